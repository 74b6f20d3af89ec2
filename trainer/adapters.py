"""LoRA on a drafter: low-rank updates of the body, the reducer trained in full (PEFT)."""

from __future__ import annotations

from pathlib import Path

from peft import LoraConfig, PeftConfig, PeftModel
from torch import nn
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME

from ..modeling_hyperdflash import HyperDFlashModel
from .arguments import TrainArguments

BODY_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def lora_config(arguments: TrainArguments, freeze_reducer: bool = False) -> LoraConfig | None:
    """The adapter that `--use_peft` and the `--lora_*` options ask for; `None` without `--use_peft`.

    At V4-Flash's shape and rank 16 it trains 6.1 M of 971 M parameters, 82 K of them the reducer's.

    Args:
        freeze_reducer: train the body alone. Otherwise the reducer is trained in full and saved with the adapter.
    """
    if not arguments.use_peft:
        return None
    return LoraConfig(
        r=arguments.lora_r,
        lora_alpha=arguments.lora_alpha,
        lora_dropout=arguments.lora_dropout,
        target_modules=list(arguments.lora_target_modules or BODY_LINEARS),
        modules_to_save=None if freeze_reducer else ["reducer"],
        bias="none",
        task_type=None,  # PEFT's tasks are heads, and a drafter has none
    )


def base_drafter(model: nn.Module) -> HyperDFlashModel:
    """The drafter in `model`: itself, or what its adapter stands on."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def check_peft_config(peft_config: PeftConfig, drafter: HyperDFlashModel, freeze_reducer: bool) -> None:
    """Refuses adapters that a drafter cannot carry.

    Raises:
        ValueError: a task with a head, modules that the drafter does not have (PEFT passes over them if it finds
            others), or a reducer that is to be frozen and trained at once.
    """
    if peft_config.task_type is not None:
        raise ValueError(
            f"peft_config.task_type: found {getattr(peft_config.task_type, 'value', peft_config.task_type)!r}, wanted "
            "None: a drafter has no head of its own"
        )
    targets = getattr(peft_config, "target_modules", None)
    if isinstance(targets, (list, set)):
        names = {name for name, module in drafter.named_modules() if isinstance(module, nn.Linear)}
        for target in sorted(targets):
            if not any(f".{name}".endswith(f".{target}") for name in names):
                wanted = sorted({name.split(".")[-1] for name in names})
                raise ValueError(f"peft_config.target_modules: found {target!r}, wanted some of {wanted}")
    if freeze_reducer and "reducer" in (getattr(peft_config, "modules_to_save", None) or ()):
        raise ValueError(
            "HyperDFlashTrainingArguments.freeze_reducer: found True together with 'reducer' in "
            "peft_config.modules_to_save, wanted one of the two"
        )


def check_output_kind(output: str | Path, writes_adapter: bool) -> None:
    """Refuses to put an adapter and a whole drafter into one folder: whoever loads it would get one on the other.

    Raises:
        ValueError: `output` holds the other kind.
    """
    for name, kind, other in (
        (CONFIG_NAME, writes_adapter, "a drafter"),
        (ADAPTER_CONFIG_NAME, not writes_adapter, "an adapter"),
    ):
        if kind and (Path(output) / name).is_file():
            raise ValueError(
                f"output_dir: found {other} in {str(output)!r}, wanted another folder for "
                f"{'an adapter' if writes_adapter else 'a drafter'} (`use_peft`, `merge_adapter`)"
            )


__all__ = ["base_drafter", "check_output_kind", "check_peft_config", "lora_config"]
