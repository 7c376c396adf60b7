"""Paths over one list of gradients, as each provider offers them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampfast import backends, functional
from ampfast.backends import core
from ampfast.backends.core import Factor, Pass, Update
from ampfast.backends.gpu import DeviceKernels

from .timing import assert_same

CHECK, UNSCALE, UPDATE = PATHS = ("check", "unscale", "unscale+update")
# A check with the 2-norm; and, of `torch_calls` and `launches` alone, that and a multiplication by
# the clip coefficient, which is 1.
NORM, CLIP = "norm", "norm and clip"
# A copy, one whose reads and writes together are as many bytes as a check reads, and the largest
# value of memory in one piece.
COPY, HALF_COPY, READ = "copy", "copy of half", "read"
# Comma-separated backends to leave out, such as those whose results were wrong before.
WITHOUT = "AMPFAST_BENCH_WITHOUT"

# Growth factor, backoff factor and growth interval. Never grows: the scale is constant while a path
# is timed.
FACTORS = (2.0, 0.5, 2**31 - 1)
# Inverse scale of the comparisons.
THIRD = 1 / 3
# Relative tolerance of a norm, as docs/kernels.md has it.
NORM_TOLERANCE = 3e-7

Gradients = list[Tensor]

_torch_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_


def moved_bytes(path: str, list_bytes: int) -> int:
    """Bytes that a path must at least move for N elements of b bytes.

    A check reads the list, b*N, and can take the norm on the way. Unscaling also writes as much,
    2*b*N, and can update the scale on the way; so does a copy. Clipping needs the norm first.
    """
    passes = {CHECK: 1, HALF_COPY: 1, NORM: 1, READ: 1, CLIP: 3}
    return passes.get(path, 2) * list_bytes


@dataclass(frozen=True)
class Scalars:
    """Scalars beside the gradients; pairs are used in turn, so that values do not drift.

    Values are halved in one turn and doubled in the next: an inverse scale of 1 might skip the
    multiplication.
    """

    found_inf: Tensor
    one: Tensor
    inverses: tuple[Tensor, Tensor]
    scales: tuple[Tensor, Tensor]
    trackers: tuple[Tensor, Tensor]

    @classmethod
    def make(cls, device: torch.device, inverse: float = 0.5) -> Scalars:
        values = [torch.tensor(v, device=device) for v in (0.0, 1.0, inverse, 1 / inverse)]
        found_inf, one, less, more = values
        trackers = [torch.zeros((), dtype=torch.int32, device=device) for _ in range(2)]
        scales = (more.clone(), less.clone())
        return cls(found_inf, one, (less, more), scales, (trackers[0], trackers[1]))


class Calls(NamedTuple):
    """Calls of a provider, given what `prepare` makes of a list, and the turn, 0 or 1."""

    provider: str
    prepare: Callable[[Gradients], Any]
    paths: dict[str, Callable[[Any, int], Any]]


def available(device: torch.device) -> tuple[list[str], list[str]]:
    """Returns ampfast's backends for a device, the default first, and reasons for missing ones."""
    if device.type == "cpu":
        return [backends.default_for(device)], []
    names, reasons = [], []
    without = os.environ.get(WITHOUT, "").split(",")
    for report in backends.report():
        reason = f"{WITHOUT} names it" if report.name in without else report.reason
        if device.type not in report.device_types:
            continue
        if report.available and report.name not in without:
            names.append(report.name)
        else:
            reasons.append(f"{report.name}: not measured, {reason}")
    return names, reasons


def torch_takes(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch's op has a dtype on a device; up to 2.15 it lacks bfloat16 on GPUs."""
    scalars = Scalars.make(device)
    try:
        _torch_unscale_([torch.ones(1, dtype=dtype, device=device)], scalars.found_inf, scalars.one)
    except RuntimeError:
        return False
    return True


def torch_calls(scalars: Scalars) -> Calls:
    """torch's op, and the calls around it."""
    s = scalars

    def unscale(gradients: Gradients, turn: int) -> None:
        _torch_unscale_(gradients, s.found_inf, s.inverses[turn])

    def unscale_and_update(gradients: Gradients, turn: int) -> None:
        # The inverse is given; the scaler computes it with three kernels.
        unscale(gradients, turn)
        torch._amp_update_scale_(s.scales[turn], s.trackers[turn], s.found_inf, *FACTORS)

    def clip(gradients: Gradients, turn: int) -> None:
        # As torch's clip_grad_norm_ without a limit, where it multiplies, too.
        norm = torch.nn.utils.get_total_norm(gradients)
        torch._foreach_mul_(gradients, torch.clamp(math.inf / (norm + 1e-6), max=1.0))

    paths = {
        CHECK: lambda gradients, turn: _torch_unscale_(gradients, s.found_inf, s.one),
        UNSCALE: unscale,
        UPDATE: unscale_and_update,
        NORM: lambda gradients, turn: torch.nn.utils.get_total_norm(gradients),
        CLIP: clip,
    }
    return Calls("torch", lambda gradients: gradients, paths)


def public_calls(name: str, device: torch.device, scalars: Scalars) -> Calls:
    """ampfast's functional calls, and a norm, which is returned as its square."""
    s = scalars
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    run = backends.choose(name).kernels_for(device).run

    def unscale(gradients: Gradients, turn: int) -> None:
        functional.unscale_(gradients, s.found_inf, s.inverses[turn])

    def unscale_and_update(gradients: Gradients, turn: int) -> None:
        unscale(gradients, turn)
        functional.update_scale_(s.scales[turn], s.trackers[turn], s.found_inf, *FACTORS)

    def norm(gradients: Gradients, turn: int) -> Tensor:
        run(listed(gradients), Pass(False, Factor.TIMES, s.inverses[turn], s.found_inf, sums=sums))
        return sums[0]

    paths = {
        CHECK: lambda gradients, turn: functional.check_(gradients, s.found_inf),
        UNSCALE: unscale,
        UPDATE: unscale_and_update,
        NORM: norm,
    }
    return Calls(name, lambda gradients: gradients, paths)


def launches(name: str, device: torch.device, scalars: Scalars) -> Calls:
    """Launches over existing tables: the device's work in steady state.

    Graphs capture these, since a whole call would include the upload of the table, which happens
    only when an address has changed.
    """
    s, kernels = scalars, device_kernels(name, device)
    updates = [Update(*pair, [], *FACTORS) for pair in zip(s.scales, s.trackers, strict=True)]
    endings = [kernels.ending(update) for update in updates]
    sums = torch.zeros(1, 2, dtype=torch.float64, device=device)
    limits = core.Clip(sums, math.inf, False, torch.zeros((), device=device), sums.new_zeros(()))
    inverse = Factor.TIMES_RECIPROCAL

    def table(gradients: Gradients) -> core.DeviceTable:
        # As often as it takes until it is uploaded.
        return [core.DeviceTable.of(listed(gradients), False) for _ in range(8)][-1]

    def launch(table: core.DeviceTable, write: bool, how: Factor, factor: Any, **more: Any) -> None:
        # As `DeviceKernels` does it; a list of one dtype is one segment.
        (segment,) = table.segments
        with on_device(device):
            kernels._launcher.multi_tensor(
                Pass(write, how, factor, s.found_inf, **more), table, segment, True
            )

    def norm(table: core.DeviceTable, turn: int) -> Tensor:
        launch(table, False, inverse, s.scales[turn], sums=sums[0])
        return sums[0, 0]

    def clip(table: core.DeviceTable, turn: int) -> None:
        norm(table, turn)
        with on_device(device):
            kernels._launcher.clip_coefficient(limits)
        launch(table, True, inverse, s.scales[turn], coefficient=limits.coefficient)

    paths = {
        CHECK: lambda table, turn: launch(table, False, Factor.NONE, None),
        UNSCALE: lambda table, turn: launch(table, True, Factor.TIMES, s.inverses[turn]),
        UPDATE: lambda table, turn: launch(
            table, True, inverse, s.scales[turn], ending=endings[turn]
        ),
        NORM: norm,
        CLIP: clip,
    }
    return Calls(name, table, paths)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Context in which launches go to a GPU; of none on a CPU."""
    return torch.cuda.device(device if device.type == "cuda" else -1)


def device_kernels(name: str, device: torch.device) -> DeviceKernels:
    """Kernels of a backend over tables on a device."""
    kernels: Any = backends.choose(name).kernels_for(device)
    return kernels


def listed(gradients: Gradients) -> core.GradList:
    """List of plain tensors on one device, as the kernels take it."""
    return core.list_of(gradients, gradients[0].device)


def assert_parity(
    gradients: Gradients, make: Callable[[Scalars], Calls], paths: Sequence[str], what: str
) -> None:
    """Compares paths over copies of finite gradients and of others with torch's op, bit for bit.

    Norms are compared with float64.
    """
    device = gradients[0].device
    for finite in (True, False):
        if not finite:
            gradients = [gradient.clone() for gradient in gradients]
            for tensor in (gradients[len(gradients) // 2], gradients[-1]):
                tensor.view(-1)[-1] = math.inf
            gradients[-1].view(-1)[0] = math.nan
        theirs = Scalars.make(device, THIRD)
        expected = _unscaled(gradients, theirs)
        for path in paths:
            ours = Scalars.make(device, THIRD)
            calls = make(ours)
            copies = [gradient.clone() for gradient in gradients]
            result = calls.paths[path](calls.prepare(copies), 0)
            where = f"{path} by {calls.provider}, {what}, {'' if finite else 'not '}all finite"
            assert_same([ours.found_inf], [theirs.found_inf], f"flag of {where}")
            # The coefficient of an infinite norm is not looked at: such a step is skipped.
            if finite or path != CLIP:
                wanted = expected if moved_bytes(path, 1) > 1 else gradients
                assert_same(copies, wanted, where)
            if path == UPDATE:
                found, updated = ([*s.scales, *s.trackers] for s in (ours, theirs))
                assert_same(found, updated, f"scale and tracker of {where}")
            elif path == NORM and finite:
                norm, exact = math.sqrt(result), exact_norm(gradients) * float(ours.inverses[0])
                if not abs(norm - exact) <= NORM_TOLERANCE * exact:
                    raise AssertionError(f"the norm is {norm}, not {exact}: {where}")
            del copies, result  # before the next are made


def _unscaled(gradients: Gradients, scalars: Scalars) -> Gradients:
    """Copies unscaled by torch, with its flag, scale and tracker after an update.

    16-bit values as float32 and rounded, as torch's op does it where it has the dtype.
    """
    copies = [gradient.clone() for gradient in gradients]
    for copy in copies:
        wide = copy.float() if copy.itemsize == 2 else copy
        _torch_unscale_([wide], scalars.found_inf, scalars.inverses[0])
        copy.copy_(wide)
    scale, tracker = scalars.scales[0], scalars.trackers[0]
    torch._amp_update_scale_(scale, tracker, scalars.found_inf, *FACTORS)
    return copies


def exact_norm(gradients: Sequence[Tensor]) -> float:
    """2-norm in float64."""
    norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients]
    return float(torch.linalg.vector_norm(torch.stack(norms)).item())
