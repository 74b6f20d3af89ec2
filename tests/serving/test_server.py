"""`bench-serve` against vLLM's own server on the embedded pair. Needs the serving environment."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

ROOT = Path(__file__).parents[2]
PATIENCE = 1200  # seconds
PROMPTS = ["What does the command `tail` do?", "Add 17 and 25.", "Write a function that adds two numbers."]


def drafted_rounds(port: int) -> float:
    """vLLM's own count; 0 while there is no server."""
    try:
        text = urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
    except (URLError, OSError):
        return 0.0
    return sum(map(float, re.findall(r"^vllm:spec_decode_num_drafts_total\{.*\} (.*)$", text, re.MULTILINE)))


def server_of(port: int) -> int:
    """Process id of the server at a port, which leads a process group of its own."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if "vllm.entrypoints.openai.api_server" in words and str(port) in words:
            return os.getpgid(int(entry.parent.name))
    raise AssertionError(f"no server at port {port}")


def test_16_clients_of_a_vllm_server_that_is_killed_all_get_their_answers(
    serving_python, serving_variables, exported, tmp_path
):
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "hyperdflash.cli", "bench-serve", "--target", str(exported / "target")]
    command += ["--drafter", str(exported / "drafter"), "--prompts", str(tmp_path / "prompts.jsonl")]
    command += ["--output", str(tmp_path / "out"), "--python", str(serving_python), "--port", str(port)]
    command += ["--concurrency", "16", "--requests", "32", "--max_new_tokens", "32", "--verification", "false"]
    command += [
        "--server_args=--enforce-eager --max-model-len 1024 --max-num-seqs 16 --distributed-executor-backend uni"
    ]
    with (tmp_path / "log").open("wb") as log:
        bench = subprocess.Popen(command, env=serving_variables, stdout=log, stderr=log, cwd=ROOT)
    try:
        deadline = time.monotonic() + PATIENCE
        while drafted_rounds(port) < 20 and bench.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        assert bench.poll() is None, (tmp_path / "log").read_text(errors="replace")[-3000:]
        os.killpg(server_of(port), signal.SIGKILL)
        assert bench.wait(PATIENCE) == 0, (tmp_path / "log").read_text(errors="replace")[-3000:]
    finally:
        if bench.poll() is None:
            bench.terminate()  # and with it its server
            bench.wait(60)
    cells = json.loads((tmp_path / "out" / "results.json").read_text())["cells"]
    alone, drafted = cells["target-only"]["16"], cells["HyperDFlash"]["16"]
    assert drafted["requests"] == 32 and drafted["retries"] >= 1 and drafted["restarts"] == 1
    assert alone["requests"] == 32 and alone["retries"] == 0
    assert drafted["tokens"] == pytest.approx(alone["tokens"], rel=0.1)  # a near-tie may end a text elsewhere
