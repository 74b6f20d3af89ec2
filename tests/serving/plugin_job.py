"""Facts about the plugin, as JSON. Run by test_plugin.py, in the serving environment: `plugin_job.py DRAFTER`."""

import json
import sys
from types import SimpleNamespace

import torch
from transformers import AutoConfig
from vllm import ModelRegistry
from vllm.plugins import load_general_plugins

load_general_plugins()

import hyperdflash.serving as serving  # noqa: E402
from hyperdflash.serving import config as serving_config  # noqa: E402
from hyperdflash.serving.drafter import (  # noqa: E402
    REDUCER_CLASSES,
    HyperDFlashForCausalLM,
    SequentialHead,
    VanillaDFlashForCausalLM,
)


def message(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except ValueError as error:
        return str(error)
    return None


def engine_config(drafter, drafts=6, **target):
    fields = {
        "model_type": "deepseek_v4",
        "hidden_size": 192,
        "num_hidden_layers": 4,
        "hc_mult": 4,
        "vocab_size": 4096,
    }
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            draft_model_config=SimpleNamespace(hf_config=drafter),
            target_model_config=SimpleNamespace(hf_config=SimpleNamespace(**fields | target)),
            num_speculative_tokens=drafts,
        )
    )


@torch.no_grad()
def filled(module):
    for _, parameter in sorted(module.named_parameters()):
        values = torch.arange(parameter.numel(), dtype=torch.float32)
        parameter.copy_(torch.sin(values).view_as(parameter))
    return module


def headed():
    states, embeds = torch.cos(torch.arange(48, dtype=torch.float32)).view(2, 3, 8)
    return filled(SequentialHead(5, 8, 1e-6))(states, embeds).tolist()


def reduced(reducer, norm, pooling):
    fields = {"hc_mult": 4, "path_norm": norm, "stream_pooling": pooling, "target_hidden_size": 8}
    module = filled(REDUCER_CLASSES[reducer](fields | {"target_rms_norm_eps": 1e-5, "hc_eps": 1e-6}, 8, 1e-6))
    with torch.no_grad():
        return module(torch.cos(torch.arange(3 * 32, dtype=torch.float32)).view(3, 32)).tolist()


drafter = AutoConfig.from_pretrained(sys.argv[1])
native = serving_config.HyperDFlashServingConfig.from_dict(
    {
        **{name: value for name, value in drafter.to_dict().items() if name != "dflash_config"},
        **{name: value for name, value in drafter.dflash_config.items() if name != "causal"},
        "context_source": "pre_hc_head",
    }
)
vanilla = SimpleNamespace(block_size=7, num_target_layers=5, dflash_config={})
facts = {
    "vanilla_misfit": message(VanillaDFlashForCausalLM, vllm_config=engine_config(vanilla)),
    "vanilla_too_few_drafts": message(VanillaDFlashForCausalLM, vllm_config=engine_config(vanilla, drafts=3)),
    "configs": [
        {
            "hc_mult": hasattr(config, "hc_mult"),
            "streams": config.dflash_config["hc_mult"],
            "causal": config.dflash_config["causal"],
            "source": config.dflash_config["target_hidden_source"],
        }
        for config in (drafter, native)
    ],
    "misfit": message(HyperDFlashForCausalLM, vllm_config=engine_config(drafter, num_hidden_layers=43)),
    "too_few_drafts": message(HyperDFlashForCausalLM, vllm_config=engine_config(drafter, drafts=3)),
    "other_target": message(
        HyperDFlashForCausalLM, vllm_config=engine_config(drafter, model_type="qwen3", hc_mult=None)
    ),
    "reducers": {
        " ".join(kind): reduced(*kind)
        for kind in (
            ("hc_gate", "value", "flatten"),
            ("hc_gate", "pre_gate", "flatten"),
            ("hc_gate", "none", "flatten"),
            ("fc", "none", "flatten"),
            ("fc", "none", "mean"),
        )
    },
    "sequential_head": headed(),
    "architectures": {
        name: ModelRegistry.models[name].load_model_cls().__name__
        for name in (
            "DeepseekV4ForCausalLM",
            "DFlashHyperDFlashDraftModel",
            "DFlashHyperDFlashModel",
            "DFlashDraftModel",
        )
    },
}
stub = SimpleNamespace(
    config=SimpleNamespace(num_hidden_layers=0),
    model=SimpleNamespace(
        reducer=SimpleNamespace(named_parameters=lambda: [("hc_fn", None), ("hc_base", None)]), sequential_head=None
    ),
)
names = ("norm.weight", "hidden_norm.weight", "reducer.hc_fn", "extra.weight")
facts["weights"] = message(HyperDFlashForCausalLM.load_weights, stub, [(name, None) for name in names])
facts["imported"] = sorted(name for name in sys.modules if name.split(".")[0] == "hyperdflash")
serving_config.complaint = serving.version_complaint("0.99.0")
facts["untested"] = message(AutoConfig.from_pretrained, sys.argv[1])
print(json.dumps(facts))
