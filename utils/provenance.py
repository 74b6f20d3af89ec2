"""Where an artifact comes from: the record that is written beside it as `provenance.json`."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .. import __version__

PROVENANCE_FILE = "provenance.json"
TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{20,}")  # of the Hub
# An absolute path, or one from a home folder, in the middle of a text: two parts at least, and no part of a URL
PATH_IN_TEXT = re.compile(r"""(?<![\w.~/<-])(?:~[\w-]*)?/[^\s/'"`,;:<>|()\[\]{}]+(?:/[^\s/'"`,;:<>|()\[\]{}]+)+/?""")
PACKAGES = ("torch", "transformers", "safetensors", "trl", "accelerate", "datasets", "peft")


def collect_provenance(command: Sequence[str] | None = None, **facts: Any) -> dict[str, Any]:
    """The record of an artifact that is being made now, in this process.

    Args:
        command: the command line, `sys.argv` by default. Of the program only the name is kept; the arguments stand as
            they were given, but for tokens of the Hub.
        facts: what else belongs in the record, JSON values: the seed, the target, fingerprints of the data. Name
            folders as the user named them, or by their last part: a record should mean something on other machines.

    Returns:
        `command`, `time` (UTC, ISO 8601), `versions`, `commit`, and the facts.

    Raises:
        ValueError: a fact has the name of one of the record's own fields.
    """
    command = list(sys.argv if command is None else command)
    arguments = [TOKEN.sub("hf_***", str(word)) for word in command[1:]]
    record = {
        "command": [Path(command[0]).name, *arguments] if command else [],
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": package_versions(),
        "commit": package_commit(),
    }
    if taken := sorted(record.keys() & facts.keys()):
        raise ValueError(f"facts: found {taken}, wanted other names: the record has these fields itself")
    return record | facts


def write_provenance(folder: str | os.PathLike, record: dict[str, Any]) -> Path:
    """Writes `record` to `provenance.json` in `folder`, and returns the file's path."""
    path = Path(folder) / PROVENANCE_FILE
    path.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def read_provenance(folder: str | os.PathLike) -> dict[str, Any] | None:
    """The record in `folder`, or `None` if it has none.

    Raises:
        ValueError: the file holds something else.
    """
    file = Path(folder) / PROVENANCE_FILE
    if not file.is_file():
        return None
    try:
        record = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise ValueError(f"{file}: found something else, wanted a JSON object, or no such file")
    return record


def published(value: Any) -> Any:
    """`value`, a record or a part of one, as strangers may read it: without the folders of whoever made it.

    Absolute paths, and those from a home folder (`~/...`), become relative to the working directory if they lie in
    it, else their last part. All else stays: relative paths, Hub ids, URLs.
    """
    if isinstance(value, dict):
        return {name: published(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [published(part) for part in value]
    if not isinstance(value, str):
        return value
    option, equals, rest = value.partition("=") if value.startswith("-") else ("", "", value)
    if rest.startswith(("/", "~")) and not re.search(r"[\s,;:]", rest):
        return option + equals + _short_path(rest)
    return PATH_IN_TEXT.sub(lambda match: _short_path(match[0]), value)


def _short_path(path: str) -> str:
    try:
        full = Path(path).expanduser()
    except RuntimeError:  # nobody's home
        full = Path(path)
    here = Path.cwd()
    if full.is_relative_to(here) and here != here.parent:
        return full.relative_to(here).as_posix()
    return full.name or path


def file_fingerprints(paths: Iterable[str | os.PathLike]) -> dict[str, str]:
    """`{name: sha256}` of the files, with their names alone: where they lie says nothing about what they hold.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: two files have the same name.
    """
    fingerprints: dict[str, str] = {}
    for path in map(Path, paths):
        if path.name in fingerprints:
            raise ValueError(f"{path}: found a second file named {path.name!r}, wanted names that differ")
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        fingerprints[path.name] = digest.hexdigest()
    return fingerprints


def package_versions() -> dict[str, str]:
    """Versions of Python, of this package, and of those of `PACKAGES` that are installed."""
    versions = {"python": platform.python_version(), "hyperdflash": __version__}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def package_commit() -> str | None:
    """The commit of the checkout that holds this package's source, ending in `-dirty` if tracked files are modified.

    `None` for a package installed from a wheel, even where that lies inside somebody else's checkout, and without git.
    """
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


__all__ = ["collect_provenance", "file_fingerprints", "published", "read_provenance", "write_provenance"]
