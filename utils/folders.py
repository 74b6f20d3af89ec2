"""Model folders that are there, and output folders that are written whole or not at all."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


def check_model_path(name: str, model: str) -> None:
    """Whether `model` is a folder, where it reads like one: `./a`, `/a/b`, `a/b/c`, or `a/b` beside a folder `a`.

    Args:
        name: of the option, for the error. model: folder or Hub id; what else reads like a Hub id is left to the Hub.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    path = Path(model).expanduser()
    local = model.startswith((".", "/", "~")) or len(path.parts) > 2 or len(path.parts) == 2 and path.parent.is_dir()
    if local and not path.is_dir():
        raise FileNotFoundError(f"{name}: found no folder {model!r}, wanted one, or a Hub id")


def check_output_folder(output: str | os.PathLike, overwrite: bool = False) -> None:
    """Whether `output` may be written: it is absent, or an empty folder, or any folder with `overwrite`.

    Raises:
        FileExistsError: `output` is a file, or a folder with something in it and `overwrite` is not set.
    """
    path = Path(output)
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"output: found the file {str(output)!r}, wanted a folder, or no such path")
    if path.is_dir() and any(path.iterdir()) and not overwrite:
        raise FileExistsError(
            f"output: found the folder {str(output)!r} with something in it, wanted an empty one, no such path, or "
            "--overwrite true"
        )


@contextmanager
def whole_folder(output: str | os.PathLike, overwrite: bool = False) -> Iterator[Path]:
    """A context whose value is a new folder beside `output`, which becomes `output` when the context ends well.

    When it ends with an exception, a keyboard interrupt included, the new folder is deleted and `output` is what it
    was. With `overwrite` a folder that stands at `output` is replaced as a whole, only after the new one is complete.

    Raises:
        FileExistsError: see [`check_output_folder`].
    """
    check_output_folder(output, overwrite)
    final = Path(output).resolve()
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = final.with_name(f".{final.name}.{uuid.uuid4().hex[:8]}.partial")
    partial.mkdir()
    try:
        yield partial
        _put_in_place(partial, final, overwrite)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def resumed_folder(output: str | os.PathLike, overwrite: bool = False, kept: tuple[str, ...] = ()) -> Iterator[Path]:
    """As [`whole_folder`], for work that is worth going on with: the new folder has a fixed name, `.NAME.partial`.

    A call finds in it what an earlier one left in the subfolders `kept`, and nothing else: what a killed process was
    writing is cleared away. When the context ends with an exception the subfolders stay, for the next call; if nothing
    is in them, the new folder is deleted.

    Raises:
        FileExistsError: see [`check_output_folder`]; or another process is writing the same folder.
    """
    check_output_folder(output, overwrite)
    final = Path(output).resolve()
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = final.with_name(f".{final.name}.partial")
    lock = FileLock(final.with_name(f".{final.name}.lock"), timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise FileExistsError(f"output: found another process that writes {str(output)!r}, wanted one only") from None
    try:
        partial.mkdir(exist_ok=True)
        _keep_only(partial, kept)
        try:
            yield partial
        except BaseException:
            _keep_only(partial, kept)
            if not any(path.is_file() for path in partial.rglob("*")):
                shutil.rmtree(partial, ignore_errors=True)
            raise
        _put_in_place(partial, final, overwrite)
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


def _keep_only(folder: Path, kept: tuple[str, ...]) -> None:
    for path in folder.iterdir():
        if path.is_dir() and path.name not in kept:
            shutil.rmtree(path)
        elif path.is_file():
            path.unlink()


def _put_in_place(partial: Path, final: Path, overwrite: bool) -> None:
    """Renames the complete folder `partial` to `final`; what stands there is replaced as a whole."""
    check_output_folder(final, overwrite)
    replaced = final.with_name(f".{final.name}.{uuid.uuid4().hex[:8]}.replaced")
    try:
        if final.exists():
            final.rename(replaced)
        partial.rename(final)
    except BaseException:
        if replaced.exists() and not final.exists():
            replaced.rename(final)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def whole_file(output: str | os.PathLike) -> Iterator[Path]:
    """A context whose value is a new path beside `output`; the file written there becomes `output` at the end.

    It is on the disk before it has its name, so that not even a power failure leaves half a file under that name. When
    the context ends with an exception, the new file is deleted and `output` is what it was.
    """
    final = Path(output)
    partial = final.with_name(f"{final.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(final)
        folder = os.open(final.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        partial.unlink(missing_ok=True)


__all__ = [
    "check_model_path",
    "check_output_folder",
    "resumed_folder",
    "whole_file",
    "whole_folder",
]
