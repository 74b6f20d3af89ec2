"""The device that a verb runs on."""

from __future__ import annotations

import torch


def choose_device(device: str | None) -> str:
    """`device`, or by default cuda if there is one, else cpu.

    Raises:
        ValueError: this torch does not have it.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device: found {device!r}, wanted one that this torch has ({error})") from None
    return device


__all__ = ["choose_device"]
