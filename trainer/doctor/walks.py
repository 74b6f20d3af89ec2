"""A text walked twice, by the decoding loop and by training's pass, and what could be seen of both from outside.

Both are watched at the doors of the models, by forward hooks: what the drafter was given, what it returned, what the
target was asked to verify. So it does not matter which copy of the code decodes, and nothing has to be believed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from ...generation_hyperdflash import GenerationStatistics
from ..attention import block_sparse_attention
from ..blocks import slot_labels
from ..drafting import draft_hidden_states
from ..states import LiveTargetStates


@dataclass
class DrafterCall:
    """One forward of the drafter: `n` new context tokens and the slots of one or more blocks.

    Attributes:
        arguments: all that it was given, by name.
        rotation: cosines of the rotary embedding at `[context ; slots]`, `[n + slots, head_dim]`.
        hidden_states: what it returned, `[slots, d]`.
    """

    arguments: dict[str, Any]
    rotation: torch.Tensor
    hidden_states: torch.Tensor

    @property
    def noise_embeds(self) -> torch.Tensor:
        """`[slots, d]`."""
        return self.arguments["noise_embeds"][0]

    @property
    def context(self) -> torch.Tensor:
        """`[n, m, d]`, or `[n, m, L * d]` for `multi_layer`."""
        return self.arguments["context_hidden_states"][0]

    @property
    def positions(self) -> torch.Tensor:
        """`[n + slots]`."""
        return self.arguments["position_ids"][0]


@dataclass
class Round:
    """A round of the decoding loop: the draft behind `anchor`, and the tokens that the target was given to verify.

    Attributes:
        hidden_states: what the LM head took for the drafts, `[drafts, d]`: a sequential head sees the draft before.
    """

    anchor: int
    drafts: list[int]
    call: DrafterCall
    hidden_states: torch.Tensor


@dataclass
class Walk:
    """One text, which the decoding loop wrote, and training's pass over it at the same anchors.

    Attributes:
        ids: prompt and answer, `[1, s]`. prompt_length: in tokens.
        rounds: `R` of them. statistics: the loop's own count.
        states: what training's source of states gives for the text, `[1, s, m, d]`.
        training: the drafter's forward in training, with `R` blocks.
        hidden_states: what training hands to the LM head, `[R, D, d]`.
        labels, counts: training's, `[R, D]`; see [`slot_labels`].
    """

    ids: torch.LongTensor
    prompt_length: int
    rounds: list[Round]
    statistics: GenerationStatistics
    states: torch.Tensor
    training: DrafterCall
    hidden_states: torch.Tensor
    labels: torch.LongTensor
    counts: torch.BoolTensor

    @property
    def anchors(self) -> torch.LongTensor:
        """`[1, R]`."""
        return torch.tensor([[each.anchor for each in self.rounds]], device=self.ids.device)


@contextmanager
def drafter_calls(drafter: PreTrainedModel) -> Iterator[list[DrafterCall]]:
    """A list that grows by one [`DrafterCall`] with every forward of `drafter` inside the `with` block."""
    calls: list[DrafterCall] = []
    rotations: list[torch.Tensor] = []

    def keep_rotation(module, args, output):
        rotations.append(output[0][0])

    def keep_call(module, args, arguments, output):
        calls.append(DrafterCall(arguments, rotations.pop(), output.last_hidden_state[0]))

    handles = [
        drafter.rotary_emb.register_forward_hook(keep_rotation),
        drafter.register_forward_hook(keep_call, with_kwargs=True),
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def plain_greedy(target: PreTrainedModel, drafter: PreTrainedModel) -> Iterator[None]:
    """Greedy decoding with whole blocks, whatever the generation configs of the two say; their end tokens stay."""
    before = target.generation_config, drafter.generation_config
    ends = {name: getattr(before[0], name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    target.generation_config = GenerationConfig(**ends)
    drafter.generation_config = GenerationConfig()
    try:
        yield
    finally:
        target.generation_config, drafter.generation_config = before


@torch.no_grad()
def decode(
    target: PreTrainedModel, drafter: PreTrainedModel, prompt: list[int], max_new_tokens: int
) -> tuple[torch.LongTensor, list[Round]]:
    """`generate` with the drafter: the text `[1, s]` and the rounds that led to it."""
    rounds: list[Round] = []

    def keep_round(module, args, arguments):
        if calls:  # otherwise a forward without drafts: the prefill, or a last token
            anchor = arguments["cache"].get_seq_length()  # the first token that the target has not processed
            tokens, call = arguments["input_ids"][0], calls.pop()  # the anchor's and the drafts
            states = call.hidden_states[drafter.config.geometry.first_slot :][: len(tokens) - 1]
            if drafter.config.sequential_head_size:
                embeds = target.get_input_embeddings()(tokens[:-1]).to(states.device, states.dtype)
                states = drafter.sequential_head(states, embeds)
            rounds.append(Round(anchor, tokens[1:].tolist(), call, states))

    inputs = torch.tensor([prompt], device=target.device)
    with plain_greedy(target, drafter), drafter_calls(drafter) as calls:
        handle = target.register_forward_pre_hook(keep_round, with_kwargs=True)
        try:
            ids = target.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                assistant_model=drafter,
                max_new_tokens=max_new_tokens,
                do_sample=False,
            )
        finally:
            handle.remove()
    return ids, rounds


@torch.no_grad()
def walk(target: PreTrainedModel, drafter: PreTrainedModel, prompt: list[int], max_new_tokens: int) -> Walk | None:
    """Decodes behind `prompt`, then drafts as training does; `None` if the text ended before there was a draft."""
    ids, rounds = decode(target, drafter, prompt, max_new_tokens)
    if not rounds:
        return None
    labels = ids.clone()
    labels[:, : len(prompt)] = -100
    anchors = torch.tensor([[each.anchor for each in rounds]], device=ids.device)
    source = LiveTargetStates(target, drafter.config)
    states = source(ids, torch.ones_like(ids))
    with block_sparse_attention(drafter.config), drafter_calls(drafter) as calls:
        hidden_states = draft_hidden_states(drafter, source.modules, states, ids, anchors)
    labels, counts = slot_labels(labels, anchors, drafter.config.geometry)
    return Walk(
        ids=ids,
        prompt_length=len(prompt),
        rounds=rounds,
        statistics=drafter.last_generation,
        states=states.context,
        training=calls[0],
        hidden_states=hidden_states[0],
        labels=labels[0],
        counts=counts[0],
    )
