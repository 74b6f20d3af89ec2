"""The options of `hyperdflash bench-serve`."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field


@dataclass
class BenchServeArguments:
    """What `hyperdflash bench-serve` serves, what it asks, and where the results go.

    Raises:
        ValueError: an option out of its range. The message names it.
    """

    target: str = field(metadata={"help": "Folder or Hub id of the target, in the form that vLLM reads."})
    prompts: str = field(
        metadata={
            "help": "JSON lines (`.gz` may be) with `messages`, `prompt` or `turns`; an answer at the end, and "
            "turns behind the first, are left out."
        }
    )
    output: str = field(metadata={"help": "Folder for results.json, results.md and, with matplotlib, results.png."})
    drafter: str | None = field(default=None, metadata={"help": "HyperDFlash drafter: a folder, exported or not."})
    vanilla: str | None = field(
        default=None, metadata={"help": "Vanilla DFlash drafter, as `hyperdflash export --to dflash` writes it."}
    )
    num_draft_tokens: int = field(default=6, metadata={"help": "Drafts a round: the block's slots less one."})
    concurrency: list[int] = field(
        default_factory=lambda: [1, 2, 4, 8, 16], metadata={"help": "Requests in flight, one table row each."}
    )
    requests: int = field(default=32, metadata={"help": "Requests a cell; at least the concurrency is sent."})
    max_new_tokens: int = field(default=128, metadata={"help": "Tokens of an answer, at most."})
    temperature: float = field(default=0.0, metadata={"help": "0 decodes greedily; above 0 samples."})
    seed: int = field(default=0, metadata={"help": "Which prompts are drawn, and in which order."})
    verification: bool = field(
        default=True,
        metadata={
            "help": "Also serve drafts that cost nothing: what tells the cost of verifying from that of drafting. "
            "vLLM can do that by its V1 runner without asynchronous scheduling only: then all systems are served so."
        },
    )
    python: str | None = field(
        default=None, metadata={"help": "Python of the environment that has vLLM. Default: the one that runs this."}
    )
    server_args: str = field(
        default="",
        metadata={"help": 'More arguments of the server, as in a shell: --server_args="--max-model-len 4096".'},
    )
    servers: list[str] | None = field(
        default=None,
        metadata={
            "help": "NAME=URL of servers that run already, with NAME out of target-only, vanilla, HyperDFlash, "
            "verification; then none is started."
        },
    )
    port: int = field(default=8011, metadata={"help": "Port of the servers that are started."})
    start_timeout: float = field(default=1800.0, metadata={"help": "Seconds that a server may take to start."})
    retries: int = field(
        default=200,
        metadata={
            "help": "Times that a request is sent again when the server is gone or fails, a second apart at first, "
            "ten at last: 200 outlast the default of start_timeout."
        },
    )
    request_timeout: float = field(
        default=600.0, metadata={"help": "Seconds without a token after which a request counts as lost."}
    )
    overwrite: bool = field(default=False, metadata={"help": "Replace what is in the output folder."})
    json: bool = field(default=False, metadata={"help": "Print the result as one JSON document."})

    def __post_init__(self):
        self._require("request_timeout", self.request_timeout > 0, "above 0")
        for name in ("requests", "max_new_tokens", "num_draft_tokens"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        self._require("retries", self.retries >= 0, "at least 0")
        self._require("temperature", self.temperature >= 0, "0 or more")
        right = bool(self.concurrency) and all(count >= 1 for count in self.concurrency)
        self._require(
            "concurrency", right and len(set(self.concurrency)) == len(self.concurrency), "numbers from 1 on"
        )
        try:
            shlex.split(self.server_args)
        except ValueError as error:
            raise ValueError(f"server_args: found {self.server_args!r}, wanted shell words ({error})") from None

    def _require(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise ValueError(f"{name}: found {getattr(self, name)!r}, wanted {rule}")


__all__ = ["BenchServeArguments"]
