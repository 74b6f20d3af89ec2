"""Going on where a run was killed: which checkpoint is whole, and whether the run that asks for it is the same."""

from __future__ import annotations

import json
import os
import warnings
import zipfile
from pathlib import Path
from typing import Any

from transformers import TrainingArguments
from transformers.trainer_utils import sort_checkpoints

from ..utils.provenance import PROVENANCE_FILE

# What a checkpoint holds, each in one of these files
CHECKPOINT_PARTS = {
    "weights": ("*.safetensors", "pytorch_model_fsdp*", "global_step*"),
    "optimizer": ("optimizer*", "global_step*"),
    "schedule": ("scheduler.pt",),
    "random numbers": ("rng_state*.pth",),
    "trainer state": ("trainer_state.json",),
}

# Options that change neither the batches nor the objective; all others must be what they were. The data is compared by
# its content, the batch by its rows over all processes.
FREE_OPTIONS = frozenset(
    """
    batch_eval_metrics data ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters
    ddp_static_graph ddp_timeout debug dataloader_num_workers dataloader_persistent_workers dataloader_pin_memory
    dataloader_prefetch_factor disable_tqdm do_eval do_predict do_train fsdp fsdp_config full_determinism
    gradient_accumulation_steps greater_is_better include_for_metrics load_best_model_at_end local_rank merge_adapter
    metric_for_best_model output_dir per_device_eval_batch_size per_device_train_batch_size prediction_loss_only
    project push_to_hub report_to resume_from_checkpoint run_name skip_memory_metrics states_cache states_shard_mb
    states_source target_init_kwargs use_cpu
    """.split()
)
FREE_PREFIXES = ("eval_", "hub_", "log_", "logging_", "save_", "trackio_")


def check_goes_on(training_args: TrainingArguments) -> None:
    """Refuses to write a new run over the checkpoints of an earlier one, unless `resume_from_checkpoint` is given.

    Raises:
        ValueError: there is a whole checkpoint in `output_dir`, and nothing says what is to become of it.
    """
    output = training_args.output_dir
    if training_args.resume_from_checkpoint is None and last_whole_checkpoint(output) is not None:
        raise ValueError(
            f"output_dir: found checkpoints of an earlier run in {output!r}, wanted --resume_from_checkpoint true to "
            "go on with it, false to begin afresh, or another folder"
        )


def metrics_of_finished(checkpoint: str | os.PathLike, output: str | os.PathLike) -> dict[str, Any] | None:
    """The recorded metrics of the run in `output`, if `checkpoint` is its last step and it was written to its end."""
    state = json.loads((Path(checkpoint) / "trainer_state.json").read_bytes())
    record = Path(output) / PROVENANCE_FILE
    if state["global_step"] < state["max_steps"] or not record.is_file():
        return None
    return json.loads(record.read_bytes()).get("metrics")


def missing_part(checkpoint: str | os.PathLike) -> str | None:
    """What a checkpoint that was being written, or deleted, when its run was killed lacks; `None` if it is whole.

    The Trainer writes the parts one after the other, the trainer state last; a part that is there may be cut off.
    """
    folder = Path(checkpoint)
    for part, patterns in CHECKPOINT_PARTS.items():
        files = [file for pattern in patterns for file in folder.glob(pattern)]
        if not files:
            return part
        if torn := [file.name for file in files if file.is_file() and not _is_whole(file)]:
            return f"{part} (the end of {torn[0]})"
    return None


def _is_whole(file: Path) -> bool:
    """Whether a file has its end: a zip's directory, the bytes that a safetensors header speaks of, a JSON's brace."""
    if file.suffix in (".pt", ".pth", ".bin"):
        return zipfile.is_zipfile(file)
    content = file.read_bytes() if file.suffix == ".json" else b""
    try:
        if file.suffix == ".json":
            return isinstance(json.loads(content), dict)
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except ValueError:
        return False
    return file.stat().st_size == 8 + length + max(ends, default=0)


def last_whole_checkpoint(output_dir: str | os.PathLike) -> str | None:
    """The newest whole checkpoint in a run's folder, or `None`; newer ones that are not whole are named in a warning.

    The order is that of their steps.
    """
    if not Path(output_dir).is_dir():
        return None
    for checkpoint in reversed(sort_checkpoints(str(output_dir))):
        missing = missing_part(checkpoint)
        if missing is None:
            return checkpoint
        warnings.warn(f"resume: passed over {checkpoint}, which lacks its {missing}", stacklevel=2)
    return None


def check_same_run(checkpoint: str | os.PathLike, record: dict[str, Any]) -> None:
    """Whether a run with the provenance `record` may go on from `checkpoint`.

    What decides the batches and the objective must be what it was: the data (by content, where it lies in files), the
    rows of a step over all processes, and every option of training but those in `FREE_OPTIONS`. Another number of
    processes with the same rows a step, or other versions of packages, is a warning: the run goes on, but not to the
    bit.

    Args:
        checkpoint: a folder with the `provenance.json` of its run; without one there is a warning.

    Raises:
        ValueError: a field differs; it names the field, what the checkpoint has, and what this run has.
    """
    path = Path(checkpoint) / PROVENANCE_FILE
    if not path.is_file():
        warnings.warn(
            f"resume: found no {PROVENANCE_FILE} in {checkpoint}: its options cannot be compared", stacklevel=2
        )
        return
    old, new = json.loads(path.read_text(encoding="utf-8")), json.loads(json.dumps(record))
    for group in ("arguments", "training_arguments", "data", "batch"):
        for name, found in new.get(group, {}).items():
            if name not in old.get(group, {}) or found == old[group][name] or _is_free(group, name):
                continue
            raise ValueError(
                f"resume_from_checkpoint: {name}: found {found!r}, wanted {old[group][name]!r}, as in the run of "
                f"{str(checkpoint)!r}"
            )
    changed = [
        f"{name} {old[group][name]} -> {new[group][name]}"
        for group, names in (("versions", old.get("versions", {})), ("batch", ("processes",)))
        for name in names
        if name in old.get(group, {}) and name in new.get(group, {}) and old[group][name] != new[group][name]
    ]
    if changed:
        warnings.warn(f"resume: goes on from {checkpoint}, but not to the bit: {', '.join(changed)}", stacklevel=2)


def _is_free(group: str, name: str) -> bool:
    if group == "data":
        return name.startswith("held_out")
    if group == "batch":
        return name == "processes"
    return name in FREE_OPTIONS or name.startswith(FREE_PREFIXES)


__all__ = ["check_same_run", "last_whole_checkpoint", "missing_part"]
