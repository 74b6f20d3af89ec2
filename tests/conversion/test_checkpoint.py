"""Malformed checkpoints: one line that names file and tensor, what was found and what was wanted."""

import json
import pickle
import struct
from pathlib import Path

import pytest

from hyperdflash.conversion import read_gates

STREAMS, WIDTH = 4, 8
INDEX = "model.safetensors.index.json"
SHAPES = {"hc_head_fn": [4, 32], "hc_head_base": [4], "hc_head_scale": [1]}


def entries(**changes) -> dict:
    """A header for the gates in float32; `changes` replace a tensor's entry, or with `None` remove it."""
    header, end = {}, 0
    for name, shape in SHAPES.items():
        size = 4 * (shape[0] * shape[1] if len(shape) == 2 else shape[0])
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    header = {name: header[name] | changes.get(name, {}) for name in header if changes.get(name, {}) is not None}
    return header | {name: entry for name, entry in changes.items() if name not in SHAPES}


def safetensors_bytes(header: object, data: bytes = bytes(532)) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def index(**weight_map) -> bytes:
    return json.dumps({"metadata": {}, "weight_map": dict.fromkeys(SHAPES, "a.safetensors") | weight_map}).encode()


GOOD = safetensors_bytes(entries())
NAN = struct.pack("<f", float("nan"))


@pytest.mark.parametrize(
    ("files", "error", "message"),
    [
        ({}, FileNotFoundError, "safetensors files: found none, wanted model.safetensors or shards"),
        ({"pytorch_model.bin": b""}, FileNotFoundError, "safetensors files: found only pytorch_model.bin"),
        ({"model.safetensors": b""}, ValueError, "model.safetensors: header length: found 0"),
        ({"model.safetensors": GOOD[:5]}, ValueError, "model.safetensors: header length"),
        ({"model.safetensors": GOOD[:100]}, ValueError, "header length: found .* in a file of 100 bytes"),
        ({"model.safetensors": b"\xff" * 8 + GOOD[8:]}, ValueError, "header length: found 18446744073709551615"),
        ({"model.safetensors": bytes(8) + GOOD[8:]}, ValueError, "header length: found 0, wanted 2 to"),
        ({"model.safetensors": safetensors_bytes(b"{'a'")}, ValueError, "header: found JSONDecodeError.*wanted JSON"),
        ({"model.safetensors": safetensors_bytes(b"\xff\xfe\xff")}, ValueError, "header: found UnicodeDecodeError"),
        ({"model.safetensors": safetensors_bytes(b"[" * 100_000)}, ValueError, "header: found .*wanted JSON"),
        ({"model.safetensors": safetensors_bytes([1])}, ValueError, "header: found list, wanted a JSON object"),
        ({"model.safetensors": GOOD[:-4]}, ValueError, "'hc_head_scale': data_offsets: found .528, 532.*528 bytes"),
        (
            {"model.safetensors": safetensors_bytes(entries(hc_head_scale=None))},
            ValueError,
            "tensor 'hc_head_scale': found none, wanted it beside 'hc_head_fn'",
        ),
        (
            {"model.safetensors": safetensors_bytes({"hc_head_fn": 3, "hc_head_base": {}, "hc_head_scale": {}})},
            ValueError,
            "tensor '.*': found .*, wanted dtype, shape and two data_offsets",
        ),
        (
            {"model.safetensors": safetensors_bytes(entries(hc_head_fn={"shape": [4, -32]}))},
            ValueError,
            "'hc_head_fn': found .*-32.*, wanted dtype, shape",
        ),
        (
            {"model.safetensors": safetensors_bytes(entries(hc_head_fn={"data_offsets": [512, 0]}))},
            ValueError,
            r"'hc_head_fn': data_offsets: found \[512, 0\]",
        ),
        (
            {"model.safetensors": safetensors_bytes(entries(hc_head_fn={"data_offsets": [0, 10**12]}))},
            ValueError,
            "'hc_head_fn': data_offsets: .*truncated file",
        ),
        (
            {"model.safetensors": safetensors_bytes(entries(hc_head_fn={"data_offsets": [0, 508]}))},
            ValueError,
            r"'hc_head_fn': data_offsets: found 508 bytes, wanted 512 for F32 \[4, 32\]",
        ),
        (
            {"model.safetensors": safetensors_bytes(entries(hc_head_fn={"shape": [32, 4]}))},
            ValueError,
            r"'hc_head_fn': shape: found \[32, 4\], wanted \[4, 32\] for 4 streams of width 8",
        ),
        (
            {"model.safetensors": safetensors_bytes(entries(hc_head_scale={"shape": []}))},
            ValueError,
            r"'hc_head_scale': shape: found \[\], wanted \[1\]",
        ),
        (
            {"model.safetensors": safetensors_bytes(entries(hc_head_base={"dtype": "I32"}))},
            ValueError,
            "'hc_head_base': dtype: found I32, wanted one of F32, BF16, F16",
        ),
        (
            {"model.safetensors": safetensors_bytes(entries(hc_head_base={"dtype": "F8_E4M3"}))},
            ValueError,
            "dtype: found F8_E4M3",
        ),
        ({"model.safetensors": GOOD[:-532] + NAN * 133}, ValueError, "'hc_head_fn': found values that are not finite"),
        ({INDEX: b"{", "a.safetensors": GOOD}, ValueError, "index.json: found JSONDecodeError.*wanted JSON"),
        ({INDEX: b"[]", "a.safetensors": GOOD}, ValueError, "weight_map: found none"),
        ({INDEX: b'{"weight_map": {}}', "a.safetensors": GOOD}, ValueError, "found none in model.safetensors.index"),
        (
            {INDEX: b'{"weight_map": {"hc_head_fn": "a.safetensors"}}', "a.safetensors": GOOD},
            ValueError,
            "tensor 'hc_head_base': found none, wanted it beside 'hc_head_fn'",
        ),
        ({INDEX: index()}, FileNotFoundError, "a.safetensors: found no such file, wanted the shard of 'hc_head_"),
        (
            {INDEX: index(), "a.safetensors": safetensors_bytes(entries(hc_head_base=None))},
            ValueError,
            "a.safetensors: tensor 'hc_head_base': found none, wanted it here, as model.safetensors.index.json says",
        ),
        (
            {INDEX: index(hc_head_fn="../b.safetensors"), "a.safetensors": GOOD, "../b.safetensors": GOOD},
            ValueError,
            "tensor 'hc_head_fn': shard: found '../b.safetensors', wanted the name of a .safetensors file",
        ),
        ({INDEX: index(hc_head_fn="/etc/a.safetensors"), "a.safetensors": GOOD}, ValueError, "shard: found '/etc/"),
        ({INDEX: index(hc_head_fn="..\\\\b.safetensors"), "a.safetensors": GOOD}, ValueError, "shard: found"),
        ({INDEX: index(hc_head_fn="a.bin"), "a.safetensors": GOOD}, ValueError, "shard: found 'a.bin'"),
        (
            {"a.safetensors": safetensors_bytes({}), "b.safetensors": GOOD[:50]},
            ValueError,
            "b.safetensors: header len",
        ),
        ({"a.safetensors": safetensors_bytes({})}, ValueError, "found none in the headers of 1 safetensors files"),
    ],
)
def test_malformed_checkpoint_is_one_line_that_says_what_is_wrong(tmp_path, files, error, message):
    folder = tmp_path / "target"
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    with pytest.raises(error, match=message) as caught:
        read_gates(folder, STREAMS, WIDTH)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_no_pickle_is_ever_loaded(tmp_path, name):
    class Trap:
        def __reduce__(self):
            return Path.touch, (tmp_path / "sprung",)

    (tmp_path / name).write_bytes(pickle.dumps(Trap()))
    with pytest.raises((ValueError, FileNotFoundError)):
        read_gates(tmp_path, STREAMS, WIDTH)
    assert not (tmp_path / "sprung").exists()


def test_index_entry_across_two_blocks_is_found_wherever_the_cut_falls(tmp_path, monkeypatch):
    (tmp_path / "a.safetensors").write_bytes(GOOD)
    (tmp_path / INDEX).write_bytes(index(before="x.safetensors", zzz="x.safetensors"))
    for block in range(1, 300):
        monkeypatch.setattr("hyperdflash.conversion.checkpoint.INDEX_BLOCK_BYTES", block)
        assert read_gates(tmp_path, STREAMS, WIDTH).hc_fn.shape == (4, 32)


def test_single_file_comes_before_an_index_as_in_transformers(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(GOOD)
    (tmp_path / INDEX).write_bytes(index(hc_head_fn="missing.safetensors"))
    assert read_gates(tmp_path, STREAMS, WIDTH).sources["hc_fn"]["file"] == "model.safetensors"
