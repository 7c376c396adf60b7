"""Triton kernels; device code only."""

import inspect
from types import SimpleNamespace

import triton
import triton.language as tl

from ampfast.backends import core


def _constants(**values):
    """Constants by name: of the value for the compiler, and of the object for the interpreter."""
    constants = tl.constexpr(SimpleNamespace(**values))
    vars(constants).update(values)
    return constants


def _enumerated(names):
    return _constants(**{name: place for place, name in enumerate(names.split())})


def _kernel(function):
    """Specializes no argument but the table, which is aligned as torch's allocator does."""
    names = inspect.signature(function).parameters
    others = [name for name in names if name.islower() and name != "table_ptr"]
    return triton.jit(function, do_not_specialize=others)


# Whether the kernels are interpreted: the interpreter converts bfloat16 wrongly.
_SOFT = tl.constexpr(triton.knobs.runtime.interpret)

_FACTOR = _constants(**core.Factor.__members__)

_SPIKE = tl.constexpr(core.SPIKE)
_SPIKE_BOUND = tl.constexpr(core.SPIKE_BOUND)
_CLIP_EPSILON = tl.constexpr(core.CLIP_EPSILON)
_LEAST_DEVIATION = tl.constexpr(core.LEAST_DEVIATION)

_WINDOW_BYTES = tl.constexpr(core.WINDOW_BYTES)
_VECTOR_BYTES = tl.constexpr(16)

# Float64 bits of infinity, from which magnitudes are not finite.
_INFINITY = tl.constexpr(0x7FF0000000000000)

# Words of a header and of a chunk, as in csrc/table_layout.h.
_HEADER = _enumerated("FINISHED PEAK")
_NOT_FINITE = tl.constexpr(1 << 32)
_CHUNK = _constants(ADDRESS=0, EXTENT=1, WORDS=2, PARAMETER_SHIFT=32)
# Words of a parameter's overflow counters, as in csrc/track.h.
_TRACK = _enumerated("LAST_NON_FINITE LAST_NAN TIMES_NON_FINITE TIMES_NAN SQUARES WORDS")
# Words of a scaler's state and of the norms of the steps taken, as in csrc/scale.h.
_STATE = _constants(**vars(core.state_layout))
_NORM = _constants(**vars(core.norm_layout))


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
def _widen(value):
    """To opmath: float64 for itself, float32 for all others."""
    if value.dtype == tl.float64:
        return value
    elif _SOFT and value.dtype == tl.bfloat16:
        return (value.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return value.to(tl.float32)


@triton.jit
def _narrow(value, DTYPE: tl.constexpr):
    """To the type of the gradient, to nearest, ties to even."""
    if _SOFT and DTYPE == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return value.to(DTYPE)


@triton.jit
def _load_factor(factor_ptr, FACTOR: tl.constexpr):
    if FACTOR == _FACTOR.NONE:
        return tl.full([], 1.0, tl.float32)
    elif FACTOR == _FACTOR.TIMES_RECIPROCAL:
        return (1.0 / tl.load(factor_ptr).to(tl.float64)).to(tl.float32)
    else:
        return tl.load(factor_ptr)


@triton.jit
def _multiplier(factor, FACTOR: tl.constexpr):
    """Returns the factor of values for their squares, and of their sum, as in csrc/element.h."""
    if FACTOR == _FACTOR.DIVIDE:
        wide = factor.to(tl.float64)
        inverse = (1.0 / wide).to(tl.float32)
        is_infinite = _magnitude(inverse) == 0x7F800000
        rest = 1.0 / (wide * 2.0**127)
        of_values = tl.where(is_infinite, 2.0**127, inverse)
        return of_values.to(tl.float32), tl.where(is_infinite, rest * rest, 1.0)
    else:
        return factor, 1.0


@triton.jit
def _used_magnitude(peak, factor, FACTOR: tl.constexpr, DTYPE: tl.constexpr):
    """Float64 bits of the magnitude of a peak, given as bits of DTYPE, as the optimizer uses it."""
    bits = peak.to(tl.int16) if DTYPE.primitive_bitwidth == 16 else peak
    value = _widen(bits.to(DTYPE, bitcast=True))
    if FACTOR == _FACTOR.DIVIDE:
        if DTYPE == tl.float64:
            value = value / factor.to(tl.float64)
        else:
            value = tl.div_rn(value, factor)
    elif FACTOR != _FACTOR.NONE:
        value = _widen(_narrow(value * factor.to(value.dtype), DTYPE))
    if FACTOR != _FACTOR.NONE:
        # An infinite factor makes zeros NaN and others infinite; which of them a thread saw must
        # not decide.
        infinite = (factor * factor + float("inf")).to(value.dtype)  # but NaN stays
        value = tl.where((peak == 0) & (value != value), infinite, value)
    return _magnitude(value.to(tl.float64))


@triton.jit
def _larger_or_nan(a, b):
    return tl.where((a != a) | (b <= a), a, b)


@triton.jit
def _load_chunk(chunks_ptr, chunk):
    """Address and extent."""
    chunk_ptr = chunks_ptr + chunk.to(tl.int64) * _CHUNK.WORDS
    return tl.load(chunk_ptr + _CHUNK.ADDRESS), tl.load(chunk_ptr + _CHUNK.EXTENT)


@triton.jit
def _parts(fields, DTYPE: tl.constexpr, THREADS: tl.constexpr):
    """Parts of a chunk: the number of its whole vectors, a mask of edges, and pointers.

    These are to whole vectors and to an edge of each thread. Up to a vector less one lie before and
    as many after the whole vectors, each of which some thread takes as its edge.
    """
    address = fields[_CHUNK.ADDRESS]
    SIZE: tl.constexpr = DTYPE.primitive_bitwidth // 8
    PER_VECTOR: tl.constexpr = _VECTOR_BYTES // SIZE
    thread = tl.arange(0, THREADS)
    size = fields[_CHUNK.EXTENT].to(tl.int32)
    head = tl.minimum((-address).to(tl.int32) & (_VECTOR_BYTES - 1), size)
    vectors = (size - head) // _VECTOR_BYTES
    is_head = thread < PER_VECTOR
    behind = (head + vectors * _VECTOR_BYTES) // SIZE
    edge = tl.where(is_head, thread, behind + thread - PER_VECTOR)
    end = tl.where(is_head, head, size) // SIZE
    first = head // SIZE
    is_edge = (thread < 2 * PER_VECTOR) & (edge < end)
    chunk_ptr = address.to(tl.pointer_type(DTYPE))
    base = tl.multiple_of(chunk_ptr + first, _VECTOR_BYTES)
    return vectors, is_edge, base, chunk_ptr + edge


@triton.jit
def _lanes(DTYPE: tl.constexpr, THREADS: tl.constexpr):
    """Vectors and elements that a program loads at once, by load, thread, place in the vector."""
    LOADS: tl.constexpr = min(_WINDOW_BYTES // (_VECTOR_BYTES * THREADS), 8)
    PER_VECTOR: tl.constexpr = _VECTOR_BYTES // (DTYPE.primitive_bitwidth // 8)
    vector = tl.arange(0, LOADS)[:, None, None] * THREADS + tl.arange(0, THREADS)[None, :, None]
    return vector, vector * PER_VECTOR + tl.arange(0, PER_VECTOR)[None, None, :]


@triton.jit
def _take(values, mask, factors, seen, WRITE: tl.constexpr, NORM: tl.constexpr):
    """Takes values of shape [loads, threads, elements]: what is written, the peak and the squares.

    Reductions are per thread: threads exchange nothing here.
    """
    DTYPE: tl.constexpr = values.dtype
    factor, coefficient = factors
    peak, squares = seen
    peak = tl.maximum(peak, tl.max(tl.max(_magnitude(values), axis=2), axis=0))
    written = values
    if WRITE or NORM:
        used = _widen(values)
        used = used * factor.to(used.dtype)
        if NORM:
            # Beside the values there are zeros, which an infinite factor makes NaN.
            counted = tl.where(mask, used, 0.0)
            squares += tl.sum(tl.sum(counted * counted, axis=2), axis=0).to(tl.float64)
        if WRITE:
            written = _narrow(used, DTYPE)
            if coefficient is not None:
                # Multiplies unscaled values.
                written = _narrow(_widen(written) * coefficient.to(used.dtype), DTYPE)
    return written, (peak, squares)


@triton.jit
def _count_overflow(row_ptr, now_ptr, used):
    """Counts this step once for a parameter if `used`, float64 bits of threads, is not finite."""
    bad = used >= _INFINITY
    # Counted by the first thread to raise it; otherwise nothing is read.
    none = used * 0
    step = tl.load(now_ptr + none, mask=bad, other=0) + 1
    seen = tl.atomic_max(row_ptr + _TRACK.LAST_NON_FINITE + none, step, mask=bad, sem="relaxed")
    times_ptr = row_ptr + _TRACK.TIMES_NON_FINITE + none
    tl.atomic_add(times_ptr, none + 1, mask=bad & (seen < step), sem="relaxed")
    bad = used > _INFINITY
    seen = tl.atomic_max(row_ptr + _TRACK.LAST_NAN + none, step, mask=bad, sem="relaxed")
    times_ptr = row_ptr + _TRACK.TIMES_NAN + none
    tl.atomic_add(times_ptr, none + 1, mask=bad & (seen < step), sem="relaxed")


@triton.jit
def _float_at(ptr):
    return tl.load(ptr).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _word(value):
    """Bits of a float32 as a state stores them."""
    return value.to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def _joint(a, b):
    """One flag for two, as `joint` of csrc/scale.h."""
    return _larger_or_nan(tl.abs(a), tl.abs(b))


@triton.jit
def _update(pointers, norm_ptr, flag, growth_factor, backoff_factor, growth_interval):
    """Writes the next scale and growth tracker, and the step into the state, if any.

    Equals `update_scale` of csrc/scale.h.
    """
    scale_ptr, growth_tracker_ptr, state_ptr = pointers
    skipped = flag != 0.0
    # Only a state knows of spikes.
    found = skipped if state_ptr is None else skipped & ~(tl.abs(flag) < _SPIKE_BOUND)
    spiked = skipped & ~found
    before = tl.load(scale_ptr)
    tracker = tl.load(growth_tracker_ptr).to(tl.int64)
    wide = before.to(tl.float64)
    grown = (wide * growth_factor).to(tl.float32)
    grown = tl.where(_magnitude(grown) < 0x7F800000, grown, before)
    grows = (growth_interval >= 1) & (tracker + 1 >= growth_interval) & ~skipped
    scale = tl.where(found, (wide * backoff_factor).to(tl.float32), tl.where(grows, grown, before))
    if state_ptr is not None:
        one = skipped.to(tl.int64)
        word = tl.arange(0, _STATE.COUNTERS)
        counters = tl.load(state_ptr + word)
        steps = tl.load(state_ptr + _STATE.STEPS)
        tolerated = tl.load(state_ptr + _STATE.TOLERATED)
        most_tolerated = tl.load(state_ptr + _STATE.MOST_TOLERATED)
        min_scale = _float_at(state_ptr + _STATE.MIN_SCALE)
        max_scale = _float_at(state_ptr + _STATE.MAX_SCALE)
        tolerated = tl.where(found, tolerated + 1, tl.where(grows, 0, tolerated))
        scale = tl.where(found & (tolerated <= most_tolerated), before, scale)
        # A scale set beyond the limits is not moved the wrong way.
        too_high = (scale > before) & (max_scale > 0) & (scale > max_scale)
        too_low = (scale < before) & (min_scale > 0) & (scale < min_scale)
        highest = tl.where(before > max_scale, before, max_scale)
        lowest = tl.where(before < min_scale, before, min_scale)
        scale = tl.where(too_high, highest, tl.where(too_low, lowest, scale))

        counted = tl.where(word == _STATE.STEPS, steps + 1, counters)
        counted = tl.where(word == _STATE.SKIPPED, counters + one, counted)
        rose, fell = (scale > before).to(tl.int64), (scale < before).to(tl.int64)
        counted = tl.where(word == _STATE.GROWTHS, counters + rose, counted)
        counted = tl.where(word == _STATE.BACKOFFS, counters + fell, counted)
        counted = tl.where(word == _STATE.CONSECUTIVE_SKIPS, (counters + 1) * one, counted)
        counted = tl.where(word == _STATE.TOLERATED, tolerated, counted)
        counted = tl.where(word == _STATE.SPIKES, counters + spiked.to(tl.int64), counted)

        entry_ptr = state_ptr + _STATE.RING + (steps & (_STATE.RING_STEPS - 1)) * _STATE.RING_WORDS
        status = one + 4 * spiked.to(tl.int64)
        norm = one * 0
        if norm_ptr is not None:
            status += 2
            norm = _word(tl.load(norm_ptr))
        tl.debug_barrier()
        tl.store(state_ptr + _STATE.BEFORE + word, counters)
        tl.store(state_ptr + _STATE.SCALE_BEFORE, _word(before))
        tl.store(state_ptr + _STATE.TRACKER_BEFORE, tracker)
        tl.store(entry_ptr + _STATE.RING_SCALE, _word(before))
        tl.store(entry_ptr + _STATE.RING_STATUS, status)
        tl.store(entry_ptr + _STATE.RING_NORM, norm)
        tl.store(state_ptr + word, counted)
    tl.debug_barrier()
    tl.store(scale_ptr, tl.where(spiked, before, scale))
    tracked = tl.where(found | grows, 0, tracker + 1)
    tl.store(growth_tracker_ptr, tl.where(spiked, tracker, tracked).to(tl.int32))


@triton.jit
def _sum_of_partials(partials_ptr, count):
    """Sum of the chunks' sums of all launches, in a fixed order."""
    AT_ONCE: tl.constexpr = 8
    place = count * 0 + tl.arange(0, 128)
    total = tl.zeros([128], dtype=tl.float64)
    first = count * 0
    while first < count:
        for _ in tl.static_range(AT_ONCE):
            # Bypasses the first-level cache, which may hold values of the last launch.
            mask = place < count
            total += tl.load(partials_ptr + place, mask=mask, other=0.0, cache_modifier=".cg")
            place += 128
        first += 128 * AT_ONCE
    return tl.sum(total, axis=0)


@triton.jit
def _is_spike(norms_ptr, window, norm, limit, is_finite):
    """Whether a norm is too large, as `is_spike` of csrc/scale.h, in the same order of sums.

    Norms of gradients that are not finite change nothing.
    """
    if norms_ptr is None:
        return ~(norm <= limit)
    else:
        ring_ptr = norms_ptr + _NORM.RING
        count = tl.load(norms_ptr + _NORM.COUNT).to(tl.int64)
        spikes = tl.load(norms_ptr + _NORM.SPIKES)
        patience = tl.load(norms_ptr + _NORM.PATIENCE)
        restarts = tl.load(norms_ptr + _NORM.RESTARTS)
        oldest = count % window
        total = tl.zeros([], dtype=tl.float64)
        place = oldest
        while place < oldest + window:
            total += tl.load(ring_ptr + tl.where(place < window, place, place - window))
            place += 1
        mean = total / window.to(tl.float64)
        squares = tl.zeros([], dtype=tl.float64)
        place = oldest
        while place < oldest + window:
            norm_then = tl.load(ring_ptr + tl.where(place < window, place, place - window))
            squares += (norm_then - mean) * (norm_then - mean)
            place += 1
        deviation, least = tl.sqrt(squares / (window - 1).to(tl.float64)), mean * _LEAST_DEVIATION
        most = mean + limit * tl.where(deviation > least, deviation, least)
        is_usable = is_finite & (norm > 0.0) & (_magnitude(norm) < _INFINITY)
        is_above = (count >= window) & ~(norm <= most)
        restarted = is_above & is_usable & (spikes >= patience)
        spiked = is_above & ~restarted
        is_taken = is_usable & ~spiked
        count = tl.where(restarted, 0, count)
        # All threads have loaded the words that the first one now replaces.
        tl.debug_barrier()
        tl.store(ring_ptr + count % window, norm, mask=is_taken)
        tl.store(norms_ptr + _NORM.COUNT, (count + 1).to(tl.float64), mask=is_taken)
        tl.store(norms_ptr + _NORM.SPIKES, tl.where(spiked, spikes + 1.0, 0.0), mask=is_usable)
        tl.store(norms_ptr + _NORM.RESTARTS, restarts + 1.0, mask=restarted)
        return spiked


@triton.jit
def _decide(total, limits, flag, results, scale_ptr, norms_ptr, window, COMPARES: tl.constexpr):
    """Writes what a clipping decides by a norm; returns the flag, of a spike if it is one."""
    max_norm, skip_above = limits
    norm_ptr, coefficient_ptr, divisor_ptr = results
    norm = total.to(norm_ptr.dtype.element_ty)
    tl.store(norm_ptr, norm)
    # torch's. An infinite limit clips nothing: inf / inf would be NaN.
    quotient = max_norm / (norm.to(tl.float64) + _CLIP_EPSILON)
    coefficient = tl.where((quotient > 1.0) | (max_norm == float("inf")), 1.0, quotient)
    if coefficient_ptr is not None:
        tl.store(coefficient_ptr, coefficient)
    if divisor_ptr is not None:
        tl.store(divisor_ptr, (tl.load(scale_ptr).to(tl.float64) / coefficient).to(tl.float32))
    if COMPARES:
        is_finite = flag == 0.0
        total = norm.to(tl.float32).to(tl.float64)
        spiked = _is_spike(norms_ptr, window, total, skip_above, is_finite)
        flag = tl.where(is_finite & spiked, _SPIKE, flag)
    return flag


@_kernel
def multi_tensor(
    table_ptr,
    word: tl.int64,
    chunks: tl.int32,
    first: tl.int32,
    all_chunks: tl.int32,
    header_ptr,
    partials_ptr,
    factor_ptr,
    coefficient_ptr,
    found_inf_ptr,
    sums_ptr,
    divisor_ptr,
    marks_ptr,
    now_ptr,
    scale_ptr,
    growth_tracker_ptr,
    state_ptr,
    other_found_inf_ptr,
    growth_factor: tl.float64,
    backoff_factor: tl.float64,
    growth_interval: tl.int64,
    norm_ptr,
    max_norm: tl.float64,
    skip_above: tl.float64,
    norms_ptr,
    window: tl.int64,
    DTYPE: tl.constexpr,
    WRITE: tl.constexpr,
    FACTOR: tl.constexpr,
    NORM: tl.constexpr,
    LARGEST: tl.constexpr,
    COMPARES: tl.constexpr,
    IS_LAST: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    THREADS: tl.constexpr,
):
    """One pass over the gradients of one dtype: checks them and, with WRITE, unscales them.

    Its chunks are at `word` of `table_ptr`, the sums of their squares at `partials_ptr` after
    `first` others. Optional pointers may be None: `coefficient_ptr` to a second factor of written
    values, `divisor_ptr` to a copy of the factor, `marks_ptr` to overflow counters of parameters.
    With IS_LAST the last program writes the results and, with `scale_ptr`, updates the scale. With
    `norm_ptr` it decides a clipping as `clip_coefficient`, of which the other two get the results.
    """
    chunks_ptr = table_ptr + word
    # Programs take chunks in turn, so that all read one part of the list at a time.
    chunk, step = tl.program_id(0), tl.num_programs(0)
    fields = _load_chunk(chunks_ptr, chunk)
    factor = _load_factor(factor_ptr, FACTOR)
    of_values, of_squares = _multiplier(factor, FACTOR) if NORM else (factor, 1.0)
    SCALES: tl.constexpr = coefficient_ptr is not None and not NORM
    factors = of_values, tl.load(coefficient_ptr) if SCALES else None
    if SCALES:
        # Where nothing changes, nothing is read.
        chunk = tl.where((factor == 1.0) & (factors[1] == 1.0), chunks, chunk)
    vector, lane = _lanes(DTYPE, THREADS)

    peak = tl.zeros([THREADS], dtype=tl.int64 if DTYPE == tl.float64 else tl.int32)
    while chunk < chunks:
        # Prefetched: many small tensors make a program wait for this.
        following = tl.minimum(chunk + step, chunks - 1)
        next_fields = _load_chunk(chunks_ptr, following)
        left, is_edge, base, edge_ptr = _parts(fields, DTYPE, THREADS)
        # Loads cannot move above stores, so this one comes first.
        edges = tl.load(edge_ptr, mask=is_edge, other=0.0)
        seen = peak, tl.zeros([THREADS], dtype=tl.float64)
        while left > 0:
            mask = vector < left
            values = tl.load(base + lane, mask=mask, other=0.0)
            written, seen = _take(values, mask, factors, seen, WRITE, NORM)
            if WRITE:
                tl.store(base + lane, written, mask=mask)
            base += lane.numel
            left -= vector.numel
        edges = edges[None, :, None]
        mask = is_edge[None, :, None]
        written, seen = _take(edges, mask, factors, seen, WRITE, NORM)
        peak, squares = seen
        if WRITE:
            tl.store(edge_ptr, tl.reshape(written, [THREADS]), mask=is_edge)
        if NORM:
            total = tl.sum(squares, axis=0) * of_squares
            tl.store(partials_ptr + first + chunk, total)
        if marks_ptr is not None:
            # Per thread: threads need not wait for each other.
            used = _used_magnitude(peak, factor, FACTOR, DTYPE)
            row_ptr = marks_ptr + (fields[_CHUNK.EXTENT] >> _CHUNK.PARAMETER_SHIFT) * _TRACK.WORDS
            _count_overflow(row_ptr, now_ptr, used)
            if NORM:
                squares_ptr = (row_ptr + _TRACK.SQUARES).to(tl.pointer_type(tl.float64))
                tl.atomic_add(squares_ptr, total, sem="relaxed")
            # Each tensor is judged separately; a finite peak may stay.
            bad = used >= _INFINITY
            none = used * 0
            told = none + _NOT_FINITE
            tl.atomic_add(header_ptr + _HEADER.FINISHED + none, told, mask=bad, sem="relaxed")
            if NORM:
                tl.atomic_max(header_ptr + _HEADER.PEAK + none, used, mask=bad, sem="relaxed")
            peak = tl.where(bad, 0, peak)
        chunk += step
        fields = next_fields

    largest = tl.max(peak, axis=0)
    largest = _used_magnitude(largest, factor, FACTOR, DTYPE)
    if NORM:
        tl.atomic_max(header_ptr + _HEADER.PEAK, largest, sem="relaxed")
    bad = largest >= _INFINITY
    seen = tl.where(bad, _NOT_FINITE, tl.zeros([], dtype=tl.int64))
    if not IS_LAST:
        tl.atomic_add(header_ptr + _HEADER.FINISHED, seen, mask=bad, sem="relaxed")
    else:
        # Some versions of Triton put no barrier between the stores above and the atomic.
        tl.debug_barrier()
        before = tl.atomic_add(header_ptr + _HEADER.FINISHED, seen + 1, sem="acq_rel", scope="gpu")
        if before.to(tl.int32) == tl.num_programs(0) - 1:
            tl.debug_barrier()
            found = before + seen >= _NOT_FINITE
            flag = found.to(tl.float32)
            if NORM:
                none = tl.zeros([], dtype=tl.int64)
                worst = tl.atomic_max(header_ptr + _HEADER.PEAK, none, sem="relaxed")
                squares = _sum_of_partials(partials_ptr, all_chunks)
                norm = worst.to(tl.float64, bitcast=True)
                tl.store(sums_ptr, squares)
                tl.store(sums_ptr + 1, norm)
                if norm_ptr is not None:
                    norm = norm if LARGEST else tl.sqrt(squares)
                    limits, decided = (
                        (max_norm, skip_above),
                        (norm_ptr, coefficient_ptr, divisor_ptr),
                    )
                    flag = _decide(
                        norm, limits, flag, decided, factor_ptr, norms_ptr, window, COMPARES
                    )
            if divisor_ptr is not None and norm_ptr is None:
                tl.store(divisor_ptr, tl.load(factor_ptr))
            result = flag
            if ACCUMULATE:
                flag = _joint(flag, tl.load(found_inf_ptr))
            if scale_ptr is not None:
                if other_found_inf_ptr is not None:
                    flag = _joint(flag, tl.load(other_found_inf_ptr))
                pointers = (scale_ptr, growth_tracker_ptr, state_ptr)
                _update(pointers, None, flag, growth_factor, backoff_factor, growth_interval)
            # All threads have loaded the values that the first one now replaces.
            tl.debug_barrier()
            tl.store(found_inf_ptr, result, mask=found if ACCUMULATE else None)
            tl.store(header_ptr + _HEADER.FINISHED, tl.zeros([], dtype=tl.int64))
            if NORM:
                tl.store(header_ptr + _HEADER.PEAK, tl.zeros([], dtype=tl.int64))


@_kernel
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
    flag = _joint(tl.load(found_inf_a_ptr), tl.load(found_inf_b_ptr))
    flag = _joint(flag, tl.load(found_inf_c_ptr))
    flag = _joint(flag, tl.load(found_inf_d_ptr))
    pointers = (scale_ptr, growth_tracker_ptr, state_ptr)
    _update(pointers, norm_ptr, flag, growth_factor, backoff_factor, growth_interval)


@_kernel
def clip_coefficient(
    sums_ptr,
    rows: tl.int64,
    max_norm: tl.float64,
    norm_ptr,
    coefficient_ptr,
    scale_ptr,
    divisor_ptr,
    found_inf_ptr,
    skip_above: tl.float64,
    norms_ptr,
    window: tl.int64,
    LARGEST: tl.constexpr,
):
    """Norm and clip coefficient from the norms of passes. One program.

    `sums_ptr` has a row for each pass. With LARGEST the norm is the largest magnitude, else the
    2-norm. Where `divisor_ptr` is given, the scale over the coefficient is written there; where
    `found_inf_ptr` is, a flag of 0 becomes that of a spike as in csrc/scale.h.
    """
    squares = tl.zeros([], dtype=tl.float64)
    peak = tl.zeros([], dtype=tl.float64)
    row = rows * 0
    while row < rows:
        squares += tl.load(sums_ptr + 2 * row)
        peak = _larger_or_nan(peak, tl.load(sums_ptr + 2 * row + 1))
        row += 1
    total = peak if LARGEST else tl.sqrt(squares)
    flag = 0.0 if found_inf_ptr is None else tl.load(found_inf_ptr)
    limits, results = (max_norm, skip_above), (norm_ptr, coefficient_ptr, divisor_ptr)
    COMPARES: tl.constexpr = found_inf_ptr is not None
    decided = _decide(total, limits, flag, results, scale_ptr, norms_ptr, window, COMPARES)
    if COMPARES:
        tl.debug_barrier()
        tl.store(found_inf_ptr, decided)
