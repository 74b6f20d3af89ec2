"""The paper's Figure 1, acceptance by position, and what a round costs: PNG and SVG, by matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers.utils import logging

logger = logging.get_logger(__name__)

COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999"]  # Okabe and Ito
MARKERS = "osD^vPX*"
COST_PARTS = {"draft_ms": ("draft", "#E69F00"), "verify_ms": ("verify", "#0072B2"), "rest_ms": ("rest", "#999999")}


def draw_figures(tables: dict[str, Any], folder: Path) -> list[str]:
    """Writes `acceptance`, `acceptance_conditional` and `cost` to `folder`, each as `.png` and `.svg`.

    Args:
        tables: `[mode][temperature][system]["average"]`, as [`build_tables`] makes them.

    Returns:
        The names of the files; none, with a warning, without matplotlib.
    """
    if find_spec("matplotlib") is None:
        logger.warning('No figures: matplotlib is not installed (pip install "hyperdflash[eval]").')
        return []
    figures = {
        "acceptance": (_draw_acceptance("unconditional"), "share of rounds with this draft accepted"),
        "acceptance_conditional": (_draw_acceptance("conditional"), "share accepted where all before were"),
        "cost": (_draw_cost, "ms a round"),
    }
    names = []
    for name, (draw, label) in figures.items():
        figure = _draw_panels(tables, draw, label)
        for end in ("png", "svg"):
            figure.savefig(folder / f"{name}.{end}", dpi=150, metadata={"Date": None} if end == "svg" else None)
            names.append(f"{name}.{end}")
    return names


def _draw_panels(tables: dict[str, Any], draw: Callable, label: str) -> Any:
    """A panel for each mode (rows) and temperature (columns), with one legend."""
    from matplotlib.figure import Figure

    temperatures = list(dict.fromkeys(temperature for table in tables.values() for temperature in table))
    size = (1.2 + 4.2 * len(temperatures), 1.1 + 3.1 * len(tables))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(tables), len(temperatures), sharex=True, sharey=True, squeeze=False)
    for row, (mode, by_temperature) in zip(panels, tables.items()):
        for panel, temperature in zip(row, temperatures):
            panel.set_title(f"{mode}, T = {temperature}", fontsize=10)
            panel.spines[["top", "right"]].set_visible(False)
            if temperature in by_temperature:
                draw(panel, {system: cells["average"] for system, cells in by_temperature[temperature].items()})
        row[0].set_ylabel(label if draw is not _draw_cost else "")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 4), frameon=False, fontsize=9)
    return figure


def _draw_acceptance(which: str) -> Callable:
    def draw(panel: Any, cells: dict[str, Any]) -> None:
        systems = [system for system in cells if cells[system][which]]
        for number, system in enumerate(systems):
            shares, interval = cells[system][which], cells[system][f"{which}_interval"]
            positions = list(range(1, len(shares) + 1))
            style = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
            panel.plot(positions, shares, label=system, markersize=5, linewidth=1.5, **style)
            if interval is not None:
                panel.fill_between(positions, *interval, color=style["color"], alpha=0.12, linewidth=0)
        panel.set_ylim(0, 1)
        panel.set_xlabel("draft position")
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.grid(axis="y", alpha=0.3)

    return draw


def _draw_cost(panel: Any, cells: dict[str, Any]) -> None:
    left = [0.0] * len(cells)
    for part, (label, colour) in COST_PARTS.items():
        widths = [cell[part] for cell in cells.values()]
        panel.barh(list(cells), widths, left=left, label=label, color=colour)
        left = [before + width for before, width in zip(left, widths)]
    if not panel.yaxis_inverted():
        panel.invert_yaxis()
    panel.set_xlabel("ms a round (target alone: a token)")
    panel.grid(axis="x", alpha=0.3)


__all__ = ["draw_figures"]
