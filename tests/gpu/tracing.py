"""Launches, copies and host syncs of a call, as the profiler sees them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

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
