"""The card says what was recorded and measured, in a form that the Hub reads, and nothing else."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from huggingface_hub import EvalResult, ModelCard

import hyperdflash
from hyperdflash.cli import main
from hyperdflash.model_card import CardArguments, build_card, run_card


def headings(text):
    return [line[3:] for line in text.splitlines() if line.startswith("## ")]


def test_front_matter_is_what_the_hubs_own_class_reads(pair, results):
    args = CardArguments(
        drafter=str(pair[1]),
        results=str(results),
        base_model="somebody/target",
        base_model_revision="abc123",
        datasets=["somebody/answers"],
        license="apache-2.0",
    )
    card = build_card(args, "somebody/drafter")
    data = ModelCard(str(card)).data
    wanted = {
        "base_model": "somebody/target",
        "base_model_relation": "adapter",
        "library_name": "transformers",
    }
    assert data.to_dict() | wanted == data.to_dict()
    assert (data.pipeline_tag, data.license, data.datasets) == ("text-generation", "apache-2.0", ["somebody/answers"])
    assert data.tags == ["hyperdflash", "dflash", "speculative-decoding"]
    written = yaml.safe_load(str(card).split("---")[1])
    assert written["model-index"][0]["name"] == "drafter" and written["base_model_relation"] == "adapter"
    # Ten rounds, 20 drafts accepted: 1 + 20 / 10; 30 tokens in a third of the target's time
    accepted, speedup = data.eval_results
    assert isinstance(accepted, EvalResult) and (accepted.dataset_type, accepted.dataset_split) == (
        "openai/gsm8k",
        "test",
    )
    assert (accepted.metric_type, accepted.metric_value) == ("accepted_length", 3.0)
    assert (speedup.metric_type, speedup.metric_value) == ("speedup", 3.0)
    assert accepted.metric_name == "Accepted length, non-think, T = 0"


def test_everything_in_it_is_recorded_or_measured(pair, results, tmp_path):
    output = tmp_path / "card" / "README.md"
    output.parent.mkdir()
    args = {"drafter": str(pair[1]), "results": str(results), "base_model": "somebody/target"}
    report = run_card(CardArguments(**args, base_model_revision="abc123", repo_id="me/it", output=str(output)))
    text = output.read_text()
    assert report["sections"] == headings(text)
    assert headings(text) == ["Usage", "Training", "Results", "Limits", "Licence", "Citation"]
    assert "| GSM8K | 2 | 3.00× | 3.00 |" in text and "| non-think | 0 | target | 1.00× | " in text
    assert "2 of 2 are the target's own" in text and "A machine" in text
    first, second = text.index("general.jsonl"), text.index("task.jsonl")
    assert first < second and "max_steps: 77" in text[first:second] and "num_train_epochs: 5" in text[second:]
    assert "1,234 rows" in text and "train_loss: 3.25" in text
    assert 'AutoModel.from_pretrained("me/it", trust_remote_code=True' in text
    assert 'from_pretrained("somebody/target", revision="abc123"' in text
    assert "--to vllm" in text and '"num_speculative_tokens": 6' in text
    assert "![Acceptance by position](figures/acceptance.svg)" in text and "cost" not in report["figures"]
    assert (output.parent / "figures" / "acceptance.svg").read_text() == "<svg/>"
    assert "{{" not in text and "None" not in text and " nan" not in text


def test_what_is_missing_leaves_its_section_out(pair, tmp_path):
    folder = tmp_path / "drafter"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((pair[1] / name).read_bytes())
    assert main(["card", "--drafter", str(folder)]) == 0
    text = (folder / "README.md").read_text()
    assert headings(text) == ["Usage", "Limits", "Licence", "Citation"]
    assert "No results are given" in text and "Weights:" not in text
    front = yaml.safe_load(text.split("---")[1])
    # A path on somebody's machine is no Hub id, though it may look like one
    assert not {"base_model", "base_model_relation", "model-index", "datasets", "license"} & front.keys()


@pytest.mark.parametrize(
    ("settings", "lines"),
    [
        ({"path_norm": "none"}, ["with no norm", "--to vllm"]),
        (
            {"context_source": "multi_layer", "target_layer_ids": [0, 2], "reducer": "fc", "stream_pooling": "mean"},
            ["after the layers 0, 2", "(`fc`) of their mean", "--to dflash", '"kv_cache_dtype": "auto"'],
        ),
        ({"sample_from_anchor": True}, ["drafts 7 tokens"]),
    ],
)
def test_the_card_describes_the_drafter_that_it_is_of(settings, lines, make_drafter, target, tmp_path):
    layers = {"layer_types": None, "sliding_window": None}
    make_drafter(target, **settings, **layers, target_name_or_path="x/y", target_revision="f00").save_pretrained(
        tmp_path
    )
    text = str(build_card(CardArguments(drafter=str(tmp_path))))
    assert all(line in text for line in lines)
    assert ("With vLLM" in text) == (not settings.get("sample_from_anchor"))
    assert ModelCard(text).data.base_model == "x/y" and 'revision="f00"' in text  # recorded with a revision: the Hub's


@pytest.fixture(scope="module")
def checkpoints():
    return Path(hyperdflash.__file__).parent / "checkpoints"


def snippet(text: str) -> str:
    return text.split("```python\n")[1].split("```")[0].replace("max_new_tokens=200", "max_new_tokens=48")


def test_the_cards_example_runs_as_it_stands(checkpoints, monkeypatch, capsys):
    monkeypatch.chdir(checkpoints.parent)
    names = {}
    exec(snippet(str(build_card(CardArguments(drafter="checkpoints/tiny-hyperdflash")))), names)
    text, accepted = capsys.readouterr().out.rsplit("\n", 2)[:2]
    assert "`tail path/to/" in text and float(accepted) > 1.5


def test_the_example_brings_the_chat_form_to_a_target_without_one(checkpoints, tmp_path, monkeypatch, capsys):
    for name in ("tiny-target", "tiny-hyperdflash"):
        shutil.copytree(
            checkpoints / name, tmp_path / name, ignore=shutil.ignore_patterns("chat_template*", "README*")
        )
    config = json.loads((tmp_path / "tiny-hyperdflash" / "config.json").read_text())
    config |= {"target_name_or_path": "tiny-target"}
    (tmp_path / "tiny-hyperdflash" / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    assert main(["card", "--drafter", "tiny-hyperdflash"]) == 0
    names = {}
    exec(snippet((tmp_path / "tiny-hyperdflash" / "README.md").read_text()), names)
    prompt = names["tokenizer"].decode(names["inputs"]["input_ids"][0])
    assert prompt.startswith("<｜begin▁of▁sentence｜><｜User｜>What does") and prompt.endswith(
        "<｜Assistant｜></think>"
    )
    assert "`tail path/to/" in capsys.readouterr().out


def test_a_target_of_a_kind_without_a_chat_form_has_its_own(pair, make_drafter, target, tmp_path):
    layers = {"layer_types": None, "sliding_window": None}
    make_drafter(target, target_model_type="hy_v4", **layers).save_pretrained(tmp_path)
    text = str(build_card(CardArguments(drafter=str(tmp_path))))
    assert "apply_chat_template" in text and "cached_file" not in text


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("provenance.json", "[1]", "provenance.json: found something else, wanted a JSON object"),
        ("provenance.json", '{"earlier": 3}', "provenance.json: found no record that `hyperdflash train` writes"),
        ("provenance.json", '{"training_arguments": {"a": 1}}', "found no record .*KeyError: 'time'"),
        ("report.json", "{}", "report.json: found something else"),
        ("report.json", '{"tables": {}, "settings": {"systems": {}}}', "results: found 0 systems"),
        (
            "report.json",
            '{"tables": {"a": {"0": {}}}, "settings": {"systems": {"x": {}}}}',
            "without what `eval` writes",
        ),
    ],
)
def test_files_that_nobody_of_us_wrote_are_one_line(file, content, message, pair, tmp_path):
    shutil.copytree(pair[1], tmp_path / "drafter")
    results = tmp_path / "drafter" / "results"
    results.mkdir()
    (results / file if file == "report.json" else tmp_path / "drafter" / file).write_text(content)
    options = {"results": str(results), "system": "x" if "x" in content else None} if file == "report.json" else {}
    with pytest.raises(ValueError, match=message):
        build_card(CardArguments(drafter=str(tmp_path / "drafter"), **options))


def change(results, edit):
    report = json.loads((results / "report.json").read_text())
    edit(report)
    (results / "report.json").write_text(json.dumps(report))


def test_results_of_other_weights_are_refused(pair, results):
    args = {"drafter": str(pair[1]), "results": str(results)}
    checkpoint = ["settings", "systems", "HyperDFlash (6)", "checkpoint"]

    def other(report):
        for key in checkpoint:
            report = report[key]
        report["model.safetensors"] = "0"

    change(results, other)
    with pytest.raises(ValueError, match="found 0 systems with the weights"):
        build_card(CardArguments(**args))
    with pytest.raises(ValueError, match="measured with other weights"):
        build_card(CardArguments(**args, system="HyperDFlash (6)"))
    with pytest.raises(ValueError, match="system: found 'MTP'"):
        build_card(CardArguments(**args, system="MTP"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--base_model", "a/b/c"], "base_model: found 'a/b/c', wanted a Hub id"),
        (["--results", "nowhere"], "results: found no report.json in 'nowhere'"),
        (["--system", "x"], "system: found 'x' without results"),
        (["--output", "card.md"], "output: found 'card.md'"),
    ],
)
def test_the_verb_says_in_one_line_what_is_wrong(arguments, message, pair, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "card.md").write_text("mine")
    assert main(["card", "--drafter", str(pair[1]), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and (tmp_path / "card.md").read_text() == "mine"


def test_a_card_is_of_a_drafter(pair):
    with pytest.raises(ValueError, match="found a model of kind 'target'"):
        build_card(CardArguments(drafter=str(pair[0])))
