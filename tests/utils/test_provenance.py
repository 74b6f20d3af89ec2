"""The record beside an artifact, and folders that are written whole."""

import hashlib
import json
import shutil
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

import hyperdflash
from hyperdflash.utils import provenance
from hyperdflash.utils.folders import whole_folder
from hyperdflash.utils.provenance import collect_provenance, file_fingerprints, read_provenance, write_provenance


def test_record_has_command_time_versions_commit_and_the_facts(tmp_path):
    record = collect_provenance(["/opt/bin/hyperdflash", "init", "--target", "a/b"], seed=3)
    assert record["command"] == ["hyperdflash", "init", "--target", "a/b"]
    assert datetime.fromisoformat(record["time"]).utcoffset().total_seconds() == 0
    assert record["versions"]["hyperdflash"] == hyperdflash.__version__
    assert {"python", "torch", "transformers"} <= record["versions"].keys()
    assert record["seed"] == 3
    assert json.loads(write_provenance(tmp_path, record).read_text()) == record
    assert (tmp_path / "provenance.json").is_file()


def test_no_token_is_recorded():
    token = "hf_" + "aB3" * 12
    record = collect_provenance(["hyperdflash", "train", "--hub_token", token, f"--hub_token={token}"])
    assert record["command"][1:] == ["train", "--hub_token", "hf_***", "--hub_token=hf_***"]


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        ("/srv/here/runs/drafter", "runs/drafter"),
        ("/srv/here", "."),
        ("/home/me/runs/drafter/", "drafter"),
        ("~/runs/drafter", "drafter"),
        ("~nobody-at-all/runs/drafter", "drafter"),
        ("--data=/home/me/rows.jsonl", "--data=rows.jsonl"),
        ("HyperDFlash:/home/me/drafter", "HyperDFlash:drafter"),
        ("found other files in '/home/me/doctor.json', wanted", "found other files in 'doctor.json', wanted"),
        ('{"dir": "/home/me/offload", "x": 1}', '{"dir": "offload", "x": 1}'),
        ("/home/me/my rows.jsonl", "my rows.jsonl"),
        *((same, same) for same in ("somebody/target", "runs/a/b", "../shared/x", "./x", "</think>", "<a></b></c>")),
        *((same, same) for same in ("https://huggingface.co/a/b", "hf://datasets/a/b", "1/2 or a/b/c", "-1.5", "/")),
    ],
)
def test_published_paths_are_relative_or_their_last_part(found, wanted, monkeypatch):
    monkeypatch.setattr(Path, "cwd", classmethod(lambda cls: Path("/srv/here")))
    record = {"command": [found], "arguments": {"x": found, "n": 3, "none": None}, "earlier": [{"data": [found]}]}
    assert provenance.published(record) == {
        "command": [wanted],
        "arguments": {"x": wanted, "n": 3, "none": None},
        "earlier": [{"data": [wanted]}],
    }


def test_a_record_that_is_none_is_named(tmp_path):
    assert read_provenance(tmp_path) is None
    (tmp_path / "provenance.json").write_text("[]")
    with pytest.raises(ValueError, match="provenance.json: found something else, wanted a JSON object"):
        read_provenance(tmp_path)


def test_command_is_this_process_by_default():
    assert collect_provenance()["command"] == [Path(sys.argv[0]).name, *sys.argv[1:]]
    assert collect_provenance([])["command"] == []


def test_fact_cannot_replace_a_field_of_the_record():
    with pytest.raises(ValueError, match="facts: found .'commit'.*wanted other names"):
        collect_provenance([], commit="mine")


def test_fingerprints_are_those_of_the_contents_by_name_alone(tmp_path):
    (tmp_path / "a").write_bytes(b"one")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a").write_bytes(b"two")
    assert file_fingerprints([tmp_path / "a"]) == {"a": hashlib.sha256(b"one").hexdigest()}
    with pytest.raises(ValueError, match="found a second file named 'a'"):
        file_fingerprints([tmp_path / "a", tmp_path / "sub" / "a"])
    with pytest.raises(FileNotFoundError):
        file_fingerprints([tmp_path / "b"])


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_commit_is_the_checkouts_with_a_mark_when_modified_and_null_elsewhere(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    source = tmp_path / "utils" / "provenance.py"
    source.parent.mkdir()
    source.write_text("")
    monkeypatch.setattr(provenance, "__file__", str(source))
    assert provenance.package_commit() is None  # no checkout
    git("init")
    assert provenance.package_commit() is None  # no commit
    git("add", ".")
    git("commit", "-m", "first")
    git("tag", "-a", "v1", "-m", "a tag does not take the commit's place")
    assert provenance.package_commit() == git("rev-parse", "HEAD")
    source.write_text("# modified")
    assert provenance.package_commit() == git("rev-parse", "HEAD") + "-dirty"
    installed = tmp_path / "site-packages" / "hyperdflash" / "utils" / "provenance.py"
    monkeypatch.setattr(provenance, "__file__", str(installed))
    assert provenance.package_commit() is None  # a wheel installed inside somebody's checkout
    monkeypatch.setattr(provenance, "__file__", str(source))
    monkeypatch.setenv("PATH", "")
    assert provenance.package_commit() is None  # no git


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_folder_is_written_whole_or_not_at_all(tmp_path, error):
    with pytest.raises(error):
        with whole_folder(tmp_path / "out") as folder:
            (folder / "half").write_text("")
            raise error
    assert list(tmp_path.iterdir()) == []
    with whole_folder(tmp_path / "out") as folder:
        (folder / "file").write_text("1")
        assert not (tmp_path / "out").exists()
    with whole_folder(tmp_path / "out", overwrite=True) as folder:
        (folder / "other").write_text("2")
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["file"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["other"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_folder_that_appears_meanwhile_is_not_overwritten(tmp_path):
    with pytest.raises(FileExistsError, match="output: found the folder"):
        with whole_folder(tmp_path / "out"):
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "somebody's").write_text("")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["somebody's"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
