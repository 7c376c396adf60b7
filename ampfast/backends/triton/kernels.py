"""The Triton kernels; device code only. `csrc/table_layout.h` says how a table is laid out."""

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
_SCALE_BEFORE = tl.constexpr(2)
_TRACKER_BEFORE = tl.constexpr(3)
_PARTIALS = tl.constexpr(4)
_PROGRAMS = tl.constexpr(5)
_TENSORS = tl.constexpr(0)
_WINDOWS = tl.constexpr(1)
_SEGMENT_PROGRAMS = tl.constexpr(2)
_FIRST_PROGRAM = tl.constexpr(3)
_FIRST_TENSOR = tl.constexpr(4)
_SEGMENT_WORDS = tl.constexpr(8)
_ALIGNMENT = tl.constexpr(16)

_INFINITY = tl.constexpr(0x7FF0000000000000)


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
    FACTOR: tl.constexpr,
    NORM: tl.constexpr,
    WHOLE: tl.constexpr,
    THREADS: tl.constexpr,
    SOFT: tl.constexpr,
):
    """Takes one vector of each thread; returns the peak and the squares with it.

    What is reduced is reduced inside each thread: threads exchange nothing here.
    """
    DTYPE: tl.constexpr = values.dtype
    VEC: tl.constexpr = values.shape[0] // THREADS
    peak = tl.maximum(peak, tl.max(tl.reshape(_bits(values), [THREADS, VEC]), axis=1))
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
    return peak, squares


@triton.jit
def _window(
    base,
    low,
    high,
    factor,
    coefficient_ptr,
    WRITE: tl.constexpr,
    FACTOR: tl.constexpr,
    NORM: tl.constexpr,
    WHOLE: tl.constexpr,
    DTYPE: tl.constexpr,
    LOADS: tl.constexpr,
    THREADS: tl.constexpr,
    SOFT: tl.constexpr,
):
    """Takes a window; returns each thread's peak and, in the type of calculation, its squares."""
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
        peak, squares = _take(
            *(a, base, lane, low, high, factor, coefficient_ptr, peak, squares),
            *(WRITE, FACTOR, NORM, WHOLE, THREADS, SOFT),
        )
        peak, squares = _take(
            *(b, base, lane + PART, low, high, factor, coefficient_ptr, peak, squares),
            *(WRITE, FACTOR, NORM, WHOLE, THREADS, SOFT),
        )
        if LOADS == 4:
            peak, squares = _take(
                *(c, base, lane + 2 * PART, low, high, factor, coefficient_ptr, peak, squares),
                *(WRITE, FACTOR, NORM, WHOLE, THREADS, SOFT),
            )
            peak, squares = _take(
                *(d, base, lane + 3 * PART, low, high, factor, coefficient_ptr, peak, squares),
                *(WRITE, FACTOR, NORM, WHOLE, THREADS, SOFT),
            )
    else:
        # One by one, and only where there is something: a load here is of single elements, each in
        # a register of its own.
        for part in tl.static_range(LOADS):
            if part * PART < high:
                values = _load(base, lane + part * PART, low, high, WHOLE)
                peak, squares = _take(
                    *(values, base, lane + part * PART, low, high, factor, coefficient_ptr),
                    *(peak, squares, WRITE, FACTOR, NORM, WHOLE, THREADS, SOFT),
                )
    return peak, squares


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
def _next_scale(scale, tracker, found, growth_factor, backoff_factor, growth_interval):
    """torch's update, except that a tracker beyond a lowered interval grows too."""
    wide = scale.to(tl.float64)
    grown = (wide * growth_factor).to(tl.float32)
    grown = tl.where(_bits(grown) < 0x7F800000, grown, scale)
    successful = tracker.to(tl.int64) + 1
    grows = (growth_interval >= 1) & (successful >= growth_interval)
    scale = tl.where(found, (wide * backoff_factor).to(tl.float32), tl.where(grows, grown, scale))
    tracker = tl.where(found | grows, 0, successful).to(tl.int32)
    return scale, tracker


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
        *("segment", "factor_ptr", "coefficient_ptr", "found_inf_ptr", "norms_ptr", "flags_ptr"),
        *("scale_ptr", "growth_tracker_ptr", "other_found_inf_ptr"),
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
    flags_ptr,
    scale_ptr,
    growth_tracker_ptr,
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
    what they are for: `coefficient_ptr` a second factor on what is written, `flags_ptr` one flag
    for each tensor. SOFT is for the interpreter, which converts bfloat16 wrongly.
    """
    SIZE: tl.constexpr = DTYPE.primitive_bitwidth // 8
    WINDOW: tl.constexpr = LOADS * THREADS * 16 // SIZE

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
    while left > 0:
        # Ahead of need: for many small tensors this is what a program waits for.
        next_address = tl.load(addresses_ptr + tensor + 1)
        next_length = tl.load(lengths_ptr + tensor + 1)
        base = (address & -_ALIGNMENT).to(tl.pointer_type(DTYPE)) + window * WINDOW
        base = tl.multiple_of(base, 16)
        low = (address & (_ALIGNMENT - 1)) // SIZE - window * WINDOW
        high = low + length
        if (low <= 0) & (high >= WINDOW):
            window_peak, window_squares = _window(
                *(base, 0, WINDOW, factor, coefficient_ptr),
                *(WRITE, FACTOR, NORM, True, DTYPE, LOADS, THREADS, SOFT),
            )
        else:
            window_peak, window_squares = _window(
                *(base, tl.maximum(low, 0).to(tl.int32), tl.minimum(high, WINDOW).to(tl.int32)),
                *(factor, coefficient_ptr),
                *(WRITE, FACTOR, NORM, False, DTYPE, LOADS, THREADS, SOFT),
            )
        peak = tl.maximum(peak, window_peak)
        if NORM:
            squares += window_squares.to(tl.float64)
        if flags_ptr is not None:
            largest = _used_bits(tl.max(window_peak, axis=0), factor, FACTOR, DTYPE, SOFT)
            flag_ptr = flags_ptr + tl.load(segment_ptr + _FIRST_TENSOR) + tensor
            tl.store(flag_ptr, 1.0, mask=largest >= _INFINITY)
        left -= 1
        ends = high <= WINDOW
        tensor += ends.to(tl.int64)
        window = tl.where(ends, 0, window + 1)
        address = tl.where(ends, next_address, address)
        length = tl.where(ends, next_length, length)

    largest = _used_bits(tl.max(peak, axis=0), factor, FACTOR, DTYPE, SOFT)
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
                tl.store(found_inf_ptr, 1.0, mask=found)
            else:
                tl.store(found_inf_ptr, found.to(tl.float32))
            if EPILOGUE == UPDATE:
                if other_found_inf_ptr is not None:
                    any_found |= tl.load(other_found_inf_ptr) != 0.0
                scale = tl.load(scale_ptr)
                tracker = tl.load(growth_tracker_ptr)
                tl.store(table_ptr + _SCALE_BEFORE, scale.to(tl.int32, bitcast=True).to(tl.int64))
                tl.store(table_ptr + _TRACKER_BEFORE, tracker.to(tl.int64))
                scale, tracker = _next_scale(
                    scale, tracker, any_found, growth_factor, backoff_factor, growth_interval
                )
                tl.debug_barrier()
                tl.store(scale_ptr, scale)
                tl.store(growth_tracker_ptr, tracker)
            tl.debug_barrier()
            tl.store(table_ptr + _FINISHED, tl.zeros([], dtype=tl.int64))
            tl.store(table_ptr + _PEAK, tl.zeros([], dtype=tl.int64))


@triton.jit(
    do_not_specialize=[
        *("scale_ptr", "growth_tracker_ptr", "found_inf_a_ptr", "found_inf_b_ptr"),
        *("found_inf_c_ptr", "found_inf_d_ptr"),
        *("growth_factor", "backoff_factor", "growth_interval"),
    ]
)
def update_scale(
    scale_ptr,
    growth_tracker_ptr,
    found_inf_a_ptr,
    found_inf_b_ptr,
    found_inf_c_ptr,
    found_inf_d_ptr,
    growth_factor: tl.float64,
    backoff_factor: tl.float64,
    growth_interval: tl.int64,
):
    """Writes the next scale and growth tracker; any of the flags counts. One program."""
    found = (tl.load(found_inf_a_ptr) != 0.0) | (tl.load(found_inf_b_ptr) != 0.0)
    found |= (tl.load(found_inf_c_ptr) != 0.0) | (tl.load(found_inf_d_ptr) != 0.0)
    scale, tracker = _next_scale(
        tl.load(scale_ptr),
        tl.load(growth_tracker_ptr),
        found,
        growth_factor,
        backoff_factor,
        growth_interval,
    )
    tl.debug_barrier()
    tl.store(scale_ptr, scale)
    tl.store(growth_tracker_ptr, tracker)


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
