"""Attention of many recursions at once: each sees a prefix of one shared context, and its own earlier steps.

In drafting a recursion that begins with pair `p` has in its cache the target's pairs before `p`, and then what its own
steps append. In training the recursions of all anchors of a document run side by side: their context is shared and
masked, their own keys are scored one to one, so nothing grows with the square of their number.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from .configuration_mtp import MtpConfig

RECURSION = "mtp_recursion"


class Recursion:
    """Stands for the cache and for the mask of the layer while recursions run.

    Args:
        context: keys of the target's pairs, `[b, 1, s, head_dim]`.
        first_pairs: `[b, A]`, the pair with which each recursion begins. window: of the sliding attention.
    """

    def __init__(self, context: torch.Tensor, first_pairs: torch.LongTensor, window: int):
        self.context = context
        self.first_pairs, self.window = first_pairs, window
        self.steps: list[torch.Tensor] = []  # keys of the steps so far, each [b, A, head_dim]
        self.hidden: torch.BoolTensor | None = None  # [b, 1, A, s], what of the context this step does not see

    def begin_step(self, position_ids: torch.LongTensor) -> None:
        """The next step stands at `position_ids` `[b, A]`: it sees pairs before the first, and within the window."""
        keys = torch.arange(self.context.shape[2], device=position_ids.device)  # [s]
        before = keys < self.first_pairs.unsqueeze(-1)  # [b, A, s]
        near = position_ids.unsqueeze(-1) - keys < self.window
        self.hidden = ~(before & near).unsqueeze(1)

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, **kwargs: Any) -> tuple:
        """Takes the keys of this step `[b, 1, A, head_dim]`, as a cache does."""
        self.steps.append(keys[:, 0])
        return keys, values


def recursion_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Recursion,
    scaling: float,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """V4's attention, sinks included, of `query` `[b, h, A, head_dim]` over the context and the own steps.

    Returns:
        `[b, A, h, head_dim]`, and no weights.
    """
    b, h, count, width = query.shape
    context = attention_mask.context[:, 0].to(query.dtype)  # [b, s, head_dim]
    steps = torch.stack(attention_mask.steps, dim=2).to(query.dtype)  # [b, A, k, head_dim]
    shared = (query.reshape(b, h * count, width) @ context.transpose(1, 2)).view(b, h, count, -1) * scaling
    own = (query.transpose(1, 2) @ steps.transpose(2, 3)).transpose(1, 2) * scaling  # [b, h, A, k]
    shared = shared.float().masked_fill(attention_mask.hidden, -torch.inf)
    sinks = module.sinks.float().view(1, h, 1, 1).expand(b, h, count, 1)
    weights = torch.cat([shared, own.float(), sinks], dim=-1).softmax(dim=-1).to(query.dtype)
    shared, own, _ = weights.split([context.shape[1], steps.shape[2], 1], dim=-1)
    output = (shared.reshape(b, h * count, -1) @ context).view(b, h, count, width).transpose(1, 2)
    return output + own.transpose(1, 2) @ steps, None  # [b, A, h, head_dim]


AttentionInterface.register(RECURSION, recursion_attention_forward)


@contextmanager
def recursion_attention(config: MtpConfig) -> Iterator[None]:
    """While it is entered, the layer's attention takes a [`Recursion`]."""
    implementation = config._attn_implementation
    config._attn_implementation = RECURSION
    try:
        yield
    finally:
        config._attn_implementation = implementation
