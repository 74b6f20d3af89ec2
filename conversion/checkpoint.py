"""Single tensors out of a checkpoint, by the headers of its safetensors files and nothing else.

A safetensors file is the length of its header (8 bytes, little-endian), the header (JSON: dtype, shape and byte range
of every tensor), and the data. Only headers and the bytes of the tensors asked for are read, from a folder or by range
requests from the Hub; no pickle is opened.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from pathlib import PurePath
from typing import Any, NamedTuple

import torch

from .sources import LocalFolder, Source

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
INDEX_BLOCK_BYTES = 1 << 16
LARGEST_INDEX_BLOCK_BYTES = 1 << 20
INDEX_OVERLAP = 1 << 10  # longer than any entry
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
DTYPE_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


class TensorEntry(NamedTuple):
    """A tensor as a header describes it: `start` and `end` are the bytes of the file that hold it."""

    file: PurePath
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class Checkpoint:
    """A folder or Hub repository with `model.safetensors`, or shards with `model.safetensors.index.json`, or shards
    alone.

    Args:
        source: a folder, or where else the files lie (`conversion/sources.py`).
        names: the tensors that may be asked for by name.

    Attributes:
        bytes_read: bytes read so far, of index, headers and tensors.

    Raises:
        FileNotFoundError: there is no safetensors file.
    """

    def __init__(self, source: str | os.PathLike | Source, names: Iterable[str] = ()):
        self.source = LocalFolder(source) if isinstance(source, str | os.PathLike) else source
        self.names = frozenset(names)
        self._read_before = self.source.bytes_read
        self._headers: dict[str, tuple[dict[str, Any], int]] = {}
        listed = self.source.names()
        self._files = [name for name in listed if name.endswith(".safetensors")]
        self._index = self.source.path(INDEX_FILE)
        if not self._files and not self.source.has(INDEX_FILE):
            others = [name for name in listed if name.endswith((".bin", ".pt", ".pth", ".ckpt", ".gguf"))]
            found = f"only {', '.join(others)}" if others else "none"
            raise FileNotFoundError(f"{self.source}: safetensors files: found {found}, wanted {SINGLE_FILE} or shards")

    @property
    def bytes_read(self) -> int:
        return self.source.bytes_read - self._read_before

    def find(self, namings: Sequence[Sequence[str]]) -> list[TensorEntry]:
        """The tensors of the first of several alternative sets of names that the checkpoint has as a whole.

        Raises:
            ValueError: no set is complete, or a file is malformed.
            FileNotFoundError: a shard that the index names is missing.
        """
        files: dict[str, str] = {}
        for listed in self._listings():
            files = listed | files
            for naming in namings:
                if all(name in files for name in naming):
                    return [self._entry(files[name], name) for name in naming]
        nearest = max(namings, key=lambda naming: sum(name in files for name in naming))
        present = [name for name in nearest if name in files]
        if present:
            missing = next(name for name in nearest if name not in files)
            raise ValueError(f"{self.source}: tensor {missing!r}: found none, wanted it beside {present[0]!r}")
        wanted = " or ".join(dict.fromkeys(repr(naming[0]) for naming in namings))
        raise ValueError(f"{self.source}: tensor {wanted}: found none in {self._where()}")

    def find_all(self, prefix: str) -> list[TensorEntry]:
        """All tensors whose names begin with `prefix`, file by file in the order of their bytes; perhaps none.

        Raises as [`find`].
        """
        if self.source.has(SINGLE_FILE):
            files = dict.fromkeys(self._header(SINGLE_FILE)[0], SINGLE_FILE)
        elif self.source.has(INDEX_FILE):
            files = {
                name: self._shard(name, shard)
                for name, shard in self._whole_index().items()
                if name.startswith(prefix)
            }
        else:
            files = {name: file for file in self._files for name in self._header(file)[0]}
        entries = [self._entry(file, name) for name, file in files.items() if name.startswith(prefix)]
        return sorted(entries, key=lambda entry: (entry.file.name, entry.start))

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
        size = self.check_size(entry)
        data = self.source.read(entry.file.name, entry.start, entry.end)
        if len(data) != size:
            raise ValueError(
                f"{entry.file}: tensor {entry.name!r}: found {len(data)} bytes, wanted {size}: truncated file"
            )
        return torch.frombuffer(data, dtype=dtypes[entry.dtype]).reshape(entry.shape)

    def check_size(self, entry: TensorEntry) -> int:
        """The tensor's bytes, of whatever dtype.

        Raises:
            ValueError: an unknown dtype, or a byte range that is not what dtype and shape need.
        """
        if entry.dtype not in DTYPE_BITS:
            raise ValueError(
                f"{entry.file}: tensor {entry.name!r}: dtype: found {entry.dtype!r}, wanted one of the format's"
            )
        size, bits = entry.end - entry.start, prod(entry.shape) * DTYPE_BITS[entry.dtype]
        if 8 * size != bits:
            raise ValueError(
                f"{entry.file}: tensor {entry.name!r}: data_offsets: found {size} bytes, wanted {-(-bits // 8)} for "
                f"{entry.dtype} {list(entry.shape)}"
            )
        return size

    def _where(self) -> str:
        if self.source.has(SINGLE_FILE):
            return SINGLE_FILE
        return INDEX_FILE if self.source.has(INDEX_FILE) else f"the headers of {len(self._files)} safetensors files"

    def _listings(self) -> Iterator[dict[str, str]]:
        """Which of `names` lies in which file, bit by bit, with the precedence of transformers."""
        if self.source.has(SINGLE_FILE):
            yield self._listing(SINGLE_FILE)
        elif self.source.has(INDEX_FILE):
            yield from self._index_listings()
        else:
            for file in self._files:
                yield self._listing(file)

    def _listing(self, file: str) -> dict[str, str]:
        return dict.fromkeys(self.names & self._header(file)[0].keys(), file)

    def _index_listings(self) -> Iterator[dict[str, str]]:
        """The entries of the index, block by block, in turn from its beginning and from its end: V4-Flash's has 6 MB,
        and the gates come early where it is sorted by name, late where it is sorted by shard."""
        names = "|".join(map(re.escape, sorted(self.names)))
        pattern = re.compile(rf'"({names})"\s*:\s*"([^"]*)"')
        size = self.source.size(INDEX_FILE)
        whole, found = bytearray(size), {}
        first, last, block_bytes, from_the_end = 0, size, INDEX_BLOCK_BYTES, False
        while first < last:
            if from_the_end:
                start, end = max(last - block_bytes, first), last
                last = start
                # An entry may begin in one block and end in the next
                end = min(end + INDEX_OVERLAP, size)
                block_bytes = min(2 * block_bytes, LARGEST_INDEX_BLOCK_BYTES)
            else:
                start, end = first, min(first + block_bytes, last)
                first = end
                end = min(end + INDEX_OVERLAP, size)
            from_the_end = not from_the_end
            block = self.source.read(INDEX_FILE, start, end)
            whole[start : start + len(block)] = block
            listed = {}
            for match in pattern.finditer(block.decode("utf-8", errors="replace")):
                listed[match[1]] = shard = self._shard(match[1], match[2])
                if found.setdefault(match[1], shard) != shard:
                    raise ValueError(
                        f"{self._index}: tensor {match[1]!r}: shard: found {found[match[1]]!r} and {shard!r}, wanted "
                        "one"
                    )
            yield listed
        self._parse_index(whole)

    def _whole_index(self) -> dict[str, Any]:
        return self._parse_index(self.source.read(INDEX_FILE, 0, self.source.size(INDEX_FILE)))

    def _parse_index(self, data: bytes | bytearray) -> dict[str, Any]:
        try:
            whole = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self._index}: found {_one_line(error)}, wanted JSON") from None
        if not isinstance(whole, dict) or not isinstance(whole.get("weight_map"), dict):
            raise ValueError(f"{self._index}: weight_map: found none, wanted a map from tensors to shards")
        return whole["weight_map"]

    def _shard(self, name: str, shard: object) -> str:
        plain = isinstance(shard, str) and shard == os.path.basename(shard) and "\\" not in shard
        if not plain or not shard.endswith(".safetensors"):
            raise ValueError(
                f"{self._index}: tensor {name!r}: shard: found {shard!r}, wanted the name of a .safetensors file"
            )
        if not self.source.has(shard):
            raise FileNotFoundError(
                f"{self.source.path(shard)}: found no such file, wanted the shard of {name!r} that {INDEX_FILE} names"
            )
        return shard

    def _entry(self, file: str, name: str) -> TensorEntry:
        header, data_start = self._header(file)
        path = self.source.path(file)
        if name not in header:
            raise ValueError(f"{path}: tensor {name!r}: found none, wanted it here, as {INDEX_FILE} says")
        return _parse_entry(path, name, header[name], data_start, self.source.size(file))

    def _header(self, file: str) -> tuple[dict[str, Any], int]:
        """What the header of `file` says of its tensors, not yet checked, and where the data begins."""
        if file not in self._headers:
            path, size = self.source.path(file), self.source.size(file)
            raw = self.source.read(file, 0, min(self.source.first_read, size))
            length = int.from_bytes(raw[:8], "little")
            most = min(size - 8, MAX_HEADER_BYTES)
            if not 2 <= length <= most:
                raise ValueError(
                    f"{path}: header length: found {length}, wanted 2 to {most} in a file of {size} bytes: it is "
                    "truncated, or no safetensors file"
                )
            raw += self.source.read(file, len(raw), 8 + length)
            try:
                header = json.loads(raw[8 : 8 + length], object_pairs_hook=_without_duplicates)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}: header: found {_one_line(error)}, wanted JSON") from None
            if not isinstance(header, dict):
                raise ValueError(f"{path}: header: found {type(header).__name__}, wanted a JSON object")
            header.pop("__metadata__", None)
            _check_apart(path, header, size - 8 - length)
            self._headers[file] = header, 8 + length
        return self._headers[file]


def _parse_entry(file: PurePath, name: str, info: object, data_start: int, file_size: int) -> TensorEntry:
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


def _check_apart(file: PurePath, header: dict[str, Any], data_bytes: int) -> None:
    """Whether no two tensors share bytes; entries that are malformed otherwise are left to [`_parse_entry`]."""
    ranges = []
    for name, info in header.items():
        offsets = info.get("data_offsets") if isinstance(info, dict) else None
        if _are_counts(offsets) and len(offsets) == 2 and offsets[0] < offsets[1] <= data_bytes:
            ranges.append((*offsets, name))
    for (_, end, name), (start, _, next_name) in pairwise(sorted(ranges)):
        if start < end:
            raise ValueError(
                f"{file}: tensor {next_name!r}: data_offsets: found {start}, inside of {name!r}, wanted {end} or more"
            )


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} twice")
    return unique


def _are_counts(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


__all__ = ["Checkpoint", "TensorEntry"]
