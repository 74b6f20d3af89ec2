"""`HyperDFlashConfig` and `BlockGeometry`."""

import itertools
import json

import pytest
import torch

from hyperdflash import BlockGeometry, HyperDFlashConfig

TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "mask_token_id": 7,
    "target_num_hidden_layers": 4,
}


def test_defaults_are_those_for_deepseek_v4_flash():
    config = HyperDFlashConfig()
    assert config.target_layer_ids == [42]
    assert config.layer_types == ["full_attention"] * 5
    assert (config.context_source, config.reducer, config.path_norm) == ("pre_hc_head", "hc_gate", "value")
    assert (config.block_size, config.mask_token_id, config.hc_mult, config.vocab_size) == (7, 128799, 4, 129280)
    assert config.target_hidden_size == config.hidden_size == 4096


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 16},
        {"reducer": "fc", "context_source": "multi_layer", "target_layer_ids": [0, 2], "stream_pooling": "mean"},
        {"path_norm": "pre_gate", "sample_from_anchor": True, "block_size": 5},
        {"target_name_or_path": "org/target", "target_revision": "abc"},
    ],
)
def test_round_trip_through_a_folder_keeps_every_field(tmp_path, fields):
    config = HyperDFlashConfig(**TINY, **fields)
    config.save_pretrained(tmp_path)
    again = HyperDFlashConfig.from_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    for name, value in {**TINY, **fields}.items():
        assert getattr(again, name) == value == written[name]
    assert again.to_dict() == config.to_dict()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"block_size": 1}, "block_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"num_attention_heads": 3}, "num_attention_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 7}, "sliding_window"),
        ({"mask_token_id": 512}, "mask_token_id"),
        ({"mask_token_id": -1}, "mask_token_id"),
        ({"context_source": "last_hidden"}, "context_source"),
        ({"reducer": "softmax"}, "reducer"),
        ({"path_norm": "after"}, "path_norm"),
        ({"stream_pooling": "max"}, "stream_pooling"),
        ({"target_layer_ids": [2]}, "target_layer_ids"),
        ({"target_layer_ids": []}, "target_layer_ids"),
        ({"reducer": "fc", "context_source": "multi_layer", "target_layer_ids": [2, 1]}, "target_layer_ids"),
        ({"reducer": "fc", "context_source": "multi_layer", "target_layer_ids": [1, 4]}, "target_layer_ids"),
        ({"context_source": "multi_layer", "target_layer_ids": [1]}, "context_source"),
        ({"target_hidden_size": 32}, "target_hidden_size"),
        ({"stream_pooling": "mean"}, "stream_pooling"),
        ({"reducer": "fc", "path_norm": "value"}, "path_norm"),
        ({"hc_mult": 0}, "hc_mult"),
    ],
)
def test_an_inconsistent_combination_is_refused_with_field_value_and_rule(fields, named):
    with pytest.raises(ValueError, match=rf"HyperDFlashConfig\.{named}: found .+, wanted .+"):
        HyperDFlashConfig(**{**TINY, **fields})


@pytest.mark.parametrize("sample_from_anchor", [False, True])
@pytest.mark.parametrize("block_size", [2, 5, 7])
def test_geometry_equals_its_description_slot_by_slot(block_size, sample_from_anchor):
    geometry = BlockGeometry(block_size, sample_from_anchor)
    predicted = {slot: slot + 1 if sample_from_anchor else slot for slot in range(block_size)}
    drafts = [slot for slot in range(block_size) if predicted[slot] >= 1]
    assert list(geometry.draft_slots) == drafts
    assert geometry.num_draft_tokens == len(drafts)
    assert [geometry.label_offset(slot) for slot in drafts] == list(range(1, len(drafts) + 1))
    for anchor, slot in itertools.product((1, 9), range(block_size)):
        assert geometry.position(anchor, slot) == anchor + slot


@pytest.mark.parametrize("window", [None, 8, 9])
def test_context_is_seen_strictly_before_the_anchor_and_inside_the_window(window):
    geometry = BlockGeometry(7)
    anchor = 20
    for slot, key in itertools.product(range(7), range(30)):
        query = anchor + slot
        expected = key < anchor and (window is None or query - key < window)
        assert bool(geometry.sees_context(key, anchor, query, window)) == expected
    keys, queries = torch.arange(30), anchor + torch.arange(7)[:, None]
    on_tensors = geometry.sees_context(keys, torch.tensor(anchor), queries, window).expand(7, 30)
    expected = [[k < anchor and (window is None or q - k < window) for k in range(30)] for q in range(20, 27)]
    assert on_tensors.tolist() == expected
