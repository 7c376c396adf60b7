"""The machine and the versions that a result belongs to."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import ampfast

from .results import Results

REPOSITORY = Path(__file__).resolve().parent.parent
DEFAULT_CACHE_BYTES = 32 << 20


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cache_bytes() -> int:
    """The last-level cache of the first core, or a usual size where it cannot be read."""
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KM")) * unit)
    return max(sizes, default=DEFAULT_CACHE_BYTES)


def available_bytes() -> int | None:
    """Memory that can be allocated without swapping, or None where it cannot be read."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else None


def describe() -> dict[str, Any]:
    """The facts about this machine that timings depend on; `load` is what else was running."""
    return {
        "cpu": _cpu_name(),
        "arch": platform.machine(),
        "os": platform.system(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "cache_bytes": cache_bytes(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def new_results() -> Results:
    """Results without rows, dated now."""
    return Results(
        machine=describe(),
        torch=torch.__version__,
        triton=_triton_version(),
        ampfast=ampfast.__version__,
        commit=_commit(),
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    )


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def _triton_version() -> str | None:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit that was measured, marked if tracked files differ from it; None without one."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(REPOSITORY), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None
