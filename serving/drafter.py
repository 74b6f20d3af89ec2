"""The HyperDFlash drafter in vLLM: its DFlash layers, and the reducer in place of the dense `fc`."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_dflash import (
    DFlashQwen3DecoderLayer,
    DFlashQwen3ForCausalLM,
    DFlashQwen3Model,
)

from .layout import check_fit, check_vanilla_fit

LAYER_WEIGHTS = (
    "input_layernorm",
    "post_attention_layernorm",
    "mlp.down_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "self_attn.k_norm",
    "self_attn.k_proj",
    "self_attn.o_proj",
    "self_attn.q_norm",
    "self_attn.q_proj",
    "self_attn.v_proj",
)
HEAD_PREFIX = "sequential_head."


def rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS normalisation without a weight over the last dimension, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


class HcGateReducer(nn.Module):
    """The gates of `hc_head` (paper, section 2.2, equation 1), float32 as in training.

        alpha = sigmoid(scale * W rms(vec(H)) + base) + eps;  y = sum_j alpha_j norm(H)_j

    Tensor parallel: replicated, 65,541 parameters for DeepSeek-V4-Flash; the residual is whole on every rank.
    """

    def __init__(self, fields: dict[str, Any], width: int, norm_eps: float):
        super().__init__()
        self.paths, self.width, self.path_norm = fields["hc_mult"], width, fields["path_norm"]
        self.input_eps, self.gate_eps, self.norm_eps = fields["target_rms_norm_eps"], fields["hc_eps"], norm_eps
        self.hc_fn = _parameter(self.paths, self.paths * width, dtype=torch.float32)
        self.hc_base = _parameter(self.paths, dtype=torch.float32)
        self.hc_scale = _parameter(1, dtype=torch.float32)
        normed = self.path_norm != "none"
        self.path_norm_weight = _parameter(self.paths, width, dtype=torch.float32) if normed else None

    def gates(self, streams: torch.Tensor) -> torch.Tensor:
        """`streams` `[tokens, m, d]` -> gates `[tokens, m]`, float32."""
        mixes = F.linear(rms(streams.flatten(1), self.input_eps), self.hc_fn)
        return torch.sigmoid(mixes * self.hc_scale + self.hc_base) + self.gate_eps

    def forward(self, residual: torch.Tensor) -> torch.Tensor:
        """`residual` `[tokens, m * d]` -> `[tokens, d]`, in its dtype."""
        streams = residual.view(-1, self.paths, self.width)  # [tokens, m, d]
        if self.path_norm == "none":
            values, gates = streams, self.gates(streams)
        else:
            values = rms(streams, self.norm_eps) * self.path_norm_weight
            gates = self.gates(values if self.path_norm == "pre_gate" else streams)
        return (gates.unsqueeze(-1) * values).sum(1).to(residual.dtype)


class FcReducer(nn.Module):
    """One dense projection of the flattened, or averaged, streams; replicated as the gates are."""

    def __init__(self, fields: dict[str, Any], width: int, norm_eps: float):
        super().__init__()
        self.paths, self.mean_over_streams = fields["hc_mult"], fields["stream_pooling"] == "mean"
        paths = 1 if self.mean_over_streams else self.paths
        self.fc = nn.Linear(paths * fields["target_hidden_size"], width, bias=False)
        self.fc.requires_grad_(False)

    def forward(self, residual: torch.Tensor) -> torch.Tensor:
        """`residual` `[tokens, m * d]` -> `[tokens, d]`."""
        if self.mean_over_streams:
            residual = residual.view(len(residual), self.paths, -1).mean(1)
        return self.fc(residual)


REDUCER_CLASSES = {"hc_gate": HcGateReducer, "fc": FcReducer}


class SequentialHead(nn.Module):
    """Tells a slot which token was drafted before it: two small projections, replicated as the reducers are.

    h'_k = h_k + down(silu(up([norm(h_k) ; norm(embedding of token k - 1)])))
    """

    def __init__(self, size: int, width: int, norm_eps: float):
        super().__init__()
        self.norm_eps = norm_eps
        self.state_norm, self.token_norm = _parameter(width), _parameter(width)
        self.up_proj, self.down_proj = _parameter(size, 2 * width), _parameter(width, size)

    def forward(self, hidden_states: torch.Tensor, previous_embeds: torch.Tensor) -> torch.Tensor:
        """Both `[requests, d]` -> `[requests, d]`."""
        parts = ((hidden_states, self.state_norm), (previous_embeds, self.token_norm))
        normed = [weight * rms(part, self.norm_eps).to(part.dtype) for part, weight in parts]
        return hidden_states + F.linear(F.silu(F.linear(torch.cat(normed, dim=-1), self.up_proj)), self.down_proj)


class OwnCacheDecoderLayer(DFlashQwen3DecoderLayer):
    """vLLM's layer with two settings that are the target's and not the drafter's taken back.

    vLLM has one cache configuration for both models. DeepSeek-V4 leaves in it its own 128-token window, which a layer
    without one falls back to, and its packed cache type `fp8_ds_mla`, which an ordinary layer takes for fp8 without
    scales. Neither is warned about, and both cost accepted drafts.
    """

    def __init__(self, vllm_config: VllmConfig, *, cache_config=None, **kwargs: Any):
        if cache_config is not None:
            cache_config = copy.copy(cache_config)
            cache_config.sliding_window = None
            chosen = vllm_config.speculative_config.kv_cache_dtype
            cache_config.cache_dtype = "auto" if chosen is None else chosen
        super().__init__(vllm_config, cache_config=cache_config, **kwargs)


class HyperDFlashModel(DFlashQwen3Model):
    """vLLM's DFlash body behind the reducer."""

    decoder_layer_cls = OwnCacheDecoderLayer

    def __init__(self, *, vllm_config: VllmConfig, start_layer_id: int = 0, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, start_layer_id=start_layer_id, prefix=prefix)
        del self.fc
        fields = self.config.dflash_config
        reducer_class = REDUCER_CLASSES[fields["reducer"]]
        self.reducer = reducer_class(fields, self.config.hidden_size, self.config.rms_norm_eps)
        size = fields["sequential_head_size"]
        self.sequential_head = (
            SequentialHead(size, self.config.hidden_size, self.config.rms_norm_eps) if size else None
        )


class HyperDFlashForCausalLM(DFlashQwen3ForCausalLM):
    """A HyperDFlash drafter. Embedding and LM head are the target's.

    Pipeline parallel: vLLM builds a drafter on the last rank only, beside the residual that it reads.
    """

    model_cls = HyperDFlashModel

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        speculation = vllm_config.speculative_config
        # The target's class has asked before, if it is ours
        check_fit(
            speculation.draft_model_config.hf_config,
            speculation.target_model_config.hf_config,
            speculation.num_speculative_tokens,
        )
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.num_drafts = speculation.num_speculative_tokens

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, inputs_embeds: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Blocks of `1 + drafts` tokens -> `[tokens, d]`; with a sequential head `[tokens, 2 d]`.

        vLLM picks the rows of the mask slots out of it and hands them to `compute_logits`: each brings the embedding
        of its block's anchor along, which is the token before the first draft.
        """
        hidden_states = super().forward(input_ids, positions, inputs_embeds)
        if self.model.sequential_head is None:
            return hidden_states
        rows = torch.arange(len(hidden_states), device=hidden_states.device)
        embeds = self.model.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        anchors = embeds[rows - rows % (1 + self.num_drafts)]
        return torch.cat([hidden_states, anchors.to(hidden_states.dtype)], dim=-1)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits `[requests * drafts, vocab]` of rows in this order.

        With a sequential head slot `k` stands behind the likeliest token of slot `k - 1`: the likeliest tokens of all
        rows are the draft. Where vLLM draws drafts at random it draws them from these rows too: right, as it verifies
        them against the same rows, but they fit less well.
        """
        head = self.model.sequential_head
        if head is None or hidden_states.shape[-1] == self.config.hidden_size:
            return super().compute_logits(hidden_states)
        states, anchors = hidden_states.unflatten(0, (-1, self.num_drafts)).chunk(2, dim=-1)  # [requests, drafts, d]
        previous, logits = anchors[:, 0], []
        for slot in range(self.num_drafts):
            logits.append(super().compute_logits(head(states[:, slot], previous)))  # [requests, vocab]
            previous = self.model.embed_input_ids(logits[-1].argmax(dim=-1)).to(states.dtype)
        return torch.stack(logits, dim=1).flatten(0, 1)

    def combine_hidden_states(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The residual `[tokens, m * d]` -> the drafter's context `[tokens, d]`, before `hidden_norm`."""
        return self.model.reducer(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Loads a drafter whose tensors are named as `save_pretrained` names them.

        Raises:
            ValueError: a tensor too few or too many. vLLM does not ask whether a drafter is whole.
        """
        weights = list(weights)
        found = {name for name, _ in weights}
        wanted = {"norm.weight", "hidden_norm.weight"}
        wanted |= {f"reducer.{name}" for name, _ in self.model.reducer.named_parameters()}
        layers = range(self.config.num_hidden_layers)
        wanted |= {f"layers.{layer}.{name}.weight" for layer in layers for name in LAYER_WEIGHTS}
        head = {} if self.model.sequential_head is None else dict(self.model.sequential_head.named_parameters())
        wanted |= {f"{HEAD_PREFIX}{name}.weight" for name in head}
        if found != wanted:
            few, many = ", ".join(sorted(wanted - found)[:3]), ", ".join(sorted(found - wanted)[:3])
            raise ValueError(f"drafter: weights: missing {few or 'none'}; unknown {many or 'none'}")
        for name, tensor in weights:  # vLLM would take its `up_proj` for half of a fused one
            if name.startswith(HEAD_PREFIX):
                head[name.removeprefix(HEAD_PREFIX).removesuffix(".weight")].data.copy_(tensor)
        super().load_weights((name, tensor) for name, tensor in weights if not name.startswith(HEAD_PREFIX))


class VanillaDFlashModel(DFlashQwen3Model):
    """vLLM's DFlash body, with the drafter's own cache settings."""

    decoder_layer_cls = OwnCacheDecoderLayer


class VanillaDFlashForCausalLM(DFlashQwen3ForCausalLM):
    """vLLM's own DFlash drafter, over states averaged over the streams: the baseline of the paper.

    Beside a target with residual streams its layers would take over the target's window and cache type as well. Its
    export names a window as long as the longest sequence, for vLLM without this plugin; here that is no window, as
    vLLM's V1 runner puts windowed layers of a drafter into several cache groups and then refuses them. Beside other
    targets this is vLLM's class as it is.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        speculation = vllm_config.speculative_config
        self.model_cls = DFlashQwen3Model
        if hasattr(speculation.target_model_config.hf_config, "hc_mult"):
            self.model_cls = VanillaDFlashModel
            config = speculation.draft_model_config.hf_config
            check_vanilla_fit(config, speculation.target_model_config.hf_config, speculation.num_speculative_tokens)
            window = getattr(config, "sliding_window", None)
            if window is not None and window >= config.max_position_embeddings:
                config.layer_types = ["full_attention"] * config.num_hidden_layers
        super().__init__(vllm_config=vllm_config, prefix=prefix)


__all__ = ["FcReducer", "HcGateReducer", "HyperDFlashForCausalLM", "SequentialHead", "VanillaDFlashForCausalLM"]
