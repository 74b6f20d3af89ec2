"""`generate`, `train` and `doctor` take Hub ids: tried without a network, on a cache as a download leaves it."""

import json
import shutil

import pytest
import torch
import transformers
from huggingface_hub import constants

from hyperdflash.cli import main

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(pair, tmp_path, monkeypatch):
    """A cache that holds `somebody/target` and `somebody/drafter`, and nothing else to be had."""
    for name, folder in (("target", "target"), ("drafter", "initial")):
        repository = tmp_path / "hub" / f"models--somebody--{name}"
        shutil.copytree(pair / folder, repository / "snapshots" / COMMIT)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(COMMIT)
    for name, value in (("HF_HUB_CACHE", str(tmp_path / "hub")), ("HF_HUB_OFFLINE", True)):
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.chdir(tmp_path)
    return tmp_path


PAIR = ["--drafter", "somebody/drafter", "--target", "somebody/target"]


@pytest.mark.parametrize("code", [[], ["--trust_remote_code", "true"]], ids=["installed code", "remote code"])
def test_generate_and_doctor_take_hub_ids(code, hub, pair, capsys):
    assert main(["generate", *PAIR, *code, "--prompt", "w5 w6 w7", "--max_new_tokens", "12", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["statistics"]["rounds"] > 0
    rows = ["--data", str(pair / "held_out.jsonl"), "--rows", "1", "--max_new_tokens", "12", "--json"]
    assert main(["doctor", *PAIR, *code, *rows]) in (0, 1)  # what the random drafter's generation config says aside
    findings = {each["check"]: each for each in json.loads(capsys.readouterr().out)["findings"]}
    assert findings["weights"]["ok"] and "borrowed tensors equal the checkpoint's" in findings["weights"]["message"]
    assert findings["config"]["ok"] and findings["acceptance"]["ok"]


def test_training_takes_hub_ids_and_a_cache_of_states_knows_the_commit(hub, settings, capsys):
    settings |= {"drafter": "somebody/drafter", "target": "somebody/target", "max_steps": 6, "states_cache": "states"}
    for source in ("fill", "cache"):
        settings |= {"states_source": source, "output_dir": str(hub / source)}
        (hub / "recipe.yaml").write_text(json.dumps(settings))
        assert main(["train", "--config", "recipe.yaml"]) == 0
    fill, cache = (json.loads((hub / source / "provenance.json").read_text()) for source in ("fill", "cache"))
    assert fill["metrics"]["train_loss"] == cache["metrics"]["train_loss"]
    assert json.loads((hub / "states" / "manifest.json").read_text())["states"]["target_revision"] == COMMIT
    assert torch.isfinite(torch.tensor(fill["metrics"]["train_loss"]))


def test_drafter_and_target_in_each_others_place_are_told_apart_on_the_hub(hub, capsys):
    assert main(["generate", "--drafter", "somebody/target", "--prompt", "a"]) == 2
    assert "drafter: found model_type 'deepseek_v4' in 'somebody/target'" in capsys.readouterr().err
    assert main(["generate", "--target", "somebody/nothing", "--prompt", "a"]) == 2
    assert "target: found no config.json of 'somebody/nothing'" in capsys.readouterr().err
