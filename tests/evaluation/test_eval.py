"""`eval`: fair in its order, exact in its records, and to be stopped and split at will."""

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hyperdflash import GenerationStatistics
from hyperdflash.baselines import init_mtp
from hyperdflash.cli import EMBEDDED_DRAFTER, EMBEDDED_TARGET, main, parse
from hyperdflash.evaluation import EvalArguments, run_eval
from hyperdflash.evaluation.arguments import MODES
from hyperdflash.evaluation.records import KEY
from hyperdflash.evaluation.systems import Decoded, System, read_systems

TIMES = ("seconds", "cpu_seconds", "statistics")


def read(folder, name="records.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def texts(records):
    """What must not change from run to run, by what it is of."""
    counted = {}
    for record in records:
        statistics = {name: value for name, value in record["statistics"].items() if "seconds" not in name}
        fixed = {name: value for name, value in record.items() if name not in TIMES} | {"counted": statistics}
        counted[tuple(record[name] for name in KEY)] = fixed
    assert len(counted) == len(records)
    return counted


@pytest.fixture(scope="module")
def embedded():
    return (
        AutoModelForCausalLM.from_pretrained(EMBEDDED_TARGET, dtype=torch.float32),
        AutoTokenizer.from_pretrained(EMBEDDED_TARGET),
    )


@pytest.fixture
def invented(monkeypatch):
    """Systems that decode nothing: they write what `invented.write` says, and `invented.asked` keeps the prompts."""

    class Invented:
        asked = []

        @staticmethod
        def write(system, seed):
            return [300, 301, 1]

    def decode(system, target, input_ids, seed, **kwargs):
        ids = Invented.write(system, seed)
        if seed != 0:  # else the warm-up
            Invented.asked.append((system.label, input_ids[0].tolist(), seed, kwargs))
        drafts = system.num_draft_tokens
        return Decoded(ids, 0.5, 0.5, GenerationStatistics(drafts, plain_steps=len(ids) - 1, verify_seconds=0.4))

    monkeypatch.setattr(System, "decode", decode)
    return Invented


def test_there_is_a_record_of_every_text(records, rows, labels):
    wanted = {
        (task, row["id"], turn, "non-think", temperature, label)
        for task, asked in rows.items()
        for row in asked
        for turn in range(len(row["turns"]))
        for temperature in (0.0, 1.0)
        for label in labels
    }
    assert {tuple(record[name] for name in KEY) for record in records} == wanted
    assert len(records) == len(wanted)
    for record in records:
        statistics = record["statistics"]
        assert record["tokens"] == len(record["ids"]) == statistics["new_tokens"] <= 8
        emitted = 1 + statistics["accepted"] + statistics["bonus_tokens"] + statistics["plain_steps"]
        assert emitted == record["tokens"]
        assert record["finish_reason"] == ("stop" if record["ids"][-1] == 1 else "length")
        parts = [statistics[f"{name}_seconds"] for name in ("prefill", "draft", "verify", "other")]
        assert 0 < sum(parts) <= record["seconds"] * 1.001
        assert (statistics["draft_seconds"] > 0) == (record["system"] != "target") or statistics["rounds"] == 0


def test_greedy_texts_are_the_targets_own(records, embedded, rows, labels):
    target, tokenizer = embedded
    form = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    for row in rows["mt-bench"]:
        messages = []
        for turn, question in enumerate(row["turns"]):
            messages.append({"role": "user", "content": question})
            inputs = tokenizer.apply_chat_template(messages, **form)
            output = target.generate(**inputs, do_sample=False, max_new_tokens=8)
            wanted = output[0, inputs["input_ids"].shape[1] :].tolist()
            found = [r for r in records if (r["id"], r["turn"], r["temperature"]) == (row["id"], turn, 0)]
            assert [record["ids"] for record in found] == [wanted] * len(labels)
            assert {record["prompt_tokens"] for record in found} == {inputs["input_ids"].shape[1]}
            messages.append({"role": "assistant", "content": tokenizer.decode([i for i in wanted if i != 1])})
    assert all(r["identical"] is (True if r["temperature"] == 0 else None) for r in records)


@pytest.mark.parametrize("ended", [True, False], ids=["reasoning ended", "cut while reasoning"])
def test_a_second_turn_follows_the_systems_own_first_answer(
    make_arguments, tmp_path, invented, embedded, rows, labels, ended
):
    tokenizer, mark = embedded[1], "</think>" if ended else " "
    own = {"target": "one", "prompt-lookup (4)": "two", "Drafter (3)": "three", "Drafter (6)": "four"}
    invented.write = lambda system, seed: [*tokenizer(f"thought{mark}{own[system.label]}")["input_ids"], 1]
    run_eval(make_arguments(tmp_path / "run", tasks=["mt-bench"], temperatures=[1.0], modes=["think-high"]))
    first, second = rows["mt-bench"][0]["turns"]
    for label, asked, _, _ in invented.asked[len(labels) :]:
        answer = own[label] if ended else ""  # without its reasoning
        conversation = f"<｜User｜>{first}<｜Assistant｜></think>{answer}{tokenizer.eos_token}<｜User｜>{second}"
        assert tokenizer.decode(asked) == f"{tokenizer.bos_token}{conversation}<｜Assistant｜><think>"


def test_all_systems_get_the_same_prompts_seeds_and_settings_in_rotating_order(
    make_arguments, tmp_path, invented, labels
):
    options = {"tasks": ["gsm8k"], "temperatures": [0.0, 0.7], "modes": ["non-think", "think-high"], "top_p": 0.9}
    run_eval(make_arguments(tmp_path / "run", **options))
    rounds = [invented.asked[start : start + 4] for start in range(0, len(invented.asked), 4)]
    assert len(rounds) == 2 * 2 * 2
    for group in rounds:
        assert len({json.dumps(each[1:]) for each in group}) == 1
        assert sorted(each[0] for each in group) == sorted(labels)
    firsts = [group[0][0] for group in rounds]
    assert firsts == [*labels, *labels[1:], labels[0]]
    assert [group[0][3]["do_sample"] for group in rounds] == [False, True] * 4
    sampled = rounds[1][0][3]
    assert (sampled["temperature"], sampled["top_k"], sampled["top_p"]) == (0.7, 0, 0.9)
    assert len({group[0][2] for group in rounds}) == 8  # a seed of its own for every text
    assert len({len(group[0][1]) for group in rounds}) == 2 and rounds[0][0][1] != rounds[2][0][1]  # <think>, </think>


def test_where_greedy_texts_part_the_margin_of_the_logits_is_recorded(make_arguments, tmp_path, invented, embedded):
    target, tokenizer = embedded
    invented.write = lambda system, seed: [300, 301, 400 if system.num_draft_tokens == 6 else 302, 1]
    run_eval(make_arguments(tmp_path / "run", temperatures=[0.0]))
    for record in read(tmp_path / "run"):
        if record["system"] != "Drafter (6)":
            assert (record["identical"], record["margin"]) == (True, None)
        elif record["turn"] == 1:  # the prompts differ already
            assert (record["identical"], record["margin"]) == (False, None)
        else:
            asked = next(ids for label, ids, _, _ in invented.asked if len(ids) == record["prompt_tokens"])
            with torch.inference_mode():
                logits = target(torch.tensor([[*asked, 300, 301]])).logits[0, -1]
            assert record["identical"] is False
            assert record["margin"] == pytest.approx(abs(float(logits[400] - logits[302])), abs=1e-4)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert {label: (each["texts"], each["identical"]) for label, each in report["identical"].items()} == {
        "prompt-lookup (4)": (4, 4),
        "Drafter (3)": (4, 4),
        "Drafter (6)": (4, 0),
    }


def stop_after(monkeypatch, texts):
    """Interrupts the decoding after so many texts, the warm-up not counted."""
    decode, calls = System.decode, itertools.count()

    def stop(system, target, input_ids, seed, **kwargs):
        if seed != 0 and next(calls) == texts:
            raise KeyboardInterrupt
        return decode(system, target, input_ids, seed, **kwargs)

    monkeypatch.setattr(System, "decode", stop)
    return lambda: monkeypatch.setattr(System, "decode", decode)


def test_the_mtp_module_is_a_system_at_every_budget(make_arguments, tmp_path, records):
    init_mtp(EMBEDDED_TARGET, tmp_path / "mtp")
    systems = ["target", *(f"MTP:{tmp_path / 'mtp'}:{drafts}" for drafts in (3, 6))]
    run_eval(make_arguments(tmp_path / "run", systems=systems, tasks=["gsm8k"], temperatures=[0.0]))
    wanted = {record["id"]: record["ids"] for record in records if record["temperature"] == 0}
    found = read(tmp_path / "run")
    assert {record["system"] for record in found} == {"target", "MTP (3)", "MTP (6)"}
    assert all(record["ids"] == wanted[record["id"]] for record in found)
    for record in found:
        if record["system"] != "target":
            budget = int(record["system"][5])
            assert record["statistics"]["rounds"] > 0
            assert record["statistics"]["num_draft_tokens"] == budget, record["statistics"]


def test_a_run_that_was_stopped_goes_on_to_the_same_end(make_arguments, tmp_path, monkeypatch, records):
    arguments = make_arguments(tmp_path / "run")
    let_go = stop_after(monkeypatch, 9)
    with pytest.raises(KeyboardInterrupt):
        run_eval(arguments)
    let_go()
    path = tmp_path / "run" / "records.jsonl"
    before = path.read_text()
    assert 0 < len(before.splitlines()) <= 9
    with path.open("a") as file:
        file.write(before.splitlines()[0][:50])  # and a line that was cut in half
    run_eval(arguments)
    assert path.read_text().startswith(before)
    assert texts(read(tmp_path / "run")) == texts(records)
    assert len(json.loads((tmp_path / "run" / "settings.json").read_text())["runs"]) == 2


@pytest.mark.parametrize("after", [0, 3, 17])
def test_it_may_be_stopped_anywhere(make_arguments, tmp_path, monkeypatch, invented, after):
    invented.write = lambda system, seed: [300 + seed % 100, len(system.label), 1]  # sampled, so to speak
    run_eval(make_arguments(tmp_path / "whole"))
    let_go = stop_after(monkeypatch, after)
    with pytest.raises(KeyboardInterrupt):
        run_eval(make_arguments(tmp_path / "run"))
    let_go()
    run_eval(make_arguments(tmp_path / "run"))
    assert texts(read(tmp_path / "run")) == texts(read(tmp_path / "whole"))


def test_shards_together_are_the_whole(make_arguments, tmp_path, invented):
    invented.write = lambda system, seed: [300 + seed % 100, len(system.label), 1]
    run_eval(make_arguments(tmp_path / "whole"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "records-1-of-2.jsonl").touch()  # the other shard is loading its models
    for shard in ("0/2", "1/2"):
        report = run_eval(make_arguments(tmp_path / "run", shard=shard))
    names = sorted(path.name for path in (tmp_path / "run").glob("records*"))
    assert names == ["records-0-of-2.jsonl", "records-1-of-2.jsonl"]
    shards = [read(tmp_path / "run", name) for name in names]
    assert {record["id"] for record in shards[0]} == {"g0", "m0"}
    assert texts(shards[0] + shards[1]) == texts(read(tmp_path / "whole"))
    assert report["shards"] == ["0/2", "1/2"] and report["texts"] == 32 and report["left_out"] == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 13}, "max_new_tokens: found 13, wanted 8 as in settings.json"),
        ({"temperatures": [0.0]}, r"temperatures: found \[0.0\], wanted \[0.0, 1.0\]"),
        ({"systems": ["target"]}, "systems: found "),
        ({"per_task": 1}, "per_task: found 1, wanted None"),
        ({"seed": 1}, "seed: found 1, wanted 0"),
        ({"dtype": "bfloat16"}, "dtype: found 'bfloat16', wanted 'float32'"),
    ],
)
def test_other_settings_do_not_go_on_with_a_run(evaluation, make_arguments, changes, message):
    folder, _ = evaluation
    before = (folder / "records.jsonl").read_bytes()
    with pytest.raises(ValueError, match=message):
        run_eval(make_arguments(folder, **changes))
    assert (folder / "records.jsonl").read_bytes() == before


def test_a_finished_run_decodes_nothing_again(evaluation, make_arguments, monkeypatch, tmp_path):
    folder, report = evaluation
    folder = shutil.copytree(folder, tmp_path / "run")
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *args, **kwargs: pytest.fail("loaded"))
    assert run_eval(make_arguments(folder))["tables"] == report["tables"]


def test_systems_say_how_many_tokens_they_draft(options, labels):
    systems = read_systems(options["systems"], str(EMBEDDED_TARGET))
    assert [system.label for system in systems] == labels
    assert [system.num_draft_tokens for system in systems] == [0, 4, 3, 6]
    assert read_systems(["prompt-lookup", "target"], str(EMBEDDED_TARGET))[0].label == "prompt-lookup (6)"


def test_a_system_may_have_a_confidence_threshold_of_its_own(make_arguments, tmp_path):
    path = str(EMBEDDED_DRAFTER)
    systems = ["target", f"Short:{path}:6:0.9", f"Long:{path}:6"]
    report = run_eval(make_arguments(tmp_path / "run", systems=systems))
    drafted = {}
    for record in read(tmp_path / "run"):
        if (statistics := record.get("statistics")) and record["system"] != "target":
            total = drafted.setdefault(record["system"], [0, 0])
            total[0] += statistics["drafted"]
            total[1] += statistics["rounds"]
    short, long = (drafted[label] for label in ("Short (6, 0.9)", "Long (6)"))
    assert short[0] / short[1] < long[0] / long[1]
    assert report["texts"] > 0
    thresholds = [system.confidence_threshold for system in read_systems(systems, str(EMBEDDED_TARGET))]
    assert thresholds == [0, 0.9, 0]


@pytest.mark.parametrize(
    "recipe, systems",
    [
        ("eval", ["target", "prompt-lookup", "HyperDFlash"]),
        ("comparison", ["target", "prompt-lookup", "MTP", "MTP", "Vanilla DFlash", "HyperDFlash"]),
    ],
)
def test_the_recipes_are_read(recipe, systems):
    argv = ["--config", str(Path(__file__).parents[2] / "recipes" / "tiny" / f"{recipe}.yaml"), "--output", "unused"]
    (arguments,) = parse("eval", [*argv, "--per_task", "1"], EvalArguments)
    assert [system.split(":")[0] for system in arguments.systems] == systems
    assert (arguments.per_task, arguments.temperatures, arguments.modes) == (1, [0.0, 1.0], list(MODES))


COMMAND = ["--output", "{output}", "--target", str(EMBEDDED_TARGET), "--data", "{data}"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (COMMAND, "systems: found None, wanted target and others"),
        ([*COMMAND, "--systems", "prompt-lookup"], "without 'target', wanted it"),
        ([*COMMAND, "--systems", "target", "target"], "systems: found two named 'target'"),
        ([*COMMAND, "--systems", "target", "prompt-lookup:x"], "found 'prompt-lookup:x', wanted prompt-lookup"),
        (
            [*COMMAND, "--systems", "target", "Drafter"],
            "found 'Drafter', wanted target, prompt-lookup[:DRAFTS]",
        ),
        ([*COMMAND, "--systems", "target", "Drafter:/nowhere"], "systems: found no folder '/nowhere'"),
        ([*COMMAND, "--systems", "target", f"Drafter:{EMBEDDED_TARGET}:3"], "found a target ('deepseek_v4')"),
        ([*COMMAND, "--systems", "target", f"Drafter:{EMBEDDED_DRAFTER}:0"], "wanted at least 1 draft a round"),
        ([*COMMAND, "--systems", "target", f"Drafter:{EMBEDDED_DRAFTER}:6:1.0"], "wanted a confidence of at least 0"),
        ([*COMMAND, "--systems", "target", f"Drafter:{EMBEDDED_DRAFTER}:7"], "found 7, wanted 1 to 6"),
        ([*COMMAND, "--systems", "target", "--temperatures", "0", "0"], "temperatures: found [0.0, 0.0]"),
        (
            [*COMMAND, "--systems", "target", "--modes", "think"],
            "modes: found ['think'], wanted non-think and",
        ),
        ([*COMMAND, "--systems", "target", "--shard", "2/2"], "shard: found '2/2', wanted I/N with I from 0"),
        ([*COMMAND, "--systems", "target", "--per_task", "0"], "per_task: found 0, wanted at least 1"),
        ([*COMMAND, "--systems", "target", "--records", "a"], "records: found ['a'], wanted none without report_only"),
        (["--output", "{output}", "--report_only", "true"], "records: found no records.jsonl"),
        (
            ["--output", "{output}", "--target", str(EMBEDDED_DRAFTER), "--data", "{data}", "--systems", "target"],
            "target: found model_type 'hyperdflash'",
        ),
    ],
)
def test_wrong_options_are_said_in_one_line(capsys, tmp_path, data, argv, message):
    argv = [word.format(output=tmp_path / "run", data=data) if "{" in word else word for word in argv]
    assert main(["eval", *argv]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("hyperdflash eval: error: ") and message in error
    assert not list(tmp_path.glob("run/records*")) or "wanted 1 to 6" in message  # known once the drafter is loaded
