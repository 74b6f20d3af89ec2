"""The options of `hyperdflash regenerate`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

# What a vLLM server would otherwise take from the model's own generation_config.json
NEUTRAL_REQUEST_FIELDS = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass
class RegenerateArguments:
    """What `hyperdflash regenerate` asks, whom, and where the answers go.

    Raises:
        ValueError: an option out of its range, or one that does not go with another. The message names it.
    """

    target: str = field(
        metadata={"help": "Folder or Hub id of the target. With `server`, only its tokenizer is loaded."}
    )
    data: str = field(
        metadata={
            "help": "Rows with prompts: a file or folder of JSON lines or parquet, or a Hub id. Rows hold `messages` "
            "(or `conversations`) or `prompt`; a `completion` and the answers that they bring are replaced."
        }
    )
    output: str = field(
        metadata={
            "help": "JSON lines to append answers to, which `train --data` reads. Beside it: OUTPUT.manifest, what "
            "the run was, and OUTPUT.skipped, rows without an answer and why. A rerun goes on where it stopped."
        }
    )
    data_split: str = field(default="train", metadata={"help": "Split of a Hub data set."})
    max_rows: int | None = field(
        default=None,
        metadata={"help": "Ask for so many rows, drawn by `seed`; a rerun may ask for more. Default: all."},
    )
    turns: str = field(
        default="last",
        metadata={
            "help": "Which turns of `messages` the target answers: last, or every: each in turn, with its own earlier "
            "answers before it.",
            "choices": ["last", "every"],
        },
    )
    raw: bool = field(
        default=False, metadata={"help": "Take a `prompt` that is a string as it is, not as a user's message."}
    )
    max_prompt_length: int | None = field(
        default=None, metadata={"help": "Rows with longer prompts are skipped, in tokens."}
    )
    dataset_num_proc: int | None = field(default=None, metadata={"help": "Processes that render the prompts."})

    tokenizer: str | None = field(default=None, metadata={"help": "Folder or Hub id. Default: the target's."})
    chat_template: str | None = field(
        default=None, metadata={"help": "File with a chat template, for a tokenizer that has none or another."}
    )
    thinking_share: float = field(
        default=0.0, metadata={"help": "Share of rows that are answered in think mode, drawn by `seed` and row id."}
    )
    thinking_variable: str | None = field(
        default=None,
        metadata={
            "help": "The chat template's variable for think mode. Default: thinking or enable_thinking, whichever "
            "the template has."
        },
    )

    temperatures: list[float] = field(
        default_factory=lambda: [0.0],
        metadata={"help": "Each row draws one of these, by `seed` and row id; 0 is greedy. Repeat one to weigh it."},
    )
    top_p: float = field(default=1.0, metadata={"help": "Sample within this probability mass only."})
    max_new_tokens: int = field(default=2048, metadata={"help": "Tokens of an answer, at most."})
    cut_answers: str = field(
        default="keep",
        metadata={
            "help": "Answers that reach max_new_tokens: keep, marked by `finish_reason: length`, or drop.",
            "choices": ["keep", "drop"],
        },
    )
    seed: int = field(default=0, metadata={"help": "Seed of every draw."})

    target_revision: str | None = field(default=None, metadata={"help": "Revision of the target on the Hub."})
    target_dtype: str = field(
        default="auto",
        metadata={"help": "Type of the target's weights: auto (as stored), bfloat16, float16, float32."},
    )
    target_init_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "JSON: further arguments of from_pretrained for the target (device_map, ...)."},
    )
    attn_implementation: str | None = field(
        default=None,
        metadata={"help": "Attention of the target; shared_key is V4's own without a copy of its one key head."},
    )
    device: str | None = field(default=None, metadata={"help": "Device; cuda if there is one, else cpu, by default."})
    batch_size: int = field(default=32, metadata={"help": "Prompts that the target answers together."})
    length_spread: int = field(
        default=0,
        metadata={
            "help": "By how many tokens prompts of a batch may differ in length; the ends of longer ones are read "
            "token by token. 0: equal lengths only."
        },
    )

    server: str | None = field(
        default=None,
        metadata={
            "help": "Base URL of an OpenAI-compatible server that has the target, as in http://host:8000/v1. Its "
            "completions endpoint is used, which takes token ids. Default: the target in this process."
        },
    )
    server_model: str | None = field(default=None, metadata={"help": "Name on the server. Default: `target`."})
    token_ids: str = field(
        default="exact",
        metadata={
            "help": "exact: the server returns the token ids of its answers (vLLM's return_token_ids). text: it "
            "returns text, which is tokenized again and may differ from what the target wrote.",
            "choices": ["exact", "text"],
        },
    )
    request_fields: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "JSON: further fields of each request, over our own; null leaves one of ours out, for servers "
            "that refuse what OpenAI does not have (top_k, min_p, repetition_penalty)."
        },
    )
    concurrency: int = field(default=64, metadata={"help": "Requests at the server at one time."})
    request_timeout: float = field(default=3600.0, metadata={"help": "Seconds until a request counts as failed."})
    max_retries: int = field(
        default=8, metadata={"help": "Retries of a request that failed for no fault of its own (429, 5xx, network)."}
    )
    retry_wait: float = field(
        default=1.0, metadata={"help": "Seconds before the first retry; doubled each time, a minute at most."}
    )
    api_key_variable: str = field(
        default="OPENAI_API_KEY", metadata={"help": "Environment variable with the server's key, if it wants one."}
    )

    def __post_init__(self):
        for name in ("target_init_kwargs", "request_fields"):
            if isinstance(value := getattr(self, name), str):
                try:
                    setattr(self, name, json.loads(value))
                except ValueError as error:
                    raise ValueError(f"{name}: found {value!r}, wanted JSON ({error})") from None
            self._require(name, isinstance(getattr(self, name), dict | None), "a JSON object")
        self.temperatures = [float(temperature) for temperature in self.temperatures]
        right = all(value == 0 or 1e-3 <= value < float("inf") for value in self.temperatures)
        self._require("temperatures", self.temperatures and right, "at least one, each 0 or from 0.001 on")
        self._require("top_p", 0 < self.top_p <= 1, "above 0 and at most 1")
        self._require("thinking_share", 0 <= self.thinking_share <= 1, "0 to 1")
        for name in ("max_new_tokens", "batch_size", "concurrency", "max_rows", "max_prompt_length"):
            value = getattr(self, name)
            self._require(name, value is None or value >= 1, "at least 1")
        for name in ("length_spread", "max_retries", "retry_wait"):
            self._require(name, getattr(self, name) >= 0, "at least 0")
        self._require("request_timeout", self.request_timeout > 0, "above 0")
        self._require("target_dtype", self.target_dtype in ("auto", "float32", "bfloat16", "float16"), "a known type")
        self._require("turns", self.turns in ("last", "every"), "last or every")
        self._require("cut_answers", self.cut_answers in ("keep", "drop"), "keep or drop")
        self._require("token_ids", self.token_ids in ("exact", "text"), "exact or text")
        if self.server is not None:
            url = urlsplit(self.server)
            self._require("server", url.scheme in ("http", "https") and url.hostname, "http://host:port/v1")
            if url.username or url.password:
                raise ValueError(f"server: found a key in the URL, wanted it in the variable {self.api_key_variable}")

    def _require(self, name: str, holds: Any, rule: str) -> None:
        if not holds:
            raise ValueError(f"{name}: found {getattr(self, name)!r}, wanted {rule}")

    @property
    def sampling(self) -> dict[str, Any]:
        """What changes an answer, as the manifest records it."""
        names = ["temperatures", "top_p", "max_new_tokens", "seed"]
        names += ["server_model", "token_ids", "request_fields"] if self.server else ["target_dtype"]
        return {"backend": "server" if self.server else "transformers"} | {name: getattr(self, name) for name in names}


__all__ = ["NEUTRAL_REQUEST_FIELDS", "RegenerateArguments"]
