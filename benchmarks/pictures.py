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
    """Bar of a group, with 20th and 80th percentile, and `mark`, a length to compare with."""

    group: str
    value: float
    label: str
    low: float
    high: float
    mark: float | None = None


def own_time(row: Row) -> Bar:
    return _time(row, f"{row.case}\n{row.tensors} parameters, {row.call}")


def warm_time(row: Row) -> Bar | None:
    group = f"{row.case.partition('x')[0]} parameters\n{row.call}"
    return None if row.replaces else _time(row, group)


def _time(row: Row, group: str) -> Bar:
    low, middle, high = row.host_us
    speed = "" if row.vs_torch is None else f" ({faster(row.vs_torch)})"
    return Bar(group, middle, f"{middle:,.0f}{speed}", low, high)


def throughput(row: Row) -> Bar | None:
    if row.call != UNSCALE or row.dtype != "float32" or not row.gb_s:
        return None
    label = percent(row.percent_of_copy)
    return Bar(row.case, row.gb_s, label, *_inverted(row, row.gb_s), row.copy_gb_s)


def over_none(row: Row) -> Bar | None:
    if not row.over_none or row.side == NO_SCALER:
        return None
    ends = (row.over_none * each / row.ms.p50 for each in (row.ms.p20, row.ms.p80))
    return Bar(f"{row.case}\n{row.call}", row.over_none, f"{row.over_none:.3f}", *ends)


def speedup(row: Row) -> Bar | None:
    if not row.vs_torch or row.dtype != "float32":
        return None
    ends = _inverted(row, row.vs_torch)
    return Bar(f"{row.case}\n{row.call}", row.vs_torch, faster(row.vs_torch), *ends)


def _inverted(row: Row, value: float) -> tuple[float, float]:
    """Spread of a figure that falls as the row's own time grows."""
    return value * row.ms.p50 / row.ms.p80, value * row.ms.p50 / row.ms.p20


# Subject, bar of a row, title, axis, and place of a vertical line; the most informative first.
CHARTS: dict[str, tuple[str, Callable[[Row], Bar | None], str, str, float | None]] = {
    "loops": (
        *("loops", own_time, "Scaler's own time in training loops"),
        *("microseconds a step; lower is better", None),
    ),
    "host": (
        *("host", warm_time, "Host time of the scaler's calls, warm"),
        *("microseconds; lower is better", None),
    ),
    "throughput": (
        *("kernels", throughput, "Throughput of unscale_, float32"),
        *("GB/s; percent of a copy, whose bandwidth is the black mark; higher is better", None),
    ),
    "training": (
        *("training", over_none, "Whole training steps"),
        *("time over that without a scaler (the line); lower is better", 1.0),
    ),
    "clip": (
        *("clip", speedup, "Unscaling and clipping, float32"),
        *("times as fast as torch (the line); higher is better", 1.0),
    ),
}


def draw(results: Results) -> dict[str, Figure]:
    """Pictures by name; none for subjects without rows."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ValueError("pictures need matplotlib: pip install matplotlib") from error
    with matplotlib.rc_context(STYLE):
        made = {name: _bars(results, *chart) for name, chart in CHARTS.items()}
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
    for old in (*folder.glob("*.svg"), *folder.glob("*.png")):
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
        for side, colour in _colours([row.side for row in here]).items():
            found = [row for row in here if row.side == side]
            sizes = [row.elements if row.tensors == 1 else row.tensors for row in found]
            least, middle, most = zip(*(row.ms for row in found), strict=True)
            axes.plot(sizes, middle, color=colour, label=side, marker="o", ms=3)
            axes.vlines(sizes, least, most, color=colour)
        axes.set(xscale="log", yscale="log", xlabel=call.removeprefix("by "), ylabel="milliseconds")
        axes.legend(frameon=False)
        axes.grid(alpha=0.3)
    return figure


def _colours(series: Sequence[str]) -> dict[str, str]:
    more = iter(MORE_COLOURS * 4)
    return {name: COLOURS.get(name) or next(more) for name in dict.fromkeys(series)}


def _bars(
    results: Results,
    subject: str,
    bar_of: Callable[[Row], Bar | None],
    title: str,
    axis: str,
    line: float | None,
) -> Figure | None:
    rows = [row for row in results.rows if row.subject == subject]
    rows = usual_loops(rows) if subject == "loops" else rows
    bars = [(row.side, bar) for row in rows if (bar := bar_of(row))]
    if not bars:
        return None
    from matplotlib.figure import Figure

    colours = _colours([side for side, _ in bars])
    groups = list(dict.fromkeys(bar.group for _, bar in bars))
    figure = Figure(figsize=(8, 1.3 + 0.2 * len(bars) + 0.18 * len(groups)), layout="constrained")
    axes = figure.subplots()
    position, centres = 0.0, []
    for group in groups:
        here = [(side, bar) for side, bar in bars if bar.group == group]
        centres.append(position + (len(here) - 1) / 2)
        for side, bar in here:
            axes.barh(position, bar.value, 0.9, color=colours[side])
            ends = [[bar.value - bar.low], [bar.high - bar.value]]
            axes.errorbar(bar.value, position, xerr=ends, fmt="none", ecolor="k", elinewidth=1)
            axes.annotate(
                *(bar.label, (bar.high, position), (4, 0)),
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
    axes.set_title(title)
    axes.set_xlabel(axis)
    if line is not None:
        axes.axvline(line, color="k", ls="--", lw=1)
    handles: list[Any] = [axes.barh(0, 0, color=colour) for colour in colours.values()]
    figure.legend(handles, list(colours), loc="outside lower center", ncols=4, frameon=False)
    return figure
