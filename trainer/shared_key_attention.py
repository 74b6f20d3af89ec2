"""DeepSeek-V4's attention without a copy of its one key head for each query head: `attn_implementation="shared_key"`.

Importing this module registers the name with transformers, for any model of this process.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask


def shared_key_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers' own attention of V4 computes, sinks included, to rounding; for inference, without dropout.

    Args:
        query: `[b, h, s, d]`. key, value: `[b, 1, n, d]`. attention_mask: added to the scores, `[b, 1, s, n]`.

    Returns:
        The output `[b, s, h, d]`, and no weights.
    """
    b, h, s, d = query.shape
    scores = (query.reshape(b, h * s, d) @ key[:, 0].transpose(1, 2)).view(b, h, s, -1) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    sinks = module.sinks.view(1, h, 1, 1).expand(b, h, s, 1)
    weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1].to(value.dtype)  # [b, h, s, n]
    output = weights.reshape(b, h * s, -1) @ value[:, 0]
    return output.view(b, h, s, d).transpose(1, 2), None


AttentionInterface.register("shared_key", shared_key_attention)
AttentionMaskInterface.register("shared_key", eager_mask)

__all__ = ["shared_key_attention"]
