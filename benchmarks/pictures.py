"""Pictures of a run, by matplotlib."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .providers import UNSCALE
from .results import Results, Row, write_whole
from .tables import NO_SCALER, faster, percent, usual_loops

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


class Bar(NamedTuple):
    """Bar of a group; `spread` is its 20th and 80th percentile, `mark` a length to compare with."""

    group: str
    series: str
    value: float
    label: str
    spread: tuple[float, float] | None = None
    mark: float | None = None


class Chart(NamedTuple):
    """Horizontal bars of the rows of a subject, with a vertical line at `line`."""

    subject: str
    title: str
    axis: str
    bar: Callable[[Row], Bar | None]
    line: float | None = None
    better: str = "lower"


def _own_time(row: Row) -> Bar:
    return _timed(row, f"{row.case}\n{row.tensors} parameters, {row.call}")


def _warm_time(row: Row) -> Bar | None:
    group = f"{row.case.partition('x')[0]} parameters\n{row.call}"
    return None if row.replaces else _timed(row, group)


def _timed(row: Row, group: str) -> Bar:
    microseconds = row.host_us.p50 if row.host_us else 0.0
    speed = "" if row.vs_torch is None else f" ({faster(row.vs_torch)})"
    ends = (row.host_us.p20, row.host_us.p80) if row.host_us else None
    return Bar(group, row.side, microseconds, f"{microseconds:,.0f}{speed}", ends)


def _throughput(row: Row) -> Bar | None:
    if row.call != UNSCALE or row.dtype != "float32" or not row.gb_s:
        return None
    label, ends = percent(row.percent_of_copy), _ends(row, row.gb_s, inverted=True)
    return Bar(row.case, row.side, row.gb_s, label, ends, row.copy_gb_s)


def _over_none(row: Row) -> Bar | None:
    if not row.over_none or row.side == NO_SCALER:
        return None
    label, ends = f"{row.over_none:.3f}", _ends(row, row.over_none)
    return Bar(f"{row.case}\n{row.call}", row.side, row.over_none, label, ends)


def _speedup(row: Row) -> Bar | None:
    if not row.vs_torch or row.dtype != "float32":
        return None
    label, ends = faster(row.vs_torch), _ends(row, row.vs_torch, inverted=True)
    return Bar(f"{row.case}\n{row.call}", row.side, row.vs_torch, label, ends)


def _ends(row: Row, value: float, inverted: bool = False) -> tuple[float, float] | None:
    """A figure's spread by that of the row's own time, as which it grows or, inverted, falls."""
    if row.ms is None:
        return None
    low, high = row.ms.p20 / row.ms.p50, row.ms.p80 / row.ms.p50
    return (value / high, value / low) if inverted else (value * low, value * high)


OVER_NONE = "time over that without a scaler (the line)"
# The most informative first.
CHARTS = {
    "loops": Chart(
        "loops", "Scaler's own time in training loops", "microseconds a step", _own_time
    ),
    "host": Chart("host", "Host time of the scaler's calls, warm", "microseconds", _warm_time),
    "throughput": Chart(
        *("kernels", "Throughput of unscale_, float32"),
        *("GB/s; percent of a copy, whose bandwidth is the black mark", _throughput),
        better="higher",
    ),
    "training": Chart("training", "Whole training steps", OVER_NONE, _over_none, 1.0),
    "mlp": Chart("mlp", "A perceptron in mixed precision", OVER_NONE, _over_none, 1.0),
    "clip": Chart(
        *("clip", "Unscaling and clipping, float32", "times as fast as torch (the line)"),
        *(_speedup, 1.0, "higher"),
    ),
}


def draw(results: Results) -> dict[str, Figure]:
    """Pictures by name; none for subjects without rows."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ValueError("pictures need matplotlib: pip install matplotlib") from error
    with matplotlib.rc_context(STYLE):
        made = {name: _bars(chart, results) for name, chart in CHARTS.items()}
        made["growth"] = _growth(results)
    return {name: figure for name, figure in made.items() if figure}


def svg(figure: Figure) -> str:
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def write(figures: dict[str, Figure], folder: Path, png: bool = True) -> None:
    """Writes each picture as SVG, and as PNG, too; removes those of an earlier run."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        if old.suffix in (".svg", ".png"):
            old.unlink()
    for name, figure in figures.items():
        write_whole(folder / f"{name}.svg", svg(figure))
        if png:
            figure.savefig(folder / f"{name}.png", dpi=144)


def _growth(results: Results) -> Figure | None:
    rows = [row for row in results.rows if row.subject == "growth" and row.ms]
    calls = list(dict.fromkeys(row.call for row in rows))
    if not calls:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.6), layout="constrained")
    figure.suptitle("Time of unscale_ and update as gradients grow", x=0.01, ha="left")
    for axes, call in zip(figure.subplots(1, len(calls), squeeze=False)[0], calls, strict=True):
        here = [row for row in rows if row.call == call]
        colours = _colours([row.side for row in here])
        for side, colour in colours.items():
            points = [
                (
                    row.elements if row.tensors == 1 else row.tensors,
                    row.ms.p50,
                    row.ms.p20,
                    row.ms.p80,
                )
                for row in here
                if row.side == side and row.ms
            ]
            sizes, times, least, most = zip(*points, strict=True)
            axes.plot(sizes, times, color=colour, label=side, marker="o", ms=3)
            axes.vlines(sizes, least, most, color=colour)
        axes.set(xscale="log", yscale="log", xlabel=call.removeprefix("by "), ylabel="milliseconds")
        axes.legend(frameon=False)
        axes.grid(alpha=0.3)
    return figure


def _colours(series: Sequence[str]) -> dict[str, str]:
    more = iter(MORE_COLOURS * 4)
    return {name: COLOURS.get(name) or next(more) for name in dict.fromkeys(series)}


def _bars(chart: Chart, results: Results) -> Figure | None:
    rows = [row for row in results.rows if row.subject == chart.subject]
    if chart.subject == "loops":
        rows = usual_loops(rows)
    if not (bars := [bar for bar in map(chart.bar, rows) if bar]):
        return None
    from matplotlib.figure import Figure

    colours = _colours([bar.series for bar in bars])
    groups = list(dict.fromkeys(bar.group for bar in bars))
    figure = Figure(figsize=(8, 1.3 + 0.2 * len(bars) + 0.18 * len(groups)), layout="constrained")
    axes = figure.subplots()
    position, centres = 0.0, []
    for group in groups:
        here = [bar for bar in bars if bar.group == group]
        centres.append(position + (len(here) - 1) / 2)
        for bar in here:
            axes.barh(position, bar.value, 0.9, color=colours[bar.series])
            if bar.spread is not None:
                ends = [[bar.value - bar.spread[0]], [bar.spread[1] - bar.value]]
                axes.errorbar(bar.value, position, xerr=ends, fmt="none", ecolor="k", elinewidth=1)
            axes.annotate(
                *(bar.label, (bar.spread[1] if bar.spread else bar.value, position), (4, 0)),
                textcoords="offset points",
                va="center",
                fontsize=8,
                # Above the line.
                bbox={"fc": "white", "ec": "none", "pad": 0.5, "alpha": 0.8},
            )
            if bar.mark is not None:
                axes.plot([bar.mark] * 2, [position - 0.45, position + 0.45], "k", lw=2)
            position += 1
        position += 0.8
    axes.set_yticks(centres, groups, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.15, y=0.01)
    axes.set_xlim(left=0)
    axes.set_title(chart.title)
    axes.set_xlabel(f"{chart.axis}; {chart.better} is better")
    if chart.line is not None:
        axes.axvline(chart.line, color="k", ls="--", lw=1)
    handles: list[Any] = [axes.barh(0, 0, color=colour) for colour in colours.values()]
    figure.legend(handles, list(colours), loc="outside lower center", ncols=4, frameon=False)
    return figure
