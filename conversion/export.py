"""`hyperdflash export`: one model folder -> another, in the layout that an engine reads, or back."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from transformers.utils import ADAPTER_CONFIG_NAME

from ..utils.folders import check_model_path, check_output_folder, whole_folder
from ..utils.provenance import collect_provenance, file_fingerprints, read_provenance, write_provenance
from .arguments import ExportArguments
from .export_drafter import ARCHITECTURES, export_drafter, import_drafter
from .export_target import export_target
from .target import folder_name
from .weights import weight_files

HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]  # no code, no pickles


def run_export(args: ExportArguments, command: Sequence[str] | None = None) -> dict[str, Any]:
    """Writes `args.model` in the layout `args.to` to the folder `args.output`, whole or not at all.

    Args:
        args: the options.
        command: the command line to record; `sys.argv` by default.

    Returns:
        JSON values: `output`, `model`, `layout`, and what the layout reports: `tensors`, and for targets `copied`.

    Raises:
        ValueError: what the layout cannot carry, or a model of another kind; the message says which and why.
        OSError: files that cannot be read, or an output that must not be written over.
    """
    check_model_path("model", args.model)
    source = Path(args.model).expanduser()
    check_output_folder(args.output, args.overwrite)
    commit = None
    if not source.is_dir():
        source = Path(snapshot_download(args.model, revision=args.revision, allow_patterns=HUB_PATTERNS))
        commit = source.name
    elif args.revision is not None:
        raise ValueError(f"revision: found {args.revision!r} for a local folder, wanted none")
    final = Path(args.output).resolve()
    if final == source.resolve() or final in source.resolve().parents or source.resolve() in final.parents:
        raise ValueError(f"output: found {args.output!r}, wanted a folder apart from the model, {args.model!r}")
    kind = kind_of(source)
    layouts = {"drafter": ("vllm", "dflash"), "exported drafter": ("transformers",)}.get(
        kind, ("deepseek", "transformers")
    )
    if args.to not in layouts:
        raise ValueError(
            f"to: found {args.to!r}, wanted {' or '.join(map(repr, layouts))} for {args.model!r}, a {kind}"
        )

    name = folder_name(args.model) if Path(args.model).is_dir() else args.model
    record = collect_provenance(
        command,
        exported={"model": name, "revision": commit, "layout": args.to},
        model_files=file_fingerprints([source / "config.json", *weight_files(source)]),
        earlier=[earlier] if (earlier := read_provenance(source)) else [],
    )
    with whole_folder(args.output, args.overwrite) as folder:
        if kind == "target":
            report = export_target(source, folder, released=args.to == "deepseek")
        elif kind == "drafter":
            report = export_drafter(source, folder, args.to)
        else:
            report = import_drafter(source, folder, args.target)
        write_provenance(folder, record)
    return {"output": args.output, "model": name, "layout": args.to, **report}


def kind_of(folder: str | os.PathLike) -> str:
    """`"drafter"`, `"exported drafter"` (a DFlash one that others published included) or `"target"`.

    Raises:
        FileNotFoundError: the folder has no `config.json`.
        ValueError: the model is none of these, or there is an adapter.
    """
    file = Path(folder) / "config.json"
    if (Path(folder) / ADAPTER_CONFIG_NAME).is_file():
        raise ValueError(f"{folder}: found an adapter, wanted a whole model: merge it first (merge_adapter)")
    if not file.is_file():
        raise FileNotFoundError(f"{file}: found no such file, wanted a model's configuration")
    try:
        keys = json.loads(file.read_bytes())
        model_type, architectures = keys.get("model_type"), keys.get("architectures") or []
    except (ValueError, AttributeError, RecursionError):
        raise ValueError(f"{file}: found something else, wanted a JSON object") from None
    if "dflash_config" in keys or set(ARCHITECTURES.values()) & set(architectures):
        return "exported drafter"
    if model_type == "hyperdflash":
        return "drafter"
    if model_type == "deepseek_v4":
        return "target"
    raise ValueError(f"{file}: model_type: found {model_type!r}, wanted a drafter, a DFlash drafter, or 'deepseek_v4'")


__all__ = ["kind_of", "run_export"]
