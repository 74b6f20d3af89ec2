"""The MTP module out of a DeepSeek-V4 checkpoint: its own tensors, `mtp.0.*`, or those of the target's last layer.

Tensors are read one by one. Those in FP8 (128 x 128 blocks) and FP4 (two to a byte, 1 x 32 blocks) are dequantised,
by transformers' own operation, when they are read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from ..conversion.checkpoint import DTYPES, Checkpoint, TensorEntry
from ..conversion.sources import Source
from .configuration_mtp import MtpConfig
from .modeling_mtp import MtpModel

STORED_DTYPES = DTYPES | {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "U8": torch.uint8,
}
RELEASED_PREFIX = "mtp.0."
# Our name -> the released one behind `mtp.0.`: of what only the module has, and of what a target's layer has too
MODULE_TENSORS = {
    "e_proj.weight": "e_proj.weight",
    "h_proj.weight": "h_proj.weight",
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
}
HEAD_TENSORS = {
    "hc_head.hc_fn": "hc_head_fn",
    "hc_head.hc_base": "hc_head_base",
    "hc_head.hc_scale": "hc_head_scale",
    "norm.weight": "norm.weight",
}
LAYER_TENSORS = {
    "layer.input_layernorm.weight": "attn_norm.weight",
    "layer.post_attention_layernorm.weight": "ffn_norm.weight",
    "layer.attn_hc.fn": "hc_attn_fn",
    "layer.attn_hc.base": "hc_attn_base",
    "layer.attn_hc.scale": "hc_attn_scale",
    "layer.ffn_hc.fn": "hc_ffn_fn",
    "layer.ffn_hc.base": "hc_ffn_base",
    "layer.ffn_hc.scale": "hc_ffn_scale",
    "layer.self_attn.q_a_proj.weight": "attn.wq_a.weight",
    "layer.self_attn.q_a_norm.weight": "attn.q_norm.weight",
    "layer.self_attn.q_b_proj.weight": "attn.wq_b.weight",
    "layer.self_attn.kv_proj.weight": "attn.wkv.weight",
    "layer.self_attn.kv_norm.weight": "attn.kv_norm.weight",
    "layer.self_attn.o_a_proj.weight": "attn.wo_a.weight",
    "layer.self_attn.o_b_proj.weight": "attn.wo_b.weight",
    "layer.self_attn.sinks": "attn.attn_sink",
    "layer.mlp.gate.weight": "ffn.gate.weight",
    "layer.mlp.gate.e_score_correction_bias": "ffn.gate.bias",
    "layer.mlp.shared_experts.gate_proj.weight": "ffn.shared_experts.w1.weight",
    "layer.mlp.shared_experts.down_proj.weight": "ffn.shared_experts.w2.weight",
    "layer.mlp.shared_experts.up_proj.weight": "ffn.shared_experts.w3.weight",
}
SAVED_NAMES = {"attn.kv_norm.weight": "attn.norm.weight"}  # what `save_pretrained` of a target calls otherwise
# The released tensors that lie one below the other in one of ours, for each expert
EXPERT_TENSORS = {
    "layer.mlp.experts.gate_up_proj": ("ffn.experts.{}.w1.weight", "ffn.experts.{}.w3.weight"),
    "layer.mlp.experts.down_proj": ("ffn.experts.{}.w2.weight",),
}


def load_released_mtp(
    folder: str | os.PathLike | Source, config: MtpConfig, dtype: torch.dtype = torch.bfloat16
) -> MtpModel:
    """The module that a checkpoint folder holds as `mtp.0.*`, dequantised to `dtype`.

    Args:
        folder: the target's folder, as DeepSeek released it, or the folder `mtp` that `init --with_mtp` writes.
        config: [`MtpConfig.of_target`] of its configuration.

    Raises:
        FileNotFoundError: no safetensors file, or a missing shard.
        ValueError: a missing tensor, or one of another shape or type; the message names it.
    """
    model = empty_mtp(config, dtype)
    read_tensors(model, folder, [RELEASED_PREFIX], MODULE_TENSORS | HEAD_TENSORS | LAYER_TENSORS)
    return model


def has_released_mtp(folder: str | os.PathLike | Source) -> bool:
    """Whether the checkpoint holds an MTP module of its own."""
    name = RELEASED_PREFIX + "e_proj.weight"
    return name in Checkpoint(folder, [name]).stored()


def empty_mtp(config: MtpConfig, dtype: torch.dtype, seed: int = 0) -> MtpModel:
    """A freshly initialised module in `dtype`. The caller's random state is kept."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MtpModel._from_config(config, dtype=dtype)


@torch.no_grad()
def read_tensors(
    model: MtpModel, folder: str | os.PathLike | Source, prefixes: Sequence[str], names: dict[str, str]
) -> dict[str, TensorEntry]:
    """Copies tensors of a checkpoint into `model`: those of `names`, our name -> the one behind a prefix.

    The experts come along with the layer's tensors.

    Args:
        prefixes: alternatives; all tensors stand behind the same one.

    Returns:
        Where each of our tensors came from; of the experts the first one's.
    """
    wanted = list(_stored_names(model, names))
    released = [place[-1] for place in wanted]
    saved = [SAVED_NAMES.get(name, name) for name in released]
    namings = [[prefix + name for name in naming] for prefix in prefixes for naming in (released, saved)]
    stems = {name.removesuffix(".weight") for naming in namings for name in naming if name.endswith(".weight")}
    checkpoint = Checkpoint(folder, {*chain(*namings), *(f"{stem}.scale" for stem in stems)})
    stored = checkpoint.stored()
    entries = checkpoint.find(namings)
    operation, state, sources = Fp8Dequantize(None), model.state_dict(), {}
    for (name, expert, rows, _), entry in zip(wanted, entries):
        tensors = {"weight": checkpoint.read(entry, STORED_DTYPES)}
        scale = entry.name.removesuffix(".weight") + ".scale"
        if scale in stored:
            tensors["weight_scale_inv"] = checkpoint.read(checkpoint.find([[scale]])[0], STORED_DTYPES)
        elif not tensors["weight"].is_floating_point() or tensors["weight"].element_size() == 1:
            raise ValueError(f"{entry.file}: tensor {scale!r}: found none, wanted it beside {entry.name!r}")
        value = operation.convert(tensors, full_layer_name=name, model=model)[name]
        place = state[name] if expert is None else state[name][expert][rows]
        if value.shape != place.shape:
            raise ValueError(
                f"{entry.file}: tensor {entry.name!r}: shape: found {list(value.shape)}, wanted {list(place.shape)}"
            )
        place.copy_(value)
        sources.setdefault(name, entry)
    return sources


def _stored_names(model: MtpModel, names: dict[str, str]) -> Iterator[tuple[str, int | None, slice, str]]:
    """(our name, expert, rows of the expert's matrix, the released name), tensor by tensor."""
    for name, released in names.items():
        yield name, None, slice(None), released
    if not any(name in LAYER_TENSORS for name in names):
        return
    for name, parts in EXPERT_TENSORS.items():
        experts, height, _ = model.get_parameter(name).shape
        for expert in range(experts):
            for part, released in enumerate(parts):
                rows = slice(part * height // len(parts), (part + 1) * height // len(parts))
                yield name, expert, rows, released.format(expert)


def tensor_report(sources: dict[str, TensorEntry]) -> dict[str, dict[str, str]]:
    """For the record: each of our tensors with the name, file and dtype that it was read from."""
    return {
        name: {"tensor": entry.name, "file": entry.file.name, "dtype": entry.dtype} for name, entry in sources.items()
    }


__all__ = ["has_released_mtp", "load_released_mtp"]
