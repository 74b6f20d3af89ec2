"""Configuration of a HyperDFlash drafter, and the geometry of the block that it drafts."""

from __future__ import annotations

from dataclasses import dataclass

from transformers.configuration_utils import PreTrainedConfig

CONTEXT_SOURCES = ("pre_hc_head", "multi_layer")
REDUCERS = ("hc_gate", "fc")
PATH_NORMS = ("value", "pre_gate", "none")
STREAM_POOLINGS = ("flatten", "mean")
LAYER_TYPES = ("full_attention", "sliding_attention")
MTP_MODEL_TYPE = "hyperdflash_mtp"  # DeepSeek-V4's native MTP module as an assistant
DRAFTER_TYPES = ("hyperdflash", MTP_MODEL_TYPE)


@dataclass(frozen=True)
class BlockGeometry:
    """Which slot of a block stands where, predicts what, and sees which key: stated once, for everybody.

    A block starts at an *anchor*, the last token known, and has `block_size` *slots*: slot 0 holds the anchor's
    embedding, the others the mask token's. Slot `k` stands at position `anchor + k`. The *context* are the target's
    states at the positions strictly before the anchor: the target has not processed the anchor when a draft is made.

    Every method works on Python ints and, elementwise, on integer tensors that broadcast.

    Args:
        block_size: slots in a block, `B`.
        sample_from_anchor: `False`: slot `k` predicts the token at its own position (slot 0, the anchor, predicts
            nothing); `True`: slot `k` predicts the token after it, so that slot 0 drafts as well.
    """

    block_size: int
    sample_from_anchor: bool = False

    @property
    def first_slot(self) -> int:
        """The first slot whose output is a draft."""
        return 0 if self.sample_from_anchor else 1

    @property
    def draft_slots(self) -> range:
        """The slots whose outputs are drafts, in order."""
        return range(self.first_slot, self.block_size)

    @property
    def num_draft_tokens(self) -> int:
        """Tokens that one block drafts."""
        return self.block_size - self.first_slot

    def label_offset(self, slot):
        """Slot `k` predicts the token at `anchor + label_offset(k)`."""
        return slot + 1 - self.first_slot

    def position(self, anchor, slot):
        """The position at which a slot stands."""
        return anchor + slot

    def sees_context(self, key_position, anchor, query_position, window: int | None = None):
        """Whether a slot standing at `query_position` in the block at `anchor` sees the context at `key_position`.

        With a sliding `window` the distance must be smaller than it, as in a causal sliding-window layer.
        """
        seen = key_position < anchor
        return seen if window is None else seen & (query_position - key_position < window)

    def sees_slot(self, query_anchor, key_anchor):
        """Whether a slot of one block sees a slot of another: blocks are bidirectional inside, and blind outside."""
        return query_anchor == key_anchor


class HyperDFlashConfig(PreTrainedConfig):
    r"""
    Configuration of a [`HyperDFlashModel`]. The defaults are a drafter for DeepSeek-V4-Flash.

    Args:
        hidden_size (`int`): Width of the drafter, and of the target's embedding and LM head that it borrows.
        intermediate_size (`int`): Width of the SwiGLU MLP.
        num_hidden_layers (`int`): Layers of the body.
        num_attention_heads (`int`): Query heads.
        num_key_value_heads (`int`): Key-value heads.
        head_dim (`int`): Width of a head.
        hidden_act (`str`): Activation of the MLP.
        rms_norm_eps (`float`): Epsilon of the body's norms.
        rope_parameters (`dict`, *optional*): Rotary settings, as in transformers; plain RoPE of base 10,000 if not
            given.
        max_position_embeddings (`int`): Longest sequence, in tokens.
        layer_types (`list[str]`, *optional*): `"full_attention"` or `"sliding_attention"` for each layer; all full by
            default.
        sliding_window (`int`, *optional*): Window of the sliding layers, in tokens, the query's own included.
        attention_dropout (`float`): Dropout of the attention weights in training.
        initializer_range (`float`): Standard deviation of a fresh body.
        block_size (`int`): Slots in a block: the anchor and `block_size - 1` mask tokens.
        mask_token_id (`int`): The token whose target embedding fills slots 1 and above.
        sample_from_anchor (`bool`): See [`BlockGeometry`].
        context_source (`str`): `"pre_hc_head"`, the target's final residual before its `hc_head` collapses the streams
            (paper, section 2.1), or `"multi_layer"`, the residuals after the layers `target_layer_ids`.
        target_layer_ids (`list[int]`, *optional*): Target layers, from 0, whose output is the context. For
            `"pre_hc_head"` it is the last one.
        reducer (`str`): `"hc_gate"`, sigmoid gates of the `hc_head` form (paper, equation 1), or `"fc"`, a dense
            projection. `"hc_gate"` needs `"pre_hc_head"` and equal widths.
        stream_pooling (`str`): For `"fc"`: `"flatten"` the streams into one vector, or take their `"mean"`.
        sequential_head_size (`int`): Width of the [`SequentialHead`], which tells each slot the token drafted before
            it; 0: none, as in the paper: all slots are drafted independently of each other.
        hc_mult (`int`): Residual streams of the target, `m`.
        hc_eps (`float`): The offset added to the gates, as in the target.
        path_norm (`str`, *optional*): Where the per-path RMSNorm of `"hc_gate"` acts: on the `"value"`s before the
            weighted sum (default), on the streams before gates and values (`"pre_gate"`), or `"none"`, which makes the
            reducer the target's own `hc_head`. With `"fc"` it is `"none"`.
        target_model_type (`str`): `model_type` of the target.
        target_hidden_size (`int`, *optional*): Width of the target; `hidden_size` by default.
        target_num_hidden_layers (`int`): Layers of the target.
        target_rms_norm_eps (`float`): Epsilon of the RMS norm in front of the gates, the target's.
        vocab_size (`int`): Vocabulary of the target.
        target_name_or_path (`str`, *optional*): The target that the drafter belongs to.
        target_revision (`str`, *optional*): Its revision.

    Raises:
        ValueError: a field, or a combination, that makes no drafter; the message names the field, the value, the rule.
    """

    model_type = "hyperdflash"
    default_theta = 10000.0
    keys_to_ignore_at_inference = ["cache"]

    hidden_size: int = 4096
    intermediate_size: int = 12288
    num_hidden_layers: int = 5
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_parameters: dict | None = None
    max_position_embeddings: int = 1048576
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    attention_dropout: float | int = 0.0
    initializer_range: float = 0.02

    block_size: int = 7
    mask_token_id: int = 128799
    sample_from_anchor: bool = False

    context_source: str = "pre_hc_head"
    target_layer_ids: list[int] | None = None
    reducer: str = "hc_gate"
    stream_pooling: str = "flatten"
    sequential_head_size: int = 0
    hc_mult: int = 4
    hc_eps: float = 1e-6
    path_norm: str | None = None

    target_model_type: str = "deepseek_v4"
    target_hidden_size: int | None = None
    target_num_hidden_layers: int = 43
    target_rms_norm_eps: float = 1e-6
    vocab_size: int = 129280
    target_name_or_path: str | None = None
    target_revision: str | None = None

    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs):
        if "dflash_config" in kwargs:
            raise ValueError(
                "HyperDFlashConfig.dflash_config: found one, wanted none: the folder is an export for vLLM "
                "(`hyperdflash export --to transformers` turns it back)"
            )
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        if self.path_norm is None:
            self.path_norm = "value" if self.reducer == "hc_gate" else "none"
        if self.target_layer_ids is None:
            self.target_layer_ids = self._default_target_layer_ids()
        self._check()
        super().__post_init__(**kwargs)

    @property
    def geometry(self) -> BlockGeometry:
        """The block's geometry."""
        return BlockGeometry(self.block_size, self.sample_from_anchor)

    def _default_target_layer_ids(self) -> list[int]:
        """The last layer, or up to five layers spread evenly between the second and the third from the end."""
        last = self.target_num_hidden_layers - 1
        if self.context_source == "pre_hc_head":
            return [last]
        first, end = min(1, last), max(last - 2, min(1, last))
        count = min(5, end - first + 1)
        return sorted({first + round(i * (end - first) / max(count - 1, 1)) for i in range(count)})

    def _check(self) -> None:
        positive = (
            "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
            "max_position_embeddings hc_mult target_hidden_size target_num_hidden_layers vocab_size"
        ).split()
        for name in positive:
            self._require(name, getattr(self, name) >= 1, "at least 1")
        self._require("sequential_head_size", self.sequential_head_size >= 0, "at least 0")
        self._require("initializer_range", self.initializer_range > 0, "above 0")
        for name, allowed in (
            ("context_source", CONTEXT_SOURCES),
            ("reducer", REDUCERS),
            ("path_norm", PATH_NORMS),
            ("stream_pooling", STREAM_POOLINGS),
        ):
            self._require(name, getattr(self, name) in allowed, f"one of {allowed}")
        heads, kv_heads, layers = self.num_attention_heads, self.num_key_value_heads, self.target_num_hidden_layers
        self._require("num_attention_heads", heads % kv_heads == 0, f"a multiple of num_key_value_heads ({kv_heads})")
        self._require("head_dim", self.head_dim % 2 == 0, "even, for the rotary embedding")
        self._require(
            "layer_types",
            len(self.layer_types) == self.num_hidden_layers,
            f"one entry a layer, {self.num_hidden_layers}",
        )
        self._require("layer_types", set(self.layer_types) <= set(LAYER_TYPES), f"entries out of {LAYER_TYPES}")
        self._require("block_size", self.block_size >= 2, "at least 2: the anchor and one mask slot")
        if "sliding_attention" in self.layer_types:
            window = self.sliding_window
            self._require(
                "sliding_window",
                window is not None and window > self.block_size,
                f"larger than block_size ({self.block_size}), since layer_types has sliding_attention",
            )
        self._require(
            "mask_token_id", 0 <= self.mask_token_id < self.vocab_size, f"in the vocabulary, 0..{self.vocab_size - 1}"
        )
        ids = self.target_layer_ids
        self._require(
            "target_layer_ids",
            len(ids) > 0 and ids == sorted(set(ids)) and 0 <= ids[0] and ids[-1] < layers,
            f"ascending layers of the target, each in 0..{layers - 1}",
        )
        if self.context_source == "pre_hc_head":
            self._require("target_layer_ids", ids == [layers - 1], f"[{layers - 1}], as context_source is pre_hc_head")
        if self.reducer == "hc_gate":
            rule = "as reducer is hc_gate (use reducer='fc' otherwise)"
            self._require("context_source", self.context_source == "pre_hc_head", f"pre_hc_head, {rule}")
            self._require(
                "target_hidden_size",
                self.target_hidden_size == self.hidden_size,
                f"hidden_size ({self.hidden_size}), {rule}",
            )
            self._require("stream_pooling", self.stream_pooling == "flatten", f"flatten, {rule}")
        else:
            self._require("path_norm", self.path_norm == "none", "none, as reducer is fc")

    def _require(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise ValueError(f"HyperDFlashConfig.{name}: found {getattr(self, name)!r}, wanted {rule}")


HyperDFlashConfig.register_for_auto_class()

__all__ = ["DRAFTER_TYPES", "MTP_MODEL_TYPE", "BlockGeometry", "HyperDFlashConfig"]
