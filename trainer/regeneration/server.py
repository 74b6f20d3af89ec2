"""An OpenAI-compatible server that has the target, vLLM above all: many requests at one time, each tried again."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx2
from transformers import PreTrainedTokenizerBase

from .arguments import NEUTRAL_REQUEST_FIELDS, RegenerateArguments
from .prompts import Answer, Conversation, Conversations, Question

RETRIED_STATUS = (408, 425, 429)  # and all from 500 on
REFUSED_STATUS = (400, 413, 422)  # this request's fault, where the settings have been seen to work
LONGEST_WAIT = 60.0  # seconds
FAILED = "failed"


class RequestRefused(ValueError):
    """The server will not answer a request, however often it is sent."""

    def __init__(self, url: str, status: int, message: str):
        super().__init__(f"server: found status {status} from {url}, wanted 200: {message}")
        self.status, self.message = status, message


class RequestFailed(ConnectionError):
    """A request failed in every attempt; `alone`: others were answered in the meantime."""

    def __init__(self, message: str, alone: bool):
        super().__init__(message)
        self.alone = alone


class ServerBackend:
    """Asks `{server}/completions` with token ids: the prompt is what our tokenizer made, to the token, and the answer
    what the server's `token_ids` say (vLLM's `return_token_ids`), not text tokenized once more.

    A request that fails for no fault of its own is sent again, after a wait that doubles or that the server names
    (`Retry-After`). When its attempts are used up: if other requests were answered since the first of them it is set
    aside as `failed`, which a rerun asks again; otherwise the server is gone and the run ends.

    Raises:
        RequestRefused: the settings, the key or the model's name are not the server's.
        RequestFailed: the server is gone.
        ValueError: an answer that is not of the API's form.
    """

    def __init__(self, args: RegenerateArguments, tokenizer: PreTrainedTokenizerBase, end_ids: set[int]):
        self.args, self.tokenizer, self.end_ids = args, tokenizer, end_ids
        self.url = args.server.rstrip("/") + "/completions"
        self.answered = 0  # requests so far

    def run(self, conversations: Conversations, finish: Callable[[Conversation], None]) -> None:
        """Asks until every conversation is done, and hands each over as soon as it is."""
        try:
            asyncio.run(self._run(conversations, finish))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _run(self, conversations: Conversations, finish: Callable[[Conversation], None]) -> None:
        key, many = os.environ.get(self.args.api_key_variable), self.args.concurrency
        limits = httpx2.Limits(max_connections=many, max_keepalive_connections=many)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with httpx2.AsyncClient(headers=headers, limits=limits, timeout=None) as client:
            await self._probe(client, conversations)
            shared = iter(conversations)

            async def work() -> None:
                for conversation in shared:
                    while not conversation.done:
                        conversation.take(await self._answer(client, conversation.question))
                    finish(conversation)

            async with asyncio.TaskGroup() as group:
                for _ in range(min(self.args.concurrency, len(conversations))):
                    group.create_task(work())

    async def _probe(self, client: httpx2.AsyncClient, conversations: Conversations) -> None:
        """One token for the shortest prompt: whatever the server has against it is an error of the settings."""
        shortest = min(range(len(conversations)), key=conversations.lengths.__getitem__)
        question = conversations[shortest].question
        body = await self._post(client, self._request(question) | {"max_tokens": 1})
        self._read(body)
        seen = body["choices"][0].get("prompt_token_ids")
        if seen is not None and seen != question.input_ids:
            raise ValueError(f"server: found a prompt of {len(seen)} other token ids, wanted the ones that were sent")

    async def _answer(self, client: httpx2.AsyncClient, question: Question) -> Answer:
        try:
            body = await self._post(client, self._request(question))
        except RequestRefused as error:
            if error.status not in REFUSED_STATUS:
                raise
            return Answer([], f"http_{error.status}", error.message)
        except RequestFailed as error:
            if not error.alone:
                raise
            return Answer([], FAILED, str(error))
        return self._read(body)

    def _request(self, question: Question) -> dict[str, Any]:
        as_wanted = {"return_token_ids": True} if self.args.token_ids == "exact" else {"skip_special_tokens": False}
        fields = {
            "model": self.args.server_model or self.args.target,
            "prompt": question.input_ids,
            "max_tokens": self.args.max_new_tokens,
            "temperature": question.temperature,
            "top_p": self.args.top_p if question.temperature else 1.0,
            "seed": question.seed,
        }
        fields |= NEUTRAL_REQUEST_FIELDS | as_wanted | (self.args.request_fields or {})
        return {name: value for name, value in fields.items() if value is not None}

    def _read(self, body: Any) -> Answer:
        try:
            choice = body["choices"][0]
            reason, ids = choice["finish_reason"], choice.get("token_ids")
            if self.args.token_ids == "text":
                ids = self.tokenizer(choice["text"], add_special_tokens=False)["input_ids"]
        except (KeyError, IndexError, TypeError):
            raise ValueError(f"server: found {str(body)[:200]!r}, wanted a completion with one choice") from None
        if ids is None:
            raise ValueError(
                "server: found an answer without token_ids, wanted a server that returns them (vLLM, from 0.10.2 on) "
                "or token_ids text"
            )
        known = range(len(self.tokenizer))
        if not isinstance(ids, list) or not all(type(token) is int and token in known for token in ids):
            raise ValueError(
                f"server: found the token ids {str(ids)[:80]}, wanted a list of ids below {len(self.tokenizer)}, the "
                "tokenizer's (is the server's model the target?)"
            )
        if reason == "stop" and not self.end_ids.intersection(ids[-1:]):
            ids = [*ids, self.tokenizer.eos_token_id]  # it is what ended the answer: no stop strings are sent
        return Answer(ids, reason or "none")

    async def _post(self, client: httpx2.AsyncClient, request: dict[str, Any]) -> Any:
        """The decoded body of a successful response."""
        wait, attempts = self.args.retry_wait, self.args.max_retries + 1
        for attempt in range(attempts):
            asked_wait = 0.0
            try:
                async with asyncio.timeout(self.args.request_timeout):
                    response = await client.post(self.url, json=request)
                if response.is_success:
                    body = response.json()
                    self.answered += 1
                    return body
                message = _error_message(response)
                if response.status_code < 500 and response.status_code not in RETRIED_STATUS:
                    raise RequestRefused(self.url, response.status_code, message)
                trouble, asked_wait = f"status {response.status_code}: {message}", _retry_after(response)
            except TimeoutError:
                trouble = f"no answer in {self.args.request_timeout} seconds"
            except httpx2.RequestError as error:
                trouble = f"{type(error).__name__} {error}".strip()
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                trouble = f"a body that is not JSON ({error})"
            if attempt == 0:
                answered_before = self.answered
            if attempt + 1 < attempts:
                await asyncio.sleep(max(asked_wait, wait * random.uniform(0.5, 1.0)))
                wait = min(2 * wait, LONGEST_WAIT)
        raise RequestFailed(
            f"server: found {trouble} from {self.url} in {attempts} attempts, wanted an answer",
            alone=self.answered > answered_before,
        )


def _error_message(response: httpx2.Response) -> str:
    """What the server says about an error: OpenAI's `error.message`, or the body's beginning."""
    try:
        body = response.json()
        error = body.get("error", body)
        return str(error["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return response.text[:300]


def _retry_after(response: httpx2.Response) -> float:
    """Seconds that the server asks to wait (RFC 9110, 10.2.3: a number or a date); 0 if it does not."""
    value = response.headers.get("Retry-After", "").strip()
    if value.isdigit():
        return float(value)
    try:
        return max((parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds(), 0.0)
    except (ValueError, TypeError):
        return 0.0


__all__ = ["FAILED", "RequestFailed", "RequestRefused", "ServerBackend"]
