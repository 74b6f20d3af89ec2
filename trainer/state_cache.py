"""Target states on disk: one folder, written by any number of processes, read row by row.

    manifest.json                       what the states are of, and how they are kept
    rank-00000-4f1c9e02a7b3.safetensors a shard: the rows of some documents

A row is what is kept of one document, tensors named `KEY/PART`, `KEY` being the digest of its token ids. The header of
a shard is its index: safetensors' own names, shapes and offsets, and beside them as metadata a checksum of each row.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ..configuration_hyperdflash import HyperDFlashConfig
from ..conversion.extract import origin_of
from ..utils.fingerprints import checkpoint_fingerprints, hub_commit, text_fingerprint, tokenizer_fingerprint
from ..utils.folders import whole_file
from ..utils.provenance import package_versions

MANIFEST_FILE = "manifest.json"
FORMAT = 1
OPEN_SHARDS = 64
ABANDONED_SECONDS = 3600.0  # a shard takes seconds to write
# Options of `from_pretrained` that say where a target lies, not what it computes
PLACEMENT = ("device_map", "max_memory", "offload_folder", "offload_buffers", "low_cpu_mem_usage", "tp_plan")


def document_key(input_ids: Sequence[int]) -> str:
    """The name of a document in a cache: 32 hexadecimal digits, a digest of its token ids."""
    return hashlib.sha256(np.asarray(input_ids, dtype="<i8").tobytes()).hexdigest()[:32]


def row_checksum(key: str, row: dict[str, torch.Tensor]) -> str:
    """SHA-256 over the key and, part by part, name, dtype, shape and bytes."""
    digest = hashlib.sha256(key.encode())
    for part, values in sorted(row.items()):
        digest.update(f"{part} {values.dtype} {list(values.shape)}".encode())
        digest.update(values.contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def state_manifest(
    target: str | os.PathLike,
    target_config: PreTrainedConfig,
    target_dtype: torch.dtype,
    target_options: dict[str, Any],
    drafter_config: HyperDFlashConfig,
    tokenizer: PreTrainedTokenizerBase,
    chat_template: str | None,
    dtype: str,
    target_revision: str | None = None,
) -> dict[str, Any]:
    """What decides the states of a run, as JSON values: two runs with the same may share a cache.

    Args:
        target: folder or Hub id; a folder that `init --with_head` made stands for the target that it came from.
            target_config: its configuration. target_dtype: of its weights.
        target_options: further arguments of its `from_pretrained`; where it is placed is left out.
        drafter_config: says which states are taken.
        tokenizer, chat_template: make the token ids.
        dtype: of the states that are kept.
        target_revision: on the Hub; what is written is the commit that it stands for.
    """
    files = checkpoint_fingerprints(target)
    name, revision = os.fspath(target), None
    if files:
        name = Path(target).resolve().name
    else:
        revision = hub_commit(target, target_revision)
    if files and (origin := origin_of(target)) is not None:
        revision = origin.get("target_revision")
        name = origin["target"] if revision else Path(origin["target"]).name
        files = {"config.json": files["config.json"]}
    text_config = target_config.get_text_config()
    return {
        "format": FORMAT,
        "target": name,
        "target_revision": revision,
        "target_files": files,
        "target_dtype": str(target_dtype).removeprefix("torch."),
        "target_options": {name: str(value) for name, value in target_options.items() if name not in PLACEMENT},
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "chat_template": text_fingerprint(chat_template),
        "source": drafter_config.context_source,
        "target_layer_ids": list(drafter_config.target_layer_ids),
        "streams": text_config.hc_mult,
        "width": text_config.hidden_size,
        "dtype": dtype,
    }


class StateCache:
    """A cache folder as a mapping from a document's key to its row, `{part: tensor on the CPU}`.

    Rows that are set are held in memory until they make a shard, which is then written whole. A killed process loses
    the shard in progress, nothing else. Rows that are read are views of the mapped file, each checked against its
    checksum the first time. Other processes may write into the same folder at the same time: shards have names of
    their own, and a row that is missing is looked for in those that have come since.

    Args:
        folder: the cache; made if there is none, unless it is `read_only`.
        manifest: what the run wants, see [`state_manifest`].
        read_only: write nothing, and take a damaged row as an error. Else it is warned about and counts as missing.
        shard_bytes: how many bytes of rows make a shard: what this process holds in memory at most, beside one row.
        rank: of this process, for the names of its shards.

    Raises:
        FileNotFoundError: no cache there, and `read_only`.
        ValueError: the folder holds something else, or states that are not those of `manifest`; the message names the
            field, what was found and what was wanted.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        manifest: dict[str, Any],
        read_only: bool = False,
        shard_bytes: int = 512 << 20,
        rank: int = 0,
    ):
        self.folder, self.read_only, self.shard_bytes, self.rank = Path(folder), read_only, shard_bytes, rank
        parts = ["residual"] if manifest["source"] == "pre_hc_head" else ["residual", "context"]
        scales = [f"{part}_scale" for part in parts] if manifest["dtype"].startswith("float8") else []
        self._parts = parts + scales
        self._pending: dict[str, dict[str, torch.Tensor]] = {}
        self._pending_bytes = 0
        self._shards: set[str] = set()
        self._places: dict[str, list[tuple[Path, str]]] = {}  # of each key, shards and the row's checksum there
        self._verified: set[str] = set()
        self._damage: list[str] = []
        self._open: dict[Path, safe_open] = {}
        if not read_only:
            self._create(manifest)
        self.check_manifest(manifest)
        self._find_shards()

    @property
    def manifest_sha256(self) -> str:
        """SHA-256 of the manifest's file: says what the cache is of, wherever it lies."""
        return hashlib.sha256((self.folder / MANIFEST_FILE).read_bytes()).hexdigest()

    def check_manifest(self, wanted: dict[str, Any]) -> None:
        """Raises `ValueError` if the cache was made of something else; files missing on either side are not compared.

        (For cached training a target's folder needs only the shards with the borrowed modules.)
        """
        path = self.folder / MANIFEST_FILE
        try:
            found = json.loads(path.read_bytes())["states"]
        except FileNotFoundError:
            where = str(self.folder)
            raise FileNotFoundError(f"states_cache: found no {MANIFEST_FILE} in {where!r}, wanted a cache") from None
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"states_cache: {path}: found no manifest, wanted that of a cache") from None
        for name, value in wanted.items():
            there = found.get(name)
            if name == "target_files" and isinstance(there, dict):
                shared = sorted(there.keys() & value.keys())
                there, value = ({file: files[file] for file in shared} for files in (there, value))
            if there != value:
                raise ValueError(
                    f"states_cache: {name}: found {there!r} in {str(self.folder)!r}, wanted {value!r}, this run's"
                )

    def get(self, key: str) -> dict[str, torch.Tensor] | None:
        """The row, or `None` if there is none.

        Raises:
            ValueError: only damaged copies of it, or none beside a damaged shard, and the cache is `read_only`.
        """
        if key in self._pending:
            return self._pending[key]
        if key not in self._places:
            self._find_shards()
        places = self._places.get(key, [])
        while places:
            path, checksum = places[-1]
            try:
                row = self._read(path, key)
                if key in self._verified or row_checksum(key, row) == checksum:
                    self._verified.add(key)
                    return row
                damage = "checksum: found another, wanted that of the header"
            except (SafetensorError, OSError) as error:
                damage = f"found {_one_line(error)}, wanted the row"
            places.pop()
            self._verified.discard(key)
            self._note(f"{path.name}: row {key}: {damage}")
        self._places.pop(key, None)
        if self.read_only and self._damage:
            raise ValueError(
                f"states_cache: row {key}: found none in {str(self.folder)!r} but damage ({'; '.join(self._damage)}), "
                "wanted it, or states_source 'fill', which makes it again"
            )
        return None

    def __contains__(self, key: str) -> bool:
        return key in self._pending or key in self._places

    def __iter__(self) -> Iterator[str]:
        return iter({**self._places, **self._pending})

    def __len__(self) -> int:
        return len(self._places.keys() | self._pending.keys())

    def __setitem__(self, key: str, row: dict[str, torch.Tensor]) -> None:
        self._pending[key] = row
        self._pending_bytes += sum(values.nbytes for values in row.values())
        if self._pending_bytes >= self.shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Writes the rows that are still held in memory as a shard."""
        if not self._pending:
            return
        path = self.folder / f"rank-{self.rank:05d}-{uuid.uuid4().hex[:12]}.safetensors"
        checksums = {key: row_checksum(key, row) for key, row in self._pending.items()}
        tensors = {f"{key}/{part}": values for key, row in self._pending.items() for part, values in row.items()}
        with whole_file(path) as partial:
            save_file(tensors, partial, metadata=checksums)
        self._add(path.name, checksums)
        self._pending, self._pending_bytes = {}, 0

    def _create(self, manifest: dict[str, Any]) -> None:
        """The folder and its manifest, where there are none yet; what dead processes left half-written goes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for partial in self.folder.glob("*.partial"):
            try:
                if time.time() - partial.stat().st_mtime > ABANDONED_SECONDS:
                    partial.unlink()
            except FileNotFoundError:
                continue  # another rank was faster
        path = self.folder / MANIFEST_FILE
        if path.exists():
            return
        others = sorted(path.name for path in self.folder.iterdir() if path.suffix != ".partial")
        if others and not path.exists():  # another rank may just have made it
            raise ValueError(
                f"states_cache: found {others[0]!r} and no {MANIFEST_FILE} in {str(self.folder)!r}, wanted a cache, "
                "an empty folder, or no such path"
            )
        record = {"states": manifest, "written_with": package_versions()}
        with whole_file(path) as partial:
            partial.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")

    def _find_shards(self) -> None:
        """Takes in the headers of shards that have come into the folder since the last time."""
        for path in sorted(self.folder.glob("rank-*.safetensors")):
            if path.name in self._shards:
                continue
            try:
                with safe_open(path, framework="pt") as shard:
                    checksums = shard.metadata() or {}
            except (SafetensorError, OSError) as error:
                checksums = {}
                self._note(f"{path.name}: found {_one_line(error)}, wanted a whole shard")
            self._add(path.name, checksums)

    def _add(self, name: str, checksums: dict[str, str]) -> None:
        self._shards.add(name)
        for key, checksum in checksums.items():
            self._places.setdefault(key, []).append((self.folder / name, checksum))
            self._verified.discard(key)

    def _read(self, path: Path, key: str) -> dict[str, torch.Tensor]:
        if path not in self._open:  # each opening reads the header: milliseconds where rows are small and many
            if len(self._open) == OPEN_SHARDS:
                self._open.pop(next(iter(self._open)))
            self._open[path] = safe_open(path, framework="pt")
        return {part: self._open[path].get_tensor(f"{key}/{part}") for part in self._parts}

    def _note(self, damage: str) -> None:
        self._damage.append(damage)
        if not self.read_only:
            warnings.warn(f"states_cache: {damage}; what it held is made again", UserWarning, stacklevel=3)


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


__all__ = ["StateCache", "document_key", "state_manifest"]
