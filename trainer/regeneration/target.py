"""The target in this process: batches of prompts, each row sampled on its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import torch
from transformers import DynamicCache, PreTrainedModel

from .prompts import Answer, Conversation, Conversations, Question

POOL = 16  # batches of conversations that wait for their next turn, at most


def make_batches(lengths: Sequence[int], batch_size: int, spread: int, draw: random.Random) -> list[list[int]]:
    """Indices into `lengths` in batches whose lengths differ by `spread` at most, in random order."""
    order = list(range(len(lengths)))
    draw.shuffle(order)
    order.sort(key=lengths.__getitem__)
    batches: list[list[int]] = []
    for index in order:
        batch = batches[-1] if batches else []
        if not batch or len(batch) == batch_size or lengths[index] - lengths[batch[0]] > spread:
            batches.append([index])
        else:
            batch.append(index)
    draw.shuffle(batches)
    return batches


def choose(
    logits: torch.Tensor, temperatures: torch.Tensor, uniforms: torch.Tensor, top_p: float = 1.0
) -> torch.LongTensor:
    """One token a row: the likeliest at temperature 0, else the one at `uniforms` of the cumulated probabilities.

    Args:
        logits: `[b, V]`, float32. temperatures: `[b]`. uniforms: `[b]`, in `[0, 1)`.
        top_p: only the likeliest tokens that together reach this mass can be chosen.

    Returns:
        `[b]`. Over uniform numbers the choice has the distribution `softmax(logits / temperature)`, cut at `top_p`.
    """
    tokens = logits.argmax(dim=-1)  # [b]
    hot = temperatures > 0
    if not hot.any():
        return tokens
    probabilities = (logits[hot] / temperatures[hot, None]).softmax(dim=-1)  # [hot, V]
    order = None
    if top_p < 1:
        probabilities, order = probabilities.sort(dim=-1, descending=True, stable=True)
    cumulated = probabilities.cumsum(dim=-1, dtype=torch.float64)  # [hot, V]
    last = (cumulated < top_p).sum(dim=-1, keepdim=True) if top_p < 1 else cumulated.shape[-1] - 1
    last = torch.as_tensor(last, device=logits.device).expand(len(cumulated), 1).clamp(max=cumulated.shape[-1] - 1)
    mass = uniforms[hot, None].double() * cumulated.gather(-1, last)  # [hot, 1]
    picks = torch.searchsorted(cumulated, mass, right=True).minimum(last)  # [hot, 1]
    tokens[hot] = (picks if order is None else order.gather(-1, picks))[:, 0]
    return tokens


class TargetBackend:
    """A model of transformers answers, prompts of (nearly) equal length together.

    DeepSeek-V4's compressors do not know about padding, so there is none: all rows of a batch stand at the same
    position at all times. Each row draws from its own seed, which makes its text that of the row alone, whatever
    batch it is in, up to the rounding of batched products. A finished row leaves the batch and its cache.

    Args:
        model: the target, in evaluation mode. end_ids: tokens that end an answer.
        length_spread: by how many tokens prompts of a batch may differ. The batch begins with what the shortest
            has; the rest of a longer one is read token by token while the others are already answered.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        end_ids: set[int],
        max_new_tokens: int,
        top_p: float = 1.0,
        batch_size: int = 32,
        length_spread: int = 0,
        seed: int = 0,
    ):
        self.model, self.end_ids = model, end_ids
        self.max_new_tokens, self.top_p = max_new_tokens, top_p
        self.batch_size, self.length_spread = batch_size, length_spread
        self.draw = random.Random(seed)

    def run(self, conversations: Conversations, finish: Callable[[Conversation], None]) -> None:
        """Asks until every conversation is done, and hands each over as soon as it is."""
        waiting: list[Conversation] = []
        for batch in self._batches(conversations.lengths):
            waiting += self._ask([conversations[index] for index in batch], finish)
            while len(waiting) >= POOL * self.batch_size:
                waiting = self._ask_all(waiting, finish)
        while waiting:
            waiting = self._ask_all(waiting, finish)

    def _batches(self, lengths: Sequence[int]) -> list[list[int]]:
        return make_batches(lengths, self.batch_size, self.length_spread, self.draw)

    def _ask_all(self, waiting: list[Conversation], finish: Callable) -> list[Conversation]:
        """The next turn of all; returns those that go on."""
        batches = self._batches([len(conversation.input_ids) for conversation in waiting])
        return [left for batch in batches for left in self._ask([waiting[index] for index in batch], finish)]

    def _ask(self, batch: list[Conversation], finish: Callable) -> list[Conversation]:
        for index, answer in self.answers([conversation.question for conversation in batch]):
            batch[index].take(answer)
            if batch[index].done:
                finish(batch[index])
        return [conversation for conversation in batch if not conversation.done]

    @torch.inference_mode()
    def answers(self, questions: list[Question]) -> Iterator[tuple[int, Answer]]:
        """`(index, answer)` for each of a batch of questions, as they finish."""
        device = self.model.device  # where ids go in; a model spread over devices has its logits elsewhere
        prompts = [question.input_ids for question in questions]
        position = min(map(len, prompts))
        uniforms = torch.stack([self._uniforms(question.seed) for question in questions])  # [b, max_new_tokens]
        temperatures = torch.tensor([question.temperature for question in questions])  # [b]
        answers: list[list[int]] = [[] for _ in questions]
        rows = list(range(len(questions)))  # those that still are in the batch
        cache = DynamicCache(config=self.model.config)
        input_ids = torch.tensor([prompt[:position] for prompt in prompts])  # [b, position]
        while rows:
            output = self.model(input_ids=input_ids.to(device), cache=cache, use_cache=True, logits_to_keep=1)
            logits = output.logits[:, -1].float()  # [b, V]
            steps = [max(position - len(prompts[row]), 0) for row in rows]
            chosen = choose(
                logits,
                temperatures[rows].to(logits.device),
                uniforms[rows, steps].to(logits.device),
                self.top_p,
            ).tolist()
            keep = []
            for place, row in enumerate(rows):
                if position < len(prompts[row]):
                    chosen[place] = prompts[row][position]
                    keep.append(place)
                    continue
                answers[row].append(chosen[place])
                if chosen[place] in self.end_ids:
                    yield row, Answer(answers[row], "stop")
                elif len(answers[row]) == self.max_new_tokens:
                    yield row, Answer(answers[row], "length")
                else:
                    keep.append(place)
            if len(keep) < len(rows) and keep:
                cache.reorder_cache(torch.tensor(keep, device=device))
            rows = [rows[place] for place in keep]
            input_ids = torch.tensor([[chosen[place]] for place in keep])  # [b, 1]
            position += 1

    def _uniforms(self, seed: int) -> torch.Tensor:
        return torch.rand(self.max_new_tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


__all__ = ["TargetBackend", "choose", "make_batches"]
