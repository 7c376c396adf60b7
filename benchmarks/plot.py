"""A picture of a run: bytes per second of each provider by list, beside a copy's."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .providers import CHECK, COPY, HALF_COPY, UNSCALE
from .results import Results, Row

MISSING = "a plot needs matplotlib, which is not installed: pip install matplotlib"
PATHS = ((UNSCALE, COPY), (CHECK, HALF_COPY))
COLOURS = {"torch": "#9aa0a6", "triton": "#3b6fb6", "cuda": "#5a9e4b", "cpu": "#3b6fb6"}
OTHER = "#b07aa1"


def is_possible() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(results: Results, path: Path) -> None:
    """Writes the picture; its format is that of the file's ending.

    One row for each path and one column for each dtype. Bars are providers, a black line is the
    copy that moves the same bytes, and above a bar stands its percentage of that copy.

    Raises:
        ValueError: If nothing was measured that could be drawn, or the format is unknown.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in results.rows if row.subject == "kernels" and row.gb_s is not None]
    dtypes = list(dict.fromkeys(row.dtype for row in rows))
    if not dtypes:
        raise ValueError("no kernels were measured, so there is nothing to draw")
    lists = max(len({row.list_name for row in rows if row.dtype == dtype}) for dtype in dtypes)
    width = max(4.0, 1.1 * lists + 1.5) * len(dtypes)
    figure = Figure(figsize=(width, 8.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title(results))
    axes = figure.subplots(len(PATHS), len(dtypes), squeeze=False, sharey="row")
    for line, (name, copy) in zip(axes, PATHS, strict=True):
        for axis, dtype in zip(line, dtypes, strict=True):
            _panel(axis, [row for row in rows if row.dtype == dtype], name, copy)
            axis.set_title(f"{name}, {dtype}")
        # Shared by the line, so it is set when the last panel is drawn; room for the labels above.
        shown = [row.gb_s for row in rows if row.path in (name, copy)]
        line[0].set_ylim(0, 1.2 * max(shown, default=1.0))
        line[0].set_ylabel("GB/s (higher is better)")
    # One legend for all: a provider may be missing from one panel.
    named = {}
    for axis in axes.flat:
        handles, labels = axis.get_legend_handles_labels()
        named.update(zip(labels, handles, strict=True))
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=len(named))
    figure.savefig(path, dpi=120)


def title(results: Results) -> str:
    """The machine, the versions, and what the picture does not say by itself."""
    machine = results.machine
    what = machine.get("gpu") or machine.get("cpu")
    versions = f"torch {results.torch}, commit {results.commit or 'unknown'}"
    unfinished = "" if results.complete else " (the run was not complete)"
    return (
        f"{what}, {versions}{unfinished}\n"
        "black: a copy that moves the same bytes; above a bar: percent of that copy"
    )


def _panel(axis: Any, rows: Sequence[Row], path: str, copy: str) -> None:
    lists = list(dict.fromkeys(row.list_name for row in rows))
    providers = list(dict.fromkeys(row.provider for row in rows if row.path == path))
    width = 0.8 / max(1, len(providers))
    for index, provider in enumerate(providers):
        found = {row.list_name: row for row in rows if (row.path, row.provider) == (path, provider)}
        places = [lists.index(name) + (index + 0.5) * width - 0.4 for name in found]
        bars = axis.bar(
            places,
            [row.gb_s for row in found.values()],
            width,
            label=provider,
            color=COLOURS.get(provider, OTHER),
        )
        labels = [
            "" if row.percent_of_copy is None else f"{row.percent_of_copy:.0f}%"
            for row in found.values()
        ]
        axis.bar_label(bars, labels, fontsize=7, rotation=90, padding=2)
    copies = {row.list_name: row.gb_s for row in rows if row.path == copy}
    axis.hlines(
        list(copies.values()),
        [lists.index(name) - 0.45 for name in copies],
        [lists.index(name) + 0.45 for name in copies],
        colors="black",
        label="copy",
    )
    axis.set_xticks(range(len(lists)), lists, rotation=35, ha="right")
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)
