# Copyright 2026 The HyperDFlash Authors. All rights reserved.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""What `target.generate(**inputs, assistant_model=drafter)` needs and transformers lacks for DeepSeek-V4.

Read from top to bottom:

1. a DeepSeek-V4 cache that can take tokens back, exactly;
2. the statistics of one call;
3. the tap: the target's residual, its hidden states and its seconds, taken from its own forward;
4. the candidate generator that drafts a block;
5. the candidate generator that the stock verification loop sees;
6. the checks made before anything is generated;
7. the hooks.
"""

import dataclasses
import functools
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    DFlashCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)
from transformers.generation.candidate_generator import CandidateGenerator, DFlashTokenCandidateGenerator
from transformers.generation.configuration_utils import GenerationConfig, GenerationMode
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitsProcessorList,
    MinPLogitsWarper,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
)
from transformers.generation.utils import GenerationMixin
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4CSACache, DeepseekV4HCACache
from transformers.utils import logging

from .configuration_hyperdflash import DRAFTER_TYPES

logger = logging.get_logger(__name__)


# ---------------------------------------------------------------------------------------------------------------------
# 1. A cache that can take tokens back
# ---------------------------------------------------------------------------------------------------------------------


class RewindableSlidingLayer(DynamicSlidingWindowLayer):
    """A sliding window layer that refuses to rewind further than its record reaches.

    While `record_past` is off it is the stock layer. While it is on, every token since the last `crop` (or since
    recording began) can be taken back; a `crop` commits everything before the tokens that it leaves.

    The class does not register itself for a layer type: `make_rewindable` turns the layers of one cache into it, and
    every other cache stays as it is.

    Attributes:
        max_rollback (`int`, *optional*):
            The most tokens that a `crop` will take back. The record is kept no longer than that, which bounds the
            memory of a long prompt; `None` keeps all tokens since the last `crop`.
    """

    _layer_type = None  # do not become the cache layer of this type for everybody
    is_rewindable = True
    max_rollback: int | None = None

    @property
    def is_croppable(self) -> bool:
        return self.record_past

    def activate_past_recording(self) -> None:
        """Begin to record, from whatever state the layer is in. No effect if it records already."""
        if not self.record_past:
            super().activate_past_recording()
            self._begin_record()

    def stop_recording(self) -> None:
        """Forget the record and become the stock layer again, with the stock layer's memory."""
        if self.record_past:
            self.record_past = False
            self._end_record()

    def _begin_record(self) -> None:
        self._committed = self.cumulative_length

    def _end_record(self) -> None:
        del self._committed
        if self.is_initialized:
            self._trim_to_window()

    def _trim_to_window(self) -> None:
        shared = self.values is self.keys
        self.keys = self.keys[:, :, -self.sliding_window + 1 :, :]
        self.values = self.keys if shared else self.values[:, :, -self.sliding_window + 1 :, :]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append `[b, heads, s, head_dim]` and return the states that the `s` queries may see, as the stock layer."""
        if not self.record_past:
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        query_length = key_states.shape[-2]
        self.cumulative_length += query_length

        keys = torch.cat([self.keys, key_states], dim=-2)
        # V4 attends with one tensor as key and value: it is stored once
        values = keys if value_states is key_states else torch.cat([self.values, value_states], dim=-2)
        kept = keys.shape[-2] if self.max_rollback is None else self.sliding_window - 1 + self.max_rollback
        self.keys = keys[:, :, -kept:, :]
        self.values = self.keys if values is keys else values[:, :, -kept:, :]
        if self.max_rollback is not None:  # what the record no longer holds cannot be taken back later either
            self._committed = max(self._committed, self.cumulative_length - self.max_rollback)

        visible = self.sliding_window - 1 + query_length
        return keys[:, :, -visible:, :], values[:, :, -visible:, :]

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last `-tokens_to_remove` tokens back and commit the rest.

        Raises:
            ValueError: `tokens_to_remove` is positive, or reaches further back than the record.
            RuntimeError: the layer does not record.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"`tokens_to_remove`: found {tokens_to_remove}, wanted 0 or a negative number of tokens to take back."
            )
        if not self.record_past:
            raise RuntimeError(
                f"{type(self).__name__}.crop needs a record of the past: call `activate_past_recording` before the "
                "forward that is to be taken back."
            )
        length = self.cumulative_length + tokens_to_remove
        reach = self.cumulative_length - self._committed
        if self.max_rollback is not None:
            reach = min(reach, self.max_rollback)
        if -tokens_to_remove > reach:
            raise ValueError(
                f"`tokens_to_remove`: found {tokens_to_remove}, wanted at least {-reach}: the cache holds "
                f"{self.cumulative_length} tokens and its record reaches back to the last {reach} of them."
            )
        if self.is_initialized:
            self._rewind(length)
        self._committed = length

    def _rewind(self, length: int) -> None:
        """Make the layer what it was at `length` tokens."""
        removed = self.cumulative_length - length
        if removed:
            shared = self.values is self.keys
            self.keys = self.keys[:, :, :-removed, :]
            self.values = self.keys if shared else self.values[:, :, :-removed, :]
            self.cumulative_length = length
        self._trim_to_window()

    def reset(self) -> None:
        super().reset()
        if self.record_past:
            self._begin_record()


class RewindableHCALayer(RewindableSlidingLayer, DeepseekV4HCACache):
    """A DeepSeek-V4 HCA layer that can take tokens back.

    The compressor turns every `compress_rate` tokens into one entry and drops their projections, so the stock layer
    cannot go back over the border of a window. Here the raw `(kv, gate)` projections are kept from the first token of
    the window that was open at the last commit: the buffer at any later length is a slice of them, and the entries
    that had been emitted by then are a prefix of `compressed_kv`.
    """

    _layer_type = None

    def _begin_record(self) -> None:
        super()._begin_record()
        self._recorded_from = dict(self.entry_count)  # the entry whose raw projections the record begins with
        self._raw_kv = dict(self.buffer_kv)  # [b, tokens since entry `_recorded_from`, features]
        self._raw_gate = dict(self.buffer_gate)

    def _end_record(self) -> None:
        super()._end_record()
        del self._recorded_from, self._raw_kv, self._raw_gate

    def store_compression_weights(
        self, name: str, kv: torch.Tensor, gate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """As the stock layer: append projections `[b, s, features]`, return the windows that they complete."""
        if not self.record_past:
            return super().store_compression_weights(name, kv, gate)
        if (raw_kv := self._raw_kv[name]) is not None and raw_kv.shape[1]:
            kv = torch.cat([raw_kv, kv], dim=1)
            gate = torch.cat([self._raw_gate[name], gate], dim=1)
        self._raw_kv[name], self._raw_gate[name] = kv, gate
        start = (self.entry_count[name] - self._recorded_from[name]) * self.compress_rate
        stop = start + (kv.shape[1] - start) // self.compress_rate * self.compress_rate
        self.buffer_kv[name], self.buffer_gate[name] = kv[:, stop:], gate[:, stop:]
        return kv[:, start:stop], gate[:, start:stop], self.entry_count[name] * self.compress_rate

    def update_compressor_states(self, name: str, compressed: torch.Tensor) -> torch.Tensor:
        entries = super().update_compressor_states(name, compressed)
        if self.record_past and self.max_rollback is not None:
            self._forget(name, self.cumulative_length - self.max_rollback)
        return entries

    def _rewind(self, length: int) -> None:
        super()._rewind(length)
        for name, raw_kv in self._raw_kv.items():
            if raw_kv is not None:
                self._rewind_entry(name, length)
                self._forget(name, length)

    def _rewind_entry(self, name: str, length: int) -> None:
        entries = length // self.compress_rate
        start = (entries - self._recorded_from[name]) * self.compress_rate
        stop = length - self._recorded_from[name] * self.compress_rate
        self._raw_kv[name], self._raw_gate[name] = self._raw_kv[name][:, :stop], self._raw_gate[name][:, :stop]
        self.buffer_kv[name], self.buffer_gate[name] = self._raw_kv[name][:, start:], self._raw_gate[name][:, start:]
        self.compressed_kv[name] = self.compressed_kv[name][:, :entries]
        self.entry_count[name] = entries

    def _forget(self, name: str, length: int) -> None:
        """Drop what no rollback to `length` tokens or more can need."""
        windows = length // self.compress_rate - self._recorded_from[name]
        if windows > 0:
            self._forget_windows(name, windows)

    def _forget_windows(self, name: str, windows: int) -> None:
        # Cloned: a view would keep the projections of a whole prompt alive
        self._raw_kv[name] = self._raw_kv[name][:, windows * self.compress_rate :].clone()
        self._raw_gate[name] = self._raw_gate[name][:, windows * self.compress_rate :].clone()
        self._recorded_from[name] += windows

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        if self.record_past:
            _reorder(beam_idx, self._raw_kv, self._raw_gate)


class RewindableCSALayer(RewindableHCALayer, DeepseekV4CSACache):
    """A DeepSeek-V4 CSA layer that can take tokens back, for its compressor and its indexer.

    An entry also reads the first half of the features of the window before it (`overlap_kv`, `overlap_gate`, the gate
    with its position bias), so these are recorded for every window completed since the last commit.
    """

    _layer_type = None

    def _begin_record(self) -> None:
        super()._begin_record()
        self._first_overlap_kv = dict(self.overlap_kv)  # [b, rate, head_dim], of the window before the record
        self._first_overlap_gate = dict(self.overlap_gate)
        self._window_kv = dict.fromkeys(self.overlap_kv)  # [b, windows since `_recorded_from`, rate, head_dim]
        self._window_gate = dict.fromkeys(self.overlap_gate)

    def _end_record(self) -> None:
        super()._end_record()
        del self._first_overlap_kv, self._first_overlap_gate, self._window_kv, self._window_gate

    def update_overlap_state(
        self, name: str, chunk_kv: torch.Tensor, chunk_gate: torch.Tensor, head_dim: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """As the stock layer: `[b, windows, rate, 2 * head_dim]` in, the overlap of the window before them out."""
        if self.record_past:
            window_kv, window_gate = chunk_kv[..., :head_dim], chunk_gate[..., :head_dim]
            if (recorded := self._window_kv[name]) is not None:
                window_kv = torch.cat([recorded, window_kv], dim=1)
                window_gate = torch.cat([self._window_gate[name], window_gate], dim=1)
            self._window_kv[name], self._window_gate[name] = window_kv, window_gate
        return super().update_overlap_state(name, chunk_kv, chunk_gate, head_dim)

    def _rewind_entry(self, name: str, length: int) -> None:
        super()._rewind_entry(name, length)
        windows = self.entry_count[name] - self._recorded_from[name]
        if windows == 0:
            self.overlap_kv[name], self.overlap_gate[name] = (
                self._first_overlap_kv[name],
                self._first_overlap_gate[name],
            )
            self._window_kv[name] = self._window_gate[name] = None
        else:
            self._window_kv[name] = self._window_kv[name][:, :windows]
            self._window_gate[name] = self._window_gate[name][:, :windows]
            self.overlap_kv[name] = self._window_kv[name][:, -1].clone()
            self.overlap_gate[name] = self._window_gate[name][:, -1].clone()

    def _forget_windows(self, name: str, windows: int) -> None:
        super()._forget_windows(name, windows)
        self._first_overlap_kv[name] = self._window_kv[name][:, windows - 1].clone()
        self._first_overlap_gate[name] = self._window_gate[name][:, windows - 1].clone()
        left = self._window_kv[name].shape[1] - windows
        self._window_kv[name] = self._window_kv[name][:, windows:].clone() if left else None
        self._window_gate[name] = self._window_gate[name][:, windows:].clone() if left else None

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        if self.record_past:
            _reorder(beam_idx, self._first_overlap_kv, self._first_overlap_gate, self._window_kv, self._window_gate)


def _reorder(beam_idx: torch.LongTensor, *records: dict[str, torch.Tensor | None]) -> None:
    for record in records:
        for name, tensor in record.items():
            if tensor is not None:
                record[name] = tensor.index_select(0, beam_idx.to(tensor.device))


_REWINDABLE_LAYERS = {
    DynamicSlidingWindowLayer: RewindableSlidingLayer,
    DeepseekV4HCACache: RewindableHCALayer,
    DeepseekV4CSACache: RewindableCSALayer,
}
_CROPPABLE_LAYERS = (DynamicLayer, DynamicIndexedLayer)  # they keep every token; the second one is HY-V4's


def make_rewindable(cache: Cache, max_rollback: int | None = None) -> Cache:
    """Let `cache.crop(-r)` take tokens back exactly, from now on; returns the same `cache`.

    The cache may be new or in use, filled by a plain `generate` or forward: recording begins at its present state, and
    tokens that it holds already cannot be taken back. The stock layers are changed into their rewindable subclasses
    in place, for this cache only.

    Args:
        cache (`Cache`): A `DynamicCache(config=target.config)`.
        max_rollback (`int`, *optional*): The most tokens that a `crop` will take back; bounds the record.

    Raises:
        ValueError: a layer is of a type that cannot be rewound (static, quantized, ...); nothing is changed then.
    """
    for index, layer in enumerate(cache.layers):
        known = type(layer) in (*_REWINDABLE_LAYERS, *_CROPPABLE_LAYERS)
        if not known and not getattr(layer, "is_rewindable", False):
            wanted = ", ".join(stock.__name__ for stock in (*_REWINDABLE_LAYERS, *_CROPPABLE_LAYERS))
            raise ValueError(
                f"`cache.layers[{index}]`: found {type(layer).__name__}, which cannot take tokens back, wanted one "
                f"of: {wanted}. Pass `DynamicCache(config=target.config)`."
            )
    for layer in cache.layers:
        if type(layer) in _REWINDABLE_LAYERS:
            layer.__class__ = _REWINDABLE_LAYERS[type(layer)]
            layer.record_past = False
        if getattr(layer, "is_rewindable", False):
            layer.max_rollback = max_rollback
            layer.activate_past_recording()
    return cache


@contextmanager
def rewindable(cache: Cache, max_rollback: int | None = None) -> Iterator[Cache]:
    """`make_rewindable` for the length of a `with` block; after it the layers are stock layers again.

    A layer that was rewindable before stays so. See `make_rewindable` for arguments and errors.
    """
    before = [(layer, type(layer), dict(vars(layer))) for layer in cache.layers]
    make_rewindable(cache, max_rollback)
    try:
        yield cache
    finally:
        for layer, stock, state in before:
            if stock in _REWINDABLE_LAYERS:
                layer.stop_recording()
                layer.record_past = state["record_past"]
                del layer.max_rollback
                layer.__class__ = stock
            elif "max_rollback" in state:
                layer.max_rollback = state["max_rollback"]


# ---------------------------------------------------------------------------------------------------------------------
# 2. Statistics
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class GenerationStatistics:
    """What one assisted `generate` call did: the one record of them, wherever it is asked for.

    A *round* is one draft and its verification by one target forward; it emits the accepted drafts and, after them,
    one token of the target's own, the bonus token. The first token comes from the prefill and belongs to no round.

    How the ends are counted: a draft is accepted if it was emitted. Where an end-of-sequence token, a stopping
    criterion or the length budget cuts a round short behind an accepted draft, the round has no bonus token, and the
    drafts behind the cut were neither emitted nor refused: they count as not drafted. A target step without a draft
    (one token of budget left) is a plain step, no round; but a round in which a prompt lookup finds nothing to propose
    is a round, with no draft accepted. So always

        new_tokens = 1 + accepted + bonus_tokens + plain_steps        (0 if nothing was generated)
        drafted = sum(drafted_per_slot), accepted = sum(accepted_per_slot) = sum(accepted_per_round)

    Attributes:
        num_draft_tokens: drafts that a full round proposes (the block allows `geometry.num_draft_tokens`).
        rounds: draft-and-verify rounds.
        drafted: drafts verified. accepted: drafts emitted.
        bonus_tokens: rounds that ended with a token of the target's own.
        plain_steps: target forwards without a draft, the prefill not counted.
        new_tokens: tokens generated.
        drafted_per_slot: `[i]`: rounds in which draft `i + 1` was verified.
        reached_per_slot: `[i]`: the same, and all drafts before it accepted.
        accepted_per_slot: `[i]`: rounds in which draft `i + 1` was emitted.
        accepted_per_round: accepted drafts, round by round. A streamer receives the prompt, the first token, and then
            one chunk for each round: its first `accepted_per_round[r]` tokens were drafted.
        prefill_seconds: the target's first forward. verify_seconds: its other forwards.
        draft_seconds: the drafter, the LM head on its slots and the choice of tokens.
        other_seconds: everything else in the decoding loop. Seconds are written when the call ends.
    """

    num_draft_tokens: int
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    bonus_tokens: int = 0
    plain_steps: int = 0
    new_tokens: int = 0
    drafted_per_slot: list[int] = field(default_factory=list)
    reached_per_slot: list[int] = field(default_factory=list)
    accepted_per_slot: list[int] = field(default_factory=list)
    accepted_per_round: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    other_seconds: float = 0.0

    def __post_init__(self):
        for name in ("drafted_per_slot", "reached_per_slot", "accepted_per_slot"):
            if not getattr(self, name):
                setattr(self, name, [0] * self.num_draft_tokens)

    def record_prefill(self, emitted: int) -> None:
        """Count the first target forward, which emitted `emitted` tokens of its own."""
        self.new_tokens += emitted

    def record_round(self, drafted: int, accepted: int, emitted: int, sought: bool = False) -> None:
        """Count one target forward that verified `drafted` tokens and emitted `accepted` of them, `emitted` in all.

        `sought`: drafts were asked for, so that none is a round in which nothing was found.
        """
        self.new_tokens += emitted
        if drafted == 0 and not sought:
            self.plain_steps += 1
            return
        if emitted == accepted:  # cut behind an accepted draft: what follows was neither emitted nor refused
            drafted = accepted
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self.bonus_tokens += emitted - accepted
        self.accepted_per_round.append(accepted)
        for slot in range(drafted):
            self.drafted_per_slot[slot] += 1
            self.reached_per_slot[slot] += slot <= accepted
            self.accepted_per_slot[slot] += slot < accepted

    @property
    def accepted_length(self) -> float:
        """The paper's tau: tokens a round, the bonus token counted, `1 + accepted / rounds`."""
        return 1 + self.accepted / self.rounds if self.rounds else 1.0

    @property
    def acceptance_per_slot(self) -> list[float]:
        """Share of all rounds in which draft `i + 1` was emitted; the sum is `accepted_length - 1`."""
        return [accepted / self.rounds if self.rounds else 0.0 for accepted in self.accepted_per_slot]

    @property
    def conditional_acceptance_per_slot(self) -> list[float]:
        """Share of the rounds that reached draft `i + 1`, all drafts before it accepted, in which it was emitted."""
        return [
            accepted / reached if reached else 0.0
            for accepted, reached in zip(self.accepted_per_slot, self.reached_per_slot)
        ]

    @property
    def total_seconds(self) -> float:
        """Seconds in the decoding loop, prefill included."""
        return self.prefill_seconds + self.draft_seconds + self.verify_seconds + self.other_seconds

    def to_dict(self) -> dict[str, Any]:
        """All fields and the derived rates, ready for JSON."""
        derived = ("accepted_length", "acceptance_per_slot", "conditional_acceptance_per_slot", "total_seconds")
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in derived}

    def __add__(self, other: "GenerationStatistics") -> "GenerationStatistics":
        """The record of both calls together; they must draft equally many tokens a round."""
        if not isinstance(other, GenerationStatistics):
            return NotImplemented
        if self.num_draft_tokens != other.num_draft_tokens:
            raise ValueError(
                f"`num_draft_tokens`: found {other.num_draft_tokens}, wanted {self.num_draft_tokens}, to add records."
            )
        total = {"num_draft_tokens": self.num_draft_tokens}
        for item in dataclasses.fields(self)[1:]:
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            if item.name.endswith("_per_slot"):
                total[item.name] = [a + b for a, b in zip(mine, theirs)]
            else:
                total[item.name] = mine + theirs
        return GenerationStatistics(**total)


class _Stopwatch:
    """Adds up seconds between `start` and `stop`; by events on CUDA, so that nothing waits for the device."""

    def __init__(self, device: torch.device):
        self.device = device
        self.on_cuda = device.type == "cuda"
        self.total = 0.0
        self.pairs = []

    def _now(self):
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def start(self) -> None:
        self.started = self._now()

    def stop(self) -> None:
        if self.on_cuda:
            self.pairs.append((self.started, self._now()))
        else:
            self.total += time.perf_counter() - self.started

    def seconds(self) -> float:
        if self.pairs:
            torch.cuda.synchronize(self.device)
            self.total += sum(start.elapsed_time(stop) for start, stop in self.pairs) / 1000
            self.pairs = []
        return self.total


# ---------------------------------------------------------------------------------------------------------------------
# 3. The tap
# ---------------------------------------------------------------------------------------------------------------------


class TargetTap:
    """What one assisted call reads from the target's own forward; nothing of it outlives the `with` block.

    The forward hooks react only to forwards on this call's cache in this call's thread: a plain `generate` elsewhere
    on the same target is not disturbed and does not disturb. They return nothing, so the target's outputs stay as
    they are, and the target keeps no layer's states that were not asked for.

    One thing is corrected on the way. V4's HCA layers let a single query see every entry, but bound the queries of a
    longer forward by their position, which lags behind the entries when a prompt has padding. Verification would then
    see fewer entries than one-by-one decoding, so with `by_index` the verifying forwards bound them by cache index.

    Args:
        target: The `DeepseekV4ForCausalLM`.
        cache: The target cache of this call.
        config: The drafter's `HyperDFlashConfig`; `None` if no residual is needed (prompt lookup).
        by_index: Whether positions and cache indices differ (padding, holes in the mask).
    """

    def __init__(self, target: PreTrainedModel, cache: Cache, config: Any | None, by_index: bool):
        self.target, self.cache, self.config, self.by_index = target, cache, config, by_index
        self.thread = get_ident()
        self.prefill_watch, self.verify_watch = _Stopwatch(target.device), _Stopwatch(target.device)
        self.active = False
        self.forwards = 0
        self.chunk_length = self.length_before = 0
        self.outputs = None
        self.captured: dict[int, torch.Tensor] = {}

    def __enter__(self) -> "TargetTap":
        self.handles = [
            self.target.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            self.target.register_forward_hook(self._after_forward),
        ]
        decoder = self.target.get_decoder()
        if self.config is not None and self.config.context_source == "pre_hc_head":
            self.handles.append(decoder.hc_head.register_forward_pre_hook(self._capture_residual))
        elif self.config is not None:
            for layer_id in self.config.target_layer_ids:
                capture = functools.partial(self._capture_layer, layer_id)
                self.handles.append(decoder.layers[layer_id].register_forward_hook(capture))
        if self.by_index:
            for layer in decoder.layers:
                if getattr(layer.self_attn, "layer_type", None) == "heavily_compressed_attention":
                    self.handles.append(layer.self_attn.compressor.register_forward_pre_hook(self._bound_by_index))
        return self

    def __exit__(self, *exception) -> None:
        for handle in self.handles:
            handle.remove()
        self.outputs = None
        self.captured = {}

    def _listening(self) -> bool:
        return self.active and get_ident() == self.thread

    def _before_forward(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if kwargs.get("cache") is self.cache and get_ident() == self.thread:
            self.active = True
            self.forwards += 1
            self.length_before = self.cache.get_seq_length()
            self.watch = self.prefill_watch if self.forwards == 1 else self.verify_watch
            self.watch.start()

    def _after_forward(self, module: nn.Module, args: tuple, outputs: Any) -> None:
        if self._listening():
            self.active = False
            self.watch.stop()
            self.chunk_length = self.cache.get_seq_length() - self.length_before
            self.outputs = outputs

    def _capture_residual(self, module: nn.Module, args: tuple) -> None:
        if self._listening():
            self.captured[0] = args[0]  # [b, s, m, d]

    def _capture_layer(self, layer_id: int, module: nn.Module, args: tuple, output: torch.Tensor | tuple) -> None:
        if self._listening():
            # [b, s, m, d]; HY-V4's layers return more beside it
            self.captured[layer_id] = output[0] if isinstance(output, tuple) else output

    def _bound_by_index(self, module: nn.Module, args: tuple) -> tuple | None:
        hidden_states, q_residual, position_ids, cache, layer_idx = args
        if not self._listening() or self.forwards == 1 or position_ids.shape[1] == 1:
            return None
        length = cache.get_seq_length()
        indices = torch.arange(length - position_ids.shape[1], length, device=position_ids.device)
        return hidden_states, q_residual, indices.unsqueeze(0), cache, layer_idx

    def context_states(self, length: int) -> torch.Tensor:
        """The drafter's context of the first `length` tokens of the last forward, `[b, length, m, d or L * d]`."""
        if self.config.context_source == "pre_hc_head":
            return self.captured[0][:, :length]
        return torch.cat([self.captured[layer_id][:, :length] for layer_id in self.config.target_layer_ids], dim=-1)

    def split_hidden_states(self, start: int, stop: int) -> tuple[torch.Tensor, ...]:
        """The rows `[start, stop)` of the last forward's hidden states, as a forward on these tokens returns them."""
        return tuple(states[:, start:stop] for states in self.outputs.hidden_states)

    def split_attentions(self, start: int, stop: int) -> tuple[torch.Tensor, ...]:
        """The same for the attention weights, `[b, heads, stop - start, keys]`, with the keys that such a forward has.

        The keys of a V4 layer are the window's tokens, then the entries of its compressor.
        """
        config = self.target.config.get_text_config()
        if getattr(config, "sliding_window", None) is None:  # HY-V4: every layer keeps every key
            return tuple(weights[:, :, start:stop, : self.length_before + stop] for weights in self.outputs.attentions)
        window = config.sliding_window
        past = min(self.length_before, window - 1)
        first_key, last_key = max(0, past + start + 1 - window), past + stop
        attentions = []
        for weights, layer_type in zip(self.outputs.attentions, config.layer_types):
            rate = config.compress_rates.get(layer_type)
            entries = (self.length_before + stop) // rate if rate else 0
            first_entry = past + self.chunk_length
            rows = weights[:, :, start:stop]
            attentions.append(
                torch.cat([rows[..., first_key:last_key], rows[..., first_entry : first_entry + entries]], dim=-1)
            )
        return tuple(attentions)


# ---------------------------------------------------------------------------------------------------------------------
# 4. The drafter's candidate generator
# ---------------------------------------------------------------------------------------------------------------------


# Processors that look at one row of logits and not at the tokens before it: they take all slots of a block at once
_ROWWISE_PROCESSORS = (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    MinPLogitsWarper,
    TypicalLogitsWarper,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
)


@dataclass
class DraftContext:
    """What a drafter knows of the tokens in a target cache.

    Attributes:
        cache: The drafter's own keys and values of the context.
        pending: Target states `[b, n, m, d]` of the newest tokens, not yet in `cache`; without gaps, up to the end.
        drafter, length, newest_keys: whose context it is, and how the target cache looked when the last call ended:
            it holds for the next call only if nobody has touched that cache since.
    """

    cache: Cache
    pending: list[torch.Tensor] = field(default_factory=list)
    drafter: weakref.ref | None = None
    length: int = 0
    newest_keys: torch.Tensor | None = None

    @classmethod
    def of(cls, target_cache: Cache, drafter: PreTrainedModel, new_cache: Callable[[Any], Cache]) -> "DraftContext":
        """Take up the context that `drafter` left with `target_cache`, or begin one with `new_cache(config)`."""
        context = _contexts.pop(target_cache, None)
        if (
            context is not None
            and context.drafter() is drafter
            and context.length == target_cache.get_seq_length()
            and context.newest_keys is target_cache.layers[0].keys
        ):
            return context
        return cls(cache=new_cache(drafter.config))

    def leave_with(self, target_cache: Cache, drafter: PreTrainedModel) -> None:
        """Keep the context for a next turn on `target_cache`; it is dropped together with that cache."""
        self.drafter = weakref.ref(drafter)
        self.length = target_cache.get_seq_length()
        self.newest_keys = target_cache.layers[0].keys
        _contexts[target_cache] = self


_contexts: "weakref.WeakKeyDictionary[Cache, DraftContext]" = weakref.WeakKeyDictionary()


class HyperDFlashCandidateGenerator(DFlashTokenCandidateGenerator):
    """Drafts the tokens after the anchor with one forward of a HyperDFlash drafter.

    What differs from the stock DFlash generator:

    * the context comes from `add_context`, as `[b, n, m, d]` states of accepted tokens: the target is not asked for
      hidden states, and those that the user asks for stay as they are;
    * the block's geometry is `config.geometry`, so a drafter may also draft from its anchor slot;
    * a round may propose fewer drafts than the block holds: the drafter still sees its whole block, but the LM head
      runs only on the slots that are proposed, and never behind the length budget;
    * padding is left out of the context (batch size is 1), so the drafter sees what it was trained on;
    * temperature, top-k and the like are applied to all slots at once; only processors that read the tokens before a
      slot are run slot by slot; without processors there is no loop;
    * a drafter with a sequential head goes through LM head and processors slot by slot, each behind the draft before;
    * a confidence threshold ends a draft before its first slot, but for slot 1, whose likeliest token is less likely
      than that. No token's own draw decides whether it is verified, so sampling stays lossless;
    * with sampling, draft logits are returned in float32: the distribution that rejection sampling divides by is then
      the one that the drafts were drawn from, in half precision too;
    * the context outlives the call. It is bound to the target's cache (weakly, and only for as long as nobody else
      uses that cache), so that a next turn on the cache drafts with the whole conversation as context. For a cache
      whose earlier tokens this drafter has not seen (filled by a plain `generate`, copied, cropped) the states of
      these tokens are unknown: drafting begins with an empty context and grows it with the new tokens, all at their
      right positions. Such drafts are accepted less often; the text is the same.

    Args:
        assistant_model (`PreTrainedModel`): The drafter.
        main_model_input_embeddings, main_model_output_embeddings: The target's embedding and LM head.
        generation_config (`GenerationConfig`): That of the call.
        logits_processor (`LogitsProcessorList`): The target's processors; drafts are chosen under the same ones.
        num_draft_tokens (`int`): Drafts a round, at most `config.geometry.num_draft_tokens`.
        context (`DraftContext`): What the drafter knows already.
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
        super().__init__(
            assistant_model,
            main_model_input_embeddings,
            main_model_output_embeddings,
            generation_config,
            logits_processor=logits_processor,
        )
        self.model_kwargs_overrides = {}
        self.geometry = assistant_model.config.geometry
        self.num_draft_tokens = num_draft_tokens
        self.confidence_threshold = confidence_threshold(assistant_model, generation_config)
        self.context = context
        self.dtype = next(assistant_model.layers.parameters()).dtype
        self.noise_ids_mask = self.noise_ids_mask.to(main_model_input_embeddings.weight.device)
        self.processors = logits_processor or []
        self.rowwise = all(type(processor) in _ROWWISE_PROCESSORS for processor in self.processors)

    @staticmethod
    def new_cache(config: Any) -> Cache:
        """An empty cache for a drafter's context."""
        cache = DFlashCache(config=config)
        cache.activate_past_recording()
        return cache

    def add_context(self, states: torch.Tensor) -> None:
        """Append target states `[b, n, m, d or L * d]` of the tokens that follow the known context."""
        self.context.pending.append(states)

    def get_candidates(
        self, input_ids: torch.LongTensor, model_kwargs: dict[str, Any], **kwargs
    ) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """Draft behind the last token of `input_ids`, the anchor.

        Returns:
            `[b, length + drafts]` token ids and `[b, drafts, vocab]` processed draft logits; `input_ids` and `None` if
            the length budget leaves no room for a draft.
        """
        num_drafts = min(self.num_draft_tokens, self.main_model_max_length - input_ids.shape[1] - 1)
        if num_drafts <= 0:
            return input_ids, None
        hidden_states = self._draft(input_ids, model_kwargs)  # [b, block, d]
        first = self.geometry.first_slot
        hidden_states = hidden_states[:, first : first + num_drafts]
        if getattr(self.assistant_model, "sequential_head", None) is not None:
            return self._choose_in_sequence(input_ids, hidden_states)
        candidate_ids, logits = self._choose(input_ids, self._logits(hidden_states, input_ids.device))
        sure = 1 + int(self._is_unsure(logits[0, 1:]).logical_not().cumprod(dim=0).sum())
        return candidate_ids[:, : input_ids.shape[1] + sure], logits[:, :sure]

    def _is_unsure(self, logits: torch.Tensor) -> torch.BoolTensor:
        """Whether the likeliest token is less likely than the threshold: `[drafts, vocab]` -> `[drafts]`."""
        if self.confidence_threshold == 0:
            return torch.zeros(logits.shape[0], dtype=torch.bool)
        return logits.float().softmax(dim=-1).amax(dim=-1) < self.confidence_threshold

    def _logits(self, hidden_states: torch.Tensor, device: torch.device) -> torch.Tensor:
        lm_head = self.main_model_output_embeddings
        return lm_head(hidden_states.to(lm_head.weight.device, lm_head.weight.dtype)).to(device)

    def _draft(self, input_ids: torch.LongTensor, model_kwargs: dict[str, Any]) -> torch.Tensor:
        pending = self.context.pending
        states = pending[0] if len(pending) == 1 else torch.cat(pending, dim=1)
        length = states.shape[1]
        # Positions and mask of the call reach to the anchor; the pending context ends just before it
        positions = model_kwargs["position_ids"][:, -length - 1 :]
        positions, anchor = positions[:, :-1], positions[:, -1:]
        if (mask := model_kwargs.get("attention_mask")) is not None:
            known = mask[0, -length - 1 : -1].bool()
            positions, states = positions[:, known], states[:, known.to(states.device)]

        slots = torch.arange(self.block_size, device=anchor.device)
        position_ids = torch.cat([positions, self.geometry.position(anchor, slots)], dim=-1)  # [b, context + block]
        noise_ids = torch.cat([input_ids[:, -1:].to(self.noise_ids_mask.device), self.noise_ids_mask], dim=-1)
        self.context.cache.set_previous_accepted_tokens(states.shape[1])
        outputs = self.assistant_model(
            noise_embeds=self._get_noise_embeds(noise_ids).to(self.device, self.dtype),
            context_hidden_states=states.to(self.device),
            position_ids=position_ids.to(self.device),
            attention_mask=None,
            cache=self.context.cache,
        )
        # The context stays in the drafter's cache, the block does not
        self.context.cache.crop(-self.block_size)
        pending.clear()
        return outputs.last_hidden_state

    def _choose(self, input_ids: torch.LongTensor, logits: torch.Tensor) -> tuple[torch.LongTensor, torch.Tensor]:
        if self.processors or self.do_sample:
            logits = logits.to(torch.float32)
        if self.processors and not self.rowwise:
            candidate_ids = input_ids
            for slot in range(logits.shape[1]):
                logits[:, slot] = self.logits_processor(candidate_ids, logits[:, slot])
                candidate_ids = torch.cat([candidate_ids, self._pick(logits[:, slot])], dim=-1)
            return candidate_ids, logits
        if self.processors:
            logits = self.logits_processor(input_ids, logits[0]).unsqueeze(0)
        return torch.cat([input_ids, self._pick(logits[0]).transpose(0, 1)], dim=-1), logits

    def _choose_in_sequence(
        self, input_ids: torch.LongTensor, hidden_states: torch.Tensor
    ) -> tuple[torch.LongTensor, torch.Tensor]:
        """As `_choose`, from the body's `[b, drafts, d]`, with the sequential head between one slot and the next."""
        candidate_ids, rows = input_ids, []
        for slot in range(hidden_states.shape[1]):
            previous = candidate_ids[:, -1:].to(self.noise_ids_mask.device)
            embeds = self._get_noise_embeds(previous).to(hidden_states.device, hidden_states.dtype)
            mixed = self.assistant_model.sequential_head(hidden_states[:, slot : slot + 1], embeds)  # [b, 1, d]
            longer_ids, logits = self._choose(candidate_ids, self._logits(mixed, input_ids.device))
            if slot > 0 and self._is_unsure(logits[0]):
                break
            candidate_ids = longer_ids
            rows.append(logits)
        return candidate_ids, torch.cat(rows, dim=1)

    def _pick(self, logits: torch.Tensor) -> torch.LongTensor:
        """`[rows, vocab]` -> `[rows, 1]`."""
        if self.do_sample:
            return torch.multinomial(logits.softmax(dim=-1), num_samples=1)
        return logits.argmax(dim=-1, keepdim=True)


# ---------------------------------------------------------------------------------------------------------------------
# 5. What the stock verification loop sees
# ---------------------------------------------------------------------------------------------------------------------


class VerifiedCandidates(CandidateGenerator):
    """Stands between a proposer of drafts and the stock `_assisted_decoding`; makes the loop exact where it is not.

    * A cache from an earlier turn: the stock loop feeds the whole prompt to it again. Here the first forward takes the
      tokens that the cache lacks, found by the same rule as in a plain `generate`.
    * An attention mask longer than the token ids (only the new tokens were passed): the stock loop cuts its end off.
    * Stopping criteria other than end-of-sequence and length: the stock loop asks them once a round and overshoots.
      Here they are asked about every draft before it is verified; a draft that would stop the text is the last of its
      round and, if accepted, the last of the text. Where a draft stops depends on no later draft, so sampling stays
      lossless. Criteria that may read scores cannot be asked in advance: `output_scores` together with such criteria
      decodes without drafts, and says so.
    * `output_hidden_states` and `output_attentions`: the stock loop splits a round's outputs into tokens along the
      wrong dimension for V4's `[b, s, m, d]` states and its compressed keys; `TargetTap` does it right.

    Args:
        proposer: A `HyperDFlashCandidateGenerator`, or a stock generator that needs no model outputs.
        tap: The tap on the target of this call.
        generation_config: The call's own copy. Its `max_length` is the budget of the round during the call.
        stopping_criteria: The call's.
        statistics: Where to count.
        holds_cached_tokens: Whether the prompt's token ids begin with those that the cache holds already.
    """

    requires_model_outputs = True

    def __init__(
        self,
        proposer: CandidateGenerator,
        tap: TargetTap,
        generation_config: GenerationConfig,
        stopping_criteria: StoppingCriteriaList,
        statistics: GenerationStatistics,
        holds_cached_tokens: bool,
    ):
        self.proposer, self.tap, self.statistics = proposer, tap, statistics
        self.generation_config = generation_config
        self.max_length = generation_config.max_length
        self.model_kwargs_overrides = {}
        self.draft_watch = _Stopwatch(tap.target.device)
        self.past_length = tap.cache.get_seq_length() if holds_cached_tokens else 0
        self.keeps_outputs = bool(generation_config.return_dict_in_generate)
        self.keeps_hidden_states = self.keeps_outputs and bool(generation_config.output_hidden_states)
        self.keeps_attentions = self.keeps_outputs and bool(generation_config.output_attentions)
        self.hidden_states, self.attentions = [], []
        self.criteria = StoppingCriteriaList(c for c in stopping_criteria if not self._settled_by_loop(c))
        self.may_draft = not (self.criteria and self.keeps_outputs and generation_config.output_scores)
        if not self.may_draft:
            names = ", ".join(type(criterion).__name__ for criterion in self.criteria)
            logger.warning(
                f"Decoding without drafts: `output_scores=True` hands the scores to the stopping criteria ({names}), "
                "so they cannot be asked about a draft before the target has scored it."
            )

    def _settled_by_loop(self, criterion: Any) -> bool:
        if isinstance(criterion, EosTokenCriteria):
            eos_token_id = getattr(self.generation_config, "_eos_token_tensor", None)
            return eos_token_id is not None and bool(torch.isin(criterion.eos_token_id, eos_token_id).all())
        if isinstance(criterion, MaxLengthCriteria):
            return criterion.max_length >= self.max_length
        return isinstance(criterion, MaxTimeCriteria)

    def get_candidates(
        self, input_ids: torch.LongTensor, model_kwargs: dict[str, Any], is_first_iteration: bool, **kwargs
    ) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """See `CandidateGenerator.get_candidates`; also sets what the next target forward is to be given."""
        self.generation_config.max_length = self.max_length
        candidate_ids, candidate_logits = input_ids, None
        self.sought = False
        if self.may_draft and not is_first_iteration:  # the prompt is read by the target alone
            self.sought = self.max_length - input_ids.shape[1] > 1
            self.draft_watch.start()
            candidate_ids, candidate_logits = self.proposer.get_candidates(input_ids, model_kwargs=model_kwargs)
            self.draft_watch.stop()
            if self.criteria:
                candidate_ids, candidate_logits = self._end_at_stop(input_ids, candidate_ids, candidate_logits)
        self.drafts = candidate_ids[:, input_ids.shape[1] :]
        self.model_kwargs_overrides = self._overrides(input_ids, model_kwargs, is_first_iteration)
        return candidate_ids, candidate_logits

    def _overrides(
        self, input_ids: torch.LongTensor, model_kwargs: dict[str, Any], is_first_iteration: bool
    ) -> dict[str, torch.Tensor]:
        overrides = {}
        mask = model_kwargs.get("attention_mask")
        if mask is not None and mask.shape[1] != input_ids.shape[1]:
            overrides["attention_mask"] = torch.cat([mask, mask.new_ones(mask.shape[0], self.drafts.shape[1])], dim=-1)
        if is_first_iteration and self.past_length > 0:
            overrides["input_ids"] = input_ids[:, self.past_length :].contiguous()
            overrides["position_ids"] = model_kwargs["position_ids"][:, self.past_length :].contiguous()
        return overrides

    def _end_at_stop(
        self, input_ids: torch.LongTensor, candidate_ids: torch.LongTensor, candidate_logits: torch.Tensor | None
    ) -> tuple[torch.LongTensor, torch.Tensor | None]:
        for length in range(input_ids.shape[1] + 1, candidate_ids.shape[1] + 1):
            if bool(self.criteria(candidate_ids[:, :length], None).all()):
                self.generation_config.max_length = min(self.max_length, length)
                if candidate_logits is not None:
                    candidate_logits = candidate_logits[:, : length - input_ids.shape[1]]
                return candidate_ids[:, :length], candidate_logits
        return candidate_ids, candidate_logits

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        """Called by the loop when a forward has been verified: `num_matches + 1` tokens were emitted."""
        emitted, drafted = num_matches + 1, self.drafts.shape[1]
        # The last emitted token is the target's own, unless the round was cut behind an accepted draft
        cut = emitted <= drafted and bool(self.drafts[0, emitted - 1] == input_ids[0, -1])
        if self.tap.forwards == 1:
            self.statistics.record_prefill(emitted)
        else:
            self.statistics.record_round(drafted, emitted if cut else num_matches, emitted, self.sought)
        if self.tap.config is not None:
            self.proposer.add_context(self.tap.context_states(self.tap.chunk_length - drafted + num_matches))
        # One element for each emitted token, the first with the whole prompt, as in a plain `generate`
        prompt_length = self.tap.chunk_length - drafted  # 1 in a round: the anchor
        for index in range(emitted):
            start, stop = (prompt_length + index - 1, prompt_length + index) if index else (0, prompt_length)
            if self.keeps_hidden_states:
                self.hidden_states.append(self.tap.split_hidden_states(start, stop))
            if self.keeps_attentions:
                self.attentions.append(self.tap.split_attentions(start, stop))


# ---------------------------------------------------------------------------------------------------------------------
# 6. Checks before anything is generated
# ---------------------------------------------------------------------------------------------------------------------


# Processors that count their calls as tokens: refused drafts cannot be taken back from them
_STATEFUL_PROCESSORS = (UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)


def is_drafter(model: Any) -> bool:
    """Whether `model` is a drafter of ours, of this copy of the code or another: told by `config.model_type`."""
    return getattr(getattr(model, "config", None), "model_type", None) in DRAFTER_TYPES


def check_drafter_fits(target: PreTrainedModel, drafter: PreTrainedModel) -> None:
    """Raise `ValueError`, naming field, found and wanted, if `drafter` was not made for a target like `target`."""
    config = target.config.get_text_config()
    drafter_config = drafter.config
    wanted = {
        "target_model_type": config.model_type,
        "target_hidden_size": config.hidden_size,
        "target_num_hidden_layers": config.num_hidden_layers,
        "hc_mult": getattr(config, "hc_mult", None),
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,  # embedding and LM head are the target's
    }
    for name, value in wanted.items():
        if (found := getattr(drafter_config, name, None)) != value:
            raise ValueError(
                f"The drafter does not fit {type(target).__name__}: `assistant_model.config.{name}`: found {found!r}, "
                f"wanted {value!r}, the target's."
            )
    rows = target.get_input_embeddings().weight.shape[0]
    if not 0 <= getattr(drafter_config, "mask_token_id", 0) < rows:  # only block drafters have one
        raise ValueError(
            f"The drafter does not fit {type(target).__name__}: `assistant_model.config.mask_token_id`: found "
            f"{drafter_config.mask_token_id}, wanted an id in [0, {rows}), the target's embedding."
        )
    for layer_id in drafter_config.target_layer_ids:
        if not 0 <= layer_id < config.num_hidden_layers:
            raise ValueError(
                f"The drafter does not fit {type(target).__name__}: `assistant_model.config.target_layer_ids`: found "
                f"{layer_id}, wanted ids in [0, {config.num_hidden_layers}), the target's layers."
            )
    if drafter_config.context_source == "pre_hc_head" and not hasattr(target.get_decoder(), "hc_head"):
        raise ValueError(
            f"The drafter does not fit {type(target).__name__}: `assistant_model.config.context_source`: found "
            f"'pre_hc_head' (reducer {drafter_config.reducer!r}), wanted 'multi_layer': the target has no `hc_head`."
        )


def _assistant_setting(
    name: str, drafter: PreTrainedModel, generation_config: GenerationConfig
) -> tuple[str, int | float | None]:
    """(where it stands, value) of the call's setting if it is not transformers' default, else of the drafter's own."""
    found = getattr(generation_config, name)
    if found is not None and found != GenerationConfig._get_default_generation_params()[name]:
        return name, found
    own = getattr(drafter, "generation_config", None)
    return f"assistant_model.generation_config.{name}", getattr(own, name, None)


def confidence_threshold(drafter: PreTrainedModel, generation_config: GenerationConfig) -> float:
    """`assistant_confidence_threshold` of the call, else of the drafter, else 0: drafts are as long as they may be.

    A call's 0.4 is transformers' own default and counts as unset, as its 20 for `num_assistant_tokens` does.

    Raises:
        ValueError: it is no probability below 1.
    """
    source, found = _assistant_setting("assistant_confidence_threshold", drafter, generation_config)
    if found is None:
        return 0.0
    if not 0 <= found < 1:
        raise ValueError(f"`{source}`: found {found}, wanted at least 0 and below 1.")
    return found


def draft_length(drafter: PreTrainedModel, generation_config: GenerationConfig) -> int:
    """How many tokens a round drafts: `num_assistant_tokens` of the call, else of the drafter, else the whole block.

    A recursive drafter (MTP) has no block: it drafts as many as are asked for.

    transformers fills an unset `num_assistant_tokens` of the call with its own default (20), which cannot be told from
    a user's 20 and therefore counts as unset.

    Raises:
        ValueError: the number is below 1 or above what the block holds.
    """
    most = drafter.config.geometry.num_draft_tokens
    source, found = _assistant_setting("num_assistant_tokens", drafter, generation_config)
    if found is None:
        return most
    if not hasattr(drafter.config, "block_size"):
        if found < 1:
            raise ValueError(f"`{source}`: found {found}, wanted at least 1.")
        return found
    if not 1 <= found <= most:
        raise ValueError(
            f"`{source}`: found {found}, wanted 1 to {most}: the drafter's block of {drafter.config.block_size} slots "
            f"holds {most} drafts."
        )
    return found


def check_assisted_call(
    target: PreTrainedModel, drafter: PreTrainedModel, mode: GenerationMode, generation_config: GenerationConfig
) -> None:
    """Raise `ValueError` if the call cannot be assisted by `drafter`: what it asks for, or the pair of models."""
    rules = {
        "num_beams": (generation_config.num_beams, (None, 1)),
        "num_return_sequences": (generation_config.num_return_sequences, (None, 1)),
        "use_cache": (generation_config.use_cache, (None, True)),
        "prompt_lookup_num_tokens": (generation_config.prompt_lookup_num_tokens, (None,)),
        "assistant_early_exit": (generation_config.assistant_early_exit, (None,)),
        "use_mtp": (generation_config.use_mtp, (None, False)),
        "dola_layers": (generation_config.dola_layers, (None,)),
    }
    for name, (found, allowed) in rules.items():
        if found not in allowed:
            raise ValueError(
                f"`{name}`: found {found!r}, wanted {allowed[-1]!r} together with a HyperDFlash `assistant_model`."
            )
    if mode != GenerationMode.ASSISTED_GENERATION:
        raise ValueError(
            f"generation mode: found '{mode.value}', wanted greedy search or sampling together with a HyperDFlash "
            "`assistant_model`."
        )
    check_drafter_fits(target, drafter)
    draft_length(drafter, generation_config)


def check_inputs(
    input_ids: torch.LongTensor, cache: Cache | None, processors: LogitsProcessorList, target: PreTrainedModel
) -> None:
    """Raise `ValueError` for inputs that cannot be verified a block at a time."""
    if input_ids.shape[0] != 1:
        raise ValueError(f"batch size: found {input_ids.shape[0]}, wanted 1: assisted generation takes one sequence.")
    if input_ids.shape[1] == 0:
        raise ValueError("`input_ids`: found no tokens, wanted at least one.")
    if cache is None:
        raise ValueError("`cache`: found None, wanted a cache: drafts are verified on top of it (`use_cache=True`).")
    num_layers = target.config.get_text_config().num_hidden_layers
    if len(cache.layers) != num_layers:
        raise ValueError(
            f"`cache`: found one with {len(cache.layers)} layers, wanted {num_layers}, the target's. Pass "
            "`DynamicCache(config=target.config)`."
        )
    for processor in processors:
        if isinstance(processor, _STATEFUL_PROCESSORS):
            raise ValueError(
                f"logits processors: found {type(processor).__name__}, wanted processors without a state of their "
                "own: it counts every call as a new token, and refused drafts cannot be taken back from it."
            )


# ---------------------------------------------------------------------------------------------------------------------
# 7. Hooks
# ---------------------------------------------------------------------------------------------------------------------


class _Rewindable:
    """A target as the stock checks see it once its cache can take tokens back."""

    _is_stateful = False

    def __init__(self, target: PreTrainedModel):
        self._target = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


def _looks_up_prompt(target: PreTrainedModel, generation_config: GenerationConfig) -> bool:
    return generation_config.prompt_lookup_num_tokens is not None and target.config.model_type == "deepseek_v4"


def _hook_validate_generation_mode(original: Callable) -> Callable:
    @functools.wraps(original)
    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        drafter = generation_mode_kwargs.get("assistant_model")
        if is_drafter(drafter):
            check_assisted_call(self, drafter, generation_mode, generation_config)
            generation_config.speculation_type = "dflash"
            self = _Rewindable(self)
        elif drafter is not None and self.config.model_type == "deepseek_v4":
            raise ValueError(
                f"`assistant_model`: found {type(drafter).__name__}, wanted a HyperDFlash drafter for "
                f"{type(self).__name__}: AutoModel.from_pretrained(drafter, trust_remote_code=True)."
            )
        elif _looks_up_prompt(self, generation_config):
            self = _Rewindable(self)
        return original(self, generation_mode, generation_config, generation_mode_kwargs)

    return _validate_generation_mode


def _hook_get_candidate_generator(original: Callable) -> Callable:
    @functools.wraps(original)
    def _get_candidate_generator(self, generation_config, *args, **kwargs):
        candidates = getattr(generation_config, "_hyperdflash_candidates", None)
        return original(self, generation_config, *args, **kwargs) if candidates is None else candidates

    return _get_candidate_generator


def _hook_assisted_decoding(original: Callable) -> Callable:
    @functools.wraps(original)
    def _assisted_decoding(self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        drafter = kwargs.get("assistant_model")
        if not is_drafter(drafter):
            drafter = None
            if not _looks_up_prompt(self, generation_config):
                return original(self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs)
        return _rewinding_decoding(
            original, self, drafter, input_ids, logits_processor, stopping_criteria, generation_config, kwargs
        )

    return _assisted_decoding


def _rewinding_decoding(
    original: Callable,
    target: PreTrainedModel,
    drafter: PreTrainedModel | None,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    kwargs: dict[str, Any],
) -> Any:
    """The stock decoding loop `original`, on a cache that rewinds and with the drafter's (or the prompt's) drafts."""
    started = time.perf_counter()
    cache = kwargs.get("cache")
    check_inputs(input_ids, cache, logits_processor, target)
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    # The rule of `GenerationMixin._prefill`: token ids as long as the mask are the whole sequence
    mask_length = mask.shape[1] if mask is not None else getattr(generation_config, "_mask_length", -1)
    holds_cached_tokens = mask_length == input_ids.shape[1]
    past_length = cache.get_seq_length()
    if past_length > 0 and holds_cached_tokens and input_ids.shape[1] <= past_length:
        raise ValueError(
            f"`input_ids`: found {input_ids.shape[1]} tokens, wanted more than the {past_length} tokens in `cache`: "
            "pass the whole sequence, or the new tokens and an `attention_mask` over the whole sequence."
        )
    by_index = positions is not None and int(positions[0, -1]) + 1 != positions.shape[1]

    if drafter is not None:
        num_drafts = draft_length(drafter, generation_config)
        generator = getattr(drafter, "candidate_generator_class", HyperDFlashCandidateGenerator)
        context = DraftContext.of(cache, drafter, generator.new_cache)
        proposer = generator(
            drafter,
            target.get_input_embeddings(),
            target.get_output_embeddings(),
            generation_config,
            logits_processor,
            num_drafts,
            context,
        )
    else:
        num_drafts = generation_config.prompt_lookup_num_tokens
        proposer = target._get_candidate_generator(
            generation_config=generation_config,
            input_ids=input_ids,
            inputs_tensor=None,
            logits_processor=logits_processor,
            model_kwargs=kwargs,
        )
    statistics = GenerationStatistics(num_draft_tokens=num_drafts)
    # Prompt lookup has no drafter to keep the record: a caller finds it on the cache that it passed
    (cache if drafter is None else drafter).last_generation = statistics

    tap = TargetTap(target, cache, None if drafter is None else drafter.config, by_index)
    candidates = VerifiedCandidates(
        proposer, tap, generation_config, stopping_criteria, statistics, holds_cached_tokens
    )
    generation_config._hyperdflash_candidates = candidates
    # `VerifiedCandidates` collects these; the stock loop must not
    generation_config.output_hidden_states = generation_config.output_attentions = False
    try:
        with rewindable(cache, max_rollback=num_drafts), tap:
            result = original(target, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs)
    finally:
        del generation_config._hyperdflash_candidates
    if drafter is not None:
        context.leave_with(cache, drafter)
    if candidates.keeps_hidden_states:
        result = type(result)(**result, hidden_states=tuple(candidates.hidden_states))
    if candidates.keeps_attentions:
        result = type(result)(**result, attentions=tuple(candidates.attentions))

    statistics.prefill_seconds = tap.prefill_watch.seconds()
    statistics.verify_seconds = tap.verify_watch.seconds()
    statistics.draft_seconds = candidates.draft_watch.seconds()
    statistics.other_seconds = time.perf_counter() - started - statistics.total_seconds
    return result


_HOOKS = {
    "_validate_generation_mode": _hook_validate_generation_mode,
    "_get_candidate_generator": _hook_get_candidate_generator,
    "_assisted_decoding": _hook_assisted_decoding,
}
_HOOKS_VERSION = 3


@dataclass(frozen=True)
class _Hook:
    """Marks a hooked method, so that any copy of this file recognises and removes the hooks of any other."""

    version: int
    original: Callable
    method: Callable


def install_hooks() -> None:
    """Make `generate(..., assistant_model=drafter)` and prompt lookup work on DeepSeek-V4; idempotent.

    Three methods of `GenerationMixin` are wrapped. A call without a HyperDFlash drafter goes straight to the stock
    method, except that `prompt_lookup_num_tokens` is let through for a DeepSeek-V4 target. No class of a target, no
    config and no cache class is touched.

    The package and the code in a checkpoint folder are copies of each other. The hooks recognise any copy's drafters,
    so one set is enough: the copy with the highest hook version serves all, and among equals the first one loaded.
    """
    for name, build in _HOOKS.items():
        current = getattr(GenerationMixin, name)
        hook = getattr(current, "_hyperdflash_hook", None)
        if hook is not None and (hook.version >= _HOOKS_VERSION or hook.method is not current):
            continue  # installed; or installed by an older copy and wrapped by somebody else since
        original = current if hook is None else hook.original
        method = build(original)
        method._hyperdflash_hook = _Hook(version=_HOOKS_VERSION, original=original, method=method)
        setattr(GenerationMixin, name, method)


def remove_hooks() -> None:
    """Put the stock methods of `GenerationMixin` back, whichever copy of this file had wrapped them; idempotent.

    Raises:
        RuntimeError: somebody else has wrapped a method on top of the hook; nothing is changed then.
    """
    current = {name: getattr(GenerationMixin, name) for name in _HOOKS}
    hooks = {name: getattr(method, "_hyperdflash_hook", None) for name, method in current.items()}
    for name, hook in hooks.items():
        if hook is not None and hook.method is not current[name]:
            raise RuntimeError(
                f"`GenerationMixin.{name}`: found {current[name]!r} wrapped around the hook, wanted the hook itself; "
                "undo the other wrapping first."
            )
    for name, hook in hooks.items():
        if hook is not None:
            setattr(GenerationMixin, name, hook.original)


def hooks_installed() -> bool:
    """Whether the hooks of this or another copy are in place."""
    return all(hasattr(getattr(GenerationMixin, name), "_hyperdflash_hook") for name in _HOOKS)
