"""DeepSeek-V4's chat form, which its released tokenizer does not bring along."""

import json
import warnings

import pytest
from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hyperdflash import cli
from hyperdflash.evaluation.arguments import MODES, EvalArguments
from hyperdflash.evaluation.runner import _make_renderer
from hyperdflash.trainer.doctor.prompts import read_prompt
from hyperdflash.utils.chat import MARKS, TEMPLATES, add_chat_template

BEGIN, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
QUESTION = {"role": "user", "content": "Why?"}
THOUGHT = {"role": "assistant", "content": "So.", "reasoning_content": "Hm."}
ANSWER = {"role": "assistant", "content": "So."}
MORE = {"role": "user", "content": "And?"}


def build_tokenizer(marks=MARKS, template=None):
    words = ["[UNK]", "Why", "?", "So", ".", "Hm", "And", "Short"]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=BEGIN, eos_token=END, unk_token="[UNK]", extra_special_tokens=list(marks)
    )
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    (folder / "config.json").write_text('{"model_type": "deepseek_v4"}')
    build_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def tokenizer(target_folder):
    tokenizer = build_tokenizer()
    with pytest.warns(UserWarning, match="has no chat template: messages are rendered by deepseek_v4.jinja"):
        add_chat_template(tokenizer, str(target_folder))
    return tokenizer


@pytest.mark.parametrize(
    ("messages", "options", "text"),
    [
        ([QUESTION], {"add_generation_prompt": True}, f"{BEGIN}<｜User｜>Why?<｜Assistant｜></think>"),
        ([QUESTION, ANSWER], {}, f"{BEGIN}<｜User｜>Why?<｜Assistant｜></think>So.{END}"),
        (
            [QUESTION],
            {"add_generation_prompt": True, "thinking": True},
            f"{BEGIN}<｜User｜>Why?<｜Assistant｜><think>",
        ),
        ([QUESTION, THOUGHT], {}, f"{BEGIN}<｜User｜>Why?<｜Assistant｜><think>Hm.</think>So.{END}"),
        ([QUESTION, ANSWER], {"thinking": True}, f"{BEGIN}<｜User｜>Why?<｜Assistant｜><think></think>So.{END}"),
        (
            [{"role": "system", "content": "Short."}, QUESTION, ANSWER, MORE],
            {"add_generation_prompt": True},
            f"{BEGIN}Short.<｜User｜>Why?<｜Assistant｜></think>So.{END}<｜User｜>And?<｜Assistant｜></think>",
        ),
        (
            [QUESTION, THOUGHT, MORE],
            {"add_generation_prompt": True, "thinking": True},
            f"{BEGIN}<｜User｜>Why?<｜Assistant｜></think>So.{END}<｜User｜>And?<｜Assistant｜><think>",
        ),
        (
            [QUESTION, THOUGHT, MORE, THOUGHT],
            {},
            f"{BEGIN}<｜User｜>Why?<｜Assistant｜></think>So.{END}<｜User｜>And?<｜Assistant｜><think>Hm.</think>So.{END}",
        ),
    ],
)
def test_messages_are_rendered_as_deepseek_does_with_earlier_reasoning_dropped(messages, options, text, tokenizer):
    assert tokenizer.apply_chat_template(messages, tokenize=False, **options) == text


def test_what_is_written_by_the_target_is_what_counts_as_the_assistants(tokenizer):
    rendered = tokenizer.apply_chat_template(
        [QUESTION, ANSWER, MORE, THOUGHT], return_dict=True, return_assistant_tokens_mask=True
    )
    words = tokenizer.convert_ids_to_tokens(rendered["input_ids"])
    assert [word for word, mask in zip(words, rendered["assistant_masks"]) if mask] == [
        *("So", ".", END),
        *("Hm", ".", "</think>", "So", ".", END),
    ]


@pytest.mark.parametrize("extra", [{"tools": [{"type": "function", "function": {"name": "f"}}]}, {}])
def test_what_the_template_has_no_form_for_is_an_error(extra, tokenizer):
    messages = [QUESTION] if extra else [QUESTION, {"role": "tool", "content": "3"}]
    with pytest.raises(TemplateError, match="tools: found some" if extra else "role: found 'tool'"):
        tokenizer.apply_chat_template(messages, tokenize=False, **extra)


def test_a_template_is_added_only_where_it_is_missing_and_fits(target_folder, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own = build_tokenizer(template="{{ bos_token }}")
        add_chat_template(own, str(target_folder))
        assert own.chat_template == "{{ bos_token }}"
        strange = build_tokenizer(marks=MARKS[1:])
        add_chat_template(strange, str(target_folder))
        (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
        other = build_tokenizer()
        add_chat_template(other, str(tmp_path))
        add_chat_template(other, "a-name-that-only-a-server-knows")
        assert strange.chat_template is None and other.chat_template is None


def test_generate_adds_it_unless_the_prompt_is_raw(tokenizer, make_target, tmp_path):
    make_target(bos_token_id=8, eos_token_id=9).save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="has no chat template"):
        _, found, _ = cli.load_pair(str(tmp_path), None, cli.GenerateArguments(prompt="Why?"))
    assert found.chat_template == TEMPLATES["deepseek_v4"].read_text()
    ids = cli.encode(found, "Why?", cli.GenerateArguments(prompt="Why?", thinking=True), "cpu")["input_ids"][0]
    wanted = [BEGIN, "<｜User｜>", "Why", "?", "<｜Assistant｜>", "<think>"]
    assert found.convert_ids_to_tokens(ids.tolist()) == wanted
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, found, _ = cli.load_pair(str(tmp_path), None, cli.GenerateArguments(prompt="Why?", raw=True))
    assert found.chat_template is None
    assert read_prompt({"messages": [QUESTION, THOUGHT]}, tokenizer).problem is None


def test_train_and_regenerate_add_it(make_target, make_drafter, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    target = make_target(bos_token_id=8, eos_token_id=9, pad_token_id=9)
    target.save_pretrained(tmp_path / "target")
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(tmp_path / "target")
    make_drafter(target).save_pretrained(tmp_path / "start")
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"messages": [QUESTION]}) + "\n")
    ask = ["--target", str(tmp_path / "target"), "--data", str(tmp_path / "prompts.jsonl"), "--max_new_tokens", "12"]
    with pytest.warns(UserWarning, match="messages are rendered by deepseek_v4.jinja"):
        assert cli.main(["regenerate", *ask, "--output", str(tmp_path / "rows.jsonl")]) == 0
    row = json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[0])
    prompt = [BEGIN, "<｜User｜>", "Why", "?", "<｜Assistant｜>", "</think>"]
    assert tokenizer.convert_ids_to_tokens(row["input_ids"])[: len(prompt)] == prompt

    (tmp_path / "answers.jsonl").write_text(json.dumps({"messages": [QUESTION, THOUGHT]}) + "\n")
    options = ["--target", str(tmp_path / "target"), "--data", str(tmp_path / "answers.jsonl"), "--max_steps", "1"]
    options += ["--drafter", str(tmp_path / "start"), "--output_dir", str(tmp_path / "out"), "--report_to", "none"]
    options += ["--use_cpu", "--bf16", "false", "--num_anchors", "4", "--disable_tqdm", "true"]
    with pytest.warns(UserWarning, match="messages are rendered by deepseek_v4.jinja"):
        assert cli.main(["train", *options]) == 0, capsys.readouterr().err
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == TEMPLATES["deepseek_v4"].read_text()


def test_eval_adds_it_and_keeps_one_that_is_given(target_folder, tmp_path):
    args = EvalArguments(output="x", target=str(target_folder), systems=["target"], tasks=["gsm8k"], modes=list(MODES))
    with pytest.warns(UserWarning, match="has no chat template"):
        renderer = _make_renderer(args)
    assert renderer.thinking_variable == "thinking"
    (tmp_path / "own.jinja").write_text("{{ bos_token }}{{ enable_thinking }}")
    args.chat_template = str(tmp_path / "own.jinja")
    assert _make_renderer(args).thinking_variable == "enable_thinking"
