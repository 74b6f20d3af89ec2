"""`hyperdflash init --method mtp`: a target -> the folder of an MTP module for it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Any

import torch

from ..conversion.arguments import MTP_STARTS, InitArguments
from ..conversion.checkpoint import Checkpoint
from ..conversion.init import DTYPES, check_output
from ..conversion.sources import Source, open_source
from ..conversion.target import CONFIG_FILE, load_target_config, read_config, target_identity
from ..utils.folders import whole_folder
from ..utils.provenance import collect_provenance, write_provenance
from .configuration_mtp import MtpConfig
from .modeling_mtp import MtpModel
from .released import (
    HEAD_TENSORS,
    LAYER_TENSORS,
    MODULE_TENSORS,
    RELEASED_PREFIX,
    empty_mtp,
    has_released_mtp,
    read_tensors,
    tensor_report,
)

# Options of `init` that only a block drafter has, and may not be given for an MTP module
BLOCK_OPTIONS = """
    num_hidden_layers intermediate_size num_attention_heads num_key_value_heads head_dim layer_types sliding_window
    initializer_range block_size mask_token_id sample_from_anchor context_source target_layer_ids reducer gate_start
    stream_pooling path_norm sequential_head_size
    with_mtp with_head
""".split()


def init_mtp(target: str | os.PathLike, output: str | os.PathLike, **options: Any) -> MtpModel:
    """Makes an MTP module for `target`, writes it to the folder `output`, and returns it.

        mtp = init_mtp("models/DeepSeek-V4-Flash", "drafters/v4-flash-mtp")

    Args:
        target: the target's folder or Hub id, or the folder `mtp` that `init --with_mtp` wrote of it.
        output: the folder to write, whole or not at all.
        options: `mtp_start`, `mtp_depths`, `dtype`, `seed`, `overwrite` and the names to record, see `InitArguments`.

    Raises: as [`init_drafter`]; also for a target that has no `mtp.0.*` where `mtp_start` is "released".
    """
    arguments = InitArguments(target=os.fspath(target), output=os.fspath(output), method="mtp", **options)
    return _init(arguments, command=None)[0]


def run_init_mtp(args: InitArguments, command: Sequence[str] | None = None) -> dict[str, Any]:
    """What [`init_mtp`] does, for the command line.

    Returns:
        JSON values: `output`, `target`, `start`, `mtp_depths`, `parameters` (a count) and `tensors` (what was taken
        from the target: name, file and dtype).
    """
    return _init(args, command)[1]


def _init(args: InitArguments, command: Sequence[str] | None) -> tuple[MtpModel, dict[str, Any]]:
    source = open_source(args.target, args.target_revision)
    target = load_target_config(source, args.trust_remote_code)
    _check(args, target.model_type)
    start = args.mtp_start
    if start == "auto":
        start = "released" if has_released_mtp(source) else "target"
    config = MtpConfig.of_target(target, mtp_depths=args.mtp_depths, **target_identity(args, source))
    model = empty_mtp(config, DTYPES[args.dtype], args.seed)
    sources = {}
    if start == "released":
        sources = read_tensors(model, source, [RELEASED_PREFIX], MODULE_TENSORS | HEAD_TENSORS | LAYER_TENSORS)
    elif start == "target":
        sources = start_from_target(model, source)
    report = {
        "output": args.output,
        "target": config.target_name_or_path,
        "start": start,
        "mtp_depths": config.mtp_depths,
        "parameters": model.num_parameters(),
        "tensors": tensor_report(sources),
    }
    record = collect_provenance(
        command,
        target=config.target_name_or_path,
        target_revision=config.target_revision,
        target_files={CONFIG_FILE: hashlib.sha256(read_config(source)).hexdigest()},
        start=start,
        tensors=report["tensors"],
        seed=args.seed,
        dtype=args.dtype,
    )
    with whole_folder(args.output, args.overwrite) as folder:
        model.save_pretrained(folder)
        write_provenance(folder, record)
    return model, report


def _check(args: InitArguments, model_type: str) -> None:
    defaults = {name: field.default for name, field in InitArguments.__dataclass_fields__.items()}
    for name in BLOCK_OPTIONS:
        if getattr(args, name) != defaults[name]:
            raise ValueError(f"{name}: found {getattr(args, name)!r}, wanted none, as method is 'mtp'")
    for name, choices in (("dtype", DTYPES), ("mtp_start", MTP_STARTS)):
        if getattr(args, name) not in choices:
            raise ValueError(f"{name}: found {getattr(args, name)!r}, wanted one of {', '.join(choices)}")
    if model_type != "deepseek_v4":
        raise ValueError(f"target: found model_type {model_type!r}, wanted 'deepseek_v4' for an MTP module")
    check_output(args)


@torch.no_grad()
def start_from_target(model: MtpModel, folder: str | os.PathLike | Source) -> dict[str, Any]:
    """Makes `model` begin near the target's own next step: its last layer, its `hc_head` and norm.

    The streams pass `h_proj` as they are.

    Returns:
        The sources of the tensors, see `read_tensors`.
    """
    last = model.config.target_num_hidden_layers - 1
    sources = read_tensors(model, folder, [f"model.layers.{last}.", f"layers.{last}."], LAYER_TENSORS)
    saved = {name: f"model.{name}" for name in HEAD_TENSORS}  # by transformers; else as DeepSeek released it
    by_transformers = Checkpoint(folder, saved.values()).stored()
    sources |= read_tensors(model, folder, [""], saved if by_transformers else HEAD_TENSORS)
    model.h_proj.weight.copy_(torch.eye(model.config.hidden_size))
    return sources


__all__ = ["init_mtp", "run_init_mtp"]
