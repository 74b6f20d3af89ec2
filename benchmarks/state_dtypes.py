"""What float8 costs that keeps the target's states: their relative error, and the loss of a drafter trained on them.

    python benchmarks/state_dtypes.py --data runs/responses/train.jsonl --rows 64 --steps 30

The target runs once, in bfloat16, on the first `--rows` rows; a quarter of them is held out. Then the same drafter is
evaluated, trained and evaluated again on the same batches and anchors, from bfloat16 states (the target's own, to the
bit) and from float8 ones. Prints JSON: bytes a token, relative error of the states (norm of the difference over the
norm, over all held-out tokens), and evaluations before and after training; and as `together` the relative error, over
all and in the worst document, of states that the target makes of 16 documents at a time instead of one.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback

from hyperdflash import HyperDFlashModel
from hyperdflash.trainer import (
    CachedTargetStates,
    HyperDFlashTrainer,
    HyperDFlashTrainingArguments,
    LiveTargetStates,
    TargetStates,
)
from hyperdflash.trainer.run import load_rows
from hyperdflash.trainer.states import STATE_DTYPES

HOME = Path(__file__).resolve().parent.parent / "checkpoints"
METRICS = ("eval_loss", "eval_ce", "eval_kl", "eval_accepted_length")


def relative_errors(source: TargetStates, wanted: TargetStates, documents: Sequence[Sequence[int]]):
    """Norm of the difference over the norm: over all tokens, and `[documents]` of each."""
    lengths = torch.tensor([len(ids) for ids in documents])
    mask = (torch.arange(lengths.max()) < lengths[:, None]).long()  # [b, s]
    ids = torch.zeros_like(mask)
    for row, document in zip(ids, documents):
        row[: len(document)] = torch.tensor(document)
    found, right = (states(ids, mask).residual.double() * mask[:, :, None, None] for states in (source, wanted))
    difference, norm = ((values**2).sum(dim=(1, 2, 3)) for values in (found - right, right))  # [b]
    return float((difference.sum() / norm.sum()).sqrt()), (difference / norm).sqrt().tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="rows, as `hyperdflash train` takes them")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--target", default=str(HOME / "tiny-target"))
    parser.add_argument("--drafter", default=str(HOME / "tiny-hyperdflash"))
    args = parser.parse_args()
    rows = load_rows(args.data)
    rows = rows.select(range(min(args.rows, len(rows)))).train_test_split(test_size=0.25, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.bfloat16)
    live = LiveTargetStates(target, HyperDFlashModel.from_pretrained(args.drafter).config)
    own = CachedTargetStates({}, live.modules, torch.bfloat16, lambda: live)

    report = {}
    for name in ("bfloat16", "float8_e4m3fn"):
        states = CachedTargetStates({}, live.modules, STATE_DTYPES[name], lambda: own)
        with tempfile.TemporaryDirectory() as output:
            trainer = HyperDFlashTrainer(
                HyperDFlashModel.from_pretrained(args.drafter, dtype=torch.float32),
                states,
                HyperDFlashTrainingArguments(
                    output_dir=output,
                    per_device_train_batch_size=8,
                    max_steps=args.steps,
                    max_length=256,
                    num_anchors=32,
                    learning_rate=1e-3,
                    kl_weight=0.2,
                    kl_teacher="hc_head",
                    save_strategy="no",
                    report_to="none",
                    disable_tqdm=True,
                ),
                rows["train"],
                rows["test"],
                tokenizer,
            )
            trainer.remove_callback(PrinterCallback)  # standard output is for the result
            before = trainer.evaluate()
            trainer.train()
            after = trainer.evaluate()
        held_out = trainer.eval_dataset["input_ids"]
        tokens = stored = 0
        for packed in states.rows.values():
            stored += sum(values.nbytes for values in packed.values())
            tokens += len(packed["residual"])
        report[name] = {
            "bytes_a_token": stored / tokens,
            "relative_error": relative_errors(states, own, held_out)[0],
            "before": {metric: before[metric] for metric in METRICS},
            "after": {metric: after[metric] for metric in METRICS},
        }
    together = LiveTargetStates(target, HyperDFlashModel.from_pretrained(args.drafter).config, batch_size=16)
    overall, each = relative_errors(together, own, held_out)
    report["together"] = {"relative_error": overall, "worst_document": max(each)}
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
