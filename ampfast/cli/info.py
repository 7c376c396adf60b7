"""Installed versions, available backends and the backend of each device."""

import importlib.metadata
import json
import os
import platform
import sys
from dataclasses import asdict
from typing import Any

import torch

import ampfast
from ampfast import backends
from ampfast.backends import core, cuda


def run() -> int:
    """Prints the result of :func:`collect` as JSON; returns the exit code 0."""
    print(json.dumps(collect(), indent=2))
    print("python -m ampfast check compares it with torch on this machine.", file=sys.stderr)
    return 0


def collect() -> dict[str, Any]:
    """Collects the facts that ``python -m ampfast info`` prints.

    Returns:
        A dict of plain values.

        - ``versions``: ``ampfast``, ``python``, ``platform``, ``torch``, torch's ``cuda`` and
          ``hip``, and ``triton``; None for a missing one.
        - ``extension``: the ``torch`` that the compiled core was built for, its
          instruction set (``cpu_capability``) and its CUDA kernels (``cuda_kernels``: "built" or
          "not built").
        - ``devices``: for the CPU and each GPU ``device`` ("cpu", "cuda:0"), ``properties``
          (torch's text), ``backend`` (None on an error) and ``error`` (None without one).
        - ``backends``: ``name``, ``available``, ``reason`` ("" if available) and
          ``device_types`` (empty for all) of each.
        - ``AMPFAST_BACKEND``: the environment variable, or None.
    """
    return {
        "versions": {
            "ampfast": ampfast.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "torch": str(torch.__version__),
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "triton": _triton_version(),
        },
        "extension": {
            "torch": core.TORCH,
            "cpu_capability": core.CPU_CAPABILITY,
            "cuda_kernels": "not built" if cuda.missing() else "built",
        },
        "devices": _devices(),
        "backends": [
            {**asdict(report), "device_types": list(report.device_types)}
            for report in backends.report()
        ],
        "AMPFAST_BACKEND": os.environ.get("AMPFAST_BACKEND"),
    }


def _devices() -> list[dict[str, Any]]:
    threads, capability = torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()
    found = {"cpu": f"{capability}, {threads} threads"}
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        # Some accelerators have no device properties.
        describe = getattr(torch.get_device_module(accelerator), "get_device_properties", str)
        for index in range(torch.accelerator.device_count()):
            device = f"{accelerator.type}:{index}"
            found[device] = str(describe(torch.device(device)))
    return [
        {"device": device, "properties": properties, **_backend(torch.device(device))}
        for device, properties in found.items()
    ]


def _backend(device: torch.device) -> dict[str, str | None]:
    # AMPFAST_BACKEND may name a backend that does not exist or cannot run here.
    try:
        return {"backend": backends.default_for(device), "error": None}
    except (ValueError, RuntimeError) as problem:
        return {"backend": None, "error": str(problem)}


def _triton_version() -> str | None:
    # By distribution, whose name depends on the platform, without an import of triton.
    distributions = importlib.metadata.packages_distributions().get("triton", [])
    return importlib.metadata.version(distributions[0]) if distributions else None
