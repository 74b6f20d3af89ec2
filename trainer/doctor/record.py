"""What a drafter's training leaves behind for `doctor` to compare with: `drafting` in `provenance.json`."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from ...configuration_hyperdflash import HyperDFlashConfig
from ...utils.fingerprints import text_fingerprint

NEUTRAL_FIELDS = {  # their values change no draft
    "attention_dropout",
    "initializer_range",
    "target_name_or_path",
    "target_revision",
    "tie_word_embeddings",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
}
DRAFTING_FIELDS = tuple(name for name in HyperDFlashConfig.__annotations__ if name not in NEUTRAL_FIELDS)


def drafting_record(config: HyperDFlashConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The settings under which a drafter was trained, as JSON values: of its config, and of the chat template."""
    return {
        "config": {name: getattr(config, name) for name in DRAFTING_FIELDS},
        "chat_template_sha256": text_fingerprint(tokenizer.chat_template),
    }
