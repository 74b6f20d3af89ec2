"""Sparse attention in training equals attention under the dense mask, forward and backward, and looks at less."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

from hyperdflash.configuration_hyperdflash import BlockGeometry
from hyperdflash.trainer import attention
from hyperdflash.trainer.attention import (
    BlockSparseMask,
    attention_masks,
    block_sparse_attention,
    block_sparse_attention_forward,
    flex_mask,
)
from hyperdflash.trainer.blocks import block_mask
from hyperdflash.trainer.drafting import draft_hidden_states
from hyperdflash.trainer.states import LiveTargetStates

GEOMETRIES = [BlockGeometry(7), BlockGeometry(4, sample_from_anchor=True)]
LENGTH = 40
ANCHORS = torch.tensor([[1, 2, 3, 9, 20, 21, 33, 39], [4, 17, 18, 30, 0, 0, 0, 0], [0] * 8])  # 0: no block


@pytest.fixture(params=[1, 3, 32])
def blocks_per_piece(request, monkeypatch):
    monkeypatch.setattr(attention, "BLOCKS_PER_PIECE", request.param)


def states(heads, queries, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(ANCHORS), heads, queries, 8, generator=generator, dtype=dtype).requires_grad_()


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("window", [None, 8])
def test_outputs_and_gradients_equal_softmax_under_the_dense_mask(geometry, window, kv_heads, blocks_per_piece):
    queries = ANCHORS.shape[1] * geometry.block_size
    inputs = [states(heads, n, i) for i, (heads, n) in enumerate([(4, queries), *[(kv_heads, LENGTH + queries)] * 2])]
    mask = BlockSparseMask.of(ANCHORS, LENGTH, geometry, window, torch.float64)
    found, _ = block_sparse_attention_forward(None, *inputs, mask, scaling=0.3)

    query, key, value = inputs
    key, value = (x.repeat_interleave(4 // kv_heads, dim=1) for x in (key, value))
    scores = (query @ key.transpose(2, 3) * 0.3).masked_fill(
        ~block_mask(ANCHORS, LENGTH, geometry, window), -torch.inf
    )
    wanted = (scores.softmax(-1) @ value).transpose(1, 2)

    real = (ANCHORS > 0).repeat_interleave(geometry.block_size, dim=1)  # [b, A * B]
    torch.testing.assert_close(found[real], wanted[real])
    weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(9), dtype=wanted.dtype)
    weights[~real] = 0
    gradients, wanted_gradients = (torch.autograd.grad((x * weights).sum(), inputs) for x in (found, wanted))
    for gradient, wanted_gradient in zip(gradients, wanted_gradients):
        assert wanted_gradient.abs().max() > 0.1
        torch.testing.assert_close(gradient, wanted_gradient)


def test_weights_are_dropped_in_the_mean_as_often_as_asked():
    queries = ANCHORS.shape[1] * 7
    inputs = [states(2, n, i).detach() for i, n in enumerate((queries, LENGTH + queries, LENGTH + queries))]
    inputs[2] = torch.ones_like(inputs[2])  # values of 1: the output is the sum of the weights that are left
    mask = BlockSparseMask.of(ANCHORS, LENGTH, GEOMETRIES[0], None, torch.float64)
    torch.manual_seed(0)
    sums, _ = block_sparse_attention_forward(None, *inputs, mask, scaling=0.3, dropout=0.5)
    assert sums.std() > 0.1 and abs(sums.mean() - 1) < 0.05


@pytest.mark.parametrize("window", [None, 8])
def test_a_piece_holds_the_context_that_its_blocks_see_and_no_other(window, blocks_per_piece):
    geometry, size = GEOMETRIES[0], attention.BLOCKS_PER_PIECE
    mask = BlockSparseMask.of(ANCHORS, LENGTH, geometry, window)
    for row, pieces in zip(ANCHORS.tolist(), mask.rows):
        assert sum(len(piece.mask) for piece in pieces) == len(row) * geometry.block_size
        for index, piece in enumerate(pieces):
            anchors = [anchor for anchor in row[index * size : (index + 1) * size] if anchor]
            first = 0 if window is None or not anchors else max(0, anchors[0] - window + 1)
            assert piece.context == slice(first, anchors[-1] if anchors else 0)


def drafted(target, drafter, implementation, autocast=False):
    """`[n, D, d]`, outputs on the draft slots of the blocks that there are, and the gradients of the parameters."""
    drafter.set_attn_implementation(implementation)
    drafter.zero_grad()
    text = torch.randint(3, 60, (len(ANCHORS), LENGTH), generator=torch.Generator().manual_seed(0))
    source = LiveTargetStates(target, drafter.config)
    found = source(text, torch.ones_like(text))
    with block_sparse_attention(drafter.config), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        hidden = draft_hidden_states(drafter, source.modules, found, text, ANCHORS)[ANCHORS > 0]
        if torch.is_grad_enabled():
            hidden.float().square().mean(-1).sqrt().sum().backward()
    return hidden.float(), {name: parameter.grad for name, parameter in drafter.named_parameters()}


@pytest.mark.parametrize("sample_from_anchor", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_drafter_trains_alike_under_the_dense_mask(
    sample_from_anchor, checkpointing, target, make_drafter, blocks_per_piece
):
    drafter = make_drafter(target, sliding_window=9, num_attention_heads=4, sample_from_anchor=sample_from_anchor)
    drafter.train()
    if checkpointing:
        drafter.activation_checkpointing_enable()
    wanted, wanted_gradients = drafted(target, drafter, "eager")
    found, gradients = drafted(target, drafter, "sdpa")
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted_gradients[name], rtol=1e-3, atol=1e-4, msg=name)


def test_bfloat16_autocast_gives_bfloat16s_rounding_and_no_more(target, make_drafter):
    drafter = make_drafter(target, sliding_window=9)
    exact, _ = drafted(target, drafter, "eager")
    rounded, _ = drafted(target, drafter, "eager", autocast=True)
    found, _ = drafted(target, drafter, "sdpa", autocast=True)
    assert 0 < (found - exact).norm() < 1.5 * (rounded - exact).norm()


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("window", [None, 8])
def test_the_predicate_for_flex_attention_is_the_dense_mask(geometry, window):
    mask = flex_mask(ANCHORS, LENGTH, geometry, window)
    queries = ANCHORS.shape[1] * geometry.block_size
    found = create_mask(mask.mask_mod, len(ANCHORS), 1, queries, LENGTH + queries, "cpu")
    assert torch.equal(found, block_mask(ANCHORS, LENGTH, geometry, window))


def test_flex_attention_drafts_alike(target, make_drafter):
    drafter = make_drafter(target, sliding_window=9)
    with torch.no_grad():  # torch has no backward of flex attention on CPUs
        wanted, found = (drafted(target, drafter, name)[0] for name in ("eager", "flex_attention"))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_block_sparse_stands_in_for_sdpa_alone_and_only_while_it_is_asked_to(target, make_drafter):
    drafter = make_drafter(target)
    for name, inside in (("sdpa", attention.BLOCK_SPARSE), ("eager", "eager"), ("flex_attention", "flex_attention")):
        drafter.set_attn_implementation(name)
        with pytest.raises(KeyboardInterrupt):
            with block_sparse_attention(drafter.config):
                assert drafter.config._attn_implementation == inside
                assert attention.BLOCK_SPARSE not in drafter.config.to_json_string(use_diff=False)
                raise KeyboardInterrupt
        assert drafter.config._attn_implementation == name


def test_a_block_drafted_by_itself_is_the_same_while_a_step_runs(target, make_drafter):
    drafter = make_drafter(target, sliding_window=9)
    noise, context = torch.randn(1, 7, 32), torch.randn(1, 20, 4, 32)
    with torch.no_grad():
        wanted = drafter(noise, context).last_hidden_state
        with block_sparse_attention(drafter.config):
            assert torch.equal(drafter(noise, context).last_hidden_state, wanted)


def test_an_implementation_without_such_masks_is_refused_by_name():
    config = SimpleNamespace(
        layer_types=["full_attention"], geometry=GEOMETRIES[0], _attn_implementation="flash_attention_2"
    )
    with pytest.raises(ValueError, match="attn_implementation: found 'flash_attention_2', wanted"):
        attention_masks(ANCHORS, LENGTH, config, torch.float32)
