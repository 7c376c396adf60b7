"""Comparison of two results: rows paired, differences beyond their spread marked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .report import Table, number
from .results import Results, Row

FASTER, SLOWER, SAME = "faster", "slower", "within spread"
FEWER, MORE = "fewer", "more"
UNKNOWN = "no spread"
VERDICTS = (FASTER, SLOWER, SAME, FEWER, MORE, UNKNOWN)
# Exact measures, whose differences all count.
COUNTS = ("launches", "copies", "syncs", "collectives", "table_bytes")
# Measures taken once, with an unknown spread.
SINGLE = ("ns_each", "extra_bytes", "allocated_bytes")
# Different on every run.
FLEETING = ("load",)

Key = tuple[str, ...]


@dataclass(frozen=True)
class Change:
    """Measure of a row in both results; `ratio` is the second over the first."""

    row: Row
    measure: str
    first: float
    second: float
    ratio: float | None
    verdict: str


@dataclass(frozen=True)
class Comparison:
    """Differences between two results.

    Attributes:
        changes: Measures of rows in both.
        environments: Sentences on differences in machine and versions.
        only_first: Rows of the first only.
        only_second: Rows of the second only.
    """

    changes: list[Change]
    environments: list[str]
    only_first: list[Row]
    only_second: list[Row]

    @classmethod
    def of(cls, first: Results, second: Results) -> Comparison:
        """Compares the rows of both."""
        rows, others = _by_key(first.rows), _by_key(second.rows)
        return cls(
            [
                change
                for key in rows
                if key in others
                for change in _changes(rows[key], others[key])
            ],
            list(_environments(first, second)),
            [row for key, row in rows.items() if key not in others],
            [row for key, row in others.items() if key not in rows],
        )

    def show(
        self,
        line: Callable[[str], object],
        show_table: Callable[[Table], object],
        everything: bool = False,
    ) -> None:
        """Shows differences of the machine, then changes, then missing rows."""
        for text in self.environments:
            line(text)
        told = [c for c in self.changes if everything or c.verdict != SAME]
        if told:
            show_table(_table(told))
        counts = Counter(change.verdict for change in self.changes)
        line(
            ", ".join(f"{counts[v]} {v}" for v in VERDICTS if counts[v])
            or "the two have nothing in common"
        )
        common = {change.row.subject for change in self.changes}
        for which, rows in (("first", self.only_first), ("second", self.only_second)):
            for place, count in _places(rows, common).items():
                line(f"only in the {which}: {place}, {count} row{'s' * (count > 1)}")


def _places(rows: Sequence[Row], common: set[str]) -> Counter[str]:
    """Numbers of rows by subject where none is common, else by list."""
    dtypes: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        dtypes.setdefault((row.subject, row.list_name), {})[row.dtype] = None
    return Counter(
        f"{row.subject} {row.list_name} ({', '.join(dtypes[row.subject, row.list_name])})"
        if row.subject in common
        else f"all of {row.subject}"
        for row in rows
    )


def _by_key(rows: Sequence[Row]) -> dict[Key, Row]:
    """Rows by all of their names; equal names are numbered."""
    seen: Counter[Key] = Counter()
    found = {}
    for row in rows:
        sizes = (row.ranks, row.tensors, row.elements)
        key = (row.subject, row.list_name, row.dtype, row.path, row.provider, *map(str, sizes))
        found[(*key, str(seen[key]))] = row
        seen[key] += 1
    return found


def _changes(first: Row, second: Row) -> Iterator[Change]:
    timed = ["ms", "host_us"]
    if first.ms_p50 is not None and first.subject == "host":
        timed = ["host_us"]  # on a CPU the same time in another unit
    for measure in timed:
        a, b = (
            [getattr(row, f"{measure}_{q}") for q in ("p20", "p50", "p80")]
            for row in (first, second)
        )
        if a[1] is None or b[1] is None:
            continue
        verdict = SAME
        if None not in (*a, *b):
            verdict = FASTER if b[2] < a[0] else SLOWER if b[0] > a[2] else SAME
        unit = {"ms": "ms", "host_us": "host us"}[measure]
        yield Change(second, unit, a[1], b[1], b[1] / a[1] if a[1] else None, verdict)
    for measure in SINGLE:
        had, has = getattr(first, measure), getattr(second, measure)
        if had is not None and has is not None:
            ratio = has / had if had else None
            verdict = SAME if had == has else UNKNOWN
            yield Change(second, measure.replace("_", " "), had, has, ratio, verdict)
    for measure in COUNTS:
        had, has = getattr(first, measure), getattr(second, measure)
        if had is not None and has is not None and had != has:
            ratio = has / had if had else None
            unit = measure.replace("_", " ")
            yield Change(second, unit, had, has, ratio, FEWER if has < had else MORE)


def _environments(first: Results, second: Results) -> Iterator[str]:
    """Machine and torch first, as ratios across these say little about ampfast."""
    keys = dict.fromkeys((*first.machine, *second.machine))
    pairs = [
        (key, first.machine.get(key), second.machine.get(key))
        for key in keys
        if key not in FLEETING
        # Missing facts of an earlier version are no difference.
        and key in first.machine.keys() & second.machine.keys() | {"gpu"}
    ]
    pairs += [(key, getattr(first, key), getattr(second, key)) for key in ("torch", "triton")]
    differing = [(key, a, b) for key, a, b in pairs if a != b]
    for key, a, b in differing:
        yield f"{key} differs: {a or 'none'} and {b or 'none'}"
    if differing:
        yield "so times differ for more reasons than ampfast's code"
    yield f"first: {_origin(first)}"
    yield f"second: {_origin(second)}"


def _origin(results: Results) -> str:
    load = results.machine.get("load")
    parts = [f"ampfast {results.ampfast}, commit {results.commit or 'unknown'}, {results.date}"]
    parts += [] if load is None else [f"load {load:.1f}"]
    parts += [] if results.complete else ["not complete"]
    return ", ".join(parts)


def _table(changes: Sequence[Change]) -> Table:
    table = Table(
        "The second over the first, by medians",
        ("subject", "list", "dtype", "path", "provider", "measure"),
        ("first", "second", "ratio", "verdict"),
    )
    for change in changes:
        row = change.row
        name = row.list_name
        sizes = {"tensors": row.tensors, "elements": row.elements, "ranks": row.ranks}
        name += "".join(f", {size:,} {what}" for what, size in sizes.items() if size is not None)
        ratio = "-" if change.ratio is None else f"{change.ratio:.3f}"
        table.add(
            *(row.subject, name, row.dtype, row.path, row.provider, change.measure),
            *(number(change.first), number(change.second), ratio, change.verdict),
        )
    return table
