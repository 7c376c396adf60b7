"""Collectives of a call, as the profiler sees gloo's."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

_BYTES = {"float": 4, "double": 8, "c10::Half": 2, "int": 4, "long int": 8, "unsigned char": 1}


def sent(call: Callable[[], object]) -> list[tuple[str, int]]:
    """Runs `call`; returns its collectives in order, with the bytes sent by a rank."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    events = [e for e in events if e.get("ph") == "X" and e["name"].startswith("gloo:")]
    return [_collective(event) for event in sorted(events, key=lambda event: event["ts"])]


def _collective(event: dict) -> tuple[str, int]:
    said = event["args"]
    pairs = zip(said.get("Input Dims", []), said.get("Input type", []), strict=True)
    return event["name"], sum(math.prod(shape) * _BYTES[kind] for shape, kind in pairs)
