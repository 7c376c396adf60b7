"""The README's performance section, made from a result file: no figure is typed by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from . import goals, steps
from .machine import REPOSITORY
from .results import Results, Row

START = "<!-- bench:start -->"
END = "<!-- bench:end -->"
NOT_MEASURED = "not measured"


def markdown(*paths: Path) -> str:
    """The section for result files, ending in a newline.

    Raises:
        ValueError: If a file is not a result.
    """
    all_results = [(path, Results.read_json(path)) for path in paths]
    on_gpu = any(results.machine.get("gpu") for _, results in all_results)
    parts = []
    for path, results in all_results:
        parts.append(_heading(path, results, on_gpu))
        makers = (_host, _kernels, _steps, _clipping, _memory, _ranks)
        if {row.subject for row in results.rows} == {"ranks"}:
            makers = (_ranks,)  # measured apart from all else, on purpose
        parts += [table for make in makers if (table := make(results))]
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


def _heading(path: Path, results: Results, on_gpu: bool) -> str:
    """What was measured where; `on_gpu` tells whether any of the files is from a GPU."""
    machine = results.machine
    shown = path.resolve()
    if shown.is_relative_to(REPOSITORY):
        shown = shown.relative_to(REPOSITORY)
    place = f"{machine['cpu']} ({machine['cores']} cores, threads: {machine['threads']})"
    versions = f"torch {results.torch}"
    if machine.get("gpu"):
        place = f"{machine['gpu']} (driver {machine.get('driver') or 'unknown'}), {place}"
        versions += (
            f" ({machine['tensors_per_launch']} tensors a launch), "
            f"triton {results.triton or 'not installed'}"
        )
    return (
        f"Measured on {place} "
        f"with {versions}, commit {results.commit or 'unknown'}, {results.date[:10]}. "
        f"Medians, both sides in one run; all of it: [`{shown.name}`]({shown.as_posix()}). "
        "A cold list is one of many that take turns, so that none is found in the cache."
        + ("" if on_gpu else f" On GPUs: {NOT_MEASURED}.")
        + ("" if results.complete else " The run was not complete.")
    )


def _host(results: Results) -> str:
    """One line for each path of ours, beside the torch calls that it replaces."""
    lines = []
    torch_row = None
    for row in _of("host", results.rows):
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


def _kernels(results: Results) -> str:
    """One line for each list, dtype and, on a GPU, backend."""
    rows = _of("kernels", results.rows)
    places = dict.fromkeys(
        (row.list_name, row.dtype, row.provider) for row in rows if row.provider != "torch"
    )
    on_gpu = bool(results.machine.get("gpu"))
    lines = []
    for name, dtype, backend in places:
        here = [row for row in rows if (row.list_name, row.dtype) == (name, dtype)]
        ours = {row.path: row for row in here if row.provider == backend}
        theirs = {row.path: row for row in here if row.provider == "torch"}
        lines.append(
            (
                *(name, dtype, *((backend,) if on_gpu else ())),
                _value(theirs.get("unscale"), lambda row: row.ms_p50, ".3f"),
                _value(ours.get("unscale"), lambda row: row.ms_p50, ".3f"),
                _value(ours.get("unscale"), lambda row: row.vs_torch, ".2f", "x"),
                _value(ours.get("unscale"), lambda row: row.percent_of_copy, ".0f", "%"),
                _value(ours.get("check"), lambda row: row.ms_p50, ".3f"),
                _value(ours.get("check"), lambda row: row.vs_torch, ".2f", "x"),
                *(
                    (_value(ours.get("check"), lambda row: row.percent_of_copy, ".0f", "%"),)
                    if on_gpu
                    else ()
                ),
            )
        )
    return _table(
        (
            *("gradients", "dtype", *(("backend",) if on_gpu else ())),
            *("torch, ms", "`unscale_`, ms", "faster", "of a copy", "`check_`, ms", "faster"),
            *(("of a copy",) if on_gpu else ()),
        ),
        lines,
    )


def _steps(results: Results) -> str:
    """Whole steps on a GPU; a CPU's are in the first table. Nothing if none were measured."""
    rows = _of("steps", results.rows)
    if not rows or not results.machine.get("gpu"):
        return ""
    lines = []
    for row in rows:
        if row.provider == "torch":
            continue
        replaced = steps.REPLACES.get(row.path, row.path)
        theirs = next(
            (
                other
                for other in rows
                if (other.list_name, other.dtype, other.path, other.provider)
                == (row.list_name, row.dtype, replaced, "torch")
            ),
            None,
        )
        lines.append(
            (
                *(row.list_name, row.dtype, row.provider, row.path),
                *(_value(r, lambda row: row.host_us_p50, ".1f") for r in (theirs, row)),
                _value(row, lambda row: row.host_vs_torch, ".1f", "x"),
                *(_value(r, lambda row: row.ms_p50, ".3f") for r in (theirs, row)),
                *(_value(r, lambda row: row.launches, "d") for r in (theirs, row)),
                *(_value(r, lambda row: row.syncs, "d") for r in (theirs, row)),
            )
        )
    return _table(
        (
            *("gradients", "dtype", "backend", "step"),
            *("torch, host us", "ampfast", "faster"),
            *("torch, ms", "ampfast", "torch, kernels", "ampfast", "torch, syncs", "ampfast"),
        ),
        lines,
    )


def _clipping(results: Results) -> str:
    """One line for each list, dtype and, on a GPU, backend; nothing if none were measured."""
    rows = _of("clip", results.rows)
    if not rows:
        return ""
    on_gpu = bool(results.machine.get("gpu"))
    places = dict.fromkeys(
        (row.list_name, row.dtype, row.provider) for row in rows if row.provider != "torch"
    )
    lines = []
    for name, dtype, backend in places:
        here = {
            (row.path, row.provider): row
            for row in rows
            if (row.list_name, row.dtype) == (name, dtype)
        }
        ours = [here.get((path, backend)) for path in (goals.CLIP, goals.DEFERRED_CLIP)]
        lines.append(
            (
                *(name, dtype, *((backend,) if on_gpu else ())),
                _value(here.get((goals.CLIP, "torch")), lambda row: row.ms_p50, ".3f"),
                *(
                    cell
                    for row in ours
                    for cell in (
                        _value(row, lambda row: row.ms_p50, ".3f"),
                        _value(row, lambda row: row.vs_torch, ".2f", "x"),
                    )
                ),
            )
        )
    return _table(
        (
            *("gradients", "dtype", *(("backend",) if on_gpu else ())),
            *("unscale + clip, torch, ms", "`clip_grad_norm_`, ms", "faster"),
            *("`in_place=False`, ms", "faster"),
        ),
        lines,
    )


def _memory(results: Results) -> str:
    """What calls need besides the gradients; nothing on a GPU, where it is not measured."""
    if results.machine.get("gpu"):
        return ""
    lines = [
        (
            row.case,
            f"`{row.path}_`, {'torch' if row.provider == 'torch' else 'ampfast'}",
            f"{(row.list_bytes or 0) / (1 << 20):.0f}",
            _value(row, lambda row: row.extra_bytes, ",.0f"),
            _value(row, lambda row: row.allocated_bytes, ",.0f"),
        )
        for row in _of("memory", results.rows)
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


def _ranks(results: Results) -> str:
    """Sharded scalers, and how many collectives each takes; nothing if none were measured."""
    rows = _of("ranks", results.rows)
    if not rows:
        return ""
    on_gpu = bool(results.machine.get("gpu"))
    theirs = {(row.case, row.path): row for row in rows if row.provider == "torch"}
    lines = []
    for row in rows:
        if row.provider == "torch":
            continue
        torchs = theirs.get((row.case, row.path))
        path = row.path
        if torchs is not None and torchs.collectives == 0:
            path += " (torch's ranks do not agree)"
        lines.append(
            (
                *(row.case, str(row.ranks), *((row.provider,) if on_gpu else ()), path),
                *(_value(each, lambda row: row.ms_p50, ".3f") for each in (torchs, row)),
                _value(row, lambda row: row.vs_torch, ".2f", "x"),
                *(_value(each, lambda row: row.collectives, "d") for each in (torchs, row)),
            )
        )
    header = (
        *("shared gradients", "ranks", *(("backend",) if on_gpu else ())),
        *("calls of `ShardedGradScaler`", "torch, ms", "ampfast, ms", "faster"),
        *("torch, collectives", "ampfast"),
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
