"""Cost of a step on a GPU: launches, copies and host syncs; and many launches in a row."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import check_epilogues
from gpu_support import Twin, kernels_of, no_syncs
from support.kernels import grads_of, run_check
from torch.profiler import ProfilerActivity, profile, record_function

from ampfast import _C, GradScaler


@pytest.fixture
def profiler() -> None:
    if reason := why_profiler_is_blind():
        pytest.skip(reason)


def started(backend: str, device: torch.device, kind: str, **options: Any) -> Twin:
    """Loop after steps of every way, over gradients of one dtype with fixed memory."""
    loop = Twin(GradScaler(backend=backend, **options), kind, device)
    loop.feed(0)
    ways = ("step", "together", "clip") + (("defer",) if "fused" in kind else ())
    for way in ways * 3:
        loop.iterate(way)
    return loop


def assert_counts(counts: Counts, kernels: int, syncs: int = 0) -> None:
    assert len(counts.kernels) == kernels, counts
    assert len(counts.syncs) == syncs, counts
    # Every host sync is a copy to the host; nothing else is copied.
    assert len(counts.copies) == syncs, counts


@pytest.mark.usefixtures("profiler")
@pytest.mark.parametrize("track", [None, "overflow"])
def test_kernels_and_syncs_of_a_step(backend: str, device: torch.device, track: Any) -> None:
    plain = started(backend, device, "quiet", track=track)
    assert_counts(counted(plain.iterate), kernels=3, syncs=1)
    assert_counts(counted(lambda: plain.iterate("together")), kernels=2, syncs=1)
    fused = started(backend, device, "quiet_fused", track=track)
    apart = counted(fused.iterate)
    assert len(apart.kernels) <= 5, apart
    assert_counts(apart, kernels=len(apart.kernels))
    assert_counts(counted(lambda: fused.iterate("together")), kernels=len(apart.kernels) - 1)


@pytest.mark.usefixtures("profiler")
def test_one_launch_for_any_number_of_tensors(backend: str, device: torch.device) -> None:
    """A long new table is one copy without a wait, a short one none."""
    kernels = kernels_of(backend, device)
    for count, copies in ((1, 0), (50, 0), (10_000, 1)):
        memory = torch.ones(4 * count, device=device)
        first, second = (list(tensors.split(2)) for tensors in memory.view(2, -1))
        run_check(kernels, grads_of(first))
        counts = counted(partial(lambda grads: run_check(kernels, grads_of(grads)), second))
        assert len(counts.kernels) == 1 and len(counts.copies) == copies, counts
        assert all("HtoD" in copy and "Pinned" in copy for copy in counts.copies), counts
        assert not counts.syncs, counts


@pytest.mark.parametrize(
    "options", [{}, {"track": "overflow"}, {"track": "norms"}, {"skip_above": 1e6}], ids=str
)
@pytest.mark.parametrize("way", ["step", "together", "clip", "defer"])
@pytest.mark.parametrize("kind", ["fused_sgd", "fused_adam", "fused_adamw", "quiet_fused"])
def test_nothing_waits_for_the_device(
    backend: str, device: torch.device, kind: str, way: str, options: dict[str, Any]
) -> None:
    loop = started(backend, device, kind, **options)
    with no_syncs():
        for step in range(6):
            if step > 2:  # at other addresses
                for p in loop.params[0]:
                    p.grad = torch.full_like(p, 64.0)
            loop.iterate(way)
    assert not loop.scaler.step_skipped(loop.optimizers[0])


def test_many_launches_find_every_infinity(backend: str, device: torch.device) -> None:
    """100,000 epilogues, each with an infinity in a random program or none."""
    programs = 8 * torch.cuda.get_device_properties(device).multi_processor_count
    elements = programs * _C.WINDOW_BYTES // 2
    check_epilogues(kernels_of(backend, device), device, elements, 100_000, 2_000)


MARK = "ampfast_counted"


@dataclass
class Counts:
    """Names of events, in order of time."""

    kernels: list[str] = field(default_factory=list)
    copies: list[str] = field(default_factory=list)
    syncs: list[str] = field(default_factory=list)


def counts_in(events: Iterable[Mapping[str, Any]]) -> Counts:
    """Counts of a Chrome trace: all device events, host events inside the mark."""
    complete = sorted(
        (event for event in events if event.get("ph") == "X"), key=lambda event: event["ts"]
    )
    marks = [e for e in complete if e["name"] == MARK and e.get("cat") == "user_annotation"]
    [(begin, end)] = [(mark["ts"], mark["ts"] + mark["dur"]) for mark in marks]
    counts = Counts()
    for event in complete:
        kind, name = event.get("cat"), event["name"]
        if kind == "kernel":
            counts.kernels.append(name)
        elif kind in ("gpu_memcpy", "gpu_memset"):
            counts.copies.append(name)
        elif "Synchronize" in name and begin <= event["ts"] <= end:
            counts.syncs.append(name)
    return counts


def counted(call: Callable[[], object]) -> Counts:
    """Runs `call` under the profiler, alone on the device."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        with record_function(MARK):
            call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        return counts_in(json.loads(path.read_text())["traceEvents"])


@cache
def why_profiler_is_blind() -> str:
    """Reason why kernels cannot be counted here, or an empty text."""
    x = torch.ones(3, device="cuda")
    counted(lambda: x.add_(1))  # the first use starts tracing, which may lose events
    seen = counted(lambda: x.add_(1).sum().item())
    if len(seen.kernels) < 2 or not seen.syncs:
        return f"the profiler does not see kernels and syncs here: {seen}"
    return ""
