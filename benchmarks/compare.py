"""Comparison of two results: rows paired by name, differences beyond their spread marked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from .results import Results, Row
from .tables import Table, number

FASTER, SLOWER, SAME = "faster", "slower", "within spread"
FEWER, MORE, UNKNOWN = "fewer", "more", "no spread"
VERDICTS = (FASTER, SLOWER, SAME, FEWER, MORE, UNKNOWN)
# Exact measures, whose differences all count.
COUNTS = ("launches", "copies", "syncs")


@dataclass(frozen=True)
class Change:
    """Measure of a row in both results; `ratio` is the second over the first."""

    row: Row
    measure: str
    first: float
    second: float
    verdict: str

    @property
    def ratio(self) -> float | None:
        return self.second / self.first if self.first else None


@dataclass(frozen=True)
class Comparison:
    """Differences between two results; `only` are the rows that just one of them has."""

    changes: list[Change]
    environments: list[str]
    only: dict[str, list[Row]]

    @classmethod
    def of(cls, first: Results, second: Results) -> Comparison:
        """Compares the rows of both."""
        rows, others = ({row.name: row for row in each.rows} for each in (first, second))
        return cls(
            [c for name in rows if name in others for c in _changes(rows[name], others[name])],
            list(_environments(first, second)),
            {
                "first": [row for name, row in rows.items() if name not in others],
                "second": [row for name, row in others.items() if name not in rows],
            },
        )

    def table(self, everything: bool = False) -> Table:
        """Changes beyond the spread, or all."""
        lines = [
            (
                *(*change.row.name, change.measure, number(change.first), number(change.second)),
                *(number(change.ratio), change.verdict),
            )
            for change in self.changes
            if everything or change.verdict != SAME
        ]
        names = ("subject", "case", "dtype", "call", "side", "measure")
        header = (*names, "first", "second", "ratio", "verdict")
        return Table("compare", "The second over the first, by medians", "", header, lines, 6)

    def summary(self) -> list[str]:
        """Numbers of verdicts, and of rows that one result lacks."""
        counts = Counter(change.verdict for change in self.changes)
        told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
        lines = [told or "the two have nothing in common"]
        for which, rows in self.only.items():
            places = Counter(f"{row.subject}, {row.case}, {row.dtype}" for row in rows)
            lines += [f"only in the {which}: {place}, rows: {n}" for place, n in places.items()]
        return lines


def _changes(first: Row, second: Row) -> Iterator[Change]:
    for measure in ("ms", "host_us"):
        a, b = getattr(first, measure), getattr(second, measure)
        if a and b:
            verdict = FASTER if b.p80 < a.p20 else SLOWER if b.p20 > a.p80 else SAME
            yield Change(second, measure, a.p50, b.p50, verdict)
    # A slope has no spread.
    for measure in ("ns_each", *COUNTS):
        a, b = getattr(first, measure), getattr(second, measure)
        if a is not None and b is not None and a != b:
            verdict = UNKNOWN if measure not in COUNTS else FEWER if b < a else MORE
            yield Change(second, measure, a, b, verdict)


def _environments(first: Results, second: Results) -> Iterator[str]:
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
