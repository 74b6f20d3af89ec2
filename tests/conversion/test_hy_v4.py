"""HY-V4: its own form of `hc_head`, and a cache without compression: a drafter starts from it and assists it."""

import json

import pytest
import torch
from transformers import AutoModel, DynamicCache, HYV4Config, HYV4ForCausalLM

from hyperdflash.conversion import init_drafter
from hyperdflash.generation_hyperdflash import make_rewindable

STREAMS, WIDTH, VOCABULARY, LAYERS = 4, 32, 64, 4
SMALL = {"mask_token_id": 63, "num_hidden_layers": 1, "dtype": "float32"}


@pytest.fixture(scope="module")
def target() -> HYV4ForCausalLM:
    """A random HY-V4 in float32 with varied text: dense and sparse layers, indexers of their own and shared ones."""
    torch.manual_seed(0)
    config = HYV4Config(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=16,
        moe_intermediate_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        index_head_dim=16,
        index_n_heads=2,
        index_topk=512,
        max_position_embeddings=1024,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    model = HYV4ForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith((".base", ".hc_base", ".sinks", "embed_tokens.weight")):
            torch.nn.init.normal_(parameter)
    assert config.indexer_types == ["full", "full", "shared", "shared"]
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def drafter(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hy-v4")
    target.save_pretrained(folder / "target")
    init_drafter(folder / "target", folder / "drafter", **SMALL)
    return AutoModel.from_pretrained(folder / "drafter")


def prompt(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCABULARY - 1, (1, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("original_format", [True, False])
def test_gates_are_inherited_to_the_bit_and_the_reducer_is_its_hc_head(target, tmp_path, original_format):
    """HY-V4 applies the RMS after the product with the gates' weight: the same function, rounded elsewhere."""
    folder = tmp_path / "target"
    target.save_pretrained(folder, save_original_format=original_format)
    drafter = init_drafter(folder, tmp_path / "drafter", path_norm="none", **SMALL)
    for name in ("hc_fn", "hc_base", "hc_scale"):
        found, wanted = (getattr(module, name).detach() for module in (drafter.reducer, target.model.hc_head))
        assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))
    for scale in (1e-2, 1.0, 1e3):
        streams = torch.randn(1, 50, STREAMS, WIDTH) * scale
        with torch.no_grad():
            found, wanted = drafter.reducer(streams), target.model.hc_head(streams)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6 * scale)
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert (config["target_model_type"], config["reducer"]) == ("hy_v4", "hc_gate")
    assert config["target_rms_norm_eps"] == target.config.rms_norm_eps


@pytest.mark.parametrize("length", [1, 5, 60])
def test_greedy_text_is_identical_and_statistics_are_there(target, drafter, length):
    plain = target.generate(prompt(length), max_new_tokens=50, do_sample=False)
    drafted = target.generate(prompt(length), max_new_tokens=50, do_sample=False, assistant_model=drafter)
    assert torch.equal(plain, drafted) and len(set(plain[0, length:].tolist())) > 10
    record = drafter.last_generation
    assert record.new_tokens == 50 == 1 + record.accepted + record.bonus_tokens + record.plain_steps
    assert record.rounds > 0 and record.drafted > record.rounds
    assert record.verify_seconds > 0 and record.draft_seconds > 0


def test_drafts_that_are_right_are_accepted(target, drafter, monkeypatch):
    """The drafter is made to propose the target's own text, with every third draft wrong."""
    plain = target.generate(prompt(9), max_new_tokens=60, do_sample=False)
    from hyperdflash.generation_hyperdflash import HyperDFlashCandidateGenerator

    def pick_of_the_text(self, input_ids, logits):
        start = input_ids.shape[1]
        drafts = plain[:, start : start + logits.shape[1]].clone()
        drafts[:, 3:4] = 7
        return torch.cat([input_ids, drafts], dim=-1), logits[:, : drafts.shape[1]]

    monkeypatch.setattr(HyperDFlashCandidateGenerator, "_choose", pick_of_the_text)
    drafted = target.generate(prompt(9), max_new_tokens=60, do_sample=False, assistant_model=drafter)
    assert torch.equal(plain, drafted)
    assert drafter.last_generation.accepted_length == pytest.approx(4, abs=0.5)


def test_layers_as_context_and_padding_and_turns_and_outputs_work_as_well(target, drafter, tmp_path):
    target.save_pretrained(tmp_path / "target")
    options = SMALL | {"context_source": "multi_layer", "target_layer_ids": [0, 2], "reducer": "fc"}
    layered = init_drafter(tmp_path / "target", tmp_path / "drafter", **options)
    greedy = {"max_new_tokens": 15, "do_sample": False}
    ids, mask = prompt(12), torch.ones(1, 12, dtype=torch.long)
    mask[:, :4] = 0
    for assistant in (drafter, layered):
        for inputs in ({}, {"attention_mask": mask}):
            plain = target.generate(ids, **inputs, **greedy)
            assert torch.equal(plain, target.generate(ids, **inputs, **greedy, assistant_model=assistant))

    outputs = {"return_dict_in_generate": True, "output_hidden_states": True, "output_attentions": True}
    plain, drafted = (target.generate(ids, **greedy, **outputs, assistant_model=model) for model in (None, drafter))
    for field in ("hidden_states", "attentions"):
        for wanted, found in zip(getattr(plain, field), getattr(drafted, field), strict=True):
            for one, other in zip(wanted, found, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)

    cache = DynamicCache(config=target.config)
    first = target.generate(ids, **greedy, assistant_model=drafter, cache=cache)
    both = torch.cat([first, prompt(4, seed=1)], dim=-1)
    second = target.generate(both, **greedy, assistant_model=drafter, cache=cache)
    assert torch.equal(second, target.generate(both, **greedy))


def test_its_cache_gives_tokens_back_as_if_they_had_never_been(target):
    ids = prompt(40)
    cache = make_rewindable(DynamicCache(config=target.config))
    with torch.no_grad():
        wanted = target(ids).logits
        target(ids[:, :20], cache=cache, use_cache=True)
        target(prompt(7, seed=5), cache=cache, use_cache=True)
        cache.crop(-7)
        found = target(ids[:, 20:], cache=cache, use_cache=True).logits
    torch.testing.assert_close(found, wanted[:, 20:], rtol=1e-4, atol=1e-4)


def test_another_kind_of_target_is_refused(target, make_target, drafter):
    with pytest.raises(ValueError, match="target_model_type`: found 'hy_v4', wanted 'deepseek_v4'"):
        make_target().generate(prompt(4), assistant_model=drafter)
