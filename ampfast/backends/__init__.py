"""Backends: kernels, requirements, and the choice among them for a device."""

from __future__ import annotations

import importlib
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from types import ModuleType
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from ampfast.backends import aten, core, scalars
from ampfast.backends.core import Clip, Factor, Pass, Update, compiled
from ampfast.backends.cuda_graphs import refuse_capture
from ampfast.backends.gpu import DeviceKernels

__all__ = [
    "NAMES",
    "TORCH_OPS",
    "BackendReport",
    "Choice",
    "Kernels",
    "choose",
    "default_for",
    "report",
    "require_known",
]

# The launchers of GPU kernels, in order of preference: a launch of the CUDA kernels takes the host
# less time, and no compilation. Each is a module, imported when it is asked for, with:
#   multi_tensor(pass, table, segment, is_last), a launch over a segment of a `DeviceTable`
#   clip_coefficient(clip) and update_scale(update), whose flags are one to four
#   is_capturing(), whether a graph captures the current stream
# and, if it needs them:
#   missing(), what it lacks besides a GPU, as a text
#   load(device), before a device's first launch
#   prepare(...), as multi_tensor, before the launches of several segments, what may fail in them
#   limit_programs(programs), for tests and measurements; INTERPRETED, of Triton's
_LAUNCHERS = {"cuda": "ampfast.backends.cuda", "triton": "ampfast.backends.triton.launch"}
NAMES = (*_LAUNCHERS, "cpu", "aten")

# Older GPUs are none that CUDA 12 compiles for, or that Triton supports.
_LEAST_CAPABILITY = {"cuda": (7, 0), "triton": (8, 0)}
_NO_GPU = "torch sees no GPU"
_TRITON_NEEDS = "; at run time Triton needs a C compiler and Python's headers (python3-dev)"
_INTERPRETED = "TRITON_INTERPRET is set, and interpreted kernels are for CPU tensors"
_REMEDIES = {
    "triton": "pip install 'triton>=3.6'",
    "cuda": "install a wheel of ampfast, or from source where nvcc is",
}


class Kernels(Protocol):
    """Kernels of a backend over gradient lists of a device."""

    def run(self, grads: Any, work: Pass, /) -> Tensor:
        """Runs a pass over a list.

        Args:
            grads: The list.
            work: The pass.

        Returns:
            Its found_inf.
        """

    def clip(self, clip: Clip, /) -> None:
        """Writes norm, clip coefficient and divisor, and the flag of a spike.

        Formula: torch.nn.utils.clip_grad_norm_, here in float64.

        Args:
            clip: The clipping.
        """

    def update(self, update: Update, /) -> bool | None:
        """Writes the next scale and growth tracker in place, and records the step in the state.

        Args:
            update: The update.

        Returns:
            Whether it was done; else nothing was written, and torch's op does it.
        """


# The kernels of every device, and of CPUs; the compiled core has its own for CPUs.
TORCH_OPS = cast(Kernels, aten)
cpu = cast(Kernels, compiled)
# The kernels of each backend that was asked for.
_kernels: dict[str, Kernels] = {"aten": TORCH_OPS, "cpu": cpu}


@dataclass(frozen=True)
class Support:
    """Whether a backend can serve, and else why not.

    Attributes:
        reason: Why it cannot; else empty.
    """

    reason: str = ""

    @property
    def supported(self) -> bool:
        """Whether it can."""
        return not self.reason


@dataclass(frozen=True)
class BackendReport:
    """One backend on this machine.

    Attributes:
        name: One of `NAMES`.
        available: Whether it can run here.
        reason: Why it cannot run; else empty.
        device_types: Supported `torch.device` types; empty for all.
    """

    name: str
    available: bool
    reason: str
    device_types: tuple[str, ...]


class Choice:
    """Kernels by device, for a requested backend or the default.

    A requested backend applies to the devices that it supports, "aten" to all; others keep their
    default. Under TRITON_INTERPRET=1 "triton" takes CPU tensors, and GPU tensors take the next
    backend.

    Args:
        name: Requested backend, or None.

    Attributes:
        devices: Device types whose gradients go through kernels, as a bit set for the core.
        finder: What finds gradients for functions, which no scaler belongs to.
    """

    finder = cached_property(lambda self: core.Finder(self))

    def __init__(self, name: str | None) -> None:
        self._name = name
        self.devices = 0 if name == "aten" else core.CPU | core.CUDA
        self._on_cpu = "aten" if name == "aten" else "triton" if _takes_cpu(name) else "cpu"

    def name_for(self, device: torch.device) -> str:
        """Returns the name of the backend for a device; "aten" if no kernel supports it.

        Args:
            device: Device of the gradients.

        Raises:
            RuntimeError: If the requested backend does not run on it.
        """
        if device.type == "cpu":
            return self._on_cpu
        if device.type != "cuda" or self._name == "aten":
            return "aten"
        gpu = _current_gpu() if device.index is None else device
        if self._name not in _LAUNCHERS or self._on_cpu == "triton":
            return _default_on_gpu(gpu)
        if not (found := support(self._name, gpu)).supported:
            raise RuntimeError(f"backend {self._name!r} cannot run here: {found.reason}")
        return self._name

    def kernels_for(self, device: torch.device) -> Kernels:
        """Returns the kernels for a device, or torch's own ops.

        Args:
            device: Device of the gradients.

        Raises:
            RuntimeError: As for `name_for`.
        """
        # It does not call `name_for`, since every step asks.
        name = self._on_cpu if device.type == "cpu" else self.name_for(device)
        return _kernels.get(name) or _kernels_of(name)


def report() -> list[BackendReport]:
    """Returns a report on every backend, in the order of `NAMES`."""
    found = []
    for name in NAMES:
        here, device_types = Support(), ("cpu",) if name == "cpu" else ()
        if name in _LAUNCHERS:
            takes_cpu = support(name).supported and _takes_cpu(name)
            device = torch.device("cpu") if takes_cpu else _current_gpu()
            here, device_types = support(name, device), (device.type,)
        found.append(BackendReport(name, here.supported, here.reason, device_types))
    return found


@cache
def support(name: str, device: torch.device | None = None) -> Support:
    """Returns whether the kernels of a GPU backend can serve.

    GPUs are tried separately, as they may differ; interpreted kernels on the CPU.

    Args:
        name: "cuda" or "triton".
        device: Where they are tried on one gradient, as compilation errors show only then; None for
            what is known without a launch.
    """
    if device is None:
        return Support(_what_is_missing(name))
    if not (found := support(name)).supported:
        return found
    if device.type == "cuda":
        if _takes_cpu(name):
            return Support(_INTERPRETED)
        refuse_capture("the first launch")
        capability = torch.cuda.get_device_capability(device)
        if torch.version.hip is None and capability < _LEAST_CAPABILITY[name]:
            least = ".".join(map(str, _LEAST_CAPABILITY[name]))
            return Support(f"{device} has compute capability below {least}")
    try:
        # A thread of its own is without the caller's modes.
        with ThreadPoolExecutor(1) as aside:
            return Support(aside.submit(_try_out, name, device).result())
    except Exception as error:  # compilers raise errors of many types
        reason = f"its kernel does not run: {type(error).__name__}: {error}".splitlines()[0]
        return Support(reason + (_TRITON_NEEDS if name == "triton" else ""))


def default_for(device: torch.device) -> str:
    """Returns the name of the default backend for gradients on `device`.

    `AMPFAST_BACKEND` overrides the choice. Devices without kernels take "aten", torch's own op.

    Args:
        device: Device of the gradients.

    Raises:
        ValueError: If `AMPFAST_BACKEND` names no backend.
        RuntimeError: If it names one that cannot run here.
    """
    return choose().name_for(device)


def choose(name: str | None = None) -> Choice:
    """Returns the kernels to use; does not touch a GPU.

    Args:
        name: A backend, or None for `AMPFAST_BACKEND` or the default.

    Raises:
        TypeError: If `name` is neither a string nor None.
        ValueError: If `name` or `AMPFAST_BACKEND` is not in `NAMES`.
        RuntimeError: If that backend cannot run here.
    """
    if name is None:
        return _choice("AMPFAST_BACKEND", os.environ.get("AMPFAST_BACKEND") or None)
    require_known(name)  # before hashing: a name that is no string may be unhashable
    return _choice("backend", name)


def require_known(name: str | None, source: str = "backend") -> None:
    """Checks the name of a backend.

    Args:
        name: The name, or None.
        source: Source of the name, for the message.

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
    if name in _LAUNCHERS and not (found := support(name)).supported:
        raise RuntimeError(f"{source} {name!r} cannot run here: {found.reason}")
    return Choice(name)


def _launcher(name: str) -> ModuleType:
    return importlib.import_module(_LAUNCHERS[name])


def _kernels_of(name: str) -> Kernels:
    return _kernels.setdefault(name, cast(Kernels, DeviceKernels(_launcher(name))))


def _takes_cpu(name: str | None) -> bool:
    """Whether the kernels of a GPU backend are interpreted, so they run on CPU tensors."""
    return name == "triton" and bool(_launcher("triton").INTERPRETED)


def _what_is_missing(name: str) -> str:
    """Returns what a GPU backend lacks, as known without a launch; else an empty text."""
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        return _NO_GPU
    try:
        missing = getattr(_launcher(name), "missing", str)()
    except ImportError as error:
        missing = str(error)
    if missing:
        return f"{missing}; {_REMEDIES[name]}"
    return "" if has_gpu or _takes_cpu(name) else _NO_GPU


def _current_gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)


def _try_out(name: str, device: torch.device) -> str:
    if hasattr(_launcher(name), "load") and device.type == "cuda":
        _launcher(name).load(device)
    gradient = scalars.allocate(torch.full, (3,), 8.0, dtype=torch.float32, device=device)
    scale = scalars.allocate(torch.full, (), 4.0, dtype=torch.float32, device=device)
    grads = core.list_of([gradient], device)
    found_inf = _kernels_of(name).run(grads, Pass(True, Factor.TIMES_RECIPROCAL, scale))
    # A copy that the sync debug mode of torch allows.
    seen, arrival = scalars.copy_to_host_async(torch.cat([gradient, found_inf.reshape(1)]))
    if arrival is not None:
        arrival.synchronize()
    if seen.tolist() != [2.0, 2.0, 2.0, 0.0]:
        return f"its kernel unscaled 8 by 4 to {seen[:3].tolist()} with found_inf {seen[3].item()}"
    return ""


@cache
def _default_on_gpu(device: torch.device) -> str:
    refused: dict[str, str] = {}
    for name in _LAUNCHERS:
        found = support(name, device)
        if found.supported:
            # One kind of kernels is enough: nobody misses another that is not installed.
            refused = {each: refused[each] for each in refused if support(each).supported}
            break
        refused[name] = found.reason
    else:
        name = "aten"
    for each, reason in refused.items():
        if reason != _NO_GPU:
            message = f"ampfast does not use its backend {each!r}: {reason}"
            warnings.warn(message, stacklevel=2)
    return name
