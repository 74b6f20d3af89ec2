"""The plugin with vLLM and the transformers that vLLM pins, without an engine."""

import json
import subprocess
from pathlib import Path

import pytest

CHECK = Path(__file__).parent / "plugin_job.py"


@pytest.fixture(scope="module")
def facts(serving_python, serving_variables, exported):
    """What plugin_job.py found."""
    command = [serving_python, CHECK, exported / "drafter"]
    done = subprocess.run(command, env=serving_variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_vllm_finds_the_plugin_by_its_entry_point(facts):
    assert facts["architectures"] == {
        "DeepseekV4ForCausalLM": "HyperDFlashDeepseekV4ForCausalLM",
        "DFlashHyperDFlashDraftModel": "HyperDFlashForCausalLM",
        "DFlashHyperDFlashModel": "HyperDFlashForCausalLM",
        "DFlashDraftModel": "VanillaDFlashForCausalLM",
    }


def test_it_pulls_no_modeling_code(facts):
    assert facts["imported"] == [
        "hyperdflash",
        "hyperdflash.serving",
        "hyperdflash.serving.config",
        "hyperdflash.serving.drafter",
        "hyperdflash.serving.layout",
        "hyperdflash.serving.target",
    ]


def test_both_layouts_make_a_config_without_top_level_streams(facts):
    for config in facts["configs"]:
        assert config == {"hc_mult": False, "streams": 4, "causal": False, "source": "pre_hc_head"}


def test_an_untested_vllm_is_named_when_a_drafter_is_read(facts):
    assert facts["untested"].startswith("vllm: found version 0.99.0, wanted 0.32 to 0.32")


def test_a_drafter_that_does_not_fit_is_refused_before_weights(facts):
    assert facts["misfit"] == "drafter: target_num_hidden_layers: found 4, wanted 43, the target's"
    assert facts["too_few_drafts"].startswith("num_speculative_tokens: found 3, wanted 6")
    assert facts["other_target"].startswith("target: found model_type 'qwen3'")
    assert facts["vanilla_misfit"] == "drafter: num_target_layers: found 5, wanted 4, the target's"
    assert facts["vanilla_too_few_drafts"].startswith("num_speculative_tokens: found 3, wanted 6")


def test_a_drafter_with_tensors_too_few_or_too_many_is_refused(facts):
    assert facts["weights"] == "drafter: weights: missing reducer.hc_base; unknown extra.weight"


def test_reducers_are_those_of_transformers(facts, tmp_path):
    """To float32 rounding, for every place of the norm, and for the dense one."""
    import torch

    from hyperdflash.configuration_hyperdflash import HyperDFlashConfig
    from hyperdflash.modeling_hyperdflash import REDUCER_CLASSES

    for kind, found in facts["reducers"].items():
        reducer, norm, pooling = kind.split(" ")
        config = HyperDFlashConfig(
            hidden_size=8, hc_mult=4, reducer=reducer, path_norm=norm, stream_pooling=pooling, target_rms_norm_eps=1e-5
        )
        module = REDUCER_CLASSES[reducer](config)
        parameters = sorted(module.named_parameters())
        with torch.no_grad():
            for _, parameter in parameters:
                values = torch.arange(parameter.numel(), dtype=torch.float32)
                parameter.copy_(torch.sin(values).view_as(parameter))
            streams = torch.cos(torch.arange(3 * 32, dtype=torch.float32)).view(1, 3, 4, 8)
            torch.testing.assert_close(torch.tensor(found), module(streams)[0])


def test_the_sequential_head_is_that_of_transformers(facts):
    import torch

    from hyperdflash.configuration_hyperdflash import HyperDFlashConfig
    from hyperdflash.modeling_hyperdflash import SequentialHead

    head = SequentialHead(HyperDFlashConfig(hidden_size=8, sequential_head_size=5, reducer="fc"))
    with torch.no_grad():
        for parameter in head.parameters():
            values = torch.arange(parameter.numel(), dtype=torch.float32)
            parameter.copy_(torch.sin(values).view_as(parameter))
        states, embeds = torch.cos(torch.arange(48, dtype=torch.float32)).view(2, 3, 8)
        torch.testing.assert_close(torch.tensor(facts["sequential_head"]), head(states, embeds))
