"""Drafters and targets told apart, by their configurations."""

from __future__ import annotations

import json
import os
from pathlib import Path

from transformers.trainer_utils import sort_checkpoints
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME, cached_file

from ..configuration_hyperdflash import DRAFTER_TYPES
from .folders import check_model_path


def check_model_kind(
    name: str, model: str, revision: str | None = None, drafter_types: tuple[str, ...] = DRAFTER_TYPES
) -> None:
    """Whether a drafter stands where `name` is "drafter", and none elsewhere: told by `config.json`, without its code.

    Args:
        name: of the option. model: folder or Hub id. revision: on the Hub.
        drafter_types: the `model_type`s of drafters that will do.

    Raises:
        OSError: there is no such folder, or no configuration.
        ValueError: the other kind, an adapter, or a configuration that is none.
    """
    check_model_path(name, model)
    if name == "drafter" and (Path(model) / ADAPTER_CONFIG_NAME).is_file():
        raise ValueError(f"drafter: found an adapter in {model!r}, wanted a drafter: merge it first (merge_adapter)")
    try:
        file = cached_file(model, CONFIG_NAME, revision=revision)
    except OSError as error:
        raise OSError(f"{name}: found no {CONFIG_NAME} of {model!r}, wanted one: {error}") from None
    if file is None:  # a folder
        checkpoints = sort_checkpoints(model)
        hint = f", or its checkpoint {checkpoints[-1]!r}" if checkpoints else ""
        raise FileNotFoundError(f"{name}: found no {CONFIG_NAME} in {model!r}, wanted a model's folder{hint}")
    try:
        model_type = json.loads(Path(file).read_bytes()).get("model_type")
    except (ValueError, AttributeError):
        raise ValueError(f"{name}: {file}: found no JSON object, wanted a model's configuration") from None
    if name == "drafter" and model_type not in drafter_types or name != "drafter" and model_type in DRAFTER_TYPES:
        wanted = (
            f"a drafter ({' or '.join(map(repr, drafter_types))})"
            if name == "drafter"
            else "the target that a drafter is for"
        )
        raise ValueError(f"{name}: found model_type {model_type!r} in {model!r}, wanted {wanted}")


def check_spares_target(output: str | os.PathLike, target: str | os.PathLike) -> None:
    """Whether a drafter may be written to `output` without harm: apart from the target, and over no other model.

    Raises:
        ValueError: `output` is the target's folder, in it, or around it.
        FileExistsError: `output` holds a model that is no drafter.
    """
    final, other = Path(output).resolve(), Path(target).resolve()
    if other.is_dir() and (final == other or final in other.parents or other in final.parents):
        raise ValueError(f"output: found {str(output)!r}, wanted a folder apart from the target, {str(target)!r}")
    config = final / "config.json"
    if config.is_file():
        try:
            model_type = json.loads(config.read_bytes()).get("model_type")
        except (ValueError, AttributeError):
            model_type = None
        if model_type not in DRAFTER_TYPES:
            raise FileExistsError(
                f"output: found {str(output)!r}, which holds a model of type {model_type!r}, wanted a drafter's folder"
            )


__all__ = ["check_model_kind", "check_spares_target"]
