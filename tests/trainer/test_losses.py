"""The objective against a plain loop over anchors and slots, written from the paper's formulas."""

import math

import pytest
import torch

from hyperdflash.trainer.losses import Objective, block_sums, slot_decay

BATCH, ANCHORS, DRAFTS, WIDTH, VOCAB, TAUGHT = 3, 5, 6, 8, 17, 2


def problem(seed):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(BATCH, ANCHORS, DRAFTS, WIDTH, generator=generator, dtype=torch.float64)
    teacher = torch.randn(BATCH, ANCHORS, TAUGHT, WIDTH, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, VOCAB, (BATCH, ANCHORS, DRAFTS), generator=generator)
    right = torch.rand(labels.shape, generator=generator) < 0.6
    labels = torch.where(right, (hidden @ weight.T).argmax(-1), labels)
    reach = torch.randint(0, DRAFTS + 1, (BATCH, ANCHORS), generator=generator)  # slots that count, per block
    counts = torch.arange(DRAFTS) < reach.unsqueeze(-1)
    return hidden.requires_grad_(), labels.masked_fill(~counts, -100), counts, weight, teacher


def loop_loss(hidden, labels, counts, weight, teacher, objective):
    numerator = denominator = 0.0
    kl_sums, kl_blocks = [0.0] * TAUGHT, [0] * TAUGHT
    temperature = objective.kl_temperature
    for row in range(BATCH):
        for anchor in range(ANCHORS):
            for index in range(DRAFTS):
                if not counts[row, anchor, index]:
                    break
                logits = weight @ hidden[row, anchor, index]
                k = index + 1
                decay = 1.0 if objective.gamma is None else math.exp(-(k - 1) / objective.gamma)
                log_q = logits - logits.logsumexp(0)
                numerator = numerator - decay * log_q[labels[row, anchor, index]]
                denominator += decay
                if k <= TAUGHT:
                    p = torch.softmax(weight @ teacher[row, anchor, index] / temperature, 0)
                    q = torch.softmax(logits / temperature, 0)
                    kl_sums[index] = kl_sums[index] + sum(p[v] * (p[v].log() - q[v].log()) for v in range(VOCAB))
                    kl_blocks[index] += 1
    kl = sum(total / max(blocks, 1) for total, blocks in zip(kl_sums, kl_blocks))
    return numerator / denominator + objective.kl_weight * temperature**2 / TAUGHT * kl


@pytest.mark.parametrize("gamma", [4.0, None, math.inf, 1.5])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_loss_and_gradient_equal_a_loop_over_anchors_and_slots(gamma, temperature):
    objective = Objective(gamma, 0.3, TAUGHT, temperature)
    hidden, labels, counts, weight, teacher = problem(seed=1)
    wanted = loop_loss(hidden, labels, counts, weight, teacher, objective)
    (wanted_gradient,) = torch.autograd.grad(wanted, hidden)
    sums = block_sums(hidden, labels, counts, lambda x: x @ weight.T, teacher, TAUGHT, temperature)
    loss = objective.loss(sums, sums.blocks)
    (gradient,) = torch.autograd.grad(loss, hidden)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-4, atol=1e-7)


def test_the_loss_of_a_split_batch_adds_up_to_the_loss_of_the_whole():
    objective = Objective(4.0, 0.1, TAUGHT, 1.0)
    hidden, labels, counts, weight, teacher = problem(seed=2)
    head = lambda x: x @ weight.T  # noqa: E731
    whole = block_sums(hidden, labels, counts, head, teacher, TAUGHT)
    parts = [
        block_sums(*(x[i : i + 1] for x in (hidden, labels, counts)), head, teacher[i : i + 1], TAUGHT)
        for i in range(3)
    ]
    split = sum(objective.loss(part, whole.blocks) for part in parts)
    assert split.item() == pytest.approx(objective.loss(whole, whole.blocks).item(), rel=1e-6)
    added = parts[0] + parts[1] + parts[2]
    for name, value in vars(added).items():
        torch.testing.assert_close(value, getattr(whole, name), msg=name)


def test_a_block_is_accepted_up_to_its_first_wrong_draft():
    hidden, labels, counts, weight, _ = problem(seed=3)
    sums = block_sums(hidden, labels, counts, lambda x: x @ weight.T)
    drafts = (hidden @ weight.T).argmax(-1)
    accepted = [0] * DRAFTS
    for row in range(BATCH):
        for anchor in range(ANCHORS):
            for index in range(DRAFTS):
                if not counts[row, anchor, index] or drafts[row, anchor, index] != labels[row, anchor, index]:
                    break
                accepted[index] += 1
    assert sums.accepted.tolist() == accepted
    assert sums.blocks.tolist() == counts.sum((0, 1)).tolist()


def test_a_batch_without_blocks_has_loss_zero_and_a_gradient():
    hidden, labels, counts, weight, teacher = problem(seed=4)
    counts, labels = torch.zeros_like(counts), torch.full_like(labels, -100)
    objective = Objective(4.0, 0.1, TAUGHT, 1.0)
    sums = block_sums(hidden, labels, counts, lambda x: x @ weight.T, teacher, TAUGHT)
    loss = objective.loss(sums, sums.blocks)
    loss.backward()
    assert loss.item() == 0 and hidden.grad.abs().max() == 0


def test_slot_weights_decay_from_one():
    assert slot_decay(3, 4.0).tolist() == pytest.approx([1, math.exp(-0.25), math.exp(-0.5)])
    assert slot_decay(3, None).tolist() == slot_decay(3, math.inf).tolist() == [1, 1, 1]
