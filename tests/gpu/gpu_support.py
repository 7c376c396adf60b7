"""Helpers of the GPU tests: devices, kernels, twins of a training loop."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from support.comparison import assert_same
from support.gradients import make_gradient
from support.optimizers import OPTIMIZERS
from support.reference_launcher import ReferenceLauncher
from support.scalers import TorchScaler

from ampfast import GradScaler, backends
from ampfast.backends import torch_ops
from ampfast.backends.gpu import DeviceKernels

BACKENDS = ("triton", "cuda")
GIB = 2**30
# By `python tests/gpu --rehearse`: torch's ops on the CPU stand in for the kernels of a GPU.
REHEARSES = bool(os.environ.get("AMPFAST_REHEARSE"))


def gpu() -> torch.device:
    if REHEARSES:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def unavailable_reason(name: str) -> str:
    """Reason why a backend is missing; one that is present but fails must fail its tests."""
    reason = "" if REHEARSES else backends._unavailable_reason(name)
    if name == "triton" and not reason and backends._takes_cpu("triton"):
        return "Triton's kernels are interpreted here"
    return f"backend {name!r} is missing: {reason}" if reason else ""


def kernels_of(backend: str, device: torch.device) -> Any:
    """Kernels of a backend; `cpu` for the CPU."""
    if REHEARSES:
        return DeviceKernels(ReferenceLauncher())
    kernels = backends.choose(backend).kernels_for(device)
    assert kernels is not torch_ops
    return kernels


def flag(value: float, device: torch.device) -> torch.Tensor:
    return torch.full((), value, dtype=torch.float32, device=device)


def require_memory(gibibytes: float) -> str:
    """Reason why a test of this size cannot run, or an empty text."""
    free, _ = torch.cuda.mem_get_info()
    if free < gibibytes * GIB:
        return f"needs {gibibytes:g} GiB of free memory, there are {free / GIB:.1f}"
    return ""


@contextlib.contextmanager
def no_syncs() -> Iterator[None]:
    """Makes torch raise at any synchronization."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


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


LAYOUTS = ("long", "contiguous", "transposed", "channels_last", "scalar", "short", "empty")


class Twin:
    """A scaler with parameters on a device, whose gradients are drawn from a seed.

    Two twins that get the same calls must stay equal bit for bit, whatever their scalers' types.
    """

    def __init__(
        self,
        scaler_type: type[TorchScaler],
        kind: str | Callable[..., Any],
        device: torch.device,
        *,
        dtypes: Sequence[torch.dtype] = (torch.float32, torch.float64),
        optimizers: int = 1,
        places: Sequence[torch.device] = (),
        loss_on: torch.device | None = None,
        **arguments: Any,
    ) -> None:
        make = OPTIMIZERS[kind] if isinstance(kind, str) else kind
        self.places = places or (device,)
        self.scaler: Any = scaler_type((loss_on or device).type, **arguments)
        self.loss = torch.ones((), device=loss_on or device)
        self.scaler.scale(self.loss)
        self.params = []
        self.optimizers: list[Any] = []
        for o in range(optimizers):
            params = []
            for i, layout in enumerate(LAYOUTS):
                dtype = dtypes[i % len(dtypes)]
                value = make_gradient(layout, dtype, 1000 * o + i)
                # Strides are kept, since the fused kernels walk over memory.
                value = value.to(self.places[i % len(self.places)])
                params.append(torch.nn.Parameter(value))
            self.params.append(params)
            self.optimizers.append(make(params))
        self.returned: list[Any] = []

    def backward(self, seed: int, o: int = 0, bad: float | None = None, add: bool = False) -> None:
        """Gradients of a scaled loss; with `add`, accumulated."""
        scale = self.scaler._scale
        for i, (p, unscaled) in enumerate(zip(self.params[o], self.unscaled(seed, o), strict=True)):
            grad = unscaled * scale.to(p.device, p.dtype)
            if bad is not None and i == seed % 4:
                grad[(0,) * grad.dim()] = bad
            if add and p.grad is not None:
                p.grad = p.grad + grad
            else:
                p.grad = grad

    def unscaled(self, seed: int, o: int = 0) -> list[torch.Tensor]:
        """Gradients of `backward` without the scale."""
        return [
            make_gradient(layout, p.dtype, 7919 * seed + 31 * o + i).to(p.device)
            for i, (layout, p) in enumerate(zip(LAYOUTS, self.params[o], strict=True))
        ]

    def step(self, o: int = 0, *, clip: bool = False) -> None:
        optimizer = self.optimizers[o]
        if clip:
            self.scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(
                [p for p in self.params[o] if p.dtype is self.params[o][0].dtype], 0.5
            )
        self.returned.append(self.scaler.step(optimizer))

    def finish(self, *, together: bool = False) -> None:
        """Ends the iteration, with `step_and_update` if `together` and available."""
        if together and hasattr(self.scaler, "step_and_update"):
            self.returned += self.scaler.step_and_update(self.optimizers[-1])
            return
        if together:
            self.step(len(self.optimizers) - 1)
        self.scaler.update()

    def observe(self) -> dict[str, Any]:
        return {
            "parameters": [[p.detach() for p in params] for params in self.params],
            "gradients": [[p.grad for p in params] for params in self.params],
            "states": [optimizer.state_dict() for optimizer in self.optimizers],
            "scale": self.scaler._scale,
            "tracker": self.scaler._growth_tracker,
            "state_dict": self.scaler.state_dict(),
            "returned": self.returned,
        }


def twins(
    backend: str, kind: str | Callable[..., Any], device: torch.device, **arguments: Any
) -> tuple[Twin, Twin]:
    """Returns ours and torch's."""
    return (
        Twin(GradScaler, kind, device, backend=backend, **arguments),
        Twin(TorchScaler, kind, device, **arguments),
    )


def assert_trains_as_without_scaler(
    ours: Twin, kind: str, bad: Sequence[float | None], *, together: bool = False
) -> None:
    """Trains where torch's scaler would read a flag on the CPU before it arrives from the GPU.

    Scales are powers of two, so the optimizer gives the same bits without a scaler.
    """
    params = [torch.nn.Parameter(p.detach().clone()) for p in ours.params[0]]
    optimizer = OPTIMIZERS[kind](params)
    scale, tracker = ours.scaler.get_scale(), 0
    for iteration, planted in enumerate(bad):
        ours.backward(iteration, bad=planted)
        if not together:
            ours.step()
        ours.finish(together=together)
        if planted is None:
            for p, grad in zip(params, ours.unscaled(iteration), strict=True):
                p.grad = grad
            optimizer.step()
            tracker += 1
            if tracker == ours.scaler.get_growth_interval():
                scale, tracker = 2 * scale, 0
        else:
            scale, tracker = scale / 2, 0
        where = f"parameters after iteration {iteration}"
        assert_same([p.detach() for p in ours.params[0]], [p.detach() for p in params], where)
        assert ours.scaler.get_scale() == scale
        assert ours.scaler.step_skipped(ours.optimizers[0]) is (planted is not None)


def assert_twins_same(ours: Twin, theirs: Twin, where: str = "twin") -> None:
    assert_same(ours.observe(), theirs.observe(), where)
