"""What is written of results: the report of a run, and the figures of README.md and docs/."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from pathlib import Path

from jinja2 import Environment, FileSystemLoader

from . import pictures, tables
from .results import NO_SCALER, Results, Row, write_whole

REPORT, PLOTS = "report.html", "plots"
START, END = "<!-- bench:start -->", "<!-- bench:end -->"
README, DOCS, FULL = "README.md", "docs/benchmarks.md", "docs/contributing/benchmarks_full.md"
# Nothing else is kept there.
PICTURES = "docs/measured"
RESULTS = "benchmarks/results"
LOOPS = {"conv net": 10, "perceptron 31x32, batch 64": 62, "perceptron 3x512, batch 128": 6}
NETS = {"gpt2, width 96 of 768": "AdamW", "resnet50, width 16 of 64": "SGD"}
NETS["dlrm, 500 tables"] = "SGD"
# Rows of docs/benchmarks.md by what is told of each.
DOCS_ROWS = {
    f"scaler alone: {case}, {count} parameters, schedule": ("loops", case, "AdamW, schedule")
    for case, count in LOOPS.items()
} | {
    f"whole step, clipped: {net}, {call}": ("training", net, f"{call}, clip by the scaler")
    for net, call in NETS.items()
}
DOCS_ROWS |= {
    "whole step, the import alone: gpt2, width 96 of 768, AdamW": (
        *("training", "gpt2, width 96 of 768", "AdamW"),
    ),
    "unscale and clip: gradients of BERT-base, float32": ("clip", "bert_base", "clip"),
    "check: gradients of BERT-base, float32": ("kernels", "bert_base", "check"),
    "scaler with torch's ops as the backend: 62 parameters": ("aten", "62x4", "full step"),
}
# Of rows that are shown; of gradients it is float32.
DTYPES = {"loops": "bfloat16", "training": "bfloat16"}


def write_report(results: Results, folder: Path) -> Path:
    """Writes a self-contained page with pictures first, and its pictures; returns its path."""
    figures = pictures.draw(results)
    drawn = [base64.b64encode(pictures.svg(each).encode()).decode() for each in figures.values()]
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    text = environment.get_template("report.html.jinja").render(
        results=results,
        sentences=tables.sentences(results),
        pictures=list(zip(figures, drawn, strict=True)),
        tables=tables.of(results),
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / REPORT, text)
    pictures.write(figures, folder / PLOTS)
    return folder / REPORT


def readme_block(results: Results) -> str:
    """What clipping gains, and the file of all results."""
    return f"{tables.gain_of_clipping(results)} [Results]({RESULTS}/{file_name(results)})."


def docs_block(results: Results) -> str:
    """A picture, ten rows, what whole steps gain, and how it was measured."""
    parts = (
        f"![{tables.SUBJECTS['loops'][0]}](measured/loops.svg)",
        _main_table("time of", DOCS_ROWS, results),
        f"{tables.gain_of_the_import(results)} {tables.gain_of_clipping(results)}",
        _heading(results, f"../{RESULTS}/"),
    )
    return "\n\n".join(parts)


def _main_table(of: str, shown: dict[str, tuple[str, str, str]], results: Results) -> str:
    """Times without a scaler, if any, with torch's and with ampfast's, of equal calls."""
    rows = [row for row in results.rows if row.dtype == DTYPES.get(row.subject, "float32")]
    at = {(row.subject, row.case, row.call, row.side): row for row in rows}
    lines = []
    for told, (*place, call) in shown.items():
        ours = at.get((*place, call, "ampfast")) or at.get((*place, call, "ampfast, aten"))
        call = (ours and ours.replaces) or call
        none, theirs = (at.get((*place, call, side)) for side in (NO_SCALER, "torch"))
        cells = (_time(none) if none else "-", _time(theirs), _time(ours))
        lines.append((told, *cells, tables.times(ours and ours.vs_torch)))
    header = (of, "no scaler", "torch's scaler", "ampfast", "faster than torch's")
    return tables.markdown(header, lines, 1)


def _time(row: Row | None) -> str:
    """Median of a row, of the device or, where there is none, of the host."""
    for unit, value in tables.times_of(row).items() if row else ():
        return f"{tables.number(value)} {unit}"
    return tables.NOT_MEASURED


def full_block(results: Results) -> str:
    """Every subject, with its picture; columns that do not fit are in the result file alone."""
    parts = [_heading(results, f"../../{RESULTS}/")]
    drawn = pictures.draw(results)
    for table in tables.of(results):
        picture = f"![{table.title}](../measured/{table.subject}.svg)"
        image = [picture] if table.subject in drawn else []
        parts += [f"### {table.title}", table.how, *image, table.markdown()]
    return "\n\n".join(parts)


PAGES: dict[str, Callable[[Results], str]]
PAGES = {README: readme_block, DOCS: docs_block, FULL: full_block}


def file_name(results: Results) -> str:
    """Name of a committed result file."""
    place = str(results.machine.get("gpu") or "cpu").lower().removeprefix("nvidia")
    short = re.sub(r"[^a-z0-9]+", "-", place).strip("-")
    return f"{short}-torch{results.torch.split('+')[0]}-{results.date[:10]}.json"


def write_pages(folder: Path, file: Path) -> None:
    """Writes a result file's figures into all pages, its pictures, and the file itself."""
    results = Results.read(file)
    if tables.NOT_MEASURED in docs_block(results):
        raise ValueError(f"{file} lacks rows that {DOCS} shows")
    old = [split(folder / page)[1] for page in PAGES]
    earlier = {name for text in old for name in re.findall(rf"{RESULTS}/([^)\s]+\.json)\)", text)}
    figures = pictures.draw(results)
    (folder / RESULTS).mkdir(parents=True, exist_ok=True)
    # As it was measured, with rows that only earlier versions measure.
    write_whole(folder / RESULTS / file_name(results), file.read_text(encoding="utf-8"))
    pictures.write(figures, folder / PICTURES)
    for page, block in PAGES.items():
        write_block(folder / page, block(results))
    for name in earlier - {file_name(results)}:
        (folder / RESULTS / name).unlink(missing_ok=True)


def split(page: Path) -> tuple[str, str, str]:
    """Text before, between and after the markers of a page; ValueError without them."""
    text = page.read_text(encoding="utf-8")
    before, start, rest = text.partition(START)
    block, end, after = rest.partition(END)
    if not (start and end) or START in rest or END in before + after:
        raise ValueError(f"{page} must contain {START} and {END}, once each and in this order")
    return before, block, after


def write_block(page: Path, block: str) -> None:
    """Writes another block between the markers of a page."""
    before, _, after = split(page)
    write_whole(page, f"{before}{START}\n{block}\n{END}{after}")


def _heading(results: Results, folder: str) -> str:
    """Machine, versions, date and file of the measurements, and how many are won."""
    name = file_name(results)
    return " ".join(
        (
            f"Measured on {results.place} with {results.versions}, {results.date[:10]}.",
            f"Medians, both sides in one run; all of it: [`{name}`]({folder}{name}).",
            tables.score(results),
            *results.caveats,
        )
    )
