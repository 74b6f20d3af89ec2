"""Who decodes: the target alone, prompt lookup, or the target with an assistant."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, DynamicCache, GenerationConfig, PreTrainedModel, set_seed

from ..generation_hyperdflash import GenerationStatistics, TargetTap
from ..utils.fingerprints import checkpoint_fingerprints
from ..utils.folders import check_model_path

TARGET, PROMPT_LOOKUP = "target", "prompt-lookup"
DEFAULT_LOOKUP_DRAFTS = 6  # the paper's budget


@dataclass
class Decoded:
    """One text.

    Attributes:
        ids: the new tokens.
        seconds, cpu_seconds: of the `generate` call, by the clock and by the processor.
        statistics: its record. That of the target alone has no rounds: each token after the first is a plain step.
    """

    ids: list[int]
    seconds: float
    cpu_seconds: float
    statistics: GenerationStatistics | None = None


@dataclass
class System:
    """One row of the tables.

    Attributes:
        name: as the user gave it: `target`, `prompt-lookup`, or an assistant's.
        num_draft_tokens: drafts a round; 0 for the target alone.
        path: folder or Hub id of the assistant; `None` for the other two.
        confidence_threshold: ends a draft before a token less likely than this; 0 does not.
        assistant: the assistant, once `load` has run.
    """

    name: str
    num_draft_tokens: int
    path: str | None = None
    confidence_threshold: float = 0.0
    assistant: PreTrainedModel | None = None

    @property
    def label(self) -> str:
        """As in the paper: the name, and in parentheses the drafts a round; behind them its confidence threshold."""
        if self.name == TARGET:
            return self.name
        threshold = f", {self.confidence_threshold:g}" if self.confidence_threshold else ""
        return f"{self.name} ({self.num_draft_tokens}{threshold})"

    @property
    def identity(self) -> dict[str, Any]:
        """What must be the same for two records to be of the same system, as JSON values."""
        record: dict[str, Any] = {"num_draft_tokens": self.num_draft_tokens}
        if self.path is not None:
            record["checkpoint"] = checkpoint_fingerprints(self.path) or self.path
        if self.confidence_threshold:
            record["confidence_threshold"] = self.confidence_threshold
        return record

    def decode(self, target: PreTrainedModel, input_ids: torch.LongTensor, seed: int, **kwargs: Any) -> Decoded:
        """Generates behind `input_ids` `[1, s]`, under `seed` and the arguments of `generate`."""
        cache = DynamicCache(config=target.config)
        if self.assistant is not None:
            self.assistant.generation_config.num_assistant_tokens = self.num_draft_tokens
            self.assistant.generation_config.assistant_confidence_threshold = self.confidence_threshold
            kwargs["assistant_model"] = self.assistant
        elif self.name == PROMPT_LOOKUP:
            kwargs["prompt_lookup_num_tokens"] = self.num_draft_tokens
        set_seed(seed)
        if self.name == TARGET:
            with TargetTap(target, cache, None, by_index=False) as tap:
                decoded = _timed_generate(target, input_ids, cache, kwargs)
            new_tokens = len(decoded.ids)
            statistics = GenerationStatistics(0, new_tokens=new_tokens, plain_steps=new_tokens - 1)
            statistics.prefill_seconds = tap.prefill_watch.seconds()
            statistics.verify_seconds = tap.verify_watch.seconds()
            statistics.other_seconds = decoded.seconds - statistics.total_seconds
            decoded.statistics = statistics
        else:
            decoded = _timed_generate(target, input_ids, cache, kwargs)
            decoded.statistics = (cache if self.assistant is None else self.assistant).last_generation
        return decoded


def _timed_generate(
    target: PreTrainedModel, input_ids: torch.LongTensor, cache: DynamicCache, kwargs: dict[str, Any]
) -> Decoded:
    start, cpu_start = time.perf_counter(), time.process_time()
    output = target.generate(input_ids, attention_mask=torch.ones_like(input_ids), cache=cache, **kwargs)
    if output.device.type == "cuda":
        torch.cuda.synchronize()
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    return Decoded(output[0, input_ids.shape[1] :].tolist(), seconds, cpu_seconds)


def read_systems(texts: Sequence[str], target: str, trust_remote_code: bool = False) -> list[System]:
    """The systems of `--systems`, without their weights.

    Raises:
        ValueError: a text of another form, no `target` or two systems with one label, an assistant that is none, or
            one that does not say how many tokens it drafts.
        OSError: an assistant that is not there.
    """
    systems = [_read_system(text, target, trust_remote_code) for text in texts]
    labels = [system.label for system in systems]
    if TARGET not in labels:
        raise ValueError(f"systems: found {labels} without {TARGET!r}, wanted it: the others are compared with it")
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise ValueError(f"systems: found two named {twice!r}, wanted names that differ")
    return systems


def _read_system(text: str, target: str, trust_remote_code: bool) -> System:
    if text == TARGET:
        return System(TARGET, 0)
    name, _, rest = text.partition(":")
    if name == PROMPT_LOOKUP:
        if rest and not rest.isdigit():
            raise ValueError(f"systems: found {text!r}, wanted {PROMPT_LOOKUP} or {PROMPT_LOOKUP}:DRAFTS")
        return System(name, _positive(text, rest or DEFAULT_LOOKUP_DRAFTS))
    if not name or not rest or name == TARGET:
        form = "NAME:PATH[:DRAFTS[:CONFIDENCE]]"
        raise ValueError(f"systems: found {text!r}, wanted {TARGET}, {PROMPT_LOOKUP}[:DRAFTS] or {form}")
    path, drafts, threshold = re.fullmatch(r"(.+?)(?::(\d+)(?::(\d*\.\d+))?)?", rest).groups()
    if threshold is not None and not 0 <= float(threshold) < 1:
        raise ValueError(f"systems: found {text!r}, wanted a confidence of at least 0 and below 1")
    check_model_path("systems", path)
    options = {"trust_remote_code": trust_remote_code}
    config = AutoConfig.from_pretrained(path, **options)
    target_type = AutoConfig.from_pretrained(target, **options).model_type
    if config.model_type == target_type:
        raise ValueError(f"systems: {name}: found a target ({target_type!r}) in {path!r}, wanted a drafter for one")
    if drafts is None:
        drafts = _own_number_of_drafts(path, config)
        if drafts is None:
            raise ValueError(f"systems: found {text!r} and no number of drafts in {path!r}, wanted NAME:PATH:DRAFTS")
    if threshold is None:
        threshold = _own_setting(path, "assistant_confidence_threshold")
    return System(name, _positive(text, drafts), path, float(threshold or 0))


def _positive(text: str, drafts: str | int) -> int:
    if int(drafts) < 1:
        raise ValueError(f"systems: found {text!r}, wanted at least 1 draft a round")
    return int(drafts)


def _own_number_of_drafts(path: str, config: Any) -> int | None:
    """`num_assistant_tokens` of the assistant's generation config, else what its block holds."""
    own = _own_setting(path, "num_assistant_tokens")
    return own or getattr(getattr(config, "geometry", None), "num_draft_tokens", None)


def _own_setting(path: str, name: str) -> Any:
    """A setting of the assistant's generation config; `None` if it has none."""
    try:
        return getattr(GenerationConfig.from_pretrained(path), name)
    except OSError:
        return None


def load_assistants(systems: Sequence[System], dtype: str, device: str, trust_remote_code: bool = False) -> None:
    """Loads the assistant of each system; a checkpoint that serves two budgets is loaded once."""
    loaded: dict[str, PreTrainedModel] = {}
    for system in systems:
        if system.path is not None:
            if system.path not in loaded:
                model = AutoModel.from_pretrained(system.path, dtype=dtype, trust_remote_code=trust_remote_code)
                loaded[system.path] = model.to(device).eval()
            system.assistant = loaded[system.path]


__all__ = ["PROMPT_LOOKUP", "TARGET", "Decoded", "System", "load_assistants", "read_systems"]
