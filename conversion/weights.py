"""Weight files copied under other tensor names, shard by shard, every value to the bit."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .checkpoint import INDEX_FILE, SINGLE_FILE

Tensors = Iterable[tuple[str, torch.Tensor]]
COUNTED_MOST = 3  # names that an error spells out


def weight_files(folder: str | os.PathLike) -> list[Path]:
    """The safetensors files of a model folder: `model.safetensors`, or the shards that the index names.

    Raises:
        FileNotFoundError: there is neither, or a shard is missing.
        ValueError: the index is no map from tensors to files of the folder.
    """
    path = Path(folder)
    if (path / SINGLE_FILE).is_file():
        return [path / SINGLE_FILE]
    index = path / INDEX_FILE
    if not index.is_file():
        raise FileNotFoundError(f"{path}: found neither {SINGLE_FILE} nor {INDEX_FILE}, wanted safetensors weights")
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{index}: weight_map: found none, wanted a map from tensors to shards") from None
    for name in names:
        if not isinstance(name, str) or name != os.path.basename(name) or not name.endswith(".safetensors"):
            raise ValueError(f"{index}: shard: found {name!r}, wanted the name of a .safetensors file")
        if not (path / name).is_file():
            raise FileNotFoundError(f"{path / name}: found no such file, wanted the shard that {INDEX_FILE} names")
    return [path / name for name in names]


@contextmanager
def open_weights(file: Path) -> Iterator[Any]:
    """`safe_open` of a file, whose errors name it.

    Raises:
        ValueError: it is no safetensors file, or a truncated one.
    """
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except SafetensorError as error:
        raise ValueError(f"{file}: found {error}, wanted a whole safetensors file") from None


def read_weights(folder: str | os.PathLike) -> dict[str, torch.Tensor]:
    """All tensors of a model folder, on the CPU, in the files' dtypes. Raises as [`weight_files`]."""
    tensors = {}
    for file in weight_files(folder):
        with open_weights(file) as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}
    return tensors


def stored_shapes(folder: str | os.PathLike) -> dict[str, list[int]]:
    """Name and shape of all tensors of a model folder, by the headers alone. Raises as [`weight_files`]."""
    shapes = {}
    for file in weight_files(folder):
        with open_weights(file) as opened:
            shapes |= {name: opened.get_slice(name).get_shape() for name in opened.keys()}
    return shapes


def copy_weights(
    source: str | os.PathLike, output: str | os.PathLike, convert: Callable[[str, torch.Tensor], Tensors]
) -> int:
    """Writes the weights of the folder `source` to the folder `output`, each tensor as what `convert` makes of it.

    Files keep their names and what is in them, so that no more than one shard is in memory.

    Args:
        convert: from a name and its tensor to the names and tensors to write.

    Returns:
        How many tensors were written.

    Raises:
        ValueError: two tensors would have the same name. Also what [`weight_files`] raises.
    """
    weight_map: dict[str, str] = {}
    size = 0
    for file in weight_files(source):
        tensors = {}
        with open_weights(file) as opened:
            for name in opened.keys():
                for new_name, tensor in convert(name, opened.get_tensor(name)):
                    if new_name in weight_map:
                        raise ValueError(f"{file}: tensor {name!r}: found a second one that becomes {new_name!r}")
                    weight_map[new_name] = file.name
                    tensors[new_name] = tensor.contiguous()
                    size += tensor.nbytes
        save_file(tensors, Path(output) / file.name, metadata={"format": "pt"})
    if set(weight_map.values()) != {SINGLE_FILE}:
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        (Path(output) / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return len(weight_map)


def spell_names(names: Iterable[str]) -> str:
    """A few of the names, and how many more there are."""
    names = sorted(names)
    more = f" and {len(names) - COUNTED_MOST} more" if len(names) > COUNTED_MOST else ""
    return ", ".join(map(repr, names[:COUNTED_MOST])) + more


__all__ = ["copy_weights", "read_weights", "spell_names", "stored_shapes", "weight_files"]
