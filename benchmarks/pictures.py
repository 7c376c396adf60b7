"""Pictures of a run, by matplotlib."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .providers import COPY, UNSCALE
from .results import Results, Row, write_whole
from .tables import NO_SCALER

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
    """Bar of a group; `mark` is a length to compare with."""

    group: str
    series: str
    value: float
    label: str
    mark: float | None = None


def draw(results: Results) -> dict[str, Figure]:
    """Pictures by name, the most informative first; none for subjects without rows.

    Raises:
        ValueError: If matplotlib is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ValueError("pictures need matplotlib: pip install matplotlib") from error
    with matplotlib.rc_context(STYLE):
        return {name: figure for name, make in MAKERS.items() for figure in make(results)}


def svg(figure: Figure) -> str:
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def write(figures: dict[str, Figure], folder: Path, kinds: Sequence[str] = ("svg", "png")) -> None:
    """Writes a file of each kind for each picture; removes those of an earlier run."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        if old.suffix in (".svg", ".png"):
            old.unlink()
    for name, figure in figures.items():
        if "svg" in kinds:
            write_whole(folder / f"{name}.svg", svg(figure))
        if "png" in kinds:
            figure.savefig(folder / f"{name}.png", dpi=144)


def _loops(results: Results) -> Iterator[Figure]:
    bars = [
        Bar(f"{row.case}\n{row.tensors} parameters, {row.call}", *_timed(row))
        for row in _of("loops", results)
    ]
    yield from _bars("Scaler's own time in training loops", "microseconds a step", bars)


def _host(results: Results) -> Iterator[Figure]:
    rows = _of("host", results)
    calls = {row.call for row in rows if row.side == "torch"}
    bars = [
        Bar(f"{row.case.partition('x')[0]} parameters\n{row.call}", *_timed(row))
        for row in rows
        if row.call in calls
    ]
    yield from _bars("Host time of the scaler's calls, warm", "microseconds", bars)


def _throughput(results: Results) -> Iterator[Figure]:
    rows = [row for row in _of("kernels", results) if row.dtype == "float32" and row.gb_s]
    copies = {row.case: row.gb_s for row in rows if row.call == COPY}
    bars = [
        Bar(row.case, row.side, row.gb_s or 0.0, number_of(row), copies.get(row.case))
        for row in rows
        if row.call == UNSCALE
    ]
    axis = "GB/s; percent of a copy, whose bandwidth is the black mark"
    yield from _bars("Throughput of unscale_, float32", axis, bars, better="higher")


def _training(subject: str, title: str) -> Callable[[Results], Iterator[Figure]]:
    def make(results: Results) -> Iterator[Figure]:
        bars = [
            Bar(f"{row.case}\n{row.call}", row.side, row.over_none, f"{row.over_none:.3f}")
            for row in _of(subject, results)
            if row.over_none and row.side != NO_SCALER
        ]
        yield from _bars(title, "time over that without a scaler (the line)", bars, line=1.0)

    return make


def _clip(results: Results) -> Iterator[Figure]:
    bars = [
        Bar(f"{row.case}\n{row.call}", row.side, row.vs_torch, f"{row.vs_torch:.2f}x")
        for row in _of("clip", results)
        if row.vs_torch and row.dtype == "float32"
    ]
    axis = "times as fast as torch (the line)"
    yield from _bars("Unscaling and clipping, float32", axis, bars, line=1.0, better="higher")


def _growth(results: Results) -> Iterator[Figure]:
    rows = [row for row in _of("growth", results) if row.ms]
    calls = list(dict.fromkeys(row.call for row in rows))
    if not calls:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.6), layout="constrained")
    figure.suptitle("Time of unscale_ and update as gradients grow", x=0.01, ha="left")
    for axes, call in zip(figure.subplots(1, len(calls), squeeze=False)[0], calls, strict=True):
        here = [row for row in rows if row.call == call]
        colours = _colours([row.side for row in here])
        for side, colour in colours.items():
            points = [
                (row.elements if row.tensors == 1 else row.tensors, row.ms.p50)
                for row in here
                if row.side == side and row.ms
            ]
            axes.plot(*zip(*points, strict=True), color=colour, label=side, marker="o", ms=3)
        axes.set(xscale="log", yscale="log", xlabel=call.removeprefix("by "), ylabel="milliseconds")
        axes.legend(frameon=False)
        axes.grid(alpha=0.3)
    yield figure


def number_of(row: Row) -> str:
    return "" if row.percent_of_copy is None else f"{row.percent_of_copy:.0f}%"


def _of(subject: str, results: Results) -> list[Row]:
    return [row for row in results.rows if row.subject == subject]


def _timed(row: Row) -> tuple[str, float, str]:
    """Series, length and label of a bar of host time."""
    microseconds = row.host_us.p50 if row.host_us else 0.0
    faster = "" if row.vs_torch is None else f" ({row.vs_torch:.1f}x faster)"
    return row.side, microseconds, f"{microseconds:,.0f}{faster}"


def _colours(series: Sequence[str]) -> dict[str, str]:
    more = iter(MORE_COLOURS * 4)
    return {name: COLOURS.get(name) or next(more) for name in dict.fromkeys(series)}


def _bars(
    title: str, axis: str, bars: Sequence[Bar], line: float | None = None, better: str = "lower"
) -> Iterator[Figure]:
    """Horizontal bars by group, if there are any; a vertical line at `line`."""
    if not bars:
        return
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
            axes.annotate(
                *(bar.label, (bar.value, position), (4, 0)),
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
    axes.set_xlabel(f"{axis}; {better} is better")
    if line is not None:
        axes.axvline(line, color="k", ls="--", lw=1)
    handles = [axes.barh(0, 0, color=colour) for colour in colours.values()]
    figure.legend(handles, list(colours), loc="outside lower center", ncols=4, frameon=False)
    yield figure


MAKERS: dict[str, Callable[[Results], Iterator[Figure]]] = {
    "loops": _loops,
    "host": _host,
    "throughput": _throughput,
    "training": _training("training", "Whole training steps"),
    "mlp": _training("mlp", "A perceptron in mixed precision"),
    "growth": _growth,
    "clip": _clip,
}
