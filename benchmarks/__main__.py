"""Command line: measures, or compares and shows results."""

from __future__ import annotations

import argparse
import datetime
import math
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from ampfast import backends
from ampfast.backends.gpu import DeviceKernels

from . import (
    ceilings,
    clipping,
    decisive,
    growth,
    host_time,
    kernels,
    master_weights,
    model,
    readme,
    real_loops,
    report,
    steps,
    tables,
    tracking,
    training,
)
from .compare import Comparison
from .device_time import CudaQueue, HostQueue
from .harness import FULL, GPU_FULL, GPU_QUICK, QUICK, REHEARSAL, Job, Setting
from .machine import REPOSITORY, OtherPrograms, default_device, new_results
from .results import Results

try:
    import rich.console
    import rich.table
except ModuleNotFoundError:
    rich = None

# In the order of a run: the most informative parts come first, in case the time is up.
SUBJECTS = tuple(tables.SUBJECTS)
# Not in a run that names none.
ON_REQUEST = ("decisive",)
INTERRUPTED = 130
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
    except ValueError as error:
        print(error, file=sys.stderr)
    else:
        return 0
    return 1


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
    print(*comparison.environments, sep="\n")
    show(comparison.table(options.all))
    print(*comparison.summary(), sep="\n")


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


def _model(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    parser.description = f"Prints the table of {model.PAGE}: bytes, launches and times of passes."
    told = "write it into the page of this repository instead"
    parser.add_argument("--write", type=Path, metavar="FOLDER", help=told)
    options = parser.parse_args(arguments)
    if options.write is None:
        print(model.block(model.committed(REPOSITORY)))
    else:
        model.write(options.write)


COMMANDS = {"compare": _compare, "report": _report, "readme": _readme, "model": _model}


def _bench(arguments: Sequence[str]) -> int:
    started = time.monotonic()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measures ampfast against torch, after comparing their results.",
        epilog=f"Result files are the input of `python -m benchmarks {'`, `'.join(COMMANDS)}`; "
        "each has a --help. OMP_NUM_THREADS sets the threads, CUDA_VISIBLE_DEVICES= takes the CPU.",
    )
    parser.add_argument("--quick", action="store_true", help="fewer lists, shorter comparisons")
    told = f"parts of the run, comma-separated: {','.join(SUBJECTS)}"
    parser.add_argument("--only", type=_subjects, metavar="NAMES", help=told)
    told = "start no further part after this time"
    parser.add_argument("--limit", type=float, metavar="SECONDS", default=math.inf, help=told)
    parser.add_argument(
        "--folder",
        type=Path,
        help=f"write {JSON}, {report.PAGE} and {report.PLOTS}/ there; earlier results go to its "
        f"folder {EARLIER}",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there alone")
    told = "run the GPU's code on the CPU, over small lists, with torch's ops for its kernels; "
    told += "TRITON_INTERPRET=1 and AMPFAST_BACKEND=triton interpret them"
    parser.add_argument("--rehearse", action="store_true", help=told)
    options = parser.parse_args(arguments)
    file = options.json or (options.folder and options.folder / JSON)
    device = default_device()
    try:
        backends.default_for(device)
        if file is not None:
            _check_place(file)
    except (OSError, RuntimeError, ValueError) as error:
        parser.error(str(error))
    results = new_results(device)
    results.asked = {"quick": options.quick, **({"only": options.only} if options.only else {})}
    exit_code = INTERRUPTED
    stopped = threading.Event()

    def stop(*_: object) -> None:
        # Only the first signal interrupts, so that no other keeps results from being written.
        if not stopped.is_set():
            stopped.set()
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        if options.rehearse:
            on = Setting(torch.device("cpu"), REHEARSAL, HostQueue())
            if backends.default_for(on.device) == "cpu":
                stand_in()
        elif device.type == "cuda":
            on = Setting(device, GPU_QUICK if options.quick else GPU_FULL, CudaQueue(device))
        else:
            on = Setting(device, QUICK if options.quick else FULL)
        usual = [subject for subject in SUBJECTS if subject not in ON_REQUEST]
        jobs = jobs_of(options.only or usual, on)
        deadline = started + options.limit
        exit_code = _run(jobs, results, file, started, deadline, stopped)
        stopped.set()
    except KeyboardInterrupt:
        results.complete = False
        print("stopped; results so far follow", flush=True)
    return max(exit_code, _finish(results, file, options.folder))


def stand_in() -> None:
    """Replaces the kernels of this process by torch's ops over tables, as of a GPU."""
    sys.path.append(str(REPOSITORY / "tests"))
    from support.reference_launcher import ReferenceLauncher

    kernels = DeviceKernels(ReferenceLauncher())
    ceilings.triton = None  # its read needs a GPU, too
    backends.Choice.kernels_for = lambda choice, device: kernels  # type: ignore


def jobs_of(subjects: Sequence[str], on: Setting) -> list[tuple[str, Job]]:
    """Named jobs of some subjects."""
    jobs = {
        # On a GPU, "training" has them.
        "loops": [] if on.queue else real_loops.jobs(on),
        "host": host_time.jobs(on),
        "mlp": training.jobs("mlp", on),
        "training": training.jobs("training", on),
        "growth": growth.jobs(on),
        "kernels": kernels.jobs(on, kernels.measure),
        "steps": kernels.jobs(on, steps.measure),
        "clip": kernels.jobs(on, clipping.measure),
        "tracking": tracking.jobs(on),
        "masters": master_weights.jobs(on),
        "decisive": decisive.jobs(on),
    }
    return [(f"{subject}: {job.label}", job) for subject in subjects for job in jobs[subject]]


def _run(
    jobs: Sequence[tuple[str, Job]],
    results: Results,
    file: Path | None,
    started: float,
    deadline: float,
    stopped: threading.Event,
) -> int:
    """Runs the jobs into `results`, which keeps its rows after a failure or Ctrl-C."""

    def note(text: str) -> None:
        results.notes.append(text)
        print(text, flush=True)

    failed = left_out = False
    others = OtherPrograms()
    # Incomplete until the last job is done, so a run that is cut off leaves a file that says so.
    results.complete = False
    for number, (name, job) in enumerate(jobs, 1):
        if stopped.is_set():
            # Python drops exceptions in some callbacks, such as those of weak references.
            raise KeyboardInterrupt
        if time.monotonic() > deadline:
            left_out = True
            more = len(jobs) - number
            note(f"left out {name}{f' and {more} more' if more else ''}: the time is up")
            break
        print(f"[{number}/{len(jobs)}] {name}", flush=True)
        try:
            measured = job.run()
        except Exception as error:
            # A failing part does not keep the others from being measured; a smaller machine
            # measures less, which is no failure.
            if _is_of_memory(error):
                left_out, verb = True, "skipped"
            else:
                failed, verb = True, "FAILED"
            note(f"{verb} {name}: {str(error) or type(error).__name__}")
        else:
            for row in measured.rows:
                print(tables.line(row), flush=True)
            results.rows += measured.rows
            results.goals += measured.goals
            for told in dict.fromkeys(measured.notes):
                if told not in results.notes:
                    note(told)
                failed |= told.startswith("FAILED")
        results.seconds = round(time.monotonic() - started, 1)
        results.machine["cores_of_others"] = others.cores()
        _save(results, file)
    results.complete = not (failed or left_out)
    return 1 if failed else 0


def _check_place(file: Path) -> None:
    """Makes the file's folder; OSError if none can be written there or it not be replaced."""
    file.parent.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=file.parent).close()
    if file.exists():
        file.read_bytes()


def _save(results: Results, file: Path | None) -> bool:
    """Writes the results, if there are any; prints a line and returns False where that fails."""
    if file is None or not results.rows:
        return True
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        _put_away(file, results.date)
        results.write(file)
    except OSError as error:
        print(f"cannot write {file}: {error}", flush=True)
        return False
    return True


def _put_away(file: Path, date: str) -> None:
    """Renames an earlier run's file, if any, to a name that no run writes."""
    if file.exists() and f'"{date}"'.encode() not in file.read_bytes():
        written = datetime.datetime.fromtimestamp(file.stat().st_mtime, datetime.timezone.utc)
        (file.parent / EARLIER).mkdir(exist_ok=True)
        file.replace(file.parent / EARLIER / f"{written:%Y-%m-%d-%H%M%S}{file.suffix}")


def _finish(results: Results, file: Path | None, folder: Path | None) -> int:
    """Shows results and writes what is left to write; returns 1 where that fails."""
    saved = _save(results, file)
    if rich is None:
        print("rich is not installed, so no tables are shown: pip install rich")
    for table in tables.of(results):
        show(table)
    if results.goals:
        show(tables.of_goals(results.goals))
    told = [tables.score(results), *filter(None, [results.during]), *results.caveats]
    print(*results.notes, *told, *tables.sentences(results), sep="\n")
    if folder is None or not results.rows or not saved:
        return 0 if saved else 1
    try:
        print(f"the report is {report.write(results, folder)}")
    except (OSError, ValueError) as error:
        # What was measured is kept.
        print(f"no report: {error}; then python -m benchmarks report {file}")
        return 1 if isinstance(error, OSError) else 0
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


def _subjects(text: str) -> list[str]:
    """argparse type of a comma-separated choice, in the order of a run."""
    given = text.split(",")
    if unknown := [name for name in given if name not in SUBJECTS]:
        told = f"{', '.join(map(repr, unknown))} is not among {', '.join(SUBJECTS)}"
        raise argparse.ArgumentTypeError(told)
    return [name for name in SUBJECTS if name in given]


if __name__ == "__main__":
    sys.exit(main())
