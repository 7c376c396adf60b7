"""Tables and sentences of results, the same in the terminal, the report and the documentation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from .results import Results, Row, Spread

NOT_MEASURED = "not measured"
NO_SCALER = "no scaler"
LOOP = "a loop"
OTHERS = (NO_SCALER, LOOP, "torch")
# Identical contenders differ by up to 2% on a quiet machine.
TIE = 0.05

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
    "growth": (
        "Growth of unscale_ and update",
        "Lists of ever more tensors of one size, and one tensor of ever more elements. ns each is "
        "the slope of a line through the larger points: the time of one more tensor or element.",
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
    "tracking": (
        "Cost of tracking each parameter",
        "Over none is relative to the same without tracking.",
    ),
    "watched": (
        "Training steps under find_nonfinite",
        "Forward, backward and the optimizer's step, without a scaler. Over none is relative to a "
        "step without find_nonfinite.",
    ),
    "masters": (
        "Steps with float32 master weights",
        "Check, unscaling, cast, clipping, rounding back and scale update, of float16 parameters "
        "with new gradients in each step; the optimizer's own step does nothing. The column torch "
        "is by hand with torch's foreach calls, a loop by hand with one parameter after the other.",
    ),
    "decisive": (
        "What a GPU is asked first",
        "Lists that no cache holds; small ones are replayed from a CUDA graph. A norm is computed "
        "with a check. For comparison, a read takes the maximum of as many bytes in one piece, and "
        "a copy copies them.",
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
        rule = ["---"] * self.names + ["--:"] * (len(self.header) - self.names)
        return "\n".join(f"| {' | '.join(line)} |" for line in (self.header, rule, *self.lines))

    def text(self) -> str:
        """The table in columns, for a terminal."""
        columns = list(zip(self.header, *self.lines, strict=True))
        widths = [max(map(len, column)) for column in columns]
        aligned = [
            [cell.ljust(width) if index < self.names else cell.rjust(width) for cell in column]
            for index, (column, width) in enumerate(zip(columns, widths, strict=True))
        ]
        return "\n".join([f"\n{self.title}", *map("  ".join, zip(*aligned, strict=True))])


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


def _median(spread: Spread | None) -> str:
    return number(spread and spread.p50)


def _relative(spread: Spread | None) -> str:
    """Half of the distance of the quantiles."""
    return f"±{50 * (spread.p80 - spread.p20) / spread.p50:.0f}%" if spread else "-"


Cell = Callable[[Row], str]
# Columns of a page, whose widest table still fits its width, and what gives way first.
MOST_COLUMNS = 6
GIVES_WAY = ("scale + step + update", "% of a step", "over none", "us", "spread", "of a copy")
# Columns of each side that has them, each followed by the ratio of both, if there is one.
PAIRS: tuple[tuple[str, Cell, Cell | None], ...] = (
    (
        "us",
        lambda row: _median(row.host_us),
        lambda row: times(row.host_us and (row.host_vs_torch if row.ms else row.vs_torch)),
    ),
    ("ms", lambda row: _median(row.ms), lambda row: times(row.ms and row.vs_torch)),
    ("ns each", lambda r: number(r.ns_each), lambda r: times(r.ns_each and r.vs_torch)),
    ("over none", lambda row: "-" if row.over_none is None else f"{row.over_none:.3f}", None),
    ("% of a step", lambda row: percent(row.share and 100 * row.share), None),
    (
        "scale + step + update",
        lambda row: " + ".join(map(number, row.parts_us)) if row.parts_us else "-",
        None,
    ),
)
# Columns of the line.
SINGLES: tuple[tuple[str, Cell], ...] = (
    ("of a copy", lambda row: percent(row.percent_of_copy)),
    ("spread", lambda row: _relative(row.ms or row.host_us)),
    ("parameters", lambda row: "-" if row.tensors is None else f"{row.tensors:,}"),
)


def line(row: Row) -> str:
    """Row on one line, with all that it has."""
    figures = [
        row.missing,
        row.ms and f"{number(row.ms.p50)} ms {_relative(row.ms)}",
        row.host_us and f"{number(row.host_us.p50)} us on the host {_relative(row.host_us)}",
        row.gb_s and f"{number(row.gb_s)} GB/s",
        row.percent_of_copy and f"{percent(row.percent_of_copy)} of a copy",
        row.vs_torch and f"{faster(row.vs_torch)} than torch",
        row.over_none and f"{row.over_none:.3f} of no scaler",
    ]
    return f"{', '.join(row.name)}: {', '.join(filter(None, figures))}"


def of(results: Results) -> list[Table]:
    """One table for each subject that has rows."""
    rows = {subject: [r for r in results.rows if r.subject == subject] for subject in SUBJECTS}
    return [of_subject(subject, found) for subject, found in rows.items() if found]


def for_pages(results: Results) -> list[Table]:
    """Tables of at most six columns; slopes, which have no time of their own, are apart."""
    made = []
    for subject in SUBJECTS:
        rows = [row for row in results.rows if row.subject == subject]
        for is_slope in (False, True):
            part = [row for row in rows if (row.ns_each is not None) == is_slope]
            if part:
                made.append(of_subject(subject, part, MOST_COLUMNS))
    return made


def of_subject(subject: str, rows: Sequence[Row], most: int | None = None) -> Table:
    """Both sides of each call on one line, with at most so many columns, if given."""
    at = {row.name: row for row in rows}
    ours = list(dict.fromkeys(row.side for row in rows if row.side not in OTHERS))
    # Row for the names, those of the others, and ampfast's.
    lines: list[tuple[Row | None, ...]] = []
    for *place, call in dict.fromkeys(row.name[:4] for row in rows):
        none, loop, theirs, *found = (at.get((*place, call, s)) for s in (*OTHERS, *ours))
        if ours and not none and not any(found):
            # A copy, which other rows are relative to.
            continue
        for row in [row for row in found if row] or [None]:
            if row and row.replaces:
                none, theirs = (at.get((*place, row.replaces, s)) for s in (NO_SCALER, "torch"))
            lines.append((row or theirs or none, none, loop, theirs, row))
    title, how = SUBJECTS[subject]
    several_dtypes, several_sides = len({row.dtype for row in rows}) > 1, len(ours) > 1
    # Unit, head and cells.
    columns: list[tuple[str, ...]]
    if most is None:
        names = ("case", "dtype", "call", "side")[: 3 + several_sides]
        columns = [("", head, *(getattr(line[0], head) for line in lines)) for head in names]
    else:
        columns = [
            ("", "case", *(_case(line[0], several_dtypes) for line in lines)),
            ("", "call", *(_call(line[0], several_sides) for line in lines)),
        ]
        if not several_dtypes:
            how = f"{how} All rows are of {rows[0].dtype}."
    count = len(columns)

    def column(unit: str, head: str, side: int, read: Cell) -> None:
        cells = [read(row) if (row := line[side]) else "-" for line in lines]
        if set(cells) != {"-"}:
            columns.append((unit, head, *cells))

    for unit, read, read_ratio in PAIRS:
        for index, side in enumerate((*OTHERS, "ampfast"), 1):
            column(unit, f"{side}, {unit}", index, read)
        if read_ratio is not None:
            column(unit, "faster", -1, read_ratio)
    for head, read in SINGLES:
        column(head, head, 0, read)
    if most is not None:
        columns = _narrowed(columns, most)
    header, *body = zip(*(column[1:] for column in columns), strict=True)
    return Table(subject, title, how, header, body, count)


def _case(row: Row, with_dtype: bool) -> str:
    """Case of a row, with the parameters of a net; a list's name has its number of tensors."""
    parts = [row.case]
    if row.tensors is not None and not row.case[0].isdigit():
        parts.append(f"{row.tensors:,} parameters")
    return ", ".join([*parts, row.dtype] if with_dtype else parts)


def _call(row: Row, with_side: bool) -> str:
    return f"{row.call}, {row.side.removeprefix('ampfast, ')}" if with_side else row.call


def _narrowed(columns: list[tuple[str, ...]], most: int) -> list[tuple[str, ...]]:
    """Leaves units out until so many columns are left; parameters are part of the case."""
    columns = [column for column in columns if column[0] != "parameters"]
    for unit in GIVES_WAY:
        is_only_time = unit == "us" and not any(column[0] == "ms" for column in columns)
        if len(columns) > most and not is_only_time:
            columns = [column for column in columns if column[0] != unit]
    return columns


def score(results: Results) -> str:
    """Sentence on how many measurements are won, tied and lost against torch."""
    ratios = [r.vs_torch for r in results.rows if r.vs_torch and r.side not in OTHERS]
    if not ratios:
        return f"Against torch: {NOT_MEASURED}."
    won, lost = sum(ratio > 1 + TIE for ratio in ratios), sum(ratio < 1 - TIE for ratio in ratios)
    return (
        f"Against torch, of {len(ratios)} measurements: {won} faster, "
        f"{len(ratios) - won - lost} as fast within {TIE:.0%}, {lost} slower."
    )


def usual_loops(rows: Iterable[Row]) -> list[Row]:
    """Rows of real loops with a schedule, of an earlier file those without."""
    loops = [row for row in rows if row.subject == "loops"]
    scheduled = [row for row in loops if row.call.endswith(", schedule")]
    return scheduled or [row for row in loops if "," not in row.call]


def pairs(rows: Iterable[Row], subject: str) -> list[tuple[Row, Row]]:
    """torch's row and ampfast's, where a subject has both for the same call."""
    rows = [row for row in rows if row.subject == subject]
    theirs = {row.name[:4]: row for row in rows if row.side == "torch"}
    return [
        (theirs[row.name[:4]], row)
        for row in rows
        if row.side not in OTHERS and row.name[:4] in theirs
    ]


def gain_of_the_import(results: Results) -> str:
    """Sentence on what whole steps gain where only the scaler's class changes."""
    both = pairs(results.rows, "training")
    gains = sorted(1 - 1 / row.vs_torch for _, row in both if row.vs_torch)
    if not gains:
        return f"What the import alone gains in a whole training step: {NOT_MEASURED}."
    nets = "; ".join(dict.fromkeys(row.case for _, row in both))
    return (
        f"On the nets measured ({nets}), the import alone makes a whole training step "
        f"{_shorter(median(gains))} than with torch's scaler: the median of {len(gains)} kinds of "
        f"step, between {_shorter(gains[0])} and {_shorter(gains[-1])}."
    )


def gain_of_clipping(results: Results) -> str:
    """Sentence on a whole step that ampfast clips, beside torch's clipping without a scaler."""
    rows = [row for row in results.rows if row.subject == "training" and row.replaces]
    over = [row.over_none for row in rows if row.over_none]
    if not over:
        return f"What clipping by the scaler gains in a whole training step: {NOT_MEASURED}."
    return (
        "With ampfast's scaler and its clipping, a whole training step is "
        f"{_shorter(1 - median(over))} (median) than with torch's clipping and no scaler."
    )


def _shorter(gain: float) -> str:
    return f"{abs(gain):.1%} {'longer' if gain < 0 else 'shorter'}"
