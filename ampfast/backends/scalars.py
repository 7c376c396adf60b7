"""Scalars on devices: copies, flags of several, the widest dtype, bits in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ampfast.backends.core import SPIKE, SPIKE_BOUND


@cache
def has_float64(device: torch.device) -> bool:
    """Whether a device computes in float64: no Apple GPU does, and not every one of Intel."""
    if device.type == "xpu":
        return bool(torch.xpu.get_device_properties(device).has_fp64)
    return device.type != "mps"


def widest(device: torch.device) -> torch.dtype:
    """Widest floating point dtype of a device."""
    return torch.float64 if has_float64(device) else torch.float32


def allocate(
    make: Callable[..., Tensor],
    *args: Any,
    dtype: torch.dtype,
    device: torch.device | str | None,
    **options: Any,
) -> Tensor:
    """Returns `make(*args)` as a tensor that may be written outside of inference mode, too."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return make(*args, dtype=dtype, device=device, **options)
    return make(*args, dtype=dtype, device=device, **options)


def any_found(flags: Iterable[Tensor], device: torch.device) -> Tensor:
    """Returns a new 0-dim float32 flag on `device`: 1 if any of `flags` is not 0, else 0."""
    found = allocate(torch.zeros, (), dtype=torch.float32, device=device)
    for flag in flags:
        found.masked_fill_(moved(flag, device).reshape(()) != 0, 1.0)
    return found


def joint_flag(flags: Iterable[Tensor], device: torch.device) -> Tensor:
    """Returns a new flag as `any_found`, but `SPIKE` if all that are not 0 are spikes'."""
    joint = new_flag(device)
    for flag in flags:
        here = moved(flag, device).reshape(()).abs()
        # Also NaN is none of a spike.
        here = torch.where(here < SPIKE_BOUND, here.clamp(max=SPIKE), 1.0)
        joint = torch.maximum(joint, here)
    return joint


def inverse(scale: Tensor) -> Tensor:
    """Returns the inverse scale as float32, from a float64 reciprocal if the device has one."""
    return scale.to(widest(scale.device)).reciprocal().float()


def new_flag(device: torch.device | None) -> Tensor:
    """Returns a new 0-dim float32 flag that is 0, on torch's default device for None."""
    return allocate(torch.zeros, (), dtype=torch.float32, device=device)


def moved(tensor: Tensor, device: torch.device, copy: bool = False) -> Tensor:
    """Returns a scalar on `device`; a sync only if the CPU will read it."""
    if tensor.device == device and not copy:
        return tensor  # as to() would return it, after a dispatch
    return tensor.to(device, non_blocking=device.type != "cpu", copy=copy)


def copy_to_host_async(tensor: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Copies a tensor to pinned host memory without a sync.

    Returns:
        The copy, and an event recorded after it; for a tensor on the host the tensor
        itself and None.
    """
    if not tensor.is_cuda:
        return tensor, None
    buffer = allocate(torch.empty, tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    with torch.cuda.device(tensor.device):
        buffer.copy_(tensor, non_blocking=True)
        arrival = torch.cuda.Event()
        arrival.record()
    return buffer, arrival


class HostCopies:
    """Copies of a tensor's numbers to the host, one at a time, without a sync."""

    def __init__(self) -> None:
        self._pending: tuple[Tensor, torch.cuda.Event | None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_pending": None}

    def latest(self, tensor: Tensor, waits: bool = False, again: bool = True) -> list[Any] | None:
        """Returns the numbers of a copy that has arrived, if any, and starts the next copy.

        Args:
            tensor: What is copied.
            waits: Whether the host waits for the copy that was started last.
            again: Whether the next copy starts as one has arrived, else in the next call.
        """
        if not tensor.is_cuda:
            return tensor.tolist()
        arrived = None
        if self._pending is not None:
            buffer, arrival = self._pending
            if arrival is not None and waits:
                arrival.synchronize()
            if arrival is None or arrival.query():
                arrived, self._pending = buffer.tolist(), None
        if self._pending is None and (again or arrived is None):
            self._pending = copy_to_host_async(tensor)
        return arrived


def float_of(word: Tensor) -> Tensor:
    """Returns the float32 values of bits in int64 words."""
    return word.to(torch.int32).view(torch.float32)


def word_of(value: Tensor) -> Tensor:
    """Returns the bits of float32 values as int64 words."""
    return value.float().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
