"""The rewindable DeepSeek-V4 cache gives back exactly the state before the tokens that were taken back."""

import copy
import random

import pytest
import torch
from transformers import DynamicCache, LlamaConfig
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, DynamicLayer, DynamicSlidingWindowLayer, StaticCache
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4CSACache, DeepseekV4HCACache

from hyperdflash.generation_hyperdflash import (
    RewindableCSALayer,
    RewindableHCALayer,
    RewindableSlidingLayer,
    make_rewindable,
    rewindable,
)

TOLERANCE = 1e-5
STOCK_LAYERS = [DynamicSlidingWindowLayer, DeepseekV4CSACache, DeepseekV4HCACache]


def random_tokens(target, length, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(target.config.vocab_size, (1, length), generator=generator)


def layer_state(layer):
    """All tensors and counts that the next forward on a stock layer depends on."""
    state = {"keys": layer.keys, "length": layer.cumulative_length}
    for name in ("buffer_kv", "buffer_gate", "compressed_kv", "overlap_kv", "overlap_gate", "entry_count"):
        state |= {f"{name}.{entry}": value for entry, value in getattr(layer, name, {}).items()}
    return state


def assert_same_state(cache, reference, tolerance=TOLERANCE):
    for layer, wanted_layer in zip(cache.layers, reference.layers, strict=True):
        state, wanted = layer_state(layer), layer_state(wanted_layer)
        assert state.keys() == wanted.keys()
        for name, value in wanted.items():
            if isinstance(value, torch.Tensor):
                assert state[name].shape == value.shape, name
                torch.testing.assert_close(state[name], value, atol=tolerance, rtol=0)
            else:
                assert state[name] == value, name


@torch.no_grad()
def read(target, cache, tokens):
    return target(tokens, cache=cache).logits


@torch.no_grad()
def fuzz(target, cache, rounds, seed, length=700, max_drafts=9, prompt_length=None):
    """Random rounds on one text: read some of its tokens and some junk, take the junk back, go on.

    Returns the largest difference of any logit to the full forward without a cache, and the rounds that the text held.
    """
    chance = random.Random(seed)
    tokens = random_tokens(target, length, seed)
    wanted = target(tokens).logits
    position = chance.randrange(1, 60) if prompt_length is None else prompt_length
    worst = (read(target, cache, tokens[:, :position]) - wanted[:, :position]).abs().max().item()
    cache.crop(0)
    done = 0
    while done < rounds and position + max_drafts < length:
        accepted = chance.randrange(max_drafts + 1)
        junk = chance.randrange(max_drafts + 1 - accepted) if accepted else chance.randrange(1, max_drafts + 1)
        chunk = torch.cat([tokens[:, position : position + accepted], random_tokens(target, junk, done)], dim=1)
        logits = read(target, cache, chunk)
        if accepted:
            difference = logits[:, :accepted] - wanted[:, position : position + accepted]
            worst = max(worst, difference.abs().max().item())
        cache.crop(-junk)
        position += accepted
        done += 1
        assert cache.get_seq_length() == position
    return worst, done


@pytest.mark.parametrize("max_rollback", [None, 9])
def test_random_accept_and_reject_rounds_equal_the_full_forward(target, max_rollback):
    rounds, seed = 0, 0
    while rounds < 1000:  # for each of both records: 2,000 rounds in all
        cache = make_rewindable(DynamicCache(config=target.config), max_rollback=max_rollback)
        worst, done = fuzz(target, cache, rounds=1000 - rounds, seed=seed)
        assert worst < TOLERANCE, f"text {seed}"
        rounds, seed = rounds + done, seed + 1


@pytest.mark.parametrize(
    "layer_type", ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
)
@pytest.mark.parametrize("rate", [1, 3, 8])
def test_each_layer_type_alone_is_exact_whatever_the_compression_rate(make_target, layer_type, rate):
    rates = {"compressed_sparse_attention": rate, "heavily_compressed_attention": rate}
    target = make_target(layer_types=[layer_type] * 3, compress_rates=rates, sliding_window=5, seed=rate)
    cache = make_rewindable(DynamicCache(config=target.config))
    worst, done = fuzz(target, cache, rounds=60, seed=rate, length=250)
    assert done > 20
    assert worst < TOLERANCE


def test_rollback_may_span_several_windows_and_forwards(target):
    tokens = random_tokens(target, 150, seed=5)
    with torch.no_grad():
        wanted = target(tokens).logits
    cache = make_rewindable(DynamicCache(config=target.config))
    read(target, cache, tokens[:, :21])
    cache.crop(0)
    for _ in range(5):  # no crop between these: all of it can be taken back
        read(target, cache, random_tokens(target, 13, seed=6))
    cache.crop(-60)
    cache.crop(0)
    stock = DynamicCache(config=target.config)
    read(target, stock, torch.cat([tokens[:, :21], random_tokens(target, 13, seed=6)[:, :5]], dim=1))
    assert_same_state(cache, stock)

    cache = make_rewindable(DynamicCache(config=target.config))
    read(target, cache, tokens)
    cache.crop(-150)  # back to nothing
    torch.testing.assert_close(read(target, cache, tokens[:, :40]), wanted[:, :40], atol=TOLERANCE, rtol=0)


def test_crop_leaves_the_state_of_a_cache_that_never_saw_the_tokens(target):
    tokens = random_tokens(target, 90, seed=7)
    for length in (1, 3, 4, 5, 11, 12, 13, 15, 16, 17, 31, 32, 33, 64):
        for junk in (0, 1, 4, 7, 20):
            cache, stock = make_rewindable(DynamicCache(config=target.config)), DynamicCache(config=target.config)
            read(target, cache, torch.cat([tokens[:, :length], random_tokens(target, junk, seed=8)], dim=1))
            cache.crop(-junk)
            read(target, stock, tokens[:, :length])
            assert_same_state(cache, stock)


@pytest.mark.parametrize("length", [1, 7, 12, 16, 33, 70])
def test_recording_may_begin_on_a_cache_that_is_in_use(target, length):
    tokens = random_tokens(target, 150, seed=9)
    with torch.no_grad():
        wanted = target(tokens).logits
    cache = DynamicCache(config=target.config)  # stock layers, filled by a plain forward
    read(target, cache, tokens[:, :length])
    make_rewindable(cache)
    position = length
    for accepted, junk in [(0, 5), (3, 4), (1, 0), (7, 0), (2, 5), (0, 9), (6, 1), (16, 3), (0, 1)]:
        chunk = torch.cat([tokens[:, position : position + accepted], random_tokens(target, junk, junk)], dim=1)
        logits = read(target, cache, chunk)
        torch.testing.assert_close(
            logits[:, :accepted], wanted[:, position : position + accepted], atol=TOLERANCE, rtol=0
        )
        cache.crop(-junk)
        position += accepted


def test_rollback_behind_the_record_is_refused(target):
    tokens = random_tokens(target, 60, seed=10)
    cache = make_rewindable(DynamicCache(config=target.config))
    read(target, cache, tokens[:, :30])
    cache.crop(-2)  # commits 28 tokens
    read(target, cache, tokens[:, 28:33])
    before = copy.deepcopy(cache)
    with pytest.raises(ValueError, match="found -6, wanted at least -5"):
        cache.crop(-6)
    assert_same_state(cache, before, tolerance=0)
    cache.crop(-5)
    assert cache.get_seq_length() == 28

    cache = make_rewindable(DynamicCache(config=target.config), max_rollback=4)
    read(target, cache, tokens)
    with pytest.raises(ValueError, match="found -5, wanted at least -4"):
        cache.crop(-5)
    cache = DynamicCache(config=target.config)
    read(target, cache, tokens)
    make_rewindable(cache)
    with pytest.raises(ValueError, match="found -1, wanted at least 0"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="found 3, wanted 0 or a negative"):
        cache.crop(3)


def test_crop_without_a_record_is_refused(target):
    cache = make_rewindable(DynamicCache(config=target.config))
    for layer in cache.layers:
        layer.stop_recording()
    assert not cache.is_croppable
    read(target, cache, random_tokens(target, 5, seed=1))
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        cache.crop(-1)
    cache.activate_past_recording()
    assert cache.is_croppable
    cache.crop(0)


def stored_bytes(cache):
    """Bytes of all storages that the cache keeps alive."""
    storages = {}
    for layer in cache.layers:
        for value in vars(layer).values():
            for tensor in value.values() if isinstance(value, dict) else [value]:
                if isinstance(tensor, torch.Tensor):
                    storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def test_the_record_is_bounded(target):
    tokens = random_tokens(target, 800, seed=11)
    cache = make_rewindable(DynamicCache(config=target.config), max_rollback=8)
    stock = DynamicCache(config=target.config)
    for start in range(0, 800, 8):
        read(target, cache, tokens[:, start : start + 8])
        read(target, stock, tokens[:, start : start + 8])
        if start % 3 == 0:
            cache.crop(-2)
            read(target, cache, tokens[:, start + 6 : start + 8])
    # Nothing but the entries may grow: the record costs a few windows, whatever the length
    window_bytes = 4 * (2 * 16 * 16 + 12 * 16 + 4 * 4 * 32)
    assert stored_bytes(cache) < stored_bytes(stock) + 6 * window_bytes
    for layer in cache.layers:
        for raw in getattr(layer, "_raw_kv", {}).values():
            assert raw.shape[1] < layer.compress_rate + 8 + 8


def test_without_a_record_layers_behave_as_the_stock_layers_to_the_bit(target):
    tokens = random_tokens(target, 100, seed=12)
    cache, stock = make_rewindable(DynamicCache(config=target.config)), DynamicCache(config=target.config)
    for layer in cache.layers:
        layer.stop_recording()
    for start, stop in [(0, 37), (37, 38), (38, 45), (45, 64), (64, 100)]:
        assert torch.equal(read(target, cache, tokens[:, start:stop]), read(target, stock, tokens[:, start:stop]))
    assert_same_state(cache, stock, tolerance=0)
    assert stored_bytes(cache) == stored_bytes(stock)


def test_recording_itself_changes_no_bit(target):
    tokens = random_tokens(target, 100, seed=13)
    cache, stock = make_rewindable(DynamicCache(config=target.config)), DynamicCache(config=target.config)
    for start, stop in [(0, 37), (37, 38), (38, 45), (45, 64), (64, 100)]:
        assert torch.equal(read(target, cache, tokens[:, start:stop]), read(target, stock, tokens[:, start:stop]))
        cache.crop(0)
        assert_same_state(cache, stock, tolerance=0)


def test_other_caches_keep_the_stock_layers(target):
    make_rewindable(DynamicCache(config=target.config))
    assert [type(layer) for layer in DynamicCache(config=target.config).layers] == STOCK_LAYERS
    assert DYNAMIC_LAYER_TYPE_MAPPING["sliding_attention"] is DynamicSlidingWindowLayer
    assert DYNAMIC_LAYER_TYPE_MAPPING["compressed_sparse_attention"] is DeepseekV4CSACache
    assert DYNAMIC_LAYER_TYPE_MAPPING["heavily_compressed_attention"] is DeepseekV4HCACache


def test_after_the_block_the_cache_is_a_stock_cache_again(target):
    tokens = random_tokens(target, 60, seed=14)
    cache, stock = DynamicCache(config=target.config), DynamicCache(config=target.config)
    read(target, cache, tokens[:, :25])
    read(target, stock, tokens[:, :25])
    with pytest.raises(KeyboardInterrupt), rewindable(cache, max_rollback=6):
        wanted = [RewindableSlidingLayer, RewindableCSALayer, RewindableHCALayer]
        assert [type(layer) for layer in cache.layers] == wanted
        read(target, cache, tokens[:, 25:31])
        cache.crop(-3)
        raise KeyboardInterrupt
    read(target, stock, tokens[:, 25:28])
    assert [type(layer) for layer in cache.layers] == STOCK_LAYERS
    assert [vars(layer).keys() for layer in cache.layers] == [vars(layer).keys() for layer in stock.layers]
    assert not any(layer.record_past for layer in cache.layers)
    assert_same_state(cache, stock)
    torch.testing.assert_close(
        read(target, cache, tokens[:, 28:]), read(target, stock, tokens[:, 28:]), atol=TOLERANCE, rtol=0
    )


def test_reset_begins_an_empty_record(target):
    tokens = random_tokens(target, 50, seed=15)
    cache = make_rewindable(DynamicCache(config=target.config), max_rollback=9)
    read(target, cache, random_tokens(target, 41, seed=16))
    cache.crop(-3)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.is_croppable
    worst, done = fuzz(target, cache, rounds=20, seed=17, length=200)
    assert (worst < TOLERANCE, done) == (True, 20)
    with pytest.raises(ValueError, match="wanted at least"):
        cache.crop(-1)
    assert tokens.shape == (1, 50)


def test_reorder_moves_the_record_with_the_sequences(target):
    tokens = torch.cat([random_tokens(target, 70, seed=18), random_tokens(target, 70, seed=19)])
    with torch.no_grad():
        wanted = target(tokens).logits
    cache = make_rewindable(DynamicCache(config=target.config))
    read(target, cache, tokens[:, :30])
    cache.crop(0)
    read(target, cache, tokens[:, 30:55])
    swap = torch.tensor([1, 0])
    cache.reorder_cache(swap)
    cache.crop(-23)
    logits = read(target, cache, tokens[swap, 32:])
    torch.testing.assert_close(logits, wanted[swap, 32:], atol=TOLERANCE, rtol=0)


def test_a_cache_that_cannot_be_rewound_is_refused_by_name(target):
    class Odd(DynamicLayer):
        pass

    cache = DynamicCache(config=target.config)
    cache.layers[1] = Odd()
    with pytest.raises(ValueError, match=r"`cache.layers\[1\]`: found Odd"):
        make_rewindable(cache)
    assert type(cache.layers[0]) is DynamicSlidingWindowLayer
    static = StaticCache(config=LlamaConfig(num_hidden_layers=2), max_cache_len=8)
    with pytest.raises(ValueError, match="StaticLayer"):
        make_rewindable(static)


def test_a_rollback_past_what_the_record_still_holds_is_refused_before_any_layer_changes(make_target):
    target = make_target()
    cache = make_rewindable(DynamicCache(config=target.config))
    input_ids = torch.randint(3, 60, (1, 200))
    with torch.no_grad():
        with rewindable(cache, max_rollback=2):
            target(input_ids, cache=cache)
        for tokens in (3, 7, 40, 150):
            with pytest.raises(ValueError, match="reaches back to the last 2"):
                cache.crop(-tokens)
        cache.crop(-2)
        found = target(input_ids[:, 198:], cache=cache).logits
        wanted = target(input_ids).logits[:, 198:]
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
