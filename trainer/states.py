"""Where training takes the target's states from: the live target, or rows that were kept of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..configuration_hyperdflash import HyperDFlashConfig
from .state_cache import StateCache, document_key
from .target_modules import TEACHER_POOLINGS, TargetModules

STATE_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
}


@dataclass
class DocumentStates:
    """The target's states at the tokens of a batch of documents, or (without `b`) of a single one.

    Attributes:
        context: what the drafter is conditioned on. `[b, s, m, d]`, or `[b, s, m, L * d]` for `multi_layer`.
        residual: the streams before the target's `hc_head` collapses them, for the teacher. `[b, s, m, d]`.
    """

    context: torch.Tensor
    residual: torch.Tensor

    @classmethod
    def batch(cls, documents: Sequence[DocumentStates], length: int, device: torch.device) -> DocumentStates:
        """Single documents as one batch on `device`, with zeros on the right up to `length` tokens."""

        def pad(states: list[torch.Tensor]) -> torch.Tensor:
            padded = states[0].new_zeros(len(states), length, *states[0].shape[1:])  # [b, s, m, d]
            for row, values in zip(padded, states):
                row[: len(values)] = values
            return padded.to(device)

        residual = pad([document.residual for document in documents])
        if all(document.context is document.residual for document in documents):
            return cls(context=residual, residual=residual)
        return cls(context=pad([document.context for document in documents]), residual=residual)

    def pack(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The tensors to keep of a single document: `residual`, and `context` if it is another tensor, in `dtype`.

        In float8 each token, stream and layer has a scale, the power of two that brings its largest number just within
        float8's range: `residual_scale` `[n, m, 1]`, `context_scale` `[n, m, L]`, bfloat16.
        """
        width, packed = self.residual.shape[-1], {}
        for name, states in vars(self).items():
            if name == "context" and states is self.residual:
                continue
            if dtype == torch.float8_e4m3fn:
                states = states.float().unflatten(-1, (-1, width))  # [n, m, L, d]
                mantissa, exponent = torch.frexp(states.abs().amax(dim=-1) / torch.finfo(dtype).max)  # [n, m, L]
                exponent = (exponent - (mantissa == 0.5).int()).clamp(min=-120)  # rounded up
                scale = (exponent + 127 << 23).view(torch.float32)  # 2 ** exponent, to the bit on every device
                packed[f"{name}_scale"] = scale.bfloat16()
                states = (states / scale.unsqueeze(-1)).flatten(2)
            packed[name] = states.to(dtype).contiguous()
        return packed

    @classmethod
    def unpack(cls, packed: dict[str, torch.Tensor]) -> DocumentStates:
        """The states that `pack` kept; float8 comes back as bfloat16, which holds its numbers exactly."""
        states = {name: packed[name] for name in ("context", "residual") if name in packed}
        for name, values in states.items():
            if f"{name}_scale" in packed:
                scale = packed[f"{name}_scale"]  # [n, m, L]
                values = values.bfloat16().unflatten(-1, (scale.shape[-1], -1)) * scale.unsqueeze(-1)
                states[name] = values.flatten(2)
        return cls(context=states.get("context", states["residual"]), residual=states["residual"])


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

    def close(self) -> None:  # noqa: B027  (most sources hold nothing)
        """Writes what the source still holds: called when training ends, however it ends."""


class LiveTargetStates(TargetStates):
    """The states of a loaded target, computed when they are asked for.

    The target is frozen (`requires_grad_(False)`, `eval()`) and otherwise left as it is: hooks live for one call, and
    its LM head is not run.

    Args:
        target: a `DeepseekV4ForCausalLM`, loaded in any way that transformers can.
        config: the drafter's, whose `context_source` and `target_layer_ids` say what the context is.
        device: where the drafter is. A target that is neither quantised nor placed by a `device_map` moves there; of
            another one only copies of the borrowed modules do. Default: all stays where it is.
        dtype: what the states are rounded to, one of `STATE_DTYPES`' values. Default: they stay in the target's.
        batch_size: documents that the target runs at a time. Kernels sum in another order for other shapes, and
            experts and compressors near a tie then choose otherwise: with 1 the states of a document depend on nothing
            but the document, more is faster where documents are short.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        config: HyperDFlashConfig,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        batch_size: int = 1,
    ):
        placed = hasattr(target, "hf_device_map") or getattr(target, "hf_quantizer", None) is not None
        if device is not None and not placed:
            target.to(device)
        self.target = target.requires_grad_(False).eval()
        self.modules = TargetModules.of(target, device)
        self.layer_ids = [] if config.context_source == "pre_hc_head" else config.target_layer_ids
        self.dtype, self.batch_size = dtype, batch_size

    def __call__(self, input_ids: torch.LongTensor, attention_mask: torch.LongTensor) -> DocumentStates:
        lengths, documents = attention_mask.sum(dim=1).tolist(), []
        for start in range(0, len(lengths), self.batch_size):
            together = lengths[start : start + self.batch_size]
            states = self._run(input_ids[start : start + self.batch_size, : max(together)])
            for row, length in enumerate(together):
                residual = states.residual[row, :length]
                context = residual if states.context is states.residual else states.context[row, :length]
                document = DocumentStates(context=context, residual=residual)
                if self.dtype is not None:
                    document = DocumentStates.unpack(document.pack(self.dtype))
                documents.append(document)
        return DocumentStates.batch(documents, input_ids.shape[1], input_ids.device)

    @torch.no_grad()
    def _run(self, input_ids: torch.LongTensor) -> DocumentStates:
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
        device = self.target.get_input_embeddings().weight.device
        try:  # weights on the meta device are accelerate's to fetch, and so is the input
            decoder(input_ids=input_ids if device.type == "meta" else input_ids.to(device), use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        residual = captured["residual"]
        if not self.layer_ids:
            return DocumentStates(context=residual, residual=residual)
        layers = [captured[i].to(residual.device) for i in self.layer_ids]
        return DocumentStates(context=torch.cat(layers, dim=-1), residual=residual)


class CachedTargetStates(TargetStates):
    """States that were computed once and kept, in a cache on disk or in memory.

    A document's states are those that [`LiveTargetStates`] gives with the same `dtype` and `batch_size` 1, to the bit.

    Args:
        rows: where they are kept: a [`StateCache`], or a `dict` for the host's memory.
        modules: the borrowed modules, on the drafter's device.
        dtype: what the states are rounded to, one of `STATE_DTYPES`' values; a [`StateCache`] was opened for the same.
        source: makes the states, not rounded, of documents that `rows` lacks. It is called at the first such document,
            so that a complete cache never loads the target. Default: a document that `rows` lacks is an error.
    """

    def __init__(
        self,
        rows: StateCache | dict[str, dict[str, torch.Tensor]],
        modules: TargetModules,
        dtype: torch.dtype,
        source: Callable[[], TargetStates] | None = None,
    ):
        self.rows, self.modules, self.dtype = rows, modules, dtype
        self._make_source, self._source = source, None

    def __call__(self, input_ids: torch.LongTensor, attention_mask: torch.LongTensor) -> DocumentStates:
        """See [`TargetStates`]. Raises `ValueError` for a document without states, where there is no `source`."""
        lengths = attention_mask.sum(dim=1).tolist()
        documents = [self._document(ids[:length]) for ids, length in zip(input_ids, lengths)]
        return DocumentStates.batch(documents, input_ids.shape[1], input_ids.device)

    def _document(self, ids: torch.LongTensor) -> DocumentStates:
        key = document_key(ids.tolist())
        packed = self.rows.get(key)
        if packed is None:
            if self._make_source is None:
                raise ValueError(
                    f"states_cache: found no states of the document of {len(ids)} tokens that begins "
                    f"{ids[:8].tolist()}, wanted them, or states_source 'fill'"
                )
            if self._source is None:
                self._source = self._make_source()
            states = self._source(ids.unsqueeze(0), torch.ones_like(ids).unsqueeze(0))
            residual = states.residual[0]  # [n, m, d]
            context = residual if states.context is states.residual else states.context[0]
            packed = DocumentStates(context=context, residual=residual).pack(self.dtype)
            packed = {name: values.cpu() for name, values in packed.items()}
            self.rows[key] = packed
        return DocumentStates.unpack(packed)

    def close(self) -> None:
        """Writes the last rows of a cache on disk."""
        if isinstance(self.rows, StateCache):
            self.rows.flush()

    def check_complete(self, documents: Iterable[Sequence[int]]) -> None:
        """Raises `ValueError` if there are no states of one of the documents, given as token ids.

        What the states of the others are worth is found when they are first read.
        """
        missing = {index: key for index, key in enumerate(map(document_key, documents)) if key not in self.rows}
        if missing:
            first = next(iter(missing))
            self.rows.get(missing[first])  # raises if a damaged shard may have held it
            raise ValueError(
                f"states_cache: found no states of {len(missing)} documents, the first in row {first}, wanted "
                "those of all, or states_source 'fill'"
            )


__all__ = [
    "STATE_DTYPES",
    "TEACHER_POOLINGS",
    "CachedTargetStates",
    "DocumentStates",
    "LiveTargetStates",
    "TargetModules",
    "TargetStates",
]
