"""What the systems are asked: the Hub's columns, local files, and rows that cannot be read."""

import json
import os

import datasets
import pytest

from hyperdflash.evaluation.tasks import TASKS, load_prompts

# One row of each task as it lies on the Hub: (path, configuration, split, row), id and turns that are wanted
HUB = {
    "gsm8k": (
        ("openai/gsm8k", "main", "test"),
        {"question": "How many?", "answer": "#### 3"},
        "0",
        ["How many?\nPlease reason step by step, and put your final answer within \\boxed{}."],
    ),
    "math-500": (
        ("HuggingFaceH4/MATH-500", None, "test"),
        {"problem": "Find $x$.", "solution": "s", "answer": "3", "subject": "a", "level": 2, "unique_id": "test/a/1"},
        "test/a/1",
        ["Find $x$.\nPlease reason step by step, and put your final answer within \\boxed{}."],
    ),
    "aime25": (
        ("math-ai/aime25", None, "test"),
        {"problem": "Find $x$.", "answer": "70", "id": "7"},
        "7",
        ["Find $x$.\nPlease reason step by step, and put your final answer within \\boxed{}."],
    ),
    "humaneval": (
        ("openai/openai_humaneval", None, "test"),
        {"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "", "test": "", "entry_point": "f"},
        "HumanEval/0",
        [
            "Write a solution to the following problem and make sure that it passes the tests:\n"
            "```python\ndef f():\n\n```"
        ],
    ),
    "mbpp": (
        ("google-research-datasets/mbpp", "sanitized", "test"),
        {"task_id": 11, "prompt": "Write a function.", "code": "", "test_imports": [], "test_list": []},
        "11",
        ["Write a function."],
    ),
    "livecodebench": (
        ("json", None, "train"),
        {"question_id": "abc301", "question_content": "Add.", "starter_code": "class S:", "private_test_cases": "x"},
        "abc301",
        [
            "Write a Python program that solves the following problem and passes all its tests.\n\nAdd.\n\n"
            "Complete this code:\n```python\nclass S:\n```"
        ],
    ),
    "mt-bench": (
        ("HuggingFaceH4/mt_bench_prompts", None, "train"),
        {"prompt": ["Write.", "Rewrite."], "category": "writing", "reference": [], "prompt_id": 81},
        "81",
        ["Write.", "Rewrite."],
    ),
}


def questions(prompt):
    """The user's turns of a prompt that has nothing else."""
    assert all(len(part) == 1 and part[0]["role"] == "user" for part in prompt.parts)
    return [part[0]["content"] for part in prompt.parts]


def write(folder, name, *rows):
    folder.mkdir(exist_ok=True)
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", TASKS)
def test_each_task_of_the_paper_is_read_from_the_hubs_columns(monkeypatch, name):
    (path, configuration, split), row, row_id, turns = HUB[name]
    asked = []

    def load_dataset(path, name=None, *, split, **options):
        asked.append((path, name, split))
        return datasets.Dataset.from_list([row, row])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    first, second = load_prompts([name])
    assert asked == [(path, configuration, split)]
    assert (first.task, first.id, questions(first)) == (name, row_id, turns)
    assert second.id == ("1" if name == "gsm8k" else f"{row_id}#2")


def test_a_program_without_starter_code_reads_standard_input():
    (turn,) = TASKS["livecodebench"].turns({"question_content": "Add.", "starter_code": ""})
    assert turn.endswith("\n\nAdd.\n\nThe program reads from standard input and writes to standard output.")


def test_a_column_that_the_hub_renamed_is_named(monkeypatch):
    renamed = datasets.Dataset.from_list([{"Problem": "Find $x$.", "id": "7"}])
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: renamed)
    with pytest.raises(ValueError, match=r"aime25: found the columns \['Problem', 'id'\].*wanted \['problem'\]"):
        load_prompts(["aime25"])


def test_all_forms_of_a_row_ask_the_same(tmp_path):
    system = {"role": "system", "content": "Be brief."}
    user, again = ({"role": "user", "content": text} for text in ("A?", "B?"))
    answer = {"role": "assistant", "content": "somebody's"}
    folder = write(
        tmp_path / "data",
        "mine",
        {"id": "turns", "turns": ["A?", "B?"]},
        {"id": "messages", "messages": [user, answer, again, answer]},
        {"id": "prompt", "prompt": "A?"},
        {"id": "prompt messages", "prompt": [system, user]},
        {"turns": ["line\u2028separator"]},
    )
    prompts = {prompt.id: prompt for prompt in load_prompts(None, str(folder))}
    assert prompts["turns"].parts == prompts["messages"].parts == [[user], [again]]  # nobody else's answers
    assert prompts["prompt"].parts == [[user]]
    assert prompts["prompt messages"].parts == [[system, user]]
    assert questions(prompts["4"]) == ["line\u2028separator"]
    assert {prompt.task for prompt in prompts.values()} == {"mine"}
    assert load_prompts([str(folder / "mine.jsonl")]) == list(prompts.values())


def test_tasks_come_in_the_papers_order_and_prompts_spread_evenly(tmp_path):
    for name in ("mt-bench", "another", "gsm8k"):
        write(tmp_path / "data", name, *({"id": str(number), "turns": ["?"]} for number in range(10)))
    prompts = load_prompts(None, str(tmp_path / "data"), per_task=4)
    found = [(prompt.task, prompt.id) for prompt in prompts]
    assert found == [(task, each) for task in ("gsm8k", "mt-bench", "another") for each in "0257"]
    assert len(load_prompts(["gsm8k"], str(tmp_path / "data"), per_task=11)) == 10


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "tasks: bad.jsonl line 2: found no JSON"),
        ("[1]", "tasks: bad.jsonl line 2: found list, wanted an object"),
        ({"turns": []}, "line 2: turns: found '.*', wanted a list of texts"),
        ({"turns": ["a", 3]}, "line 2: turns: found .*3.*, wanted a list of texts"),
        ({"question": "a"}, r"line 2: found the fields \['question'\], wanted turns, messages or prompt"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, r"line 2: found the fields \['messages'\]"),
        ({"messages": [{"role": "nobody", "content": "a"}]}, "line 2: found the message .*nobody"),
    ],
)
def test_a_row_that_cannot_be_read_is_named(tmp_path, row, message):
    folder = write(tmp_path / "data", "bad", {"turns": ["fine"]}, row)
    with pytest.raises(ValueError, match=message):
        load_prompts(None, str(folder))


def test_tasks_that_are_not_there_are_named(tmp_path):
    with pytest.raises(ValueError, match="tasks: found 'gsm9k', wanted one of gsm8k, math-500"):
        load_prompts(["gsm9k"])
    with pytest.raises(FileNotFoundError, match="data: found no folder"):
        load_prompts(["gsm8k"], str(tmp_path / "nowhere"))
    folder = write(tmp_path / "data", "mine", {"turns": ["?"]})
    with pytest.raises(FileNotFoundError, match="tasks: found no file .*gsm8k.jsonl"):
        load_prompts(["gsm8k"], str(folder))  # with a folder nothing comes from the Hub unasked
    with pytest.raises(ValueError, match="tasks: found two named 'mine'"):
        load_prompts(["mine", str(folder / "mine.jsonl")], str(folder))


@pytest.mark.network
@pytest.mark.skipif("HYPERDFLASH_TEST_HUB" not in os.environ, reason="downloads; HYPERDFLASH_TEST_HUB=1 runs it")
@pytest.mark.parametrize("name", TASKS)
def test_the_hub_has_the_tasks(name):
    assert all(questions(prompt) for prompt in load_prompts([name], per_task=2))
