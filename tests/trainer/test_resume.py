"""A run that was killed goes on as if nothing had happened, or says why it does not."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hyperdflash.cli import main
from hyperdflash.trainer.resume import CHECKPOINT_PARTS, check_same_run, last_whole_checkpoint, missing_part


def train(folder, settings):
    folder.mkdir(exist_ok=True)
    (folder / "recipe.yaml").write_text(json.dumps(settings))  # JSON is YAML
    return main(["train", "--config", str(folder / "recipe.yaml")])


def weights(output, file="model.safetensors"):
    return load_file(Path(output) / file)


def assert_equal_to_the_bit(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@pytest.fixture
def resumable(settings):
    """6 steps an epoch, of 2 micro-batches, the last one short; a checkpoint every 4 steps, 29 steps in all."""
    return settings | {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 29,
        "save_strategy": "steps",
        "save_steps": 4,
        "save_total_limit": 3,
        "train_sampling_strategy": "group_by_length",
    }


def test_a_run_killed_at_a_random_moment_ends_with_the_same_weights(resumable, tmp_path):
    straight = tmp_path / "straight"
    assert train(tmp_path / "a", resumable | {"output_dir": str(straight)}) == 0

    killed = tmp_path / "killed"
    settings = resumable | {"output_dir": str(killed), "resume_from_checkpoint": "true"}  # nothing there yet: afresh
    (tmp_path / "recipe.yaml").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "hyperdflash.cli", "train", "--config", str(tmp_path / "recipe.yaml")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    first = killed / f"checkpoint-{random.choice((4, 8, 12))}"
    while not first.exists() and process.poll() is None:
        time.sleep(0.002)
    time.sleep(random.uniform(0, 0.3))
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "the run ended before it was killed"
    assert not (killed / "model.safetensors").exists()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a checkpoint may be torn
        checkpoint = last_whole_checkpoint(killed)
        assert train(tmp_path, settings) == 0
    assert_equal_to_the_bit(weights(killed), weights(straight))
    record = json.loads((killed / "provenance.json").read_text())
    assert record.get("resumed_from") == (Path(checkpoint).name if checkpoint else None)
    logs = [json.loads((folder / "trainer_state.json").read_text())["log_history"] for folder in (killed, straight)]
    for entry, wanted in zip(*logs, strict=True):
        for name in ("loss", "ce", "accepted_length", "num_tokens"):
            assert entry.get(name) == wanted.get(name), (wanted["step"], name)


@pytest.mark.parametrize("strategy", ["random", "group_by_length"])
def test_the_next_batches_and_anchors_are_those_of_the_uninterrupted_run(
    strategy, resumable, target, make_drafter, tokenizer, documents, monkeypatch, tmp_path
):
    """In the middle of the third epoch, batch by batch."""
    from hyperdflash.trainer import HyperDFlashTrainer, HyperDFlashTrainingArguments

    fields = {name: value for name, value in resumable.items() if name not in ("drafter", "target", "data")}
    fields.pop("target_dtype")
    fields |= {"train_sampling_strategy": strategy, "save_steps": 15, "max_steps": 20}
    seen = []
    original = HyperDFlashTrainer.get_batch_samples

    def watched(self, *args):
        batches, blocks = original(self, *args)
        seen.append([(batch["input_ids"].tolist(), batch["anchors"].tolist()) for batch in batches])
        return batches, blocks

    monkeypatch.setattr(HyperDFlashTrainer, "get_batch_samples", watched)
    for checkpoint in (None, str(Path(fields["output_dir"]) / "checkpoint-15")):
        arguments = HyperDFlashTrainingArguments(**fields)
        trainer = HyperDFlashTrainer(
            make_drafter(target), target, arguments, documents(43, low=10), processing_class=tokenizer
        )
        trainer.train(resume_from_checkpoint=checkpoint)
    straight, resumed = seen[:20], seen[20:]
    assert len(resumed) == 5 and resumed == straight[15:]
    assert straight[12:17] != straight[6:11]  # epochs differ


@pytest.fixture(scope="module")
def run_of_8_steps(pair, tmp_path_factory):
    """The settings of a run, with checkpoints 4 and 8 in its `output_dir`."""
    folder = tmp_path_factory.mktemp("run")
    settings = {
        "drafter": str(pair / "initial"),
        "target": str(pair / "target"),
        "data": str(pair / "rows.jsonl"),
        "target_dtype": "float32",
        "output_dir": str(folder / "out"),
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": 8,
        "max_steps": 8,
        "num_anchors": 4,
        "save_steps": 4,
        "report_to": "none",
        "disable_tqdm": True,
    }
    assert train(folder, settings) == 0
    return settings


@pytest.fixture
def run_folder(run_of_8_steps, tmp_path):
    """A copy of that run's folder, to be damaged."""
    return Path(shutil.copytree(run_of_8_steps["output_dir"], tmp_path / "out"))


def test_checkpoints_and_the_final_folder_have_their_provenance(run_folder):
    for folder in (run_folder, run_folder / "checkpoint-4", run_folder / "checkpoint-8"):
        record = json.loads((folder / "provenance.json").read_text())
        assert record["batch"] == {"rows_per_step": 8, "processes": 1}
        assert record["training_arguments"]["num_anchors"] == 4
        assert ("metrics" in record) == (folder == run_folder)


@pytest.mark.parametrize("part, patterns", CHECKPOINT_PARTS.items())
@pytest.mark.parametrize("damage", ["absent", "cut off", "empty"])
def test_a_torn_checkpoint_is_passed_over_and_named(part, patterns, damage, run_folder):
    last = run_folder / "checkpoint-8"
    assert last_whole_checkpoint(run_folder) == str(last)
    (file,) = (file for pattern in patterns for file in last.glob(pattern))
    if damage == "absent":
        file.unlink()
    else:
        content = file.read_bytes()
        file.write_bytes(content[: len(content) * 9 // 10] if damage == "cut off" else b"")
    assert missing_part(last).startswith(part)
    with pytest.warns(UserWarning, match=f"passed over .*checkpoint-8, which lacks its {part}"):
        assert last_whole_checkpoint(run_folder) == str(run_folder / "checkpoint-4")


def test_a_folder_without_a_whole_checkpoint_means_a_fresh_start(run_folder, tmp_path):
    for name in ("checkpoint-4", "checkpoint-8"):
        (run_folder / name / "trainer_state.json").unlink()
    with pytest.warns(UserWarning, match="lacks its trainer state"):
        assert last_whole_checkpoint(run_folder) is None
    assert last_whole_checkpoint(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seed", 7),
        ("per_device_train_batch_size", 4),
        ("num_anchors", 5),
        ("learning_rate", 1e-2),
        ("max_steps", 12),
        ("kl_weight", 0.2),
        ("max_length", 20),
        ("train_sampling_strategy", "group_by_length"),
        ("held_out", 3),
        ("data", "other.jsonl"),
        ("drafter", "other"),
        ("use_peft", True),
    ],
)
def test_a_resumed_run_with_other_options_is_refused_by_name(field, value, run_of_8_steps, pair, tmp_path, capsys):
    if field == "data":  # other rows, under the same name
        rows = (pair / "rows.jsonl").read_text().splitlines()
        (tmp_path / "rows.jsonl").write_text("\n".join(rows[1:] + rows[:1]))
        value = str(tmp_path / "rows.jsonl")
    if field == "drafter":
        value = str(shutil.copytree(pair / "initial", tmp_path / "other"))
    checkpoint = str(Path(run_of_8_steps["output_dir"]) / "checkpoint-4")
    changed = {"output_dir": str(tmp_path / "out"), "resume_from_checkpoint": checkpoint, field: value}
    assert train(tmp_path / "new", run_of_8_steps | changed) == 2
    named = {"per_device_train_batch_size": "rows_per_step", "data": "train_files"}.get(field, field)
    assert f"resume_from_checkpoint: {named}: found" in capsys.readouterr().err
    assert not list(tmp_path.glob("out/*"))


def test_what_changes_neither_batches_nor_objective_may_change(run_of_8_steps):
    checkpoint = Path(run_of_8_steps["output_dir"]) / "checkpoint-4"
    record = json.loads((checkpoint / "provenance.json").read_text())
    for group, name, value in (
        ("training_arguments", "save_steps", 3),
        ("training_arguments", "logging_steps", 1),
        ("training_arguments", "report_to", ["tensorboard"]),
        ("training_arguments", "gradient_accumulation_steps", 4),
        ("training_arguments", "per_device_train_batch_size", 2),
        ("arguments", "data", "elsewhere.jsonl"),
        ("arguments", "a_new_option", 1),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check_same_run(checkpoint, record | {group: record[group] | {name: value}})
    with pytest.warns(UserWarning, match="not to the bit: .*processes 1 -> 2"):
        check_same_run(checkpoint, record | {"batch": {"rows_per_step": 8, "processes": 2}})
    with pytest.warns(UserWarning, match="torch .* -> 0.1"):
        check_same_run(checkpoint, record | {"versions": record["versions"] | {"torch": "0.1"}})


def test_a_checkpoint_named_by_hand_must_be_whole(run_of_8_steps, run_folder, tmp_path, capsys):
    os.remove(run_folder / "checkpoint-4" / "optimizer.pt")
    changed = {"output_dir": str(tmp_path / "new"), "resume_from_checkpoint": str(run_folder / "checkpoint-4")}
    assert train(tmp_path, run_of_8_steps | changed) == 2
    assert "without its optimizer, wanted a whole checkpoint" in capsys.readouterr().err


def test_a_new_run_does_not_write_over_the_checkpoints_of_another(run_of_8_steps, run_folder, tmp_path, capsys):
    before = {file: file.read_bytes() for file in run_folder.rglob("*") if file.is_file()}
    assert train(tmp_path, run_of_8_steps | {"output_dir": str(run_folder)}) == 2
    assert "output_dir: found checkpoints of an earlier run" in capsys.readouterr().err
    assert {file: file.read_bytes() for file in run_folder.rglob("*") if file.is_file()} == before
    afresh = {"output_dir": str(run_folder), "resume_from_checkpoint": "false", "max_steps": 1}
    assert train(tmp_path, run_of_8_steps | afresh) == 0
    record = json.loads((run_folder / "provenance.json").read_text())
    assert "resumed_from" not in record and record["training_arguments"]["max_steps"] == 1


def test_a_run_that_had_ended_is_left_as_it_is(run_of_8_steps, run_folder, tmp_path, capsys):
    record, weights = ((run_folder / name).read_bytes() for name in ("provenance.json", "model.safetensors"))
    again = {"output_dir": str(run_folder), "resume_from_checkpoint": "true"}
    with pytest.warns(UserWarning, match="has come to its end before"):
        assert train(tmp_path, run_of_8_steps | again) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(record)["metrics"]
    assert (run_folder / "provenance.json").read_bytes() == record
    assert (run_folder / "model.safetensors").read_bytes() == weights


def test_a_target_that_changed_is_not_resumed_on(run_of_8_steps, run_folder, tmp_path, capsys):
    target = Path(shutil.copytree(run_of_8_steps["target"], tmp_path / "target"))
    moved = run_of_8_steps | {"target": str(target), "output_dir": str(run_folder)}
    record = run_folder / "checkpoint-4" / "provenance.json"
    record.write_text(record.read_text().replace(run_of_8_steps["target"], str(target)))
    changed = {name: value + ("norm" in name) for name, value in load_file(target / "model.safetensors").items()}
    save_file(changed, target / "model.safetensors")
    assert train(tmp_path, moved | {"resume_from_checkpoint": str(run_folder / "checkpoint-4")}) == 2
    assert "target_files: found" in capsys.readouterr().err
