"""The report's numbers are those of the records, and its tables and figures have all cells."""

import json
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from importlib.util import find_spec

import numpy as np
import pytest

from hyperdflash.cli import main
from hyperdflash.evaluation import EvalArguments, figures, run_eval
from hyperdflash.evaluation.report import build_tables, measure, resample, sum_by_prompt


def total(records, name):
    return sum(record.get(name, record["statistics"].get(name)) for record in records)


def rate(records, seconds="seconds"):
    return total(records, "tokens") / total(records, seconds)


def test_the_table_is_the_records_counted_by_hand(evaluation, records, labels):
    _, report = evaluation
    for temperature in (0.0, 1.0):
        table = report["tables"]["non-think"][f"{temperature:g}"]
        assert list(table) == labels
        for label in labels:
            means = defaultdict(list)
            for task in ("gsm8k", "mt-bench"):
                chosen = [r for r in records if (r["task"], r["temperature"]) == (task, temperature)]
                mine, alone = ([r for r in chosen if r["system"] == each] for each in (label, "target"))
                rounds, accepted = total(mine, "rounds"), total(mine, "accepted")
                steps = rounds + total(mine, "plain_steps")
                tau = 1 + accepted / rounds if rounds else 1
                verify, draft = total(mine, "verify_seconds"), total(mine, "draft_seconds")
                prefill = total(mine, "prefill_seconds")
                plain = sum(len(r["ids"]) - 1 for r in alone)  # tokens behind the first
                one = (total(alone, "seconds") - total(alone, "prefill_seconds")) / plain
                given = sum(1 + each for r in mine for each in r["statistics"]["accepted_per_round"])
                given += total(mine, "plain_steps")
                behind = sum(len(r["ids"]) - 1 for r in mine) / (total(mine, "seconds") - prefill)
                by_hand = {
                    "speedup": rate(mine) / rate(alone),
                    "cpu_speedup": rate(mine, "cpu_seconds") / rate(alone, "cpu_seconds"),
                    "accepted_length": tau,
                    "accepted_drafts": accepted / rounds if rounds else 0,
                    "tokens_per_second": rate(mine),
                    "ideal_speedup": given * one / (verify + draft),
                    "free_draft_speedup": given * one / verify,
                    "efficiency": behind / given * (verify + draft),
                    "verify_ms": 1000 * verify / steps,
                    "draft_ms": 1000 * draft / steps,
                    "rest_ms": 1000 * (total(mine, "seconds") - verify - draft - prefill) / steps,
                }
                for name, value in by_hand.items():
                    assert table[label][task][name] == pytest.approx(value), (label, task, name)
                    means[name].append(value)
                lists = [r["statistics"]["accepted_per_round"] for r in mine]
                for slot, found in enumerate(table[label][task]["unconditional"]):
                    hits = sum(each > slot for accepted in lists for each in accepted)
                    assert found == pytest.approx(hits / rounds)
                    reached = sum(r["statistics"]["reached_per_slot"][slot] for r in mine)
                    assert table[label][task]["conditional"][slot] == pytest.approx(hits / reached if reached else 0)
            average = table[label]["average"]
            for name, values in means.items():
                assert average[name] == pytest.approx(sum(values) / 2)
            assert sum(average["unconditional"]) == pytest.approx(average["accepted_drafts"])


def test_an_interval_of_two_prompts_lies_between_the_two(evaluation, records):
    """Of two prompts a resample draws one twice or both once: the extremes are the prompts' own ratios."""
    _, report = evaluation
    chosen = [r for r in records if (r["task"], r["temperature"]) == ("gsm8k", 0)]
    ratios = [
        rate([r for r in chosen if r["id"] == each and r["system"] == "Drafter (6)"])
        / rate([r for r in chosen if r["id"] == each and r["system"] == "target"])
        for each in ("g0", "g1")
    ]
    cell = report["tables"]["non-think"]["0"]["Drafter (6)"]
    assert cell["gsm8k"]["speedup_interval"] == pytest.approx(sorted(ratios))  # paired: target and drafter alike
    assert report["tables"]["non-think"]["0"]["target"]["gsm8k"]["speedup_interval"] == pytest.approx([1, 1])
    assert cell["mt-bench"]["prompts"] == 1 and cell["mt-bench"]["speedup_interval"] is None


def test_intervals_cover_what_they_should():
    """Over many samples of prompts with a known rate, about 95 % of the intervals hold it."""
    generator, hits = np.random.default_rng(0), 0
    for trial in range(200):
        accepted = generator.binomial(10, 0.3, size=30)
        rows = {name: np.full(30, 10.0) for name in ("tokens", "seconds", "cpu_seconds", "rounds", "verify_seconds")}
        rows |= {name: np.zeros(30) for name in ("plain_steps", "draft_seconds", "prefill_seconds")}
        rows["texts"] = np.ones(30)
        rows |= {"accepted": accepted * 1.0, "accepted_per_slot": accepted[:, None] * 1.0}
        rows |= {"reached_per_slot": np.full((30, 1), 10.0)}
        drawn = {name: resample("task", 30, 400, trial) @ values for name, values in rows.items()}
        low, high = np.percentile(measure(drawn, drawn)["accepted_length"], [2.5, 97.5])
        hits += low <= 1.3 <= high
    assert 180 <= hits <= 198


def test_prompts_that_not_all_systems_have_answered_are_left_out(evaluation, records, tmp_path):
    folder, whole = evaluation
    kept = [r for r in records if (r["id"], r["temperature"], r["system"], r["turn"]) != ("m0", 1, "Drafter (6)", 1)]
    copy_run(folder, tmp_path / "a", kept)
    report = run_eval(EvalArguments(str(tmp_path / "a"), report_only=True, bootstrap=200))
    assert report["left_out"] == 1 and report["texts"] == len(records) - 8
    assert report["tables"]["non-think"]["0"] == whole["tables"]["non-think"]["0"]
    assert list(report["tables"]["non-think"]["1"]["target"]) == ["gsm8k", "average"]
    assert "Left out: 1 prompts" in report["markdown"]


def copy_run(folder, other, records, **changes):
    """`folder` again, with these records and other settings."""
    other.mkdir()
    (other / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    head = json.loads((folder / "settings.json").read_text())
    head["settings"] |= changes
    (other / "settings.json").write_text(json.dumps(head))


def test_records_of_several_runs_make_one_report(evaluation, records, tmp_path, capsys):
    folder, whole = evaluation
    for task in ("gsm8k", "mt-bench"):
        copy_run(folder, tmp_path / task, [r for r in records if r["task"] == task], tasks=[task])
    argv = ["--output", str(tmp_path / "both"), "--report_only", "true", "--bootstrap", "200", "--json", "true"]
    argv += ["--records", str(tmp_path / "gsm8k"), str(tmp_path / "mt-bench")]
    assert main(["eval", *argv]) == 0
    assert json.loads(capsys.readouterr().out)["tables"] == json.loads(json.dumps(whole["tables"]))
    assert json.loads((tmp_path / "both" / "report.json").read_text())["tables"] == whole["tables"]


def test_records_that_cannot_be_compared_are_refused(evaluation, records, tmp_path, capsys):
    folder, _ = evaluation
    copy_run(folder, tmp_path / "a", records[:8])
    copy_run(folder, tmp_path / "b", records[8:], max_new_tokens=99)
    copy_run(folder, tmp_path / "c", records[:1])
    argv = ["eval", "--output", str(tmp_path / "out"), "--report_only", "true", "--records", str(tmp_path / "a")]
    for other, message in (("b", "max_new_tokens: found 99, wanted 8"), ("c", "again in")):
        assert main([*argv, str(tmp_path / other)]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_markdown_has_all_cells_and_says_what_was_measured(evaluation, labels):
    folder, report = evaluation
    text = (folder / "report.md").read_text()
    lines = text.splitlines()
    start = lines.index("## Speed-up and accepted length, non-think mode") + 2
    table = [line.strip("| ").split(" | ") for line in lines[start : start + 3 + 2 * (1 + len(labels))]]
    assert [cell for cell in table[2] if cell.strip()] == ["**GSM8K**", "**MT-Bench**", "**Average**"]
    for block, temperature in ((table[3:8], "0"), (table[8:13], "1")):
        assert block[0][0] == f"**Temperature = {temperature}**" and block[0][1:3] == ["Speed-up", "τ"]
        for label, cells in zip(labels, block[1:]):
            found = report["tables"]["non-think"][temperature][label]
            assert cells[0] == label and len(cells) == 7
            for column, task in enumerate(("gsm8k", "mt-bench", "average")):
                assert cells[1 + 2 * column].startswith(f"{found[task]['speedup']:.2f}×")
                assert cells[2 + 2 * column].startswith(f"{found[task]['accepted_length']:.2f}")
    settings = report["settings"]
    stated = [
        "8,958,373 parameters, float32",
        "GSM8K 2, MT-Bench 1",
        "torch ",
        "cores",
        f"{settings['threads']} threads",
    ]
    assert all(each in text for each in [*stated, str(report["runs"][0]["commit"] or "unknown")])
    assert "| Drafter (6) | 4 | 4 |" in text


def test_tasks_outside_the_paper_have_columns_of_their_own(records):
    renamed = [record | {"task": "mine" if record["task"] == "gsm8k" else record["task"]} for record in records]
    table = build_tables(renamed, ["target"], 100, 0)["non-think"]["0"]["target"]
    assert list(table) == ["mt-bench", "mine", "average"]


def test_turns_of_a_prompt_are_one_sample(records):
    chosen = [r for r in records if (r["task"], r["temperature"], r["system"]) == ("mt-bench", 0, "target")]
    totals = sum_by_prompt(chosen)
    assert len(chosen) == 2 and totals["tokens"].tolist() == [total(chosen, "tokens")]


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed (the extra `eval`)")
def test_figures_show_every_system(evaluation, labels):
    folder, report = evaluation
    names = [f"{name}.{end}" for name in ("acceptance", "acceptance_conditional", "cost") for end in ("png", "svg")]
    assert report["figures"] == names
    for name in names:
        content = (folder / name).read_bytes()
        if name.endswith("png"):
            assert content.startswith(b"\x89PNG") and len(content) > 5000
        else:
            assert ElementTree.fromstring(content).tag.endswith("svg")
            comments = content.decode()
            shown = labels if name == "cost.svg" else labels[1:]
            assert all(f"<!-- {label} -->" in comments for label in shown)
    assert "![acceptance](acceptance.svg)" in (folder / "report.md").read_text()


def test_without_matplotlib_there_is_a_report_without_figures(evaluation, monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(figures, "find_spec", lambda name: None)
    monkeypatch.setattr(figures.logger, "propagate", True, raising=False)
    assert figures.draw_figures(evaluation[1]["tables"], tmp_path) == []
    assert not list(tmp_path.iterdir())
