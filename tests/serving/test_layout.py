"""What a drafter's config says to vLLM, and which drafters are refused. Needs no vLLM."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from hyperdflash.cli import EMBEDDED_DRAFTER
from hyperdflash.serving import version_complaint
from hyperdflash.serving.layout import check_fit, serving_fields


@pytest.fixture()
def saved():
    """config.json as `save_pretrained` writes it."""
    return json.loads((EMBEDDED_DRAFTER / "config.json").read_text())


@pytest.fixture()
def exported(tmp_path):
    """config.json as `export --to vllm` writes it."""
    from hyperdflash.conversion import ExportArguments, run_export

    run_export(ExportArguments(model=str(EMBEDDED_DRAFTER), to="vllm", output=str(tmp_path / "drafter")))
    return json.loads((tmp_path / "drafter" / "config.json").read_text())


def target(**overrides):
    fields = {
        "model_type": "deepseek_v4",
        "hidden_size": 192,
        "num_hidden_layers": 4,
        "hc_mult": 4,
        "vocab_size": 4096,
    }
    return SimpleNamespace(**fields | overrides)


def test_saved_and_exported_drafter_are_served_alike(saved, exported):
    ours, theirs = serving_fields(saved), serving_fields(exported)
    inner = {name: value for name, value in theirs.pop("dflash_config").items() if name in ours["dflash_config"]}
    assert inner == ours.pop("dflash_config")
    shared = ours.keys() & theirs.keys() - {"transformers_version"}
    assert {name: ours[name] for name in shared} == {name: theirs[name] for name in shared}
    assert {"hidden_size", "num_hidden_layers", "rope_parameters", "head_dim", "block_size", "layer_types"} <= shared


def test_streams_stand_inside_and_blocks_are_bidirectional(saved):
    """A top-level hc_mult makes vLLM's V2 runner widen its buffers; without `causal`, sliding layers are causal."""
    fields = serving_fields(saved)
    assert "hc_mult" in saved and "hc_mult" not in fields and "auto_map" not in fields
    assert fields["dflash_config"]["hc_mult"] == 4
    assert fields["dflash_config"]["causal"] is False
    assert fields["architectures"] == ["HyperDFlashDraftModel"]


@pytest.mark.parametrize(
    "change, named",
    [
        ({"context_source": "multi_layer"}, "target_hidden_source"),
        ({"sample_from_anchor": True}, "sample_from_anchor"),
        ({"mask_token_id": None}, "mask_token_id"),
        ({"block_size": None}, "block_size"),
    ],
)
def test_a_config_of_another_kind_is_refused(saved, change, named):
    fields = {name: value for name, value in (saved | change).items() if value is not None}
    with pytest.raises(ValueError, match=named):
        serving_fields(fields)


def as_config(fields):
    return SimpleNamespace(**serving_fields(fields))


def test_a_drafter_that_fits_is_taken(saved):
    check_fit(as_config(saved), target(), 6)


@pytest.mark.parametrize(
    "change, of_target, drafts, named",
    [
        ({}, {"hidden_size": 256}, 6, "target_hidden_size: found 192, wanted 256"),
        ({}, {"num_hidden_layers": 43}, 6, "target_num_hidden_layers: found 4, wanted 43"),
        ({}, {"hc_mult": 2}, 6, "hc_mult: found 4, wanted 2"),
        ({}, {"vocab_size": 129280}, 6, "vocab_size: found 4096, wanted 129280"),
        ({}, {"model_type": "hy_v4"}, 6, "target_model_type: found 'deepseek_v4', wanted 'hy_v4'"),
        ({}, {"hc_mult": None, "model_type": "qwen3"}, 6, "target: found model_type 'qwen3'"),
        ({"mask_token_id": 4096}, {}, 6, "mask_token_id: found 4096"),
        ({"hidden_size": 128}, {}, 6, "hidden_size: found 128, wanted 192"),
        ({}, {}, 5, "num_speculative_tokens: found 5, wanted 6"),
        ({}, {}, 7, "num_speculative_tokens: found 7, wanted 6"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused(saved, change, of_target, drafts, named):
    with pytest.raises(ValueError, match=named):
        check_fit(as_config(saved | change), target(**of_target), drafts)


@pytest.mark.parametrize(
    "version, tested", [("0.32.0", True), ("0.32.1+cpu", True), ("0.31.9", False), ("0.40.0", False)]
)
def test_the_version_guard_states_the_tested_range(version, tested):
    complaint = version_complaint(version)
    assert (complaint is None) == tested
    assert tested or (version in complaint and "0.32" in complaint)


def test_the_plugin_pulls_no_modeling_code():
    """vLLM imports it in every process, with the transformers release that vLLM pins."""
    code = (
        "import sys, hyperdflash.serving, hyperdflash.serving.layout\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
        "assert not [name for name in sys.modules if name.startswith('hyperdflash.') and 'serving' not in name]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
