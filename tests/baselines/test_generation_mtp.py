"""`target.generate(assistant_model=mtp)`: the target's own texts, drafted as the module is defined."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from hyperdflash.baselines import MtpConfig, MtpModel
from hyperdflash.baselines.generation_mtp import MtpCandidateGenerator
from hyperdflash.generation_hyperdflash import GenerationStatistics

TINY_TARGET = Path(__file__).parents[2] / "checkpoints" / "tiny-target"


def prompt(length, seed=0):
    return torch.randint(3, 60, (1, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def states_of(target, ids):
    """Embeddings of the tokens after each, and the target's streams, from one forward over the whole text."""
    captured = []
    handle = target.model.hc_head.register_forward_pre_hook(lambda module, args: captured.append(args[0]))
    target(ids)
    handle.remove()
    return target.get_input_embeddings()(ids[:, 1:]), captured[0]


@pytest.fixture
def forced(monkeypatch):
    """Makes three drafts of four those of a text, so that some are accepted; draft logits stay the module's."""

    def force(text):
        calls, choose = iter(range(10_000)), MtpCandidateGenerator._choose

        def choose_from_text(self, input_ids, logits):
            candidate_ids, logits = choose(self, input_ids, logits)
            if next(calls) % 4 and candidate_ids.shape[1] <= text.shape[1]:
                candidate_ids[:, -1] = text[:, candidate_ids.shape[1] - 1]
            return candidate_ids, logits

        monkeypatch.setattr(MtpCandidateGenerator, "_choose", choose_from_text)

    return force


@pytest.mark.parametrize("drafts", [1, 3, 6, 9])
@pytest.mark.parametrize("length", [1, 2, 11, 30])
def test_greedy_text_is_the_targets_own(target, mtp, length, drafts):
    ids = prompt(length, seed=length)
    text = target.generate(ids, do_sample=False, max_new_tokens=24)
    drafted = target.generate(
        ids, do_sample=False, max_new_tokens=24, assistant_model=mtp, num_assistant_tokens=drafts
    )
    assert torch.equal(drafted, text)
    assert type(mtp.last_generation) is GenerationStatistics and mtp.last_generation.num_draft_tokens == drafts


@pytest.mark.parametrize("pads", [0, 5])
@pytest.mark.parametrize("max_new_tokens", [1, 2, 7, 50])
def test_greedy_text_is_the_targets_own_where_drafts_are_accepted(target, mtp, forced, max_new_tokens, pads):
    ids = prompt(14, seed=2)
    mask = torch.ones_like(ids)
    ids[:, :pads], mask[:, :pads] = 2, 0
    inputs = {"input_ids": ids, "attention_mask": mask, "do_sample": False}
    forced(target.generate(**inputs, max_new_tokens=60))
    text = target.generate(**inputs, max_new_tokens=max_new_tokens)
    assert torch.equal(target.generate(**inputs, max_new_tokens=max_new_tokens, assistant_model=mtp), text)
    assert max_new_tokens < 7 or mtp.last_generation.accepted > 0


def rounds_of(target, mtp, *calls):
    """The texts of assisted calls, and of each round (anchor, drafts, draft logits)."""
    rounds, stock = [], MtpCandidateGenerator.get_candidates

    def spy(self, input_ids, model_kwargs, **more):
        candidates, logits = stock(self, input_ids, model_kwargs, **more)
        if logits is not None:
            rounds.append((input_ids.shape[1] - 1, candidates[0, input_ids.shape[1] :], logits[0]))
        return candidates, logits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MtpCandidateGenerator, "get_candidates", spy)
        texts = [target.generate(assistant_model=mtp, do_sample=False, **inputs) for inputs in calls]
    return texts, rounds


@torch.no_grad()
def recomputed(target, mtp, text, anchor, drafts):
    """Draft logits behind an anchor of `text` without any cache: one recursion over all pairs before it."""
    ids = torch.cat([text[:, : anchor + 1], drafts[None]], dim=1)
    streams = states_of(target, text[:, : anchor + 1])[1]
    streams = torch.cat([streams, torch.zeros_like(streams[:, :1]).expand(-1, len(drafts), -1, -1)], dim=1)
    outputs = mtp(
        target.get_input_embeddings()(ids[:, 1:]),
        streams[:, :-1],
        first_pairs=torch.tensor([[anchor - 1]]),
        num_depths=len(drafts),
    )
    return target.lm_head(outputs.last_hidden_state[0, 0])


def test_drafts_on_the_cache_are_those_of_a_recomputation_without_one(target, mtp, forced):
    """Past the window, whatever was accepted before: so the cache holds the accepted pairs and no others."""
    ids = prompt(9, seed=4)
    forced(target.generate(ids, do_sample=False, max_new_tokens=60))
    (text,), rounds = rounds_of(target, mtp, {"inputs": ids, "max_new_tokens": 40})
    assert 0 < mtp.last_generation.accepted < mtp.last_generation.drafted and len(rounds) > 8
    for anchor, drafts, logits in rounds:
        torch.testing.assert_close(logits, recomputed(target, mtp, text, anchor, drafts), atol=1e-4, rtol=1e-4)


def test_a_draft_ends_before_the_first_token_below_the_confidence(target, mtp, forced):
    """The drafts that are left are those of a recomputation, so the cache lacks what was not verified."""
    ids, confidence = prompt(9, seed=4), 0.2
    text = target.generate(ids, do_sample=False, max_new_tokens=60)
    forced(text)
    call = {"inputs": ids, "max_new_tokens": 40, "assistant_confidence_threshold": confidence}
    (drafted,), rounds = rounds_of(target, mtp, call)
    assert torch.equal(drafted, text[:, : drafted.shape[1]])
    lengths = set()
    for anchor, drafts, logits in rounds:
        torch.testing.assert_close(recomputed(target, mtp, drafted, anchor, drafts), logits, atol=1e-4, rtol=1e-4)
        assert (logits[1:].softmax(-1).amax(-1) >= confidence).all()
        room = ids.shape[1] + 40 - anchor - 2  # of the length budget
        if len(drafts) < min(6, room):
            longer = torch.cat([drafts, logits[-1:].argmax(-1)])
            next_row = recomputed(target, mtp, drafted, anchor, longer)[-1]
            assert next_row.softmax(-1).max() < confidence + 1e-4
        lengths.add(len(drafts))
    assert len(lengths) > 2


def read_nothing(self, *args):
    return None


@pytest.mark.parametrize("fault", ["stale pairs", "missing pairs", "wrong position"])
def test_a_fault_in_the_cache_is_seen_by_the_recomputation(target, mtp, forced, monkeypatch, fault):
    ids = prompt(9, seed=4)
    forced(target.generate(ids, do_sample=False, max_new_tokens=60))
    if fault == "stale pairs":
        monkeypatch.setattr(
            MtpCandidateGenerator, "new_cache", staticmethod(lambda config: NeverCropped(config=config))
        )
    elif fault == "missing pairs":
        monkeypatch.setattr(MtpModel, "read", read_nothing)
    else:
        forward = mtp.forward
        later = lambda **inputs: forward(**inputs | {"position_ids": inputs["position_ids"] + 1})  # noqa: E731
        monkeypatch.setattr(mtp, "forward", later)
    (text,), rounds = rounds_of(target, mtp, {"inputs": ids, "max_new_tokens": 40})
    monkeypatch.undo()
    off = [(logits - recomputed(target, mtp, text, a, drafts)).abs().max() for a, drafts, logits in rounds]
    assert max(off[1:]) > 1e-2


class NeverCropped(DynamicCache):
    def crop(self, tokens_to_remove):
        for layer in self.layers:
            layer._committed = layer.cumulative_length


def test_a_second_turn_drafts_with_the_first_as_context(target, mtp):
    cache = DynamicCache(config=target.config)
    first = prompt(8, seed=6)
    calls = [{"inputs": first, "max_new_tokens": 10, "cache": cache}]
    (text,), _ = rounds_of(target, mtp, *calls)
    second = torch.cat([text, prompt(5, seed=7)], dim=1)
    (text,), rounds = rounds_of(target, mtp, {"inputs": second, "max_new_tokens": 10, "cache": cache})
    assert torch.equal(text, target.generate(second, do_sample=False, max_new_tokens=10))
    for anchor, drafts, logits in rounds:
        torch.testing.assert_close(logits, recomputed(target, mtp, text, anchor, drafts), atol=1e-4, rtol=1e-4)


def test_training_acceptance_is_that_of_generate_round_by_round(target, mtp, monkeypatch):
    """On the text that the target wrote, the recursions from generate's anchors accept what generate accepted."""
    with torch.no_grad():  # a random module agrees with the target nowhere: agreement comes from a narrow head
        narrow = torch.nn.Parameter(target.lm_head.weight * NARROW[:, None])
    monkeypatch.setitem(target.lm_head._parameters, "weight", narrow)
    ids = prompt(9, seed=11)
    (text,), rounds = rounds_of(target, mtp, {"inputs": ids, "max_new_tokens": 60})
    anchors = torch.tensor([[anchor for anchor, *_ in rounds]])
    embeds, streams = states_of(target, text)
    with torch.no_grad():
        outputs = mtp(embeds, streams[:, :-1], first_pairs=anchors - 1, num_depths=6).last_hidden_state
        drafts = target.lm_head(outputs).argmax(-1)  # [1, A, 6]
    labels = anchors.unsqueeze(-1) + torch.arange(1, 7)
    right = text[0][labels.clamp(max=text.shape[1] - 1)] == drafts
    right &= torch.arange(6) < torch.tensor([len(drafts) for _, drafts, _ in rounds])[:, None]  # the budget's end
    accepted = right.cumprod(-1).sum(-1)[0].tolist()
    assert accepted == mtp.last_generation.accepted_per_round and sum(accepted) > 5


NARROW = torch.where(torch.arange(64) % 16 == 5, 4.0, 0.2)


class Markov:
    """Next tokens depend on the current one alone, so a long text holds independent draws of known distributions."""

    def __init__(self, make_target, make_mtp):
        fields = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"], "mlp_layer_types": ["moe"]}
        fields |= {"n_routed_experts": 2, "num_experts_per_tok": 1, "hc_mult": 2, "hc_sinkhorn_iters": 1}
        self.target = make_target(vocab_size=10, **fields)
        torch.nn.init.zeros_(self.target.model.layers[0].self_attn.o_b_proj.weight)
        self.target.lm_head.weight.data *= 0.33
        self.mtp = make_mtp(self.target)

    def p_value(self, draws, calls=5):
        counts, accepted = torch.zeros(10, 10), 0
        for seed in range(calls):
            torch.manual_seed(seed)
            text = self.target.generate(
                torch.tensor([[3]]),
                assistant_model=self.mtp,
                num_assistant_tokens=3,
                do_sample=True,
                top_k=0,
                max_new_tokens=draws // calls,
                pad_token_id=0,
            )[0]
            counts.index_put_((text[:-1], text[1:]), torch.ones(len(text) - 1), accumulate=True)
            accepted += self.mtp.last_generation.accepted
        assert accepted > draws // 10
        with torch.no_grad():
            p = self.target(torch.arange(10)[:, None]).logits[:, -1].softmax(-1)
        expected = p * counts.sum(-1, keepdim=True)
        cells = expected >= 5
        statistic = ((counts - expected)[cells] ** 2 / expected[cells]).sum()
        return torch.special.gammaincc((cells.sum() - 10) / 2, statistic / 2).item()


@pytest.fixture(scope="module")
def markov(make_target, make_mtp):
    return Markov(make_target, make_mtp)


def test_sampled_tokens_have_the_targets_distribution(markov):
    assert markov.p_value(3_000) > 0.001


def test_drafts_chosen_greedily_but_verified_as_samples_are_seen(markov, monkeypatch):
    monkeypatch.setattr(MtpCandidateGenerator, "_pick", lambda self, logits: logits.argmax(-1, keepdim=True))
    assert markov.p_value(1_500) < 1e-6


@pytest.mark.parametrize("found", [0, -1])
def test_no_drafts_at_all_are_refused(target, mtp, found):
    with pytest.raises(ValueError, match=f"`num_assistant_tokens`: found {found}, wanted at least 1"):
        target.generate(prompt(4), assistant_model=mtp, num_assistant_tokens=found, max_new_tokens=4)


def test_a_module_of_another_target_is_refused(make_target, mtp):
    with pytest.raises(ValueError, match="config.hidden_size|target_hidden_size"):
        make_target(hidden_size=48).generate(prompt(4), assistant_model=mtp, max_new_tokens=4)


def test_the_embedded_targets_text_is_its_own():
    target = AutoModelForCausalLM.from_pretrained(TINY_TARGET, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(TINY_TARGET)
    torch.manual_seed(0)
    mtp = MtpModel(MtpConfig.of_target(target.config)).eval()
    inputs = tokenizer("Tom has 3 apples and", return_tensors="pt")
    text = target.generate(**inputs, do_sample=False, max_new_tokens=24)
    for drafts in (3, 6):
        drafted = target.generate(
            **inputs, do_sample=False, max_new_tokens=24, assistant_model=mtp, num_assistant_tokens=drafts
        )
        assert torch.equal(drafted, text)
