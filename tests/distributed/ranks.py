"""Runs a function on several gloo ranks, forked from one process that has imported torch."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Imported once: each rank would need seconds for each of them.
_PRELOADED = [
    "torch",
    "torch._dynamo",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.tensor.parallel",
    "ampfast",
    "numpy",
    "pytest",
]
# Timeouts of a rank for another one, and of a test for its ranks: far above the time needed on a
# busy machine.
COLLECTIVE_SECONDS = 200.0
JOB_SECONDS = 600.0
# Seconds for ranks that do not end to dump their tracebacks.
DUMP_SECONDS = 5.0


@dataclass(frozen=True)
class Outcome:
    """Result or failure of a job on one rank.

    Attributes:
        value: Return value of the job.
        error: The exception as "Type: message", "exit code N" of a process that died, or
            "still running".
        details: Traceback, or stack of a rank that did not end; then its output.
    """

    value: Any = None
    error: str | None = None
    details: str = ""


class RanksFailedError(AssertionError):
    """Error with the failures of all ranks."""


def run(job: Callable[..., Any], *args: Any, ranks: int = 2) -> Any:
    """Runs `job(*args)` on every rank of a new gloo world and returns the values by rank.

    Args:
        job: Importable function, which asks `torch.distributed` for its rank.
        *args: Picklable arguments.
        ranks: World size.

    Raises:
        RanksFailedError: If a rank raises, dies or does not end.
    """
    outcomes = attempt(job, *args, ranks=ranks)
    failed = [f"rank {i}: {o.error}\n{o.details}" for i, o in enumerate(outcomes) if o.error]
    if failed:
        raise RanksFailedError("\n".join(failed))
    return [outcome.value for outcome in outcomes]


def run_each(job: Callable[..., Any], cases: Sequence[tuple[Any, ...]], ranks: int = 2) -> Any:
    """Runs `job(*case)` for each case in one world, which needs a second or two to begin.

    Returns the values by case, of each those by rank.
    """
    return list(zip(*run(_each, job, cases, ranks=ranks), strict=True))


def _each(job: Callable[..., Any], cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    values = []
    for case in cases:
        try:
            values.append(job(*case))
        except Exception as error:
            raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error
    return values


def attempt(job: Callable[..., Any], *args: Any, ranks: int = 2) -> list[Outcome]:
    """As `run`, but returns the outcome of every rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    # Not by the pipes of multiprocessing, which would share tensors through memory files.
    work = pickle.dumps((job, args))
    pipes, processes = [], []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(ranks):
                here, there = context.Pipe()
                args = work, rank, ranks, folder, there
                process = context.Process(target=_rank, args=args, daemon=True)
                process.start()
                there.close()
                pipes.append(here)
                processes.append(process)
            return _outcomes(pipes, processes, Path(folder))
        finally:
            for pipe in pipes:
                pipe.close()
            for process in processes:
                process.join(2)
                process.kill()
                process.join()


def _outcomes(pipes: list[Connection], processes: list[Any], folder: Path) -> list[Outcome]:
    outcomes: dict[int, Outcome] = {}
    deadline = time.monotonic() + JOB_SECONDS
    while len(outcomes) < len(pipes) and (left := deadline - time.monotonic()) > 0:
        for pipe in wait([p for i, p in enumerate(pipes) if i not in outcomes], left):
            rank = pipes.index(pipe)
            try:
                outcomes[rank] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                processes[rank].join()
                outcomes[rank] = Outcome(
                    error=f"exit code {processes[rank].exitcode}", details=_log(folder, rank)
                )
    stuck = [rank for rank in range(len(pipes)) if rank not in outcomes]
    for rank in stuck:
        os.kill(processes[rank].pid, signal.SIGUSR1)
    if stuck:
        time.sleep(DUMP_SECONDS)
    for rank in stuck:
        outcomes[rank] = Outcome(error="still running", details=_log(folder, rank))
        processes[rank].kill()
    return [outcomes[rank] for rank in range(len(pipes))]


def _log(folder: Path, rank: int) -> str:
    path = folder / f"rank{rank}"
    return path.read_text(errors="replace")[-20_000:] if path.exists() else ""


def _rank(work: bytes, rank: int, ranks: int, folder: str, pipe: Connection) -> None:
    log = os.open(Path(folder, f"rank{rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    # Also gloo's threads, which the Python traceback of a crash lacks.
    torch._C._set_print_stack_traces_on_fatal_signal(True)
    # The ranks share the cores.
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    # A rank that fails must not end while another still connects to it.
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    try:
        dist.init_process_group(
            "gloo",
            init_method=Path(folder, "store").as_uri(),
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=COLLECTIVE_SECONDS),
        )
        job, args = pickle.loads(work)
        outcome = pickle.dumps(Outcome(job(*args)))
    except Exception as error:
        sys.stderr.flush()
        said = f"{type(error).__name__}: {error}"
        details = f"{traceback.format_exc()}{_log(Path(folder), rank)}"
        pipe.send_bytes(pickle.dumps(Outcome(error=said, details=details)))
        # The end of this process signals the others.
        return
    pipe.send_bytes(outcome)
    # Data sent to the others is lost if this process ends before they have read it.
    wait([pipe])
