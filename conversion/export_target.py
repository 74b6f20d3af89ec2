"""DeepSeek-V4 targets between transformers' form and DeepSeek's: names of tensors, keys of `config.json`.

vLLM reads the released form only; transformers reads both. `save_pretrained` writes a form between the two: released
names, except for a prefix, the embedding, the `hc_head` and one norm. Values and dtypes are never touched.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, DeepseekV4Config

from .weights import Tensors, copy_weights, stored_shapes

# transformers' module names -> released names, in this order; names that are released already stay as they are
RELEASED_NAMES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^model\.", ""),
        (r"^embed_tokens\.", "embed."),
        (r"^lm_head\.", "head."),
        (r"^hc_head\.hc_", "hc_head_"),
        (r"\.self_attn\.", ".attn."),
        (r"\.mlp\.", ".ffn."),
        (r"\.compressor\.indexer\.scorer\.", ".indexer."),
        (r"\.compressor\.indexer\.q_b_proj\.", ".indexer.wq_b."),
        (r"\.compressor\.indexer\.", ".indexer.compressor."),
        (r"\.input_layernorm\.", ".attn_norm."),
        (r"\.post_attention_layernorm\.", ".ffn_norm."),
        (r"\.attn_hc\.", ".hc_attn_"),
        (r"\.ffn_hc\.", ".hc_ffn_"),
        (r"\.sinks$", ".attn_sink"),
        (r"\.position_bias$", ".ape"),
        (r"\.compressor\.kv_norm\.", ".compressor.norm."),
        (r"\.attn\.norm\.", ".attn.kv_norm."),
        (r"\.q_a_norm\.", ".q_norm."),
        (r"\.shared_experts\.gate_proj\.", ".shared_experts.w1."),
        (r"\.shared_experts\.down_proj\.", ".shared_experts.w2."),
        (r"\.shared_experts\.up_proj\.", ".shared_experts.w3."),
        (r"\.q_a_proj\.", ".wq_a."),
        (r"\.q_b_proj\.", ".wq_b."),
        (r"\.kv_proj\.", ".wkv."),
        (r"\.gate_proj\.", ".wgate."),
        (r"\.o_a_proj\.", ".wo_a."),
        (r"\.o_b_proj\.", ".wo_b."),
        (r"\.e_score_correction_bias$", ".bias"),
    )
]
# released names -> those that transformers' save_pretrained writes
SAVED_NAMES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\.attn\.kv_norm\.", ".attn.norm."),
        (r"^embed\.", "embed_tokens."),
        (r"^hc_head_", "hc_head.hc_"),
        (r"^(?!head\.|mtp\.)", "model."),
    )
]
COMPRESS_RATIOS = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
# What the released keys say in their own way
TRANSFORMERS_KEYS = ("layer_types", "mlp_layer_types", "compress_rates", "rope_parameters", "partial_rotary_factor")
RECORD_KEYS = ("_name_or_path", "architectures", "transformers_version")
COPIED_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)


def released_tensors(name: str, tensor: torch.Tensor) -> Tensors:
    """A tensor under DeepSeek's name. Experts that transformers keeps stacked become one tensor each.

    `gate_up_proj` `[experts, 2 * width, d]` -> `w1`, `w3` `[width, d]`; `down_proj` `[experts, d, width]` -> `w2`.
    """
    for pattern, replacement in RELEASED_NAMES:
        name = pattern.sub(replacement, name)
    stem, _, part = name.rpartition(".")
    if not stem.endswith(".experts") or part not in ("gate_up_proj", "down_proj"):
        yield name, tensor
        return
    for expert, weight in enumerate(tensor):
        pieces = {"w2": weight} if part == "down_proj" else dict(zip(("w1", "w3"), weight.chunk(2)))
        for piece, value in pieces.items():
            yield f"{stem}.{expert}.{piece}.weight", value.clone()


def saved_tensors(name: str, tensor: torch.Tensor) -> Tensors:
    """A tensor of the released form under the name that transformers' `save_pretrained` gives it."""
    for pattern, replacement in SAVED_NAMES:
        name = pattern.sub(replacement, name)
    yield name, tensor


def released_config(config: DeepseekV4Config) -> dict[str, Any]:
    """The `config.json` of `config` in DeepSeek's keys.

    Raises:
        ValueError: a setting that those keys have no form for.
    """
    rates = {"sliding_attention": 0, **config.compress_rates}
    for kind in sorted(set(config.layer_types)):
        if rates[kind] != COMPRESS_RATIOS[kind]:
            raise ValueError(
                f"compress_rates: found {rates[kind]} for {kind}, wanted {COMPRESS_RATIOS[kind]}: in compress_ratios "
                "the number is what tells the kind of a layer"
            )
    hashed = config.mlp_layer_types.count("hash_moe")
    if config.mlp_layer_types != ["hash_moe"] * hashed + ["moe"] * (config.num_hidden_layers - hashed):
        raise ValueError(
            f"mlp_layer_types: found {config.mlp_layer_types}, wanted all hash_moe layers first: num_hash_layers "
            "counts them"
        )
    keys = {name: value for name, value in config.to_diff_dict().items() if name not in TRANSFORMERS_KEYS}
    main, compress = config.rope_parameters["main"], config.rope_parameters["compress"]
    if compress["rope_type"] == "default":
        keys["rope_parameters"] = {"rope_type": "default", "rope_theta": main["rope_theta"]}
    else:
        own = ("rope_theta", "partial_rotary_factor", "attention_factor")
        keys["rope_scaling"] = {name: value for name, value in compress.items() if name not in own}
    keys |= {
        "architectures": ["DeepseekV4ForCausalLM"],
        "compress_ratios": [rates[kind] for kind in config.layer_types] + [0] * config.num_nextn_predict_layers,
        "compress_rope_theta": compress["rope_theta"],
        "num_hash_layers": hashed,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "rope_theta": main["rope_theta"],
        "topk_method": "noaux_tc",
    }
    again = DeepseekV4Config.from_dict(deepcopy(keys)).to_dict()
    for name, value in config.to_dict().items():
        if name not in RECORD_KEYS and again.get(name) != value:
            raise ValueError(f"{name}: found {value!r}, wanted {again.get(name)!r}, all that DeepSeek's keys can say")
    return keys


def export_target(source: Path, output: Path, released: bool) -> dict[str, Any]:
    """Writes the DeepSeek-V4 target in `source` to the folder `output`, in DeepSeek's form or in transformers'.

    Args:
        released: DeepSeek's form (`True`) or transformers'.

    Returns:
        `tensors`, how many were written, and `copied`, the names of tokenizer and generation files.

    Raises:
        ValueError, OSError: a target of another kind, a setting without a form, files that cannot be read.
    """
    config = AutoConfig.from_pretrained(source, trust_remote_code=False, local_files_only=True)
    if getattr(config, "quantization_config", None):
        raise ValueError("quantization_config: found one, wanted a target in 16 or 32 bits")
    stored = stored_shapes(source)
    for layer in range(config.num_hidden_layers):
        if not any(f"layers.{layer}." in name for name in stored):
            raise ValueError(f"{source}: tensor 'layers.{layer}.*': found none, wanted a whole target")
    if released:
        keys = released_config(config)
        (output / "config.json").write_text(json.dumps(keys, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    else:
        config.architectures = ["DeepseekV4ForCausalLM"]
        for key in ("topk_method", "num_hash_layers", "compress_ratios", "rope_scaling"):
            config.__dict__.pop(key, None)
        config.save_pretrained(output)
    tensors = copy_weights(source, output, released_tensors if released else saved_tensors)
    return {"tensors": tensors, "copied": copy_side_files(source, output)}


def copy_side_files(source: str | os.PathLike, output: str | os.PathLike) -> list[str]:
    """Copies tokenizer, chat template and generation settings, as they are. Returns the names of the files."""
    copied = [name for name in COPIED_FILES if (Path(source) / name).is_file()]
    for name in copied:
        shutil.copyfile(Path(source) / name, Path(output) / name)
    if (Path(source) / "chat_templates").is_dir():
        shutil.copytree(Path(source) / "chat_templates", Path(output) / "chat_templates")
        copied.append("chat_templates")
    return copied


__all__ = ["export_target", "released_config", "released_tensors", "saved_tensors"]
