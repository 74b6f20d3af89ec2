"""Train the tiny DeepSeek-V4 target from scratch. Resumes by itself from the newest checkpoint in `--output_dir`.

    python recipes/tiny/train_target.py --config recipes/tiny/target.yaml --data DATA --tokenizer runs/tokenizer

The learning rate is constant after warm-up and falls over the last `lr_scheduler_kwargs.num_decay_steps` steps: a run
can be ended anywhere by restarting it with a smaller `--max_steps`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import transformers.models.deepseek_v4.modeling_deepseek_v4 as deepseek_v4
from data import data_files, load_conversations, tokenize
from transformers import (
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
    GenerationConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint
from trl import TrlParser
from trl.data_utils import pack_dataset

from hyperdflash.utils.provenance import collect_provenance, file_fingerprints, write_provenance


@dataclass
class TargetArguments:
    data: str = field(metadata={"help": "Folder of JSON lines with `messages`."})
    tokenizer: str = field(metadata={"help": "Folder of the tokenizer (`train_tokenizer.py`)."})
    model: dict = field(default_factory=dict, metadata={"help": "Fields of `DeepseekV4Config`."})
    row_length: int = field(
        default=512, metadata={"help": "Tokens in a training row: whole conversations, packed; longer ones are split."}
    )
    held_out: int = field(default=400, metadata={"help": "Rows set aside for the evaluation loss."})
    balance_rate: float = field(default=1e-3, metadata={"help": "Step of the routers' balance bias; 0 leaves it 0."})


class ExpertBalance(TrainerCallback):
    """DeepSeek's auxiliary-loss-free load balancing: after each step every router's correction bias moves one step
    towards the experts that got fewer tokens than the mean (DeepSeek-V3 report, section 2.1.2)."""

    def __init__(self, model: DeepseekV4ForCausalLM, rate: float):
        self.rate = rate
        self.loads = {m: 0 for m in model.modules() if isinstance(m, deepseek_v4.DeepseekV4TopKRouter)}
        for router in self.loads:
            router.register_forward_hook(self.count)

    def count(self, router, args, output):
        if router.training:
            self.loads[router] = self.loads[router] + torch.bincount(output[2].flatten(), minlength=router.num_experts)

    def on_step_end(self, args, state, control, **kwargs):
        for router, load in self.loads.items():
            router.e_score_correction_bias += self.rate * torch.sign(load.float().mean() - load)
            self.loads[router] = 0


def build_target(fields: dict, tokenizer) -> DeepseekV4ForCausalLM:
    """A randomly initialised target; hash-routed layers get a random table of distinct experts per token."""
    config = DeepseekV4Config(
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **fields,
    )
    model = DeepseekV4ForCausalLM(config)
    for module in model.modules():
        if isinstance(module, deepseek_v4.DeepseekV4HashRouter):
            scores = torch.rand(config.vocab_size, module.num_experts)
            module.tid2eid.copy_(scores.topk(module.top_k, dim=-1).indices)
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    return model


class TargetTrainer(Trainer):
    """Evaluates without the compiled layers, which were compiled for training's shape and gradients; and resumes."""

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        # The Trainer of transformers 5.24 reads the config there as a generic one, which refuses V4's MLP layer types
        saved = type(self.model).from_pretrained(resume_from_checkpoint, dtype=torch.float32)
        self.model.load_state_dict(saved.state_dict())

    def evaluate(self, *args, **kwargs):
        with torch.compiler.set_stance("force_eager"):
            return super().evaluate(*args, **kwargs)


def main() -> None:
    args, training_args = TrlParser((TargetArguments, TrainingArguments)).parse_args_and_config()
    set_seed(training_args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    train, held_out = (
        pack_dataset(tokenize(rows, tokenizer, training_args.seed), args.row_length, strategy="bfd_split")
        for rows in load_conversations(args.data, training_args.seed, args.held_out)
    )
    model = build_target(args.model, tokenizer)
    model.set_experts_implementation("grouped_mm")
    # Most of a small target's time goes to small elementwise operations (Sinkhorn iterations, streams): fuse them.
    for layer in model.model.layers:
        layer.compile(dynamic=False)
    tokens = sum(map(len, train["input_ids"]))
    print(
        f"target: {model.num_parameters():,} parameters, {tokens:,} training tokens in {len(train):,} rows", flush=True
    )
    trainer = TargetTrainer(
        model=model,
        args=training_args,
        train_dataset=train.select_columns("input_ids"),
        eval_dataset=held_out.select_columns("input_ids"),
        processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False, pad_to_multiple_of=args.row_length),
        callbacks=[ExpertBalance(model, args.balance_rate)] if args.balance_rate else None,
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(training_args.output_dir))
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    trainer.save_model()
    write_provenance(
        training_args.output_dir,
        collect_provenance(
            data=file_fingerprints(data_files(args.data)),
            seed=training_args.seed,
            steps=trainer.state.global_step,
            tokens=trainer.state.global_step * training_args.train_batch_size * args.row_length,
            held_out_loss=metrics["eval_loss"],
        ),
    )


if __name__ == "__main__":
    main()
