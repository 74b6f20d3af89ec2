"""The files of a run: answers, skipped rows, and the manifest that says what they are of."""

from __future__ import annotations

import json
import os
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from .prompts import Conversation
from .server import FAILED


class LineFile:
    """JSON lines that are appended whole.

    Opening reads what is there. Lines of one `append` belong together (`part` of `parts`); what a killed run left of
    an append, half a line or half of its lines, is cut off.

    Attributes:
        ids: of all complete rows.

    Raises:
        ValueError: a line before the last is not JSON.
    """

    def __init__(self, path: Path):
        self.ids: set[str] = set()
        if path.exists() and (complete := self._read(path)) < path.stat().st_size:
            os.truncate(path, complete)
        self._file = path.open("ab")

    def _read(self, path: Path) -> int:
        """Counts what is complete, and returns how many bytes that is."""
        size, offset, complete = path.stat().st_size, 0, 0
        pending: list[dict[str, Any]] = []
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                offset += len(line)
                try:
                    row = json.loads(line) if line.endswith(b"\n") else None
                except ValueError:
                    row = None
                if not isinstance(row, dict):
                    if offset < size:
                        raise ValueError(f"output: line {number} of {path}: found no JSON object, wanted a row")
                    break
                pending.append(row)
                if row.get("part") == row.get("parts"):
                    self._count(pending)
                    pending, complete = [], offset
        return complete

    def _count(self, rows: list[dict[str, Any]]) -> None:
        self.ids.update(row["id"] for row in rows)

    def append(self, *rows: dict[str, Any]) -> None:
        """Writes rows of one id, in one go."""
        self._file.write("".join(json.dumps(row) + "\n" for row in rows).encode())
        self._file.flush()
        self._count(list(rows))

    def __enter__(self):
        return self

    def __exit__(self, *exception) -> None:
        self._file.close()


class AnswerFile(LineFile):
    """The rows to train on: `rows`, `tokens` (answers' only) and `finish_reasons` count them."""

    def __init__(self, path: Path):
        self.rows = self.tokens = 0
        self.finish_reasons: Counter[str] = Counter()
        super().__init__(path)

    def _count(self, rows: list[dict[str, Any]]) -> None:
        super()._count(rows)
        self.rows += len(rows)
        self.tokens += sum(sum(row["assistant_masks"]) for row in rows)
        self.finish_reasons.update(row["finish_reason"] for row in rows)


class SkippedFile(LineFile):
    """Rows that have no answer, or not all of them, and why: `last` has the newest record of each id."""

    def __init__(self, path: Path):
        self.last: dict[str, dict[str, Any]] = {}
        super().__init__(path)

    def _count(self, rows: list[dict[str, Any]]) -> None:
        super()._count(rows)
        self.last.update({row["id"]: row for row in rows})


class ResponseFiles:
    """`OUTPUT`, `OUTPUT.skipped` and `OUTPUT.manifest`, whose names keep the last two from being read as data.

    As long as there is no answer, the manifest of an earlier attempt binds nobody and is replaced.

    Args:
        settings: what must be the same for a rerun to go on. provenance: what else the manifest records.

    Raises:
        ValueError: the answers are of a run with other settings. The message names the first that differs.
        FileExistsError: answers without a manifest, a folder, or another run that writes them.
    """

    def __init__(self, output: str, settings: dict[str, Any], provenance: dict[str, Any], every_turn: bool):
        path = Path(output).absolute()
        if path.is_dir():
            raise FileExistsError(f"output: found the folder {output!r}, wanted a file")
        path.parent.mkdir(parents=True, exist_ok=True)
        manifest, skipped, lock = (path.with_name(path.name + end) for end in (".manifest", ".skipped", ".lock"))
        self.every_turn = every_turn
        with ExitStack() as stack:
            try:
                stack.enter_context(FileLock(lock, timeout=0))
            except Timeout:
                raise FileExistsError(f"output: found another run that writes {output!r}, wanted it ended") from None
            if path.exists() and path.stat().st_size:
                if not manifest.exists():
                    raise FileExistsError(f"output: found {output!r} without {manifest.name}, wanted both or neither")
                record = json.loads(manifest.read_text(encoding="utf-8"))
                check_settings(record["settings"], settings, manifest.name)
            else:
                skipped.unlink(missing_ok=True)
                partial = manifest.with_name(manifest.name + ".partial")
                record = {"settings": settings, "provenance": provenance}
                partial.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
                partial.replace(manifest)
            self.answers = stack.enter_context(AnswerFile(path))
            self.skipped = stack.enter_context(SkippedFile(skipped))
            self._open = stack.pop_all()

    @property
    def done(self) -> set[str]:
        """Ids of rows that need not be asked again: answered, or skipped for a reason that will not pass."""
        skipped = self.skipped.last.values()
        final = {row["id"] for row in skipped if not row["answered"] and row["reason"] != FAILED}
        return self.answers.ids | final

    @property
    def skip_reasons(self) -> dict[str, int]:
        """How many rows have no answer, or not all of them, by reason."""
        skipped = self.skipped.last.values()
        return dict(Counter(row["reason"] for row in skipped if row["answered"] or row["id"] not in self.answers.ids))

    def skip(self, row_id: str, reason: str, detail: str | None = None, answered: int = 0) -> None:
        """Records why a row has no answer, or only so many."""
        self.skipped.append({"id": row_id, "reason": reason, "detail": detail, "answered": answered})

    def write(self, conversation: Conversation) -> None:
        """Appends what a finished conversation has come to."""
        if conversation.refusal is not None:
            self.skip(conversation.id, *conversation.refusal, answered=conversation.answered)
        shared = {"temperature": conversation.temperature, "thinking": conversation.thinking}
        rows = [{"id": conversation.id, **row, **shared} for row in conversation.rows]
        if self.every_turn:
            rows = [{**row, "part": part, "parts": len(rows)} for part, row in enumerate(rows, 1)]
        if rows:
            self.answers.append(*rows)

    def __enter__(self):
        return self

    def __exit__(self, *exception) -> None:
        self._open.close()


def check_settings(wanted: dict[str, Any], found: dict[str, Any], manifest: str) -> None:
    """Refuses a run whose settings are not those of `manifest`, naming the first that differs."""
    for name in [*wanted, *(name for name in found if name not in wanted)]:
        if wanted.get(name) != found.get(name):
            raise ValueError(
                f"{name}: found {found.get(name)!r}, wanted {wanted.get(name)!r} as in {manifest}, or another output"
            )


__all__ = ["ResponseFiles", "check_settings"]
