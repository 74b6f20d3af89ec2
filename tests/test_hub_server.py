"""The loopback Hub answers the unmodified client as the real one does: what other tests may rely on."""

import os
import subprocess
import sys

import httpx2
import pytest
from huggingface_hub import CommitOperationDelete, HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

WEIGHTS = bytes(range(256)) * 400


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "files"
    (folder / "sub").mkdir(parents=True)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\ntags: [one]\n---\n# A model\n")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    (folder / "sub" / "notes.txt").write_text("notes")
    return folder


def test_reads_info_tree_paths_and_files_with_ranges(hub, folder):
    api, commit = HfApi(), hub.add_repository("somebody/model", folder)
    info = api.model_info("somebody/model", files_metadata=True)
    assert info.sha == commit and info.tags == ["one"] and info.card_data.license == "apache-2.0"
    assert {file.rfilename: file.size for file in info.siblings}["model.safetensors"] == len(WEIGHTS)
    assert {entry.path for entry in api.list_repo_tree("somebody/model")} == {
        "README.md",
        "config.json",
        "model.safetensors",
        "sub",
    }
    (weights,) = api.get_paths_info("somebody/model", "model.safetensors")
    assert weights.lfs.size == len(WEIGHTS)
    assert api.file_exists("somebody/model", "sub/notes.txt") and not api.file_exists("somebody/model", "sub/none")
    assert [ref.target_commit for ref in api.list_repo_refs("somebody/model").branches] == [commit]

    local = snapshot_download("somebody/model", revision=commit[:10])
    assert open(os.path.join(local, "model.safetensors"), "rb").read() == WEIGHTS
    assert {request.token for request in hub.requests} == {"hf_owner", None}  # none for the storage

    url = f"{hub.url}/somebody/model/resolve/main/"
    for name, content in (("model.safetensors", WEIGHTS), ("sub/notes.txt", b"notes")):
        for asked, wanted in (("1-3", content[1:4]), ("2-", content[2:]), ("-2", content[-2:])):
            response = httpx2.get(url + name, headers={"Range": f"bytes={asked}"}, follow_redirects=True)
            assert (response.status_code, response.content) == (206, wanted)
            assert response.headers["Content-Range"].endswith(f"/{len(content)}")
        assert httpx2.get(url + name, headers={"Range": "bytes=999999-"}, follow_redirects=True).status_code == 416


def test_refuses_as_the_hub_does(hub, folder, tmp_path):
    hub.add_repository("owner/private", folder, private=True)
    hub.add_repository("other/private", folder, private=True)
    hub.add_repository("other/gated", folder, gated=True)
    hub.add_repository("other/open", folder, gated=True, readers=("owner",))
    api = HfApi()
    assert api.whoami()["name"] == "owner"
    assert hf_hub_download("owner/private", "config.json") and hf_hub_download("other/open", "config.json")
    assert api.model_info("other/gated").gated == "manual"  # its files are hidden, not itself
    for repo, token, error in (
        ("other/private", None, RepositoryNotFoundError),
        ("owner/private", False, RepositoryNotFoundError),
        ("owner/absent", None, RepositoryNotFoundError),
        ("other/gated", None, GatedRepoError),
        ("other/gated", False, GatedRepoError),
        ("other/open", False, GatedRepoError),
    ):
        with pytest.raises(error):
            hf_hub_download(repo, "config.json", token=token, cache_dir=tmp_path / "empty")
    with pytest.raises(HfHubHTTPError, match="Invalid user token"):
        api.whoami(token="hf_wrong")
    with pytest.raises(RevisionNotFoundError):
        hf_hub_download("owner/private", "config.json", revision="v2")
    with pytest.raises(RemoteEntryNotFoundError):
        hf_hub_download("owner/private", "none.json")
    with pytest.raises(HfHubHTTPError, match="403"):
        api.create_repo("reader/model", token="hf_reader")
    with pytest.raises(HfHubHTTPError, match="403"):
        api.create_repo("stranger/model")


@pytest.mark.parametrize("part_bytes", [None, 30_000])
def test_takes_uploads_as_commits_branches_and_pull_requests(hub, folder, part_bytes):
    hub.multipart_bytes = part_bytes
    api = HfApi()
    assert api.create_repo("somebody/model", private=True).repo_id == "somebody/model"
    with pytest.raises(HfHubHTTPError, match="409"):
        api.create_repo("somebody/model")
    api.create_repo("somebody/model", exist_ok=True)
    first = api.upload_folder(repo_id="somebody/model", folder_path=folder, commit_message="All")
    files = hub.files("somebody/model")
    assert set(files) == {".gitattributes", "README.md", "config.json", "model.safetensors", "sub/notes.txt"}
    assert files["model.safetensors"].read_bytes() == WEIGHTS
    assert api.model_info("somebody/model").private

    again = api.upload_folder(repo_id="somebody/model", folder_path=folder)
    assert again.oid == first.oid  # nothing has changed
    api.create_branch("somebody/model", branch="next")
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(WEIGHTS[::-1])
    api.upload_folder(repo_id="somebody/model", folder_path=folder, revision="next")
    pull = api.upload_folder(repo_id="somebody/model", folder_path=folder, create_pr=True)
    assert (pull.pr_num, pull.pr_revision) == (1, "refs/pr/1")
    for revision, weights in (("main", WEIGHTS), ("next", WEIGHTS[::-1]), ("refs/pr/1", WEIGHTS[::-1])):
        path = hf_hub_download("somebody/model", "model.safetensors", revision=revision)
        assert open(path, "rb").read() == weights
    api.create_tag("somebody/model", tag="v1", revision=first.oid)
    assert api.model_info("somebody/model", revision="v1").sha == first.oid
    assert api.create_pull_request("somebody/model", title="Draft").git_reference == "refs/pr/2"

    api.create_commit("somebody/model", [CommitOperationDelete("sub/")], commit_message="Less")
    assert "sub/notes.txt" not in hub.files("somebody/model")
    with pytest.raises(HfHubHTTPError, match="412"):
        api.upload_folder(repo_id="somebody/model", folder_path=folder, parent_commit=first.oid)
    with pytest.raises(RevisionNotFoundError):
        api.upload_folder(repo_id="somebody/model", folder_path=folder, revision="absent")
    with pytest.raises(RepositoryNotFoundError):
        api.upload_folder(repo_id="somebody/absent", folder_path=folder)
    (folder / "README.md").write_text("---\nlicense: [\n---\n")
    with pytest.raises(ValueError, match="Invalid metadata in README.md"):
        api.upload_folder(repo_id="somebody/model", folder_path=folder)
    api.delete_repo("somebody/model")
    assert not api.repo_exists("somebody/model")


def test_cuts_refuses_and_delays_as_told_and_counts_what_it_sends(hub, folder, tmp_path):
    hub.add_repository("somebody/model", folder)
    hub.fail("/get/", cut_after=1000)
    hub.fail("config.json", status=429, methods=("GET",), headers={"Retry-After": "0"})
    local = snapshot_download("somebody/model", max_workers=1)
    assert open(os.path.join(local, "model.safetensors"), "rb").read() == WEIGHTS
    gets = [request for request in hub.requests if request.path.startswith("/get/") and request.method == "GET"]
    assert [request.body for request in gets] == [1000, len(WEIGHTS)]  # the client keeps whole chunks of 10 MB only
    assert sum(hub.bytes_by_path.values()) > len(WEIGHTS)
    assert hub.bytes_sent > sum(hub.bytes_by_path.values())


def test_a_fresh_process_has_it_as_its_hub(hub, folder, tmp_path):
    hub.add_repository("somebody/model", folder)
    program = "from huggingface_hub import hf_hub_download; print(hf_hub_download('somebody/model', 'config.json'))"
    environment = os.environ | hub.environment(tmp_path / "cache")
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip().startswith(str(tmp_path / "cache"))
