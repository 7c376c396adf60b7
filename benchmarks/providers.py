"""Paths over one list of gradients, as each provider offers them."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampfast import backends, functional
from ampfast.backends import core
from ampfast.backends.core import Factor, Pass, Update

from .timing import assert_same

CHECK, UNSCALE, UPDATE = PATHS = ("check", "unscale", "unscale+update")
# A check with the 2-norm.
NORM = "norm"
# In one piece; and one whose reads and writes together are as many bytes as a check reads.
COPY, HALF_COPY = "copy", "copy of half"
# Comma-separated backends to leave out, such as those whose results were wrong before.
WITHOUT = "AMPFAST_BENCH_WITHOUT"

# Growth factor, backoff factor and growth interval. Never grows: the scale is constant while a path
# is timed.
FACTORS = (2.0, 0.5, 2**31 - 1)
# Inverse scale of the comparisons.
THIRD = 1 / 3
# Relative tolerance of a norm, as docs/contributing/kernels.md has it.
NORM_TOLERANCE = 3e-7

Gradients = list[Tensor]

_torch_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_


def moved_bytes(path: str, list_bytes: int) -> int:
    """Bytes that a path must at least move for N elements of b bytes.

    A check reads the list, b*N, and can take the norm on the way. Unscaling also writes as much,
    2*b*N, and can update the scale on the way; so does a copy.
    """
    return list_bytes if path in (CHECK, NORM, HALF_COPY) else 2 * list_bytes


class Scalars(NamedTuple):
    """Scalars beside the gradients; pairs are used in turn, so that values do not drift.

    Values are halved in one turn and doubled in the next: an inverse scale of 1 might skip the
    multiplication.
    """

    found_inf: Tensor
    one: Tensor
    inverses: list[Tensor]
    scales: list[Tensor]
    trackers: list[Tensor]

    @classmethod
    def make(cls, device: torch.device, inverse: float = 0.5) -> Scalars:
        make, pair = functools.partial(torch.tensor, device=device), (inverse, 1 / inverse)
        trackers = [make(0, dtype=torch.int32) for _ in pair]
        return cls(make(0.0), make(1.0), [*map(make, pair)], [*map(make, pair[::-1])], trackers)


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
    try:
        with device:
            _torch_unscale_([torch.ones(1, dtype=dtype)], torch.zeros(()), torch.ones(()))
    except RuntimeError:
        return False
    return True


def calls_of(
    provider: str, scalars: Scalars, unscale: Any, check: Any, update: Any, norm: Any
) -> Calls:
    """Calls of functions like torch's; the inverse is given: its scaler computes it by kernels."""
    s = scalars

    def unscale_and_update(gradients: Gradients, turn: int) -> None:
        unscale(gradients, s.found_inf, s.inverses[turn])
        update(s.scales[turn], s.trackers[turn], s.found_inf, *FACTORS)

    paths = {
        CHECK: lambda gradients, turn: check(gradients, s.found_inf),
        UNSCALE: lambda gradients, turn: unscale(gradients, s.found_inf, s.inverses[turn]),
        UPDATE: unscale_and_update,
        NORM: lambda gradients, turn: norm(gradients),
    }
    return Calls(provider, lambda gradients: gradients, paths)


def torch_calls(scalars: Scalars) -> Calls:
    """torch's op, and the calls around it."""

    def check(gradients: Gradients, found_inf: Tensor) -> None:
        _torch_unscale_(gradients, found_inf, scalars.one)

    update, norm = torch._amp_update_scale_, torch.nn.utils.get_total_norm
    return calls_of("torch", scalars, _torch_unscale_, check, update, norm)


def public_calls(name: str, device: torch.device, scalars: Scalars) -> Calls:
    """ampfast's functional calls, and a norm, which is returned as its square."""
    f, run = functional, backends.choose(name).kernels_for(device).run
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    with_sums = Pass(False, Factor.TIMES, scalars.inverses[0], scalars.found_inf, sums=sums)

    def norm(gradients: Gradients) -> Tensor:
        run(listed(gradients), with_sums)
        return sums[0]

    return calls_of(name, scalars, f.unscale_, f.check_, f.update_scale_, norm)


def launches(name: str, device: torch.device, scalars: Scalars) -> Calls:
    """Launches over existing tables: the device's work in steady state.

    Graphs capture these, since a whole call would include the upload of the table, which happens
    only when an address has changed.
    """
    s = scalars
    kernels: Any = backends.choose(name).kernels_for(device)
    updates = [Update(*pair, [], *FACTORS) for pair in zip(s.scales, s.trackers, strict=True)]
    endings = [kernels.ending(update) for update in updates]
    sums = torch.zeros(1, 2, dtype=torch.float64, device=device)
    inverse = Factor.TIMES_RECIPROCAL

    def table(gradients: Gradients) -> core.DeviceTable:
        # As often as it takes until it is uploaded.
        return [core.DeviceTable.of(listed(gradients), False) for _ in range(8)][-1]

    def launch(table: core.DeviceTable, write: bool, how: Factor, factor: Any, **more: Any) -> None:
        # As `DeviceKernels` does it; a list of one dtype is one segment.
        (segment,) = table.segments
        work = Pass(write, how, factor, s.found_inf, **more)
        # Of none on a CPU.
        with torch.cuda.device(device if device.type == "cuda" else -1):
            kernels.launcher.multi_tensor(work, table, segment, True)

    def norm(table: core.DeviceTable, turn: int) -> Tensor:
        launch(table, False, inverse, s.scales[turn], sums=sums[0])
        return sums[0, 0]

    paths = {
        CHECK: lambda table, turn: launch(table, False, Factor.NONE, None),
        UNSCALE: lambda table, turn: launch(table, True, Factor.TIMES, s.inverses[turn]),
        UPDATE: lambda table, turn: launch(
            table, True, inverse, s.scales[turn], ending=endings[turn]
        ),
        NORM: norm,
    }
    return Calls(name, table, paths)


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
            assert_same(copies, expected if moved_bytes(path, 1) > 1 else gradients, where)
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
