"""Machine and versions of a result."""

from __future__ import annotations

import contextlib
import datetime
import gc
import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

import ampfast

from .results import Results

REPOSITORY = Path(__file__).resolve().parent.parent
DEFAULT_CACHE_BYTES = 32 << 20
DEFAULT_GPU_CACHE_BYTES = 64 << 20


def default_device() -> torch.device:
    """The current GPU, or the CPU of a machine without one."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def cache_bytes(device: torch.device) -> int:
    """Last cache before the memory of a GPU or of the CPU's first core, in bytes."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return getattr(properties, "L2_cache_size", 0) or DEFAULT_GPU_CACHE_BYTES
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KM")) * unit)
    return max(sizes, default=DEFAULT_CACHE_BYTES)


def available_bytes(device: torch.device) -> int | None:
    """Allocatable memory without swapping, or None where it cannot be read."""
    if device.type == "cuda":
        # Memory cached from earlier parts of the run is free, too.
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    free = _line("/proc/meminfo", "MemAvailable")
    return int(free.split()[0]) << 10 if free else None


def _line(path: str, name: str) -> str | None:
    """Value of the first line of a system's file with that name, or None."""
    with contextlib.suppress(OSError):
        found = re.search(rf"^{name}\s*:\s*(.+)$", Path(path).read_text(), re.MULTILINE)
        return found[1] if found else None
    return None


def require_memory(needed: int, device: torch.device) -> None:
    """Raises MemoryError unless so many bytes are available."""
    available = available_bytes(device)
    if available is not None and available < needed:
        raise MemoryError(f"needs {needed >> 20} MiB, {available >> 20} MiB are available")


def describe(device: torch.device) -> dict[str, Any]:
    """Facts about this machine that timings depend on; `load` is that of other processes."""
    facts: dict[str, Any] = {}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        query = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        facts = {
            "gpu": properties.name,
            "gpu_cache_bytes": cache_bytes(device),
            "gpu_capability": f"{properties.major}.{properties.minor}",
            "driver": (query or "unknown").partition("\n")[0],
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
        }
    has_affinity = hasattr(os, "sched_getaffinity")
    return facts | {
        "cpu": _line("/proc/cpuinfo", "model name") or platform.processor() or "unknown",
        "arch": platform.machine(),
        "os": platform.system(),
        # Those available to this process, where the system tells.
        "cores": len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cache_bytes": cache_bytes(torch.device("cpu")),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def _output(*command: str) -> str | None:
    """What a program prints, or None where it is missing or fails."""
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def new_results(device: torch.device) -> Results:
    """Results without rows, dated now; the commit is AMPFAST_COMMIT or git's, marked if dirty."""
    git = ("git", "-C", str(REPOSITORY), "describe", "--always", "--abbrev=12", "--dirty")
    triton = None
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        triton = importlib.metadata.version("triton")
    return Results(
        machine=describe(device),
        torch=torch.__version__,
        triton=triton,
        ampfast=ampfast.__version__,
        commit=os.environ.get("AMPFAST_COMMIT") or _output(*git, "--exclude=*"),
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    )
