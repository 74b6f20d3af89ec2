"""`hyperdflash init`: a target's folder -> a drafter's folder, with the target's gates and a fresh body."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel

from ..configuration_hyperdflash import HyperDFlashConfig
from ..modeling_hyperdflash import HyperDFlashModel
from ..utils.folders import check_output_folder, check_spares_target, whole_folder
from ..utils.provenance import collect_provenance, file_fingerprints, write_provenance
from .arguments import InitArguments
from .gates import Gates, read_gates
from .target import drafter_config, load_target_config

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def init_drafter(target: str | os.PathLike, output: str | os.PathLike, **options: Any) -> HyperDFlashModel:
    """Makes a drafter for `target`, writes it to the folder `output`, and returns it.

        drafter = init_drafter("models/DeepSeek-V4-Flash", "drafters/v4-flash", path_norm="none")

    Args:
        target: the target's folder.
        output: the folder to write, whole or not at all.
        options: the other fields of [`InitArguments`].

    Raises:
        FileNotFoundError: the target's folder, its `config.json`, or a safetensors file is missing.
        FileExistsError: something stands at `output`.
        ValueError: options that do not go together, another kind of target, gates that cannot be used.
    """
    drafter, _ = _init(InitArguments(target=os.fspath(target), output=os.fspath(output), **options), command=None)
    return drafter


def run_init(args: InitArguments, command: Sequence[str] | None = None) -> dict[str, Any]:
    """What [`init_drafter`] does, for the command line.

    Args:
        args: the options.
        command: the command line to record; `sys.argv` by default.

    Returns:
        JSON values: `output`, `target`, `context_source`, `reducer`, `path_norm`, `mask_token_id`, `parameters` and
        `reducer_parameters` (counts), `gates` (name, file, dtype and SHA-256 of each; `None` with fc), and
        `target_bytes_read` (of its index, safetensors headers and tensors).
    """
    return _init(args, command)[1]


def _init(args: InitArguments, command: Sequence[str] | None) -> tuple[HyperDFlashModel, dict[str, Any]]:
    for name, wanted in (("method", "hyperdflash"), ("mtp_start", "auto"), ("mtp_depths", 6)):
        if (found := getattr(args, name)) != wanted:
            raise ValueError(f"{name}: found {found!r}, wanted {wanted!r} for a HyperDFlash drafter")
    if args.dtype not in DTYPES:
        raise ValueError(f"dtype: found {args.dtype!r}, wanted one of {', '.join(DTYPES)}")
    target = load_target_config(args.target)
    check_output(args)
    config = drafter_config(args, target)
    gates = None
    if config.reducer == "hc_gate":
        gates = read_gates(args.target, config.hc_mult, config.hidden_size)

    drafter = fresh_drafter(config, gates, DTYPES[args.dtype], args.seed)
    report = {
        "output": args.output,
        "target": config.target_name_or_path,
        "context_source": config.context_source,
        "reducer": config.reducer,
        "path_norm": config.path_norm,
        "mask_token_id": config.mask_token_id,
        "parameters": drafter.num_parameters(),
        "reducer_parameters": sum(parameter.numel() for parameter in drafter.reducer.parameters()),
        "gates": gates.sources if gates else None,
        "target_bytes_read": gates.bytes_read if gates else 0,
    }
    record = collect_provenance(
        command,
        target=config.target_name_or_path,
        target_revision=config.target_revision,
        target_files=file_fingerprints([Path(args.target) / "config.json"]),
        gates=report["gates"],
        seed=args.seed,
        dtype=args.dtype,
    )
    with whole_folder(args.output, args.overwrite) as folder:
        drafter.save_pretrained(folder)
        write_provenance(folder, record)
    return drafter, report


def fresh_drafter(config: HyperDFlashConfig, gates: Gates | None, dtype: torch.dtype, seed: int) -> HyperDFlashModel:
    """A drafter with a random body, created in `dtype`, and the given gates. The caller's random state is kept."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = AutoModel.from_config(config, dtype=dtype)
    if gates is not None:
        with torch.no_grad():
            for name in gates.sources:
                getattr(drafter.reducer, name).copy_(getattr(gates, name))
    return drafter


def check_output(args: InitArguments) -> None:
    """Refuses, before any work, what must not be written over: only drafters are replaced, never a target."""
    check_output_folder(args.output, args.overwrite)
    check_spares_target(args.output, args.target)
    output = Path(args.output)
    if output.is_dir() and any(output.iterdir()) and not (output / "config.json").is_file():
        raise FileExistsError(f"output: found {args.output!r}, which holds no drafter, wanted one to overwrite")


__all__ = ["DTYPES", "check_output", "init_drafter", "run_init"]
