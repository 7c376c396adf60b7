"""Random lists, marks, updates and captures, and bytes moved: the GPU tests, scaled down."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from batches import KINDS, random_batch, run_batch
from launched import BACKEND, CPU, KERNELS, launch
from support.captures import Capturing, assert_replays_are_eager
from support.comparison import FLOATS, TorchScaler, assert_same
from support.kernels import (
    flag,
    grads_of,
    guarded,
    normal,
    offsets,
    run_check,
    run_unscale,
    wide,
    window,
)
from support.launchers import ON_HOST
from support.models import LIMITS, check_limits, check_passes, check_random_lists

IS_COMPILED = BACKEND is None
# The interpreter is ten times slower.
LISTS = 12 if IS_COMPILED else 2
IS_COUNTED = IS_COMPILED and not ON_HOST
FACTORS = (1 / 3, 2.0**-16, 3.0, -0.75, 1.0, 2.0**-128, 3e38, 0.0, torch.inf, torch.nan)


@pytest.mark.parametrize("seed", range(10))
def test_random_lists(
    seed: int, limit_programs: Callable[[int], None], request: pytest.FixtureRequest
) -> None:
    chance = random.Random(f"batch {seed}")
    limit_programs(seed % 5 + 1)
    if seed % 2:
        request.getfixturevalue("few_chunks")
    batch = random_batch(seed, LISTS)
    kind, factor = KINDS[seed % 3], FACTORS[seed]
    is_scale = chance.random() < 0.5
    run_batch(KERNELS, batch, CPU, kind=kind, factor=factor, is_scale=is_scale, seed=seed)


@contextlib.contextmanager
def counted() -> Iterator[Any]:
    """Bytes read and written, where the emulator counts them."""
    if not IS_COUNTED:
        yield None
        return
    from ptx_emulator import emulation

    with emulation() as record:
        yield record


@pytest.mark.skipif(not IS_COUNTED, reason="the emulator alone counts bytes")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_check_reads_each_gradient_once_and_unscaling_writes_it_once(dtype: torch.dtype) -> None:
    sizes = (5, window(dtype) + 3, 4 * window(dtype), 1)

    def moved(write: bool, count: int) -> tuple[int, int]:
        """Bytes read and written for the first tensors of a list."""
        grads = grads_of([guarded(normal(size, dtype), 1) for size in sizes[:count]])
        with counted() as record:
            if write:
                run_unscale(KERNELS, grads, flag(3.0), is_scale=True)
            else:
                run_check(KERNELS, grads, flag(3.0))
        return record.read, record.written

    total = sum(sizes) * dtype.itemsize
    reads, written = moved(False, len(sizes))
    # A check writes its flag and resets two words, for any list.
    assert written == moved(False, 1)[1] <= 4 + 2 * 8
    assert moved(True, len(sizes)) == (reads, written + total)
    # The rest is the table, which each thread reads for itself, from the caches on a GPU.
    threads, programs = 128, 3
    words = 16 + 2 * 2 * len(sizes) * programs
    assert total <= reads <= total + threads * words * 8


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_coefficient_of_1_reads_no_gradient(
    dtype: torch.dtype, limit_programs: Callable[[int], None]
) -> None:
    limit_programs(2)
    grad = guarded(normal(12 * window(dtype) + 5, dtype), 1)
    grad[7], grad[9] = torch.nan, torch.inf
    for factor, coefficient in ((1.0, 1.0), (0.5, 1.0), (1.0, 0.5), (2.0, 0.5)):
        expected, more = (grad * factor) * coefficient, {"coefficient": wide(coefficient)}
        with counted() as record:
            run_unscale(KERNELS, grads_of([grad]), flag(factor), is_scale=False, **more)
        assert_same(grad, expected)
        if record is not None and factor == coefficient:
            assert record.read < grad.nbytes / 4 and record.written <= 4 + 2 * 8
        elif record is not None:
            assert min(record.read, record.written) >= grad.nbytes


# Tracking, against plain comparisons


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("programs", [1, 3, 100])
def test_marks_of_random_lists(programs: int, limit_programs: Callable[[int], None]) -> None:
    limit_programs(programs)
    check_random_lists(KERNELS, CPU, range(3 * programs % 7, 3 * programs % 7 + 3))


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_marks_of_windows(dtype: torch.dtype) -> None:
    size = window(dtype)
    values = torch.randn(2 * size + 3, generator=torch.Generator().manual_seed(3)).to(dtype)
    values[::7] = 0.0
    grads = [guarded(values, 1), guarded(values[:size])]
    grads[0][-1], grads[1][0] = torch.inf, torch.nan
    for offset in offsets(dtype):
        # Bad values at either end, then a finite parameter without a mark.
        grads += [guarded(values[:n], offset) for n in (5, size, 5)]
        grads[-3][0], grads[-2][-1] = torch.nan, torch.inf
    check_passes(KERNELS, grads, CPU)


# Limits of the scale, counters and history, against a model; captured steps


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("limits", LIMITS)
def test_random_updates(limits: str) -> None:
    check_limits(KERNELS, CPU, limits)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("kind", ["momentum", "adam"])
def test_replays_are_torchs_eager_steps(
    kind: str, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    capturing = Capturing(launch, monkeypatch)
    assert_replays_are_eager(capturing, kind, lambda training: training.step(together), TorchScaler)
