"""The borrowed modules without the target: the same bits, and nothing else of the checkpoint is read."""

import json
import shutil

import huggingface_hub
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hyperdflash.generation_hyperdflash import check_drafter_fits
from hyperdflash.trainer.states import LiveTargetStates
from hyperdflash.trainer.target_modules import RELEASED_NAMES, TargetModules, load_without_layers

RELEASED = {name: names[0] for name, names in RELEASED_NAMES.items()}  # of DeepSeek-V4
BORROWED = set(RELEASED) | set(RELEASED.values())


def states_of(modules):
    return {
        f"{name}.{key}": value for name, module in vars(modules).items() for key, value in module.state_dict().items()
    }


def assert_same_bits(found, wanted):
    found, wanted = states_of(found), states_of(wanted)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


def save(target, folder, **options):
    target.save_pretrained(folder, **options)
    return folder


def remove_other_shards(folder):
    """Deletes the shards without a borrowed tensor; how many it were."""
    removed = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as shard:
            names = set(shard.keys())
        if not names & BORROWED:
            path.unlink()
            removed += 1
    return removed


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["auto", torch.float32, torch.bfloat16])
def test_the_modules_are_those_of_a_full_load_and_other_shards_may_be_missing(make_target, tmp_path, tied, dtype):
    folder = save(make_target(tie_word_embeddings=tied).bfloat16(), tmp_path / "target", max_shard_size="20KB")
    full = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    assert remove_other_shards(folder) > 2
    with pytest.raises((OSError, RuntimeError)):
        AutoModelForCausalLM.from_pretrained(folder)
    partial = load_without_layers(folder, dtype=dtype)
    assert_same_bits(TargetModules.of(partial), TargetModules.of(full))
    assert partial.dtype == full.dtype
    assert not any(parameter.requires_grad for parameter in partial.parameters())
    if tied:
        assert partial.lm_head.weight is partial.model.embed_tokens.weight


def test_the_modules_give_the_targets_own_logits(make_target, drafter, tmp_path):
    folder = save(make_target(), tmp_path / "target")
    full = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    input_ids = torch.randint(3, 60, (1, 40))
    residual = LiveTargetStates(full, drafter.config)(input_ids, torch.ones_like(input_ids)).residual
    modules = TargetModules.of(load_without_layers(folder, dtype=torch.bfloat16))
    with torch.no_grad():
        assert torch.equal(modules.logits(modules.teacher_states(residual, "hc_head")), full(input_ids).logits)


def test_released_names_are_understood(make_target, tmp_path):
    target = make_target()
    folder = save(target, tmp_path / "target")
    tensors = load_file(folder / "model.safetensors")
    found = {RELEASED.get(name, name): value for name, value in tensors.items() if ".layers." not in name}
    assert set(found) == set(RELEASED.values())
    save_file(found, folder / "model.safetensors")
    assert_same_bits(TargetModules.of(load_without_layers(folder)), TargetModules.of(target))


def test_the_drafter_is_checked_against_the_whole_target(make_target, make_drafter, tmp_path):
    target = make_target()
    partial = load_without_layers(save(target, tmp_path / "target"))
    check_drafter_fits(partial, make_drafter(target))
    with pytest.raises(ValueError, match="target_num_hidden_layers: found 2, wanted 3|target_num_hidden_layers"):
        check_drafter_fits(partial, make_drafter(target, target_num_hidden_layers=2, target_layer_ids=[1]))


@pytest.mark.parametrize("missing", ["model.norm.weight", "model.hc_head.hc_fn"])
def test_a_missing_module_is_named(make_target, tmp_path, missing):
    folder = save(make_target(), tmp_path / "target")
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(missing)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=missing):
        load_without_layers(folder)


def test_from_the_hub_only_the_files_with_the_modules_are_asked_for(make_target, tmp_path, monkeypatch):
    folder = tmp_path / "hub" / "models--somebody--target" / "snapshots" / ("0" * 40)
    target = make_target()
    save(target, folder, max_shard_size="20KB")
    (folder.parents[1] / "refs").mkdir()
    (folder.parents[1] / "refs" / "main").write_text("0" * 40)
    assert remove_other_shards(folder) > 2
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    asked = []

    def download(repo, revision, allow_patterns):
        asked.extend(allow_patterns)
        return huggingface_hub.snapshot_download(repo, revision=revision, allow_patterns=allow_patterns)

    monkeypatch.setattr("hyperdflash.trainer.target_modules.snapshot_download", download)
    assert_same_bits(TargetModules.of(load_without_layers("somebody/target")), TargetModules.of(target))
    wanted = {path.name for path in folder.glob("*.safetensors")}
    assert {name for name in asked if name.startswith("model-")} == wanted
    assert len(wanted) < len(
        set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values())
    )


def test_of_a_target_that_is_spread_out_copies_are_borrowed(make_target, drafter, tmp_path):
    folder = save(make_target(), tmp_path / "target")
    whole = AutoModelForCausalLM.from_pretrained(folder)
    device_map = {"model": "cpu", "lm_head": "disk", "model.layers.1": "disk", "model.hc_head": "disk"}
    device_map |= {f"model.{name}": "cpu" for name in ("embed_tokens", "layers.0", "layers.2", "norm", "rotary_emb")}
    del device_map["model"]
    spread = AutoModelForCausalLM.from_pretrained(folder, device_map=device_map, offload_folder=tmp_path / "offload")
    assert spread.lm_head.weight.device.type == "meta"
    states = LiveTargetStates(spread, drafter.config, torch.device("cpu"))
    assert_same_bits(states.modules, TargetModules.of(whole))
    assert spread.lm_head.weight.device.type == "meta"  # the target is as it was
    input_ids = torch.randint(3, 60, (2, 40))
    mask = torch.ones_like(input_ids)
    wanted = LiveTargetStates(whole, drafter.config)(input_ids, mask)
    assert torch.equal(states(input_ids, mask).residual, wanted.residual)
    hidden = torch.randn(3, 32, requires_grad=True)  # as the drafter's, which learns through the LM head
    states.modules.logits(hidden).sum().backward()
    assert hidden.grad.abs().max() > 0
    shutil.rmtree(tmp_path / "offload")


def test_a_quantised_target_is_not_moved(make_target, drafter, monkeypatch):
    target = make_target()
    target.hf_quantizer = object()

    def refuse(*args, **kwargs):
        raise ValueError("`.to` is not supported for this quantised model")

    monkeypatch.setattr(target, "to", refuse)
    assert LiveTargetStates(target, drafter.config, torch.device("cpu")).target is target
