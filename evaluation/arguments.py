"""The options of `hyperdflash eval`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

MODES = ("non-think", "think-high")


@dataclass
class EvalArguments:
    """What `hyperdflash eval` asks, whom, how they decode, and where records and report go.

    Raises:
        ValueError: an option out of its range, or one that is missing. The message names it.
    """

    output: str = field(
        metadata={
            "help": "Folder for records.jsonl (appended text by text), settings.json, report.md, report.json and the "
            "figures. A rerun with the same settings goes on where it stopped."
        }
    )
    target: str | None = field(default=None, metadata={"help": "Folder or Hub id of the target."})
    systems: list[str] | None = field(
        default=None,
        metadata={
            "help": "Who decodes: target (needed, the baseline), prompt-lookup[:DRAFTS], and assistants as "
            "NAME:PATH[:DRAFTS[:CONFIDENCE]], with DRAFTS the drafts a round and CONFIDENCE what a token's likelihood "
            "must be for a draft to go on. Example: --systems target prompt-lookup:6 "
            "MTP:runs/mtp:3 HyperDFlash:runs/drafter"
        },
    )
    tasks: list[str] | None = field(
        default=None,
        metadata={
            "help": "gsm8k, math-500, aime25, humaneval, mbpp, livecodebench, mt-bench, or JSON-lines files. Default: "
            "all files in `data`."
        },
    )
    data: str | None = field(
        default=None,
        metadata={"help": "Folder with TASK.jsonl for each of the tasks. Default: the tasks come from the Hub."},
    )
    per_task: int | None = field(
        default=None, metadata={"help": "Prompts of each task, spread evenly over it. Default: all."}
    )
    shard: str | None = field(
        default=None,
        metadata={
            "help": "I/N: only every Nth prompt, from the Ith on (from 0). Shards with the same output are combined."
        },
    )

    modes: list[str] = field(
        default_factory=lambda: ["non-think"],
        metadata={"help": "non-think, think-high (the chat template opens the answer with <think>), or both."},
    )
    temperatures: list[float] = field(
        default_factory=lambda: [0.0], metadata={"help": "0 decodes greedily; each other one, from 0.001 on, samples."}
    )
    top_p: float = field(default=1.0, metadata={"help": "Sample within this probability mass only."})
    max_new_tokens: int = field(default=256, metadata={"help": "Tokens of an answer, at most."})
    seed: int = field(default=0, metadata={"help": "Seed of sampling, and of the bootstrap."})

    dtype: str = field(
        default="float32", metadata={"help": "float32, bfloat16, float16, or auto: as the checkpoints are stored."}
    )
    device: str | None = field(default=None, metadata={"help": "Device; cuda if there is one, else cpu, by default."})
    threads: int | None = field(default=None, metadata={"help": "CPU threads. Default: torch's own number."})
    chat_template: str | None = field(
        default=None, metadata={"help": "File with a chat template, for a tokenizer that has none or another."}
    )
    thinking_variable: str | None = field(
        default=None,
        metadata={"help": "The template's variable for think mode. Default: thinking or enable_thinking."},
    )
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Run the code in the folders of target and assistants."}
    )

    report_only: bool = field(
        default=False, metadata={"help": "Decode nothing: make the report again, from the records that are there."}
    )
    records: list[str] | None = field(
        default=None,
        metadata={"help": "With report_only: folders of runs to combine into one report. Default: the output."},
    )
    bootstrap: int = field(default=2000, metadata={"help": "Resamples over prompts for the 95 %% intervals."})
    json: bool = field(default=False, metadata={"help": "Print the report as JSON instead of Markdown."})

    def __post_init__(self):
        self.temperatures = [float(temperature) for temperature in self.temperatures]
        right = all(value == 0 or 1e-3 <= value < float("inf") for value in self.temperatures)
        distinct = len(set(self.temperatures)) == len(self.temperatures)
        self._require("temperatures", self.temperatures and right and distinct, "different ones, each 0 or from 0.001")
        distinct = len(set(self.modes)) == len(self.modes)
        self._require("modes", self.modes and distinct and set(self.modes) <= set(MODES), " and/or ".join(MODES))
        self._require("top_p", 0 < self.top_p <= 1, "above 0 and at most 1")
        self._require("max_new_tokens", self.max_new_tokens >= 1, "at least 1")
        self._require("bootstrap", self.bootstrap >= 100, "at least 100")
        for name in ("per_task", "threads"):
            value = getattr(self, name)
            self._require(name, value is None or value >= 1, "at least 1")
        self._require("dtype", self.dtype in ("auto", "float32", "bfloat16", "float16"), "a known type")
        if self.shard is not None:
            match = re.fullmatch(r"(\d+)/(\d+)", self.shard)
            self._require("shard", match and int(match[1]) < int(match[2]), "I/N with I from 0 to N - 1")
        self._require("records", self.records is None or self.report_only, "none without report_only")
        if not self.report_only:
            self._require("target", self.target, "a folder or Hub id")
            self._require("systems", self.systems, "target and others")
            self._require("tasks", self.tasks or self.data, "tasks, or a folder as data")

    def _require(self, name: str, holds: object, rule: str) -> None:
        if not holds:
            raise ValueError(f"{name}: found {getattr(self, name)!r}, wanted {rule}")


__all__ = ["MODES", "EvalArguments"]
