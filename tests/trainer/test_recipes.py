"""The recipes in the repository can be read, and say what the paper says."""

from pathlib import Path

import pytest
import yaml
from trl import TrlParser

from hyperdflash.conversion import InitArguments
from hyperdflash.trainer import HyperDFlashTrainingArguments, TrainArguments

RECIPES = Path(__file__).parents[2] / "recipes"
FLAGS = [
    "--drafter",
    "d",
    "--target",
    "t",
    "--data",
    "x",
    "--output_dir",
    "unused",
    "--use_cpu",
    "true",
    "--bf16",
    "0",
]


def parse(recipe):
    parser = TrlParser((TrainArguments, HyperDFlashTrainingArguments))
    return parser.parse_args_and_config(["--config", str(RECIPES / recipe), *FLAGS])


@pytest.mark.parametrize("stage", [1, 2])
def test_the_mtp_module_is_trained_as_the_drafter_is(stage):
    drafter, mtp = (
        yaml.safe_load((RECIPES / f"tiny/{name}-stage{stage}.yaml").read_text()) for name in ("drafter", "mtp")
    )
    assert mtp == drafter


def test_vanilla_dflash_begins_as_the_drafter_does_but_for_what_it_reads_and_the_head():
    names = ("init", "dflash-init")
    drafter, vanilla = (yaml.safe_load((RECIPES / f"tiny/{name}.yaml").read_text()) for name in names)
    differing = {name for name in drafter | vanilla if drafter.get(name) != vanilla.get(name)}
    reads = {"context_source", "target_layer_ids", "reducer", "stream_pooling", "path_norm"}
    assert differing == reads | {"sequential_head_size"}


@pytest.mark.parametrize("recipe", ["tiny/drafter-stage1.yaml", "tiny/drafter-stage2.yaml"])
def test_recipes_of_the_tiny_pair_are_read(recipe):
    _, arguments = parse(recipe)
    assert arguments.num_anchors == 48


@pytest.mark.parametrize(("recipe", "rate"), [("v4-flash/stage1.yaml", 8e-4), ("v4-flash/stage2.yaml", 1e-4)])
def test_recipes_for_v4_flash_are_the_papers(recipe, rate):
    _, arguments = parse(recipe)
    wanted = {
        "learning_rate": rate,
        "num_train_epochs": 5,
        "warmup_steps": 0.04,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "num_anchors": 512,
        "loss_decay_gamma": 4.0,
        "kl_positions": 2,
        "kl_temperature": 1.0,
        "kl_teacher": "mean",
    }
    assert {name: getattr(arguments, name) for name in wanted} == wanted
    assert 0.1 <= arguments.kl_weight <= 0.2 and arguments.lr_scheduler_type == "cosine"
    processes = yaml.safe_load((RECIPES / "accelerate" / "fsdp2.yaml").read_text())["num_processes"]
    assert arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * processes == 32


def test_the_drafter_for_v4_flash_is_the_papers():
    (arguments,) = TrlParser((InitArguments,)).parse_args_and_config(
        ["--config", str(RECIPES / "v4-flash" / "init.yaml"), "--target", "t", "--output", "o"]
    )
    shape = (arguments.num_hidden_layers, arguments.intermediate_size, arguments.block_size, arguments.mask_token_id)
    assert shape == (5, 12288, 7, 128799)
