"""Targets that are not what they say: one line that names the fault, exit code 2, and nothing written.

Each case is one change to a small target that `init` accepts, and is tried from a folder and from the Hub.
"""

import json
import os
import pickle
import struct
import warnings
from pathlib import Path

import pytest

from hyperdflash.cli import main

STREAMS, WIDTH, VOCABULARY = 4, 8, 64
CONFIG, INDEX, SHARD, OTHER = "config.json", "model.safetensors.index.json", "a.safetensors", "b.safetensors"
TENSORS = {
    "hc_head_fn": [STREAMS, STREAMS * WIDTH],
    "hc_head_base": [STREAMS],
    "hc_head_scale": [1],
    "norm.weight": [WIDTH],
    "embed.weight": [VOCABULARY, WIDTH],
    "head.weight": [VOCABULARY, WIDTH],
    "mtp.0.norm.weight": [WIDTH],
    "mtp.0.e_proj.weight": [WIDTH, WIDTH],
    "mtp.0.h_proj.weight": [WIDTH, WIDTH],
}
NAN, INFINITY = (struct.pack("<f", float(value)) for value in ("nan", "inf"))


def header() -> dict:
    entries, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in TENSORS.items():
        size = 4 * shape[0] * (shape[1] if len(shape) == 2 else 1)
        entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    return entries


DATA_BYTES = max(entry["data_offsets"][1] for name, entry in header().items() if name in TENSORS)
RAW = json.dumps(header()).encode()
GOOD = {
    CONFIG: json.dumps(
        {
            "model_type": "deepseek_v4",
            "vocab_size": VOCABULARY,
            "hidden_size": WIDTH,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "head_dim": 16,
            "qk_rope_head_dim": 8,
            "compress_ratios": [0, 4, 128, 0],
            "hc_mult": STREAMS,
        }
    ).encode(),
    INDEX: json.dumps({"weight_map": dict.fromkeys(TENSORS, SHARD)}).encode(),
    SHARD: len(RAW).to_bytes(8, "little") + RAW + bytes(DATA_BYTES),
}


def shard(raw: bytes | dict, data: bytes = bytes(DATA_BYTES), length: int | None = None) -> dict[str, bytes]:
    """The shard with another header, and perhaps a length of it that is not true."""
    raw = raw if isinstance(raw, bytes) else json.dumps(raw).encode()
    return {SHARD: (len(raw) if length is None else length).to_bytes(8, "little") + raw + data}


def entry(name: str, **changes) -> dict[str, bytes]:
    """The shard with changes to one tensor's entry."""
    return shard(header() | {name: header()[name] | changes})


def without(name: str) -> dict[str, bytes]:
    return shard({key: value for key, value in header().items() if key != name})


def index(**weight_map) -> dict[str, bytes]:
    return {INDEX: json.dumps({"weight_map": dict.fromkeys(TENSORS, SHARD) | weight_map}).encode()}


def config(**changes) -> dict[str, bytes]:
    return {CONFIG: json.dumps(json.loads(GOOD[CONFIG]) | changes).encode()}


class Trap:
    def __reduce__(self):
        return os.mkdir, ("sprung",)


DEEP = b"[" * 100_000
TWICE = RAW[:-1] + b', "hc_head_fn": ' + json.dumps(header()["hc_head_fn"]).encode() + b"}"
INDEX_TWICE = b'{"weight_map": {"hc_head_fn": "b.safetensors", ' + GOOD[INDEX].split(b"{", 2)[2]

# name: (files that replace the good ones, `None` removes one; what the line says)
CASES = {
    # The configuration
    "no config": ({CONFIG: None}, "config.json: found no such file"),
    "empty config": ({CONFIG: b""}, "config.json: found something else, wanted a JSON object"),
    "config that is no JSON": ({CONFIG: b"model_type: deepseek_v4"}, "wanted a JSON object"),
    "config that is no text": ({CONFIG: b"\xff\xfe\x00"}, "wanted a JSON object"),
    "config that is a list": ({CONFIG: b"[1]"}, "wanted a JSON object"),
    "config nested without end": ({CONFIG: DEEP}, "wanted a JSON object"),
    "config of 20 MB": ({CONFIG: GOOD[CONFIG] + b" " * 20_000_000}, "wanted at most 10000000"),
    "no model type": ({CONFIG: b"{}"}, "model_type: found None"),
    "unknown model type": (config(model_type="llama"), "model_type: found 'llama', wanted one of deepseek_v4"),
    "model type of code beside": (
        config(model_type="mine", auto_map={"AutoConfig": "code.Config"}) | {"code.py": b"raise SystemExit"},
        "model_type: found 'mine'",
    ),
    "model type that is no text": (config(model_type={"a": 1}), "model_type: found {'a': 1}"),
    "width that is text": (config(hidden_size="wide"), "hidden_size"),
    "width below zero": (config(hidden_size=-8), "hidden_size"),
    "no streams": (config(hc_mult=0), "hc_mult"),
    "rotary settings of another form": (config(rope_scaling=[1, 2]), "wanted a configuration of deepseek_v4"),
    "layer types unknown": (config(compress_ratios=[7, 7, 7, 7]), "config.json"),
    # The index
    "no weights at all": ({INDEX: None, SHARD: None}, "safetensors files: found none"),
    "pickled weights only": (
        {INDEX: None, SHARD: None, "pytorch_model.bin": pickle.dumps(Trap())},
        "safetensors files: found only pytorch_model.bin",
    ),
    "a pickle named safetensors": ({INDEX: None, SHARD: pickle.dumps(Trap())}, "header length: found"),
    "no index and an empty shard": ({INDEX: None, SHARD: shard({})[SHARD]}, "found none in the headers of 1"),
    "index cut off": ({INDEX: GOOD[INDEX][: len(GOOD[INDEX]) // 8]}, "model.safetensors.index.json: found"),
    "index without a map": ({INDEX: b'{"weight_map": [1]}'}, "weight_map: found none, wanted a map"),
    "index nested without end": ({INDEX: DEEP}, "model.safetensors.index.json: found RecursionError"),
    "index without the gates": ({INDEX: b'{"weight_map": {}}'}, "found none in model.safetensors.index.json"),
    "index that names a missing shard": ({SHARD: None}, "a.safetensors: found no such file"),
    "index that names itself": (index(hc_head_fn=INDEX), "shard: found 'model.safetensors.index.json', wanted"),
    "path out of the folder": (index(hc_head_fn="../a.safetensors"), "shard: found '../a.safetensors', wanted"),
    "path from the root": (index(hc_head_fn="/tmp/a.safetensors"), "shard: found '/tmp/a.safetensors', wanted"),
    "path with backslashes": (index(hc_head_fn="..\\a.safetensors"), "shard: found"),
    "shard that is a pickle": (index(hc_head_fn="a.bin") | {"a.bin": pickle.dumps(Trap())}, "shard: found 'a.bin'"),
    "a tensor in two shards": ({INDEX: INDEX_TWICE, OTHER: GOOD[SHARD]}, "shard: found 'b.safetensors' and"),
    "index that is wrong": (index(hc_head_fn=OTHER) | {OTHER: without("hc_head_fn")[SHARD]}, "wanted it here, as"),
    # The headers
    "empty shard": ({SHARD: b""}, "a.safetensors: header length: found 0"),
    "shard of five bytes": ({SHARD: GOOD[SHARD][:5]}, "in a file of 5 bytes"),
    "header cut off": ({SHARD: GOOD[SHARD][:100]}, "in a file of 100 bytes: it is truncated"),
    "header longer than the file": (shard(RAW, length=10**9), "header length: found 1000000000, wanted 2 to"),
    "header of 16 exabytes": (shard(RAW, length=2**64 - 1), "header length: found 18446744073709551615"),
    "header of no length": (shard(RAW, length=0), "header length: found 0"),
    "header that ends early": (shard(RAW, length=50), "header: found JSONDecodeError"),
    "header that is no JSON": (shard(b"{'a': 1}"), "header: found JSONDecodeError"),
    "header that is no text": (shard(b"\xff" * 9), "header: found UnicodeDecodeError"),
    "header that is a list": (shard(b"[1, 2]"), "header: found list, wanted a JSON object"),
    "header nested without end": (shard(DEEP), "header: found RecursionError"),
    "header with a tensor twice": (shard(TWICE), "the key 'hc_head_fn' twice"),
    "entry that is a number": (shard(header() | {"hc_head_fn": 3}), "wanted dtype, shape and two data_offsets"),
    "dtype of integers": (entry("hc_head_base", dtype="I32"), "dtype: found I32, wanted one of F32, BF16, F16"),
    "dtype unknown": (entry("hc_head_base", dtype="F32\n"), "dtype: found"),
    "dtype of half the size": (entry("hc_head_base", dtype="BF16"), "data_offsets: found 16 bytes, wanted 8"),
    "shape transposed": (entry("hc_head_fn", shape=[32, 4]), "shape: found [32, 4], wanted [4, 32]"),
    "shape below zero": (entry("hc_head_fn", shape=[-4, -32]), "wanted dtype, shape and two data_offsets"),
    "shape of fractions": (entry("hc_head_fn", shape=[4.0, 32.0]), "wanted dtype, shape and two data_offsets"),
    "offsets below zero": (entry("hc_head_fn", data_offsets=[-512, 0]), "wanted dtype, shape and two data_offsets"),
    "offsets backwards": (entry("hc_head_fn", data_offsets=[512, 0]), "data_offsets: found [512, 0]"),
    "offsets behind the end": (entry("hc_head_fn", data_offsets=[10**9, 10**9 + 512]), "truncated file"),
    "offsets that overlap": (entry("hc_head_base", data_offsets=[500, 516]), "inside of 'hc_head_fn', wanted 512"),
    "offsets too short": (entry("hc_head_fn", data_offsets=[0, 508]), "found 508 bytes, wanted 512"),
    # The values
    "data cut off": (shard(RAW, bytes(100)), "truncated file"),
    "gates that are no numbers": (shard(RAW, NAN * (DATA_BYTES // 4)), "found values that are not finite"),
    "gates without bound": (shard(RAW, INFINITY * (DATA_BYTES // 4)), "found values that are not finite"),
    "a gate too few": (without("hc_head_scale"), "'hc_head_scale': found none"),
    # Parts beside the gates
    "head of another vocabulary": (entry("head.weight", shape=[8, VOCABULARY]), "'head.weight': shape: found [8, 64]"),
    "embedding missing": (
        {INDEX: GOOD[INDEX].replace(b"embed.weight", b"other.weight")},
        "tensor 'model.embed_tokens.weight' or 'embed.weight': found none",
    ),
    "MTP module of unknown type": (entry("mtp.0.e_proj.weight", dtype="F3"), "dtype: found 'F3', wanted one of"),
    "MTP module of wrong bytes": (entry("mtp.0.h_proj.weight", dtype="F64"), "found 256 bytes, wanted 512"),
    "MTP module with a projection too few": (
        {INDEX: GOOD[INDEX].replace(b"mtp.0.h_proj", b"mtp.0.other")} | without("mtp.0.h_proj.weight"),
        "mtp.0.",
    ),
}


def write(folder: Path, changes: dict[str, bytes | None]) -> Path:
    folder.mkdir()
    for name, data in (GOOD | changes).items():
        if data is not None:
            (folder / name).write_bytes(data)
    return folder


def init(target: str | Path, output: Path) -> int:
    options = ["--mask_token_id", "63", "--num_hidden_layers", "1", "--with_mtp", "--with_head"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return main(["init", "--target", str(target), "--output", str(output), *options])


def test_the_target_that_the_cases_change_is_accepted(hub, tmp_path):
    hub.add_repository("somebody/target", write(tmp_path / "target", {}))
    assert init(tmp_path / "target", tmp_path / "local") == init("somebody/target", tmp_path / "remote") == 0


@pytest.mark.parametrize("where", ["folder", "hub"])
@pytest.mark.parametrize("case", CASES)
def test_malformed_target_is_one_line_and_exit_code_2_and_nothing_written(
    request, tmp_path, monkeypatch, capsys, case, where
):
    changes, message = CASES[case]
    target = write(tmp_path / "target", changes)
    if where == "hub":
        request.getfixturevalue("hub").add_repository("somebody/target", target)
        target = "somebody/target"
    monkeypatch.chdir(tmp_path)
    before = sorted(path for path in tmp_path.rglob("*") if "hub-" not in str(path))
    assert init(target, tmp_path / "out" / "drafter") == 2
    out, error = capsys.readouterr()
    (line,) = error.splitlines()
    assert line.startswith("hyperdflash init: error: ") and message in line
    assert out == ""
    assert sorted(path for path in tmp_path.rglob("*") if "hub-" not in str(path)) == before


def test_oversized_header_is_refused_without_being_read(tmp_path, capsys):
    target = write(tmp_path / "target", {})
    with (target / SHARD).open("r+b") as file:
        file.write((200_000_000).to_bytes(8, "little"))
        os.truncate(file.fileno(), 1 << 40)  # a terabyte of holes
    assert init(target, tmp_path / "drafter") == 2
    assert "header length: found 200000000, wanted 2 to 100000000" in capsys.readouterr().err


def test_shards_that_link_to_themselves_are_missing(tmp_path, capsys):
    target = write(tmp_path / "target", {SHARD: None})
    (target / SHARD).symlink_to(target / OTHER)
    (target / OTHER).symlink_to(target / SHARD)
    assert init(target, tmp_path / "drafter") == 2
    assert "a.safetensors: found no such file" in capsys.readouterr().err
