"""Which kernels a device gets: the backends, what they need, and the choice among them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache

import torch

from ampfast.backends import native

__all__ = ["NAMES", "BackendReport", "default_for", "device_set", "report", "require_known"]

NAMES = ("triton", "cuda", "cpu", "aten")


@dataclass(frozen=True)
class BackendReport:
    """What one backend is good for on this machine.

    Attributes:
        name: One of `NAMES`.
        available: Whether it can run here.
        reason: Why not; empty where it can.
        device_types: The `torch.device` types whose gradients it takes; empty for all.
    """

    name: str
    available: bool
    reason: str
    device_types: tuple[str, ...]


def report() -> list[BackendReport]:
    """Returns a report on every backend, in the order of `NAMES`."""
    without_kernels = "this version of ampfast has no GPU kernels"
    return [
        BackendReport("triton", False, without_kernels, ("cuda",)),
        BackendReport("cuda", False, without_kernels, ("cuda",)),
        BackendReport("cpu", True, "", ("cpu",)),
        BackendReport("aten", True, "", ()),
    ]


def default_for(device: torch.device) -> str:
    """Returns the name of the backend that gradients on `device` get where none is asked for.

    `AMPFAST_BACKEND` is heeded. Gradients on a device that no kernel knows take torch's own op,
    which is the backend "aten".

    Raises:
        ValueError: If `AMPFAST_BACKEND` names no backend.
        RuntimeError: If it names one that cannot run here.
    """
    return "cpu" if device.type == "cpu" and device_set() else "aten"


def device_set(name: str | None = None) -> int:
    """Returns the device types whose gradients go through kernels, as a bit set for the core.

    A named backend decides for the devices that it serves; the others keep their default, so that
    gradients in mixed places work. "aten" serves all.

    Args:
        name: A backend, or None for `AMPFAST_BACKEND` and else the default.

    Raises:
        TypeError: If `name` is neither a string nor None.
        ValueError: If `name` or `AMPFAST_BACKEND` is not in `NAMES`.
        RuntimeError: If that backend cannot run here.
    """
    if name is None:
        return _device_set("AMPFAST_BACKEND", os.environ.get("AMPFAST_BACKEND") or "cpu")
    require_known(name)
    return _device_set("backend", name)


def require_known(name: str | None, source: str = "backend") -> None:
    """Raises the TypeError or ValueError of `device_set` unless `name` is None or in `NAMES`."""
    if name is not None and not isinstance(name, str):
        raise TypeError(f"{source} must be a string or None, got {type(name).__name__}")
    if name is not None and name not in NAMES:
        raise ValueError(f"{source} must be one of {', '.join(NAMES)}, got {name!r}")


@cache
def _device_set(source: str, name: str) -> int:
    require_known(name, source)
    entry = next(entry for entry in report() if entry.name == name)
    if not entry.available:
        raise RuntimeError(f"{source} {name!r} cannot run here: {entry.reason}")
    return 0 if name == "aten" else native.DEVICES
