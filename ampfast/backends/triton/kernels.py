"""The Triton kernels; device code only. `csrc/*_layout.h` say how what they read is laid out."""

import triton
import triton.language as tl

# What is done with the factor, and what decides whether a step is skipped.
RAW = tl.constexpr(0)  # no factor: the values themselves
INVERSE = tl.constexpr(1)  # values times the factor
SCALE = tl.constexpr(2)  # values times the factor's float64 reciprocal, rounded to float32
DIVIDE = tl.constexpr(3)  # the largest value divided by the factor; reads only

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

# Words of a scaler's state, as csrc/scale_state.h names them.
STEPS = tl.constexpr(0)
SKIPPED = tl.constexpr(1)
GROWTHS = tl.constexpr(2)
BACKOFFS = tl.constexpr(3)
CONSECUTIVE_SKIPS = tl.constexpr(4)
SKIPS_AT_MINIMUM = tl.constexpr(5)
TOLERATED = tl.constexpr(6)
LAST_SKIPPED = tl.constexpr(7)
BEFORE = tl.constexpr(8)
SCALE_BEFORE = tl.constexpr(16)
TRACKER_BEFORE = tl.constexpr(17)
MIN_SCALE = tl.constexpr(18)
MAX_SCALE = tl.constexpr(19)
MOST_TOLERATED = tl.constexpr(20)
REFILLS_ON_FINITE_STEPS = tl.constexpr(21)
RING = tl.constexpr(32)
RING_STEPS = tl.constexpr(1024)
RING_SCALE = tl.constexpr(0)
RING_STATUS = tl.constexpr(1)
RING_NORM = tl.constexpr(2)
RING_WORDS = tl.constexpr(3)
# Words of what is noted of a parameter, as csrc/track_layout.h names them.
_LAST_NON_FINITE = tl.constexpr(0)
_LAST_NAN = tl.constexpr(1)
_TIMES_NON_FINITE = tl.constexpr(2)
_TIMES_NAN = tl.constexpr(3)
_MARK_WORDS = tl.constexpr(4)
_ELEMENTS = tl.constexpr(0)
_NONZERO = tl.constexpr(1)
_VANISHING = tl.constexpr(2)
_SUBNORMAL = tl.constexpr(3)
_OVERFLOWING = tl.constexpr(4)
_LARGEST = tl.constexpr(5)
_SMALLEST = tl.constexpr(6)
_HEALTH_WORDS = tl.constexpr(7)

_INFINITY = tl.constexpr(0x7FF0000000000000)
_COMPLEMENT = tl.constexpr(0x7FFFFFFFFFFFFFFF)


@triton.jit
def _bits(value):
    """Magnitudes as integers, which are ordered as they are, with NaN above infinity."""
    if value.dtype == tl.float64:
        return value.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
    elif value.dtype == tl.float32:
        return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        return value.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF


@triton.jit
def _widen(value, SOFT: tl.constexpr):
    """To the type in which is calculated."""
    if value.dtype == tl.float64:
        return value
    elif SOFT and value.dtype == tl.bfloat16:
        return (value.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return value.to(tl.float32)


@triton.jit
def _narrow(value, DTYPE: tl.constexpr, SOFT: tl.constexpr):
    """To the type of the gradient, to the nearest, ties to even."""
    if SOFT and DTYPE == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return value.to(DTYPE)


@triton.jit
def _factor(factor_ptr, FACTOR: tl.constexpr):
    if FACTOR == RAW:
        return 1.0
    elif FACTOR == SCALE:
        return (1.0 / tl.load(factor_ptr).to(tl.float64)).to(tl.float32)
    else:
        return tl.load(factor_ptr)


@triton.jit
def _times(value, factor, FACTOR: tl.constexpr):
    """The product, in the type in which is calculated."""
    if FACTOR == RAW:
        return value
    else:
        return value * factor.to(value.dtype)


@triton.jit
def _written(value, coefficient_ptr, DTYPE: tl.constexpr, SOFT: tl.constexpr):
    """An unscaled value as it is written; the coefficient multiplies what unscaling would write."""
    narrow = _narrow(value, DTYPE, SOFT)
    if coefficient_ptr is not None:
        wide = _widen(narrow, SOFT)
        narrow = _narrow(wide * tl.load(coefficient_ptr).to(wide.dtype), DTYPE, SOFT)
    return narrow


@triton.jit
def _load(base, lane, low, high, WHOLE: tl.constexpr):
    if WHOLE:
        return tl.load(base + lane)
    else:
        return tl.load(base + lane, mask=(lane >= low) & (lane < high), other=0.0)


@triton.jit
def _counted(values, health, THREADS: tl.constexpr):
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
    bits = tl.reshape(_bits(values), [THREADS, VEC])
    less_one = (bits - 1).to(UNSIGNED, bitcast=True)
    smallest = tl.minimum(smallest, tl.min(less_one, axis=1))
    nonzero += tl.sum((bits != 0).to(tl.int32), axis=1)
    if RANGE[0] > 1:  # else nothing is
        vanishing += tl.sum((less_one < RANGE[0] - 1).to(tl.int32), axis=1)
    subnormal += tl.sum((less_one < RANGE[1] - 1).to(tl.int32), axis=1)
    overflowing += tl.sum((bits > RANGE[2]).to(tl.int32), axis=1)
    return smallest, nonzero, vanishing, subnormal, overflowing


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
    peak = tl.maximum(peak, tl.max(tl.reshape(_bits(values), [THREADS, VEC]), axis=1))
    if HEALTH:
        health = _counted(values, health, THREADS)
    if WRITE or NORM:
        used = _times(_widen(values, SOFT), factor, FACTOR)
        if WRITE:
            written = _written(used, coefficient_ptr, DTYPE, SOFT)
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
def _window(
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


@triton.jit
def _used_bits(peak, factor, FACTOR: tl.constexpr, DTYPE: tl.constexpr, SOFT: tl.constexpr):
    """The float64 bits of the magnitude that the peak, given as bits, has once it is used."""
    if DTYPE == tl.float64:
        value = peak.to(tl.float64, bitcast=True)
    elif DTYPE == tl.float32:
        value = peak.to(tl.float32, bitcast=True)
    else:
        value = _widen(peak.to(tl.int16).to(DTYPE, bitcast=True), SOFT)
    if FACTOR == DIVIDE:
        if DTYPE == tl.float64:
            value = value / factor.to(tl.float64)
        else:
            value = tl.div_rn(value, factor)
    elif FACTOR != RAW:
        value = _widen(_narrow(_times(value, factor, FACTOR), DTYPE, SOFT), SOFT)
    return _bits(value.to(tl.float64))


@triton.jit
def _larger_or_nan(a, b):
    return tl.where((a != a) | (b <= a), a, b)


@triton.jit
def _mark(row_ptr, now_ptr, used):
    """Counts this step for a parameter, once, if `used`, float64 bits of one or several threads,
    are those of a value that is not finite.
    """
    bad = used >= _INFINITY
    # By the first thread that raises it; without one nothing is read.
    none = used * 0
    step = tl.load(now_ptr + none, mask=bad, other=0) + 1
    seen = tl.atomic_max(row_ptr + _LAST_NON_FINITE + none, step, mask=bad, sem="relaxed")
    times_ptr = row_ptr + _TIMES_NON_FINITE + none
    tl.atomic_add(times_ptr, none + 1, mask=bad & (seen < step), sem="relaxed")
    bad = used > _INFINITY
    seen = tl.atomic_max(row_ptr + _LAST_NAN + none, step, mask=bad, sem="relaxed")
    times_ptr = row_ptr + _TIMES_NAN + none
    tl.atomic_add(times_ptr, none + 1, mask=bad & (seen < step), sem="relaxed")


@triton.jit
def _add_health(row_ptr, length, largest, health, DTYPE: tl.constexpr, SOFT: tl.constexpr):
    """Adds what all threads of a program counted of a tensor; `largest` are bits of its dtype."""
    smallest, nonzero, vanishing, subnormal, overflowing = health
    tl.store(row_ptr + _ELEMENTS, length)
    tl.atomic_add(row_ptr + _NONZERO, tl.sum(nonzero, axis=0).to(tl.int64), sem="relaxed")
    tl.atomic_add(row_ptr + _VANISHING, tl.sum(vanishing, axis=0).to(tl.int64), sem="relaxed")
    tl.atomic_add(row_ptr + _SUBNORMAL, tl.sum(subnormal, axis=0).to(tl.int64), sem="relaxed")
    tl.atomic_add(row_ptr + _OVERFLOWING, tl.sum(overflowing, axis=0).to(tl.int64), sem="relaxed")
    largest = _used_bits(largest, 1.0, RAW, DTYPE, SOFT)
    tl.atomic_max(row_ptr + _LARGEST, largest, sem="relaxed")
    SIGNED: tl.constexpr = tl.int64 if DTYPE == tl.float64 else tl.int32
    # The greatest number stands for none, and becomes 0.
    least = tl.min(smallest, axis=0).to(SIGNED, bitcast=True) + 1
    least = tl.where(least > 0, _COMPLEMENT - _used_bits(least, 1.0, RAW, DTYPE, SOFT), 0)
    tl.atomic_max(row_ptr + _SMALLEST, least, sem="relaxed")


@triton.jit
def _no_health(DTYPE: tl.constexpr, THREADS: tl.constexpr):
    """The health of nothing, of each thread."""
    count = tl.zeros([THREADS], dtype=tl.int32)
    if DTYPE == tl.float64:
        smallest = tl.full([THREADS], 0xFFFFFFFFFFFFFFFF, dtype=tl.uint64)
    else:
        smallest = tl.full([THREADS], 0xFFFFFFFF, dtype=tl.uint32)
    return smallest, count, count, count, count


@triton.jit
def _word(value):
    """A float32 as it stands in a state."""
    return value.to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def _float_at(ptr):
    return tl.load(ptr).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _update(
    scale_ptr,
    growth_tracker_ptr,
    state_ptr,
    norm_ptr,
    found,
    growth_factor,
    backoff_factor,
    growth_interval,
):
    """Writes the next scale and growth tracker, and into `state_ptr`, if given, what is kept.

    torch's update, except that a tracker beyond a lowered interval grows too; then the policy of
    the state. `csrc/scale_state.h` does the same.
    """
    before = tl.load(scale_ptr)
    tracker_before = tl.load(growth_tracker_ptr)
    wide = before.to(tl.float64)
    grown = (wide * growth_factor).to(tl.float32)
    grown = tl.where(_bits(grown) < 0x7F800000, grown, before)
    successful = tracker_before.to(tl.int64) + 1
    grows = (growth_interval >= 1) & (successful >= growth_interval) & (found == 0)
    scale = tl.where(found, (wide * backoff_factor).to(tl.float32), tl.where(grows, grown, before))
    tracker = tl.where(found | grows, 0, successful).to(tl.int32)
    if state_ptr is not None:
        one = found.to(tl.int64)
        steps = tl.load(state_ptr + STEPS)
        skipped = tl.load(state_ptr + SKIPPED)
        growths = tl.load(state_ptr + GROWTHS)
        backoffs = tl.load(state_ptr + BACKOFFS)
        consecutive = tl.load(state_ptr + CONSECUTIVE_SKIPS)
        at_minimum = tl.load(state_ptr + SKIPS_AT_MINIMUM)
        tolerated = tl.load(state_ptr + TOLERATED)
        last_skipped = tl.load(state_ptr + LAST_SKIPPED)
        min_scale = _float_at(state_ptr + MIN_SCALE)
        max_scale = _float_at(state_ptr + MAX_SCALE)
        most_tolerated = tl.load(state_ptr + MOST_TOLERATED)
        refills = grows | (tl.load(state_ptr + REFILLS_ON_FINITE_STEPS) != 0)
        now_tolerated = tl.where(found, tolerated + 1, tl.where(refills, 0, tolerated))
        scale = tl.where(found & (now_tolerated <= most_tolerated), before, scale)
        # A scale that was set beyond them is not moved the wrong way.
        most = tl.where(before > max_scale, before, max_scale)
        least = tl.where(before < min_scale, before, min_scale)
        too_high = (scale > before) & (max_scale > 0) & (scale > max_scale)
        too_low = (scale < before) & (min_scale > 0) & (scale < min_scale)
        scale = tl.where(too_high, most, tl.where(too_low, least, scale))
        is_stuck = found & (min_scale > 0) & (before <= min_scale)
        entry_ptr = state_ptr + RING + steps % RING_STEPS * RING_WORDS
        status = one
        norm = one * 0
        if norm_ptr is not None:
            status += 2
            norm = _word(tl.load(norm_ptr))
        tl.debug_barrier()
        tl.store(state_ptr + BEFORE + STEPS, steps)
        tl.store(state_ptr + BEFORE + SKIPPED, skipped)
        tl.store(state_ptr + BEFORE + GROWTHS, growths)
        tl.store(state_ptr + BEFORE + BACKOFFS, backoffs)
        tl.store(state_ptr + BEFORE + CONSECUTIVE_SKIPS, consecutive)
        tl.store(state_ptr + BEFORE + SKIPS_AT_MINIMUM, at_minimum)
        tl.store(state_ptr + BEFORE + TOLERATED, tolerated)
        tl.store(state_ptr + BEFORE + LAST_SKIPPED, last_skipped)
        tl.store(state_ptr + SCALE_BEFORE, _word(before))
        tl.store(state_ptr + TRACKER_BEFORE, tracker_before.to(tl.int64))
        tl.store(entry_ptr + RING_SCALE, _word(before))
        tl.store(entry_ptr + RING_STATUS, status)
        tl.store(entry_ptr + RING_NORM, norm)
        tl.store(state_ptr + STEPS, steps + 1)
        tl.store(state_ptr + SKIPPED, skipped + one)
        tl.store(state_ptr + GROWTHS, growths + (scale > before).to(tl.int64))
        tl.store(state_ptr + BACKOFFS, backoffs + (scale < before).to(tl.int64))
        tl.store(state_ptr + CONSECUTIVE_SKIPS, tl.where(found, consecutive + 1, 0))
        tl.store(state_ptr + SKIPS_AT_MINIMUM, tl.where(is_stuck, at_minimum + 1, 0))
        tl.store(state_ptr + TOLERATED, now_tolerated)
        tl.store(state_ptr + LAST_SKIPPED, tl.where(found, steps + 1, last_skipped))
    tl.debug_barrier()
    tl.store(scale_ptr, scale)
    tl.store(growth_tracker_ptr, tracker)


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
    factor = _factor(factor_ptr, FACTOR)

    peak = tl.zeros([THREADS], dtype=tl.int64 if DTYPE == tl.float64 else tl.int32)
    squares = tl.zeros([THREADS], dtype=tl.float64)
    health = _no_health(DTYPE, THREADS)
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
            window_peak, window_squares, health = _window(
                *(base, 0, WINDOW, factor, coefficient_ptr, health),
                *(WRITE, FACTOR, NORM, HEALTH, True, DTYPE, LOADS, THREADS, SOFT),
            )
        else:
            window_peak, window_squares, health = _window(
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
                row_ptr = marks_ptr + parameter * _MARK_WORDS
                if HEALTH:
                    largest = tl.max(peak, axis=0)
                    used = _used_bits(largest, factor, FACTOR, DTYPE, SOFT)
                    _mark(row_ptr, now_ptr, used)
                    worst = tl.maximum(worst, used)
                    row_ptr = health_ptr + parameter * _HEALTH_WORDS
                    _add_health(row_ptr, length, largest, health, DTYPE, SOFT)
                    health = _no_health(DTYPE, THREADS)
                    peak = tl.zeros_like(peak)
                else:
                    # Each thread by itself: they need not wait for each other.
                    used = _used_bits(peak, factor, FACTOR, DTYPE, SOFT)
                    _mark(row_ptr, now_ptr, used)
                    # So that the next tensor is judged by itself; a peak that passes may stay.
                    bad = used >= _INFINITY
                    tl.atomic_max(table_ptr + _PEAK + used * 0, used, mask=bad, sem="relaxed")
                    peak = tl.where(bad, 0, peak)
        left -= 1
        tensor += ends.to(tl.int64)
        window = tl.where(ends, 0, window + 1)
        address = tl.where(ends, next_address, address)
        length = tl.where(ends, next_length, length)

    largest = _used_bits(tl.max(peak, axis=0), factor, FACTOR, DTYPE, SOFT)
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
            found = worst >= _INFINITY
            if NORM:
                tl.store(norms_ptr, _sum_of_partials(table_ptr))
                tl.store(norms_ptr + 1, worst.to(tl.float64, bitcast=True))
            any_found = found
            if ACCUMULATE:
                any_found = found | (tl.load(found_inf_ptr) != 0.0)
                tl.store(found_inf_ptr, 1.0, mask=found)
            else:
                tl.store(found_inf_ptr, found.to(tl.float32))
            if EPILOGUE == UPDATE:
                if other_found_inf_ptr is not None:
                    any_found |= tl.load(other_found_inf_ptr) != 0.0
                _update(
                    *(scale_ptr, growth_tracker_ptr, state_ptr, None, any_found),
                    *(growth_factor, backoff_factor, growth_interval),
                )
            tl.debug_barrier()
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
    _update(
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
        peak = _larger_or_nan(peak, tl.load(norms_ptr + 2 * row + 1))
        row += 1
    total = peak if LARGEST else tl.sqrt(squares)
    norm = total.to(norm_ptr.dtype.element_ty)
    quotient = max_norm / (norm.to(tl.float64) + epsilon)
    coefficient = tl.where(quotient > 1.0, 1.0, quotient)
    tl.store(norm_ptr, norm)
    tl.store(coefficient_ptr, coefficient)
    if divisor_ptr is not None:
        tl.store(divisor_ptr, (tl.load(scale_ptr).to(tl.float64) / coefficient).to(tl.float32))
