"""The objective: decayed cross-entropy on the draft slots plus `alpha * KL` on the first `P` (paper, section 2.3).

Everything is kept as sums over blocks, slot by slot, apart from the number of blocks that they are divided by. So sums
over micro-batches and ranks can be added first and divided once: the loss does not depend on how a batch was split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F


def slot_decay(num_slots: int, gamma: float | None, device: torch.device | str | None = None) -> torch.Tensor:
    """Weights `exp(-(k - 1) / gamma)` of the draft slots `k = 1..num_slots`, `[D]`; all 1 for `gamma=None`."""
    slots = torch.arange(num_slots, dtype=torch.float32, device=device)
    return torch.ones_like(slots) if gamma is None else torch.exp(-slots / gamma)


@dataclass
class BlockSums:
    """Sums over the blocks of a batch, for each draft slot.

    Attributes:
        blocks: `[D]`, blocks in which the slot counts.
        cross_entropy: `[D]`, sum of `-log q(label)` over these blocks. Carries the gradient.
        divergence: `[P]`, sum of `KL(p || q)` over these blocks, of the first `P` slots. Carries the gradient.
        accepted: `[D]`, blocks whose drafts up to this slot all equal their labels.
    """

    blocks: torch.Tensor
    cross_entropy: torch.Tensor
    divergence: torch.Tensor
    accepted: torch.Tensor

    def detach(self) -> BlockSums:
        """The same numbers without gradient."""
        return BlockSums(*(value.detach() for value in vars(self).values()))

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


def block_sums(
    hidden_states: torch.Tensor,
    labels: torch.LongTensor,
    counts: torch.BoolTensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    teacher_states: torch.Tensor | None = None,
    kl_positions: int = 0,
    temperature: float = 1.0,
) -> BlockSums:
    """Runs the LM head on the draft slots that count, slot after slot, and sums up.

    The teacher of slot `k = 1..P` is the target's distribution for the same token, `softmax(head(teacher) / T)`.

    Args:
        hidden_states: `[b, A, D, d]`, the drafter's output on its draft slots.
        labels, counts: `[b, A, D]`, see [`slot_labels`].
        head: the target's LM head, `[n, d]` -> `[n, vocab]`.
        teacher_states: `[b, A, P, d]`, what the LM head takes at the token before each label; `None`: no divergence.
        kl_positions: `P`. temperature: `T`.
    """
    cross_entropy, divergence, accepted = [], [], []
    right = torch.ones_like(counts[..., 0])  # [b, A], all drafts so far equal their labels
    for slot in range(labels.shape[-1]):
        here = counts[..., slot]  # [b, A]
        label = labels[..., slot][here]  # [n]
        logits = head(hidden_states[:, :, slot][here]).float()  # [n, vocab]
        cross_entropy.append(F.cross_entropy(logits, label, reduction="sum"))
        if slot < kl_positions and teacher_states is not None:
            with torch.no_grad():
                teacher = head(teacher_states[:, :, slot][here]).float()  # [n, vocab]
                teacher = F.log_softmax(teacher / temperature, dim=-1)
            student = F.log_softmax(logits / temperature, dim=-1)
            divergence.append(F.kl_div(student, teacher, reduction="sum", log_target=True))
        hits = torch.zeros_like(here)
        hits[here] = logits.detach().argmax(dim=-1) == label
        right = right & hits
        accepted.append(right.sum())
    return BlockSums(
        blocks=counts.sum(dim=(0, 1)).float(),
        cross_entropy=torch.stack(cross_entropy),
        divergence=torch.stack(divergence) if divergence else hidden_states.new_zeros(kl_positions),
        accepted=torch.stack(accepted).float(),
    )
