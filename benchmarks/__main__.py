"""Command line: measures, or compares and shows results."""

from __future__ import annotations

import argparse
import functools
import math
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ampfast import backends
from ampfast.backends.gpu import DeviceKernels

from . import decisive, kernels, loops, pages, steps, tables, training
from .machine import REPOSITORY, default_device, new_results
from .results import Results
from .timing import FULL, GPU_FULL, GPU_QUICK, QUICK, REHEARSAL, CudaQueue, HostQueue, Job, Setting

# In the order of a run: the most informative parts come first, in case the time is up.
SUBJECTS: dict[str, Callable[[Setting], list[Job]]] = {
    "loops": loops.jobs,
    "host": steps.host_jobs,
    "aten": steps.aten_jobs,
    "clip": lambda on: kernels.lists_jobs(on, functools.partial(steps.measure, "clip")),
    "training": training.jobs,
    "kernels": lambda on: kernels.lists_jobs(on, kernels.measure),
    "steps": lambda on: kernels.lists_jobs(on, functools.partial(steps.measure, "steps")),
    "decisive": decisive.jobs,
}
# Not in a run that names none.
ON_REQUEST = ("decisive",)
INTERRUPTED = 130
JSON, EARLIER = "results.json", "earlier-"
# What each does, and its arguments.
COMMANDS = {
    "compare": ("Shows changes beyond both spreads between two result files.", "first", "second"),
    "report": ("Makes report.html and plots/ beside a result file.", "file"),
    "readme": ("Writes a result file and its figures into README.md and docs/.", "file", "--write"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code: 1 for a file that cannot be read or written."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if not arguments or arguments[0] not in COMMANDS:
        return bench(arguments)
    name, *rest = arguments
    does, *takes = COMMANDS[name]
    parser = argparse.ArgumentParser(f"python -m benchmarks {name}", description=does)
    for argument in takes:
        told = "a repository (default: this one)" if argument == "--write" else "of results"
        parser.add_argument(argument, type=Path, default=REPOSITORY, help=told)
    options = parser.parse_args(rest)
    try:
        if name == "compare":
            both = Results.read(options.first), Results.read(options.second)
            print(*tables.comparison(*both), sep="\n")
        elif name == "report":
            print(pages.write_report(Results.read(options.file), options.file.parent))
        else:
            pages.write_pages(options.write, options.file)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def bench(arguments: Sequence[str]) -> int:
    """Measures, and writes and shows the results, also of a run that is interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measures ampfast against torch, after comparing their results.",
        epilog=f"Result files are the input of `python -m benchmarks {'`, `'.join(COMMANDS)}`; "
        "each has a --help. OMP_NUM_THREADS sets the threads, CUDA_VISIBLE_DEVICES= takes the CPU.",
    )
    parser.add_argument("--quick", action="store_true", help="fewer lists, shorter comparisons")
    told = f"parts of the run, comma-separated: {','.join(SUBJECTS)}"
    parser.add_argument("--only", metavar="NAMES", help=told)
    told = "start no further part after this time"
    parser.add_argument("--limit", type=float, metavar="SECONDS", default=math.inf, help=told)
    told = f"write {JSON}, {pages.REPORT} and {pages.PLOTS}/ there; keep {EARLIER}{JSON}"
    parser.add_argument("--folder", type=Path, help=told)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there alone")
    told = "run the GPU's code on the CPU, over small lists, with torch's ops for its kernels; "
    told += "TRITON_INTERPRET=1 and AMPFAST_BACKEND=triton interpret them"
    parser.add_argument("--rehearse", action="store_true", help=told)
    options = parser.parse_args(arguments)
    only = options.only.split(",") if options.only else []
    if unknown := [each for each in only if each not in SUBJECTS]:
        parser.error(f"{', '.join(unknown)}: not among {', '.join(SUBJECTS)}")
    file = options.json or (options.folder and options.folder / JSON)
    device = default_device()
    try:
        backends.default_for(device)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            if file.exists():
                file.replace(file.with_name(EARLIER + file.name))
    except (OSError, RuntimeError, ValueError) as error:
        parser.error(str(error))
    results = new_results(device)
    results.asked = {"quick": options.quick, **({"only": only} if only else {})}
    on = _setting(device, options.quick, options.rehearse)
    chosen = [each for each in SUBJECTS if (each in only if only else each not in ON_REQUEST)]
    jobs = [(f"{each}: {job.label}", job) for each in chosen for job in SUBJECTS[each](on)]
    exit_code = INTERRUPTED
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        exit_code = run(jobs, results, file, options.limit)
    except KeyboardInterrupt:
        print("stopped; results so far follow", flush=True)
    if file is not None and results.rows:
        results.write(file)
    print(*(table.text() for table in tables.of(results)), *results.notes, sep="\n")
    print(*tables.sentences(results), *results.caveats, sep="\n")
    if options.folder is not None and results.rows:
        try:
            print(f"the report is {pages.write_report(results, options.folder)}")
        except ValueError as error:
            print(f"no report: {error}; then python -m benchmarks report {file}")
    return exit_code


def _setting(device: torch.device, quick: bool, rehearse: bool) -> Setting:
    """Setting of a run; to rehearse, torch's ops replace this process's kernels, as of a GPU."""
    if rehearse:
        device = torch.device("cpu")
        if backends.default_for(device) == "cpu":
            sys.path.append(str(REPOSITORY / "tests"))
            from support.launchers import ReferenceLauncher

            replaced = DeviceKernels(ReferenceLauncher())
            backends.Choice.kernels_for = lambda choice, device: replaced  # type: ignore
        return Setting(device, REHEARSAL, HostQueue())
    if device.type == "cuda":
        return Setting(device, GPU_QUICK if quick else GPU_FULL, CudaQueue())
    return Setting(device, QUICK if quick else FULL)


def run(jobs: Sequence[tuple[str, Job]], results: Results, file: Path | None, limit: float) -> int:
    """Runs the jobs into `results`, which keeps its rows after a failure or Ctrl-C."""
    started = time.monotonic()

    def note(text: str) -> None:
        if text not in results.notes:
            results.notes.append(text)
            print(text, flush=True)

    failed = left_out = False
    # Incomplete until the last job is done, so a run that is cut off leaves a file that says so.
    results.complete = False
    for number, (name, job) in enumerate(jobs, 1):
        if time.monotonic() - started > limit:
            left_out = True
            note(f"left out {name} and {len(jobs) - number} more: the time is up")
            break
        print(f"[{number}/{len(jobs)}] {name}", flush=True)
        try:
            measured = job.run()
        except Exception as error:
            # A failing part does not keep the others from being measured; a smaller machine
            # measures less, which is no failure. For a CPU torch has no error type of its own.
            lacks_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
            lacks_memory |= "DefaultCPUAllocator" in str(error)
            left_out, failed = left_out or lacks_memory, failed or not lacks_memory
            told = str(error) or type(error).__name__
            note(f"{'skipped' if lacks_memory else 'FAILED'} {name}: {told}")
        else:
            for row in measured.rows:
                print(tables.line(row), flush=True)
            results.rows += measured.rows
            for told in measured.notes:
                note(told)
                failed |= told.startswith("FAILED")
        results.seconds = round(time.monotonic() - started, 1)
        if file is not None and results.rows:
            results.write(file)
    results.complete = not (failed or left_out)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
