"""`init` from the Hub: byte ranges of one commit, nothing half written, and no code of the target's repository."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import hub_server
import pytest
import torch
from huggingface_hub import constants
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from hyperdflash.cli import main
from hyperdflash.conversion import InitArguments, init_drafter, read_gates, run_init
from hyperdflash.conversion.sources import HubRepository
from hyperdflash.trainer.target_modules import TargetModules, load_without_layers

_spec = importlib.util.spec_from_file_location("v4_flash", Path(__file__).with_name("v4_flash.py"))
v4_flash = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(v4_flash)

SMALL_BODY = [
    *("--num_hidden_layers", "1"),
    *("--intermediate_size", "64"),
    *("--num_attention_heads", "1"),
    *("--num_key_value_heads", "1"),
]
GATES = ("fn", "base", "scale")
WIDTH, STREAMS, VOCABULARY = 32, 4, 64


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr("hyperdflash.conversion.sources.FIRST_WAIT", 0.0)


@pytest.fixture(scope="module")
def v4_flash_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("v4-flash") / "files"
    return folder, v4_flash.write_v4_flash(folder)


def write_target(folder: Path, **config) -> dict[str, torch.Tensor]:
    """A small DeepSeek-V4 in released names: what `init` reads of it, an MTP module in FP8 and packed FP4 included."""
    generator = torch.Generator().manual_seed(2)

    def random(*shape, dtype=torch.float32):
        return torch.randn(*shape, generator=generator).to(dtype)

    bytes_of = {torch.float8_e4m3fn: (256, 100), torch.int8: (64, 100)}
    first = {"embed.weight": random(VOCABULARY, WIDTH, dtype=torch.bfloat16)}
    last = {
        "norm.weight": random(WIDTH, dtype=torch.bfloat16),
        "head.weight": random(VOCABULARY, WIDTH, dtype=torch.bfloat16),
        "hc_head_fn": random(STREAMS, STREAMS * WIDTH),
        "hc_head_base": random(STREAMS),
        "hc_head_scale": random(1),
        "mtp.0.norm.weight": random(WIDTH, dtype=torch.bfloat16),
        "mtp.0.e_proj.weight": random(WIDTH, WIDTH).to(torch.float8_e4m3fn),
        "mtp.0.e_proj.scale": torch.full((1, 1), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu),
    }
    mtp = {
        "mtp.0.h_proj.weight": random(WIDTH, WIDTH).to(torch.float8_e4m3fn),
        "mtp.0.hc_head_fn": random(STREAMS, STREAMS * WIDTH),
        **{
            f"mtp.0.ffn.experts.{expert}.w1.weight": torch.randint(
                -128, 128, bytes_of[torch.int8], generator=generator, dtype=torch.int8
            )
            for expert in range(40)
        },
    }
    folder.mkdir(parents=True)
    shards = {f"model-{i:05}-of-00003.safetensors": tensors for i, tensors in enumerate((first, last, mtp), 1)}
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
    weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    fields = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 3, "hc_mult": STREAMS}
    fields |= {"num_attention_heads": 2, "head_dim": 16, "qk_rope_head_dim": 8, "compress_ratios": [0, 4, 128, 0]}
    (folder / "config.json").write_text(json.dumps({"model_type": "deepseek_v4", **fields, **config}))
    return first | last | mtp


SMALL = [*SMALL_BODY, "--mask_token_id", "63"]


def init(repository: str, output: Path, *options: str) -> int:
    return main(["init", "--target", repository, "--output", str(output), *options])


def one_line(capsys) -> str:
    error = capsys.readouterr().err
    lines = [line for line in error.splitlines() if line.startswith("hyperdflash init: error: ")]
    assert len(lines) == 1 and "Traceback" not in error, error
    return lines[0]


# The real thing's size


def test_init_of_v4_flash_transfers_under_3_megabytes_in_under_a_minute(hub, v4_flash_folder, tmp_path, capsys):
    folder, gates = v4_flash_folder
    commit = hub.add_repository("deepseek-ai/DeepSeek-V4-Flash", folder)
    start = time.perf_counter()
    assert init("deepseek-ai/DeepSeek-V4-Flash", tmp_path / "drafter", *SMALL_BODY) == 0
    assert time.perf_counter() - start < 60
    assert hub.bytes_sent < 3_000_000
    report = json.loads(capsys.readouterr().out)
    assert report["target_bytes_read"] < hub.bytes_sent
    assert (report["target"], report["target_revision"]) == ("deepseek-ai/DeepSeek-V4-Flash", commit)
    assert report["mask_token_id"] == 128799
    assert report["gates"]["hc_fn"]["file"] == "model-00045-of-00046.safetensors"
    shards = {request.path for request in hub.requests if request.path.endswith(".safetensors")}
    assert shards == {f"/deepseek-ai/DeepSeek-V4-Flash/resolve/{commit}/model-00045-of-00046.safetensors"}
    assert all(request.range for request in hub.requests if "/get/" in request.path)

    drafter = AutoModel.from_pretrained(tmp_path / "drafter")
    saved = load_file(tmp_path / "drafter" / "model.safetensors")
    for name in GATES:
        for found in (saved[f"reducer.hc_{name}"], getattr(drafter.reducer, f"hc_{name}").detach()):
            assert torch.equal(found.view(torch.int32), gates[f"hc_head_{name}"].view(torch.int32))
    assert drafter.config.target_revision == commit
    record = json.loads((tmp_path / "drafter" / "provenance.json").read_text())
    assert (record["target_revision"], record["gates"]) == (commit, report["gates"])
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("hub-")] == ["drafter"]


def test_a_folder_and_the_hub_give_the_same_drafter(hub, tmp_path):
    write_target(tmp_path / "files")
    hub.add_repository("somebody/target", tmp_path / "files")
    options = {"mask_token_id": 63, "num_hidden_layers": 2, "seed": 5, "target_name_or_path": "x"}
    local = init_drafter(tmp_path / "files", tmp_path / "local", **options)
    remote = init_drafter("somebody/target", tmp_path / "remote", **options)
    assert local.config.target_revision is None
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("local", "remote")]
    assert weights[0].keys() == weights[1].keys() == remote.state_dict().keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_gates_are_found_as_cheaply_in_an_index_that_is_sorted_by_name(hub, v4_flash_folder):
    folder, gates = v4_flash_folder
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps(json.loads(index.read_text()), indent=2, sort_keys=True))
    hub.add_repository("deepseek-ai/DeepSeek-V4-Flash", folder)
    found = read_gates(HubRepository("deepseek-ai/DeepSeek-V4-Flash"), 4, 4096)
    assert torch.equal(found.hc_fn, gates["hc_head_fn"]) and hub.bytes_sent < 3_000_000


def test_body_is_written_with_no_more_than_one_layer_in_memory(tmp_path, monkeypatch):
    from hyperdflash.conversion import fresh

    write_target(tmp_path / "files")
    live = []
    original = fresh.HyperDFlashModel._init_weights

    def init_weights(self, module):
        original(self, module)
        live.append(sum(p.numel() for p in self.parameters() if p.device.type != "meta"))

    monkeypatch.setattr(fresh.HyperDFlashModel, "_init_weights", init_weights)
    args = InitArguments(str(tmp_path / "files"), str(tmp_path / "drafter"), mask_token_id=63, num_hidden_layers=5)
    run_init(args)
    largest = max(live)
    drafter = AutoModel.from_pretrained(tmp_path / "drafter")
    assert largest == sum(p.numel() for p in drafter.layers[0].parameters())
    assert abs(float(drafter.layers[4].mlp.up_proj.weight.float().std()) - 0.02) < 2e-3
    assert torch.equal(drafter.norm.weight.float(), torch.ones(WIDTH))
    assert not torch.equal(drafter.layers[0].mlp.up_proj.weight, drafter.layers[1].mlp.up_proj.weight)


# The parts that are copied


def test_mtp_module_is_copied_byte_by_byte_under_its_released_names(hub, tmp_path):
    tensors = write_target(tmp_path / "files")
    commit = hub.add_repository("somebody/target", tmp_path / "files")
    assert init("somebody/target", tmp_path / "drafter", "--with_mtp", *SMALL) == 0
    folder = tmp_path / "drafter" / "mtp"
    with safe_open(folder / "model.safetensors", "pt") as copy:
        assert copy.metadata() == {"format": "pt", "target": "somebody/target", "target_revision": commit}
        assert set(copy.keys()) == {name for name in tensors if name.startswith("mtp.0.")}
        for name in copy.keys():
            found, wanted = copy.get_tensor(name), tensors[name]
            assert found.dtype == wanted.dtype and torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
    assert (folder / "config.json").read_bytes() == (tmp_path / "files" / "config.json").read_bytes()


def test_head_is_a_target_for_training_on_cached_states(hub, tmp_path):
    write_target(tmp_path / "files")
    hub.add_repository("somebody/target", tmp_path / "files")
    assert init("somebody/target", tmp_path / "drafter", "--with_head", *SMALL) == 0
    found = TargetModules.of(load_without_layers(tmp_path / "drafter" / "head"))
    wanted = TargetModules.of(load_without_layers(tmp_path / "files"))
    for name in ("embedding", "hc_head", "norm", "lm_head"):
        pairs = zip(getattr(found, name).parameters(), getattr(wanted, name).parameters(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize(
    ("option", "tensor", "message"),
    [
        ("--with_mtp", "mtp.0.", "tensor 'mtp.0.*': found none, wanted the native MTP module"),
        ("--with_mtp", "mtp.0.h_proj.weight", "tensor 'mtp.0.h_proj.weight': found none"),
        ("--with_head", "embed.weight", "tensor 'model.embed_tokens.weight' or 'embed.weight': found none"),
        ("--with_head", "head.weight", "tensor 'lm_head.weight' or 'head.weight': found none"),
    ],
)
def test_parts_that_the_target_lacks_are_an_error_before_anything_is_written(
    hub, tmp_path, capsys, option, tensor, message
):
    write_target(tmp_path / "files")
    index = tmp_path / "files" / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {k: v for k, v in weight_map.items() if not k.startswith(tensor)}}))
    hub.add_repository("somebody/target", tmp_path / "files")
    assert init("somebody/target", tmp_path / "out" / "drafter", option, *SMALL) == 2
    assert message in one_line(capsys)
    assert not (tmp_path / "out").exists()


def test_parts_of_another_width_are_an_error(hub, tmp_path, capsys):
    write_target(tmp_path / "files", vocab_size=65)
    hub.add_repository("somebody/target", tmp_path / "files")
    assert init("somebody/target", tmp_path / "drafter", "--with_head", *SMALL) == 2
    assert "tensor 'embed.weight': shape: found [64, 32], wanted [65, 32]" in one_line(capsys)


# Interruptions


def test_a_connection_that_breaks_is_taken_up_where_it_broke(hub, tmp_path):
    tensors = write_target(tmp_path / "files")
    hub.add_repository("somebody/target", tmp_path / "files")
    hub.fail("/get/", cut_after=100, times=3)
    hub.fail("index.json", status=503, headers={"Retry-After": "0"})
    gates = read_gates(HubRepository("somebody/target"), STREAMS, WIDTH)
    assert torch.equal(gates.hc_fn, tensors["hc_head_fn"])
    ranges = [request.range for request in hub.requests if "/get/" in request.path][:4]
    assert [range.split("=")[1].split("-")[0] for range in ranges] == ["0", "100", "200", "300"]


def test_a_download_that_stopped_goes_on_and_leaves_nothing_else(hub, tmp_path, capsys):
    tensors = write_target(tmp_path / "files")
    hub.add_repository("somebody/target", tmp_path / "files")
    shard = "model-00003-of-00003.safetensors"
    size = (tmp_path / "files" / shard).stat().st_size
    output = tmp_path / "out" / "drafter"
    blob = next(blob for blob in hub.objects.values() if blob.path == tmp_path / "files" / shard)
    hub.fail(f"/get/{blob.sha256}", delay=0.01)  # the header comes
    hub.fail(f"/get/{blob.sha256}", cut_after=50_000)  # the data breaks off, and then there is no answer any more
    hub.fail(f"/get/{blob.sha256}", status=0, times=5)
    assert init("somebody/target", output, "--with_mtp", *SMALL) == 2
    assert "found no connection to http://127.0.0.1" in one_line(capsys)
    assert not output.exists()
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".drafter.partial"]
    kept = (tmp_path / "out" / ".drafter.partial" / "mtp" / "model.safetensors").stat().st_size
    assert 50_000 < kept < size

    assert init("somebody/target", output, "--with_mtp", *SMALL) == 0
    assert hub.bytes_by_path[f"/get/{blob.sha256}"] < size + 2 * (1 << 16)  # the header twice, nothing else
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["drafter"]
    copy = load_file(output / "mtp" / "model.safetensors")
    assert all(torch.equal(copy[n].view(torch.uint8), tensors[n].view(torch.uint8)) for n in copy)


def test_a_download_of_another_commit_is_not_gone_on_with(hub, tmp_path, capsys):
    write_target(tmp_path / "files")
    hub.add_repository("somebody/target", tmp_path / "files")
    partial = tmp_path / ".drafter.partial" / "mtp"
    assert init("somebody/target", tmp_path / "drafter", "--with_mtp", *SMALL) == 0
    whole = (tmp_path / "drafter" / "mtp" / "model.safetensors").read_bytes()
    partial.mkdir(parents=True)
    (partial / "model.safetensors").write_bytes(whole[:-10_000].replace(b"somebody", b"anybody1"))
    (partial.parent / "left_over.txt").write_text("")
    assert init("somebody/target", tmp_path / "drafter", "--with_mtp", "--overwrite", *SMALL) == 0
    assert (tmp_path / "drafter" / "mtp" / "model.safetensors").read_bytes() == whole
    assert not partial.parent.exists() and not (tmp_path / "drafter" / "left_over.txt").exists()


def test_killed_in_the_middle_and_rerun_it_completes_without_debris(hub, tmp_path):
    tensors = write_target(tmp_path / "files")
    hub.add_repository("somebody/target", tmp_path / "files")
    output = tmp_path / "out" / "drafter"
    command = [sys.executable, "-m", "hyperdflash.cli", "init", "--target", "somebody/target", "--output", str(output)]
    command += ["--with_mtp", *SMALL]
    blob = next(blob for blob in hub.objects.values() if blob.path.name == "model-00003-of-00003.safetensors")
    hub.fail(f"/get/{blob.sha256}", delay=0.01)  # the header comes
    hub.fail(f"/get/{blob.sha256}", cut_after=90_000)
    hub.fail(f"/get/{blob.sha256}", delay=20)
    process = subprocess.Popen(command, env=os.environ | hub.environment(tmp_path / "cache"))
    while any(fault.times for fault in hub.faults):
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not output.exists()
    assert (output.parent / ".drafter.partial" / "mtp" / "model.safetensors").stat().st_size > 50_000
    assert main(command[3:]) == 0
    assert [path.name for path in output.parent.iterdir()] == ["drafter"]
    copy = load_file(output / "mtp" / "model.safetensors")
    assert all(torch.equal(copy[n].view(torch.uint8), tensors[n].view(torch.uint8)) for n in copy)


# What the Hub refuses


@pytest.mark.parametrize("token", ["hf_owner", "", "hf_wrong"])
@pytest.mark.parametrize("kind", ["absent", "private", "gated"])
def test_repositories_out_of_reach_are_one_line(hub, tmp_path, capsys, monkeypatch, kind, token):
    write_target(tmp_path / "files")
    hub.add_repository("other/private", tmp_path / "files", private=True)
    hub.add_repository("other/gated", tmp_path / "files", gated=True)
    monkeypatch.setenv("HF_TOKEN", token)
    assert init(f"other/{kind}", tmp_path / "out" / "drafter", *SMALL) == 2
    message = one_line(capsys)
    if token == "hf_wrong":
        assert "found status 401" in message and "Invalid credentials" in message
    elif kind == "gated":
        assert "found 'other/gated', which is gated, wanted access to it" in message
    else:
        assert f"found neither a folder 'other/{kind}' nor such a repository" in message
    assert "hf_" not in message.replace("`hf auth", "").replace("hf_wrong", "hf_")
    assert not (tmp_path / "out").exists()


def test_revision_is_resolved_once_and_an_unknown_one_is_refused(hub, tmp_path, capsys):
    write_target(tmp_path / "files")
    first = hub.add_repository("somebody/target", tmp_path / "files")
    write_target(tmp_path / "later", rms_norm_eps=1e-3)
    hub.add_repository("somebody/target", tmp_path / "later")
    options = {"mask_token_id": 63, "num_hidden_layers": 1}
    old = init_drafter("somebody/target", tmp_path / "old", target_revision=first[:8], **options)
    assert (old.config.target_revision, old.config.target_rms_norm_eps) == (first, 1e-6)
    assert init_drafter("somebody/target", tmp_path / "new", **options).config.target_rms_norm_eps == 1e-3
    assert {request.path.split("/")[4] for request in hub.requests if "/resolve/" in request.path} == set(
        hub.repositories["models/somebody/target"].commits
    )
    assert init("somebody/target", tmp_path / "none", "--target_revision", "v9", *SMALL) == 2
    assert "target_revision: found no 'v9' in 'somebody/target'" in one_line(capsys)


def test_no_network_offline_mode_and_server_errors_are_one_line(hub, tmp_path, capsys, monkeypatch):
    write_target(tmp_path / "files")
    hub.add_repository("somebody/target", tmp_path / "files")
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    hub.fail("/get/", status=500, times=20)
    assert init("somebody/target", tmp_path / "out" / "drafter", *SMALL) == 2
    assert "found status 500" in one_line(capsys)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert init("somebody/target", tmp_path / "out" / "drafter", *SMALL) == 2
    assert "found no connection to http://127.0.0.1:9 for 'somebody/target' (ConnectError" in one_line(capsys)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert init("somebody/target", tmp_path / "out" / "drafter", *SMALL) == 2
    assert "HF_HUB_OFFLINE set" in one_line(capsys)
    assert init("not a name", tmp_path / "out" / "drafter", *SMALL) == 2
    assert "found 'not a name', wanted a folder, or a Hub id" in one_line(capsys)
    assert not (tmp_path / "out").exists()


def test_something_that_ignores_ranges_is_refused_before_it_sends_the_shard(hub, tmp_path, capsys, monkeypatch):
    write_target(tmp_path / "files")
    hub.add_repository("somebody/target", tmp_path / "files")
    original = hub_server.Handler.send_blob

    def send_whole(self, blob, headers):
        if self.headers.get("Range", "").startswith("bytes=0-"):
            return original(self, blob, headers)
        del self.headers["Range"]
        return original(self, blob, headers)

    monkeypatch.setattr(hub_server.Handler, "send_blob", send_whole)
    assert init("somebody/target", tmp_path / "drafter", *SMALL) == 2
    assert "found status 200 and the range '', wanted 206" in one_line(capsys)


# Code and other targets


def test_no_code_of_the_target_runs_unless_it_is_trusted(hub, tmp_path, capsys):
    trap = tmp_path / "sprung"
    auto_map = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    write_target(tmp_path / "files", auto_map=auto_map)
    code = f"import pathlib\npathlib.Path({str(trap)!r}).touch()\n"
    code += "from transformers import DeepseekV4Config\nclass Config(DeepseekV4Config):\n    pass\n"
    (tmp_path / "files" / "code.py").write_text(code)
    tokenizer = {"tokenizer_class": "Tokenizer", "auto_map": {"AutoTokenizer": ["code.Tokenizer", None]}}
    (tmp_path / "files" / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    hub.add_repository("somebody/target", tmp_path / "files")
    for target in ("somebody/target", str(tmp_path / "files")):
        assert init(target, tmp_path / "drafter", "--overwrite", *SMALL) == 0
        assert init(target, tmp_path / "none", *SMALL_BODY) == 2  # it would need the tokenizer
        assert "mask_token_id: found a tokenizer" in one_line(capsys)
        assert not trap.exists()
    assert init("somebody/target", tmp_path / "trusted", "--trust_remote_code", *SMALL) == 0
    assert trap.exists()


def test_mask_token_comes_from_the_tokenizer_on_the_hub(hub, tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    write_target(tmp_path / "files")
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "<mask>": 42}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, mask_token="<mask>").save_pretrained(tmp_path / "files")
    hub.add_repository("somebody/target", tmp_path / "files")
    assert init_drafter("somebody/target", tmp_path / "drafter", num_hidden_layers=1).config.mask_token_id == 42


def test_glm5_next_gets_fc_said_aloud_and_recorded(hub, tmp_path):
    folder = tmp_path / "files"
    text = {"hidden_size": WIDTH, "num_hidden_layers": 3, "vocab_size": VOCABULARY}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "glm5_next", "text_config": text}))
    save_file({"lm_head.weight": torch.zeros(VOCABULARY, WIDTH)}, folder / "model.safetensors")
    hub.add_repository("somebody/glm", folder)
    with pytest.warns(UserWarning, match="fresh fc.*hc_head of glm5_next_text has no parameters"):
        drafter = init_drafter("somebody/glm", tmp_path / "drafter", mask_token_id=63, num_hidden_layers=1)
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert (config["reducer"], config["target_model_type"]) == ("fc", "glm5_next_text")
    assert drafter.reducer.fc.weight.shape == (WIDTH, STREAMS * WIDTH)
    assert not any("/get/" in request.path for request in hub.requests)  # no weights are needed for it
