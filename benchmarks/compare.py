"""Comparison of two results: rows paired by name, differences beyond their spread marked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from .results import Results, Row
from .tables import Table, number

FASTER, SLOWER, SAME, UNKNOWN = "faster", "slower", "within spread", "no spread"


def changes(first: Results, second: Results) -> Iterator[tuple[Row, str, float, float, str]]:
    """Row, measure, both medians and verdict, of each row that both have."""
    rows = {row.name: row for row in second.rows}
    for before in first.rows:
        if (after := rows.get(before.name)) is None:
            continue
        for measure in ("ms", "host_us"):
            a, b = getattr(before, measure), getattr(after, measure)
            if a and b:
                verdict = FASTER if b.p80 < a.p20 else SLOWER if b.p20 > a.p80 else SAME
                yield after, measure, a.p50, b.p50, verdict
        if before.ns_each and after.ns_each and before.ns_each != after.ns_each:
            yield after, "ns_each", before.ns_each, after.ns_each, UNKNOWN


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


def summary(first: Results, second: Results) -> Iterator[str]:
    """Numbers of verdicts, and of rows that one result lacks."""
    counts = Counter(verdict for *_, verdict in changes(first, second))
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    yield told or "the two have nothing in common"
    names = [{row.name for row in each.rows} for each in (first, second)]
    for which, only in (("first", names[0] - names[1]), ("second", names[1] - names[0])):
        if only:
            subjects = ", ".join(sorted({subject for subject, *_ in only}))
            yield f"only in the {which}: {len(only)} rows ({subjects})"


def environments(first: Results, second: Results) -> Iterator[str]:
    """Machine and torch first, as ratios across these say little about ampfast."""
    a, b = ({**x.machine, "load": 0, "torch": x.torch, "triton": x.triton} for x in (first, second))
    keys = [key for key in a | b if a.get(key) != b.get(key)]
    yield from (f"{key} differs: {a.get(key)} and {b.get(key)}" for key in keys)
    if keys:
        yield "so times differ for more reasons than ampfast's code"
    for which, each in (("first", first), ("second", second)):
        told = f"{which}: ampfast {each.ampfast}, commit {each.commit or 'unknown'}, {each.date}"
        yield " ".join((told, *each.caveats))
