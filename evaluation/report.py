"""From records to the paper's tables: measures by task and system, their intervals, Markdown and JSON."""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from ..utils.folders import whole_file
from .arguments import MODES
from .figures import draw_figures
from .metrics.accepted_length import accepted_length
from .metrics.decoding_efficiency import ideal_speedup, token_seconds
from .metrics.decoding_speedup import speedup
from .metrics.slot_acceptance import share
from .systems import TARGET
from .tasks import TASKS

AVERAGE = "average"
STATISTICS = (
    "rounds",
    "accepted",
    "plain_steps",
    "draft_seconds",
    "verify_seconds",
    "prefill_seconds",
    "accepted_per_slot",
    "reached_per_slot",
)
Totals = dict[str, np.ndarray]  # tokens, seconds, `STATISTICS`: [...], the slots' [..., slots]


def measure(totals: Totals, baseline: Totals) -> dict[str, np.ndarray]:
    """All measures of one system on one task, from sums over texts; `[...]` as the sums, the slots' `[..., slots]`.

    Args:
        totals: sums of `texts`, `tokens`, `seconds` and `STATISTICS` of the system. baseline: of the target alone.

    Returns:
        `speedup`, `cpu_speedup` (the same by seconds of the processor, which other processes take less from),
        `accepted_length` (tau, with the bonus token), `accepted_drafts` (without it), `ideal_speedup`,
        `free_draft_speedup`, `efficiency`, `tokens_per_second`; `draft_ms`, `verify_ms`, `rest_ms` a step (a round, or
        a step without a draft; the rest is all of the call but these two and the prompt's own pass); `unconditional`
        and `conditional` acceptance by slot.
    """
    base = (baseline["tokens"], baseline["seconds"])
    behind_first = ("texts", "tokens", "seconds", "prefill_seconds")
    alone, mine = (token_seconds(*(sums[name] for name in behind_first)) for sums in (baseline, totals))
    counts = (totals["accepted"], totals["rounds"], totals["plain_steps"])
    steps = np.maximum(totals["rounds"] + totals["plain_steps"], 1)
    rest = totals["seconds"] - sum(totals[f"{part}_seconds"] for part in ("prefill", "draft", "verify"))
    length = accepted_length(totals["accepted"], totals["rounds"])
    ideal = ideal_speedup(*counts, totals["verify_seconds"] + totals["draft_seconds"], alone)
    return {
        "speedup": speedup(totals["tokens"], totals["seconds"], *base),
        "cpu_speedup": speedup(totals["tokens"], totals["cpu_seconds"], baseline["tokens"], baseline["cpu_seconds"]),
        "accepted_length": length,
        "accepted_drafts": length - 1,
        "ideal_speedup": ideal,
        "free_draft_speedup": ideal_speedup(*counts, totals["verify_seconds"], alone),
        "efficiency": alone / mine / ideal,
        "tokens_per_second": totals["tokens"] / totals["seconds"],
        "draft_ms": 1e3 * totals["draft_seconds"] / steps,
        "verify_ms": 1e3 * totals["verify_seconds"] / steps,
        "rest_ms": 1e3 * rest / steps,
        "unconditional": share(totals["accepted_per_slot"], np.expand_dims(totals["rounds"], -1)),
        "conditional": share(totals["accepted_per_slot"], totals["reached_per_slot"]),
    }


def sum_by_prompt(records: list[dict[str, Any]]) -> Totals:
    """Sums over the turns of each prompt: `[prompts]`, the slots' `[prompts, slots]`; prompts in order of ids."""
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        rows[record["id"]].append(record)
    order = sorted(rows)
    totals = {
        name: np.array([sum(record[name] for record in rows[key]) for key in order], dtype=float)
        for name in ("tokens", "seconds", "cpu_seconds")
    }
    totals["texts"] = np.array([len(rows[key]) for key in order], dtype=float)
    for name in STATISTICS:
        values = [np.sum([record["statistics"][name] for record in rows[key]], axis=0) for key in order]
        totals[name] = np.array(values, dtype=float)
    return totals


def resample(name: str, prompts: int, number: int, seed: int) -> np.ndarray:
    """How often each prompt of a task is drawn in each resample, `[number, prompts]`: the same for every system."""
    generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
    return generator.multinomial(prompts, np.full(prompts, 1 / prompts), size=number).astype(float)


def complete_prompts(records: list[dict[str, Any]], systems: list[str]) -> tuple[list[dict[str, Any]], int]:
    """The records of those prompts that all systems have answered, in all turns; and how many prompts are left out."""
    found: dict[tuple, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        found[record["task"], record["id"], record["mode"], record["temperature"]].append(record)
    whole = [group for group in found.values() if len(group) == len(systems) * group[0]["turns"]]
    return [record for group in whole for record in group], len(found) - len(whole)


def build_tables(
    records: list[dict[str, Any]], systems: list[str], bootstrap: int, seed: int
) -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    """`[mode][temperature][system][task]` -> measures with their intervals, and the number of prompts.

    `average` is the mean over the tasks, as in the paper. `NAME_interval` holds the middle 95 % of the resamples over
    prompts: two numbers (for the slots two lists); `None` for a task with fewer than two prompts.
    """
    cells: dict[tuple, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        cells[record["mode"], record["temperature"], record["system"], record["task"]].append(record)
    tasks = order_tasks({key[3] for key in cells})
    tables: dict = {}
    for mode in (mode for mode in MODES if any(key[0] == mode for key in cells)):
        for temperature in sorted({key[1] for key in cells if key[0] == mode}):
            table = tables.setdefault(mode, {})[f"{temperature:g}"] = {}
            present = [task for task in tasks if (mode, temperature, TARGET, task) in cells]
            for system in systems:
                points, draws, row = [], [], {}
                for task in present:
                    of_system, of_target = (
                        sum_by_prompt(cells[mode, temperature, label, task]) for label in (system, TARGET)
                    )
                    prompts = len(of_target["tokens"])
                    weights = resample(task, prompts, bootstrap, seed)
                    points.append(measure(*(_sum(totals) for totals in (of_system, of_target))))
                    drawn = [{n: weights @ v for n, v in totals.items()} for totals in (of_system, of_target)]
                    draws.append(measure(*drawn) if prompts > 1 else None)
                    row[task] = {"prompts": prompts} | _with_intervals(points[-1], draws[-1])
                mean_draws = None if None in draws else _mean(draws)
                row[AVERAGE] = {"tasks": len(present)} | _with_intervals(_mean(points), mean_draws)
                table[system] = row
    return tables


def _sum(totals: Totals) -> Totals:
    return {name: values.sum(axis=0) for name, values in totals.items()}


def _mean(measures: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.mean([each[name] for each in measures], axis=0) for name in measures[0]}


def _with_intervals(point: dict[str, np.ndarray], draws: dict[str, np.ndarray] | None) -> dict[str, Any]:
    cell: dict[str, Any] = {}
    for name, value in point.items():
        cell[name] = np.asarray(value).tolist()
        cell[f"{name}_interval"] = None if draws is None else np.percentile(draws[name], [2.5, 97.5], axis=0).tolist()
    return cell


def order_tasks(names: set[str]) -> list[str]:
    """The paper's tasks in the paper's order, then the others."""
    return [name for name in TASKS if name in names] + sorted(names - TASKS.keys())


def count_identical(records: list[dict[str, Any]], systems: list[str]) -> dict[str, dict[str, Any]]:
    """Of each system's greedy texts how many equal the target's, and the margins where they part (see the runner)."""
    counts: dict[str, dict[str, Any]] = {}
    for system in systems:
        texts = [record for record in records if record["system"] == system and record["temperature"] == 0]
        if texts and system != TARGET:
            counts[system] = {
                "texts": len(texts),
                "identical": sum(record["identical"] for record in texts),
                "margins": sorted(record["margin"] for record in texts if record["margin"] is not None),
            }
    return counts


def build_report(
    records: list[dict[str, Any]], heads: list[dict[str, Any]], bootstrap: int, seed: int
) -> dict[str, Any]:
    """`settings`, `runs`, `shards`, `left_out`, `bootstrap`, `tables` (see [`build_tables`]) and `identical`.

    Raises:
        ValueError: no prompt that all systems have answered.
    """
    settings = heads[0]["settings"]
    systems = list(settings["systems"])
    whole, left_out = complete_prompts(records, systems)
    if not whole:
        raise ValueError("records: found no prompt that all systems have answered, wanted some: let the run go on")
    return {
        "settings": settings,
        "shards": [head["settings"]["shard"] for head in heads],
        "runs": [run for head in heads for run in head["runs"]],
        "texts": len(whole),
        "left_out": left_out,
        "bootstrap": {"resamples": bootstrap, "seed": seed, "level": 0.95},
        "tables": build_tables(whole, systems, bootstrap, seed),
        "identical": count_identical(whole, systems),
    }


def write_report(
    folder: Path, records: list[dict[str, Any]], heads: list[dict[str, Any]], bootstrap: int, seed: int
) -> dict[str, Any]:
    """Writes `report.json`, `report.md` and the figures to `folder`; returns the report with its `markdown`."""
    report = build_report(records, heads, bootstrap, seed)
    folder.mkdir(parents=True, exist_ok=True)
    report["figures"] = draw_figures(report["tables"], folder)
    text = to_markdown(report)
    document = json.dumps(report, indent=2, ensure_ascii=False) + "\n"
    for name, content in {"report.json": document, "report.md": text}.items():
        with whole_file(folder / name) as path:
            path.write_text(content, encoding="utf-8")
    return report | {"markdown": text}


# ---------------------------------------------------------------------------------------------------------------------
# Markdown
# ---------------------------------------------------------------------------------------------------------------------


def to_markdown(report: dict[str, Any]) -> str:
    """The whole of `report.md`."""
    lines = ["# Evaluation", "", *_describe(report), ""]
    for mode, by_temperature in report["tables"].items():
        lines += [f"## Speed-up and accepted length, {mode} mode", "", *_main_table(by_temperature), ""]
    level, resamples = report["bootstrap"]["level"], report["bootstrap"]["resamples"]
    lines += [
        "Speed-up: tokens a second over those of the target alone. τ: tokens a round, the bonus token counted. "
        f"In brackets {level:.0%} intervals, {resamples} resamples over prompts, in pairs with the target alone. "
        "Average: mean over tasks. In parentheses behind a name: drafts a round.",
        "",
    ]
    if report["identical"]:
        lines += ["## Greedy texts", "", *_identity_table(report["identical"]), ""]
    lines += ["## Acceptance by position", "", *_figure(report, "acceptance"), *_slot_table(report["tables"]), ""]
    lines += ["## What a round costs", "", *_figure(report, "cost"), *_cost_table(report["tables"]), ""]
    return "\n".join(lines)


def _describe(report: dict[str, Any]) -> list[str]:
    settings, runs = report["settings"], report["runs"]
    last = runs[-1]

    def each(name: str) -> str:
        values = (run[name] if isinstance(run[name], str) else json.dumps(run[name]) for run in runs if run[name])
        return "; ".join(dict.fromkeys(values)) or "unknown"

    sizes = last["parameters"]
    table = next(iter(next(iter(report["tables"].values())).values()))
    systems = [
        f"{label}: {path}, {sizes[label]:,} parameters" if path else label for label, path in last["systems"].items()
    ]
    counts = {task: cell["prompts"] for task, cell in table[TARGET].items() if task != AVERAGE}
    lines = [
        f"* Target: {last['target']}, {sizes[TARGET]:,} parameters, {last['dtype']}",
        "* Systems: " + "; ".join(systems),
        "* Prompts: " + ", ".join(f"{title_of(task)} {count}" for task, count in counts.items()),
        f"* Decoding: up to {settings['max_new_tokens']} new tokens, top-p {settings['top_p']:g}, seed "
        f"{settings['seed']}; all systems in one process, prompt by prompt, in rotating order",
        f"* Machine: {each('machine')}; {settings['threads']} threads, device {settings['device']}",
        f"* Commit: {each('commit')}",
        "* Versions: " + ", ".join(f"{name} {version}" for name, version in last["versions"].items()),
        "* Command: " + "; ".join(dict.fromkeys(f"`{' '.join(run['command'])}`" for run in runs)),
    ]
    if report["left_out"]:
        lines.append(f"* Left out: {report['left_out']} prompts that not all systems have answered yet")
    return lines


def title_of(task: str) -> str:
    """The column of a task: as in the paper, or its own name."""
    return TASKS[task].title if task in TASKS else task


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _main_table(by_temperature: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    """The paper's Tables 2 and 3: groups of tasks, tasks, and for each temperature speed-up and tau by system."""
    present = {task for table in by_temperature.values() for task in table[TARGET]}
    tasks = [*order_tasks(present - {AVERAGE}), AVERAGE]
    groups = [TASKS[task].group if task in TASKS else "Avg." if task == AVERAGE else "Other" for task in tasks]
    shown = [group if group not in groups[:place] else "" for place, group in enumerate(groups)]
    titles = ["Average" if task == AVERAGE else title_of(task) for task in tasks]
    lines = [
        _row(["Method", *(cell for group in shown for cell in (group, ""))]),
        _row(["---"] * (2 * len(tasks) + 1)),
        _row(["", *(cell for title in titles for cell in (f"**{title}**", ""))]),
    ]
    for temperature, table in by_temperature.items():
        lines.append(_row([f"**Temperature = {temperature}**", *("Speed-up", "τ") * len(tasks)]))
        for system, cells in table.items():
            row = [system]
            for task in tasks:
                row += [_number(cells.get(task), "speedup", "×"), _number(cells.get(task), "accepted_length")]
            lines.append(_row(row))
    return lines


def _number(cell: dict[str, Any] | None, name: str, unit: str = "") -> str:
    if cell is None:  # no prompt of the task has been answered by all at this temperature
        return ""
    value, interval = cell[name], cell[f"{name}_interval"]
    if interval is None or interval[0] == interval[1]:
        return f"{value:.2f}{unit}"
    return f"{value:.2f}{unit} [{interval[0]:.2f}, {interval[1]:.2f}]"


def _identity_table(identical: dict[str, dict[str, Any]]) -> list[str]:
    lines = [
        "At temperature 0, how many texts are the target's own, and where others part the difference of the two "
        "tokens' logits.",
        "",
        _row(["Method", "texts", "identical", "margins"]),
        _row(["---"] * 4),
    ]
    for system, counts in identical.items():
        margins = ", ".join(f"{margin:.2g}" for margin in counts["margins"])
        lines.append(_row([system, str(counts["texts"]), str(counts["identical"]), margins]))
    return lines


def _averages(tables: dict) -> list[tuple[str, str, str, dict[str, Any]]]:
    return [
        (mode, temperature, system, cells[AVERAGE])
        for mode, by_temperature in tables.items()
        for temperature, table in by_temperature.items()
        for system, cells in table.items()
    ]


def _slot_table(tables: dict) -> list[str]:
    rows = [row for row in _averages(tables) if row[3]["unconditional"]]
    slots = max((len(row[3]["unconditional"]) for row in rows), default=0)
    lines = [
        "Share of all rounds in which the draft at a position was accepted; in parentheses the share of those rounds "
        "in which all drafts before it had been. Means over tasks.",
        "",
        _row(["Mode", "T", "Method", *(str(slot + 1) for slot in range(slots))]),
        _row(["---"] * (slots + 3)),
    ]
    for mode, temperature, system, cell in rows:
        shares = [f"{u:.2f} ({c:.2f})" for u, c in zip(cell["unconditional"], cell["conditional"])]
        lines.append(_row([mode, temperature, system, *shares, *[""] * (slots - len(shares))]))
    return lines


def _cost_table(tables: dict) -> list[str]:
    lines = [
        "Milliseconds a round (for the target alone, a token), means over tasks; rest: all of the call but draft, "
        "verification and the prompt's own pass. By CPU time: the speed-up in seconds of the processor instead of the "
        "clock. Ideal: the speed-up that accepted length and the times of draft and verification allow; efficiency: "
        "the measured one over it; free drafts: the limit if drafts cost nothing.",
        "",
        _row(
            ["Mode", "T", "Method", "draft", "verify", "rest"]
            + ["speed-up", "by CPU time", "ideal", "efficiency", "free drafts"]
        ),
        _row(["---"] * 11),
    ]
    for mode, temperature, system, cell in _averages(tables):
        times = [f"{cell[name]:.1f}" for name in ("draft_ms", "verify_ms", "rest_ms")]
        names = ("speedup", "cpu_speedup", "ideal_speedup", "efficiency", "free_draft_speedup")
        rates = [f"{cell[name]:.2f}" for name in names]
        lines.append(_row([mode, temperature, system, *times, *rates]))
    return lines


def _figure(report: dict[str, Any], name: str) -> list[str]:
    return [f"![{name}]({name}.svg)", ""] if f"{name}.svg" in report["figures"] else []


__all__ = ["build_report", "build_tables", "measure", "order_tasks", "write_report"]
