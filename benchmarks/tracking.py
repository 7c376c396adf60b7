"""Cost of per-parameter tracking, relative to the same pass without it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ampfast.backends import core, cpu
from ampfast.backends.core import Factor, Pass, Track

from . import goals, kernels, providers
from .cases import GradCase, make_gradients
from .goals import TRACKED_CHECKS, TRACKED_UNSCALES
from .harness import Contender, Job, Measured, Setting, assert_same
from .kernels import Lists
from .providers import CHECK, UNSCALE
from .steps import lists_in_turn
from .timing import dtype_name, time_contenders

# On a CPU, which has no goals.
CPU_CASES = ("bert_base", "one_16m")


def jobs(on: Setting) -> list[Job]:
    """One job for each list; on a CPU for some."""
    lists = kernels.chosen(on)
    if on.queue is None:
        lists = [(c, d) for c, d in lists if c.name in CPU_CASES and d in kernels.QUICK_DTYPES]
    return kernels.jobs(on, measure, lists)


def measure(case: GradCase, dtype: torch.dtype, on: Setting) -> Measured:
    """Times check and unscaling alone and with marks."""
    lists, device = lists_in_turn(case, dtype, on), on.device
    names, notes = providers.available(device)
    for name in names:
        assert_parity(case, dtype, device, name)
    gradients = Lists(case, dtype, device, lists)
    contenders = [
        Contender(path, name, _caller(path, name, gradients.lists, device))
        for path in (*TRACKED_CHECKS, *TRACKED_UNSCALES)
        for name in names
    ]
    timed = time_contenders("tracking", case, dtype, contenders, on, lists=lists)
    gradients.assert_steady()
    measured = Measured(notes=notes)
    for contender, row in zip(contenders, timed.rows(), strict=True):
        plain, _, track = row.call.partition(", ")
        over = timed.samples.ratio(contender.key, (plain, contender.provider)).p50
        measured.rows.append(replace(row, over_none=over if track else None))
    for name in names:
        measured.goals += goals.of_tracking(timed, name)
    return measured


def track_for(path: str, parameters: int, device: torch.device) -> Track | None:
    """Tracking tables of a path, if it has any."""
    if path in (CHECK, UNSCALE):
        return None
    marks = torch.zeros(parameters, core.MARK_WORDS, dtype=torch.int64, device=device)
    now = torch.zeros(1, dtype=torch.int64, device=device)
    return Track(marks, now)


def run(path: str, passes: Any, grads: Any, inverse: Tensor, track: Track | None) -> Tensor:
    """One pass."""
    work = Pass(True, Factor.TIMES, inverse)
    if path in TRACKED_CHECKS:
        work = Pass(False, Factor.NONE)
    if track is not None:
        work = work._replace(marks=track.marks, now=track.now)
    return passes.run(grads, work)


def _passes(name: str, device: torch.device) -> Any:
    return providers.device_kernels(name, device) or cpu


def _caller(
    path: str, name: str, lists: Sequence[list[Tensor]], device: torch.device
) -> Callable[[int], object]:
    """One pass per call: lists in turn, gradients halved and then doubled."""
    passes, grads = _passes(name, device), [providers.listed(gradients) for gradients in lists]
    track = track_for(path, len(lists[0]), device)
    factors = [torch.full((), factor, device=device) for factor in (0.5, 2.0)]
    count = len(lists)
    return lambda call: run(path, passes, grads[call % count], factors[call // count % 2], track)


def assert_parity(case: GradCase, dtype: torch.dtype, device: torch.device, name: str) -> None:
    """Compares results with those without tracking, and marks with torch's op."""
    passes = _passes(name, device)
    half = torch.full((), 0.5, device=device)
    for bad in (False, True):
        gradients = make_gradients(case, dtype, device)
        if bad:
            gradients[len(gradients) // 2].view(-1)[-1] = math.inf
            gradients[-1].view(-1)[0] = math.nan
        for paths in (TRACKED_CHECKS, TRACKED_UNSCALES):
            plain = [gradient.clone() for gradient in gradients]
            found = run(paths[0], passes, providers.listed(plain), half, None)
            for path in paths[1:]:
                what = f"{path} by {name}, {case.name} {dtype_name(dtype)}"
                tracked = [gradient.clone() for gradient in gradients]
                track = track_for(path, len(gradients), device)
                flag = run(path, passes, providers.listed(tracked), half, track)
                assert_same([flag, *tracked], [found, *plain], f"results of {what}")
                if track is not None:
                    _assert_noted(track, gradients, what)


def _assert_noted(track: Track, gradients: Sequence[Tensor], what: str) -> None:
    marked = [bool(times) for times in track.marks[:, 2].tolist()]
    wanted = [not bool(gradient.isfinite().all()) for gradient in gradients]
    if marked != wanted:
        raise AssertionError(f"marks of {what}")
