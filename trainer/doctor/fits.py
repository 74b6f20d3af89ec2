"""How well a drafter fits texts as it is configured, and how well if it were configured otherwise.

A config that was edited, or that lost a field, deceives training's pass and the decoding loop alike. The weights know
better: a trained drafter fits best the setting in which it was trained. So the texts are drafted under the configured
setting, and under each of the classic mistakes, and the cross-entropies are compared.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from ...configuration_hyperdflash import BlockGeometry, HyperDFlashConfig
from ..attention import additive
from ..blocks import block_mask, position_ids
from ..drafting import previous_embeds
from ..states import TargetModules

LEAST_GAIN = 0.05  # nats a draft: what a better setting must win at least
STANDARD_ERRORS = 3.0  # and how many standard errors of the mean
MOST_ANCHORS = 64  # of one text


@dataclass(frozen=True)
class Setting:
    """A way to draft. The fields that are not given are as configured.

    Attributes:
        check: whose business it is. what: the setting in words. advice: what to do if the drafter fits it best.
        layer_ids: whose output is the context; -1 is the embedding, the number of layers the collapsed, normed state.
        normed: the context has been through the target's final norm.
        rope_parameters: of the drafter; `None`: its own rotary embedding as it is.
        position_shift: of the slots against the context. label_shift: of the labels against the slots.
        causal: a slot sees no later slot. sees_anchor: the context holds the anchor's state as well.
    """

    check: str
    what: str
    advice: str
    geometry: BlockGeometry
    mask_token_id: int
    layer_ids: tuple[int, ...]
    normed: bool = False
    rope_parameters: dict | None = None
    position_shift: int = 0
    label_shift: int = 0
    causal: bool = False
    sees_anchor: bool = False


def configured(config: HyperDFlashConfig) -> Setting:
    """What the drafter's config says."""
    return Setting("fit", "as configured", "", config.geometry, config.mask_token_id, tuple(config.target_layer_ids))


def alternatives(
    config: HyperDFlashConfig, target: PreTrainedModel, other_mask_tokens: tuple[int, ...] = ()
) -> Iterator[Setting]:
    """The settings in which a drafter may have been trained by mistake, or which a config may have lost.

    Some come close to each other: a label one token later is nearly a slot one position earlier. The more frequent
    mistake comes first.
    """
    base, retrain = configured(config), "train it again"

    def other(check: str, what: str, advice: str, **fields) -> Setting:
        return replace(base, check=check, what=what, advice=advice, **fields)

    for shift in (-1, 1):
        what = f"slot k with the token at a+k{shift:+d}"
        yield other("labels", what, f"labels were off by one in training: {retrain}", label_shift=shift)
    yield other("layers", "states behind the target's final norm", f"training read them there: {retrain}", normed=True)
    names = {-1: "embedding", config.target_num_hidden_layers: "collapsed, normed state"}
    for shift in (-1, 1):
        layers = tuple(layer + shift for layer in base.layer_ids)
        what = ", ".join(str(names.get(layer, layer)) for layer in layers)
        advice = f"set target_layer_ids to what training read, or {retrain}"
        yield other("layers", f"target_layer_ids [{what}]", advice, layer_ids=layers)
    rope = getattr(target.config.get_text_config(), "rope_parameters", None) or {}
    parts = [part for part in (rope, *rope.values()) if isinstance(part, dict)]
    own = config.rope_parameters
    bases = {float(part["rope_theta"]) for part in parts if "rope_theta" in part} | {config.default_theta}
    for theta in sorted(bases):
        if own.get("rope_type") != "default" or own.get("rope_theta") != theta:
            advice = f"set rope_parameters to what training used, or {retrain}"
            plain = {"rope_type": "default", "rope_theta": theta}
            yield other("rotary", f"plain rotary of base {theta:g}", advice, rope_parameters=plain)
    yield other("causality", "slots that see no later slot", f"training was causal: {retrain}", causal=True)
    advice = f"training saw a state that decoding does not have: {retrain}"
    yield other("causality", "a context that holds the anchor's state", advice, sees_anchor=True)
    for token in sorted({*other_mask_tokens} - {config.mask_token_id}):
        advice = f"set mask_token_id to what training used, or {retrain}"
        yield other("mask_token", f"mask_token_id {token}", advice, mask_token_id=token)
    for size in range(max(config.block_size - 2, 2), config.block_size + 3):
        if size != config.block_size:
            geometry = replace(base.geometry, block_size=size)
            advice = f"set block_size to what training used, or {retrain}"
            yield other("block", f"block_size {size}", advice, geometry=geometry)
    for shift in (-1, 1):
        what = f"slot k at position a+k{shift:+d}"
        yield other("positions", what, f"positions were off by one in training: {retrain}", position_shift=shift)


@dataclass
class Streams:
    """The target's residual streams in one plain forward over a text, seen at its own modules.

    Attributes:
        layers: `{-1: embedding, 0: output of layer 0, ..., L - 1: ..., L: collapsed and normed}`, `[1, s, m, d]` each.
        logits: `[1, s, vocab]`.
    """

    layers: dict[int, torch.Tensor]
    logits: torch.Tensor

    def context(self, layer_ids: tuple[int, ...]) -> torch.Tensor:
        """`[1, s, m, L * d]`."""
        return torch.cat([self.layers[layer] for layer in layer_ids], dim=-1)


@torch.no_grad()
def read_streams(target: PreTrainedModel, ids: torch.LongTensor) -> Streams:
    """Runs the target over `ids` `[1, s]` without a cache."""
    decoder = target.get_decoder()
    layers: dict[int, torch.Tensor] = {}

    def keep(index):
        def hook(module, args, output):
            layers[index] = output

        return hook

    def keep_embedding(module, args):
        layers[-1] = args[0]

    handles = [decoder.layers[0].register_forward_pre_hook(keep_embedding)]
    handles += [layer.register_forward_hook(keep(index)) for index, layer in enumerate(decoder.layers)]
    handles += [decoder.norm.register_forward_hook(keep(len(decoder.layers)))]
    try:
        logits = target(input_ids=ids, use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
    last = len(decoder.layers)
    layers[last] = layers[last].unsqueeze(2).expand_as(layers[last - 1])
    return Streams(layers, logits)


@torch.no_grad()
def cross_entropies(
    drafter: PreTrainedModel,
    modules: TargetModules,
    streams: Streams,
    ids: torch.LongTensor,
    anchors: torch.LongTensor,
    setting: Setting,
) -> torch.Tensor:
    """Nats of the text's tokens under the drafts of a setting, `[A, D]`; not a number behind the end of the text.

    Args:
        ids: `[1, s]`. anchors: `[1, A]`.
    """
    config, geometry, length = drafter.config, setting.geometry, ids.shape[1]
    size, dtype = geometry.block_size, next(drafter.layers.parameters()).dtype
    noise = modules.embed_blocks(ids.gather(1, anchors), setting.mask_token_id, size).to(dtype)  # [1, A * B, d]
    context = streams.context(setting.layer_ids)
    if setting.normed:
        width = streams.layers[-1].shape[-1]
        context = modules.norm(context.unflatten(-1, (-1, width))).flatten(3)
    positions = position_ids(anchors, length, geometry)
    positions[:, length:] += setting.position_shift

    slots = torch.arange(size, device=ids.device).repeat(anchors.shape[1])  # [A * B]
    block_anchors = anchors[0].repeat_interleave(size).unsqueeze(-1)  # [A * B, 1]
    masks = {}
    for layer_type in set(config.layer_types):
        window = config.sliding_window if layer_type == "sliding_attention" else None
        visible = block_mask(anchors, length, geometry, window)  # [1, 1, A * B, s + A * B]
        if setting.causal:
            visible[..., length:] &= slots <= slots.unsqueeze(-1)
        if setting.sees_anchor:
            visible[..., :length] |= torch.arange(length, device=ids.device) == block_anchors
        masks[layer_type] = additive(visible, dtype, torch.finfo(dtype).min)

    own = drafter.rotary_emb
    if setting.rope_parameters is not None:
        changed = copy.deepcopy(config)
        changed.rope_parameters = setting.rope_parameters
        drafter.rotary_emb = type(own)(changed).to(ids.device)
    try:
        known = previous_embeds(modules, config, ids, anchors, geometry, dtype)
        hidden = drafter(
            noise, context, attention_mask=masks, position_ids=positions, previous_embeds=known
        ).last_hidden_state
    finally:
        drafter.rotary_emb = own
    hidden = hidden[0].unflatten(0, (-1, size))[:, geometry.first_slot :]  # [A, D, d]
    logits = modules.logits(hidden).float()

    offsets = [geometry.label_offset(slot) + setting.label_shift for slot in geometry.draft_slots]
    places = anchors[0].unsqueeze(-1) + torch.tensor(offsets, device=ids.device)  # [A, D]
    labels = ids[0, places.clamp(max=length - 1)].masked_fill(places >= length, -100)
    nats = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")  # [A, D]
    return nats.masked_fill(labels == -100, float("nan"))


@dataclass
class Fit:
    """A setting beside the configured one, over all texts.

    Attributes:
        nats: mean cross-entropy of a draft.
        gain: how much lower it is than the configured setting's; a slot that this one lacks gains nothing.
        error: standard error of `gain`; blocks overlap, so only one in `D` counts as independent.
    """

    setting: Setting
    nats: float
    gain: float
    error: float

    @property
    def is_better(self) -> bool:
        """Whether the drafter fits this setting better than the configured one, beyond chance."""
        return self.gain > max(LEAST_GAIN, STANDARD_ERRORS * self.error)


def compare(setting: Setting, found: list[torch.Tensor], base: list[torch.Tensor]) -> Fit:
    """`found` and `base`: `[A, D]` of each text."""
    gains, nats, slots = [], [], base[0].shape[1]
    for mine, usual in zip(found, base):
        shared = min(mine.shape[1], slots)
        mine = mine[:, :shared]
        won = F.pad(usual[:, :shared] - mine, (0, slots - shared)).masked_fill(usual.isnan(), float("nan"))  # [A, D]
        won = won.nanmean(dim=1)  # [A]
        gains.append(won[~won.isnan()])
        nats.append(mine[~mine.isnan()])
    gain = torch.cat(gains).double()
    error = gain.std().item() * math.sqrt(slots / len(gain)) if len(gain) > 1 else math.inf
    return Fit(setting, torch.cat(nats).mean().item(), gain.mean().item(), error)


def fits(
    target: PreTrainedModel,
    drafter: PreTrainedModel,
    texts: list[tuple[torch.LongTensor, int]],
    other_mask_tokens: tuple[int, ...] = (),
) -> tuple[Fit, list[Fit]]:
    """The fit of the configured setting, and of all alternatives, in their order.

    Args:
        texts: token ids `[1, s]` that the target wrote, two tokens at least, behind a prompt of the given length.
        other_mask_tokens: ids that may have been the mask token.
    """
    modules, base = TargetModules.of(target), configured(drafter.config)
    settings = [base, *alternatives(drafter.config, target, other_mask_tokens)]
    found: list[list[torch.Tensor]] = [[] for _ in settings]
    for ids, prompt_length in texts:
        streams = read_streams(target, ids)
        anchors = torch.arange(prompt_length, ids.shape[1] - 1, device=ids.device)[:MOST_ANCHORS].unsqueeze(0)
        for nats, setting in zip(found, settings):
            nats.append(cross_entropies(drafter, modules, streams, ids, anchors, setting))
    usual, *others = (compare(setting, nats, found[0]) for setting, nats in zip(settings, found))
    return usual, others


def best_of(found: list[Fit]) -> Fit:
    """The one that gains most; of those that gain as much, within a standard error, the first."""
    most = max(found, key=lambda fit: fit.gain)
    return next(fit for fit in found if fit.gain >= most.gain - most.error)


__all__ = ["Fit", "Setting", "Streams", "best_of", "fits", "read_streams"]
