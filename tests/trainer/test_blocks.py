"""Anchors, labels, positions and masks of the blocks, each against a loop that spells the rule out."""

import pytest
import torch

from hyperdflash.configuration_hyperdflash import BlockGeometry
from hyperdflash.trainer.blocks import (
    block_mask,
    document_generator,
    draw_anchors,
    eligible_anchors,
    position_ids,
    slot_labels,
)

GEOMETRIES = [BlockGeometry(2), BlockGeometry(7), BlockGeometry(4, sample_from_anchor=True)]


def random_labels(seed, rows=4, length=30):
    """Labels with supervised stretches, gaps and padding."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, 60, (rows, length), generator=generator)
    labels[torch.rand(rows, length, generator=generator) < 0.15] = -100
    for row in range(rows):
        labels[row, length - 3 * row :] = -100
        labels[row, : 2 * row] = -100
    return labels


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("seed", range(5))
def test_an_anchor_is_eligible_iff_something_stands_before_it_and_its_first_draft_is_supervised(geometry, seed):
    labels = random_labels(seed)
    eligible = eligible_anchors(labels, geometry)
    for row, tokens in enumerate(labels.tolist()):
        for anchor in range(len(tokens)):
            first = anchor + 1  # whichever slot drafts it, the first draft is the token after the anchor
            wanted = anchor >= 1 and first < len(tokens) and tokens[first] != -100
            assert eligible[row, anchor] == wanted


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("seed", range(5))
def test_a_slot_counts_iff_all_drafts_up_to_it_are_supervised_tokens_of_the_document(geometry, seed):
    labels = random_labels(seed)
    anchors = torch.arange(labels.shape[1]).expand(len(labels), -1)
    found, counts = slot_labels(labels, anchors, geometry)
    for row, tokens in enumerate(labels.tolist()):
        for anchor in range(len(tokens)):
            alive = anchor >= 1
            for index, slot in enumerate(range(0 if geometry.sample_from_anchor else 1, geometry.block_size)):
                predicted = anchor + (slot + 1 if geometry.sample_from_anchor else slot)
                alive = alive and predicted < len(tokens) and tokens[predicted] != -100
                assert counts[row, anchor, index] == alive
                assert found[row, anchor, index] == (tokens[predicted] if alive else -100)


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("window", [None, 8])
def test_a_slot_sees_its_own_block_and_the_context_before_its_anchor_within_the_window(geometry, window):
    anchors = torch.tensor([[1, 5, 6, 19], [3, 10, 0, 0]])
    length, size = 20, geometry.block_size
    mask = block_mask(anchors, length, geometry, window)
    positions = position_ids(anchors, length, geometry)
    queries = anchors.shape[1] * size
    assert mask.shape == (2, 1, queries, length + queries)
    for row in range(2):
        assert positions[row, :length].tolist() == list(range(length))
        for query in range(queries):
            anchor, slot = anchors[row, query // size].item(), query % size
            assert positions[row, length + query] == anchor + slot
            for key in range(length):
                distance = anchor + slot - key
                assert mask[row, 0, query, key] == (key < anchor and (window is None or distance < window))
            for key in range(queries):
                if anchor:  # the blocks at 0 fill up a row and count nowhere
                    assert mask[row, 0, query, length + key] == (query // size == key // size)
            assert mask[row, 0, query].any()


def batch(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(3, 60, (len(lengths), max(lengths)), generator=generator)
    attention_mask = torch.zeros_like(input_ids)
    for row, length in enumerate(lengths):
        attention_mask[row, :length] = 1
    input_ids[attention_mask == 0] = 2
    return input_ids, input_ids.masked_fill(attention_mask == 0, -100), attention_mask


def test_anchors_are_drawn_without_replacement_among_the_eligible_ones():
    geometry = BlockGeometry(7)
    documents = batch([40, 12, 3, 25])
    eligible = eligible_anchors(documents[1], geometry)
    anchors = draw_anchors(*documents, geometry, 16, seed=0, step=3)
    assert anchors.shape == (4, 16)
    for row, drawn in enumerate(anchors.tolist()):
        drawn = [anchor for anchor in drawn if anchor]
        assert len(drawn) == len(set(drawn)) == min(16, eligible[row].sum())
        assert drawn == sorted(drawn)
        assert eligible[row, drawn].all()


def test_every_eligible_anchor_is_drawn_equally_often():
    geometry = BlockGeometry(7)
    documents = batch([22])
    drawn = torch.cat([draw_anchors(*documents, geometry, 5, seed=0, step=step)[0] for step in range(2000)])
    counts = drawn.bincount(minlength=22)[1:21]  # 20 eligible anchors, 10,000 draws
    assert counts.min() > 400 and counts.max() < 600


def test_anchors_depend_on_seed_step_and_document_but_not_on_row_neighbours_or_padding():
    geometry = BlockGeometry(7)
    input_ids, labels, attention_mask = batch([40, 33, 38])

    def draw(rows, seed=0, step=0, cut=40):
        cut_batch = (x[rows, :cut] for x in (input_ids, labels, attention_mask))
        return draw_anchors(*cut_batch, geometry, 8, seed, step)

    together = draw([0, 1, 2])
    assert torch.equal(together, draw([0, 1, 2]))
    assert torch.equal(together[[2, 1]], draw([2, 1]))
    assert torch.equal(together[1:2], draw([1], cut=33))
    assert not torch.equal(together, draw([0, 1, 2], step=1))
    assert not torch.equal(together, draw([0, 1, 2], seed=1))
    first, second = (torch.rand(4, generator=document_generator(input_ids[row], 0, 0)) for row in (0, 1))
    assert not torch.equal(first, second)


def test_a_batch_without_any_eligible_anchor_has_blocks_that_count_nowhere():
    geometry = BlockGeometry(7)
    input_ids, labels, attention_mask = batch([5, 4])
    labels.fill_(-100)
    anchors = draw_anchors(input_ids, labels, attention_mask, geometry, 8, 0, 0)
    assert anchors.tolist() == [[0], [0]]
    assert not slot_labels(labels, anchors, geometry)[1].any()
