"""What the systems are asked: the paper's seven tasks, from the Hub or from a folder, and anybody's JSON lines."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import datasets

from ..trainer.regeneration.prompts import split_at_answers


@dataclass(frozen=True)
class Task:
    """One benchmark of the paper, as it lies on the Hub.

    Attributes:
        title, group: column and group of columns in the tables.
        path, options: of `datasets.load_dataset`; the configuration and the split are among the options.
        columns: those that are read; others may be large.
        turns: row -> what the user says, turn by turn.
        id_column: the column that names a row; its number by default.
    """

    title: str
    group: str
    path: str
    options: dict[str, Any]
    columns: tuple[str, ...]
    turns: Callable[[dict[str, Any]], list[str]] = field(repr=False)
    id_column: str | None = None


def ask_math(question: str) -> list[str]:
    """One turn: the question, and to reason and box the answer."""
    return [f"{question}\nPlease reason step by step, and put your final answer within \\boxed{{}}."]


def ask_function(row: dict[str, Any]) -> list[str]:
    """One turn: HumanEval's unfinished function."""
    return [
        "Write a solution to the following problem and make sure that it passes the tests:\n"
        f"```python\n{row['prompt']}\n```"
    ]


def ask_program(row: dict[str, Any]) -> list[str]:
    """One turn: LiveCodeBench's problem, with the code to start from where it has some."""
    if row["starter_code"]:
        form = f"Complete this code:\n```python\n{row['starter_code']}\n```"
    else:
        form = "The program reads from standard input and writes to standard output."
    return [
        "Write a Python program that solves the following problem and passes all its tests.\n\n"
        f"{row['question_content']}\n\n{form}"
    ]


TASKS: dict[str, Task] = {
    "gsm8k": Task(
        "GSM8K",
        "Math",
        "openai/gsm8k",
        {"name": "main", "split": "test"},
        ("question",),
        lambda row: ask_math(row["question"]),
    ),
    "math-500": Task(
        "MATH-500",
        "Math",
        "HuggingFaceH4/MATH-500",
        {"split": "test"},
        ("problem", "unique_id"),
        lambda row: ask_math(row["problem"]),
        id_column="unique_id",
    ),
    "aime25": Task(
        "AIME25",
        "Math",
        "math-ai/aime25",
        {"split": "test"},
        ("problem", "id"),
        lambda row: ask_math(row["problem"]),
        id_column="id",
    ),
    "humaneval": Task(
        "HumanEval",
        "Code",
        "openai/openai_humaneval",
        {"split": "test"},
        ("prompt", "task_id"),
        ask_function,
        id_column="task_id",
    ),
    "mbpp": Task(
        "MBPP",
        "Code",
        "google-research-datasets/mbpp",
        {"name": "sanitized", "split": "test"},
        ("prompt", "task_id"),
        lambda row: [row["prompt"]],
        id_column="task_id",
    ),
    "livecodebench": Task(
        "LCB",
        "Code",
        "json",  # the dataset has a loading script, which `datasets` no longer runs: its newest file is read instead
        {"data_files": "hf://datasets/livecodebench/code_generation_lite/test6.jsonl", "split": "train"},
        ("question_content", "starter_code", "question_id"),
        ask_program,
        id_column="question_id",
    ),
    "mt-bench": Task(
        "MT-Bench",
        "Chat",
        "HuggingFaceH4/mt_bench_prompts",
        {"split": "train"},
        ("prompt", "prompt_id"),
        lambda row: list(row["prompt"]),
        id_column="prompt_id",
    ),
}


@dataclass(frozen=True)
class Prompt:
    """One prompt: `parts[t]` are the messages that go before answer `t`, after all that was said before."""

    task: str
    id: str
    parts: list[list[dict[str, Any]]]


def load_prompts(tasks: Sequence[str] | None, data: str | None = None, per_task: int | None = None) -> list[Prompt]:
    """The prompts of `tasks`, task by task.

    Args:
        tasks: names in `TASKS`, or paths of JSON-lines files. With `data`: names of files in it, all by default.
        data: folder with `TASK.jsonl`.
        per_task: so many of each task, spread evenly over it.

    Raises:
        ValueError: an unknown task, a row that cannot be read (the message names file and line), two tasks of one
            name.
        OSError: no such file or folder, or a Hub that cannot be reached.
    """
    if data is not None and not Path(data).is_dir():
        raise FileNotFoundError(f"data: found no folder {data!r}, wanted one with TASK.jsonl files")
    if not tasks:
        found = sorted(path.stem for path in Path(data).glob("*.jsonl"))
        tasks = [name for name in TASKS if name in found] + [name for name in found if name not in TASKS]
        if not tasks:
            raise FileNotFoundError(f"data: found no *.jsonl in {data!r}, wanted TASK.jsonl files")
    prompts: list[Prompt] = []
    for name in tasks:
        if name.endswith(".jsonl"):
            rows = read_json_lines(Path(name))
        elif data is not None:
            rows = read_json_lines(Path(data) / f"{name}.jsonl")
        elif name in TASKS:
            rows = read_hub(name)
        else:
            raise ValueError(f"tasks: found {name!r}, wanted one of {', '.join(TASKS)}, or a .jsonl file, or `data`")
        rows = _spread(rows, per_task)
        if any(prompt.task == rows[0].task for prompt in prompts):
            raise ValueError(f"tasks: found two named {rows[0].task!r}, wanted names that differ")
        prompts += rows
    return prompts


def read_hub(name: str) -> list[Prompt]:
    """All prompts of a task of the paper, from the Hub (or from where `datasets` keeps what it has downloaded)."""
    task = TASKS[name]
    rows = datasets.load_dataset(task.path, **task.options)
    if missing := [column for column in task.columns if column not in rows.column_names]:
        raise ValueError(f"tasks: {name}: found the columns {rows.column_names} in {task.path}, wanted {missing} too")
    return _number_equal_ids(
        Prompt(name, str(row[task.id_column] if task.id_column else number), _as_parts(task.turns(row)))
        for number, row in enumerate(rows.select_columns(list(task.columns)))
    )


def read_json_lines(path: Path) -> list[Prompt]:
    """All prompts of a file: rows with `turns` (the user's, in order), `messages` or `prompt`, and perhaps an `id`.

    Raises:
        FileNotFoundError, ValueError: no such file, or a row that cannot be read. The message names file and line.
    """
    if not path.is_file():
        raise FileNotFoundError(f"tasks: found no file {str(path)!r}, wanted one of JSON lines")
    prompts: list[Prompt] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n")):
        if not line.strip():
            continue
        where = f"tasks: {path.name} line {number + 1}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where}: found no JSON ({error}), wanted an object") from None
        if not isinstance(row, dict):
            raise ValueError(f"{where}: found {type(row).__name__}, wanted an object")
        prompts.append(Prompt(path.stem, str(row.get("id", number)), _read_parts(row, where)))
    if not prompts:
        raise ValueError(f"tasks: found no rows in {str(path)!r}, wanted some")
    return _number_equal_ids(prompts)


def _number_equal_ids(prompts: Iterable[Prompt]) -> list[Prompt]:
    """The prompts with ids that differ: the second row of an id gets `#2` behind it (MBPP has one such pair)."""
    seen: Counter[str] = Counter()
    distinct = []
    for prompt in prompts:
        seen[prompt.id] += 1
        distinct.append(prompt if seen[prompt.id] == 1 else replace(prompt, id=f"{prompt.id}#{seen[prompt.id]}"))
    return distinct


def _read_parts(row: dict[str, Any], where: str) -> list[list[dict[str, Any]]]:
    if "turns" in row:
        turns = row["turns"]
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
            raise ValueError(f"{where}: turns: found {str(turns)[:80]!r}, wanted a list of texts")
        return _as_parts(turns)
    try:
        parts = split_at_answers(row, every=True, raw=False)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if not parts:
        raise ValueError(f"{where}: found the fields {sorted(row)}, wanted turns, messages or prompt with a question")
    return parts


def _as_parts(turns: Sequence[str]) -> list[list[dict[str, Any]]]:
    return [[{"role": "user", "content": turn}] for turn in turns]


def _spread(rows: list[Prompt], number: int | None) -> list[Prompt]:
    if number is None or number >= len(rows):
        return rows
    return [rows[index * len(rows) // number] for index in range(number)]


__all__ = ["TASKS", "Prompt", "Task", "load_prompts", "read_hub", "read_json_lines"]
