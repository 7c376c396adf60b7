"""The arithmetic of single elements in the Triton kernels; device code only."""

import triton
import triton.language as tl

# What is done with the factor, and what decides whether a step is skipped.
RAW = tl.constexpr(0)  # no factor: the values themselves
INVERSE = tl.constexpr(1)  # values times the factor
SCALE = tl.constexpr(2)  # values times the factor's float64 reciprocal, rounded to float32
DIVIDE = tl.constexpr(3)  # the largest value divided by the factor; reads only

# Of float64 bits: from here on a magnitude is not finite.
INFINITY = tl.constexpr(0x7FF0000000000000)


@triton.jit
def magnitude(value):
    """Magnitudes as integers, which are ordered as they are, with NaN above infinity."""
    if value.dtype == tl.float64:
        return value.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
    elif value.dtype == tl.float32:
        return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        return value.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF


@triton.jit
def widen(value, SOFT: tl.constexpr):
    """To the type in which is calculated."""
    if value.dtype == tl.float64:
        return value
    elif SOFT and value.dtype == tl.bfloat16:
        return (value.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return value.to(tl.float32)


@triton.jit
def narrow(value, DTYPE: tl.constexpr, SOFT: tl.constexpr):
    """To the type of the gradient, to the nearest, ties to even."""
    if SOFT and DTYPE == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return value.to(DTYPE)


@triton.jit
def load_factor(factor_ptr, FACTOR: tl.constexpr):
    if FACTOR == RAW:
        return 1.0
    elif FACTOR == SCALE:
        return (1.0 / tl.load(factor_ptr).to(tl.float64)).to(tl.float32)
    else:
        return tl.load(factor_ptr)


@triton.jit
def times(value, factor):
    """The product, in the type in which is calculated."""
    return value * factor.to(value.dtype)


@triton.jit
def as_written(value, coefficient_ptr, DTYPE: tl.constexpr, SOFT: tl.constexpr):
    """An unscaled value as it is written; the coefficient multiplies what unscaling would write."""
    written = narrow(value, DTYPE, SOFT)
    if coefficient_ptr is not None:
        wide = widen(written, SOFT)
        written = narrow(wide * tl.load(coefficient_ptr).to(wide.dtype), DTYPE, SOFT)
    return written


@triton.jit
def used_magnitude(peak, factor, FACTOR: tl.constexpr, DTYPE: tl.constexpr, SOFT: tl.constexpr):
    """The float64 bits of the magnitude that the peak, given as bits, has once it is used."""
    if DTYPE == tl.float64:
        value = peak.to(tl.float64, bitcast=True)
    elif DTYPE == tl.float32:
        value = peak.to(tl.float32, bitcast=True)
    else:
        value = widen(peak.to(tl.int16).to(DTYPE, bitcast=True), SOFT)
    if FACTOR == DIVIDE:
        if DTYPE == tl.float64:
            value = value / factor.to(tl.float64)
        else:
            value = tl.div_rn(value, factor)
    elif FACTOR != RAW:
        value = widen(narrow(times(value, factor), DTYPE, SOFT), SOFT)
    return magnitude(value.to(tl.float64))


@triton.jit
def larger_or_nan(a, b):
    return tl.where((a != a) | (b <= a), a, b)
