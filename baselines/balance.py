"""DeepSeek's load balancing of experts without an auxiliary loss (DeepSeek-V3 report, section 2.1.2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4TopKRouter


class ExpertBalance(TrainerCallback):
    """After each step every router's correction bias moves by `rate` towards the experts that got too few tokens.

    On several processes each counts its own tokens and the counts are added, so the biases stay equal.

    Attributes:
        counted: which of the tokens of a forward count, a boolean tensor; `None`: all.
    """

    def __init__(self, model: nn.Module, rate: float = 1e-3):
        self.rate = rate
        self.counted: torch.Tensor | None = None
        self.loads = {module: None for module in model.modules() if isinstance(module, DeepseekV4TopKRouter)}
        for router in self.loads:
            router.register_forward_hook(self._count)

    def _count(self, router: DeepseekV4TopKRouter, args: tuple, output: tuple[torch.Tensor, ...]) -> None:
        if router.training:
            chosen = output[2] if self.counted is None else output[2][self.counted.flatten()]  # [tokens, experts each]
            load = torch.bincount(chosen.flatten(), minlength=router.num_experts)
            self.loads[router] = load if self.loads[router] is None else self.loads[router] + load

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for router, load in self.loads.items():
            if load is None:
                continue
            load = load.float()
            if torch.distributed.is_initialized():
                torch.distributed.all_reduce(load)
            router.e_score_correction_bias += self.rate * torch.sign(load.mean() - load)
            self.loads[router] = None


__all__ = ["ExpertBalance"]
