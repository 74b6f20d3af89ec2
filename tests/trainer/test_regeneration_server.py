"""An OpenAI-compatible server answers prompts, with all that goes wrong on the way. The server is in this process."""

import json
import threading
import time
from collections import Counter, defaultdict
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx2
import pytest
from transformers import AutoTokenizer

from hyperdflash.cli import EMBEDDED_TARGET, main
from hyperdflash.trainer import RegenerateArguments, run_regenerate
from hyperdflash.trainer.regeneration.server import _retry_after
from hyperdflash.trainer.run import load_rows

ROWS = 12


class Server(ThreadingHTTPServer):
    """Answers each prompt with its own last three ids, and what `plan` says instead, in this order, for a row.

    A plan is a list of faults: a status, `(status, headers)`, "slow", "garbage", "drop", or a choice to answer with;
    when it is used up, the request is answered. Prompts are told apart by the row's number in their text.
    """

    daemon_threads = True

    def __init__(self, tokenizer):
        super().__init__(("127.0.0.1", 0), Handler)
        self.tokenizer = tokenizer
        self.plan: dict[int, list] = defaultdict(list)
        self.requests: list[tuple[dict, dict]] = []
        self.times: dict[int, list[float]] = defaultdict(list)
        self.at_one_time = self.most_at_one_time = 0
        self.lock = threading.Lock()
        self.delay = 0.0
        self.gone_after = None
        self.finish_reason = "stop"
        self.fields = {"token_ids", "prompt_token_ids", "text"}

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def row_of(self, request):
        return int(self.tokenizer.decode(request["prompt"]).split("row ")[1].split(" ")[0])

    def handle_error(self, request, client_address):
        pass  # a client that gave up


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def reply(self, status, body, headers=None):
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        server = self.server
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/completions":
            return self.reply(404, b'{"error": {"message": "no such path"}}')
        with server.lock:
            server.at_one_time += 1
            server.most_at_one_time = max(server.most_at_one_time, server.at_one_time)
        try:
            self.answer(server, request)
        finally:
            with server.lock:
                server.at_one_time -= 1

    def answer(self, server, request):
        row, probe = server.row_of(request), request["max_tokens"] == 1
        with server.lock:
            server.requests.append((request, dict(self.headers)))
            if not probe:
                server.times[row].append(time.monotonic())
            faults = server.plan["probe" if probe else row]
            fault = faults.pop(0) if faults else None
            if server.gone_after is not None and len(server.requests) > server.gone_after:
                fault = 503
        time.sleep(server.delay)
        if fault == "slow":
            time.sleep(2.5)
        elif fault == "garbage":
            return self.reply(200, b"<html>")
        elif fault == "drop":
            self.close_connection = True
            return self.connection.close()
        elif isinstance(fault, dict):
            return self.reply(200, json.dumps({"choices": [{"finish_reason": "stop"} | fault]}).encode())
        elif fault is not None:
            status, headers = fault if isinstance(fault, tuple) else (fault, {})
            return self.reply(status, json.dumps({"error": {"message": f"planted {status}"}}).encode(), headers)
        ids = request["prompt"][-3:] + ([1] if server.finish_reason == "stop" else [])
        known = {
            "token_ids": ids,
            "prompt_token_ids": request["prompt"],
            "text": server.tokenizer.decode(request["prompt"][-3:]),
        }
        choice = {"finish_reason": server.finish_reason} | {name: known[name] for name in server.fields}
        self.reply(200, json.dumps({"choices": [choice]}).encode())


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(EMBEDDED_TARGET)


@pytest.fixture
def server(tokenizer, monkeypatch):
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    server = Server(tokenizer)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def options(tmp_path, server):
    rows = [{"id": f"r{i}", "prompt": f"row {i} asks", "completion": "someone's"} for i in range(ROWS)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {
        "target": str(EMBEDDED_TARGET),
        "data": str(tmp_path / "prompts.jsonl"),
        "output": str(tmp_path / "answers.jsonl"),
        "server": server.url,
        "server_model": "v4",
        "max_new_tokens": 16,
        "concurrency": 4,
        "retry_wait": 0.02,
        "max_retries": 3,
    }


def rows_of(options):
    with open(options["output"]) as file:
        return sorted(map(json.loads, file), key=lambda row: row["id"])


def run(options):
    return run_regenerate(RegenerateArguments(**options))


def test_the_servers_token_ids_become_rows_that_train_reads(server, options, tokenizer):
    summary = run(options | {"temperatures": [0.0, 0.7], "top_p": 0.9, "thinking_share": 0.5})
    rows = rows_of(options)
    assert summary["rows"] == len(rows) == ROWS and summary["finish_reasons"] == {"stop": ROWS}
    sent = {server.row_of(request): request for request, _ in server.requests if request["max_tokens"] != 1}
    for row in rows:
        number = int(row["id"][1:])
        message = [{"role": "user", "content": f"row {number} asks"}]
        prompt = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, thinking=row["thinking"], return_dict=False
        )
        assert row["input_ids"] == prompt + prompt[-3:] + [1]
        assert row["assistant_masks"] == [0] * len(prompt) + [1] * 4
        assert sent[number]["prompt"] == prompt
        assert sent[number]["temperature"] == row["temperature"]
        assert sent[number]["top_p"] == (0.9 if row["temperature"] else 1.0)
        assert (sent[number]["model"], sent[number]["max_tokens"], sent[number]["return_token_ids"]) == (
            "v4",
            16,
            True,
        )
        assert (sent[number]["top_k"], sent[number]["repetition_penalty"]) == (-1, 1.0)
    assert len({request["seed"] for request in sent.values()}) == ROWS
    assert {row["temperature"] for row in rows} == {0.0, 0.7} and {row["thinking"] for row in rows} == {True, False}
    assert load_rows(options["output"])["input_ids"]


def test_concurrency_is_used_and_bounded(server, options):
    server.delay = 0.2
    run(options)
    assert server.most_at_one_time == 4


@pytest.mark.parametrize("fault", [429, 500, 503, 408, "slow", "garbage", "drop"])
def test_what_may_pass_is_tried_again(server, options, fault):
    server.plan[3] = [fault, fault]
    server.plan[5] = [fault]
    summary = run(options | ({"request_timeout": 1.0} if fault == "slow" else {}))
    assert summary["rows"] == ROWS and summary["skipped"] == {}
    assert [len(server.times[row]) for row in (3, 5, 6)] == [3, 2, 1]


def test_waits_grow_and_the_servers_own_is_kept(server, options):
    server.plan[3] = [500, 500, 500]
    server.plan[5] = [(429, {"Retry-After": "1"})]
    run(options | {"retry_wait": 0.1})
    waits = {row: [b - a for a, b in zip(times, times[1:])] for row, times in server.times.items()}
    assert waits[5][0] >= 1.0
    assert all(0.5 * wait <= found for wait, found in zip((0.1, 0.2, 0.4), waits[3]))


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("7", 7),
        (timedelta(hours=1), 3600),
        (timedelta(hours=-1), 0),
        ("soon", 0),
        ("", 0),
    ],
)
def test_retry_after_is_a_number_or_a_date(value, seconds):
    if isinstance(value, timedelta):
        value = format_datetime(datetime.now(UTC) + value, usegmt=True)
    response = httpx2.Response(429, headers={"Retry-After": value} if value else {})
    assert _retry_after(response) == pytest.approx(seconds, abs=300)


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_request_that_the_server_refuses_is_a_skipped_row(server, options, status):
    server.plan[3] = [status]
    summary = run(options)
    assert summary["rows"] == ROWS - 1 and summary["skipped"] == {f"http_{status}": 1}
    with open(options["output"] + ".skipped") as file:
        (row,) = map(json.loads, file)
    assert (row["id"], row["detail"], row["answered"]) == ("r3", f"planted {status}", 0)
    assert run(options)["rows"] == ROWS - 1 and len(server.times[3]) == 1  # and is not asked again


@pytest.mark.parametrize("status", [400, 401, 404])
def test_settings_that_the_server_refuses_are_one_line_and_bind_no_later_run(capsys, server, options, status):
    server.plan["probe"] = [status]
    argv = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    assert main(["regenerate", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"server: found status {status}" in captured.err.splitlines()[-1]
    assert f"planted {status}" in captured.err.splitlines()[-1]
    assert len(server.requests) == 1
    assert run(options | {"max_new_tokens": 8})["rows"] == ROWS


def test_a_key_that_expires_ends_the_run_and_the_next_one_goes_on(server, options):
    server.plan[7] = [401]
    with pytest.raises(ValueError, match="status 401"):
        run(options | {"concurrency": 1})
    before = len(rows_of(options))
    assert before < ROWS
    server.requests.clear()
    assert run(options)["rows"] == ROWS
    assert len(server.requests) == ROWS - before + 1  # and the probe


def test_a_server_that_is_gone_ends_the_run_and_the_next_one_goes_on(server, options):
    whole = options | {"output": options["output"] + ".whole.jsonl"}
    run(whole)
    server.gone_after = len(server.requests) + 5  # the probe and four rows
    with pytest.raises(ConnectionError, match="status 503.* in 4 attempts"):
        run(options | {"concurrency": 1})
    assert len(rows_of(options)) == 4
    server.gone_after = None
    assert run(options)["rows"] == ROWS
    assert rows_of(options) == rows_of(whole)


def test_a_row_that_always_fails_is_set_aside_while_others_are_answered(server, options):
    server.plan[3] = [500] * 4
    server.delay = 0.05
    summary = run(options | {"concurrency": 2})
    assert summary["rows"] == ROWS - 1 and summary["skipped"] == {"failed": 1}
    summary = run(options)  # asks it again
    assert summary["rows"] == ROWS and summary["skipped"] == {}


@pytest.mark.parametrize("ids", [[5, 999_999], [-5], ["a"], [1.5], "abc", [True]])
def test_answers_that_are_no_token_ids_end_the_run_and_are_not_written(server, options, ids):
    server.plan[3] = [{"token_ids": ids}] * 9
    with pytest.raises(ValueError, match="server: found the token ids .*wanted a list of ids below 4096"):
        run(options)
    rows = Path(options["output"]).read_text().splitlines() if Path(options["output"]).exists() else []
    assert all(type(token) is int and 0 <= token < 4096 for row in rows for token in json.loads(row)["input_ids"])


def test_no_server_is_one_line(capsys, options):
    argv = options | {"server": "http://127.0.0.1:9/v1", "max_retries": 1}
    assert main(["regenerate", *(text for name, value in argv.items() for text in (f"--{name}", str(value)))]) == 2
    assert "ConnectError" in capsys.readouterr().err.splitlines()[-1]


def test_answers_without_token_ids_are_refused_unless_text_is_asked_for(server, options, tokenizer):
    server.fields = {"text"}
    with pytest.raises(ValueError, match="found an answer without token_ids"):
        run(options)
    assert run(options | {"token_ids": "text"})["rows"] == ROWS
    for row in rows_of(options):
        answer = [token for token, mask in zip(row["input_ids"], row["assistant_masks"]) if mask]
        prompt = row["input_ids"][: -len(answer)]
        assert answer == prompt[-3:] + [1]  # the end token is put back: it stopped there
    assert all("return_token_ids" not in request for request, _ in server.requests[-ROWS:])


@pytest.mark.parametrize("reason", ["length", "content_filter"])
def test_why_an_answer_ended_is_kept(server, options, reason):
    server.finish_reason = reason
    summary = run(options)
    if reason == "length":
        assert summary["finish_reasons"] == {"length": ROWS}
        assert all(row["input_ids"][-1] != 1 for row in rows_of(options))
    else:
        assert summary["rows"] == 0 and summary["skipped"] == {"content_filter": ROWS}


def test_the_key_comes_from_the_environment_and_is_written_nowhere(server, options, monkeypatch, tmp_path):
    monkeypatch.setenv("MY_KEY", "very-secret")
    run(options | {"api_key_variable": "MY_KEY"})
    assert all(headers["Authorization"] == "Bearer very-secret" for _, headers in server.requests)
    assert all(b"very-secret" not in path.read_bytes() for path in tmp_path.iterdir())


def test_further_fields_go_over_ours_and_null_leaves_one_out(server, options):
    run(options | {"request_fields": '{"top_k": null, "min_p": 0.1, "user": "me"}'})
    request, _ = server.requests[-1]
    assert "top_k" not in request and (request["min_p"], request["user"]) == (0.1, "me")


def test_every_turn_goes_to_the_server_in_turn(server, options, tokenizer, tmp_path):
    turns = [{"role": role, "content": text} for role, text in (("user", "row 0 asks"), ("assistant", "x"))]
    rows = [{"messages": [*turns, {"role": "user", "content": "and again"}, turns[1]]}]
    (tmp_path / "prompts.jsonl").write_text(json.dumps(rows[0]))
    run(options | {"turns": "every"})
    requests = [request for request, _ in server.requests if request["max_tokens"] != 1]
    assert len({request["seed"] for request in requests}) == 2
    own = tokenizer.decode(requests[0]["prompt"][-3:])
    assert f"{own}{tokenizer.eos_token}<｜User｜>and again" in tokenizer.decode(requests[1]["prompt"])
    assert Counter(sum((row["assistant_masks"] for row in rows_of(options)), []))[1] == 8
