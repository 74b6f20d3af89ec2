"""Drafters in the layouts that engines read: vLLM with the plugin of this package, and plain DFlash as z-lab has it.

Both describe the body by Qwen3's fields and the rest in `dflash_config`, and name tensors as the drafter does, but for
DFlash's `fc`. Every field of [`HyperDFlashConfig`] that Qwen3 has no place for stands in `dflash_config`, where
engines pass over what they do not know: the way back loses nothing.

`target_layer_ids` mean the same here and there: layer `i`, from 0, stands for its output, `hidden_states[i + 1]` of
transformers. vLLM adds the one itself for its `aux_hidden_state_layers`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config
from transformers.utils import GENERATION_CONFIG_NAME

from ..configuration_hyperdflash import HyperDFlashConfig
from ..modeling_hyperdflash import HyperDFlashModel
from .target import load_target_config
from .weights import Tensors, copy_weights, read_weights, spell_names, stored_shapes

ARCHITECTURES = {"vllm": "HyperDFlashDraftModel", "dflash": "DFlashDraftModel"}
MODEL_TYPES = {"vllm": "hyperdflash", "dflash": "qwen3"}
QWEN3_FIELDS = (
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim hidden_act "
    "rms_norm_eps rope_parameters max_position_embeddings layer_types sliding_window attention_dropout "
    "initializer_range vocab_size tie_word_embeddings pad_token_id bos_token_id eos_token_id dtype"
).split()
DFLASH_FIELDS = (
    "block_size mask_token_id sample_from_anchor context_source target_layer_ids reducer stream_pooling "
    "sequential_head_size hc_mult hc_eps path_norm target_model_type target_hidden_size target_num_hidden_layers "
    "target_rms_norm_eps target_name_or_path target_revision"
).split()
# Settings of published DFlash folders that this drafter has one form of only: name -> the values that mean it
FIXED_SETTINGS = {
    "attention_bias": (False, None),
    "is_neox_style": (True, None),
    "is_causal": (False, None),
    "logit_scale": (1.0, None),
    "causal": (False, None),
    "use_swa": (False, None),
    "attention_sink_bias": (False, None),
    "use_aux_hidden_state": (True, None),
    "input_embedding_scale": (1.0, None),
    "fc_layernorm": (False, None),
}
SOURCE_FIELD = "target_hidden_source"  # what the layouts call `context_source`
READ_SETTINGS = {*DFLASH_FIELDS, SOURCE_FIELD, "num_target_layers", "mask_token"}
FC_OWN, FC_DFLASH = "reducer.fc.weight", "fc.weight"


def dflash_tensors(name: str, tensor: torch.Tensor) -> Tensors:
    """A drafter's tensor under its name in plain DFlash."""
    yield (FC_DFLASH if name == FC_OWN else name), tensor


def serving_config(config: HyperDFlashConfig, layout: str) -> dict[str, Any]:
    """The `config.json` of a drafter in a layout, `"vllm"` or `"dflash"`. Raises as [`check_layout`]."""
    check_layout(config, layout)
    own = config.to_dict()
    body = {name: own.get(name) for name in QWEN3_FIELDS}
    if layout == "dflash" and config.target_model_type == "deepseek_v4":
        # Full layers would inherit the window of 128 that V4 has in vLLM, the one engine that drafts for it by DFlash
        body["layer_types"] = ["sliding_attention"] * config.num_hidden_layers
        body["sliding_window"] = config.max_position_embeddings
    return {
        "architectures": [ARCHITECTURES[layout]],
        "model_type": MODEL_TYPES[layout],
        **body,
        "rope_theta": config.rope_parameters["rope_theta"],
        "attention_bias": False,
        "use_sliding_window": "sliding_attention" in body["layer_types"],  # without it Qwen3 drops the window
        "block_size": config.block_size,
        "num_target_layers": config.target_num_hidden_layers,
        "dflash_config": {
            "causal": False,  # else sliding layers would be causal inside a block
            "num_target_layers": config.target_num_hidden_layers,
            SOURCE_FIELD: config.context_source,
            **{name: own[name] for name in DFLASH_FIELDS if name != "context_source"},
        },
    }


def check_layout(config: HyperDFlashConfig, layout: str) -> None:
    """Whether a layout can carry the drafter.

    Raises:
        ValueError: it cannot; the message names the field, the value, and why.
    """

    def refuse(name: str, wanted: str) -> None:
        raise ValueError(f"{name}: found {getattr(config, name)!r}, wanted {wanted}")

    engine = "vLLM's dflash method" if layout == "vllm" else "DFlash"
    if config.sample_from_anchor:
        refuse("sample_from_anchor", f"False: {engine} drafts from the mask slots only")
    if config.hidden_act != "silu":
        refuse("hidden_act", "'silu', the only one that engines have for this body")
    if layout == "vllm":
        if config.context_source != "pre_hc_head":
            refuse("context_source", "'pre_hc_head' (--to dflash for the states of several layers)")
        return
    if config.sequential_head_size:
        refuse("sequential_head_size", "0: plain DFlash drafts all slots of a block at once (--to vllm has the head)")
    if config.reducer != "fc":
        refuse("reducer", "'fc': plain DFlash has no place for gates (--to vllm has)")
    if config.stream_pooling == "flatten" and config.hc_mult > 1:
        refuse("stream_pooling", "'mean': the states that engines hand to plain DFlash are means over streams")
    if config.target_hidden_size != config.hidden_size:
        refuse("target_hidden_size", f"hidden_size ({config.hidden_size}): plain DFlash reads the width from it")
    if "sliding_attention" in config.layer_types:
        refuse("layer_types", "full_attention only: SGLang makes sliding layers causal inside a block (--to vllm)")


def load_drafter_config(folder: str | os.PathLike) -> HyperDFlashConfig:
    """The configuration of the drafter in `folder`.

    Raises:
        ValueError: its `config.json` makes none.
    """
    try:
        return HyperDFlashConfig.from_pretrained(folder)
    except (TypeError, AttributeError, KeyError) as error:  # values of another type
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{Path(folder) / 'config.json'}: found {reason}, wanted a drafter's fields") from None


def export_drafter(source: Path, output: Path, layout: str) -> dict[str, Any]:
    """Writes the drafter in `source` to the folder `output` in a layout, `"vllm"` or `"dflash"`.

    Returns:
        `tensors`, how many were written.

    Raises:
        ValueError, OSError: see [`check_layout`]; tensors that are no drafter's; files that cannot be read.
    """
    config = load_drafter_config(source)
    keys = serving_config(config, layout)
    check_shapes(source, config, stored_shapes(source))
    (output / "config.json").write_text(json.dumps(keys, indent=2) + "\n", encoding="utf-8")
    tensors = copy_weights(source, output, dflash_tensors if layout == "dflash" else lambda *named: [named])
    copy_generation_config(source, output)
    return {"tensors": tensors}


def import_drafter(source: Path, output: Path, target: str | None) -> dict[str, Any]:
    """Writes the drafter in `source`, in the vLLM or the DFlash layout, to the folder `output` as this package's own.

    Args:
        target: folder of the target that the drafter was made for; what `source` itself does not say is taken from
            its configuration. Not needed for folders that this package wrote.

    Returns:
        `tensors`, how many were written.

    Raises:
        ValueError, OSError: a setting that this drafter has no form for, tensors that are not its own or are missing,
            facts of the target that nobody gives.
    """
    config = drafter_config_of(json.loads((source / "config.json").read_bytes()), target)
    if (source / "mask_embedding.pt").exists():
        raise ValueError("mask_embedding.pt: found one, wanted the target's own embedding of mask_token_id")
    weights = {FC_OWN if name == FC_DFLASH else name: tensor for name, tensor in read_weights(source).items()}
    check_shapes(source, config, {name: tensor.shape for name, tensor in weights.items()})
    with torch.device("meta"):
        drafter = HyperDFlashModel(config)
    drafter.load_state_dict(weights, assign=True)
    drafter.save_pretrained(output)
    copy_generation_config(source, output)
    return {"tensors": len(weights)}


def drafter_config_of(keys: dict[str, Any], target: str | None) -> HyperDFlashConfig:
    """The drafter's configuration out of the `config.json` of a layout, and the target's where that is silent.

    Raises:
        ValueError: see [`import_drafter`].
    """
    dflash = keys.get("dflash_config")
    if not isinstance(dflash, dict):
        raise ValueError(f"dflash_config: found {dflash!r}, wanted the settings of a DFlash drafter")
    architectures = keys.get("architectures")
    if architectures not in ([name] for name in ARCHITECTURES.values()):
        raise ValueError(f"architectures: found {architectures}, wanted one of {', '.join(ARCHITECTURES.values())}")
    for name, allowed in FIXED_SETTINGS.items():
        found = dflash.get(name, keys.get(name))
        if found not in allowed:
            raise ValueError(f"{name}: found {found!r}, wanted {allowed[0]!r}, the only form that this drafter has")
    unknown = [name for name in dflash if name not in READ_SETTINGS and name not in FIXED_SETTINGS]
    if unknown:
        raise ValueError(f"dflash_config: found {spell_names(unknown)}, wanted settings that this drafter has")
    vocabulary = keys.get("vocab_size")
    if (drafted := keys.get("draft_vocab_size")) not in (None, vocabulary):
        raise ValueError(f"draft_vocab_size: found {drafted}, wanted the whole vocabulary, {vocabulary}")

    body = Qwen3Config.from_dict({name: value for name, value in keys.items() if name != "model_type"})
    fields = {name: getattr(body, name, None) for name in QWEN3_FIELDS}
    sliding = "sliding_attention" in (fields["layer_types"] or ())
    if sliding and fields["sliding_window"] >= fields["max_position_embeddings"]:  # see `serving_config`
        fields |= {"layer_types": None, "sliding_window": None}
    if sliding and dflash.get("causal", keys.get("is_causal")) is None:
        raise ValueError("causal: found none, which makes sliding layers causal inside a block, wanted false")
    settings = {name: dflash[name] for name in DFLASH_FIELDS if name in dflash}
    settings["context_source"] = dflash.get(SOURCE_FIELD)
    settings.setdefault("block_size", keys.get("block_size"))
    settings.setdefault("target_num_hidden_layers", dflash.get("num_target_layers", keys.get("num_target_layers")))
    if target is not None:
        settings = settings_of_target(target) | settings
    settings = {name: value for name, value in settings.items() if value is not None or name == "target_revision"}
    settings = {"context_source": "multi_layer", "reducer": "fc", "stream_pooling": "mean"} | settings
    if "hc_mult" not in settings:
        raise ValueError("target: found none, wanted the folder of the drafter's target: its streams are not recorded")
    for name in ("block_size", "mask_token_id", "target_layer_ids"):
        if name not in settings:
            raise ValueError(f"dflash_config.{name}: found none, wanted it: a default might be wrong")
    config = HyperDFlashConfig(**fields, **settings)
    config.architectures = [HyperDFlashModel.__name__]
    return config


def settings_of_target(folder: str) -> dict[str, Any]:
    """What a drafter's configuration records of the target in `folder`."""
    target = load_target_config(folder)
    return {
        "hc_mult": target.hc_mult,
        "hc_eps": target.hc_eps,
        "target_model_type": target.model_type,
        "target_hidden_size": target.hidden_size,
        "target_num_hidden_layers": target.num_hidden_layers,
        "target_rms_norm_eps": target.rms_norm_eps,
    }


def check_shapes(source: Path, config: HyperDFlashConfig, found: dict[str, Sequence[int]]) -> None:
    """Whether the tensors in `source` are those of a drafter of this configuration, by name and shape.

    Raises:
        ValueError: one is missing, of another shape, or none of the drafter's.
    """
    with torch.device("meta"):
        wanted = {name: tensor.shape for name, tensor in HyperDFlashModel(config).state_dict().items()}
    if missing := wanted.keys() - found.keys():
        raise ValueError(f"{source}: tensors: found no {spell_names(missing)}, wanted all of the drafter's")
    if others := found.keys() - wanted.keys():
        raise ValueError(f"{source}: tensors: found {spell_names(others)}, wanted none that this drafter has not")
    for name, shape in wanted.items():
        if tuple(found[name]) != tuple(shape):
            raise ValueError(f"{source}: tensor {name!r}: found shape {list(found[name])}, wanted {list(shape)}")


def copy_generation_config(source: Path, output: Path) -> None:
    """Takes along how the drafter drafts in transformers (`num_assistant_tokens`)."""
    if (source / GENERATION_CONFIG_NAME).is_file():
        shutil.copyfile(source / GENERATION_CONFIG_NAME, output / GENERATION_CONFIG_NAME)


__all__ = ["check_layout", "drafter_config_of", "export_drafter", "import_drafter", "serving_config"]
