"""The MTP module computes what the design says: against the naive module of `conftest.py`."""

import pytest
import torch
from transformers import AutoConfig, AutoModel, DynamicCache

from hyperdflash.baselines import MtpConfig, MtpModel
from hyperdflash.generation_hyperdflash import make_rewindable

LENGTH = 20  # the tests' window is 12


@pytest.fixture(scope="module")
def pairs(target):
    """Embeddings `[1, s, d]` of tokens and the target's streams `[1, s, m, d]` before them."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 60, (1, LENGTH + 1), generator=generator)
    captured = []
    handle = target.model.hc_head.register_forward_pre_hook(lambda module, args: captured.append(args[0]))
    with torch.no_grad():
        target(ids)
        embeds = target.get_input_embeddings()(ids[:, 1:])
    handle.remove()
    return embeds, captured[0][:, :-1]


def naive_logits(naive, target, pairs, firsts, depths):
    head = target.lm_head.weight.double()
    return torch.stack([naive.steps(pairs[0][0], pairs[1][0], first, depths) @ head.T for first in firsts])


@torch.no_grad()
def test_teacher_forced_logits_are_those_of_the_naive_module(target, mtp, naive, pairs):
    logits = target.lm_head(mtp(*pairs).last_hidden_state)[0]  # [s, vocab]
    wanted = naive_logits(naive(mtp), target, pairs, range(LENGTH), 1)[:, 0]
    torch.testing.assert_close(logits.double(), wanted, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_the_recursions_logits_are_those_of_the_naive_module_at_every_depth(target, mtp, naive, pairs):
    firsts = [0, 1, 9, 14]
    outputs = mtp(*pairs, first_pairs=torch.tensor([firsts]), num_depths=6).last_hidden_state
    wanted = naive_logits(naive(mtp), target, pairs, firsts, 6)
    torch.testing.assert_close(target.lm_head(outputs)[0].double(), wanted, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("fault", ["no_hnorm", "wrong_position"])
def test_a_fault_in_the_module_is_seen(target, mtp, naive, pairs, fault):
    outputs = mtp(*pairs, first_pairs=torch.tensor([[9]]), num_depths=3).last_hidden_state
    wrong = naive_logits(naive(mtp, [fault]), target, pairs, [9], 3)
    assert (target.lm_head(outputs)[0].double() - wrong).abs().max() > 1e-3


@torch.no_grad()
def test_steps_on_a_cache_of_pairs_that_were_read_are_the_recursion(mtp, pairs):
    embeds, streams = pairs
    for first in (0, 5, 13):
        wanted = mtp(embeds, streams, first_pairs=torch.tensor([[first]]), num_depths=4).last_hidden_state[0, 0]
        cache = make_rewindable(DynamicCache(config=mtp.config), max_rollback=4)
        if first:
            mtp.read(embeds[:, :first], streams[:, :first], torch.arange(first)[None], cache)
        state = streams[:, first : first + 1]
        for depth in range(4):
            outputs = mtp(embeds[:, first + depth, None], state, cache=cache)
            torch.testing.assert_close(outputs.last_hidden_state[0, 0], wanted[depth], atol=1e-5, rtol=1e-5)
            state = outputs.streams


def test_recursions_do_not_see_each_other_nor_what_follows_them(mtp, pairs):
    embeds, streams = (value.clone() for value in pairs)
    together = mtp(embeds, streams, first_pairs=torch.tensor([[2, 7, 8]]), num_depths=3).last_hidden_state
    for index, first in enumerate([2, 7, 8]):
        changed = streams.clone()
        changed[:, first + 1 :] += 1.0
        alone = mtp(embeds, changed, first_pairs=torch.tensor([[first]]), num_depths=3).last_hidden_state
        torch.testing.assert_close(alone[:, 0], together[:, index], atol=1e-6, rtol=1e-6)


def test_gradients_reach_every_weight(mtp, pairs):
    mtp.zero_grad()
    mtp(*pairs, first_pairs=torch.arange(LENGTH - 3)[None], num_depths=3).last_hidden_state.square().mean().backward()
    still = [name for name, parameter in mtp.named_parameters() if parameter.grad is None or not parameter.grad.any()]
    assert not still
    mtp.zero_grad()


def test_a_saved_module_loads_as_an_automodel_with_the_same_outputs(mtp, pairs, tmp_path):
    mtp.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path).eval()
    assert type(loaded) is MtpModel and type(AutoConfig.from_pretrained(tmp_path)) is MtpConfig
    assert not any("embed_tokens" in name or "lm_head" in name for name in loaded.state_dict())
    with torch.no_grad():
        assert torch.equal(loaded(*pairs).last_hidden_state, mtp(*pairs).last_hidden_state)


@pytest.mark.parametrize("depths", [0, 12])
def test_a_recursion_outside_the_window_is_refused(target, depths):
    with pytest.raises(ValueError, match=f"MtpConfig.mtp_depths: found {depths}, wanted 1 to 11"):
        MtpConfig.of_target(target.config, mtp_depths=depths)
