"""How a Triton kernel goes over the elements of one window of a tensor; device code only."""

import triton
import triton.language as tl

from ampfast.backends.triton.elements import as_written, magnitude, times, widen
from ampfast.backends.triton.track import counted


@triton.jit
def _load(base, lane, low, high, WHOLE: tl.constexpr):
    if WHOLE:
        return tl.load(base + lane)
    else:
        return tl.load(base + lane, mask=(lane >= low) & (lane < high), other=0.0)


@triton.jit
def _take(
    values,
    base,
    lane,
    low,
    high,
    factor,
    coefficient_ptr,
    peak,
    squares,
    health,
    WRITE: tl.constexpr,
    FACTOR: tl.constexpr,
    NORM: tl.constexpr,
    HEALTH: tl.constexpr,
    WHOLE: tl.constexpr,
    THREADS: tl.constexpr,
    SOFT: tl.constexpr,
):
    """Takes one vector of each thread; returns the peak, the squares and the health with it.

    What is reduced is reduced inside each thread: threads exchange nothing here.
    """
    DTYPE: tl.constexpr = values.dtype
    VEC: tl.constexpr = values.shape[0] // THREADS
    peak = tl.maximum(peak, tl.max(tl.reshape(magnitude(values), [THREADS, VEC]), axis=1))
    if HEALTH:
        health = counted(values, health, THREADS)
    if WRITE or NORM:
        used = times(widen(values, SOFT), factor)
        if WRITE:
            written = as_written(used, coefficient_ptr, DTYPE, SOFT)
            if WHOLE:
                tl.store(base + lane, written)
            else:
                tl.store(base + lane, written, mask=(lane >= low) & (lane < high))
        if NORM:
            if not WHOLE:
                used = tl.where((lane >= low) & (lane < high), used, 0.0)
            squares += tl.sum(tl.reshape(used * used, [THREADS, VEC]), axis=1)
    return peak, squares, health


@triton.jit
def take_window(
    base,
    low,
    high,
    factor,
    coefficient_ptr,
    health,
    WRITE: tl.constexpr,
    FACTOR: tl.constexpr,
    NORM: tl.constexpr,
    HEALTH: tl.constexpr,
    WHOLE: tl.constexpr,
    DTYPE: tl.constexpr,
    LOADS: tl.constexpr,
    THREADS: tl.constexpr,
    SOFT: tl.constexpr,
):
    """Takes a window; returns each thread's peak, its health, and squares as is calculated."""
    PART: tl.constexpr = THREADS * 16 // (DTYPE.primitive_bitwidth // 8)
    lane = tl.arange(0, PART)
    peak = tl.zeros([THREADS], dtype=tl.int64 if DTYPE == tl.float64 else tl.int32)
    squares = tl.zeros([THREADS], dtype=tl.float64 if DTYPE == tl.float64 else tl.float32)
    if WHOLE:
        # All loads first: they cannot move above a store.
        a = _load(base, lane, low, high, WHOLE)
        b = _load(base, lane + PART, low, high, WHOLE)
        if LOADS == 4:
            c = _load(base, lane + 2 * PART, low, high, WHOLE)
            d = _load(base, lane + 3 * PART, low, high, WHOLE)
        peak, squares, health = _take(
            *(a, base, lane, low, high, factor, coefficient_ptr),
            *(peak, squares, health, WRITE, FACTOR, NORM, HEALTH, WHOLE, THREADS, SOFT),
        )
        peak, squares, health = _take(
            *(b, base, lane + PART, low, high, factor, coefficient_ptr),
            *(peak, squares, health, WRITE, FACTOR, NORM, HEALTH, WHOLE, THREADS, SOFT),
        )
        if LOADS == 4:
            peak, squares, health = _take(
                *(c, base, lane + 2 * PART, low, high, factor, coefficient_ptr),
                *(peak, squares, health, WRITE, FACTOR, NORM, HEALTH, WHOLE, THREADS, SOFT),
            )
            peak, squares, health = _take(
                *(d, base, lane + 3 * PART, low, high, factor, coefficient_ptr),
                *(peak, squares, health, WRITE, FACTOR, NORM, HEALTH, WHOLE, THREADS, SOFT),
            )
    else:
        # One by one, and only where there is something: a load here is of single elements, each in
        # a register of its own.
        for part in tl.static_range(LOADS):
            if part * PART < high:
                values = _load(base, lane + part * PART, low, high, WHOLE)
                peak, squares, health = _take(
                    *(values, base, lane + part * PART, low, high, factor, coefficient_ptr),
                    *(peak, squares, health, WRITE, FACTOR, NORM, HEALTH, WHOLE, THREADS, SOFT),
                )
    return peak, squares, health
