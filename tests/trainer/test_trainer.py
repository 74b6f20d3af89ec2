"""`HyperDFlashTrainer` end to end on tiny models: what TRL prepares, what is logged, how the loss is normalised."""

import json
import os
import subprocess
import sys

import pytest
import torch
from datasets import Dataset
from transformers import AutoModel, TrainerCallback
from trl import TrlParser

from hyperdflash.modeling_hyperdflash import HyperDFlashModel
from hyperdflash.trainer import HyperDFlashTrainer, HyperDFlashTrainingArguments, TrainArguments, attention, run_train
from hyperdflash.trainer.blocks import slot_labels


def arguments(tmp_path, **overrides):
    fields = {
        "output_dir": str(tmp_path),
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": 4,
        "max_steps": 2,
        "num_anchors": 6,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return HyperDFlashTrainingArguments(**fields | overrides)


@pytest.fixture
def make_trainer(target, make_drafter, tokenizer, documents, tmp_path):
    def make(rows=None, drafter=None, eval_dataset=None, callbacks=None, **overrides):
        return HyperDFlashTrainer(
            drafter or make_drafter(target),
            target,
            arguments(tmp_path, **overrides),
            rows or documents(),
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
            callbacks=callbacks,
        )

    return make


def parameters(trainer):
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def test_one_batch_of_16_and_4_accumulated_batches_of_4_train_alike(make_trainer, documents):
    rows = documents(16, low=10, high=60)  # of very different lengths: means of means would not agree
    whole, split = (
        make_trainer(rows, per_device_train_batch_size=size, gradient_accumulation_steps=16 // size, max_steps=3)
        for size in (16, 4)
    )
    start = parameters(whole)
    whole.train(), split.train()
    for name in ("loss", "grad_norm", "ce", "kl", "accepted_length"):
        logs = [[entry[name] for entry in trainer.state.log_history if name in entry] for trainer in (whole, split)]
        assert len(logs[0]) == 3
        assert logs[0] == pytest.approx(logs[1], rel=1e-5), name
    torch.testing.assert_close(parameters(whole), parameters(split), rtol=1e-4, atol=1e-6)
    assert (parameters(whole) - start).abs().max() > 1e-4


def test_the_loss_that_is_logged_is_ce_plus_alpha_kl(make_trainer):
    trainer = make_trainer(kl_weight=0.5)
    trainer.train()
    for entry in trainer.state.log_history[:-1]:
        assert entry["loss"] == pytest.approx(entry["ce"] + 0.5 * entry["kl"], rel=1e-5)
        acceptance = [entry[f"acceptance_{slot}"] for slot in range(1, 7)]
        assert acceptance == sorted(acceptance, reverse=True)
        assert entry["accepted_length"] == pytest.approx(1 + sum(acceptance))
        assert all(0 < entry[f"gate_{path}"] < 1 for path in range(4))


def test_the_teacher_is_the_targets_own_distribution_with_hc_head(make_trainer, target, monkeypatch):
    """With the target's own collapsed, normed state in place of the drafter's output, the divergence is 0."""
    import hyperdflash.trainer.trainer as module

    trainer = make_trainer(kl_teacher="hc_head", kl_positions=6)

    def oracle(model, modules, states, input_ids, anchors):
        collapsed = modules.norm(modules.hc_head(states.residual))  # [b, s, d]
        before_label = anchors.unsqueeze(-1) + torch.arange(6)  # [b, A, D]: slot k predicts a + k from a + k - 1
        before_label = before_label.clamp(max=input_ids.shape[1] - 1)
        return collapsed[torch.arange(len(input_ids))[:, None, None], before_label]

    monkeypatch.setattr(module, "draft_hidden_states", oracle)
    batch = next(iter(trainer.get_train_dataloader()))
    _, sums = trainer.compute_loss(trainer.model, batch, return_outputs=True)
    assert sums.divergence.abs().max() < 1e-4
    trainer.args.kl_teacher = "mean"
    _, sums = trainer.compute_loss(trainer.model, batch, return_outputs=True)
    assert sums.divergence.min() > 1e-2


def test_only_assistant_tokens_are_supervised_in_conversations(make_trainer):
    turns = [("user", "w5 w6 w7"), ("assistant", "w8 w9 w10"), ("user", "w11 w12"), ("assistant", "w13 w14 w15 w16")]
    rows = Dataset.from_list([{"messages": [{"role": role, "content": text} for role, text in turns]}] * 4)
    trainer = make_trainer(rows, num_anchors=20)
    row = trainer.train_dataset[0]
    assert row["input_ids"] == [0, 5, 6, 7, 8, 9, 10, 1, 11, 12, 13, 14, 15, 16, 1]
    assert row["labels"] == [-100] * 4 + [8, 9, 10, 1] + [-100] * 2 + [13, 14, 15, 16, 1]
    (batch,), blocks = trainer.get_batch_samples(iter(trainer.get_train_dataloader()), 1, torch.device("cpu"))
    assert batch["anchors"][0].tolist() == [3, 4, 5, 6, 9, 10, 11, 12, 13]
    counts = slot_labels(batch["labels"], batch["anchors"], trainer.geometry)[1]
    assert blocks.tolist() == counts.sum((0, 1)).tolist()


def test_only_completions_are_supervised_behind_prompts(make_trainer):
    rows = Dataset.from_list([{"prompt": "w5 w6 w7 ", "completion": "w8 w9 w10 w11 "}] * 4)
    trainer = make_trainer(rows)
    assert trainer.train_dataset[0]["labels"][:3] == [-100] * 3
    assert trainer.train_dataset[0]["labels"][3:7] == [8, 9, 10, 11]


def test_evaluation_reports_the_loss_over_all_blocks_and_the_same_anchors_each_time(make_trainer, documents):
    trainer = make_trainer(eval_dataset=documents(7, seed=9), per_device_eval_batch_size=3)
    first, second = trainer.evaluate(), trainer.evaluate()
    assert first["eval_loss"] == second["eval_loss"]
    whole = make_trainer(eval_dataset=documents(7, seed=9), per_device_eval_batch_size=7).evaluate()
    for name in ("eval_loss", "eval_ce", "eval_kl", "eval_accepted_length", "eval_acceptance_1"):
        assert first[name] == pytest.approx(whole[name], rel=1e-5)


def test_a_resumed_run_draws_the_same_anchors_and_ends_with_the_same_weights(make_trainer, tmp_path):
    straight = make_trainer(max_steps=4, save_strategy="steps", save_steps=2)
    straight.train()
    resumed = make_trainer(max_steps=4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert torch.equal(parameters(straight), parameters(resumed))


def test_the_reducer_has_its_own_learning_rate_or_none(make_trainer, target, make_drafter):
    trainer = make_trainer(reducer_learning_rate_factor=0.1)
    groups = trainer.create_optimizer().param_groups
    rates = {id(parameter): group["lr"] for group in groups for parameter in group["params"]}
    assert len(rates) == sum(1 for _ in trainer.model.parameters())
    for name, parameter in trainer.model.named_parameters():
        assert rates[id(parameter)] == pytest.approx(1e-4 if name.startswith("reducer.") else 1e-3)
    frozen = make_trainer(freeze_reducer=True)
    before = {name: value.clone() for name, value in frozen.model.named_parameters()}
    frozen.train()
    changed = {name for name, value in frozen.model.named_parameters() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if not name.startswith("reducer.")}


def test_muon_steps_the_linear_layers_and_adamw_the_rest(make_trainer, target, make_drafter):
    """Two optimizers of torch, each over its own parameters of a copy of the drafter, step it alike."""
    drafter = make_drafter(target, sequential_head_size=16)
    copy = HyperDFlashModel(drafter.config)
    copy.load_state_dict(drafter.state_dict())
    trainer = make_trainer(drafter=drafter, use_muon=True, weight_decay=0.1)
    optimizer = trainer.create_optimizer()
    linears = {f"{name}.weight" for name, module in copy.named_modules() if isinstance(module, torch.nn.Linear)}
    assert len(linears) == 7 * copy.config.num_hidden_layers + 2
    named = dict(copy.named_parameters())
    muon = torch.optim.Muon(
        [named[name] for name in sorted(linears)], lr=1e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    decayed = set(trainer.get_decay_parameter_names(copy))
    groups = [
        {"params": [value for name, value in named.items() if name not in linears and (name in decayed) == decays]}
        | {"weight_decay": 0.1 if decays else 0.0}
        for decays in (True, False)
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for name, parameter in drafter.named_parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            named[name].grad = parameter.grad.clone()
        optimizer.step(), muon.step(), adamw.step()
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(parameter, named[name], rtol=1e-5, atol=1e-7, msg=name)


def test_a_run_with_muon_resumes_to_the_same_weights(make_trainer, tmp_path):
    fields = {"use_muon": True, "max_steps": 4, "lr_scheduler_type": "linear"}
    straight = make_trainer(save_strategy="steps", save_steps=2, **fields)
    straight.train()
    resumed = make_trainer(**fields)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert torch.equal(parameters(straight), parameters(resumed))
    assert {group["lr"] for group in straight.optimizer.param_groups} == {0.0}  # the schedule reaches both


@pytest.mark.parametrize(
    "schedule, options", [("polynomial", {"lr_end": 1e-5}), ("cosine_with_min_lr", {"min_lr_rate": 0.1})]
)
def test_schedules_that_ask_the_optimizer_for_its_rate_run_with_muon(make_trainer, schedule, options):
    trainer = make_trainer(use_muon=True, lr_scheduler_type=schedule, lr_scheduler_kwargs=options, max_steps=2)
    trainer.train()
    rates = {group["lr"] for group in trainer.optimizer.param_groups}
    assert len(rates) == 1 and 0 < rates.pop() < 1e-3


def test_muon_is_refused_where_matrices_are_sharded(make_trainer):
    trainer = make_trainer(use_muon=True)
    trainer.is_fsdp_enabled = True
    with pytest.raises(ValueError, match="use_muon: found True beside FSDP or DeepSpeed, wanted False"):
        trainer.create_optimizer()


def test_muon_is_refused_beside_an_optimizer_of_the_callers(target, make_drafter, tokenizer, documents, tmp_path):
    drafter = make_drafter(target)
    with pytest.raises(ValueError, match="use_muon: found True beside an optimizer of the caller's"):
        HyperDFlashTrainer(
            drafter,
            target,
            arguments(tmp_path, use_muon=True),
            documents(),
            processing_class=tokenizer,
            optimizers=(torch.optim.SGD(drafter.parameters(), lr=0.1), None),
        )


def test_bfloat16_autocast_keeps_the_gates_in_float32(make_trainer):
    trainer = make_trainer(bf16=True)
    trainer.train()
    assert trainer.model.reducer.hc_fn.dtype == torch.float32
    exact = make_trainer(bf16=False)
    exact.train()
    first, wanted = trainer.state.log_history[0], exact.state.log_history[0]
    assert first["loss"] == pytest.approx(wanted["loss"], rel=2e-2)
    assert [first[f"gate_{path}"] for path in range(4)] == pytest.approx([wanted[f"gate_{path}"] for path in range(4)])


def test_gradient_checkpointing_changes_nothing(make_trainer):
    plain, checkpointed = make_trainer(), make_trainer(activation_checkpointing=True)
    plain.train(), checkpointed.train()
    torch.testing.assert_close(parameters(plain), parameters(checkpointed), rtol=1e-5, atol=1e-7)


def test_block_sparse_attention_trains_as_the_dense_mask_and_leaves_the_drafters_implementation(
    make_trainer, target, make_drafter, documents, monkeypatch
):
    masks = []
    make_mask = attention.BlockSparseMask.of
    monkeypatch.setattr(attention.BlockSparseMask, "of", lambda *args: masks.append(args) or make_mask(*args))
    found = {}
    for name in ("eager", "sdpa"):
        drafter = make_drafter(target)
        drafter.set_attn_implementation(name)
        trainer = make_trainer(drafter=drafter, eval_dataset=documents(4), loss_chunk_size=5)
        trainer.train()
        found[name] = parameters(trainer), trainer.evaluate()["eval_loss"]
        assert drafter.config._attn_implementation == name
        assert len(masks) == (0 if name == "eager" else 2 * 3)  # a mask a layer type; 2 steps and 1 evaluation
    torch.testing.assert_close(found["sdpa"][0], found["eager"][0], rtol=1e-4, atol=1e-6)
    assert found["sdpa"][1] == pytest.approx(found["eager"][1], rel=1e-5)


def target_texts(target, count=8, length=40):
    """Greedy texts that the target wrote."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for _ in range(count):
        prompt = torch.randint(3, 60, (1, 6), generator=generator)
        text = target.generate(prompt, max_new_tokens=length, do_sample=False)[0].tolist()
        rows.append({"input_ids": text, "assistant_masks": [0] * 6 + [1] * length})
    return Dataset.from_list(rows)


def test_train_save_load_generate(target, make_drafter, tokenizer, tmp_path):
    """The verb's function on folders: the loss falls, drafts get accepted, the folder is complete and loads."""
    rows = target_texts(target)
    rows.to_json(str(tmp_path / "rows.jsonl"))
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    make_drafter(target).save_pretrained(tmp_path / "initial")
    recipe = tmp_path / "recipe.yaml"
    settings = {
        "drafter": str(tmp_path / "initial"),
        "target": str(tmp_path / "target"),
        "data": str(tmp_path / "rows.jsonl"),
        "eval_data": str(tmp_path / "rows.jsonl"),
        "target_dtype": "float32",
        "output_dir": str(tmp_path / "out"),
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": 8,
        "max_steps": 60,
        "num_anchors": 16,
        "learning_rate": 3e-3,
        "logging_steps": 5,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    recipe.write_text(json.dumps(settings))  # JSON is YAML
    parser = TrlParser((TrainArguments, HyperDFlashTrainingArguments))
    script_args, training_args = parser.parse_args_and_config(["--config", str(recipe), "--kl_weight", "0.2"])
    assert training_args.kl_weight == 0.2 and training_args.warmup_steps == 0.04
    metrics = run_train(script_args, training_args)

    history = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"]
    losses = [entry["loss"] for entry in history if "loss" in entry]
    assert losses[-1] < 0.7 * losses[0]
    assert metrics["eval_accepted_length"] > 1.5

    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {
        "config.json",
        "model.safetensors",
        "generation_config.json",
        "configuration_hyperdflash.py",
        "modeling_hyperdflash.py",
        "generation_hyperdflash.py",
        "provenance.json",
    }
    record = json.loads((tmp_path / "out" / "provenance.json").read_text())
    assert record["seed"] == training_args.seed and record["data"]["train_files"].keys() == {"rows.jsonl"}
    assert record["training_arguments"]["kl_weight"] == 0.2

    initial, trained = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("initial", "out"))
    special = ("bos_token_id", "eos_token_id", "pad_token_id")  # the Trainer copies the tokenizer's
    assert {k: v for k, v in trained.items() if k not in special} == {
        k: v for k, v in initial.items() if k not in special
    }

    drafter = AutoModel.from_pretrained(tmp_path / "out")
    assert isinstance(drafter, HyperDFlashModel)
    statistics = []
    for row in rows["input_ids"]:
        text = target.generate(torch.tensor([row[:6]]), assistant_model=drafter, max_new_tokens=40, do_sample=False)
        assert text[0].tolist() == row
        statistics.append(drafter.last_generation)
    assert sum(statistics[1:], statistics[0]).accepted_length > 1.25


def test_gates_are_logged_over_all_tokens_of_all_documents(make_trainer, documents):
    rows = documents(12, low=10, high=60)
    trainer = make_trainer(rows, per_device_train_batch_size=4, max_steps=3, logging_steps=3, learning_rate=0.0)
    trainer.train()
    gates = []
    for row in rows["input_ids"]:  # every row once, alone
        ids = torch.tensor([row])
        context = trainer.target_states(ids, torch.ones_like(ids)).context
        gates.append(trainer.model.reducer.gates(context)[0].detach())
    wanted = torch.cat(gates).mean(dim=0).tolist()
    logged = [trainer.state.log_history[0][f"gate_{path}"] for path in range(4)]
    assert logged == pytest.approx(wanted, rel=1e-5)
    assert trainer.state.log_history[0]["num_tokens"] == sum(map(len, rows["input_ids"]))


def test_rows_without_a_block_are_not_seen_however_batches_are_split(make_trainer, documents):
    rows = documents(8, low=10, high=60).to_list()
    for row in rows[::3]:  # the second token alone is supervised: no block can start before it
        row["assistant_masks"] = [0, 1] + [0] * (len(row["input_ids"]) - 2)
    rows, logs = Dataset.from_list(rows), []
    for size in (1, 4):
        split = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 8 // size}
        trainer = make_trainer(rows, max_steps=1, logging_steps=1, learning_rate=0.0, **split)
        trainer.train()
        logs.append(trainer.state.log_history[0])
    seen = sum(len(row["input_ids"]) for index, row in enumerate(rows) if index % 3)
    assert [log["num_tokens"] for log in logs] == [seen, seen]
    assert logs[0]["gate_0"] == pytest.approx(logs[1]["gate_0"], rel=1e-5)


def test_a_token_that_the_target_does_not_have_is_named_before_training(make_trainer, documents):
    rows = documents(6).to_list()
    rows[4]["input_ids"][9] = 64
    with pytest.raises(ValueError, match="train_dataset: row 4: found the token id 64, wanted ids from 0 to 63"):
        make_trainer(Dataset.from_list(rows))
    rows[4]["input_ids"][9] = 5
    rows[0]["input_ids"][0] = -1
    with pytest.raises(ValueError, match="row 0: found the token id -1"):
        make_trainer(Dataset.from_list(rows))


def test_rows_without_anything_to_draft_are_refused_before_training(make_trainer, documents):
    rows = documents(3).to_list()
    for row in rows:  # the second token alone: no block can start before it, as the context would be empty
        row["assistant_masks"] = [0, 1] + [0] * (len(row["input_ids"]) - 2)
    with pytest.raises(ValueError, match="found 0 blocks to draft in 3 rows"):
        make_trainer(Dataset.from_list(rows))
    rows[1]["assistant_masks"][2] = 1
    make_trainer(Dataset.from_list(rows))


def test_streamed_rows_are_checked_as_they_come(make_trainer, documents):
    good, bad = documents(4).to_list(), documents(4).to_list()
    bad[3]["input_ids"][7] = 99
    trainer = make_trainer(Dataset.from_list(good + bad).to_iterable_dataset(), max_steps=2)
    with pytest.raises(ValueError, match="step 2: found the token id 99"):
        trainer.train()
    for row in bad:
        row["input_ids"][7] = 9
        row["assistant_masks"] = [0, 1] + [0] * (len(row["input_ids"]) - 2)
    trainer = make_trainer(Dataset.from_list(good + bad).to_iterable_dataset(), max_steps=2)
    with pytest.raises(ValueError, match="step 2: found 0 blocks"):
        trainer.train()


def test_what_is_logged_reaches_every_reporter(make_trainer, documents):
    """trackio, tensorboard and wandb are callbacks of the Trainer: they get `logs` as this one does."""

    class Reporter(TrainerCallback):
        def __init__(self):
            self.logs = []

        def on_log(self, args, state, control, logs=None, **kwargs):
            self.logs.append(dict(logs))

    reporter = Reporter()
    trainer = make_trainer(
        eval_dataset=documents(4, seed=5), callbacks=[reporter], eval_strategy="steps", eval_steps=2
    )
    trainer.train()
    slots, paths = range(1, 7), range(4)
    names = {"ce", "kl", "accepted_length", *(f"acceptance_{k}" for k in slots), *(f"gate_{j}" for j in paths)}
    assert {"loss", "grad_norm", "learning_rate", "num_tokens"} | names <= reporter.logs[0].keys()
    (evaluation,) = (logs for logs in reporter.logs if "eval_loss" in logs)
    assert {f"eval_{name}" for name in names} <= evaluation.keys()


@pytest.mark.parametrize(
    "field, value",
    [
        ("num_anchors", 0),
        ("loss_decay_gamma", 0.0),
        ("kl_weight", -0.1),
        ("kl_positions", 0),
        ("kl_temperature", 0.0),
        ("kl_teacher", "median"),
        ("loss_chunk_size", 0),
        ("reducer_learning_rate_factor", 0.0),
        ("packing", True),
        ("padding_free", True),
        ("loss_type", "dft"),
        ("label_smoothing_factor", 0.1),
        ("neftune_noise_alpha", 5.0),
        ("chat_template_path", "some/tokenizer"),
        ("bf16_full_eval", True),
    ],
)
def test_arguments_that_make_no_objective_are_refused_by_name(field, value, tmp_path):
    with pytest.raises(ValueError, match=rf"{field}: found {value!r}, wanted"):
        arguments(tmp_path, **{field: value})


def test_a_drafter_that_does_not_fit_is_refused_by_name(make_trainer, make_target, make_drafter):
    with pytest.raises(ValueError, match="hc_mult: found 4, wanted 2|vocab_size"):
        make_trainer(drafter=make_drafter(make_target(vocab_size=80)))
    with pytest.raises(ValueError, match="kl_positions: found 7, wanted at most 6"):
        make_trainer(kl_positions=7)


def test_geometry_and_losses_import_without_trl():
    code = "import sys, hyperdflash.trainer.blocks, hyperdflash.trainer.losses; sys.exit('trl' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ).returncode == 0
