"""What HyperDFlash is compared with: DeepSeek-V4's own multi-token prediction (MTP) module as an assistant."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

_HOMES = {
    "MtpConfig": "configuration_mtp",
    "MtpModel": "modeling_mtp",
    "MtpTrainer": "trainer",
    "init_mtp": "init",
    "load_released_mtp": "released",
    "run_init_mtp": "init",
}
__all__ = ["MtpConfig", "MtpModel", "MtpTrainer", "init_mtp", "load_released_mtp", "run_init_mtp"]

if TYPE_CHECKING:
    from .configuration_mtp import MtpConfig
    from .init import init_mtp, run_init_mtp
    from .modeling_mtp import MtpModel
    from .released import load_released_mtp
    from .trainer import MtpTrainer


def __getattr__(name: str):
    """Imports a public name from its module when it is first asked for: drafting needs no trainer."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
