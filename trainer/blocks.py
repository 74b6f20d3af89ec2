"""Where the blocks of a training step stand: anchors, slots, labels, attention. Pure functions on `BlockGeometry`.

A batch holds one document a row, padded on the right. A block may start at every *eligible* anchor; a step draws some
of them and trains all their blocks in one pass behind one shared context. Anchor 0 is never eligible, so 0 fills up
the rows with fewer anchors than the others.
"""

from __future__ import annotations

import hashlib

import torch

from ..configuration_hyperdflash import BlockGeometry

IGNORED_LABEL = -100


def eligible_anchors(labels: torch.LongTensor, geometry: BlockGeometry) -> torch.BoolTensor:
    """Where a block may start.

    A position is eligible if the first draft behind it is a supervised token of the document, and if it is not the
    document's first: the context, the positions strictly before the anchor, must hold something. In decoding the
    first anchor of an answer is its first token, which comes from the prefill; eligible is also the token before it,
    the last one of the prompt.

    Args:
        labels: `[b, s]`, token ids, -100 where a token is not supervised (prompt, padding).

    Returns:
        `[b, s]`.
    """
    positions = torch.arange(labels.shape[1], device=labels.device)
    target = positions + geometry.label_offset(geometry.first_slot)  # [s], the token that the first draft predicts
    inside = target < labels.shape[1]
    supervised = labels[:, target.clamp(max=labels.shape[1] - 1)] != IGNORED_LABEL  # [b, s]
    return supervised & inside & (positions >= 1)


def document_generator(document: torch.LongTensor, seed: int, step: int) -> torch.Generator:
    """The random numbers of one document in one step: a function of `seed`, `step` and the document's token ids alone.

    So a resumed run draws the same anchors, and a document's anchors depend neither on its row, nor on its neighbours,
    nor on the micro-batch or the rank that it lands in.
    """
    tokens = document.to("cpu", torch.int64).contiguous().numpy().tobytes()
    digest = hashlib.blake2b(tokens, digest_size=8, key=f"{seed}/{step}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def draw_anchors(
    input_ids: torch.LongTensor,
    labels: torch.LongTensor,
    attention_mask: torch.LongTensor,
    geometry: BlockGeometry,
    num_anchors: int,
    seed: int,
    step: int,
) -> torch.LongTensor:
    """Draws up to `num_anchors` eligible anchors of each document, uniformly and without replacement.

    Args:
        input_ids, labels, attention_mask: `[b, s]`, padded on the right.
        num_anchors: the most anchors of a document.
        seed, step: see [`document_generator`].

    Returns:
        `[b, A]`, ascending, `A` being the most anchors that a document of the batch got; then zeros.
    """
    eligible = eligible_anchors(labels, geometry).cpu()
    lengths = attention_mask.sum(dim=1).tolist()
    rows = []
    for row, length in enumerate(lengths):
        candidates = eligible[row].nonzero().squeeze(-1)
        if len(candidates) > num_anchors:
            generator = document_generator(input_ids[row, :length], seed, step)
            candidates = candidates[torch.randperm(len(candidates), generator=generator)[:num_anchors]].sort().values
        rows.append(candidates)
    anchors = torch.zeros(len(rows), max(1, *map(len, rows)) if rows else 1, dtype=torch.long)  # [b, A]
    for row, candidates in enumerate(rows):
        anchors[row, : len(candidates)] = candidates
    return anchors.to(input_ids.device)


def slot_labels(
    labels: torch.LongTensor, anchors: torch.LongTensor, geometry: BlockGeometry
) -> tuple[torch.LongTensor, torch.BoolTensor]:
    """The token that each draft slot predicts, and whether it counts.

    A slot counts only if it and all earlier draft slots of its block predict supervised tokens: in decoding a draft
    behind a refused one, or behind the end of an answer, is never looked at.

    Args:
        labels: `[b, s]`, -100 where a token is not supervised. anchors: `[b, A]`, 0 for none.

    Returns:
        `[b, A, D]` token ids, -100 where the slot does not count, and `[b, A, D]`: whether it counts, `D` being
        `geometry.num_draft_tokens`.
    """
    offsets = [geometry.label_offset(slot) for slot in geometry.draft_slots]
    target = anchors.unsqueeze(-1) + torch.tensor(offsets, device=anchors.device)  # [b, A, D]
    inside = target < labels.shape[1]
    found = labels.gather(1, target.clamp(max=labels.shape[1] - 1).flatten(1)).view(target.shape)
    counts = inside & (found != IGNORED_LABEL) & (anchors >= 1).unsqueeze(-1)
    counts = counts.cumprod(dim=-1).bool()  # [b, A, D]
    return found.masked_fill(~counts, IGNORED_LABEL), counts


def position_ids(anchors: torch.LongTensor, context_length: int, geometry: BlockGeometry) -> torch.LongTensor:
    """Positions of `[context ; blocks]`: `[b, s + A * B]` for anchors `[b, A]`."""
    context = torch.arange(context_length, device=anchors.device).expand(len(anchors), -1)
    return torch.cat([context, _slot_positions(anchors, geometry)], dim=1)


def block_mask(
    anchors: torch.LongTensor,
    context_length: int,
    geometry: BlockGeometry,
    window: int | None = None,
    context_start: int = 0,
) -> torch.BoolTensor:
    """Which key each slot of each block sees, over `[context ; blocks]`.

    * context: the positions strictly before the block's anchor, and within the sliding `window` if there is one;
    * blocks: all slots of the same block, in both directions.

    So padding on the right is never seen, and every slot sees at least its own block.

    Args:
        anchors: `[b, A]`. context_length: `s`. context_start: leaves out the positions before.

    Returns:
        `[b, 1, A * B, s + A * B]`, true where seen: broadcast over the heads.
    """
    key_positions = torch.arange(context_start, context_length, device=anchors.device)  # [s]
    query_positions = _slot_positions(anchors, geometry).unsqueeze(-1)  # [b, A * B, 1]
    query_anchors = anchors.repeat_interleave(geometry.block_size, dim=1).unsqueeze(-1)  # [b, A * B, 1]
    context = geometry.sees_context(key_positions, query_anchors, query_positions, window)  # [b, A * B, s]
    blocks = geometry.sees_slot(query_anchors, query_anchors.transpose(1, 2))  # [b, A * B, A * B]
    return torch.cat([context, blocks], dim=-1).unsqueeze(1)


def _slot_positions(anchors: torch.LongTensor, geometry: BlockGeometry) -> torch.LongTensor:
    slots = torch.arange(geometry.block_size, device=anchors.device)
    return geometry.position(anchors.unsqueeze(-1), slots).flatten(1)  # [b, A * B]
