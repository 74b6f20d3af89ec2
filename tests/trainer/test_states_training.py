"""Live, cached and filled-on-miss training are one and the same, to the bit."""

import hashlib
import json
from dataclasses import asdict

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import TrlParser

import hyperdflash.trainer.run as run_module
from hyperdflash.modeling_hyperdflash import HyperDFlashModel
from hyperdflash.trainer import (
    CachedTargetStates,
    HyperDFlashTrainer,
    HyperDFlashTrainingArguments,
    LiveTargetStates,
    StateCache,
    TrainArguments,
    run_train,
)
from hyperdflash.trainer.state_cache import state_manifest
from hyperdflash.trainer.states import STATE_DTYPES
from hyperdflash.trainer.target_modules import TargetModules, load_without_layers

MULTI_LAYER = {"context_source": "multi_layer", "reducer": "fc", "path_norm": "none", "target_layer_ids": [0, 2]}


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("CI", "1")  # no telemetry
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def tokenizer():
    words = {"<bos>": 0, "<eos>": 1, "<pad>": 2} | {f"w{i}": i for i in range(3, 64)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w3")),
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
    )


@pytest.fixture(scope="module")
def rows():
    """Pre-tokenised rows of very different lengths: a prompt of 6 tokens, and an answer."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(12, 60, (10,), generator=generator).tolist()
    ids = [torch.randint(3, 60, (length,), generator=generator).tolist() for length in lengths]
    return Dataset.from_list([{"input_ids": row, "assistant_masks": [0] * 6 + [1] * (len(row) - 6)} for row in ids])


@pytest.fixture(scope="module")
def folders(make_target, make_drafter, tokenizer, rows, tmp_path_factory):
    """A target's folder in many shards, drafters' and the rows'."""
    root, target = tmp_path_factory.mktemp("folders"), make_target()
    target.save_pretrained(root / "target", max_shard_size="20KB")
    tokenizer.save_pretrained(root / "target")
    make_drafter(target).save_pretrained(root / "pre_hc_head")
    make_drafter(target, **MULTI_LAYER).save_pretrained(root / "multi_layer")
    rows.to_json(str(root / "rows.jsonl"))
    return root


def arguments(output, **overrides):
    """Three shuffled epochs with batches of 4, 4 and 2 documents."""
    fields = {
        "output_dir": str(output),
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": 4,
        "num_train_epochs": 3,
        "num_anchors": 6,
        "learning_rate": 1e-3,
        "kl_weight": 0.5,
        "kl_teacher": "hc_head",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return HyperDFlashTrainingArguments(**fields | overrides)


def train(states, folders, output, rows, tokenizer, source="pre_hc_head", **overrides):
    """What was logged, and the drafter's parameters at the end."""
    drafter = HyperDFlashModel.from_pretrained(folders / source, dtype=torch.float32)
    args = arguments(output, **overrides)
    trainer = HyperDFlashTrainer(drafter, states, args, rows, processing_class=tokenizer)
    trainer.train()
    states.close()
    names = ("loss", "ce", "kl", "grad_norm", "accepted_length")
    logged = [[entry[name] for name in names] for entry in trainer.state.log_history if "loss" in entry]
    return logged, torch.cat([parameter.detach().flatten() for parameter in drafter.parameters()])


@pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker processes")
@pytest.mark.parametrize(
    ("target_dtype", "dtype", "source"),
    [
        (torch.bfloat16, "bfloat16", "pre_hc_head"),
        (torch.bfloat16, "bfloat16", "multi_layer"),
        (torch.bfloat16, "float8_e4m3fn", "pre_hc_head"),
        (torch.float32, "float32", "pre_hc_head"),
        (torch.float32, "bfloat16", "multi_layer"),
    ],
)
def test_live_filled_and_cached_training_are_equal_to_the_bit(
    folders, rows, tokenizer, tmp_path, target_dtype, dtype, source
):
    target = AutoModelForCausalLM.from_pretrained(folders / "target", dtype=target_dtype)
    config = HyperDFlashModel.from_pretrained(folders / source).config
    manifest = state_manifest(
        folders / "target", target.config, target_dtype, {}, config, tokenizer, tokenizer.chat_template, dtype
    )
    modules = TargetModules.of(load_without_layers(folders / "target", dtype=target_dtype))
    kind = STATE_DTYPES[dtype]

    def run(states, **overrides):
        return train(states, folders, tmp_path / "out", rows, tokenizer, source, **overrides)

    logged, weights = run(LiveTargetStates(target, config, dtype=kind))
    assert len(logged) == 9 and logged[-1][0] != logged[0][0]

    unrounded = LiveTargetStates(target, config)
    cache = StateCache(tmp_path / "cache", manifest, shard_bytes=20_000)
    kept = StateCache(tmp_path / "cache", manifest, read_only=True)
    for states, overrides in (
        (CachedTargetStates(cache, modules, kind, lambda: unrounded), {}),  # fills a cache on disk
        (CachedTargetStates(kept, modules, kind), {}),
        (CachedTargetStates(kept, modules, kind), {"dataloader_num_workers": 2}),
        (CachedTargetStates({}, modules, kind, lambda: unrounded), {}),  # fills the memory
    ):
        again, same_weights = run(states, **overrides)
        assert again == logged
        assert torch.equal(same_weights, weights)
    assert len(list((tmp_path / "cache").glob("*.safetensors"))) > 1


def test_rounding_is_what_would_make_them_differ(folders, rows, tokenizer, tmp_path):
    """The other tests would see a source that rounds otherwise."""
    target = AutoModelForCausalLM.from_pretrained(folders / "target", dtype=torch.float32)
    config = HyperDFlashModel.from_pretrained(folders / "pre_hc_head").config
    runs = [
        train(LiveTargetStates(target, config, dtype=dtype), folders, tmp_path, rows, tokenizer, max_steps=1)[0]
        for dtype in (None, torch.float32, torch.bfloat16, torch.float8_e4m3fn)
    ]
    assert runs[0] == runs[1] and runs[1] != runs[2] != runs[3]


@pytest.fixture
def verb(folders, tmp_path):
    """`hyperdflash train` on the folders: the losses it logged, and its provenance."""

    def run(states_source="live", output="out", **overrides):
        fields = {
            "drafter": str(folders / "pre_hc_head"),
            "target": str(folders / "target"),
            "data": str(folders / "rows.jsonl"),
            "target_dtype": "bfloat16",
            "states_source": states_source,
        } | ({"states_cache": str(tmp_path / "cache")} if states_source != "live" else {})
        script = TrainArguments(**fields | overrides)
        run_train(script, arguments(tmp_path / output))
        history = json.loads((tmp_path / output / "trainer_state.json").read_text())["log_history"]
        record = json.loads((tmp_path / output / "provenance.json").read_text())
        return [entry["loss"] for entry in history if "loss" in entry], record

    return run


@pytest.fixture
def loads(monkeypatch):
    """How often the verb has loaded a target."""
    loaded = []

    class Counting(AutoModelForCausalLM):
        @classmethod
        def from_pretrained(cls, *args, **kwargs):
            loaded.append(args[0])
            return AutoModelForCausalLM.from_pretrained(*args, **kwargs)

    monkeypatch.setattr(run_module, "AutoModelForCausalLM", Counting)
    return loaded


def test_the_verb_trains_alike_from_all_sources_and_a_full_cache_never_loads_the_target(verb, loads, tmp_path):
    losses, record = verb()
    assert len(losses) == 9 and len(loads) == 1
    assert record["arguments"]["states_cache"] is None
    filled, record = verb("fill", "filled")
    assert filled == losses and len(loads) == 2
    again, _ = verb("fill", "again")
    cached, cached_record = verb("cache", "cached")
    memory, _ = verb("fill", "memory", states_cache=None)
    assert again == cached == memory == losses and len(loads) == 3  # the last one for the memory
    manifest = (tmp_path / "cache" / "manifest.json").read_bytes()
    wanted = {"manifest_sha256": hashlib.sha256(manifest).hexdigest()}
    assert record["arguments"]["states_cache"] == cached_record["arguments"]["states_cache"] == wanted
    assert str(tmp_path) not in manifest.decode() and json.loads(manifest)["states"]["target"] == "target"


def test_the_verb_refuses_a_cache_of_something_else_before_it_loads_the_target(verb, loads, folders, tmp_path):
    manifest = tmp_path / "cache" / "manifest.json"
    verb("fill", "filled")
    loads.clear()
    before = manifest.read_bytes()
    other = PreTrainedTokenizerFast.from_pretrained(folders / "target")
    other.add_tokens(["another"])
    other.save_pretrained(tmp_path / "other")
    changes = {
        "dtype": {"states_dtype": "float32"},
        "target_dtype": {"target_dtype": "float32"},
        "target_options": {"target_init_kwargs": {"experts_implementation": "eager"}},
        "source": {"drafter": str(folders / "multi_layer")},
        "tokenizer": {"tokenizer": str(tmp_path / "other")},
    }
    for field, change in changes.items():
        for source in ("fill", "cache"):
            with pytest.raises(ValueError, match=rf"states_cache: {field}: found .*, wanted"):
                verb(source, "refused", **change)
    assert not loads and not (tmp_path / "refused").exists() and manifest.read_bytes() == before


def test_the_verb_says_which_rows_a_cache_lacks_before_it_trains(verb, rows, tmp_path):
    verb("fill", "filled")
    more = Dataset.from_list([*rows, {"input_ids": list(range(3, 40)), "assistant_masks": [0] * 6 + [1] * 31}])
    more.to_json(str(tmp_path / "more.jsonl"))
    with pytest.raises(ValueError, match="found no states of 1 documents, the first in row 10"):
        verb("cache", "refused", data=str(tmp_path / "more.jsonl"))
    assert not (tmp_path / "refused" / "provenance.json").exists()
    losses, _ = verb("fill", "more", data=str(tmp_path / "more.jsonl"))
    assert verb("cache", "cached", data=str(tmp_path / "more.jsonl"))[0] == losses
    torn = max((tmp_path / "cache").glob("*.safetensors"), key=lambda path: path.stat().st_size)
    torn.write_bytes(torn.read_bytes()[:-1])
    with pytest.raises(ValueError, match=torn.name):
        verb("cache", "refused")
    with pytest.warns(UserWarning, match=torn.name):
        verb("fill", "mended")
    assert verb("cache", "cached", data=str(tmp_path / "more.jsonl"))[0] == losses


def test_a_run_that_fails_keeps_the_rows_it_has_made(verb, loads, tmp_path, monkeypatch):
    compute_loss, steps = HyperDFlashTrainer.compute_loss, []

    def fail(self, *args, **kwargs):
        steps.append(len(self.target_states.rows))
        if len(steps) == 2:
            raise KeyboardInterrupt
        return compute_loss(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(HyperDFlashTrainer, "compute_loss", fail)
        with pytest.raises(KeyboardInterrupt):
            verb("fill", "stopped")
    assert steps == [0, 4]
    (shard,) = (tmp_path / "cache").glob("*.safetensors")
    losses, _ = verb("fill", "whole")
    assert shard.exists() and losses == verb()[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"states_source": "cache"}, "states_cache: found None, wanted a folder, as states_source is 'cache'"),
        ({"states_cache": "folder"}, "states_cache: found 'folder', wanted none, as states_source is 'live'"),
        ({"states_source": "disk"}, "states_source: found 'disk', wanted one of"),
        ({"states_dtype": "float16"}, "states_dtype: found 'float16', wanted one of"),
        ({"states_shard_mb": 0}, "states_shard_mb: found 0, wanted at least 1"),
        ({"target_batch_size": 0}, "target_batch_size: found 0, wanted at least 1"),
        ({"states_source": "fill", "target_batch_size": 4}, "target_batch_size: found 4, wanted 1"),
    ],
)
def test_options_that_do_not_go_together_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=f"TrainArguments.{message}"):
        TrainArguments(drafter="a", target="b", data="c", **change)


def test_the_options_come_from_the_command_line():
    flags = "--drafter a --target b --data c --states_source fill --states_cache d --states_dtype float8_e4m3fn"
    (script,) = TrlParser(TrainArguments).parse_args_and_config(flags.split())
    found = asdict(script)
    assert (found["states_source"], found["states_cache"]) == ("fill", "d")
    assert (found["states_dtype"], found["states_shard_mb"]) == ("float8_e4m3fn", 512)
