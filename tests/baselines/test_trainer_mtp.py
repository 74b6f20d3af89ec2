"""`hyperdflash train` on an MTP module: the loss is the recursion's, and all that the drafters' trainer does holds."""

import json

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hyperdflash.baselines import MtpModel, MtpTrainer
from hyperdflash.trainer import HyperDFlashTrainingArguments, TrainArguments, run_train

DEPTHS = 3


def rows(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    documents = []
    for _ in range(count):
        length = int(torch.randint(16, 28, (1,), generator=generator))
        ids = torch.randint(3, 60, (length,), generator=generator).tolist()
        documents.append({"input_ids": ids, "assistant_masks": [0] * 6 + [1] * (length - 6)})
    return Dataset.from_list(documents)


@pytest.fixture(scope="module")
def tokenizer():
    words = {"<bos>": 0, "<eos>": 1, "<pad>": 2} | {f"w{i}": i for i in range(3, 64)}
    backend = Tokenizer(models.WordLevel(words, unk_token="w3"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        chat_template="{{ bos_token }}",
    )


@pytest.fixture(scope="module")
def folder(target, make_mtp, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mtp")
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    make_mtp(target, mtp_depths=DEPTHS).save_pretrained(folder / "start")
    rows(16).to_json(str(folder / "rows.jsonl"))
    return folder


def train(folder, output, **options):
    source = {name: options.pop(name) for name in list(options) if name in TrainArguments.__dataclass_fields__}
    names = {"drafter": folder / "start", "target": folder / "target", "data": folder / "rows.jsonl"}
    arguments = {name: str(value) for name, value in names.items()} | {"target_dtype": "float32"} | source
    training = {
        "output_dir": str(output),
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": 4,
        "max_steps": 8,
        "num_anchors": 6,
        "learning_rate": 3e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    } | options
    run_train(TrainArguments(**arguments), HyperDFlashTrainingArguments(**training))
    return json.loads((output / "trainer_state.json").read_text())["log_history"][:-1]


def test_training_lowers_the_loss_and_logs_every_depth(folder, tmp_path):
    log = train(folder, tmp_path / "out", max_steps=24, learning_rate=1e-2, kl_weight=0.2, kl_teacher="hc_head")
    assert log[-1]["loss"] < 0.9 * log[0]["loss"]
    assert {f"acceptance_{depth}" for depth in range(1, DEPTHS + 1)} < log[0].keys() and "gate_0" not in log[0]
    trained, start = (MtpModel.from_pretrained(path) for path in (tmp_path / "out", folder / "start"))
    moved = {name for name, value in trained.state_dict().items() if not torch.equal(value, start.state_dict()[name])}
    assert moved == set(start.state_dict())  # the balance of the router among them
    assert json.loads((tmp_path / "out" / "provenance.json").read_text())["data"]["train_rows"] == 16


def trainer_of(target, mtp, tokenizer, tmp_path, **options):
    arguments = HyperDFlashTrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", num_anchors=4, **options
    )
    return MtpTrainer(mtp, target, arguments, train_dataset=rows(2), processing_class=tokenizer)


@pytest.mark.parametrize("off_by", [0, 1])
def test_the_loss_is_the_naive_cross_entropy_of_the_token_after_next(
    target, make_mtp, naive, tokenizer, tmp_path, off_by
):
    mtp = make_mtp(target, mtp_depths=DEPTHS)
    trainer = trainer_of(target, mtp, tokenizer, tmp_path, kl_weight=0.0, loss_decay_gamma=None)
    batch = next(iter(trainer.get_train_dataloader()))
    (batch,), blocks = trainer.get_batch_samples(iter([batch]), 1, torch.device("cpu"))
    with torch.no_grad():
        loss, sums = trainer.compute_loss(trainer.model, dict(batch), return_outputs=True, num_items_in_batch=blocks)
    losses, accepted = [], torch.zeros(DEPTHS)
    for ids, mask, labels, anchors in zip(*(batch[k] for k in ("input_ids", "attention_mask", "labels", "anchors"))):
        ids = ids[: mask.sum()]
        with torch.no_grad():
            streams = trainer.target_states(ids[None], torch.ones_like(ids)[None]).context[0]
            embeds = target.get_input_embeddings()(ids[1:])
        for anchor in anchors[anchors > 0].tolist():
            depths = min(DEPTHS, len(ids) - 1 - anchor)
            outputs = naive(mtp).steps(embeds, streams, anchor - 1, depths)
            logits = outputs @ target.lm_head.weight.double().T
            wanted = torch.tensor([ids[min(anchor + k + off_by, len(ids) - 1)] for k in range(1, depths + 1)])
            assert (labels[anchor + 1 : anchor + 1 + depths] != -100).all()
            losses.append(F.cross_entropy(logits, wanted, reduction="none"))
            accepted[:depths] += (logits.argmax(-1) == wanted).cumprod(0)
    expected = torch.cat(losses).mean()
    if off_by:
        assert (loss - expected).abs() > 1e-2
    else:
        torch.testing.assert_close(loss.double(), expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(sums.accepted, accepted)


def test_kept_states_give_the_losses_of_a_live_target(folder, tmp_path):
    live, filled = (
        train(folder, tmp_path / source, max_steps=3, states_source=source, states_dtype="bfloat16")
        for source in ("live", "fill")
    )
    assert [entry["loss"] for entry in live] == [entry["loss"] for entry in filled]


def test_a_resumed_run_ends_as_the_uninterrupted_one(folder, tmp_path):
    kwargs = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    train(folder, tmp_path / "whole", **kwargs)
    (tmp_path / "cut").mkdir()
    (tmp_path / "whole" / "checkpoint-3").rename(tmp_path / "cut" / "checkpoint-3")
    train(folder, tmp_path / "cut", resume_from_checkpoint="true", **kwargs)
    whole, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"freeze_reducer": True}, "freeze_reducer: found True, wanted False for an MTP module"),
        ({"reducer_learning_rate_factor": 0.1}, "reducer_learning_rate_factor: found 0.1, wanted 1.0"),
        ({"use_peft": True}, "use_peft: found True, wanted False for an MTP module"),
    ],
)
def test_options_of_a_reducer_or_an_adapter_are_refused(folder, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        train(folder, tmp_path / "out", **options)


def test_muon_steps_single_matrices_only(target, mtp, tokenizer, tmp_path):
    """Not the grouped output projection, several matrices in one, and not the experts."""
    trainer = trainer_of(target, mtp, tokenizer, tmp_path, use_muon=True)
    groups = trainer.create_optimizer().param_groups
    muon = {parameter for group in groups if "ns_steps" in group for parameter in group["params"]}
    names = {name for name, parameter in mtp.named_parameters() if parameter in muon}
    assert {"e_proj.weight", "layer.self_attn.q_a_proj.weight", "layer.self_attn.o_b_proj.weight"} < names
    assert not any("o_a_proj" in name or "experts.gate_up_proj" in name or "hc" in name for name in names)


def test_the_balance_counts_no_missing_anchors(target, mtp, tokenizer, tmp_path, monkeypatch):
    """Two of six recursions begin nowhere: in each depth four rows of experts are counted."""
    trainer = trainer_of(target, mtp, tokenizer, tmp_path, max_steps=1, per_device_train_batch_size=2)
    anchors = torch.tensor([[8, 0, 9], [10, 11, 0]])
    monkeypatch.setattr(trainer, "_draw_anchors", lambda *args: anchors)
    monkeypatch.setattr(trainer.balance, "on_step_end", lambda *args, **kwargs: None)  # which begins anew
    trainer.train()
    (load,) = trainer.balance.loads.values()
    assert int(load.sum()) == mtp.config.mtp_depths * 4 * target.config.num_experts_per_tok
