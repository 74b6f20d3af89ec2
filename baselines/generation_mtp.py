"""Drafting with the MTP module: token after token, each from the output of the one before."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation.configuration_utils import GenerationConfig
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.utils import GenerationMixin

from ..generation_hyperdflash import DraftContext, HyperDFlashCandidateGenerator, confidence_threshold, make_rewindable
from .configuration_mtp import MtpConfig


class MtpCandidateGenerator(HyperDFlashCandidateGenerator):
    """Drafts behind the anchor with as many forwards of an [`MtpModel`] as there are drafts.

    Between rounds the module's cache holds the accepted pairs `(H[t], token[t+1])` and nothing else: a round reads
    those that have come, all but the last without their outputs, drafts from the last one, and takes the keys of the
    later steps back, as they were made of the module's own streams. Draft logits, processors and sampling are those of
    the block drafter.

    Args: as in [`HyperDFlashCandidateGenerator`].
    """

    def __init__(
        self,
        assistant_model: PreTrainedModel,
        main_model_input_embeddings: nn.Embedding,
        main_model_output_embeddings: nn.Linear,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList | None,
        num_draft_tokens: int,
        context: DraftContext,
    ):
        # Nothing of the parents' `__init__`: they set up a block and its mask tokens
        self.assistant_model = assistant_model
        self.main_model_input_embeddings = main_model_input_embeddings
        self.main_model_output_embeddings = main_model_output_embeddings
        self.main_model_max_length = generation_config.max_length
        self.do_sample = generation_config.do_sample
        self.logits_processor = logits_processor
        self.processors = logits_processor or []
        self.rowwise = False  # drafts are chosen one by one
        self.model_kwargs_overrides = {}
        self.num_draft_tokens = num_draft_tokens
        self.confidence_threshold = confidence_threshold(assistant_model, generation_config)
        self.context = context
        make_rewindable(context.cache, max_rollback=num_draft_tokens)
        self.device, self.dtype = assistant_model.device, assistant_model.e_proj.weight.dtype

    @staticmethod
    def new_cache(config: MtpConfig) -> Cache:
        return DynamicCache(config=config)

    def get_candidates(
        self, input_ids: torch.LongTensor, model_kwargs: dict[str, Any], **kwargs
    ) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """Draft behind the last token of `input_ids`, the anchor; see [`HyperDFlashCandidateGenerator`]."""
        num_drafts = min(self.num_draft_tokens, self.main_model_max_length - input_ids.shape[1] - 1)
        if num_drafts <= 0:
            return input_ids, None
        streams, position = self._read_context(input_ids, model_kwargs)
        lm_head, cache = self.main_model_output_embeddings, self.context.cache
        candidate_ids, candidate_logits = input_ids, []
        # The experts' kernel for few tokens, as `generate` chooses it for the target
        with GenerationMixin._optimize_model_for_decode(self.assistant_model):
            for step in range(num_drafts):
                outputs = self.assistant_model(
                    token_embeds=self._embed(candidate_ids[:, -1:]),
                    hidden_states=streams,
                    position_ids=position + step,
                    cache=cache,
                )
                streams = outputs.streams
                logits = lm_head(outputs.last_hidden_state.to(lm_head.weight.device, lm_head.weight.dtype))
                longer_ids, logits = self._choose(candidate_ids, logits.to(input_ids.device))
                if step > 0 and self._is_unsure(logits[0]):
                    break
                candidate_ids = longer_ids
                candidate_logits.append(logits)  # [b, 1, vocab]
        cache.crop(-step)  # the first step's pair is an accepted one, the others were drafts
        return candidate_ids, torch.cat(candidate_logits, dim=1)

    def _read_context(
        self, input_ids: torch.LongTensor, model_kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.LongTensor]:
        """Reads the pending pairs but the last, and returns the streams `[b, 1, m, d]` and position `[b, 1]` of that.

        The pending states are those of the tokens up to the one before the anchor, so each goes with the token after
        it, and the last with the anchor.
        """
        pending = self.context.pending
        states = pending[0] if len(pending) == 1 else torch.cat(pending, dim=1)  # [b, n, m, d]
        length = states.shape[1]
        tokens = input_ids[:, -length:]  # [b, n], the tokens after
        positions = model_kwargs["position_ids"][:, -length - 1 : -1]
        if (mask := model_kwargs.get("attention_mask")) is not None:  # padding is left out, as batch size is 1
            known = mask[0, -length - 1 : -1].bool()
            tokens, positions, states = tokens[:, known], positions[:, known], states[:, known.to(states.device)]
        states, positions = states.to(self.device, self.dtype), positions.to(self.device)
        if states.shape[1] > 1:
            self.assistant_model.read(
                self._embed(tokens[:, :-1]), states[:, :-1], positions[:, :-1], self.context.cache
            )
        pending.clear()
        return states[:, -1:], positions[:, -1:]

    def _embed(self, token_ids: torch.LongTensor) -> torch.Tensor:
        token_ids = token_ids.to(self.main_model_input_embeddings.weight.device)
        return self._get_noise_embeds(token_ids).to(self.device, self.dtype)


__all__ = ["MtpCandidateGenerator"]
