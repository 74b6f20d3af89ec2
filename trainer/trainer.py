"""The trainer of a HyperDFlash drafter, on top of TRL's `SFTTrainer`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from trl import SFTTrainer
from trl.data_utils import is_conversational
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from ..generation_hyperdflash import check_drafter_fits
from ..modeling_hyperdflash import HcGateReducer, HyperDFlashModel, rms
from .arguments import HyperDFlashTrainingArguments
from .attention import block_sparse_attention
from .blocks import draw_anchors, slot_labels
from .drafting import draft_hidden_states, teacher_positions
from .losses import BlockSums, block_loss
from .states import LiveTargetStates, TargetStates

EVALUATION_STEP = -1  # stands for the step where anchors are drawn: every evaluation looks at the same ones


@dataclass
class LogWindow:
    """What has been seen since the last log, on this rank.

    Attributes:
        sums: of the objective. tokens: tokens of documents. gates: `[m]`, sum over the documents of the mean gate of
        each path. documents: how many documents `gates` sums up.
    """

    sums: BlockSums
    tokens: torch.Tensor
    gates: torch.Tensor
    documents: torch.Tensor

    def __add__(self, other: LogWindow) -> LogWindow:
        return LogWindow(*(mine + theirs for mine, theirs in zip(vars(self).values(), vars(other).values())))


class HyperDFlashTrainer(SFTTrainer):
    """Trains a drafter against a frozen target.

    TRL prepares the data: chat templates, assistant masks, prompts with completions, pre-tokenised rows. The model is
    the drafter, the processing class the target's tokenizer. A batch holds one document a row, padded on the right; in
    every step each document gets freshly drawn anchors, and the loss is normalised over all blocks of the step: all
    micro-batches, all ranks.

    Logged beside `loss`: `ce` and `kl`; `acceptance_k`, the share of blocks whose drafts `1..k` all equal the text, as
    a draft behind a supervised token's end counts as refused; `accepted_length`, 1 (the bonus token) plus their sum;
    `gate_j`, the mean gate of each path. They are sums over the logged steps divided once, not means of means, and
    mean the same as in [`GenerationStatistics`], only that rounds begin where anchors were drawn.

    Args:
        model: the drafter.
        target: the target, loaded in any way transformers can, or any [`TargetStates`].
        args: the training arguments.
        train_dataset, eval_dataset, formatting_func: as in [`~trl.SFTTrainer`].
        processing_class: the target's tokenizer; by default it is loaded from where the target was.
        callbacks, optimizers: as in [`~transformers.Trainer`].

    Raises:
        ValueError: the drafter does not fit the target, or the arguments do not fit the drafter.
    """

    _tag_names = ["trl", "hyperdflash"]
    _name = "HyperDFlash"
    loss_is_scaled_for_ga = True  # `compute_loss` divides by the blocks of the whole step

    def __init__(
        self,
        model: HyperDFlashModel,
        target: PreTrainedModel | TargetStates,
        args: HyperDFlashTrainingArguments,
        train_dataset: Dataset | IterableDataset,
        eval_dataset: Dataset | IterableDataset | dict[str, Dataset | IterableDataset] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
        formatting_func: Callable[[dict], str] | None = None,
    ):
        self.geometry = model.config.geometry
        self.objective = args.objective
        if args.kl_weight and args.kl_positions > self.geometry.num_draft_tokens:
            raise ValueError(
                f"HyperDFlashTrainingArguments.kl_positions: found {args.kl_positions}, wanted at most "
                f"{self.geometry.num_draft_tokens}, the drafts of a block"
            )
        if not isinstance(target, TargetStates):
            check_drafter_fits(target, model)
            if processing_class is None:
                processing_class = AutoTokenizer.from_pretrained(target.config.name_or_path)
            target = LiveTargetStates(target, model.config, args.device)
        self.target_states = target
        if args.assistant_only_loss is None:
            sample = next(iter(train_dataset))
            args.assistant_only_loss = "messages" in sample and is_conversational(sample)
        if args.freeze_reducer:
            model.reducer.requires_grad_(False)
        if processing_class.pad_token_id is None:
            processing_class.pad_token = processing_class.eos_token
        super().__init__(
            model=model,
            args=args,
            data_collator=DataCollatorForLanguageModeling(
                processing_class.pad_token_id, pad_to_multiple_of=args.pad_to_multiple_of
            ),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
            formatting_func=formatting_func,
        )
        vars(self.model).pop("forward", None)  # TRL's LM head, fused into the forward: a drafter has none
        vars(self.model.config).pop("use_cache", None)  # Trainer's, and not a field of a drafter's config
        self._windows: dict[str, LogWindow | None] = {"train": None, "eval": None}

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """As in [`~transformers.Trainer`]; the reducer gets groups of its own if its learning rate differs."""
        if self.optimizer is not None:
            return self.optimizer
        optimizer = super().create_optimizer(model)
        if self.args.reducer_learning_rate_factor != 1.0:
            reducer = set(self.model.reducer.parameters())
            for group in list(optimizer.param_groups):
                own = [parameter for parameter in group["params"] if parameter in reducer]
                if own:
                    group["params"] = [parameter for parameter in group["params"] if parameter not in reducer]
                    rate = group["lr"] * self.args.reducer_learning_rate_factor
                    optimizer.add_param_group({**group, "params": own, "lr": rate})
        return optimizer

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, torch.Tensor]], torch.Tensor]:
        """The micro-batches of one step, each with its `anchors`, and `[D]`: the blocks of all ranks, slot by slot."""
        batches = list(islice(epoch_iterator, num_batches))
        blocks = torch.zeros(self.geometry.num_draft_tokens, device=device)
        for batch in batches:
            batch["anchors"] = self._draw_anchors(batch, self.state.global_step)  # [b, A]
            counts = slot_labels(batch["labels"], batch["anchors"], self.geometry)[1]  # [b, A, D]
            blocks += counts.sum(dim=(0, 1)).to(device)
        return batches, self.accelerator.reduce(blocks, reduction="sum")

    def _draw_anchors(self, batch: dict[str, torch.Tensor], step: int) -> torch.LongTensor:
        return draw_anchors(
            batch["input_ids"],
            batch["labels"],
            batch["attention_mask"],
            self.geometry,
            self.args.num_anchors,
            self.args.seed,
            step,
        )

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Forward and backward, which recomputes layers under activation checkpointing, on block-sparse attention."""
        with block_sparse_attention(self.model.config):
            return super().training_step(*args, **kwargs)

    def prediction_step(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor | None, ...]:
        """As in training."""
        with block_sparse_attention(self.model.config):
            return super().prediction_step(*args, **kwargs)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, BlockSums]:
        """The share of this micro-batch in the loss of the step.

        Args:
            inputs: `input_ids`, `labels`, `attention_mask` `[b, s]`, `anchors` `[b, A]` (drawn here in evaluation).
            num_items_in_batch: `[D]`, blocks of the whole step (`get_batch_samples`); `None`: those of this batch.

        Returns:
            The loss, and with `return_outputs` the sums that it is made of.
        """
        input_ids, labels, anchors = inputs["input_ids"], inputs["labels"], inputs.get("anchors")
        if anchors is None:
            anchors = self._draw_anchors(inputs, EVALUATION_STEP)
        modules = self.target_states.modules
        states = self.target_states(input_ids, inputs["attention_mask"])
        hidden_states = draft_hidden_states(model, modules, states, input_ids, anchors)
        teacher = None
        if self.objective.kl_weight:
            teacher = modules.teacher_states(states.residual, self.args.kl_teacher)  # [b, s, d]
            positions = teacher_positions(anchors, self.geometry, self.objective.kl_positions)  # [b, A, P]
            rows = torch.arange(len(anchors), device=anchors.device)[:, None, None]
            teacher = teacher[rows, positions.clamp(max=input_ids.shape[1] - 1)]  # [b, A, P, d]
        with self.accelerator.autocast():
            loss, sums = block_loss(
                hidden_states,
                *slot_labels(labels, anchors, self.geometry),
                modules.logits,
                self.objective,
                num_items_in_batch,
                teacher,
                self.args.loss_chunk_size,
            )
        if num_items_in_batch is not None:  # DDP averages the gradients over the ranks
            loss = loss * self.accelerator.num_processes
        self._record(sums, states.context, inputs["attention_mask"])
        return (loss, sums) if return_outputs else loss

    @torch.no_grad()
    def _record(self, sums: BlockSums, context: torch.Tensor, attention_mask: torch.LongTensor) -> None:
        gates = _mean_gates(self.model.reducer, context[:1, : attention_mask[0].sum()])
        window = LogWindow(sums, attention_mask.sum(), gates, torch.ones_like(gates[:1]))
        mode = "train" if self.model.training else "eval"
        self._windows[mode] = window if self._windows[mode] is None else self._windows[mode] + window

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds what was seen since the last log, over all ranks; an evaluation's loss is that of all its blocks."""
        mode = "train" if self.model.training else "eval"
        window, self._windows[mode] = self._windows[mode], None
        if window is not None:
            metrics = self._metrics_of(window)
            if mode == "train":
                self._total_train_tokens += metrics.pop("tokens")
                metrics["num_tokens"] = self._total_train_tokens
                del metrics["loss"]  # the Trainer's own: the mean over the logged steps
            else:
                prefix = next((key.removesuffix("loss") for key in logs if key.endswith("_loss")), "eval_")
                metrics = {f"{prefix}{name}": value for name, value in metrics.items()}
            logs.update(metrics)
        super().log(logs, start_time)

    def _metrics_of(self, window: LogWindow) -> dict[str, float]:
        def reduce(value: torch.Tensor) -> torch.Tensor:
            return self.accelerator.reduce(value.to(self.accelerator.device), reduction="sum")

        sums = BlockSums(*map(reduce, vars(window.sums).values()))
        acceptance = sums.accepted / sums.blocks[0].clamp(min=1)  # [D]
        gates = reduce(window.gates) / reduce(window.documents)  # [m]
        return {
            "loss": self.objective.loss(sums, sums.blocks).item(),
            "ce": self.objective.cross_entropy(sums, sums.blocks).item(),
            **({"kl": self.objective.divergence(sums, sums.blocks).item()} if self.objective.kl_weight else {}),
            "accepted_length": 1 + acceptance.sum().item(),
            **{f"acceptance_{slot + 1}": rate for slot, rate in enumerate(acceptance.tolist())},
            **{f"gate_{path}": gate for path, gate in enumerate(gates.tolist())},
            "tokens": int(reduce(window.tokens).item()),
        }

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """None: TRL's card shows how to prompt a causal language model, which a drafter is not."""


def _mean_gates(reducer: nn.Module, context: torch.Tensor) -> torch.Tensor:
    """Mean gate of each path over the tokens of `context` `[1, n, m, d]`: `[m]`; empty for a reducer without gates."""
    if not isinstance(reducer, HcGateReducer):
        return context.new_zeros(0, dtype=torch.float32)
    if reducer.path_norm == "pre_gate":
        context = rms(context, reducer.norm_eps) * reducer.path_norm_weight.float()
    return reducer.gates(context).mean(dim=(0, 1))
