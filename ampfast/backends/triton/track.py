"""What the Triton kernels note of each parameter; device code only."""

import triton
import triton.language as tl

from ampfast.backends.triton.elements import INFINITY, RAW, magnitude, used_magnitude

# Words of what is noted of a parameter, as csrc/track_layout.h names them.
_LAST_NON_FINITE = tl.constexpr(0)
_LAST_NAN = tl.constexpr(1)
_TIMES_NON_FINITE = tl.constexpr(2)
_TIMES_NAN = tl.constexpr(3)
MARK_WORDS = tl.constexpr(4)
_ELEMENTS = tl.constexpr(0)
_NONZERO = tl.constexpr(1)
_VANISHING = tl.constexpr(2)
_SUBNORMAL = tl.constexpr(3)
_OVERFLOWING = tl.constexpr(4)
_LARGEST = tl.constexpr(5)
_SMALLEST = tl.constexpr(6)
HEALTH_WORDS = tl.constexpr(7)

_COMPLEMENT = tl.constexpr(0x7FFFFFFFFFFFFFFF)


@triton.jit
def no_health(DTYPE: tl.constexpr, THREADS: tl.constexpr):
    """The health of nothing, of each thread."""
    count = tl.zeros([THREADS], dtype=tl.int32)
    if DTYPE == tl.float64:
        smallest = tl.full([THREADS], 0xFFFFFFFFFFFFFFFF, dtype=tl.uint64)
    else:
        smallest = tl.full([THREADS], 0xFFFFFFFF, dtype=tl.uint32)
    return smallest, count, count, count, count


@triton.jit
def counted(values, health, THREADS: tl.constexpr):
    """Counts one vector of each thread by magnitude; zeros change nothing.

    Magnitudes less one, as unsigned numbers, put zero behind all others: a single comparison tells
    whether one is below a bound and not zero.
    """
    smallest, nonzero, vanishing, subnormal, overflowing = health
    VEC: tl.constexpr = values.shape[0] // THREADS
    UNSIGNED: tl.constexpr = tl.uint64 if values.dtype == tl.float64 else tl.uint32
    # Of 2^-24, 2^-14, and 65504 or what is next below it.
    if values.dtype == tl.float64:
        RANGE: tl.constexpr = (0x3E70000000000000, 0x3F10000000000000, 0x40EFFC0000000000)
    elif values.dtype == tl.float32:
        RANGE: tl.constexpr = (0x33800000, 0x38800000, 0x477FE000)
    elif values.dtype == tl.bfloat16:
        RANGE: tl.constexpr = (0x3380, 0x3880, 0x477F)
    else:
        RANGE: tl.constexpr = (0x0001, 0x0400, 0x7BFF)
    bits = tl.reshape(magnitude(values), [THREADS, VEC])
    less_one = (bits - 1).to(UNSIGNED, bitcast=True)
    smallest = tl.minimum(smallest, tl.min(less_one, axis=1))
    nonzero += tl.sum((bits != 0).to(tl.int32), axis=1)
    if RANGE[0] > 1:  # else nothing is
        vanishing += tl.sum((less_one < RANGE[0] - 1).to(tl.int32), axis=1)
    subnormal += tl.sum((less_one < RANGE[1] - 1).to(tl.int32), axis=1)
    overflowing += tl.sum((bits > RANGE[2]).to(tl.int32), axis=1)
    return smallest, nonzero, vanishing, subnormal, overflowing


@triton.jit
def mark(row_ptr, now_ptr, used):
    """Counts this step for a parameter, once, if `used`, float64 bits of one or several threads,
    are those of a value that is not finite.
    """
    bad = used >= INFINITY
    # By the first thread that raises it; without one nothing is read.
    none = used * 0
    step = tl.load(now_ptr + none, mask=bad, other=0) + 1
    seen = tl.atomic_max(row_ptr + _LAST_NON_FINITE + none, step, mask=bad, sem="relaxed")
    times_ptr = row_ptr + _TIMES_NON_FINITE + none
    tl.atomic_add(times_ptr, none + 1, mask=bad & (seen < step), sem="relaxed")
    bad = used > INFINITY
    seen = tl.atomic_max(row_ptr + _LAST_NAN + none, step, mask=bad, sem="relaxed")
    times_ptr = row_ptr + _TIMES_NAN + none
    tl.atomic_add(times_ptr, none + 1, mask=bad & (seen < step), sem="relaxed")


@triton.jit
def add_health(row_ptr, length, largest, health, DTYPE: tl.constexpr, SOFT: tl.constexpr):
    """Adds what all threads of a program counted of a tensor; `largest` are bits of its dtype."""
    smallest, nonzero, vanishing, subnormal, overflowing = health
    tl.store(row_ptr + _ELEMENTS, length)
    tl.atomic_add(row_ptr + _NONZERO, tl.sum(nonzero, axis=0).to(tl.int64), sem="relaxed")
    tl.atomic_add(row_ptr + _VANISHING, tl.sum(vanishing, axis=0).to(tl.int64), sem="relaxed")
    tl.atomic_add(row_ptr + _SUBNORMAL, tl.sum(subnormal, axis=0).to(tl.int64), sem="relaxed")
    tl.atomic_add(row_ptr + _OVERFLOWING, tl.sum(overflowing, axis=0).to(tl.int64), sem="relaxed")
    largest = used_magnitude(largest, 1.0, RAW, DTYPE, SOFT)
    tl.atomic_max(row_ptr + _LARGEST, largest, sem="relaxed")
    SIGNED: tl.constexpr = tl.int64 if DTYPE == tl.float64 else tl.int32
    # The greatest number stands for none, and becomes 0.
    least = tl.min(smallest, axis=0).to(SIGNED, bitcast=True) + 1
    least = tl.where(least > 0, _COMPLEMENT - used_magnitude(least, 1.0, RAW, DTYPE, SOFT), 0)
    tl.atomic_max(row_ptr + _SMALLEST, least, sem="relaxed")
