"""Training of a drafter: anchors and blocks, target states, the objective, and the TRL-derived trainer."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

_HOMES = {
    "DoctorArguments": "doctor.arguments",
    "HyperDFlashTrainer": "trainer",
    "HyperDFlashTrainingArguments": "arguments",
    "LiveTargetStates": "states",
    "RememberedTargetStates": "states",
    "TargetStates": "states",
    "TrainArguments": "arguments",
    "run_doctor": "doctor.run",
    "run_train": "run",
}
__all__ = [
    "DoctorArguments",
    "HyperDFlashTrainer",
    "HyperDFlashTrainingArguments",
    "LiveTargetStates",
    "RememberedTargetStates",
    "TargetStates",
    "TrainArguments",
    "run_doctor",
    "run_train",
]

if TYPE_CHECKING:
    from .arguments import HyperDFlashTrainingArguments, TrainArguments
    from .doctor.arguments import DoctorArguments
    from .doctor.run import run_doctor
    from .run import run_train
    from .states import LiveTargetStates, RememberedTargetStates, TargetStates
    from .trainer import HyperDFlashTrainer


def __getattr__(name: str):
    """Imports a public name from its module when it is first asked for: geometry and losses need no TRL."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
