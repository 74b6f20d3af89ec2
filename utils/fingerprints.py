"""Tells one target or tokenizer from another without reading 160 GB: what a rerun must find unchanged."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from transformers import PreTrainedTokenizerBase
from transformers.utils import CONFIG_NAME, cached_file
from transformers.utils.hub import extract_commit_hash

SAMPLED_BLOCKS, BLOCK_BYTES = 64, 1 << 16


def sampled_fingerprint(path: str | os.PathLike) -> str:
    """SHA-256 of a file's size and of 64 blocks of 64 KiB spread evenly over it; up to 4 MiB, of all of it.

    Another training of the same model changes all of its weights, and a checkpoint of 160 GB is not read for that.
    """
    size = os.path.getsize(path)
    digest = hashlib.sha256(str(size).encode())
    last = max(size - BLOCK_BYTES, 0)
    with open(path, "rb") as file:
        for start in sorted({last * block // (SAMPLED_BLOCKS - 1) for block in range(SAMPLED_BLOCKS)}):
            file.seek(start)
            digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()


def checkpoint_fingerprints(folder: str | os.PathLike) -> dict[str, str]:
    """File name -> [`sampled_fingerprint`] of a local checkpoint's configuration and weights; empty for a Hub id."""
    path = Path(folder)
    if not path.is_dir():
        return {}
    files = [path / "config.json", *sorted(path.glob("*.safetensors"))]
    return {file.name: sampled_fingerprint(file) for file in files}


def hub_commit(model: str | os.PathLike, revision: str | None = None) -> str | None:
    """The commit of a Hub id's `revision`, as its configuration lies in the cache; `None` for a folder.

    Raises:
        OSError: the Hub, and the cache, have no such model.
    """
    if Path(model).is_dir():
        return None
    return extract_commit_hash(cached_file(model, CONFIG_NAME, revision=revision), None)


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of all that makes token ids of text: of a fast tokenizer its whole pipeline, else the vocabulary."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state = tokenizer.get_vocab() if backend is None else json.loads(backend.to_str())
    for call_option in ("truncation", "padding"):
        state.pop(call_option, None)
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def text_fingerprint(text: str | None) -> str | None:
    """SHA-256 of a chat template or other text; `None` for none."""
    return None if text is None else hashlib.sha256(str(text).encode()).hexdigest()


__all__ = ["checkpoint_fingerprints", "hub_commit", "sampled_fingerprint", "text_fingerprint", "tokenizer_fingerprint"]
