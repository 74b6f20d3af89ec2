"""What reads like a folder must be one; the rest is the Hub's."""

import json

import pytest

from hyperdflash.utils.folders import check_model_path
from hyperdflash.utils.models import check_model_kind


@pytest.mark.parametrize("model", ["./there/model", "there/model", "org/model", "model", "somewhere/model"])
def test_folders_and_hub_ids_pass(model, tmp_path, monkeypatch):
    (tmp_path / "there" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    check_model_path("target", model)


@pytest.mark.parametrize("model", ["./model", "~/no/such/model", "/no/such/model", "there/modle", "org/model/part"])
def test_a_path_without_a_folder_is_named_with_its_option(model, tmp_path, monkeypatch):
    (tmp_path / "there" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=f"drafter: found no folder '{model}'"):
        check_model_path("drafter", model)


def test_a_drafter_and_a_target_are_told_apart_by_their_configuration(tmp_path):
    for name, model_type in (("drafter", "hyperdflash"), ("target", "deepseek_v4")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": model_type}))
        check_model_kind(name, str(tmp_path / name))
    with pytest.raises(ValueError, match="drafter: found model_type 'deepseek_v4'.*wanted a drafter"):
        check_model_kind("drafter", str(tmp_path / "target"))
    with pytest.raises(ValueError, match="target: found model_type 'hyperdflash'.*wanted the target"):
        check_model_kind("target", str(tmp_path / "drafter"))


def test_the_folder_of_a_killed_run_names_its_checkpoint(tmp_path):
    for step in (4, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
    with pytest.raises(FileNotFoundError, match="drafter: found no config.json in .*its checkpoint '.*checkpoint-10'"):
        check_model_kind("drafter", str(tmp_path))


@pytest.mark.parametrize(
    ("file", "text"), [("config.json", "[]"), ("config.json", "{"), ("adapter_config.json", "{}")]
)
def test_what_is_no_drafter_is_named_before_it_is_loaded(file, text, tmp_path):
    (tmp_path / file).write_text(text)
    with pytest.raises(ValueError, match="found no JSON object|found an adapter"):
        check_model_kind("drafter", str(tmp_path))
