"""What the Trainer uploads is a drafter that can be loaded, during training and at its end."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi, RepoUrl
from safetensors.torch import load_file
from transformers import AutoModel

from hyperdflash.cli import main

DRAFTER_FILES = {
    "config.json",
    "model.safetensors",
    "generation_config.json",
    "configuration_hyperdflash.py",
    "modeling_hyperdflash.py",
    "generation_hyperdflash.py",
    "provenance.json",
    "tokenizer.json",
}


class Hub:
    """Takes uploads in place of the Hub: a folder each, without what `ignore_patterns` leaves out."""

    def __init__(self, folder):
        self.folder, self.uploads = folder, []

    def create_repo(self, repo_id, **kwargs):
        return RepoUrl(f"https://huggingface.co/somebody/{Path(repo_id).name}")

    def upload_folder(self, *, repo_id, folder_path, commit_message, ignore_patterns=(), **kwargs):
        copy = self.folder / str(len(self.uploads))
        shutil.copytree(folder_path, copy, ignore=shutil.ignore_patterns(*ignore_patterns))
        self.uploads.append((repo_id, commit_message, copy))
        return self

    def done(self):
        return True


@pytest.fixture
def hub(tmp_path, monkeypatch):
    hub = Hub(tmp_path / "hub")
    for name in ("create_repo", "upload_folder"):
        monkeypatch.setattr(HfApi, name, getattr(hub, name))
    return hub


def push(folder, settings):
    settings = settings | {"push_to_hub": True, "hub_model_id": "somebody/drafter"}
    (folder / "recipe.yaml").write_text(json.dumps(settings))  # JSON is YAML
    return main(["train", "--config", str(folder / "recipe.yaml")])


def test_every_upload_holds_a_whole_drafter(hub, settings, tmp_path):
    shutil.copytree(settings["drafter"], tmp_path / "initial")
    settings |= {"drafter": str(tmp_path / "initial")}
    (tmp_path / "initial" / "provenance.json").write_text('{"command": ["hyperdflash", "init"]}')
    assert push(tmp_path, settings | {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}) == 0
    assert [message for _, message, _ in hub.uploads] == [
        "Training in progress, step 2",
        "Training in progress, step 4",
        "Model save",
    ]
    for repo, _, folder in hub.uploads:
        assert repo == "somebody/drafter"
        names = {path.name for path in folder.iterdir()}
        assert names >= DRAFTER_FILES and not any(name.startswith("checkpoint") for name in names)
        assert json.loads((folder / "config.json").read_text())["auto_map"]["AutoModel"].startswith("modeling_hyperdf")
        assert AutoModel.from_pretrained(folder).dtype == torch.float32
    first, last = (load_file(hub.uploads[index][2] / "model.safetensors") for index in (0, -1))
    assert any(not torch.equal(first[name], last[name]) for name in last)
    text = (hub.uploads[-1][2] / "provenance.json").read_text()
    record = json.loads(text)
    assert "metrics" in record and record["earlier"] == [{"command": ["hyperdflash", "init"]}]
    assert str(tmp_path) not in text and record["arguments"]["drafter"] == "initial"  # strangers read it


def test_a_merged_drafter_is_uploaded_without_its_adapter_beside_it(hub, settings, tmp_path, capsys):
    settings = settings | {"use_peft": True, "merge_adapter": True, "max_steps": 2, "save_strategy": "steps"}
    assert push(tmp_path, settings) == 2
    assert "hub_strategy: found 'every_save' with merge_adapter, wanted 'end'" in capsys.readouterr().err
    assert push(tmp_path, settings | {"hub_strategy": "end"}) == 0
    ((_, _, folder),) = hub.uploads
    names = {path.name for path in folder.iterdir()}
    assert names >= DRAFTER_FILES and not {"adapter_config.json", "adapter_model.safetensors"} & names
