"""Tables of docs/benchmarks.md, with fewer columns than a run prints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from . import goals, plot, steps
from .results import Results, Row

NOT_MEASURED = "not measured"


def whole(results: Results) -> dict[str, str]:
    """Table of each subject; "" without measurements."""
    subjects = {row.subject for row in results.rows}
    # Subjects run deliberately alone imply nothing about missing ones.
    return {
        subject: make(results) if subject in subjects or subjects & USUAL else ""
        for subject, make in MAKERS.items()
    }


def _against_none(subject: str) -> Callable[[Results], str]:
    """One line for each case and path, relative to the same without a scaler."""

    def make(results: Results) -> str:
        rows = of(subject, results.rows)
        scalers = list(dict.fromkeys(row.provider for row in rows))
        places = dict.fromkeys((row.case, row.dtype, row.path) for row in rows)
        lines = []
        for place in places:
            here = {row.provider: row for row in rows if (row.case, row.dtype, row.path) == place}
            cells = []
            for scaler in scalers:
                row = here.get(scaler)
                cells.append(figure(row, lambda row: row.ms_p50, ".1f", missing="-"))
                if scaler != "none":
                    cells.append(figure(row, lambda row: row.over_none, ".3f", missing="-"))
            lines.append((*place, *cells))
        header = [f"{plot.shown(scaler)}, ms" for scaler in scalers]
        for index in range(len(scalers), 0, -1):
            if scalers[index - 1] != "none":
                header.insert(index, "over none")
        return table(("net", "dtype", "step", *header), lines) if rows else ""

    return make


def _growth(results: Results) -> str:
    """Cost of one more tensor or element; nothing if it was not measured."""
    rows = [row for row in of("growth", results.rows) if row.ns_each is not None]
    theirs = {(row.path, row.case): row for row in rows if row.provider == "torch"}
    lines = [
        (
            *(row.path.partition(",")[0], row.case, plot.shown(row.provider)),
            *(
                figure(each, lambda row: row.ns_each, ".3g")
                for each in (theirs.get((row.path, row.case)), row)
            ),
            figure(row, lambda row: row.vs_torch, ".2f", "x"),
        )
        for row in rows
        if row.provider != "torch"
    ]
    header = ("growth", "over", "scaler", "torch, ns each", "ampfast, ns each", "faster")
    return table(header, lines) if rows else ""


def loops(results: Results, by_part: bool = True) -> str:
    """One line for each net and optimizer; nothing if they were not measured."""
    rows = of("loops", results.rows)
    if not rows:
        return ""
    theirs = {(row.case, row.path): row for row in rows if row.provider == "torch"}
    lines = []
    for row in rows:
        if row.provider == "torch":
            continue
        both = (theirs.get((row.case, row.path)), row)
        lines.append(
            (
                *(row.case, figure(row, lambda row: row.tensors, ",d"), row.path),
                *(figure(each, lambda row: row.host_us_p50, ".0f") for each in both),
                figure(row, lambda row: row.vs_torch, ".2f", "x"),
                *(
                    " + ".join(
                        figure(each, read, ".0f")
                        for read in (
                            lambda row: row.scale_us,
                            lambda row: row.step_us,
                            lambda row: row.update_us,
                        )
                    )
                    for each in both
                    if by_part
                ),
                *(
                    figure(each, lambda row: row.share and 100 * row.share, ".2f", "%")
                    for each in both
                ),
            )
        )
    header = (
        *("training loop", "parameters", "optimizer", "torch's scaler, us", "ampfast's", "faster"),
        *(("torch, scale + step + update", "ampfast") if by_part else ()),
        *("torch, of a step", "ampfast"),
    )
    return table(header, lines)


def _host(results: Results) -> str:
    """One line for each path of ours, beside the torch calls that it replaces."""
    lines = []
    torch_row = None
    for row in of("host", results.rows):
        if row.provider == "torch":
            torch_row = row
            continue
        lines.append(
            (
                row.case.replace("x", " of ", 1),
                row.path,
                figure(torch_row, lambda row: row.host_us_p50, ".1f"),
                figure(row, lambda row: row.host_us_p50, ".1f"),
                figure(row, lambda row: row.vs_torch, ".1f", "x"),
            )
        )
    header = ("parameters of elements", "warm host time of", "torch, us", "ampfast, us", "faster")
    return table(header, lines)


def _kernels(results: Results) -> str:
    """One line for each list, dtype and, on a GPU, backend."""
    rows = of("kernels", results.rows)
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
                figure(theirs.get("unscale"), lambda row: row.ms_p50, ".3f"),
                figure(ours.get("unscale"), lambda row: row.ms_p50, ".3f"),
                figure(ours.get("unscale"), lambda row: row.vs_torch, ".2f", "x"),
                figure(ours.get("unscale"), lambda row: row.percent_of_copy, ".0f", "%"),
                figure(ours.get("check"), lambda row: row.ms_p50, ".3f"),
                figure(ours.get("check"), lambda row: row.vs_torch, ".2f", "x"),
                *(
                    (figure(ours.get("check"), lambda row: row.percent_of_copy, ".0f", "%"),)
                    if on_gpu
                    else ()
                ),
            )
        )
    return table(
        (
            *("gradients", "dtype", *(("backend",) if on_gpu else ())),
            *("torch, ms", "`unscale_`, ms", "faster", "of a copy", "`check_`, ms", "faster"),
            *(("of a copy",) if on_gpu else ()),
        ),
        lines,
    )


def _steps(results: Results) -> str:
    """Whole steps on a GPU; a CPU's are in the first table. Nothing if none were measured."""
    rows = of("steps", results.rows)
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
                *(figure(r, lambda row: row.host_us_p50, ".1f") for r in (theirs, row)),
                figure(row, lambda row: row.host_vs_torch, ".1f", "x"),
                *(figure(r, lambda row: row.ms_p50, ".3f") for r in (theirs, row)),
                *(figure(r, lambda row: row.launches, "d") for r in (theirs, row)),
                *(figure(r, lambda row: row.syncs, "d") for r in (theirs, row)),
            )
        )
    return table(
        (
            *("gradients", "dtype", "backend", "step"),
            *("torch, host us", "ampfast", "faster"),
            *("torch, ms", "ampfast", "torch, kernels", "ampfast", "torch, syncs", "ampfast"),
        ),
        lines,
    )


def _clipping(results: Results) -> str:
    """One line for each list, dtype and, on a GPU, backend; nothing if none were measured."""
    rows = of("clip", results.rows)
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
                figure(here.get((goals.CLIP, "torch")), lambda row: row.ms_p50, ".3f"),
                *(
                    cell
                    for row in ours
                    for cell in (
                        figure(row, lambda row: row.ms_p50, ".3f"),
                        figure(row, lambda row: row.vs_torch, ".2f", "x"),
                    )
                ),
            )
        )
    return table(
        (
            *("gradients", "dtype", *(("backend",) if on_gpu else ())),
            *("unscale + clip, torch, ms", "`clip_grad_norm_`, ms", "faster"),
            *("`in_place=False`, ms", "faster"),
        ),
        lines,
    )


def _tracking(results: Results) -> str:
    """Cost of tracking; nothing if it was not measured."""
    rows = of("tracking", results.rows)
    bare = {}
    lines = []
    for row in rows:
        place = (row.list_name, row.dtype, row.provider)
        path, _, track = row.path.partition(", ")
        if not track:
            bare[(*place, path)] = row
            continue
        without = bare.get((*place, path))
        cells = [figure(each, lambda row: row.ms_p50, ".3f") for each in (without, row)]
        over = "-" if without is None else f"{(row.ms_p50 or 0) / (without.ms_p50 or 1):.2f}"
        backend = () if row.provider == "cpu" else (row.provider,)
        lines.append((" ".join((*place[:2], *backend)), f"`{path}_`", track, *cells, over))
    header = ("gradients", "call", "track", "without, ms", "with, ms", "over")
    return table(header, lines) if lines else ""


def _memory(results: Results) -> str:
    """Memory of calls beyond the gradients; nothing on a GPU, where it is not measured."""
    if results.machine.get("gpu"):
        return ""
    lines = [
        (
            row.case,
            f"`{row.path}_`, {'torch' if row.provider == 'torch' else 'ampfast'}",
            f"{(row.list_bytes or 0) / (1 << 20):.0f}",
            figure(row, lambda row: row.extra_bytes, ",.0f"),
            figure(row, lambda row: row.allocated_bytes, ",.0f"),
        )
        for row in of("memory", results.rows)
        if row.path != "table"
    ]
    header = (
        "gradients",
        "call",
        "MiB",
        "more memory, bytes",
        "from torch's allocator, bytes",
    )
    return table(header, lines)


def _ranks(results: Results) -> str:
    """Sharded scalers, and how many collectives each takes; nothing if none were measured."""
    rows = of("ranks", results.rows)
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
                *(figure(each, lambda row: row.ms_p50, ".3f") for each in (torchs, row)),
                figure(row, lambda row: row.vs_torch, ".2f", "x"),
                *(figure(each, lambda row: row.collectives, "d") for each in (torchs, row)),
            )
        )
    header = (
        *("shared gradients", "ranks", *(("backend",) if on_gpu else ())),
        *("calls of `ShardedGradScaler`", "torch, ms", "ampfast, ms", "faster"),
        *("torch, collectives", "ampfast"),
    )
    return table(header, lines)


def of(subject: str, rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.subject == subject]


def figure(
    row: Row | None,
    read: Callable[[Row], float | None],
    format_spec: str,
    unit: str = "",
    missing: str = NOT_MEASURED,
) -> str:
    value = None if row is None else read(row)
    return missing if value is None else f"{value:{format_spec}}{unit}"


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    if not lines:
        lines = [[NOT_MEASURED] * len(header)]
    rule = ["---"] * len(header)
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *lines))


MAKERS: dict[str, Callable[[Results], str]] = {
    "loops": loops,
    "host": _host,
    "training": _against_none("training"),
    "mlp": _against_none("mlp"),
    "growth": _growth,
    "kernels": _kernels,
    "steps": _steps,
    "clip": _clipping,
    "tracking": _tracking,
    "memory": _memory,
    "ranks": _ranks,
}
# A full run is expected to have the other subjects, too.
USUAL = {"host", "kernels", "memory"}
