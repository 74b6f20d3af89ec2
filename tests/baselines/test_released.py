"""The MTP module out of a checkpoint as DeepSeek releases it: FP8 with block scales, experts in FP4."""

import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, DeepseekV4Config

from hyperdflash.baselines import MtpConfig, MtpModel, init_mtp, load_released_mtp
from hyperdflash.baselines.released import HEAD_TENSORS, LAYER_TENSORS, MODULE_TENSORS, _stored_names
from hyperdflash.cli import main
from hyperdflash.conversion import InitArguments

_spec = importlib.util.spec_from_file_location("v4_flash", Path(__file__).parents[1] / "conversion" / "v4_flash.py")
v4_flash = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(v4_flash)

FIELDS = {
    "vocab_size": 64,
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 128,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 128,
    "o_groups": 2,
    "o_lora_rank": 128,
    "index_n_heads": 2,
    "index_head_dim": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "hc_mult": 4,
}
KEPT = ("enorm", "hnorm", "norm", "hc_", "attn_sink", "gate.")  # 16 or 32 bits in the released checkpoint


def e4m3(byte):
    """Sign, 4 bits of exponent (bias 7), 3 of mantissa."""
    sign, exponent, mantissa = -1.0 if byte & 128 else 1.0, byte >> 3 & 15, byte & 7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def e2m1(nibble):
    """Sign, 2 bits of exponent (bias 1), 1 of mantissa."""
    sign, exponent, mantissa = -1.0 if nibble & 8 else 1.0, nibble >> 1 & 3, nibble & 1
    return sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


E4M3 = np.array([e4m3(byte) for byte in range(256)])
E2M1 = np.array([e2m1(nibble) for nibble in range(16)])


class Released:
    """A folder with `mtp.0.*` of random bytes, and what they stand for: bit by bit, without torch or transformers."""

    def __init__(self, folder, seed=0):
        self.folder, self.random = folder, np.random.default_rng(seed)
        self.tensors, self.values = {}, {}
        config = {"model_type": "deepseek_v4", "compress_ratios": [0, 4], "num_hash_layers": 1, **FIELDS}
        config |= {
            "quantization_config": {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
        }
        (folder / "config.json").write_text(json.dumps(config | {"expert_dtype": "fp4"}))
        self.config = MtpConfig.of_target(AutoConfig.from_pretrained(folder))
        shapes = {name: tuple(value.shape) for name, value in MtpModel(self.config).state_dict().items()}
        for name, released in (MODULE_TENSORS | HEAD_TENSORS | LAYER_TENSORS).items():
            if any(part in released for part in KEPT):
                self.keep(released, shapes[name])
            else:
                self.fp8(released, *shapes[name])
        width, inner = FIELDS["hidden_size"], FIELDS["moe_intermediate_size"]
        for expert in range(FIELDS["n_routed_experts"]):
            for part, shape in (("w1", (inner, width)), ("w3", (inner, width)), ("w2", (width, inner))):
                self.fp4(f"ffn.experts.{expert}.{part}.weight", *shape)
        shards = [{}, {}]
        for index, (name, value) in enumerate(self.tensors.items()):
            shards[index % 2][name] = value
        weight_map = {}
        for index, shard in enumerate(shards):
            save_file(shard, folder / f"model-{index}.safetensors")
            weight_map |= dict.fromkeys(shard, f"model-{index}.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    def with_gates(self, folder):
        """The same in `folder`, with gates of the target, which a drafter starts from."""
        shutil.copytree(self.folder, folder)
        width, streams = FIELDS["hidden_size"], FIELDS["hc_mult"]
        shapes = {"hc_head_fn": (streams, streams * width), "hc_head_base": (streams,), "hc_head_scale": (1,)}
        gates = {name: torch.from_numpy(self.random.normal(size=shape)).float() for name, shape in shapes.items()}
        save_file(gates, folder / "model-2.safetensors")
        index = folder / "model.safetensors.index.json"
        weight_map = json.loads(index.read_text())["weight_map"] | dict.fromkeys(gates, "model-2.safetensors")
        index.write_text(json.dumps({"weight_map": weight_map}))

    def keep(self, name, shape):
        value = self.random.normal(size=shape).astype(np.float32)
        self.tensors["mtp.0." + name] = torch.from_numpy(value)
        self.values[name] = value

    def scales(self, name, *grid):
        exponents = self.random.integers(118, 124, size=grid).astype(np.uint8)
        scale = name.removesuffix(".weight") + ".scale"
        self.tensors["mtp.0." + scale] = torch.from_numpy(exponents).view(torch.float8_e8m0fnu)
        return 2.0 ** (exponents.astype(np.float64) - 127)

    def fp8(self, name, rows, columns):
        codes = self.random.integers(0, 256, size=(rows, columns)).astype(np.uint8)
        codes[(codes & 127) == 127] = 0  # not a number
        self.tensors["mtp.0." + name] = torch.from_numpy(codes).view(torch.float8_e4m3fn)
        scales = self.scales(name, rows // 128, columns // 128)
        self.values[name] = E4M3[codes] * np.kron(scales, np.ones((128, 128)))

    def fp4(self, name, rows, columns):
        codes = self.random.integers(0, 16, size=(rows, columns)).astype(np.uint8)
        packed = codes[:, 0::2] | codes[:, 1::2] << 4
        self.tensors["mtp.0." + name] = torch.from_numpy(packed).view(torch.int8)
        self.values[name] = E2M1[codes] * np.kron(self.scales(name, rows, columns // 32), np.ones((1, 32)))


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    return Released(tmp_path_factory.mktemp("released"))


def assert_is_released(state, values):
    for name, stored in (MODULE_TENSORS | HEAD_TENSORS | LAYER_TENSORS).items():
        assert np.array_equal(state[name].double().numpy(), values[stored].astype(np.float64)), name
    for expert in range(FIELDS["n_routed_experts"]):
        gate, up, down = (values[f"ffn.experts.{expert}.{part}.weight"] for part in ("w1", "w3", "w2"))
        found = state["layer.mlp.experts.gate_up_proj"][expert].double().numpy()
        assert np.array_equal(found, np.concatenate([gate, up]))
        assert np.array_equal(state["layer.mlp.experts.down_proj"][expert].double().numpy(), down)


def test_every_tensor_is_what_its_bits_stand_for(released):
    model = load_released_mtp(released.folder, released.config, torch.float32)
    assert_is_released(model.state_dict(), released.values)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_in_bfloat16_the_values_are_exact_too(released):
    """An FP8 or FP4 number times a power of two has at most 4 significant bits."""
    model = load_released_mtp(released.folder, released.config)
    quantised = model.e_proj.weight
    assert quantised.dtype == torch.bfloat16 and model.hc_head.hc_fn.dtype == torch.float32
    assert np.array_equal(quantised.double().detach().numpy(), released.values["e_proj.weight"])


def test_init_takes_the_targets_own_module_and_writes_a_folder_that_loads(released, tmp_path):
    init_mtp(released.folder, tmp_path / "mtp", dtype="float32")
    loaded = MtpModel.from_pretrained(tmp_path / "mtp", dtype=torch.float32)
    assert_is_released(loaded.state_dict(), released.values)
    record = json.loads((tmp_path / "mtp" / "provenance.json").read_text())
    assert record["start"] == "released" and record["tensors"]["e_proj.weight"]["dtype"] == "F8_E4M3"
    assert record["tensors"]["layer.mlp.experts.down_proj"]["dtype"] == "I8"


def test_names_and_shapes_are_those_of_v4_flash(tmp_path):
    """All tensors of its MTP module but the scales."""
    stored = {name: shape for name, (_, shape) in v4_flash.shards()[-1].items()}
    (tmp_path / "config.json").write_text(json.dumps(v4_flash.CONFIG))
    with torch.device("meta"):
        model = MtpModel(MtpConfig.of_target(AutoConfig.from_pretrained(tmp_path)))
    state, found = model.state_dict(), {}
    for name, expert, rows, released in _stored_names(model, MODULE_TENSORS | HEAD_TENSORS | LAYER_TENSORS):
        place = state[name] if expert is None else state[name][expert][rows]
        found["mtp.0." + released] = [*place.shape[:-1], place.shape[-1] // (1 if expert is None else 2)]  # FP4
    assert found == {name: shape for name, shape in stored.items() if not name.endswith(".scale")}


@pytest.mark.parametrize("where", ["folder", "hub"])
def test_the_folder_that_with_mtp_writes_gives_the_same_module_to_the_bit(released, hub, tmp_path, where, capsys):
    """Dequantised from the copy, from the target itself, and by `init --method mtp` from either."""
    released.with_gates(tmp_path / "somebody" / "target")
    target, name = str(tmp_path / "somebody" / "target"), "target"
    commit = hub.add_repository("somebody/target", target)
    if where == "hub":
        target = name = "somebody/target"
    drafter = tmp_path / "drafter"
    small = ["--num_hidden_layers", "1", "--intermediate_size", "64", "--mask_token_id", "63"]
    assert main(["init", "--target", target, "--output", str(drafter), "--with_mtp", *small]) == 0
    copied, wanted = (load_released_mtp(folder, released.config) for folder in (drafter / "mtp", released.folder))
    outputs = [tmp_path / "of-copy", tmp_path / "of-target"]
    for source, output in zip((str(drafter / "mtp"), target), outputs):
        assert main(["init", "--method", "mtp", "--target", source, "--output", str(output)]) == 0
    written = [MtpModel.from_pretrained(output) for output in outputs]
    for model in (copied, *written):
        found = model.state_dict()
        assert found.keys() == wanted.state_dict().keys()
        for key, value in wanted.state_dict().items():
            assert found[key].dtype == value.dtype and torch.equal(found[key], value), key
    for model in written:
        assert model.config.target_name_or_path == name
        assert model.config.target_revision == (commit if where == "hub" else None)
    assert '"start": "released"' in capsys.readouterr().out


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.pop("mtp.0.attn.wq_a.scale"), "'mtp.0.attn.wq_a.scale': found none, wanted it beside"),
        (lambda t: t.pop("mtp.0.ffn.experts.3.w2.weight"), "'mtp.0.ffn.experts.3.w2.weight': found none"),
        (lambda t: t.update({"mtp.0.hnorm.weight": torch.ones(3)}), r"'mtp.0.hnorm.weight': shape: found \[3\]"),
        (lambda t: t.update({"mtp.0.hnorm.weight": torch.ones(256).long()}), "dtype: found I64, wanted one of"),
    ],
)
def test_a_tensor_that_is_not_as_released_is_named(released, tmp_path, change, message):
    tensors = dict(released.tensors)
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load_released_mtp(tmp_path, released.config)


def test_without_a_module_of_its_own_the_targets_last_layer_is_the_start(make_target, tmp_path):
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    target = make_target(layer_types=["sliding_attention"] * 3, compress_rates=rates)
    target.save_pretrained(tmp_path / "target")
    mtp = init_mtp(tmp_path / "target", tmp_path / "mtp", dtype="float32", mtp_depths=3)
    assert mtp.config.mtp_depths == 3 and mtp.generation_config.speculation_type == "dflash"
    last, state = target.model.layers[-1].state_dict(), mtp.state_dict()
    for name, value in last.items():
        assert torch.equal(state[f"layer.{name}"], value), name
    assert torch.equal(mtp.hc_head.hc_fn, target.model.hc_head.hc_fn)
    assert torch.equal(mtp.norm.weight, target.model.norm.weight)
    assert torch.equal(mtp.h_proj.weight, torch.eye(32))
    saved = load_file(tmp_path / "mtp" / "model.safetensors")
    assert torch.equal(saved["h_proj.weight"], torch.eye(32))
    folders = ["--model", str(tmp_path / "target"), "--output", str(tmp_path / "released")]
    assert main(["export", "--to", "deepseek", *folders]) == 0
    other = init_mtp(tmp_path / "released", tmp_path / "other", dtype="float32").state_dict()
    assert all(torch.equal(other[name], value) for name, value in state.items())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"mtp_start": "released"}, "'mtp.0.e_proj.weight': found none"),
        ({"num_hidden_layers": 2}, "num_hidden_layers: found 2, wanted none, as method is 'mtp'"),
        ({"with_mtp": True}, "with_mtp: found True, wanted none, as method is 'mtp'"),
        ({"mtp_depths": 0}, "MtpConfig.mtp_depths: found 0"),
        ({"mtp_start": "elsewhere"}, "mtp_start: found 'elsewhere', wanted one of auto, released, target, fresh"),
    ],
)
def test_options_that_make_no_module_are_refused(make_target, tmp_path, options, message):
    make_target().save_pretrained(tmp_path / "target")
    with pytest.raises(ValueError, match=message):
        init_mtp(tmp_path / "target", tmp_path / "mtp", **options)
    assert not (tmp_path / "mtp").exists()


def test_the_configuration_follows_the_target():
    target = DeepseekV4Config(num_hidden_layers=4, hidden_size=192, num_attention_heads=2, sliding_window=64)
    config = MtpConfig.of_target(target)
    assert config.num_hidden_layers == 1 and config.target_num_hidden_layers == 4
    assert (config.layer_types, config.mlp_layer_types) == (["sliding_attention"], ["moe"])
    assert config.sliding_window == 64 and config.rope_parameters["main"] == target.rope_parameters["main"]
    assert InitArguments.__dataclass_fields__["mtp_depths"].default == config.mtp_depths == 6
