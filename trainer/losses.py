"""The objective: decayed cross-entropy on the draft slots plus `alpha * KL` on the first `P` (paper, section 2.3).

Everything is kept as sums over blocks, slot by slot, apart from the number of blocks that they are divided by. So sums
over micro-batches and ranks can be added first and divided once: the loss does not depend on how a batch was split.

What they are divided by counts blocks, so what each slot weighs in the loss is known before the LM head runs. The loss
is differentiated chunk by chunk while it is computed: logits of more than one chunk never exist, forward or backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable


def slot_decay(num_slots: int, gamma: float | None, device: torch.device | str | None = None) -> torch.Tensor:
    """Weights `exp(-(k - 1) / gamma)` of the draft slots `k = 1..num_slots`, `[D]`; all 1 for `gamma=None`."""
    slots = torch.arange(num_slots, dtype=torch.float32, device=device)
    return torch.ones_like(slots) if gamma is None else torch.exp(-slots / gamma)


@dataclass
class BlockSums:
    """Sums over the blocks of a batch, for each draft slot.

    Attributes:
        blocks: `[D]`, blocks in which the slot counts.
        cross_entropy: `[D]`, sum of `-log q(label)` over these blocks.
        divergence: `[P]`, sum of `KL(p || q)` over these blocks, of the first `P` slots.
        accepted: `[D]`, blocks whose drafts up to this slot all equal their labels.
    """

    blocks: torch.Tensor
    cross_entropy: torch.Tensor
    divergence: torch.Tensor
    accepted: torch.Tensor

    def __add__(self, other: BlockSums) -> BlockSums:
        return BlockSums(*(mine + theirs for mine, theirs in zip(vars(self).values(), vars(other).values())))


@dataclass
class Objective:
    """How the sums become a loss.

    Attributes:
        gamma: decay of the slot weights; `None`: all slots weigh the same.
        kl_weight: `alpha`. kl_positions: `P`. kl_temperature: `T`.
    """

    gamma: float | None
    kl_weight: float
    kl_positions: int
    kl_temperature: float

    def weights(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the cross-entropy of one block's slot `k` weighs in the loss, `[D]`, and what its divergence, `[P]`.

        `w_k / sum_j w_j N_j` and `alpha * T^2 / (P * N_k)`; `blocks` `[D]` are the `N_k`, see [`~Objective.loss`].
        """
        decay = slot_decay(len(blocks), self.gamma, blocks.device)
        taught = blocks[: self.kl_positions].clamp(min=1)
        scale = self.kl_weight * self.kl_temperature**2 / self.kl_positions
        return decay / (blocks * decay).sum().clamp(min=torch.finfo(decay.dtype).tiny), scale / taught

    def cross_entropy(self, sums: BlockSums, blocks: torch.Tensor) -> torch.Tensor:
        """Weighted mean over all counted slots: `sum_k w_k CE_k / sum_k w_k N_k`; `blocks` `[D]` are the `N_k`."""
        decay = slot_decay(len(blocks), self.gamma, blocks.device)
        return (sums.cross_entropy * decay).sum() / (blocks * decay).sum().clamp(min=torch.finfo(decay.dtype).tiny)

    def divergence(self, sums: BlockSums, blocks: torch.Tensor) -> torch.Tensor:
        """`T^2 / P * sum_{k=1..P} E KL(p_k || q_k)`, each expectation over the `N_k` blocks whose slot `k` counts."""
        means = sums.divergence / blocks[: self.kl_positions].clamp(min=1)  # [P]
        return self.kl_temperature**2 / self.kl_positions * means.sum()

    def loss(self, sums: BlockSums, blocks: torch.Tensor) -> torch.Tensor:
        """`CE + alpha * KL`. `blocks` `[D]` counts the blocks of the whole step: all micro-batches, all ranks."""
        loss = self.cross_entropy(sums, blocks)
        return loss + self.kl_weight * self.divergence(sums, blocks) if self.kl_weight else loss


class _Differentiated(torch.autograd.Function):
    """A value whose gradient with respect to `rows` is known already."""

    @staticmethod
    def forward(ctx, rows: torch.Tensor, value: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, factor: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * factor, None, None


def block_loss(
    hidden_states: torch.Tensor,
    labels: torch.LongTensor,
    counts: torch.BoolTensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    objective: Objective,
    blocks: torch.Tensor | None = None,
    teacher_states: torch.Tensor | None = None,
    chunk_size: int = 128,
) -> tuple[torch.Tensor, BlockSums]:
    """Runs the LM head on the draft slots that count, chunk by chunk: the loss, and the sums that it is made of.

    The teacher of slot `k = 1..P` is the target's distribution for the same token, `softmax(head(teacher) / T)`.

    The gradient goes to `hidden_states` alone, as the head is frozen. It is computed along with the loss, so that the
    head is run once and no logits are kept; a second derivative is refused.

    Args:
        hidden_states: `[b, A, D, d]`, the drafter's output on its draft slots.
        labels, counts: `[b, A, D]`, see [`slot_labels`].
        head: the target's LM head, `[n, d]` -> `[n, vocab]`.
        blocks: `[D]`, how many blocks of the whole step each slot counts in; `None`: those at hand.
        teacher_states: `[b, A, P, d]`, what the LM head takes at the token before each label; `None`: no divergence.
        chunk_size: draft slots whose logits exist at once.
    """
    counts = counts.movedim(-1, 0)  # [D, b, A]: rows go slot by slot, so that the taught ones come first
    rows = hidden_states.movedim(2, 0)[counts]  # [n, d]
    row_labels = labels.movedim(-1, 0)[counts]  # [n]
    if teacher_states is None:
        taught_counts, taught = torch.zeros_like(counts[: objective.kl_positions]), rows[:0]
    else:
        taught_counts = counts[: objective.kl_positions]  # [P, b, A]
        taught = teacher_states.movedim(2, 0)[taught_counts]  # [k, d]
    row_blocks = counts.sum(dim=(1, 2))  # [D]
    blocks = row_blocks.float() if blocks is None else blocks
    ce_weights, kl_weights = objective.weights(blocks)
    ce_weights = ce_weights.repeat_interleave(row_blocks)  # [n]
    kl_weights = kl_weights.repeat_interleave(taught_counts.sum(dim=(1, 2)))  # [k]

    differentiate = torch.is_grad_enabled() and rows.requires_grad
    gradient = torch.empty_like(rows)
    cross_entropy, divergence = torch.empty_like(ce_weights), torch.empty_like(kl_weights)
    right = torch.empty_like(row_labels, dtype=torch.bool)  # [n]
    for start in range(0, len(rows), chunk_size):
        chunk = slice(start, start + chunk_size)
        cross_entropy[chunk], divergence[chunk], right[chunk], gradient[chunk] = _chunk_losses(
            rows[chunk].detach().requires_grad_(differentiate),
            row_labels[chunk],
            taught[chunk],
            head,
            ce_weights[chunk],
            kl_weights[chunk],
            objective.kl_temperature,
        )
    sums = BlockSums(
        blocks=row_blocks.float(),
        cross_entropy=_spread(cross_entropy, counts).sum(dim=(1, 2)),
        divergence=_spread(divergence, taught_counts).sum(dim=(1, 2)),
        accepted=_spread(right, counts).cumprod(dim=0).sum(dim=(1, 2)).float(),
    )
    loss = objective.loss(sums, blocks)
    return (_Differentiated.apply(rows, loss, gradient) if differentiate else loss), sums


def _spread(values: torch.Tensor, counts: torch.BoolTensor) -> torch.Tensor:
    """Values of the slots that count, in their order, at their places in a tensor of zeros shaped as `counts`."""
    return values.new_zeros(counts.shape).masked_scatter_(counts, values)


def _chunk_losses(
    rows: torch.Tensor,
    labels: torch.LongTensor,
    taught: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    ce_weights: torch.Tensor,
    kl_weights: torch.Tensor,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.BoolTensor, torch.Tensor | float]:
    """Losses of some rows, and the gradient of their weighted sum.

    With `q = softmax(z)`, and `q_T`, `p_T` those of student and teacher at temperature `T`, the gradients with respect
    to the logits `z` are `q - onehot(label)` for the cross-entropy and `(q_T - p_T) / T` for the divergence.

    Args:
        rows: `[c, d]`, a leaf. labels, ce_weights: `[c]`.
        taught: `[k, d]`, the teacher's states for the first `k` rows. kl_weights: `[k]`.

    Returns:
        Cross-entropy `[c]`; divergence `[k]`; whether the likeliest token is the label, `[c]`; the gradient with
        respect to `rows`, `[c, d]`, 0 if they need none.
    """
    outputs = head(rows)  # [c, vocab]
    with torch.no_grad():
        logits = outputs.detach().float()  # overwritten step by step, down to the gradient with respect to themselves
        log_p = F.log_softmax(head(taught).float() / temperature, dim=-1)  # [k, vocab]
        log_q = F.log_softmax(logits[: len(taught)] / temperature, dim=-1)  # [k, vocab]
        p = log_p.exp()
        divergence = log_p.sub_(log_q).mul_(p).sum(dim=-1)

        labels = labels.unsqueeze(-1)  # [c, 1]
        top, drafts = logits.max(dim=-1, keepdim=True)
        at_label = logits.gather(-1, labels)
        total = logits.sub_(top).exp_().sum(dim=-1, keepdim=True)
        cross_entropy = top + total.log() - at_label

        gradient = 0.0
        if rows.requires_grad:
            logits.mul_(ce_weights.unsqueeze(-1) / total).scatter_add_(-1, labels, -ce_weights.unsqueeze(-1))
            logits[: len(taught)] += log_q.exp_().sub_(p).mul_(kl_weights.unsqueeze(-1) / temperature)
            (gradient,) = torch.autograd.grad(outputs, rows, logits.to(outputs.dtype))
    return cross_entropy.squeeze(-1), divergence, (drafts == labels).squeeze(-1), gradient
