"""Helpers of the GPU tests: devices, kernels, and training loops of two kinds."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from support.gradients import make_gradient, parameter_with
from support.launchers import ReferenceLauncher
from support.optimizers import OPTIMIZERS

from ampfast import backends
from ampfast.backends import aten
from ampfast.backends.gpu import DeviceKernels

# By `python tests/gpu --rehearse`: torch's ops on the CPU stand in for the kernels of a GPU.
REHEARSES = bool(os.environ.get("AMPFAST_REHEARSE"))
# Cycles, long enough for the host to queue the rest.
A_WHILE = 400_000_000


def gpu() -> torch.device:
    if REHEARSES:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def unavailable_reason(name: str) -> str:
    """Reason why a backend is missing; one that is present but fails must fail its tests."""
    reason = "" if REHEARSES else backends.support(name).reason
    if name == "triton" and not reason and backends._takes_cpu("triton"):
        return "Triton's kernels are interpreted here"
    return f"backend {name!r} is missing: {reason}" if reason else ""


def kernels_of(backend: str, device: torch.device) -> Any:
    """Kernels of a backend; `cpu` for the CPU."""
    if REHEARSES:
        return DeviceKernels(ReferenceLauncher())
    kernels = backends.choose(backend).kernels_for(device)
    assert kernels is not aten
    return kernels


@contextlib.contextmanager
def no_syncs() -> Iterator[None]:
    """Makes torch raise at any synchronization."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextlib.contextmanager
def side_stream() -> Iterator[None]:
    """Another stream between two waits, as the warm-up of a capture needs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


class Quiet:
    """Plain optimizer without work of its own, so that only the scaler's calls are counted."""

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self.param_groups = [{"params": list(params)}]
        self.steps = 0

    def step(self) -> None:
        self.steps += 1


class QuietFused(Quiet):
    """The same with `grad_scale` and `found_inf`."""

    _step_supports_amp_scaling = True
    # To optimizers of torch the flag itself is handed, to others a copy, which they may write.
    __module__ = "torch.optim.quiet"


MAKERS: dict[str, Callable[..., Any]] = {
    **OPTIMIZERS,
    "quiet": Quiet,
    "quiet_fused": QuietFused,
    "capturable_sgd": lambda params: torch.optim.SGD(params, lr=0.25, fused=True),
    "capturable_adam": lambda params: torch.optim.Adam(params, lr=0.1, fused=True, capturable=True),
}
LAYOUTS = ("long", "contiguous", "transposed", "channels_last", "scalar", "short", "empty")


def skip_without(kind: str, make: Callable[..., Any], device: torch.device) -> None:
    """Skips a test of an optimizer that this torch does not have for the device, in its words."""
    try:
        make([parameter_with(torch.ones(1, device=device))]).step()
    except RuntimeError as error:
        pytest.skip(f"{kind}: torch says: {error}".splitlines()[0])


class Twin:
    """A scaler with parameters of all layouts, whose gradients are drawn from a seed.

    Twins that get the same calls must stay equal bit for bit, whatever their scalers' types.
    """

    def __init__(
        self,
        scaler: Any,
        kind: str,
        device: torch.device,
        *,
        dtypes: Sequence[torch.dtype] = (torch.float32,),
        optimizers: int = 1,
        places: Sequence[torch.device] = (),
        loss_on: torch.device | None = None,
    ) -> None:
        self.scaler = scaler
        self.loss = torch.ones((), device=loss_on or device)
        self.norm = torch.zeros((), device=device)
        scaler.scale(self.loss)
        on = itertools.cycle(places or [device])
        of = itertools.cycle(dtypes)
        # Strides are kept, since the fused kernels walk over memory.
        self.params = [
            [
                torch.nn.Parameter(make_gradient(layout, next(of), o).to(next(on)))
                for layout in LAYOUTS
            ]
            for o in range(optimizers)
        ]
        self.optimizers = [MAKERS[kind](params) for params in self.params]

    def unscaled(self, seed: int, o: int = 0) -> list[torch.Tensor]:
        """Gradients of `feed` without the scale."""
        return [
            make_gradient(layout, p.dtype, 7919 * seed + 31 * o + i).to(p.device)
            for i, (layout, p) in enumerate(zip(LAYOUTS, self.params[o], strict=True))
        ]

    def feed(self, seed: int, bad: float | None = None, o: int = 0, anew: bool = False) -> None:
        """Gradients of a scaled loss, in the memory of the last ones unless `anew`."""
        scale = self.scaler._scale
        for i, (p, unscaled) in enumerate(zip(self.params[o], self.unscaled(seed, o), strict=True)):
            grad = unscaled * scale.to(p.device, p.dtype)
            if bad is not None and i == seed % 4:
                grad[(0,) * grad.dim()] = bad
            if p.grad is None or anew:
                p.grad = grad
            else:
                p.grad.copy_(grad)

    def step(self, way: str = "step", o: int = -1) -> None:
        """Steps one optimizer; with "together" the scale is updated, too."""
        scaler, optimizer = self.scaler, self.optimizers[o]
        if way == "unscale":
            scaler.unscale_(optimizer)
            first = [p for p in self.params[o] if p.dtype is self.params[o][0].dtype]
            torch.nn.utils.clip_grad_norm_(first, 0.5)
        elif way in ("clip", "defer"):
            self.norm.copy_(scaler.clip_grad_norm_(optimizer, 1.0, in_place=way == "clip"))
        if way == "together" and hasattr(scaler, "step_and_update"):
            scaler.step_and_update(optimizer)
            return
        scaler.step(optimizer)
        if way == "together":
            scaler.update()

    def iterate(self, way: str = "step") -> None:
        """Scales a loss, steps and updates the scale."""
        self.scaler.scale(self.loss)
        self.step(way)
        if way != "together":
            self.scaler.update()

    def observe(self) -> dict[str, Any]:
        return {
            "parameters": [[p.detach() for p in params] for params in self.params],
            "gradients": [[p.grad for p in params] for params in self.params],
            "states": [optimizer.state_dict() for optimizer in self.optimizers],
            "norm": self.norm,
            "scale": self.scaler._scale,
            "tracker": self.scaler._growth_tracker,
            "state_dict": self.scaler.state_dict(),
        }
