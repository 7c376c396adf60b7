"""Tables that a run prints: one for each subject, then goals and omissions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from .results import Goal, Results, Row

# Column name, its value, and decimals where they are not the default.
Column = tuple[str, Callable[["Row"], "float | None"], "int | None"]

COLOURS = {
    "met": "green",
    "met within spread": "yellow",
    "not met": "red",
    "faster": "green",
    "fewer": "green",
    "slower": "red",
    "more": "red",
}


@dataclass
class Table:
    """Names to the left, numbers to the right; `sections` are the lines followed by a rule."""

    title: str
    names: tuple[str, ...]
    numbers: tuple[str, ...]
    lines: list[tuple[str, ...]] = field(default_factory=list)
    sections: set[int] = field(default_factory=set)

    def add(self, *cells: str) -> None:
        self.lines.append(cells)

    def add_section(self) -> None:
        self.sections.add(len(self.lines))

    def plain(self) -> str:
        """The table as text."""
        header = self.names + self.numbers
        widths = [max(map(len, column)) for column in zip(header, *self.lines, strict=True)]

        def line(cells: Sequence[str]) -> str:
            padded = [
                cell.ljust(width) if index < len(self.names) else cell.rjust(width)
                for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
            ]
            return "  ".join(padded).rstrip()

        text = [self.title, line(header), "  ".join("-" * width for width in widths)]
        for number, cells in enumerate(self.lines, 1):
            text.append(line(cells))
            if number in self.sections and number < len(self.lines):
                text.append("")
        return "\n".join(text)


def show(results: Results, show_table: Callable[[Table], object]) -> None:
    """Shows the tables of all measurements."""
    for part in parts_of(results):
        show_table(part.make(part.title, part.rows))
    if results.goals:
        show_table(goal_table(results.goals))


@dataclass(frozen=True)
class Part:
    """Rows of one subject: name, method and table."""

    subject: str
    title: str
    how: str
    make: Callable[[str, Sequence[Row]], Table]
    rows: tuple[Row, ...] = ()


def parts_of(results: Results) -> list[Part]:
    """One part for each subject that has rows, known or not."""
    rows: dict[str, list[Row]] = {}
    for row in results.rows:
        rows.setdefault(row.subject, []).append(row)
    known = {part.subject: part for part in PARTS}
    order = [subject for subject in known if subject in rows]
    order += [subject for subject in rows if subject not in known]
    return [
        replace(
            known.get(subject, Part(subject, subject.capitalize(), "", any_table)),
            rows=tuple(rows[subject]),
        )
        for subject in order
    ]


def any_table(title: str, rows: Sequence[Row]) -> Table:
    """Table of the columns that have values."""

    def given(columns: Sequence[Column]) -> list[Column]:
        return [column for column in columns if any(column[1](row) is not None for row in rows)]

    numbers = given(ANY_NUMBERS)
    table = Table(title, ANY_NAMES, tuple(name for name, _, _ in numbers))
    place = None
    for row in rows:
        if place not in (None, (row.case, row.path)):
            table.add_section()
        place = (row.case, row.path)
        cells = (
            number(read(row)) if digits is None else _fixed(read(row), digits)
            for _, read, digits in numbers
        )
        table.add(row.list_name, row.dtype, row.path, row.provider, *cells)
    return table


def loop_table(title: str, rows: Sequence[Row]) -> Table:
    columns = ("parameters", "us p20", "p50", "p80", "x torch")
    parts = ("scale, us", "step", "update", "% of the loop")
    table = Table(title, ("net", "optimizer", "provider"), columns + parts)
    for row in rows:
        table.add(
            *(row.case, row.path, row.provider, _fixed(row.tensors, 0)),
            *map(number, (row.host_us_p20, row.host_us_p50, row.host_us_p80, row.vs_torch)),
            *map(number, (row.scale_us, row.step_us, row.update_us)),
            number(row.share, 100),
        )
    return table


def host_table(title: str, rows: Sequence[Row]) -> Table:
    table = Table(title, ("parameters", "path", "provider"), ("us p20", "p50", "p80", "x torch"))
    for row in rows:
        times = (row.host_us_p20, row.host_us_p50, row.host_us_p80)
        table.add(row.case, row.path, row.provider, *map(number, times), number(row.vs_torch))
    return table


def kernel_table(title: str, rows: Sequence[Row]) -> Table:
    """Device time and bandwidth, with columns for values measured on a GPU only if present."""
    on_gpu = any(row.host_us_p50 is not None for row in rows)
    columns = ("ms p20", "p50", "p80", "x torch", "GB/s", "% of copy")
    more = ("host us", "kernels", "syncs", "timed by") if on_gpu else ()
    table = Table(title, ("list", "dtype", "path", "provider"), columns + more)
    for row in rows:
        table.add(
            *(row.list_name, row.dtype, row.path, row.provider),
            *map(number, (row.ms_p20, row.ms_p50, row.ms_p80)),
            *map(number, (row.vs_torch, row.gb_s, row.percent_of_copy)),
            *(_on_gpu(row) if on_gpu else ()),
        )
        if row.path == "copy of half":
            table.add_section()
    return table


def step_table(title: str, rows: Sequence[Row]) -> Table:
    on_gpu = any(row.host_us_p50 is not None for row in rows)
    more = ("host us", "kernels", "syncs", "timed by", "x torch on the host") if on_gpu else ()
    columns = ("ms p20", "p50", "p80", "x torch")
    table = Table(title, ("list", "dtype", "path", "provider"), columns + more)
    place = None
    for row in rows:
        if place not in (None, (row.list_name, row.dtype)):
            table.add_section()
        place = (row.list_name, row.dtype)
        table.add(
            *(*place, row.path, row.provider),
            *map(number, (row.ms_p20, row.ms_p50, row.ms_p80, row.vs_torch)),
            *((*_on_gpu(row), number(row.host_vs_torch)) if on_gpu else ()),
        )
    return table


def tracking_table(title: str, rows: Sequence[Row]) -> Table:
    """Device time, and its ratio to the same pass without tracking, by medians."""
    columns = ("ms p20", "p50", "p80", "x without")
    table = Table(title, ("list", "dtype", "path", "provider"), columns)
    plain: dict[tuple[str, str, str, str], float] = {}
    for row in rows:
        work, *tracked = row.path.split(", ")
        key = (row.list_name, row.dtype, work, row.provider)
        if not tracked and row.ms_p50:
            plain[key] = row.ms_p50
        over = row.ms_p50 / plain[key] if tracked and row.ms_p50 and key in plain else None
        times = (row.ms_p20, row.ms_p50, row.ms_p80, over)
        table.add(row.list_name, row.dtype, row.path, row.provider, *map(number, times))
    return table


def memory_table(title: str, rows: Sequence[Row]) -> Table:
    columns = ("list MiB", "process KiB", "allocator KiB", "table bytes", "chunks")
    table = Table(title, ("list", "path", "provider"), columns)
    for row in rows:
        table.add(
            *(row.case, row.path, row.provider),
            number(row.list_bytes, 1 / (1 << 20)),
            number(row.extra_bytes, 1 / (1 << 10)),
            number(row.allocated_bytes, 1 / (1 << 10)),
            number(row.table_bytes),
            number(row.chunks),
        )
    return table


def rank_table(title: str, rows: Sequence[Row]) -> Table:
    on_gpu = any(row.host_us_p50 is not None for row in rows)
    more = ("host us", "x torch on the host") if on_gpu else ()
    columns = ("ranks", "ms p20", "p50", "p80", "x torch", "collectives")
    table = Table(title, ("list", "path", "provider"), columns + more)
    place = None
    for row in rows:
        if place not in (None, row.case):
            table.add_section()
        place = row.case
        table.add(
            *(row.case, row.path, row.provider, str(row.ranks)),
            *map(number, (row.ms_p20, row.ms_p50, row.ms_p80, row.vs_torch)),
            str(row.collectives),
            *(map(number, (row.host_us_p50, row.host_vs_torch)) if on_gpu else ()),
        )
    return table


def training_table(title: str, rows: Sequence[Row]) -> Table:
    """Times of training, and their ratios to the same without a scaler."""
    on_gpu = any(row.host_us_p50 is not None for row in rows)
    more = ("host us", "kernels", "syncs", "timed by") if on_gpu else ()
    columns = ("tensors", "elements", "ms p20", "p50", "p80", "x torch", "over none")
    table = Table(title, ("net", "dtype", "path", "provider"), columns + more)
    place = None
    for row in rows:
        if place not in (None, row.case):
            table.add_section()
        place = row.case
        table.add(
            *(row.case, row.dtype, row.path, row.provider),
            *(_fixed(row.tensors, 0), _fixed(row.elements, 0)),
            *map(number, (row.ms_p20, row.ms_p50, row.ms_p80, row.vs_torch)),
            _fixed(row.over_none, 3),
            *(_on_gpu(row) if on_gpu else ()),
        )
    return table


def growth_table(title: str, rows: Sequence[Row]) -> Table:
    """Points of the curves, and the cost of one more tensor or element."""
    columns = ("ms p20", "p50", "p80", "host us", "x torch", "ns each")
    table = Table(title, ("list", "path", "provider"), columns)
    for row in rows:
        table.add(
            *(row.case, row.path, row.provider),
            *map(number, (row.ms_p20, row.ms_p50, row.ms_p80)),
            *map(number, (row.host_us_p50, row.vs_torch, row.ns_each)),
        )
    return table


def goal_table(goals: Sequence[Goal]) -> Table:
    table = Table(
        "Goals", ("goal", "list", "dtype"), ("limit", "measured", "p20 to p80", "verdict")
    )
    for goal in goals:
        spread = "-"
        if goal.ratio_p20 is not None and goal.ratio_p80 is not None:
            spread = f"{goal.ratio_p20:.3g} to {goal.ratio_p80:.3g}"
        table.add(
            *(goal.name, goal.case, goal.dtype),
            *(f"{goal.sense} {goal.limit:g}", f"{goal.ratio:.3g}", spread, goal.verdict),
        )
    return table


def number(value: float | None, factor: float = 1.0) -> str:
    """Three significant digits without an exponent, or a dash for a missing value."""
    if value is None:
        return "-"
    value *= factor
    if 0 < abs(value) < 0.1:
        return f"{value:.4f}"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"


def _on_gpu(row: Row) -> tuple[str, ...]:
    counts = ("-" if count is None else str(count) for count in (row.launches, row.syncs))
    return number(row.host_us_p50), *counts, row.timer or "-"


def _fixed(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


ANY_NAMES = ("case", "dtype", "path", "provider")
ANY_NUMBERS: tuple[Column, ...] = (
    ("tensors", lambda row: row.tensors, 0),
    ("elements", lambda row: row.elements, 0),
    ("ms p20", lambda row: row.ms_p20, None),
    ("p50", lambda row: row.ms_p50, None),
    ("p80", lambda row: row.ms_p80, None),
    ("x torch", lambda row: row.vs_torch, None),
    ("over none", lambda row: row.over_none, 3),
    ("ns each", lambda row: row.ns_each, None),
    ("GB/s", lambda row: row.gb_s, None),
    ("% of copy", lambda row: row.percent_of_copy, None),
    ("host us", lambda row: row.host_us_p50, None),
    ("x torch on the host", lambda row: row.host_vs_torch, None),
    ("kernels", lambda row: row.launches, 0),
    ("copies", lambda row: row.copies, 0),
    ("syncs", lambda row: row.syncs, 0),
)

PARTS = (
    Part(
        "loops",
        "Scaler's own time in training loops",
        "scale, step less the optimizer's own time, and update, in microseconds an iteration; "
        "forward and backward cool the caches before each. The graph is freed before the calls "
        "that are timed. The last column is the scaler's part of the iteration. Autocast is to "
        "bfloat16.",
        loop_table,
    ),
    Part(
        "mlp",
        "A perceptron in mixed precision, epochs",
        "Forward, backward and optimizer; the epochs of all modes take turns, from the same "
        "parameters. Over none is relative to autocast without a scaler.",
        training_table,
    ),
    Part(
        "training",
        "Training steps of whole nets",
        "Forward, backward, clipping where named, and the optimizer's step. Over none is relative "
        "to the same step without a scaler, round by round.",
        training_table,
    ),
    Part(
        "growth",
        "Growth of unscale_ and update",
        "Lists of ever more tensors of one size, and one tensor of ever more elements. A slope is "
        "that of the line through the larger points, in nanoseconds per tensor or element.",
        growth_table,
    ),
    Part(
        "host",
        "Host time of the scaler, warm calls",
        "Parameters of four elements, so that only overhead remains: wall time until the call "
        "returns, in microseconds. Calls without a counterpart in torch are compared with the "
        "calls that they replace.",
        host_table,
    ),
    Part(
        "kernels",
        "Kernels over gradient lists",
        "One pass over an existing list. A cold list is one of many that take turns, so that none "
        "is in the cache. GB/s are the bytes that the work must move (a check "
        "reads the list, unscaling also writes it) over the median; a copy moves as many in one "
        "piece.",
        kernel_table,
    ),
    Part(
        "steps",
        "Whole steps of the scaler, scale(loss) to update()",
        "With optimizers without work, so that only the scaler is timed; a fused optimizer takes "
        "scale and flag itself.",
        step_table,
    ),
    Part(
        "clip",
        "Unscaling and clipping by the norm, whole calls",
        "Torch's unscale_ and clip_grad_norm_ against one call; in_place=False leaves the "
        "gradients to the optimizer.",
        step_table,
    ),
    Part(
        "tracking",
        "Cost of tracking each parameter",
        "The same pass with and without; the last column is over the pass without, by medians.",
        tracking_table,
    ),
    Part(
        "memory",
        "Memory on top of the gradients",
        "Each call in a process of its own: growth of its resident set, and peak of torch's "
        "allocator.",
        memory_table,
    ),
    Part(
        "ranks",
        "Ranks that share a list, sharded scalers",
        "Each process has a shard of every tensor; times are those of the slowest rank of a round.",
        rank_table,
    ),
)
