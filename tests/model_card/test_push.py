"""What `push` sends is a drafter that a stranger loads and decodes with; what is unsound it does not send."""

import json
import os
import shutil
import subprocess
import sys
import warnings

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

from hyperdflash.cli import main
from hyperdflash.model_card import PushArguments, push, run_push
from hyperdflash.trainer.doctor.run import drafter_files

REPOSITORY = "somebody/drafter"
FILES = {
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "provenance.json",
    "chat_template.jinja",
    "configuration_hyperdflash.py",
    "modeling_hyperdflash.py",
    "generation_hyperdflash.py",
}
STRANGER = """
import json, sys, torch
from transformers import AutoModel, AutoModelForCausalLM
target = AutoModelForCausalLM.from_pretrained(sys.argv[1])
drafter = AutoModel.from_pretrained(sys.argv[2], trust_remote_code=True, revision=sys.argv[3])
ids = torch.arange(3, 15)[None]
output = target.generate(ids, max_new_tokens=24, do_sample=False, assistant_model=drafter)
module = type(drafter).__module__.split(".")[0]
print(json.dumps([output[0].tolist(), drafter.last_generation.to_dict()["rounds"], module]))
"""


@pytest.fixture
def drafter(pair, tmp_path):
    shutil.copytree(pair[1], tmp_path / "drafter")
    return tmp_path / "drafter"


@pytest.fixture
def diagnosis(drafter, tmp_path):
    """A clean diagnosis of the drafter, as `doctor --json` prints it."""
    report = {"ok": True, "findings": [], "drafter_files": drafter_files(str(drafter)), "acceptance": None}
    (tmp_path / "doctor.json").write_text(json.dumps(report))
    return tmp_path / "doctor.json"


def arguments(drafter, diagnosis, **options):
    return PushArguments(drafter=str(drafter), repo_id=REPOSITORY, doctor_report=str(diagnosis), **options)


def test_a_stranger_loads_what_was_pushed_and_decodes_the_same(hub, pair, drafter, diagnosis, tmp_path):
    report = run_push(arguments(drafter, diagnosis, base_model="somebody/target", base_model_revision="f00"))
    files = hub.files(REPOSITORY)
    assert set(files) == FILES | {".gitattributes"} and set(report["files"]) == FILES
    assert report["files"] == {name: files[name].stat().st_size for name in FILES}
    assert hub.repositories[f"models/{REPOSITORY}"].private and report["commit"] in report["url"]
    keys = json.loads(files["config.json"].read_text())
    assert (keys["target_name_or_path"], keys["target_revision"]) == ("somebody/target", "f00")
    assert ModelCard(files["README.md"].read_text()).data.base_model == "somebody/target"
    assert json.loads(files["provenance.json"].read_text())["pushed"]["in_spite_of"] == []

    command = [sys.executable, "-c", STRANGER, str(pair[0]), REPOSITORY, report["commit"]]
    environment = os.environ | hub.environment(cache=tmp_path / "cache", token="hf_owner")
    run = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    tokens, rounds, module = json.loads(run.stdout.splitlines()[-1])
    target, local = AutoModelForCausalLM.from_pretrained(pair[0]), AutoModel.from_pretrained(drafter)
    expected = target.generate(torch.arange(3, 15)[None], max_new_tokens=24, do_sample=False, assistant_model=local)
    assert tokens == expected[0].tolist() and rounds == local.last_generation.rounds > 0
    assert module == "transformers_modules"  # the code from the repository, not the installed one


def test_a_target_that_only_this_machine_has_is_said(drafter, diagnosis):
    config = json.loads((drafter / "config.json").read_text())
    for name, expected in (("models/target", True), ("somebody/target", False)):
        revision = None if expected else "f00"
        (drafter / "config.json").write_text(
            json.dumps(config | {"target_name_or_path": name, "target_revision": revision})
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run_push(arguments(drafter, diagnosis, dry_run=True, force=True))
        said = [warning for warning in caught if "--base_model says where" in str(warning.message)]
        assert bool(said) == expected


def test_a_dry_run_lists_files_and_sizes_and_sends_nothing(hub, drafter, diagnosis, capsys):
    before = sorted(drafter.parent.rglob("*"))
    options = ["--drafter", str(drafter), "--repo_id", REPOSITORY, "--doctor_report", str(diagnosis)]
    assert main(["push", *options, "--dry-run"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["files"]) == FILES and report["bytes"] == sum(report["files"].values())
    assert report["files"]["model.safetensors"] == (drafter / "model.safetensors").stat().st_size
    assert not hub.requests and sorted(drafter.parent.rglob("*")) == before


def test_the_targets_own_tensors_stay_behind_and_a_dry_run_says_so(hub, drafter, diagnosis, capsys):
    """What `init --with_mtp --with_head` puts into the folder, and what training leaves there."""
    for part in ("mtp", "head"):
        (drafter / part).mkdir()
        (drafter / part / "model.safetensors").write_bytes(b"x" * 1000)
        (drafter / part / "config.json").write_text("{}")
    (drafter / "checkpoint-4").mkdir()
    (drafter / "elsewhere").symlink_to(drafter.parent)
    options = ["--drafter", str(drafter), "--repo_id", REPOSITORY, "--doctor_report", str(diagnosis)]
    assert main(["push", *options, "--dry-run"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["files"]) == FILES
    assert {name: report["left_out"][name] for name in ("mtp/", "head/")} == {"mtp/": 1002, "head/": 1002}
    assert set(report["left_out"]) == {
        *("mtp/", "head/", "checkpoint-4/", "elsewhere"),
        *("optimizer.pt", "training_args.bin"),
    }
    run_push(arguments(drafter, diagnosis))
    assert set(hub.files(REPOSITORY)) == FILES | {".gitattributes"}


def test_shards_go_along_with_their_index_and_an_index_of_nothing_stays(pair, drafter, diagnosis):
    (drafter / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}')
    assert set(run_push(arguments(drafter, diagnosis, dry_run=True))["files"]) == FILES
    AutoModel.from_pretrained(pair[1]).save_pretrained(drafter.parent / "sharded", max_shard_size="20KB")
    report = run_push(arguments(drafter.parent / "sharded", diagnosis, dry_run=True, force=True))
    shards = {name for name in report["files"] if name.startswith("model-")}
    assert len(shards) > 1
    assert set(report["files"]) == FILES - {"model.safetensors"} | shards | {"model.safetensors.index.json"}


def test_no_link_leads_into_the_repository(drafter, diagnosis, tmp_path):
    (drafter / "README.md").write_text(f"# {REPOSITORY}")
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "key.png").write_text("mine")
    (drafter / "figures").symlink_to(tmp_path / "private")
    assert set(run_push(arguments(drafter, diagnosis, dry_run=True))["files"]) == FILES
    (drafter / "figures").unlink()
    (drafter / "figures").mkdir()
    (drafter / "figures" / "mine.svg").write_text("<svg/>")
    (drafter / "figures" / "more").symlink_to(tmp_path / "private")
    report = run_push(arguments(drafter, diagnosis, dry_run=True))
    assert set(report["files"]) == FILES | {"figures/mine.svg"}


def test_what_is_published_names_no_folder_of_this_machine(hub, drafter, diagnosis, results, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    secret = tmp_path.parent / "secret"
    record = json.loads((drafter / "provenance.json").read_text())
    record |= {
        "command": [
            "hyperdflash",
            "train",
            "--data",
            str(tmp_path / "data" / "a b.jsonl"),
            f"--target={secret}/target",
        ],
        "arguments": {"data": str(tmp_path / "data" / "a b.jsonl"), "target": "somebody/target", "cache": "~/secret"},
    }
    (drafter / "provenance.json").write_text(json.dumps(record))
    report = json.loads((results / "report.json").read_text())
    report["runs"][0]["command"] += ["--output", str(secret / "eval")]
    (results / "report.json").write_text(json.dumps(report))
    args = arguments(drafter, tmp_path / "no.json", results=str(results), force=True)
    args.doctor_report = None
    with pytest.warns(UserWarning, match="Pushed in spite of this"):
        run_push(args, command=["hyperdflash", "push", "--drafter", str(drafter), "--data", str(secret)])
    files = hub.files(REPOSITORY)
    texts = {name: files[name].read_text() for name in ("README.md", "provenance.json", "config.json")}
    assert not any(str(tmp_path.parent) in text or "~" in text for text in texts.values())
    sent = json.loads(texts["provenance.json"])
    assert sent["command"][3:] == ["data/a b.jsonl", "--target=target"]
    assert sent["arguments"] == {"data": "data/a b.jsonl", "target": "somebody/target", "cache": "secret"}
    assert sent["pushed"]["command"] == ["hyperdflash", "push", "--drafter", "drafter", "--data", "secret"]
    assert "`hyperdflash train --data 'data/a b.jsonl' --target=target`" in texts["README.md"]
    assert "`hyperdflash eval --output eval`" in texts["README.md"]
    assert json.loads((drafter / "provenance.json").read_text()) == record  # this machine's own


def test_a_card_of_another_repository_is_said(drafter, diagnosis):
    (drafter / "README.md").write_text("Mine.")
    with pytest.warns(UserWarning, match="does not name 'somebody/drafter': `hyperdflash card --repo_id`"):
        run_push(arguments(drafter, diagnosis, dry_run=True))


def test_branch_pull_request_and_visibility_are_the_hubs(hub, drafter, diagnosis):
    run_push(arguments(drafter, diagnosis, private=False))
    assert not hub.repositories[f"models/{REPOSITORY}"].private
    first = hub.files(REPOSITORY)["model.safetensors"].read_bytes()
    weights = load_file(drafter / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, drafter / "model.safetensors", {"format": "pt"})
    options = {"force": True, "commit_message": "Another"}
    with pytest.warns(UserWarning, match="Pushed in spite of this: doctor_report: found the diagnosis of other files"):
        run_push(arguments(drafter, diagnosis, revision="next", **options))
        report = run_push(arguments(drafter, diagnosis, create_pr=True, **options))
    assert hub.files(REPOSITORY)["model.safetensors"].read_bytes() == first
    for revision in ("next", "refs/pr/1"):
        files = hub.files(REPOSITORY, revision)
        assert files["model.safetensors"].read_bytes() != first
        assert "doctor_report" in json.loads(files["provenance.json"].read_text())["pushed"]["in_spite_of"][0]
    assert report["pull_request"].endswith("/discussions/1")


def test_results_go_along_in_the_card_with_their_figures(hub, drafter, diagnosis, results):
    (drafter / "README.md").write_text("---\nlicense: mit\n---\nMine.")
    run_push(arguments(drafter, diagnosis))
    assert hub.files(REPOSITORY)["README.md"].read_text().endswith("Mine.")
    run_push(arguments(drafter, diagnosis, results=str(results)))
    files = hub.files(REPOSITORY)
    assert "## Results" in files["README.md"].read_text() and files["figures/acceptance.svg"].read_text() == "<svg/>"


def refuse(args, message):
    with pytest.raises(ValueError, match=message):
        run_push(args)


def test_a_drafter_without_a_clean_diagnosis_of_its_own_is_refused(hub, drafter, diagnosis, monkeypatch):
    refuse(PushArguments(drafter=str(drafter), repo_id=REPOSITORY), "doctor: found no diagnosis")
    report = json.loads(diagnosis.read_text())
    wrong = [{"check": "rotary", "ok": False, "message": "found base 1, wanted 2"}]
    diagnosis.write_text(json.dumps(report | {"ok": False, "findings": wrong}))
    refuse(arguments(drafter, diagnosis), "doctor: found rotary: found base 1, wanted 2 .or --force true")
    diagnosis.write_text(json.dumps(report | {"drafter_files": report["drafter_files"] | {"config.json": "0"}}))
    refuse(arguments(drafter, diagnosis), "found the diagnosis of other files")
    diagnosis.write_text("{}")
    refuse(arguments(drafter, diagnosis), "doctor_report: found something else")
    monkeypatch.setattr(push, "run_doctor", lambda args: report | {"ok": False, "findings": wrong})
    run = PushArguments(drafter=str(drafter), repo_id=REPOSITORY, target="a", data="b", force=False)
    refuse(run, "doctor: found rotary")
    assert not hub.requests


def test_doctor_runs_with_the_target_and_the_rows_that_are_given(pair, drafter, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"input_ids": list(range(3, 23))}) + "\n")
    (drafter / "provenance.json").unlink()
    args = {
        "drafter": str(drafter),
        "repo_id": REPOSITORY,
        "target": str(pair[0]),
        "data": str(tmp_path / "rows.jsonl"),
    }
    assert set(run_push(PushArguments(**args, dry_run=True))["files"]) == FILES
    config = json.loads((drafter / "config.json").read_text())
    (drafter / "config.json").write_text(json.dumps(config | {"vocab_size": 65}))
    refuse(PushArguments(**args, dry_run=True), "doctor: found pair: .*vocab_size")


def test_code_that_is_not_the_installed_is_refused_and_missing_code_is_added(hub, drafter, diagnosis):
    (drafter / "generation_hyperdflash.py").unlink()
    assert set(run_push(arguments(drafter, diagnosis, dry_run=True))["files"]) == FILES
    code = drafter / "modeling_hyperdflash.py"
    code.write_text(code.read_text() + "\n# changed\n")
    refuse(arguments(drafter, diagnosis), "code files: found modeling_hyperdflash.py unlike the installed ones")
    with pytest.warns(UserWarning, match="code files: found modeling_hyperdflash.py"):
        run_push(arguments(drafter, diagnosis, force=True))
    assert hub.files(REPOSITORY)["modeling_hyperdflash.py"].read_text().endswith("# changed\n")


def test_half_a_drafter_is_refused(drafter, diagnosis):
    weights = load_file(drafter / "model.safetensors")
    del weights["norm.weight"]
    save_file(weights, drafter / "model.safetensors")
    refuse(arguments(drafter, diagnosis), "found no 'norm.weight'")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "repo_id: found none, wanted organization/name"),
        (["--repo_id", "a b/c"], "repo_id: found 'a b/c', wanted a Hub id"),
        (["--repo_id", REPOSITORY, "--target", "x"], "target, data: found one without the other"),
        (["--repo_id", REPOSITORY, "--drafter", "nowhere"], "drafter: found no folder 'nowhere'"),
    ],
)
def test_the_verb_says_in_one_line_what_is_wrong(options, message, drafter, capsys):
    assert main(["push", "--drafter", str(drafter), *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_token_that_may_not_write_is_an_error_of_one_line(hub, drafter, diagnosis, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    options = ["--drafter", str(drafter), "--repo_id", REPOSITORY, "--doctor_report", str(diagnosis)]
    assert main(["push", *options]) == 2
    assert "403" in (error := capsys.readouterr().err) and error.count("\n") == 1 and not hub.repositories
