"""Teacher-forced acceptance in training is acceptance in the decoding loop, on the same tokens, slot by slot."""

import pytest
import torch

from hyperdflash.generation_hyperdflash import HyperDFlashCandidateGenerator, install_hooks
from hyperdflash.trainer.attention import BLOCK_SPARSE, block_sparse_attention
from hyperdflash.trainer.blocks import slot_labels
from hyperdflash.trainer.drafting import draft_hidden_states
from hyperdflash.trainer.losses import Objective, block_loss
from hyperdflash.trainer.states import LiveTargetStates

PROMPT, NEW_TOKENS = 9, 40

VARIANTS = {
    "sliding and full": {},
    "full only": {"layer_types": ["full_attention"] * 2, "sliding_window": None},
    "sliding only": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9},
    "pre_gate": {"path_norm": "pre_gate"},
    "no path norm": {"path_norm": "none"},
    "fc": {"reducer": "fc", "path_norm": "none"},
    "multi_layer": {"context_source": "multi_layer", "reducer": "fc", "path_norm": "none", "target_layer_ids": [0, 2]},
    "mean over streams": {"reducer": "fc", "path_norm": "none", "stream_pooling": "mean"},
    "sample_from_anchor": {"sample_from_anchor": True, "block_size": 5},
    "sequential head": {"sequential_head_size": 24},
    "sequential head, from the anchor": {"sequential_head_size": 24, "sample_from_anchor": True, "block_size": 5},
}


@pytest.fixture(scope="module")
def decoded(make_target):
    """A target, a prompt, and both with the target's greedy answer."""
    target = make_target(seed=3)
    prompt = torch.randint(3, 60, (1, PROMPT), generator=torch.Generator().manual_seed(5))
    return target, prompt, target.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)


def training_drafts(drafter, states, found, text, anchors):
    """`[A, D]` drafts, `[A, D]` whether all drafts up to a slot equal the text, and the hidden states, in one pass."""
    with block_sparse_attention(drafter.config):
        hidden = draft_hidden_states(drafter, states.modules, found, text, anchors)
    labels, counts = slot_labels(text, anchors, drafter.config.geometry)
    drafts = states.modules.logits(hidden).argmax(dim=-1)  # [1, A, D]
    accepted = ((drafts == labels) & counts).cumprod(dim=-1)
    return drafts[0], accepted[0], (hidden, labels, counts)


def fit(drafter, states, found, text, steps):
    """Some steps of training on `text`, so that drafts are accepted and rounds are of different lengths."""
    anchors = torch.arange(1, text.shape[1] - 1).unsqueeze(0)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    objective = Objective(4.0, 0.0, 1, 1.0)
    for _ in range(steps):
        hidden, labels, counts = training_drafts(drafter, states, found, text, anchors)[2]
        block_loss(hidden, labels, counts, states.modules.logits, objective)[0].backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("steps", [0, 25], ids=["untrained", "trained"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_drafts_and_acceptance_in_training_equal_those_of_generate(variant, steps, decoded, make_drafter, monkeypatch):
    install_hooks()
    target, prompt, text = decoded
    drafter = make_drafter(target, **VARIANTS[variant])
    states = LiveTargetStates(target, drafter.config)
    found = states(text, torch.ones_like(text))
    if steps:
        fit(drafter, states, found, text, steps)

    anchors = torch.arange(1, text.shape[1] - 1).unsqueeze(0)  # every position that may be one
    with torch.no_grad():
        drafts, accepted, _ = training_drafts(drafter, states, found, text, anchors)

    rounds = []
    get_candidates = HyperDFlashCandidateGenerator.get_candidates

    def record(self, input_ids, *args, **kwargs):
        candidates, logits = get_candidates(self, input_ids, *args, **kwargs)
        rounds.append((input_ids.shape[1] - 1, candidates[0, input_ids.shape[1] :].tolist()))
        return candidates, logits

    monkeypatch.setattr(HyperDFlashCandidateGenerator, "get_candidates", record)
    assert torch.equal(
        target.generate(prompt, assistant_model=drafter, max_new_tokens=NEW_TOKENS, do_sample=False), text
    )
    statistics = drafter.last_generation
    rounds = [(anchor, drafted) for anchor, drafted in rounds if drafted]
    assert len(rounds) == statistics.rounds > 0
    assert rounds[0][0] == PROMPT  # the first anchor is the first token of the answer
    for (anchor, drafted), accepted_in_round in zip(rounds, statistics.accepted_per_round):
        row = anchor - 1
        # Behind a refused draft a sequential head goes on from the text in training, from the draft in decoding
        compared = accepted_in_round + 1 if drafter.config.sequential_head_size else len(drafted)
        assert drafts[row, : len(drafted)].tolist()[:compared] == drafted[:compared], f"anchor {anchor}"
        assert accepted[row, : len(drafted)].sum() == accepted_in_round, f"anchor {anchor}"
    per_slot = sum(accepted[anchor - 1] for anchor, _ in rounds)
    if rounds[-1][0] + 1 + drafts.shape[1] <= text.shape[1]:  # no round was cut by the length budget
        assert per_slot.tolist() == statistics.accepted_per_slot
    if steps:
        assert statistics.accepted > 5  # else the test would not see drafts behind accepted drafts


@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager", BLOCK_SPARSE])
def test_blocks_drafted_together_equal_blocks_drafted_one_by_one(attn_implementation, target, make_drafter):
    drafter = make_drafter(target, sliding_window=9)
    drafter.set_attn_implementation(attn_implementation)
    states = LiveTargetStates(target, drafter.config)
    text = torch.randint(3, 60, (2, 30), generator=torch.Generator().manual_seed(0))
    anchors = torch.tensor([[1, 2, 8, 20, 28], [4, 5, 29, 0, 0]])
    with torch.no_grad():
        found = states(text, torch.ones_like(text))
        together = draft_hidden_states(drafter, states.modules, found, text, anchors)
        for row in range(2):
            for index, anchor in enumerate(anchors[row].tolist()):
                if not anchor:
                    continue
                noise = torch.tensor([[text[row, anchor].item(), *[drafter.config.mask_token_id] * 6]])
                alone = drafter(
                    target.get_input_embeddings()(noise), found.context[row : row + 1, :anchor]
                ).last_hidden_state[0, 1:]
                torch.testing.assert_close(together[row, index], alone, rtol=1e-4, atol=1e-5)
