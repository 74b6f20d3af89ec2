"""Where a checkpoint's files lie: a local folder, or a repository on the Hub, of which only byte ranges are fetched.

The Hub is asked through the functions, the session and the token of `huggingface_hub`, so endpoint, proxies and login
are the user's. Its revision is resolved once: all that is read belongs to the same commit.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath, PurePosixPath

import httpx2
from huggingface_hub import HfApi, constants, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

from ..utils.folders import check_model_path

BLOCK_BYTES = 1 << 20
CONNECTION_TRIES = 5  # in a row, without a byte
FIRST_WAIT, LONGEST_WAIT = 1.0, 8.0  # seconds before the next try


class Source(ABC):
    """Files that are read by byte ranges.

    Attributes:
        commit: of a repository on the Hub; `None` for a folder.
        first_read: bytes worth asking for at the beginning of a safetensors file.
        bytes_read: so far.
    """

    commit: str | None = None
    first_read: int
    bytes_read: int

    @abstractmethod
    def path(self, name: str) -> PurePath:
        """The file as it is named in messages."""

    @abstractmethod
    def names(self) -> list[str]:
        """All files, sorted; of a folder what else lies in it, too."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether there is a file `name`."""

    @abstractmethod
    def size(self, name: str) -> int:
        """Bytes of the file `name`."""

    @abstractmethod
    def stream(self, name: str, start: int, end: int) -> Iterator[bytes]:
        """Bytes `start` to `end` of a file, in blocks; fewer where it ends before."""

    def read(self, name: str, start: int, end: int) -> bytearray:
        """The same in one piece."""
        data = bytearray()
        for block in self.stream(name, start, end):
            data += block
        return data


class LocalFolder(Source):
    """Files in a folder."""

    first_read = 8

    def __init__(self, folder: str | os.PathLike):
        self.folder = Path(folder)
        self.bytes_read = 0

    def __str__(self) -> str:
        return str(self.folder)

    def path(self, name: str) -> PurePath:
        return self.folder / name

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir()) if self.folder.is_dir() else []

    def has(self, name: str) -> bool:
        return (self.folder / name).is_file()

    def size(self, name: str) -> int:
        return (self.folder / name).stat().st_size

    def stream(self, name: str, start: int, end: int) -> Iterator[bytes]:
        with open(self.folder / name, "rb", buffering=0) as file:
            file.seek(start)
            while start < end and (block := file.read(min(end - start, BLOCK_BYTES))):
                start += len(block)
                self.bytes_read += len(block)
                yield block


class HubRepository(Source):
    """Files of a model repository at one commit.

    Args:
        repo_id: such as `deepseek-ai/DeepSeek-V4-Flash`.
        revision: branch, tag, pull request or commit; `main` by default.

    Attributes:
        commit: the hash of the commit that `revision` stands for.

    Raises (here and in reading, each with one line that says what to do):
        FileNotFoundError: no such repository, or none that the token may see; no such revision.
        PermissionError: a gated repository.
        ConnectionError: no network, offline mode, or a connection that breaks again and again.
        OSError: the Hub answers with another error.
    """

    first_read = 1 << 16

    def __init__(self, repo_id: str, revision: str | None = None):
        self.repo_id = repo_id
        self.revision = revision or constants.DEFAULT_REVISION
        self.bytes_read = 0
        with self._errors_in_one_line():
            info = HfApi().model_info(
                repo_id, revision=revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
            )
        self.commit = info.sha
        self._sizes = {file.rfilename: file.size for file in info.siblings or ()}

    def __str__(self) -> str:
        return self.repo_id

    def path(self, name: str) -> PurePath:
        return PurePosixPath(self.repo_id) / name

    def names(self) -> list[str]:
        return sorted(self._sizes)

    def has(self, name: str) -> bool:
        return name in self._sizes

    def size(self, name: str) -> int:
        size = self._sizes[name]
        if size is None:
            raise OSError(f"{self.path(name)}: found no size of it in {self._endpoint()}'s answer, wanted one")
        return size

    def stream(self, name: str, start: int, end: int) -> Iterator[bytes]:
        """See [`Source`]; a connection that breaks is taken up again where it broke."""
        url = hf_hub_url(self.repo_id, name, revision=self.commit)
        end = min(end, self.size(name))
        failures = 0
        while start < end:
            headers = build_hf_headers() | {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
            with self._errors_in_one_line():
                try:
                    with http_stream_backoff(
                        "GET",
                        url,
                        headers=headers,
                        timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
                        retry_on_exceptions=(),  # tried again below
                    ) as response:
                        hf_raise_for_status(response)
                        self._check_range(name, response, start)
                        for block in response.iter_bytes():
                            block = block[: end - start]
                            failures = 0
                            start += len(block)
                            self.bytes_read += len(block)
                            yield block
                except httpx2.TransportError:
                    failures += 1
                    if failures == CONNECTION_TRIES:
                        raise
                    time.sleep(min(FIRST_WAIT * 2 ** (failures - 1), LONGEST_WAIT))

    def _check_range(self, name: str, response: httpx2.Response, start: int) -> None:
        """Whether the answer begins at `start`: a proxy that knows no ranges sends the file from its beginning."""
        found = response.headers.get("Content-Range", "")
        if not found.startswith(f"bytes {start}-") and not (response.status_code == 200 and start == 0):
            raise OSError(
                f"{self.path(name)}: found status {response.status_code} and the range {found!r}, wanted 206 and the "
                f"bytes from {start}: something between here and the Hub ignores ranges"
            )

    def _endpoint(self) -> str:
        return constants.ENDPOINT

    @contextmanager
    def _errors_in_one_line(self) -> Iterator[None]:
        repo = self.repo_id
        login = "`hf auth login` or HF_TOKEN"
        try:
            yield
        except GatedRepoError:
            raise PermissionError(
                f"target: found {repo!r}, which is gated, wanted access to it: accept its terms at "
                f"{self._endpoint()}/{repo}, and log in ({login})"
            ) from None
        except RepositoryNotFoundError:
            raise FileNotFoundError(
                f"target: found neither a folder {repo!r} nor such a repository on {self._endpoint()}, wanted one; if "
                f"it is private, log in ({login})"
            ) from None
        except RevisionNotFoundError:
            raise FileNotFoundError(
                f"target_revision: found no {self.revision!r} in {repo!r}, wanted a branch, tag or commit of it"
            ) from None
        except HFValidationError:
            raise ValueError(f"target: found {repo!r}, wanted a folder, or a Hub id such as 'name/model'") from None
        except OfflineModeIsEnabled:
            raise ConnectionError(
                f"target: found no folder {repo!r} and HF_HUB_OFFLINE set, wanted a folder, or the Hub"
            ) from None
        except HfHubHTTPError as error:
            status, reason = error.response.status_code, " ".join((error.server_message or "").split())
            raise OSError(
                f"target: found status {status} from {self._endpoint()} for {repo!r}, wanted its files: {reason}"
            ) from None
        except httpx2.TransportError as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise ConnectionError(
                f"target: found no connection to {self._endpoint()} for {repo!r} ({reason}), wanted one; the same "
                "command goes on where it stopped"
            ) from None


def open_source(target: str | os.PathLike | Source, revision: str | None = None) -> Source:
    """The folder `target`, or else the Hub repository of that name at `revision`. A source is returned as it is.

    Raises:
        FileNotFoundError: what reads like a folder is none. See also [`HubRepository`].
    """
    if isinstance(target, Source):
        return target
    if Path(target).is_dir():
        return LocalFolder(target)
    check_model_path("target", os.fspath(target))
    return HubRepository(os.fspath(target), revision)


__all__ = ["HubRepository", "LocalFolder", "Source", "open_source"]
