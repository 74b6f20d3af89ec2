"""Muon for a model's matrices, any optimizer of transformers for the rest, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Muon, Optimizer


class MuonWith(Optimizer):
    """Takes the matrices out of another optimizer and steps them with [`~torch.optim.Muon`].

    Updates of Muon have the size of AdamW's (`adjust_lr_fn="match_rms_adamw"`), so one learning rate serves both. The
    groups and the state are one optimizer's: schedules, checkpoints and resumption need nothing of their own.

    Args:
        optimizer: over all parameters; it keeps those that are not `matrices`.
        matrices: parameters of two dimensions among them.
    """

    def __init__(self, optimizer: Optimizer, matrices: set[torch.nn.Parameter]):
        rest, taken = [], []
        for group in optimizer.param_groups:
            own = [parameter for parameter in group["params"] if parameter in matrices]
            if own:
                taken.append({"params": own, "lr": group["lr"], "weight_decay": group.get("weight_decay", 0.0)})
            group["params"] = [parameter for parameter in group["params"] if parameter not in matrices]
            if group["params"]:
                rest.append(group)
        muon = Muon(taken, adjust_lr_fn="match_rms_adamw")
        self._optimizers, self._num_rest = (optimizer, muon), len(rest)
        super().__init__([*rest, *muon.param_groups], dict(optimizer.defaults))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        shares = self.param_groups[: self._num_rest], self.param_groups[self._num_rest :]
        for optimizer, groups in zip(self._optimizers, shares):  # what was loaded or rescheduled stands in the groups
            optimizer.param_groups, optimizer.state = groups, self.state
            optimizer.step()
        return loss
