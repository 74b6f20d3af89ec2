"""Two processes train as one does with the same rows a step, through the verb that a user runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hyperdflash.cli import main
from hyperdflash.trainer.sampling import SeededLengthGroupedSampler, drop_repeated_rows

TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc_per_node", "2")


def launch(folder, settings, launcher=TORCHRUN, program=("-m", "hyperdflash.cli")):
    """Runs `hyperdflash train` in two processes on the CPU, and returns what they print."""
    (folder / "recipe.yaml").write_text(json.dumps(settings))  # JSON is YAML
    command = [sys.executable, "-m", *launcher, *program, "train", "--config", str(folder / "recipe.yaml")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CI": "1", "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


def history(output):
    return json.loads((Path(output) / "trainer_state.json").read_text())["log_history"]


def assert_alike(output, other, rel):
    """Loss curve, logged metrics, held-out metrics and weights of two runs, relative to their size."""
    for entry, wanted in zip(history(output), history(other), strict=True):
        for name in wanted.keys() - {key for key in wanted if "second" in key or "runtime" in key}:
            assert entry[name] == pytest.approx(wanted[name], rel=rel, abs=rel), (name, wanted["step"])
    weights, wanted = (load_file(Path(folder) / "model.safetensors") for folder in (output, other))
    assert weights.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (weights[name] - value).norm() <= rel * value.norm(), name


@pytest.fixture(scope="module")
def single(pair, tmp_path_factory):
    """The settings of 50 steps and an evaluation, and the folder where one process has run them.

    43 rows of very different lengths make 5 whole steps of 8 rows and one of 3 in an epoch, which leaves the second
    of two processes without a row; the last of the held-out batches does so too.
    """
    settings = {
        "drafter": str(pair / "initial"),
        "target": str(pair / "target"),
        "data": str(pair / "rows.jsonl"),
        "eval_data": str(pair / "held_out.jsonl"),
        "target_dtype": "float32",
        "states_dtype": "float32",  # through bfloat16 states the reducer's output would be rounded, and rounding jumps
        "output_dir": str(tmp_path_factory.mktemp("single")),
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 4,
        "max_steps": 50,
        "num_anchors": 6,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    (Path(settings["output_dir"]) / "recipe.yaml").write_text(json.dumps(settings))
    assert main(["train", "--config", str(Path(settings["output_dir"]) / "recipe.yaml")]) == 0
    return settings


def test_two_processes_train_as_one(single, tmp_path):
    settings = single | {"output_dir": str(tmp_path / "out"), "per_device_train_batch_size": 4}
    printed = launch(tmp_path, settings)
    assert_alike(tmp_path / "out", single["output_dir"], rel=1e-4)
    assert json.loads(printed[printed.index("{\n") :])["eval_loss"] > 0  # behind the log, one process's JSON
    record = json.loads((tmp_path / "out" / "provenance.json").read_text())
    assert record["batch"] == {"rows_per_step": 8, "processes": 2}


# accelerate switches FSDP on for GPUs and their like only: it is told that the two CPU processes are GPUs
FSDP_ON_CPU = """
import os
import sys
from accelerate import DistributedType, PartialState
from accelerate.state import AcceleratorState

def init(self, *args, original=PartialState.__init__, **kwargs):
    fresh = not self._shared_state
    original(self, *args, **kwargs)
    if fresh:
        self.distributed_type = DistributedType.MULTI_GPU

PartialState.__init__ = init

from hyperdflash.cli import main

code = main(sys.argv[1:])
print("ran as", AcceleratorState().distributed_type, AcceleratorState().fsdp_plugin.fsdp_version, flush=True)
os._exit(code)  # gloo, which FSDP is not meant for, aborts a process now and then whose threads it ends
"""


def test_the_fsdp2_recipe_trains_as_one_process(single, tmp_path):
    settings = single | {"output_dir": str(tmp_path / "out"), "per_device_train_batch_size": 4}
    (tmp_path / "program.py").write_text(FSDP_ON_CPU)
    recipe = Path(__file__).parents[2] / "recipes" / "accelerate" / "fsdp2.yaml"
    options = ["--config_file", str(recipe), "--num_processes", "2", "--main_process_port", "0"]
    launcher = ["accelerate.commands.launch", *options]
    assert "ran as DistributedType.FSDP 2" in launch(tmp_path, settings, launcher, [str(tmp_path / "program.py")])
    assert_alike(tmp_path / "out", single["output_dir"], rel=1e-4)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["HyperDFlashModel"]
    assert config["auto_map"]["AutoModel"] == "modeling_hyperdflash.HyperDFlashModel"
    assert (tmp_path / "out" / "modeling_hyperdflash.py").is_file()


@pytest.mark.parametrize("rows", [1, 3, 8, 13, 17, 23, 24])
def test_every_row_counts_once_in_an_epoch(rows):
    """Against accelerate's own sharding of an epoch over 3 processes, which repeats rows to fill up the last step."""
    from accelerate.data_loader import BatchSamplerShard
    from torch.utils.data import BatchSampler

    shards = [BatchSamplerShard(BatchSampler(range(rows), 4, False), 3, process) for process in range(3)]
    seen = []
    for process, shard in enumerate(shards):
        batches = [{"input_ids": torch.tensor(batch)[:, None]} for batch in shard]
        for batch in batches:
            batch["labels"] = batch["input_ids"]
        batches[-1] = drop_repeated_rows(batches[-1], rows, process, 3, 4)
        assert all(len(batch["labels"]) for batch in batches)
        seen += [row for batch in batches for row in batch["labels"].flatten().tolist() if row != -100]
    assert sorted(seen) == list(range(rows))


def test_the_length_grouped_order_depends_on_seed_and_epoch_alone():
    lengths = torch.randint(5, 50, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    sampler, other = (SeededLengthGroupedSampler(8, lengths, seed=3) for _ in range(2))
    first = list(sampler)
    torch.rand(1)  # the process's own random numbers do not matter
    assert list(other) == first and sorted(first) == list(range(200))
    sampler.set_epoch(1)
    assert list(sampler) != first
    other.set_epoch(1)
    assert list(sampler) == list(other) != list(SeededLengthGroupedSampler(8, lengths, seed=5))
