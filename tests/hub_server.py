"""A Hub on the loopback interface, for the unmodified client of `huggingface_hub`.

Two listeners, as in the real one: the Hub itself, and the storage that it redirects large files to, which refuses
requests that carry a token. Repositories come from folders (`add_repository`; sparse files are served as what they
are) or from the client (`create_repo`, commits, pull requests, LFS uploads). Xet is not offered.

    with HubServer(tmp_path / "hub") as hub:
        hub.add_repository("somebody/target", folder)
        hub.fail("model-00046", cut_after=1000)
        subprocess.run([...], env=os.environ | hub.environment(cache=tmp_path / "cache"))
        assert hub.bytes_sent < 3_000_000
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

import pytest
import yaml

LFS_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf", ".png", ".arrow", ".parquet", ".zip")
LARGEST_REGULAR_FILE = 10 << 20
LARGEST_HASHED_FILE = 64 << 20  # above, as for sparse files of a terabyte, an object's name stands in for its hash
BLOCK_BYTES = 1 << 16
TREE_PAGE = 1000
START_OF_TIME = "2026-01-01T00:00:00.000Z"
GIT_ATTRIBUTES = b"".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n".encode() for suffix in LFS_SUFFIXES)


@dataclass
class Blob:
    """A file's content; `path` is never written again once it is here."""

    path: Path
    lfs: bool
    size: int
    git_oid: str
    sha256: str

    @classmethod
    def of(cls, path: Path, lfs: bool) -> Blob:
        size = path.stat().st_size
        if size > LARGEST_HASHED_FILE:
            sha256 = hashlib.sha256(f"{path}:{size}".encode()).hexdigest()
        else:
            sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        return cls(path, lfs, size, git_oid(pointer(sha256, size) if lfs else path.read_bytes()), sha256)

    @property
    def etag(self) -> str:
        return self.sha256 if self.lfs else self.git_oid


def pointer(sha256: str, size: int) -> bytes:
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()


def git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Commit:
    oid: str
    files: dict[str, Blob]
    title: str
    parent: str | None


@dataclass
class Repository:
    """`gated`: `False`, or who has access by name; `refs`: `main`, other branches, tags, and `refs/pr/1`."""

    id: str
    kind: str = "models"
    private: bool = False
    gated: bool = False
    readers: set[str] = field(default_factory=set)
    commits: dict[str, Commit] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    pull_requests: list[str] = field(default_factory=list)  # titles

    def resolve(self, revision: str) -> Commit | None:
        """By branch, tag, pull request, or a commit's hash, of which the first digits are enough."""
        for names in (self.refs, self.tags):
            if revision in names:
                return self.commits[names[revision]]
        found = [commit for oid, commit in self.commits.items() if len(revision) >= 7 and oid.startswith(revision)]
        return found[0] if len(found) == 1 else None

    def commit(self, ref: str, files: dict[str, Blob], title: str) -> Commit:
        parent = self.refs.get(ref)
        seed = json.dumps([self.id, parent, title, len(self.commits), sorted((k, v.etag) for k, v in files.items())])
        commit = Commit(hashlib.sha1(seed.encode()).hexdigest(), files, title, parent)
        self.commits[commit.oid] = commit
        self.refs[ref] = commit.oid
        return commit

    @property
    def owner(self) -> str:
        return self.id.split("/")[0]


@dataclass
class User:
    """`organizations`: where the token may write, beside the user's own namespace; `write`: whether it may at all."""

    name: str
    organizations: tuple[str, ...] = ()
    write: bool = True


@dataclass
class Request:
    """One request as it was answered. `sent`: bytes on the wire, status line and headers included; `body`: without."""

    method: str
    path: str
    range: str | None
    token: str | None
    status: int = 0
    sent: int = 0
    body: int = 0
    received: int = 0


@dataclass
class Fault:
    """What goes wrong with the next `times` requests whose `METHOD path` matches `pattern`."""

    pattern: re.Pattern
    status: int | None
    cut_after: int | None
    delay: float
    headers: dict[str, str]
    times: int
    methods: tuple[str, ...]


class Answer(Exception):
    """Ends the handling of a request with a status, headers and a JSON body."""

    def __init__(self, status: int, body: Any = None, headers: dict[str, str] | None = None):
        self.status, self.body, self.headers = status, body, headers or {}


def refusal(status: int, message: str, code: str | None = None, **headers: str) -> Answer:
    named = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
    return Answer(status, {"error": message}, named | headers)


class QuietServer(ThreadingHTTPServer):
    """A client that hangs up between two requests is no fault of the server, and prints nothing."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class HubServer:
    """See the module. Attributes:

    tokens: token -> `User`; `hf_owner` (namespaces `owner` and `somebody`) and the read-only `hf_reader` are there.
    requests: of every request, in the order of their arrival, what was asked and sent.
    multipart_bytes: LFS objects above this size are uploaded in parts of it; `None`: always at once.
    """

    def __init__(self, root: str | os.PathLike):
        self.root = Path(root)
        (self.root / "objects").mkdir(parents=True, exist_ok=True)
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, Blob] = {}
        self.tokens = {"hf_owner": User("owner", ("somebody",)), "hf_reader": User("reader", (), write=False)}
        self.requests: list[Request] = []
        self.multipart_bytes: int | None = None
        self.faults: list[Fault] = []
        self.lock = threading.RLock()
        self._servers: list[ThreadingHTTPServer] = []

    def __enter__(self) -> HubServer:
        for handler in (HubHandler, StorageHandler):
            server = QuietServer(("127.0.0.1", 0), type(handler.__name__, (handler,), {"hub": self}))
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
            self._servers.append(server)
        self.url, self.storage_url = (f"http://127.0.0.1:{server.server_address[1]}" for server in self._servers)
        return self

    def __exit__(self, *exception: object) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def add_repository(
        self,
        repo_id: str,
        folder: str | os.PathLike,
        *,
        private: bool = False,
        gated: bool = False,
        readers: tuple[str, ...] = (),
        kind: str = "models",
    ) -> str:
        """Serves the files of `folder` as `main`; a second call commits them anew. Returns the commit.

        The files are served where they lie, so they must not change. `readers`: users who may read a gated one.
        """
        files = {}
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                files[path.relative_to(folder).as_posix()] = Blob.of(path, is_lfs(path.name, path.stat().st_size))
        with self.lock:
            self.objects |= {blob.sha256: blob for blob in files.values() if blob.lfs}
            repository = self.repositories.setdefault(key(kind, repo_id), Repository(repo_id, kind))
            repository.private, repository.gated, repository.readers = private, gated, set(readers)
            return repository.commit("main", files, "Files of a folder").oid

    def files(self, repo_id: str, revision: str = "main", kind: str = "models") -> dict[str, Path]:
        """Name in the repository -> file with its content."""
        commit = self.repositories[key(kind, repo_id)].resolve(revision)
        return {name: blob.path for name, blob in sorted(commit.files.items())}

    def fail(
        self,
        pattern: str,
        *,
        status: int | None = None,
        cut_after: int | None = None,
        delay: float = 0.0,
        times: int = 1,
        headers: dict[str, str] | None = None,
        methods: tuple[str, ...] = ("GET", "HEAD", "POST", "PUT", "DELETE"),
    ) -> None:
        """Lets the next `times` requests whose path matches `pattern` (searched) go wrong.

        Args:
            status: the answer, instead of the right one. 0: the connection is closed without any.
            cut_after: the connection is closed after so many bytes of the body.
            delay: seconds before the answer.
            headers: of the answer with `status`, such as `Retry-After`.
            methods: only requests of these methods.
        """
        self.faults.append(Fault(re.compile(pattern), status, cut_after, delay, headers or {}, times, methods))

    def fault(self, method: str, path: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and method in fault.methods and fault.pattern.search(path):
                    fault.times -= 1
                    return fault
        return None

    @property
    def bytes_sent(self) -> int:
        """All bytes that the Hub and its storage sent, headers included."""
        return sum(request.sent for request in self.requests)

    @property
    def bytes_by_path(self) -> dict[str, int]:
        """Bytes of bodies by path, for the storage by the path that was redirected there."""
        count: dict[str, int] = {}
        for request in self.requests:
            count[request.path] = count.get(request.path, 0) + request.body
        return count

    def environment(self, cache: str | os.PathLike, token: str | None = "hf_owner") -> dict[str, str]:
        """What a subprocess needs to have this as its Hub. `HF_TOKEN=""` is no token at all."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(cache),
            "HF_HUB_CACHE": str(Path(cache) / "hub"),
            "HF_MODULES_CACHE": str(Path(cache) / "modules"),
            "HF_TOKEN": token or "",
            "HF_HUB_OFFLINE": "0",
            "TRANSFORMERS_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_UPDATE_CHECK": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }


def key(kind: str, repo_id: str) -> str:
    return f"{kind}/{repo_id}"


def is_lfs(name: str, size: int, sample: bytes = b"") -> bool:
    return name.endswith(LFS_SUFFIXES) or size > LARGEST_REGULAR_FILE or b"\0" in sample


class CountingFile:
    """The socket as a file; what is sent is counted in `record` before it arrives."""

    def __init__(self, file):
        self.file = file
        self.record: Request | None = None

    def write(self, data) -> int:
        if self.record is not None:
            self.record.sent += len(data)
        return self.file.write(data)

    def __getattr__(self, name: str):
        return getattr(self.file, name)


class Handler(BaseHTTPRequestHandler):
    """What Hub and storage share: requests with bodies, faults, ranges, records."""

    hub: HubServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = 60

    def setup(self) -> None:
        super().setup()
        self.wfile = CountingFile(self.wfile)

    def log_message(self, *args: Any) -> None:
        pass

    def handle_any(self) -> None:
        hub = self.hub
        parts = urlsplit(self.path)
        self.raw_path, self.query = parts.path, {name: values[-1] for name, values in parse_qs(parts.query).items()}
        authorization = self.headers.get("Authorization")
        token = authorization.removeprefix("Bearer ") if authorization else None
        self.record = Request(self.command, unquote(parts.path), self.headers.get("Range"), token)
        with hub.lock:
            hub.requests.append(self.record)
        self.wfile.record = self.record
        self.fault = hub.fault(self.command, unquote(parts.path))
        self._unread = True
        try:
            if self.fault and self.fault.delay:
                time.sleep(self.fault.delay)
            if self.fault and self.fault.status == 0:
                self.close_connection = True
                return
            if self.fault and self.fault.status:
                raise Answer(self.fault.status, {"error": "so it was told"}, self.fault.headers)
            self.answer()
        except Answer as answer:
            self.drain()
            self.send_json(answer.status, answer.body, answer.headers)
        except (BrokenPipeError, ConnectionResetError, TimeoutError):
            self.close_connection = True

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_any

    def answer(self) -> None:
        raise NotImplementedError

    def blocks(self) -> Iterator[bytes]:
        """The body of the request, of a known length or chunked."""
        if not self._unread:
            return
        self._unread = False
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            while size := int(self.rfile.readline().split(b";")[0], 16):
                block = self.rfile.read(size)
                self.rfile.readline()
                self.record.received += len(block)
                yield block
            self.rfile.readline()
            return
        left = int(self.headers.get("Content-Length") or 0)
        while left and (block := self.rfile.read(min(left, BLOCK_BYTES))):
            left -= len(block)
            self.record.received += len(block)
            yield block

    def drain(self) -> None:
        for _ in self.blocks():
            pass

    def read_body(self) -> bytes:
        return b"".join(self.blocks())

    def read_json(self) -> dict[str, Any]:
        return json.loads(self.read_body() or b"{}")

    def send_json(self, status: int, body: Any = None, headers: dict[str, str] | None = None) -> None:
        data = b"" if body is None else json.dumps(body).encode()
        self.send_head(status, len(data), {"Content-Type": "application/json; charset=utf-8"} | (headers or {}))
        if self.command != "HEAD":
            self.send_data(data)

    def send_head(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.record.status = status
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        self.send_header("X-Request-Id", f"Root=1-{len(self.hub.requests)}")
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def send_data(self, data: bytes) -> None:
        """Sends a part of the body; a fault may close the connection in it."""
        limit = self.fault.cut_after if self.fault else None
        if limit is not None and self.record.body + len(data) > limit:
            data = data[: limit - self.record.body]
            self.close_connection = True
        self.record.body += len(data)
        self.wfile.write(data)
        if self.close_connection and limit is not None and self.record.body >= limit:
            self.wfile.flush()
            raise ConnectionResetError

    def send_blob(self, blob: Blob, headers: dict[str, str]) -> None:
        """The content, or the range of it that is asked for."""
        headers = {"Accept-Ranges": "bytes", "ETag": f'"{blob.etag}"'} | headers
        start, end, status = 0, blob.size, 200
        if match := re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range") or ""):
            first, last = match.groups()
            if not first:
                start = max(blob.size - int(last or 0), 0)
            else:
                start, end = int(first), min(int(last) + 1, blob.size) if last else blob.size
            if start >= end:
                self.send_head(416, 0, headers | {"Content-Range": f"bytes */{blob.size}"})
                return
            status = 206
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{blob.size}"
        self.send_head(status, end - start, headers)
        if self.command == "HEAD":
            return
        with blob.path.open("rb") as file:
            file.seek(start)
            while start < end:
                block = file.read(min(end - start, BLOCK_BYTES))
                self.send_data(block)
                start += len(block)


class StorageHandler(Handler):
    """The bucket behind the Hub: signed addresses only."""

    def answer(self) -> None:
        if self.headers.get("Authorization"):
            raise refusal(400, "Only one auth mechanism allowed: the token must not leave the Hub")
        match = re.fullmatch(r"/(get|put)/([0-9a-f]{64})(?:/(\d+))?", self.raw_path)
        if match is None:
            raise refusal(404, "NoSuchKey")
        verb, sha256, part = match.groups()
        if verb == "get":
            blob = self.hub.objects.get(sha256)
            if blob is None:
                raise refusal(404, "NoSuchKey")
            self.drain()
            self.send_blob(blob, {"Content-Type": "application/octet-stream"})
            return
        target = self.hub.root / "objects" / (f"{sha256}.{part}" if part else sha256)
        digest = hashlib.sha256()
        incoming = target.with_name(f"{target.name}.{threading.get_ident()}.incoming")
        with incoming.open("wb") as file:
            for block in self.blocks():
                digest.update(block)
                file.write(block)
        incoming.replace(target)
        if not part and digest.hexdigest() != sha256:
            target.unlink()
            raise refusal(400, f"The upload has sha256 {digest.hexdigest()}, not {sha256}")
        if not part:
            store(self.hub, target, sha256)
        self.send_json(200, None, {"ETag": f'"{digest.hexdigest()[:32]}"'})


def store(hub: HubServer, path: Path, sha256: str) -> None:
    size = path.stat().st_size
    with hub.lock:
        hub.objects[sha256] = Blob(path, True, size, git_oid(pointer(sha256, size)), sha256)


class HubHandler(Handler):
    """The Hub: its API, `resolve`, and the LFS batch endpoint."""

    def answer(self) -> None:
        self.user = self.authenticate()
        path = self.raw_path
        for pattern, method in ROUTES:
            verb, _, rest = pattern.partition(" ")
            if (verb == self.command or verb == "GET" and self.command == "HEAD") and (
                match := re.fullmatch(rest, path)
            ):
                getattr(self, method)(*[unquote(group) if group else group for group in match.groups()])
                return
        raise refusal(404, f"Sorry, we can't find the page you are looking for: {self.command} {path}")

    def authenticate(self) -> User | None:
        token = self.record.token
        if not token:
            return None
        if token not in self.hub.tokens:
            raise refusal(401, "Invalid credentials in Authorization header")
        return self.hub.tokens[token]

    # Access

    def repository(self, kind: str | None, repo_id: str, write: bool = False, content: bool = False) -> Repository:
        repository = self.hub.repositories.get(key((kind or "models").rstrip("/"), repo_id))
        own = repository is not None and self.may_write(repository.owner, ignore_role=True)
        if repository is None or repository.private and not own:
            # The real one sends the code with a token only; without, the client goes by its https address
            raise refusal(404 if self.user else 401, "Repository not found", "RepoNotFound")
        if write and not self.may_write(repository.owner):
            raise refusal(403, f"You don't have the rights to write to {repo_id}")
        if content and repository.gated and not own and not (self.user and self.user.name in repository.readers):
            start = f"Access to model {repo_id} is restricted"
            if self.user is None:
                raise refusal(401, f"{start}. You must be authenticated to access it. Please log in.", "GatedRepo")
            raise refusal(403, f"{start} and you are not in the authorized list.", "GatedRepo")
        return repository

    def may_write(self, namespace: str, ignore_role: bool = False) -> bool:
        user = self.user
        return user is not None and (user.write or ignore_role) and namespace in (user.name, *user.organizations)

    def revision(self, repository: Repository, revision: str) -> Commit:
        commit = repository.resolve(revision)
        if commit is None:
            raise refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit

    # Reading

    def whoami(self) -> None:
        if self.user is None:
            raise refusal(401, "Invalid username or password.")
        role = "write" if self.user.write else "read"
        organizations = [{"name": name, "type": "org", "roleInOrg": "admin"} for name in self.user.organizations]
        raise Answer(
            200,
            {
                "type": "user",
                "name": self.user.name,
                "fullname": self.user.name,
                "orgs": organizations,
                "auth": {"type": "access_token", "accessToken": {"displayName": "a token", "role": role}},
            },
        )

    def info(self, kind: str, repo_id: str, revision: str | None = None) -> None:
        repository = self.repository(kind, repo_id)
        commit = self.revision(repository, revision or "main")
        siblings = []
        for name, blob in sorted(commit.files.items()):
            siblings.append({"rfilename": name})
            if self.query.get("blobs", "").lower() == "true":
                siblings[-1] |= {"size": blob.size, "blobId": blob.git_oid}
                if blob.lfs:
                    siblings[-1]["lfs"] = {"size": blob.size, "sha256": blob.sha256, "pointerSize": 134}
        card = front_matter(commit.files["README.md"].path.read_text()) if "README.md" in commit.files else {}
        answer = {
            "_id": "0",
            "id": repo_id,
            "modelId": repo_id,
            "author": repository.owner,
            "sha": commit.oid,
            "private": repository.private,
            "gated": "manual" if repository.gated else False,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "tags": list(card.get("tags") or []),
            "createdAt": START_OF_TIME,
            "lastModified": START_OF_TIME,
            "siblings": siblings,
            "cardData": card,
        }
        for name in ("library_name", "pipeline_tag"):
            if name in card:
                answer[name] = card[name]
        raise Answer(200, answer)

    def tree(self, kind: str, repo_id: str, revision: str, folder: str | None = None) -> None:
        commit = self.revision(self.repository(kind, repo_id), revision)
        prefix = f"{folder}/" if folder else ""
        entries: dict[str, dict[str, Any]] = {}
        for name, blob in sorted(commit.files.items()):
            if not name.startswith(prefix):
                continue
            rest = name[len(prefix) :].split("/")
            for depth in range(1, len(rest)):
                inner = prefix + "/".join(rest[:depth])
                entries.setdefault(inner, {"type": "directory", "oid": git_oid(inner.encode()), "size": 0})
                if self.query.get("recursive", "").lower() != "true":
                    break
            else:
                entries[name] = describe(blob)
        if folder and not entries:
            raise refusal(404, f"{folder} does not exist on {revision}", "EntryNotFound")
        listed = [entry | {"path": name} for name, entry in sorted(entries.items())]
        start = int(self.query.get("cursor", 0))
        headers = {}
        if start + TREE_PAGE < len(listed):
            query = f"recursive={self.query.get('recursive', 'false')}&cursor={start + TREE_PAGE}"
            headers["Link"] = f'<{self.hub.url}{self.raw_path}?{query}>; rel="next"'
        raise Answer(200, listed[start : start + TREE_PAGE], headers)

    def paths_info(self, kind: str, repo_id: str, revision: str) -> None:
        commit = self.revision(self.repository(kind, repo_id), revision)
        body = self.read_body()
        if "json" in self.headers.get("Content-Type", ""):
            paths = json.loads(body)["paths"]
        else:
            paths = parse_qs(body.decode()).get("paths", [])
        found = []
        for path in paths:
            if path in commit.files:
                found.append(describe(commit.files[path]) | {"path": path})
            elif any(name.startswith(f"{path.rstrip('/')}/") for name in commit.files):
                found.append({"type": "directory", "path": path, "oid": git_oid(path.encode()), "size": 0})
        raise Answer(200, found)

    def refs(self, kind: str, repo_id: str) -> None:
        repository = self.repository(kind, repo_id)

        def listed(names: dict[str, str], prefix: str) -> list[dict[str, str]]:
            return [{"name": name, "ref": prefix + name, "targetCommit": oid} for name, oid in sorted(names.items())]

        branches = {name: oid for name, oid in repository.refs.items() if not name.startswith("refs/")}
        pulls = {name: oid for name, oid in repository.refs.items() if name.startswith("refs/")}
        answer = {"branches": listed(branches, "refs/heads/"), "tags": listed(repository.tags, "refs/tags/")}
        raise Answer(200, answer | {"converts": [], "pullRequests": listed(pulls, "")})

    def commits(self, kind: str, repo_id: str, revision: str) -> None:
        repository = self.repository(kind, repo_id)
        commit, listed = self.revision(repository, revision), []
        while commit is not None:
            listed.append(
                {"id": commit.oid, "title": commit.title, "message": "", "authors": [], "date": START_OF_TIME}
            )
            commit = repository.commits.get(commit.parent)
        raise Answer(200, listed)

    def auth_check(self, kind: str, repo_id: str, write: str | None = None) -> None:
        self.repository(kind, repo_id, write=bool(write), content=True)
        raise Answer(200, {})

    def resolve(self, kind: str | None, repo_id: str, revision: str, name: str) -> None:
        repository = self.repository(kind, repo_id, content=True)
        commit = self.revision(repository, revision)
        headers = {"X-Repo-Commit": commit.oid}
        blob = commit.files.get(name)
        if blob is None:
            raise refusal(404, "Entry not found", "EntryNotFound", **headers)
        self.drain()
        if not blob.lfs:
            self.send_blob(blob, headers | {"Content-Type": "text/plain; charset=utf-8"})
            return
        location = f"{self.hub.storage_url}/get/{blob.sha256}?X-Amz-Signature=valid&name={quote(name)}"
        linked = {"X-Linked-Size": str(blob.size), "X-Linked-ETag": f'"{blob.etag}"', "Accept-Ranges": "bytes"}
        raise Answer(302, None, headers | linked | {"Location": location})

    # Writing

    def create(self) -> None:
        asked = self.read_json()
        namespace = asked.get("organization") or (self.user.name if self.user else None)
        repo_id, kind = f"{namespace}/{asked['name']}", f"{asked.get('type') or 'model'}s"
        if self.user is None:
            raise refusal(401, "Invalid username or password.")
        if not self.may_write(namespace):
            raise refusal(403, f"You don't have the rights to create a model under the namespace {namespace!r}")
        url = f"{self.hub.url}/{'' if kind == 'models' else kind + '/'}{repo_id}"
        with self.hub.lock:
            if key(kind, repo_id) in self.hub.repositories:
                message = f"You already created this {kind[:-1]} repo"
                raise Answer(409, {"error": message, "url": url}, {"X-Error-Message": message})
            repository = Repository(repo_id, kind)
            repository.private = asked.get("visibility") == "private" or bool(asked.get("private"))
            self.hub.repositories[key(kind, repo_id)] = repository
            path = self.hub.root / "objects" / "gitattributes"
            path.write_bytes(GIT_ATTRIBUTES)
            repository.commit("main", {".gitattributes": Blob.of(path, lfs=False)}, "initial commit")
        raise Answer(200, {"url": url, "name": repo_id, "id": "0"})

    def delete(self) -> None:
        asked = self.read_json()
        namespace = asked.get("organization") or (self.user.name if self.user else "")
        kind, repo_id = f"{asked.get('type') or 'model'}s", f"{namespace}/{asked['name']}"
        self.repository(kind, repo_id, write=True)
        del self.hub.repositories[key(kind, repo_id)]
        raise Answer(200, {})

    def settings(self, kind: str, repo_id: str) -> None:
        repository, asked = self.repository(kind, repo_id, write=True), self.read_json()
        if "visibility" in asked or "private" in asked:
            repository.private = asked.get("visibility") == "private" or bool(asked.get("private"))
        repository.gated = bool(asked.get("gated", repository.gated))
        raise Answer(200, {"private": repository.private, "gated": repository.gated})

    def branch(self, kind: str, repo_id: str, branch: str) -> None:
        repository, asked = self.repository(kind, repo_id, write=True), self.read_json()
        if self.command == "DELETE":
            if repository.refs.pop(branch, None) is None:
                raise refusal(404, f"Reference does not exist: {branch}", "RevisionNotFound")
            raise Answer(200, {})
        if branch in repository.refs:
            raise refusal(409, f"Reference already exists: {branch}")
        repository.refs[branch] = self.revision(repository, asked.get("startingPoint") or "main").oid
        raise Answer(200, {})

    def tag(self, kind: str, repo_id: str, revision: str) -> None:
        repository, asked = self.repository(kind, repo_id, write=True), self.read_json()
        if asked["tag"] in repository.tags:
            raise refusal(409, f"Tag reference exists already: {asked['tag']}")
        repository.tags[asked["tag"]] = self.revision(repository, revision).oid
        raise Answer(200, {})

    def validate_yaml(self) -> None:
        content = self.read_json()["content"]
        errors, warnings = [], []
        try:
            if not front_matter(content):
                warnings.append({"message": "empty or missing yaml metadata in repo card"})
        except (yaml.YAMLError, ValueError) as error:
            errors.append({"message": str(error).splitlines()[0]})
        raise Answer(400 if errors else 200, {"errors": errors, "warnings": warnings})

    def preupload(self, kind: str, repo_id: str, revision: str) -> None:
        create_pr = self.query.get("create_pr") == "1"
        repository = self.repository(kind, repo_id, write=not create_pr)
        commit, files = self.revision(repository, revision), []
        for file in self.read_json()["files"]:
            sample = base64.b64decode(file.get("sample") or "")
            mode = "lfs" if is_lfs(file["path"], file["size"], sample) else "regular"
            files.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False})
            if file["path"] in commit.files:
                files[-1]["oid"] = commit.files[file["path"]].etag
        raise Answer(200, {"files": files, "commitOid": commit.oid})

    def lfs_batch(self, kind: str | None, repo_id: str) -> None:
        self.repository(kind, repo_id, write=True)
        asked, hub, answers = self.read_json(), self.hub, []
        for wanted in asked["objects"]:
            oid, size = wanted["oid"], wanted["size"]
            answer = {"oid": oid, "size": size}
            if oid not in hub.objects:
                address = f"{hub.url}/{kind or ''}{repo_id}.git/info/lfs"
                upload: dict[str, Any] = {"href": f"{hub.storage_url}/put/{oid}"}
                if hub.multipart_bytes and size > hub.multipart_bytes and "multipart" in asked.get("transfers", ()):
                    parts = -(-size // hub.multipart_bytes)
                    urls = {f"{part:05d}": f"{hub.storage_url}/put/{oid}/{part}" for part in range(1, parts + 1)}
                    upload = {"href": f"{address}/complete", "header": {"chunk_size": str(hub.multipart_bytes)} | urls}
                answer["actions"] = {"upload": upload, "verify": {"href": f"{address}/verify"}}
            answers.append(answer)
        headers = {"Content-Type": "application/vnd.git-lfs+json"}
        raise Answer(200, {"transfer": "basic", "objects": answers}, headers)

    def lfs_complete(self, kind: str | None, repo_id: str) -> None:
        asked = self.read_json()
        path = self.hub.root / "objects" / asked["oid"]
        digest = hashlib.sha256()
        with path.open("wb") as whole:
            for part in sorted(asked["parts"], key=lambda part: part["partNumber"]):
                piece = path.with_name(f"{asked['oid']}.{part['partNumber']}")
                data = piece.read_bytes()
                digest.update(data)
                whole.write(data)
                piece.unlink()
        if digest.hexdigest() != asked["oid"]:
            path.unlink()
            raise refusal(400, "The parts do not make the object")
        store(self.hub, path, asked["oid"])
        raise Answer(200, {"success": True})

    def lfs_verify(self, kind: str | None, repo_id: str) -> None:
        asked = self.read_json()
        blob = self.hub.objects.get(asked["oid"])
        if blob is None or blob.size != asked["size"]:
            raise refusal(404, "Object not found")
        raise Answer(200, {"message": "ok"})

    def commit(self, kind: str, repo_id: str, revision: str) -> None:
        create_pr = self.query.get("create_pr") == "1"
        repository = self.repository(kind, repo_id, write=not create_pr)
        if self.user is None:
            raise refusal(401, "Invalid username or password.")
        lines = [json.loads(line) for line in self.read_body().splitlines() if line]
        with self.hub.lock:
            base = repository.resolve(revision)
            if base is None or not create_pr and revision not in repository.refs:
                raise refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
            files, header = dict(base.files), lines[0]["value"]
            if header.get("parentCommit") not in (None, base.oid):
                raise refusal(412, "A commit has happened since. Please refresh and try again.")
            for line in lines[1:]:
                self.apply(line["key"], line["value"], files)
            ref = revision
            if create_pr:
                repository.pull_requests.append(header["summary"])
                ref = f"refs/pr/{len(repository.pull_requests)}"
                repository.refs[ref] = base.oid
            commit = repository.commit(ref, files, header["summary"])
        url = f"{self.hub.url}/{'' if kind == 'models' else kind + '/'}{repo_id}"
        answer = {
            "success": True,
            "commitOid": commit.oid,
            "commitUrl": f"{url}/commit/{commit.oid}",
            "hookOutput": "",
        }
        if create_pr:
            answer["pullRequestUrl"] = f"{url}/discussions/{len(repository.pull_requests)}"
        raise Answer(200, answer)

    def apply(self, operation: str, value: dict[str, Any], files: dict[str, Blob]) -> None:
        path = value["path"]
        if path.startswith("/") or ".." in path.split("/"):
            raise refusal(400, f"Invalid path: {path}")
        if operation == "file":
            data = base64.b64decode(value["content"])
            if is_lfs(path, len(data), data[:8000]):
                raise refusal(400, f"Your push was rejected because it contains binary files: {path}")
            content = self.hub.root / "objects" / git_oid(data)
            content.write_bytes(data)
            files[path] = Blob.of(content, lfs=False)
        elif operation == "lfsFile":
            if value["oid"] not in self.hub.objects:
                raise refusal(400, f"Your push was rejected: LFS pointer to a file that does not exist: {path}")
            files[path] = self.hub.objects[value["oid"]]
        elif operation == "deletedFile":
            if path not in files:
                raise refusal(404, "A file with this name doesn't exist", "EntryNotFound")
            del files[path]
        elif operation == "deletedFolder":
            inside = [name for name in files if name.startswith(f"{path.rstrip('/')}/")]
            if not inside:
                raise refusal(404, "A file with this name doesn't exist", "EntryNotFound")
            for name in inside:
                del files[name]
        else:
            raise refusal(400, f"Unknown operation: {operation}")

    def discuss(self, kind: str, repo_id: str) -> None:
        repository, asked = self.repository(kind, repo_id), self.read_json()
        if self.user is None:
            raise refusal(401, "Invalid username or password.")
        repository.pull_requests.append(asked["title"])
        number = len(repository.pull_requests)
        repository.refs[f"refs/pr/{number}"] = repository.refs["main"]
        raise Answer(200, {"num": number, "pullRequest": asked.get("pullRequest", False)})

    def discussion(self, kind: str, repo_id: str, number: str) -> None:
        repository = self.repository(kind, repo_id)
        answer = {
            "title": repository.pull_requests[int(number) - 1],
            "num": int(number),
            "author": {"name": repository.owner},
            "createdAt": START_OF_TIME,
            "status": "draft",
            "isPullRequest": True,
            "repo": {"name": repo_id, "type": kind[:-1]},
            "events": [],
            "filesWithConflicts": [],
            "changes": {"base": "refs/heads/main", "mergeCommitId": None},
        }
        raise Answer(200, answer)


KIND, REPO, REST = "(models|datasets|spaces)", "([^/]+/[^/]+)", "([^/]+)"
API = f"/api/{KIND}/{REPO}"
LFS = rf"/(datasets/|spaces/)?{REPO}\.git/info/lfs"
ROUTES = (
    ("GET /api/whoami-v2", "whoami"),
    ("POST /api/repos/create", "create"),
    ("DELETE /api/repos/delete", "delete"),
    ("POST /api/validate-yaml", "validate_yaml"),
    (f"GET {API}", "info"),
    (f"GET {API}/revision/{REST}", "info"),
    (f"GET {API}/tree/{REST}", "tree"),
    (f"GET {API}/tree/{REST}/(.+)", "tree"),
    (f"POST {API}/paths-info/{REST}", "paths_info"),
    (f"GET {API}/refs", "refs"),
    (f"GET {API}/commits/{REST}", "commits"),
    (f"GET {API}/auth-check(/write)?", "auth_check"),
    (f"PUT {API}/settings", "settings"),
    (f"POST {API}/branch/{REST}", "branch"),
    (f"DELETE {API}/branch/{REST}", "branch"),
    (f"POST {API}/tag/{REST}", "tag"),
    (f"POST {API}/preupload/{REST}", "preupload"),
    (f"POST {API}/commit/{REST}", "commit"),
    (f"POST {API}/discussions", "discuss"),
    (rf"GET {API}/discussions/(\d+)", "discussion"),
    (f"POST {LFS}/objects/batch", "lfs_batch"),
    (f"POST {LFS}/complete", "lfs_complete"),
    (f"POST {LFS}/verify", "lfs_verify"),
    (f"GET /(datasets/|spaces/)?{REPO}/resolve/{REST}/(.+)", "resolve"),
)


def describe(blob: Blob) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "oid": blob.git_oid, "size": blob.size}
    if blob.lfs:
        entry["lfs"] = {"oid": blob.sha256, "size": blob.size, "pointerSize": len(pointer(blob.sha256, blob.size))}
    return entry


def front_matter(text: str) -> dict[str, Any]:
    """The YAML between the two `---` of a card. Raises `ValueError` where it is no mapping."""
    match = re.match(r"---\r?\n(.*?)\r?\n---\r?\n", text, re.DOTALL)
    if match is None:
        return {}
    found = yaml.safe_load(match[1]) or {}
    if not isinstance(found, dict):
        raise ValueError("the metadata is no mapping")
    return found


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Iterator[HubServer]:
    """A running Hub, and this process as its client: `huggingface_hub` reads its settings on import, so they are
    replaced where it keeps them. The cache is new, and the token is `hf_owner`'s."""
    import huggingface_hub.hf_api
    import transformers.dynamic_module_utils
    import transformers.utils.hub
    from huggingface_hub import constants
    from huggingface_hub.utils import close_session

    with HubServer(tmp_path / "hub-server") as server:
        cache = tmp_path / "hub-cache"
        for name, value in server.environment(cache).items():
            monkeypatch.setenv(name, value)
        settings = {
            "ENDPOINT": server.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": server.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
            "HF_HOME": str(cache),
            "HF_HUB_CACHE": str(cache / "hub"),
            "HUGGINGFACE_HUB_CACHE": str(cache / "hub"),
            "HF_TOKEN_PATH": str(cache / "token"),
        }
        for name, value in settings.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", server.url)
        # transformers keeps its client, with the endpoint that it first had: an earlier test's, which is gone
        monkeypatch.setattr(transformers.utils.hub, "_hf_api", None)
        for module in (transformers.utils.hub, transformers.dynamic_module_utils):
            monkeypatch.setattr(module, "HF_MODULES_CACHE", str(cache / "modules"))
        close_session()
        yield server
        close_session()
