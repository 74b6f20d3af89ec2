"""The objective against a plain loop over anchors and slots, written from the paper's formulas."""

import math
import weakref

import pytest
import torch
import torch.nn.functional as F

from hyperdflash.trainer.losses import BlockSums, Objective, block_loss, slot_decay

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


def unchunked_loss(hidden, labels, counts, head, teacher, objective):
    """The straightforward form, left to autograd: logits of all rows at once. The loss, and the sums."""
    index = counts.nonzero()  # [n, 3]
    logits = head(hidden[counts]).float()
    cross_entropy = F.cross_entropy(logits, labels[counts], reduction="none")
    sums = torch.zeros(labels.shape[-1]).index_add(0, index[:, 2], cross_entropy)
    divergence = torch.zeros(objective.kl_positions)
    if teacher is not None:
        taught = index[:, 2] < objective.kl_positions
        row, anchor, slot = index[taught].T
        log_p = F.log_softmax(head(teacher[row, anchor, slot]).float() / objective.kl_temperature, dim=-1)
        log_q = F.log_softmax(logits[taught] / objective.kl_temperature, dim=-1)
        divergence = divergence.index_add(0, slot, (log_p.exp() * (log_p - log_q)).sum(-1))
    hits = torch.zeros_like(counts)
    hits[counts] = logits.argmax(-1) == labels[counts]
    blocks = counts.sum((0, 1)).float()
    found = BlockSums(blocks, sums, divergence, hits.cumprod(-1).sum((0, 1)).float())
    return objective.loss(found, blocks), found


@pytest.mark.parametrize("chunk_size", [1, 7, 10_000])
@pytest.mark.parametrize("gamma", [4.0, None, math.inf, 1.5])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_loss_and_gradient_equal_a_loop_over_anchors_and_slots(gamma, temperature, chunk_size):
    objective = Objective(gamma, 0.3, TAUGHT, temperature)
    hidden, labels, counts, weight, teacher = problem(seed=1)
    wanted = loop_loss(hidden, labels, counts, weight, teacher, objective)
    (wanted_gradient,) = torch.autograd.grad(wanted, hidden)
    head = lambda x: x @ weight.T  # noqa: E731
    loss, _ = block_loss(hidden, labels, counts, head, objective, teacher_states=teacher, chunk_size=chunk_size)
    (gradient,) = torch.autograd.grad(loss, hidden)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-5, atol=1e-7)


CASES = {
    "as the paper": (Objective(4.0, 0.1, TAUGHT, 1.0), None),
    "no divergence": (Objective(4.0, 0.0, TAUGHT, 1.0), None),
    "no decay, all slots taught, warm": (Objective(None, 0.7, DRAFTS, 1.5), None),
    "a slot that counts nowhere": (Objective(4.0, 0.1, TAUGHT, 1.0), 1),
}


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16 autocast"])
@pytest.mark.parametrize("chunk_size", [1, 4, 7, 10_000])  # of 40 rows: 4 divides them, 7 does not
@pytest.mark.parametrize("case", CASES)
def test_chunks_change_neither_sums_nor_gradients(case, chunk_size, autocast):
    objective, first_empty = CASES[case]
    hidden, labels, counts, weight, _ = problem(seed=5)
    teacher = torch.randn(BATCH, ANCHORS, objective.kl_positions, WIDTH, generator=torch.Generator().manual_seed(6))
    teacher = teacher if objective.kl_weight else None
    if first_empty is not None:
        counts[..., first_empty:] = False
        labels = labels.masked_fill(~counts, -100)
    head = torch.nn.Linear(WIDTH, VOCAB, bias=False).requires_grad_(False)
    head.weight.copy_(weight)
    leaves = [hidden.detach().float().requires_grad_() for _ in range(2)]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss, sums = block_loss(
            leaves[0], labels, counts, head, objective, teacher_states=teacher, chunk_size=chunk_size
        )
        wanted, wanted_sums = unchunked_loss(leaves[1], labels, counts, head, teacher, objective)
    for name, value in vars(sums).items():
        torch.testing.assert_close(value, getattr(wanted_sums, name), rtol=1e-5, atol=1e-5, msg=name)
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-6)
    (3 * loss).backward(), (3 * wanted).backward()
    # In bfloat16 the gradients of the logits are rounded to 8 bits, before and after they are added up
    tolerance = {"rtol": 2e-2, "atol": 2e-3} if autocast else {"rtol": 1e-5, "atol": 1e-7}
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad, **tolerance)


@pytest.mark.parametrize("gradients", [True, False])
def test_the_head_runs_once_on_each_row_and_on_one_chunk_at_a_time(gradients):
    hidden, labels, counts, weight, teacher = problem(seed=7)
    alive, calls = weakref.WeakSet(), []

    def head(x):
        outputs = x @ weight.T
        calls.append((len(x), len(alive)))
        alive.add(outputs)
        return outputs

    with torch.set_grad_enabled(gradients):
        loss, _ = block_loss(
            hidden, labels, counts, head, Objective(4.0, 0.1, TAUGHT, 1.0), teacher_states=teacher, chunk_size=4
        )
    if gradients:
        loss.backward()
    assert max(rows for rows, _ in calls) == 4
    assert sum(rows for rows, _ in calls) == counts.sum() + counts[..., :TAUGHT].sum()
    assert max(others for _, others in calls) == 1  # the teacher's logits stand beside the student's
    assert loss.requires_grad == gradients and not alive


def test_the_gradient_is_scaled_by_what_comes_from_above_each_time():
    hidden, labels, counts, weight, teacher = problem(seed=8)
    loss, sums = block_loss(
        hidden, labels, counts, lambda x: x @ weight.T, Objective(4.0, 0.1, TAUGHT, 1.0), teacher_states=teacher
    )
    (once,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    (thrice,) = torch.autograd.grad(3 * loss, hidden)
    torch.testing.assert_close(thrice, 3 * once)
    assert once.abs().max() > 0 and not any(value.requires_grad for value in vars(sums).values())


def test_the_loss_of_a_split_batch_adds_up_to_the_loss_of_the_whole():
    objective = Objective(4.0, 0.1, TAUGHT, 1.0)
    hidden, labels, counts, weight, teacher = problem(seed=2)
    head = lambda x: x @ weight.T  # noqa: E731
    loss, whole = block_loss(hidden, labels, counts, head, objective, teacher_states=teacher)
    (gradient,) = torch.autograd.grad(loss, hidden)
    losses, parts = zip(
        *(
            block_loss(
                *(x[i : i + 1] for x in (hidden, labels, counts)), head, objective, whole.blocks, teacher[i : i + 1]
            )
            for i in range(3)
        )
    )
    (split_gradient,) = torch.autograd.grad(sum(losses), hidden)
    torch.testing.assert_close(split_gradient, gradient, rtol=1e-5, atol=1e-8)
    assert sum(losses).item() == pytest.approx(loss.item(), rel=1e-6)
    added = parts[0] + parts[1] + parts[2]
    for name, value in vars(added).items():
        torch.testing.assert_close(value, getattr(whole, name), msg=name)


def test_a_block_is_accepted_up_to_its_first_wrong_draft():
    hidden, labels, counts, weight, _ = problem(seed=3)
    _, sums = block_loss(hidden, labels, counts, lambda x: x @ weight.T, Objective(4.0, 0.0, TAUGHT, 1.0))
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
    loss, _ = block_loss(hidden, labels, counts, lambda x: x @ weight.T, objective, teacher_states=teacher)
    loss.backward()
    assert loss.item() == 0 and hidden.grad.abs().max() == 0


def test_slot_weights_decay_from_one():
    assert slot_decay(3, 4.0).tolist() == pytest.approx([1, math.exp(-0.25), math.exp(-0.5)])
    assert slot_decay(3, None).tolist() == slot_decay(3, math.inf).tolist() == [1, 1, 1]
