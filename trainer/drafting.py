"""The drafter's forward in training: the blocks of all anchors of a document at once, as decoding would draft them."""

from __future__ import annotations

import torch
from torch import nn

from ..configuration_hyperdflash import BlockGeometry, HyperDFlashConfig
from .attention import attention_masks
from .blocks import position_ids
from .states import DocumentStates, TargetModules


def draft_hidden_states(
    model: nn.Module,
    modules: TargetModules,
    states: DocumentStates,
    input_ids: torch.LongTensor,
    anchors: torch.LongTensor,
) -> torch.Tensor:
    """What the target's LM head takes to draft behind each anchor.

    Args:
        model: the drafter, or its wrapper for distributed training.
        modules: what it borrows from the target.
        states: the target's states at `input_ids`.
        input_ids: `[b, s]`, one document a row, padded on the right. anchors: `[b, A]`, 0 for none.

    Returns:
        `[b, A, D, d]`, the drafter's output on the draft slots.
    """
    drafter = getattr(model, "module", model)
    config, geometry = drafter.config, drafter.config.geometry
    dtype = next(drafter.layers.parameters()).dtype
    noise_embeds = modules.embed_blocks(input_ids.gather(1, anchors), config.mask_token_id, geometry.block_size)
    outputs = model(
        noise_embeds=noise_embeds.to(dtype),  # [b, A * B, d]
        context_hidden_states=states.context.to(dtype),  # or what the reducer makes of them is rounded as they were
        attention_mask=attention_masks(anchors, input_ids.shape[1], config, dtype),
        position_ids=position_ids(anchors, input_ids.shape[1], geometry),
        previous_embeds=previous_embeds(modules, config, input_ids, anchors, geometry, dtype),
    )
    hidden_states = outputs.last_hidden_state.unflatten(1, (-1, geometry.block_size))  # [b, A, B, d]
    return hidden_states[:, :, geometry.first_slot :]


def previous_embeds(
    modules: TargetModules,
    config: HyperDFlashConfig,
    input_ids: torch.LongTensor,
    anchors: torch.LongTensor,
    geometry: BlockGeometry,
    dtype: torch.dtype,
) -> torch.Tensor | None:
    """For a sequential head, embeddings of the text's token before the one that each slot predicts.

    A draft counts only while all drafts before it equal the text: it then stands behind these tokens in decoding too.

    Args:
        input_ids: `[b, s]`. anchors: `[b, A]`.

    Returns:
        `[b, A * B, d]`; `None` for a drafter without such a head.
    """
    if not config.sequential_head_size:
        return None
    offsets = [geometry.label_offset(slot) - 1 for slot in range(geometry.block_size)]
    places = anchors.unsqueeze(-1) + torch.tensor(offsets, device=anchors.device)  # [b, A, B]
    tokens = input_ids.gather(1, places.clamp(0, input_ids.shape[1] - 1).flatten(1))  # [b, A * B]
    return modules.embedding(tokens).to(dtype)


def teacher_positions(anchors: torch.LongTensor, geometry: BlockGeometry, num_positions: int) -> torch.LongTensor:
    """Where the target predicts the tokens of the first `num_positions` draft slots: `[b, A, P]`.

    It is the position before each label: slot `k` is taught by the target's state at `a + k - 1`.
    """
    offsets = [geometry.label_offset(slot) - 1 for slot in geometry.draft_slots[:num_positions]]
    return anchors.unsqueeze(-1) + torch.tensor(offsets, device=anchors.device)
