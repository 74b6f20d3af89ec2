"""`bench-serve` against a server that speaks as vLLM's does. Needs no vLLM."""

import json
import shutil
import socket
import sys
from pathlib import Path

import pytest

from hyperdflash.cli import EMBEDDED_TARGET, main
from hyperdflash.serving.arguments import BenchServeArguments
from hyperdflash.serving.bench import read_prompts, run_bench_serve, speculation, split_costs, summarise
from hyperdflash.serving.client import Timing, read_counters


@pytest.fixture()
def arguments(tmp_path, monkeypatch):
    """Options under which `python -m vllm...` is the server of fake_vllm.py."""
    module = tmp_path / "site" / "vllm" / "entrypoints" / "openai" / "api_server.py"
    module.parent.mkdir(parents=True)
    shutil.copy(Path(__file__).parent / "fake_vllm.py", module)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    rows = [{"prompt": "How are you?"}, {"messages": [{"role": "user", "content": "Add 1 and 2."}]}]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {
        "target": str(EMBEDDED_TARGET),
        "prompts": str(tmp_path / "prompts.jsonl"),
        "output": str(tmp_path / "bench"),
        "drafter": "drafter",
        "vanilla": "vanilla",
        "max_new_tokens": 12,
        "requests": 8,
        "concurrency": [1, 4],
        "python": sys.executable,
        "port": port,
        "start_timeout": 120.0,
    }


def test_the_report_of_one_command(arguments):
    report = run_bench_serve(BenchServeArguments(**arguments))
    assert list(report["cells"]) == ["target-only", "vanilla", "HyperDFlash", "verification"]
    for system, accepted_length in (("target-only", None), ("HyperDFlash", 3.0), ("verification", 1.0)):
        for cell in report["cells"][system].values():
            assert cell["requests"] == 8 and cell["retries"] == 0 and cell["tokens"] == 8 * 12
            assert cell["accepted_length"] == accepted_length
    cell = report["cells"]["HyperDFlash"][4]
    assert cell["rounds"] == 8 * 4 and cell["acceptance_per_slot"] == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert {(row["system"], row["concurrency"]) for row in report["split"]} >= {("HyperDFlash", 1), ("HyperDFlash", 4)}
    folder = Path(arguments["output"])
    assert json.loads((folder / "results.json").read_text())["cells"]["HyperDFlash"]["4"] == cell
    assert "| HyperDFlash | 4 |" in (folder / "results.md").read_text()


def test_a_server_that_dies_loses_no_client(arguments, tmp_path, monkeypatch):
    monkeypatch.setenv("DIE_ONCE", str(tmp_path / "died"))
    options = arguments | {"vanilla": None, "verification": False, "concurrency": [4], "requests": 16}
    report = run_bench_serve(BenchServeArguments(**options))
    assert (tmp_path / "died").exists()
    cell = report["cells"]["target-only"][4]
    assert cell["requests"] == 16 and cell["tokens"] == 16 * 12 and cell["retries"] >= 1
    assert cell["step_seconds"] is None and cell["restarts"] == 1  # the counters went with the server
    assert report["cells"]["HyperDFlash"][4]["retries"] == 0


def test_without_counters_nothing_is_made_up(arguments, monkeypatch):
    monkeypatch.setenv("NO_COUNTERS", "1")
    report = run_bench_serve(BenchServeArguments(**arguments | {"vanilla": None, "verification": False}))
    cell = report["cells"]["HyperDFlash"][4]
    assert cell["requests"] == 8 and cell["rounds"] is None and cell["step_seconds"] is None
    assert report["cells"]["target-only"][4]["step_seconds"] > 0


def test_a_system_that_fails_does_not_take_the_others_along(arguments, monkeypatch):
    monkeypatch.setenv("REFUSE", "custom_class")
    with pytest.raises(ValueError, match="found no such method; .*bench holds target-only, vanilla, HyperDFlash$"):
        run_bench_serve(BenchServeArguments(**arguments))
    report = json.loads((Path(arguments["output"]) / "results.json").read_text())
    assert list(report["cells"]) == ["target-only", "vanilla", "HyperDFlash"]
    assert report["cells"]["HyperDFlash"]["4"]["accepted_length"] == 3.0


def test_prompts_are_in_the_chat_form_of_a_target_without_a_template(arguments, tmp_path):
    """DeepSeek-V4 is released without one."""
    target = tmp_path / "target"
    shutil.copytree(EMBEDDED_TARGET, target, ignore=shutil.ignore_patterns("*.jinja", "*.safetensors"))
    assert not (target / "chat_template.jinja").exists()
    options = BenchServeArguments(**arguments | {"target": str(target)})
    assert sorted(read_prompts(options)) == sorted(read_prompts(BenchServeArguments(**arguments)))


def test_a_round_is_split_into_its_parts():
    def cell(step, seconds):
        return {"step_seconds": step, "tokens_per_second": 10 / seconds, "end_to_end_seconds": {"mean": seconds}}

    cells = {
        "target-only": {1: cell(0.010, 4.0), 2: cell(0.012, 6.0)},
        "HyperDFlash": {1: cell(0.018, 2.0), 2: cell(0.027, 3.0)},
        "verification": {1: cell(0.014, 5.0), 2: cell(0.020, 9.0)},
    }
    row = split_costs(cells)[-1]
    assert (row["system"], row["concurrency"]) == ("HyperDFlash", 2)
    assert row["verification_seconds"] == pytest.approx(0.008)
    assert row["drafter_seconds"] == pytest.approx(0.007)
    assert row["target_step_seconds"] + row["verification_seconds"] + row["drafter_seconds"] == pytest.approx(0.027)
    assert row["batching"] == pytest.approx(1.5) and row["end_to_end_speedup"] == pytest.approx(2.0)


def test_counters_and_times_of_a_cell():
    before = read_counters('vllm:spec_decode_num_drafts_total{engine="0"} 5.0')
    metrics = [f"vllm:spec_decode_num_{name}_total 4.0" for name in ("drafts", "draft_tokens", "accepted_tokens")]
    metrics += [f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{k}"}} {4 - k}.0' for k in range(2)]
    after = read_counters("\n".join([*metrics, 'vllm:spec_decode_num_drafts_total{engine="1"} 11.0']))
    assert after["drafts"] == 15.0 and after["accepted_per_slot"] == [4.0, 3.0]
    cell = summarise([Timing(21, 0.5, 2.5, 0), Timing(5, 0.1, 0.9, 0)], 3.0, before, after)
    assert cell["accepted_length"] == pytest.approx(1.4)
    assert cell["step_seconds"] == pytest.approx(2.8 / 10)
    alone = summarise([Timing(21, 0.5, 2.5, 0), Timing(5, 0.1, 0.9, 0)], 3.0, before, before, drafts=False)
    assert alone["step_seconds"] == pytest.approx(2.8 / 24) and alone["accepted_length"] is None
    assert cell["seconds_per_token"]["mean"] == pytest.approx((2.0 / 20 + 0.8 / 4) / 2)
    assert cell["tokens_per_second"] == pytest.approx(26 / 3)


def test_vanilla_does_not_inherit_the_targets_cache_type(arguments):
    settings = json.loads(speculation(BenchServeArguments(**arguments), "vanilla"))
    assert settings["kv_cache_dtype"] == "auto" and settings["method"] == "dflash"


@pytest.mark.parametrize(
    "change, named",
    [
        ({"drafter": None, "vanilla": None}, "drafter"),
        ({"concurrency": [0]}, "concurrency"),
        ({"prompts": "nowhere.jsonl"}, "nowhere.jsonl"),
        ({"servers": ["HyperDFlash=http://a/v1"]}, "servers"),
    ],
)
def test_bad_options_are_one_line(arguments, change, named, capsys):
    words = []
    for name, value in (arguments | change).items():
        if value is not None:
            words += [f"--{name}", *(map(str, value) if isinstance(value, list) else [str(value)])]
    assert main(["bench-serve", *words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and named in error
