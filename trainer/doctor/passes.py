"""Checks of the two passes: what training's pass and the decoding loop give the drafter, and take from it."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ...generation_hyperdflash import GenerationStatistics
from ..attention import block_sparse_attention
from ..states import TargetModules
from .case import Case
from .walks import Walk

# Relative error of a token's state up to which two ways to compute it agree, and the share of tokens that may exceed
# it: near a tie the target's router takes other experts
STATE_TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
STATE_OUTLIERS = 0.05
# Logits are tied that are not further apart than this many roundings of the largest of them. Of the other drafts a
# share may differ, where the router took other experts.
TIE_ROUNDINGS = {torch.float32: 32, torch.float16: 8, torch.bfloat16: 4}
STRAY_DRAFTS = {torch.float32: 0.0, torch.float16: 0.02, torch.bfloat16: 0.02}


@dataclass
class Acceptance:
    """Teacher-forced acceptance beside that of the decoding loop, over all rounds of all texts.

    Attributes:
        training, decoding: accepted drafts of each round.
        drafts: how many were compared. stray: how many of them may differ by more than rounding, for their dtype.
        near_ties: of the drafts that differ while their logits differ by rounding only, how far apart these are.
        differences: the others: row, anchor, slot, the token in training, the one in decoding, and how far apart
            their logits are in the pass where they are further apart.
        statistics: the decoding loop's own record.
    """

    training: list[int]
    decoding: list[int]
    drafts: int
    stray: int
    near_ties: list[float]
    differences: list[dict[str, Any]]
    statistics: GenerationStatistics

    def per_slot(self, accepted: list[int]) -> list[float]:
        """Share of all rounds in which the first, second, ... draft was accepted."""
        slots = range(self.statistics.num_draft_tokens)
        return [sum(count > slot for count in accepted) / max(len(accepted), 1) for slot in slots]

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "rounds": len(self.decoding),
            "drafts": self.drafts,
            "differing_drafts": len(self.differences),
            "tolerated_drafts": self.stray,
            "near_ties": len(self.near_ties),
            "largest_near_tie": max(self.near_ties, default=0.0),
            "first_difference": self.differences[0] if self.differences else None,
            "training_per_slot": self.per_slot(self.training),
            "decoding_per_slot": self.per_slot(self.decoding),
            "statistics": self.statistics.to_dict(),
        }


def tie(logits: torch.Tensor, dtype: torch.dtype) -> float:
    """How far apart two of `logits` may be and still count as equal in a model of `dtype`."""
    return TIE_ROUNDINGS[dtype] * torch.finfo(dtype).eps * logits.abs().max().item()


@torch.no_grad()
def measure_acceptance(case: Case) -> Acceptance:
    """Compares the drafts of both passes, token by token."""
    modules, geometry = TargetModules.of(case.target), case.drafter.config.geometry
    found = Acceptance([], [], 0, 0, [], [], GenerationStatistics(geometry.num_draft_tokens))
    for row, text in enumerate(case.walks):
        found.statistics += text.statistics
        found.decoding += text.statistics.accepted_per_round
        for index, each in enumerate(text.rounds):
            count = len(each.drafts)
            taught = modules.logits(text.hidden_states[index, :count]).float()  # [drafts, vocab]
            served = modules.logits(each.hidden_states).float()
            tokens = taught.argmax(dim=-1)
            right = (tokens == text.labels[index, :count]) & text.counts[index, :count]
            found.training.append(int(right.cumprod(dim=0).sum()))
            labels = text.labels[index].tolist()
            for slot, (mine, theirs) in enumerate(zip(tokens.tolist(), each.drafts)):
                if case.drafter.config.sequential_head_size and each.drafts[:slot] != labels[:slot]:
                    break  # training goes on behind the text, decoding behind its own drafts
                found.drafts += 1
                if mine == theirs:
                    continue
                margin = max(
                    abs(float(taught[slot, mine] - taught[slot, theirs])),
                    abs(float(served[slot, mine] - served[slot, theirs])),
                )
                if margin <= tie(taught[slot], case.drafter.dtype):
                    found.near_ties.append(margin)
                    continue
                slot += geometry.first_slot
                place = {"row": row, "anchor": each.anchor, "slot": slot}
                found.differences.append({**place, "training": mine, "decoding": theirs, "margin": margin})
    found.stray = int(STRAY_DRAFTS[case.drafter.dtype] * found.drafts)
    return found


def check_acceptance(case: Case) -> Generator[str, None, str]:
    """Training's pass and the decoding loop draft the same tokens, and count the same of them as accepted."""
    found = case.acceptance
    if found is None:
        yield "found no draft in any text, wanted some: take rows with longer answers"
        return ""
    if len(found.differences) > found.stray:
        first = found.differences[0]
        most = f" but for {found.stray}" if found.stray else ""
        yield (
            f"found {len(found.differences)} of {found.drafts} drafts that differ, the first in row {first['row']} "
            f"behind anchor {first['anchor']} in slot {first['slot']}: token {first['training']} in training, "
            f"{first['decoding']} in decoding, their logits {first['margin']:.3g} apart; wanted the same{most}: the "
            "other lines say where the passes part"
        )
    differing = sum(mine != theirs for mine, theirs in zip(found.training, found.decoding))
    if differing > len(found.near_ties) + found.stray:
        taught, served = (
            " ".join(f"{share:.2f}" for share in found.per_slot(counts)) for counts in (found.training, found.decoding)
        )
        yield (
            f"found other accepted lengths in {differing} of {len(found.decoding)} rounds: by slot {taught} in "
            f"training, {served} in decoding; wanted the same"
        )
    but = []
    if found.near_ties:
        but.append(f"{len(found.near_ties)} near-ties (logits at most {max(found.near_ties):.2g} apart)")
    if found.differences:
        but.append(f"{len(found.differences)} others (up to {found.stray} are the router's in {case.drafter.dtype})")
    return (
        f"{found.drafts} drafts of {len(found.decoding)} rounds are the same in training and decoding"
        f"{' but for ' + ' and '.join(but) if but else ''}; accepted length {found.statistics.accepted_length:.2f}"
    )


def check_labels(case: Case) -> Generator[str, None, str]:
    """Slot `k` is taught the token at `a + k`, which is where decoding puts its draft."""
    geometry, wrong = case.drafter.config.geometry, 0
    offsets = torch.tensor([geometry.label_offset(slot) for slot in geometry.draft_slots])
    for text in case.walks:
        ids = text.ids[0].cpu()
        places = text.anchors[0].cpu().unsqueeze(-1) + offsets  # [R, D]
        inside = places < len(ids)
        wanted = ids[places.clamp(max=len(ids) - 1)].masked_fill(~inside, -100)
        wrong += int((text.labels.cpu() != wanted).sum())
    rule = f"slot {geometry.first_slot} is taught the token at anchor + 1, and so on"
    if wrong:
        yield f"found {wrong} labels in training against the rule that {rule}; wanted none: repair the labels"
    return rule


def check_positions(case: Case) -> Generator[str, None, str]:
    """Context and slots stand at the same positions in both passes, and where the geometry says."""
    geometry, size = case.drafter.config.geometry, case.drafter.config.block_size
    for text in case.walks:
        seen = 0
        for index, each in enumerate(text.rounds):
            taught, served = _slots(text.training.positions, index, text, size), each.call.positions
            wanted = [geometry.position(each.anchor, slot) for slot in range(size)]
            for where, found in (("training", taught), ("decoding", served[-size:])):
                if found.tolist() != wanted:
                    yield (
                        f"found the slots behind anchor {each.anchor} at {found.tolist()} in {where}, wanted "
                        f"{wanted}: repair the position ids of {where}"
                    )
                    return ""
            if served[:-size].tolist() != list(range(seen, each.anchor)):
                yield (
                    f"found the new context behind anchor {each.anchor} at {served[:-size].tolist()} in decoding, "
                    f"wanted {seen} to {each.anchor - 1}: every token before the anchor once"
                )
                return ""
            seen = each.anchor
    return "slots and context stand at the same positions in training and decoding"


def _slots(values: torch.Tensor, index: int, text: Walk, size: int) -> torch.Tensor:
    """The entries of the block of round `index` in `values`, over `[context ; slots]` or over all slots."""
    return values[-len(text.rounds) * size :][index * size : (index + 1) * size]


def check_rotary(case: Case) -> Generator[str, None, str]:
    """The rotary embedding is the one that the config describes, and rotates alike in both passes."""
    drafter, size = case.drafter, case.drafter.config.block_size
    rope = drafter.config.rope_parameters
    fresh = type(drafter.rotary_emb)(drafter.config).inv_freq.float().cpu()
    found = drafter.rotary_emb.inv_freq.float().cpu()
    if found.shape != fresh.shape or not torch.allclose(found, fresh, rtol=1e-5, atol=0):
        yield (
            f"found other frequencies in the drafter than those of rope_parameters {rope}, wanted these: load it in "
            "its dtype, rather than casting it"
        )
    for text in case.walks:
        for index, each in enumerate(text.rounds):
            taught, served = _slots(text.training.rotation, index, text, size), each.call.rotation[-size:]
            if not torch.allclose(taught.float(), served.float(), atol=1e-4):
                yield (
                    f"found the block behind anchor {each.anchor} rotated otherwise in decoding than in training, "
                    f"wanted the same: both take rope_parameters {rope} and the same positions"
                )
                return ""
    return f"type {rope.get('rope_type')}, base {rope.get('rope_theta')}, in training and decoding"


@torch.no_grad()
def check_layers(case: Case) -> Generator[str, None, str]:
    """Both passes give the drafter the states that the config names, as they leave the target's layers."""
    config, text, streams = case.drafter.config, case.walks[0], case.streams
    tolerance = STATE_TOLERANCE[case.drafter.dtype]
    source = "pre_hc_head" if config.context_source == "pre_hc_head" else f"layers {config.target_layer_ids}"
    wanted = streams.context(tuple(config.target_layer_ids))[0]  # [s, m, L * d]
    served = torch.cat([each.call.context for each in text.rounds])  # [n, m, L * d]
    for where, found in (("training", text.states[0]), ("decoding", served)):
        count = min(len(found), len(wanted))
        if not apart(found[:count], wanted[:count], tolerance):
            continue
        known = _known_states(case)
        parts = found[:count].split(streams.layers[-1].shape[-1], dim=-1)  # [n, m, d] each
        described = [
            next((name for name, states in known if not apart(part, states[:count], tolerance)), "states of no layer")
            for part in parts
        ]
        yield f"found {', '.join(described)} as the context in {where}, wanted {source}: repair what {where} captures"
    return f"{source} is the context in training and decoding"


def _known_states(case: Case) -> list[tuple[str, torch.Tensor]]:
    """Names and values `[s, m, d]` of all states that a context may have been taken from."""
    norm, layers = case.target.get_decoder().norm, case.streams.layers
    names = {index: f"layer {index}" for index in layers}
    names |= {-1: "the embedding", max(layers): "the collapsed, normed state"}
    plain = [(names[index], states[0]) for index, states in layers.items()]
    return plain + [(f"{name} behind the final norm", norm(states)) for name, states in plain]


def apart(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> bool:
    """Whether more tokens `[n, ...]` than a few differ by more than rounding, or in shape."""
    if found.shape != wanted.shape:
        return True
    found, wanted = found.float().flatten(1), wanted.float().flatten(1)
    error = (found - wanted).norm(dim=1) / wanted.norm(dim=1).clamp(min=1e-20)
    return bool((~(error <= tolerance)).float().mean() > STATE_OUTLIERS)


@torch.no_grad()
def check_lm_head(case: Case) -> Generator[str, None, str]:
    """Drafts go through the target's own LM head, and what training borrows gives the target's own logits."""
    modules, dtype = TargetModules.of(case.target), case.drafter.dtype
    residual = case.streams.layers[max(case.streams.layers) - 1]  # [1, s, m, d]
    logits = modules.logits(modules.teacher_states(residual, "hc_head"))
    if apart(logits[0], case.streams.logits[0], STATE_TOLERANCE[dtype]):
        yield (
            "found lm_head(norm(hc_head(residual))) apart from the target's logits, wanted the same: training borrows "
            "other modules than the target runs"
        )
    drafts = wrong = 0
    for each in (each for text in case.walks for each in text.rounds):
        for slot, token in enumerate(each.drafts):
            logits = modules.logits(each.hidden_states[slot]).float()  # [vocab]
            wrong += float(logits.max() - logits[token]) > tie(logits, dtype)
            drafts += 1
    if wrong:
        yield (
            f"found {wrong} of {drafts} drafts in decoding that are not the likeliest token of the target's LM head, "
            "wanted none: the loop runs another head, or takes other slots"
        )
    return "training and decoding draft with the target's own norm and LM head"


@torch.no_grad()
def check_causality(case: Case) -> Generator[str, None, str]:
    """A block sees itself in both directions, the context before its anchor, and nothing else.

    Tried out on the inputs of both passes, by changing one of them after another.
    """
    text, size = case.walks[0], case.drafter.config.block_size
    index, first = len(text.rounds) // 2, text.rounds[0]

    def outputs(arguments: dict[str, Any], name: str | None = None, where: slice = slice(0)) -> torch.Tensor:
        if name is not None:  # the vectors at `where` turned, at the same length
            value = arguments[name].clone()
            value[:, where] = value[:, where].roll(1, dims=-1)
            arguments = {**arguments, name: value}
        with block_sparse_attention(case.drafter.config):  # what training's mask was made for
            return case.drafter(**arguments).last_hidden_state[0]  # [slots, d]

    for where, arguments, anchor, start in (
        ("training", text.training.arguments, text.rounds[index].anchor, index * size),
        ("decoding", {**first.call.arguments, "cache": None}, first.anchor, 0),
    ):
        own, before = slice(start, start + size), outputs(arguments)
        changed = outputs(arguments, "noise_embeds", slice(own.stop - 1, own.stop)) != before
        sees_last = changed.any(dim=-1)  # [slots]
        if not sees_last[own].all():
            blind = (~sees_last[own]).nonzero().flatten().tolist()
            yield (
                f"found slots {blind} that do not see their block's last slot in {where}, wanted all: attention "
                f"inside a block is bidirectional; repair the mask of {where}"
            )
        if sees_last[: own.start].any() or sees_last[own.stop :].any():
            yield f"found blocks that see another block in {where}, wanted none: repair the mask of {where}"
        if torch.equal(outputs(arguments, "context_hidden_states", slice(anchor - 1, anchor))[own], before[own]):
            yield f"found a block that does not see the token before its anchor in {where}, wanted it in sight"
        later = outputs(arguments, "context_hidden_states", slice(anchor, None))[own]
        if not torch.allclose(later, before[own], rtol=1e-4, atol=1e-5 * before.abs().max().item()):
            yield (
                f"found a block that sees the context at or behind its anchor in {where}, wanted it out of sight: "
                f"decoding has no state there; repair the mask of {where}"
            )
    return "blocks see themselves in both directions, and of the context what is before their anchor"


def check_mask_token(case: Case) -> Generator[str, None, str]:
    """The mask token is a token of its own, and its embedding fills the slots behind the anchor in both passes."""
    token, size = case.drafter.config.mask_token_id, case.drafter.config.block_size
    own = None if case.tokenizer is None else case.tokenizer.mask_token_id
    if own is not None and own != token:
        yield f"mask_token_id: found {token}, wanted {own}, the mask token of the target's tokenizer; write that"
    rows = sum(token in prompt.row_ids for prompt in case.prompts)
    texts = sum(token in text.ids[0].tolist() for text in case.walks)
    if rows or texts:
        yield (
            f"mask_token_id: found {token}, which occurs in {rows} rows and {texts} texts of the target, wanted a "
            "token that no text holds; write what training used"
        )
    yield from _embeddings(case, token, size)
    return f"{token}, in no text, fills the slots in training and decoding"


@torch.no_grad()
def _embeddings(case: Case, token: int, size: int) -> Iterable[str]:
    embedding = case.target.get_input_embeddings()
    for text in case.walks:
        ids = torch.full((len(text.rounds), size), token, device=text.ids.device)
        ids[:, 0] = text.ids[0, text.anchors[0]]
        wanted = embedding(ids)  # [R, B, d]
        taught = text.training.noise_embeds.unflatten(0, (-1, size))
        served = torch.stack([each.call.noise_embeds for each in text.rounds])
        for where, found in (("training", taught), ("decoding", served)):
            if not torch.equal(found, wanted.to(found.dtype)):
                yield (
                    f"found blocks in {where} that are not the embeddings of [anchor, mask token, ...], wanted the "
                    f"target's own: repair how {where} fills them"
                )
                return
