"""Report of results: a self-contained page with pictures first, and picture files."""

from __future__ import annotations

import base64
from collections import Counter, defaultdict
from pathlib import Path

from jinja2 import Environment, FileSystemLoader

from . import goals, pictures, tables
from .results import VERDICTS, Results, write_whole

PAGE = "report.html"
PLOTS = "plots"
METHOD = (
    "Before timing, results are compared with torch's, bit for bit but for norms; on a difference "
    "nothing is timed and the run fails.",
    "Both sides are measured in one run and take turns in rounds, every other round backwards; a "
    "ratio is taken within each round, and its median over the rounds is shown. Times are medians, "
    "the spread half of the distance from the 20th to the 80th percentile. A dash means not "
    "measured; nothing is estimated.",
    "On a CPU, ms is the wall time of the call. On a GPU it is the device's own clock, and us the "
    "time until the call returns.",
    "Goals marked “within spread” are of the form “not slower”: the median is within 5% of the "
    "limit, and the better fifth of the rounds reaches it.",
)


def write(results: Results, folder: Path) -> Path:
    """Writes the page and its pictures, and returns the page's path."""
    figures = pictures.draw(results)
    drawn = [base64.b64encode(pictures.svg(each).encode()).decode() for each in figures.values()]
    kinds: dict[str, Counter[str]] = defaultdict(Counter)
    for goal in results.goals:
        kinds[goal.subject][goal.verdict] += 1
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = environment.get_template("report.html.jinja").render(
        results=results,
        score=tables.score(results),
        sentences=[*tables.sentences(results), tables.gain_of_a_step(results)],
        pictures=list(zip(figures, drawn, strict=True)),
        verdicts=sum(kinds.values(), Counter()),
        kinds=kinds,
        explained=goals.KINDS,
        what_goals_are=goals.WHAT,
        all_verdicts=VERDICTS,
        goals=[tables.of_goals(results.goals)] if results.goals else [],
        tables=tables.of(results),
        method=METHOD,
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / PAGE, text)
    pictures.write(figures, folder / PLOTS)
    return folder / PAGE
