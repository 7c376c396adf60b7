"""Tables and sentences of results, the same in the terminal, the report and the documentation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .real_loops import ADAMW
from .results import MISSED, NEAR, Goal, Results, Row, Spread
from .steps import UNSCALE

NOT_MEASURED = "not measured"
# Number of leading columns that are names.
NAMES = 3
NO_SCALER = "no scaler"
BOTH_SIDES = ("torch", NO_SCALER)

# Title and method of each subject, in the order of a run.
SUBJECTS = {
    "loops": (
        "Scaler's own time in training loops",
        "scale, step less the optimizer's own time, and update, in microseconds an iteration under "
        "autocast to bfloat16; forward and backward cool the caches before each.",
    ),
    "host": (
        "Host time of the scaler, warm calls",
        "Parameters of four elements, so that only overhead remains: time until the call returns.",
    ),
    "mlp": (
        "A perceptron in mixed precision",
        "Whole training steps, also in float32 without autocast.",
    ),
    "training": (
        "Training steps of whole nets",
        "Forward, backward, clipping where named, and the optimizer's step. Over none is relative "
        "to the same step without a scaler, round by round.",
    ),
    "growth": (
        "Growth of unscale_ and update",
        "Lists of ever more tensors of one size, and one tensor of ever more elements. A slope is "
        "that of the line through the larger points, per tensor or element.",
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
    "clip": (
        "Unscaling and clipping by the norm",
        "torch's unscale_ and clip_grad_norm_ against one call; in_place=False leaves the "
        "gradients to the optimizer.",
    ),
    "tracking": (
        "Cost of tracking each parameter",
        "Over none is relative to the same pass without tracking.",
    ),
}


@dataclass(frozen=True)
class Table:
    """Names to the left, numbers to the right."""

    subject: str
    title: str
    how: str
    header: tuple[str, ...]
    lines: list[tuple[str, ...]]
    names: int = NAMES

    def markdown(self) -> str:
        rule = ["---"] * self.names + ["--:"] * (len(self.header) - self.names)
        return "\n".join(f"| {' | '.join(line)} |" for line in (self.header, rule, *self.lines))


def number(value: float | None) -> str:
    """Three significant digits without an exponent, or a dash for a missing value."""
    if value is None:
        return "-"
    if 0 < abs(value) < 0.1:
        return f"{value:.4f}"
    digits = 0 if abs(value) >= 100 or value == int(value) else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"


def times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}%" if value < 10 else f"{value:.0f}%"


def _median(spread: Spread | None) -> str:
    return number(spread and spread.p50)


Cell = Callable[[Row], str]
# Columns of each side that has them, each followed by the ratio of both if there is one.
PAIRS: tuple[tuple[str, Cell, str, Cell | None], ...] = (
    ("us", lambda row: _median(row.host_us), "faster", lambda row: _of_host(row)),
    ("ms", lambda row: _median(row.ms), "faster", lambda row: times(row.ms and row.vs_torch)),
    ("ns each", lambda r: number(r.ns_each), "faster", lambda r: times(r.ns_each and r.vs_torch)),
    ("over none", lambda row: "-" if row.over_none is None else f"{row.over_none:.3f}", "", None),
    ("% of a step", lambda row: percent(row.share and 100 * row.share), "", None),
    ("kernels", lambda row: number(row.launches), "", None),
    ("syncs", lambda row: number(row.syncs), "", None),
    (
        "scale + step + update",
        lambda row: " + ".join(map(number, row.parts_us)) if row.parts_us else "-",
        *("", None),
    ),
)
# Columns of the line.
SINGLES: tuple[tuple[str, Cell], ...] = (
    ("of a copy", lambda row: percent(row.percent_of_copy)),
    ("spread", lambda row: _relative(row.ms or row.host_us)),
    ("parameters", lambda row: "-" if row.tensors is None else f"{row.tensors:,}"),
)


def _of_host(row: Row) -> str:
    return times(row.host_us and (row.host_vs_torch if row.ms else row.vs_torch))


def _relative(spread: Spread | None) -> str:
    """Half of the distance of the quantiles."""
    return f"±{50 * (spread.p80 - spread.p20) / spread.p50:.0f}%" if spread else "-"


def of(results: Results) -> list[Table]:
    """One table for each subject that has rows."""
    order = dict.fromkeys((*SUBJECTS, *(row.subject for row in results.rows)))
    rows = {subject: [r for r in results.rows if r.subject == subject] for subject in order}
    return [of_subject(subject, found) for subject, found in rows.items() if found]


def of_subject(subject: str, rows: Sequence[Row]) -> Table:
    """Both sides of each call on one line."""
    at = {row.name: row for row in rows}
    ours = list(dict.fromkeys(row.side for row in rows if row.side not in BOTH_SIDES))
    lines: list[list[Row | None]] = []
    taken: set[tuple[str, ...]] = set()
    for row in rows:
        place = (row.subject, row.case, row.dtype)
        if row.name in taken:
            continue
        found_here = [at.get((*place, row.call, side)) for side in ours]
        if ours and row.side == "torch" and not any(found_here):
            # A copy, which other rows are relative to.
            continue
        for found in [each for each in found_here if each] or [None]:
            first = found or row
            theirs = at.get((*place, first.replaces or first.call, "torch"))
            none = at.get((*place, row.call, NO_SCALER))
            lines.append([first, none, theirs, found])
        taken |= {(*place, row.call, side) for side in (*BOTH_SIDES, *ours)}
    columns: list[tuple[str, list[str]]] = [
        ("case", [line[0].case for line in lines if line[0]]),
        ("dtype", [line[0].dtype for line in lines if line[0]]),
        ("call", [line[0].call for line in lines if line[0]]),
    ]
    if len(ours) > 1:
        columns.append(("side", [line[0].side for line in lines if line[0]]))
    names = len(columns)
    for unit, read, ratio, read_ratio in PAIRS:
        for index, side in enumerate((NO_SCALER, "torch", "ampfast"), 1):
            columns.append((f"{side}, {unit}", [_cell(line[index], read) for line in lines]))
        if read_ratio is not None:
            columns.append((ratio, [_cell(line[3], read_ratio) for line in lines]))
    columns += [(head, [_cell(line[0], read) for line in lines]) for head, read in SINGLES]
    kept = [
        (head, cells)
        for index, (head, cells) in enumerate(columns)
        if index < names or any(cell != "-" for cell in cells)
    ]
    title, how = SUBJECTS.get(subject, (subject, ""))
    header = tuple(head for head, _ in kept)
    body = list(zip(*(cells for _, cells in kept), strict=True))
    return Table(subject, title, how, header, body, names)


def _cell(row: Row | None, read: Cell) -> str:
    return "-" if row is None else read(row)


def of_goals(goals: Sequence[Goal]) -> Table:
    """Goals and measurements, those that were not met first."""
    order = [MISSED, NEAR]
    lines = [
        (
            *(goal.verdict, *goal.name, goal.over, f"{goal.limit:.3g}"),
            *(f"{goal.ratio.p50:.3g}", f"{goal.ratio.p20:.3g} to {goal.ratio.p80:.3g}"),
        )
        for goal in sorted(
            goals, key=lambda g: order.index(g.verdict) if g.verdict in order else len(order)
        )
    ]
    names = ("verdict", "subject", "case", "dtype", "call", "side", "over")
    how = "Time of the row over that of another call, round by round, and its limit."
    return Table("goals", "Goals", how, (*names, "at most", "measured", "p20 to p80"), lines, 7)


def sentences(results: Results) -> list[str]:
    """Real loops, host time and throughput: both sides and their ratio."""
    told = (
        ("loops", ADAMW, "Scaler's own time in a real training loop", "us", _host_us),
        ("host", UNSCALE, "Host time of warm calls", "us", _host_us),
        ("kernels", "unscale", "Throughput", "GB/s", lambda row: row.gb_s),
    )
    return [
        f"{what}: {_compared(results.rows, subject, call, unit, read)}."
        for subject, call, what, unit, read in told
    ]


def _host_us(row: Row) -> float | None:
    return row.host_us and row.host_us.p50


def _compared(
    rows: Iterable[Row],
    subject: str,
    call: str,
    unit: str,
    read: Callable[[Row], float | None],
) -> str:
    rows = [row for row in rows if row.subject == subject]
    both = [pair for pair in pairs(rows, subject) if pair[1].call == call]
    # The largest real model among lists, which has the least to gain; else the first.
    both.sort(key=lambda pair: pair[1].case.startswith("bert") and pair[1].dtype == "float32")
    if not both:
        return NOT_MEASURED
    theirs, ours = both[-1] if subject == "kernels" else both[0]
    ratios = [row.vs_torch for row in rows if row.vs_torch and row.side not in BOTH_SIDES]
    return (
        f"{number(read(theirs))} {unit} with torch, {number(read(ours))} {unit} with "
        f"{ours.side}, {times(ours.vs_torch)} ({describe(ours)}); over all {len(ratios)} rows "
        f"{times(min(ratios))} to {times(max(ratios))}"
    )


def describe(row: Row) -> str:
    parameters = f", {row.tensors:,} parameters" if row.tensors else ""
    return f"{row.case}{parameters}, {row.dtype}, {row.call}"


def pairs(rows: Iterable[Row], subject: str) -> list[tuple[Row, Row]]:
    """torch's row and ampfast's, where a subject has both for the same call."""
    rows = [row for row in rows if row.subject == subject]
    theirs = {row.name[:4]: row for row in rows if row.side == "torch"}
    return [
        (theirs[row.name[:4]], row)
        for row in rows
        if row.side not in BOTH_SIDES and row.name[:4] in theirs
    ]


def gain_of_a_step(results: Results) -> str:
    """Sentence on what whole training steps gain, from those without tricks of our own."""
    both = pairs(results.rows, "training")
    gains = sorted(1 - 1 / row.vs_torch for _, row in both if row.vs_torch)
    if not gains:
        return f"What a whole training step gains: {NOT_MEASURED}."
    nets = "; ".join(dict.fromkeys(row.case for _, row in both))
    return (
        f"On the nets measured ({nets}), a whole training step gains {gains[0]:.1%} to "
        f"{gains[-1]:.1%}."
    )
