"""The trainer of a HyperDFlash drafter, on top of TRL's `SFTTrainer`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, IterableDataset
from peft import PeftConfig, PeftModel
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import Sampler
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4GroupedLinear
from trl import SFTTrainer
from trl.data_utils import is_conversational
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from ..configuration_hyperdflash import BlockGeometry
from ..generation_hyperdflash import check_drafter_fits
from ..modeling_hyperdflash import HyperDFlashModel, rms
from ..utils.chat import add_chat_template
from ..utils.provenance import published, write_provenance
from .adapters import base_drafter, check_peft_config
from .arguments import HyperDFlashTrainingArguments
from .attention import block_sparse_attention
from .blocks import draw_anchors, eligible_anchors, slot_labels
from .drafting import draft_hidden_states, teacher_positions
from .losses import BlockSums, block_loss
from .muon import MuonWith
from .sampling import SeededLengthGroupedSampler, drop_repeated_rows, set_sampler_epoch
from .states import DocumentStates, LiveTargetStates, TargetStates

EVALUATION_STEP = -1  # stands for the step where anchors are drawn: every evaluation looks at the same ones


@dataclass
class LogWindow:
    """What has been seen since the last log, on this rank.

    Attributes:
        sums: of the objective. tokens: how many tokens the documents have. gates: `[m]`, sum of each path's gate over
        these tokens.
    """

    sums: BlockSums
    tokens: torch.Tensor
    gates: torch.Tensor

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
    `gate_j`, the mean gate of each path over all tokens. They are sums over the logged steps divided once, not means
    of means, and mean the same as in [`GenerationStatistics`], only that rounds begin where anchors were drawn.

    Args:
        model: the drafter, or a `PeftModel` around one.
        target: the target, loaded in any way transformers can, or any [`TargetStates`].
        args: the training arguments.
        train_dataset, eval_dataset, formatting_func: as in [`~trl.SFTTrainer`].
        processing_class: the target's tokenizer; by default it is loaded from where the target was.
        callbacks, optimizers: as in [`~transformers.Trainer`].
        peft_config: trains an adapter in place of all weights, such as [`lora_config`]; modules that are trained in
            full, like the reducer, stand in its `modules_to_save`.

    Attributes:
        provenance: a record that is written as `provenance.json` into every folder that the model is saved to.

    Raises:
        ValueError: the drafter does not fit the target, the arguments do not fit the drafter, or the rows cannot be
            trained on: token ids that the target does not have, or nothing to supervise.
    """

    _tag_names = ["trl", "hyperdflash"]
    _name = "HyperDFlash"
    loss_is_scaled_for_ga = True  # `compute_loss` divides by the blocks of the whole step

    def __init__(
        self,
        model: HyperDFlashModel | PeftModel,
        target: PreTrainedModel | TargetStates,
        args: HyperDFlashTrainingArguments,
        train_dataset: Dataset | IterableDataset,
        eval_dataset: Dataset | IterableDataset | dict[str, Dataset | IterableDataset] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
        formatting_func: Callable[[dict], str] | None = None,
        peft_config: PeftConfig | None = None,
    ):
        if args.use_muon and optimizers[0] is not None:
            raise ValueError(
                "HyperDFlashTrainingArguments.use_muon: found True beside an optimizer of the caller's, wanted "
                "one of them"
            )
        self.geometry = model.config.geometry
        self.objective = args.objective
        self.provenance: dict[str, Any] | None = None
        if peft_config is not None:
            check_peft_config(peft_config, model, args.freeze_reducer)
        if args.kl_weight and args.kl_positions > self.geometry.num_draft_tokens:
            raise ValueError(
                f"HyperDFlashTrainingArguments.kl_positions: found {args.kl_positions}, wanted at most "
                f"{self.geometry.num_draft_tokens}, the drafts of a block"
            )
        if not isinstance(target, TargetStates):
            check_drafter_fits(target, model)
            if processing_class is None:
                processing_class = AutoTokenizer.from_pretrained(target.config.name_or_path)
                add_chat_template(processing_class, target.config.name_or_path)
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
            peft_config=peft_config,
        )
        vars(base_drafter(self.model)).pop("forward", None)  # TRL's LM head, fused into the forward: there is none
        vars(self.model.config).pop("use_cache", None)  # Trainer's, and not a field of a drafter's config
        self._windows: dict[str, LogWindow | None] = {"train": None, "eval": None}
        if isinstance(self.train_dataset, Dataset):
            check_rows(self.train_dataset, model.config.vocab_size, self.geometry)

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler | None:
        """As in [`~transformers.Trainer`]; `group_by_length` gives the same order on resumption and on any ranks."""
        rows = self.train_dataset if train_dataset is None else train_dataset
        if self.args.train_sampling_strategy != "group_by_length" or not isinstance(rows, Dataset):
            return super()._get_train_sampler(train_dataset)
        step = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return SeededLengthGroupedSampler(step, list(map(len, rows["input_ids"])), seed)

    def _run_epoch(self, *, train_dataloader, epoch: int, **kwargs: Any) -> None:
        set_sampler_epoch(train_dataloader, epoch)
        super()._run_epoch(train_dataloader=train_dataloader, epoch=epoch, **kwargs)

    def _without_repeated_rows(
        self, batch: dict[str, torch.Tensor], rows: Dataset | IterableDataset, batch_size: int
    ) -> dict[str, torch.Tensor]:
        """`batch`, or if it is its loader's last, what it holds of rows that this epoch has not had yet."""
        last = self.accelerator.gradient_state.end_of_dataloader
        if not last or self.args.dataloader_drop_last or not isinstance(rows, Dataset):
            return batch
        return drop_repeated_rows(
            batch, len(rows), self.accelerator.process_index, self.accelerator.num_processes, batch_size
        )

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """As in [`~transformers.Trainer`]; the reducer has groups of its own if its learning rate differs, and the
        weights of linear layers if `use_muon` asks for it."""
        if self.args.use_muon and (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            raise ValueError(
                "HyperDFlashTrainingArguments.use_muon: found True beside FSDP or DeepSpeed, wanted False: Muon needs "
                "matrices as a whole, and these shard or flatten them"
            )
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
        if self.args.use_muon:
            # A grouped linear is a stack of matrices, which Muon would take for one
            linears = (module for module in self.model.modules() if isinstance(module, nn.Linear))
            single = (linear for linear in linears if not isinstance(linear, DeepseekV4GroupedLinear))
            matrices = {linear.weight for linear in single if linear.weight.requires_grad}
            self.optimizer = MuonWith(optimizer, matrices)
        return self.optimizer

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, torch.Tensor]], torch.Tensor]:
        """The micro-batches of one step, each with its `anchors`, and `[D]`: the blocks of all ranks, slot by slot."""
        batches = list(islice(epoch_iterator, num_batches))
        if batches and self.args.train_sampling_strategy != "batch_rebalance":  # it repeats no rows
            batches[-1] = self._without_repeated_rows(batches[-1], self.train_dataset, self._train_batch_size)
        blocks = torch.zeros(self.geometry.num_draft_tokens, device=device)
        for batch in batches:
            batch["anchors"] = self._draw_anchors(batch, self.state.global_step)  # [b, A]
            counts = slot_labels(batch["labels"], batch["anchors"], self.geometry)[1]  # [b, A, D]
            blocks += counts.sum(dim=(0, 1)).to(device)
        blocks = self.accelerator.reduce(blocks, reduction="sum")
        if not isinstance(self.train_dataset, Dataset):
            self._check_stream(batches, blocks)
        return batches, blocks

    def _check_stream(self, batches: list[dict[str, torch.Tensor]], blocks: torch.Tensor) -> None:
        """The checks of `check_rows` for rows that come as a stream, as they come."""
        vocab_size = self.model.config.vocab_size
        for batch in batches:
            if (largest := int(batch["input_ids"].max())) >= vocab_size:
                raise ValueError(
                    f"train_dataset: step {self.state.global_step + 1}: found the token id {largest}, wanted ids "
                    f"below {vocab_size}, the target's vocabulary"
                )
        if batches and blocks[0] == 0:
            raise ValueError(
                f"train_dataset: step {self.state.global_step + 1}: found 0 blocks to draft, wanted supervised tokens "
                "(assistant turns, completions) from a row's third token on"
            )

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
        with block_sparse_attention(base_drafter(self.model).config):
            return super().training_step(*args, **kwargs)

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
        hidden_states = self._draft_hidden_states(model, states, input_ids, anchors)
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
        seen = (anchors > 0).any(dim=1, keepdim=True)  # a row that only keeps its process company is not seen
        self._record(sums, states.context, inputs["attention_mask"] * seen)
        return (loss, sums) if return_outputs else loss

    def _draft_hidden_states(
        self, model: nn.Module, states: DocumentStates, input_ids: torch.LongTensor, anchors: torch.LongTensor
    ) -> torch.Tensor:
        """What the target's LM head takes to draft behind each anchor, `[b, A, D, d]`: see `draft_hidden_states`."""
        return draft_hidden_states(model, self.target_states.modules, states, input_ids, anchors)

    def _gate_sums(self, context: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        """See `gate_sums`."""
        return gate_sums(base_drafter(self.model).reducer, context, lengths)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, torch.Tensor], prediction_loss_only: bool, ignore_keys=None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """As in [`~transformers.Trainer`], without the rows that fill up the last batches of several processes."""
        rows = self.callback_handler.eval_dataloader.dataset
        inputs = self._without_repeated_rows(inputs, rows, self.args.eval_batch_size)
        with block_sparse_attention(base_drafter(self.model).config):
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    @torch.no_grad()
    def _record(self, sums: BlockSums, context: torch.Tensor, attention_mask: torch.LongTensor) -> None:
        if isinstance(self.model, FSDPModule):
            self.model.unshard()  # the reducer, in the group of the root, may have been sharded behind the forward
        gates = self._gate_sums(context, attention_mask.sum(dim=1).tolist())
        window = LogWindow(sums, attention_mask.sum(), gates)
        mode = "train" if self.model.training else "eval"
        self._windows[mode] = window if self._windows[mode] is None else self._windows[mode] + window

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds what was seen since the last log, over all ranks; an evaluation's loss is that of all its blocks."""
        mode = "train" if self.model.training else "eval"
        window, self._windows[mode] = self._windows[mode], None
        if window is not None:
            metrics = self._metrics_of(window)
            if mode == "train":
                earlier = (entry["num_tokens"] for entry in reversed(self.state.log_history) if "num_tokens" in entry)
                metrics["num_tokens"] = next(earlier, 0) + metrics.pop("tokens")  # goes on in a resumed run
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
        tokens = reduce(window.tokens)
        gates = reduce(window.gates) / tokens.clamp(min=1)  # [m]
        return {
            "loss": self.objective.loss(sums, sums.blocks).item(),
            "ce": self.objective.cross_entropy(sums, sums.blocks).item(),
            **({"kl": self.objective.divergence(sums, sums.blocks).item()} if self.objective.kl_weight else {}),
            "accepted_length": 1 + acceptance.sum().item(),
            **{f"acceptance_{slot + 1}": rate for slot, rate in enumerate(acceptance.tolist())},
            **{f"gate_{path}": gate for path, gate in enumerate(gates.tolist())},
            "tokens": int(tokens.item()),
        }

    def merge_adapter(self) -> HyperDFlashModel:
        """Merges the trained adapter into the drafter, which takes the place of `self.model`, and returns it.

        Raises:
            ValueError: there is no adapter, or it is sharded over processes (FSDP).
        """
        if not isinstance(self.model, PeftModel):
            raise ValueError(f"merge_adapter: found a {type(self.model).__name__}, wanted a drafter with an adapter")
        if self.is_fsdp_enabled:
            raise ValueError("merge_adapter: found an adapter sharded by FSDP, wanted it whole: merge what it saved")
        self.model = self.model_wrapped = self.model.merge_and_unload()
        return self.model

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        wrapped = type(base_drafter(self.model))
        if issubclass(wrapped, FSDPModule):  # a class made by torch, whose file would be saved as the drafter's code
            drafter = next(cls for cls in wrapped.__mro__ if not issubclass(cls, FSDPModule))
            wrapped.__name__, wrapped.__module__ = drafter.__name__, drafter.__module__
        super()._save(output_dir, state_dict)
        if self.args.should_save and self.provenance is not None:
            folder = self.args.output_dir if output_dir is None else output_dir
            uploaded = self.args.push_to_hub and folder == self.args.output_dir
            write_provenance(folder, published(self.provenance) if uploaded else self.provenance)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self.is_world_process_zero():  # the Trainer brings weights and configs along, not the code that reads them
            for file in Path(checkpoint_folder).glob("*.py"):
                shutil.copy(file, self.args.output_dir)
        super()._push_from_checkpoint(checkpoint_folder)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """None: TRL's card shows how to prompt a causal language model, which a drafter is not."""


def check_rows(rows: Dataset, vocab_size: int, geometry: BlockGeometry) -> None:
    """Whether prepared rows (`input_ids`, `labels`) can be trained on.

    Raises:
        ValueError: a row has a token id outside the target's vocabulary, or no row has a block to draft.
    """
    done = 0
    for batch in rows.select_columns("input_ids").with_format("arrow").iter(1000):
        ids = batch["input_ids"].combine_chunks()
        values = ids.flatten().to_numpy(zero_copy_only=False)
        wrong = (values < 0) | (values >= vocab_size)
        if wrong.any():
            where = int(wrong.argmax())
            ends = np.cumsum(ids.value_lengths().to_numpy(zero_copy_only=False))
            row = done + int(np.searchsorted(ends, where, side="right"))
            raise ValueError(
                f"train_dataset: row {row}: found the token id {values[where]}, wanted ids from 0 to "
                f"{vocab_size - 1}, the target's vocabulary (is the tokenizer the target's?)"
            )
        done += len(ids)
    labels = rows.select_columns("labels").with_format("torch")
    if not any(eligible_anchors(row["labels"].unsqueeze(0), geometry).any() for row in labels):
        raise ValueError(
            f"train_dataset: found 0 blocks to draft in {len(rows)} rows, wanted supervised tokens (assistant turns, "
            "completions) from a row's third token on"
        )


def gate_sums(reducer: nn.Module, context: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Sum of each path's gate over the documents' tokens: `[m]`; empty for a reducer without gates.

    Args:
        context: `[b, s, m, d]`, padded on the right. lengths: of the documents.
    """
    if not hasattr(reducer, "gates"):
        return context.new_zeros(0, dtype=torch.float32)
    total = torch.zeros(reducer.hc_base.shape, device=context.device)
    for streams, length in zip(context, lengths):  # one document at a time: the gates are computed in float32
        streams = streams[None, :length]  # [1, n, m, d]
        if reducer.path_norm == "pre_gate":
            streams = rms(streams, reducer.norm_eps) * reducer.path_norm_weight.float()
        total += reducer.gates(streams).sum(dim=(0, 1))
    return total
