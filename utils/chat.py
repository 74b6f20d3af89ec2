"""The chat form of targets whose tokenizer has none: DeepSeek-V4 is released without a chat template."""

from __future__ import annotations

import warnings
from pathlib import Path

from transformers import AutoConfig, PreTrainedTokenizerBase

TEMPLATES = {"deepseek_v4": Path(__file__).parent / "chat_templates" / "deepseek_v4.jinja"}
MARKS = ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>")  # the template's, one token each


def add_chat_template(
    tokenizer: PreTrainedTokenizerBase, target: str, revision: str | None = None, trust_remote_code: bool = False
) -> None:
    """Gives `tokenizer` the chat template of its target's kind if it has none, and says so in a warning.

    Nothing happens for kinds without a template here, and for a vocabulary that lacks the template's own tokens.

    Args:
        target: folder or Hub id of the target; `revision`, `trust_remote_code`: as `from_pretrained` takes them.
    """
    if tokenizer.chat_template:
        return
    try:
        kind = AutoConfig.from_pretrained(target, revision=revision, trust_remote_code=trust_remote_code).model_type
    except (OSError, ValueError):  # the name that a server has for its target, which need not be a folder
        return
    if kind not in TEMPLATES or not set(MARKS) <= tokenizer.get_vocab().keys():
        return
    tokenizer.chat_template = TEMPLATES[kind].read_text(encoding="utf-8")
    warnings.warn(
        f"The tokenizer of {target!r} has no chat template: messages are rendered by {TEMPLATES[kind].name} of this "
        "package (system, user and assistant messages, no tools).",
        UserWarning,
        stacklevel=2,
    )


__all__ = ["MARKS", "TEMPLATES", "add_chat_template"]
