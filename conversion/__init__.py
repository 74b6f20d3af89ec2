"""From a target's checkpoint to a drafter that starts from the target's own gates, and on to what engines read."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

_HOMES = {
    "ExportArguments": "arguments",
    "InitArguments": "arguments",
    "Gates": "gates",
    "read_gates": "gates",
    "init_drafter": "init",
    "run_export": "export",
    "run_init": "init",
}
__all__ = ["ExportArguments", "Gates", "InitArguments", "init_drafter", "read_gates", "run_export", "run_init"]

if TYPE_CHECKING:
    from .arguments import ExportArguments, InitArguments
    from .export import run_export
    from .gates import Gates, read_gates
    from .init import init_drafter, run_init


def __getattr__(name: str):
    """Imports a public name from its module when it is first asked for: reading gates needs no model code."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
