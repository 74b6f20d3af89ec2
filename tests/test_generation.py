"""`generate(..., assistant_model=drafter)` on DeepSeek-V4: the text of the target alone, and nothing left behind."""

import copy
import importlib.util
import inspect
import json
import random
import sys
import threading

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, LlamaConfig, LlamaForCausalLM, StoppingCriteria
from transformers.generation import utils as generation_utils
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerationMixin

from hyperdflash import generation_hyperdflash
from hyperdflash.generation_hyperdflash import (
    GenerationStatistics,
    HyperDFlashCandidateGenerator,
    confidence_threshold,
    hooks_installed,
    install_hooks,
    remove_hooks,
)
from hyperdflash.trainer.states import LiveTargetStates

HOOKED = ("_validate_generation_mode", "_get_candidate_generator", "_assisted_decoding")


@pytest.fixture(autouse=True)
def hooks():
    install_hooks()
    yield
    remove_hooks()  # of whichever copy the test had installed
    install_hooks()


def prompt(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 60, (1, length), generator=generator)


def plain(target, input_ids, **kwargs):
    return target.generate(input_ids, **({"do_sample": False} | kwargs))


class Oracle:
    """Makes a drafter know the text `ids`: its drafts are right up to a random slot and wrong from there.

    The drafter's own forward still runs, with its cache. Only the output is replaced, by hidden states whose LM head
    logits are highest for the wanted tokens.
    """

    def __init__(self, drafter, target, ids, monkeypatch, seed=0, pads=0, wrong=True):
        self.geometry, self.pads, self.wrong = drafter.config.geometry, pads, wrong
        self.ids = ids[0].tolist()
        self.chance = random.Random(seed)
        self.head = target.lm_head.weight.detach()
        best = (self.head @ self.head.T).argmax(dim=-1)
        assert torch.equal(best, torch.arange(len(best))), "the LM head's rows do not find themselves"
        self.forward = drafter.forward
        self.calls = []
        monkeypatch.setattr(drafter, "forward", self)

    def __call__(self, **inputs):
        self.calls.append(inputs)
        outputs = self.forward(**inputs)
        block_size = inputs["noise_embeds"].shape[1]
        anchor = inputs["position_ids"][0, -block_size].item() + self.pads
        right = self.chance.randrange(self.geometry.num_draft_tokens + 1) if self.wrong else block_size
        hidden_states = outputs.last_hidden_state.clone()
        for index, slot in enumerate(self.geometry.draft_slots):
            position = anchor + 1 + index
            token = self.ids[position] if position < len(self.ids) else 3
            if index >= right:
                token = (token + 1) % len(self.head)
            hidden_states[:, slot] = 4 * self.head[token]
        outputs.last_hidden_state = hidden_states
        return outputs


@pytest.fixture
def oracle(target, drafter, monkeypatch):
    def make(ids, **kwargs):
        return Oracle(drafter, target, ids, monkeypatch, **kwargs)

    return make


class Chunks(BaseStreamer):
    def __init__(self, on_put=None):
        self.chunks, self.ended, self.on_put = [], False, on_put

    def put(self, value):
        self.chunks.append(value.reshape(-1).tolist())
        if self.on_put is not None:
            self.on_put()

    def end(self):
        self.ended = True


# ---------------------------------------------------------------------------------------------------------------------
# The same text
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 5, 11, 12, 13, 16, 33, 130])
def test_greedy_text_is_the_targets_own(target, drafter, length):
    input_ids = prompt(length, seed=length)
    assert torch.equal(
        target.generate(input_ids, assistant_model=drafter, do_sample=False, max_new_tokens=40),
        plain(target, input_ids, max_new_tokens=40),
    )


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 6, 7, 8, 15, 50])
def test_greedy_text_is_the_targets_own_whatever_is_accepted(target, drafter, oracle, max_new_tokens):
    input_ids = prompt(20, seed=1)
    text = plain(target, input_ids, max_new_tokens=max_new_tokens)
    oracle(plain(target, input_ids, max_new_tokens=80), seed=max_new_tokens)
    assert torch.equal(plain(target, input_ids, assistant_model=drafter, max_new_tokens=max_new_tokens), text)
    assert drafter.last_generation.new_tokens == max_new_tokens


def test_all_accept_counts_occur_and_the_text_stays_the_same(target, drafter, oracle):
    input_ids = prompt(25, seed=2)
    text = plain(target, input_ids, max_new_tokens=300)
    oracle(text)
    assert torch.equal(plain(target, input_ids, assistant_model=drafter, max_new_tokens=300), text)
    statistics = drafter.last_generation
    assert set(statistics.accepted_per_round) == set(range(7))
    assert statistics.accepted_length > 3


def test_drafting_from_the_anchor_slot(target, make_drafter, monkeypatch):
    drafter = make_drafter(target, sample_from_anchor=True)
    input_ids = prompt(18, seed=3)
    text = plain(target, input_ids, max_new_tokens=120)
    assert torch.equal(plain(target, input_ids, assistant_model=drafter, max_new_tokens=120), text)
    oracle = Oracle(drafter, target, text, monkeypatch)
    assert torch.equal(plain(target, input_ids, assistant_model=drafter, max_new_tokens=120), text)
    assert set(drafter.last_generation.accepted_per_round) == set(range(8))
    assert drafter.last_generation.num_draft_tokens == 7
    assert oracle.calls[0]["noise_embeds"].shape[1] == 7


@pytest.mark.parametrize(
    "processors",
    [
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 2},
        {"repetition_penalty": 0.6, "min_new_tokens": 30, "eos_token_id": [5, 9, 13]},
        {"suppress_tokens": [27, 28, 16, 5], "exponential_decay_length_penalty": (5, 1.05), "eos_token_id": 1},
        {"bad_words_ids": [[5], [16, 5]], "forced_eos_token_id": 1},
        {"sequence_bias": [[[13], 2.0], [[5, 7], -4.0]], "renormalize_logits": True},
    ],
    ids=lambda processors: "+".join(processors),
)
def test_greedy_text_with_processors_is_the_targets_own(target, drafter, oracle, processors):
    input_ids = prompt(22, seed=4)
    text = plain(target, input_ids, max_new_tokens=60, **processors)
    oracle(text)
    assert torch.equal(plain(target, input_ids, assistant_model=drafter, max_new_tokens=60, **processors), text)
    assert drafter.last_generation.accepted > 5


def test_each_of_several_end_tokens_ends_the_text(target, drafter, oracle):
    input_ids = prompt(20, seed=5)
    free = plain(target, input_ids, max_new_tokens=80)
    oracle(free)
    written = free[0, 20:].tolist()
    never = [token for token in range(64) if token not in written][:2]
    assert len(set(written)) > 20
    for token in sorted(set(written))[::3]:
        text = plain(target, input_ids, max_new_tokens=80, eos_token_id=[token, *never])
        assisted = plain(target, input_ids, assistant_model=drafter, max_new_tokens=80, eos_token_id=[token, *never])
        assert torch.equal(assisted, text)
        assert assisted.shape[1] == 20 + written.index(token) + 1
        assert_consistent(drafter.last_generation, new_tokens=written.index(token) + 1)


class StopAt(StoppingCriteria):
    def __init__(self, pattern):
        self.pattern = pattern

    def __call__(self, input_ids, scores, **kwargs):
        stops = input_ids[0, -len(self.pattern) :].tolist() == self.pattern
        return torch.full((input_ids.shape[0],), stops, dtype=torch.bool)


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_custom_stopping_criterion_ends_the_text_at_its_token(target, drafter, oracle, do_sample):
    input_ids = prompt(20, seed=6)
    free = plain(target, input_ids, max_new_tokens=60)
    oracle(free)
    for stop in range(22, 70, 6):
        criterion = StopAt(free[0, stop - 2 : stop].tolist())
        streamer = Chunks()
        text = plain(target, input_ids, max_new_tokens=60, stopping_criteria=[criterion])
        assisted = target.generate(
            input_ids,
            assistant_model=drafter,
            max_new_tokens=60,
            stopping_criteria=[criterion],
            do_sample=do_sample,
            top_k=1 if do_sample else None,  # sampling, but with one choice
            streamer=streamer,
        )
        assert torch.equal(assisted, text)
        assert sum(streamer.chunks, []) == text[0].tolist()
        assert_consistent(drafter.last_generation, new_tokens=text.shape[1] - 20)


def test_criteria_that_may_read_scores_decode_without_drafts(target, drafter, oracle):
    input_ids = prompt(20, seed=6)
    free = plain(target, input_ids, max_new_tokens=30)
    oracle(free)

    class StopOnScores(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((1,), len(scores) == 9, dtype=torch.bool)

    wanted = {"max_new_tokens": 30, "stopping_criteria": [StopOnScores()]}
    wanted |= {"return_dict_in_generate": True, "output_scores": True}
    output = plain(target, input_ids, assistant_model=drafter, **wanted)
    assert torch.equal(output.sequences, free[:, :29])
    assert drafter.last_generation.rounds == 0
    assert drafter.last_generation.plain_steps == 8


def test_a_streamer_receives_the_text_round_by_round(target, drafter, oracle):
    input_ids = prompt(20, seed=7)
    text = plain(target, input_ids, max_new_tokens=60)
    oracle(text)
    streamer = Chunks()
    plain(target, input_ids, assistant_model=drafter, max_new_tokens=60, streamer=streamer)
    assert streamer.ended
    assert sum(streamer.chunks, []) == text[0].tolist()
    prompt_chunk, first_chunk, *rounds = streamer.chunks
    assert (prompt_chunk, len(first_chunk)) == (input_ids[0].tolist(), 1)
    accepted = drafter.last_generation.accepted_per_round
    assert len(rounds) - drafter.last_generation.plain_steps == len(accepted)
    for chunk, count in zip(rounds[:-1], accepted, strict=False):
        assert len(chunk) == count + 1


@pytest.mark.parametrize("lookup", [False, True])
def test_the_returned_dictionary_is_that_of_plain_generation(target, drafter, oracle, lookup):
    input_ids = torch.cat([prompt(20, seed=8)] * 2, dim=1)
    wanted = {"max_new_tokens": 40, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    wanted |= {"output_hidden_states": True, "output_attentions": True, "repetition_penalty": 1.2}
    reference = plain(target, input_ids, **wanted)
    oracle(reference.sequences)
    assistance = {"prompt_lookup_num_tokens": 5} if lookup else {"assistant_model": drafter}
    output = plain(target, input_ids, **wanted, **assistance)
    assert torch.equal(output.sequences, reference.sequences)
    assert output.keys() == reference.keys()
    assert output.cache.get_seq_length() == reference.cache.get_seq_length()
    for name in ("scores", "logits"):
        assert len(output[name]) == 40
        torch.testing.assert_close(torch.stack(output[name]), torch.stack(reference[name]), atol=1e-4, rtol=0)
    for name in ("hidden_states", "attentions"):
        assert len(output[name]) == 40
        for step, wanted_step in zip(output[name], reference[name], strict=True):
            assert len(step) == len(wanted_step)
            for states, wanted_states in zip(step, wanted_step, strict=True):
                assert states.shape == wanted_states.shape, name
                torch.testing.assert_close(states, wanted_states, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("length, pads", [(9, 1), (20, 5), (30, 16), (60, 37)])
@pytest.mark.parametrize("lookup", [False, True])
def test_left_padded_prompts(target, drafter, oracle, length, pads, lookup):
    input_ids = torch.cat([torch.full((1, pads), 2), prompt(length - pads, seed=length)], dim=1)
    inputs = {"attention_mask": (torch.arange(length) >= pads).long().unsqueeze(0), "max_new_tokens": 90}
    text = plain(target, input_ids, **inputs)
    oracle(text, pads=pads)
    assistance = {"prompt_lookup_num_tokens": 4} if lookup else {"assistant_model": drafter}
    assert torch.equal(plain(target, input_ids, **inputs, **assistance), text)
    if not lookup:
        assert len(set(drafter.last_generation.accepted_per_round)) >= 5


def test_masks_with_holes_and_masks_of_ones(target, drafter, oracle):
    input_ids = prompt(50, seed=9)
    mask = torch.ones_like(input_ids)
    for holes in ([], [10, 11], list(range(20, 40))):
        mask[0, holes] = 0
        text = plain(target, input_ids, attention_mask=mask, max_new_tokens=60)
        calls = oracle(text, pads=int((mask == 0).sum())).calls
        assert torch.equal(
            plain(target, input_ids, attention_mask=mask, assistant_model=drafter, max_new_tokens=60), text
        )
        # What is masked is no context
        assert calls[0]["context_hidden_states"].shape[1] == int(mask.sum())
        assert calls[0]["position_ids"][0].tolist() == list(range(int(mask.sum()) + 7))


def test_the_drafters_own_setting_and_the_calls_setting_shorten_the_draft(target, drafter, oracle, monkeypatch):
    input_ids = prompt(20, seed=10)
    text = plain(target, input_ids, max_new_tokens=60)
    calls = oracle(text).calls
    rows = []
    handle = target.lm_head.register_forward_pre_hook(lambda module, args: rows.append(args[0].shape[1]))
    for number in (1, 2, 5, 6):
        rows.clear()
        output = plain(target, input_ids, assistant_model=drafter, num_assistant_tokens=number, max_new_tokens=60)
        assert torch.equal(output, text)
        statistics = drafter.last_generation
        assert statistics.num_draft_tokens == number
        assert statistics.drafted_per_slot[-1] > 0
        assert {0, number} <= set(statistics.accepted_per_round) <= set(range(number + 1))
        # The LM head sees the drafted slots only, then the drafts and the anchor; the drafter its whole block
        assert rows[1:3] == [number, number + 1]
        assert calls[-1]["noise_embeds"].shape[1] == 7
    handle.remove()

    monkeypatch.setattr(drafter, "generation_config", GenerationConfig(num_assistant_tokens=3), raising=False)
    assert torch.equal(plain(target, input_ids, assistant_model=drafter, max_new_tokens=60), text)
    assert drafter.last_generation.num_draft_tokens == 3
    config = GenerationConfig(num_assistant_tokens=4, max_new_tokens=60, do_sample=False)
    assert torch.equal(target.generate(input_ids, assistant_model=drafter, generation_config=config), text)
    assert drafter.last_generation.num_draft_tokens == 4


@pytest.mark.parametrize("processors", [{}, {"repetition_penalty": 1.2}])
@pytest.mark.parametrize("fields", [{}, {"sequential_head_size": 24}], ids=["parallel", "sequential"])
def test_a_draft_ends_before_the_first_slot_of_low_confidence(target, make_drafter, monkeypatch, fields, processors):
    drafter, confidence = make_drafter(target, **fields), 0.25 if fields else 0.09
    choose, get_candidates = HyperDFlashCandidateGenerator._choose, HyperDFlashCandidateGenerator.get_candidates
    rows, lengths = [], []

    def record_rows(self, input_ids, logits):
        ids, logits = choose(self, input_ids, logits)
        rows.extend(logits[0].double().softmax(-1).amax(-1).tolist())
        return ids, logits

    def check_length(self, input_ids, *args, **kwargs):
        rows.clear()
        ids, logits = get_candidates(self, input_ids, *args, **kwargs)
        if logits is not None:
            drafts = ids.shape[1] - input_ids.shape[1]
            assert logits.shape[1] == drafts >= 1
            assert all(likelihood >= confidence for likelihood in rows[1:drafts])
            assert drafts == 6 or rows[drafts:] == [] or rows[drafts] < confidence
            if rows[drafts:] or drafts == 6:  # else the length budget was shorter than the block
                lengths.append(drafts)
        return ids, logits

    monkeypatch.setattr(HyperDFlashCandidateGenerator, "_choose", record_rows)
    monkeypatch.setattr(HyperDFlashCandidateGenerator, "get_candidates", check_length)
    call = {"assistant_model": drafter, "assistant_confidence_threshold": confidence}
    text = plain(target, prompt(20), max_new_tokens=60, **call, **processors)
    assert torch.equal(text, plain(target, prompt(20), max_new_tokens=60, **processors))
    assert len(set(lengths)) > 2, lengths
    assert drafter.last_generation.drafted < 6 * drafter.last_generation.rounds


def test_the_confidence_may_stand_with_the_drafter_and_must_be_a_probability(target, drafter, monkeypatch):
    own = GenerationConfig(assistant_confidence_threshold=0.4)
    monkeypatch.setattr(drafter, "generation_config", own, raising=False)
    settings = {"assistant_confidence_threshold": 0.4}  # transformers' default: counts as unset
    assert confidence_threshold(drafter, GenerationConfig(**settings)) == 0.4
    own.assistant_confidence_threshold = None
    assert confidence_threshold(drafter, GenerationConfig(**settings)) == 0
    assert confidence_threshold(drafter, GenerationConfig(assistant_confidence_threshold=0.2)) == 0.2
    for found in (1.0, -0.1):
        settings = {"assistant_confidence_threshold": found, "max_new_tokens": 4}
        with pytest.raises(ValueError, match=f"`assistant_confidence_threshold`: found {found}, wanted at least 0"):
            plain(target, prompt(5), assistant_model=drafter, **settings)


# ---------------------------------------------------------------------------------------------------------------------
# The drafter's context
# ---------------------------------------------------------------------------------------------------------------------


def context_of(calls, block_size=7):
    """All context states and their positions that the drafter was given, `[n, m, d]` and `[n]`."""
    states = torch.cat([call["context_hidden_states"] for call in calls], dim=1)[0]
    positions = torch.cat([call["position_ids"][:, :-block_size] for call in calls], dim=1)[0]
    return states, positions


@torch.no_grad()
def reference_states(target, ids, layers):
    """`[s, m, len(layers) * d]` from hooks on the layers themselves, in one forward without a cache."""
    states = {}
    handles = [
        target.model.layers[i].register_forward_hook(lambda m, a, output, i=i: states.update({i: output}))
        for i in layers
    ]
    target(ids)
    for handle in handles:
        handle.remove()
    return torch.cat([states[i] for i in layers], dim=-1)[0]


@pytest.mark.parametrize("source, layers", [("pre_hc_head", [2]), ("multi_layer", [0, 2]), ("multi_layer", [0, 1])])
def test_the_context_is_the_targets_states_of_all_tokens_before_the_anchor(
    target, make_drafter, monkeypatch, source, layers
):
    reducer = "hc_gate" if source == "pre_hc_head" else "fc"
    drafter = make_drafter(target, context_source=source, target_layer_ids=layers, reducer=reducer)
    input_ids = prompt(30, seed=11)
    text = plain(target, input_ids, max_new_tokens=60)
    calls = Oracle(drafter, target, text, monkeypatch).calls
    assert torch.equal(plain(target, input_ids, assistant_model=drafter, max_new_tokens=60), text)
    states, positions = context_of(calls)
    assert positions.tolist() == list(range(len(positions)))
    assert len(positions) > 70
    torch.testing.assert_close(states, reference_states(target, text, layers)[: len(states)], atol=1e-4, rtol=1e-4)
    for call in calls:
        block = call["position_ids"][0, -7:].tolist()
        anchor = block[0]
        assert block == list(range(anchor, anchor + 7))
        wanted = torch.cat([text[:, anchor], torch.full((6,), drafter.config.mask_token_id)])
        assert torch.equal(call["noise_embeds"][0], target.model.embed_tokens(wanted))
        assert call["attention_mask"] is None


def test_the_drafters_forward_sees_what_one_forward_over_the_text_sees(target, drafter, oracle):
    """Its cached, round-by-round context gives the outputs of a single call with the whole context."""
    input_ids = prompt(30, seed=12)
    text = plain(target, input_ids, max_new_tokens=40)
    watcher = oracle(text)
    outputs = []
    forward = watcher.forward

    def record(**inputs):
        result = forward(**inputs)
        outputs.append(result.last_hidden_state.clone())
        return result

    watcher.forward = record
    plain(target, input_ids, assistant_model=drafter, max_new_tokens=40)
    states, _ = context_of(watcher.calls)
    for call, output in zip(watcher.calls, outputs, strict=True):
        anchor = call["position_ids"][0, -7].item()
        with torch.no_grad():
            wanted = forward(
                noise_embeds=call["noise_embeds"],
                context_hidden_states=states[None, :anchor],
                position_ids=torch.arange(anchor + 7)[None],
            )
        torch.testing.assert_close(output, wanted.last_hidden_state, atol=1e-4, rtol=1e-4)


def test_other_forwards_on_the_target_during_the_call_do_not_enter_the_context(target, drafter, oracle):
    input_ids = prompt(20, seed=13)
    wanted = {"max_new_tokens": 60, "return_dict_in_generate": True, "output_hidden_states": True}
    reference = plain(target, input_ids, **wanted)
    calls = oracle(reference.sequences).calls
    other = prompt(33, seed=14)
    plain_text = plain(target, other, max_new_tokens=9)
    same_thread = Chunks(on_put=lambda: target(other, use_cache=True))
    stop = threading.Event()
    texts = []

    def decode_elsewhere():
        while not stop.is_set():
            texts.append(plain(target, other, max_new_tokens=9))

    thread = threading.Thread(target=decode_elsewhere)
    thread.start()
    try:
        output = plain(target, input_ids, assistant_model=drafter, streamer=same_thread, **wanted)
    finally:
        stop.set()
        thread.join()
    assert texts
    assert all(torch.equal(text, plain_text) for text in texts)
    assert torch.equal(output.sequences, reference.sequences)
    states, positions = context_of(calls)
    assert positions.tolist() == list(range(len(positions)))
    text = reference.sequences
    torch.testing.assert_close(states, reference_states(target, text, [2])[: len(states)], atol=1e-4, rtol=1e-4)
    for step, wanted_step in zip(output.hidden_states, reference.hidden_states, strict=True):
        torch.testing.assert_close(step[-1], wanted_step[-1], atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------------------------------------------------------------
# Several turns on one cache
# ---------------------------------------------------------------------------------------------------------------------


def turns(target, assistance, number=3, pads=0, only_new=False, cache=None, new_tokens=30):
    """A conversation on one cache; `assistance` maps a turn to `generate` arguments."""
    cache = DynamicCache(config=target.config) if cache is None else cache
    ids = torch.cat([torch.full((1, pads), 2), prompt(25, seed=20)], dim=1)
    texts = []
    for turn in range(number):
        if turn:
            ids = torch.cat([ids, prompt(1 if turn == 2 else 17, seed=20 + turn)], dim=1)
        mask = (torch.arange(ids.shape[1]) >= pads).long()[None]
        given = ids[:, cache.get_seq_length() :] if only_new else ids
        output = target.generate(
            given, attention_mask=mask, cache=cache, do_sample=False, max_new_tokens=new_tokens, **assistance(turn)
        )
        ids = torch.cat([ids, output[:, given.shape[1] :]], dim=1)
        texts.append(ids)
    return texts


@pytest.mark.parametrize("only_new", [False, True])
@pytest.mark.parametrize("pads", [0, 6])
@pytest.mark.parametrize("lookup", [False, True])
def test_turns_on_one_cache_give_the_targets_own_texts(target, drafter, oracle, only_new, pads, lookup):
    wanted = turns(target, lambda turn: {}, pads=pads, only_new=only_new)
    oracle(wanted[-1], pads=pads)
    assistance = {"prompt_lookup_num_tokens": 4} if lookup else {"assistant_model": drafter}
    cache = DynamicCache(config=target.config)
    texts = turns(target, lambda turn: assistance, pads=pads, only_new=only_new, cache=cache)
    for text, wanted_text in zip(texts, wanted, strict=True):
        assert torch.equal(text, wanted_text)
    assert cache.get_seq_length() == texts[-1].shape[1] - 1
    assert not any(layer.record_past for layer in cache.layers)


def test_the_next_turn_drafts_with_the_whole_conversation_as_context(target, drafter, oracle):
    text = turns(target, lambda turn: {})[-1]
    calls = oracle(text).calls
    turns(target, lambda turn: {"assistant_model": drafter})
    states, positions = context_of(calls)
    assert positions.tolist() == list(range(len(positions)))
    assert len(positions) > 120
    torch.testing.assert_close(states, reference_states(target, text, [2])[: len(states)], atol=1e-4, rtol=1e-4)


def test_after_a_plain_turn_drafting_begins_anew_at_the_right_positions(target, drafter, oracle):
    wanted = turns(target, lambda turn: {})
    for assisted in ([1, 2], [0, 2], [2], [0, 1]):
        calls = oracle(wanted[-1]).calls
        texts = turns(target, lambda turn, a=assisted: {"assistant_model": drafter} if turn in a else {})
        for text, wanted_text in zip(texts, wanted, strict=True):
            assert torch.equal(text, wanted_text)
        states, positions = context_of(calls)
        torch.testing.assert_close(states, reference_states(target, wanted[-1], [2])[positions], atol=1e-4, rtol=1e-4)


def test_a_cropped_copied_or_foreign_cache_begins_without_a_context(target, make_drafter, oracle, drafter):
    text = plain(target, prompt(25, seed=21), max_new_tokens=60)
    oracle(text)
    other = make_drafter(target, seed=5)
    first = {"max_new_tokens": 20, "return_dict_in_generate": True, "assistant_model": drafter}
    for change, again in [
        (lambda cache: copy.deepcopy(cache), drafter),
        (lambda cache: generation_hyperdflash.make_rewindable(cache), drafter),
        (lambda cache: cache, other),
    ]:
        cache = plain(target, text[:, :25], **first).cache
        cache = change(cache)
        assert torch.equal(plain(target, text[:, :45], cache=cache, assistant_model=again, max_new_tokens=40), text)


def test_a_cache_that_was_refilled_to_the_same_length_begins_without_a_context(target, drafter, oracle):
    text = plain(target, prompt(25, seed=22), max_new_tokens=60)
    calls = oracle(text).calls
    wanted = {"max_new_tokens": 20, "return_dict_in_generate": True, "assistant_model": drafter}
    cache = plain(target, prompt(25, seed=23), **wanted).cache
    length = cache.get_seq_length()
    cache.reset()
    target(text[:, :length], cache=cache)
    calls.clear()
    assert torch.equal(plain(target, text[:, :45], cache=cache, assistant_model=drafter, max_new_tokens=40), text)
    assert context_of(calls)[1][0] == length


def test_a_context_dies_with_its_cache(target, drafter):
    before = len(generation_hyperdflash._contexts)
    output = plain(target, prompt(9), assistant_model=drafter, max_new_tokens=9, return_dict_in_generate=True)
    assert len(generation_hyperdflash._contexts) == before + 1
    del output
    assert len(generation_hyperdflash._contexts) == before


def test_a_cache_that_leaves_nothing_to_read_is_refused(target, drafter):
    cache = plain(target, prompt(20), max_new_tokens=5, return_dict_in_generate=True).cache
    length = cache.get_seq_length()
    with pytest.raises(ValueError, match=f"found {length} tokens, wanted more than the {length} tokens in `cache`"):
        plain(target, prompt(length), cache=cache, assistant_model=drafter, max_new_tokens=5)
    with pytest.raises(ValueError, match="`cache`: found one with 0 layers, wanted 3"):
        plain(target, prompt(9), cache=DynamicCache(), assistant_model=drafter, max_new_tokens=5)


# ---------------------------------------------------------------------------------------------------------------------
# Prompt lookup
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 4, 12])
def test_prompt_lookup_gives_the_targets_own_text(target, number):
    input_ids = prompt(16, seed=number).repeat(1, 4)
    text = plain(target, input_ids, max_new_tokens=50)
    # The target wrote the first text itself, so that a lookup of its own words is accepted now and then
    for ids in (input_ids, torch.cat([text, text[:, 64:90]], dim=1)):
        wanted = plain(target, ids, max_new_tokens=50)
        assert torch.equal(plain(target, ids, prompt_lookup_num_tokens=number, max_new_tokens=50), wanted)


def test_prompt_lookup_stops_where_the_target_stops(target):
    input_ids = prompt(16, seed=1).repeat(1, 3)
    free = plain(target, input_ids, max_new_tokens=60)
    for stop in range(51, 100, 12):
        criterion = StopAt(free[0, stop - 2 : stop].tolist())
        text = plain(target, input_ids, max_new_tokens=60, stopping_criteria=[criterion])
        kwargs = {"max_new_tokens": 60, "stopping_criteria": [criterion], "prompt_lookup_num_tokens": 6}
        assert torch.equal(plain(target, input_ids, **kwargs), text)


# ---------------------------------------------------------------------------------------------------------------------
# Sampling
# ---------------------------------------------------------------------------------------------------------------------


class Markov:
    """A DeepSeek-V4 whose next token depends on the current token alone: its attention writes nothing.

    One long sampled text then holds as many independent draws as it has tokens, and their distributions are known:
    one row of a transition table for each current token.
    """

    def __init__(self, make_target, make_drafter, **drafter_fields):
        fields = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"], "mlp_layer_types": ["moe"]}
        fields |= {"n_routed_experts": 2, "num_experts_per_tok": 1, "hc_mult": 2, "hc_sinkhorn_iters": 1}
        self.target = make_target(vocab_size=12, **fields)
        torch.nn.init.zeros_(self.target.model.layers[0].self_attn.o_b_proj.weight)
        self.target.lm_head.weight.data *= 0.33  # flatter distributions: about four of five drafts are accepted
        fields = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"], "sliding_window": 16, "block_size": 11}
        self.drafter = make_drafter(self.target, **fields, **drafter_fields)

    @torch.no_grad()
    def transitions(self, temperature=1.0, top_k=None, top_p=None):
        logits = self.target(torch.arange(12)[:, None]).logits[:, -1] / temperature
        if top_k is not None:
            logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], float("-inf"))
        if top_p is not None:
            ordered, order = logits.sort(descending=True)
            before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
            logits = logits.masked_fill((before >= top_p).scatter(1, order, before >= top_p), float("-inf"))
        return logits.softmax(-1)

    def p_value(self, draws, calls=10, **processors):
        """Chi-squared test of `draws` sampled tokens against the transition table."""
        kwargs = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} | processors
        counts = torch.zeros(12, 12)
        self.statistics = None
        for seed in range(calls):
            torch.manual_seed(seed)
            text = self.target.generate(
                torch.tensor([[3]]),
                assistant_model=self.drafter,
                do_sample=True,
                max_new_tokens=draws // calls,
                pad_token_id=0,
                **kwargs,
            )[0]
            counts.index_put_((text[:-1], text[1:]), torch.ones(len(text) - 1), accumulate=True)
            one = self.drafter.last_generation
            self.statistics = one if self.statistics is None else self.statistics + one
        expected = self.transitions(**processors) * counts.sum(-1, keepdim=True)
        if (counts[expected == 0] > 0).any():
            return 0.0
        # Cells with few expected draws are put together, row by row
        statistic, freedom = 0.0, 0
        for row, wanted in zip(counts, expected, strict=True):
            large = wanted >= 8
            cells = [(row[large], wanted[large])]
            if wanted[~large].sum() >= 8:
                cells.append((row[~large].sum()[None], wanted[~large].sum()[None]))
            found, wanted = (torch.cat(parts) for parts in zip(*cells, strict=True))
            if len(found) > 1:
                wanted = wanted * found.sum() / wanted.sum()
                statistic += ((found - wanted) ** 2 / wanted).sum().item()
                freedom += len(found) - 1
        return torch.special.gammaincc(torch.tensor(freedom / 2.0), torch.tensor(statistic / 2)).item()


@pytest.fixture(scope="module")
def markov(make_target, make_drafter):
    return Markov(make_target, make_drafter)


def test_sampled_tokens_have_the_targets_distribution(markov):
    assert markov.p_value(20_000) > 0.001
    statistics = markov.statistics
    assert statistics.new_tokens == 20_000
    # Drafts are accepted and refused in every slot, so the rule is at work
    assert all(0.3 < rate < 0.95 for rate in statistics.conditional_acceptance_per_slot)
    assert min(statistics.accepted_per_slot) > 200


@pytest.mark.parametrize("processors", [{}, {"temperature": 0.6, "top_k": 5}])
def test_tokens_sampled_with_a_sequential_head_have_the_targets_distribution(make_target, make_drafter, processors):
    markov = Markov(make_target, make_drafter, sequential_head_size=16)
    assert markov.p_value(4_000, calls=2, **processors) > 0.001
    assert markov.statistics.accepted > 400


def test_a_sequential_head_sees_the_draft_before_each_slot(target, make_drafter):
    """The drafts are those of a forward that is given them, one slot later; greedy text is the target's."""
    drafter = make_drafter(target, sequential_head_size=24)
    rounds = []
    get_candidates = HyperDFlashCandidateGenerator.get_candidates

    def record(self, input_ids, *args, **kwargs):
        rounds.append((input_ids, *get_candidates(self, input_ids, *args, **kwargs)))
        return rounds[-1][1:]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HyperDFlashCandidateGenerator, "get_candidates", record)
        text = target.generate(prompt(9), assistant_model=drafter, do_sample=False, max_new_tokens=24)
    assert torch.equal(text, target.generate(prompt(9), do_sample=False, max_new_tokens=24))
    context = LiveTargetStates(target, drafter.config)(text, torch.ones_like(text)).context
    embed, mask = target.get_input_embeddings(), drafter.config.mask_token_id
    drafted = [(known, ids, logits) for known, ids, logits in rounds if logits is not None and logits.shape[1] == 6]
    assert len(drafted) > 5
    with torch.no_grad():
        for known, ids, logits in drafted:
            anchor = known.shape[1] - 1
            noise = torch.tensor([[int(known[0, -1]), *[mask] * 6]])
            before = torch.cat([known[:, -1:], known[:, -1:], ids[:, known.shape[1] : -1]], dim=1)  # [1, 7]
            states = drafter(embed(noise), context[:, :anchor], previous_embeds=embed(before)).last_hidden_state[:, 1:]
            torch.testing.assert_close(target.lm_head(states), logits, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("processors", [{"temperature": 0.6, "top_k": 5}, {"temperature": 1.3, "top_p": 0.8}])
def test_sampled_tokens_have_the_processed_distribution(markov, processors):
    assert markov.p_value(2_500, calls=2, **processors) > 0.001
    assert markov.statistics.accepted > 200


def cut_by_the_draw(self, input_ids, *args, original=HyperDFlashCandidateGenerator.get_candidates, **kwargs):
    """The usual mistake: a draft ends before a token that happened to be an unlikely one."""
    threshold, self.confidence_threshold = self.confidence_threshold, 0
    ids, logits = original(self, input_ids, *args, **kwargs)
    self.confidence_threshold = threshold
    if logits is None:
        return ids, logits
    drafts = ids[0, input_ids.shape[1] :]
    likely = logits[0].softmax(-1)[torch.arange(len(drafts)), drafts] >= threshold
    kept = 1 + int(likely[1:].cumprod(0).sum())
    return ids[:, : input_ids.shape[1] + kept], logits[:, :kept]


@pytest.mark.parametrize("fields", [{}, {"sequential_head_size": 16}], ids=["parallel", "sequential"])
def test_drafts_that_end_by_confidence_keep_the_targets_distribution(make_target, make_drafter, fields):
    markov = Markov(make_target, make_drafter, **fields)
    markov.drafter.generation_config = GenerationConfig(assistant_confidence_threshold=0.16)
    assert markov.p_value(4_000, calls=2) > 0.001
    assert markov.statistics.accepted > 400 and markov.statistics.drafted < 8 * markov.statistics.rounds


def test_drafts_that_end_by_their_own_draw_are_seen(make_target, make_drafter, monkeypatch):
    markov = Markov(make_target, make_drafter)
    markov.drafter.generation_config = GenerationConfig(assistant_confidence_threshold=0.08)
    monkeypatch.setattr(HyperDFlashCandidateGenerator, "get_candidates", cut_by_the_draw)
    assert markov.p_value(10_000, calls=5) < 1e-6


def accept_every_draft(candidate_ids, candidate_logits, length, new_logits, **kwargs):
    bonus = torch.multinomial(new_logits[:, -1].softmax(-1), num_samples=1)
    return torch.cat([candidate_ids[:, -length:], bonus], dim=-1), torch.tensor(length)


def resample_from_the_target(candidate_ids, candidate_logits, length, new_logits, **kwargs):
    """The usual mistake: right acceptance, but after a refusal the token is drawn from p instead of (p - q)+."""
    drafts = candidate_ids[0, -length:]
    p, q = new_logits[0].softmax(-1), candidate_logits[0].softmax(-1)
    rows = torch.arange(length)
    accepted = torch.rand(length) <= p[rows, drafts] / q[rows, drafts]
    number = ((~accepted).cumsum(-1) < 1).sum()
    return torch.cat([drafts[:number], torch.multinomial(p[number], num_samples=1)])[None], number


@pytest.mark.parametrize("broken_rule", [accept_every_draft, resample_from_the_target])
def test_a_broken_acceptance_rule_fails_the_distribution_test(markov, monkeypatch, broken_rule):
    monkeypatch.setattr(generation_utils, "_speculative_sampling", broken_rule)
    assert markov.p_value(4_000, calls=2) < 1e-6


def test_draft_logits_are_those_that_the_drafts_were_drawn_from(target, make_drafter):
    """In half precision too: float32, processed, one row for each draft, the draft itself possible."""
    half = copy.deepcopy(target).to(torch.bfloat16)
    drafter = make_drafter(target).to(torch.bfloat16)
    rounds = []
    choose = HyperDFlashCandidateGenerator._choose

    def spy(self, input_ids, logits):
        rounds.append(choose(self, input_ids, logits))
        return rounds[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HyperDFlashCandidateGenerator, "_choose", spy)
        for processors in ({"top_k": 4}, {"top_k": 0}, {"top_k": 4, "repetition_penalty": 1.3}):
            rounds.clear()
            text = half.generate(prompt(9), assistant_model=drafter, do_sample=True, max_new_tokens=20, **processors)
            assert text.shape[1] == 29
            for ids, logits in rounds:
                assert logits.dtype == torch.float32
                drafts = ids[0, -logits.shape[1] :]
                assert torch.isfinite(logits[0, torch.arange(len(drafts)), drafts]).all()
                if processors["top_k"]:
                    assert (torch.isfinite(logits).sum(-1) < 8).all()  # 4, and ties


# ---------------------------------------------------------------------------------------------------------------------
# Nothing left behind
# ---------------------------------------------------------------------------------------------------------------------


def hook_counts(target):
    return [
        (len(module._forward_pre_hooks), len(module._forward_hooks), len(module._backward_hooks))
        for module in target.modules()
    ]


@torch.no_grad()
def plain_outputs(target):
    """Everything that a plain forward and a plain generate return."""
    ids = prompt(40, seed=30)
    wanted = {"output_hidden_states": True, "output_attentions": True, "return_dict_in_generate": True}
    forward = target(ids, output_hidden_states=True, output_attentions=True, use_cache=True)
    generated = plain(target, ids, max_new_tokens=20, output_scores=True, output_logits=True, **wanted)
    tensors = [forward.logits, *forward.hidden_states, *forward.attentions, generated.sequences]
    tensors += [*generated.scores, *generated.logits, *[t for step in generated.hidden_states for t in step]]
    for cache in (forward.cache, generated.cache):
        for layer in cache.layers:
            for value in vars(layer).values():
                tensors += [
                    tensor
                    for tensor in (value.values() if isinstance(value, dict) else [value])
                    if isinstance(tensor, torch.Tensor)
                ]
    return tensors, [[type(layer) for layer in cache.layers] for cache in (forward.cache, generated.cache)]


def assert_same_to_the_bit(outputs, wanted):
    assert outputs[1] == wanted[1]
    assert len(outputs[0]) == len(wanted[0])
    assert all(torch.equal(tensor, other) for tensor, other in zip(outputs[0], wanted[0], strict=True))


def test_plain_outputs_are_the_same_bits_before_during_and_after_an_assisted_call(make_target, make_drafter):
    target = make_target()
    remove_hooks()
    wanted = plain_outputs(target)  # with nothing of ours in place
    drafter = make_drafter(target)
    install_hooks()
    assert_same_to_the_bit(plain_outputs(target), wanted)
    hooks, attributes = hook_counts(target), set(vars(target))
    class_attributes = dict(vars(type(target)))
    config, generation_config = target.config.to_dict(), target.generation_config.to_dict()

    # A streamer may use the target in the middle of the call, on another cache
    during = []
    streamer = Chunks(on_put=lambda: during.append(plain_outputs(target)) if len(during) < 3 else None)
    ids = prompt(20, seed=31)
    text = plain(target, ids, max_new_tokens=30)
    assert torch.equal(plain(target, ids, assistant_model=drafter, max_new_tokens=30, streamer=streamer), text)
    for outputs in during:
        assert_same_to_the_bit(outputs, wanted)
    assert len(during) == 3

    assert_same_to_the_bit(plain_outputs(target), wanted)
    assert hook_counts(target) == hooks
    assert set(vars(target)) == attributes
    assert dict(vars(type(target))) == class_attributes
    assert type(target)._is_stateful
    assert "_is_stateful" not in vars(target)
    assert (target.config.to_dict(), target.generation_config.to_dict()) == (config, generation_config)


def test_an_exception_in_the_middle_leaves_nothing_behind(target, drafter):
    class Broken(Exception):
        pass

    class BreaksLater(BaseStreamer):
        chunks = 0

        def put(self, value):
            self.chunks += 1
            if self.chunks == 5:
                raise Broken

        def end(self): ...

    hooks = hook_counts(target)
    cache = DynamicCache(config=target.config)
    stock = [type(layer) for layer in cache.layers]
    ids = prompt(20, seed=32)
    config = GenerationConfig(max_new_tokens=30, do_sample=False)
    before = config.to_dict()
    with pytest.raises(Broken):
        target.generate(ids, assistant_model=drafter, generation_config=config, cache=cache, streamer=BreaksLater())
    assert hook_counts(target) == hooks
    assert [type(layer) for layer in cache.layers] == stock
    assert config.to_dict() == before
    assert not hasattr(config, "_hyperdflash_candidates")
    text = plain(target, ids, max_new_tokens=30)
    assert torch.equal(plain(target, ids, assistant_model=drafter, max_new_tokens=30), text)


def stock_methods():
    return {name: inspect.unwrap(vars(GenerationMixin)[name]) for name in HOOKED}


def load_copy(name):
    """Another copy of the file, as a checkpoint folder brings it along."""
    name = f"{generation_hyperdflash.__package__}.{name}"  # beside its siblings, which it imports
    spec = importlib.util.spec_from_file_location(name, generation_hyperdflash.__file__)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_hooks_are_idempotent_and_reversible():
    stock = stock_methods()
    install_hooks()
    once = {name: vars(GenerationMixin)[name] for name in HOOKED}
    install_hooks()
    assert {name: vars(GenerationMixin)[name] for name in HOOKED} == once
    assert hooks_installed()
    for name in HOOKED:
        assert once[name].__wrapped__ is stock[name]
        assert inspect.signature(once[name]) == inspect.signature(stock[name])
    remove_hooks()
    remove_hooks()
    assert {name: vars(GenerationMixin)[name] for name in HOOKED} == stock
    assert not hooks_installed()


@pytest.mark.parametrize("package_first", [True, False])
def test_copies_side_by_side_wrap_once_and_serve_each_others_drafters(target, drafter, oracle, package_first):
    remove_hooks()
    stock = stock_methods()
    remote = load_copy("remote_generation_hyperdflash")
    first, second = (generation_hyperdflash, remote) if package_first else (remote, generation_hyperdflash)
    first.install_hooks()
    second.install_hooks()
    for name in HOOKED:
        assert vars(GenerationMixin)[name].__wrapped__ is stock[name]
        assert vars(GenerationMixin)[name].__module__ == GenerationMixin.__module__
        assert vars(GenerationMixin)[name].__globals__ is vars(first)
    ids = prompt(20, seed=33)
    text = plain(target, ids, max_new_tokens=40)
    oracle(text)
    assert torch.equal(plain(target, ids, assistant_model=drafter, max_new_tokens=40), text)
    assert type(drafter.last_generation) is first.GenerationStatistics
    assert drafter.last_generation.accepted > 10
    second.remove_hooks()  # either copy takes the hooks of the other away
    assert {name: vars(GenerationMixin)[name] for name in HOOKED} == stock


def test_a_newer_copy_replaces_the_hooks_of_an_older_one():
    stock = stock_methods()
    newer = load_copy("newer_generation_hyperdflash")
    newer._HOOKS_VERSION = generation_hyperdflash._HOOKS_VERSION + 1
    newer.install_hooks()
    install_hooks()
    for name in HOOKED:
        assert vars(GenerationMixin)[name].__globals__ is vars(newer)
        assert vars(GenerationMixin)[name].__wrapped__ is stock[name]


def test_hooks_below_somebody_elses_wrapping_are_kept_and_not_removed(monkeypatch):
    import functools

    hooked = vars(GenerationMixin)["_assisted_decoding"]

    @functools.wraps(hooked)
    def theirs(*args, **kwargs):
        return hooked(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GenerationMixin, "_assisted_decoding", theirs)
        install_hooks()
        assert vars(GenerationMixin)["_assisted_decoding"] is theirs
        with pytest.raises(RuntimeError, match="_assisted_decoding"):
            remove_hooks()
        assert hooks_installed()


def test_other_models_and_assistants_are_not_touched(target):
    torch.manual_seed(0)
    fields = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    fields |= {"num_hidden_layers": 2, "initializer_range": 0.3, "pad_token_id": 2, "eos_token_id": None}
    llama = LlamaForCausalLM(LlamaConfig(**fields)).eval()
    small = LlamaForCausalLM(LlamaConfig(**(fields | {"num_hidden_layers": 1}))).eval()
    ids = prompt(12, seed=34).repeat(1, 2)
    calls = [
        {"do_sample": False},
        {"do_sample": True, "top_k": 5},
        {"do_sample": False, "num_beams": 3},
        {"do_sample": False, "assistant_model": small},
        {"do_sample": True, "assistant_model": small},
        {"do_sample": False, "prompt_lookup_num_tokens": 4},
    ]

    def outputs():
        results = []
        for call in calls:
            torch.manual_seed(1)
            results.append(llama.generate(ids, max_new_tokens=20, **call))
        return results

    hooked = outputs()
    with pytest.raises(ValueError, match="found LlamaForCausalLM, wanted a HyperDFlash drafter"):
        target.generate(ids, assistant_model=small, max_new_tokens=5)
    remove_hooks()
    for result, wanted in zip(hooked, outputs(), strict=True):
        assert torch.equal(result, wanted)
    with pytest.raises(ValueError, match="stateful"):
        target.generate(ids, prompt_lookup_num_tokens=3, max_new_tokens=5)


# ---------------------------------------------------------------------------------------------------------------------
# Errors before anything is generated
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "inputs, message",
    [
        ({"num_beams": 3}, "`num_beams`: found 3, wanted 1"),
        ({"num_return_sequences": 2, "do_sample": True}, "`num_return_sequences`: found 2, wanted 1"),
        ({"use_cache": False}, "`use_cache`: found False, wanted True"),
        (
            {"num_assistant_tokens": 7},
            "`num_assistant_tokens`: found 7, wanted 1 to 6: the drafter's block of 7 slots",
        ),
        ({"num_assistant_tokens": 0}, "`num_assistant_tokens`: found 0, wanted 1 to 6"),
        ({"prompt_lookup_num_tokens": 3}, "`prompt_lookup_num_tokens`: found 3, wanted None"),
        ({"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidanceLogitsProcessor, wanted processors without a state"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_a_call_that_cannot_be_assisted_is_refused(target, drafter, inputs, message):
    forwards = []
    handle = target.register_forward_pre_hook(lambda module, args: forwards.append(module))
    with pytest.raises(ValueError, match=message):
        target.generate(prompt(9), assistant_model=drafter, max_new_tokens=5, **inputs)
    handle.remove()
    assert not forwards


@pytest.mark.parametrize("assistant", ["path/to/drafter", "target"])
def test_an_assistant_that_is_no_drafter_is_refused_by_what_it_is(target, assistant):
    found = "str" if assistant != "target" else "DeepseekV4ForCausalLM"
    with pytest.raises(ValueError, match=f"assistant_model.*found {found}, wanted a HyperDFlash drafter"):
        target.generate(prompt(9), assistant_model=target if assistant == "target" else assistant)


def test_more_than_one_sequence_is_refused(target, drafter):
    for assistance in ({"assistant_model": drafter}, {"prompt_lookup_num_tokens": 3}):
        with pytest.raises(ValueError, match="batch size: found 2, wanted 1"):
            target.generate(prompt(9).repeat(2, 1), max_new_tokens=5, **assistance)


@pytest.mark.parametrize(
    "field, found, wanted",
    [
        ("target_model_type", "hy_v4", "'deepseek_v4'"),
        ("target_hidden_size", 48, "32"),
        ("target_num_hidden_layers", 4, "3"),
        ("hc_mult", 2, "4"),
        ("vocab_size", 65, "64"),
        ("hidden_size", 48, "32"),
        ("mask_token_id", 64, r"an id in \[0, 64\)"),
        ("target_layer_ids", [3], r"ids in \[0, 3\)"),
    ],
)
def test_a_drafter_of_another_target_is_refused_by_field(target, make_drafter, field, found, wanted):
    drafter = make_drafter(target)
    object.__setattr__(drafter.config, field, found)
    value = found[0] if isinstance(found, list) else repr(found)
    with pytest.raises(ValueError, match=f"`assistant_model.config.{field}`: found {value}, wanted {wanted}"):
        target.generate(prompt(9), assistant_model=drafter, max_new_tokens=5)


def test_a_target_of_another_kind_is_refused(drafter):
    fields = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    llama = LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, **fields))
    with pytest.raises(
        ValueError, match="does not fit LlamaForCausalLM.*target_model_type.*'deepseek_v4', wanted 'llama'"
    ):
        llama.generate(prompt(9), assistant_model=drafter, max_new_tokens=5)


def test_a_target_without_gates_is_refused_by_reducer(target, drafter, monkeypatch):
    monkeypatch.delattr(target.model, "hc_head")
    with pytest.raises(ValueError, match="context_source.*'pre_hc_head' .reducer 'hc_gate'., wanted 'multi_layer'"):
        target.generate(prompt(9), assistant_model=drafter, max_new_tokens=5)


# ---------------------------------------------------------------------------------------------------------------------
# Statistics
# ---------------------------------------------------------------------------------------------------------------------


def assert_consistent(statistics, new_tokens):
    assert statistics.new_tokens == new_tokens
    assert new_tokens == 1 + statistics.accepted + statistics.bonus_tokens + statistics.plain_steps
    assert statistics.drafted == sum(statistics.drafted_per_slot)
    assert statistics.accepted == sum(statistics.accepted_per_slot) == sum(statistics.accepted_per_round)
    assert statistics.rounds == len(statistics.accepted_per_round)
    assert statistics.rounds - 1 <= statistics.bonus_tokens <= statistics.rounds
    for drafted, reached, accepted in zip(
        statistics.drafted_per_slot, statistics.reached_per_slot, statistics.accepted_per_slot, strict=True
    ):
        assert statistics.rounds >= drafted >= reached >= accepted


def test_there_are_no_statistics_before_a_call(target, make_drafter):
    assert make_drafter(target).last_generation is None


def test_statistics_count_what_was_accepted(target, drafter, monkeypatch):
    input_ids = prompt(20, seed=40)
    text = plain(target, input_ids, max_new_tokens=101)
    right = iter([0, 6, 3, 3, 1, 0, 6, 6, 2, 5, 4, 0, 1, 6, 6, 3, 2, 6, 6, 6, 6, 6])
    oracle = Oracle(drafter, target, text, monkeypatch)
    given = []
    oracle.chance.randrange = lambda stop: given.append(next(right)) or given[-1]
    plain(target, input_ids, assistant_model=drafter, max_new_tokens=101)
    statistics = drafter.last_generation
    assert_consistent(statistics, new_tokens=101)
    assert statistics.accepted_per_round[:-1] == given[:-1]
    accepted = statistics.accepted_per_round
    assert statistics.accepted_per_slot == [sum(a > slot for a in accepted) for slot in range(6)]
    assert statistics.accepted_length == pytest.approx(1 + sum(accepted) / len(accepted))
    assert sum(statistics.acceptance_per_slot) == pytest.approx(statistics.accepted_length - 1)
    for slot, rate in enumerate(statistics.conditional_acceptance_per_slot):
        reached = sum(a >= slot for a in accepted[:-1])
        assert rate == pytest.approx(sum(a > slot for a in accepted[:-1]) / reached, abs=0.05)


def test_tokens_behind_the_end_are_counted_neither_as_accepted_nor_as_refused(target, drafter, oracle):
    input_ids = prompt(20, seed=41)
    text = plain(target, input_ids, max_new_tokens=80)
    oracle(text, wrong=False)  # every draft is right
    for max_new_tokens in range(1, 16):
        plain(target, input_ids, assistant_model=drafter, max_new_tokens=max_new_tokens)
        statistics = drafter.last_generation
        assert_consistent(statistics, new_tokens=max_new_tokens)
        assert statistics.drafted == statistics.accepted
        # One token from the prefill, then rounds of seven; one that is left over needs no draft
        assert statistics.plain_steps == (max_new_tokens - 1) % 7 // 1 * ((max_new_tokens - 1) % 7 == 1)
    for index in range(1, 15):
        token = text[0, 20 + index].item()
        if token in text[0, 20 : 20 + index]:
            continue
        plain(target, input_ids, assistant_model=drafter, max_new_tokens=80, eos_token_id=token)
        statistics = drafter.last_generation
        assert_consistent(statistics, new_tokens=index + 1)
        assert statistics.drafted == statistics.accepted
        assert statistics.bonus_tokens == index // 7


def test_statistics_add_up_and_go_to_json(target, drafter, oracle):
    input_ids = prompt(20, seed=42)
    oracle(plain(target, input_ids, max_new_tokens=60))
    records = []
    for max_new_tokens in (20, 33):
        plain(target, input_ids, assistant_model=drafter, max_new_tokens=max_new_tokens)
        records.append(drafter.last_generation)
    assert records[0] is not records[1]
    total = records[0] + records[1]
    assert total.new_tokens == 53
    assert total.accepted_per_slot == [a + b for a, b in zip(*(r.accepted_per_slot for r in records), strict=True)]
    assert total.accepted_per_round == records[0].accepted_per_round + records[1].accepted_per_round
    document = json.loads(json.dumps(total.to_dict()))
    assert document["accepted_length"] == total.accepted_length
    assert document["total_seconds"] == pytest.approx(sum(record.total_seconds for record in records))
    for record in records:
        for name in ("prefill_seconds", "draft_seconds", "verify_seconds", "other_seconds"):
            assert getattr(record, name) > 0
    with pytest.raises(ValueError, match="`num_draft_tokens`: found 3, wanted 6"):
        total + GenerationStatistics(num_draft_tokens=3)


def test_a_round_asks_neither_the_target_nor_the_drafter_twice(target, drafter, oracle):
    input_ids = prompt(40, seed=43)
    text = plain(target, input_ids, max_new_tokens=60)
    calls = oracle(text).calls
    lengths = []
    handle = target.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    plain(target, input_ids, assistant_model=drafter, max_new_tokens=60)
    handle.remove()
    statistics = drafter.last_generation
    assert len(calls) == statistics.rounds
    assert len(lengths) == 1 + statistics.rounds + statistics.plain_steps
    assert lengths[0] == 40
    assert set(lengths[1:]) <= set(range(1, 8))
    # Each token's state goes through the drafter once
    assert sum(call["context_hidden_states"].shape[1] for call in calls) <= text.shape[1]
