"""The target's states and modules as training takes them; the target stays as it was."""

import copy

import pytest
import torch

from hyperdflash.trainer.states import (
    STATE_DTYPES,
    CachedTargetStates,
    DocumentStates,
    LiveTargetStates,
    TargetModules,
)


@pytest.fixture
def fresh_target(make_target):
    return make_target()


def multi_layer(make_drafter, target):
    return make_drafter(
        target, context_source="multi_layer", reducer="fc", path_norm="none", target_layer_ids=[0, 2]
    ).config


def test_the_residual_goes_through_hc_head_and_norm_to_the_targets_own_logits(fresh_target, drafter):
    input_ids = torch.randint(3, 60, (2, 40))
    with torch.no_grad():
        logits = fresh_target(input_ids).logits
    states = LiveTargetStates(fresh_target, drafter.config)
    found = states(input_ids, torch.ones_like(input_ids))
    assert torch.equal(found.context, found.residual)
    modules = states.modules
    assert torch.equal(modules.logits(modules.teacher_states(found.residual, "hc_head")), logits)
    pooled = modules.norm(found.residual.mean(2))
    assert torch.equal(modules.teacher_states(found.residual, "mean"), pooled)


def test_multi_layer_context_is_the_output_of_the_named_layers_side_by_side(fresh_target, make_drafter):
    input_ids = torch.randint(3, 60, (2, 40))
    config = multi_layer(make_drafter, fresh_target)
    found = LiveTargetStates(fresh_target, config)(input_ids, torch.ones_like(input_ids))
    fresh_target.config.tie_last_hidden_states = False
    with torch.no_grad():
        hidden = fresh_target(input_ids, output_hidden_states=True).hidden_states
    assert torch.equal(found.context, torch.cat([hidden[1], hidden[3]], dim=-1))  # entry 0 is the embedding
    assert torch.equal(found.residual, hidden[3])


def test_states_of_a_document_do_not_depend_on_its_padding(fresh_target, drafter):
    states = LiveTargetStates(fresh_target, drafter.config)
    document = torch.randint(3, 60, (1, 37))
    padded = torch.full((1, 64), 2)
    padded[:, :37] = document
    mask = (torch.arange(64) < 37).long().unsqueeze(0)
    alone = states(document, torch.ones_like(document)).residual
    torch.testing.assert_close(states(padded, mask).residual[:, :37], alone, rtol=1e-5, atol=1e-5)


def count_hooks(model):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_the_target_stays_bit_identical_and_free_of_hooks(fresh_target, make_drafter):
    input_ids = torch.randint(3, 60, (1, 40))
    before = copy.deepcopy(fresh_target.state_dict())
    with torch.no_grad():
        wanted = fresh_target(input_ids, output_hidden_states=True)
    hooks = count_hooks(fresh_target)  # transformers leaves its own, to record hidden states
    LiveTargetStates(fresh_target, multi_layer(make_drafter, fresh_target))(input_ids, torch.ones_like(input_ids))
    with torch.no_grad():
        found = fresh_target(input_ids, output_hidden_states=True)
    assert count_hooks(fresh_target) == hooks
    assert torch.equal(found.logits, wanted.logits)
    assert all(map(torch.equal, found.hidden_states, wanted.hidden_states))
    assert all(torch.equal(value, before[name]) for name, value in fresh_target.state_dict().items())


def test_hooks_are_removed_when_the_target_fails(fresh_target, drafter):
    states = LiveTargetStates(fresh_target, drafter.config)
    with pytest.raises(IndexError):
        states(torch.full((1, 4), 10_000), torch.ones(1, 4, dtype=torch.long))
    assert not fresh_target.model.hc_head._forward_pre_hooks


def test_a_block_holds_the_anchors_embedding_and_then_the_mask_tokens(target):
    modules = TargetModules.of(target)
    blocks = modules.embed_blocks(torch.tensor([[5, 9]]), mask_token_id=63, block_size=3)
    ids = torch.tensor([[5, 63, 63, 9, 63, 63]])
    assert torch.equal(blocks, target.get_input_embeddings()(ids))


def ragged(lengths=(40, 23, 31)):
    """Token ids `[b, s]` of documents of these lengths, padded on the right, and their mask."""
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return torch.randint(3, 60, mask.shape).masked_fill(mask == 0, 2), mask


def assert_same_bits(found, wanted, mask):
    for name in ("context", "residual"):
        a, b = (getattr(states, name)[mask.bool()] for states in (found, wanted))
        assert a.dtype == b.dtype and torch.equal(a, b), name


def count_calls(states, monkeypatch):
    """The list to which each run of the target behind `states` adds its batch size."""
    calls, run = [], states._run
    monkeypatch.setattr(states, "_run", lambda ids: calls.append(len(ids)) or run(ids))
    return calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_depend_on_nothing_but_the_document(make_target, drafter, dtype):
    states = LiveTargetStates(make_target().to(dtype), drafter.config)
    ids, mask = ragged()
    together = states(ids, mask)
    for rows in ([2], [1, 0], [2, 1]):
        wanted = DocumentStates(context=together.context[rows], residual=together.residual[rows])
        assert_same_bits(states(ids[rows], mask[rows]), wanted, mask[rows])
    wider = (torch.nn.functional.pad(values, (0, 24)) for values in (ids, mask))
    assert torch.equal(states(*wider).residual[:, :40][mask.bool()], together.residual[mask.bool()])


def test_documents_run_together_where_that_is_asked_for(fresh_target, drafter, monkeypatch):
    ids, mask = ragged()
    wanted = LiveTargetStates(fresh_target, drafter.config)(ids, mask)
    states = LiveTargetStates(fresh_target, drafter.config, batch_size=2)
    calls = count_calls(states, monkeypatch)
    found = states(ids, mask)
    assert calls == [2, 1]
    torch.testing.assert_close(found.residual[mask.bool()], wanted.residual[mask.bool()], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", STATE_DTYPES.values())
@pytest.mark.parametrize("source", ["pre_hc_head", "multi_layer"])
def test_kept_states_are_the_live_ones_to_the_bit_and_made_once(
    fresh_target, make_drafter, drafter, source, dtype, monkeypatch
):
    config = drafter.config if source == "pre_hc_head" else multi_layer(make_drafter, fresh_target)
    live = LiveTargetStates(fresh_target, config, dtype=dtype)
    asked = LiveTargetStates(fresh_target, config)
    calls = count_calls(asked, monkeypatch)
    made = []
    kept = CachedTargetStates({}, live.modules, dtype, lambda: made.append(1) or asked)
    assert not made
    ids, mask = ragged()
    for rows in ([0, 1], [1, 2], [2, 0, 1], [1, 1]):
        found = kept(ids[rows], mask[rows])
        assert_same_bits(found, live(ids[rows], mask[rows]), mask[rows])
        assert (found.context is found.residual) == (source == "pre_hc_head")
    assert calls == [1, 1, 1] and made == [1]
    kept.check_complete([row[: length.sum()].tolist() for row, length in zip(ids, mask)])
    again = CachedTargetStates(kept.rows, live.modules, dtype)
    assert_same_bits(again(ids, mask), live(ids, mask), mask)
    with pytest.raises(ValueError, match=r"1 documents, the first in row 1.*states_source 'fill'"):
        again.check_complete([ids[0].tolist(), ids[0, :-1].tolist()])
    with pytest.raises(ValueError, match=r"document of 39 tokens that begins \["):
        again(ids[:1, :-1], mask[:1, :-1])


def random_states(scale):
    """Streams of very different size, as DeepSeek-V4's are, and a token of zeros. `[n, m, d]`."""
    states = torch.randn(50, 4, 64, generator=torch.Generator().manual_seed(0))
    states *= torch.tensor([1e-3, 1.0, 30.0, 1e3])[:, None] * scale
    states[7] = 0
    return states


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
@pytest.mark.parametrize("layers", [0, 3])
def test_float8_keeps_every_stream_to_a_sixteenth_whatever_its_size(scale, layers):
    residual = random_states(scale)
    parts = [residual * factor for factor in (1e-3, 1.0, 1e3)[:layers]]
    context = torch.cat(parts, dim=-1) if layers else residual
    packed = DocumentStates(context=context, residual=residual).pack(torch.float8_e4m3fn)
    bytes_a_token = sum(values[0].nbytes for values in packed.values())
    assert bytes_a_token == 4 * (64 + 2) * (1 + layers)  # a byte a number, a scale of 2 a stream and layer
    for name in ("residual_scale", "context_scale")[: 1 + bool(layers)]:
        assert (torch.frexp(packed[name].float()).mantissa == 0.5).all()  # powers of two
    found = DocumentStates.unpack(packed)
    for kept, wanted in ((found.residual, residual), (found.context, context)):
        assert kept.dtype == torch.bfloat16 and kept.shape == wanted.shape
        groups = wanted.unflatten(-1, (-1, 64))
        error = (kept.double() - wanted.double()).unflatten(-1, (-1, 64)).abs()
        smallest = groups.abs().amax(dim=-1, keepdim=True).double() * 2**-17  # below, e4m3 has fewer bits
        assert (error <= groups.abs().double() / 16 + smallest).all()
    again = DocumentStates.unpack(found.pack(torch.float8_e4m3fn))
    assert torch.equal(again.residual, found.residual) and torch.equal(again.context, found.context)


def test_states_of_the_targets_own_type_are_kept_as_they_are():
    states = random_states(1.0).bfloat16()
    found = DocumentStates.unpack(DocumentStates(context=states, residual=states).pack(torch.bfloat16))
    assert torch.equal(found.residual, states) and found.context is found.residual
    wider = DocumentStates(context=states, residual=states).pack(torch.float32)["residual"]
    assert wider.dtype == torch.float32 and torch.equal(wider.bfloat16(), states)
