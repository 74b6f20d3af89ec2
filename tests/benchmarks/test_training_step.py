"""The benchmark of a training step, at a small size: all forms are one step, and its FLOPs are what torch counts."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

PATH = Path(__file__).resolve().parents[2] / "benchmarks" / "training_step.py"
SHAPE = {"vocabulary": 300, "width": 32, "layers": 2, "heads": 2, "head-dim": 16, "anchors": 9, "tokens": 40}
ARGUMENTS = [*(f"--{name}={value}" for name, value in SHAPE.items()), "--chunk-size=10", "--repeats=1"]


@pytest.fixture
def benchmark(monkeypatch):
    spec = importlib.util.spec_from_file_location("training_step", PATH)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_it_reports_memory_and_time_of_equal_steps(benchmark, tmp_path):
    output = tmp_path / "runs" / "report.json"
    report = benchmark.main([*ARGUMENTS, f"--output={output}"])
    assert json.loads(output.read_text()) == report
    for form in benchmark.FORMS:
        assert report["memory"][f"{form}_peak_gb"] >= report["memory"][f"{form}_before_gb"] > 0.1
        assert report["time"][f"{form}_seconds"] > 0
    for form in ("sparse", "checkpointed"):
        assert 0 < report["time"][f"{form}_gradient_difference"] < 1e-4


def test_unequal_steps_are_no_result(benchmark, monkeypatch):
    problem = benchmark.Problem.of(benchmark.parse(ARGUMENTS))
    block_loss = benchmark.block_loss

    def wrong(*args, **kwargs):
        loss, sums = block_loss(*args, **kwargs)
        return 1.001 * loss, sums

    monkeypatch.setattr(benchmark, "block_loss", wrong)
    with pytest.raises(AssertionError, match="loss: found"):
        benchmark.measure_time(problem, 1)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_flops_are_those_that_torch_counts_less_what_is_hidden(benchmark, attention):
    problem = benchmark.Problem.of(benchmark.parse([*ARGUMENTS, f"--dense-attention={attention}"]))
    config, heads = problem.drafter.config, SHAPE["heads"] * SHAPE["head-dim"] * SHAPE["layers"]
    queries = SHAPE["anchors"] * config.block_size
    seen = sum(config.block_size * (anchor + config.block_size) for anchor in problem.anchors[0].tolist())
    gates = 2 * 2 * SHAPE["tokens"] * config.hc_mult**2 * SHAPE["width"]  # left out, as the streams need no gradient
    with FlopCounterMode(display=False) as counter:
        problem.step("dense")
    counted = sum(
        count for operator, count in counter.get_flop_counts()["Global"].items() if "scaled_dot" not in str(operator)
    )
    dense = 3 * 2 * 2 * heads * queries * (SHAPE["tokens"] + queries) if attention == "eager" else 0
    assert counted - gates - dense == problem.flops() - 3 * 2 * 2 * heads * seen


def test_a_matrix_product_takes_time(benchmark):
    assert 0 < benchmark.matmul_rate(torch.nn.Linear(32, 300, bias=False), 9) < 1e14
