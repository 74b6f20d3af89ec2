"""Configuration of DeepSeek-V4's native MTP module as an assistant."""

from __future__ import annotations

from typing import Any

from transformers import DeepseekV4Config, PreTrainedConfig

from ..configuration_hyperdflash import MTP_MODEL_TYPE, BlockGeometry

# What a module of one layer has itself, or what says nothing about it; all else follows the target
OWN_FIELDS = {
    "_name_or_path",
    "architectures",
    "auto_map",
    "dtype",
    "layer_types",
    "mlp_layer_types",
    "model_type",
    "num_hidden_layers",
    "quantization_config",
    "transformers_version",
    "use_cache",
}


class MtpConfig(DeepseekV4Config):
    r"""
    Configuration of an [`MtpModel`]: that of its one layer, a [`DeepseekV4Config`] with sliding attention and a
    learned-gate MoE, and what follows.

    Args:
        mtp_depths (`int`): Tokens that a round drafts unless the call says otherwise; also the depth to which
            the recursion is unrolled in training.
        target_model_type (`str`): `model_type` of the target.
        target_num_hidden_layers (`int`): Layers of the target.
        target_name_or_path (`str`, *optional*): The target that the module belongs to.
        target_revision (`str`, *optional*): Its revision.

    Raises:
        ValueError: no draft tokens, or more than the sliding window holds.
    """

    model_type = MTP_MODEL_TYPE

    num_hidden_layers: int = 1
    mtp_depths: int = 6
    target_model_type: str = "deepseek_v4"
    target_num_hidden_layers: int = 43
    target_name_or_path: str | None = None
    target_revision: str | None = None

    # Of the target it reads what a HyperDFlash drafter reads: the final residual before `hc_head` collapses it
    context_source = "pre_hc_head"

    def __post_init__(self, **kwargs):
        self.num_hidden_layers = 1
        self.layer_types, self.mlp_layer_types = ["sliding_attention"], ["moe"]
        if not 1 <= self.mtp_depths < self.sliding_window:
            raise ValueError(
                f"MtpConfig.mtp_depths: found {self.mtp_depths}, wanted 1 to {self.sliding_window - 1}, "
                "below sliding_window"
            )
        super().__post_init__(**kwargs)

    @property
    def target_layer_ids(self) -> list[int]:
        """The target's last layer, whose output the module reads."""
        return [self.target_num_hidden_layers - 1]

    @property
    def target_hidden_size(self) -> int:
        """Width of the target: the module's own."""
        return self.hidden_size

    @property
    def geometry(self) -> BlockGeometry:
        """A round in the terms of a block drafter: draft `k` behind anchor `a` predicts the token at `a + k`."""
        return BlockGeometry(self.mtp_depths + 1)

    def to_dict(self) -> dict[str, Any]:
        """As in [`PreTrainedConfig`], without the kind of the MLP, which never differs.

        The Trainer, when it resumes, reads a checkpoint's configuration as that of no model in particular, and then
        V4's kinds of MLP are unknown.
        """
        return {name: value for name, value in super().to_dict().items() if name != "mlp_layer_types"}

    @classmethod
    def of_target(cls, target: PreTrainedConfig, **fields) -> MtpConfig:
        """That of the module that belongs to a target with the configuration `target`; `fields` of our own."""
        shape = {name: value for name, value in target.to_dict().items() if name not in OWN_FIELDS}
        return cls(
            **shape,
            target_model_type=target.model_type,
            target_num_hidden_layers=target.num_hidden_layers,
            **fields,
        )


__all__ = ["MtpConfig"]
