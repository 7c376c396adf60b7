"""Paths over one list of gradients, as each provider offers them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ampfast import backends, functional
from ampfast.backends import core
from ampfast.backends.core import Factor, Pass, Update
from ampfast.backends.gpu import DeviceKernels

from .cases import GradCase, make_gradients
from .harness import assert_same
from .timing import dtype_name

CHECK = "check"
UNSCALE = "unscale"
UPDATE = "unscale+update"
COPY = "copy"
# A copy whose reads and writes together are as many bytes as a check reads.
HALF_COPY = "copy of half"
# The largest value of memory in one piece.
READ = "read"
PATHS = (CHECK, UNSCALE, UPDATE)
# A check with the 2-norm.
NORM = "norm"
# Of `torch_calls` and `launches` alone: that and a multiplication by the clip coefficient, which is
# 1.
CLIP = "norm and clip"
# Comma-separated backends to leave out, such as those whose results were wrong before.
WITHOUT = "AMPFAST_BENCH_WITHOUT"

# Growth factor, backoff factor and growth interval. Never grows: the scale is constant while a path
# is timed.
FACTORS = (2.0, 0.5, 2**31 - 1)

Gradients = list[Tensor]

_torch_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_


def moved_bytes(path: str, list_bytes: int) -> int:
    """Bytes that a path must move for N elements of b bytes.

    A check reads the list, b*N, and can take the norm on the way. Unscaling also writes as much,
    2*b*N, and can update the scale on the way; so does a copy. Clipping needs the norm first. That
    is the least: a provider that takes several passes moves more, and its bytes per second are what
    it achieves of the work.
    """
    # "check, 64 KiB" is a check.
    path = path.partition(",")[0]
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
        def scalar(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(value, dtype=dtype, device=device)

        return cls(
            *(scalar(0), scalar(1)),
            inverses=(scalar(inverse), scalar(1 / inverse)),
            scales=(scalar(1 / inverse), scalar(inverse)),
            trackers=(scalar(0, torch.int32), scalar(0, torch.int32)),
        )


@dataclass(frozen=True)
class Calls:
    """Calls of a provider, given the result of `prepare` for a list, and the turn, 0 or 1."""

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
        if device.type in report.device_types:
            if report.name in without:
                reasons.append(f"{report.name}: not measured, {WITHOUT} names it")
            elif report.available:
                names.append(report.name)
            else:
                reasons.append(f"{report.name}: not measured, {report.reason}")
    return names, reasons


def default_backend(name: str) -> AbstractContextManager[object]:
    """Makes a backend the default of the functional calls."""
    return mock.patch.dict(os.environ, AMPFAST_BACKEND=name)


def torch_takes(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch's op has a dtype on a device; up to 2.15 it lacks bfloat16 on GPUs."""
    scalars = Scalars.make(device)
    try:
        _torch_unscale_([torch.ones(1, dtype=dtype, device=device)], scalars.found_inf, scalars.one)
    except RuntimeError:
        return False
    return True


def torch_calls(scalars: Scalars) -> Calls:
    """torch's op, and the calls around it.

    Its check, as in the scaler, is the same op with an inverse scale of 1, which writes, too.
    """
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
    """ampfast's functional calls, for use within `default_backend(name)`.

    The norm is a pass as the scaler makes it: a custom op takes milliseconds for 1,000 tensors.
    """
    s = scalars
    kernels = backends.choose(name).kernels_for(device)
    sums = torch.zeros(2, dtype=torch.float64, device=device)

    def unscale_and_update(gradients: Gradients, turn: int) -> None:
        functional.unscale_(gradients, s.found_inf, s.inverses[turn])
        functional.update_scale_(s.scales[turn], s.trackers[turn], s.found_inf, *FACTORS)

    def norm(gradients: Gradients, turn: int) -> Tensor:
        work = Pass(False, Factor.TIMES, s.inverses[turn], s.found_inf, sums=sums)
        kernels.run(listed(gradients), work)
        return sums

    paths = {
        CHECK: lambda gradients, turn: functional.check_(gradients, s.found_inf),
        UNSCALE: lambda gradients, turn: functional.unscale_(
            gradients, s.found_inf, s.inverses[turn]
        ),
        UPDATE: unscale_and_update,
        NORM: norm,
    }
    return Calls(name, lambda gradients: gradients, paths)


def launches(name: str, device: torch.device, scalars: Scalars) -> Calls:
    """Launches over existing tables: the device's work in steady state.

    Graphs capture these, since a whole call would include the upload of the table, which happens
    only when an address has changed.
    """
    s = scalars
    kernels = device_kernels(name, device)
    launcher = kernels._launcher
    endings = [
        kernels.ending(Update(scale, tracker, [], *FACTORS))
        for scale, tracker in zip(s.scales, s.trackers, strict=True)
    ]

    def table(gradients: Gradients) -> core.DeviceTable:
        grads = listed(gradients)
        # As often as it takes until it is uploaded.
        return [core.DeviceTable.of(grads, False) for _ in range(8)][-1]

    sums = torch.zeros(1, 2, dtype=torch.float64, device=device)
    limits = core.Clip(sums, math.inf, False, torch.zeros((), device=device), sums.new_zeros(()))

    def launch(
        table: core.DeviceTable, write: bool, how: Factor, factor: Tensor | None, **more: Any
    ) -> None:
        # As `DeviceKernels` does it; a list of one dtype is one segment.
        (segment,) = table.segments
        work = Pass(write, how, factor, s.found_inf, **more)
        with on_device(device):
            launcher.multi_tensor(work, table, segment, True)

    def norm(table: core.DeviceTable, turn: int) -> Tensor:
        launch(table, False, Factor.TIMES_RECIPROCAL, s.scales[turn], sums=sums[0])
        return sums[0, 0]

    def clip(table: core.DeviceTable, turn: int) -> None:
        norm(table, turn)
        with on_device(device):
            launcher.clip_coefficient(limits)
        more = {"coefficient": limits.coefficient}
        launch(table, True, Factor.TIMES_RECIPROCAL, s.scales[turn], **more)

    def unscale_and_update(table: core.DeviceTable, turn: int) -> None:
        launch(table, True, Factor.TIMES_RECIPROCAL, s.scales[turn], ending=endings[turn])

    paths = {
        CHECK: lambda table, turn: launch(table, False, Factor.NONE, None),
        UNSCALE: lambda table, turn: launch(table, True, Factor.TIMES, s.inverses[turn]),
        UPDATE: unscale_and_update,
        NORM: norm,
        CLIP: clip,
    }
    return Calls(name, table, paths)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Context in which launches go to a GPU; of none on a CPU."""
    return torch.cuda.device(device if device.type == "cuda" else -1)


def device_kernels(name: str, device: torch.device) -> DeviceKernels | None:
    """Kernels of a backend over tables on a device, or None if it has none."""
    kernels = backends.choose(name).kernels_for(device)
    return kernels if isinstance(kernels, DeviceKernels) else None


def listed(gradients: Gradients) -> core.GradList:
    """List of plain tensors on one device, as the kernels take it."""
    return core.list_of(gradients, gradients[0].device)


def assert_parity(case: GradCase, dtype: torch.dtype, device: torch.device, name: str) -> None:
    """Compares all calls of a backend with torch's, for finite and other gradients.

    torch's op runs on the CPU where it lacks the dtype on that device.
    """
    oracle = device if torch_takes(dtype, device) else torch.device("cpu")
    gradients = make_gradients(case, dtype, device)
    for finite in (True, False):
        if not finite:
            for tensor in (gradients[len(gradients) // 2], gradients[-1]):
                tensor.view(-1)[-1] = math.inf
            gradients[-1].view(-1)[0] = math.nan
        what = f"{case.name} {dtype_name(dtype)}, {'all' if finite else 'not all'} finite"
        with default_backend(name):
            _compare(gradients, name, oracle, what)


def _compare(gradients: Gradients, name: str, oracle: torch.device, what: str) -> None:
    """Compares each path, as calls and as launches alone, over fresh copies of `gradients`."""
    device = gradients[0].device
    expected = [gradient.to(oracle, copy=True) for gradient in gradients]
    theirs = Scalars.make(oracle, inverse=1 / 3)
    torch_calls(theirs).paths[UPDATE](expected, 0)
    makers = [public_calls]
    if device_kernels(name, device) is not None:
        makers.append(launches)
    for make in makers:
        for path in PATHS:
            ours = Scalars.make(device, inverse=1 / 3)
            calls = make(name, device, ours)
            copies = [gradient.clone() for gradient in gradients]
            calls.paths[path](calls.prepare(copies), 0)
            found, wanted = [ours.found_inf, *copies], [theirs.found_inf, *expected]
            if path == CHECK:
                wanted = [theirs.found_inf, *gradients]
            elif path == UPDATE:
                found += [ours.scales[0], ours.trackers[0]]
                wanted += [theirs.scales[0], theirs.trackers[0]]
            label = f"flag, gradients and scale of {path} by {make.__name__} of {name}, {what}"
            assert_same(found, [tensor.to(device) for tensor in wanted], label)
