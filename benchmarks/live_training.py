"""What training costs beside the target: a step with live states, over the forward of the target alone.

    python benchmarks/live_training.py --output runs/live_training.json

Trains the embedded drafter with a recipe of `recipes/tiny` and live states. In each step the target's decoder is first
run alone on the documents of the step, in the same batches, and timed; then comes the step itself: the target, the
drafter forward and backward, the optimizer. Without `--data` the documents are random tokens, as long as the recipe's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
import yaml
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, PrinterCallback, TrainerCallback

from hyperdflash import HyperDFlashModel
from hyperdflash.trainer import (
    HyperDFlashTrainer,
    HyperDFlashTrainingArguments,
    LiveTargetStates,
    TargetStates,
    TrainArguments,
)
from hyperdflash.trainer.run import load_rows
from hyperdflash.trainer.states import DocumentStates

ROOT = Path(__file__).resolve().parent.parent


class TimedStates(TargetStates):
    """Live states; before them the decoder runs alone on the same documents, and `alone` gets its seconds."""

    def __init__(self, live: LiveTargetStates):
        self.live, self.modules, self.alone = live, live.modules, []

    @torch.no_grad()
    def __call__(self, input_ids: torch.LongTensor, attention_mask: torch.LongTensor) -> DocumentStates:
        lengths, decoder, size = (
            attention_mask.sum(dim=1).tolist(),
            self.live.target.get_decoder(),
            self.live.batch_size,
        )
        start = time.perf_counter()
        for first in range(0, len(lengths), size):
            decoder(input_ids=input_ids[first : first + size, : max(lengths[first : first + size])], use_cache=False)
        self.alone.append(time.perf_counter() - start)
        return self.live(input_ids, attention_mask)


class StepTimes(TrainerCallback):
    """The seconds of each optimizer step."""

    def __init__(self):
        self.seconds, self._start = [], 0.0

    def on_step_begin(self, *args, **kwargs):
        self._start = time.perf_counter()

    def on_step_end(self, *args, **kwargs):
        self.seconds.append(time.perf_counter() - self._start)


def random_rows(count: int, longest: int, vocab_size: int) -> Dataset:
    """`count` documents of 32 to `longest` tokens, supervised from a third on."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for length in torch.randint(32, longest + 1, (count,), generator=generator).tolist():
        ids = torch.randint(8, vocab_size, (length,), generator=generator).tolist()
        rows.append({"input_ids": ids, "assistant_masks": [int(3 * i >= length) for i in range(length)]})
    return Dataset.from_list(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default=str(ROOT / "recipes" / "tiny" / "drafter-stage1.yaml"))
    parser.add_argument("--data", default=None, help="rows, as `hyperdflash train` takes them")
    parser.add_argument("--steps", type=int, default=20, help="timed steps; two more come first")
    parser.add_argument("--target-batch-size", type=int, default=None, help="instead of the recipe's")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--target", default=str(ROOT / "checkpoints" / "tiny-target"))
    parser.add_argument("--drafter", default=str(ROOT / "checkpoints" / "tiny-hyperdflash"))
    parser.add_argument("--output", default=None)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    recipe = yaml.safe_load(Path(args.recipe).read_text(encoding="utf-8"))
    recipe |= {"max_steps": args.steps + 2, "save_strategy": "no", "states_source": "live", "disable_tqdm": True}
    recipe |= {"drafter": args.drafter, "target": args.target, "data": args.data or "random"}
    if args.target_batch_size is not None:
        recipe["target_batch_size"] = args.target_batch_size
    with tempfile.TemporaryDirectory() as output:
        parser = HfArgumentParser((TrainArguments, HyperDFlashTrainingArguments))
        script, arguments = parser.parse_dict(recipe | {"output_dir": output})
        target = AutoModelForCausalLM.from_pretrained(args.target, dtype=getattr(torch, script.target_dtype))
        if args.data:
            rows = load_rows(args.data)
        else:
            count = arguments.max_steps * arguments.per_device_train_batch_size
            rows = random_rows(count, arguments.max_length, target.config.vocab_size)
        drafter = HyperDFlashModel.from_pretrained(args.drafter, dtype=torch.float32)
        states = TimedStates(LiveTargetStates(target, drafter.config, batch_size=script.target_batch_size))
        times = StepTimes()
        trainer = HyperDFlashTrainer(
            drafter,
            states,
            arguments,
            rows,
            processing_class=AutoTokenizer.from_pretrained(args.target),
            callbacks=[times],
        )
        trainer.remove_callback(PrinterCallback)  # standard output is for the result
        trainer.train()
    alone, steps = states.alone[2:], [step - first for step, first in zip(times.seconds, states.alone)][2:]
    report = {
        "recipe": Path(args.recipe).name,
        "target_batch_size": script.target_batch_size,
        "steps": len(steps),
        "threads": torch.get_num_threads(),
        "step_seconds": statistics.median(steps),
        "target_alone_seconds": statistics.median(alone),
        "step_over_target_alone": statistics.median(step / target for step, target in zip(steps, alone)),
    }
    if args.output:
        Path(args.output).parent.mkdir(parents=True, exist_ok=True)
        Path(args.output).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
