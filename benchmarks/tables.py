"""Tables and sentences of results and of their comparison, the same wherever they are shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from .results import NO_SCALER, OTHERS, Results, Row

NOT_MEASURED = "not measured"
# Identical contenders differ by up to 2% on a quiet machine.
TIE = 0.05
# Columns that fit the width of a page.
MOST_COLUMNS = 6
FASTER, SLOWER, SAME = "faster", "slower", "within spread"

# Title and method of each subject, in the order of a run.
SUBJECTS = {
    "loops": (
        "Scaler's own time in training loops",
        "Time of scale, of step without the optimizer's own, and of update, in microseconds an "
        "iteration under autocast to bfloat16. Forward and backward leave the caches cold.",
    ),
    "host": (
        "Host time of the scaler, warm calls",
        "Time until a call returns, with parameters of four elements, so that overhead alone "
        "remains.",
    ),
    "aten": (
        "Steps with torch's ops as the backend",
        "As on devices without kernels. Host time of warm calls, with parameters of four elements.",
    ),
    "clip": (
        "Unscaling and clipping by the norm",
        "torch's unscale_ and clip_grad_norm_ against one call; in_place=False leaves the "
        "gradients to the optimizer.",
    ),
    "training": (
        "Training steps of whole nets",
        "Forward, backward, clipping where named, and the optimizer's step. Over none is relative "
        "to the same step without a scaler, round by round.",
    ),
    "kernels": (
        "Kernels over gradient lists",
        "One pass over an existing list. A cold list is one of many that take turns, so that none "
        "is in the cache. A copy moves as many bytes in one piece.",
    ),
    "steps": (
        "Whole steps of the scaler, scale(loss) to update()",
        "With optimizers without work, so that only the scaler is timed; a fused optimizer takes "
        "scale and flag itself.",
    ),
    "decisive": (
        "What a GPU is asked first",
        "Lists that no cache holds, replayed from a CUDA graph. A norm is computed with a check. "
        "For comparison, a copy copies as many bytes in one piece.",
    ),
}


@dataclass(frozen=True)
class Table:
    """Names to the left, numbers to the right."""

    subject: str
    title: str
    how: str
    header: tuple[str, ...]
    lines: Sequence[tuple[str, ...]]
    names: int

    def markdown(self) -> str:
        return markdown(self.header, self.lines, self.names)

    def text(self) -> str:
        """The table in columns, for a terminal."""
        columns = list(zip(self.header, *self.lines, strict=True))
        widths = [max(map(len, column)) for column in columns]
        aligned = [
            [cell.ljust(width) if index < self.names else cell.rjust(width) for cell in column]
            for index, (column, width) in enumerate(zip(columns, widths, strict=True))
        ]
        return "\n".join([f"\n{self.title}", *map("  ".join, zip(*aligned, strict=True))])


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]], names: int) -> str:
    """Table with names to the left and numbers to the right."""
    rule = ["---"] * names + ["--:"] * (len(header) - names)
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *lines))


def number(value: float | None) -> str:
    """Three significant digits without an exponent, or a dash for a missing value."""
    if value is None:
        return "-"
    if 0 < abs(value) < 0.1:
        return f"{value:.4f}"
    digits = 0 if abs(value) >= 100 or value == int(value) else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"


def times(value: float | None) -> str:
    """How many times as fast, in a column "faster"; of less than once, how much slower."""
    if value is None:
        return "-"
    return f"{value:.2f}x" if round(value, 2) >= 1 else f"{1 / value:.2f}x slower"


def faster(value: float) -> str:
    return times(value) if round(value, 2) < 1 else f"{times(value)} faster"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}%" if value < 10 else f"{value:.0f}%"


def _spread(row: Row) -> str:
    """Half of the distance of the quantiles."""
    spread = row.ms or row.host_us
    return f"±{50 * (spread.p80 - spread.p20) / spread.p50:.0f}%" if spread else "-"


def line(row: Row) -> str:
    """Row on one line."""
    figures = [f"{number(value)} {unit}" for unit, value in times_of(row).items()]
    figures += [f"{faster(row.vs_torch)} than torch"] if row.vs_torch else []
    return f"{', '.join(row.name)}: {', '.join(figures)} {_spread(row)}"


def of(results: Results) -> list[Table]:
    """A table for each subject with rows."""
    by_subject = {each: [row for row in results.rows if row.subject == each] for each in SUBJECTS}
    return [of_subject(subject, rows) for subject, rows in by_subject.items() if rows]


def of_subject(subject: str, rows: Sequence[Row]) -> Table:
    """Both sides of each call on one line."""
    at = {row.name: row for row in rows}
    ours = list(dict.fromkeys(row.side for row in rows if row.side not in OTHERS))
    several_dtypes = len({row.dtype for row in rows}) > 1
    # Names, rows of the others and of ampfast.
    names, lines = [], []
    for *place, call in dict.fromkeys(row.name[:4] for row in rows):
        none, theirs, *found = (at.get((*place, call, side)) for side in (*OTHERS, *ours))
        if ours and not none and not any(found):
            # A copy, which other rows are relative to.
            continue
        for row in [row for row in found if row] or [None]:
            if row and row.replaces:
                none, theirs = (at.get((*place, row.replaces, s)) for s in (NO_SCALER, "torch"))
            names.append(_names(row or theirs or none, several_dtypes, len(ours) > 1))
            lines.append((none, theirs, row))
    unit = "ms" if rows[0].ms else "us"
    columns = [
        (f"{side}, {unit}", [number(row and times_of(row).get(unit)) for row in each])
        for side, each in zip((*OTHERS, "ampfast"), zip(*lines, strict=True), strict=True)
    ]
    last = [row or none or theirs for none, theirs, row in lines]
    columns.append(("faster", [times(row.vs_torch) for row in last]))
    if not any(row.vs_torch for row in rows):
        over = ["-" if row.over_none is None else f"{row.over_none:.3f}" for row in last]
        columns.append(("ampfast, over none", over))
    columns.append(("of a copy", [percent(row.percent_of_copy) for row in last]))
    columns.append(("spread", [_spread(row) for row in last]))
    columns = [(head, cells) for head, cells in columns if set(cells) != {"-"}]
    columns = columns[: MOST_COLUMNS - 2]
    title, how = SUBJECTS[subject]
    if not several_dtypes:
        how = f"{how} All rows are of {rows[0].dtype}."
    header = ("case", "call", *(head for head, _ in columns))
    cells = zip(names, *(cells for _, cells in columns), strict=True)
    return Table(subject, title, how, header, [(*name, *line) for name, *line in cells], 2)


def times_of(row: Row) -> dict[str, float]:
    """Medians of a row by their units."""
    found = {"ms": row.ms, "us": row.host_us}
    return {unit: spread.p50 for unit, spread in found.items() if spread}


def _names(row: Row, with_dtype: bool, with_side: bool) -> tuple[str, str]:
    """Case of a row, with its number of tensors where its name lacks it."""
    parts = [row.case]
    if row.tensors is not None and not row.case[0].isdigit():
        parts.append(f"{row.tensors:,} parameters")
    parts += [row.dtype] if with_dtype else []
    call = f"{row.call}, {row.side.removeprefix('ampfast, ')}" if with_side else row.call
    return ", ".join(parts), call


def score(results: Results) -> str:
    """Sentence on how many measurements are won, tied and lost against torch."""
    # Without rows of subjects that only an earlier version measured.
    rows = [row for row in results.rows if row.subject in SUBJECTS and row.side not in OTHERS]
    ratios = [row.vs_torch for row in rows if row.vs_torch]
    if not ratios:
        return f"Against torch: {NOT_MEASURED}."
    won, lost = sum(ratio > 1 + TIE for ratio in ratios), sum(ratio < 1 - TIE for ratio in ratios)
    return (
        f"Against torch, of {len(ratios)} measurements: {won} faster, "
        f"{len(ratios) - won - lost} as fast within {TIE:.0%}, {lost} slower."
    )


def sentences(results: Results) -> list[str]:
    """What a reader wants to know first."""
    return [score(results), gain_of_the_import(results), gain_of_clipping(results)]


def gain_of_the_import(results: Results) -> str:
    """Sentence on what whole steps gain where only the scaler's class changes."""
    rows = [row for row in results.rows if row.subject == "training"]
    rows = [row for row in rows if row.vs_torch and not row.replaces]
    gains = sorted(1 - 1 / row.vs_torch for row in rows)
    if not gains:
        return f"What the import alone gains in a whole training step: {NOT_MEASURED}."
    nets = "; ".join(dict.fromkeys(row.case for row in rows))
    return (
        f"On the nets measured ({nets}), the import alone makes a whole training step "
        f"{_shorter(median(gains))} than with torch's scaler: the median of {len(gains)} kinds of "
        f"step, between {_shorter(gains[0])} and {_shorter(gains[-1])}."
    )


def gain_of_clipping(results: Results) -> str:
    """Sentence on a whole step that ampfast clips, beside torch's clipping without a scaler."""
    rows = [row for row in results.rows if row.subject == "training" and row.replaces]
    rows = [row for row in rows if row.call.endswith("clip by the scaler")]  # and no more
    over = [row.over_none for row in rows if row.over_none]
    if not over:
        return f"What clipping by the scaler gains in a whole training step: {NOT_MEASURED}."
    gain = 1 - median(over)
    return (
        f"On a {'GPU' if results.machine.get('gpu') else 'CPU'}, with ampfast's scaler and clip, a "
        f"step takes {abs(gain):.1%} {'more' if gain < 0 else 'less'} time (median) than with "
        "torch's clip and no scaler."
    )


def _shorter(gain: float) -> str:
    return f"{abs(gain):.1%} {'longer' if gain < 0 else 'shorter'}"


def changes(first: Results, second: Results) -> Iterator[tuple[Row, str, float, float, str]]:
    """Row, unit, both medians and verdict, of each row that both have."""
    rows = {row.name: row for row in second.rows}
    for before in first.rows:
        after = rows.get(before.name)
        for measure in ("ms", "host_us") if after else ():
            a, b = getattr(before, measure), getattr(after, measure)
            if a and b:
                verdict = FASTER if b.p80 < a.p20 else SLOWER if b.p20 > a.p80 else SAME
                yield after, measure, a.p50, b.p50, verdict


def comparison(first: Results, second: Results) -> Iterator[str]:
    """Environments, then changes beyond the spread, and numbers of verdicts."""
    a, b = ({**x.machine, "load": 0, "torch": x.torch, "triton": x.triton} for x in (first, second))
    # Machine and torch first, as ratios across these say little about ampfast.
    keys = [key for key in a | b if a.get(key) != b.get(key)]
    yield from (f"{key} differs: {a.get(key)} and {b.get(key)}" for key in keys)
    if keys:
        yield "so times differ for more reasons than ampfast's code"
    for which, each in (("first", first), ("second", second)):
        told = f"{which}: ampfast {each.ampfast}, commit {each.commit or 'unknown'}, {each.date}"
        yield " ".join((told, *each.caveats))
    found = list(changes(first, second))
    names = ("subject", "case", "dtype", "call", "side", "measure")
    header = (*names, "first", "second", "ratio", "verdict")
    lines = [
        (*row.name, measure, number(before), number(after), number(after / before), verdict)
        for row, measure, before, after, verdict in found
        if verdict != SAME
    ]
    yield Table("compare", "The second over the first, by medians", "", header, lines, 6).text()
    counts = Counter(verdict for *_, verdict in found)
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    yield told or "the two have nothing in common"
    known = [{row.name for row in each.rows} for each in (first, second)]
    for which, only in (("first", known[0] - known[1]), ("second", known[1] - known[0])):
        if only:
            subjects = ", ".join(sorted({subject for subject, *_ in only}))
            yield f"only in the {which}: {len(only)} rows ({subjects})"
