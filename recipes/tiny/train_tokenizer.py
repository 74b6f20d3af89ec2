"""Train the tiny target's tokenizer: a byte-level BPE with DeepSeek-V4's pre-tokenizer rules and chat form.

python recipes/tiny/train_tokenizer.py --data DATA --output runs/tokenizer
"""

from __future__ import annotations

import argparse

from data import load_conversations
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hyperdflash.utils.chat import TEMPLATES

# Ids 0..7, in this order; the begin and end ids are those of DeepSeek-V4.
SPECIAL_TOKENS = [
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "<mask>",
]
SPLITS = [
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"""|\s*[\r\n]+|\s+(?!\S)|\s+""",
]


def train_tokenizer(folder: str, vocab_size: int, seed: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(rule), behavior="isolated") for rule in SPLITS]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rows, _ = load_conversations(folder, seed)
    tokenizer.train_from_iterator(
        (message["content"] for messages in rows["messages"] for message in messages), trainer, length=len(rows)
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL_TOKENS[0],
        eos_token=SPECIAL_TOKENS[1],
        pad_token=SPECIAL_TOKENS[2],
        mask_token=SPECIAL_TOKENS[7],
        additional_special_tokens=SPECIAL_TOKENS[3:7],
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )
    wrapped.chat_template = TEMPLATES["deepseek_v4"].read_text(encoding="utf-8")
    return wrapped


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True, help="folder of JSON lines with `messages`")
    parser.add_argument("--output", required=True, help="folder to write the tokenizer to")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    train_tokenizer(args.data, args.vocab_size, args.seed).save_pretrained(args.output)
