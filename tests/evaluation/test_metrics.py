"""The metrics load without a network and agree with a count by hand."""

from pathlib import Path

import evaluate
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, DynamicCache

from hyperdflash.cli import EMBEDDED_DRAFTER, EMBEDDED_TARGET

METRICS = Path(__file__).parents[2] / "evaluation" / "metrics"
NUM_DRAFTS, NEW_TOKENS = 6, 40


class Chunks:
    """A streamer that keeps what it is given: the prompt, the first token, then a chunk a round."""

    def __init__(self):
        self.chunks = []

    def put(self, value):
        self.chunks.append(value.flatten().tolist())

    def end(self):
        pass


def count_by_hand(chunks):
    """[(drafts that the budget allowed, accepted drafts)] of each round, from what a streamer was given."""
    rounds, emitted = [], 1
    for chunk in chunks[2:]:
        if allowed := min(NUM_DRAFTS, NEW_TOKENS - emitted - 1):  # else a step for the last token, without a draft
            rounds.append((allowed, len(chunk) - 1))
        emitted += len(chunk)
    assert emitted == NEW_TOKENS
    return rounds


@pytest.fixture(scope="module")
def recorded_run():
    """[(statistics, rounds as counted by hand)] of two texts."""
    target = AutoModelForCausalLM.from_pretrained(EMBEDDED_TARGET, dtype=torch.float32)
    drafter = AutoModel.from_pretrained(EMBEDDED_DRAFTER, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_TARGET)
    texts = []
    for prompt in ("What does the command `tail` do?", "Tom has 5 boxes with 12 pencils each."):
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        streamer = Chunks()
        target.generate(
            **inputs,
            assistant_model=drafter,
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            eos_token_id=None,  # no text ends early: every round has its bonus token
            streamer=streamer,
        )
        texts.append((drafter.last_generation, count_by_hand(streamer.chunks)))
    return texts


def load(name):
    return evaluate.load(str(METRICS / f"{name}.py"))


def test_accepted_length_is_the_count_by_hand(recorded_run):
    by_hand = [accepted for _, rounds in recorded_run for _, accepted in rounds]
    rounds, accepted = len(by_hand), sum(by_hand)
    assert rounds > 10 and accepted > 0
    result = load("accepted_length").compute(
        accepted_per_round=[statistics.accepted_per_round for statistics, _ in recorded_run]
    )
    assert result["accepted_length"] == pytest.approx((rounds + accepted) / rounds)
    assert result["accepted_drafts"] == pytest.approx(accepted / rounds)
    assert (result["rounds"], result["accepted"]) == (rounds, accepted)


def test_acceptance_by_slot_is_the_count_by_hand(recorded_run):
    by_hand = [each for _, rounds in recorded_run for each in rounds]
    result = load("slot_acceptance").compute(
        accepted_per_slot=[statistics.accepted_per_slot for statistics, _ in recorded_run],
        reached_per_slot=[statistics.reached_per_slot for statistics, _ in recorded_run],
        rounds=[statistics.rounds for statistics, _ in recorded_run],
    )
    for slot in range(NUM_DRAFTS):
        reached = sum(accepted >= slot and allowed > slot for allowed, accepted in by_hand)
        hits = sum(accepted > slot for _, accepted in by_hand)
        assert result["unconditional"][slot] == pytest.approx(hits / len(by_hand))
        assert result["conditional"][slot] == pytest.approx(hits / reached if reached else 0)
    assert result["unconditional"][0] > result["unconditional"][2] > 0


def test_speedup_is_a_ratio_of_sums_and_not_a_mean_of_ratios():
    result = load("decoding_speedup").compute(
        tokens=[10, 90], seconds=[1.0, 3.0], baseline_tokens=[20, 60], baseline_seconds=[4.0, 4.0]
    )
    assert result == {"speedup": 2.5, "tokens_per_second": 25.0, "baseline_tokens_per_second": 10.0}


def test_efficiency_is_the_speedup_over_what_rounds_allow():
    # 20 rounds of 3 tokens behind the first; a round costs 30 ms, a token of the target alone 20 ms: 2 at best
    columns = {
        "tokens": [37, 25],
        "seconds": [0.5, 0.6],
        "prefill_seconds": [0.1, 0.2],
        "rounds": [12, 8],
        "accepted": [30, 10],
        "plain_steps": [0, 0],
        "draft_seconds": [0.04, 0.06],
        "verify_seconds": [0.3, 0.2],
        "baseline_tokens": [51, 51],
        "baseline_seconds": [1.1, 1.2],
        "baseline_prefill_seconds": [0.1, 0.2],
    }
    result = load("decoding_efficiency").compute(**columns)
    assert result["ideal_speedup"] == pytest.approx(2)
    assert result["free_draft_speedup"] == pytest.approx(3 * 0.02 / 0.025)
    assert result["speedup"] == pytest.approx(75 / 50)
    assert result["efficiency"] == pytest.approx(0.75)
    no_loop = columns | {"seconds": [0.1 + 0.34, 0.2 + 0.26]}  # nothing but the prompt, drafts and verification
    assert load("decoding_efficiency").compute(**no_loop)["efficiency"] == pytest.approx(1)


def test_efficiency_of_a_recorded_run_is_what_its_clock_says(recorded_run):
    """A clock of invented seconds, the same for each step; the counts are the run's."""
    prompt, step, draft, rest, token = 0.5, 0.03, 0.01, 0.002, 0.02
    rows = []
    for statistics, rounds in recorded_run:
        plain = statistics.plain_steps
        tokens = 1 + plain + sum(1 + accepted for _, accepted in rounds)
        verify, drafts = step * (len(rounds) + plain), draft * len(rounds)
        seconds = prompt + verify + drafts + rest * len(rounds)
        rows.append((tokens, seconds, verify, drafts, statistics, prompt + token * (tokens - 1)))
    result = load("decoding_efficiency").compute(
        tokens=[row[0] for row in rows],
        seconds=[row[1] for row in rows],
        prefill_seconds=[prompt] * len(rows),
        verify_seconds=[row[2] for row in rows],
        draft_seconds=[row[3] for row in rows],
        **{name: [getattr(row[4], name) for row in rows] for name in ("rounds", "accepted", "plain_steps")},
        baseline_tokens=[row[0] for row in rows],
        baseline_seconds=[row[5] for row in rows],
        baseline_prefill_seconds=[prompt] * len(rows),
    )
    working = sum(row[2] + row[3] for row in rows)
    loop = sum(rest * row[4].rounds for row in rows)
    assert sum(row[4].rounds for row in rows) > 10
    assert result["efficiency"] == pytest.approx(working / (working + loop))
    assert result["speedup"] == pytest.approx(token * sum(row[0] - 1 for row in rows) / (working + loop))


@pytest.mark.parametrize("name", sorted(path.stem for path in METRICS.glob("*.py") if path.stem != "__init__"))
def test_the_documented_example_is_true(name):
    metric = load(name)
    example, wanted = metric.inputs_description.split(">>> metric.compute(", 1)[1].rsplit("\n    {", 1)
    call = "metric.compute(" + example.replace("\n    ...", "\n")
    assert str(eval(call)) == "{" + wanted.strip()


def test_texts_with_different_numbers_of_slots_are_refused():
    with pytest.raises(ValueError, match=r"accepted_per_slot.*found \[1, 2\] slots"):
        load("slot_acceptance").compute(accepted_per_slot=[[1], [1, 1]], reached_per_slot=[[1], [1, 1]], rounds=[1, 1])


@pytest.mark.parametrize("repeats", [True, False])
def test_prompt_lookup_leaves_the_same_record_on_the_cache(target, repeats):
    """Also of rounds in which nothing was found: a streamer sees each as a chunk of one token."""
    ids = torch.tensor([[5, 9, 7, 5, 9, 7, 5, 9, 7, 5] if repeats else [3, 5, 9, 7, 11]])
    cache, streamer = DynamicCache(config=target.config), Chunks()
    target.generate(
        ids,
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        prompt_lookup_num_tokens=NUM_DRAFTS,
        cache=cache,
        streamer=streamer,
    )
    statistics = cache.last_generation
    assert statistics.accepted_per_round == [accepted for _, accepted in count_by_hand(streamer.chunks)]
    assert statistics.rounds == len(statistics.accepted_per_round) == statistics.bonus_tokens
    assert statistics.drafted_per_slot[0] < statistics.rounds  # in some rounds nothing was found
    assert statistics.accepted == sum(statistics.accepted_per_slot) == sum(statistics.accepted_per_round)
    emitted = 1 + statistics.accepted + statistics.bonus_tokens + statistics.plain_steps
    assert emitted == statistics.new_tokens == NEW_TOKENS
    assert statistics.verify_seconds > 0 and statistics.draft_seconds > 0
