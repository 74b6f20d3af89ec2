"""`init --with_head` brings all of a target that training on cached states needs."""

import json

import pytest
from huggingface_hub import constants

from hyperdflash.cli import main


def train(folder, settings) -> list[float]:
    (folder / "recipe.yaml").write_text(json.dumps(settings))  # JSON is YAML
    assert main(["train", "--config", str(folder / "recipe.yaml")]) == 0
    state = json.loads((folder / "out" / "trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


@pytest.mark.parametrize("where", ["folder", "hub"])
def test_states_of_a_whole_target_train_on_with_its_head_alone(
    hub, target, tokenizer, settings, tmp_path, monkeypatch, capsys, where
):
    folder = tmp_path / "somebody" / "target"
    target.save_pretrained(folder, max_shard_size="40KB")
    tokenizer.save_pretrained(folder)
    assert len(list(folder.glob("*.safetensors"))) > 3
    hub.add_repository("somebody/target", folder)
    whole = "somebody/target" if where == "hub" else str(folder)
    cached = {"max_steps": 6, "states_cache": str(tmp_path / "cache")}
    wanted = train(tmp_path, settings | cached | {"target": whole, "states_source": "fill"})

    options = ["--target", whole, "--output", str(tmp_path / "drafter"), "--with_head", "--mask_token_id", "63"]
    assert main(["init", *options]) == 0
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    head = str(tmp_path / "drafter" / "head")
    settings |= cached | {"target": head, "states_source": "cache"}
    assert train(tmp_path, settings) == wanted

    if where == "hub":
        return  # its commit stands for its files
    capsys.readouterr()
    (tmp_path / "drafter" / "head" / "config.json").write_text(
        (folder / "config.json").read_text().replace('"hc_eps": 1e-06', '"hc_eps": 1e-05')
    )
    (tmp_path / "recipe.yaml").write_text(json.dumps(settings))
    assert main(["train", "--config", str(tmp_path / "recipe.yaml")]) == 2
    assert "states_cache: target_files: found" in capsys.readouterr().err
