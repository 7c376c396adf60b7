"""Pictures of a run, by matplotlib."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .providers import UNSCALE
from .results import NO_SCALER, Results, Row, write_whole
from .tables import faster, percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Colours with a fixed meaning in all pictures; others follow.
COLOURS = {"torch": "#8b949e", NO_SCALER: "#7c4aa5", "ampfast": "#1f5fae"}
MORE_COLOURS = ("#b45309", "#2f7d4f", "#6cb0ff", "#c49bf5")
STYLE = {
    # Text stays text, and equal results give equal files.
    "svg.fonttype": "none",
    "svg.hashsalt": "ampfast",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
}


class Chart(NamedTuple):
    """Horizontal bars of the rows that have a value, with a line at `line`."""

    title: str
    axis: str
    value: Callable[[Row], float | None]
    label: Callable[[Row], str]
    group: Callable[[Row], str] = lambda row: f"{row.case}\n{row.call}"
    is_rate: bool = False  # falls as the row's own time grows
    line: float | None = None


def _host_time(row: Row) -> str:
    speed = "" if row.vs_torch is None else f" ({faster(row.vs_torch)})"
    return f"{row.host_us.p50:,.0f}{speed}"


# By subject, the most informative first.
CHARTS = {
    "loops": Chart(
        *("Scaler's own time in training loops", "microseconds a step; lower is better"),
        *(lambda row: row.host_us.p50 if "schedule" in row.call else None, _host_time),
        lambda row: f"{row.case}\n{row.tensors} parameters, {row.call}",
    ),
    "host": Chart(
        *("Host time of the scaler's calls, warm", "microseconds; lower is better"),
        *(lambda row: None if row.replaces else row.host_us.p50, _host_time),
        lambda row: f"{row.case.partition('x')[0]} parameters\n{row.call}",
    ),
    "kernels": Chart(
        "Throughput of unscale_, float32",
        "GB/s; percent of a copy, whose bandwidth is the black mark; higher is better",
        lambda row: row.gb_s if (row.call, row.dtype) == (UNSCALE, "float32") else None,
        lambda row: percent(row.percent_of_copy),
        lambda row: row.case,
        is_rate=True,
    ),
    "training": Chart(
        "Whole training steps",
        "time over that without a scaler (the line); lower is better",
        lambda row: None if row.side == NO_SCALER else row.over_none,
        lambda row: f"{row.over_none:.3f}",
        line=1.0,
    ),
    "clip": Chart(
        "Unscaling and clipping, float32",
        "times as fast as torch (the line); higher is better",
        lambda row: row.vs_torch if row.dtype == "float32" else None,
        lambda row: faster(row.vs_torch),
        is_rate=True,
        line=1.0,
    ),
}


def draw(results: Results) -> dict[str, Figure]:
    """Pictures by subject; none for those without rows."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ValueError("pictures need matplotlib: pip install matplotlib") from error
    with matplotlib.rc_context(STYLE):
        made = {name: _bars(name, results) for name in CHARTS}
    return {name: figure for name, figure in made.items() if figure}


def svg(figure: Figure) -> str:
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def write(figures: dict[str, Figure], folder: Path) -> None:
    """Writes each picture, and removes those of an earlier run."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.svg"):
        old.unlink()
    for name, figure in figures.items():
        write_whole(folder / f"{name}.svg", svg(figure))


def _colours(series: Sequence[str]) -> dict[str, str]:
    more = iter(MORE_COLOURS * 4)
    return {name: COLOURS.get(name) or next(more) for name in dict.fromkeys(series)}


def _bars(subject: str, results: Results) -> Figure | None:
    chart = CHARTS[subject]
    rows = [row for row in results.rows if row.subject == subject and chart.value(row)]
    if not rows:
        return None
    from matplotlib.figure import Figure

    colours = _colours([row.side for row in rows])
    groups = list(dict.fromkeys(map(chart.group, rows)))
    figure = Figure(figsize=(8, 1.3 + 0.2 * len(rows) + 0.18 * len(groups)), layout="constrained")
    axes = figure.subplots()
    position, centres = 0.0, []
    for group in groups:
        here = [row for row in rows if chart.group(row) == group]
        centres.append(position + (len(here) - 1) / 2)
        for row in here:
            value, time = chart.value(row), row.ms or row.host_us
            ends = [value * time.p20 / time.p50, value * time.p80 / time.p50]
            if chart.is_rate:
                ends = [value * time.p50 / time.p80, value * time.p50 / time.p20]
            axes.barh(position, value, 0.9, color=colours[row.side])
            distances = [[value - ends[0]], [ends[1] - value]]
            axes.errorbar(value, position, xerr=distances, fmt="none", ecolor="k", elinewidth=1)
            axes.annotate(
                *(chart.label(row), (ends[1], position), (4, 0)),
                textcoords="offset points",
                va="center",
                fontsize=8,
                # Above the line.
                bbox={"fc": "white", "ec": "none", "pad": 0.5, "alpha": 0.8},
            )
            if row.copy_gb_s is not None:
                axes.plot([row.copy_gb_s] * 2, [position - 0.45, position + 0.45], "k", lw=2)
            position += 1
        position += 0.8
    axes.set_yticks(centres, groups, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.15, y=0.01)
    axes.set_xlim(left=0)
    axes.set_title(chart.title)
    axes.set_xlabel(chart.axis)
    if chart.line is not None:
        axes.axvline(chart.line, color="k", ls="--", lw=1)
    handles: list[Any] = [axes.barh(0, 0, color=colour) for colour in colours.values()]
    figure.legend(handles, list(colours), loc="outside lower center", ncols=4, frameon=False)
    return figure
