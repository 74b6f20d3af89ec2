"""A drafter's `README.md`: out of its config, its provenance and an evaluation, and of nothing else."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers.utils import CHAT_TEMPLATE_FILE

from ..configuration_hyperdflash import HyperDFlashConfig
from ..conversion.export import kind_of
from ..conversion.export_drafter import check_layout, load_drafter_config
from ..conversion.weights import stored_shapes
from ..evaluation.report import AVERAGE
from ..evaluation.tasks import TASKS
from ..utils.chat import TEMPLATES
from ..utils.fingerprints import checkpoint_fingerprints
from ..utils.folders import whole_file
from ..utils.provenance import PROVENANCE_FILE, published, read_provenance
from .arguments import CardArguments, CardSettings

TEMPLATE = Path(__file__).parent / "templates" / "drafter.md.jinja"
CARD_FILE, REPORT_FILE, FIGURE_FOLDER = "README.md", "report.json", "figures"
FIGURES = {"acceptance.svg": "Acceptance by position", "cost.svg": "What a round costs"}
TAGS = ["hyperdflash", "dflash", "speculative-decoding"]
SHOWN_TRAINING = ("train_runtime", "train_loss", "accepted_length", "eval_accepted_length")
SHOWN_SETTINGS = ("learning_rate", "per_device_train_batch_size", "kl_weight")


def run_card(args: CardArguments) -> dict[str, Any]:
    """Writes the card of `args.drafter`, and beside it the chat template and the figures (a folder) that it names.

    Returns:
        JSON values: `output`, `figures` (file names) and `sections` (the card's headings).

    Raises:
        ValueError, OSError: a folder that holds no drafter, results of another drafter, a card that is there.
    """
    output = Path(args.output) if args.output else Path(args.drafter) / CARD_FILE
    if output.exists() and not args.overwrite:
        raise FileExistsError(f"output: found {str(output)!r}, wanted no such file, or --overwrite true")
    card = build_card(args, args.repo_id)
    write_card(card, args.results, output)
    copy_chat_template(Path(args.drafter), output.parent)
    sections = [line[3:] for line in card.text.splitlines() if line.startswith("## ")]
    return {"output": str(output), "figures": figure_names(args.results), "sections": sections}


def write_card(card: ModelCard, results: str | None, output: Path) -> None:
    """Writes the card to the file `output`, and its figures beside it."""
    for name in figure_names(results):
        (output.parent / FIGURE_FOLDER).mkdir(exist_ok=True)
        (output.parent / FIGURE_FOLDER / name).write_bytes((Path(results) / name).read_bytes())
    with whole_file(output) as path:
        card.save(path)


def build_card(args: CardSettings, repo_id: str | None = None) -> ModelCard:
    """The card of the drafter in `args.drafter`, as huggingface_hub's own class.

    Args:
        args: what the folder does not know. repo_id: the Hub id for the examples; the folder's name by default.

    Raises:
        ValueError, OSError: see [`run_card`].
    """
    folder = Path(args.drafter)
    if not folder.is_dir():
        raise FileNotFoundError(f"drafter: found no folder {args.drafter!r}, wanted one")
    if (kind := kind_of(folder)) != "drafter":
        raise ValueError(f"drafter: found a model of kind {kind!r} in {args.drafter!r}, wanted a drafter")
    config = load_drafter_config(folder)
    base_model, revision = target_of(args, config)
    name = (repo_id or folder.resolve().name).rsplit("/")[-1]
    target = base_model or config.target_name_or_path or f"a target of type {config.target_model_type}"
    report = read_report(args.results)
    label = shown = measures = None
    if report is not None:
        try:
            label = find_system(report, folder, args.system)
            shown, measures = describe_results(report, label), list(eval_results(report, label))
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(
                f"results: found a {REPORT_FILE} in {args.results!r} without what `eval` writes "
                f"({type(error).__name__}: {error}), wanted a whole one"
            ) from None
    data = ModelCardData(
        base_model=base_model,
        base_model_relation="adapter" if base_model else None,  # of the Hub's four relations the one that fits
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=TAGS,
        datasets=args.datasets,
        license=args.license,
        model_name=name,
        eval_results=measures,
    )
    if not data.eval_results:
        data.eval_results = data.model_name = None  # the class would write an empty index
    card = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        name=name,
        repo_id=repo_id or published(str(args.drafter)),
        config=config,
        target=target,
        revision=revision,
        revision_argument=f', revision="{revision}"' if revision else "",
        chat_template=CHAT_TEMPLATE_FILE if find_chat_template(folder, config) else None,
        drafts=config.geometry.num_draft_tokens,
        parameters=f"{sum(math.prod(shape) for shape in stored_shapes(folder).values()):,}",
        context=describe_context(config),
        reducer=describe_reducer(config),
        layout=find_layout(config),
        stages=read_stages(folder),
        results=shown,
        license=args.license,
    )
    if ModelCard(str(card)).data.to_dict() != data.to_dict():
        raise ValueError("card: found front matter that huggingface_hub reads otherwise than it was written")
    return card


def find_chat_template(folder: Path, config: HyperDFlashConfig) -> Path | None:
    """The chat template for targets without one: that of the drafter's training if the folder has it, else that of
    this package for the target's kind; `None` if there is neither."""
    if (folder / CHAT_TEMPLATE_FILE).is_file():
        return folder / CHAT_TEMPLATE_FILE
    return TEMPLATES.get(config.target_model_type)


def copy_chat_template(drafter: Path, output: Path) -> None:
    """Puts [`find_chat_template`] into the folder `output`."""
    file = find_chat_template(drafter, load_drafter_config(drafter))
    if file is not None and not (output / CHAT_TEMPLATE_FILE).is_file():
        shutil.copyfile(file, output / CHAT_TEMPLATE_FILE)


def target_of(args: CardSettings, config: HyperDFlashConfig) -> tuple[str | None, str | None]:
    """Hub id and revision of the target; `None` for a target that is a folder of somebody's machine.

    A recorded name counts as a Hub id only with a revision beside it: a path such as `checkpoints/target` reads alike.
    """
    if args.base_model is not None:
        same = args.base_model == config.target_name_or_path
        return args.base_model, args.base_model_revision or (config.target_revision if same else None)
    if config.target_revision is not None:
        return config.target_name_or_path, args.base_model_revision or config.target_revision
    return None, None


def describe_context(config: HyperDFlashConfig) -> str:
    streams = f"{config.hc_mult} residual streams"
    if config.context_source == "pre_hc_head":
        return f"the target's {streams} after its last layer, before `hc_head` collapses them"
    return f"the target's {streams} after the layers {', '.join(map(str, config.target_layer_ids))} (from 0)"


def describe_reducer(config: HyperDFlashConfig) -> str:
    if config.reducer == "hc_gate":
        norm = {"value": "a norm on each stream's values", "pre_gate": "a norm on each stream", "none": "no norm"}
        return f"sigmoid gates of the form of the target's own `hc_head`, with {norm[config.path_norm]}"
    pooled = "their mean" if config.stream_pooling == "mean" else "all of them, flattened"
    return f"one dense projection (`fc`) of {pooled}"


def find_layout(config: HyperDFlashConfig) -> str | None:
    """The layout of `hyperdflash export` by which vLLM serves the drafter, or `None`."""
    for layout in ("vllm", "dflash"):
        try:
            check_layout(config, layout)
        except ValueError:
            continue
        return layout
    return None


def read_stages(folder: Path) -> list[dict[str, Any]]:
    """The training runs that `provenance.json` records, the first one first.

    Raises:
        ValueError: the file is no such record.
    """
    try:
        records, waiting = [], [record] if (record := read_provenance(folder)) else []
        while waiting:
            record = waiting.pop()
            records.append(record)
            waiting += record.get("earlier") or []
        return [describe_stage(record) for record in reversed(records) if record.get("training_arguments")]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{folder / PROVENANCE_FILE}: found no record that `hyperdflash train` writes "
            f"({type(error).__name__}: {error}), wanted one, or no such file"
        ) from None


def describe_stage(record: dict[str, Any]) -> dict[str, Any]:
    """Date, command and facts of one training run, for the template."""
    settings, data, metrics = record["training_arguments"], record.get("data") or {}, record.get("metrics") or {}
    length = "max_steps" if settings.get("max_steps", -1) > 0 else "num_train_epochs"
    shown = [", ".join(f"{name}: {settings[name]}" for name in (length, *SHOWN_SETTINGS) if name in settings)]
    if data.get("train_rows"):
        shown.append(f"{data['train_rows']:,} rows of training data")
    measured = [f"{name}: {metrics[name]:.4g}" for name in SHOWN_TRAINING if name in metrics]
    if measured:
        shown.append(f"measured in training: {', '.join(measured)}")
    return {"date": record["time"][:10], "command": shlex.join(published(record["command"])), "facts": shown}


def read_report(results: str | None) -> dict[str, Any] | None:
    """The `report.json` in a folder of results.

    Raises:
        FileNotFoundError: there is none. ValueError: it is no report of `hyperdflash eval`.
    """
    if results is None:
        return None
    file = Path(results) / REPORT_FILE
    if not file.is_file():
        raise FileNotFoundError(f"results: found no {REPORT_FILE} in {results!r}, wanted the output of `eval`")
    try:
        report = json.loads(file.read_bytes())
        report["tables"].items(), report["settings"]["systems"].items()
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{file}: found something else, wanted a report of `hyperdflash eval`") from None
    return report


def find_system(report: dict[str, Any], folder: str | os.PathLike, label: str | None) -> str:
    """The label in the report of the system that is this drafter, told by the fingerprints of its weights.

    Raises:
        ValueError: none is, or `label` is another.
    """
    own = {name: value for name, value in checkpoint_fingerprints(folder).items() if name != "config.json"}
    systems = report["settings"]["systems"]
    same = []
    for name, identity in systems.items():
        recorded = identity.get("checkpoint")
        if isinstance(recorded, dict) and own == {k: v for k, v in recorded.items() if k != "config.json"}:
            same.append(name)
    if label is not None:
        if label not in systems:
            raise ValueError(f"system: found {label!r}, wanted one of {', '.join(systems)}")
        if isinstance(systems[label].get("checkpoint"), dict) and label not in same:
            raise ValueError(f"system: found {label!r}, which was measured with other weights than those in {folder}")
        return label
    if len(same) != 1:
        raise ValueError(
            f"results: found {len(same)} systems with the weights in {str(folder)!r} among {', '.join(systems)}, "
            "wanted one, or its label as system"
        )
    return same[0]


def eval_results(report: dict[str, Any], label: str) -> Iterable[EvalResult]:
    """The measures of one system, as the Hub's model index has them: by task two for each mode and temperature."""
    for mode, temperature, task, cell in cells_of(report, label):
        known = TASKS.get(task)
        for metric, title in (("accepted_length", "Accepted length"), ("speedup", "Speed-up")):
            yield EvalResult(
                task_type="text-generation",
                task_name="Speculative decoding",
                dataset_type=known.path if known else task,
                dataset_name=known.title if known else task,
                dataset_config=known.options.get("name") if known else None,
                dataset_split=known.options.get("split") if known else None,
                metric_type=metric,
                metric_name=f"{title}, {mode}, T = {temperature}",
                metric_value=round(cell[metric], 4),
            )


def cells_of(report: dict[str, Any], label: str) -> Iterable[tuple[str, str, str, dict[str, Any]]]:
    """(mode, temperature, task, cell) of one system's measures, without the averages."""
    for mode, by_temperature in report["tables"].items():
        for temperature, table in by_temperature.items():
            for task, cell in table[label].items():
                if "prompts" in cell and math.isfinite(cell["speedup"]) and math.isfinite(cell["accepted_length"]):
                    yield mode, temperature, task, cell


def describe_results(report: dict[str, Any], label: str) -> dict[str, Any]:
    """Tables, figures and circumstances for the template."""
    tables, others = [], []
    for mode, by_temperature in report["tables"].items():
        for temperature, table in by_temperature.items():
            rows = []
            for task, cell in table[label].items():
                title = TASKS[task].title if task in TASKS else task
                measures = [number(cell, "speedup", "×"), number(cell, "accepted_length")]
                rows.append([title, str(cell.get("prompts", "")), *measures])
            tables.append({"title": f"{mode}, temperature {temperature}", "rows": rows})
            for system, cells in table.items():
                average = cells[AVERAGE]
                measures = [number(average, "speedup", "×"), number(average, "accepted_length")]
                others.append([mode, temperature, system, *measures])
    run, settings = report["runs"][-1], report["settings"]
    counts = report.get("identical", {}).get(label)
    return {
        "tables": tables,
        "others": others if len(settings["systems"]) > 1 else None,
        "intervals": f"{report['bootstrap']['level']:.0%}" if report.get("bootstrap") else None,
        "identical": counts and f"{counts['identical']} of {counts['texts']} are the target's own, token by token",
        "figures": [
            {"title": title, "path": f"{FIGURE_FOLDER}/{name}"}
            for name, title in FIGURES.items()
            if name in (report.get("figures") or ())
        ],
        "facts": [
            f"{settings['dtype']}, up to {settings['max_new_tokens']} new tokens, threads: {settings['threads']}, "
            f"device {settings['device']}: {run['machine']}",
            "Versions: " + ", ".join(f"{name} {version}" for name, version in run["versions"].items()),
            f"Made by `{shlex.join(published(run['command']))}`",
        ],
    }


def number(cell: dict[str, Any], name: str, unit: str = "") -> str:
    """A measure with its interval, as a cell of a table; empty where it was not measured."""
    if not math.isfinite(cell[name]):
        return ""
    interval = cell.get(f"{name}_interval")
    if not interval or interval[0] == interval[1]:
        return f"{cell[name]:.2f}{unit}"
    return f"{cell[name]:.2f}{unit} [{interval[0]:.2f}, {interval[1]:.2f}]"


def figure_names(results: str | None) -> list[str]:
    """Those of a report's figures that the card shows."""
    drawn = [] if results is None else read_report(results).get("figures") or ()
    return [name for name in FIGURES if name in drawn]


__all__ = ["build_card", "run_card"]
