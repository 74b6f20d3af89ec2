"""DeepSeek-V4 that hands its residual streams to a HyperDFlash drafter."""

from __future__ import annotations

import torch
from vllm.config import VllmConfig
from vllm.models.deepseek_v4 import DeepseekV4ForCausalLM
from vllm.sequence import IntermediateTensors

from .layout import PRE_HC_HEAD, check_fit


def reads_pre_hc_head(vllm_config: VllmConfig) -> bool:
    """Whether the drafter, if there is one, reads the residual before `hc_head`."""
    speculation = vllm_config.speculative_config
    if speculation is None or speculation.method != "dflash" or speculation.draft_model_config is None:
        return False
    fields = getattr(speculation.draft_model_config.hf_config, "dflash_config", None) or {}
    return fields.get("target_hidden_source") == PRE_HC_HEAD


class HyperDFlashDeepseekV4ForCausalLM(DeepseekV4ForCausalLM):
    """vLLM's DeepSeek-V4. With a HyperDFlash drafter, its one auxiliary state is the residual before `hc_head`.

    vLLM's `dflash` reads auxiliary states of chosen layers, which DeepSeek-V4 fills with the *mean* over the streams.
    The residual itself is kept already, for the native MTP module, in `_mtp_hidden_buffer` `[tokens, m * d]`; its
    first rows are returned. Without such a drafter this is the parent class, to the bit.

    Parallelism, as far as vLLM's code tells (run on one CPU only):

    * Tensor parallel: every layer ends in an all-reduce, so the residual is whole and the same on all ranks, and so is
      the buffer. With sequence-parallel MoE the parent gathers the tokens before it fills the buffer.
    * Pipeline parallel: only the last rank has the buffer, and only there is a drafter. Earlier ranks hand on their
      `IntermediateTensors`; no layer's state is asked for, so there is nothing to relay.
    * CUDA graphs: the buffer is allocated once, so a view of it is at the same address in every replay.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        returns_residual = reads_pre_hc_head(vllm_config)
        if returns_residual:
            speculation = vllm_config.speculative_config
            check_fit(
                speculation.draft_model_config.hf_config,
                vllm_config.model_config.hf_config,
                speculation.num_speculative_tokens,
            )
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.returns_residual = returns_residual

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        """No layer is captured when the drafter reads the residual."""
        super().set_aux_hidden_state_layers(() if self.returns_residual else layers)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ):
        """As the parent; the last pipeline rank adds `[residual]`, `[tokens, m * d]`, if the drafter reads it."""
        output = super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)
        if not self.returns_residual or isinstance(output, IntermediateTensors):
            return output
        return output, [self.get_mtp_target_hidden_states()[: output.shape[0]]]


__all__ = ["HyperDFlashDeepseekV4ForCausalLM", "reads_pre_hc_head"]
