"""Single tensors out of a checkpoint folder, by the headers of its safetensors files and nothing else.

A safetensors file is the length of its header (8 bytes, little-endian), the header (JSON: dtype, shape and byte range
of every tensor), and the data. Only headers and the bytes of the tensors asked for are read; no pickle is opened.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
INDEX_BLOCK_BYTES = 1 << 16
INDEX_OVERLAP = 1 << 10
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class TensorEntry(NamedTuple):
    """A tensor as a header describes it: `start` and `end` are the bytes of the file that hold it."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class Checkpoint:
    """A folder with `model.safetensors`, or shards with `model.safetensors.index.json`, or shards alone.

    Args:
        folder: the folder.
        names: the tensors that may be asked for; nothing is kept about others.

    Attributes:
        bytes_read: bytes read so far, of index, headers and tensors.

    Raises:
        FileNotFoundError: the folder holds no safetensors file.
    """

    def __init__(self, folder: str | os.PathLike, names: Iterable[str]):
        self.folder = Path(folder)
        self.names = frozenset(names)
        self.bytes_read = 0
        self._headers: dict[Path, dict[str, TensorEntry]] = {}
        self._files = sorted(self.folder.glob("*.safetensors"))
        self._index = self.folder / INDEX_FILE
        if not self._files and not self._index.is_file():
            others = sorted(
                p.name for p in self.folder.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".ckpt", ".gguf")
            )
            found = f"only {', '.join(others)}" if others else "none"
            raise FileNotFoundError(f"{self.folder}: safetensors files: found {found}, wanted {SINGLE_FILE} or shards")

    def find(self, namings: Sequence[Sequence[str]]) -> list[TensorEntry]:
        """The tensors of the first of several alternative sets of names that the checkpoint has as a whole.

        Raises:
            ValueError: no set is complete, or a file is malformed.
            FileNotFoundError: a shard that the index names is missing.
        """
        files: dict[str, Path] = {}
        for listed in self._listings():
            files = listed | files
            for naming in namings:
                if all(name in files for name in naming):
                    return [self._entry(files[name], name) for name in naming]
        nearest = max(namings, key=lambda naming: sum(name in files for name in naming))
        present = [name for name in nearest if name in files]
        if present:
            missing = next(name for name in nearest if name not in files)
            raise ValueError(f"{self.folder}: tensor {missing!r}: found none, wanted it beside {present[0]!r}")
        wanted = " or ".join(repr(naming[0]) for naming in namings)
        raise ValueError(f"{self.folder}: tensor {wanted}: found none in {self._where()}")

    def stored(self) -> frozenset[str]:
        """Those of `names` that the checkpoint has. Raises as [`find`] does for malformed files."""
        return frozenset().union(*self._listings())

    def read(self, entry: TensorEntry, dtypes: Mapping[str, torch.dtype] = DTYPES) -> torch.Tensor:
        """The tensor, in the file's dtype.

        Args:
            dtypes: those that the caller can take, by safetensors' names: by default floating point of 2 or 4 bytes.

        Raises:
            ValueError: the dtype is none of `dtypes`, or the file ends too early.
        """
        if entry.dtype not in dtypes:
            raise ValueError(
                f"{entry.file}: tensor {entry.name!r}: dtype: found {entry.dtype}, wanted one of {', '.join(dtypes)}"
            )
        dtype = dtypes[entry.dtype]
        size, wanted = entry.end - entry.start, prod(entry.shape) * dtype.itemsize
        if size != wanted:
            raise ValueError(
                f"{entry.file}: tensor {entry.name!r}: data_offsets: found {size} bytes, wanted {wanted} for "
                f"{entry.dtype} {list(entry.shape)}"
            )
        with entry.file.open("rb", buffering=0) as file:
            file.seek(entry.start)
            data = bytearray(file.read(size))
        self.bytes_read += len(data)
        if len(data) != size:
            raise ValueError(
                f"{entry.file}: tensor {entry.name!r}: found {len(data)} bytes, wanted {size}: truncated file"
            )
        return torch.frombuffer(data, dtype=dtype).reshape(entry.shape)

    def _where(self) -> str:
        if (self.folder / SINGLE_FILE).is_file():
            return SINGLE_FILE
        return INDEX_FILE if self._index.is_file() else f"the headers of {len(self._files)} safetensors files"

    def _listings(self) -> Iterator[dict[str, Path]]:
        """Which of `names` lies in which file, bit by bit, with the precedence of transformers."""
        single = self.folder / SINGLE_FILE
        if single.is_file():
            yield dict.fromkeys(self._header(single), single)
        elif self._index.is_file():
            yield from self._index_listings()
        else:
            for file in self._files:
                yield dict.fromkeys(self._header(file), file)

    def _index_listings(self) -> Iterator[dict[str, Path]]:
        """The entries of the index, block by block: V4-Flash's has 6 MB, and in a sorted one gates come early."""
        names = "|".join(map(re.escape, sorted(self.names)))
        pattern = re.compile(rf'"({names})"\s*:\s*"([^"]*)"')
        text = ""
        with self._index.open("rb", buffering=0) as file:
            while block := file.read(INDEX_BLOCK_BYTES):
                self.bytes_read += len(block)
                text += block.decode("utf-8", errors="replace")
                yield {match[1]: self._shard(match[1], match[2]) for match in pattern.finditer(text)}
                text = text[-INDEX_OVERLAP:]  # an entry may begin in one block and end in the next
        try:
            whole = json.loads(self._index.read_bytes())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self._index}: found {_one_line(error)}, wanted JSON") from None
        if not isinstance(whole, dict) or not isinstance(whole.get("weight_map"), dict):
            raise ValueError(f"{self._index}: weight_map: found none, wanted a map from tensors to shards")

    def _shard(self, name: str, shard: str) -> Path:
        if shard != os.path.basename(shard) or "\\" in shard or not shard.endswith(".safetensors"):
            raise ValueError(
                f"{self._index}: tensor {name!r}: shard: found {shard!r}, wanted the name of a .safetensors file"
            )
        path = self.folder / shard
        if not path.is_file():
            raise FileNotFoundError(
                f"{path}: found no such file, wanted the shard of {name!r} that {INDEX_FILE} names"
            )
        return path

    def _entry(self, file: Path, name: str) -> TensorEntry:
        header = self._header(file)
        if name not in header:
            raise ValueError(f"{file}: tensor {name!r}: found none, wanted it here, as {INDEX_FILE} says")
        return header[name]

    def _header(self, file: Path) -> dict[str, TensorEntry]:
        """The entries of `file` for those of `names` that it holds."""
        if file not in self._headers:
            with file.open("rb", buffering=0) as opened:
                size = os.fstat(opened.fileno()).st_size
                length = int.from_bytes(opened.read(8), "little")
                most = min(size - 8, MAX_HEADER_BYTES)
                if not 2 <= length <= most:
                    raise ValueError(
                        f"{file}: header length: found {length}, wanted 2 to {most} in a file of {size} bytes: it is "
                        "truncated, or no safetensors file"
                    )
                raw = opened.read(length)
            self.bytes_read += 8 + len(raw)
            try:
                header = json.loads(raw)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{file}: header: found {_one_line(error)}, wanted JSON") from None
            if not isinstance(header, dict):
                raise ValueError(f"{file}: header: found {type(header).__name__}, wanted a JSON object")
            self._headers[file] = {
                name: _parse_entry(file, name, header[name], 8 + length, size) for name in self.names & header.keys()
            }
        return self._headers[file]


def _parse_entry(file: Path, name: str, info: object, data_start: int, file_size: int) -> TensorEntry:
    fields = info if isinstance(info, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not (isinstance(dtype, str) and _are_counts(shape) and _are_counts(offsets) and len(offsets) == 2):
        raise ValueError(f"{file}: tensor {name!r}: found {info!r:.100}, wanted dtype, shape and two data_offsets")
    start, end = (data_start + offset for offset in offsets)
    if not start <= end <= file_size:
        raise ValueError(
            f"{file}: tensor {name!r}: data_offsets: found {offsets}, wanted a range within the "
            f"{file_size - data_start} bytes of data: truncated file"
        )
    return TensorEntry(file, name, dtype, tuple(shape), start, end)


def _are_counts(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


__all__ = ["Checkpoint", "TensorEntry"]
