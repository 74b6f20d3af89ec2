"""The modules that training borrows from the target, and how to have them without the target."""

from __future__ import annotations

import copy
import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate.utils import align_module_device
from huggingface_hub import snapshot_download
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ..conversion.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint
from ..conversion.extract import RELEASED_NAMES

TEACHER_POOLINGS = ("mean", "hc_head")


def stored_names(name: str) -> list[str]:
    """The names under which a checkpoint may hold what transformers calls `name`."""
    return [name, *RELEASED_NAMES.get(name, ())]


@dataclass
class TargetModules:
    """The frozen modules of the target that training runs: embedding, `hc_head`, final norm and LM head."""

    embedding: nn.Module
    hc_head: nn.Module
    norm: nn.Module
    lm_head: nn.Module

    @classmethod
    def of(cls, target: PreTrainedModel, device: torch.device | None = None) -> TargetModules:
        """Those of a loaded target; copies on `device` if they lie elsewhere, as in a target spread over devices.

        Raises:
            ValueError: the target has no `hc_head`.
        """
        decoder = target.get_decoder()
        if not hasattr(decoder, "hc_head"):
            raise ValueError(
                f"target: found {type(target).__name__} without an `hc_head`, wanted a DeepSeek-V4-class target"
            )
        own = cls(target.get_input_embeddings(), decoder.hc_head, decoder.norm, target.get_output_embeddings())
        if device is None:
            return own
        device = torch.empty(0, device=device).device  # with its index
        if all(value.device == device for module in vars(own).values() for value in module.parameters()):
            return own
        copies = cls.of(_without_layers(target.config))
        for name, module in vars(own).items():
            with align_module_device(module):  # fetches what accelerate keeps on another device or on the disk
                state = {key: value.to(device, copy=True) for key, value in module.state_dict().items()}
            getattr(copies, name).load_state_dict(state, assign=True)
            getattr(copies, name).requires_grad_(False)
        return copies

    def tensors(self) -> dict[str, torch.Tensor]:
        """Their parameters, under transformers' names."""
        places = {
            "model.embed_tokens": self.embedding,
            "model.hc_head": self.hc_head,
            "model.norm": self.norm,
            "lm_head": self.lm_head,
        }
        return {
            f"{place}.{name}": value for place, module in places.items() for name, value in module.named_parameters()
        }

    def embed_blocks(self, anchor_tokens: torch.LongTensor, mask_token_id: int, block_size: int) -> torch.Tensor:
        """Token ids of the anchors `[b, A]` -> embeddings of `[anchor, mask, ..., mask]` blocks, `[b, A * B, d]`."""
        anchors = self.embedding(anchor_tokens)  # [b, A, d]
        mask = self.embedding(anchor_tokens.new_tensor([mask_token_id]))  # [1, d]
        blocks = mask.repeat(*anchor_tokens.shape, block_size, 1)  # [b, A, B, d]
        blocks[:, :, 0] = anchors
        return blocks.flatten(1, 2)

    @torch.no_grad()
    def teacher_states(self, residual: torch.Tensor, pooling: str) -> torch.Tensor:
        """Streams `[b, s, m, d]` -> `[b, s, d]`, pooled and through the final norm: what the LM head takes.

        Args:
            pooling: `"mean"` over the streams, as the paper ran, or the target's own `"hc_head"`, which gives the
                target's true distribution.
        """
        pooled = residual.mean(dim=2) if pooling == "mean" else self.hc_head(residual)
        return self.norm(pooled)

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`[..., d]` -> `[..., vocab]`, in the LM head's dtype (or autocast's)."""
        return self.lm_head(hidden_states.to(self.lm_head.weight.dtype))


def load_without_layers(
    target: str | os.PathLike, revision: str | None = None, dtype: str | torch.dtype = "auto"
) -> PreTrainedModel:
    """A target without its layers: embedding, `hc_head`, final norm and LM head, as a full load would give them.

    Only safetensors headers and the bytes of these tensors are read: shards that hold none of them may be missing, and
    from the Hub they are not fetched.

    Args:
        target: folder or Hub id. revision: on the Hub.
        dtype: of the weights, as in `from_pretrained`; what the target keeps in float32 stays so.

    Returns:
        A frozen model of the target's class and with its config, to take [`TargetModules`] of; it cannot run text.

    Raises:
        FileNotFoundError: no safetensors file, or a missing shard with one of these tensors.
        ValueError: a missing or malformed tensor, or one stored in other than 16 or 32 bits.
    """
    config = AutoConfig.from_pretrained(target, revision=revision)
    empty = _without_layers(config)
    names = {name: stored_names(name) for name in empty.state_dict()}
    checkpoint = Checkpoint(_fetch(target, revision, set().union(*names.values())), set().union(*names.values()))
    stored, entries = checkpoint.stored(), []
    for name, alternatives in names.items():
        if name not in empty.all_tied_weights_keys or stored.intersection(alternatives):
            entries += checkpoint.find([[alternative] for alternative in alternatives])
    model = type(empty).from_pretrained(
        None,
        config=empty.config,
        state_dict={entry.name: checkpoint.read(entry) for entry in entries},
        dtype=dtype,
    )
    model.config = config
    return model.requires_grad_(False).eval()


def _without_layers(config: PreTrainedConfig) -> PreTrainedModel:
    """The target's class with no layers, its parameters on the meta device."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = 0
    for name in list(vars(config)):
        if name.endswith("layer_types"):
            setattr(config, name, [])
    vars(config).pop("quantization_config", None)  # quantised targets leave these modules as they are
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _fetch(target: str | os.PathLike, revision: str | None, names: set[str]) -> Path:
    """The checkpoint's folder; of a checkpoint on the Hub only the files with tensors among `names` are fetched."""
    if Path(target).is_dir():
        return Path(target)
    files = [SINGLE_FILE]
    index = Path(snapshot_download(target, revision=revision, allow_patterns=[INDEX_FILE])) / INDEX_FILE
    if index.is_file():
        weight_map = json.loads(index.read_bytes())["weight_map"]
        files = [INDEX_FILE, *{weight_map[name] for name in names & weight_map.keys()}]
    return Path(snapshot_download(target, revision=revision, allow_patterns=files))
