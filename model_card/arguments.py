"""The options of `hyperdflash card` and `hyperdflash push`."""

from __future__ import annotations

from dataclasses import dataclass, field

from huggingface_hub.utils import validate_repo_id


@dataclass
class CardSettings:
    """What a card says that no file in the drafter's folder knows."""

    drafter: str = field(metadata={"help": "Folder of the drafter."})
    results: str | None = field(
        default=None, metadata={"help": "Output folder of `hyperdflash eval`. Without it the card has no results."}
    )
    system: str | None = field(
        default=None,
        metadata={"help": "The drafter's label in the results. Default: the system with this drafter's weights."},
    )
    base_model: str | None = field(
        default=None,
        metadata={"help": "Hub id of the target. Default: the config's, if its target came from the Hub."},
    )
    base_model_revision: str | None = field(
        default=None, metadata={"help": "Revision of the target. Default: the config's."}
    )
    datasets: list[str] | None = field(default=None, metadata={"help": "Hub ids of the data that it was trained on."})
    license: str | None = field(default=None, metadata={"help": "Licence of the weights, as the Hub abbreviates it."})

    def __post_init__(self):
        for name in ("base_model", "repo_id"):
            if (value := getattr(self, name, None)) is not None:
                check_hub_id(name, value)
        for value in self.datasets or ():
            check_hub_id("datasets", value)
        if self.system is not None and self.results is None:
            raise ValueError(f"system: found {self.system!r} without results, wanted the folder of an evaluation")


@dataclass
class CardArguments(CardSettings):
    """`card`: writes the drafter's `README.md`."""

    repo_id: str | None = field(
        default=None, metadata={"help": "Hub id that the drafter will have. Default: the folder's name."}
    )
    output: str | None = field(default=None, metadata={"help": "File to write. Default: README.md in the folder."})
    overwrite: bool = field(default=False, metadata={"help": "Replace a card that is there."})


@dataclass
class PushArguments(CardSettings):
    """`push`: uploads a drafter to the Hub."""

    repo_id: str | None = field(default=None, metadata={"help": "Hub id to push to: organization/name."})
    private: bool = field(default=True, metadata={"help": "Visibility of a repository that is new."})
    revision: str | None = field(
        default=None, metadata={"help": "Branch to commit to; made if it is not there. Default: main."}
    )
    create_pr: bool = field(default=False, metadata={"help": "Open a pull request instead of committing."})
    commit_message: str = field(default="Upload drafter", metadata={"help": "Title of the commit."})
    dry_run: bool = field(
        default=False, metadata={"help": "Check everything and list files and sizes; nothing goes to the Hub."}
    )
    force: bool = field(
        default=False,
        metadata={"help": "Push in spite of a missing or failing diagnosis, or of code files that differ."},
    )
    doctor_report: str | None = field(
        default=None, metadata={"help": "Output of `hyperdflash doctor --json` on these very weights."}
    )
    target: str | None = field(
        default=None, metadata={"help": "With `data`, instead of a report: the target to run `doctor` with."}
    )
    data: str | None = field(default=None, metadata={"help": "With `target`: the rows that `doctor` looks at."})

    def __post_init__(self):
        super().__post_init__()
        if self.repo_id is None:
            raise ValueError("repo_id: found none, wanted organization/name")
        if (self.target is None) != (self.data is None):
            raise ValueError("target, data: found one without the other, wanted both, for `doctor`")
        if self.target is not None and self.doctor_report is not None:
            raise ValueError("doctor_report: found one beside target and data, wanted one or the other")


def check_hub_id(name: str, value: str) -> None:
    """Whether `value` is the id of a repository.

    Raises:
        ValueError: it is not, for the option `name`.
    """
    try:
        validate_repo_id(value)
    except ValueError:
        raise ValueError(f"{name}: found {value!r}, wanted a Hub id: organization/name") from None


__all__ = ["CardArguments", "CardSettings", "PushArguments"]
