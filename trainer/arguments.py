"""The options of training: what the objective is, and what `hyperdflash train` trains on."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from trl import SFTConfig

from .losses import Objective
from .states import STATE_DTYPES, TEACHER_POOLINGS

STATES_SOURCES = ("live", "cache", "fill")


@dataclass
class HyperDFlashTrainingArguments(SFTConfig):
    r"""
    Arguments of the [`HyperDFlashTrainer`]: those of TRL's [`~trl.SFTConfig`], and the drafter's objective.

    Args:
        num_anchors (`int`): The most blocks of a document in one step, their anchors drawn without replacement.
        loss_decay_gamma (`float`, *optional*): Draft slot `k` weighs `exp(-(k - 1) / gamma)` in the cross-entropy;
            `None` or `inf`: all weigh the same.
        kl_weight (`float`): `alpha` of `CE + alpha * KL` (paper, section 2.3: 0.1 to 0.2); 0: no teacher.
        kl_positions (`int`): `P`, the draft slots that the target teaches.
        kl_temperature (`float`): `T` of teacher and student.
        kl_teacher (`str`): How the target's streams are pooled for the teacher: their `"mean"`, as the paper ran, or
            its own `"hc_head"`, which gives its true distribution.
        loss_chunk_size (`int`): Draft slots whose logits exist at once, student's and teacher's: each takes the
            vocabulary in float32. The loss does not depend on it.
        reducer_learning_rate_factor (`float`): The reducer's learning rate over that of the body.
        freeze_reducer (`bool`): Do not train the reducer.
        use_muon (`bool`): Step the weights of all linear layers with [`~torch.optim.Muon`], at the size of AdamW's
            updates, and the rest with `optim`.

    Raises:
        ValueError: a value that makes no objective, or an option of TRL that a drafter cannot follow.

    Defaults that differ from TRL's: learning rate 8e-4, 5 epochs, cosine with 4 % warm-up (the paper's first stage);
    `activation_checkpointing` off; `ddp_find_unused_parameters` off; `max_length` 4096; `assistant_only_loss` is
    `None`, which means yes for rows of `messages` and no for others (`completion_only_loss` decides for prompts with
    completions).
    """

    learning_rate: float = field(default=8e-4, metadata={"help": "Peak learning rate of AdamW (stage 2: 1e-4)."})
    num_train_epochs: float = field(default=5.0, metadata={"help": "Passes over the data."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Schedule of the learning rate."})
    warmup_steps: float = field(default=0.04, metadata={"help": "Warm-up in steps; below 1: as a share of all steps."})
    gradient_checkpointing: bool | None = field(
        default=None,
        metadata={"help": "Deprecated alias of activation_checkpointing, which is off by default (TRL's is on)."},
    )
    max_length: int | None = field(default=4096, metadata={"help": "Longer documents are cut to this, in tokens."})
    ddp_find_unused_parameters: bool | None = field(
        default=False, metadata={"help": "A drafter uses all its parameters in every step: nothing to search for."}
    )
    assistant_only_loss: bool | None = field(
        default=None,
        metadata={
            "help": "Supervise the assistant's turns only. Default: yes for conversational rows, no for others."
        },
    )

    num_anchors: int = field(
        default=512, metadata={"help": "The most blocks of a document in one step, drawn without replacement."}
    )
    loss_decay_gamma: float | None = field(
        default=4.0,
        metadata={
            "help": "Draft slot k weighs exp(-(k - 1) / gamma) in the cross-entropy; none or inf: all the same."
        },
    )
    kl_weight: float = field(default=0.1, metadata={"help": "alpha of CE + alpha * KL; 0: no teacher."})
    kl_positions: int = field(default=2, metadata={"help": "P: draft slots that the target teaches."})
    kl_temperature: float = field(default=1.0, metadata={"help": "T of teacher and student."})
    kl_teacher: str = field(
        default="mean",
        metadata={
            "help": "Pooling of the target's streams for the teacher: mean (as the paper ran) or hc_head (the "
            "target's true distribution).",
            "choices": list(TEACHER_POOLINGS),
        },
    )
    loss_chunk_size: int = field(
        default=128, metadata={"help": "Draft slots whose logits exist at once; the loss does not depend on it."}
    )
    reducer_learning_rate_factor: float = field(
        default=1.0, metadata={"help": "The reducer's learning rate over that of the body."}
    )
    freeze_reducer: bool = field(default=False, metadata={"help": "Do not train the reducer."})
    use_muon: bool = field(
        default=False, metadata={"help": "Muon for the weights of linear layers, `optim` for the rest."}
    )

    def __post_init__(self):
        if self.bf16 is None and not torch.accelerator.is_available():
            self.bf16 = False  # TRL's default asks for a GPU
        super().__post_init__()
        gamma = self.loss_decay_gamma
        self._require("num_anchors", self.num_anchors >= 1, "at least 1")
        self._require("loss_decay_gamma", gamma is None or gamma > 0, "above 0, or none")
        self._require("kl_weight", self.kl_weight >= 0, "at least 0")
        self._require("kl_positions", self.kl_positions >= 1, "at least 1 (kl_weight 0 turns the teacher off)")
        self._require("kl_temperature", self.kl_temperature > 0, "above 0")
        self._require("kl_teacher", self.kl_teacher in TEACHER_POOLINGS, f"one of {TEACHER_POOLINGS}")
        self._require("loss_chunk_size", self.loss_chunk_size >= 1, "at least 1")
        self._require("reducer_learning_rate_factor", self.reducer_learning_rate_factor > 0, "above 0")
        for name in ("packing", "eval_packing", "padding_free"):
            rule = "False: one document a row, as DeepSeek-V4 compresses its context across documents that share one"
            self._require(name, not getattr(self, name), rule)
        self._require("loss_type", self.loss_type == "nll", "'nll': the drafter has its own loss")
        rule = "none: a drafter has no embedding, it borrows the target's"
        self._require("neftune_noise_alpha", self.neftune_noise_alpha is None, rule)
        template = self.chat_template_path
        self._require(
            "chat_template_path",
            template is None or Path(template).is_file() and template.endswith((".jinja", ".j2")),
            "a .jinja or .j2 file: the template of a tokenizer would bring tokens that the target does not have",
        )
        for name in ("bf16_full_eval", "fp16_full_eval"):
            rule = "False: an evaluation would round the drafter, its float32 gates too, before it is saved"
            self._require(name, not getattr(self, name), rule)
        self._require("label_smoothing_factor", self.label_smoothing_factor == 0, "0: the drafter has its own loss")

    @property
    def objective(self) -> Objective:
        """The loss that these arguments describe."""
        return Objective(self.loss_decay_gamma, self.kl_weight, self.kl_positions, self.kl_temperature)

    def _require(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise ValueError(f"HyperDFlashTrainingArguments.{name}: found {getattr(self, name)!r}, wanted {rule}")


@dataclass
class TrainArguments:
    """What `hyperdflash train` trains, against which target, on which data."""

    drafter: str = field(metadata={"help": "Folder or Hub id of the drafter to start from (`hyperdflash init`)."})
    target: str = field(metadata={"help": "Folder or Hub id of the target."})
    data: str = field(
        metadata={
            "help": "Training rows: a file or folder of JSON lines or parquet, or a Hub id. Rows hold `messages`, "
            "`prompt` and `completion`, or `input_ids` with `assistant_masks` or `labels`."
        }
    )
    data_split: str = field(default="train", metadata={"help": "Split of a Hub data set."})
    eval_data: str | None = field(default=None, metadata={"help": "Held-out rows, given as `data` is."})
    held_out: int = field(
        default=0, metadata={"help": "Without eval_data: rows of `data` set aside, drawn by `seed`."}
    )
    tokenizer: str | None = field(default=None, metadata={"help": "Folder or Hub id. Default: the target's."})
    target_revision: str | None = field(default=None, metadata={"help": "Revision of the target on the Hub."})
    target_dtype: str = field(
        default="auto",
        metadata={"help": "Type of the target's weights: auto (as stored), bfloat16, float16, float32."},
    )
    states_source: str = field(
        default="live",
        metadata={
            "help": "Where the target's states come from: live, the target runs in every step; cache, states_cache "
            "has them all and the target is not loaded; fill, a document's states are computed once and kept, in "
            "states_cache, or in memory without one. All three train on the same numbers.",
            "choices": list(STATES_SOURCES),
        },
    )
    states_cache: str | None = field(
        default=None,
        metadata={"help": "Folder of kept states, for states_source cache and fill: streams x width numbers a token."},
    )
    states_dtype: str = field(
        default="bfloat16",
        metadata={
            "help": "What states are rounded to, whatever their source: bfloat16, float32, or float8_e4m3fn with a "
            "scale a token and stream.",
            "choices": list(STATE_DTYPES),
        },
    )
    states_shard_mb: int = field(
        default=512, metadata={"help": "MB in a file of the cache; each process holds as much in memory to fill it."}
    )
    target_batch_size: int = field(
        default=1,
        metadata={
            "help": "For states_source live: documents that the target runs at a time. With 1 states depend on the "
            "document alone, as kept ones always do; more is faster where documents are short."
        },
    )
    target_init_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "JSON: further arguments of from_pretrained for the target (experts_implementation, ...)."},
    )

    use_peft: bool = field(
        default=False,
        metadata={"help": "Train LoRA on the body's projections, and the reducer in full, instead of all weights."},
    )
    lora_r: int = field(default=16, metadata={"help": "Rank of LoRA."})
    lora_alpha: int = field(default=32, metadata={"help": "LoRA's update is scaled by lora_alpha / lora_r."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout in front of LoRA's matrices."})
    lora_target_modules: list[str] | None = field(
        default=None,
        metadata={"help": "Modules that get LoRA. Default: q, k, v, o, gate, up and down projections of all layers."},
    )
    merge_adapter: bool = field(
        default=False,
        metadata={
            "help": "With use_peft: write the drafter with the adapter merged into it, ready to be served. Otherwise "
            "output_dir gets the adapter."
        },
    )

    def __post_init__(self):
        if isinstance(self.target_init_kwargs, str):
            self.target_init_kwargs = json.loads(self.target_init_kwargs)
        for name, choices in (("states_source", STATES_SOURCES), ("states_dtype", tuple(STATE_DTYPES))):
            if getattr(self, name) not in choices:
                raise ValueError(f"TrainArguments.{name}: found {getattr(self, name)!r}, wanted one of {choices}")
        for name in ("states_shard_mb", "target_batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"TrainArguments.{name}: found {getattr(self, name)}, wanted at least 1")
        live = self.states_source == "live"
        if live and self.states_cache is not None or self.states_source == "cache" and self.states_cache is None:
            raise ValueError(
                f"TrainArguments.states_cache: found {self.states_cache!r}, wanted {'none' if live else 'a folder'}, "
                f"as states_source is {self.states_source!r}"
            )
        if self.target_batch_size > 1 and not live:
            raise ValueError(
                f"TrainArguments.target_batch_size: found {self.target_batch_size}, wanted 1, as states_source is "
                f"{self.states_source!r}: kept states depend on the document alone"
            )
        if self.lora_r < 1:
            raise ValueError(f"TrainArguments.lora_r: found {self.lora_r}, wanted at least 1")
        if self.merge_adapter and not self.use_peft:
            raise ValueError("TrainArguments.merge_adapter: found True without use_peft, wanted both")
        if self.held_out < 0:
            raise ValueError(f"TrainArguments.held_out: found {self.held_out}, wanted at least 0")
        if self.held_out and self.eval_data:
            raise ValueError(f"TrainArguments.held_out: found {self.held_out}, wanted 0, as eval_data is given")
