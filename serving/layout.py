"""What a drafter's `config.json` says to vLLM, and whether a drafter fits a target. Plain Python, no imports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PRE_HC_HEAD = "pre_hc_head"
# Fields of HyperDFlashConfig that stand inside `dflash_config`. A top-level `hc_mult` makes vLLM's V2 runner widen its
# own buffers for drafters that read the residual as it is, as the native MTP module does.
INNER_FIELDS = (
    "mask_token_id",
    "target_layer_ids",
    "reducer",
    "stream_pooling",
    "path_norm",
    "hc_mult",
    "hc_eps",
    "target_rms_norm_eps",
    "target_hidden_size",
    "target_num_hidden_layers",
    "target_model_type",
)
TRAINING_FIELDS = ("auto_map", "context_source", "sample_from_anchor")


def serving_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a drafter's `config.json` as vLLM's `dflash` method reads them: Qwen3's, and `dflash_config`.

    Takes the exported layout, and that of `save_pretrained`, whose fields all stand at the top.

    Raises:
        ValueError: a drafter of a kind that the plugin does not serve.
    """
    fields = dict(fields)
    inner = dict(fields.get("dflash_config") or {})
    source = inner.get("target_hidden_source", fields.get("context_source"))
    if source != PRE_HC_HEAD:
        raise ValueError(
            f"drafter: dflash_config.target_hidden_source: found {source!r}, wanted {PRE_HC_HEAD!r} (a drafter that "
            "reads layer states is served by vLLM's own dflash: `hyperdflash export` writes it)"
        )
    if fields.get("sample_from_anchor") or inner.get("sample_from_anchor"):
        raise ValueError("drafter: sample_from_anchor: found True, wanted False: vLLM drafts from the mask slots only")
    for name in (*INNER_FIELDS, "sequential_head_size"):
        if name in fields:
            inner.setdefault(name, fields.pop(name))
    inner.setdefault("sequential_head_size", 0)
    missing = [name for name in INNER_FIELDS if inner.get(name) is None]
    if "block_size" not in fields:
        missing.append("block_size")
    if missing:
        raise ValueError(
            f"drafter: dflash_config: found no {', '.join(missing)}, wanted what the drafter was trained with"
        )
    # Blocks are bidirectional inside, in sliding layers too, where vLLM would take them for causal
    inner |= {"target_hidden_source": PRE_HC_HEAD, "causal": False, "use_aux_hidden_state": True}
    for name in TRAINING_FIELDS:
        fields.pop(name, None)
    return fields | {"architectures": ["HyperDFlashDraftModel"], "attention_bias": False, "dflash_config": inner}


def check_fit(drafter: Any, target: Any, num_speculative_tokens: int) -> None:
    """Refuses a drafter that was not made for `target`, before weights are read.

    Args:
        drafter: its configuration, with the fields of [`serving_fields`] as attributes.
        target: the target's configuration.
        num_speculative_tokens: what vLLM was told to draft a round.

    Raises:
        ValueError: names the field, what was found, what was wanted.
    """
    inner = drafter.dflash_config
    streams = getattr(target, "hc_mult", None)
    if streams is None:
        raise ValueError(
            f"target: found model_type {target.model_type!r}, wanted one with residual streams: deepseek_v4"
        )
    _check_block(drafter.block_size, num_speculative_tokens)
    for name, found, wanted in (
        ("target_model_type", inner["target_model_type"], target.model_type),
        ("target_num_hidden_layers", inner["target_num_hidden_layers"], target.num_hidden_layers),
        ("target_hidden_size", inner["target_hidden_size"], target.hidden_size),
        ("hidden_size", drafter.hidden_size, target.hidden_size),  # it borrows the target's embedding and LM head
        ("hc_mult", inner["hc_mult"], streams),
        ("vocab_size", drafter.vocab_size, target.vocab_size),
    ):
        if found != wanted:
            raise ValueError(f"drafter: {name}: found {found!r}, wanted {wanted!r}, the target's")
    if not 0 <= inner["mask_token_id"] < target.vocab_size:
        raise ValueError(
            f"drafter: mask_token_id: found {inner['mask_token_id']}, wanted 0 to {target.vocab_size - 1}, a token of "
            "the target's"
        )


def check_vanilla_fit(drafter: Any, target: Any, num_speculative_tokens: int) -> None:
    """The same for a plain DFlash drafter, by the fields that its configuration has.

    Raises:
        ValueError: names the field, what was found, what was wanted.
    """
    inner = getattr(drafter, "dflash_config", None) or {}
    block_size = getattr(drafter, "block_size", inner.get("block_size"))
    if block_size is not None:
        _check_block(block_size, num_speculative_tokens)
    layers = inner.get("num_target_layers", getattr(drafter, "num_target_layers", None))
    if layers is not None and layers != target.num_hidden_layers:
        raise ValueError(
            f"drafter: num_target_layers: found {layers}, wanted {target.num_hidden_layers}, the target's"
        )


def _check_block(block_size: int, num_speculative_tokens: int) -> None:
    if num_speculative_tokens != block_size - 1:
        raise ValueError(
            f"num_speculative_tokens: found {num_speculative_tokens}, wanted {block_size - 1}: the drafter was "
            f"trained on blocks of {block_size} slots, the first of which holds the last token known"
        )


__all__ = ["PRE_HC_HEAD", "check_fit", "check_vanilla_fit", "serving_fields"]
