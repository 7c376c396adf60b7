"""The README's tables: training loops, then one line for each of the other main figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from . import goals
from .readme_tables import figure, loops, of, table
from .results import Results, Row

# Many small tensors, and real models.
FEW_LISTS = ("1000x1k", "bert_base", "gpt2_xl")


@dataclass(frozen=True)
class Told:
    """Call to show, for all of its lists or for `FEW_LISTS` in float32."""

    subject: str
    path: str
    what: str
    read: Callable[[Row], float | None]
    format_spec: str
    few: bool = False


TOLD = (
    Told(
        *("host", "unscale_ + update", "`unscale_` and `update`, {} elements, warm; us"),
        *(lambda row: row.host_us_p50, ".1f"),
    ),
    Told(
        *("growth", "by tensors, slope", "`unscale_` and `update`, slope over {1}; ns each"),
        *(lambda row: row.ns_each, ".0f"),
    ),
    Told("kernels", "unscale", "`unscale_`, {1}; ms", lambda row: row.ms_p50, ".2f", few=True),
    Told(
        *("clip", goals.CLIP, "`unscale_` and clipping, {1}; ms"),
        *(lambda row: row.ms_p50, ".2f", True),
    ),
    Told(
        *("clip", goals.DEFERRED_CLIP, "`unscale_` and clipping, `in_place=False`, {1}; ms"),
        *(lambda row: row.ms_p50, ".2f", True),
    ),
)


def short(results: Results) -> dict[str, str]:
    """Tables by subject, with a line for each measured call."""
    lines = [
        (
            told.what.format(row.case.replace("x", " parameters of ", 1), row.list_name)
            + ("" if row.provider == "cpu" else f" ({row.provider})"),
            *(figure(each, told.read, told.format_spec) for each in (_torchs(row, results), row)),
            figure(row, lambda row: row.vs_torch, ".2f", "x"),
        )
        for told in TOLD
        for row in of(told.subject, results.rows)
        if row.path == told.path and row.provider not in ("torch", goals.WITHOUT)
        if not told.few or (row.case in FEW_LISTS and row.dtype == "float32")
    ]
    for subject, what in (
        ("training", "{} kinds of training step, over the same without a scaler"),
        ("mlp", "a perceptron's epochs, over the same without a scaler"),
    ):
        rows = [row for row in of(subject, results.rows) if row.provider != goals.WITHOUT]
        torchs = {(row.case, row.dtype, row.path): row for row in rows if row.provider == "torch"}
        for provider in dict.fromkeys(row.provider for row in rows if row.provider != "torch"):
            ours = {(r.case, r.dtype, r.path): r for r in rows if r.provider == provider}
            both = ours.keys() & torchs.keys()
            backend = "" if provider == "cpu" else f" ({provider})"
            cells = (_range(each[place] for place in both) for each in (torchs, ours))
            lines.append((what.format(len(both)) + backend, *cells, "-"))
            if alone := [ours[place] for place in ours.keys() - both]:
                more = f"{len(alone)} more that clip by the scaler{backend}"
                lines.append((more, "-", _range(alone), "-"))
    return {
        "loops": "\n\n".join(filter(None, (loops(results, by_part=False), _of_a_step(results)))),
        "": table(("time of", "torch", "ampfast", "faster"), lines),
    }


def _of_a_step(results: Results) -> str:
    """Cases in which the scaler does not matter, by its smallest and largest share of a step."""
    rows = [row for row in of("loops", results.rows) if row.provider == "torch" and row.share]
    if not rows:
        return ""
    most, least = (choose(rows, key=lambda row: row.share or 0) for choose in (max, min))
    return (
        "Where steps are long, as with few large tensors, the scaler does not matter: torch's "
        f"takes {most.share:.1%} of a step of {most.case} with {most.tensors} parameters, but "
        f"{least.share:.2%} of one of {least.case}."
    )


def _range(rows: Iterable[Row]) -> str:
    """Range of times relative to those without a scaler."""
    over = [row.over_none for row in rows if row.over_none is not None]
    return f"{min(over):.2f} to {max(over):.2f}" if over else "-"


def _torchs(row: Row, results: Results) -> Row | None:
    """torch's row that this one replaces."""
    path = goals.CLIP if row.path == goals.DEFERRED_CLIP else row.path
    place = (row.subject, row.case, row.dtype, path, row.lists)
    for other in results.rows:
        theirs = (other.subject, other.case, other.dtype, other.path, other.lists)
        if other.provider == "torch" and theirs == place:
            return other
    return None
