"""`HyperDFlashModel`: reducers, attention implementations, cache, masks, round trips, loading."""

import subprocess
import sys
import textwrap

import pytest
import torch
from transformers import AutoConfig, AutoModel, DeepseekV4Config
from transformers.cache_utils import DFlashCache
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperHead

from hyperdflash import HyperDFlashConfig, HyperDFlashModel
from hyperdflash.modeling_hyperdflash import FcReducer, HcGateReducer

TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "mask_token_id": 7,
    "target_num_hidden_layers": 3,
    "max_position_embeddings": 4096,
}
VARIANTS = {
    "gates": {},
    "sliding": {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 16},
    "path_norm_none": {"path_norm": "none"},
    "pre_gate": {"path_norm": "pre_gate"},
    "multi_layer_fc": {"reducer": "fc", "context_source": "multi_layer", "target_layer_ids": [0, 1, 2]},
    "mean_fc": {"reducer": "fc", "stream_pooling": "mean"},
    "sample_from_anchor": {"sample_from_anchor": True},
    "sequential_head": {"sequential_head_size": 48},
}


def make(seed: int = 0, **fields) -> HyperDFlashModel:
    torch.manual_seed(seed)
    return HyperDFlashModel(HyperDFlashConfig(**{**TINY, **fields})).eval()


def inputs_for(model: HyperDFlashModel, context: int = 40, batch: int = 1) -> dict[str, torch.Tensor]:
    config = model.config
    width = config.target_hidden_size * len(config.target_layer_ids)
    generator = torch.Generator().manual_seed(1)
    return {
        "noise_embeds": torch.randn(batch, config.block_size, config.hidden_size, generator=generator),
        "context_hidden_states": torch.randn(batch, context, config.hc_mult, width, generator=generator),
    }


def randomize_gates(module: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(2)
    for name in ("hc_fn", "hc_base", "hc_scale"):
        parameter = getattr(module, name)
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)


def test_a_fresh_sequential_head_changes_nothing_and_a_trained_one_reads_the_token_before_each_slot():
    model, plain = make(sequential_head_size=48), make()
    inputs, previous = inputs_for(model), torch.randn(1, 7, 64, generator=torch.Generator().manual_seed(5))
    plain.load_state_dict({name: value for name, value in model.state_dict().items() if name in plain.state_dict()})
    without = plain(**inputs).last_hidden_state
    assert torch.equal(model(**inputs, previous_embeds=previous).last_hidden_state, without)

    torch.nn.init.normal_(model.sequential_head.down_proj.weight)
    assert torch.equal(model(**inputs).last_hidden_state, without)  # the caller goes from slot to slot
    found, head = model(**inputs, previous_embeds=previous).last_hidden_state, model.sequential_head
    for slot in range(7):
        parts = (without[0, slot], previous[0, slot])
        normed = torch.cat([part / (part.square().mean() + model.config.rms_norm_eps).sqrt() for part in parts])
        wanted = parts[0] + head.down_proj.weight @ torch.nn.functional.silu(head.up_proj.weight @ normed)
        torch.testing.assert_close(found[0, slot], wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_without_a_path_norm_the_reducer_is_the_targets_hc_head_to_the_bit(dtype):
    head = DeepseekV4HyperHead(DeepseekV4Config(hidden_size=64, hc_mult=4, num_hidden_layers=1))
    randomize_gates(head)
    reducer = make(path_norm="none").reducer
    reducer.load_state_dict(head.state_dict())
    streams = (torch.randn(2, 11, 4, 64) * 3).to(dtype)
    assert torch.equal(reducer(streams), head(streams))


def test_the_gates_ignore_the_value_norm_and_see_the_pre_gate_norm():
    streams = torch.randn(1, 5, 4, 64) * torch.tensor([1.0, 10.0, 0.1, 3.0])[:, None]
    models = {name: make(path_norm=name) for name in ("none", "value", "pre_gate")}
    for model in models.values():
        randomize_gates(model.reducer)
    raw_gates = models["none"].reducer.gates(streams)
    normed = streams / (streams.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    assert torch.equal(models["value"].reducer.gates(streams), raw_gates)
    by_value = (raw_gates.unsqueeze(-1) * normed).sum(2)
    by_pre_gate = (models["none"].reducer.gates(normed).unsqueeze(-1) * normed).sum(2)
    torch.testing.assert_close(models["value"].reducer(streams), by_value)
    torch.testing.assert_close(models["pre_gate"].reducer(streams), by_pre_gate)
    assert not torch.allclose(by_value, by_pre_gate)


def test_trainable_reducer_parameters_for_v4_flash_are_65541_gates_against_67108864_fc():
    with torch.device("meta"):
        gates = HcGateReducer(HyperDFlashConfig(path_norm="none"))
        with_norm = HcGateReducer(HyperDFlashConfig())
        fc = FcReducer(HyperDFlashConfig(reducer="fc"))

    def count(module):
        return sum(p.numel() for p in module.parameters() if p.requires_grad)

    assert count(gates) == 65_541
    assert count(with_norm) == 65_541 + 4 * 4096
    assert count(fc) == 67_108_864


def test_a_drafter_has_no_embedding_and_no_lm_head():
    names = [name for name, _ in make().named_parameters()]
    assert not any("embed_tokens" in name or "lm_head" in name for name in names)
    assert all(512 not in p.shape for p in make().parameters())
    # None, as transformers, PEFT and accelerate's FSDP2 take it from models without one; the default raises
    assert make().get_input_embeddings() is None and make().get_output_embeddings() is None


@pytest.mark.parametrize("implementation", ["sdpa", "flex_attention"])
@pytest.mark.parametrize("variant", ["gates", "sliding"])
@pytest.mark.parametrize("padding", [0, 3])
def test_attention_implementations_agree_with_eager(variant, implementation, padding):
    model = make(**VARIANTS[variant])
    inputs = inputs_for(model)
    mask = torch.ones(1, 47, dtype=torch.long)
    mask[:, :padding] = 0
    outputs = []
    for name in ("eager", implementation):
        model.set_attn_implementation(name)
        with torch.no_grad():
            outputs.append(model(**inputs, attention_mask=mask).last_hidden_state)
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_context_given_piece_by_piece_through_the_cache_equals_context_given_at_once(variant):
    model = make(**VARIANTS[variant])
    inputs = inputs_for(model, context=40)
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
        cache = DFlashCache(config=model.config)
        cache.activate_past_recording()
        start = 0
        for end in (21, 22, 27, 40):
            cache.set_previous_accepted_tokens(end - start)
            if start:
                cache.crop(-model.config.block_size)
            piece = inputs["context_hidden_states"][:, start:end]
            found = model(inputs["noise_embeds"], piece, cache=cache).last_hidden_state
            start = end
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_sliding_layer_sees_exactly_the_keys_that_the_geometry_names():
    model = make(num_hidden_layers=1, layer_types=["sliding_attention"], sliding_window=16)
    inputs = inputs_for(model, context=40)
    geometry, anchor = model.config.geometry, 40
    with torch.no_grad():
        before = model(**inputs).last_hidden_state
        for key in (10, 24, 25, 30, 31, 39):
            changed = {**inputs, "context_hidden_states": inputs["context_hidden_states"].clone()}
            changed["context_hidden_states"][:, key] += 1.0
            moved = (model(**changed).last_hidden_state - before).abs().amax(-1)[0] > 1e-7
            expected = [geometry.sees_context(key, anchor, anchor + slot, 16) for slot in range(7)]
            assert moved.tolist() == expected, key


def test_padded_context_changes_nothing():
    model = make(**VARIANTS["sliding"])
    inputs = inputs_for(model, context=20)
    junk = torch.randn(1, 3, 4, 64)
    padded = {**inputs, "context_hidden_states": torch.cat([junk, inputs["context_hidden_states"]], dim=1)}
    mask = torch.tensor([[0] * 3 + [1] * 27])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        alone = model(**inputs).last_hidden_state
        with_padding = model(**padded, attention_mask=mask, position_ids=positions).last_hidden_state
    torch.testing.assert_close(with_padding, alone, atol=1e-5, rtol=1e-5)


def test_gradient_checkpointing_gives_the_same_gradients():
    gradients = []
    for checkpointing in (False, True):
        model = make().train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model(**inputs_for(model)).last_hidden_state.square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    for plain, checkpointed in zip(*gradients):
        torch.testing.assert_close(checkpointed, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", ["gates", "multi_layer_fc"])
def test_round_trip_keeps_weights_dtype_and_float32_gates(tmp_path, dtype, variant):
    first = make(**VARIANTS[variant])
    if variant == "gates":
        randomize_gates(first.reducer)
    first.save_pretrained(tmp_path / "float32")
    loaded = AutoModel.from_pretrained(tmp_path / "float32", dtype=dtype)
    loaded.save_pretrained(tmp_path / "again")
    again = AutoModel.from_pretrained(tmp_path / "again")
    assert loaded.dtype == again.dtype == dtype
    for (name, a), (_, b), (_, c) in zip(*(m.state_dict().items() for m in (first, loaded, again))):
        expected = torch.float32 if ".hc_" in name else dtype
        assert b.dtype == c.dtype == expected, name
        assert torch.equal(b, a.to(expected)) and torch.equal(b, c), name


def test_generation_settings_travel_with_the_drafter_and_broken_ones_are_an_error(tmp_path):
    model = make()
    model.generation_config.num_assistant_tokens = 3
    model.save_pretrained(tmp_path)
    assert AutoModel.from_pretrained(tmp_path).generation_config.num_assistant_tokens == 3
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(OSError, match="generation_config.json"):
        AutoModel.from_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    assert AutoModel.from_pretrained(tmp_path).generation_config.speculation_type == "dflash"


def test_installed_package_loads_a_folder_without_trusting_remote_code(tmp_path):
    make().save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is HyperDFlashConfig
    assert type(AutoModel.from_pretrained(tmp_path)) is HyperDFlashModel


def test_folder_loads_with_remote_code_where_the_package_cannot_be_imported(tmp_path):
    model = make(**VARIANTS["sliding"])
    model.save_pretrained(tmp_path / "drafter")
    files = {path.name for path in (tmp_path / "drafter").iterdir()}
    code = {f"{kind}_hyperdflash.py" for kind in ("configuration", "modeling", "generation")}
    assert files == code | {"config.json", "generation_config.json", "model.safetensors"}
    inputs = inputs_for(model)
    with torch.no_grad():
        torch.save({**inputs, "expected": model(**inputs).last_hidden_state}, tmp_path / "case.pt")
    script = textwrap.dedent(
        f"""
        import importlib.abc, sys
        class Refuse(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] == "hyperdflash":
                    raise ModuleNotFoundError(name)
        sys.meta_path.insert(0, Refuse())
        import torch
        from transformers import AutoConfig, AutoModel
        folder, case = {str(tmp_path / "drafter")!r}, torch.load({str(tmp_path / "case.pt")!r})
        assert AutoConfig.from_pretrained(folder, trust_remote_code=True).model_type == "hyperdflash"
        drafter = AutoModel.from_pretrained(folder, trust_remote_code=True)
        expected = case.pop("expected")
        with torch.no_grad():
            found = drafter(**case).last_hidden_state
        assert torch.equal(found, expected)
        assert "hyperdflash" not in sys.modules
        drafter.save_pretrained({str(tmp_path / "copy")!r})
        print("loaded as", type(drafter).__module__.split(".")[0])
        """
    )
    environment = {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1", "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "loaded as transformers_modules"
    assert {path.name for path in (tmp_path / "copy").iterdir()} == files


def test_importing_the_package_imports_nothing_heavy():
    script = (
        "import sys, hyperdflash\n"
        "heavy = {'torch', 'transformers', 'trl', 'datasets', 'accelerate', 'peft'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert 'HyperDFlashModel' in dir(hyperdflash)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
