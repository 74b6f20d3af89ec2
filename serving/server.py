"""A vLLM server as a child process: started, waited for, started again if it dies, stopped."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx2

POLL_SECONDS = 0.5
MOST_RESTARTS = 3


class Server:
    """`python -m vllm.entrypoints.openai.api_server ARGS` under environment `variables`, at `url`, inside a `with`.

    Raises:
        ValueError: the port is taken; the server ends, or is not ready in `timeout` seconds. The message ends with the
            last error that the server logged.
    """

    def __init__(
        self, python: str, args: list[str], port: int, timeout: float, variables: dict[str, str] | None = None
    ):
        self.command = [python, "-m", "vllm.entrypoints.openai.api_server", "--port", str(port), *args]
        self.port, self.timeout, self.restarts = port, timeout, 0
        self.variables = os.environ | (variables or {})
        self.url = f"http://127.0.0.1:{port}/v1"
        self.process: subprocess.Popen | None = None

    def __enter__(self) -> Server:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                raise ValueError(f"port: found {self.port} in use, wanted a free one")
        descriptor, self.log = tempfile.mkstemp(prefix="bench-serve-", suffix=".log")
        os.close(descriptor)
        # Whoever ends this process ends its server too
        self.old_handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        self._start()
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        self._stop(signal.SIGTERM)
        signal.signal(signal.SIGTERM, self.old_handler)
        os.unlink(self.log)

    async def watch(self) -> None:
        """Starts the server again whenever it dies, at most three times; runs until it is cancelled."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            if self.process.poll() is None:
                continue
            self.restarts += 1
            if self.restarts > MOST_RESTARTS:
                raise ValueError(f"server: found that it died {self.restarts} times: {self._last_error()}")
            self._stop(signal.SIGKILL)  # what the dead parent left behind
            self._start()

    def _start(self) -> None:
        with open(self.log, "ab") as log:
            # A session of its own: the engine's processes end with the server's, however it ends
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=log, env=self.variables, start_new_session=True
            )

    def _wait(self) -> None:
        deadline = time.monotonic() + self.timeout
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ValueError(f"server: found that it ended while it started: {self._last_error()}")
            try:
                if httpx2.get(self.url.removesuffix("/v1") + "/health", timeout=5.0).is_success:
                    return
            except httpx2.TransportError:
                pass
            time.sleep(POLL_SECONDS)
        raise ValueError(
            f"server: found none after {self.timeout} seconds, wanted one that is ready: {self._last_error()}"
        )

    def _stop(self, first_signal: signal.Signals) -> None:
        for number, patience in ((first_signal, 30.0), (signal.SIGKILL, 10.0)):
            try:
                os.killpg(self.process.pid, number)
                self.process.wait(patience)
            except ProcessLookupError:
                return
            except subprocess.TimeoutExpired:
                continue

    def _last_error(self) -> str:
        lines = Path(self.log).read_text(errors="replace").splitlines()
        errors = [line for line in lines if "Error" in line and "See root cause" not in line]
        return (errors or lines or ["it wrote nothing"])[-1].strip()[-500:]


def server_arguments(target: str, speculation: str | None, more: str) -> list[str]:
    """Arguments of the server for `target`, with a `--speculative-config` or without."""
    args = ["--model", target, *shlex.split(more)]
    return args if speculation is None else [*args, "--speculative-config", speculation]


__all__ = ["Server", "server_arguments"]
