# ruff: noqa: E501 (the lines of the card are Markdown)
"""Write a trained model of the pair to its embedded folder: bfloat16 weights and provenance; the target's card.

    python recipes/tiny/publish.py target  --model runs/target --output checkpoints/tiny-target
    python recipes/tiny/publish.py drafter --model runs/stage2 --output checkpoints/tiny-hyperdflash
    python recipes/tiny/publish.py drafter --model runs/dflash-stage2 --output checkpoints/tiny-dflash
    python recipes/tiny/publish.py mtp     --model runs/mtp-stage2 --output checkpoints/tiny-mtp

Cards of drafters are made by `hyperdflash card`, once `hyperdflash eval` has measured the embedded weights.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from hyperdflash import HyperDFlashModel  # noqa: F401  (registers the drafter)
from hyperdflash.baselines import MtpModel  # noqa: F401  (registers the MTP module)
from hyperdflash.utils.folders import whole_folder
from hyperdflash.utils.provenance import write_provenance

SAMPLE_PROMPTS = [
    "A farmer has 12 cows and buys 8 more. He sells 5 of them. How many cows does he have now?\n"
    "Please reason step by step, and put your final answer within \\boxed{}.",
    "What does the command `head` do, and how do I use it?",
    "Write a Python function that returns the largest number in a list.",
]
SOURCES = """\
GSM8K (MIT); AQuA, StrategyQA, QASC and CREAK in the FLAN collection (Apache-2.0; MIT; CC BY 4.0; MIT); MBPP (CC BY 4.0);
reasoning-gym's CodeIO (Apache-2.0); TheAlgorithms/Python (MIT); keon/algorithms (MIT); kamyu104/LeetCode-Solutions (MIT);
exercism/python (MIT); tldr-pages (CC BY 4.0); Open-Assistant model evaluations (Apache-2.0); Taskmaster TM-4 (CC BY 4.0).
Messages that share a 13-word n-gram with a benchmark prompt were removed. Files and SHA-256: `provenance.json`."""


@torch.inference_mode()
def samples(target, tokenizer) -> str:
    """Greedy answers to the sample prompts, as Markdown."""
    texts = []
    for prompt in SAMPLE_PROMPTS:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        output = target.generate(**inputs, do_sample=False, max_new_tokens=120)
        answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        texts.append(f"~~~text\n> {prompt}\n\n{answer}\n~~~")
    return "\n\n".join(texts)


def target_card(target, tokenizer, record: dict) -> str:
    return f"""---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags: [deepseek_v4, tiny]
---

# tiny-target: DeepSeek-V4's architecture at {target.num_parameters() / 1e6:.1f} M parameters

A test and demonstration target for hyperdflash: sliding, CSA and HCA layers, 4 residual streams, 64 experts, a
4,096-token vocabulary, think and non-think. It writes well-formed text in a few narrow domains and knows nothing: do not
use it for anything else.

* Training: {record["tokens"]:,} tokens in {record["steps"]:,} steps, from scratch (`recipes/tiny` in the hyperdflash
  repository); held-out loss {record["held_out_loss"]:.3f} nats a token (prompts included).
* Data: {SOURCES}

## Samples (greedy)

{samples(target, tokenizer)}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("kind", choices=["target", "drafter", "mtp"])
    parser.add_argument("--model", required=True, help="folder of the trained model")
    parser.add_argument("--output", required=True)
    parser.add_argument("--earlier", nargs="*", default=[], help="target: folders whose provenance came before")
    args = parser.parse_args()
    record = json.loads((Path(args.model) / "provenance.json").read_text(encoding="utf-8"))
    if args.earlier:
        record["earlier"] = [
            json.loads((Path(e) / "provenance.json").read_text(encoding="utf-8")) for e in args.earlier
        ]

    auto = AutoModelForCausalLM if args.kind == "target" else AutoModel
    model = auto.from_pretrained(args.model, dtype=torch.bfloat16).eval()
    with whole_folder(args.output, overwrite=True) as folder:
        model.save_pretrained(folder)
        if args.kind == "target":
            tokenizer = AutoTokenizer.from_pretrained(args.model)
            tokenizer.save_pretrained(folder)
            card = target_card(auto.from_pretrained(folder, dtype=torch.float32).eval(), tokenizer, record)
            (folder / "README.md").write_text(card, encoding="utf-8")
        write_provenance(folder, record)


if __name__ == "__main__":
    main()
