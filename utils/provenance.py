"""Where an artifact comes from: the record that is written beside it as `provenance.json`."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .. import __version__

PROVENANCE_FILE = "provenance.json"
PACKAGES = ("torch", "transformers", "safetensors", "trl", "accelerate", "datasets", "peft")


def collect_provenance(command: Sequence[str] | None = None, **facts: Any) -> dict[str, Any]:
    """The record of an artifact that is being made now, in this process.

    Args:
        command: the command line, `sys.argv` by default. Of the program only the name is kept; the arguments stand as
            they were given.
        facts: what else belongs in the record, JSON values: the seed, the target, fingerprints of the data. Name
            folders as the user named them, or by their last part: a record should mean something on other machines.

    Returns:
        `command`, `time` (UTC, ISO 8601), `versions`, `commit`, and the facts.

    Raises:
        ValueError: a fact has the name of one of the record's own fields.
    """
    command = list(sys.argv if command is None else command)
    record = {
        "command": [Path(command[0]).name, *map(str, command[1:])] if command else [],
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


__all__ = ["collect_provenance", "file_fingerprints", "write_provenance"]
