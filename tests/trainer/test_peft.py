"""LoRA on a drafter: what is trained, and that adapter, reloaded adapter and merged drafter are the same drafter."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModel

from hyperdflash.cli import main
from hyperdflash.configuration_hyperdflash import HyperDFlashConfig
from hyperdflash.modeling_hyperdflash import HyperDFlashModel
from hyperdflash.trainer import HyperDFlashTrainer, HyperDFlashTrainingArguments, TrainArguments
from hyperdflash.trainer.adapters import BODY_LINEARS, check_output_kind, lora_config
from hyperdflash.trainer.run import check_mergeable


def options(**changes):
    return TrainArguments(drafter="d", target="t", data="x", use_peft=True, **changes)


def train(folder, settings):
    folder.mkdir(exist_ok=True)
    (folder / "recipe.yaml").write_text(json.dumps(settings))  # JSON is YAML
    return main(["train", "--config", str(folder / "recipe.yaml")])


@pytest.fixture
def lora(settings):
    return settings | {"use_peft": True, "lora_r": 4, "lora_alpha": 16, "learning_rate": 3e-2, "max_steps": 12}


def drafts_and_texts(target, drafter):
    """The accepted drafts of each round and the text, for a few prompts."""
    seen = []
    for seed in range(4):
        prompt = torch.randint(3, 60, (1, 7), generator=torch.Generator().manual_seed(seed))
        text = target.generate(prompt, assistant_model=drafter, max_new_tokens=24, do_sample=False)[0].tolist()
        alone = target.generate(prompt, max_new_tokens=24, do_sample=False)[0].tolist()
        assert text == alone
        seen.append((text, drafter.last_generation.accepted_per_round))
    return seen


def outputs(target, drafter):
    generator = torch.Generator().manual_seed(0)
    config = drafter.config
    blocks = torch.randn(2, config.block_size, config.hidden_size, generator=generator)
    streams = torch.randn(2, 11, config.hc_mult, config.target_hidden_size, generator=generator)
    with torch.no_grad():
        hidden = drafter(noise_embeds=blocks, context_hidden_states=streams).last_hidden_state
        return target.get_output_embeddings()(hidden)  # [b, B, vocab]


@pytest.mark.parametrize(
    ("shape", "rank"),
    [
        pytest.param(
            {
                "hidden_size": 4096,
                "intermediate_size": 12288,
                "num_hidden_layers": 5,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 128,
            },
            16,
            id="V4-Flash",
        ),
        pytest.param(
            {
                "hidden_size": 192,
                "intermediate_size": 768,
                "num_hidden_layers": 3,
                "num_attention_heads": 6,
                "num_key_value_heads": 2,
                "head_dim": 64,
            },
            4,
            id="the tiny pair",
        ),
    ],
)
def test_lora_trains_under_5_percent_of_the_parameters(shape, rank):
    fields = shape | {"hc_mult": 4, "target_hidden_size": shape["hidden_size"], "target_num_hidden_layers": 4}
    with torch.device("meta"):
        drafter = HyperDFlashModel(HyperDFlashConfig(**fields, target_layer_ids=[3], mask_token_id=1, vocab_size=64))
        model = get_peft_model(drafter, lora_config(options(lora_r=rank)), low_cpu_mem_usage=True)
    trained, total = model.get_nb_trainable_parameters()
    width, wide, body = shape["hidden_size"], shape["intermediate_size"], shape["num_hidden_layers"]
    query, key = (shape[name] * shape["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    per_layer = 2 * (width + query) + 2 * (width + key) + 3 * (width + wide)
    reducer = 4 * 4 * width + 4 + 1 + 4 * width  # gates, and the per-path norm
    assert trained == body * rank * per_layer + reducer
    assert trained < 0.05 * total


def test_adapter_reloaded_adapter_and_merged_drafter_draft_alike(lora, target, pair, tmp_path):
    assert train(tmp_path / "a", lora | {"output_dir": str(tmp_path / "adapter")}) == 0
    assert train(tmp_path / "b", lora | {"output_dir": str(tmp_path / "merged"), "merge_adapter": True}) == 0

    base = AutoModel.from_pretrained(pair / "initial")
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    loaded = AutoModel.from_pretrained(pair / "initial")
    loaded.load_adapter(str(tmp_path / "adapter"))
    merged = AutoModel.from_pretrained(tmp_path / "merged").eval()
    again = PeftModel.from_pretrained(AutoModel.from_pretrained(pair / "initial"), tmp_path / "merged" / "adapter")

    wanted, start = outputs(target, adapted), outputs(target, AutoModel.from_pretrained(pair / "initial").eval())
    assert (wanted - start).abs().max() > 0.5  # the adapter does something
    for drafter in (loaded.eval(), merged, again.eval(), again.merge_and_unload().eval()):
        torch.testing.assert_close(outputs(target, drafter), wanted, rtol=1e-4, atol=1e-4)
    assert drafts_and_texts(target, adapted) == drafts_and_texts(target, merged)

    # The merged folder is a drafter's like any other, with the reducer trained, in float32
    names = {path.name for path in (tmp_path / "merged").iterdir()}
    assert names >= {"config.json", "model.safetensors", "modeling_hyperdflash.py", "generation_config.json"}
    assert not names & {"adapter_config.json", "adapter_model.safetensors"}
    weights, initial = (load_file(folder / "model.safetensors") for folder in (tmp_path / "merged", pair / "initial"))
    assert weights.keys() == initial.keys()
    changed = {name for name in weights if not torch.equal(weights[name], initial[name])}
    linears = {name for name in weights if name.split(".")[-2] in BODY_LINEARS}
    assert changed == linears | {name for name in weights if name.startswith("reducer.")}
    assert weights["reducer.hc_fn"].dtype == torch.float32


def test_an_adapters_run_resumes_to_the_bit(lora, tmp_path):
    settings = lora | {"lora_dropout": 0.1, "save_strategy": "steps", "save_steps": 5, "max_steps": 8}
    straight, resumed = (settings | {"output_dir": str(tmp_path / name)} for name in ("straight", "resumed"))
    assert train(tmp_path / "a", straight) == 0
    checkpoint = str(tmp_path / "straight" / "checkpoint-5")
    assert train(tmp_path / "b", resumed | {"resume_from_checkpoint": checkpoint}) == 0
    file = "adapter_model.safetensors"
    found, wanted = (load_file(tmp_path / name / file) for name in ("resumed", "straight"))
    assert found.keys() == wanted.keys() and any("reducer.hc_fn" in name for name in wanted)
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def test_frozen_reducer_and_checkpointed_activations_with_lora(lora, pair, target, make_drafter, tokenizer, documents):
    fields = {
        name: lora[name] for name in ("output_dir", "use_cpu", "bf16", "num_anchors", "save_strategy", "report_to")
    }
    trained = []
    for checkpointing in (False, True):
        arguments = HyperDFlashTrainingArguments(
            **fields, freeze_reducer=True, activation_checkpointing=checkpointing, max_steps=3, disable_tqdm=True
        )
        trainer = HyperDFlashTrainer(
            make_drafter(target),
            target,
            arguments,
            documents(),
            processing_class=tokenizer,
            peft_config=lora_config(options(lora_r=4), freeze_reducer=True),
        )
        trainer.train()
        names = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
        assert names and all("lora_" in name for name in names)
        trained.append({name: value for name, value in trainer.model.named_parameters() if name in names})
    for name, value in trained[0].items():
        torch.testing.assert_close(trained[1][name], value, rtol=1e-5, atol=1e-7)


def test_what_a_drafter_cannot_be_adapted_with_is_refused_by_name(lora, target, make_drafter, tokenizer, documents):
    def make(peft_config, **changes):
        arguments = HyperDFlashTrainingArguments(output_dir=lora["output_dir"], use_cpu=True, bf16=False, **changes)
        drafter = make_drafter(target)
        HyperDFlashTrainer(
            drafter, target, arguments, documents(), processing_class=tokenizer, peft_config=peft_config
        )

    with pytest.raises(ValueError, match="task_type: found 'CAUSAL_LM', wanted None"):
        make(LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="freeze_reducer: found True together with 'reducer'"):
        make(lora_config(options()), freeze_reducer=True)
    with pytest.raises(ValueError, match="target_modules: found 'not_there', wanted some of .*'q_proj'"):
        make(lora_config(options(lora_target_modules=["q_proj", "not_there"])))
    with pytest.raises(ValueError, match="merge_adapter: found True without use_peft"):
        TrainArguments(drafter="d", target="t", data="x", merge_adapter=True)
    with pytest.raises(ValueError, match="lora_r: found 0"):
        options(lora_r=0)


def test_an_adapter_in_pieces_is_not_merged(lora, target, make_drafter, tokenizer, documents):
    arguments = HyperDFlashTrainingArguments(output_dir=lora["output_dir"], use_cpu=True, bf16=False)
    trainer = HyperDFlashTrainer(make_drafter(target), target, arguments, documents(), processing_class=tokenizer)
    with pytest.raises(ValueError, match="found a HyperDFlashModel, wanted a drafter with an adapter"):
        trainer.merge_adapter()
    trainer.model = get_peft_model(trainer.model, lora_config(options()))
    trainer.is_fsdp_enabled = True
    with pytest.raises(ValueError, match="sharded by FSDP"):
        trainer.merge_adapter()
    with pytest.raises(ValueError, match="merge_adapter: found True under FSDP"):
        check_mergeable(options(merge_adapter=True), trainer)


def test_adapter_and_drafter_do_not_share_a_folder(lora, tmp_path, capsys):
    adapter, drafter = tmp_path / "adapter", tmp_path / "drafter"
    for folder, file in ((adapter, "adapter_config.json"), (drafter, "config.json")):
        folder.mkdir()
        (folder / file).write_text(json.dumps({"model_type": "hyperdflash"}))
    check_output_kind(adapter, writes_adapter=True)
    check_output_kind(drafter, writes_adapter=False)
    assert train(tmp_path / "a", lora | {"output_dir": str(drafter)}) == 2
    assert "output_dir: found a drafter" in capsys.readouterr().err
    assert train(tmp_path / "b", lora | {"output_dir": str(adapter), "merge_adapter": True}) == 2
    assert "output_dir: found an adapter" in capsys.readouterr().err
    assert train(tmp_path / "c", lora | {"drafter": str(adapter)}) == 2
    assert "drafter: found an adapter" in capsys.readouterr().err
    assert [path.name for path in Path(adapter).iterdir()] == ["adapter_config.json"]
