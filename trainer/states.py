"""What training takes from the target: the states of a document's tokens, and the modules that the drafter borrows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from ..configuration_hyperdflash import HyperDFlashConfig

TEACHER_POOLINGS = ("mean", "hc_head")


@dataclass
class DocumentStates:
    """The target's states at the tokens of a batch of documents.

    Attributes:
        context: what the drafter is conditioned on. `[b, s, m, d]`, or `[b, s, m, L * d]` for `multi_layer`.
        residual: the streams before the target's `hc_head` collapses them, for the teacher. `[b, s, m, d]`.
    """

    context: torch.Tensor
    residual: torch.Tensor


@dataclass
class TargetModules:
    """The frozen modules of the target that training runs: embedding, `hc_head`, final norm and LM head."""

    embedding: nn.Module
    hc_head: nn.Module
    norm: nn.Module
    lm_head: nn.Module

    @classmethod
    def of(cls, target: PreTrainedModel) -> TargetModules:
        """Those of a loaded target. Raises `ValueError` if it has no `hc_head`."""
        decoder = target.get_decoder()
        if not hasattr(decoder, "hc_head"):
            raise ValueError(
                f"target: found {type(target).__name__} without an `hc_head`, wanted a DeepSeek-V4-class target"
            )
        return cls(target.get_input_embeddings(), decoder.hc_head, decoder.norm, target.get_output_embeddings())

    def embed_blocks(self, anchor_tokens: torch.LongTensor, mask_token_id: int, block_size: int) -> torch.Tensor:
        """Token ids of the anchors `[b, A]` -> embeddings of `[anchor, mask, ..., mask]` blocks, `[b, A * B, d]`."""
        anchors = self.embedding(anchor_tokens)  # [b, A, d]
        mask = self.embedding(anchor_tokens.new_tensor([mask_token_id]))  # [1, d]
        blocks = mask.repeat(*anchor_tokens.shape, block_size, 1)  # [b, A, B, d]
        blocks[:, :, 0] = anchors
        return blocks.flatten(1, 2)

    @torch.no_grad()
    def teacher_states(self, residual: torch.Tensor, pooling: str) -> torch.Tensor:
        """Streams `[b, s, m, d]` -> `[b, s, d]`, pooled and through the final norm: what the LM head takes.

        Args:
            pooling: `"mean"` over the streams, as the paper ran, or the target's own `"hc_head"`, which gives the
                target's true distribution.
        """
        pooled = residual.mean(dim=2) if pooling == "mean" else self.hc_head(residual)
        return self.norm(pooled)

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`[..., d]` -> `[..., vocab]`, in the LM head's dtype (or autocast's)."""
        return self.lm_head(hidden_states.to(self.lm_head.weight.dtype))


class TargetStates(ABC):
    """A source of target states. Calling it gives the [`DocumentStates`] of a batch.

    Attributes:
        modules: the target's [`TargetModules`].
    """

    modules: TargetModules

    @abstractmethod
    def __call__(self, input_ids: torch.LongTensor, attention_mask: torch.LongTensor) -> DocumentStates:
        """The states of token ids `[b, s]`, one document a row, padded on the right; `attention_mask` `[b, s]`.

        The target is causal, so padding on the right changes nothing at a document's tokens. What stands at the
        padding is not defined.
        """


class LiveTargetStates(TargetStates):
    """The states of a loaded target, computed when they are asked for.

    The target is frozen (`requires_grad_(False)`, `eval()`) and otherwise left as it is: hooks live for one call, and
    its LM head is not run.

    Args:
        target: a `DeepseekV4ForCausalLM`.
        config: the drafter's, whose `context_source` and `target_layer_ids` say what the context is.
    """

    def __init__(self, target: PreTrainedModel, config: HyperDFlashConfig):
        self.target = target.requires_grad_(False).eval()
        self.modules = TargetModules.of(target)
        self.layer_ids = [] if config.context_source == "pre_hc_head" else config.target_layer_ids

    @torch.no_grad()
    def __call__(self, input_ids: torch.LongTensor, attention_mask: torch.LongTensor) -> DocumentStates:
        decoder = self.target.get_decoder()
        captured: dict[str | int, torch.Tensor] = {}

        def keep_residual(module, args):
            captured["residual"] = args[0]  # [b, s, m, d]

        def keep_layer(layer_id):
            def keep(module, args, output):
                captured[layer_id] = output  # [b, s, m, d]

            return keep

        handles = [decoder.hc_head.register_forward_pre_hook(keep_residual)]
        handles += [decoder.layers[i].register_forward_hook(keep_layer(i)) for i in self.layer_ids]
        try:
            decoder(input_ids=input_ids, use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        residual = captured["residual"]
        context = torch.cat([captured[i] for i in self.layer_ids], dim=-1) if self.layer_ids else residual
        return DocumentStates(context=context, residual=residual)


class RememberedTargetStates(TargetStates):
    """The states of another source, kept in the host's memory after their first use: for data that is seen again.

    A token takes `m * d` numbers in the target's dtype, and `L` times as many again for `multi_layer`.

    Args:
        source: where the states of a document come from that has not been seen yet.
    """

    def __init__(self, source: TargetStates):
        self.source, self.modules = source, source.modules
        self._documents: dict[bytes, DocumentStates] = {}

    def __call__(self, input_ids: torch.LongTensor, attention_mask: torch.LongTensor) -> DocumentStates:
        lengths = attention_mask.sum(dim=1).tolist()
        keys = [row[:length].cpu().numpy().tobytes() for row, length in zip(input_ids, lengths)]
        unknown = [row for row, key in enumerate(keys) if key not in self._documents]
        if unknown:
            longest = max(lengths[row] for row in unknown)
            states = self.source(input_ids[unknown, :longest], attention_mask[unknown, :longest])
            for index, row in enumerate(unknown):
                residual = states.residual[index, : lengths[row]].to("cpu", copy=True)  # [n, m, d]
                same = states.context is states.residual
                context = residual if same else states.context[index, : lengths[row]].to("cpu", copy=True)
                self._documents[keys[row]] = DocumentStates(context=context, residual=residual)
        documents = [self._documents[key] for key in keys]

        def pad(states: list[torch.Tensor]) -> torch.Tensor:
            padded = states[0].new_zeros(input_ids.shape + states[0].shape[1:])  # [b, s, m, d]
            for row, values in zip(padded, states):
                row[: len(values)] = values
            return padded.to(input_ids.device)

        residual = pad([document.residual for document in documents])
        if all(document.context is document.residual for document in documents):
            return DocumentStates(context=residual, residual=residual)
        return DocumentStates(context=pad([document.context for document in documents]), residual=residual)
