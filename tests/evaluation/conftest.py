"""A small evaluation of the embedded pair: two tasks, one of them with two turns, at two temperatures."""

import json

import pytest

from hyperdflash.cli import EMBEDDED_DRAFTER, EMBEDDED_TARGET
from hyperdflash.evaluation import EvalArguments, run_eval

ROWS = {
    "gsm8k": [
        {"id": "g0", "turns": ["Ann has 3 boxes of 12 pencils. How many pencils does she have?"]},
        {"id": "g1", "turns": ["A cook fries 24 eggs and burns 6 of them. How many eggs are left?"]},
    ],
    "mt-bench": [{"id": "m0", "turns": ["What does the command `tail` do?", "And what does `head` do?"]}],
}
SYSTEMS = ["target", "prompt-lookup:4", f"Drafter:{EMBEDDED_DRAFTER}:3", f"Drafter:{EMBEDDED_DRAFTER}"]
LABELS = ["target", "prompt-lookup (4)", "Drafter (3)", "Drafter (6)"]


@pytest.fixture(scope="session")
def rows():
    return ROWS


@pytest.fixture(scope="session")
def labels():
    """The systems of the small evaluation, as the tables call them."""
    return LABELS


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A folder of JSON lines."""
    folder = tmp_path_factory.mktemp("data")
    for name, rows in ROWS.items():
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def options(data):
    """The settings of the small evaluation; `make_arguments(output, **changes)` takes others over them."""
    return {
        "target": str(EMBEDDED_TARGET),
        "systems": SYSTEMS,
        "data": str(data),
        "temperatures": [0.0, 1.0],
        "max_new_tokens": 8,
        "bootstrap": 200,
        "threads": 1,
    }


@pytest.fixture(scope="session")
def make_arguments(options):
    return lambda output, **changes: EvalArguments(**options | {"output": str(output)} | changes)


@pytest.fixture(scope="session")
def evaluation(make_arguments, tmp_path_factory):
    """(folder, report) of the small evaluation, run once."""
    folder = tmp_path_factory.mktemp("evaluation") / "run"
    return folder, run_eval(make_arguments(folder))


@pytest.fixture(scope="session")
def records(evaluation):
    return [json.loads(line) for line in (evaluation[0] / "records.jsonl").read_text().splitlines()]


@pytest.fixture(autouse=True)
def without_figures(monkeypatch):
    """Figures take seconds: only the small evaluation itself draws them, before this."""
    monkeypatch.setattr("hyperdflash.evaluation.report.draw_figures", lambda tables, folder: [])
