"""The verb `train`: from folders and rows to a trained drafter folder."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetGenerationError
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.trainer_utils import get_last_checkpoint

from ..configuration_hyperdflash import HyperDFlashConfig
from ..generation_hyperdflash import check_drafter_fits
from ..modeling_hyperdflash import HyperDFlashModel
from ..utils.folders import check_spares_target
from ..utils.provenance import collect_provenance, file_fingerprints, write_provenance
from .arguments import HyperDFlashTrainingArguments, TrainArguments
from .doctor.record import drafting_record
from .states import LiveTargetStates, RememberedTargetStates
from .trainer import HyperDFlashTrainer

ROW_FORMS = (
    ("input_ids", ("labels", "assistant_masks", "completion_mask")),
    ("messages", ("tools", "chat_template_kwargs")),
    ("prompt", ("completion", "tools", "chat_template_kwargs")),
    ("text", ()),
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
    if len(formats) != 1:
        raise ValueError(
            f"data: found {sorted(formats) or 'no rows'} in {data!r}, wanted JSON lines or parquet, not both"
        )
    return [str(file) for file in found]


def _file_format(path: Path) -> str | None:
    return FILE_FORMATS.get(Path(path.name.removesuffix(".gz")).suffix)


def load_rows(data: str, split: str = "train") -> Dataset:
    """Rows of a file, a folder or a Hub data set, with the columns of the first form in `ROW_FORMS` that they have.

    Raises:
        ValueError: the rows have none of these forms.
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
        if "messages" in columns and not any(message["role"] == "assistant" for message in row["messages"]):
            raise ValueError(f"data: row {index} of {data!r}: found messages without an assistant's, wanted one")
        for name in {"labels", "assistant_masks", "completion_mask"}.intersection(columns):
            if "input_ids" in columns and len(row[name]) != len(row["input_ids"]):
                found, wanted = len(row[name]), len(row["input_ids"])
                raise ValueError(f"data: row {index} of {data!r}: {name}: found {found} entries, wanted {wanted}")


def run_train(script_args: TrainArguments, training_args: HyperDFlashTrainingArguments) -> dict[str, Any]:
    """Trains a drafter and writes it to `training_args.output_dir`, with its `provenance.json`.

    `resume_from_checkpoint: true` continues from the newest checkpoint in the output folder, if there is one.

    Returns:
        The metrics of training (`train_*`) and, with held-out rows, of the last evaluation (`eval_*`).
    """
    check_spares_target(training_args.output_dir, script_args.target)
    for name in ("drafter", "target"):
        _check_model_type(name, getattr(script_args, name))
    train, held_out = load_rows(script_args.data, script_args.data_split), None
    if script_args.eval_data:
        held_out = load_rows(script_args.eval_data, script_args.data_split)
    elif script_args.held_out:
        parts = train.train_test_split(test_size=script_args.held_out, seed=training_args.seed)
        train, held_out = parts["train"], parts["test"]

    target = AutoModelForCausalLM.from_pretrained(
        script_args.target,
        revision=script_args.target_revision,
        dtype=script_args.target_dtype,
        **(script_args.target_init_kwargs or {}),
    )
    tokenizer = AutoTokenizer.from_pretrained(
        script_args.tokenizer or script_args.target,
        revision=None if script_args.tokenizer else script_args.target_revision,
    )
    drafter = HyperDFlashModel.from_pretrained(script_args.drafter, dtype=torch.float32)
    if script_args.remember_states:
        check_drafter_fits(target, drafter)
        target = RememberedTargetStates(LiveTargetStates(target.to(training_args.device), drafter.config))
    trainer = HyperDFlashTrainer(
        model=drafter,
        target=target,
        args=training_args,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
    )
    record = _provenance(script_args, training_args, train, held_out)
    if trainer.is_world_process_zero():
        record["drafting"] = drafting_record(drafter.config, tokenizer)
        Path(training_args.output_dir).mkdir(parents=True, exist_ok=True)
        write_provenance(training_args.output_dir, record)

    resume = training_args.resume_from_checkpoint
    if str(resume).lower() in ("true", "none"):
        folder = Path(training_args.output_dir)
        resume = get_last_checkpoint(str(folder)) if resume and folder.is_dir() else None
    metrics = trainer.train(resume_from_checkpoint=resume).metrics
    if held_out is not None:
        metrics |= trainer.evaluate()
    trainer.save_model()
    trainer.save_state()
    if trainer.is_world_process_zero():
        write_provenance(training_args.output_dir, record | {"metrics": metrics})
    return metrics


def _check_model_type(name: str, model: str) -> None:
    """Refuses a local folder of the other kind: a target where the drafter is wanted, or the reverse."""
    config = Path(model) / "config.json"
    if not config.is_file():
        return  # a Hub id, or left to from_pretrained
    try:
        model_type = json.loads(config.read_bytes()).get("model_type")
    except (ValueError, AttributeError):
        raise ValueError(f"{name}: {config}: found no JSON object, wanted a model's configuration") from None
    if (model_type == HyperDFlashConfig.model_type) != (name == "drafter"):
        wanted = "a drafter ('hyperdflash')" if name == "drafter" else "a target"
        raise ValueError(f"{name}: found model_type {model_type!r} in {model!r}, wanted {wanted}")


def _provenance(
    script_args: TrainArguments, training_args: HyperDFlashTrainingArguments, train: Dataset, held_out: Dataset | None
) -> dict[str, Any]:
    data = {"train_rows": len(train), "train_files": file_fingerprints(data_files(script_args.data))}
    if held_out is not None:
        data["held_out_rows"] = len(held_out)
        data["held_out_files"] = file_fingerprints(data_files(script_args.eval_data)) if script_args.eval_data else {}
    changed = {
        name: value
        for name, value in training_args.to_sanitized_dict().items()
        if name in HyperDFlashTrainingArguments.__dataclass_fields__ and name not in ("output_dir", "logging_dir")
    }
    return collect_provenance(
        arguments=asdict(script_args), training_arguments=changed, data=data, seed=training_args.seed
    )


__all__ = ["load_rows", "run_train"]
