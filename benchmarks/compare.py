"""Comparison of two results: rows paired by name, differences beyond their spread marked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from .results import Results, Row
from .tables import Table, number

FASTER, SLOWER, SAME, UNKNOWN = "faster", "slower", "within spread", "no spread"


def changes(first: Results, second: Results) -> list[tuple[Row, str, float, float, str]]:
    """Row of the second result, measure, both medians and verdict, of each row that both have."""
    others = {row.name: row for row in second.rows}
    return [
        (others[row.name], *change)
        for row in first.rows
        if row.name in others
        for change in _changes(row, others[row.name])
    ]


def _changes(first: Row, second: Row) -> Iterator[tuple[str, float, float, str]]:
    for measure in ("ms", "host_us"):
        a, b = getattr(first, measure), getattr(second, measure)
        if a and b:
            verdict = FASTER if b.p80 < a.p20 else SLOWER if b.p20 > a.p80 else SAME
            yield measure, a.p50, b.p50, verdict
    if first.ns_each and second.ns_each and first.ns_each != second.ns_each:
        yield "ns_each", first.ns_each, second.ns_each, UNKNOWN


def table(first: Results, second: Results, everything: bool = False) -> Table:
    """Changes beyond the spread, or all."""
    lines = [
        (*row.name, measure, number(before), number(after), number(after / before), verdict)
        for row, measure, before, after, verdict in changes(first, second)
        if everything or verdict != SAME
    ]
    names = ("subject", "case", "dtype", "call", "side", "measure")
    header = (*names, "first", "second", "ratio", "verdict")
    return Table("compare", "The second over the first, by medians", "", header, lines, len(names))


def summary(first: Results, second: Results) -> list[str]:
    """Numbers of verdicts, and of rows that one result lacks."""
    counts = Counter(verdict for *_, verdict in changes(first, second))
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    lines = [told or "the two have nothing in common"]
    names = [{row.name for row in each.rows} for each in (first, second)]
    for which, only in (("first", names[0] - names[1]), ("second", names[1] - names[0])):
        if only:
            subjects = ", ".join(sorted({subject for subject, *_ in only}))
            lines.append(f"only in the {which}: {len(only)} rows ({subjects})")
    return lines


def environments(first: Results, second: Results) -> Iterator[str]:
    """Machine and torch first, as ratios across these say little about ampfast."""
    both = [
        {**each.machine, "load": None, "torch": each.torch, "triton": each.triton}
        for each in (first, second)
    ]
    keys = [key for key in both[0] | both[1] if both[0].get(key) != both[1].get(key)]
    yield from (
        f"{k} differs: {both[0].get(k) or 'none'} and {both[1].get(k) or 'none'}" for k in keys
    )
    if keys:
        yield "so times differ for more reasons than ampfast's code"
    for which, each in (("first", first), ("second", second)):
        told = f"{which}: ampfast {each.ampfast}, commit {each.commit or 'unknown'}, {each.date}"
        yield " ".join((told, *each.caveats))
