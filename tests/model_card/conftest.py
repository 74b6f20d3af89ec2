"""A drafter's folder as training leaves it, the target that it is for, and an evaluation of the two."""

import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hyperdflash.evaluation.report import build_report
from hyperdflash.utils.fingerprints import checkpoint_fingerprints

STAGES = [
    {
        "command": ["hyperdflash", "train", "--data", name],
        "time": f"2026-11-{day}T10:00:00+00:00",
        "training_arguments": {"num_train_epochs": 5, "max_steps": steps, "learning_rate": 8e-4},
        "data": {"train_rows": 1234},
        "metrics": {"train_loss": 3.25},
    }
    for name, day, steps in (("general.jsonl", 20, 77), ("task.jsonl", 21, -1))
]


@pytest.fixture(scope="session")
def pair(make_target, make_drafter, tmp_path_factory):
    """(target's folder, drafter's folder)."""
    folder = tmp_path_factory.mktemp("pair")
    target = make_target()
    target.save_pretrained(folder / "target")
    backend = Tokenizer(models.WordLevel({str(index): index for index in range(64)}, unk_token="0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="0", eos_token="1", pad_token="2").save_pretrained(
        folder / "target"
    )
    drafter = make_drafter(target, target_name_or_path="checkpoints/target", sliding_window=None, layer_types=None)
    drafter.save_pretrained(folder / "drafter")
    record = STAGES[1] | {"earlier": [STAGES[0]]}
    (folder / "drafter" / "provenance.json").write_text(json.dumps(record))
    (folder / "drafter" / "optimizer.pt").write_bytes(b"not for the Hub")
    (folder / "drafter" / "training_args.bin").write_bytes(b"not for the Hub")
    return folder / "target", folder / "drafter"


def record(system, identifier, tokens, seconds, **statistics):
    zero = {"rounds": 0, "accepted": 0, "plain_steps": 0, "draft_seconds": 0.0, "verify_seconds": 0.5}
    statistics = zero | {"prefill_seconds": 0.1, "accepted_per_slot": [], "reached_per_slot": []} | statistics
    return {
        **{"task": "gsm8k", "id": identifier, "turn": 0, "turns": 1, "mode": "non-think", "temperature": 0.0},
        **{"system": system, "tokens": tokens, "seconds": seconds, "cpu_seconds": seconds, "identical": True},
        **{"margin": None, "statistics": statistics},
    }


@pytest.fixture
def results(pair, tmp_path):
    """The folder of an evaluation: 2 prompts; the drafter makes 30 tokens in 10 rounds, in a third of the time."""
    label, rounds = "HyperDFlash (6)", {"rounds": 10, "accepted": 20, "draft_seconds": 0.1}
    slots = {"accepted_per_slot": [10, 10, 0, 0, 0, 0], "reached_per_slot": [10, 10, 10, 0, 0, 0]}
    records = [
        each
        for identifier in ("a", "b")
        for each in (
            record("target", identifier, 30, 3.0, plain_steps=29),
            record(label, identifier, 30, 1.0, **rounds, **slots),
        )
    ]
    head = {
        "settings": {
            **{"systems": {"target": {}, label: {"checkpoint": checkpoint_fingerprints(pair[1])}}, "shard": None},
            **{"dtype": "float32", "max_new_tokens": 64, "threads": 1, "device": "cpu"},
        },
        "runs": [
            {"machine": "A machine", "versions": {"torch": torch.__version__}, "command": ["hyperdflash", "eval"]}
        ],
    }
    report = build_report(records, [head], bootstrap=100, seed=0) | {"figures": ["acceptance.png", "acceptance.svg"]}
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "report.json").write_text(json.dumps(report))
    (folder / "acceptance.svg").write_text("<svg/>")
    return folder
