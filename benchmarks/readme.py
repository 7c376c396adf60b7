"""Figures of README.md and docs/benchmarks.md, generated from result files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from . import plot, readme_short, readme_tables, whole_files
from .machine import REPOSITORY
from .results import Results
from .svg import Picture

START = "<!-- bench:start -->"
END = "<!-- bench:end -->"
# Nothing else is kept there.
PICTURES = PurePosixPath("docs/measured")


@dataclass(frozen=True)
class Page:
    """Page with figures between its two markers.

    Attributes:
        place: Path from the repository's root.
        tables: Makes tables by subject from results; "" without measurements.
        drawn: Names of the pictures to show.
    """

    place: PurePosixPath
    tables: Callable[[Results], dict[str, str]]
    drawn: tuple[str, ...]

    def section(self, *paths: Path) -> str:
        """Text between the markers for result files, ending in a newline.

        Raises:
            OSError: If a file cannot be read.
            ValueError: If a file is not a result.
        """
        all_results = [(path, Results.read_json(path)) for path in paths]
        on_gpu = any(results.machine.get("gpu") for _, results in all_results)
        parts = []
        for path, results in all_results:
            parts.append(self._heading(path, results, on_gpu))
            drawn = self._pictures(path, results)
            for subject, table in self.tables(results).items():
                parts += [self._image(picture) for picture in drawn.pop(subject, ())]
                parts += [table]
            parts += [self._image(picture) for found in drawn.values() for picture in found]
        return "\n\n".join(part for part in parts if part) + "\n"

    def pictures(self, *paths: Path) -> list[Picture]:
        """Pictures shown by `section`, by file name; raises the same errors."""
        return [
            picture
            for path in paths
            for drawn in self._pictures(path, Results.read_json(path)).values()
            for picture in drawn
        ]

    def section_in(self, folder: Path) -> str:
        """Current text between the markers; ValueError without them."""
        return _split(folder / self.place)[1].removeprefix("\n")

    def _heading(self, path: Path, results: Results, on_gpu: bool) -> str:
        """Machine of the measurements; `on_gpu` tells whether any file is from a GPU."""
        shown = path.resolve()
        if shown.is_relative_to(REPOSITORY):
            up = [".."] * (len(self.place.parts) - 1)
            shown = PurePosixPath(*up, shown.relative_to(REPOSITORY))
        return (
            f"Measured on {results.place} with {results.versions}, {results.date[:10]}. "
            f"Medians, both sides in one run; all of it: [`{shown.name}`]({shown.as_posix()})."
            + ("" if on_gpu else f" On GPUs: {readme_tables.NOT_MEASURED}.")
            + ("" if results.complete else " The run was not complete.")
            + _failures(results)
            + (f" {results.disturbance}" if results.disturbance else "")
            + _verdicts(results)
        )

    def _pictures(self, path: Path, results: Results) -> dict[str, list[Picture]]:
        """Pictures by subject; names distinguish result files."""
        return {
            subject: [
                replace(picture, name=f"{path.stem}-{picture.name}")
                for picture in drawn
                if picture.name in self.drawn
            ]
            for subject, drawn in plot.pictures(results).items()
        }

    def _image(self, picture: Picture) -> str:
        place = PICTURES.relative_to(self.place.parent) / picture.name
        return f"![{picture.title}]({place}{plot.ENDING})"


README = Page(PurePosixPath("README.md"), readme_short.short, ("loops", "training"))
WHOLE = Page(
    PurePosixPath("docs/benchmarks.md"),
    readme_tables.whole,
    (
        *("loops", "host", "mlp", "training", "growth-tensors", "growth-elements"),
        *("unscale-float32", "clip-float32", "ranks-float32"),
    ),
)
PAGES = (README, WHOLE)


def write(folder: Path, *paths: Path) -> None:
    """Writes result files between the markers of both pages, and their pictures beside them.

    Args:
        folder: The repository, or a copy of it.
        *paths: Result files, in the order in which they are shown.

    Raises:
        OSError: If something cannot be read or written.
        ValueError: If a page does not have each marker once, in order, or a file is not a
            result; then nothing is written.
    """
    written = []
    for page in PAGES:
        before, _, after = _split(folder / page.place)
        section = page.section(*paths)
        written.append((folder / page.place, f"{before}{START}\n{section}{END}{after}"))
    pictures = {picture.name: picture for page in PAGES for picture in page.pictures(*paths)}
    plot.write_all(list(pictures.values()), folder / PICTURES)
    for path, text in written:
        whole_files.write(path, text)


def _split(readme: Path) -> tuple[str, str, str]:
    text = readme.read_text(encoding="utf-8")
    before, start, rest = text.partition(START)
    section, end, after = rest.partition(END)
    if not (start and end) or START in rest or END in after:
        raise ValueError(f"{readme} must contain {START} and then {END}, each once")
    return before, section, after


def _failures(results: Results) -> str:
    """Number of parts that differ from torch or ended in an error."""
    failed = sum(note.startswith("FAILED") for note in results.notes)
    return f" {failed} of its parts failed; the file says why." if failed else ""


def _verdicts(results: Results) -> str:
    """Number of goals met, and the goals that were not."""
    if not results.goals:
        return ""
    missed = [goal for goal in results.goals if not goal.met]
    told = f" Goals met: {len(results.goals) - len(missed)} of {len(results.goals)}"
    shown = (
        f"{goal.name}, {goal.case} {goal.dtype} ({goal.ratio:.3g}, promised "
        f"{goal.sense} {goal.limit:g})"
        for goal in missed
    )
    return f"{told}; not met: {'; '.join(shown)}." if missed else f"{told}."
