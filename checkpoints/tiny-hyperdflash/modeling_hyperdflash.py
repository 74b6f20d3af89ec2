"""The HyperDFlash drafter: a reducer of the target's residual streams, and a body that drafts a block in one pass.

The body's layers are the DFlash layers that transformers ships (`muse_glimmer_assistant`): Qwen3-style attention with
q/k norms and rotary, SwiGLU; queries from the block, keys and values from `[context ; block]`.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import AutoConfig, AutoModel, GenerationConfig
from transformers import initialization as init
from transformers.cache_utils import DFlashCache
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant import (
    MuseGlimmerAssistantAttention,
    MuseGlimmerAssistantDecoderLayer,
    MuseGlimmerAssistantRMSNorm,
    MuseGlimmerAssistantRotaryEmbedding,
)
from transformers.utils import GENERATION_CONFIG_NAME, cached_file

from .configuration_hyperdflash import HyperDFlashConfig
from .generation_hyperdflash import install_hooks


def rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS normalisation without a weight over the last dimension, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


class HcGateReducer(nn.Module):
    """Collapses the target's streams with the gates of its own `hc_head` (paper, section 2.2, equation 1).

        x = rms(vec(H));  alpha = sigmoid(scale * W x + base) + eps;  y = sum_j alpha_j norm(H)_j

    One scalar sigmoid gate per path, no softmax. The gates are float32, whatever the dtype of the model. The per-path
    RMSNorm `norm` acts where `config.path_norm` says; with `"none"` this is the target's `hc_head` to the bit.
    """

    def __init__(self, config: HyperDFlashConfig):
        super().__init__()
        paths, width = config.hc_mult, config.hidden_size
        self.input_eps = config.target_rms_norm_eps
        self.gate_eps = config.hc_eps
        self.norm_eps = config.rms_norm_eps
        self.path_norm = config.path_norm
        self.hc_fn = nn.Parameter(torch.empty(paths, paths * width, dtype=torch.float32))
        self.hc_base = nn.Parameter(torch.empty(paths, dtype=torch.float32))
        self.hc_scale = nn.Parameter(torch.empty(1, dtype=torch.float32))
        self.path_norm_weight = None if self.path_norm == "none" else nn.Parameter(torch.ones(paths, width))

    def gates(self, streams: torch.Tensor) -> torch.Tensor:
        """`streams` `[batch, context, m, d]` -> gates `[batch, context, m]`, float32."""
        with torch.autocast(device_type=streams.device.type, enabled=False):
            mixes = F.linear(rms(streams.flatten(2), self.input_eps), self.hc_fn.float())
            return torch.sigmoid(mixes * self.hc_scale.float() + self.hc_base.float()) + self.gate_eps

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        """`streams` `[batch, context, m, d]` -> `[batch, context, d]`, in the dtype of `streams`."""
        dtype = streams.dtype
        if self.path_norm == "none":
            return (self.gates(streams).unsqueeze(-1) * streams).sum(dim=2).to(dtype)
        values = rms(streams, self.norm_eps) * self.path_norm_weight.float()  # [batch, context, m, d]
        gates = self.gates(values if self.path_norm == "pre_gate" else streams)
        return (gates.unsqueeze(-1) * values).sum(dim=2).to(dtype)


class FcReducer(nn.Module):
    """The generic DFlash reducer: one dense projection of the flattened, or averaged, streams (paper, section 2.2)."""

    def __init__(self, config: HyperDFlashConfig):
        super().__init__()
        self.mean_over_streams = config.stream_pooling == "mean"
        paths = 1 if self.mean_over_streams else config.hc_mult
        width = paths * len(config.target_layer_ids) * config.target_hidden_size
        self.fc = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        """`streams` `[batch, context, m, layers * d]` -> `[batch, context, hidden_size]`."""
        pooled = streams.mean(dim=2) if self.mean_over_streams else streams.flatten(2)
        return self.fc(pooled.to(self.fc.weight.dtype))


class ZeroLinear(nn.Linear):
    """A projection that begins at zero."""


class SequentialHead(nn.Module):
    """Tells a slot which token was drafted before it. Not in the paper, whose slots are independent of each other.

        h'_k = h_k + down(silu(up([norm(h_k) ; norm(embedding of token k - 1)])))

    It runs behind the body and in front of the target's LM head: the body still drafts the whole block in one pass,
    and only this small step goes from slot to slot. `down` begins at zero, as if there were no head.
    """

    def __init__(self, config: HyperDFlashConfig):
        super().__init__()
        width, size = config.hidden_size, config.sequential_head_size
        self.state_norm = MuseGlimmerAssistantRMSNorm(width, eps=config.rms_norm_eps)
        self.token_norm = MuseGlimmerAssistantRMSNorm(width, eps=config.rms_norm_eps)
        self.up_proj = nn.Linear(2 * width, size, bias=False)
        self.down_proj = ZeroLinear(size, width, bias=False)

    def forward(self, hidden_states: torch.Tensor, previous_embeds: torch.Tensor) -> torch.Tensor:
        """`[..., d]` of the body, and the target's embeddings of the tokens before -> `[..., d]` for the LM head."""
        inputs = torch.cat([self.state_norm(hidden_states), self.token_norm(previous_embeds)], dim=-1)
        return hidden_states + self.down_proj(F.silu(self.up_proj(inputs)))


REDUCER_CLASSES = {"hc_gate": HcGateReducer, "fc": FcReducer}


class HyperDFlashPreTrainedModel(PreTrainedModel):
    config_class = HyperDFlashConfig
    config: HyperDFlashConfig
    base_model_prefix = "model"
    main_input_name = "noise_embeds"
    supports_gradient_checkpointing = True
    _no_split_modules = ["MuseGlimmerAssistantDecoderLayer"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _keep_in_fp32_modules_strict = ["hc_fn", "hc_base", "hc_scale"]
    _can_record_outputs = {
        "hidden_states": MuseGlimmerAssistantDecoderLayer,
        "attentions": MuseGlimmerAssistantAttention,
    }

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, HcGateReducer):
            init.normal_(module.hc_fn, mean=0.0, std=self.config.initializer_range)
            init.zeros_(module.hc_base)
            init.ones_(module.hc_scale)
            if module.path_norm_weight is not None:
                init.ones_(module.path_norm_weight)
        elif isinstance(module, ZeroLinear):
            init.zeros_(module.weight)


class HyperDFlashModel(HyperDFlashPreTrainedModel):
    """A transformers DFlash assistant for targets with several residual streams.

    It has no embedding and no LM head: it borrows the target's. Loading one makes
    `target.generate(**inputs, assistant_model=drafter)` work (see `generation_hyperdflash.py`).

    Attributes:
        last_generation: statistics of the last `generate` call that it assisted, or `None`.
        generation_config: how it drafts; `num_assistant_tokens` below the block's drafts shortens them.
    """

    def __init__(self, config: HyperDFlashConfig):
        super().__init__(config)
        self.layers = nn.ModuleList(
            MuseGlimmerAssistantDecoderLayer(config, layer_idx) for layer_idx in range(config.num_hidden_layers)
        )
        self.norm = MuseGlimmerAssistantRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = MuseGlimmerAssistantRotaryEmbedding(config)
        # After the body: the dtype of a model is that of its first parameter, and the gates are always float32.
        self.reducer = REDUCER_CLASSES[config.reducer](config)
        self.hidden_norm = MuseGlimmerAssistantRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.sequential_head = SequentialHead(config) if config.sequential_head_size else None
        self.gradient_checkpointing = False
        self.generation_config = GenerationConfig(speculation_type="dflash")
        self.last_generation = None
        self.post_init()
        install_hooks()

    def get_input_embeddings(self) -> None:
        """`None`, as of other models that own no embedding: there is nothing to shard, to hook or to resize."""
        return None

    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | dict[str, Any] | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: DFlashCache | None = None,
        use_cache: bool | None = None,
        previous_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        r"""
        Keys and values are computed from `[context ; block]`, queries from the block: masks and positions span both.

        Args:
            noise_embeds (`[batch, block, d]`): target embeddings of the anchor and the mask tokens. In training,
                the blocks of all anchors, one after the other.
            context_hidden_states (`[batch, context, m, d]`): the target's residual streams at the positions that the
                cache does not hold yet; `[batch, context, m, layers * d]` for `context_source="multi_layer"`.
            attention_mask (`[batch, cached + context + block]`, or a dict from layer type to a mask as the attention
                implementation takes it): 1 for real tokens, 0 for padding. A dict is used as it is.
            position_ids (`[batch, context + block]`): positions of the context and of the block's slots.
            cache: keys and values of the context seen so far. The block's own are appended as well: whoever calls
                again crops them (`cache.crop(-block)`), as the generator of transformers does.
            use_cache: make a cache if none is given.
            previous_embeds (`[batch, block, d]`): for a drafter with a [`SequentialHead`], target embeddings of the
                token before the one that each slot predicts, which are known in training. Without them (in decoding)
                the head is left to the caller, slot by slot.

        Returns:
            `last_hidden_state` `[batch, block, d]`, to be put through the target's LM head, and the cache.
        """
        if use_cache and cache is None:
            cache = DFlashCache(config=self.config)
        context = self.hidden_norm(self.reducer(context_hidden_states))  # [batch, context, d]
        if context.dtype != noise_embeds.dtype:
            context = context.to(noise_embeds.dtype)

        new_tokens = context.shape[1] + noise_embeds.shape[1]
        if position_ids is None:
            seen = cache.get_seq_length() if cache is not None else 0
            position_ids = (torch.arange(new_tokens, device=noise_embeds.device) + seen).unsqueeze(0)
        masks = attention_mask
        if not isinstance(masks, dict):
            masks = {
                layer_type: self._decoding_mask(noise_embeds, new_tokens, attention_mask, cache, layer_type)
                for layer_type in set(self.config.layer_types)
            }

        hidden_states = noise_embeds
        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        for layer, layer_type in zip(self.layers, self.config.layer_types):
            hidden_states = layer(
                hidden_states,
                context_hidden_states=context,
                position_embeddings=position_embeddings,
                attention_mask=masks[layer_type],
                cache=cache,
                **kwargs,
            )
        hidden_states = self.norm(hidden_states)
        if self.sequential_head is not None and previous_embeds is not None:
            hidden_states = self.sequential_head(hidden_states, previous_embeds)
        return BaseModelOutputWithPast(last_hidden_state=hidden_states, cache=cache)

    def _decoding_mask(
        self,
        noise_embeds: torch.Tensor,
        new_tokens: int,
        attention_mask: torch.Tensor | None,
        cache: DFlashCache | None,
        layer_type: str,
    ) -> torch.Tensor | BlockMask | None:
        """The mask `[batch, 1, block, keys]` of one block behind its context, or `None` if it hides nothing.

        Everything in the cache and in the context stands before the anchor, so only padding and a sliding window hide.
        """
        geometry = self.config.geometry
        layer_idx = self.config.layer_types.index(layer_type)
        window = self.config.sliding_window if layer_type == "sliding_attention" else None
        seen = cache.get_seq_length(layer_idx) if cache is not None else 0
        length = seen + new_tokens
        held = seen if window is None else min(seen, window - 1)
        block = noise_embeds.shape[1]
        has_padding = attention_mask is not None and not bool(attention_mask.all())
        if not has_padding and (window is None or held + new_tokens <= window):
            return None

        device = noise_embeds.device
        keys = torch.arange(length - held - new_tokens, length, device=device)  # [keys], as indices into the sequence
        slots = torch.arange(length - block, length, device=device).unsqueeze(-1)  # [block, 1]
        anchor = length - block
        visible = geometry.sees_context(keys, anchor, slots, window) | (keys >= anchor)
        visible = visible.expand(noise_embeds.shape[0], 1, block, len(keys))  # [batch, 1, block, keys]
        if has_padding:
            visible = visible & attention_mask.to(device=device, dtype=torch.bool)[:, None, None, keys]
        if self.config._attn_implementation == "flex_attention":
            return create_block_mask(
                lambda b, h, q, k: visible[b, 0, q, k],
                len(visible),
                None,
                block,
                len(keys),
                device=device,
                _compile=False,
            )
        mask = torch.zeros(visible.shape, dtype=noise_embeds.dtype, device=device)
        return mask.masked_fill_(~visible, torch.finfo(mask.dtype).min)

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """Writes config, weights, the code files, and `generation_config.json`; see [`PreTrainedModel`]."""
        super().save_pretrained(save_directory, **kwargs)
        if kwargs.get("is_main_process", True):
            self.generation_config.save_pretrained(save_directory)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, *args: Any, **kwargs: Any):
        """Loads a drafter and, where there is one, its `generation_config.json`; see [`PreTrainedModel`]."""
        hub_kwargs = {
            name: kwargs[name]
            for name in ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
            if name in kwargs
        }
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        # A folder without one keeps the defaults of `__init__`; one that cannot be read is an error
        file = cached_file(
            pretrained_model_name_or_path,
            GENERATION_CONFIG_NAME,
            _raise_exceptions_for_missing_entries=False,
            **hub_kwargs,
        )
        if file is not None:
            model.generation_config = GenerationConfig.from_pretrained(pretrained_model_name_or_path, **hub_kwargs)
        return loaded


HyperDFlashModel.register_for_auto_class("AutoModel")
if __name__.split(".")[0] == "hyperdflash":  # the installed package; a remote-code copy is found by its auto_map
    AutoConfig.register(HyperDFlashConfig.model_type, HyperDFlashConfig, exist_ok=True)
    AutoModel.register(HyperDFlashConfig, HyperDFlashModel, exist_ok=True)

__all__ = ["FcReducer", "HcGateReducer", "HyperDFlashModel", "HyperDFlashPreTrainedModel", "SequentialHead"]
