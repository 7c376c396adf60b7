"""Memory of a call beyond the gradients, measured in a process of its own for each call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor

from ampfast import backends, functional

from .cases import CASES, make_gradients
from .harness import Job, Measured, Setting
from .machine import require_memory
from .results import Goal, Row, Spread
from .timing import side

FULL_CASES = ("one_64m", "bert_base", "10000x256")
QUICK_CASES = ("one_16m",)

# A copy of the gradients would be 1. Below this remain the list of addresses and lengths and the
# granularity of the kernel's accounting, a few hundred KiB.
EXTRA_GOAL = 0.01
EXTRA_GOAL_FROM_BYTES = 64 << 20
CLEAR_REFS = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Usage:
    """Bytes needed by a call: of the whole process, and peak of torch's allocator."""

    list_bytes: int
    extra_bytes: int | None
    allocated_bytes: int


def jobs(on: Setting) -> list[Job]:
    """One job for each list and path."""
    names = QUICK_CASES if on.effort.quick else FULL_CASES
    backend = backends.default_for(torch.device("cpu"))
    paths = (("unscale", "torch"), ("unscale", backend), ("check", backend))
    return [
        Job(f"{name} {path} by {side(provider)}", functools.partial(measure, name, path, provider))
        for name in names
        for path, provider in paths
    ]


def measure(name: str, path: str, provider: str) -> Measured:
    """Starts a process that makes the list, calls once and reports its memory.

    Raises:
        MemoryError: If the list would not fit.
        RuntimeError: If the process failed.
    """
    needed = 2 * CASES[name].list_bytes(torch.float32) + (512 << 20)
    require_memory(needed, torch.device("cpu"))
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        usage = pool.submit(usage_of, name, path, provider).result()
    row = Row(
        *("memory", name, "float32", path, side(provider)),
        list_bytes=usage.list_bytes,
        extra_bytes=usage.extra_bytes,
        allocated_bytes=usage.allocated_bytes,
    )
    measured = Measured([row])
    # On a small list fixed costs would hide growth, or pass for it.
    large = usage.list_bytes >= EXTRA_GOAL_FROM_BYTES
    if provider != "torch" and usage.extra_bytes is not None and large:
        extra = max(usage.extra_bytes, usage.allocated_bytes) / usage.list_bytes
        ratio = Spread(extra, extra, extra)
        measured.goals.append(Goal(*row.name, "the gradients, memory", ratio, EXTRA_GOAL))
    return measured


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
