"""The options of `hyperdflash doctor`."""

from __future__ import annotations

from dataclasses import dataclass, field

DTYPES = ("float32", "bfloat16", "float16")


@dataclass
class DoctorArguments:
    """`doctor`: does a drafter decode as it was trained?"""

    drafter: str = field(metadata={"help": "Folder or Hub id of the drafter."})
    target: str = field(metadata={"help": "Folder or Hub id of the target."})
    data: str = field(metadata={"help": "Rows whose prompts are answered, in any form that `train --data` takes."})
    data_split: str = field(default="train", metadata={"help": "Split of a Hub data set."})
    training: str | None = field(
        default=None,
        metadata={
            "help": "What training recorded: a provenance.json, or a YAML file of arguments or config fields. "
            "Default: the provenance.json beside the drafter."
        },
    )
    rows: int = field(default=4, metadata={"help": "How many rows, from the first on."})
    max_new_tokens: int = field(default=64, metadata={"help": "Tokens that the target writes for a row, at most."})
    num_draft_tokens: int | None = field(
        default=None,
        metadata={
            "help": "Drafts a round that serving is meant to ask for (num_assistant_tokens, vLLM's "
            "num_speculative_tokens); the block's own number by default."
        },
    )
    dtype: str = field(default="float32", metadata={"help": "float32, bfloat16 or float16, of both models."})
    device: str | None = field(default=None, metadata={"help": "Device; cuda if there is one, else cpu, by default."})
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Run the code in the drafter's folder instead of the installed."}
    )
    json: bool = field(default=False, metadata={"help": "Print the report as one JSON document."})

    def __post_init__(self):
        for name in ("rows", "max_new_tokens", "num_draft_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"DoctorArguments.{name}: found {value}, wanted at least 1")
        if self.max_new_tokens < 3:
            raise ValueError(
                f"DoctorArguments.max_new_tokens: found {self.max_new_tokens}, wanted at least 3: an anchor, a draft, "
                "and the target's own token behind it"
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"DoctorArguments.dtype: found {self.dtype!r}, wanted one of {DTYPES}")
