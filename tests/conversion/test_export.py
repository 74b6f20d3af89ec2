"""`export`: to what engines read and back, without the loss of a bit, and no without what a layout cannot carry."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForCausalLM, DeepseekV4Config, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from hyperdflash.cli import main
from hyperdflash.configuration_hyperdflash import HyperDFlashConfig
from hyperdflash.conversion import ExportArguments, run_export
from hyperdflash.conversion.export_drafter import serving_config
from hyperdflash.conversion.export_target import released_config

RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
LAYER_STATES = {
    "context_source": "multi_layer",
    "target_layer_ids": [0, 2],
    "reducer": "fc",
    "stream_pooling": "mean",
    "layer_types": ["full_attention", "full_attention"],
    "sliding_window": None,
}
YARN = {"rope_type": "yarn", "factor": 32, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 64}


def export(model, to, output, **options):
    return run_export(
        ExportArguments(model=str(model), to=to, output=str(output), **options), ["hyperdflash", "export"]
    )


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def write_config(folder, change):
    keys = config_of(folder)
    change(keys)
    (folder / "config.json").write_text(json.dumps(keys))


@pytest.fixture(scope="module")
def v4(make_target):
    return make_target(compress_rates=RATES)


@pytest.fixture(scope="module")
def target_folder(v4, tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    v4.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text("{{ bos_token }}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_text("no pickle is taken along")
    return folder


@pytest.fixture(scope="module")
def gate_folder(v4, make_drafter, tmp_path_factory):
    fields = {"path_norm": "value", "sequential_head_size": 24, "eos_token_id": [1, 3]}
    drafter = make_drafter(v4, target_name_or_path="somebody/target", **fields)
    drafter.to(torch.bfloat16)
    for name in ("hc_fn", "hc_base", "hc_scale"):
        parameter = getattr(drafter.reducer, name)
        parameter.data = torch.randn(parameter.shape)  # float32, as training leaves them
    drafter.generation_config.num_assistant_tokens = 3
    folder = tmp_path_factory.mktemp("gates")
    drafter.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def layers_folder(v4, make_drafter, tmp_path_factory):
    folder = tmp_path_factory.mktemp("layers")
    make_drafter(v4, seed=3, **LAYER_STATES).save_pretrained(folder)
    return folder


def files_of(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "provenance.json"}


@pytest.mark.parametrize("layout", ["vllm", "dflash"])
def test_a_drafter_comes_back_from_a_layout_to_the_bit(layout, gate_folder, layers_folder, tmp_path):
    source = gate_folder if layout == "vllm" else layers_folder
    export(source, layout, tmp_path / "out")
    export(tmp_path / "out", "transformers", tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(source)
    record = json.loads((tmp_path / "back" / "provenance.json").read_text())
    assert record["exported"]["layout"] == "transformers" and record["earlier"][0]["exported"]["layout"] == layout


def test_the_vllm_layout_has_qwen3_fields_above_and_ours_inside(gate_folder, tmp_path):
    export(gate_folder, "vllm", tmp_path / "out")
    keys = config_of(tmp_path / "out")
    assert keys["architectures"] == ["HyperDFlashDraftModel"] and keys["model_type"] == "hyperdflash"
    # vLLM's V2 runner takes a drafter with hc_mult on top for one that widens its own buffers
    assert "hc_mult" not in keys and keys["dflash_config"]["hc_mult"] == 4
    assert keys["dflash_config"]["causal"] is False and keys["dflash_config"]["target_hidden_source"] == "pre_hc_head"
    body = Qwen3Config.from_dict({name: value for name, value in keys.items() if name != "model_type"})
    own = HyperDFlashConfig.from_pretrained(gate_folder)
    for name in ("hidden_size", "head_dim", "num_key_value_heads", "layer_types", "sliding_window", "rope_parameters"):
        assert getattr(body, name) == getattr(own, name)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored["reducer.hc_fn"].dtype == torch.float32 and stored["norm.weight"].dtype == torch.bfloat16
    with pytest.raises(ValueError, match="export for vLLM"):
        AutoModel.from_pretrained(tmp_path / "out")


def reference_dflash(keys, weights, noise, context, positions):
    """DFlash as published, written with Qwen3's own parts: what a reader of the layout makes of its files."""
    config = Qwen3Config.from_dict(keys)
    config._attn_implementation = "eager"

    def load(module, name):
        own = {key: weights[f"{name}.{key}"] for key in module.state_dict()}
        module.load_state_dict(own)
        return module

    def norm(name, size=config.hidden_size):
        return load(Qwen3RMSNorm(size, eps=config.rms_norm_eps), name)

    context = norm("hidden_norm")(F.linear(context, weights["fc.weight"]))
    cos, sin = Qwen3RotaryEmbedding(config)(noise, positions)
    states, block = noise, noise.shape[1]
    for layer in range(config.num_hidden_layers):
        name = f"layers.{layer}"
        inner = norm(f"{name}.input_layernorm")(states)
        whole = torch.cat([context, inner], dim=1)

        def heads(x, projection, name=name):
            return F.linear(x, weights[f"{name}.self_attn.{projection}.weight"]).unflatten(-1, (-1, config.head_dim))

        query = norm(f"{name}.self_attn.q_norm", config.head_dim)(heads(inner, "q_proj")).transpose(1, 2)
        key = norm(f"{name}.self_attn.k_norm", config.head_dim)(heads(whole, "k_proj")).transpose(1, 2)
        value = heads(whole, "v_proj").transpose(1, 2)
        query, _ = apply_rotary_pos_emb(query, query, cos[:, -block:], sin[:, -block:])
        key, _ = apply_rotary_pos_emb(key, key, cos, sin)
        answer = F.scaled_dot_product_attention(query, key, value, enable_gqa=True).transpose(1, 2).flatten(2)
        states = states + F.linear(answer, weights[f"{name}.self_attn.o_proj.weight"])
        states = states + load(Qwen3MLP(config), f"{name}.mlp")(norm(f"{name}.post_attention_layernorm")(states))
    return norm("norm")(states)


@torch.no_grad()
def test_who_reads_the_dflash_layout_as_published_drafts_what_the_drafter_drafts(v4, layers_folder, tmp_path):
    export(layers_folder, "dflash", tmp_path / "out")
    keys, weights = config_of(tmp_path / "out"), load_file(tmp_path / "out" / "model.safetensors")
    drafter = AutoModel.from_pretrained(layers_folder)

    # The published rule: layer i means hidden_states[i + 1]; engines hand out the mean over V4's streams
    ids = torch.randint(0, 64, (1, 20), generator=torch.Generator().manual_seed(0))
    states = v4(ids, output_hidden_states=True, use_cache=False).hidden_states
    captured = {}
    hooks = [
        layer.register_forward_hook(lambda module, args, output, i=i: captured.__setitem__(i, output))
        for i, layer in enumerate(v4.model.layers)
    ]
    v4(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    assert torch.equal(states[1], captured[0])
    published = [captured[i] for i in keys["dflash_config"]["target_layer_ids"]]  # each [1, s, m, d]
    means = torch.cat([state.mean(dim=2) for state in published], dim=-1)
    noise = v4.get_input_embeddings()(torch.tensor([[5] + [keys["dflash_config"]["mask_token_id"]] * 6]))
    positions = torch.arange(27)[None]
    expected = reference_dflash(keys, weights, noise, means, positions)
    context = torch.cat(published, dim=-1)  # [1, s, m, layers * d], as this package captures it
    found = drafter(noise, context, position_ids=positions).last_hidden_state
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_v4s_window_in_vllm_cannot_cut_the_context_of_plain_dflash(layers_folder, tmp_path):
    export(layers_folder, "dflash", tmp_path / "out")
    keys = Qwen3Config.from_dict(config_of(tmp_path / "out"))
    assert set(keys.layer_types) == {"sliding_attention"} and keys.sliding_window == keys.max_position_embeddings
    assert keys.dflash_config["causal"] is False
    other = HyperDFlashConfig.from_pretrained(layers_folder, target_model_type="hy_v4")
    assert set(serving_config(other, "dflash")["layer_types"]) == {"full_attention"}


@pytest.mark.parametrize(
    ("layout", "settings", "message"),
    [
        (
            "dflash",
            {"reducer": "hc_gate"},
            "reducer: found 'hc_gate', wanted 'fc': plain DFlash has no place for gates",
        ),
        ("dflash", {**LAYER_STATES, "stream_pooling": "flatten"}, "stream_pooling: found 'flatten', wanted 'mean'"),
        ("dflash", {**LAYER_STATES, "sample_from_anchor": True}, "sample_from_anchor: found True, wanted False"),
        (
            "dflash",
            {**LAYER_STATES, "layer_types": ["sliding_attention"] * 2, "sliding_window": 9},
            "layer_types: found",
        ),
        ("dflash", {**LAYER_STATES, "target_hidden_size": 64}, "target_hidden_size: found 64"),
        ("vllm", {"sample_from_anchor": True}, "sample_from_anchor: found True, wanted False"),
        ("dflash", {**LAYER_STATES, "sequential_head_size": 8}, "sequential_head_size: found 8, wanted 0"),
        ("vllm", LAYER_STATES, "context_source: found 'multi_layer', wanted 'pre_hc_head'"),
        ("vllm", {"hidden_act": "gelu"}, "hidden_act: found 'gelu'"),
    ],
)
def test_what_a_layout_cannot_carry_is_refused_with_the_reason(layout, settings, message, make_drafter, v4, tmp_path):
    make_drafter(v4, **settings).save_pretrained(tmp_path / "drafter")
    with pytest.raises(ValueError, match=message):
        export(tmp_path / "drafter", layout, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


def test_pooled_streams_before_the_head_are_the_state_of_the_last_layer(v4, make_drafter, tmp_path):
    settings = LAYER_STATES | {"context_source": "pre_hc_head", "target_layer_ids": [2]}
    make_drafter(v4, **settings).save_pretrained(tmp_path / "drafter")
    export(tmp_path / "drafter", "dflash", tmp_path / "out")
    assert config_of(tmp_path / "out")["dflash_config"]["target_layer_ids"] == [2]
    export(tmp_path / "out", "transformers", tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(tmp_path / "drafter")


@pytest.fixture
def published(layers_folder, tmp_path):
    """The folder as z-lab publishes: nothing in it that is ours."""
    folder = tmp_path / "published"
    export(layers_folder, "dflash", folder)

    def change(keys):
        ours = keys["dflash_config"]
        keys["dflash_config"] = {name: ours[name] for name in ("mask_token_id", "target_layer_ids")}
        keys["rope_theta"] = keys.pop("rope_parameters")["rope_theta"]
        keys |= {"layer_types": ["full_attention"] * 2, "sliding_window": None, "use_sliding_window": False}

    write_config(folder, change)
    (folder / "provenance.json").unlink()
    return folder


def test_a_published_dflash_folder_becomes_the_fc_drafter_that_it_is(
    published, layers_folder, target_folder, tmp_path
):
    export(published, "transformers", tmp_path / "back", target=str(target_folder))
    back, wanted = config_of(tmp_path / "back"), config_of(layers_folder)
    assert back == wanted
    stored, original = (load_file(folder / "model.safetensors") for folder in (tmp_path / "back", layers_folder))
    assert stored.keys() == original.keys() and all(torch.equal(stored[name], original[name]) for name in original)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "architectures: found"),
        ({"attention_bias": True}, "attention_bias: found True"),
        ({"is_causal": True}, "is_causal: found True"),
        ({"draft_vocab_size": 32}, "draft_vocab_size: found 32"),
        (
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": 16, "use_sliding_window": True},
            "causal: found none",
        ),
        ({"block_size": None}, "dflash_config.block_size: found none"),
        ({"dflash_config": {"mask_token_id": 63}}, "dflash_config.target_layer_ids: found none"),
        (
            {"dflash_config": {"mask_token_id": 63, "target_layer_ids": [0, 2], "markov_rank": 8}},
            "found 'markov_rank'",
        ),
        ({"dflash_config": {"mask_token_id": 63, "target_layer_ids": [0, 3]}}, "target_layer_ids: found"),
        ({"dflash_config": {"mask_token_id": 63, "target_layer_ids": [0]}}, "'reducer.fc.weight': found shape"),
    ],
)
def test_what_a_published_folder_has_and_this_drafter_has_not_is_refused(
    change, message, published, target_folder, tmp_path
):
    write_config(published, lambda keys: keys.update(change))
    with pytest.raises(ValueError, match=message):
        export(published, "transformers", tmp_path / "back", target=str(target_folder))
    assert not (tmp_path / "back").exists()


def test_facts_of_the_target_are_not_guessed(published, target_folder, tmp_path):
    with pytest.raises(ValueError, match="target: found none, wanted the folder of the drafter's target"):
        export(published, "transformers", tmp_path / "back")
    (published / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(ValueError, match="mask_embedding.pt: found one"):
        export(published, "transformers", tmp_path / "back", target=str(target_folder))


@pytest.mark.parametrize("tensors", ["missing", "another"])
def test_tensors_that_are_not_the_drafters_are_named(tensors, published, target_folder, tmp_path):
    stored = load_file(published / "model.safetensors")
    if tensors == "missing":
        del stored["layers.1.self_attn.q_norm.weight"]
    else:
        stored["lm_head.weight"] = torch.zeros(64, 32)
    save_file(stored, published / "model.safetensors")
    name = "layers.1.self_attn.q_norm.weight" if tensors == "missing" else "lm_head.weight"
    with pytest.raises(ValueError, match=name):
        export(published, "transformers", tmp_path / "back", target=str(target_folder))


@pytest.mark.parametrize("form", ["as saved", "by module", "sharded"])
def test_a_target_in_deepseeks_form_is_the_same_target(form, v4, target_folder, tmp_path):
    source = target_folder
    if form != "as saved":
        source = tmp_path / "source"
        v4.save_pretrained(source, save_original_format=form == "sharded", max_shard_size="40KB")
        assert len(list(source.glob("*.safetensors"))) > 1
    report = export(source, "deepseek", tmp_path / "out")
    names = {name for file in (tmp_path / "out").glob("*.safetensors") for name in load_file(file)}
    assert report["tensors"] == len(names)
    assert {"embed.weight", "head.weight", "norm.weight", "hc_head_fn", "hc_head_base", "hc_head_scale"} <= names
    assert "layers.1.attn.kv_norm.weight" in names and "layers.1.attn.compressor.norm.weight" in names
    assert "layers.2.ffn.experts.3.w2.weight" in names and "layers.1.attn.indexer.weights_proj.weight" in names
    assert {name.split(".")[0] for name in names} == {"embed", "head", "norm", "layers"} | {
        f"hc_head_{part}" for part in ("fn", "base", "scale")
    }
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, tensor in v4.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    ids = torch.arange(40)[None]
    assert torch.equal(loaded(ids).logits, v4(ids).logits)


def test_a_target_comes_back_to_the_bit_with_its_tokenizer(target_folder, tmp_path):
    export(target_folder, "deepseek", tmp_path / "out")
    export(tmp_path / "out", "transformers", tmp_path / "back")
    wanted = {name: data for name, data in files_of(target_folder).items() if name != "pytorch_model.bin"}
    assert files_of(tmp_path / "back") == wanted


def test_the_keys_are_those_that_deepseek_writes(v4):
    keys = released_config(v4.config)
    assert keys["compress_ratios"] == [0, 4, 128, 0]  # the last is the MTP module's
    assert keys["num_hash_layers"] == 1 and keys["topk_method"] == "noaux_tc" and keys["qk_rope_head_dim"] == 8
    assert keys["rope_parameters"]["rope_type"] == "default" and keys["compress_rope_theta"] == 160000.0
    assert not {"layer_types", "mlp_layer_types", "compress_rates"} & keys.keys()
    scaled = DeepseekV4Config(**{**v4.config.to_diff_dict(), "rope_parameters": dict(YARN)})
    keys = released_config(scaled)
    assert keys["rope_scaling"] == YARN
    assert DeepseekV4Config.from_dict(keys).rope_parameters == scaled.rope_parameters


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"compress_rates": {**RATES, "heavily_compressed_attention": 16}}, "compress_rates: found 16"),
        ({"mlp_layer_types": ["moe", "hash_moe", "moe"]}, "mlp_layer_types: found"),
    ],
)
def test_settings_that_deepseeks_keys_cannot_say_are_refused(setting, message, v4):
    with pytest.raises(ValueError, match=message):
        released_config(DeepseekV4Config(**v4.config.to_diff_dict() | setting))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "deepseek"], "to: found 'deepseek', wanted 'vllm' or 'dflash'"),
        (["--to", "vllm", "--target", "x"], "target: found 'x' with --to vllm"),
        (["--to", "vllm", "--revision", "main"], "revision: found 'main' for a local folder"),
    ],
)
def test_the_verb_says_in_one_line_what_is_wrong_and_writes_nothing(arguments, message, gate_folder, tmp_path, capsys):
    output = tmp_path / "out"
    assert main(["export", "--model", str(gate_folder), "--output", str(output), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not output.exists()


def test_a_drafter_on_the_hub_is_exported_as_one_in_a_folder_and_its_commit_recorded(hub, gate_folder, tmp_path):
    commit = hub.add_repository("somebody/drafter", gate_folder)
    export("somebody/drafter", "vllm", tmp_path / "hub-out", revision="main")
    export(gate_folder, "vllm", tmp_path / "out")
    assert files_of(tmp_path / "hub-out") == files_of(tmp_path / "out")
    record = json.loads((tmp_path / "hub-out" / "provenance.json").read_text())["exported"]
    assert record == {"model": "somebody/drafter", "revision": commit, "layout": "vllm"}
    assert not any(request.path.endswith(".py") for request in hub.requests)


def spoil(folder, kind):
    if kind == "adapter":
        (folder / "adapter_config.json").write_text("{}")
    elif kind == "field":
        write_config(folder, lambda keys: keys.update(hidden_size="wide"))
    elif kind == "record":
        (folder / "provenance.json").write_text("[")
    else:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:1000])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("adapter", "found an adapter, wanted a whole model: merge it first"),
        ("field", "config.json: found TypeError: .*, wanted a drafter's fields"),
        ("record", "provenance.json: found something else, wanted a JSON object"),
        ("weights", "model.safetensors: found .*, wanted a whole safetensors file"),
    ],
)
def test_folders_that_are_no_whole_drafter_are_one_line_for_every_verb(kind, message, gate_folder, tmp_path, capsys):
    source = tmp_path / "source"
    shutil.copytree(gate_folder, source)
    spoil(source, kind)
    verbs = [
        ["export", "--model", str(source), "--to", "vllm", "--output", str(tmp_path / "out")],
        ["card", "--drafter", str(source), "--overwrite"],
        ["push", "--drafter", str(source), "--repo_id", "a/b", "--force", "--dry_run"],
    ]
    before = files_of(source)
    for verb in verbs:
        assert main(verb) == 2
        error = capsys.readouterr().err
        assert re.search(message, error) and error.count("\n") == 1, error
    assert files_of(source) == before and [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_target_without_its_layers_is_not_exported(target_folder, tmp_path):
    init = ["--target", str(target_folder), "--output", str(tmp_path / "drafter"), "--with_head"]
    assert main(["init", *init, "--mask_token_id", "63"]) == 0
    with pytest.raises(ValueError, match=r"tensor 'layers.0.\*': found none, wanted a whole target"):
        export(tmp_path / "drafter" / "head", "deepseek", tmp_path / "out")


def test_a_broken_shard_leaves_what_stood_at_the_output(gate_folder, tmp_path):
    export(gate_folder, "vllm", tmp_path / "out")
    before = files_of(tmp_path / "out")
    broken = tmp_path / "broken"
    broken.mkdir()
    for name, data in files_of(gate_folder).items():
        (broken / name).write_bytes(data[:-100] if name.endswith(".safetensors") else data)
    code = main(
        ["export", "--model", str(broken), "--to", "vllm", "--output", str(tmp_path / "out"), "--overwrite", "true"]
    )
    assert code == 2 and files_of(tmp_path / "out") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "out"]
