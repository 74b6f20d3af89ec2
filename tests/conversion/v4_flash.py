"""The repository of DeepSeek-V4-Flash as to names, shapes, dtypes and shards; all but the gates is holes."""

import json
import os
from math import prod
from pathlib import Path

import torch

CONFIG = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 129280,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "num_nextn_predict_layers": 1,
    "num_hash_layers": 3,
    "compress_ratios": [0, 0] + [4, 128] * 20 + [4, 0],
    "sliding_window": 128,
    "hc_mult": 4,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32},
    "max_position_embeddings": 1048576,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}
BYTES = {"F32": 4, "BF16": 2, "I64": 8, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1}


def fp8(name: str, rows: int, columns: int) -> dict:
    scale = [-(-rows // 128), -(-columns // 128)]
    return {f"{name}.weight": ("F8_E4M3", [rows, columns]), f"{name}.scale": ("F8_E8M0", scale)}


def fp4(name: str, rows: int, columns: int) -> dict:
    return {f"{name}.weight": ("I8", [rows, columns // 2]), f"{name}.scale": ("F8_E8M0", [rows, columns // 32])}


def compressor(name: str, rate: int, width: int, coefficient: int) -> dict:
    return {
        f"{name}.ape": ("F32", [rate, coefficient * width]),
        f"{name}.wkv.weight": ("BF16", [coefficient * width, 4096]),
        f"{name}.wgate.weight": ("BF16", [coefficient * width, 4096]),
        f"{name}.norm.weight": ("BF16", [width]),
    }


def block(name: str, ratio: int, hashed: bool) -> dict:
    """One decoder layer in released names: attention by its compression `ratio`, and the experts."""
    tensors = {
        **fp8("attn.wq_a", 1024, 4096),
        "attn.q_norm.weight": ("BF16", [1024]),
        **fp8("attn.wq_b", 32768, 1024),
        **fp8("attn.wkv", 512, 4096),
        "attn.kv_norm.weight": ("BF16", [512]),
        **fp8("attn.wo_a", 8192, 4096),
        **fp8("attn.wo_b", 4096, 8192),
        "attn.attn_sink": ("F32", [64]),
        "attn_norm.weight": ("BF16", [4096]),
        "ffn_norm.weight": ("BF16", [4096]),
        "ffn.gate.weight": ("BF16", [256, 4096]),
    }
    if hashed:
        tensors["ffn.gate.tid2eid"] = ("I64", [129280, 6])
    else:
        tensors["ffn.gate.bias"] = ("F32", [256])
    for part in ("attn", "ffn"):
        tensors |= {f"hc_{part}_fn": ("F32", [24, 16384]), f"hc_{part}_base": ("F32", [24])}
        tensors[f"hc_{part}_scale"] = ("F32", [3])
    if ratio:
        tensors |= compressor("attn.compressor", ratio, 512, 2 if ratio == 4 else 1)
    if ratio == 4:
        tensors |= fp8("attn.indexer.wq_b", 8192, 1024)
        tensors["attn.indexer.weights_proj.weight"] = ("BF16", [64, 4096])
        tensors |= compressor("attn.indexer.compressor", 4, 128, 2)
    for matrix, rows, columns in (("w1", 2048, 4096), ("w2", 4096, 2048), ("w3", 2048, 4096)):
        tensors |= fp8(f"ffn.shared_experts.{matrix}", rows, columns)
        for expert in range(256):
            tensors |= fp4(f"ffn.experts.{expert}.{matrix}", rows, columns)
    return {f"{name}.{tensor}": entry for tensor, entry in tensors.items()}


def gates(prefix: str = "") -> dict:
    shapes = {"fn": [4, 16384], "base": [4], "scale": [1]}
    return {f"{prefix}hc_head_{name}": ("F32", shape) for name, shape in shapes.items()}


def shards() -> list[dict]:
    """The tensors of each of the 46 shards: embedding, a layer each, norm and head and gates, MTP module."""
    ratios = CONFIG["compress_ratios"]
    mtp = block("mtp.0", ratios[43], hashed=False) | fp8("mtp.0.e_proj", 4096, 4096) | fp8("mtp.0.h_proj", 4096, 4096)
    mtp |= {f"mtp.0.{name}.weight": ("BF16", [4096]) for name in ("enorm", "hnorm", "norm")}
    return [
        {"embed.weight": ("BF16", [129280, 4096])},
        *(block(f"layers.{layer}", ratios[layer], layer < CONFIG["num_hash_layers"]) for layer in range(43)),
        {"norm.weight": ("BF16", [4096]), "head.weight": ("BF16", [129280, 4096])} | gates(),
        mtp | gates("mtp.0."),
    ]


def write_v4_flash(folder: Path, sorted_index: bool = False) -> dict[str, torch.Tensor]:
    """Writes the repository and returns its gates, which are random; a few megabytes on the disk."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    generator = torch.Generator().manual_seed(3)
    values = {name: torch.randn(shape, generator=generator) for name, (_, shape) in gates().items()}
    weight_map, total = {}, 0
    for number, tensors in enumerate(shards(), 1):
        file = f"model-{number:05}-of-00046.safetensors"
        header, end = {}, 0
        for name, (dtype, shape) in tensors.items():
            size = prod(shape) * BYTES[dtype]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
            end += size
        weight_map |= dict.fromkeys(tensors, file)
        total += end
        raw = json.dumps(header, separators=(",", ":")).encode()
        with (folder / file).open("wb") as opened:
            opened.write(len(raw).to_bytes(8, "little") + raw)
            start = opened.tell()
            for name in values.keys() & tensors.keys():
                opened.seek(start + header[name]["data_offsets"][0])
                opened.write(values[name].numpy().tobytes())
            os.truncate(opened.fileno(), start + end)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=sorted_index))
    return values
