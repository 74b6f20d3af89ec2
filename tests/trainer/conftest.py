"""What the trainer's tests share: a tokenizer of 64 words, documents of random tokens, and a pair in folders."""

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hyperdflash.generation_hyperdflash import install_hooks

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + ' ' + eos_token }}{% endgeneration %}"
    "{% else %}{{ ' ' + message['content'] + ' ' }}{% endif %}{% endfor %}"
)


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("CI", "1")  # no telemetry
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    install_hooks()


@pytest.fixture(scope="session")
def tokenizer():
    words = {"<bos>": 0, "<eos>": 1, "<pad>": 2} | {f"w{i}": i for i in range(3, 64)}
    backend = Tokenizer(models.WordLevel(words, unk_token="w3"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", chat_template=CHAT_TEMPLATE
    )


def documents_of(count=16, seed=0, low=24, high=40):
    """Pre-tokenised rows: a prompt of 6 tokens, and an answer."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        length = int(torch.randint(low, high, (1,), generator=generator))
        ids = torch.randint(3, 60, (length,), generator=generator).tolist()
        rows.append({"input_ids": ids, "assistant_masks": [0] * 6 + [1] * (length - 6)})
    return Dataset.from_list(rows)


@pytest.fixture(scope="session")
def documents():
    return documents_of


@pytest.fixture(scope="session")
def pair(target, make_drafter, tokenizer, tmp_path_factory):
    """A folder with `target`, `initial`, 43 rows in `rows.jsonl` and 7 in `held_out.jsonl`."""
    folder = tmp_path_factory.mktemp("pair")
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    make_drafter(target).save_pretrained(folder / "initial")
    documents_of(43, low=10).to_json(str(folder / "rows.jsonl"))
    documents_of(7, seed=9, low=10).to_json(str(folder / "held_out.jsonl"))
    return folder


@pytest.fixture
def settings(pair, tmp_path):
    """The options of `hyperdflash train` for this pair on a CPU, as a dict to be changed: 8 rows a step."""
    return {
        "drafter": str(pair / "initial"),
        "target": str(pair / "target"),
        "data": str(pair / "rows.jsonl"),
        "target_dtype": "float32",
        "output_dir": str(tmp_path / "out"),
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": 8,
        "num_train_epochs": 20,
        "num_anchors": 6,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
