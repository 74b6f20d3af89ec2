"""What a drafter's configuration takes from its target's, and the rules for the rest."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

from ..configuration_hyperdflash import HyperDFlashConfig
from .arguments import InitArguments
from .extract import origin_of
from .sources import HubRepository, LocalFolder, Source, open_source

# Targets with several residual streams, and whether their `hc_head` has gates that a reducer can take over. HY-V4's
# are the same function, with the RMS applied after the product: equal up to rounding.
TARGET_TYPES = {"deepseek_v4": True, "hy_v4": True, "glm5_next": False, "glm5_next_text": False}
CONFIG_FILE, MAX_CONFIG_BYTES = "config.json", 10_000_000
DEEPSEEK_V4_VOCAB_SIZE, DEEPSEEK_V4_MASK_TOKEN_ID = 129280, 128799


def load_target_config(target: str | os.PathLike | Source, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The configuration of the language model in a folder or Hub repository, as transformers' own class reads it.

    Args:
        trust_remote_code: whether a class that the repository brings along may read it instead.

    Raises:
        FileNotFoundError: no such target, or no `config.json` in it.
        ValueError: a `model_type` that is none of `TARGET_TYPES`, or a `config.json` that makes no configuration.
    """
    source = open_source(target)
    file = source.path(CONFIG_FILE)
    if not source.has(CONFIG_FILE):
        raise FileNotFoundError(f"{file}: found no such file, wanted the target's configuration")
    if source.size(CONFIG_FILE) > MAX_CONFIG_BYTES:
        raise ValueError(f"{file}: found {source.size(CONFIG_FILE)} bytes, wanted at most {MAX_CONFIG_BYTES}")
    data = read_config(source)
    try:
        model_type = json.loads(data).get("model_type")
    except (ValueError, AttributeError, RecursionError):
        raise ValueError(f"{file}: found something else, wanted a JSON object") from None
    if not isinstance(model_type, str) or model_type not in TARGET_TYPES:
        raise ValueError(f"{file}: model_type: found {model_type!r}, wanted one of {', '.join(TARGET_TYPES)}")
    try:
        if trust_remote_code:
            config = AutoConfig.from_pretrained(**_for_transformers(source), trust_remote_code=True)
        else:
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / CONFIG_FILE).write_bytes(data)
                config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        return config.get_text_config()
    except OSError:
        raise
    except Exception as error:  # whatever a configuration's own class stumbles over
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{file}: found {reason}, wanted a configuration of {model_type}") from None


def read_config(source: Source) -> bytes:
    """The target's `config.json`."""
    return bytes(source.read(CONFIG_FILE, 0, source.size(CONFIG_FILE)))


def _for_transformers(source: Source) -> dict[str, str | None]:
    """The arguments of `from_pretrained` that say where the target is."""
    if isinstance(source, HubRepository):
        return {"pretrained_model_name_or_path": source.repo_id, "revision": source.commit}
    return {"pretrained_model_name_or_path": str(source)}


def drafter_config(args: InitArguments, target: PreTrainedConfig, source: Source) -> HyperDFlashConfig:
    """The configuration of a drafter for `target`, whose files lie in `source`.

    Width, streams, epsilons, vocabulary, layer count, rotary base and longest sequence are the target's. The body
    follows its width: see [`body_shape`].

    Raises:
        ValueError: options that make no drafter; see also [`HyperDFlashConfig`].
    """
    if args.sliding_window is not None and "sliding_attention" not in (args.layer_types or ()):
        raise ValueError(
            f"sliding_window: found {args.sliding_window}, wanted none, as layer_types has no sliding_attention"
        )
    rope = getattr(target, "rope_parameters", None) or {}
    rope = rope.get("main", rope)  # DeepSeek-V4 keeps one set for the main rotary and one for the compressed branches
    return HyperDFlashConfig(
        hidden_size=target.hidden_size,
        **body_shape(args, target),
        rms_norm_eps=target.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": float(rope.get("rope_theta", 10000.0))},
        max_position_embeddings=target.max_position_embeddings,
        layer_types=args.layer_types,
        sliding_window=args.sliding_window,
        initializer_range=args.initializer_range,
        block_size=args.block_size,
        mask_token_id=find_mask_token_id(args, target, source),
        sample_from_anchor=args.sample_from_anchor,
        context_source=args.context_source,
        target_layer_ids=args.target_layer_ids,
        reducer=choose_reducer(args, target),
        stream_pooling=args.stream_pooling,
        sequential_head_size=args.sequential_head_size,
        hc_mult=target.hc_mult,
        hc_eps=target.hc_eps,
        path_norm=args.path_norm,
        target_model_type=target.model_type,
        target_hidden_size=target.hidden_size,
        target_num_hidden_layers=target.num_hidden_layers,
        target_rms_norm_eps=target.rms_norm_eps,
        vocab_size=target.vocab_size,
        **target_identity(args, source),
    )


def target_identity(args: InitArguments, source: Source) -> dict[str, str | None]:
    """`target_name_or_path` and `target_revision` to record: the options, and the commit on the Hub; of a folder that
    `--with_mtp` or `--with_head` filled, the target that it came from."""
    origin = (origin_of(args.target) or {}) if source.commit is None else {}
    return {
        "target_name_or_path": args.target_name_or_path or origin.get("target") or folder_name(args.target),
        "target_revision": source.commit or args.target_revision or origin.get("target_revision"),
    }


def body_shape(args: InitArguments, target: PreTrainedConfig) -> dict[str, int]:
    """Depth, MLP and heads of the body: the options, and for those left out V4-Flash's body scaled to the target.

    At V4-Flash's width (4096, 43 layers) that is 5 layers, 32 query and 8 key-value heads of 128, an MLP of 12288. In
    general: layers, as many as `layer_types`, or an eighth of the target's, from 1 to 5; MLP, 3 times the width;
    `head_dim`, 128 or the largest smaller power of two that divides the width into at least 4 heads; query heads, the
    width over `head_dim`; key-value heads, the largest divisor of the query heads up to a quarter of them.
    """
    width = target.hidden_size
    layers, heads, head_dim = args.num_hidden_layers, args.num_attention_heads, args.head_dim
    kv_heads, intermediate_size = args.num_key_value_heads, args.intermediate_size
    if layers is None:
        layers = len(args.layer_types) if args.layer_types else min(max(target.num_hidden_layers // 8, 1), 5)
    if head_dim is None and heads is None:
        head_dim = next((size for size in (128, 64, 32, 16, 8, 4) if width % size == 0 and width // size >= 4), 4)
    elif head_dim is None:
        head_dim = max(width // max(heads, 1), 1)
    if heads is None:
        heads = max(width // max(head_dim, 1), 1)
    if kv_heads is None:
        kv_heads = next((count for count in range(heads // 4, 0, -1) if heads % count == 0), 1)
    return {
        "num_hidden_layers": layers,
        "intermediate_size": 3 * width if intermediate_size is None else intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


def choose_reducer(args: InitArguments, target: PreTrainedConfig) -> str:
    """`hc_gate` where the target has gates and the context is what they collapse; else `fc`, said out loud (paper,
    section 2.2). `args.reducer` decides where it is given.

    Raises:
        ValueError: `hc_gate` is asked for and the target has no gates.
    """
    has_gates = TARGET_TYPES[target.model_type]
    if args.reducer == "hc_gate" and not has_gates:
        raise ValueError(
            f"reducer: found 'hc_gate', wanted 'fc': the hc_head of {target.model_type} has no parameters"
        )
    if args.reducer is not None:
        return args.reducer
    if args.context_source == "pre_hc_head" and has_gates:
        return "hc_gate"
    reason = f"the hc_head of {target.model_type} has no parameters"
    if has_gates:
        reason = f"gates collapse the residual before hc_head, and context_source is {args.context_source!r}"
    warnings.warn(f"The reducer is a fresh fc, not gates taken from the target: {reason}.", UserWarning, stacklevel=2)
    return "fc"


def find_mask_token_id(args: InitArguments, target: PreTrainedConfig, source: Source | None = None) -> int:
    """The mask token: the option, DeepSeek-V4's, or that of the target's tokenizer, in this order.

    Raises:
        ValueError: none of them says, or the tokenizer cannot be read.
    """
    if args.mask_token_id is not None:
        return args.mask_token_id
    if target.model_type == "deepseek_v4" and target.vocab_size == DEEPSEEK_V4_VOCAB_SIZE:
        return DEEPSEEK_V4_MASK_TOKEN_ID
    source, found = source or LocalFolder(args.target), "no tokenizer"
    if any(source.has(name) for name in ("tokenizer.json", "tokenizer_config.json")):
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                **_for_transformers(source), trust_remote_code=args.trust_remote_code
            )
        except OSError:
            raise
        except Exception as error:  # the tokenizers library raises bare ones
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise ValueError(
                f"mask_token_id: found a tokenizer in {source} that cannot be read ({reason}), wanted the id as an "
                "option"
            ) from None
        if tokenizer.mask_token_id is not None:
            return tokenizer.mask_token_id
        found = "a tokenizer without a mask token"
    raise ValueError(f"mask_token_id: found {found} in {args.target}, wanted the id as an option")


def folder_name(folder: str | os.PathLike) -> str:
    """The folder as it was given if that is relative; else its last part, which means something elsewhere too."""
    path = Path(folder)
    return path.name if path.is_absolute() else path.as_posix()


__all__ = ["drafter_config", "load_target_config", "read_config"]
