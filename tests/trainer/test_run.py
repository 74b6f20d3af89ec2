"""`hyperdflash train` refuses bad input before any long work, and writes over nothing but drafters."""

import json

import pytest

from hyperdflash.trainer import HyperDFlashTrainingArguments, TrainArguments, run_train
from hyperdflash.trainer.run import load_rows

GOOD = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


@pytest.fixture
def folders(tmp_path):
    """A target's, a drafter's and another model's folder, as far as their configs."""
    for name, model_type in (("target", "deepseek_v4"), ("drafter", "hyperdflash"), ("other", "llama")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": model_type}))
    (tmp_path / "rows.jsonl").write_text(json.dumps(GOOD))
    return tmp_path


def train(folders, output, drafter="drafter", target="target", rows="rows.jsonl"):
    script = TrainArguments(drafter=str(folders / drafter), target=str(folders / target), data=str(folders / rows))
    arguments = HyperDFlashTrainingArguments(output_dir=str(folders / output), use_cpu=True, report_to="none")
    return run_train(script, arguments)


@pytest.mark.parametrize("output", ["target", "target/inside", "."])
def test_the_target_is_never_written_over(folders, output):
    before = (folders / "target" / "config.json").read_text()
    with pytest.raises(ValueError, match="apart from the target"):
        train(folders, output)
    assert (folders / "target" / "config.json").read_text() == before


def test_another_models_folder_is_never_written_over(folders):
    with pytest.raises(FileExistsError, match="'llama'"):
        train(folders, "other")


def test_drafter_and_target_in_each_others_place_are_told_apart(folders):
    with pytest.raises(ValueError, match="drafter: found model_type 'deepseek_v4'"):
        train(folders, "output", drafter="target")
    with pytest.raises(ValueError, match="target: found model_type 'hyperdflash'"):
        train(folders, "output", target="drafter")
    assert not (folders / "output").exists()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "no rows|wanted rows"),
        ("{not json", "wanted rows"),
        (json.dumps(GOOD) + "\n" + json.dumps({"messages": GOOD["messages"][:1]}), "row 1.*without an assistant"),
        (json.dumps({"input_ids": [5, 6], "labels": [5]}), "labels: found 1 entries, wanted 2"),
        (json.dumps({"other": 1}), "found the columns"),
    ],
)
def test_rows_that_cannot_be_trained_on_are_named(tmp_path, text, named):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=named):
        load_rows(str(path))


def test_arguments_fit_a_machine_without_an_accelerator_as_they_are():
    import torch

    arguments = HyperDFlashTrainingArguments(output_dir="unused", report_to="none")
    assert arguments.bf16 is (torch.accelerator.is_available())
