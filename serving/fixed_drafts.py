"""Drafts that cost nothing and are never accepted: what is left of a round is the cost of verifying it."""

from __future__ import annotations

from typing import Any


class FixedDrafts:
    """A proposer for vLLM (`"method": "custom_class"`): the token 0, the begin of a text, in every slot.

    A target does not write it, so that each round verifies all drafts and keeps one token of its own. `bench-serve`
    subtracts such a round from a round with a drafter.
    """

    token_id = 0

    def __init__(self, vllm_config: Any):
        self.num_drafts = vllm_config.speculative_config.num_speculative_tokens

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """There is none."""

    def propose(self, sampled_token_ids: list[list[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        """Drafts for each request that has just got a token; none for one whose prompt is not read to its end."""
        return [[self.token_id] * self.num_drafts if sampled else [] for sampled in sampled_token_ids]


__all__ = ["FixedDrafts"]
