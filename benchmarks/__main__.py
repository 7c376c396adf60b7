"""Command line: measure, or turn a result file into the README's performance section."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from . import host_time, kernels, memory, readme, report
from .cases import CASES
from .harness import FULL, QUICK, Job
from .machine import new_results
from .results import Results

SUBJECTS = ("host", "kernels", "memory")
INTERRUPTED = 130
PAGE_WIDTH = 120
# Load average of the last minute from which something else takes a noticeable part of a core.
BUSY = 0.5


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] == ["readme"]:
        return _readme(arguments[1:])
    return _bench(arguments)


def _bench(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measures ampfast against torch, after comparing their results.",
        epilog="`python -m benchmarks readme FILE` prints a result file as Markdown.",
    )
    parser.add_argument("--quick", action="store_true", help="fewer lists, shorter comparisons")
    parser.add_argument(
        "--only",
        type=_names_among(SUBJECTS),
        default=SUBJECTS,
        metavar="SUBJECTS",
        help=f"comma-separated: {','.join(SUBJECTS)}",
    )
    parser.add_argument(
        "--cases",
        type=_names_among(tuple(CASES)),
        metavar="LISTS",
        help=f"gradient lists for the kernels, comma-separated: {','.join(CASES)}",
    )
    parser.add_argument("--threads", type=_positive, metavar="N", help="threads of torch and ours")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows and goals there")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write rows there")
    options = parser.parse_args(arguments)
    for path in (options.json, options.csv):
        if path is not None and not path.parent.is_dir():
            parser.error(f"{path.parent} is not a directory")

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    effort = QUICK if options.quick else FULL
    jobs_of = {
        "host": lambda: host_time.jobs(effort),
        "kernels": lambda: kernels.jobs(effort, options.cases),
        "memory": lambda: memory.jobs(effort),
    }
    console = Console(width=None if sys.stdout.isatty() else PAGE_WIDTH)
    results = new_results()
    if (results.machine["load"] or 0) > BUSY:
        console.print(f"the load is {results.machine['load']:.1f}: other processes disturb timings")
    exit_code = _run(
        [(subject, job) for subject in options.only for job in jobs_of[subject]()],
        results,
        console,
    )
    report.show(results, console)
    if options.json is not None:
        results.write_json(options.json)
    if options.csv is not None:
        results.write_csv(options.csv)
    return exit_code


def _run(jobs: Sequence[tuple[str, Job]], results: Results, console: Console) -> int:
    """Runs the jobs into `results`; what was measured before a failure or Ctrl-C stays there."""
    failed = False
    columns = (
        TextColumn("{task.description:<40}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(jobs))
        for subject, job in jobs:
            name = f"{subject}: {job.label}"
            progress.update(task, description=name)
            try:
                measured = job.run()
            except KeyboardInterrupt:
                results.complete = False
                console.print(f"stopped at {name}; what was measured so far follows")
                return INTERRUPTED
            except MemoryError as error:
                # A smaller machine measures less, which is no failure of what is measured.
                results.complete = False
                console.print(f"skipped {name}: {error}", markup=False)
            except (AssertionError, RuntimeError) as error:
                results.complete = False
                failed = True
                console.print(f"FAILED {name}: {error}", markup=False)
            else:
                results.rows += measured.rows
                results.goals += measured.goals
            progress.advance(task)
    return 1 if failed else 0


def _readme(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks readme",
        description="Prints a result file as the Markdown of the README's performance section.",
    )
    parser.add_argument("file", type=Path, help="what --json wrote")
    parser.add_argument(
        "--write",
        type=Path,
        metavar="README",
        help=f"put it there instead, between {readme.START} and {readme.END}",
    )
    options = parser.parse_args(arguments)
    try:
        section = readme.markdown(options.file)
        if options.write is None:
            print(section, end="")
        else:
            readme.write(options.write, section)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _names_among(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    """An argparse type for a comma-separated choice, in the order of `known`."""

    def names(text: str) -> tuple[str, ...]:
        given = text.split(",")
        unknown = [name for name in given if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(
                f"{', '.join(map(repr, unknown))} is not among {', '.join(known)}"
            )
        return tuple(name for name in known if name in given)

    return names


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


if __name__ == "__main__":
    # Being told to end keeps what was measured, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
