"""DeepSeek-V4's native MTP module: one layer of the target's kind that drafts token after token.

    x  = e_proj(enorm(embed(token[t+1]))) + h_proj(hnorm(H[t]))     on each of the m streams
    x  = layer(x, position t)                                       [m, d]
    logits of token t+2 = lm_head(norm(hc_head(x)))
    next draft:  H[t+1] := x,  token[t+2] := the draft

`(H[t], token[t+1])` is the *pair* `t`. `H` are the target's streams before its own `hc_head`. Embedding and LM head
are the target's. The layer, its hyper-connections and the collapse are transformers' own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, GenerationConfig
from transformers.cache_utils import Cache
from transformers.masking_utils import create_sliding_window_causal_mask
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4DecoderLayer,
    DeepseekV4HyperHead,
    DeepseekV4PreTrainedModel,
    DeepseekV4RMSNorm,
    DeepseekV4RotaryEmbedding,
    apply_rotary_pos_emb,
)
from transformers.utils import ModelOutput

from ..generation_hyperdflash import install_hooks
from .configuration_mtp import MtpConfig
from .generation_mtp import MtpCandidateGenerator
from .recursion import Recursion, recursion_attention


@dataclass
class MtpOutput(ModelOutput):
    """
    Attributes:
        last_hidden_state: collapsed and normed: what the target's LM head takes. `[b, s, d]`; of a recursion
            `[b, A, D, d]`.
        streams: the layer's output `[b, s, m, d]`, the `H` of the next step; `None` for a recursion.
        cache: the cache that was given.
    """

    last_hidden_state: torch.Tensor | None = None
    streams: torch.Tensor | None = None
    cache: Cache | None = None


class MtpLayer(DeepseekV4DecoderLayer):
    """transformers' layer, which can also read pairs whose output nobody needs."""

    def keys(
        self, streams: torch.Tensor, position_embeddings: dict[str, tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        """The keys (V4: also the values) that the layer's attention makes of `[b, s, m, d]`: `[b, 1, s, head_dim]`."""
        attention = self.self_attn
        collapsed = self.attn_hc(streams)[2]  # [b, s, d]
        keys = attention.kv_norm(attention.kv_proj(self.input_layernorm(collapsed)))
        return apply_rotary_pos_emb(keys.unsqueeze(1), *position_embeddings[attention.rope_layer_type])


class MtpModel(DeepseekV4PreTrainedModel):
    """The MTP module as an assistant: `target.generate(**inputs, assistant_model=mtp, num_assistant_tokens=3)`.

    Attributes:
        last_generation: statistics of the last `generate` call that it assisted, or `None`.
        generation_config: how it drafts; `num_assistant_tokens` in it goes before `config.mtp_depths`.
    """

    config_class = MtpConfig
    config: MtpConfig
    main_input_name = "token_embeds"
    supports_gradient_checkpointing = False  # the recursion hands keys from step to step
    _no_split_modules = ["MtpLayer"]
    _can_record_outputs = {}
    _keep_in_fp32_modules_strict = [*DeepseekV4PreTrainedModel._keep_in_fp32_modules_strict, "enorm", "hnorm"]
    candidate_generator_class = MtpCandidateGenerator

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # transformers looks for it in the source of this file, but the experts are its own

    def __init__(self, config: MtpConfig):
        super().__init__(config)
        width = config.hidden_size
        self.e_proj = nn.Linear(width, width, bias=False)
        self.h_proj = nn.Linear(width, width, bias=False)
        self.enorm = DeepseekV4RMSNorm(width, eps=config.rms_norm_eps).to(dtype=torch.float32)
        self.hnorm = DeepseekV4RMSNorm(width, eps=config.rms_norm_eps).to(dtype=torch.float32)
        self.layer = MtpLayer(config, layer_idx=0)
        self.hc_head = DeepseekV4HyperHead(config).to(dtype=torch.float32)
        self.norm = DeepseekV4RMSNorm(width, eps=config.rms_norm_eps).to(dtype=torch.float32)
        self.rotary_emb = DeepseekV4RotaryEmbedding(config)
        self.generation_config = GenerationConfig(speculation_type="dflash")
        self.last_generation = None
        self.post_init()
        install_hooks()

    def get_input_embeddings(self) -> None:
        """`None`: the module borrows the target's."""
        return None

    def forward(
        self,
        token_embeds: torch.Tensor,
        hidden_states: torch.Tensor,
        position_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        first_pairs: torch.LongTensor | None = None,
        num_depths: int | None = None,
    ) -> MtpOutput:
        r"""
        Applies the module once to the pairs `t = 0..s-1` or, with `first_pairs`, several times from each of some.

        Args:
            token_embeds (`[b, s, d]`): the target's embeddings of the tokens `t + 1`.
            hidden_states (`[b, s, m, d]`): the target's streams `H[t]`, or the module's own of the step before.
            position_ids (`[b, s]`): positions `t`. Default: those that follow the cache.
            attention_mask: as transformers' models take it.
            cache: keys of the pairs before; those of the given ones are appended.
            first_pairs (`[b, A]`): the recursion, as drafting runs it, from each of these pairs on: step 1 takes the
                pair `p` itself, step `k` the output of the one before and the token of pair `p + k - 1`, whose label
                is the token after it. The keys of a recursion are the target's pairs before `p` and its own steps.
            num_depths: steps of a recursion; `config.mtp_depths` by default.
        """
        if first_pairs is not None:
            num_depths = self.config.mtp_depths if num_depths is None else num_depths
            return self._recursion(token_embeds, hidden_states, first_pairs, num_depths)
        if position_ids is None:
            seen = cache.get_seq_length() if cache is not None else 0
            position_ids = (torch.arange(token_embeds.shape[1], device=token_embeds.device) + seen).unsqueeze(0)
        mask = None
        if token_embeds.shape[1] > 1 or attention_mask is not None or cache is None:
            mask = create_sliding_window_causal_mask(
                config=self.config,
                inputs_embeds=token_embeds,
                attention_mask=attention_mask,
                cache=cache,
                position_ids=position_ids,
            )
        streams = self._run_layer(
            self.merge(token_embeds, hidden_states),
            self._position_embeddings(token_embeds, position_ids),
            position_ids,
            mask,
            cache,
        )
        return MtpOutput(last_hidden_state=self.norm(self.hc_head(streams)), streams=streams, cache=cache)

    def read(
        self, token_embeds: torch.Tensor, hidden_states: torch.Tensor, position_ids: torch.LongTensor, cache: Cache
    ) -> None:
        """Appends the keys of pairs to `cache`, without their outputs: all that accepted tokens leave behind."""
        keys = self.layer.keys(
            self.merge(token_embeds, hidden_states), self._position_embeddings(token_embeds, position_ids)
        )
        cache.update(keys, keys, 0)

    def merge(self, token_embeds: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Pairs `[b, s, d]` and `[b, s, m, d]` -> what the layer takes, `[b, s, m, d]`."""
        return self.e_proj(self.enorm(token_embeds)).unsqueeze(2) + self.h_proj(self.hnorm(hidden_states))

    def _position_embeddings(
        self, like: torch.Tensor, position_ids: torch.LongTensor
    ) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        return {"main": self.rotary_emb(like, position_ids=position_ids, layer_type="main")}

    def _run_layer(self, streams, position_embeddings, position_ids, mask, cache) -> torch.Tensor:
        return self.layer(
            streams,
            position_embeddings=position_embeddings,
            position_ids=position_ids,
            attention_mask=mask,
            cache=cache,
        )

    def _recursion(
        self, token_embeds: torch.Tensor, hidden_states: torch.Tensor, first_pairs: torch.LongTensor, num_depths: int
    ) -> MtpOutput:
        rows = torch.arange(len(first_pairs), device=first_pairs.device).unsqueeze(1)  # [b, 1]
        last = token_embeds.shape[1] - 1
        tokens = self.e_proj(self.enorm(token_embeds)).unsqueeze(2)  # [b, s, 1, d]
        pairs = tokens + self.h_proj(self.hnorm(hidden_states))  # [b, s, m, d]
        positions = torch.arange(token_embeds.shape[1], device=first_pairs.device).unsqueeze(0)
        context = self.layer.keys(pairs, self._position_embeddings(pairs, positions))  # [b, 1, s, head_dim]

        outputs, streams = [], pairs[rows, first_pairs]  # [b, A, m, d]
        recursion = Recursion(context, first_pairs, self.config.sliding_window)
        with recursion_attention(self.config):
            for depth in range(num_depths):
                position_ids = first_pairs + depth  # [b, A]
                if depth > 0:  # behind the document's end nothing counts, whatever token stands there
                    streams = tokens[rows, position_ids.clamp(max=last)] + self.h_proj(self.hnorm(streams))
                recursion.begin_step(position_ids)
                streams = self._run_layer(
                    streams, self._position_embeddings(streams, position_ids), position_ids, recursion, recursion
                )
                outputs.append(self.norm(self.hc_head(streams)))  # [b, A, d]
        return MtpOutput(last_hidden_state=torch.stack(outputs, dim=2))


AutoConfig.register(MtpConfig.model_type, MtpConfig, exist_ok=True)
AutoModel.register(MtpConfig, MtpModel, exist_ok=True)

__all__ = ["MtpModel", "MtpOutput"]
