"""The target's states and modules as training takes them; the target stays as it was."""

import copy

import pytest
import torch

from hyperdflash.trainer.states import LiveTargetStates, RememberedTargetStates, TargetModules


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


@pytest.mark.parametrize("source", ["pre_hc_head", "multi_layer"])
def test_remembered_states_are_the_sources_own_and_ask_it_once_a_document(fresh_target, make_drafter, drafter, source):
    config = drafter.config if source == "pre_hc_head" else multi_layer(make_drafter, fresh_target)
    live = LiveTargetStates(fresh_target, config)
    asked = []

    class Counting(LiveTargetStates):
        def __call__(self, input_ids, attention_mask):
            asked.append(len(input_ids))
            return super().__call__(input_ids, attention_mask)

    remembered = RememberedTargetStates(Counting(fresh_target, config))
    ids = torch.randint(3, 60, (3, 40))
    lengths = torch.tensor([40, 23, 31])
    mask = (torch.arange(40) < lengths[:, None]).long()
    for rows in ([0, 1], [1, 2], [2, 0, 1]):
        found, wanted = remembered(ids[rows], mask[rows]), live(ids[rows], mask[rows])
        for row, length in enumerate(lengths[rows].tolist()):
            for name in ("context", "residual"):
                a, b = getattr(found, name)[row, :length], getattr(wanted, name)[row, :length]
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert asked == [2, 1]
