"""From a target's checkpoint to a drafter that starts from the target's own gates."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

_HOMES = {
    "InitArguments": "arguments",
    "Gates": "gates",
    "read_gates": "gates",
    "init_drafter": "init",
    "run_init": "init",
}
__all__ = ["Gates", "InitArguments", "init_drafter", "read_gates", "run_init"]

if TYPE_CHECKING:
    from .arguments import InitArguments
    from .gates import Gates, read_gates
    from .init import init_drafter, run_init


def __getattr__(name: str):
    """Imports a public name from its module when it is first asked for: reading gates needs no model code."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
