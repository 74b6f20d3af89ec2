"""`hyperdflash init`: a target, in a folder or on the Hub -> a drafter's folder, with the target's gates and a fresh
body."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..modeling_hyperdflash import HyperDFlashModel
from ..utils.folders import check_output_folder, resumed_folder
from ..utils.models import check_spares_target
from ..utils.provenance import collect_provenance, write_provenance
from .arguments import InitArguments
from .extract import copy_tensors, copy_tokenizer, plan_head, plan_mtp
from .fresh import write_fresh_drafter
from .gates import read_gates
from .sources import open_source
from .target import CONFIG_FILE, drafter_config, load_target_config, read_config

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def init_drafter(target: str | os.PathLike, output: str | os.PathLike, **options: Any) -> HyperDFlashModel:
    """Makes a drafter for `target`, writes it to the folder `output`, and returns it.

        drafter = init_drafter("deepseek-ai/DeepSeek-V4-Flash", "drafters/v4-flash", path_norm="none")

    Args:
        target: the target's folder or Hub id.
        output: the folder to write, whole or not at all.
        options: the other fields of [`InitArguments`].

    Raises:
        FileNotFoundError: the target, its `config.json`, or a safetensors file is missing.
        OSError: the Hub cannot be reached, or does not give the target; see [`HubRepository`].
        FileExistsError: something stands at `output`.
        ValueError: options that do not go together, another kind of target, gates that cannot be used.
    """
    run_init(InitArguments(target=os.fspath(target), output=os.fspath(output), **options))
    return HyperDFlashModel.from_pretrained(output)


def run_init(args: InitArguments, command: Sequence[str] | None = None) -> dict[str, Any]:
    """What [`init_drafter`] does, for the command line; the drafter is never in memory as a whole.

    Args:
        args: the options.
        command: the command line to record; `sys.argv` by default.

    Returns:
        JSON values: `output`, `target`, `target_revision`, `context_source`, `reducer`, `path_norm`, `mask_token_id`,
        `parameters` and `reducer_parameters` (counts), `gates` (name, file, dtype and SHA-256 of each; `None` where
        they are not the target's), `mtp` and `head` (folder, tensors, bytes; `None` where not asked for), and
        `target_bytes_read` (of the target's files in all).
    """
    for name, wanted in (("method", "hyperdflash"), ("mtp_start", "auto"), ("mtp_depths", 6)):
        if (found := getattr(args, name)) != wanted:
            raise ValueError(f"{name}: found {found!r}, wanted {wanted!r} for a HyperDFlash drafter")
    if args.dtype not in DTYPES:
        raise ValueError(f"dtype: found {args.dtype!r}, wanted one of {', '.join(DTYPES)}")
    source = open_source(args.target, args.target_revision)
    target = load_target_config(source, args.trust_remote_code)
    check_output(args)
    config = drafter_config(args, target, source)
    if args.gate_start != "target" and config.reducer != "hc_gate":
        raise ValueError(f"gate_start: found {args.gate_start!r}, wanted 'target', as reducer is {config.reducer!r}")
    inherits = config.reducer == "hc_gate" and args.gate_start == "target"
    gates = read_gates(source, config.hc_mult, config.hidden_size) if inherits else None
    extracts = {"mtp": plan_mtp(source, target) if args.with_mtp else None}
    extracts["head"] = plan_head(source, target) if args.with_head else None
    copied = {name: extract for name, extract in extracts.items() if extract is not None}

    config_data = read_config(source)
    record = collect_provenance(
        command,
        target=config.target_name_or_path,
        target_revision=config.target_revision,
        target_files={CONFIG_FILE: hashlib.sha256(config_data).hexdigest()},
        gates=gates.sources if gates else None,
        seed=args.seed,
        dtype=args.dtype,
    )
    kept = tuple(copied) if source.commit else ()  # downloads
    with resumed_folder(args.output, args.overwrite, kept) as folder:
        for name, extract in copied.items():
            (folder / name).mkdir(exist_ok=True)
            copy_tensors(extract, folder / name, config.target_name_or_path)
            (folder / name / CONFIG_FILE).write_bytes(config_data)
            copy_tokenizer(source, folder / name)
        drafter = write_fresh_drafter(folder, config, gates, DTYPES[args.dtype], args.seed)
        write_provenance(folder, record)
    return {
        "output": args.output,
        "target": config.target_name_or_path,
        "target_revision": config.target_revision,
        "context_source": config.context_source,
        "reducer": config.reducer,
        "path_norm": config.path_norm,
        "mask_token_id": config.mask_token_id,
        "parameters": drafter.num_parameters(),
        "reducer_parameters": sum(parameter.numel() for parameter in drafter.reducer.parameters()),
        "gates": gates.sources if gates else None,
        **{name: extract and extract.report() for name, extract in extracts.items()},
        "target_bytes_read": source.bytes_read,
    }


def check_output(args: InitArguments) -> None:
    """Refuses, before any work, what must not be written over: only drafters are replaced, never a target."""
    check_output_folder(args.output, args.overwrite)
    check_spares_target(args.output, args.target)
    output = Path(args.output)
    if output.is_dir() and any(output.iterdir()) and not (output / "config.json").is_file():
        raise FileExistsError(f"output: found {args.output!r}, which holds no drafter, wanted one to overwrite")


__all__ = ["DTYPES", "check_output", "init_drafter", "run_init"]
