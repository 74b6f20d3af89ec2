"""Training of the MTP module: the drafters' trainer, with the module's recursion in the place of a block."""

from __future__ import annotations

from typing import Any

import torch
from peft import PeftConfig
from torch import nn
from transformers import PreTrainedModel

from ..trainer.arguments import HyperDFlashTrainingArguments
from ..trainer.states import DocumentStates, TargetStates
from ..trainer.trainer import HyperDFlashTrainer
from .balance import ExpertBalance
from .modeling_mtp import MtpModel


class MtpTrainer(HyperDFlashTrainer):
    """Trains an [`MtpModel`] against a frozen target, on the data, states, anchors and objective of the drafters.

    From each anchor the recursion is unrolled `config.mtp_depths` steps deep, each step on the output of the one
    before and on the text's tokens, with the keys that it has in drafting. Step `k` is what slot `k` is to a block
    drafter: its label is the token `k` behind the anchor, `kl_teacher` teaches the first `kl_positions`, and
    `acceptance_k` is logged. So what a step means here is what it means in `generate`.

    Args: as in [`HyperDFlashTrainer`]; `model` is an [`MtpModel`].

    Raises:
        ValueError: options of a reducer or an adapter, which the module does not have.
    """

    _tag_names = ["trl", "hyperdflash", "mtp"]
    _name = "MTP"

    def __init__(
        self,
        model: MtpModel,
        target: PreTrainedModel | TargetStates,
        args: HyperDFlashTrainingArguments,
        *positional: Any,
        peft_config: PeftConfig | None = None,
        **kwargs: Any,
    ):
        rules = {
            "freeze_reducer": (args.freeze_reducer, False),
            "reducer_learning_rate_factor": (args.reducer_learning_rate_factor, 1.0),
            "activation_checkpointing": (bool(args.activation_checkpointing), False),
        }
        for name, (found, wanted) in rules.items():
            if found != wanted:
                raise ValueError(
                    f"HyperDFlashTrainingArguments.{name}: found {found}, wanted {wanted} for an MTP module"
                )
        if peft_config is not None:
            raise ValueError("use_peft: found True, wanted False for an MTP module")
        super().__init__(model, target, args, *positional, **kwargs)
        self.balance = ExpertBalance(self.model)
        self.add_callback(self.balance)

    def _draft_hidden_states(
        self, model: nn.Module, states: DocumentStates, input_ids: torch.LongTensor, anchors: torch.LongTensor
    ) -> torch.Tensor:
        """`[b, A, D, d]`: step `k` of the recursion that begins with the pair before each anchor."""
        dtype = getattr(model, "module", model).e_proj.weight.dtype
        self.balance.counted = anchors > 0  # in each step of the recursion
        embeds = self.target_states.modules.embedding(input_ids[:, 1:])  # [b, s - 1, d]
        return model(
            token_embeds=embeds.to(dtype),
            hidden_states=states.context[:, :-1].to(dtype),
            first_pairs=(anchors - 1).clamp(min=0),  # 0 stands for no anchor
            num_depths=self.geometry.num_draft_tokens,
        ).last_hidden_state

    def _gate_sums(self, context: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        return context.new_zeros(0, dtype=torch.float32)


__all__ = ["MtpTrainer"]
