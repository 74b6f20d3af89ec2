"""`init`: a drafter that starts from its target's own gates, read without the rest of the target."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, HfArgumentParser

from hyperdflash.configuration_hyperdflash import HyperDFlashConfig
from hyperdflash.conversion import InitArguments, init_drafter, read_gates, run_init
from hyperdflash.modeling_hyperdflash import HyperDFlashModel

TRANSFORMERS = "model.hc_head.hc_{}"
RELEASED = "hc_head_{}"
WITHOUT_LM_HEAD = "hc_head.hc_{}"
STREAMS, WIDTH = 4, 32
SMALL = {"mask_token_id": 63, "num_hidden_layers": 1, "intermediate_size": 16}


def target_config(**overrides) -> dict:
    """A small target's `config.json`, in the keys of DeepSeek's released one."""
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "vocab_size": 64,
        "hidden_size": WIDTH,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "head_dim": 16,
        "qk_rope_head_dim": 8,
        "compress_ratios": [0, 4, 128, 0],
        "num_hash_layers": 1,
        "hc_mult": STREAMS,
        "hc_eps": 1e-5,
        "rms_norm_eps": 1e-6,
        "rope_theta": 20000.0,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
    } | overrides


def random_gates(naming: str, streams: int = STREAMS, width: int = WIDTH, dtype=torch.float32) -> dict:
    generator = torch.Generator().manual_seed(1)
    shapes = {"fn": (streams, streams * width), "base": (streams,), "scale": (1,)}
    return {naming.format(name): torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def write_checkpoint(folder: Path, tensors: dict, layout: str = "single", config: dict | None = None) -> Path:
    """A target's folder: `single` file, `sharded` with an index, or shards with `no_index`; gates in two shards."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or target_config()))
    others = {"layers.0.attn.wq_a.weight": torch.zeros(16, WIDTH), "mtp.0.hc_head_fn": torch.ones(STREAMS, 8)}
    if layout == "single":
        save_file(others | tensors, folder / "model.safetensors")
        return folder
    first, *rest = tensors
    shards = {
        "model-00001-of-00003.safetensors": others,
        "model-00002-of-00003.safetensors": {name: tensors[name] for name in rest},
        "model-00003-of-00003.safetensors": {first: tensors[first]},
    }
    for name, shard in shards.items():
        save_file(shard, folder / name)
    if layout == "sharded":
        weight_map = {tensor: name for name, shard in shards.items() for tensor in shard}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def assert_same_bits(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.dtype == torch.float32 and torch.equal(found.view(torch.int32), wanted.view(torch.int32))


# What is inherited


@pytest.mark.parametrize("layout", ["single", "sharded", "no_index"])
@pytest.mark.parametrize("naming", [TRANSFORMERS, RELEASED, WITHOUT_LM_HEAD])
def test_gates_are_inherited_bit_for_bit(tmp_path, naming, layout):
    gates = random_gates(naming)
    target = write_checkpoint(tmp_path / "target", gates, layout)
    drafter = init_drafter(target, tmp_path / "drafter", **SMALL)
    saved = load_file(tmp_path / "drafter" / "model.safetensors")
    loaded = AutoModel.from_pretrained(tmp_path / "drafter", dtype=torch.float16)
    for name in ("fn", "base", "scale"):
        wanted = gates[naming.format(name)]
        assert_same_bits(getattr(drafter.reducer, f"hc_{name}").detach(), wanted)
        assert_same_bits(saved[f"reducer.hc_{name}"], wanted)
        assert_same_bits(getattr(loaded.reducer, f"hc_{name}").detach(), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gates_stored_in_16_bits_are_widened_as_transformers_does(tmp_path, dtype):
    gates = random_gates(RELEASED, dtype=dtype)
    found = read_gates(write_checkpoint(tmp_path / "target", gates), STREAMS, WIDTH)
    assert_same_bits(found.hc_fn, gates["hc_head_fn"].float())


@pytest.mark.parametrize("original_format", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reducer_without_path_norm_is_the_targets_hc_head_to_the_bit(tmp_path, make_target, original_format, dtype):
    target = make_target()
    target.save_pretrained(tmp_path / "target", save_original_format=original_format)
    drafter = init_drafter(tmp_path / "target", tmp_path / "drafter", path_norm="none", dtype="float32", **SMALL)
    streams = (torch.randn(2, 9, STREAMS, WIDTH) * 3).to(dtype)  # [batch, context, m, d]
    with torch.no_grad():
        assert torch.equal(drafter.reducer(streams), target.model.hc_head(streams))


# What comes out


def test_drafter_folder_is_complete_and_generates_what_the_target_does(tmp_path, make_target):
    target = make_target()
    target.save_pretrained(tmp_path / "target")
    init_drafter(tmp_path / "target", tmp_path / "drafter", dtype="float32", **SMALL)
    assert {path.name for path in (tmp_path / "drafter").iterdir()} == {
        "config.json",
        "configuration_hyperdflash.py",
        "generation_config.json",
        "generation_hyperdflash.py",
        "model.safetensors",
        "modeling_hyperdflash.py",
        "provenance.json",
    }
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert config["auto_map"]["AutoModel"] == "modeling_hyperdflash.HyperDFlashModel"
    drafter = AutoModel.from_pretrained(tmp_path / "drafter")
    prompt = torch.tensor([[5, 9, 23, 41, 7]])
    plain = target.generate(prompt, max_new_tokens=12, do_sample=False)
    assert torch.equal(plain, target.generate(prompt, max_new_tokens=12, do_sample=False, assistant_model=drafter))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_body_has_the_dtype_asked_for_and_gates_stay_float32(tmp_path, dtype):
    target = write_checkpoint(tmp_path / "target", random_gates(RELEASED))
    init_drafter(target, tmp_path / "drafter", dtype=dtype, **SMALL)
    for name, tensor in load_file(tmp_path / "drafter" / "model.safetensors").items():
        assert tensor.dtype == (torch.float32 if ".hc_" in name else getattr(torch, dtype)), name
        assert tensor.isfinite().all()
    assert json.loads((tmp_path / "drafter" / "config.json").read_text())["dtype"] == dtype


def test_seed_decides_the_body_and_leaves_the_callers_random_state_alone(tmp_path):
    target = write_checkpoint(tmp_path / "target", random_gates(RELEASED))
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    bodies = [
        init_drafter(target, tmp_path / str(i), seed=seed, **SMALL).layers[0].mlp.up_proj.weight
        for i, seed in enumerate((0, 0, 1))
    ]
    assert torch.equal(torch.rand(3), wanted)
    assert torch.equal(bodies[0], bodies[1]) and not torch.equal(bodies[0], bodies[2])


def test_gates_are_fresh_on_request_and_only_they_differ_from_inherited_ones(tmp_path):
    target = write_checkpoint(tmp_path / "target", random_gates(RELEASED))
    inherited = init_drafter(target, tmp_path / "inherited", seed=1, **SMALL).state_dict()
    fresh = init_drafter(target, tmp_path / "fresh", seed=1, gate_start="fresh", **SMALL).state_dict()
    differ = {name for name in fresh if not torch.equal(fresh[name], inherited[name])}
    assert differ == {"reducer.hc_fn", "reducer.hc_base", "reducer.hc_scale"}
    assert json.loads((tmp_path / "fresh" / "provenance.json").read_text())["gates"] is None


def test_initializer_range_is_the_standard_deviation_of_the_bodys_matrices(tmp_path):
    target = write_checkpoint(tmp_path / "target", random_gates(RELEASED))
    drafter = init_drafter(target, tmp_path / "drafter", initializer_range=0.07, dtype="float32", **SMALL)
    matrices = [weight.flatten() for weight in drafter.layers.parameters() if weight.dim() == 2]
    assert torch.cat(matrices).std().item() == pytest.approx(0.07, rel=0.05)


def test_sequential_head_begins_as_if_there_were_none(tmp_path):
    target = write_checkpoint(tmp_path / "target", random_gates(RELEASED))
    drafter = init_drafter(target, tmp_path / "drafter", sequential_head_size=12, **SMALL)
    assert drafter.sequential_head.up_proj.weight.abs().min() > 0
    assert (drafter.sequential_head.down_proj.weight == 0).all()


def test_config_is_the_targets_where_they_share_something(tmp_path):
    target = write_checkpoint(tmp_path / "target", random_gates(RELEASED))
    config = init_drafter(target, tmp_path / "drafter", target_revision="abc", mask_token_id=63).config
    wanted = {
        "hidden_size": WIDTH,
        "target_hidden_size": WIDTH,
        "target_num_hidden_layers": 3,
        "target_layer_ids": [2],
        "target_model_type": "deepseek_v4",
        "target_rms_norm_eps": 1e-6,
        "target_name_or_path": "target",
        "target_revision": "abc",
        "vocab_size": 64,
        "hc_mult": STREAMS,
        "hc_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
        "max_position_embeddings": 4096,
        "reducer": "hc_gate",
        "path_norm": "value",
        "num_hidden_layers": 1,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    assert {name: getattr(config, name) for name in wanted} == wanted


def test_options_reach_the_config(tmp_path):
    target = write_checkpoint(tmp_path / "target", random_gates(RELEASED))
    options = {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 16,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 4,
        "intermediate_size": 20,
        "block_size": 5,
        "sample_from_anchor": True,
        "path_norm": "pre_gate",
        "sequential_head_size": 12,
        "initializer_range": 0.05,
        "mask_token_id": 3,
        "target_name_or_path": "somebody/target",
    }
    config = init_drafter(target, tmp_path / "drafter", **options).config
    assert {name: getattr(config, name) for name in options} == options
    assert config.num_hidden_layers == 2


@pytest.mark.parametrize(
    ("width", "layers", "body"),
    [
        (4096, 43, (5, 12288, 32, 8, 128)),  # DeepSeek-V4-Flash: the defaults of HyperDFlashConfig
        (7168, 61, (5, 21504, 56, 14, 128)),
        (192, 4, (1, 576, 6, 1, 32)),
    ],
)
def test_body_follows_the_targets_width_and_depth(width, layers, body):
    from transformers import DeepseekV4Config

    from hyperdflash.conversion.target import body_shape

    shape = body_shape(InitArguments("t", "o"), DeepseekV4Config(hidden_size=width, num_hidden_layers=layers))
    names = ("num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    assert tuple(shape[name] for name in names) == body
    if width == 4096:
        assert body == tuple(getattr(HyperDFlashConfig(), name) for name in names)


def test_reducer_of_v4_flash_has_65541_parameters_and_fc_67108864():
    with torch.device("meta"):
        counts = {
            reducer: sum(p.numel() for p in HyperDFlashModel(HyperDFlashConfig(**fields)).reducer.parameters())
            for reducer, fields in {"hc_gate": {"path_norm": "none"}, "fc": {"reducer": "fc"}}.items()
        }
    assert counts == {"hc_gate": 65_541, "fc": 67_108_864}


# The mask token


def write_tokenizer(folder: Path, mask_token: str | None) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "<mask>": 42}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, mask_token=mask_token).save_pretrained(folder)


def test_mask_token_comes_from_the_option_then_the_vocabulary_then_the_tokenizer(tmp_path):
    from transformers import DeepseekV4Config

    from hyperdflash.conversion.target import find_mask_token_id

    small, flash = DeepseekV4Config(vocab_size=64), DeepseekV4Config()
    args = InitArguments(str(tmp_path), "o")
    assert find_mask_token_id(args, flash) == 128799
    with pytest.raises(ValueError, match="mask_token_id: found no tokenizer"):
        find_mask_token_id(args, small)
    write_tokenizer(tmp_path, None)
    with pytest.raises(ValueError, match="mask_token_id: found a tokenizer without a mask token"):
        find_mask_token_id(args, small)
    write_tokenizer(tmp_path, "<mask>")
    assert find_mask_token_id(args, small) == 42
    assert find_mask_token_id(InitArguments(str(tmp_path), "o", mask_token_id=7), small) == 7


# fc: where the paper says so, and aloud


def test_target_without_gates_gets_fc_said_once(tmp_path):
    config = {"model_type": "glm5_next_text", "hidden_size": WIDTH, "num_hidden_layers": 3, "vocab_size": 64}
    target = write_checkpoint(tmp_path / "target", {"lm_head.weight": torch.zeros(64, WIDTH)}, config=config)
    with pytest.warns(UserWarning, match="fresh fc.*glm5_next_text has no parameters") as caught:
        drafter = init_drafter(target, tmp_path / "drafter", **SMALL)
    assert len(caught) == 1
    assert (drafter.config.reducer, drafter.config.path_norm) == ("fc", "none")
    assert drafter.reducer.fc.weight.shape == (WIDTH, STREAMS * WIDTH)
    with pytest.raises(ValueError, match="reducer: found 'hc_gate', wanted 'fc'"):
        init_drafter(target, tmp_path / "other", reducer="hc_gate", **SMALL)


def test_multi_layer_context_gets_fc_said_once_and_fc_asked_for_is_not_announced(tmp_path):
    target = write_checkpoint(tmp_path / "target", random_gates(RELEASED))
    options = SMALL | {"context_source": "multi_layer", "target_layer_ids": [0, 2]}
    with pytest.warns(UserWarning, match="fresh fc.*context_source is 'multi_layer'") as caught:
        drafter = init_drafter(target, tmp_path / "drafter", **options)
    assert len(caught) == 1 and drafter.reducer.fc.weight.shape == (WIDTH, 2 * STREAMS * WIDTH)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        init_drafter(target, tmp_path / "asked", reducer="fc", **SMALL)


def test_broken_gates_are_an_error_and_never_fc(tmp_path):
    target = write_checkpoint(tmp_path / "target", {"lm_head.weight": torch.zeros(64, WIDTH)})
    with pytest.raises(
        ValueError, match="tensor 'model.hc_head.hc_fn' or 'hc_head_fn'.*found none in model.safetenso"
    ):
        init_drafter(target, tmp_path / "drafter", **SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


# The command line


def test_arguments_parse_from_flags_and_from_a_recipe(tmp_path):
    from trl import TrlParser

    flags = ["--target", "t", "--output", "o", "--layer_types", "sliding_attention", "full_attention"]
    flags += ["--sliding_window", "64", "--path_norm", "none", "--overwrite"]
    (args,) = HfArgumentParser(InitArguments).parse_args_into_dataclasses(flags)
    assert args == InitArguments(
        "t",
        "o",
        overwrite=True,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=64,
        path_norm="none",
    )
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("target: t\nblock_size: 5\n")
    (args,) = TrlParser(InitArguments).parse_args_and_config(["--config", str(recipe), "--output", "o"])
    assert args == InitArguments("t", "o", block_size=5)


def test_report_and_provenance_say_where_the_drafter_comes_from(tmp_path, monkeypatch):
    write_checkpoint(tmp_path / "target", random_gates(RELEASED), "sharded")
    monkeypatch.chdir(tmp_path)
    command = ["/somewhere/bin/hyperdflash", "init", "--target", "target", "--output", "drafter"]
    report = run_init(InitArguments("target", "drafter", seed=3, **SMALL), command)
    assert json.loads(json.dumps(report)) == report
    assert report["gates"]["hc_fn"]["tensor"] == "hc_head_fn"
    assert report["gates"]["hc_fn"]["file"] == "model-00003-of-00003.safetensors"
    text = (tmp_path / "drafter" / "provenance.json").read_text()
    record = json.loads(text)
    assert record["command"] == ["hyperdflash", *command[1:]]
    assert (record["target"], record["seed"], record["gates"]) == ("target", 3, report["gates"])
    assert str(tmp_path) not in text + (tmp_path / "drafter" / "config.json").read_text()


# The output folder


def test_interrupted_write_leaves_nothing_and_spares_what_was_there(tmp_path, monkeypatch):
    target = write_checkpoint(tmp_path / "target", random_gates(RELEASED))
    init_drafter(target, tmp_path / "old", **SMALL)
    before = {path.name: path.read_bytes() for path in (tmp_path / "old").iterdir()}

    def interrupted(folder, record):
        assert (Path(folder) / "model.safetensors").is_file()
        raise KeyboardInterrupt

    monkeypatch.setattr("hyperdflash.conversion.init.write_provenance", interrupted)
    with pytest.raises(KeyboardInterrupt):
        init_drafter(target, tmp_path / "new", **SMALL)
    with pytest.raises(KeyboardInterrupt):
        init_drafter(target, tmp_path / "old", overwrite=True, seed=1, **SMALL)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old", "target"]
    assert {path.name: path.read_bytes() for path in (tmp_path / "old").iterdir()} == before


def test_output_is_replaced_only_when_told_and_only_if_it_is_a_drafter(tmp_path):
    target = write_checkpoint(tmp_path / "target", random_gates(RELEASED))
    (tmp_path / "drafter").mkdir()  # an empty folder may be written
    first = init_drafter(target, tmp_path / "drafter", **SMALL)
    with pytest.raises(FileExistsError, match="output: found the folder .*drafter"):
        init_drafter(target, tmp_path / "drafter", seed=1, **SMALL)
    (tmp_path / "drafter" / "left_over").write_text("")
    second = init_drafter(target, tmp_path / "drafter", overwrite=True, seed=1, **SMALL)
    assert not (tmp_path / "drafter" / "left_over").exists()
    assert not torch.equal(first.layers[0].mlp.up_proj.weight, second.layers[0].mlp.up_proj.weight)

    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a").write_text("dear")
    with pytest.raises(FileExistsError, match="holds no drafter"):
        init_drafter(target, tmp_path / "notes", overwrite=True, **SMALL)
    for output in (target, tmp_path, target / "drafter"):
        with pytest.raises((ValueError, FileExistsError)):
            init_drafter(target, output, overwrite=True, **SMALL)
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError, match="found the file"):
        init_drafter(target, tmp_path / "file", overwrite=True, **SMALL)
    assert (tmp_path / "notes" / "a").read_text() == "dear" and (target / "config.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drafter", "file", "notes", "target"]


# Targets and options that are refused


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({"model_type": "llama"}, {}, "model_type: found 'llama', wanted one of deepseek_v4"),
        ({"model_type": ["deepseek_v4"]}, {}, "model_type: found"),
        ({"model_type": "hyperdflash"}, {}, "model_type: found 'hyperdflash'"),
        ({}, {"sliding_window": 16}, "sliding_window: found 16"),
        ({}, {"layer_types": ["sliding_attention"]}, "sliding_window: found None"),
        ({}, {"mask_token_id": 64}, "mask_token_id: found 64"),
        ({}, {"reducer": "hc_gate", "context_source": "multi_layer"}, "context_source: found 'multi_layer'"),
        ({}, {"reducer": "fc", "path_norm": "value"}, "path_norm: found 'value'"),
        ({}, {"stream_pooling": "mean"}, "stream_pooling: found 'mean'"),
        ({}, {"dtype": "float8"}, "dtype: found 'float8'"),
        ({}, {"initializer_range": 0.0}, "initializer_range: found 0.0"),
        ({}, {"reducer": "fc", "gate_start": "fresh"}, "gate_start: found 'fresh'"),
        ({"hidden_size": 64}, {}, r"shape: found \[4, 128\], wanted \[4, 256\] for 4 streams of width 64"),
        ({"hc_mult": 2}, {}, r"shape: found \[4, 128\], wanted \[2, 64\] for 2 streams"),
    ],
)
def test_target_or_option_that_makes_no_drafter_is_refused(tmp_path, config, options, message):
    target = write_checkpoint(tmp_path / "target", random_gates(RELEASED), config=target_config(**config))
    with pytest.raises(ValueError, match=message):
        init_drafter(target, tmp_path / "drafter", **SMALL | options)
    assert not (tmp_path / "drafter").exists()


def test_target_that_is_no_folder_or_has_no_config_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="target: found no folder './absent', wanted one, or a Hub id"):
        init_drafter("./absent", tmp_path / "drafter")
    target = write_checkpoint(tmp_path / "target", random_gates(RELEASED))
    (target / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="wanted a JSON object"):
        init_drafter(target, tmp_path / "drafter")
    (target / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="config.json: found no such file"):
        init_drafter(target, tmp_path / "drafter")


# The size of the thing


def v4_flash_names() -> list[str]:
    """69,187 tensor names as in DeepSeek-V4-Flash: the released ones of the experts, made-up ones for the rest."""
    experts = [
        f"{block}.ffn.experts.{expert}.w{matrix}.{part}"
        for block in [*(f"layers.{i}" for i in range(43)), "mtp.0"]
        for expert in range(256)
        for matrix in (1, 2, 3)
        for part in ("weight", "scale")
    ]
    others = ["embed.weight", "head.weight", "norm.weight", "hc_head_fn", "hc_head_base", "hc_head_scale"]
    rest = 69_187 - len(experts) - len(others)
    return [*experts, *others, *(f"layers.{i % 43}.attn.tensor_{i:04}.weight" for i in range(rest))]


def write_v4_flash(folder: Path, sort_index: bool) -> dict:
    """The folder of V4-Flash with one shard of its 46: the gates' own, 3.5 GB of which all but the gates is a hole."""
    folder.mkdir()
    config = target_config(
        vocab_size=129280,
        hidden_size=4096,
        num_hidden_layers=43,
        num_attention_heads=64,
        head_dim=512,
        qk_rope_head_dim=64,
        compress_ratios=[0, 0] + [4, 128] * 20 + [4, 0],
        num_hash_layers=3,
        quantization_config={"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
        rope_scaling={"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32},
        max_position_embeddings=1048576,
    )
    (folder / "config.json").write_text(json.dumps(config))
    names = v4_flash_names()
    shard_of = {name: f"model-{i * 46 // len(names) + 1:05}-of-00046.safetensors" for i, name in enumerate(names)}
    shard = shard_of["hc_head_fn"]
    gates = random_gates(RELEASED, 4, 4096)
    shard_of |= dict.fromkeys(gates, shard)
    index = {"metadata": {"total_size": 159_600_000_000}, "weight_map": shard_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=sort_index))

    header, end = {}, 0
    for name in (name for name, file in shard_of.items() if file == shard and name not in gates):
        header[name] = {"dtype": "I8", "shape": [2048, 1024], "data_offsets": [end, end + (1 << 21)]}
        end += 1 << 21
    start = end
    for name, tensor in gates.items():
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    with (folder / shard).open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.seek(start, os.SEEK_CUR)
        file.write(b"".join(tensor.numpy().tobytes() for tensor in gates.values()))
    return gates


MEASURE = """
import json, sys
from hyperdflash.conversion import InitArguments, read_gates

def rchar():
    return int(open("/proc/self/io").readline().split()[1])

def peak():
    # Not ru_maxrss: a child process starts with its parent's
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

before, peak_before = rchar(), peak()
gates = read_gates(sys.argv[1], 4, 4096)
read, peak_read = rchar() - before, peak()
assert "transformers" not in sys.modules
from hyperdflash.conversion import run_init
peak_import = peak()
body = dict(num_hidden_layers=1, intermediate_size=64, num_attention_heads=1, num_key_value_heads=1, head_dim=128)
report = run_init(InitArguments(sys.argv[1], sys.argv[2], **body))
print(json.dumps({
    "read": read, "bytes_read": gates.bytes_read, "report": report,
    "peak_read": peak_read, "growth_read": peak_read - peak_before,
    "peak_init": peak(), "growth_init": peak() - peak_import,
}))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="counts bytes read in /proc")
def test_gates_of_v4_flash_cost_under_2_megabytes_read_and_little_memory(tmp_path):
    """Files are read with `read`, never mapped, so the kernel's count of bytes read by the process is all there is."""
    gates = write_v4_flash(tmp_path / "target", sort_index=True)
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "target"), str(tmp_path / "drafter")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    print({name: value for name, value in found.items() if name != "report"})
    assert found["read"] < 2_000_000
    assert 0 <= found["read"] - found["bytes_read"] < 20_000  # what is reported is what the kernel counted
    assert 0 < found["report"]["target_bytes_read"] - found["bytes_read"] < 5_000  # config.json
    assert found["growth_read"] < 50_000_000 and found["growth_init"] < 300_000_000  # over the imports
    assert found["report"]["mask_token_id"] == 128799
    assert_same_bits(load_file(tmp_path / "drafter" / "model.safetensors")["reducer.hc_fn"], gates["hc_head_fn"])


def test_gates_of_v4_flash_cost_no_more_than_the_index_besides_if_that_is_unsorted(tmp_path):
    write_v4_flash(tmp_path / "target", sort_index=False)
    index_bytes = (tmp_path / "target" / "model.safetensors.index.json").stat().st_size
    assert read_gates(tmp_path / "target", 4, 4096).bytes_read < 2_000_000 + index_bytes
