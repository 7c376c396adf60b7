"""Pictures of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from . import svg, whole_files
from .providers import CHECK, COPY, HALF_COPY, UNSCALE
from .results import Results, Row
from .svg import Bar, Curve, Group, Picture

ENDING = ".svg"
WITHOUT = "no scaler"
# Colours with a fixed meaning in all pictures; other series take the remaining ones.
TONES = {"torch": 0, WITHOUT: 4}
PATHS = ((UNSCALE, COPY), (CHECK, HALF_COPY))
Maker = Callable[[Results], Iterator[Picture]]


def pictures(results: Results) -> dict[str, list[Picture]]:
    """Pictures by subject, without subjects that have no rows."""
    drawn = {subject: list(make(results)) for subject, make in MAKERS.items()}
    return {subject: found for subject, found in drawn.items() if found}


def draw(results: Results, path: Path) -> None:
    """Writes the kernels' pictures as one.

    Raises:
        OSError: If it cannot be written.
        ValueError: If nothing was measured that could be drawn.
    """
    kernels = list(_kernels(results))
    if not kernels:
        raise ValueError("no kernels were measured, so there is nothing to draw")
    unfinished = "" if results.complete else " (the run was not complete)"
    title = f"{results.place}, {results.versions}{unfinished}"
    whole_files.write(path, svg.stacked("kernels", title, kernels).file())


def write_all(found: Sequence[Picture], folder: Path) -> None:
    """Writes a file for each; removes pictures of an earlier run.

    Raises:
        OSError: If one cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for picture in found:
        whole_files.write(folder / f"{picture.name}{ENDING}", picture.file())
    kept = {f"{picture.name}{ENDING}" for picture in found}
    for file in folder.glob(f"*{ENDING}"):
        if file.name not in kept:
            file.unlink()


def shown(provider: str) -> str:
    """Provider as shown to readers."""
    names = {"torch": "torch", "none": WITHOUT, "cpu": "ampfast"}
    return names.get(provider, f"ampfast, {provider}")


def _host_time(subject: str, title: str, name: Callable[[Row], str]) -> Maker:
    """Host time of paths that torch has, too."""

    def make(results: Results) -> Iterator[Picture]:
        rows = [row for row in results.rows if row.subject == subject and row.host_us_p50]
        paths = {row.path for row in rows if row.provider == "torch"}
        groups = _groups(
            [row for row in rows if row.path in paths],
            name,
            lambda row: row.host_us_p50,
            lambda row: f"{row.host_us_p50:,.1f}{_faster(row)}",
        )
        if groups:
            yield _bars(subject, title, "microseconds (lower is better)", groups)

    return make


def _kernels(results: Results) -> Iterator[Picture]:
    """Bandwidth by list, one picture for each path and dtype, beside a copy's."""
    rows = [row for row in results.rows if row.subject == "kernels" and row.gb_s is not None]
    for path, copy in PATHS:
        for dtype in dict.fromkeys(row.dtype for row in rows):
            here = [row for row in rows if row.dtype == dtype]
            copies = {row.list_name: row.gb_s for row in here if row.path == copy}
            groups = _groups(
                [row for row in here if row.path == path],
                lambda row: row.list_name,
                lambda row: row.gb_s,
                lambda row: "" if row.percent_of_copy is None else f"{row.percent_of_copy:.0f}%",
                copies,
            )
            if groups:
                yield _bars(
                    f"{path}-{dtype}",
                    f"{path}, {dtype}: bytes a second, and percent of a copy's",
                    "GB/s (higher is better)",
                    groups,
                    mark="a copy that moves as many bytes",
                )


def _speedups(subject: str, title: str) -> Maker:
    """Speed relative to torch, one picture for each dtype."""

    def make(results: Results) -> Iterator[Picture]:
        rows = [row for row in results.rows if row.subject == subject and row.vs_torch]
        for dtype in dict.fromkeys(row.dtype for row in rows):
            here = [row for row in rows if row.dtype == dtype]
            several = len({row.provider for row in here}) > 1
            groups = _groups(
                here,
                lambda row: row.list_name,
                lambda row: row.vs_torch,
                lambda row: f"{row.vs_torch:.2f}x",
                series=_path_and_provider if several else _path,
            )
            yield _bars(
                f"{subject}-{dtype}",
                f"{title}, {dtype}",
                "times as fast as torch (higher is better; the line: as fast)",
                groups,
                limit=1.0,
            )

    return make


def _over_none(subject: str, title: str, without: str) -> Maker:
    """Time relative to the same training without a scaler."""

    def make(results: Results) -> Iterator[Picture]:
        rows = [row for row in results.rows if row.subject == subject and row.over_none]
        groups = _groups(
            rows,
            lambda row: ", ".join(dict.fromkeys((row.case, row.path))),
            lambda row: row.over_none,
            lambda row: f"{row.over_none:.3f}",
        )
        if groups:
            yield _bars(
                subject,
                title,
                f"time over that of {without} (lower is better; the line: alike)",
                groups,
                limit=1.0,
            )

    return make


def _growth(results: Results) -> Iterator[Picture]:
    """Time by number of tensors and of elements, a curve for each provider."""
    rows = [row for row in results.rows if row.subject == "growth" and row.ms_p50]
    for path in dict.fromkeys(row.path for row in rows):
        here = [row for row in rows if row.path == path]
        by_tensors = len({row.tensors for row in here}) > 1
        across = "tensors" if by_tensors else "elements"
        points: dict[str, dict[int, float]] = {}
        for row in here:
            x = row.tensors if by_tensors else row.elements
            if x and row.ms_p50:
                points.setdefault(shown(row.provider), {})[x] = row.ms_p50
        lines = [Curve(name, tuple(sorted(found.items()))) for name, found in points.items()]
        if not lines:
            continue
        title = f"Time of unscale_ and update against the number of {across}"
        ends = (
            f"{line.series} from {line.points[0][1]:.3g} ms at {line.points[0][0]:,} to "
            f"{line.points[-1][1]:.3g} ms at {line.points[-1][0]:,}"
            for line in lines
        )
        yield svg.curves(
            f"growth-{across}",
            title,
            "; ".join(ends),
            (across, "milliseconds (lower is better)"),
            lines,
            svg.tones_of([line.series for line in lines], TONES),
        )


def _groups(
    rows: Sequence[Row],
    name: Callable[[Row], str],
    value: Callable[[Row], float | None],
    label: Callable[[Row], str],
    marks: dict[str, float | None] | None = None,
    series: Callable[[Row], str] = lambda row: shown(row.provider),
) -> list[Group]:
    """Rows as bars, grouped by a name."""
    found: dict[str, list[Bar]] = {}
    for row in rows:
        length = value(row)
        if length is not None:
            found.setdefault(name(row), []).append(Bar(series(row), length, label(row)))
    return [Group(name, tuple(bars), (marks or {}).get(name)) for name, bars in found.items()]


def _bars(
    name: str,
    title: str,
    axis: str,
    groups: Sequence[Group],
    mark: str = "",
    limit: float | None = None,
) -> Picture:
    series = [bar.series for group in groups for bar in group.bars]
    told = (
        f"{group.name}: " + ", ".join(f"{bar.series} {bar.value:.4g}" for bar in group.bars)
        for group in groups
    )
    tones = svg.tones_of(series, TONES)
    return svg.bars(
        name, title, f"{axis}; {'; '.join(told)}", axis, groups, tones, mark=mark, limit=limit
    )


def _path(row: Row) -> str:
    return row.path


def _path_and_provider(row: Row) -> str:
    return f"{row.path}, {row.provider}"


def _faster(row: Row) -> str:
    return "" if row.vs_torch is None else f" ({row.vs_torch:.1f}x faster)"


MAKERS: dict[str, Maker] = {
    "loops": _host_time(
        "loops",
        "Scaler's own time in training loops",
        lambda row: f"{row.case}, {row.tensors} parameters, {row.path}",
    ),
    "mlp": _over_none("mlp", "A perceptron's epochs", "autocast without a scaler"),
    "training": _over_none("training", "Whole training steps", "the step without a scaler"),
    "growth": _growth,
    "host": _host_time(
        "host",
        "Host time of the scaler's calls, warm",
        lambda row: f"{row.case.partition('x')[0]} parameters, {row.path}",
    ),
    "kernels": _kernels,
    "steps": _speedups("steps", "Whole steps of the scaler"),
    "clip": _speedups("clip", "Unscaling and clipping"),
    "ranks": _speedups("ranks", "Ranks that share a list"),
}
