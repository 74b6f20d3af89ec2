"""Text for the tiny target: JSON lines of `messages`, rendered with the tokenizer's chat template."""

from __future__ import annotations

import random
from pathlib import Path

from datasets import Dataset, load_dataset

FINAL_LINE_MARKS = ("The answer is", "So the answer is")


def data_files(folder: str | Path) -> list[str]:
    """Every `*.jsonl` and `*.jsonl.gz` under `folder`, sorted by name. Raises `FileNotFoundError` if there is none."""
    files = sorted(str(path) for pattern in ("*.jsonl", "*.jsonl.gz") for path in Path(folder).glob(pattern))
    if not files:
        raise FileNotFoundError(f"data: no *.jsonl or *.jsonl.gz under {folder!s}, wanted at least one")
    return files


def split_reasoning(messages: list[dict], row_id: str, seed: int) -> list[dict]:
    """Half of the rows whose last answer ends in a marked final line become think rows: what stands before that
    line is the reasoning, the line is the answer. Which half depends on `row_id` and `seed` alone."""
    *earlier, last = messages
    body, _, final = last["content"].rpartition("\n")
    if not body or not final.startswith(FINAL_LINE_MARKS) or random.Random(f"{seed}/{row_id}").random() < 0.5:
        return messages
    return [*earlier, {**last, "content": final, "reasoning_content": body}]


def load_conversations(folder: str | Path, seed: int, held_out: int = 0) -> tuple[Dataset, Dataset | None]:
    """Conversations of `folder` as (train, held out): rows `{"id", "messages"}`, shuffled with `seed`.

    `held_out` rows are set aside for the loss on text that was not trained on.
    """
    rows = load_dataset("json", data_files=data_files(folder), split="train").select_columns(["id", "messages"])
    rows = rows.shuffle(seed=seed)
    if not held_out:
        return rows, None
    return rows.select(range(held_out, len(rows))), rows.select(range(held_out))


def tokenize(rows: Dataset, tokenizer, seed: int) -> Dataset:
    """Conversations in their chat form, as `input_ids` alone."""

    def render(row: dict) -> dict:
        messages = split_reasoning(row["messages"], row["id"], seed)
        return {"input_ids": tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)}

    return rows.map(render, remove_columns=rows.column_names, desc="tokenize")
