"""SVG pictures: grouped bars and curves over logarithmic axes, deterministic.

They need no library, have a light and a dark scheme, and keep text as text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

WIDTH = 720
# Width of a character, estimated without the font.
CHARACTER = 6.8
BAR = 15
GAP = 11
HEAD = 62
FOOT = 44
PLOT_HEIGHT = 330

# Colours are variables, so that a page can define them.
LIGHT = (
    "--paper:#ffffff;--ink:#1f2328;--soft:#57606a;--grid:#d8dee4;"
    "--tone0:#7b848d;--tone1:#1f5fae;--tone2:#b45309;--tone3:#2f7d4f;--tone4:#7c4aa5"
)
DARK = (
    "--paper:#12161c;--ink:#e6edf3;--soft:#a2abb5;--grid:#333b45;"
    "--tone0:#8b949e;--tone1:#6cb0ff;--tone2:#e8a35c;--tone3:#63c08a;--tone4:#c49bf5"
)
STYLE = (
    ".chart text{fill:var(--ink);font:12px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}"
    ".chart .title{font-size:15px;font-weight:600}.chart .soft{fill:var(--soft)}"
    ".chart .value{font-size:11px;paint-order:stroke;stroke:var(--paper);stroke-width:3px}"
    ".chart .grid{stroke:var(--grid)}"
    ".chart .mark{stroke:var(--ink);stroke-width:2}"
    ".chart .limit{stroke:var(--ink);stroke-dasharray:4 3}"
    ".chart .line{fill:none;stroke-width:2}"
    + "".join(
        f".chart .t{tone}{{fill:var(--tone{tone})}}.chart .l{tone}{{stroke:var(--tone{tone})}}"
        for tone in range(5)
    )
    + ".chart .l1{stroke-dasharray:none}.chart .l0{stroke-dasharray:6 3}"
)
TONES = 5


@dataclass(frozen=True)
class Picture:
    """Picture with title, description and content."""

    name: str
    title: str
    description: str
    height: int
    inside: str

    def inline(self) -> str:
        """For a page that defines style and colours."""
        return self._element("")

    def file(self) -> str:
        """For a file of its own."""
        style = f":root{{{LIGHT}}}@media (prefers-color-scheme:dark){{:root{{{DARK}}}}}{STYLE}"
        # Opaque: the page around it may not follow the reader's colour scheme.
        paper = f'<rect width="{WIDTH}" height="{self.height}" rx="6" style="fill:var(--paper)"/>'
        return self._element(
            f"<style>{style}</style>\n{paper}\n", f' width="{WIDTH}" height="{self.height}"'
        )

    def _element(self, before: str, size: str = "") -> str:
        label = quoteattr(f"{self.title}: {self.description}")
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" role="img" aria-label={label}'
            f'{size} viewBox="0 0 {WIDTH} {self.height}">\n{before}{self.inside}</svg>\n'
        )


@dataclass(frozen=True)
class Bar:
    """Bar of a group: series, length and label."""

    series: str
    value: float
    label: str


@dataclass(frozen=True)
class Group:
    """Bars below one another; `mark` is a length to compare with."""

    name: str
    bars: tuple[Bar, ...]
    mark: float | None = None


@dataclass(frozen=True)
class Curve:
    """Points (x, y), both positive, in the order of x."""

    series: str
    points: tuple[tuple[float, float], ...]


def bars(
    name: str,
    title: str,
    description: str,
    axis: str,
    groups: Sequence[Group],
    tones: dict[str, int],
    mark: str = "",
    limit: float | None = None,
) -> Picture:
    """Horizontal bars from zero, with an optional line at `limit`.

    Args:
        name: File name without its ending.
        title: Title.
        description: Alternative text.
        axis: Label of the axis, with its unit.
        groups: At least one, of at least one bar each.
        tones: Colour of each series, 0 to 4, in the order of the legend.
        mark: Name of the groups' marks.
        limit: Position of a vertical line.
    """
    left = 24 + CHARACTER * max(len(group.name) for group in groups)
    longest = max(len(bar.label) for group in groups for bar in group.bars)
    right = WIDTH - 20 - CHARACTER * longest
    values = [bar.value for group in groups for bar in group.bars]
    values += [group.mark for group in groups if group.mark is not None]
    ticks = _linear_ticks(max([*values, limit or 0.0]))
    bottom = HEAD + sum(BAR * len(group.bars) + GAP for group in groups)

    def across(value: float) -> float:
        return left + (right - left) * value / ticks[-1]

    parts = [_head(title, tones, mark)]
    for tick in ticks:
        parts.append(_line(across(tick), HEAD - 4, across(tick), bottom, "grid"))
        parts.append(_text(across(tick), bottom + 15, _short(tick), "soft", "middle"))
    parts.append(_text((left + right) / 2, bottom + 33, axis, "soft", "middle"))
    # Drawn last, above all lines.
    labels = []
    top = float(HEAD)
    for group in groups:
        height = BAR * len(group.bars)
        parts.append(_text(left - 8, top + height / 2 + 4, group.name, "", "end"))
        for index, bar in enumerate(group.bars):
            y = top + BAR * index
            parts.append(
                f'<rect class="t{tones[bar.series]}" x="{left:.1f}" y="{y + 1:.1f}" '
                f'width="{across(bar.value) - left:.1f}" height="{BAR - 2}"/>\n'
            )
            end = across(bar.value)
            reach = end + 8 + CHARACTER * len(bar.label)
            if group.mark is not None and end <= across(group.mark) < reach:
                end = across(group.mark)
            labels.append(_text(end + 5, y + 12, bar.label, "value"))
        if group.mark is not None:
            parts.append(_line(across(group.mark), top, across(group.mark), top + height, "mark"))
        top += height + GAP
    if limit is not None:
        parts.append(_line(across(limit), HEAD - 4, across(limit), bottom, "limit"))
    parts += labels
    return Picture(name, title, description, bottom + FOOT, "".join(parts))


def curves(
    name: str,
    title: str,
    description: str,
    axes: tuple[str, str],
    lines: Sequence[Curve],
    tones: dict[str, int],
) -> Picture:
    """Curves over logarithmic axes, with a mark at each point.

    Args:
        name: File name without its ending.
        title: Title.
        description: Alternative text.
        axes: Labels of the horizontal and the vertical axis.
        lines: At least one, of at least one point each.
        tones: Colour of each series, 0 to 4, in the order of the legend.
    """
    left, right, bottom = 74.0, WIDTH - 24.0, float(HEAD + PLOT_HEIGHT)
    x_ticks = _decades([x for line in lines for x, _ in line.points])
    y_ticks = _decades([y for line in lines for _, y in line.points])

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            left + (right - left) * _part(x, x_ticks),
            bottom - (bottom - HEAD) * _part(y, y_ticks),
        )

    parts = [_head(title, tones, "")]
    for tick in x_ticks:
        x, _ = place(tick, y_ticks[0])
        parts.append(_line(x, HEAD, x, bottom, "grid"))
        parts.append(_text(x, bottom + 16, _short(tick), "soft", "middle"))
    for tick in y_ticks:
        _, y = place(x_ticks[0], tick)
        parts.append(_line(left, y, right, y, "grid"))
        parts.append(_text(left - 8, y + 4, _short(tick), "soft", "end"))
    parts.append(_text((left + right) / 2, bottom + 35, axes[0], "soft", "middle"))
    turned = f'transform="rotate(-90 16 {(HEAD + bottom) / 2:.1f})"'
    parts.append(_text(16, (HEAD + bottom) / 2, axes[1], "soft", "middle", turned))
    for line in lines:
        tone = tones[line.series]
        places = [place(x, y) for x, y in line.points]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline class="line l{tone}" points="{points}"/>\n')
        parts += [_point(x, y, tone) for x, y in places]
    return Picture(name, title, description, int(bottom) + FOOT, "".join(parts))


def stacked(name: str, title: str, pictures: Sequence[Picture]) -> Picture:
    """Pictures stacked vertically as one, under a title."""
    top, parts = 34, [_text(16, 24, title, "soft")]
    for picture in pictures:
        parts.append(f'<g transform="translate(0 {top})">\n{picture.inside}</g>\n')
        top += picture.height
    return Picture(
        name, title, "; ".join(picture.title for picture in pictures), top, "".join(parts)
    )


def tones_of(series: Sequence[str], fixed: dict[str, int]) -> dict[str, int]:
    """Colour of each series, in order: its own in `fixed`, or a free one.

    Colours fixed for absent series are used last, from the end.
    """
    drawn = {tone for name, tone in fixed.items() if name in series}
    free = [tone for tone in range(TONES) if tone not in fixed.values()]
    free += [tone for tone in reversed(fixed.values()) if tone not in drawn]
    others = [name for name in dict.fromkeys(series) if name not in fixed]
    given = {name: free[index % len(free)] for index, name in enumerate(others)} | fixed
    return {name: given[name] for name in dict.fromkeys(series)}


def _head(title: str, tones: dict[str, int], mark: str) -> str:
    parts = [_text(16, 24, title, "title")]
    x = 16.0
    for series, tone in tones.items():
        parts.append(_point(x + 5, 42, tone))
        parts.append(_text(x + 15, 46, series))
        x += 34 + CHARACTER * len(series)
    if mark:
        parts.append(_line(x + 5, 36, x + 5, 48, "mark"))
        parts.append(_text(x + 13, 46, mark))
    return "".join(parts)


def _point(x: float, y: float, tone: int) -> str:
    """Marker whose shape also identifies the series, for readers who cannot tell colours."""
    if tone == 0:
        return f'<circle class="t0" cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>\n'
    if tone == 1:
        return f'<rect class="t1" x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8"/>\n'
    corners = {
        2: ((0, -5), (5, 4), (-5, 4)),
        3: ((0, -5.5), (5.5, 0), (0, 5.5), (-5.5, 0)),
        4: ((-5, -4), (5, -4), (0, 5)),
    }[tone]
    points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)
    return f'<polygon class="t{tone}" points="{points}"/>\n'


def _text(
    x: float, y: float, text: str, kind: str = "", anchor: str = "start", more: str = ""
) -> str:
    attributes = f' class="{kind}"' if kind else ""
    attributes += f' text-anchor="{anchor}"' if anchor != "start" else ""
    attributes += f" {more}" if more else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{attributes}>{escape(text)}</text>\n'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    places = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line class="{kind}" {places}/>\n'


def _linear_ticks(largest: float) -> list[float]:
    """Ticks from 0 to at least the largest, in three to six steps of 1, 2 or 5 times 10^n."""
    if not 0 < largest < math.inf:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(largest / 3))
    step = next(s * power for s in (1, 2, 5, 10) if largest / (s * power) <= 6)
    return [step * index for index in range(math.ceil(round(largest / step, 9)) + 1)]


def _decades(values: Sequence[float]) -> list[float]:
    """Powers of ten from below the smallest to above the largest, at least two."""
    low = math.floor(math.log10(min(values)))
    high = max(low + 1, math.ceil(math.log10(max(values))))
    return [10.0**exponent for exponent in range(low, high + 1)]


def _part(value: float, ticks: Sequence[float]) -> float:
    return math.log10(value / ticks[0]) / math.log10(ticks[-1] / ticks[0])


def _short(value: float) -> str:
    """Tick label: 0.001, 20, 1,000, 1M."""
    for size, unit in ((1e9, "G"), (1e6, "M")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.6g}"
