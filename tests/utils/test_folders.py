"""What reads like a folder must be one; the rest is the Hub's."""

import pytest

from hyperdflash.utils.folders import check_model_path


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
