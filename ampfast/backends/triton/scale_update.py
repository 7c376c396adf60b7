"""One update of the scale in the Triton kernels; device code only."""

import triton
import triton.language as tl

from ampfast.backends.triton.elements import magnitude

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


@triton.jit
def _word(value):
    """A float32 as it stands in a state."""
    return value.to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def _float_at(ptr):
    return tl.load(ptr).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def apply_update(
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
    grown = tl.where(magnitude(grown) < 0x7F800000, grown, before)
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
