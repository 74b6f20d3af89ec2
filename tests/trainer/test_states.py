"""The target's states and modules as training takes them; the target stays as it was."""

import copy

import pytest
import torch

from hyperdflash.trainer.states import LiveTargetStates, TargetModules


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
    found = states(input_ids)
    assert torch.equal(found.context, found.residual)
    modules = states.modules
    assert torch.equal(modules.logits(modules.teacher_states(found.residual, "hc_head")), logits)
    pooled = modules.norm(found.residual.mean(2))
    assert torch.equal(modules.teacher_states(found.residual, "mean"), pooled)


def test_multi_layer_context_is_the_output_of_the_named_layers_side_by_side(fresh_target, make_drafter):
    input_ids = torch.randint(3, 60, (2, 40))
    config = multi_layer(make_drafter, fresh_target)
    found = LiveTargetStates(fresh_target, config)(input_ids)
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
    torch.testing.assert_close(states(padded).residual[:, :37], states(document).residual, rtol=1e-5, atol=1e-5)


def count_hooks(model):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_the_target_stays_bit_identical_and_free_of_hooks(fresh_target, make_drafter):
    input_ids = torch.randint(3, 60, (1, 40))
    before = copy.deepcopy(fresh_target.state_dict())
    with torch.no_grad():
        wanted = fresh_target(input_ids, output_hidden_states=True)
    hooks = count_hooks(fresh_target)  # transformers leaves its own, to record hidden states
    LiveTargetStates(fresh_target, multi_layer(make_drafter, fresh_target))(input_ids)
    with torch.no_grad():
        found = fresh_target(input_ids, output_hidden_states=True)
    assert count_hooks(fresh_target) == hooks
    assert torch.equal(found.logits, wanted.logits)
    assert all(map(torch.equal, found.hidden_states, wanted.hidden_states))
    assert all(torch.equal(value, before[name]) for name, value in fresh_target.state_dict().items())


def test_hooks_are_removed_when_the_target_fails(fresh_target, drafter):
    states = LiveTargetStates(fresh_target, drafter.config)
    with pytest.raises(IndexError):
        states(torch.full((1, 4), 10_000))
    assert not fresh_target.model.hc_head._forward_pre_hooks


def test_a_block_holds_the_anchors_embedding_and_then_the_mask_tokens(target):
    modules = TargetModules.of(target)
    blocks = modules.embed_blocks(torch.tensor([[5, 9]]), mask_token_id=63, block_size=3)
    ids = torch.tensor([[5, 63, 63, 9, 63, 63]])
    assert torch.equal(blocks, target.get_input_embeddings()(ids))
