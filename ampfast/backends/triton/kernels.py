"""Triton kernels; device code only."""

import triton
import triton.language as tl

from ampfast.backends.cpu import state_layout

# Role of the factor, which decides whether a step is skipped.
RAW = tl.constexpr(0)  # no factor: the values themselves
INVERSE = tl.constexpr(1)  # values times the factor
SCALE = tl.constexpr(2)  # values times the factor's float64 reciprocal, rounded to float32
DIVIDE = tl.constexpr(3)  # largest value divided by the factor; reads only

# Work of the last program of a launch.
NOTHING = tl.constexpr(0)
FINISH = tl.constexpr(1)  # writes flag and norms, and resets the header
UPDATE = tl.constexpr(2)  # and the scale

# Float64 bits of infinity, from which magnitudes are not finite.
_INFINITY = tl.constexpr(0x7FF0000000000000)
_COMPLEMENT = tl.constexpr(0x7FFFFFFFFFFFFFFF)

# Words of a table, as in csrc/table_layout.h.
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

# Words of a parameter's marks and health, as in csrc/track.h.
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

# Words of a scaler's state, as in csrc/scale.h.
_STEPS = tl.constexpr(state_layout.STEPS)
_SKIPPED = tl.constexpr(state_layout.SKIPPED)
_GROWTHS = tl.constexpr(state_layout.GROWTHS)
_BACKOFFS = tl.constexpr(state_layout.BACKOFFS)
_CONSECUTIVE_SKIPS = tl.constexpr(state_layout.CONSECUTIVE_SKIPS)
_SKIPS_AT_MINIMUM = tl.constexpr(state_layout.SKIPS_AT_MINIMUM)
_TOLERATED = tl.constexpr(state_layout.TOLERATED)
_LAST_SKIPPED = tl.constexpr(state_layout.LAST_SKIPPED)
_COUNTERS = tl.constexpr(state_layout.COUNTERS)
_BEFORE = tl.constexpr(state_layout.BEFORE)
_SCALE_BEFORE = tl.constexpr(state_layout.SCALE_BEFORE)
_TRACKER_BEFORE = tl.constexpr(state_layout.TRACKER_BEFORE)
_MIN_SCALE = tl.constexpr(state_layout.MIN_SCALE)
_MAX_SCALE = tl.constexpr(state_layout.MAX_SCALE)
_MOST_TOLERATED = tl.constexpr(state_layout.MOST_TOLERATED)
_REFILLS_ON_FINITE_STEPS = tl.constexpr(state_layout.REFILLS_ON_FINITE_STEPS)
_RING = tl.constexpr(state_layout.RING)
_RING_STEPS = tl.constexpr(state_layout.RING_STEPS)
_RING_SCALE = tl.constexpr(state_layout.RING_SCALE)
_RING_STATUS = tl.constexpr(state_layout.RING_STATUS)
_RING_NORM = tl.constexpr(state_layout.RING_NORM)
_RING_WORDS = tl.constexpr(state_layout.RING_WORDS)


@triton.jit
def _magnitude(value):
    """Magnitudes as integers, in the order of their values with NaN above infinity."""
    if value.dtype == tl.float64:
        return value.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
    elif value.dtype == tl.float32:
        return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        return value.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF


@triton.jit
def _widen(value, SOFT: tl.constexpr):
    """To opmath: float64 for itself, float32 for all others."""
    if value.dtype == tl.float64:
        return value
    elif SOFT and value.dtype == tl.bfloat16:
        return (value.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return value.to(tl.float32)


@triton.jit
def _narrow(value, DTYPE: tl.constexpr, SOFT: tl.constexpr):
    """To the type of the gradient, to nearest, ties to even."""
    if SOFT and DTYPE == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return value.to(DTYPE)


@triton.jit
def _load_factor(factor_ptr, FACTOR: tl.constexpr):
    if FACTOR == RAW:
        return 1.0
    elif FACTOR == SCALE:
        return (1.0 / tl.load(factor_ptr).to(tl.float64)).to(tl.float32)
    else:
        return tl.load(factor_ptr)


@triton.jit
def _times(value, factor):
    """The product in opmath."""
    return value * factor.to(value.dtype)


@triton.jit
def _used_magnitude(peak, factor, FACTOR: tl.constexpr, DTYPE: tl.constexpr, SOFT: tl.constexpr):
    """Float64 bits of the magnitude of a peak, given as bits of DTYPE, as the optimizer uses it."""
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
        value = _widen(_narrow(_times(value, factor), DTYPE, SOFT), SOFT)
    return _magnitude(value.to(tl.float64))


@triton.jit
def _larger_or_nan(a, b):
    return tl.where((a != a) | (b <= a), a, b)


@triton.jit
def _first_window(segment_ptr):
    """First window of a program: columns of addresses and lengths, row, window, count."""
    program = tl.program_id(0).to(tl.int64)
    tensors = tl.load(segment_ptr + _TENSORS)
    windows = tl.load(segment_ptr + _WINDOWS)
    programs = tl.load(segment_ptr + _SEGMENT_PROGRAMS)
    addresses_ptr = segment_ptr + _SEGMENT_WORDS
    lengths_ptr = addresses_ptr + tensors + 1
    start_ptr = lengths_ptr + tensors + 1 + 2 * program
    count = (program + 1) * windows // programs - program * windows // programs
    return addresses_ptr, lengths_ptr, tl.load(start_ptr), tl.load(start_ptr + 1), count


@triton.jit
def _bounds(address, length, window, DTYPE: tl.constexpr, WINDOW: tl.constexpr):
    """Aligned address of a window, and the tensor's bounds relative to it."""
    SIZE: tl.constexpr = DTYPE.primitive_bitwidth // 8
    base = (address & -_ALIGNMENT).to(tl.pointer_type(DTYPE)) + window * WINDOW
    low = (address & (_ALIGNMENT - 1)) // SIZE - window * WINDOW
    return tl.multiple_of(base, 16), low, low + length


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
    WRITE: tl.constexpr,
    NORM: tl.constexpr,
    WHOLE: tl.constexpr,
    THREADS: tl.constexpr,
    SOFT: tl.constexpr,
):
    """Takes one vector of each thread; returns the peak and the squares with it.

    Reductions are per thread: threads exchange nothing here.
    """
    DTYPE: tl.constexpr = values.dtype
    VEC: tl.constexpr = values.shape[0] // THREADS
    peak = tl.maximum(peak, tl.max(tl.reshape(_magnitude(values), [THREADS, VEC]), axis=1))
    if WRITE or NORM:
        used = _times(_widen(values, SOFT), factor)
        if WRITE:
            written = _narrow(used, DTYPE, SOFT)
            if coefficient_ptr is not None:
                # Multiplies unscaled values.
                wide = _widen(written, SOFT)
                written = _narrow(_times(wide, tl.load(coefficient_ptr)), DTYPE, SOFT)
            if WHOLE:
                tl.store(base + lane, written)
            else:
                tl.store(base + lane, written, mask=(lane >= low) & (lane < high))
        if NORM:
            if not WHOLE:
                used = tl.where((lane >= low) & (lane < high), used, 0.0)
            squares += tl.sum(tl.reshape(used * used, [THREADS, VEC]), axis=1)
    return peak, squares


@triton.jit
def _take_window(
    base,
    low,
    high,
    factor,
    coefficient_ptr,
    WRITE: tl.constexpr,
    NORM: tl.constexpr,
    WHOLE: tl.constexpr,
    DTYPE: tl.constexpr,
    LOADS: tl.constexpr,
    THREADS: tl.constexpr,
    SOFT: tl.constexpr,
):
    """Takes a window; returns each thread's peak, and its squares in opmath."""
    PART: tl.constexpr = THREADS * 16 // (DTYPE.primitive_bitwidth // 8)
    lane = tl.arange(0, PART)
    peak = tl.zeros([THREADS], dtype=tl.int64 if DTYPE == tl.float64 else tl.int32)
    squares = tl.zeros([THREADS], dtype=tl.float64 if DTYPE == tl.float64 else tl.float32)
    if WHOLE:
        # All loads come first, as they cannot move above a store.
        a = _load(base, lane, low, high, WHOLE)
        b = _load(base, lane + PART, low, high, WHOLE)
        if LOADS == 4:
            c = _load(base, lane + 2 * PART, low, high, WHOLE)
            d = _load(base, lane + 3 * PART, low, high, WHOLE)
        peak, squares = _take(
            *(a, base, lane, low, high, factor, coefficient_ptr),
            *(peak, squares, WRITE, NORM, WHOLE, THREADS, SOFT),
        )
        peak, squares = _take(
            *(b, base, lane + PART, low, high, factor, coefficient_ptr),
            *(peak, squares, WRITE, NORM, WHOLE, THREADS, SOFT),
        )
        if LOADS == 4:
            peak, squares = _take(
                *(c, base, lane + 2 * PART, low, high, factor, coefficient_ptr),
                *(peak, squares, WRITE, NORM, WHOLE, THREADS, SOFT),
            )
            peak, squares = _take(
                *(d, base, lane + 3 * PART, low, high, factor, coefficient_ptr),
                *(peak, squares, WRITE, NORM, WHOLE, THREADS, SOFT),
            )
    else:
        # Singly, and only where there is something: loads here are of single elements, each in a
        # register of its own.
        for part in tl.static_range(LOADS):
            if part * PART < high:
                values = _load(base, lane + part * PART, low, high, WHOLE)
                peak, squares = _take(
                    *(values, base, lane + part * PART, low, high, factor, coefficient_ptr),
                    *(peak, squares, WRITE, NORM, WHOLE, THREADS, SOFT),
                )
    return peak, squares


@triton.jit
def _mark(row_ptr, now_ptr, used):
    """Counts this step once for a parameter if `used`, float64 bits of threads, is not finite."""
    bad = used >= _INFINITY
    # Counted by the first thread to raise it; otherwise nothing is read.
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
def _float_at(ptr):
    return tl.load(ptr).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _word(value):
    """Bits of a float32 as they stand in a state."""
    return value.to(tl.uint32, bitcast=True).to(tl.int64)


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
    """Writes the next scale and growth tracker, and the step into the state, if any.

    Equals `apply(Update)` of csrc/scale.h.
    """
    before = tl.load(scale_ptr)
    tracker = tl.load(growth_tracker_ptr).to(tl.int64)
    wide = before.to(tl.float64)
    grown = (wide * growth_factor).to(tl.float32)
    grown = tl.where(_magnitude(grown) < 0x7F800000, grown, before)
    grows = (growth_interval >= 1) & (tracker + 1 >= growth_interval) & (found == 0)
    scale = tl.where(found, (wide * backoff_factor).to(tl.float32), tl.where(grows, grown, before))
    if state_ptr is not None:
        one = found.to(tl.int64)
        word = tl.arange(0, _COUNTERS)
        counters = tl.load(state_ptr + word)
        steps = tl.load(state_ptr + _STEPS)
        last_skipped = tl.where(found, steps + 1, tl.load(state_ptr + _LAST_SKIPPED))
        tolerated = tl.load(state_ptr + _TOLERATED)
        most_tolerated = tl.load(state_ptr + _MOST_TOLERATED)
        min_scale = _float_at(state_ptr + _MIN_SCALE)
        max_scale = _float_at(state_ptr + _MAX_SCALE)
        refills = grows | (tl.load(state_ptr + _REFILLS_ON_FINITE_STEPS) != 0)
        tolerated = tl.where(found, tolerated + 1, tl.where(refills, 0, tolerated))
        scale = tl.where(found & (tolerated <= most_tolerated), before, scale)
        # A scale set beyond the limits is not moved the wrong way.
        too_high = (scale > before) & (max_scale > 0) & (scale > max_scale)
        too_low = (scale < before) & (min_scale > 0) & (scale < min_scale)
        highest = tl.where(before > max_scale, before, max_scale)
        lowest = tl.where(before < min_scale, before, min_scale)
        scale = tl.where(too_high, highest, tl.where(too_low, lowest, scale))
        is_stuck = found & (min_scale > 0) & (before <= min_scale)

        counted = tl.where(word == _STEPS, steps + 1, counters)
        counted = tl.where(word == _SKIPPED, counters + one, counted)
        counted = tl.where(word == _GROWTHS, counters + (scale > before).to(tl.int64), counted)
        counted = tl.where(word == _BACKOFFS, counters + (scale < before).to(tl.int64), counted)
        counted = tl.where(word == _CONSECUTIVE_SKIPS, (counters + 1) * one, counted)
        stuck = (counters + 1) * is_stuck.to(tl.int64)
        counted = tl.where(word == _SKIPS_AT_MINIMUM, stuck, counted)
        counted = tl.where(word == _TOLERATED, tolerated, counted)
        counted = tl.where(word == _LAST_SKIPPED, last_skipped, counted)

        entry_ptr = state_ptr + _RING + steps % _RING_STEPS * _RING_WORDS
        status = one
        norm = one * 0
        if norm_ptr is not None:
            status += 2
            norm = _word(tl.load(norm_ptr))
        tl.debug_barrier()
        tl.store(state_ptr + _BEFORE + word, counters)
        tl.store(state_ptr + _SCALE_BEFORE, _word(before))
        tl.store(state_ptr + _TRACKER_BEFORE, tracker)
        tl.store(entry_ptr + _RING_SCALE, _word(before))
        tl.store(entry_ptr + _RING_STATUS, status)
        tl.store(entry_ptr + _RING_NORM, norm)
        tl.store(state_ptr + word, counted)
    tl.debug_barrier()
    tl.store(scale_ptr, scale)
    tl.store(growth_tracker_ptr, tl.where(found | grows, 0, tracker + 1).to(tl.int32))


@triton.jit
def _sum_of_partials(table_ptr):
    """Sum of the partial sums of all programs of all launches, in a fixed order."""
    partials_ptr = table_ptr + tl.load(table_ptr + _PARTIALS)
    count = tl.load(table_ptr + _PROGRAMS)
    lane = tl.arange(0, 128)
    total = tl.zeros([128], dtype=tl.float64)
    first = count * 0
    while first < count:
        # Bypasses the first-level cache, which may hold values of the last launch.
        bits = tl.load(
            partials_ptr + first + lane, mask=first + lane < count, other=0, cache_modifier=".cg"
        )
        total += bits.to(tl.float64, bitcast=True)
        first += 128
    return tl.sum(total, axis=0)


@triton.jit(
    do_not_specialize=[
        *("segment", "factor_ptr", "coefficient_ptr", "found_inf_ptr", "norms_ptr"),
        *("marks_ptr", "now_ptr"),
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

    A program takes consecutive windows. Only the first and the last window of a tensor are masked;
    the others are read and written 16 bytes at a time. Optional pointers may be None:
    `coefficient_ptr` to a second factor of written values, `marks_ptr` to the overflow marks of
    parameters. SOFT is for the interpreter, which converts bfloat16 wrongly.
    """
    WINDOW: tl.constexpr = LOADS * THREADS * 16 // (DTYPE.primitive_bitwidth // 8)

    program = tl.program_id(0).to(tl.int64)
    segment_ptr = table_ptr + segment
    programs = tl.load(segment_ptr + _SEGMENT_PROGRAMS)
    addresses_ptr, lengths_ptr, tensor, window, left = _first_window(segment_ptr)
    address = tl.load(addresses_ptr + tensor)
    length = tl.load(lengths_ptr + tensor)
    factor = _load_factor(factor_ptr, FACTOR)

    peak = tl.zeros([THREADS], dtype=tl.int64 if DTYPE == tl.float64 else tl.int32)
    squares = tl.zeros([THREADS], dtype=tl.float64)
    while left > 0:
        # Prefetched: many small tensors make a program wait for this.
        next_address = tl.load(addresses_ptr + tensor + 1)
        next_length = tl.load(lengths_ptr + tensor + 1)
        base, low, high = _bounds(address, length, window, DTYPE, WINDOW)
        if (low <= 0) & (high >= WINDOW):
            window_peak, window_squares = _take_window(
                *(base, 0, WINDOW, factor, coefficient_ptr),
                *(WRITE, NORM, True, DTYPE, LOADS, THREADS, SOFT),
            )
        else:
            window_peak, window_squares = _take_window(
                *(base, tl.maximum(low, 0).to(tl.int32), tl.minimum(high, WINDOW).to(tl.int32)),
                *(factor, coefficient_ptr),
                *(WRITE, NORM, False, DTYPE, LOADS, THREADS, SOFT),
            )
        peak = tl.maximum(peak, window_peak)
        if NORM:
            squares += window_squares.to(tl.float64)
        ends = high <= WINDOW
        if marks_ptr is not None:
            is_done = ends | (left == 1)  # of this program and this tensor
            if is_done:
                parameter = tl.load(table_ptr + tl.load(segment_ptr + _PARAMETERS) + tensor)
                # Per thread: threads need not wait for each other.
                used = _used_magnitude(peak, factor, FACTOR, DTYPE, SOFT)
                _mark(marks_ptr + parameter * _MARK_WORDS, now_ptr, used)
                # Each tensor is judged separately; a finite peak may stay.
                bad = used >= _INFINITY
                tl.atomic_max(table_ptr + _PEAK + used * 0, used, mask=bad, sem="relaxed")
                peak = tl.where(bad, 0, peak)
        left -= 1
        tensor += ends.to(tl.int64)
        window = tl.where(ends, 0, window + 1)
        address = tl.where(ends, next_address, address)
        length = tl.where(ends, next_length, length)

    largest = _used_magnitude(tl.max(peak, axis=0), factor, FACTOR, DTYPE, SOFT)
    tl.atomic_max(table_ptr + _PEAK, largest, sem="relaxed")
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
            if EPILOGUE == UPDATE:
                if other_found_inf_ptr is not None:
                    any_found |= tl.load(other_found_inf_ptr) != 0.0
                _update(
                    *(scale_ptr, growth_tracker_ptr, state_ptr, None, any_found),
                    *(growth_factor, backoff_factor, growth_interval),
                )
            # All threads have loaded the values that the first one now replaces.
            tl.debug_barrier()
            if ACCUMULATE:
                tl.store(found_inf_ptr, 1.0, mask=found)
            else:
                tl.store(found_inf_ptr, found.to(tl.float32))
            tl.store(table_ptr + _FINISHED, tl.zeros([], dtype=tl.int64))
            tl.store(table_ptr + _PEAK, tl.zeros([], dtype=tl.int64))


@triton.jit
def _no_health(DTYPE: tl.constexpr, THREADS: tl.constexpr):
    """Health of no values, per thread: largest, smallest less one, counts."""
    count = tl.zeros([THREADS], dtype=tl.int32)
    if DTYPE == tl.float64:
        largest = tl.zeros([THREADS], dtype=tl.int64)
        smallest = tl.full([THREADS], 0xFFFFFFFFFFFFFFFF, dtype=tl.uint64)
    else:
        largest = count
        smallest = tl.full([THREADS], 0xFFFFFFFF, dtype=tl.uint32)
    return largest, smallest, count, count, count, count


@triton.jit
def _count_window(
    base,
    low,
    high,
    health,
    WHOLE: tl.constexpr,
    DTYPE: tl.constexpr,
    LOADS: tl.constexpr,
    THREADS: tl.constexpr,
):
    """Counts a window by magnitude; zeros change nothing.

    Magnitudes less one, unsigned, put zero last: a single comparison tests for nonzero below a
    bound.
    """
    largest, smallest, nonzero, vanishing, subnormal, overflowing = health
    PART: tl.constexpr = THREADS * 16 // (DTYPE.primitive_bitwidth // 8)
    UNSIGNED: tl.constexpr = tl.uint64 if DTYPE == tl.float64 else tl.uint32
    # Bounds 2^-24, 2^-14, and 65504 or the next value below.
    if DTYPE == tl.float64:
        RANGE: tl.constexpr = (0x3E70000000000000, 0x3F10000000000000, 0x40EFFC0000000000)
    elif DTYPE == tl.float32:
        RANGE: tl.constexpr = (0x33800000, 0x38800000, 0x477FE000)
    elif DTYPE == tl.bfloat16:
        RANGE: tl.constexpr = (0x3380, 0x3880, 0x477F)
    else:
        RANGE: tl.constexpr = (0x0001, 0x0400, 0x7BFF)
    lane = tl.arange(0, PART)
    for part in tl.static_range(LOADS):
        if WHOLE or part * PART < high:
            values = _load(base, lane + part * PART, low, high, WHOLE)
            bits = tl.reshape(_magnitude(values), [THREADS, PART // THREADS])
            less_one = (bits - 1).to(UNSIGNED, bitcast=True)
            largest = tl.maximum(largest, tl.max(bits, axis=1))
            smallest = tl.minimum(smallest, tl.min(less_one, axis=1))
            nonzero += tl.sum((bits != 0).to(tl.int32), axis=1)
            if RANGE[0] > 1:  # else no value is
                vanishing += tl.sum((less_one < RANGE[0] - 1).to(tl.int32), axis=1)
            subnormal += tl.sum((less_one < RANGE[1] - 1).to(tl.int32), axis=1)
            overflowing += tl.sum((bits > RANGE[2]).to(tl.int32), axis=1)
    return largest, smallest, nonzero, vanishing, subnormal, overflowing


@triton.jit
def _add_health(row_ptr, length, health, DTYPE: tl.constexpr, SOFT: tl.constexpr):
    """Adds the counts of all threads of a program for a tensor."""
    largest, smallest, nonzero, vanishing, subnormal, overflowing = health
    tl.store(row_ptr + _ELEMENTS, length)
    tl.atomic_add(row_ptr + _NONZERO, tl.sum(nonzero, axis=0).to(tl.int64), sem="relaxed")
    tl.atomic_add(row_ptr + _VANISHING, tl.sum(vanishing, axis=0).to(tl.int64), sem="relaxed")
    tl.atomic_add(row_ptr + _SUBNORMAL, tl.sum(subnormal, axis=0).to(tl.int64), sem="relaxed")
    tl.atomic_add(row_ptr + _OVERFLOWING, tl.sum(overflowing, axis=0).to(tl.int64), sem="relaxed")
    most = _used_magnitude(tl.max(largest, axis=0), 1.0, RAW, DTYPE, SOFT)
    tl.atomic_max(row_ptr + _LARGEST, most, sem="relaxed")
    SIGNED: tl.constexpr = tl.int64 if DTYPE == tl.float64 else tl.int32
    # The largest number stands for none, and becomes 0.
    least = tl.min(smallest, axis=0).to(SIGNED, bitcast=True) + 1
    least = tl.where(least > 0, _COMPLEMENT - _used_magnitude(least, 1.0, RAW, DTYPE, SOFT), 0)
    tl.atomic_max(row_ptr + _SMALLEST, least, sem="relaxed")


@triton.jit(do_not_specialize=["segment", "health_ptr"])
def measure(
    table_ptr,
    segment: tl.int64,
    health_ptr,
    DTYPE: tl.constexpr,
    LOADS: tl.constexpr,
    THREADS: tl.constexpr,
    SOFT: tl.constexpr,
):
    """Health of gradients of one dtype: adds the range of values to parameters' rows."""
    WINDOW: tl.constexpr = LOADS * THREADS * 16 // (DTYPE.primitive_bitwidth // 8)
    segment_ptr = table_ptr + segment
    addresses_ptr, lengths_ptr, tensor, window, left = _first_window(segment_ptr)
    health = _no_health(DTYPE, THREADS)
    while left > 0:
        address = tl.load(addresses_ptr + tensor)
        length = tl.load(lengths_ptr + tensor)
        base, low, high = _bounds(address, length, window, DTYPE, WINDOW)
        if (low <= 0) & (high >= WINDOW):
            health = _count_window(base, 0, WINDOW, health, True, DTYPE, LOADS, THREADS)
        else:
            first = tl.maximum(low, 0).to(tl.int32)
            end = tl.minimum(high, WINDOW).to(tl.int32)
            health = _count_window(base, first, end, health, False, DTYPE, LOADS, THREADS)
        ends = high <= WINDOW
        is_done = ends | (left == 1)  # of this program and this tensor
        if is_done:
            parameter = tl.load(table_ptr + tl.load(segment_ptr + _PARAMETERS) + tensor)
            _add_health(health_ptr + parameter * _HEALTH_WORDS, length, health, DTYPE, SOFT)
            health = _no_health(DTYPE, THREADS)
        left -= 1
        tensor += ends.to(tl.int64)
        window = tl.where(ends, 0, window + 1)


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
    """Updates the scale alone; any of the flags counts. One program."""
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
    """Norm and clip coefficient from the norms of passes. One program.

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
    # An infinite limit clips nothing: inf / inf would be NaN.
    coefficient = tl.where((quotient > 1.0) | (max_norm == float("inf")), 1.0, quotient)
    tl.store(norm_ptr, norm)
    tl.store(coefficient_ptr, coefficient)
    if divisor_ptr is not None:
        tl.store(divisor_ptr, (tl.load(scale_ptr).to(tl.float64) / coefficient).to(tl.float32))
