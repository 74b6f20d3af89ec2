"""The embedded models: what they are, where they come from, and that the pair keeps its promise."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

from hyperdflash import HyperDFlashModel  # noqa: F401  (registers the drafter)
from hyperdflash.cli import DEMO_PROMPTS, EMBEDDED_DRAFTER, EMBEDDED_TARGET


@pytest.fixture(scope="module")
def pair():
    target = AutoModelForCausalLM.from_pretrained(EMBEDDED_TARGET, dtype=torch.float32)
    drafter = AutoModel.from_pretrained(EMBEDDED_DRAFTER, dtype=torch.float32)
    return target, drafter, AutoTokenizer.from_pretrained(EMBEDDED_TARGET)


def test_the_target_has_deepseek_v4s_architecture_in_at_most_12_million_parameters(pair):
    target = pair[0]
    config = target.config
    assert config.model_type == "deepseek_v4"
    assert target.num_parameters() <= 12_000_000
    assert config.hc_mult == 4
    assert set(config.layer_types) == {
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
    }
    assert set(config.mlp_layer_types) == {"hash_moe", "moe"}
    # what vLLM's CPU backend can serve
    assert (config.head_dim, config.index_head_dim, config.num_experts_per_tok) == (512, 128, 6)
    assert config.n_routed_experts in (64, 128, 256, 384)


@pytest.mark.parametrize(
    "folder, measured",
    [(EMBEDDED_TARGET, "held-out loss"), (EMBEDDED_DRAFTER, "accepted length")],
    ids=["target", "drafter"],
)
def test_weights_are_bfloat16_and_say_where_they_come_from(folder, measured):
    assert AutoConfig.from_pretrained(folder).dtype == torch.bfloat16
    record = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))
    assert {"command", "commit", "versions", "data", "seed"} <= record.keys()
    assert record["commit"]
    assert measured in (folder / "README.md").read_text(encoding="utf-8")


def test_the_code_beside_the_drafter_is_the_packages_own():
    for kind in ("configuration", "modeling", "generation"):
        name = f"{kind}_hyperdflash.py"
        package_copy = EMBEDDED_DRAFTER.parent.parent / name
        assert (EMBEDDED_DRAFTER / name).read_text() == package_copy.read_text(), f"copy {name} to the checkpoint"


def test_all_checkpoints_together_stay_below_40_megabytes():
    size = sum(path.stat().st_size for path in EMBEDDED_TARGET.parent.rglob("*") if path.is_file())
    assert size <= 40_000_000


def test_the_chat_template_renders_non_think_think_and_multi_turn(pair):
    tokenizer = pair[2]
    user, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
    begin, end = tokenizer.bos_token, tokenizer.eos_token

    def render(messages, **kwargs):
        return tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)

    assert render([user], add_generation_prompt=True) == f"{begin}<｜User｜>hi<｜Assistant｜></think>"
    assert render([user], add_generation_prompt=True, thinking=True) == f"{begin}<｜User｜>hi<｜Assistant｜><think>"
    assert render([user, answer]) == f"{begin}<｜User｜>hi<｜Assistant｜></think>yes{end}"
    think = {**answer, "reasoning_content": "so"}
    assert render([user, think]) == f"{begin}<｜User｜>hi<｜Assistant｜><think>so</think>yes{end}"
    assert render([user, think, user], add_generation_prompt=True) == (
        f"{begin}<｜User｜>hi<｜Assistant｜></think>yes{end}<｜User｜>hi<｜Assistant｜></think>"
    )


def test_the_assistant_mask_covers_exactly_what_the_target_writes(pair):
    tokenizer = pair[2]
    for extra, written in (({}, "yes"), ({"reasoning_content": "so"}, "so</think>yes")):
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes", **extra}]
        row = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        masked = [token for token, mask in zip(row["input_ids"], row["assistant_masks"]) if mask]
        assert tokenizer.decode(masked) == written + tokenizer.eos_token


@pytest.mark.parametrize("thinking", [False, True])
def test_greedy_text_is_the_targets_own_and_drafts_are_accepted(pair, thinking):
    target, drafter, tokenizer = pair
    total = None
    for prompt in DEMO_PROMPTS[:3]:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            thinking=thinking,
            return_dict=True,
            return_tensors="pt",
        )
        alone = target.generate(**inputs, do_sample=False, max_new_tokens=64)
        drafted = target.generate(**inputs, do_sample=False, max_new_tokens=64, assistant_model=drafter)
        assert torch.equal(alone, drafted)
        total = drafter.last_generation if total is None else total + drafter.last_generation
    assert total.accepted_length > 2.5
