"""A drafter with a random body, written without ever being in memory as a whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModel
from transformers.dynamic_module_utils import custom_object_save

from ..configuration_hyperdflash import HyperDFlashConfig
from ..modeling_hyperdflash import HyperDFlashModel
from .checkpoint import DTYPES, SINGLE_FILE
from .extract import safetensors_header
from .gates import Gates

STORED_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_fresh_drafter(
    folder: str | os.PathLike, config: HyperDFlashConfig, gates: Gates | None, dtype: torch.dtype, seed: int
) -> HyperDFlashModel:
    """Writes what `save_pretrained` would write of a fresh drafter: config, code files, `generation_config.json`, and
    the weights, initialised one layer at a time and written before the next one is made.

    Args:
        folder: an existing folder. gates: for the reducer, or `None` for random ones.
        dtype: of the body; the gates are float32 in any case.
        seed: of the body. The caller's random state is kept.

    Returns:
        The drafter without its values, on the meta device.
    """
    with torch.device("meta"):
        drafter = AutoModel.from_config(config, dtype=dtype)
    config.architectures, config.dtype = [type(drafter).__name__], str(dtype).removeprefix("torch.")
    custom_object_save(drafter, folder, config=config)
    config.save_pretrained(folder)
    drafter.generation_config.save_pretrained(folder)

    header = safetensors_header(
        {
            f"{prefix}.{name}": (STORED_NAMES[tensor.dtype], tensor.shape, tensor.nbytes)
            for prefix, part in _parts(drafter)
            for name, tensor in part.state_dict().items()
        },
        {"format": "pt"},
    )
    with (Path(folder) / SINGLE_FILE).open("wb") as file, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        file.write(header)
        for _, part in _parts(drafter):
            part.to_empty(device="cpu")
            part.apply(drafter._init_weights)
            if part is drafter.reducer and gates is not None:
                with torch.no_grad():
                    for name in gates.sources:
                        getattr(part, name).copy_(getattr(gates, name))
            for tensor in part.state_dict().values():
                file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy())
            part.to(device="meta")
    return drafter


def _parts(drafter: HyperDFlashModel) -> Iterator[tuple[str, nn.Module]]:
    """The layers, one by one, and the modules beside them that have parameters; with the names of them all."""
    for name, module in drafter.named_children():
        if isinstance(module, nn.ModuleList):
            yield from ((f"{name}.{index}", layer) for index, layer in enumerate(module))
        elif module.state_dict():
            yield name, module


__all__ = ["write_fresh_drafter"]
