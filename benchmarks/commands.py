"""Commands over result files: page, comparison, README figures, picture."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from . import page, plot, readme, terminal, whole_files
from .compare import Comparison
from .results import Results

UNREADABLE = 1


def ends_in(*endings: str) -> Callable[[str], Path]:
    """argparse type of an output file, by its ending: a forgotten one would cost a result file."""

    def path(text: str) -> Path:
        if not text.endswith(endings):
            raise argparse.ArgumentTypeError(f"{text!r} does not end in {' or '.join(endings)}")
        return Path(text)

    return path


def run(name: str, arguments: Sequence[str]) -> int:
    """Runs one of `COMMANDS`.

    Returns:
        0, or 1 with a line on stderr if a file cannot be read or written; then nothing was
        overwritten. Wrong arguments exit with 2.
    """
    try:
        COMMANDS[name](arguments)
    except OSError as error:
        print(f"{error.filename or name}: {whole_files.reason(error)}", file=sys.stderr)
        return UNREADABLE
    except ValueError as error:
        print(error, file=sys.stderr)
        return UNREADABLE
    return 0


def _page(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks page",
        description="Makes one HTML page of result files, which opens from disk and prints.",
    )
    parser.add_argument("files", type=Path, nargs="+", metavar="file", help="result file of --json")
    parser.add_argument("page", type=ends_in(*page.ENDINGS), help="output file")
    options = parser.parse_args(arguments)
    page.write([Results.read_json(path) for path in options.files], options.page)


def _compare(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks compare",
        description="Shows changes between two result files; faster or slower means beyond both "
        "spreads (p20 to p80). Exits with 0 in any case.",
    )
    parser.add_argument("first", type=Path, help="result file of --json")
    parser.add_argument("second", type=Path, help="a later one, or one from elsewhere")
    parser.add_argument("--all", action="store_true", help="also show changes within the spreads")
    options = parser.parse_args(arguments)
    results = [Results.read_json(path) for path in (options.first, options.second)]
    shown = terminal.make()
    Comparison.of(*results).show(shown.line, shown.table, options.all)


def _plot(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks plot",
        description="Draws bytes per second by list from a result file, beside a copy's.",
    )
    parser.add_argument("file", type=Path, help="result file of --json")
    parser.add_argument("picture", type=ends_in(plot.ENDING), help="output file")
    options = parser.parse_args(arguments)
    plot.draw(Results.read_json(options.file), options.picture)


def _readme(arguments: Sequence[str]) -> None:
    pages = " and ".join(str(page.place) for page in readme.PAGES)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks readme",
        description=f"Prints result files as the Markdown of {readme.WHOLE.place}.",
    )
    parser.add_argument("files", type=Path, nargs="+", metavar="file", help="result file of --json")
    parser.add_argument(
        "--write",
        type=Path,
        metavar="FOLDER",
        help=f"write them into {pages} of this repository instead, between {readme.START} and "
        f"{readme.END}, and their pictures into {readme.PICTURES}",
    )
    options = parser.parse_args(arguments)
    if options.write is None:
        print(readme.WHOLE.section(*options.files), end="")
    else:
        readme.write(options.write, *options.files)


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "page": _page,
    "compare": _compare,
    "readme": _readme,
    "plot": _plot,
}
