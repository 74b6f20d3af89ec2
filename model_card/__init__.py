"""The model card of a drafter, and its way to the Hub."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

_HOMES = {
    "CardArguments": "arguments",
    "PushArguments": "arguments",
    "build_card": "card",
    "run_card": "card",
    "run_push": "push",
}
__all__ = ["CardArguments", "PushArguments", "build_card", "run_card", "run_push"]

if TYPE_CHECKING:
    from .arguments import CardArguments, PushArguments
    from .card import build_card, run_card
    from .push import run_push


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
