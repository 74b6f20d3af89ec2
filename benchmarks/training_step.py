"""Memory and time of a training step from cached states, against the straightforward form of the same step.

    python benchmarks/training_step.py --output runs/training_step.json

One document with random states, one AdamW step. `sparse` is how the trainer does it: block-sparse attention, and the
loss chunk by chunk. `checkpointed` is the same with the trainer's `activation_checkpointing`. `dense` is the
straightforward form: a dense mask, all logits at once, gradients left to autograd. The learning rate is 0, so that
every step sees the same weights; losses and gradients of all forms must be equal.

* Memory: the peak resident memory of a process that does nothing else, imports included, one process for each form.
  glibc is told to give freed tensors back at once (`MALLOC_MMAP_THRESHOLD_`); by itself it learns to keep those below
  32 MB, and the peak is then that of its holes as well.
* Time: median over interleaved steps. Beside them the rate of a bare matrix product of the LM head's shape, and the
  share of it that a step reaches. A step's FLOPs are those that the mathematics asks for, whatever a form does beyond:
  products with the weights, attention over visible pairs, and twice that for gradients; the LM head is frozen and gets
  no gradient of its own, the teacher's is run forward only. Norms, softmaxes and the optimizer count as nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from hyperdflash import HyperDFlashConfig, HyperDFlashModel
from hyperdflash.trainer.attention import block_sparse_attention
from hyperdflash.trainer.blocks import block_mask, draw_anchors, slot_labels
from hyperdflash.trainer.drafting import draft_hidden_states, teacher_positions
from hyperdflash.trainer.losses import BlockSums, Objective, block_loss
from hyperdflash.trainer.states import DocumentStates, TargetModules

FORMS = ("sparse", "checkpointed", "dense")
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "262144"}  # bytes; glibc only, other allocators do not look at it
LOGIT_SPREAD = 3.0  # standard deviation of the random logits, as wide as a trained model's


@dataclass
class Problem:
    """A drafter, one document, and the blocks drawn from it."""

    drafter: HyperDFlashModel
    modules: TargetModules
    states: DocumentStates
    input_ids: torch.LongTensor
    anchors: torch.LongTensor
    objective: Objective
    optimizer: torch.optim.Optimizer
    args: argparse.Namespace

    @classmethod
    def of(cls, args: argparse.Namespace) -> Problem:
        torch.manual_seed(0)
        config = HyperDFlashConfig(
            hidden_size=args.width,
            intermediate_size=3 * args.width,
            num_hidden_layers=args.layers,
            num_attention_heads=args.heads,
            num_key_value_heads=args.kv_heads,
            head_dim=args.head_dim,
            layer_types=["full_attention"] * args.layers,
            block_size=args.block,
            mask_token_id=args.vocabulary - 1,
            vocab_size=args.vocabulary,
        )
        drafter = HyperDFlashModel(config).train()
        modules = TargetModules(
            embedding=nn.Embedding(args.vocabulary, args.width),
            hc_head=nn.Identity(),
            norm=nn.RMSNorm(args.width),
            lm_head=nn.Linear(args.width, args.vocabulary, bias=False),
        )
        nn.init.normal_(modules.lm_head.weight, std=LOGIT_SPREAD / args.width**0.5)
        for module in vars(modules).values():
            module.requires_grad_(False)
        residual = torch.randn(1, args.tokens, config.hc_mult, args.width)  # [b, s, m, d]
        input_ids = torch.randint(args.vocabulary, (1, args.tokens))
        return cls(
            drafter,
            modules,
            DocumentStates(residual, residual),
            input_ids,
            draw_anchors(input_ids, input_ids, torch.ones_like(input_ids), config.geometry, args.anchors, 0, 0),
            Objective(gamma=4.0, kl_weight=0.1, kl_positions=2, kl_temperature=1.0),
            torch.optim.AdamW(drafter.parameters(), lr=0.0, weight_decay=0.0),
            args,
        )

    def step(self, form: str) -> float:
        """One step; its loss. The gradients stay."""
        config, positions = self.drafter.config, self.objective.kl_positions
        if form == "checkpointed":
            self.drafter.activation_checkpointing_enable()
        else:
            self.drafter.activation_checkpointing_disable()
        config._attn_implementation = self.args.dense_attention if form == "dense" else "sdpa"
        self.optimizer.zero_grad()
        with nullcontext() if form == "dense" else block_sparse_attention(config):
            hidden = draft_hidden_states(self.drafter, self.modules, self.states, self.input_ids, self.anchors)
            teacher = self.modules.teacher_states(self.states.residual, "mean")  # [b, s, d]
            taught = teacher_positions(self.anchors, config.geometry, positions).clamp(max=self.input_ids.shape[1] - 1)
            batch = (hidden, *slot_labels(self.input_ids, self.anchors, config.geometry))
            head, teacher = self.modules.logits, teacher[0, taught]  # [b, A, P, d]
            if form == "dense":
                loss = straightforward_loss(*batch, head, self.objective, teacher)
            else:
                loss, _ = block_loss(
                    *batch, head, self.objective, teacher_states=teacher, chunk_size=self.args.chunk_size
                )
            loss.backward()
        self.optimizer.step()
        return loss.item()

    def gradient(self) -> torch.Tensor:
        return torch.cat([parameter.grad.flatten() for parameter in self.drafter.parameters()])

    def flops(self) -> float:
        """What a step asks for."""
        config, (rows, anchors) = self.drafter.config, self.anchors.shape
        block_tokens = rows * anchors * config.block_size
        tokens = self.input_ids.numel() + block_tokens
        counts = slot_labels(self.input_ids, self.anchors, config.geometry)[1]
        taught = counts[..., : self.objective.kl_positions].sum().item()
        body = 0.0
        for name, parameter in self.drafter.layers.named_parameters():
            if parameter.dim() == 2:
                body += parameter.numel() * (tokens if "k_proj" in name or "v_proj" in name else block_tokens)
        pairs = block_mask(self.anchors, self.input_ids.shape[1], config.geometry).sum().item()
        body += 2 * pairs * config.num_attention_heads * config.head_dim * config.num_hidden_layers
        head = (2 * counts.sum().item() + taught) * self.modules.lm_head.weight.numel()
        return 2.0 * (3 * body + head)


def straightforward_loss(
    hidden_states: torch.Tensor,
    labels: torch.LongTensor,
    counts: torch.BoolTensor,
    head: nn.Module,
    objective: Objective,
    teacher_states: torch.Tensor,
) -> torch.Tensor:
    """[`block_loss`] as one would write it down."""
    slots = counts.nonzero()[:, 2]  # [n]
    logits = head(hidden_states[counts]).float()  # [n, vocab]
    cross_entropy = F.cross_entropy(logits, labels[counts], reduction="none")  # [n]

    taught = slots < objective.kl_positions
    teacher = head(teacher_states[counts[..., : objective.kl_positions]]).float()  # [taught, vocab]
    divergence = F.kl_div(
        F.log_softmax(logits[taught] / objective.kl_temperature, dim=-1),
        F.log_softmax(teacher / objective.kl_temperature, dim=-1),
        reduction="none",
        log_target=True,
    ).sum(dim=-1)

    hits = torch.zeros_like(counts)
    hits[counts] = logits.argmax(dim=-1) == labels[counts]
    zeros = torch.zeros(labels.shape[-1])
    sums = BlockSums(
        blocks=counts.sum(dim=(0, 1)).float(),
        cross_entropy=zeros.index_add(0, slots, cross_entropy),
        divergence=zeros[: objective.kl_positions].index_add(0, slots[taught], divergence),
        accepted=hits.cumprod(dim=-1).sum(dim=(0, 1)).float(),
    )
    return objective.loss(sums, sums.blocks)


def matmul_rate(head: nn.Linear, rows: int) -> float:
    """FLOPs a second of `[rows, d] @ [d, vocab]`, into memory that is there already."""
    weight = head.weight.detach().T  # [d, vocab]
    states, out = torch.randn(rows, len(weight)), torch.empty(rows, weight.shape[1])
    torch.mm(states, weight, out=out)
    start = time.perf_counter()
    torch.mm(states, weight, out=out)
    return 2.0 * rows * weight.numel() / (time.perf_counter() - start)


def peak_memory() -> float:
    """Bytes that this process has held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measure_memory(arguments: list[str]) -> dict:
    """Peaks of two steps in a process of their own: the second has the optimizer's state from the start."""
    peaks = {}
    for form in FORMS:
        command = [sys.executable, __file__, *arguments, "--only", form]
        run = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | GIVE_BACK)
        peaks[form] = json.loads(run.stdout.splitlines()[-1])
    return {
        **{f"{form}_{name}": value for form, values in peaks.items() for name, value in values.items()},
        **{f"dense_over_{form}": peaks["dense"]["peak_gb"] / peaks[form]["peak_gb"] for form in FORMS[:-1]},
    }


def measure_time(problem: Problem, repeats: int) -> dict:
    losses = {form: problem.step(form) for form in FORMS}
    gradients = {}
    seconds: dict[str, list[float]] = {form: [] for form in FORMS}
    rates = []
    for repeat in range(repeats):
        for form in FORMS[repeat % len(FORMS) :] + FORMS[: repeat % len(FORMS)]:
            start = time.perf_counter()
            loss = problem.step(form)
            seconds[form].append(time.perf_counter() - start)
            if abs(loss - losses["dense"]) > 1e-5 * abs(losses["dense"]):
                raise AssertionError(f"loss: found {loss} in {form}, wanted {losses['dense']}")
            gradients[form] = problem.gradient()
            rates.append(matmul_rate(problem.modules.lm_head, problem.anchors.shape[1]))
    differences = {}
    for form in FORMS[:-1]:
        difference = ((gradients[form] - gradients["dense"]).norm() / gradients["dense"].norm()).item()
        if difference > 1e-4:
            raise AssertionError(
                f"gradient: found a relative difference of {difference} in {form}, wanted at most 1e-4"
            )
        differences[f"{form}_gradient_difference"] = difference
    median = {form: statistics.median(values) for form, values in seconds.items()}
    rate, flops = statistics.median(rates), problem.flops()
    return {
        "loss": losses["dense"],
        **differences,
        **{f"{form}_seconds": value for form, value in median.items()},
        "all_seconds": seconds,
        **{f"dense_over_{form}": median["dense"] / median[form] for form in FORMS[:-1]},
        "gflop_a_step": flops / 1e9,
        "matmul_gflop_a_second": rate / 1e9,
        **{f"{form}_share_of_matmul_rate": flops / value / rate for form, value in median.items()},
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--vocabulary", type=int, default=129_280)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=1)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--anchors", type=int, default=512)
    parser.add_argument("--block", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--chunk-size", type=int, default=128, help="as the trainer's loss_chunk_size")
    parser.add_argument("--dense-attention", choices=["sdpa", "eager"], default="sdpa", help="under the dense mask")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of each form")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--output", default=None)
    parser.add_argument("--only", choices=FORMS, help="two steps of one form, and the peak memory of this process")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> dict:
    args = parse(arguments)
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.only:
        problem = Problem.of(args)
        before = peak_memory()
        for _ in range(2):
            problem.step(args.only)
        report = {"before_gb": before / 1e9, "peak_gb": peak_memory() / 1e9}
        print(json.dumps(report))
        return report
    report = {
        "settings": vars(args) | {"threads": torch.get_num_threads(), "torch": torch.__version__},
        "memory": measure_memory(sys.argv[1:] if arguments is None else arguments),
        "time": measure_time(Problem.of(args), args.repeats),
    }
    if args.output:
        Path(args.output).parent.mkdir(parents=True, exist_ok=True)
        Path(args.output).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))
    return report


if __name__ == "__main__":
    main()
