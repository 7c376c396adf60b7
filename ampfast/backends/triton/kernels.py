"""The Triton kernels; device code only. `csrc/*_layout.h` say how what they read is laid out."""

import triton
import triton.language as tl

from ampfast.backends.triton.elements import (
    INFINITY,
    larger_or_nan,
    load_factor,
    used_magnitude,
)
from ampfast.backends.triton.scale_update import apply_update
from ampfast.backends.triton.track import HEALTH_WORDS, MARK_WORDS, add_health, mark, no_health
from ampfast.backends.triton.windows import take_window

# What the last program of a launch does.
NOTHING = tl.constexpr(0)
FINISH = tl.constexpr(1)  # writes the flag and the norms, and resets the header
UPDATE = tl.constexpr(2)  # and the scale

# Words of a table, as csrc/table_layout.h names them.
_FINISHED = tl.constexpr(0)
_PEAK = tl.constexpr(1)
_PARTIALS = tl.constexpr(2)
_PROGRAMS = tl.constexpr(3)
_TENSORS = tl.constexpr(0)
_WINDOWS = tl.constexpr(1)
_SEGMENT_PROGRAMS = tl.constexpr(2)
_FIRST_PROGRAM = tl.constexpr(3)
_PARAMETERS = tl.constexpr(4)
_SEGMENT_WORDS = tl.constexpr(8)
_ALIGNMENT = tl.constexpr(16)


@triton.jit
def _sum_of_partials(table_ptr):
    """Sums what all programs of all launches left, in an order that does not change."""
    partials_ptr = table_ptr + tl.load(table_ptr + _PARTIALS)
    count = tl.load(table_ptr + _PROGRAMS)
    lane = tl.arange(0, 128)
    total = tl.zeros([128], dtype=tl.float64)
    first = count * 0
    while first < count:
        # Past the first-level cache, which may hold what stood there at the last launch.
        bits = tl.load(
            partials_ptr + first + lane, mask=first + lane < count, other=0, cache_modifier=".cg"
        )
        total += bits.to(tl.float64, bitcast=True)
        first += 128
    return tl.sum(total, axis=0)


@triton.jit(
    do_not_specialize=[
        *("segment", "factor_ptr", "coefficient_ptr", "found_inf_ptr", "norms_ptr"),
        *("marks_ptr", "now_ptr", "health_ptr"),
        *("scale_ptr", "growth_tracker_ptr", "state_ptr", "other_found_inf_ptr"),
        *("growth_factor", "backoff_factor", "growth_interval"),
    ]
)
def multi_tensor(
    table_ptr,
    segment: tl.int64,
    factor_ptr,
    coefficient_ptr,
    found_inf_ptr,
    norms_ptr,
    marks_ptr,
    now_ptr,
    health_ptr,
    scale_ptr,
    growth_tracker_ptr,
    state_ptr,
    other_found_inf_ptr,
    growth_factor: tl.float64,
    backoff_factor: tl.float64,
    growth_interval: tl.int64,
    DTYPE: tl.constexpr,
    WRITE: tl.constexpr,
    FACTOR: tl.constexpr,
    NORM: tl.constexpr,
    EPILOGUE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    LOADS: tl.constexpr,
    THREADS: tl.constexpr,
    SOFT: tl.constexpr,
):
    """One pass over the gradients of one dtype: checks them and, with WRITE, unscales them.

    A program takes windows that follow one another. Only the first and the last window of a tensor
    are masked; the others are read and written 16 bytes at a time. Pointers that are None leave out
    what they are for: `coefficient_ptr` a second factor on what is written, `marks_ptr` which
    parameters are not finite, `health_ptr` how large the values of each are. SOFT is for the
    interpreter, which converts bfloat16 wrongly.
    """
    SIZE: tl.constexpr = DTYPE.primitive_bitwidth // 8
    WINDOW: tl.constexpr = LOADS * THREADS * 16 // SIZE
    HEALTH: tl.constexpr = health_ptr is not None

    program = tl.program_id(0).to(tl.int64)
    segment_ptr = table_ptr + segment
    tensors = tl.load(segment_ptr + _TENSORS)
    windows = tl.load(segment_ptr + _WINDOWS)
    programs = tl.load(segment_ptr + _SEGMENT_PROGRAMS)
    addresses_ptr = segment_ptr + _SEGMENT_WORDS
    lengths_ptr = addresses_ptr + tensors + 1
    start_ptr = lengths_ptr + tensors + 1 + 2 * program
    tensor = tl.load(start_ptr)
    window = tl.load(start_ptr + 1)
    left = (program + 1) * windows // programs - program * windows // programs
    address = tl.load(addresses_ptr + tensor)
    length = tl.load(lengths_ptr + tensor)
    factor = load_factor(factor_ptr, FACTOR)

    peak = tl.zeros([THREADS], dtype=tl.int64 if DTYPE == tl.float64 else tl.int32)
    squares = tl.zeros([THREADS], dtype=tl.float64)
    health = no_health(DTYPE, THREADS)
    worst = tl.zeros([], dtype=tl.int64)
    while left > 0:
        # Ahead of need: for many small tensors this is what a program waits for.
        next_address = tl.load(addresses_ptr + tensor + 1)
        next_length = tl.load(lengths_ptr + tensor + 1)
        base = (address & -_ALIGNMENT).to(tl.pointer_type(DTYPE)) + window * WINDOW
        base = tl.multiple_of(base, 16)
        low = (address & (_ALIGNMENT - 1)) // SIZE - window * WINDOW
        high = low + length
        if (low <= 0) & (high >= WINDOW):
            window_peak, window_squares, health = take_window(
                *(base, 0, WINDOW, factor, coefficient_ptr, health),
                *(WRITE, FACTOR, NORM, HEALTH, True, DTYPE, LOADS, THREADS, SOFT),
            )
        else:
            window_peak, window_squares, health = take_window(
                *(base, tl.maximum(low, 0).to(tl.int32), tl.minimum(high, WINDOW).to(tl.int32)),
                *(factor, coefficient_ptr, health),
                *(WRITE, FACTOR, NORM, HEALTH, False, DTYPE, LOADS, THREADS, SOFT),
            )
        peak = tl.maximum(peak, window_peak)
        if NORM:
            squares += window_squares.to(tl.float64)
        ends = high <= WINDOW
        if marks_ptr is not None:
            is_done = ends | (left == 1)  # this program, with the tensor
            if is_done:
                parameter = tl.load(table_ptr + tl.load(segment_ptr + _PARAMETERS) + tensor)
                row_ptr = marks_ptr + parameter * MARK_WORDS
                if HEALTH:
                    largest = tl.max(peak, axis=0)
                    used = used_magnitude(largest, factor, FACTOR, DTYPE, SOFT)
                    mark(row_ptr, now_ptr, used)
                    worst = tl.maximum(worst, used)
                    row_ptr = health_ptr + parameter * HEALTH_WORDS
                    add_health(row_ptr, length, largest, health, DTYPE, SOFT)
                    health = no_health(DTYPE, THREADS)
                    peak = tl.zeros_like(peak)
                else:
                    # Each thread by itself: they need not wait for each other.
                    used = used_magnitude(peak, factor, FACTOR, DTYPE, SOFT)
                    mark(row_ptr, now_ptr, used)
                    # So that the next tensor is judged by itself; a peak that passes may stay.
                    bad = used >= INFINITY
                    tl.atomic_max(table_ptr + _PEAK + used * 0, used, mask=bad, sem="relaxed")
                    peak = tl.where(bad, 0, peak)
        left -= 1
        tensor += ends.to(tl.int64)
        window = tl.where(ends, 0, window + 1)
        address = tl.where(ends, next_address, address)
        length = tl.where(ends, next_length, length)

    largest = used_magnitude(tl.max(peak, axis=0), factor, FACTOR, DTYPE, SOFT)
    tl.atomic_max(table_ptr + _PEAK, tl.maximum(largest, worst), sem="relaxed")
    if NORM:
        partial = tl.load(table_ptr + _PARTIALS) + tl.load(segment_ptr + _FIRST_PROGRAM) + program
        tl.store(table_ptr + partial, tl.sum(squares, axis=0).to(tl.int64, bitcast=True))
    if EPILOGUE != NOTHING:
        # Some versions of Triton put no barrier between the stores above and the atomic.
        tl.debug_barrier()
        finished = tl.atomic_add(table_ptr + _FINISHED, 1, sem="acq_rel", scope="gpu")
        if finished == programs - 1:
            tl.debug_barrier()
            worst = tl.atomic_max(table_ptr + _PEAK, tl.zeros([], dtype=tl.int64), sem="relaxed")
            found = worst >= INFINITY
            if NORM:
                tl.store(norms_ptr, _sum_of_partials(table_ptr))
                tl.store(norms_ptr + 1, worst.to(tl.float64, bitcast=True))
            any_found = found
            if ACCUMULATE:
                any_found = found | (tl.load(found_inf_ptr) != 0.0)
            if EPILOGUE == UPDATE:
                if other_found_inf_ptr is not None:
                    any_found |= tl.load(other_found_inf_ptr) != 0.0
                apply_update(
                    *(scale_ptr, growth_tracker_ptr, state_ptr, None, any_found),
                    *(growth_factor, backoff_factor, growth_interval),
                )
            # All threads have loaded what the first one now stores.
            tl.debug_barrier()
            if ACCUMULATE:
                tl.store(found_inf_ptr, 1.0, mask=found)
            else:
                tl.store(found_inf_ptr, found.to(tl.float32))
            tl.store(table_ptr + _FINISHED, tl.zeros([], dtype=tl.int64))
            tl.store(table_ptr + _PEAK, tl.zeros([], dtype=tl.int64))


@triton.jit(
    do_not_specialize=[
        *("scale_ptr", "growth_tracker_ptr", "state_ptr", "norm_ptr"),
        *("found_inf_a_ptr", "found_inf_b_ptr", "found_inf_c_ptr", "found_inf_d_ptr"),
        *("growth_factor", "backoff_factor", "growth_interval"),
    ]
)
def update_scale(
    scale_ptr,
    growth_tracker_ptr,
    state_ptr,
    norm_ptr,
    found_inf_a_ptr,
    found_inf_b_ptr,
    found_inf_c_ptr,
    found_inf_d_ptr,
    growth_factor: tl.float64,
    backoff_factor: tl.float64,
    growth_interval: tl.int64,
):
    """Updates the scale by itself; any of the flags counts. One program."""
    found = (tl.load(found_inf_a_ptr) != 0.0) | (tl.load(found_inf_b_ptr) != 0.0)
    found |= (tl.load(found_inf_c_ptr) != 0.0) | (tl.load(found_inf_d_ptr) != 0.0)
    apply_update(
        *(scale_ptr, growth_tracker_ptr, state_ptr, norm_ptr, found),
        *(growth_factor, backoff_factor, growth_interval),
    )


@triton.jit(
    do_not_specialize=[
        *("norms_ptr", "rows", "max_norm", "epsilon"),
        *("norm_ptr", "coefficient_ptr", "scale_ptr", "divisor_ptr"),
    ]
)
def clip_coefficient(
    norms_ptr,
    rows: tl.int64,
    max_norm: tl.float64,
    epsilon: tl.float64,
    norm_ptr,
    coefficient_ptr,
    scale_ptr,
    divisor_ptr,
    LARGEST: tl.constexpr,
):
    """Writes the norm and what clipping multiplies by, from norms that passes left. One program.

    `norms_ptr` has a row for each pass. With LARGEST the norm is the largest magnitude, else the
    2-norm. Where `divisor_ptr` is given, the scale over the coefficient is written there.
    """
    squares = tl.zeros([], dtype=tl.float64)
    peak = tl.zeros([], dtype=tl.float64)
    row = rows * 0
    while row < rows:
        squares += tl.load(norms_ptr + 2 * row)
        peak = larger_or_nan(peak, tl.load(norms_ptr + 2 * row + 1))
        row += 1
    total = peak if LARGEST else tl.sqrt(squares)
    norm = total.to(norm_ptr.dtype.element_ty)
    quotient = max_norm / (norm.to(tl.float64) + epsilon)
    # An infinite limit clips nothing: inf / inf would be NaN.
    coefficient = tl.where((quotient > 1.0) | (max_norm == float("inf")), 1.0, quotient)
    tl.store(norm_ptr, norm)
    tl.store(coefficient_ptr, coefficient)
    if divisor_ptr is not None:
        tl.store(divisor_ptr, (tl.load(scale_ptr).to(tl.float64) / coefficient).to(tl.float32))
