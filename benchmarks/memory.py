"""Memory of a call beyond the gradients, measured in a process of its own for each call."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from ampfast import backends, functional
from ampfast.backends import cpu

from .cases import CASES, make_gradients
from .harness import Effort, Job, Measured
from .machine import REPOSITORY, require_memory
from .results import Goal, Row

FULL_CASES = ("one_64m", "bert_base", "10000x256")
QUICK_CASES = ("one_16m",)

# A copy of the gradients would be 1. Below this remain the table (under 64 bytes for a chunk of
# some 64 KiB) and the granularity of the kernel's accounting, a few hundred KiB.
EXTRA_GOAL = 0.01
EXTRA_GOAL_FROM_BYTES = 64 << 20
TABLE_BYTES_GOAL = 64
CLEAR_REFS = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Usage:
    """Bytes needed by a call: of the whole process, and peak of torch's allocator."""

    list_bytes: int
    extra_bytes: int | None
    allocated_bytes: int


def jobs(effort: Effort) -> list[Job]:
    """One job for each list and path, and one for the table."""
    names = QUICK_CASES if effort.quick else FULL_CASES
    backend = backends.default_for(torch.device("cpu"))
    paths = (("unscale", "torch"), ("unscale", backend), ("check", backend))
    return [
        Job(
            f"{name} {path} {provider}",
            functools.partial(measure, name, path, provider),
        )
        for name in names
        for path, provider in paths
    ] + [Job(f"{name} table", functools.partial(measure_table, name)) for name in names]


def measure(name: str, path: str, provider: str) -> Measured:
    """Starts a process that makes the list, calls once and reports its memory.

    Raises:
        MemoryError: If the list would not fit.
        RuntimeError: If the process failed.
    """
    needed = 2 * CASES[name].list_bytes(torch.float32) + (512 << 20)
    require_memory(needed, torch.device("cpu"))
    command = [sys.executable, "-m", "benchmarks.memory", name, path, provider]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:])} failed: {done.stderr.strip()}")
    usage = Usage(**json.loads(done.stdout))

    measured = Measured(
        [
            Row(
                subject="memory",
                case=name,
                dtype="float32",
                path=path,
                provider=provider,
                list_bytes=usage.list_bytes,
                extra_bytes=usage.extra_bytes,
                allocated_bytes=usage.allocated_bytes,
            )
        ]
    )
    # On a small list fixed costs would hide growth, or pass for it.
    large = usage.list_bytes >= EXTRA_GOAL_FROM_BYTES
    if provider != "torch" and usage.extra_bytes is not None and large:
        extra = max(usage.extra_bytes, usage.allocated_bytes) / usage.list_bytes
        goal = Goal(
            f"{path}_, extra memory over the gradients'",
            name,
            "float32",
            "<=",
            EXTRA_GOAL,
            extra,
        )
        measured.goals.append(goal)
    return measured


def measure_table(name: str) -> Measured:
    """Size of the core's table of a list, for each chunk of work."""
    # The table holds addresses and lengths, so the addresses need no memory.
    gradients = [torch.empty(shape) for shape in CASES[name].shapes]
    grads = cpu.list_of(gradients, torch.device("cpu"))
    assert grads is not None
    table_bytes = cpu.DeviceTable.of(grads, 1, False).buffer.nbytes
    row = Row(
        subject="memory",
        case=name,
        dtype="float32",
        path="table",
        provider="cpu",
        list_bytes=CASES[name].list_bytes(torch.float32),
        table_bytes=table_bytes,
        chunks=grads.chunks,
    )
    per_chunk = table_bytes / grads.chunks
    goal = Goal("table, bytes per chunk", name, "float32", "<", TABLE_BYTES_GOAL, per_chunk)
    return Measured([row], [goal])


def usage_of(name: str, path: str, provider: str) -> Usage:
    """Calls once and measures, in a fresh process, since earlier peaks would hide this one."""
    device = torch.device("cpu")
    call = _call(path, provider, device)
    # Loads code and starts threads, whose memory does not depend on the gradients.
    call([torch.ones(1 << 16) for _ in range(4)])
    return usage_of_call(call, make_gradients(CASES[name], torch.float32, device))


def usage_of_call(call: Callable[[list[Tensor]], object], gradients: list[Tensor]) -> Usage:
    """Runs the call twice, as torch's profiler would add to the resident set."""
    before = _restart_peak()
    call(gradients)
    extra_bytes = None if before is None else max(0, _resident("VmHWM") - before)

    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        call(gradients)
    return Usage(
        list_bytes=sum(gradient.nbytes for gradient in gradients),
        extra_bytes=extra_bytes,
        allocated_bytes=_allocated_peak(profile),
    )


def _call(path: str, provider: str, device: torch.device) -> Callable[[list[Tensor]], object]:
    found_inf = torch.zeros((), device=device)
    inv_scale = torch.tensor(0.5, device=device)
    if path == "check":
        return lambda gradients: functional.check_(gradients, found_inf)
    unscale_ = (
        torch._amp_foreach_non_finite_check_and_unscale_
        if provider == "torch"
        else functional.unscale_
    )
    return lambda gradients: unscale_(gradients, found_inf, inv_scale)


def _restart_peak() -> int | None:
    """Resets the peak of the resident set; returns its current value, or None."""
    try:
        CLEAR_REFS.write_text("5")
    except OSError:
        return None
    return _resident("VmRSS")


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def _allocated_peak(profile: torch.profiler.profile) -> int:
    """Peak of allocated bytes over the events in order of time."""
    held = peak = 0
    events = profile.profiler.kineto_results.events()
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


if __name__ == "__main__":
    print(json.dumps(asdict(usage_of(*sys.argv[1:4]))))
