"""The tables that a run prints: one for each subject, then the goals."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from .results import Goal, Results, Row

COLOURS = {"met": "green", "met within spread": "yellow", "not met": "red"}


def show(results: Results, console: Console) -> None:
    """Prints everything that was measured."""
    for title, subject, make in (
        ("Host time of the scaler, whole calls", "host", host_table),
        ("Kernels over gradient lists", "kernels", kernel_table),
        ("Memory on top of the gradients", "memory", memory_table),
    ):
        rows = [row for row in results.rows if row.subject == subject]
        if rows:
            console.print(make(title, rows))
    if results.goals:
        console.print(goal_table(results.goals))


def host_table(title: str, rows: Sequence[Row]) -> Table:
    table = _table(title, ("parameters", "path", "provider"), ("us p20", "p50", "p80", "x torch"))
    for row in rows:
        times = [_number(value, 1e3) for value in (row.ms_p20, row.ms_p50, row.ms_p80)]
        table.add_row(row.case, row.path, row.provider, *times, _number(row.vs_torch))
    return table


def kernel_table(title: str, rows: Sequence[Row]) -> Table:
    columns = ("ms p20", "p50", "p80", "x torch", "GB/s", "% of copy")
    table = _table(title, ("list", "dtype", "path", "provider"), columns)
    for row in rows:
        times = [_number(value) for value in (row.ms_p20, row.ms_p50, row.ms_p80)]
        what = (row.list_name, row.dtype, row.path, row.provider)
        table.add_row(
            *what,
            *times,
            _number(row.vs_torch),
            _number(row.gb_s),
            _number(row.percent_of_copy),
        )
        if row.path == "copy":
            table.add_section()
    return table


def memory_table(title: str, rows: Sequence[Row]) -> Table:
    columns = ("list MiB", "process KiB", "allocator KiB", "table bytes", "chunks")
    table = _table(title, ("list", "path", "provider"), columns)
    for row in rows:
        table.add_row(
            row.case,
            row.path,
            row.provider,
            _number(row.list_bytes, 1 / (1 << 20)),
            _number(row.extra_bytes, 1 / (1 << 10)),
            _number(row.allocated_bytes, 1 / (1 << 10)),
            _number(row.table_bytes),
            _number(row.chunks),
        )
    return table


def goal_table(goals: Sequence[Goal]) -> Table:
    table = _table(
        "Goals",
        ("goal", "list", "dtype"),
        ("limit", "measured", "p20 to p80", "verdict"),
    )
    for goal in goals:
        spread = "-"
        if goal.ratio_p20 is not None and goal.ratio_p80 is not None:
            spread = f"{goal.ratio_p20:.3g} to {goal.ratio_p80:.3g}"
        table.add_row(
            goal.name,
            goal.case,
            goal.dtype,
            f"{goal.sense} {goal.limit:g}",
            f"{goal.ratio:.3g}",
            spread,
            f"[{COLOURS[goal.verdict]}]{goal.verdict}[/]",
        )
    return table


def _table(title: str, names: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in names:
        table.add_column(name)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def _number(value: float | None, factor: float = 1.0) -> str:
    """Three significant digits without an exponent, or a dash for what was not measured."""
    if value is None:
        return "-"
    value *= factor
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"
