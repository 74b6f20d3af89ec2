"""The files of a run: one JSON record per text, appended as they come, and the settings that they were made under."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ..trainer.regeneration.responses import LineFile, check_settings
from ..utils.folders import whole_file

KEY = ("task", "id", "turn", "mode", "temperature", "system")  # what a record is of; no two are of the same

# Runs that differ only in these are parts of one evaluation, as long as no text is in two of them
PARTS = ("tasks", "prompts", "per_task", "shard", "modes", "temperatures")


def key_of(record: dict[str, Any]) -> tuple:
    """What the record is of."""
    return tuple(record[name] for name in KEY)


class RecordFile(LineFile):
    """`records.jsonl` of a run, and `settings.json` beside it; a shard has its own two in the same folder.

    One process writes at a time. Half a line that a killed run left is cut off.

    Args:
        folder: made if it is not there.
        shard: `I/N` or `None`.
        settings: JSON values that must be the same for a rerun to go on.

    Attributes:
        records: all complete records, by [`key_of`].

    Raises:
        ValueError: the records that are there are of other settings. The message names the first that differs.
        FileExistsError: records without settings, or another run that writes them.
    """

    def __init__(self, folder: Path, shard: str | None, settings: dict[str, Any]):
        self.records: dict[tuple, dict[str, Any]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        end = "" if shard is None else f"-{shard.replace('/', '-of-')}"
        path, self._settings_path = folder / f"records{end}.jsonl", folder / f"settings{end}.json"
        self._lock = FileLock(folder / f".records{end}.lock")
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise FileExistsError(f"output: found another run that writes {str(path)!r}, wanted it ended") from None
        try:
            self._head = {"settings": settings, "runs": []}
            if path.exists() and path.stat().st_size:
                if not self._settings_path.exists():
                    raise FileExistsError(
                        f"output: found {str(path)!r} without {self._settings_path.name}, wanted both or neither"
                    )
                self._head = json.loads(self._settings_path.read_text(encoding="utf-8"))
                check_settings(self._head["settings"], settings, self._settings_path.name)
            super().__init__(path)
        except BaseException:
            self._lock.release()
            raise

    def _count(self, rows: list[dict[str, Any]]) -> None:
        self.records.update({key_of(row): row for row in rows})

    def add_run(self, provenance: dict[str, Any]) -> None:
        """Records that a run with these versions, on this machine, adds to the file from now on."""
        self._head["runs"].append(provenance)
        with whole_file(self._settings_path) as path:
            path.write_text(json.dumps(self._head, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def __exit__(self, *exception) -> None:
        super().__exit__(*exception)
        self._lock.release()


def read_records(folders: Iterable[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """All records of all runs and shards in `folders`, and their heads: `settings` and `runs` of each.

    The last line of a file that is being written may be half a line: it is left out.

    Raises:
        FileNotFoundError: a folder without records.
        ValueError: runs under settings that cannot be compared, or a text that two runs have. The message names it.
    """
    records: dict[tuple, dict[str, Any]] = {}
    heads: list[dict[str, Any]] = []
    for folder in folders:
        # A shard that has just begun has an empty file and no settings yet
        paths = [path for path in sorted(Path(folder).glob("records*.jsonl")) if path.stat().st_size]
        if not paths:
            raise FileNotFoundError(f"records: found no records.jsonl in {folder!r}, wanted the output of a run")
        for path in paths:
            head_path = path.with_name(path.stem.replace("records", "settings", 1) + ".json")
            head = json.loads(head_path.read_text(encoding="utf-8"))
            if heads:
                first, other = (
                    {name: value for name, value in each["settings"].items() if name not in PARTS}
                    for each in (heads[0], head)
                )
                check_settings(first, other, "the first records")
            heads.append(head)
            for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
                if line.endswith("\n"):
                    record = json.loads(line)
                    if (key := key_of(record)) in records:
                        raise ValueError(f"records: found {key} again in {str(path)!r}, wanted each text once")
                    records[key] = record
    return list(records.values()), heads


__all__ = ["KEY", "RecordFile", "key_of", "read_records"]
