"""Output folders that are written whole or not at all."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
            "overwrite"
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
    mark = uuid.uuid4().hex[:8]
    partial, replaced = (final.with_name(f".{final.name}.{mark}.{state}") for state in ("partial", "replaced"))
    partial.mkdir()
    try:
        yield partial
        check_output_folder(output, overwrite)
        try:
            if final.exists():
                final.rename(replaced)
            partial.rename(final)
        except BaseException:
            if replaced.exists() and not final.exists():
                replaced.rename(final)
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(replaced, ignore_errors=True)


__all__ = ["check_output_folder", "whole_folder"]
