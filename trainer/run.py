"""The verb `train`: from folders and rows to a trained drafter folder."""

from __future__ import annotations

import warnings
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetGenerationError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.trainer_utils import HubStrategy

from ..configuration_hyperdflash import MTP_MODEL_TYPE
from ..generation_hyperdflash import check_drafter_fits
from ..modeling_hyperdflash import HyperDFlashModel
from ..utils.chat import add_chat_template
from ..utils.fingerprints import checkpoint_fingerprints, hub_commit
from ..utils.models import check_model_kind, check_spares_target
from ..utils.provenance import collect_provenance, file_fingerprints, read_provenance, write_provenance
from .adapters import check_output_kind, lora_config
from .arguments import HyperDFlashTrainingArguments, TrainArguments
from .doctor.record import drafting_record
from .resume import check_goes_on, check_same_run, last_whole_checkpoint, metrics_of_finished, missing_part
from .state_cache import StateCache, state_manifest
from .states import STATE_DTYPES, CachedTargetStates, LiveTargetStates, TargetStates
from .target_modules import TargetModules, load_without_layers
from .trainer import HyperDFlashTrainer

ROW_FORMS = (
    ("input_ids", ("labels", "assistant_masks", "completion_mask")),
    ("messages", ("tools", "chat_template_kwargs")),
    ("prompt", ("completion", "tools", "chat_template_kwargs")),
)
FILE_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


def data_files(data: str) -> list[str]:
    """The files that `data` names, itself or in its folder, sorted; none if there is no such path (a Hub id).

    Raises:
        ValueError: a path that holds no rows that we can read, or several formats.
    """
    path = Path(data)
    if not path.exists():
        return []
    found = sorted(file for file in (path.iterdir() if path.is_dir() else [path]) if _file_format(file))
    formats = {_file_format(file) for file in found}
    if not formats:
        raise ValueError(f"data: found no .jsonl, .json or .parquet file in {data!r}, wanted rows")
    if len(formats) > 1:
        raise ValueError(f"data: found {' and '.join(sorted(formats))} files in {data!r}, wanted one format")
    return [str(file) for file in found]


def _file_format(path: Path) -> str | None:
    return FILE_FORMATS.get(Path(path.name.removesuffix(".gz")).suffix)


def read_rows(data: str, split: str = "train") -> Dataset:
    """Rows of a file, a folder or a Hub data set, as they are.

    Raises:
        ValueError: there are no rows, or they cannot be read.
    """
    files = data_files(data)
    try:
        if files:
            rows = load_dataset(_file_format(Path(files[0])), data_files=files, split="train")
        else:
            rows = load_dataset(data, split=split)
    except (DatasetGenerationError, StopIteration) as error:
        reason = str(error.__cause__ or error).splitlines() or ["no rows"]
        raise ValueError(f"data: found {reason[0]} in {data!r}, wanted rows as JSON lines or parquet") from None
    if len(rows) == 0:
        raise ValueError(f"data: found no rows in {data!r}, wanted at least one")
    return rows


def load_rows(data: str, split: str = "train") -> Dataset:
    """Rows of a file, a folder or a Hub data set, with the columns of the first form in `ROW_FORMS` that they have.

    Raises:
        ValueError: the rows have none of these forms.
    """
    rows = read_rows(data, split)
    for column, others in ROW_FORMS:
        if column in rows.column_names:
            rows = rows.select_columns([column, *(other for other in others if other in rows.column_names)])
            _check_rows(rows, data)
            return rows
    raise ValueError(
        f"data: found the columns {rows.column_names} in {data!r}, wanted one of {[form[0] for form in ROW_FORMS]}"
    )


def _check_rows(rows: Dataset, data: str) -> None:
    """Refuses rows that cannot be supervised, naming the first."""
    columns = rows.column_names
    for index, row in enumerate(rows):
        if "messages" in columns and not any(message["role"] == "assistant" for message in row["messages"] or ()):
            raise ValueError(f"data: row {index} of {data!r}: found messages without an assistant's, wanted one")
        for name in {"labels", "assistant_masks", "completion_mask"}.intersection(columns):
            if "input_ids" in columns and len(row[name] or ()) != len(row["input_ids"]):
                found, wanted = len(row[name] or ()), len(row["input_ids"])
                raise ValueError(f"data: row {index} of {data!r}: {name}: found {found} entries, wanted {wanted}")


def run_train(script_args: TrainArguments, training_args: HyperDFlashTrainingArguments) -> dict[str, Any]:
    """Trains a drafter and writes it to `training_args.output_dir`, with its `provenance.json`.

    With `use_peft` that is the adapter; with `merge_adapter` it is the merged drafter, and the adapter lies in the
    folder `adapter` beside it. `resume_from_checkpoint: true` continues from the newest whole checkpoint in the output
    folder, if there is one, and starts afresh if there is none.

    Returns:
        The metrics of training (`train_*`) and, with held-out rows, of the last evaluation (`eval_*`).
    """
    check_spares_target(training_args.output_dir, script_args.target)
    check_output_kind(training_args.output_dir, script_args.use_peft and not script_args.merge_adapter)
    check_goes_on(training_args)
    check_model_kind("drafter", script_args.drafter)
    check_model_kind("target", script_args.target, script_args.target_revision)
    train, held_out = load_rows(script_args.data, script_args.data_split), None
    if script_args.eval_data:
        held_out = load_rows(script_args.eval_data, script_args.data_split)
    elif script_args.held_out:
        parts = train.train_test_split(test_size=script_args.held_out, seed=training_args.seed)
        train, held_out = parts["train"], parts["test"]

    tokenizer = AutoTokenizer.from_pretrained(
        script_args.tokenizer or script_args.target,
        revision=None if script_args.tokenizer else script_args.target_revision,
    )
    if training_args.chat_template_path is None:
        add_chat_template(tokenizer, script_args.target, script_args.target_revision)
    model_class, trainer_class = drafter_classes(script_args.drafter)
    drafter = model_class.from_pretrained(script_args.drafter, dtype=torch.float32)
    states = choose_states(script_args, training_args, drafter, tokenizer)
    trainer = trainer_class(
        model=drafter,
        target=states,
        args=training_args,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        peft_config=lora_config(script_args, training_args.freeze_reducer),
    )
    if script_args.states_source == "cache":
        for rows in filter(None, (trainer.train_dataset, trainer.eval_dataset)):
            states.check_complete(rows.with_format("numpy")["input_ids"])
    check_mergeable(script_args, trainer)
    record = _provenance(script_args, training_args, train, held_out, states)
    if model_class is HyperDFlashModel:  # for `doctor`
        record["drafting"] = drafting_record(drafter.config, tokenizer)
    resume = _checkpoint_to_resume(training_args, record)
    if resume is not None and (metrics := metrics_of_finished(resume, training_args.output_dir)) is not None:
        warnings.warn(
            f"The run in {training_args.output_dir!r} has come to its end before: nothing is trained. To train "
            "longer, begin a new run with its drafter.",
            UserWarning,
            stacklevel=2,
        )
        return metrics
    trainer.provenance = record | ({"resumed_from": Path(resume).name} if resume else {})
    if trainer.is_world_process_zero():
        Path(training_args.output_dir).mkdir(parents=True, exist_ok=True)
        write_provenance(training_args.output_dir, trainer.provenance)

    with closing(states):
        metrics = trainer.train(resume_from_checkpoint=resume).metrics
        if script_args.merge_adapter:
            trainer.save_model(str(Path(training_args.output_dir) / "adapter"), _internal_call=True)
            trainer.merge_adapter()
        if held_out is not None:
            metrics |= trainer.evaluate()
    trainer.save_state()
    trainer.provenance["metrics"] = metrics
    trainer.save_model()  # the last: with `push_to_hub` it uploads the folder as it is then
    return metrics


def drafter_classes(drafter: str) -> tuple[type[PreTrainedModel], type[HyperDFlashTrainer]]:
    """The model and the trainer of what lies in the folder, or at the Hub id, `drafter`."""
    fields, _ = PreTrainedConfig.get_config_dict(drafter)
    if fields.get("model_type") == MTP_MODEL_TYPE:
        from ..baselines import MtpModel, MtpTrainer

        return MtpModel, MtpTrainer
    return HyperDFlashModel, HyperDFlashTrainer


def choose_states(
    script_args: TrainArguments,
    training_args: HyperDFlashTrainingArguments,
    drafter: HyperDFlashModel | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> TargetStates:
    """The source of states that the arguments ask for. Only `states_source="live"` loads the target here.

    Raises:
        ValueError: the drafter does not fit the target, or `states_cache` holds other states; see [`StateCache`].
    """
    dtype, options = STATE_DTYPES[script_args.states_dtype], script_args.target_init_kwargs or {}

    def live(dtype: torch.dtype | None) -> LiveTargetStates:
        target = AutoModelForCausalLM.from_pretrained(
            script_args.target, revision=script_args.target_revision, dtype=script_args.target_dtype, **options
        )
        check_drafter_fits(target, drafter)
        return LiveTargetStates(target, drafter.config, training_args.device, dtype, script_args.target_batch_size)

    if script_args.states_source == "live":
        return live(dtype)
    target = load_without_layers(script_args.target, script_args.target_revision, script_args.target_dtype)
    check_drafter_fits(target, drafter)
    rows = {}
    if script_args.states_cache is not None:
        template, path = tokenizer.chat_template, training_args.chat_template_path
        if path is not None:  # TRL will put it in place
            template = Path(path).read_text(encoding="utf-8")
        rows = StateCache(
            script_args.states_cache,
            state_manifest(
                target=script_args.target,
                target_config=target.config,
                target_dtype=target.dtype,
                target_options=options,
                drafter_config=drafter.config,
                tokenizer=tokenizer,
                chat_template=template,
                dtype=script_args.states_dtype,
                target_revision=script_args.target_revision,
            ),
            read_only=script_args.states_source == "cache",
            shard_bytes=script_args.states_shard_mb << 20,
            rank=training_args.process_index,
        )
    source = partial(live, None) if script_args.states_source == "fill" else None
    return CachedTargetStates(rows, TargetModules.of(target.to(training_args.device)), dtype, source)


def check_mergeable(script_args: TrainArguments, trainer: HyperDFlashTrainer) -> None:
    """Refuses, before anything is trained, a merge that could not be done or whose repository would hold both."""
    if not script_args.merge_adapter:
        return
    if trainer.is_fsdp_enabled:
        raise ValueError("merge_adapter: found True under FSDP, wanted False: merge the adapter that is saved")
    if trainer.args.push_to_hub and trainer.args.hub_strategy != HubStrategy.END:
        raise ValueError(
            f"hub_strategy: found {trainer.args.hub_strategy.value!r} with merge_adapter, wanted 'end': the "
            "repository would hold both the adapter and the merged drafter"
        )


def _checkpoint_to_resume(training_args: HyperDFlashTrainingArguments, record: dict[str, Any]) -> str | None:
    """The checkpoint that `resume_from_checkpoint` names, or the newest whole one for `true`; it fits this run."""
    resume = str(training_args.resume_from_checkpoint)
    if resume.lower() in ("none", "false"):
        return None
    if resume.lower() == "true":
        resume = last_whole_checkpoint(training_args.output_dir)
    elif (missing := missing_part(resume)) is not None:
        raise ValueError(f"resume_from_checkpoint: found {resume!r} without its {missing}, wanted a whole checkpoint")
    if resume is not None:
        check_same_run(resume, record)
    return resume


def _provenance(
    script_args: TrainArguments,
    training_args: HyperDFlashTrainingArguments,
    train: Dataset,
    held_out: Dataset | None,
    states: TargetStates,
) -> dict[str, Any]:
    data = {"train_rows": len(train), "train_files": file_fingerprints(data_files(script_args.data))}
    if not data["train_files"]:
        data["train_name"] = script_args.data  # on the Hub
    if held_out is not None:
        data["held_out_rows"] = len(held_out)
        data["held_out_files"] = file_fingerprints(data_files(script_args.eval_data)) if script_args.eval_data else {}
    changed = {
        name: value
        for name, value in training_args.to_sanitized_dict().items()
        if name in HyperDFlashTrainingArguments.__dataclass_fields__ and name not in ("output_dir", "logging_dir")
    }
    arguments = asdict(script_args)
    if script_args.states_cache is not None:  # where it lies says nothing, what it is of does
        arguments["states_cache"] = {"manifest_sha256": states.rows.manifest_sha256}
    else:  # a manifest has them
        arguments["target_files"] = checkpoint_fingerprints(script_args.target) or hub_commit(
            script_args.target, script_args.target_revision
        )
    rows = training_args.train_batch_size * training_args.gradient_accumulation_steps * training_args.world_size
    return collect_provenance(
        arguments=arguments,
        training_arguments=changed,
        data=data,
        batch={"rows_per_step": rows, "processes": training_args.world_size},
        seed=training_args.seed,
        earlier=[earlier] if (earlier := read_provenance(script_args.drafter)) else [],
    )


__all__ = ["load_rows", "run_train"]
