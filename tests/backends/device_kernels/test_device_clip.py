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
    run_check,
    run_clip,
    window,
)
from support.models import SPIKE, Rule, assert_clipped, exact_norm, grads_in, random_norms

from ampfast import Sigmas
from ampfast.backends.core import Clip

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


@pytest.mark.parametrize("rule", [None, (3.0, None), (1.0, Sigmas(1.0, 2))], ids=str)
@pytest.mark.parametrize("dtype", [*FLOATS, None], ids=str)
def test_a_read_decides_as_a_launch_after_it(dtype: torch.dtype | None, rule: Any) -> None:
    """Also without gradients, and of infinite ones."""
    for wide, largest, bad in itertools.product(
        (torch.float32, torch.float64), (False, True), (False, True)
    ):
        grads = mixed()
        if dtype is not None:
            grads = [guarded(normal(window(dtype) + 9, dtype), 1), guarded(normal(5, dtype))]
        if bad:
            grads[-1].fill_(INF)
        sides: list[list[Any]] = []
        for is_one in (True, False):
            above, sigmas = rule or (INF, None)
            words = None if sigmas is None else Rule(sigmas).words()
            sides.append([])
            for listed in (grads, [torch.empty(0)], grads, grads):
                outputs = [torch.full((), NAN, dtype=each) for each in (wide, torch.float64)]
                outputs += [flag(8.0), flag(NAN)]
                given, sums = grads_of(listed), torch.empty(2, dtype=torch.float64)
                clip = Clip(None, 0.7, largest, *outputs, None, above, words)
                found = run_check(
                    KERNELS, given, flag(8.0), sums=sums, clip=clip if is_one else None
                )
                if not is_one:
                    compared = None if rule is None else found
                    run_clip(
                        *(KERNELS, sums.reshape(1, 2), 0.7, largest, *outputs),
                        *(compared, above, words),
                    )
                sides[-1].append([*outputs, found, None if words is None else words.clone()])
        assert_same(*sides, f"{wide} {largest} {bad}")
