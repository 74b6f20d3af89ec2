"""Training of a drafter: anchors and blocks, target states, the objective, and the TRL-derived trainer."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

_HOMES = {
    "CachedTargetStates": "states",
    "DoctorArguments": "doctor.arguments",
    "HyperDFlashTrainer": "trainer",
    "HyperDFlashTrainingArguments": "arguments",
    "LiveTargetStates": "states",
    "RegenerateArguments": "regeneration",
    "StateCache": "state_cache",
    "TargetStates": "states",
    "TrainArguments": "arguments",
    "run_doctor": "doctor.run",
    "run_regenerate": "regeneration",
    "run_train": "run",
}
__all__ = [
    "CachedTargetStates",
    "DoctorArguments",
    "HyperDFlashTrainer",
    "HyperDFlashTrainingArguments",
    "LiveTargetStates",
    "RegenerateArguments",
    "StateCache",
    "TargetStates",
    "TrainArguments",
    "run_doctor",
    "run_regenerate",
    "run_train",
]

if TYPE_CHECKING:
    from .arguments import HyperDFlashTrainingArguments, TrainArguments
    from .doctor.arguments import DoctorArguments
    from .doctor.run import run_doctor
    from .regeneration import RegenerateArguments, run_regenerate
    from .run import run_train
    from .state_cache import StateCache
    from .states import CachedTargetStates, LiveTargetStates, TargetStates
    from .trainer import HyperDFlashTrainer


def __getattr__(name: str):
    """Imports a public name from its module when it is first asked for: geometry and losses need no TRL."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
