"""The cache on disk: what was put in comes out to the bit, or not at all."""

import os
import random
import signal
import time
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from hyperdflash.trainer import state_cache
from hyperdflash.trainer.state_cache import StateCache, document_key, state_manifest
from hyperdflash.trainer.states import STATE_DTYPES, DocumentStates

MANIFEST = {
    "format": 1,
    "target": "target",
    "target_revision": None,
    "target_files": {"config.json": "aa", "model.safetensors": "bb"},
    "target_dtype": "bfloat16",
    "target_options": {},
    "tokenizer": "cc",
    "chat_template": None,
    "source": "pre_hc_head",
    "target_layer_ids": [2],
    "streams": 4,
    "width": 32,
    "dtype": "bfloat16",
}


def documents(count, length=9, seed=0, layers=0, dtype=torch.bfloat16):
    """`{key: row}` of random documents of about `length` tokens; with `layers`, as `multi_layer` keeps them."""
    generator = torch.Generator().manual_seed(seed)
    rows = {}
    for index in range(count):
        n = length + index % 3
        residual = torch.randn(n, 4, 32, generator=generator)
        context = torch.randn(n, 4, 32 * layers, generator=generator) if layers else residual
        key = document_key(torch.randint(0, 60, (n,), generator=generator).tolist())
        rows[key] = DocumentStates(context=context, residual=residual).pack(dtype)
    return rows


def same(found, wanted):
    return found.keys() == wanted.keys() and all(
        found[part].dtype == wanted[part].dtype and torch.equal(found[part].float(), wanted[part].float())
        for part in wanted
    )


def filled(folder, rows, manifest=MANIFEST, **options):
    cache = StateCache(folder, manifest, **options)
    for key, row in rows.items():
        cache[key] = row
    cache.flush()
    return cache


def shards(folder):
    return sorted(folder.glob("*.safetensors"))


@pytest.mark.parametrize("layers", [0, 3])
@pytest.mark.parametrize("dtype", STATE_DTYPES)
def test_rows_come_out_as_they_went_in(tmp_path, dtype, layers):
    manifest = MANIFEST | {"dtype": dtype, "source": "multi_layer" if layers else "pre_hc_head"}
    rows = documents(5, layers=layers, dtype=STATE_DTYPES[dtype])
    writer = filled(tmp_path, rows, manifest)
    reader = StateCache(tmp_path, manifest, read_only=True)
    for cache in (writer, reader):
        assert set(cache) == set(rows) and len(cache) == 5
        assert all(key in cache and same(cache.get(key), row) for key, row in rows.items())
        assert document_key([1, 2, 3]) not in cache and cache.get(document_key([1, 2, 3])) is None


def test_keys_tell_documents_apart():
    assert document_key([1, 2, 3]) == document_key(torch.tensor([1, 2, 3]).tolist())
    assert len({document_key(ids) for ids in ([], [0], [0, 0], [1, 2, 3], [1, 2], [2, 1], [258])}) == 7


def test_a_killed_process_loses_the_shard_in_progress_and_nothing_else(tmp_path):
    rows = documents(10)
    size = sum(values.nbytes for values in next(iter(rows.values())).values())
    child = os.fork()
    if child == 0:
        cache = StateCache(tmp_path, MANIFEST, shard_bytes=3 * size)
        for key, row in rows.items():
            cache[key] = row
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert len(shards(tmp_path)) == 3
    again = StateCache(tmp_path, MANIFEST)
    found = [key for key in rows if again.get(key) is not None]
    assert found == list(rows)[:9]
    again[list(rows)[9]] = rows[list(rows)[9]]
    again.flush()
    reader = StateCache(tmp_path, MANIFEST, read_only=True)
    assert all(same(reader.get(key), row) for key, row in rows.items())


def test_a_process_that_dies_while_it_writes_leaves_no_shard(tmp_path, monkeypatch):
    def half(tensors, path, metadata):
        save_file(tensors, path, metadata)
        with open(path, "rb+") as file:
            file.truncate(os.path.getsize(path) // 2)
        raise KeyboardInterrupt

    cache = StateCache(tmp_path, MANIFEST)
    monkeypatch.setattr(state_cache, "save_file", half)
    with pytest.raises(KeyboardInterrupt):
        for key, row in documents(3).items():
            cache[key] = row
        cache.flush()
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


def test_what_dead_processes_left_is_swept_and_what_live_ones_write_is_not(tmp_path):
    StateCache(tmp_path, MANIFEST)
    old, new = (tmp_path / f"rank-00001-{name}.safetensors.1.partial" for name in ("old", "new"))
    for path in (old, new):
        path.write_bytes(b"half a shard")
    os.utime(old, (time.time() - 7200,) * 2)
    assert len(StateCache(tmp_path, MANIFEST, read_only=True)) == 0
    assert old.exists()  # a reader writes nothing
    assert len(StateCache(tmp_path, MANIFEST)) == 0
    assert not old.exists() and new.exists()


def test_shards_and_what_is_held_in_memory_are_bounded(tmp_path):
    rows = documents(40)
    largest = max(sum(values.nbytes for values in row.values()) for row in rows.values())
    cache = StateCache(tmp_path, MANIFEST, shard_bytes=4 * largest)
    for key, row in rows.items():
        cache[key] = row
        held = sum(values.nbytes for row in cache._pending.values() for values in row.values())
        assert held < 4 * largest
    cache.flush()
    assert len(shards(tmp_path)) >= 8
    assert all(path.stat().st_size < 5 * largest + 4096 for path in shards(tmp_path))


def test_ranks_write_into_one_folder_and_find_each_others_rows(tmp_path):
    rows = documents(12)
    keys = list(rows)
    ranks = [StateCache(tmp_path, MANIFEST, shard_bytes=1, rank=rank) for rank in (0, 1, 1)]  # two runs, even
    for index, key in enumerate(keys):
        ranks[index % 3][key] = rows[key]
    assert len(shards(tmp_path)) == 12
    assert {path.name[:11] for path in shards(tmp_path)} == {"rank-00000-", "rank-00001-"}
    for cache in ranks:
        assert all(same(cache.get(key), rows[key]) for key in keys)


@pytest.mark.parametrize("field", MANIFEST)
@pytest.mark.parametrize("read_only", [False, True])
def test_a_cache_of_something_else_is_refused_by_field(tmp_path, field, read_only):
    filled(tmp_path, documents(1))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    other = {"config.json": "aa", "model.safetensors": "other"} if field == "target_files" else "other"
    wanted = MANIFEST | {field: other}
    if field in ("source", "dtype"):
        wanted[field] = {"source": "multi_layer", "dtype": "float32"}[field]
    with pytest.raises(ValueError, match=rf"states_cache: {field}: found .*, wanted .*(other|multi_layer|float32)"):
        StateCache(tmp_path, wanted, read_only=read_only)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_files_of_the_target_that_are_missing_on_either_side_are_no_mismatch(tmp_path):
    filled(tmp_path, documents(1))
    for files in ({"config.json": "aa"}, {}, {"config.json": "aa", "model-2.safetensors": "dd"}):
        assert len(StateCache(tmp_path, MANIFEST | {"target_files": files}, read_only=True)) == 1


def test_a_folder_that_is_no_cache_is_refused_and_kept(tmp_path):
    with pytest.raises(FileNotFoundError, match="manifest.json"):
        StateCache(tmp_path / "none", MANIFEST, read_only=True)
    assert not (tmp_path / "none").exists()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="'config.json' and no manifest.json"):
        StateCache(tmp_path, MANIFEST)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    for text in ("", "[]", '{"states"', '{"other": 1}'):
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(ValueError, match="no manifest"):
            StateCache(tmp_path, MANIFEST)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.999])
def test_a_torn_shard_is_made_again_or_named_never_read(tmp_path, share):
    rows = documents(6)
    size = sum(values.nbytes for values in next(iter(rows.values())).values())
    filled(tmp_path, rows, shard_bytes=2 * size)
    torn = shards(tmp_path)[0]
    with torn.open("rb+") as file:
        file.truncate(int(torn.stat().st_size * share))

    reader = StateCache(tmp_path, MANIFEST, read_only=True)
    lost = [key for key in rows if key not in reader]
    assert len(lost) == 2
    assert all(same(reader.get(key), rows[key]) for key in rows if key not in lost)
    for key in lost:
        with pytest.raises(ValueError, match=torn.name):
            reader.get(key)

    with pytest.warns(UserWarning, match=torn.name):
        cache = StateCache(tmp_path, MANIFEST)
    for key in lost:
        assert cache.get(key) is None
        cache[key] = rows[key]
    cache.flush()
    reader = StateCache(tmp_path, MANIFEST, read_only=True)  # the torn one still lies there
    assert all(same(reader.get(key), row) for key, row in rows.items())


def test_a_flipped_bit_anywhere_in_a_shard_is_never_read(tmp_path):
    rows = documents(3, length=4)
    filled(tmp_path, rows)
    (path,) = shards(tmp_path)
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    draw = random.Random(0)
    places = draw.sample(range(header), 150) + draw.sample(range(header, len(whole)), 150)
    outcomes = {"refused": 0, "missing": 0, "whole": 0}
    for place in places:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << draw.randrange(8)]) + whole[place + 1 :])
        reader = StateCache(tmp_path, MANIFEST, read_only=True)
        refused = 0
        for key, row in rows.items():
            try:
                found = reader.get(key)
            except ValueError as error:
                assert path.name in str(error)
                refused += 1
            else:
                assert found is None or same(found, row), place
                outcomes["missing" if found is None else "whole"] += 1
        outcomes["refused"] += refused
        assert refused == 1 or place < header
    assert outcomes["refused"] >= 200 and outcomes["whole"] >= 300 and outcomes["missing"] > 0


def test_a_damaged_row_is_made_again_and_the_other_rows_are_kept(tmp_path):
    rows = documents(3)
    filled(tmp_path, rows)
    (path,) = shards(tmp_path)
    with path.open("rb+") as file:
        file.seek(-5, os.SEEK_END)
        byte = file.read(1)
        file.seek(-5, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    cache = StateCache(tmp_path, MANIFEST)
    with pytest.warns(UserWarning, match=rf"{path.name}: row .*checksum"):
        lost = [key for key in rows if cache.get(key) is None]
    assert len(lost) == 1
    cache[lost[0]] = rows[lost[0]]
    cache.flush()
    for read_only in (True, False):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            again = StateCache(tmp_path, MANIFEST, read_only=read_only)
            assert all(same(again.get(key), row) for key, row in rows.items())


def test_rows_are_checked_once_and_read_without_the_rest_of_the_cache(tmp_path, monkeypatch):
    def resident():
        return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    big = {document_key([index]): {"residual": torch.zeros(2000, 4, 2048).bfloat16()} for index in range(4)}  # 33 MB
    filled(tmp_path, big | documents(1))
    (key,) = documents(1)
    del big
    checked = []
    checksum = state_cache.row_checksum
    monkeypatch.setattr(state_cache, "row_checksum", lambda key, row: checked.append(key) or checksum(key, row))
    before = resident()
    reader = StateCache(tmp_path, MANIFEST, read_only=True)
    for _ in range(3):
        assert same(reader.get(key), documents(1)[key])
    assert checked == [key]
    assert resident() - before < 16 << 20


@pytest.fixture
def run(make_target, drafter, tmp_path):
    """What a run's manifest is made of, and the target's folder."""
    target = make_target()
    target.save_pretrained(tmp_path / "target", max_shard_size="20KB")

    def tokenizer(words=10):
        backend = Tokenizer(models.WordLevel({f"w{index}": index for index in range(words)}, unk_token="w0"))
        return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="w1", unk_token="w0")

    def manifest(**changes):
        fields = {
            "target": tmp_path / "target",
            "target_config": target.config,
            "target_dtype": torch.float32,
            "target_options": {},
            "drafter_config": drafter.config,
            "tokenizer": tokenizer(),
            "chat_template": "{{ messages }}",
            "dtype": "bfloat16",
        }
        return state_manifest(**fields | changes)

    return tmp_path / "target", manifest, tokenizer


def test_the_manifest_follows_what_decides_the_states(run, drafter, make_drafter, target):
    folder, manifest, tokenizer = run
    before = manifest()

    def changed(**changes):
        return {name for name, value in manifest(**changes).items() if value != before[name]}

    assert not changed()
    used = tokenizer()
    used(["w3 w4", "w5"], padding=True, truncation=True, max_length=1)  # leaves its marks in a fast tokenizer
    assert not changed(tokenizer=used)
    assert changed(tokenizer=tokenizer(11)) == {"tokenizer"}
    assert changed(chat_template="{{ message }}") == changed(chat_template=None) == {"chat_template"}
    assert changed(dtype="float32") == {"dtype"}
    assert changed(target_dtype=torch.bfloat16) == {"target_dtype"}
    assert not changed(target_options={"device_map": "auto", "max_memory": {0: "10GB"}})
    assert changed(target_options={"quantization_config": {"load_in_4bit": True}}) == {"target_options"}
    multi = make_drafter(target, context_source="multi_layer", reducer="fc", path_norm="none", target_layer_ids=[0, 2])
    assert changed(drafter_config=multi.config) == {"source", "target_layer_ids"}


def test_another_training_of_the_target_is_another_target(run):
    folder, manifest, _ = run
    before = manifest()["target_files"]
    assert set(before) == {"config.json", *(path.name for path in folder.glob("*.safetensors"))}
    for path in shards(folder):
        tensors = load_file(path)
        name = next((name for name in tensors if "layers." in name and name.endswith("wq_a.weight")), None)
        if name is not None:  # not one of the borrowed modules
            tensors[name] += 1e-3
            save_file(tensors, path, metadata={"format": "pt"})
            break
    after = manifest()["target_files"]
    assert [name for name in before if before[name] != after[name]] == [path.name]
