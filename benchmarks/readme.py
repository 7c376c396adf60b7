"""The README's performance section, made from a result file: no figure is typed by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path, PurePosixPath

from . import plot, whole_files
from .machine import REPOSITORY
from .readme_tables import MAKERS, NOT_MEASURED, USUAL
from .results import Results
from .svg import Picture

START = "<!-- bench:start -->"
END = "<!-- bench:end -->"
# Beside the README; nothing else is kept there.
PICTURES = PurePosixPath("docs/measured")
# What is drawn on the page, of all that could be.
DRAWN = (
    *("mlp", "training", "growth-tensors", "growth-elements"),
    *("host", "unscale-float32", "clip-float32", "ranks-float32"),
)


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
        drawn = _pictures(path, results)
        subjects = {row.subject for row in results.rows}
        for subject, make in MAKERS.items():
            # What is measured apart from all else, on purpose, says nothing of the others.
            table = make(results) if subject in subjects or subjects & USUAL else ""
            parts += [_image(picture) for picture in drawn.get(subject, ())]
            parts += [table] if table else []
    return "\n\n".join(parts) + "\n"


def pictures(*paths: Path) -> list[Picture]:
    """The pictures that `markdown` shows, by the names of their files.

    Raises:
        ValueError: If a file is not a result.
    """
    return [
        picture
        for path in paths
        for drawn in _pictures(path, Results.read_json(path)).values()
        for picture in drawn
    ]


def write(readme: Path, *paths: Path) -> None:
    """Puts result files between the two markers, and their pictures beside the page.

    Raises:
        OSError: If something cannot be read or written.
        ValueError: If the page does not have each marker once, in order, or a file is not a
            result; then nothing is written.
    """
    before, _, after = _split(readme)
    section, found = markdown(*paths), pictures(*paths)
    plot.write_all(found, readme.parent / PICTURES)
    whole_files.write(readme, f"{before}{START}\n{section}{END}{after}")


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
    shown = path.resolve()
    if shown.is_relative_to(REPOSITORY):
        shown = shown.relative_to(REPOSITORY)
    return (
        f"Measured on {results.place} with {results.versions}, {results.date[:10]}. "
        f"Medians, both sides in one run; all of it: [`{shown.name}`]({shown.as_posix()}). "
        "A cold list is one of many that take turns, so that none is found in the cache."
        + ("" if on_gpu else f" On GPUs: {NOT_MEASURED}.")
        + ("" if results.complete else " The run was not complete.")
        + _failures(results)
        + (f" {results.disturbance}" if results.disturbance else "")
        + _verdicts(results)
    )


def _failures(results: Results) -> str:
    """How many parts gave another result than torch, or ended in an error."""
    failed = sum(note.startswith("FAILED") for note in results.notes)
    return f" {failed} of its parts failed; the file says why." if failed else ""


def _verdicts(results: Results) -> str:
    """How many goals were met, and which were not."""
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


def _pictures(path: Path, results: Results) -> dict[str, list[Picture]]:
    """By subject; the names tell pictures of one result file from those of another."""
    return {
        subject: [
            replace(picture, name=f"{path.stem}-{picture.name}")
            for picture in drawn
            if picture.name in DRAWN
        ]
        for subject, drawn in plot.pictures(results).items()
    }


def _image(picture: Picture) -> str:
    return f"![{picture.title}]({PICTURES / picture.name}{plot.ENDING})"
