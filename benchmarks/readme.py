"""The README's performance section, made from a result file: no figure is typed by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from .machine import REPOSITORY
from .results import Results, Row

START = "<!-- bench:start -->"
END = "<!-- bench:end -->"
NOT_MEASURED = "not measured"


def markdown(path: Path) -> str:
    """The section for a result file, ending in a newline.

    Raises:
        ValueError: If the file is not a result.
    """
    results = Results.read_json(path)
    parts = [_heading(path, results)]
    for make in (_host, _kernels, _memory):
        parts.append(make(results.rows))
    return "\n\n".join(parts) + "\n"


def write(readme: Path, section: str) -> None:
    """Replaces what stands between the two markers.

    Raises:
        ValueError: If the file does not have each marker once, in order.
    """
    before, _, after = _split(readme)
    readme.write_text(f"{before}{START}\n{section}{END}{after}", encoding="utf-8")


def section_of(readme: Path) -> str:
    """What stands between the two markers."""
    return _split(readme)[1].removeprefix("\n")


def _split(readme: Path) -> tuple[str, str, str]:
    text = readme.read_text(encoding="utf-8")
    before, start, rest = text.partition(START)
    section, end, after = rest.partition(END)
    if not (start and end) or START in rest or END in after:
        raise ValueError(f"{readme} must contain {START} and then {END}, each once")
    return before, section, after


def _heading(path: Path, results: Results) -> str:
    machine = results.machine
    shown = path.resolve()
    if shown.is_relative_to(REPOSITORY):
        shown = shown.relative_to(REPOSITORY)
    return (
        f"Measured on {machine['cpu']} ({machine['cores']} cores, threads: {machine['threads']}) "
        f"with torch {results.torch}, commit {results.commit or 'unknown'}, {results.date[:10]}. "
        f"Medians, both sides in one run; all of it: [`{shown.name}`]({shown.as_posix()}). "
        "A cold list is one of many that take turns, so that none is found in the cache."
        + ("" if machine.get("gpu") else f" On GPUs: {NOT_MEASURED}.")
        + ("" if results.complete else " The run was not complete.")
    )


def _host(rows: Sequence[Row]) -> str:
    """One line for each path of ours, beside the torch calls that it replaces."""
    lines = []
    torch_row = None
    for row in _of("host", rows):
        if row.provider == "torch":
            torch_row = row
            continue
        lines.append(
            (
                row.case.partition("x")[0],
                row.path,
                _value(torch_row, lambda row: row.host_us_p50, ".1f"),
                _value(row, lambda row: row.host_us_p50, ".1f"),
                _value(row, lambda row: row.vs_torch, ".1f", "x"),
            )
        )
    return _table(("parameters", "host time of", "torch, us", "ampfast, us", "faster"), lines)


def _kernels(rows: Sequence[Row]) -> str:
    """One line for each list and dtype."""
    places = dict.fromkeys((row.list_name, row.dtype) for row in _of("kernels", rows))
    lines = []
    for place in places:
        here = [row for row in _of("kernels", rows) if (row.list_name, row.dtype) == place]
        ours = {row.path: row for row in here if row.provider != "torch"}
        theirs = {row.path: row for row in here if row.provider == "torch"}
        lines.append(
            (
                *place,
                _value(theirs.get("unscale"), lambda row: row.ms_p50, ".3f"),
                _value(ours.get("unscale"), lambda row: row.ms_p50, ".3f"),
                _value(ours.get("unscale"), lambda row: row.vs_torch, ".2f", "x"),
                _value(ours.get("unscale"), lambda row: row.percent_of_copy, ".0f", "%"),
                _value(ours.get("check"), lambda row: row.ms_p50, ".3f"),
                _value(ours.get("check"), lambda row: row.vs_torch, ".2f", "x"),
            )
        )
    return _table(
        (
            "gradients",
            "dtype",
            "torch, ms",
            "`unscale_`, ms",
            "faster",
            "of a copy",
            "`check_`, ms",
            "faster",
        ),
        lines,
    )


def _memory(rows: Sequence[Row]) -> str:
    lines = [
        (
            row.case,
            f"`{row.path}_`, {'torch' if row.provider == 'torch' else 'ampfast'}",
            f"{(row.list_bytes or 0) / (1 << 20):.0f}",
            _value(row, lambda row: row.extra_bytes, ",.0f"),
            _value(row, lambda row: row.allocated_bytes, ",.0f"),
        )
        for row in _of("memory", rows)
        if row.path != "table"
    ]
    header = (
        "gradients",
        "call",
        "MiB",
        "more memory, bytes",
        "from torch's allocator, bytes",
    )
    return _table(header, lines)


def _of(subject: str, rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.subject == subject]


def _value(
    row: Row | None,
    read: Callable[[Row], float | None],
    format_spec: str,
    unit: str = "",
) -> str:
    value = None if row is None else read(row)
    return NOT_MEASURED if value is None else f"{value:{format_spec}}{unit}"


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    if not lines:
        lines = [[NOT_MEASURED] * len(header)]
    rule = ["---"] * len(header)
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *lines))
