"""The gates of a target's `hc_head`, read from its checkpoint without the rest of it."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import Any

import torch

from .checkpoint import Checkpoint
from .sources import Source

# What each kind of checkpoint calls the gates, `{}` being fn, base, scale
NAMINGS = (
    "model.hc_head.hc_{}",  # transformers, a causal language model
    "hc_head_{}",  # DeepSeek-V4 as released
    "hc_head.hc_{}",  # transformers, the model without its LM head
    "model.hc_pre.hc_head.hc_head_{}",  # HY-V4 as released
)


@dataclass(frozen=True)
class Gates:
    """The parameters of an `hc_head`, float32, and where they come from.

    Attributes:
        hc_fn: `[m, m * d]`.
        hc_base: `[m]`.
        hc_scale: `[1]`.
        sources: for each of the three, the tensor's name, its file, its dtype in there, and the SHA-256 of its bytes
            as float32, little-endian.
        bytes_read: bytes that were read of index, headers and tensors.
    """

    hc_fn: torch.Tensor
    hc_base: torch.Tensor
    hc_scale: torch.Tensor
    sources: dict[str, dict[str, Any]]
    bytes_read: int


def read_gates(source: str | os.PathLike | Source, streams: int, width: int) -> Gates:
    """The gates in a checkpoint, single file or sharded, in transformers' naming or the released one.

    Gates that a checkpoint stores in 16 bits are widened to float32, as transformers does when it loads them.

    Args:
        source: the target's folder, or its repository on the Hub.
        streams: the target's residual streams, `m`.
        width: its width, `d`.

    Raises:
        FileNotFoundError: no safetensors file, or a missing shard.
        ValueError: a missing tensor, one of another shape or dtype, values that are not finite, a malformed file; the
            message names file and tensor, what was found, and what was wanted.
    """
    shapes = {"fn": (streams, streams * width), "base": (streams,), "scale": (1,)}
    namings = [[naming.format(gate) for gate in shapes] for naming in NAMINGS]
    checkpoint = Checkpoint(source, (name for naming in namings for name in naming))
    tensors, sources = {}, {}
    for (gate, shape), entry in zip(shapes.items(), checkpoint.find(namings), strict=True):
        if entry.shape != shape:
            raise ValueError(
                f"{entry.file}: tensor {entry.name!r}: shape: found {list(entry.shape)}, wanted {list(shape)} for "
                f"{streams} streams of width {width}"
            )
        tensor = checkpoint.read(entry).float()
        if not tensor.isfinite().all():
            raise ValueError(f"{entry.file}: tensor {entry.name!r}: found values that are not finite, wanted gates")
        tensors[f"hc_{gate}"] = tensor
        sources[f"hc_{gate}"] = {
            "tensor": entry.name,
            "file": entry.file.name,
            "dtype": entry.dtype,
            "sha256": hashlib.sha256(tensor.numpy().astype("<f4").tobytes()).hexdigest(),
        }
    return Gates(**tensors, sources=sources, bytes_read=checkpoint.bytes_read)


__all__ = ["Gates", "read_gates"]
