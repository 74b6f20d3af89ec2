"""Rows of any TRL form as conversations with the target: what it is asked, and what becomes of its answers."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset, Features, List, Value
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from trl.data_utils import maybe_convert_to_chatml

from .arguments import RegenerateArguments

ROLES = ("system", "developer", "user", "assistant", "tool")
THINKING_VARIABLES = ("thinking", "enable_thinking")
THINKING_END = "</think>"
TEMPLATE_ERRORS = (TemplateError, TypeError)  # the second: what a template does with a message without content


@dataclass
class Question:
    """What the target is asked: `input_ids` end where its answer begins; `seed` is this answer's own."""

    input_ids: list[int]
    temperature: float
    seed: int


@dataclass
class Answer:
    """What came back: `ids`, with the end token if there was one, and `finish_reason`: `stop`, `length` (cut at
    max_new_tokens), or what else ended it, which is no answer and has its `detail`."""

    ids: list[int]
    finish_reason: str
    detail: str | None = None


class PromptRenderer:
    """Chat template, thinking and end tokens, as one target has them.

    Args:
        end_ids: what ends an answer beside the tokenizer's end-of-sequence token.

    Raises:
        ValueError: a share of rows shall think and the template has no variable for it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, args: RegenerateArguments, end_ids: set[int] | None = None):
        self.tokenizer, self.args = tokenizer, args
        self.end_ids: set[int] = {tokenizer.eos_token_id} | (end_ids or set())
        template = tokenizer.get_chat_template() if tokenizer.chat_template else ""
        known = (name for name in THINKING_VARIABLES if re.search(rf"(?<![\w.'\"]){name}(?![\w'\"])", template))
        self.thinking_variable: str | None = args.thinking_variable or next(known, None)
        if args.thinking_share and not self.thinking_variable:
            raise ValueError(
                f"thinking_share: found {args.thinking_share} and a chat template with none of the variables "
                f"{THINKING_VARIABLES}, wanted 0, or the variable's name as thinking_variable"
            )

    def render(self, messages: list[dict] | str, thinking: bool, row: dict[str, Any]) -> list[int]:
        """The ids of `messages` up to where the answer begins; of a string as it is.

        Raises:
            TemplateError, TypeError: the template refuses the messages.
        """
        if isinstance(messages, str):
            return self.tokenizer(messages)["input_ids"]
        mode = {self.thinking_variable: thinking} if self.thinking_variable else {}
        return self.tokenizer.apply_chat_template(
            messages,
            tools=row.get("tools") or None,
            add_generation_prompt=True,
            return_dict=False,
            **(row.get("chat_template_kwargs") or {}) | mode,
        )

    def message(self, ids: list[int], thinking: bool) -> dict[str, str]:
        """An answer as a message of the conversation that goes on, its reasoning apart.

        Args:
            thinking: whether it was given in think mode: then it is all reasoning if it was cut before that ended.
        """
        text = self.tokenizer.decode(ids[:-1] if ids[-1] in self.end_ids else ids, clean_up_tokenization_spaces=False)
        reasoning, end, content = text.rpartition(THINKING_END)
        if thinking and not end:
            reasoning, content = text, ""
        return {"role": "assistant", "content": content} | ({"reasoning_content": reasoning} if reasoning else {})


def split_at_answers(row: dict[str, Any], every: bool, raw: bool) -> list[list[dict] | str]:
    """What is said before each answer that the target is asked for: the beginning, then what comes in between.

    Only the beginning, which then includes other people's earlier answers, unless `every`. Empty if nobody asks.

    Raises:
        ValueError: a message without role or content, or with a role that no template knows.
    """
    row = maybe_convert_to_chatml(dict(row))
    prompt = row.get("messages", row.get("prompt"))
    if isinstance(prompt, str):
        return [prompt if raw else [{"role": "user", "content": prompt}]]
    parts, between = [], []
    for message in prompt or []:
        if not isinstance(message, dict) or message.get("role") not in ROLES or "content" not in message:
            raise ValueError(f"found the message {str(message)[:80]!r}, wanted content and a role of {ROLES}")
        if message["role"] != "assistant":
            between.append(message)
        elif between and every:
            parts.append(between)
            between = []
        elif not every:
            between.append(message)
    while between and between[-1]["role"] == "assistant":
        between.pop()
    return [*parts, between] if between else parts


def add_prompts(rows: Dataset, renderer: PromptRenderer) -> Dataset:
    """`rows` with `id`, `thinking`, `input_ids` (of the first question) and `refusal`: why there is none, or empty.

    The id is the row's own, as a string, or a digest of its prompt and `index`.

    Raises:
        ValueError: a row that cannot be read. The message names it.
    """
    args = renderer.args

    def render(row: dict) -> dict[str, Any]:
        try:
            parts = split_at_answers(row, args.turns == "every", args.raw)
        except ValueError as error:
            raise ValueError(f"data: row {row['index']}: {error}") from None
        digest = hashlib.sha256(f"{row['index']}/{json.dumps(parts, sort_keys=True, default=str)}".encode())
        row_id = str(row["id"]) if "id" in row else digest.hexdigest()[:16]
        thinking = random.Random(f"{args.seed}/{row_id}").random() < args.thinking_share
        found = {"id": row_id, "thinking": thinking, "input_ids": [], "refusal": ""}
        if not parts:
            return found | {"refusal": "no_prompt"}
        if args.turns == "every" and any(message["role"] == "tool" for part in parts[1:] for message in part):
            return found | {"refusal": "tool_messages"}  # they answer a call that the target will not have made
        try:
            found["input_ids"] = renderer.render(parts[0], thinking, row)
        except TEMPLATE_ERRORS as error:
            return found | {"refusal": f"template: {error}"}
        if not found["input_ids"]:
            return found | {"refusal": "no_prompt"}
        if args.max_prompt_length and len(found["input_ids"]) > args.max_prompt_length:
            found["refusal"] = f"prompt_too_long: {len(found['input_ids'])} tokens"
        return found

    added = {"id": Value("string"), "thinking": Value("bool"), "input_ids": List(Value("int32"))}
    features = Features({**rows.features, **added, "refusal": Value("string")})
    return rows.map(render, features=features, num_proc=args.dataset_num_proc, desc="render")


class Conversation:
    """One row on its way: the `question` that the target is to answer next, and the training rows so far.

    Attributes:
        rows: `input_ids` and `assistant_masks` of the same length, `finish_reason`. An answer extends the row before
            it if its prompt goes on from there, token for token; otherwise (a template that drops earlier reasoning)
            it begins a row of its own. Only ids that the target wrote are in the mask.
        answered: answers so far.
        refusal: why the conversation ended before its last answer, as `(reason, detail)`, or `None`.
    """

    def __init__(self, row: dict[str, Any], renderer: PromptRenderer):
        args = renderer.args
        self.row, self.renderer = row, renderer
        self.id: str = row["id"]
        self.thinking: bool = row["thinking"]
        self.temperature: float = random.Random(f"{args.seed}/{self.id}/temperature").choice(args.temperatures)
        self.messages, *self.upcoming = split_at_answers(row, args.turns == "every", args.raw)
        self.input_ids: list[int] = row["input_ids"]
        self.rows: list[dict[str, Any]] = []
        self.answered = 0
        self.refusal: tuple[str, str | None] | None = None
        self.done = False

    @property
    def question(self) -> Question:
        digest = hashlib.sha256(f"{self.renderer.args.seed}/{self.id}/{self.answered}".encode()).digest()
        return Question(self.input_ids, self.temperature, int.from_bytes(digest[:4], "big") >> 1)

    def take(self, answer: Answer) -> None:
        """Goes on with the answer to `question`: to the next one, or to the end."""
        args, cut = self.renderer.args, answer.finish_reason == "length"
        if answer.finish_reason not in ("stop", "length"):
            return self._refuse(answer.finish_reason, answer.detail)
        if not answer.ids or (len(answer.ids) == 1 and answer.ids[0] in self.renderer.end_ids):
            return self._refuse("empty")
        if cut and args.cut_answers == "drop":
            return self._refuse("length", f"{len(answer.ids)} tokens")
        self._extend_rows(answer)
        if cut or not self.upcoming:
            self.done = True
            return
        self.messages = [*self.messages, self.renderer.message(answer.ids, self.thinking), *self.upcoming.pop(0)]
        try:
            self.input_ids = self.renderer.render(self.messages, self.thinking, self.row)
        except TEMPLATE_ERRORS as error:
            return self._refuse("template", str(error))
        if args.max_prompt_length and len(self.input_ids) > args.max_prompt_length:
            self._refuse("prompt_too_long", f"{len(self.input_ids)} tokens")

    def _refuse(self, reason: str, detail: str | None = None) -> None:
        self.refusal, self.done = (reason, detail), True

    def _extend_rows(self, answer: Answer) -> None:
        before, mask = [], []
        if self.rows and self.input_ids[: len(self.rows[-1]["input_ids"])] == self.rows[-1]["input_ids"]:
            last = self.rows.pop()
            before, mask = last["input_ids"], last["assistant_masks"]
        mask = mask + [0] * (len(self.input_ids) - len(before)) + [1] * len(answer.ids)
        self.rows.append(
            {
                "input_ids": self.input_ids + answer.ids,
                "assistant_masks": mask,
                "finish_reason": answer.finish_reason,
            }
        )
        self.answered += 1


class Conversations(Sequence):
    """The conversations of prepared rows, made when they are asked for; `lengths` of their first questions."""

    def __init__(self, rows: Dataset, renderer: PromptRenderer):
        self.rows, self.renderer = rows, renderer
        self.lengths: list[int] = [len(ids) for batch in rows.iter(1000) for ids in batch["input_ids"]]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Conversation:
        if index >= len(self.rows):
            raise IndexError(index)
        return Conversation(self.rows[index], self.renderer)


__all__ = [
    "Answer",
    "Conversation",
    "Conversations",
    "PromptRenderer",
    "Question",
    "add_prompts",
    "split_at_answers",
]
