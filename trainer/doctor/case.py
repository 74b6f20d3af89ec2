"""What `doctor` looks at, and what it says."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .fits import Streams
from .prompts import Prompt
from .walks import Walk

if TYPE_CHECKING:
    from .passes import Acceptance


@dataclass(frozen=True)
class Finding:
    """What a check found. The message of a fault says what was found, what was wanted, and what to do."""

    check: str
    ok: bool
    message: str


@dataclass
class Case:
    """What is looked at.

    Attributes:
        prompts: one a row. walks: of those rows whose text had a draft.
        streams: the target's own, over the text of the first walk. acceptance: of both passes; `None` without walks.
        tokenizer: the target's; `None`: none at hand.
        record: what training recorded; `None`: nothing is.
        config_file: the drafter's `config.json` as it stands in the file; `None`: there is no file.
        target_folder: where the target's weights lie; `None`: not on this machine.
        loading: for "target" and "drafter" what `from_pretrained` reports about their weights.
        num_draft_tokens: what serving is meant to ask for; `None`: the whole block.
    """

    target: PreTrainedModel
    drafter: PreTrainedModel
    prompts: list[Prompt]
    tokenizer: PreTrainedTokenizerBase | None = None
    record: dict[str, Any] | None = None
    config_file: dict[str, Any] | None = None
    target_folder: Path | None = None
    loading: dict[str, dict[str, Any]] = field(default_factory=dict)
    num_draft_tokens: int | None = None
    walks: list[Walk] = field(default_factory=list)
    streams: Streams | None = None
    acceptance: Acceptance | None = None

    def recorded(self, name: str) -> Any:
        """A value of the training record: of its `drafting`, or at its top level; `None` if it is not there."""
        record = self.record or {}
        drafting = record.get("drafting") or {}
        parts = (drafting.get("config") or {}, drafting, record)
        return next((part[name] for part in parts if part.get(name) is not None), None)


# A check yields one line for each fault, and returns the line to print if there was none
Check = Callable[[Case], Generator[str, None, str]]


def run_check(check: Check, case: Case) -> list[Finding]:
    """The findings of one check, under its function's name without `check_`."""
    name, faults, lines = check.__name__.removeprefix("check_"), [], check(case)
    while True:
        try:
            faults.append(Finding(name, False, next(lines)))
        except StopIteration as end:
            return faults or [Finding(name, True, end.value)]
