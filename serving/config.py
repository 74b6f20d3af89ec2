"""The drafter's configuration inside vLLM."""

from __future__ import annotations

from typing import Any

from transformers import Qwen3Config

from .layout import serving_fields

complaint: str | None = None  # why no drafter may be served, set by `register`


class HyperDFlashServingConfig(Qwen3Config):
    """A Qwen3 configuration with `dflash_config`: what vLLM's `dflash` method reads."""

    model_type = "hyperdflash"

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any):
        """As in transformers, from the exported layout or that of `save_pretrained`.

        Raises:
            ValueError: an untested vLLM; a drafter that the plugin does not serve.
        """
        if complaint:
            raise ValueError(complaint)
        return super().from_dict(serving_fields(config_dict), **kwargs)


__all__ = ["HyperDFlashServingConfig"]
