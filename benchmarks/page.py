"""Self-contained page of results: verdicts, pictures, tables, method."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path

from . import plot, report, svg, whole_files
from .goals import WITHOUT
from .report import Table
from .results import CLOSE, Goal, Results, Row

ENDINGS = (".html", ".htm")
SYMBOLS = {"met": "✓", "met within spread": "≈", "not met": "✗"}
CLASSES = {"met": "met", "met within spread": "near", "not met": "missed"}
FACTS = {
    "gpu": "GPU",
    "gpu_memory_bytes": "GPU memory, bytes",
    "gpu_cache_bytes": "GPU cache, bytes",
    "gpu_processors": "GPU processors",
    "gpu_capability": "GPU capability",
    "driver": "driver",
    "cuda": "CUDA",
    "hip": "HIP",
    "tensors_per_launch": "tensors in a launch of torch",
    "cpu": "CPU",
    "arch": "architecture",
    "os": "system",
    "cores": "cores",
    "threads": "threads",
    "memory_bytes": "memory, bytes",
    "cache_bytes": "cache, bytes",
    "cpu_capability": "instructions that torch uses",
    "python": "Python",
    "load": "load of the minute before",
}
METHOD_TITLE = "How each figure was taken"
METHOD = (
    "Before timing, results are compared with torch's, bit for bit but for norms. On a "
    "difference nothing is timed and the run fails.",
    "Both sides are measured in one run. They take turns in rounds, every other round backwards; "
    "a ratio is taken within each round, and its median over the rounds is shown.",
    "p20, p50 and p80 are quantiles over the rounds. x torch is torch's time over this one's, so "
    "more is better. A dash means not measured; nothing is estimated.",
    "On a CPU, ms is the wall time of the call. On a GPU it is the device's own clock: graph means "
    "replayed from a CUDA graph, events queued behind one another, waits that the call itself "
    "waits for the device, loop one after another as in training, where the slower of host and "
    "device counts; wall is the time of whole epochs until the device is done. Host us is the time "
    "until the call returns, from an empty queue.",
    "A goal of the form “not slower” is also met within spread: its median is within "
    f"{CLOSE:.0%} of the limit, and the better fifth of the rounds reaches it.",
)


def write(all_results: Sequence[Results], path: Path) -> None:
    """Writes the page.

    Raises:
        OSError: If it cannot be written.
    """
    whole_files.write(path, html(all_results))


def html(all_results: Sequence[Results]) -> str:
    """Page of one or more results, in order."""
    parts = [_run(results, f"run{number}") for number, results in enumerate(all_results, 1)]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(_title(all_results))}</title>\n<style>\n{_style()}</style>\n"
        f"</head>\n<body>\n<main>\n{''.join(parts)}{_method()}</main>\n</body>\n</html>\n"
    )


def _title(all_results: Sequence[Results]) -> str:
    places = (results.machine.get("gpu") or results.machine.get("cpu") for results in all_results)
    return f"ampfast, measured on {' and '.join(dict.fromkeys(map(str, places)))}"


def _run(results: Results, name: str) -> str:
    """A result; ids begin with `name`."""
    parts = report.parts_of(results)
    pictures = plot.pictures(results)
    contents = [("goals", "Goals")] if results.goals else []
    contents += [(part.subject, part.title) for part in parts]
    contents += [("environment", "Environment"), ("notes", "Notes")]
    links = "".join(
        f'<li><a href="#{name}-{escape(target)}">{escape(title)}</a></li>\n'
        for target, title in contents
    )
    links += f'<li><a href="#method">{METHOD_TITLE}</a></li>\n'
    sections = [
        f"<header>\n<h1>{escape(_title([results]))}</h1>\n"
        f"<p>{escape(results.place)}<br>{escape(results.versions)}, "
        f"ampfast {escape(results.ampfast)}, {escape(results.date.replace('T', ' '))}</p>\n"
        f"{_state(results)}{_tiles(results.goals)}</header>\n"
        f'<nav aria-label="Contents"><ul>\n{links}</ul></nav>\n',
        _brief(results.rows),
    ]
    if results.goals:
        sections.append(_section(f"{name}-goals", "Goals", _goals(results.goals)))
    for part in parts:
        how = f"<p>{escape(part.how)}</p>\n" if part.how else ""
        drawn = "".join(map(_figure, pictures.get(part.subject, ())))
        table = _table(part.make(f"{part.title}: every row", part.rows))
        inside = f"{how}{_figures(drawn)}{table}"
        sections.append(_section(f"{name}-{part.subject}", part.title, inside))
    sections.append(_section(f"{name}-environment", "Environment", _environment(results)))
    notes = "".join(f"<li>{escape(note)}</li>\n" for note in results.notes)
    inside = f"<ul class=notes>\n{notes}</ul>\n" if notes else "<p>Nothing was left out.</p>\n"
    sections.append(_section(f"{name}-notes", "Notes", inside))
    return "".join(sections)


def _state(results: Results) -> str:
    """Conditions of the run, shown before any figure."""
    unfinished = "Parts of this run were cut off, failed or did not fit; the notes say which."
    told = [] if results.complete else [f"<strong>Not complete.</strong> {unfinished}"]
    told += [results.disturbance] if results.disturbance else []
    return "".join(f'<p class="banner" role="note">{text}</p>\n' for text in told)


def _tiles(goals: Sequence[Goal]) -> str:
    """Number of goals by verdict."""
    counts = dict.fromkeys(SYMBOLS, 0)
    for goal in goals:
        counts[goal.verdict] += 1
    tiles = "".join(
        f'<li class="{CLASSES[verdict]}"><b>{count}</b> {SYMBOLS[verdict]} {verdict}</li>\n'
        for verdict, count in counts.items()
    )
    return f'<ul class="tiles" aria-label="Goals by verdict">\n{tiles}</ul>\n' if goals else ""


def _brief(rows: Sequence[Row]) -> str:
    """Ranges of the two ratios that matter, for each path."""
    tables = [
        _ranges(
            "Time over that of the same without a scaler (less is better)",
            rows,
            lambda row: row.over_none,
            3,
        ),
        _ranges(
            "Times as fast as torch, over all lists and dtypes (more is better)",
            rows,
            lambda row: None if row.provider == WITHOUT else row.vs_torch,
            2,
            "x",
        ),
    ]
    shown = "".join(_table(table) for table in tables if table.lines)
    return _section("", "In short", shown) if shown else ""


def _ranges(
    title: str,
    rows: Sequence[Row],
    read: Callable[[Row], float | None],
    digits: int,
    unit: str = "",
) -> Table:
    """Minimum, median and maximum of what `read` returns, by subject, path and provider."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        ratio = read(row)
        if ratio is not None:
            found.setdefault((row.subject, row.path, row.provider), []).append(ratio)
    table = Table(title, ("subject", "path", "provider"), ("cases", "lowest", "median", "highest"))
    for names, ratios in found.items():
        shown = (min(ratios), statistics.median(ratios), max(ratios))
        table.add(*names, str(len(ratios)), *(f"{ratio:.{digits}f}{unit}" for ratio in shown))
    return table


def _goals(goals: Sequence[Goal]) -> str:
    """Table of goals, unmet ones first; the verdict stands beside the goal."""
    worst_first = sorted(goals, key=lambda goal: list(SYMBOLS)[::-1].index(goal.verdict))
    usual = report.goal_table(worst_first)
    table = Table(
        "Goals and measurements, unmet goals first",
        (usual.names[0], usual.numbers[-1], *usual.names[1:]),
        usual.numbers[:-1],
    )
    for goal, *cells, verdict in usual.lines:
        table.add(goal, verdict, *cells)
    return _table(table)


def _environment(results: Results) -> str:
    facts = [(told, results.machine[key]) for key, told in FACTS.items() if key in results.machine]
    facts += [(key, value) for key, value in results.machine.items() if key not in FACTS]
    facts += [("torch", results.torch), ("Triton", results.triton), ("ampfast", results.ampfast)]
    facts += [("commit", results.commit), ("begun", results.date)]
    if results.seconds is not None:
        facts.append(("seconds it took", round(results.seconds)))
    facts += [(f"asked for: {key}", value) for key, value in results.asked.items()]
    lines = "".join(
        f'<tr><th scope="row">{escape(told)}</th><td>{escape(_fact(value))}</td></tr>\n'
        for told, value in facts
    )
    caption = "<caption>The machine and the versions, when the run began</caption>"
    return (
        f'<div class="wide" tabindex="0"><table class="facts">\n{caption}\n{lines}</table></div>\n'
    )


def _fact(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.2f}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return "-" if value is None else str(value)


def _method() -> str:
    lines = "".join(f"<li>{escape(line)}</li>\n" for line in METHOD)
    return _section("method", METHOD_TITLE, f"<ul>\n{lines}</ul>\n")


def _section(name: str, title: str, inside: str) -> str:
    target = f' id="{escape(name)}"' if name else ""
    return f"<section{target}>\n<h2>{escape(title)}</h2>\n{inside}</section>\n"


def _figures(drawn: str) -> str:
    return f'<div class="figures">\n{drawn}</div>\n' if drawn else ""


def _figure(picture: svg.Picture) -> str:
    return f'<figure tabindex="0">{picture.inline()}</figure>\n'


def _table(table: Table) -> str:
    """Table with a header column; scrolls where the page is too narrow."""
    names = len(table.names)
    head = "".join(
        f'<th scope="col"{_number(index >= names)}>{escape(cell)}</th>'
        for index, cell in enumerate(table.names + table.numbers)
    )
    body = "".join(_lines(table))
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(table.title)}">'
        f"<table>\n<caption><span>{escape(table.title)}</span></caption>\n"
        f"<thead><tr>{head}</tr></thead>\n"
        f"<tbody>\n{body}</tbody></table></div>\n"
    )


def _lines(table: Table) -> Iterator[str]:
    names = len(table.names)
    for number, cells in enumerate(table.lines, 1):
        kind = ' class="last"' if number in table.sections else ""
        rest = "".join(
            f"<td{_number(index >= names)}>{_cell(cell)}</td>"
            for index, cell in enumerate(cells[1:], 1)
        )
        yield f'<tr{kind}><th scope="row">{escape(cells[0])}</th>{rest}</tr>\n'


def _number(is_number: bool) -> str:
    return ' class="n"' if is_number else ""


def _cell(text: str) -> str:
    if text in SYMBOLS:
        return f'<span class="{CLASSES[text]}">{SYMBOLS[text]} {text}</span>'
    return escape(text)


def _style() -> str:
    more_light = "--met:#176f37;--near:#7d5700;--missed:#b3261e;--raised:#f6f8fa"
    more_dark = "--met:#5fd08a;--near:#e3b341;--missed:#ff8a80;--raised:#1b212a"
    return f"""\
:root{{color-scheme:light dark;{svg.LIGHT};{more_light}}}
@media (prefers-color-scheme:dark){{:root{{{svg.DARK};{more_dark}}}}}
{svg.STYLE}
*{{box-sizing:border-box}}
body{{margin:0;background:var(--paper);color:var(--ink);
 font:16px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}}
main{{max-width:75rem;margin:0 auto;padding:1rem clamp(.75rem,3vw,2rem) 4rem}}
h1{{font-size:clamp(1.35rem,4vw,2rem);line-height:1.2;margin:1.5rem 0 .5rem;overflow-wrap:anywhere}}
h2{{font-size:1.3rem;margin:2.5rem 0 .5rem;padding-bottom:.25rem;
 border-bottom:1px solid var(--grid)}}
p,nav li{{max-width:50rem}}
header p{{color:var(--soft);margin:.25rem 0}}
a{{color:var(--tone1)}}
a:focus-visible,[tabindex]:focus-visible{{outline:2px solid var(--tone1);outline-offset:2px}}
nav ul{{columns:18rem;padding-left:1.2rem}}
.banner{{color:var(--ink);border-left:4px solid var(--missed);background:var(--raised);
 padding:.6rem .9rem;margin:1rem 0}}
.tiles{{display:flex;flex-wrap:wrap;gap:.75rem;list-style:none;padding:0;margin:1rem 0}}
.tiles li{{background:var(--raised);border:1px solid var(--grid);border-radius:.5rem;
 padding:.5rem 1rem;min-width:9rem}}
.tiles b{{display:block;font-size:1.7rem;line-height:1.2}}
.met{{color:var(--met)}}.near{{color:var(--near)}}.missed{{color:var(--missed);font-weight:600}}
.figures{{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,34rem),1fr));gap:1rem;
 align-items:start;margin:1rem 0}}
figure{{margin:0;max-width:46rem;overflow-x:auto;border:1px solid var(--grid);border-radius:.5rem}}
.chart{{display:block;width:100%;min-width:32rem;height:auto}}
.wide{{overflow-x:auto;margin:1rem 0}}
table{{border-collapse:collapse;font-size:.875rem;font-variant-numeric:tabular-nums}}
caption{{text-align:left;color:var(--soft);padding-bottom:.4rem}}
caption span{{display:block;max-width:calc(100vw - 2rem)}}
th,td{{padding:.25rem .7rem .25rem 0;text-align:left;vertical-align:top}}
thead th{{border-bottom:2px solid var(--grid);vertical-align:bottom}}
tbody th{{font-weight:500;min-width:6.5rem;max-width:26rem}}
td{{white-space:nowrap}}
tbody tr{{border-bottom:1px solid var(--grid)}}
tbody tr.last{{border-bottom:2px solid var(--soft)}}
.n{{text-align:right;white-space:nowrap;padding-left:.5rem}}
.facts th{{color:var(--soft)}}.facts td{{white-space:normal}}
.notes li{{white-space:pre-wrap;overflow-wrap:anywhere}}
@media print{{
 :root{{{svg.LIGHT};{more_light}}}
 body{{font-size:10pt}}main{{max-width:none;padding:0}}nav{{display:none}}
 table{{font-size:7.5pt}}th,td{{padding:.1rem .35rem .1rem 0}}
 thead{{display:table-header-group;break-after:avoid}}caption{{break-after:avoid}}
 tr,figure,.tiles li{{break-inside:avoid}}h2{{break-after:avoid}}
 .wide,figure{{overflow:visible}}.chart{{min-width:0}}caption span{{max-width:none}}
 .figures{{grid-template-columns:repeat(auto-fit,minmax(17rem,1fr))}}
}}
"""
