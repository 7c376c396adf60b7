"""Figures of README.md and docs/benchmarks.md, generated from a result file."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from . import goals, pictures, tables
from .real_loops import ADAMW, SCHEDULED_ADAMW
from .results import MISSED, Results, Row, write_whole

START = "<!-- bench:start -->"
END = "<!-- bench:end -->"
README = "README.md"
DOCS = "docs/benchmarks.md"
# Nothing else is kept there.
PICTURES = "docs/measured"
RESULTS = "benchmarks/results"
# To show in README.md.
LOOPS = ("conv net", "perceptron 31x32, batch 64", "perceptron 3x512, batch 128")


def loops_of(results: Results) -> dict[str, tuple[Row, Row]]:
    """torch's row and ampfast's of each real loop with plain AdamW, by its case."""
    both = tables.pairs(tables.usual_loops(results.rows), "loops")
    plain = (ADAMW, SCHEDULED_ADAMW)
    return {row.case: (theirs, row) for theirs, row in both if row.call in plain}


def readme_block(results: Results) -> str:
    """Real loops, steps that clip, what a whole step gains, and how it was measured."""
    rows = loops_of(results)
    lines = []
    for case in LOOPS:
        theirs, ours = rows.get(case, (None, None))
        told = case
        if ours is not None:
            told += f", {ours.tensors} parameters{ours.call.removeprefix(ADAMW)}"
        times = [
            f"{tables.number(r.host_us.p50)} us" if r and r.host_us else tables.NOT_MEASURED
            for r in (theirs, ours)
        ]
        lines.append((f"scaler alone: {told}", "-", *times, tables.times(ours and ours.vs_torch)))
    clipped = clipped_steps(results)
    first = "time under bfloat16 of"
    header = (first, "no scaler", "torch's scaler", "ampfast", "faster than torch's")
    table = tables.Table("", "", "", header, lines + clipped, 1).markdown()
    told = tables.gain_of_a_step(results)
    if clipped:
        step, *shown, _ = clipped[0]
        told = (
            "For example, a {}: torch clips it in {} without a scaler and in {} with its scaler; "
            "ampfast's scaler, which clips, too, takes {}. ".format(step, *shown)
        ) + told
    return "\n\n".join((told, table, _heading(results, f"{RESULTS}/")))


def clipped_steps(results: Results) -> list[tuple[str, ...]]:
    """Lines of whole steps that torch clips, without a scaler and with its own, or ampfast's."""
    at = {row.name: row for row in results.rows if row.subject == "training" and row.ms}
    lines = []
    for ours in at.values():
        if ours.call == f"{ours.replaces} by the scaler" and "fused" not in ours.call:
            place = ("training", ours.case, ours.dtype, ours.replaces)
            sides = (at.get((*place, tables.NO_SCALER)), at.get((*place, "torch")), ours)
            times = [
                f"{tables.number(r.ms.p50)} ms" if r and r.ms else tables.NOT_MEASURED
                for r in sides
            ]
            told = f"whole step, clipped: {ours.case}, {ours.replaces.removesuffix(', clip')}"
            lines.append((told, *times, tables.times(ours.vs_torch)))
    return lines


def docs_block(results: Results) -> str:
    """Every table, with its picture."""
    names = {"kernels": "throughput"}
    parts = [_heading(results, f"../{RESULTS}/")]
    drawn = pictures.draw(results)
    for table in tables.of(results):
        name = names.get(table.subject, table.subject)
        image = [f"![{table.title}](measured/{name}.svg)"] if name in drawn else []
        told = " ".join(filter(None, (table.how, table.example)))
        parts += [f"### {table.title}", told, *image, table.markdown()]
    missed = [goal for goal in results.goals if goal.verdict == MISSED]
    table = tables.of_goals(missed)
    kinds = dict.fromkeys(goal.subject for goal in results.goals)
    parts += [
        "### Goals of our own",
        f"{goals.WHAT} {len(missed)} of {len(results.goals)} were not met. By part of the run:",
        "\n".join(f"- `{kind}`: {goals.KINDS.get(kind, '')}" for kind in kinds),
        *([f"{table.how} {table.example}", table.markdown()] if missed else []),
    ]
    return "\n\n".join(parts)


def file_name(results: Results) -> str:
    """Name of a committed result file."""
    place = str(results.machine.get("gpu") or "cpu").lower().removeprefix("nvidia")
    short = re.sub(r"[^a-z0-9]+", "-", place).strip("-")
    return f"{short}-torch{results.torch.split('+')[0]}-{results.date[:10]}.json"


PAGES: dict[str, Callable[[Results], str]] = {README: readme_block, DOCS: docs_block}


def write(folder: Path, file: Path) -> None:
    """Writes a result file's figures into both pages, its pictures, and the file itself.

    The result file that README.md named before is removed. Nothing is written if the result lacks a
    loop that README.md shows, a page does not have each marker once, in order, or matplotlib is not
    installed.
    """
    results = Results.read(file)
    if missing := [case for case in LOOPS if case not in loops_of(results)]:
        raise ValueError(f"{file} lacks loops that {README} shows: {'; '.join(missing)}")
    texts, earlier = {}, []
    for page, block in PAGES.items():
        before, old, after = split(folder / page)
        texts[page] = f"{before}{START}\n{block(results)}\n{END}{after}"
        earlier += re.findall(rf"{RESULTS}/([^)\s]+\.json)\)", old)
    figures = pictures.draw(results)
    (folder / RESULTS).mkdir(parents=True, exist_ok=True)
    results.write(folder / RESULTS / file_name(results))
    pictures.write(figures, folder / PICTURES, png=False)
    for page, text in texts.items():
        write_whole(folder / page, text)
    for name in set(earlier) - {file_name(results)}:
        (folder / RESULTS / name).unlink(missing_ok=True)


def split(page: Path) -> tuple[str, str, str]:
    """Text before, between and after the markers of a page; ValueError without them."""
    text = page.read_text(encoding="utf-8")
    before, start, rest = text.partition(START)
    block, end, after = rest.partition(END)
    if not (start and end) or START in rest or END in after:
        raise ValueError(f"{page} must contain {START} and then {END}, each once")
    return before, block, after


def _heading(results: Results, folder: str) -> str:
    name = file_name(results)
    return " ".join(
        (
            f"Measured on {results.place} with {results.versions}, {results.date[:10]}.",
            f"Medians, both sides in one run; all of it: [`{name}`]({folder}{name}).",
            tables.score(results),
            *results.caveats,
        )
    )
