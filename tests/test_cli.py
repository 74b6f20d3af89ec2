"""The `hyperdflash` command, on the embedded pair."""

import io
import json
import shutil
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hyperdflash.cli import EMBEDDED_DRAFTER, EMBEDDED_TARGET, main

PROMPT = "What does the command `tail` do, and how do I use it?"
PAIR = ["--target", str(EMBEDDED_TARGET), "--drafter", str(EMBEDDED_DRAFTER), "--dtype", "float32"]


@pytest.fixture(scope="module")
def target_text():
    """What the embedded target writes on its own, greedily."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_TARGET)
    target = AutoModelForCausalLM.from_pretrained(EMBEDDED_TARGET, dtype=torch.float32)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    output = target.generate(**inputs, do_sample=False, max_new_tokens=48)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = main(list(argv))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def run_json(capsys, *argv: str) -> dict:
    code, out, err = run(capsys, *argv, "--json")
    assert code == 0, err
    return json.loads(out)


def test_demo_reports_identical_texts_accepted_length_and_speed(capsys):
    report = run_json(capsys, "demo", "--prompts", "2", "--max_new_tokens", "48")
    assert report["identical"] == report["prompts"] == 2
    assert 1 < report["accepted_length"] <= 7
    assert report["accepted_length"] == pytest.approx(1 + sum(report["acceptance_per_slot"]))
    assert report["speedup"] == pytest.approx(
        report["drafted_tokens_per_second"] / report["target_only_tokens_per_second"]
    )


def test_demo_is_plain_where_there_is_no_terminal(capsys):
    code, out, _ = run(capsys, "demo", "--prompts", "1", "--max_new_tokens", "24")
    assert code == 0
    assert "\x1b" not in out
    assert "accepted length" in out and "identical texts" in out and "1 of 1" in out


def test_demo_marks_drafted_tokens_in_colour_on_a_terminal():
    script = (
        "from rich.console import Console\n"
        "from transformers import AutoTokenizer\n"
        "import torch\n"
        "from hyperdflash.cli import EMBEDDED_TARGET, MarkedStreamer\n"
        "tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_TARGET)\n"
        "ids = tokenizer('one two three four five')['input_ids']\n"
        "streamer = MarkedStreamer(tokenizer, Console(force_terminal=True, color_system='standard', width=200))\n"
        "for chunk in ([[0]], ids[:1], ids[1:4], ids[4:]):\n"
        "    streamer.put(torch.tensor(chunk))\n"
        "streamer.end()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "\x1b[32m" in done.stdout
    plain = done.stdout.replace("\x1b[32m", "").replace("\x1b[0m", "")
    assert plain.strip() == "one two three four five"


@pytest.mark.parametrize("source", ["argument", "file", "stdin"])
def test_generate_takes_the_prompt_from_argument_file_or_stdin(capsys, monkeypatch, tmp_path, target_text, source):
    (tmp_path / "prompt.txt").write_text(PROMPT, encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    prompt = {
        "argument": ["--prompt", PROMPT],
        "file": ["--prompt_file", str(tmp_path / "prompt.txt")],
        "stdin": ["--prompt", "-"],
    }[source]
    report = run_json(capsys, "generate", *PAIR, *prompt, "--max_new_tokens", "48")
    assert report["text"] == target_text
    assert report["statistics"]["new_tokens"] == report["new_tokens"]


def test_generate_streams_the_text_that_json_reports(capsys, target_text):
    code, out, err = run(capsys, "generate", *PAIR, "--prompt", PROMPT, "--max_new_tokens", "48")
    assert code == 0
    assert out.strip() == target_text.strip()
    assert "accepted length" in err


def test_generate_without_a_drafter_is_the_target_alone(capsys, target_text):
    report = run_json(capsys, "generate", "--dtype", "float32", "--prompt", PROMPT, "--max_new_tokens", "48")
    assert report["text"] == target_text
    assert report["statistics"] is None


def test_fewer_draft_tokens_give_the_same_text(capsys, target_text):
    report = run_json(
        capsys, "generate", *PAIR, "--prompt", PROMPT, "--max_new_tokens", "48", "--num_draft_tokens", "2"
    )
    assert report["text"] == target_text
    assert report["statistics"]["num_draft_tokens"] == 2


def test_sampling_is_reproducible_by_its_seed(capsys):
    argv = ["generate", *PAIR, "--prompt", PROMPT, "--max_new_tokens", "24", "--temperature", "1"]
    texts = [run_json(capsys, *argv, "--seed", seed)["text"] for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]


def test_options_come_from_a_file_and_flags_go_over_it(capsys, tmp_path, target_text):
    config = tmp_path / "generate.yaml"
    config.write_text(f"prompt: {json.dumps(PROMPT)}\nmax_new_tokens: 5\ndtype: float32\n", encoding="utf-8")
    report = run_json(capsys, "generate", "--config", str(config), "--max_new_tokens", "48")
    assert report["text"] == target_text


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["fly"], "verb: found 'fly'"),
        (["generate"], "prompt"),
        (["generate", "--prompt", "a", "--prompt_file", "b"], "prompt"),
        (["generate", "--prompt_file", "./no/such/file"], "no/such/file"),
        (["generate", "--prompt", "a", "--target", "./no/such/target"], "target"),
        (["generate", "--prompt", "a", "--drafter", "./no/such/drafter"], "drafter"),
        (["generate", "--prompt", "a", "--dtype", "int3"], "dtype"),
        (["generate", "--prompt", "a", "--temperature", "-1"], "temperature"),
        (["generate", "--prompt", "a", "--temperature", "nan"], "temperature"),
        (["generate", "--prompt", "a", "--top_p", "7"], "top_p"),
        (["generate", "--prompt", "a", "--num_draft_tokens", "3"], "num_draft_tokens"),
        (["generate", "--prompt", "", "--raw"], "prompt"),
        (["generate", "--prompt", "a", "--device", "no-such-device"], "device"),
        (["generate", "--prompt", "a", "--drafter", str(EMBEDDED_TARGET)], "drafter: found model_type 'deepseek_v4'"),
        (["generate", "--prompt", "a", "--target", str(EMBEDDED_DRAFTER)], "target: found model_type 'hyperdflash'"),
        (["demo", "--prompts", "0"], "prompts"),
        (["generate", "--prompt", "a", "--max_new_tokens", "0"], "max_new_tokens"),
        (["init", "--target", "./no/such/target", "--output", "out"], "no/such/target"),
        (["generate", "--prompt", "a", "--config"], "config: found nothing"),
        (["generate", "--promt", "a"], "--promt: found no such option, wanted --prompt"),
        (["train", "--target", "a"], "required: --drafter"),
    ],
)
def test_bad_input_is_one_line_that_names_the_field_and_exit_code_2(capsys, argv, named):
    code, out, err = run(capsys, *argv)
    assert code == 2
    assert out == ""
    assert named in err and err.startswith("hyperdflash") and err.count("\n") == 1


def test_more_drafts_than_the_block_holds_are_refused(capsys):
    code, _, err = run(capsys, "generate", *PAIR, "--prompt", "a", "--num_draft_tokens", "7")
    assert code == 2 and "num_draft_tokens: found 7, wanted 1 to 6" in err


def test_a_truncated_checkpoint_is_one_line_as_well(capsys, tmp_path):
    shutil.copytree(EMBEDDED_DRAFTER, tmp_path / "drafter")
    weights = tmp_path / "drafter" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    code, _, err = run(capsys, "generate", *PAIR[:2], "--drafter", str(tmp_path / "drafter"), "--prompt", "a")
    assert code == 2
    assert err.splitlines()[-1].startswith("hyperdflash generate: error:")


def test_init_train_and_generate_follow_each_other(capsys, tmp_path, target_text):
    start, output, data = tmp_path / "start", tmp_path / "drafter", tmp_path / "rows.jsonl"
    row = {"messages": [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": target_text}]}
    data.write_text("\n".join([json.dumps(row)] * 4), encoding="utf-8")
    code, out, err = run(
        capsys, "init", "--target", str(EMBEDDED_TARGET), "--output", str(start), "--intermediate_size", "64"
    )
    assert code == 0, err
    assert json.loads(out)["reducer"] == "hc_gate"
    code, _, err = run(
        capsys,
        *("train", "--drafter", str(start), "--target", str(EMBEDDED_TARGET), "--data", str(data)),
        *("--output_dir", str(output), "--max_steps", "2", "--per_device_train_batch_size", "2", "--num_anchors", "4"),
        *("--report_to", "none", "--save_strategy", "no"),
    )
    assert code == 0, err
    shutil.rmtree(start)
    report = run_json(
        capsys,
        *("generate", "--target", str(EMBEDDED_TARGET), "--drafter", str(output), "--dtype", "float32"),
        *("--prompt", PROMPT, "--max_new_tokens", "48"),
    )
    assert report["text"] == target_text
    assert json.loads((output / "provenance.json").read_text())["seed"] == 42
