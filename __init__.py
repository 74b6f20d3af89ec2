"""Block-parallel speculative drafters for DeepSeek-V4-class targets with several residual streams."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOMES = {
    "BlockGeometry": "configuration_hyperdflash",
    "HyperDFlashConfig": "configuration_hyperdflash",
    "HyperDFlashModel": "modeling_hyperdflash",
    "GenerationStatistics": "generation_hyperdflash",
    "install_hooks": "generation_hyperdflash",
    "remove_hooks": "generation_hyperdflash",
    "HyperDFlashTrainer": "trainer",
    "HyperDFlashTrainingArguments": "trainer",
    "init_drafter": "conversion",
}
__all__ = ["__version__", *_HOMES]

if TYPE_CHECKING:
    from .configuration_hyperdflash import BlockGeometry, HyperDFlashConfig
    from .conversion import init_drafter
    from .generation_hyperdflash import GenerationStatistics, install_hooks, remove_hooks
    from .modeling_hyperdflash import HyperDFlashModel
    from .trainer import HyperDFlashTrainer, HyperDFlashTrainingArguments


def __getattr__(name: str):
    """Imports a public name from its module when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
