"""Tensors of a target copied as they are, byte by byte, into a safetensors file of their own."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.utils import tqdm
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig

from .checkpoint import SINGLE_FILE, Checkpoint, TensorEntry
from .sources import Source

MTP_PREFIX = "mtp.0."
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
# transformers' names -> those of released checkpoints (DeepSeek-V4, HY-V4), under which transformers too saves some
RELEASED_NAMES = {
    "model.embed_tokens.weight": ("embed.weight",),
    "model.hc_head.hc_fn": ("hc_head_fn", "model.hc_pre.hc_head.hc_head_fn"),
    "model.hc_head.hc_base": ("hc_head_base", "model.hc_pre.hc_head.hc_head_base"),
    "model.hc_head.hc_scale": ("hc_head_scale", "model.hc_pre.hc_head.hc_head_scale"),
    "model.norm.weight": ("norm.weight",),
    "lm_head.weight": ("head.weight",),
}


@dataclass(frozen=True)
class Extract:
    """Tensors that are to be copied.

    Attributes:
        source: where they lie. entries: which, in the order of their bytes. num_bytes: of all of them.
        folder: the name of the folder that they are copied to.
    """

    source: Source
    entries: list[TensorEntry]
    num_bytes: int
    folder: str

    @classmethod
    def of(cls, checkpoint: Checkpoint, entries: Sequence[TensorEntry], folder: str) -> Extract:
        entries = sorted(entries, key=lambda entry: (entry.file.name, entry.start))
        return cls(checkpoint.source, entries, sum(map(checkpoint.check_size, entries)), folder)

    def report(self) -> dict[str, Any]:
        return {"folder": self.folder, "tensors": len(self.entries), "bytes": self.num_bytes}


def plan_mtp(source: Source, target: PreTrainedConfig) -> Extract:
    """The native MTP module, `mtp.0.*` of a checkpoint as released, to be copied to the folder `mtp`.

    Raises:
        ValueError: the checkpoint has none, or one of another width.
    """
    checkpoint = Checkpoint(source)
    entries = {entry.name: entry for entry in checkpoint.find_all(MTP_PREFIX)}
    if not entries:
        raise ValueError(
            f"{source}: tensor '{MTP_PREFIX}*': found none, wanted the native MTP module: it is in checkpoints as "
            "released, and transformers does not save it"
        )
    width = target.hidden_size
    for name, shape in (
        ("e_proj.weight", (width, width)),
        ("h_proj.weight", (width, width)),
        ("norm.weight", (width,)),
    ):
        name = MTP_PREFIX + name
        if name not in entries:
            raise ValueError(f"{source}: tensor {name!r}: found none, wanted it beside {next(iter(entries))!r}")
        _check_shape(entries[name], shape)
    return Extract.of(checkpoint, list(entries.values()), "mtp")


def plan_head(source: Source, target: PreTrainedConfig) -> Extract:
    """What training on cached states needs of a target, to be copied to the folder `head`: embedding, gates of
    `hc_head`, final norm and LM head, under the names that the checkpoint has for them.

    Raises:
        ValueError: one is missing, or has another shape.
    """
    width, streams, vocabulary = target.hidden_size, target.hc_mult, target.vocab_size
    shapes = {
        "model.embed_tokens.weight": (vocabulary, width),
        "model.hc_head.hc_fn": (streams, streams * width),
        "model.hc_head.hc_base": (streams,),
        "model.hc_head.hc_scale": (1,),
        "model.norm.weight": (width,),
        "lm_head.weight": (vocabulary, width),
    }
    if target.tie_word_embeddings:
        del shapes["lm_head.weight"]
    checkpoint = Checkpoint(source, [name for names in RELEASED_NAMES.items() for name in (names[0], *names[1])])
    entries = []
    for name, shape in shapes.items():
        (entry,) = checkpoint.find([[alternative] for alternative in (name, *RELEASED_NAMES[name])])
        _check_shape(entry, shape)
        entries.append(entry)
    return Extract.of(checkpoint, entries, "head")


def copy_tensors(extract: Extract, folder: str | os.PathLike, name: str) -> None:
    """Writes the tensors to `model.safetensors` in `folder`, and goes on where an earlier call for the same commit on
    the Hub stopped: what is in the file is as it was received.

    Args:
        name: of the target, recorded in the file together with its commit.

    Raises:
        ValueError: a file of the target ends too early.
        OSError: see [`HubRepository`]; what was received stays in the file.
    """
    path, source = Path(folder) / SINGLE_FILE, extract.source
    metadata = {"format": "pt", "target": name} | ({"target_revision": source.commit} if source.commit else {})
    header = safetensors_header(
        {entry.name: (entry.dtype, entry.shape, entry.end - entry.start) for entry in extract.entries}, metadata
    )
    done = 0
    if source.commit and path.is_file() and path.stat().st_size >= len(header):
        with path.open("rb") as file:
            if file.read(len(header)) == header:
                done = path.stat().st_size - len(header)
    try:
        with path.open("r+b" if done else "wb") as file:
            file.seek(0, os.SEEK_END)
            if not done:
                file.write(header)
            with tqdm(total=extract.num_bytes, initial=done, unit="B", unit_scale=True, desc=extract.folder) as bar:
                for shard, start, end in _runs(extract.entries):
                    skipped = min(done, end - start)
                    start, done = start + skipped, done - skipped
                    for block in source.stream(shard, start, end) if start < end else ():
                        file.write(block)
                        start += len(block)
                        bar.update(len(block))
                    if start != end:
                        raise ValueError(f"{source.path(shard)}: found {end - start} bytes too few: truncated file")
    except BaseException:
        if path.stat().st_size == len(header):
            path.unlink()  # nothing to go on with
        raise


def copy_tokenizer(source: Source, folder: str | os.PathLike) -> None:
    """Copies the files of the target's tokenizer, as many as there are."""
    for name in filter(source.has, TOKENIZER_FILES):
        with (Path(folder) / name).open("wb") as file:
            file.writelines(source.stream(name, 0, source.size(name)))


def origin_of(folder: str | os.PathLike) -> dict[str, str] | None:
    """Of a folder that [`copy_tensors`] has filled, `target` and, if that came from the Hub, `target_revision`; of any
    other `None`.

    Raises:
        ValueError: its file is no safetensors file.
    """
    path = Path(folder) / SINGLE_FILE
    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"{path}: found {error}, wanted a safetensors file") from None
    return {key: metadata[key] for key in ("target", "target_revision") if key in metadata} or None


def _runs(entries: Sequence[TensorEntry]) -> list[tuple[str, int, int]]:
    """(file, start, end) of the byte ranges that the tensors make up, tensors that lie side by side in one."""
    runs: list[tuple[str, int, int]] = []
    for entry in entries:
        if runs and runs[-1][0] == entry.file.name and runs[-1][2] == entry.start:
            runs[-1] = (*runs[-1][:2], entry.end)
        else:
            runs.append((entry.file.name, entry.start, entry.end))
    return runs


def _check_shape(entry: TensorEntry, wanted: tuple[int, ...]) -> None:
    if entry.shape != wanted:
        raise ValueError(
            f"{entry.file}: tensor {entry.name!r}: shape: found {list(entry.shape)}, wanted {list(wanted)}"
        )


def safetensors_header(tensors: dict[str, tuple[str, Sequence[int], int]], metadata: dict[str, str]) -> bytes:
    """What stands before the data of a safetensors file with these tensors (dtype, shape, bytes), one after the other
    in this order: the header's length and the header, padded to 8 bytes."""
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw


__all__ = [
    "RELEASED_NAMES",
    "Extract",
    "copy_tensors",
    "copy_tokenizer",
    "origin_of",
    "plan_head",
    "plan_mtp",
    "safetensors_header",
]
