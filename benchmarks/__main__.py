"""Command line: measures, or compares and shows results."""

from __future__ import annotations

import argparse
import datetime
import functools
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ampfast import backends

from . import (
    clipping,
    growth,
    host_time,
    kernels,
    readme,
    real_loops,
    report,
    steps,
    tables,
    tracking,
    training,
)
from .cases import CASES, GradCase
from .compare import Comparison
from .device_time import CudaQueue
from .harness import FULL, GPU_FULL, GPU_QUICK, QUICK, Job, Measured, Setting
from .machine import default_device, new_results
from .results import Results
from .timing import dtype_name

try:
    import rich.console
    import rich.table
except ModuleNotFoundError:
    rich = None

# In the order of a run: the most informative parts come first, in case the time is up.
SUBJECTS = tuple(tables.SUBJECTS)
INTERRUPTED = 130
# Seconds after which a run on a GPU starts no further part.
GPU_LIMIT_S = {False: 330.0, True: 105.0}
JSON = "results.json"
EARLIER = "earlier"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code: 1 for a file that cannot be read or written."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    command = COMMANDS.get(arguments[0]) if arguments else None
    if command is None:
        return _bench(arguments)
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {arguments[0]}")
    try:
        command(parser, arguments[1:])
    except OSError as error:
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _compare(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    parser.description = (
        "Shows changes between two result files; faster or slower means beyond both spreads (p20 "
        "to p80). Exits with 0 in any case."
    )
    parser.add_argument("first", type=Path, help="result file")
    parser.add_argument("second", type=Path, help="a later one, or one from elsewhere")
    parser.add_argument("--all", action="store_true", help="also show changes within the spreads")
    options = parser.parse_args(arguments)
    comparison = Comparison.of(Results.read(options.first), Results.read(options.second))
    for line in comparison.environments:
        print(line)
    show(comparison.table(options.all))
    for line in comparison.summary():
        print(line)


def _report(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    parser.description = "Makes the report of a result file: report.html and plots/."
    parser.add_argument("file", type=Path, help="result file")
    parser.add_argument("--folder", type=Path, help="place of the report (default: the file's)")
    options = parser.parse_args(arguments)
    print(report.write(Results.read(options.file), options.folder or options.file.parent))


def _readme(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    parser.description = f"Prints the figures of {readme.README} from a result file."
    parser.add_argument("file", type=Path, help="result file")
    parser.add_argument(
        "--write",
        type=Path,
        metavar="FOLDER",
        help=f"write them into {' and '.join(readme.PAGES)} of this repository instead, between "
        f"{readme.START} and {readme.END}, with {readme.PICTURES} and {readme.RESULTS}",
    )
    options = parser.parse_args(arguments)
    if options.write is None:
        print(readme.readme_block(Results.read(options.file)))
    else:
        readme.write(options.write, options.file)


COMMANDS = {"compare": _compare, "report": _report, "readme": _readme}


def _bench(arguments: Sequence[str]) -> int:
    started = time.monotonic()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measures ampfast against torch, after comparing their results.",
        epilog=f"Result files are the input of `python -m benchmarks {'`, `'.join(COMMANDS)}`; "
        "each has a --help.",
    )
    dtypes = {dtype_name(dtype): dtype for dtype in kernels.DTYPES}
    parser.add_argument("--quick", action="store_true", help="fewer lists, shorter comparisons")
    for flag, known, told in (
        ("only", SUBJECTS, "parts of the run"),
        ("cases", tuple(CASES), "gradient lists, but of loops and host"),
        ("dtypes", tuple(dtypes), "dtypes of kernels, steps, clip and tracking"),
    ):
        told = f"{told}, comma-separated: {','.join(known)}"
        parser.add_argument(f"--{flag}", type=_names_among(known), metavar="NAMES", help=told)
    told = "default: the GPU of a machine that has one"
    parser.add_argument("--device", choices=("cpu", "cuda"), help=told)
    parser.add_argument("--threads", type=_positive, metavar="N", help="threads of torch and ours")
    parser.add_argument(
        "--limit", type=_positive, metavar="SECONDS", help="start no further part after this time"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help=f"write {JSON}, {report.PAGE} and {report.PLOTS}/ there; earlier results go to its "
        f"folder {EARLIER}",
    )
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU")
    device = torch.device("cpu") if options.device == "cpu" else default_device()
    try:
        backends.default_for(device)
        if options.folder is not None:
            options.folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError, ValueError) as error:
        parser.error(str(error))
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    on_gpu = device.type == "cuda"
    quick, full = (GPU_QUICK, GPU_FULL) if on_gpu else (QUICK, FULL)
    queue = CudaQueue(device) if on_gpu else None
    results = new_results(device)
    chosen = {name: getattr(options, name) for name in ("only", "cases", "dtypes")}
    results.asked = {"quick": options.quick, **{k: list(v) for k, v in chosen.items() if v}}
    limit = options.limit or (GPU_LIMIT_S[options.quick] if on_gpu else None)
    deadline = None if limit is None else started + limit
    exit_code = INTERRUPTED
    # As Ctrl-C; what was measured is kept.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        of_dtypes = tuple(dtypes[name] for name in options.dtypes or ())
        on = Setting(device, quick if options.quick else full, queue)
        jobs = jobs_of(options.only or SUBJECTS, on, options.cases, of_dtypes)
        exit_code = _run(jobs, results, options.folder, started, deadline)
    except KeyboardInterrupt:
        print("stopped; results so far follow", flush=True)
    return max(exit_code, _finish(results, options.folder))


def jobs_of(
    subjects: Sequence[str],
    on: Setting,
    cases: tuple[str, ...] | None = None,
    dtypes: tuple[torch.dtype, ...] = (),
) -> list[tuple[str, Job]]:
    """Named jobs of some subjects."""
    on_gpu = on.device.type == "cuda"
    lists = kernels.chosen(on, cases, dtypes)

    def for_each(
        measure: Callable[..., Measured], lists: list[tuple[GradCase, torch.dtype]] = lists
    ) -> list[Job]:
        return [
            Job(f"{case.name} {dtype_name(dtype)}", functools.partial(measure, case, dtype, on))
            for case, dtype in lists
        ]

    makers: dict[str, Callable[[], list[Job]]] = {
        # On a GPU, "training" has them.
        "loops": lambda: [] if on_gpu else real_loops.jobs(on),
        "host": lambda: host_time.jobs(on),
        "mlp": lambda: training.jobs("mlp", on),
        "training": lambda: training.jobs("training", on),
        "growth": lambda: growth.jobs(on),
        "kernels": lambda: for_each(kernels.measure),
        "steps": lambda: for_each(steps.measure),
        "clip": lambda: for_each(clipping.measure),
        "tracking": lambda: for_each(tracking.measure, tracking.chosen(lists, on_gpu, cases)),
    }
    return [(f"{subject}: {job.label}", job) for subject in subjects for job in makers[subject]()]


def _run(
    jobs: Sequence[tuple[str, Job]],
    results: Results,
    folder: Path | None,
    started: float,
    deadline: float | None,
) -> int:
    """Runs the jobs into `results`, which keeps its rows after a failure or Ctrl-C."""

    def note(text: str) -> None:
        results.notes.append(text)
        print(text, flush=True)

    failed = left_out = False
    # Incomplete until the last job is done, so a run that is cut off leaves a file that says so.
    results.complete = False
    for number, (name, job) in enumerate(jobs, 1):
        if deadline is not None and time.monotonic() > deadline:
            left_out = True
            note(f"left out {name}: the time is up")
            continue
        print(f"[{number}/{len(jobs)}] {name}", flush=True)
        try:
            measured = job.run()
        except KeyboardInterrupt:
            note(f"stopped at {name}; results so far follow")
            return INTERRUPTED
        except Exception as error:
            # A failing part does not keep the others from being measured; a smaller machine
            # measures less, which is no failure.
            too_large = _is_of_memory(error)
            failed, left_out = failed or not too_large, left_out or too_large
            verb = "skipped" if too_large else "FAILED"
            note(f"{verb} {name}: {str(error) or type(error).__name__}")
        else:
            results.rows += measured.rows
            results.goals += measured.goals
            results.notes += [each for each in measured.notes if each not in results.notes]
        results.seconds = round(time.monotonic() - started, 1)
        if folder is not None and results.rows:
            _put_away(folder / JSON, results.date)
            results.write(folder / JSON)
    results.complete = not (failed or left_out)
    return 1 if failed else 0


def _put_away(file: Path, date: str) -> None:
    """Renames an earlier run's file, if any, to a name that no run writes."""
    if file.exists() and f'"{date}"' not in file.read_text(encoding="utf-8"):
        written = datetime.datetime.fromtimestamp(file.stat().st_mtime, datetime.timezone.utc)
        (file.parent / EARLIER).mkdir(exist_ok=True)
        file.replace(file.parent / EARLIER / f"{written:%Y-%m-%d-%H%M%S}{file.suffix}")


def _finish(results: Results, folder: Path | None) -> int:
    """Shows results and writes what is left to write; returns 1 where that fails."""
    if rich is None:
        print("rich is not installed, so no tables are shown: pip install rich")
    for table in tables.of(results):
        show(table)
    if results.goals:
        show(tables.of_goals(results.goals))
    for line in (*results.notes, *results.caveats, *tables.sentences(results)):
        print(line)
    if folder is None or not results.rows:
        return 0
    try:
        results.write(folder / JSON)
        print(f"the report is {report.write(results, folder)}")
    except OSError as error:
        print(f"{error.filename}: {error.strerror}")
        return 1
    except ValueError as error:
        # What was measured is kept.
        print(f"no report: {error}; then python -m benchmarks report {folder / JSON}")
    return 0


def show(table: tables.Table) -> None:
    """Prints a table, if rich is installed."""
    if rich is None or not table.lines:
        return
    console = rich.console.Console(width=None if sys.stdout.isatty() else 180)
    drawn = rich.table.Table(title=table.title, title_justify="left", box=None)
    for index, name in enumerate(table.header):
        drawn.add_column(name, justify="left" if index < table.names else "right")
    for line in table.lines:
        drawn.add_row(*map(rich.markup.escape, line))
    console.print(drawn)


def _is_of_memory(error: Exception) -> bool:
    """Whether an error means too little memory; for a CPU torch has no error type of its own."""
    of_cpu = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return of_cpu or isinstance(error, (MemoryError, torch.OutOfMemoryError))


def _names_among(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    """argparse type of a comma-separated choice, in the order of `known`."""

    def names(text: str) -> tuple[str, ...]:
        given = text.split(",")
        if unknown := [name for name in given if name not in known]:
            told = f"{', '.join(map(repr, unknown))} is not among {', '.join(known)}"
            raise argparse.ArgumentTypeError(told)
        return tuple(name for name in known if name in given)

    return names


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


if __name__ == "__main__":
    sys.exit(main())
