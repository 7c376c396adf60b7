"""Clip kernel against the compiled core, and whole clips with it."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from launched import BACKEND, KERNELS
from support.comparison import FLOATS, assert_same, started
from support.gradients import sgd_with
from support.kernels import (
    CPU_KERNELS,
    flag,
    grads_of,
    guarded,
    mixed,
    normal,
    run_clip,
    run_clipped,
    storage,
    window,
)
from support.models import SPIKE, Rule, assert_clipped, exact_norm, grads_in, random_norms

from ampfast import Sigmas

pytestmark = pytest.mark.usefixtures("watched")

INF, NAN = math.inf, math.nan
ROWS = [
    [(25.0, 4.0)],
    [(9.0, 3.0), (16.0, 4.0)],
    [(1 / 3, 0.5), (1e-7, 3e-4), (1e9, 3e4), (0.0, 0.0), (7.0, 2.0)],
    *([(value, value)] for value in (0.0, 1e-12, 1e-50, 1e80, INF, NAN)),
    [(INF, INF), (NAN, NAN), (INF, INF)],
    [(NAN, NAN), (1.0, 1.0)],
]
LIMITS = (0.0, 1e-3, 1.0, 5.0, 1e30, INF)


def results(kernels: Any, rows: list, limit: float, largest: bool, scale: float | None) -> list:
    """Outputs over poison: float32 and float64 norm, coefficient, divisor."""
    written = []
    for dtype in (torch.float32, torch.float64):
        norm = torch.full((), NAN, dtype=dtype)
        coefficient = torch.full((), -7.0, dtype=torch.float64)
        divisor = None if scale is None else flag(-7.0)
        sums = torch.tensor(rows, dtype=torch.float64)
        before = sums.clone()
        scales = None if scale is None else flag(scale)
        run_clip(kernels, sums, limit, largest, norm, coefficient, scales, divisor)
        assert_same(sums, before)
        written.append([norm, coefficient, divisor])
    return written


@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_the_coefficient_is_that_of_the_cpu(rows: list, largest: bool) -> None:
    for limit, scale in itertools.product(LIMITS, (None, 3.0, 2.0**16, 0.0)):
        ours = results(KERNELS, rows, limit, largest, scale)
        assert_same(ours, results(CPU_KERNELS, rows, limit, largest, scale), f"{limit} {scale}")


@pytest.mark.parametrize(
    "limit", [1.8, Sigmas(1.0, 2), Sigmas(2.0, 5), Sigmas(1.0, 19, 3)], ids=str
)
def test_spikes_are_those_of_the_rule(limit: float | Sigmas) -> None:
    rule, chance, flags = Rule(limit), random.Random(8), []
    words, number = None, limit
    if isinstance(limit, Sigmas):
        words, number = rule.words(), limit.sigmas
    for norm in random_norms(20 if words is None else 8 * words.numel(), seed=2):
        found = flag(chance.choice([0.0, 0.0, 0.0, 1.0]))
        expected = found.item() or rule.flag(norm)
        rows = torch.tensor([[norm * norm, norm]], dtype=torch.float64)
        outputs = [torch.zeros(()), torch.zeros((), dtype=torch.float64)]
        run_clip(KERNELS, rows, 1.0, True, *outputs, None, None, found, number, words)
        assert found.item() == expected
        flags.append(expected)
    assert {0.0, 1.0, SPIKE} == set(flags)
    if words is not None:
        rule.assert_are(words)
        assert rule.restarts


@pytest.mark.parametrize("order", [2.0, INF])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_clips_of_a_scaler(dtype: torch.dtype, order: float) -> None:
    sizes = (5, window(dtype) + 3, 2 * window(dtype), 1)
    optimizer = sgd_with(*(guarded(normal(size, dtype, size), size % 3) for size in sizes))
    before = [grad.clone() for grad in grads_in(optimizer)]
    scaler = started(scale=3.0, backend=BACKEND, allow_fp16=True)
    norm = scaler.clip_grad_norm_(optimizer, 0.5, order)
    rel = 1e-6 if order == 2.0 else torch.finfo(dtype).eps
    assert norm.item() == pytest.approx(exact_norm(before, 3.0, order), rel=rel)
    assert_clipped(grads_in(optimizer), before, 3.0, norm, 0.5)


@pytest.mark.parametrize("sums", [(7.0, 2.5), (INF, INF), (NAN, NAN)])
@pytest.mark.parametrize("dtype", [*FLOATS, None], ids=str)
def test_one_launch_clips_by_sums(dtype: torch.dtype | None, sums: tuple[float, float]) -> None:
    """Norm, coefficient and products; where the coefficient is 1, no gradient is read."""
    given = torch.tensor([sums], dtype=torch.float64)
    for limit, wide, largest in itertools.product(
        (0.7, 0.0, 1e4), (torch.float32, torch.float64), (False, True)
    ):
        sides = []
        for kernels in (KERNELS, CPU_KERNELS):
            grads = mixed()
            if dtype is not None:
                grads = [guarded(normal(window(dtype) + 9, dtype), 1), guarded(normal(5, dtype))]
            norms = [torch.full((), NAN, dtype=wide) for _ in range(2)]
            # Also without gradients.
            for norm, listed in zip(norms, (grads, [torch.empty(0)]), strict=True):
                run_clipped(kernels, grads_of(listed), given, limit, largest, norm)
            sides.append([*norms, [storage(grad) for grad in grads]])
        assert_same(sides[0], sides[1], f"{limit} {wide}")
