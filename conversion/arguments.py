"""The options of `hyperdflash init` and `hyperdflash export`."""

from __future__ import annotations

from dataclasses import dataclass, field

METHODS = ("hyperdflash", "mtp")
MTP_STARTS = ("auto", "released", "target", "fresh")


@dataclass
class InitArguments:
    """What `hyperdflash init` makes, and out of what. Options left out follow the target (`conversion/target.py`)."""

    target: str = field(
        metadata={
            "help": "Folder or Hub id of the target: config.json and safetensors files, as transformers writes them "
            "or as DeepSeek released them. Only the gates are read, or fetched."
        },
    )
    output: str = field(metadata={"help": "Folder to write the drafter to. It is written whole or not at all."})
    method: str = field(
        default="hyperdflash",
        metadata={
            "help": "What to make: hyperdflash, a block drafter, or mtp, DeepSeek-V4's native MTP module, which takes "
            "of the options below only `mtp_...`.",
            "choices": list(METHODS),
        },
    )
    overwrite: bool = field(
        default=False, metadata={"help": "Replace the drafter that stands at `output`, once the new one is complete."}
    )
    with_mtp: bool = field(
        default=False,
        metadata={
            "help": "Also copy the target's native MTP module, mtp.0.*, to the folder `mtp` in `output`: the released "
            "tensors as they are, 3.6 GB for DeepSeek-V4-Flash."
        },
    )
    with_head: bool = field(
        default=False,
        metadata={
            "help": "Also copy the target's embedding, hc_head, norm and LM head to the folder `head` in `output`, to "
            "train on cached states without the target: 2.1 GB for DeepSeek-V4-Flash."
        },
    )
    trust_remote_code: bool = field(
        default=False,
        metadata={"help": "Let code in the target's repository run, which its configuration or tokenizer may name."},
    )
    seed: int = field(default=0, metadata={"help": "Seed of the fresh body."})
    dtype: str = field(
        default="bfloat16",
        metadata={
            "help": "Type of the weights: bfloat16, float16 or float32. The gates are float32 in any case.",
            "choices": ["bfloat16", "float16", "float32"],
        },
    )

    num_hidden_layers: int | None = field(
        default=None,
        metadata={
            "help": "Layers of the body. Default: as many as `layer_types`, or an eighth of the target's, 1 to 5."
        },
    )
    intermediate_size: int | None = field(
        default=None, metadata={"help": "Width of the SwiGLU MLP. Default: three times the target's width."}
    )
    num_attention_heads: int | None = field(
        default=None, metadata={"help": "Query heads. Default: as many as `head_dim` makes of the target's width."}
    )
    num_key_value_heads: int | None = field(
        default=None,
        metadata={"help": "Key-value heads. Default: a quarter of the query heads, or the next divisor below."},
    )
    head_dim: int | None = field(
        default=None,
        metadata={
            "help": "Width of a head. Default: 128, or the largest smaller power of 2 that leaves 4 heads or more."
        },
    )
    layer_types: list[str] | None = field(
        default=None,
        metadata={
            "help": "full_attention or sliding_attention for each layer of the body. Default: all full.",
            "choices": ["full_attention", "sliding_attention"],
        },
    )
    sliding_window: int | None = field(
        default=None,
        metadata={"help": "Window of the sliding layers, in tokens. Needed by, and only with, such layers."},
    )
    initializer_range: float = field(
        default=0.02, metadata={"help": "Standard deviation of the body's fresh matrices; narrow bodies want more."}
    )

    block_size: int = field(
        default=7, metadata={"help": "Slots in a block: the anchor and block_size - 1 mask tokens."}
    )
    mask_token_id: int | None = field(
        default=None,
        metadata={
            "help": "The token whose embedding fills the mask slots. Default: 128799 for DeepSeek-V4's vocabulary of "
            "129,280, else the mask token of the target's tokenizer."
        },
    )
    sample_from_anchor: bool = field(
        default=False,
        metadata={"help": "Slot k predicts the token after it, so that the anchor's slot drafts as well."},
    )

    context_source: str = field(
        default="pre_hc_head",
        metadata={
            "help": "What the drafter is conditioned on: pre_hc_head, the residual streams before the target's "
            "hc_head collapses them, or multi_layer, the streams after `target_layer_ids`.",
            "choices": ["pre_hc_head", "multi_layer"],
        },
    )
    target_layer_ids: list[int] | None = field(
        default=None,
        metadata={"help": "Target layers, from 0, for multi_layer. Default: up to 5, spread evenly over the target."},
    )
    reducer: str | None = field(
        default=None,
        metadata={
            "help": "hc_gate, gates of the form of the target's hc_head, taken from it, or fc, a dense projection. "
            "Default: hc_gate where the target has usable gates and the context is pre_hc_head; else fc, with a "
            "warning.",
            "choices": ["hc_gate", "fc"],
        },
    )
    gate_start: str = field(
        default="target",
        metadata={
            "help": "For hc_gate: begin with the target's own gates, or with fresh ones (for comparison).",
            "choices": ["target", "fresh"],
        },
    )
    stream_pooling: str = field(
        default="flatten",
        metadata={"help": "For fc: flatten the streams, or take their mean.", "choices": ["flatten", "mean"]},
    )
    sequential_head_size: int = field(
        default=0,
        metadata={
            "help": "Width of a head that tells each slot which token was drafted before it. 0: none, as in the paper."
        },
    )
    path_norm: str | None = field(
        default=None,
        metadata={
            "help": "Where the per-path RMSNorm of hc_gate acts: value (default), pre_gate, or none, which starts the "
            "reducer as the target's own hc_head, to the bit.",
            "choices": ["value", "pre_gate", "none"],
        },
    )

    mtp_start: str = field(
        default="auto",
        metadata={
            "help": "Weights of an MTP module: released, the target's own `mtp.0.*`; target, its last layer, hc_head "
            "and norm; fresh; or auto: released where the target has them, else target.",
            "choices": list(MTP_STARTS),
        },
    )
    mtp_depths: int = field(
        default=6,
        metadata={"help": "Tokens that an MTP module drafts a round, and steps of its recursion in training."},
    )

    target_name_or_path: str | None = field(
        default=None,
        metadata={
            "help": "Name of the target to record. Default: its Hub id, or its folder, as it was given if that is "
            "relative, else its last part."
        },
    )
    target_revision: str | None = field(
        default=None,
        metadata={
            "help": "Branch, tag or commit of the target on the Hub; the commit is recorded. For a folder: what to "
            "record."
        },
    )


@dataclass
class ExportArguments:
    """What `hyperdflash export` reads, and what it makes of it."""

    model: str = field(
        metadata={
            "help": "Folder or Hub id: a drafter, an export of one, a published DFlash drafter, a DeepSeek-V4 target."
        }
    )
    to: str = field(
        metadata={
            "help": "vllm: a drafter, for this package's vLLM plugin. dflash: an fc drafter, for stock engines. "
            "deepseek: a target in DeepSeek's released form, which vLLM reads. transformers: any of these back.",
            "choices": ["vllm", "dflash", "deepseek", "transformers"],
        }
    )
    output: str = field(metadata={"help": "Folder to write. It is written whole or not at all."})
    overwrite: bool = field(
        default=False, metadata={"help": "Replace what stands at `output`, once the new folder is complete."}
    )
    revision: str | None = field(default=None, metadata={"help": "Revision of `model` on the Hub."})
    target: str | None = field(
        default=None,
        metadata={
            "help": "For a DFlash folder that others wrote: folder of the target that it drafts for. Only its config "
            "is read."
        },
    )

    def __post_init__(self):
        if self.target is not None and self.to != "transformers":
            raise ValueError(
                f"target: found {self.target!r} with --to {self.to}, wanted it with --to transformers only"
            )


__all__ = ["ExportArguments", "InitArguments"]
