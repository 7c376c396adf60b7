"""Random lists, many epilogues and bytes moved: the GPU tests, scaled down."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from batches import KINDS, every_offset_batch, random_batch, run_batch
from device_parity import BACKEND, CPU, KERNELS, guarded, normal, window
from epilogues import epilogues
from support.comparison import FLOATS, assert_same
from support.kernel_calls import grads_of, run_check, run_unscale
from support.kernel_parity import flag
from support.requested_kernels import ON_HOST

from ampfast.backends.core import WINDOW_BYTES

IS_COMPILED = BACKEND is None
# The interpreter is ten times slower.
LISTS = 12 if IS_COMPILED else 2
IS_COUNTED = IS_COMPILED and not ON_HOST
LAUNCHES = 200 if IS_COMPILED else 20
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


@pytest.mark.skipif(
    not IS_COMPILED, reason="test_device_lists.py has some of them for the interpreter"
)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sizes_around_the_window_at_every_offset(dtype: torch.dtype) -> None:
    batch = every_offset_batch(dtype)
    run_batch(KERNELS, batch, CPU, kind="normal", factor=1 / 3, is_scale=False, seed=1)


@pytest.mark.parametrize(
    ("programs", "launches"), [(1, LAUNCHES), (4, LAUNCHES), (13, LAUNCHES // 4)]
)
def test_many_launches_find_every_infinity(
    programs: int, launches: int, limit_programs: Callable[[int], None]
) -> None:
    limit_programs(programs)
    elements = programs * WINDOW_BYTES // 2
    factors = (2.0, 0.5, 3)
    found, expected, state = epilogues(KERNELS, CPU, elements, launches, launches, factors)
    assert found == 0, f"{found} of {launches} flags are wrong"
    assert state == expected


@pytest.mark.skipif(not IS_COUNTED, reason="the emulator alone counts bytes")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_check_reads_each_gradient_once_and_unscaling_writes_it_once(dtype: torch.dtype) -> None:
    from ptx_emulator import emulation

    sizes = (5, window(dtype) + 3, 4 * window(dtype), 1)

    def moved(write: bool, count: int) -> tuple[int, int]:
        """Bytes read and written for the first tensors of a list."""
        grads = grads_of([guarded(normal(size, dtype), 1) for size in sizes[:count]])
        factor = flag(3.0)
        with emulation() as record:
            if write:
                run_unscale(KERNELS, grads, factor, is_scale=True)
            else:
                run_check(KERNELS, grads, factor)
        return record.read, record.written

    total = sum(sizes) * dtype.itemsize
    reads, written = moved(False, len(sizes))
    unscale_reads, unscale_written = moved(True, len(sizes))
    # A check writes its flag and resets two words, for any list.
    assert written == moved(False, 1)[1] <= 4 + 2 * 8
    assert unscale_written - written == total
    assert unscale_reads == reads
    # The rest is the table, which each thread reads for itself, from the caches on a GPU.
    threads, programs = 128, 3
    words = 16 + 2 * 2 * len(sizes) * programs
    assert total <= reads <= total + threads * words * 8


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_coefficient_of_1_reads_no_gradient(
    dtype: torch.dtype, limit_programs: Callable[[int], None]
) -> None:
    limit_programs(2)
    bits = guarded(normal(12 * window(dtype) + 5, dtype), 1)
    bits[7], bits[9] = torch.nan, torch.inf
    before = bits.clone()

    def clip(factor: float, coefficient: float) -> tuple[int, int]:
        given = {"coefficient": torch.tensor(coefficient, dtype=torch.float64)}
        if not IS_COUNTED:
            run_unscale(KERNELS, grads_of([bits]), flag(factor), is_scale=False, **given)
            return 0, 0
        from ptx_emulator import emulation

        with emulation() as record:
            run_unscale(KERNELS, grads_of([bits]), flag(factor), is_scale=False, **given)
        return record.read, record.written

    read, written = clip(1.0, 1.0)
    assert_same(bits, before)
    if IS_COUNTED:
        assert read < bits.nbytes / 4 and written <= 4 + 2 * 8
    for factor, coefficient in ((0.5, 1.0), (1.0, 0.5), (2.0, 0.5)):
        expected = (bits * factor) * coefficient
        read, written = clip(factor, coefficient)
        assert_same(bits, expected)
        assert not IS_COUNTED or min(read, written) >= bits.nbytes
