"""Backends: their kernels, their requirements, and the choice among them for a device."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from ampfast.backends import cpu
from ampfast.backends.gpu import DeviceKernels
from ampfast.backends.gpu import ScaleUpdate as Update
from ampfast.errors import refuse_capture

__all__ = [
    "NAMES",
    "BackendReport",
    "Choice",
    "Kernels",
    "Update",
    "choose",
    "default_for",
    "report",
    "require_known",
]

NAMES = ("triton", "cuda", "cpu", "aten")

# In order of preference.
_GPU_NAMES = ("triton", "cuda")
_LAUNCHERS = {"triton": "ampfast.backends.triton.launch", "cuda": "ampfast.backends.cuda"}
_LEAST_CAPABILITY = (7, 5)
_NO_GPU = "torch sees no GPU"
_REMEDIES = {
    "triton": "pip install 'triton>=3.6'",
    "cuda": "install ampfast again where nvcc and a CUDA build of torch are",
}


class Kernels(Protocol):
    """Kernels of a backend; arguments and results are those of `backends.cpu`."""

    unscale_: Callable[..., Tensor]
    norms: Callable[..., Tensor]
    check_: Callable[..., Tensor]
    measure_: Callable[[cpu.GradList, Tensor], None]
    clip_coefficient: Callable[..., None]
    scale_update: Callable[..., Update | None]  # None on a CPU, where no update rides in a pass
    update_scale_: Callable[..., bool]


@dataclass(frozen=True)
class BackendReport:
    """One backend on this machine.

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


class Choice:
    """The kernels for gradients on each type of device, where one backend was asked for or none.

    A named backend decides for the devices that it serves; the others keep their default, so that
    gradients in mixed places work. "aten" serves all. Under TRITON_INTERPRET=1 "triton" serves CPU
    tensors, and those on a GPU take the next backend.

    Args:
        name: The backend that was asked for, or None.
    """

    def __init__(self, name: str | None) -> None:
        self._name = name
        if name == "aten":
            self._on_cpu = "aten"
        else:
            self._on_cpu = "triton" if name == "triton" and _is_interpreted() else "cpu"
        self._cpu_kernels = _kernels(self._on_cpu)
        self._serves_gpus = True

    @property
    def devices(self) -> int:
        """The device types whose gradients go through kernels, as a bit set for the core.

        No GPUs any more once one of them turned out to have no kernels.
        """
        if self._name == "aten":
            return 0
        return cpu.CPU | cpu.CUDA if self._serves_gpus else cpu.CPU

    def name_for(self, device: torch.device) -> str:
        """Returns the name of the backend for a device; "aten" where no kernel knows it.

        Args:
            device: Where the gradients are.

        Raises:
            RuntimeError: If the backend that was asked for turns out not to run on it.
        """
        if device.type == "cpu":
            return self._on_cpu
        return (
            "aten" if device.type != "cuda" or self._name == "aten" else self._on_gpu(device.index)
        )

    def kernels_for(self, device: torch.device) -> Kernels | None:
        """Returns the kernels for a device, or None where torch's own ops must do.

        Args:
            device: Where the gradients are.

        Raises:
            RuntimeError: As `name_for`.
        """
        if device.type == "cpu":
            return self._cpu_kernels
        kernels = _kernels(self.name_for(device))
        if kernels is None and device.type == "cuda":
            self._serves_gpus = False
        return kernels

    def _on_gpu(self, index: int | None) -> str:
        if index is None:
            index = _current_gpu()
        if self._name in _GPU_NAMES and not (self._name == "triton" and _is_interpreted()):
            if reason := _why_not(self._name) or _why_it_fails(self._name, index):
                raise RuntimeError(f"backend {self._name!r} cannot run here: {reason}")
            return self._name
        return _default_on_gpu(index)


def report() -> list[BackendReport]:
    """Returns a report on every backend, in the order of `NAMES`."""
    return [_report(name) for name in NAMES]


def default_for(device: torch.device) -> str:
    """Returns the name of the backend that gradients on `device` get where none is asked for.

    `AMPFAST_BACKEND` is heeded. Gradients on a device that no kernel knows take torch's own op,
    which is the backend "aten".

    Args:
        device: Where they are.

    Raises:
        ValueError: If `AMPFAST_BACKEND` names no backend.
        RuntimeError: If it names one that cannot run here.
    """
    return choose().name_for(device)


def choose(name: str | None = None) -> Choice:
    """Returns the kernels to use; does not touch a GPU.

    Args:
        name: A backend, or None for `AMPFAST_BACKEND` and else the default.

    Raises:
        TypeError: If `name` is neither a string nor None.
        ValueError: If `name` or `AMPFAST_BACKEND` is not in `NAMES`.
        RuntimeError: If that backend cannot run here.
    """
    if name is None:
        return _choice("AMPFAST_BACKEND", os.environ.get("AMPFAST_BACKEND") or None)
    require_known(name)  # first: what is no string may not be hashable either
    return _choice("backend", name)


def require_known(name: str | None, source: str = "backend") -> None:
    """Checks the name of a backend.

    Args:
        name: The name, or None.
        source: Where it comes from, for the message.

    Raises:
        TypeError: If it is neither a string nor None.
        ValueError: If it is not in `NAMES`.
    """
    if name is not None and not isinstance(name, str):
        raise TypeError(f"{source} must be a string or None, got {type(name).__name__}")
    if name is not None and name not in NAMES:
        raise ValueError(f"{source} must be one of {', '.join(NAMES)}, got {name!r}")


@cache
def _choice(source: str, name: str | None) -> Choice:
    require_known(name, source)
    if name in _GPU_NAMES and (reason := _why_not(name)):
        raise RuntimeError(f"{source} {name!r} cannot run here: {reason}")
    return Choice(name)


def _report(name: str) -> BackendReport:
    if name not in _GPU_NAMES:
        return BackendReport(name, True, "", ("cpu",) if name == "cpu" else ())
    reason = _why_not(name) or _why_it_fails(name, _current_gpu())
    interpreted = name == "triton" and not reason and _is_interpreted()
    return BackendReport(name, not reason, reason, ("cpu",) if interpreted else ("cuda",))


@cache
def _launcher(name: str) -> ModuleType:
    return importlib.import_module(_LAUNCHERS[name])


@cache
def _kernels(name: str) -> Kernels | None:
    if name == "aten":
        return None
    if name == "cpu":
        return cast(Kernels, cpu)
    return cast(Kernels, DeviceKernels(cast(Any, _launcher(name))))


def _is_interpreted() -> bool:
    return bool(_launcher("triton").INTERPRETED)


@cache
def _why_not(name: str) -> str:
    """Why a GPU backend cannot run, as far as it can be told without a launch."""
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        return _NO_GPU
    try:
        launcher = _launcher(name)
    except ImportError as error:
        return f"{error}; {_REMEDIES[name]}"
    is_interpreted = name == "triton" and launcher.INTERPRETED
    return "" if has_gpu or is_interpreted else _NO_GPU


def _current_gpu() -> int | None:
    return torch.cuda.current_device() if torch.cuda.is_available() else None


@cache
def _why_it_fails(name: str, index: int | None) -> str:
    """Tries the kernels on one gradient: whether they compile shows only then.

    Each GPU is tried for itself, as they may differ; interpreted kernels on the CPU.
    """
    device = torch.device("cpu")
    if not (name == "triton" and _is_interpreted()):
        device = torch.device(f"cuda:{index}")
        refuse_capture("the first launch")
        capability = torch.cuda.get_device_capability(device)
        if torch.version.hip is None and capability < _LEAST_CAPABILITY:
            least = ".".join(map(str, _LEAST_CAPABILITY))
            return f"{device} has compute capability below {least}"
    try:
        # In a thread of its own: no mode of the caller's counts there.
        with ThreadPoolExecutor(1) as aside:
            return aside.submit(_try_out, name, device).result()
    except Exception as error:  # a compiler fails in many ways
        return f"its kernel does not run: {type(error).__name__}: {error}".splitlines()[0]


def _try_out(name: str, device: torch.device) -> str:
    gradient = torch.full((3,), 8.0, dtype=torch.float32, device=device)
    scale = torch.full((), 4.0, dtype=torch.float32, device=device)
    grads = cpu.list_of([gradient], device)
    if grads is None:
        raise RuntimeError("tensors are not plain ones here")
    found_inf = DeviceKernels(cast(Any, _launcher(name))).unscale_(grads, scale, is_scale=True)
    seen = torch.cat([gradient, found_inf.reshape(1)])
    if device.type == "cuda":
        held = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        try:
            seen = seen.cpu()
        finally:
            torch.cuda.set_sync_debug_mode(held)
    if seen.tolist() != [2.0, 2.0, 2.0, 0.0]:
        return f"its kernel unscaled 8 by 4 to {seen[:3].tolist()} with found_inf {seen[3].item()}"
    return ""


@cache
def _default_on_gpu(index: int | None) -> str:
    for name in _GPU_NAMES:
        reason = _why_not(name)
        if not reason and name == "triton" and _is_interpreted():
            reason = "TRITON_INTERPRET is set, and interpreted kernels are for CPU tensors"
        reason = reason or _why_it_fails(name, index)
        if not reason:
            return name
        if reason != _NO_GPU:
            _warn_once(f"ampfast does without its backend {name!r}: {reason}")
    return "aten"


@cache
def _warn_once(message: str) -> None:
    """Warns once of what several GPUs have in common."""
    warnings.warn(message, stacklevel=3)
