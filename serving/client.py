"""Asks an OpenAI-compatible server and times its answers; a request that a lost server takes along is sent again."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx2

FIRST_WAIT, LONGEST_WAIT = 1.0, 10.0  # seconds between attempts
METRICS_PREFIX = "vllm:spec_decode_num_"


@dataclass
class Timing:
    """One answered request. Seconds count from when it was first sent, lost attempts included."""

    tokens: int
    first_token_seconds: float
    seconds: float
    retries: int

    @property
    def decode_seconds(self) -> float:
        """From the first token to the last."""
        return self.seconds - self.first_token_seconds


class Client:
    """Asks the server at `url` (with `/v1`), inside an `async with`; what a lost server takes along is asked again.

    Args:
        retries: times that a request is sent again, a second after the first loss, ten after later ones.
        timeout: seconds without a word from the server after which a request counts as lost.

    Raises:
        ValueError: the server refuses a request (status 4xx): it would refuse it again.
        ConnectionError: a request was lost in every attempt.
    """

    def __init__(self, url: str, retries: int, timeout: float):
        self.url, self.retries = url.rstrip("/"), retries
        self.client = httpx2.AsyncClient(
            limits=httpx2.Limits(max_connections=None), timeout=httpx2.Timeout(timeout, pool=None)
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_) -> None:
        await self.client.aclose()

    async def run(
        self, requests: list[dict[str, Any]], concurrency: int, finish: Callable[[Timing], Any] = lambda timing: None
    ) -> list[Timing]:
        """Timings of `requests` (bodies for `/completions`), in their order; `finish` is called with each."""
        timings: list[Timing | None] = [None] * len(requests)
        waiting = iter(enumerate(requests))

        async def work() -> None:
            for index, request in waiting:
                body = request | {"stream": True, "stream_options": {"include_usage": True}}
                start = time.perf_counter()
                (first, tokens), lost = await self._insist(lambda body=body: self._stream(body))
                timings[index] = Timing(tokens, first - start, time.perf_counter() - start, lost)
                finish(timings[index])

        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(requests))):
                group.create_task(work())
        return timings

    async def get(self, url: str) -> httpx2.Response:
        """A page of the server's."""

        async def ask() -> httpx2.Response:
            response = await self.client.get(url)
            check_status(response.status_code, url)
            return response

        return (await self._insist(ask))[0]

    async def _insist(self, ask: Callable[[], Awaitable[Any]]) -> tuple[Any, int]:
        """(answer, attempts that were lost)"""
        wait = FIRST_WAIT
        for attempt in range(self.retries + 1):
            try:
                return await ask(), attempt
            except (httpx2.TransportError, ConnectionError) as error:
                trouble = f"{type(error).__name__} {error}".strip()
            if attempt < self.retries:
                await asyncio.sleep(wait)
                wait = min(2 * wait, LONGEST_WAIT)
        raise ConnectionError(
            f"server: found {trouble} from {self.url} in {self.retries + 1} attempts, wanted an answer"
        )

    async def _stream(self, body: dict[str, Any]) -> tuple[float, int]:
        """(when the first token came, how many tokens came in all)"""
        first, tokens, ended = None, None, False
        url = f"{self.url}/completions"
        async with self.client.stream("POST", url, json=body) as response:
            if response.status_code != 200:
                check_status(response.status_code, url, (await response.aread()).decode(errors="replace"))
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    ended = True
                    break
                event = json.loads(data)
                if "error" in event:
                    raise ConnectionError(str(event["error"])[:200])
                if event.get("choices") and first is None:
                    first = time.perf_counter()
                if event.get("usage"):
                    tokens = event["usage"]["completion_tokens"]
        if not ended or first is None or tokens is None:
            raise ConnectionError("an answer that breaks off")
        return first, tokens


def check_status(status: int, url: str, text: str = "") -> None:
    """Raises `ConnectionError` for a server that fails, `ValueError` for one that refuses."""
    if status >= 500:
        raise ConnectionError(f"status {status}")
    if status != 200:
        raise ValueError(f"server: found status {status} from {url}, wanted 200: {text[:300]}".removesuffix(": "))


def read_counters(metrics: str) -> dict[str, Any]:
    """vLLM's counters of speculation out of its `/metrics` text, summed over engines: `drafts` (rounds),
    `draft_tokens`, `accepted_tokens`, and `accepted_per_slot`, a list."""
    totals = {"drafts": 0.0, "draft_tokens": 0.0, "accepted_tokens": 0.0}
    slots: dict[int, float] = {}
    for line in metrics.splitlines():
        if not line.startswith(METRICS_PREFIX):
            continue
        name, _, value = line.rpartition(" ")
        name, _, labels = name.partition("{")
        name = name.removeprefix(METRICS_PREFIX).removesuffix("_total")
        if name in totals:
            totals[name] += float(value)
        elif name == "accepted_tokens_per_pos":
            slot = int(labels.partition('position="')[2].partition('"')[0])
            slots[slot] = slots.get(slot, 0.0) + float(value)
    return totals | {"accepted_per_slot": [slots[slot] for slot in sorted(slots)]}


__all__ = ["Client", "Timing", "read_counters"]
