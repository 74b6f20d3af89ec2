"""Markdown and a figure out of what `bench-serve` measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def number(value: float | None, digits: int = 2, scale: float = 1.0) -> str:
    """`value * scale`, or a dash for what is not known."""
    return "-" if value is None else f"{value * scale:.{digits}f}"


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def markdown_report(report: dict[str, Any]) -> str:
    """The report as Markdown: what was measured, then where the time of a round goes."""
    measured = [
        [
            system,
            str(concurrency),
            number(cell["tokens_per_second"], 1),
            number(cell["first_token_seconds"]["median"], 0, 1e3),
            number(cell["seconds_per_token"]["mean"], 1, 1e3),
            number(cell["end_to_end_seconds"]["mean"], 2),
            number(cell["end_to_end_seconds"]["p95"], 2),
            number(cell["accepted_length"]),
            " ".join(number(share) for share in cell["acceptance_per_slot"] or []) or "-",
            f"{cell['retries']} ({cell['restarts']})",
        ]
        for system, by_concurrency in report["cells"].items()
        for concurrency, cell in by_concurrency.items()
    ]
    split = [
        [
            row["system"],
            str(row["concurrency"]),
            number(row["round_seconds"], 1, 1e3),
            number(row["target_step_seconds"], 1, 1e3),
            number(row["verification_seconds"], 1, 1e3),
            number(row["drafter_seconds"], 1, 1e3),
            number(row["batching"]),
            number(row["throughput_ratio"]),
            number(row["end_to_end_speedup"]),
        ]
        for row in report["split"]
    ]
    provenance = report["provenance"]
    return "\n".join(
        [
            "# Serving benchmark",
            "",
            f"`{' '.join(provenance['command'])}`, {provenance['time']}, commit {provenance['commit']}",
            "",
            *table(
                [
                    "system",
                    "in flight",
                    "tokens/s",
                    "first token ms",
                    "per token ms",
                    "end to end s",
                    "p95 s",
                    "accepted length",
                    "acceptance by slot",
                    "sent again (restarts)",
                ],
                measured,
            ),
            "",
            "Accepted length counts the bonus token. `verification` drafts for nothing and is always refused.",
            "",
            "## Where a round goes",
            "",
            *table(
                [
                    "system",
                    "in flight",
                    "round ms",
                    "target step ms",
                    "+ verification ms",
                    "+ drafter ms",
                    "round over the first row's",
                    "throughput over target-only",
                    "end-to-end speed-up",
                ],
                split,
            ),
            "",
        ]
    )


def plot_report(report: dict[str, Any], file: Path) -> bool:
    """Throughput, latency and the parts of a round over concurrency, as a PNG. `False` without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(13, 4), layout="constrained")
    throughput, latency, parts = figure.subplots(1, 3)
    for system, cells in report["cells"].items():
        if system == "verification":
            continue
        counts = list(cells)
        throughput.plot(counts, [cells[count]["tokens_per_second"] for count in counts], marker="o", label=system)
        latency.plot(
            counts, [cells[count]["end_to_end_seconds"]["mean"] for count in counts], marker="o", label=system
        )
    rows = [row for row in report["split"] if row["drafter_seconds"] is not None]
    names = [f"{row['system']} {row['concurrency']}" for row in rows]
    bottom = [0.0] * len(rows)
    for part in ("target_step", "verification", "drafter"):
        values = [row[f"{part}_seconds"] * 1e3 for row in rows]
        parts.bar(names, values, bottom=bottom, label=part.replace("_", " "))
        bottom = [below + value for below, value in zip(bottom, values)]
    parts.tick_params(axis="x", rotation=90)
    for axes, title in ((throughput, "tokens/s"), (latency, "end to end, s"), (parts, "a round, ms")):
        axes.set_title(title)
        if axes.has_data():
            axes.legend()
    for axes in (throughput, latency):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("requests in flight")
    figure.savefig(file, dpi=120)
    return True


__all__ = ["markdown_report", "plot_report"]
