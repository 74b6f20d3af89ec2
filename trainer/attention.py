"""Attention over `[context ; blocks]` in training: each block sees a prefix of one shared context, and itself.

Under a dense mask each of `A * B` slots is scored against `s + A * B` keys, of which it sees those before its anchor
and the `B` of its block. As anchors ascend, neighbouring blocks see nearly the same context. So `block_sparse` takes
`BLOCKS_PER_PIECE` of them at a time and runs plain attention on the keys that any of them sees: exact, and hardly more
than what is seen.

| `attn_implementation` | in training |
|---|---|
| `sdpa` | `block_sparse`, while a step runs (`block_sparse_attention`); outside of one, a dense mask |
| `flex_attention` | a `BlockMask`, whose empty tiles are skipped: for GPUs, as torch has no backward of it on CPUs |
| `eager` | a dense mask: the reference |
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..configuration_hyperdflash import BlockGeometry, HyperDFlashConfig
from .blocks import block_mask

BLOCK_SPARSE = "block_sparse"  # without "flash", which transformers takes for flash attention
BLOCKS_PER_PIECE = 32


def additive(visible: torch.BoolTensor, dtype: torch.dtype, hidden: float) -> torch.Tensor:
    """What is added to attention scores so that only keys which are `visible` count."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, hidden)


@dataclass
class Piece:
    """Some neighbouring blocks of a row.

    Attributes:
        context: the part of the context that any of them sees.
        mask: `[queries, keys]`, what each of their slots sees of `[that part ; these blocks]`, 0 or `-inf`. Layers and
            heads share it; from a boolean one each call of `sdpa` would make its own.
    """

    context: slice
    mask: torch.Tensor


@dataclass
class BlockSparseMask:
    """What `block_sparse` takes for a mask: the pieces of each row, which together are all its blocks, in order."""

    context_length: int
    rows: list[list[Piece]]

    @classmethod
    def of(
        cls,
        anchors: torch.LongTensor,
        context_length: int,
        geometry: BlockGeometry,
        window: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> BlockSparseMask:
        """That of [`block_mask`], of which its pieces are made, for attention in `dtype`."""
        # Of all slots of a block, the first sees most of the context: a sliding window moves on with the slots
        keys, first = torch.arange(context_length), anchors.cpu().unsqueeze(-1)
        seen = geometry.sees_context(keys, first, geometry.position(first, 0), window)  # [b, A, s]
        rows = []
        for row_anchors, row_seen in zip(anchors, seen):
            pieces = []
            for some, seen_by_some in zip(row_anchors.split(BLOCKS_PER_PIECE), row_seen.split(BLOCKS_PER_PIECE)):
                at = seen_by_some.any(dim=0).nonzero()
                context = slice(int(at[0]), int(at[-1]) + 1) if len(at) else slice(0, 0)
                visible = block_mask(some.unsqueeze(0), context.stop, geometry, window, context.start)
                pieces.append(Piece(context, additive(visible[0, 0], dtype, -torch.inf)))
            rows.append(pieces)
        return cls(context_length, rows)


def block_sparse_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: BlockSparseMask | torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers. With another mask than a [`BlockSparseMask`] it is `sdpa`.

    Args:
        query: `[b, heads, A * B, head_dim]`. key, value: `[b, key-value heads, s + A * B, head_dim]`.

    Returns:
        `[b, A * B, heads, head_dim]`, and no weights.
    """
    if not isinstance(attention_mask, BlockSparseMask):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    outputs = []
    for pieces, q_row, k_row, v_row in zip(attention_mask.rows, query, key, value):
        lengths = [len(piece.mask) for piece in pieces]
        k_context, *k_blocks = k_row.split([attention_mask.context_length, *lengths], dim=1)
        v_context, *v_blocks = v_row.split([attention_mask.context_length, *lengths], dim=1)
        for piece, q, k, v in zip(pieces, q_row.split(lengths, dim=1), k_blocks, v_blocks):
            k = torch.cat([k_context[:, piece.context], k], dim=1)  # [key-value heads, keys, head_dim]
            v = torch.cat([v_context[:, piece.context], v], dim=1)
            output = F.scaled_dot_product_attention(
                q.unsqueeze(0),
                k.unsqueeze(0),
                v.unsqueeze(0),
                attn_mask=piece.mask,
                dropout_p=dropout,
                scale=scaling,
                enable_gqa=True,
            )
            outputs.append(output.squeeze(0))
    output = torch.cat(outputs, dim=1)  # [heads, b * A * B, head_dim]
    return output.unflatten(1, (len(query), -1)).permute(1, 2, 0, 3), None


AttentionInterface.register(BLOCK_SPARSE, block_sparse_attention_forward)


@contextmanager
def block_sparse_attention(config: HyperDFlashConfig) -> Iterator[None]:
    """While it is entered, forward and backward of a drafter with `sdpa` attention use `block_sparse`."""
    implementation = config._attn_implementation
    if implementation == "sdpa":
        config._attn_implementation = BLOCK_SPARSE
    try:
        yield
    finally:
        config._attn_implementation = implementation


def flex_mask(
    anchors: torch.LongTensor, context_length: int, geometry: BlockGeometry, window: int | None = None
) -> BlockMask:
    """[`block_mask`] as flex attention takes it: a predicate, and which of its tiles are empty or full."""
    size = geometry.block_size

    def visible(row, head, query, key):
        anchor = anchors[row, query // size]
        key_anchor = anchors[row, (key - context_length).clamp(min=0) // size]
        context = geometry.sees_context(key, anchor, geometry.position(anchor, query % size), window)
        return torch.where(key < context_length, context, geometry.sees_slot(anchor, key_anchor))

    rows, queries = len(anchors), anchors.shape[1] * size
    return create_block_mask(
        visible, rows, None, queries, context_length + queries, device=anchors.device, _compile=False
    )


def attention_masks(
    anchors: torch.LongTensor, context_length: int, config: HyperDFlashConfig, dtype: torch.dtype
) -> dict[str, torch.Tensor | BlockMask | BlockSparseMask]:
    """A mask for each layer type of the drafter, in the form that its attention implementation takes.

    Args:
        anchors: `[b, A]`, ascending, 0 for none. context_length: `s`.

    Raises:
        ValueError: an implementation without such masks.
    """
    implementation, masks = config._attn_implementation, {}
    for layer_type in set(config.layer_types):
        window = config.sliding_window if layer_type == "sliding_attention" else None
        arguments = (anchors, context_length, config.geometry, window)
        if implementation == BLOCK_SPARSE:
            masks[layer_type] = BlockSparseMask.of(*arguments, dtype)
        elif implementation == "flex_attention":
            masks[layer_type] = flex_mask(*arguments)
        elif implementation == "sdpa":
            masks[layer_type] = block_mask(*arguments)
        elif implementation == "eager":
            masks[layer_type] = additive(block_mask(*arguments), dtype, torch.finfo(dtype).min)
        else:
            raise ValueError(
                f"attn_implementation: found {implementation!r}, wanted 'sdpa', 'flex_attention' or 'eager' to train"
            )
    return masks
