"""The target answers prompts, in this process: the same text as one by one, resumed where it stopped."""

import json
import random
import shutil

import pytest
import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV4ForCausalLM

from hyperdflash.cli import EMBEDDED_DRAFTER, EMBEDDED_TARGET, main
from hyperdflash.trainer import RegenerateArguments, run_regenerate
from hyperdflash.trainer.regeneration import run as run_module
from hyperdflash.trainer.regeneration.prompts import (
    Answer,
    Conversation,
    PromptRenderer,
    Question,
    add_prompts,
    split_at_answers,
)
from hyperdflash.trainer.regeneration.responses import LineFile, ResponseFiles
from hyperdflash.trainer.regeneration.target import TargetBackend, choose, make_batches
from hyperdflash.trainer.run import load_rows

END = 1


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def questions_of(lengths, temperature=0.0, seed=0):
    draw = random.Random(seed)
    return [
        Question([draw.randrange(3, 63) for _ in range(n)], temperature, seed=100 + i) for i, n in enumerate(lengths)
    ]


def alone(target, question, max_new_tokens):
    """The answer of transformers' own greedy `generate` to one prompt."""
    prompt = torch.tensor([question.input_ids])
    output = target.generate(prompt, do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=END)
    return output[0, prompt.shape[1] :].tolist()


def answer_all(backend, questions):
    return {index: answer for index, answer in backend.answers(questions)}


@pytest.fixture(scope="module")
def ending_target(make_target):
    """A target that ends some answers early: its end token's logit is raised."""
    target = make_target(seed=3)
    with torch.no_grad():
        target.lm_head.weight[END] *= 1.7
    return target


@pytest.mark.parametrize("lengths", [[9] * 6, [5, 9, 9, 17, 20, 33]], ids=["equal", "unequal"])
def test_batched_text_is_the_text_of_each_prompt_alone(ending_target, lengths):
    questions = questions_of(lengths)
    backend = TargetBackend(ending_target, {END}, max_new_tokens=40, length_spread=40)
    answers = answer_all(backend, questions)
    expected = [alone(ending_target, question, 40) for question in questions]
    assert [answers[index].ids for index in range(6)] == expected
    assert [answers[index].finish_reason for index in range(6)] == [
        "stop" if ids[-1] == END else "length" for ids in expected
    ]
    assert 1 < len({len(ids) for ids in expected})  # rows left the batch at different times


def test_a_finished_row_leaves_the_batch_and_the_last_one_ends_it(ending_target):
    sizes = []
    hook = ending_target.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].shape[0]), with_kwargs=True
    )
    answers = answer_all(TargetBackend(ending_target, {END}, max_new_tokens=40), questions_of([9] * 6))
    hook.remove()
    lengths = [len(answer.ids) for answer in answers.values()]
    assert sizes == [sum(length > step for length in lengths) for step in range(max(lengths))]


def test_sampled_text_depends_on_the_rows_seed_and_not_on_its_batch(target):
    questions = questions_of([9] * 4, temperature=1.0)
    backend = TargetBackend(target, {END}, max_new_tokens=24, top_p=0.95)
    together = answer_all(backend, questions)
    for index, question in enumerate(questions):
        assert answer_all(backend, [question])[0].ids == together[index].ids
    reseeded = [Question(question.input_ids, 1.0, question.seed + 1) for question in questions]
    assert all(answer.ids != together[index].ids for index, answer in answer_all(backend, reseeded).items())


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_choices_have_the_distribution_of_softmax_cut_at_top_p(temperature, top_p):
    logits = torch.randn(16, generator=torch.Generator().manual_seed(0)) * 2
    draws = 20000
    uniforms = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    chosen = choose(logits.expand(draws, -1), torch.full((draws,), temperature), uniforms, top_p)
    expected = (logits / temperature).softmax(-1)
    order = expected.argsort(descending=True).tolist()
    kept, mass = [], 0.0
    for token in order:
        if mass < top_p:
            kept.append(token)
            mass += expected[token].item()
    wanted = torch.zeros(16)
    wanted[kept] = expected[kept] / expected[kept].sum()
    torch.testing.assert_close(chosen.bincount(minlength=16) / draws, wanted, atol=2e-4, rtol=0)
    assert top_p == 1 or len(kept) < 16


def test_temperature_zero_is_the_likeliest_token_beside_rows_that_sample():
    logits = torch.randn(2, 16, generator=torch.Generator().manual_seed(1))
    chosen = choose(logits, torch.tensor([0.0, 1.0]), torch.tensor([0.999, 0.999], dtype=torch.float64))
    assert chosen[0] == logits[0].argmax()
    assert chosen[1] == (logits[1].softmax(-1).cumsum(-1) > 0.999).nonzero()[0, 0]


@pytest.mark.parametrize("spread", [0, 3])
def test_batches_hold_every_prompt_once_and_lengths_within_the_spread(spread):
    draw = random.Random(0)
    lengths = [draw.randrange(5, 30) for _ in range(200)]
    for batch_size in (8, 40):
        batches = make_batches(lengths, batch_size, spread, random.Random(1))
        assert sorted(index for batch in batches for index in batch) == list(range(200))
        assert max(map(len, batches)) <= batch_size
    assert max(map(len, make_batches([7] * 20, 8, spread, random.Random(1)))) == 8
    assert max(max(lengths[i] for i in batch) - min(lengths[i] for i in batch) for batch in batches) == spread
    assert batches != sorted(batches, key=lambda batch: lengths[batch[0]])


def test_shared_key_attention_computes_what_the_models_own_does(target, tmp_path):
    target.save_pretrained(tmp_path)
    shared = DeepseekV4ForCausalLM.from_pretrained(tmp_path, attn_implementation="shared_key")
    assert shared.config._attn_implementation == "shared_key"
    input_ids = torch.randint(3, 63, (2, 50), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(shared(input_ids).logits, target(input_ids).logits, atol=1e-5, rtol=1e-4)


# Prompts


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(EMBEDDED_TARGET)


def arguments(**options):
    return RegenerateArguments(**{"target": str(EMBEDDED_TARGET), "data": "unused", "output": "unused"} | options)


SYSTEM = {"role": "system", "content": "s"}
TURNS = [SYSTEM, user("a"), assistant("b"), user("c"), assistant("d")]


@pytest.mark.parametrize(
    ("row", "every", "raw", "parts"),
    [
        ({"messages": TURNS}, False, False, [TURNS[:4]]),
        ({"messages": TURNS[:4]}, False, False, [TURNS[:4]]),
        ({"messages": TURNS}, True, False, [TURNS[:2], TURNS[3:4]]),
        ({"messages": TURNS[:4]}, True, False, [TURNS[:2], TURNS[3:4]]),
        ({"messages": [assistant("hello"), *TURNS[1:3]]}, True, False, [[user("a")]]),
        ({"messages": [assistant("hello")]}, False, False, []),
        ({"messages": []}, True, False, []),
        ({"prompt": "a", "completion": "b"}, False, False, [[user("a")]]),
        ({"prompt": "a"}, False, True, ["a"]),
        ({"prompt": TURNS[:2], "completion": TURNS[2:3]}, False, True, [TURNS[:2]]),
        ({"conversations": [{"from": "user", "value": "a"}]}, False, False, [[user("a")]]),
    ],
)
def test_rows_of_every_form_are_split_where_the_target_answers(row, every, raw, parts):
    assert split_at_answers(row, every, raw) == parts


@pytest.mark.parametrize("message", [{"role": "gpt", "content": "b"}, {"role": "user"}, "text"])
def test_a_message_that_no_template_knows_is_an_error(message):
    with pytest.raises(ValueError, match="found the message"):
        split_at_answers({"messages": [user("a"), message]}, False, False)


def test_a_share_of_rows_thinks_drawn_by_seed_and_id(tokenizer):
    from datasets import Dataset

    rows = Dataset.from_list([{"prompt": "a", "id": f"r{i}", "index": i} for i in range(200)])
    draws = [
        add_prompts(rows, PromptRenderer(tokenizer, arguments(thinking_share=share, seed=seed)))
        for share, seed in ((0.3, 0), (0.3, 1), (0.0, 0))
    ]
    shares = [sum(draw["thinking"]) for draw in draws]
    assert 40 <= shares[0] <= 80 and shares[2] == 0
    assert draws[0]["thinking"] != draws[1]["thinking"]
    think, answer = (tokenizer.convert_tokens_to_ids(token) for token in ("<think>", "</think>"))
    assert all(
        ids[-1] == (think if thinks else answer) for ids, thinks in zip(draws[0]["input_ids"], draws[0]["thinking"])
    )


def test_thinking_needs_a_template_that_can(tokenizer):
    plain = AutoTokenizer.from_pretrained(EMBEDDED_TARGET)
    plain.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    with pytest.raises(ValueError, match="thinking_share: found 0.5"):
        PromptRenderer(plain, arguments(thinking_share=0.5))
    plain.chat_template += "{{ messages[0]['thinking'] }}{% if enable_thinking %}T{% endif %}"
    renderer = PromptRenderer(plain, arguments(thinking_share=0.5))
    assert plain.decode(renderer.render([user("a")], True, {})) == "aT"
    assert plain.decode(renderer.render([user("a")], False, {})) == "a"


def converse(tokenizer, replies, thinking=False, **options):
    """A conversation of three turns with these answers; `(text, finish_reason)` each."""
    renderer = PromptRenderer(tokenizer, arguments(turns="every", **options))
    messages = [user("one"), assistant("x"), user("two"), assistant("y"), user("three"), assistant("z")]
    row = {"messages": messages, "id": "r", "thinking": thinking, "refusal": ""}
    row["input_ids"] = renderer.render(messages[:1], thinking, row)
    conversation = Conversation(row, renderer)
    for text, reason in replies:
        assert not conversation.done
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        conversation.take(Answer(ids + [END] if reason == "stop" else ids, reason))
    return conversation


def supervised(tokenizer, row):
    return tokenizer.decode([token for token, mask in zip(row["input_ids"], row["assistant_masks"]) if mask])


def test_every_turn_is_asked_with_the_targets_own_earlier_answers_and_makes_one_row(tokenizer):
    conversation = converse(tokenizer, [("first", "stop"), ("second", "stop"), ("third", "stop")])
    assert conversation.done and conversation.refusal is None and conversation.answered == 3
    (row,) = conversation.rows
    end = tokenizer.eos_token
    assert supervised(tokenizer, row) == f"first{end}second{end}third{end}"
    own = [user("one"), assistant("first"), user("two"), assistant("second"), user("three"), assistant("third")]
    assert row["input_ids"] == tokenizer.apply_chat_template(own, return_dict=False)
    assert len(row["assistant_masks"]) == len(row["input_ids"])


def test_reasoning_that_the_template_drops_later_begins_a_row_of_its_own(tokenizer):
    replies = [("because</think>first", "stop"), ("so</think>second", "stop"), ("well</think>third", "stop")]
    conversation = converse(tokenizer, replies, thinking=True)
    end = tokenizer.eos_token
    assert [supervised(tokenizer, row) for row in conversation.rows] == [text + end for text, _ in replies]
    last = tokenizer.decode(conversation.rows[-1]["input_ids"])
    assert "because" not in last and "first" in last and last.endswith(f"<think>well</think>third{end}")


@pytest.mark.parametrize(
    ("replies", "options", "refusal", "answered"),
    [
        ([("", "stop")], {}, "empty", 0),
        ([("", "content_filter")], {}, "content_filter", 0),
        ([("first", "length")], {"cut_answers": "drop"}, "length", 0),
        ([("first", "stop"), ("second", "length")], {"cut_answers": "drop"}, "length", 1),
        ([("first " * 40, "stop")], {"max_prompt_length": 30}, "prompt_too_long", 1),
    ],
)
def test_a_refused_turn_ends_the_conversation_and_keeps_the_turns_before(
    tokenizer, replies, options, refusal, answered
):
    conversation = converse(tokenizer, replies, **options)
    assert conversation.done
    assert (conversation.refusal[0], conversation.answered, len(conversation.rows)) == (refusal, answered, answered)


def test_a_cut_answer_is_kept_and_ends_the_conversation(tokenizer):
    conversation = converse(tokenizer, [("first", "stop"), ("second", "length")])
    assert conversation.done and conversation.refusal is None
    assert conversation.rows[0]["finish_reason"] == "length"
    assert supervised(tokenizer, conversation.rows[0]) == f"first{tokenizer.eos_token}second"


# Files


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("tail", "kept"),
    [
        ('{"id": "c", "inp', ["a", "b"]),
        ('{"id": "c", "input_ids": []}', ["a", "b"]),  # whole, but for its line's end
        ('{"id": "c", "part": 1, "parts": 2}\n', ["a", "b"]),
        ('{"id": "c", "part": 1, "parts": 2}\n{"id": "c", "par', ["a", "b"]),
        ('{"id": "c", "part": 1, "parts": 2}\n{"id": "c", "part": 2, "parts": 2}\n', ["a", "b", "c", "c"]),
        ("\0\0\0\0", ["a", "b"]),
    ],
)
def test_what_a_killed_run_tore_is_cut_off(tmp_path, tail, kept):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": "a"}\n{"id": "b"}\n' + tail)
    with LineFile(path) as file:
        assert file.ids == set(kept)
        file.append({"id": "d"})
    assert [row["id"] for row in lines_of(path)] == [*kept, "d"]


def test_a_bad_line_inside_is_an_error_and_stays(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": "a"}\nnot JSON\n{"id": "b"}\n')
    with pytest.raises(ValueError, match="line 2"):
        LineFile(path)
    assert path.read_text().endswith('{"id": "b"}\n')


def test_rows_of_unknown_settings_are_not_added_to(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": "a"}\n')
    with pytest.raises(FileExistsError, match="without rows.jsonl.manifest"):
        ResponseFiles(str(path), {}, {}, False)


def test_two_runs_do_not_write_the_same_file(tmp_path):
    path = str(tmp_path / "rows.jsonl")
    with ResponseFiles(path, {}, {}, False):
        with pytest.raises(FileExistsError, match="another run"):
            ResponseFiles(path, {}, {}, False)
    with ResponseFiles(path, {}, {}, False):
        pass


# The verb, on the embedded target

PROMPTS = [
    "Write a function that adds two numbers.",
    "What does the command `tail` do?",
    "Does this make sense? A cat barks.",
    "Tom has 5 pens and buys 3. How many pens does he have?",
    "Name a colour.",
    "Write a function to check whether a given string is a palindrome.",
    "How many legs do two dogs have?",
]


@pytest.fixture
def options(tmp_path):
    rows = [{"id": i, "messages": [user(prompt), assistant("someone's answer")]} for i, prompt in enumerate(PROMPTS)]
    rows.append({"id": 7, "messages": [user("long " * 200), assistant("x")]})
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {
        "target": str(EMBEDDED_TARGET),
        "data": str(tmp_path / "prompts.jsonl"),
        "output": str(tmp_path / "out" / "answers.jsonl"),
        "target_dtype": "float32",
        "device": "cpu",
        "max_new_tokens": 24,
        "max_prompt_length": 100,
        "batch_size": 3,
        "length_spread": 4,
    }


def sorted_rows(path):
    return sorted(lines_of(path), key=lambda row: row["id"])


def flags(options):
    return [text for name, value in options.items() for text in (f"--{name}", *str(value).split(" "))]


def test_regenerate_writes_the_targets_greedy_answers_as_rows_that_train_reads(capsys, tmp_path, options, tokenizer):
    assert main(["regenerate", *flags(options)]) == 0
    captured = capsys.readouterr()
    summary = json.loads(captured.out)
    assert "7/8" in captured.err or "8/8" in captured.err  # the progress bar
    output = tmp_path / "out" / "answers.jsonl"
    rows = lines_of(output)
    assert summary["rows"] == len(rows) == 7
    assert summary["skipped"] == {"prompt_too_long": 1}
    assert summary["answer_tokens"] == sum(sum(row["assistant_masks"]) for row in rows)
    assert summary["finish_reasons"] == {
        reason: count
        for reason in ("stop", "length")
        if (count := sum(row["finish_reason"] == reason for row in rows))
    }
    (skipped,) = lines_of(tmp_path / "out" / "answers.jsonl.skipped")
    assert skipped["id"] == "7" and skipped["reason"] == "prompt_too_long"

    target = AutoModelForCausalLM.from_pretrained(EMBEDDED_TARGET, dtype=torch.float32)
    for row in rows:
        inputs = tokenizer.apply_chat_template(
            [user(PROMPTS[int(row["id"])])], add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        expected = target.generate(**inputs, do_sample=False, max_new_tokens=24)[0].tolist()
        assert row["input_ids"] == expected
        assert row["assistant_masks"] == [int(i >= inputs["input_ids"].shape[1]) for i in range(len(expected))]
        assert (row["temperature"], row["thinking"]) == (0.0, False)
    for data in (output, output.parent):  # the sidecars are not taken for data
        read = load_rows(str(data))
        assert read["input_ids"] == [row["input_ids"] for row in rows]
        assert read["assistant_masks"] == [row["assistant_masks"] for row in rows]
    manifest = json.loads((tmp_path / "out" / "answers.jsonl.manifest").read_text())
    assert manifest["settings"]["temperatures"] == [0.0]
    assert manifest["provenance"]["arguments"]["max_new_tokens"] == 24


def test_a_killed_run_goes_on_to_the_rows_of_an_uninterrupted_one(tmp_path, monkeypatch, options):
    sampled = options | {"temperatures": [0.0, 1.0], "thinking_share": 0.5, "seed": 5}
    whole = options | sampled | {"output": str(tmp_path / "whole.jsonl")}
    run_regenerate(RegenerateArguments(**whole))

    written = []

    def write_three(files, conversation):
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(conversation.id)
        write(files, conversation)

    write = ResponseFiles.write
    monkeypatch.setattr(ResponseFiles, "write", write_three)
    with pytest.raises(KeyboardInterrupt):
        run_regenerate(RegenerateArguments(**sampled))
    monkeypatch.undo()
    output = tmp_path / "out" / "answers.jsonl"
    assert len(lines_of(output)) == 3
    with output.open("a") as file:
        file.write('{"id": "6", "input_')
    summary = run_regenerate(RegenerateArguments(**sampled))
    assert summary["rows"] == 7 and summary["new"]["rows"] == 4
    assert sorted_rows(output) == sorted_rows(tmp_path / "whole.jsonl")
    assert len({(row["temperature"], row["thinking"]) for row in sorted_rows(output)}) > 1
    assert len(lines_of(tmp_path / "out" / "answers.jsonl.skipped")) == 1

    monkeypatch.setattr(run_module, "_load_target", lambda *args: pytest.fail("the target was loaded for nothing"))
    assert run_regenerate(RegenerateArguments(**sampled))["new"]["rows"] == 0


def test_a_rerun_may_ask_for_more_rows(tmp_path, options):
    first = run_regenerate(RegenerateArguments(**options, max_rows=3))
    some = {row["id"] for row in lines_of(tmp_path / "out" / "answers.jsonl")}
    assert first["rows"] + sum(first["skipped"].values()) == 3
    assert run_regenerate(RegenerateArguments(**options))["rows"] == 7
    assert some < {row["id"] for row in lines_of(tmp_path / "out" / "answers.jsonl")}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"temperatures": [0.5]}, r"temperatures: found \[0.5\], wanted \[0.0\]"),
        ({"max_new_tokens": 7}, "max_new_tokens: found 7, wanted 24"),
        ({"thinking_share": 0.5}, "thinking_share: found 0.5, wanted 0.0"),
        ({"turns": "every"}, "turns: found 'every', wanted 'last'"),
        ({"seed": 3}, "seed: found 3, wanted 0"),
        ({"target_dtype": "bfloat16"}, "target_dtype: found 'bfloat16', wanted 'float32'"),
        ("data", "data: found"),
        ("target", "target: found"),
        ("chat_template", "chat_template: found"),
    ],
)
def test_other_settings_are_an_error_that_names_the_field(tmp_path, monkeypatch, options, change, named):
    target = tmp_path / "target"
    shutil.copytree(EMBEDDED_TARGET, target)
    options["target"] = str(target)
    monkeypatch.setattr(run_module, "_load_target", lambda *args: First())
    run_regenerate(RegenerateArguments(**options))
    if change == "data":
        with open(options["data"], "a") as file:
            file.write("\n" + json.dumps({"id": 9, "messages": [user("a"), assistant("b")]}))
    elif change == "target":
        weights = bytearray((target / "model.safetensors").read_bytes())
        weights[-1] ^= 1
        (target / "model.safetensors").write_bytes(weights)
    elif change == "chat_template":
        (tmp_path / "other.jinja").write_text((target / "chat_template.jinja").read_text() + " ")
        options["chat_template"] = str(tmp_path / "other.jinja")
    else:
        options |= change
    with pytest.raises(ValueError, match=named):
        run_regenerate(RegenerateArguments(**options))


class First:
    """A backend that answers the first row and stops."""

    def run(self, conversations, finish):
        conversation = conversations[0]
        conversation.take(Answer([5, END], "stop"))
        finish(conversation)


def test_every_turn_of_a_conversation_is_regenerated_in_turn(tmp_path, options, tokenizer):
    data = tmp_path / "turns.jsonl"
    first = 'Does the following sentence make sense?\n"A {} barks."\nOptions:\n- yes\n- no'
    rows = [
        {"messages": [user(first.format(animal)), assistant("x"), user(PROMPTS[4]), assistant("y")]}
        for animal in ("cat", "dog", "table")
    ]
    data.write_text("\n".join(map(json.dumps, rows)))
    options |= {"data": str(data), "turns": "every", "max_new_tokens": 60, "max_prompt_length": 400}
    summary = run_regenerate(RegenerateArguments(**options))
    written = lines_of(tmp_path / "out" / "answers.jsonl")
    assert len({row["id"] for row in written}) == 3
    assert all(row["part"] <= row["parts"] for row in written)
    target = AutoModelForCausalLM.from_pretrained(EMBEDDED_TARGET, dtype=torch.float32)
    both = 0
    for row in written:
        starts = [i for i in range(1, len(row["input_ids"])) if row["assistant_masks"][i - 1 : i + 1] == [0, 1]]
        both += len(starts) == 2
        for start in starts:
            length = row["assistant_masks"][start:].index(0) if 0 in row["assistant_masks"][start:] else None
            answer = row["input_ids"][start:][:length]
            output = target.generate(torch.tensor([row["input_ids"][:start]]), do_sample=False, max_new_tokens=60)
            assert answer == output[0, start:].tolist()
    assert both and summary["rows"] == len(written)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"temperatures": "-1"}, "temperatures: found [-1.0]"),
        ({"top_p": "0"}, "top_p: found 0.0"),
        ({"max_new_tokens": "0"}, "max_new_tokens: found 0"),
        ({"thinking_share": "2"}, "thinking_share: found 2.0"),
        ({"thinking_share": "0.5", "chat_template": "plain.jinja"}, "thinking_share: found 0.5"),
        ({"device": "no-such-device"}, "device: found 'no-such-device'"),
        ({"data": "./no/such/file"}, "no/such/file"),
        ({"data": "columns.jsonl"}, "data: found the columns ['other']"),
        ({"data": "roles.jsonl"}, "data: row 1: found the message"),
        ({"target": "./no/such/target"}, "no/such/target"),
        (
            {"target": str(EMBEDDED_DRAFTER), "tokenizer": str(EMBEDDED_TARGET)},
            "target: found model_type 'hyperdflash'",
        ),
        ({"output": "."}, "output: found the folder"),
        ({"server": "host:8000"}, "server: found 'host:8000'"),
        ({"server": "http://me:secret@host/v1"}, "server: found a key in the URL"),
        ({"request_fields": "{"}, "request_fields: found '{'"),
    ],
)
def test_bad_input_is_one_line_before_the_target_is_loaded(capsys, tmp_path, monkeypatch, options, change, named):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain.jinja").write_text("{{ messages[0]['content'] }}")
    (tmp_path / "columns.jsonl").write_text('{"other": 1}')
    (tmp_path / "roles.jsonl").write_text(
        "\n".join(json.dumps({"messages": [{"role": role, "content": "a"}]}) for role in ("user", "gpt"))
    )
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *args, **kwargs: pytest.fail("loaded"))
    assert main(["regenerate", *flags(options | change)]) == 2
    captured = capsys.readouterr()
    last = captured.err.splitlines()[-1]
    assert captured.out == ""
    assert last.startswith("hyperdflash regenerate: error:") and named in last and "secret" not in last
    assert not (tmp_path / "out" / "answers.jsonl").exists() or not (tmp_path / "out" / "answers.jsonl").read_text()


def test_an_empty_prompt_is_set_aside(tmp_path, options):
    data = tmp_path / "empty.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in ("", PROMPTS[4])))
    summary = run_regenerate(RegenerateArguments(**options | {"data": str(data), "raw": True}))
    assert (summary["rows"], summary["skipped"]) == (1, {"no_prompt": 1})


def test_rows_that_cannot_be_asked_are_counted_not_lost(tmp_path, options):
    rows = [
        {"messages": [assistant("nobody asked")]},
        {"messages": [user("a"), {"role": "assistant", "content": ""}, {"role": "tool", "content": "1"}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [user(PROMPTS[4])]},
    ]
    data = tmp_path / "odd.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    summary = run_regenerate(RegenerateArguments(**options | {"data": str(data), "turns": "every"}))
    assert summary["rows"] == 1
    assert summary["skipped"] == {"no_prompt": 1, "tool_messages": 1, "template": 1}
    assert len(load_dataset("json", data_files=str(tmp_path / "out" / "answers.jsonl"), split="train")) == 1
