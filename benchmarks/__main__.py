"""Command line: measures, or makes a page, comparison or picture of results."""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ampfast import backends

from . import (
    clipping,
    commands,
    growth,
    host_time,
    kernels,
    memory,
    mlp_amp,
    outputs,
    plot,
    ranks,
    real_loops,
    report,
    steps,
    terminal,
    tracking,
    training,
    whole_files,
)
from .cases import CASES, GradCase
from .device_time import CudaQueue
from .ending import Request, requests_to_end
from .harness import FULL, GPU_FULL, GPU_QUICK, QUICK, Effort, Job, Measured
from .machine import default_device, new_results
from .outputs import Outputs
from .results import Results
from .rows import dtype_name
from .terminal import Terminal

# In the order of a run: the most informative parts come first, in case the time is up.
SUBJECTS = (
    *("loops", "host", "mlp", "training", "growth"),
    *("kernels", "steps", "clip", "tracking", "memory", "ranks"),
)
INTERRUPTED = 130
# Seconds after which a run on a GPU starts no further part.
GPU_LIMIT_S = {False: 330.0, True: 105.0}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments and arguments[0] in commands.COMMANDS:
        return commands.run(arguments[0], arguments[1:])
    return _bench(arguments)


def _bench(arguments: Sequence[str]) -> int:
    started = time.monotonic()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measures ampfast against torch, after comparing their results.",
        epilog="Result files are the input of `python -m benchmarks page`, `compare`, `readme` and "
        "`plot`; each has a --help.",
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
        help=f"gradient lists, but of loops, host and memory, comma-separated: {','.join(CASES)}",
    )
    dtypes = {dtype_name(dtype): dtype for dtype in kernels.DTYPES}
    parser.add_argument(
        "--dtypes",
        type=_names_among(tuple(dtypes)),
        metavar="DTYPES",
        help=f"dtypes of kernels, steps, clip and tracking, comma-separated: {','.join(dtypes)}",
    )
    parser.add_argument(
        "--device", type=_device, help="cpu or cuda (default: the GPU of a machine that has one)"
    )
    parser.add_argument("--threads", type=_positive, metavar="N", help="threads of torch and ours")
    parser.add_argument(
        "--limit", type=_positive, metavar="SECONDS", help="start no further part after this time"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="FOLDER",
        help=f"write {outputs.JSON}, {outputs.CSV}, {outputs.PAGE} and pictures there; "
        f"earlier results go to its folder {outputs.EARLIER}",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows and goals there")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write rows there")
    parser.add_argument(
        "--plot",
        type=commands.ends_in(plot.ENDING),
        metavar="FILE",
        help=f"draw the kernels there, in a file that ends in {plot.ENDING}",
    )
    options = parser.parse_args(arguments)
    files = [path for path in (options.json, options.csv, options.plot) if path is not None]
    if len({path.resolve() for path in files}) < len(files):
        parser.error("--json, --csv and --plot must name different files")
    device = options.device or default_device()
    try:
        backends.default_for(device)
        if options.folder is not None:
            options.folder.mkdir(parents=True, exist_ok=True)
        whole_files.require_writable(files, [] if options.folder is None else [options.folder])
    except (OSError, RuntimeError, ValueError) as error:
        parser.error(str(error))

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    on_gpu = device.type == "cuda"
    shown = terminal.make()
    written = Outputs(shown.line, options.folder, options.json, options.csv, options.plot)
    effort = _effort(options.quick, on_gpu)
    results = new_results(device)
    results.asked = {
        "subjects": list(options.only),
        "quick": options.quick,
        "seconds for a comparison": effort.comparison_s,
        **({"lists": list(options.cases)} if options.cases else {}),
        **({"dtypes": list(options.dtypes)} if options.dtypes else {}),
    }
    # Incomplete until the last job is done, so a run that is cut off leaves a file that says so.
    results.complete = False
    if results.disturbance:
        shown.line(results.disturbance)
    limit = options.limit or (GPU_LIMIT_S[options.quick] if on_gpu else None)
    chosen = tuple(dtypes[name] for name in options.dtypes) if options.dtypes else None
    exit_code = INTERRUPTED
    with requests_to_end() as request:
        try:
            jobs = _jobs(options.only, device, effort, options.cases, chosen)
            exit_code = _run(jobs, results, shown, written, Clock(started, limit), request)
        except KeyboardInterrupt:
            shown.line("stopped; results so far follow")
        finally:
            request.hold()
            written.finish(results)
    report.show(results, shown.table)
    for note in results.notes:
        shown.line(note)
    return max(exit_code, int(written.failed))


@dataclass(frozen=True)
class Clock:
    """Seconds since the start of a run, and their limit."""

    started: float
    limit: float | None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    @property
    def is_up(self) -> bool:
        return self.limit is not None and self.seconds > self.limit


def _effort(quick: bool, on_gpu: bool) -> Effort:
    if on_gpu:
        return GPU_QUICK if quick else GPU_FULL
    return QUICK if quick else FULL


def _jobs(
    subjects: Sequence[str],
    device: torch.device,
    effort: Effort,
    cases: tuple[str, ...] | None,
    dtypes: tuple[torch.dtype, ...] | None,
) -> list[tuple[str, Job]]:
    on_gpu = device.type == "cuda"
    queue = CudaQueue(device) if on_gpu else None
    lists = kernels.chosen(effort, device, cases, dtypes)

    def for_each_list(
        measure: Callable[..., Measured], lists: list[tuple[GradCase, torch.dtype]] = lists
    ) -> list[Job]:
        return [
            Job(
                f"{case.name} {dtype_name(dtype)}",
                functools.partial(measure, case, dtype, device, effort, queue),
            )
            for case, dtype in lists
        ]

    jobs_of: dict[str, Callable[[], list[Job]]] = {
        # On a GPU, "training" has them.
        "loops": lambda: [] if on_gpu else real_loops.jobs(effort),
        "host": lambda: host_time.jobs(effort, device, queue),
        "kernels": lambda: for_each_list(kernels.measure),
        "steps": lambda: for_each_list(steps.measure),
        "clip": lambda: for_each_list(clipping.measure),
        "tracking": lambda: for_each_list(tracking.measure, tracking.chosen(lists, on_gpu, cases)),
        # Memory of the process besides the gradients is measured on a CPU.
        "memory": lambda: [] if on_gpu else memory.jobs(effort),
        "ranks": lambda: ranks.jobs(effort, device, cases),
        "mlp": lambda: mlp_amp.jobs(effort.quick, device, queue),
        "training": lambda: training.jobs(effort, device, queue),
        "growth": lambda: growth.jobs(effort, device, queue),
    }
    return [(f"{subject}: {job.label}", job) for subject in subjects for job in jobs_of[subject]()]


def _run(
    jobs: Sequence[tuple[str, Job]],
    results: Results,
    shown: Terminal,
    written: Outputs,
    clock: Clock,
    request: Request,
) -> int:
    """Runs the jobs into `results`, which keeps its rows after a failure or Ctrl-C."""
    failed = left_out = False
    for name, job in shown.progress(jobs):
        if clock.is_up:
            left_out = True
            _note(results, shown, f"left out {name}: the time is up")
            continue
        try:
            request.check()
            measured = job.run()
        except KeyboardInterrupt:
            _note(results, shown, f"stopped at {name}; results so far follow")
            return INTERRUPTED
        except Exception as error:
            # A failing part does not keep the others from being measured.
            told = str(error) or type(error).__name__
            if _is_of_memory(error):
                # A smaller machine measures less, which is no failure.
                left_out = True
                _note(results, shown, f"skipped {name}: {told}")
            else:
                failed = True
                _note(results, shown, f"FAILED {name}: {told}")
        else:
            results.rows += measured.rows
            results.goals += measured.goals
            results.notes += [note for note in measured.notes if note not in results.notes]
        results.seconds = clock.seconds
        written.keep(results)
    results.complete = not (failed or left_out)
    return 1 if failed else 0


def _is_of_memory(error: Exception) -> bool:
    """Whether an error means too little memory; for a CPU torch has no error type of its own."""
    of_cpu = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return of_cpu or isinstance(error, (MemoryError, torch.OutOfMemoryError))


def _note(results: Results, shown: Terminal, text: str) -> None:
    results.notes.append(text)
    shown.line(text)


def _names_among(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    """argparse type of a comma-separated choice, in the order of `known`."""

    def names(text: str) -> tuple[str, ...]:
        given = text.split(",")
        unknown = [name for name in given if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(
                f"{', '.join(map(repr, unknown))} is not among {', '.join(known)}"
            )
        return tuple(name for name in known if name in given)

    return names


def _device(text: str) -> torch.device:
    if text == "cpu":
        return torch.device("cpu")
    if text != "cuda":
        raise argparse.ArgumentTypeError(f"must be cpu or cuda, got {text!r}")
    if not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("torch sees no GPU")
    return default_device()


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


if __name__ == "__main__":
    sys.exit(main())
