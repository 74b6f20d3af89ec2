"""HyperDFlash drafters in vLLM: a plugin, loaded by vLLM itself through the entry point `vllm.general_plugins`.

Nothing here imports the package's modeling code: vLLM pins a transformers release of its own, which need not be the
one that the modeling code is written for.
"""

from __future__ import annotations

import logging

TESTED_VLLM = ("0.32", "0.32")  # first and last minor version that the tests were run with
ALLOW_UNTESTED_VARIABLE = "HYPERDFLASH_ALLOW_UNTESTED_VLLM"
# vLLM puts "DFlash" before the name of an architecture that it does not know
DRAFTER_ARCHITECTURES = (
    "HyperDFlashDraftModel",
    "DFlashHyperDFlashDraftModel",
    "HyperDFlashModel",
    "DFlashHyperDFlashModel",
)

logger = logging.getLogger(__name__)


def version_complaint(version: str) -> str | None:
    """What is wrong with vLLM `version`, in one line, or `None` if the tests were run with it.

    The plugin subclasses vLLM's models, whose insides are no public interface: another release may move them.
    """
    first, last = ([int(part) for part in bound.split(".")] for bound in TESTED_VLLM)
    try:
        found = [int(part) for part in version.split(".")[:2]]
    except ValueError:  # a build without a release number
        found = []
    if len(found) == 2 and first <= found <= last:
        return None
    return (
        f"vllm: found version {version}, wanted {TESTED_VLLM[0]} to {TESTED_VLLM[1]}, the versions that hyperdflash "
        f"was tested with (set {ALLOW_UNTESTED_VARIABLE}=1 to try another)"
    )


def register() -> None:
    """Makes vLLM know HyperDFlash drafters. Runs in every process of vLLM, and may run several times.

    With an untested vLLM the target's class is left alone, and a drafter is refused when its config is read: who
    serves another model with vLLM is not disturbed.
    """
    import os

    import vllm
    from transformers import AutoConfig
    from vllm import ModelRegistry

    from . import config

    config.complaint = version_complaint(vllm.__version__)
    if config.complaint and os.environ.get(ALLOW_UNTESTED_VARIABLE) == "1":
        logger.warning(config.complaint)
        config.complaint = None
    AutoConfig.register("hyperdflash", config.HyperDFlashServingConfig, exist_ok=True)
    if config.complaint:
        return
    ModelRegistry.register_model("DeepseekV4ForCausalLM", f"{__name__}.target:HyperDFlashDeepseekV4ForCausalLM")
    for architecture in DRAFTER_ARCHITECTURES:
        ModelRegistry.register_model(architecture, f"{__name__}.drafter:HyperDFlashForCausalLM")
    ModelRegistry.register_model("DFlashDraftModel", f"{__name__}.drafter:VanillaDFlashForCausalLM")


__all__ = ["TESTED_VLLM", "register", "version_complaint"]
