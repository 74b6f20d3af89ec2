"""The prompts of rows: what decoding is given, and whether training reads the same before the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

MODES = ({}, {"thinking": True})  # how a template may open the answer


@dataclass
class Prompt:
    """A row as decoding is given it.

    Attributes:
        ids: tokens before the answer. row_ids: the tokens of the row as training reads them.
        problem: why `row_ids` does not begin with `ids`, or `None`.
    """

    ids: list[int]
    row_ids: list[int]
    problem: str | None = None


def read_prompt(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """What decoding is given for a row of any form of `train --data`, and how training reads the row.

    Of `messages` the last assistant's turn is answered anew; `text` and `input_ids` without marks are cut in half.

    Raises:
        ValueError: nothing stands before the answer, or there are messages and no chat template.
    """
    if "input_ids" in row:
        return _ids_prompt(row, tokenizer)
    if "text" in row:
        ids = tokenizer(row["text"])["input_ids"]
        return Prompt(ids[: max(len(ids) // 2, 1)], ids)
    if "prompt" in row and isinstance(row["prompt"], str):
        whole = row["prompt"] + (row.get("completion") or "")
        ids, whole = (tokenizer(text)["input_ids"] for text in (row["prompt"], whole))
        return Prompt(ids, whole, _difference(tokenizer, whole[: len(ids)], ids))
    unanswered = [{"role": "assistant", "content": ""}]
    messages = row.get("messages") or [*row["prompt"], *(row.get("completion") or unanswered)]
    last = max(index for index, message in enumerate(messages) if message["role"] == "assistant")
    if not tokenizer.chat_template:
        raise ValueError("chat_template: found none with the target, wanted one, as rows hold messages")
    marks = "{% generation" in tokenizer.chat_template or "{%- generation" in tokenizer.chat_template

    def render(messages: list[dict], **kwargs: Any) -> dict[str, list[int]]:
        settings = (row.get("chat_template_kwargs") or {}) | kwargs
        return tokenizer.apply_chat_template(messages, tools=row.get("tools"), return_dict=True, **settings)

    whole = render(messages[: last + 1], return_assistant_tokens_mask=marks)
    ids, start = whole["input_ids"], None
    if marks:  # the last run of supervised tokens
        mask = whole["assistant_masks"]
        start = next((i for i in range(len(ids) - 1, -1, -1) if mask[i] and (i == 0 or not mask[i - 1])), None)
    prompts = [render(messages[:last], add_generation_prompt=True, **extra)["input_ids"] for extra in MODES]
    for prompt in prompts:
        if ids[: len(prompt) if start is None else start] == prompt:
            return Prompt(prompt, ids)
    return Prompt(prompts[0], ids, _difference(tokenizer, ids[: start or len(prompts[0])], prompts[0]))


def _ids_prompt(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Prompt:
    ids = row["input_ids"]
    marks = row.get("assistant_masks") or row.get("completion_mask")
    if marks is None and row.get("labels") is not None:
        marks = [label != -100 for label in row["labels"]]
    start = next((index for index, mark in enumerate(marks or ()) if mark), 0)
    if start == 0 or not tokenizer.chat_template:
        return Prompt(ids[: start or max(len(ids) // 2, 1)], ids)
    user = [{"role": "user", "content": "."}]
    tails = []
    for extra in MODES:
        prompt, message = (
            tokenizer.apply_chat_template(user, add_generation_prompt=opened, return_dict=True, **extra)["input_ids"]
            for opened in (True, False)
        )
        tails.append(prompt[len(message) :] if prompt[: len(message)] == message else [])
    if any(ids[start - len(tail) : start] == tail for tail in tails):
        return Prompt(ids[:start], ids)
    return Prompt(ids[:start], ids, _difference(tokenizer, ids[:start], tails[0]))


def _difference(tokenizer: PreTrainedTokenizerBase, found: list[int], wanted: list[int]) -> str | None:
    if found == wanted:
        return None
    found, wanted = (tokenizer.decode(ids)[-40:] for ids in (found, wanted))
    return (
        f"found {found!r} before the answer as training reads the row, wanted {wanted!r}, as decoding is given: "
        "render both alike, with one chat template"
    )
