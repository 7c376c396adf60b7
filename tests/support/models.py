"""Reference models of all kernels: clipping, the scale and its limits, spikes, marks."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from ampfast import Sigmas
from ampfast.backends.aten import squares_in
from ampfast.backends.core import MARK_WORDS, SPIKE, Factor, Pass, Update, norm_layout
from ampfast.backends.core import state_layout as layout
from ampfast.scaler.loss_scale import Limits, LossScale
from support.comparison import BITS, FLOATS, assert_same, replaced
from support.kernels import Track, flag, grads_of, inverse_of, run_check, storage, torch_unscale_

# Bound on the relative error of a norm against the float64 norm of the unscaled values: one
# rounding of each value, whose mean counts, and one of the norm. A float64 norm sums thousands of
# roundings.
NORM_ULPS = 4
WIDE_NORM_ULPS = 256
# Bound in ulps on a clipped gradient against unscaled x coefficient: one for each rounding.
GRADIENT_ULPS = 2


def ordered_bits(values: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the floats."""
    bits = values.contiguous().view(BITS[values.dtype]).to(torch.int64)
    least = torch.iinfo(BITS[values.dtype]).min
    return torch.where(bits < 0, least - bits, bits)


def ulps(ours: torch.Tensor, exact: torch.Tensor) -> int:
    """Largest distance in ulps of `ours` from float64 values."""
    rounded = exact.to(ours.dtype)
    if not ours.numel():
        return 0
    return int((ordered_bits(ours) - ordered_bits(rounded)).abs().max())


def unscaled(grads: Iterable[torch.Tensor], scale: float) -> list[torch.Tensor]:
    """Gradients as torch's op unscales them."""
    written = [g.detach().clone(memory_format=torch.contiguous_format) for g in grads]
    for each in written:
        torch_unscale_([each], inverse_of(scale))
    return written


def exact_norm(grads: Sequence[torch.Tensor], scale: float, order: float = 2.0) -> float:
    """Float64 norm of the unscaled values, not rounded to 16 bit."""
    values = [np.zeros(1)]
    for grad in grads:
        wide = grad.detach().reshape(-1).to(torch.promote_types(grad.dtype, torch.float32))
        values.append((wide * inverse_of(scale)).double().abs().numpy())
    every = np.concatenate(values)
    if order == math.inf:
        return float(every.max())
    # 64 bits of mantissa where the processor has them.
    return float((every.astype(np.longdouble) ** order).sum()) ** (1 / order)


def coefficient_of(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """torch's coefficient in float64, but 1 for an infinite limit."""
    wide = norm.detach().double()
    if max_norm == math.inf:
        return torch.ones_like(wide)
    return (torch.full_like(wide, max_norm) / (wide + 1e-6)).clamp(max=1.0)


def clip_by_hand(parameters: Iterable[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Unscaled gradients times the coefficient, bit for bit as `clip_grad_norm_`."""
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None:
            wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
            grad.copy_(wide * coefficient_of(norm, max_norm).to(wide.dtype))


def assert_clipped(
    grads: Sequence[torch.Tensor],
    before: Sequence[torch.Tensor],
    scale: float,
    norm: torch.Tensor,
    max_norm: float,
) -> None:
    """Asserts that the gradients were clipped to the returned norm."""
    coefficient = coefficient_of(norm, max_norm)
    for index, (grad, values) in enumerate(zip(grads, unscaled(before, scale), strict=True)):
        if coefficient == 1.0:
            assert_same(grad.contiguous(), values, f"gradient {index}")
        else:
            exact = values.double() * coefficient
            assert ulps(grad, exact) <= GRADIENT_ULPS, f"gradient {index}"


def assert_norm(norm: torch.Tensor, exact: float) -> None:
    assert norm.shape == ()
    if not math.isfinite(exact):
        assert_same(norm, torch.tensor(exact, dtype=norm.dtype))
    allowed = WIDE_NORM_ULPS if norm.dtype is torch.float64 else NORM_ULPS
    assert ulps(norm, torch.tensor(exact, dtype=torch.float64)) <= allowed, (norm, exact)


def grads_in(*optimizers: Any) -> list[torch.Tensor]:
    return [
        parameter.grad
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]


class Factors(NamedTuple):
    """Growth factor, backoff factor and growth interval."""

    growth: float
    backoff: float
    interval: int


def float32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float64).float().item()


@dataclass
class ScaleModel:
    """Scale, counters and history."""

    scale: float
    tracker: int
    factors: Factors
    limits: Limits
    steps: int = 0
    skipped: int = 0
    growths: int = 0
    backoffs: int = 0
    consecutive_skips: int = 0
    tolerated: int = 0
    spikes: int = 0
    history: list[tuple[float, float, float | None]] = field(default_factory=list)

    def update(self, flag: float, norm: float | None = None) -> None:
        self.history.append((self.scale, flag, norm))
        self.steps += 1
        self.skipped += flag != 0
        self.consecutive_skips = self.consecutive_skips + 1 if flag else 0
        if flag == SPIKE:
            self.spikes += 1
        else:
            self._move(bool(flag))

    def _move(self, found: bool) -> None:
        growth, backoff, interval = self.factors
        before, limits = self.scale, self.limits
        after = before
        if found:
            self.tracker = 0
            self.tolerated += 1
            if self.tolerated >= limits.hysteresis:
                after = float32(before * backoff)
        else:
            self.tracker += 1
            if 1 <= interval <= self.tracker:
                self.tracker = 0
                self.tolerated = 0
                grown = float32(before * growth)
                after = grown if math.isfinite(grown) else before
        if after > before and limits.max_scale is not None:
            after = min(after, max(before, float32(limits.max_scale)))
        elif after < before and limits.min_scale is not None:
            after = max(after, min(before, float32(limits.min_scale)))
        self.growths += after > before
        self.backoffs += after < before
        self.scale = after

    def counters(self) -> list[int]:
        known = [
            *(self.steps, self.skipped, self.growths, self.backoffs, self.consecutive_skips),
            *(self.tolerated, self.spikes),
        ]
        return known + [0] * (layout.COUNTERS - len(known))


LIMITS = {
    "torch's": Limits(),
    "limits": Limits(min_scale=0.3, max_scale=40.0),
    "minimum": Limits(min_scale=1.1),
    "maximum": Limits(max_scale=7.7),
    "hysteresis": Limits(hysteresis=3),
    "all": Limits(0.5, 30.0, 2),
}
FACTORS = Factors(1.9, 0.3, 3)


def random_steps(count: int, seed: int, spikes: bool = False) -> list[tuple[float, float | None]]:
    """Flags of random overflows, often enough to reach both limits, and norms now and then."""
    chance = random.Random(seed)
    steps = []
    while len(steps) < count:
        overflows = chance.random() < 0.4
        for _ in range(chance.randint(1, 12)):
            flag = float(overflows and chance.random() < 0.9)
            if spikes and chance.random() < 0.2:
                flag = SPIKE
            norm = chance.choice([None, math.inf, math.nan, chance.random()])
            steps.append((flag, norm if norm is None else float32(norm)))
    return steps[:count]


def update_of(
    kept: LossScale, scale: torch.Tensor, tracker: torch.Tensor, found: float, norm: float | None
) -> Update:
    """An update of these by `FACTORS`."""
    device = scale.device
    given = None if norm is None else torch.tensor(norm, device=device)
    words = kept.words_on(device)
    return Update(scale, tracker, [torch.tensor(found, device=device)], *FACTORS, words, given)


def assert_state(kept: LossScale, model: ScaleModel) -> None:
    """Compares counters and ring with those of the model."""
    words = kept.words.cpu()
    assert words[: layout.COUNTERS].tolist() == model.counters()
    history = kept.history()
    expected = model.history[-layout.RING_STEPS :]
    assert history.step.tolist() == list(range(model.steps - len(expected), model.steps))
    columns = (history.scale, history.skipped, history.spiked, history.grad_norm)
    rows = zip(*(each.tolist() for each in columns), strict=True)
    assert repr(list(rows)) == repr(
        [
            (scale, flag != 0, flag == SPIKE, math.nan if norm is None else norm)
            for scale, flag, norm in expected
        ]
    )
    assert history.has_norm.tolist() == [norm is not None for _, _, norm in expected]


def check_limits(kernels: Any, device: torch.device, limits: str) -> None:
    """Compares random updates, every other one behind a check, with those of the model."""
    model = ScaleModel(3.0, 1, FACTORS, LIMITS[limits])
    kept = LossScale(model.limits)
    words = kept.words_on(device)
    # Near the end of the ring, so that it wraps around.
    ahead = layout.RING_STEPS - 20
    words[layout.STEPS] = model.steps = ahead
    model.history = [(0.0, 0.0, None)] * ahead
    words[layout.RING :][: ahead * layout.RING_WORDS] = 0
    scale = torch.tensor(model.scale, device=device)
    tracker = torch.tensor(model.tracker, dtype=torch.int32, device=device)
    for turn, (found, norm) in enumerate(random_steps(80, len(limits), spikes=True)):
        riding = turn % 2 == 0
        norm = None if riding else norm
        infinite = riding and found == 1
        update = update_of(kept, scale, tracker, found, norm)
        if infinite:
            update = replaced(update, found_infs=())
        if riding:
            ending = kernels.ending(update)
            value = math.nan if infinite else 1.0
            run_check(kernels, grads_of([torch.full((3,), value, device=device)]), ending=ending)
            assert ending.applied
        else:
            assert kernels.update(update)
        model.update(found, norm)
        assert (scale.item(), tracker.item()) == (model.scale, model.tracker)
        if turn % 17 == 16:
            model.scale = 6.0
            scale.fill_(model.scale)
    assert_state(kept, model)


class Rule:
    """Mean and sample deviation of the norms of the last steps taken, summed from the oldest.

    Attributes:
        taken: Norms since the window began.
        spikes: Spikes in a row.
        restarts: Restarts of the window.
    """

    def __init__(self, limit: float | Sigmas) -> None:
        self.limit = limit
        self.taken: list[float] = []
        self.spikes = self.restarts = 0

    @property
    def patience(self) -> int:
        assert isinstance(self.limit, Sigmas)
        return self.limit.patience or min(self.limit.window // 2, 32)

    def flag(self, norm: float) -> float:
        """The flag after a clipping of finite gradients with this norm."""
        if not isinstance(self.limit, Sigmas):
            return 0.0 if norm <= self.limit else SPIKE
        is_usable = 0 < norm < math.inf
        last = self.taken[-self.limit.window :]
        if len(last) == self.limit.window:
            mean = total(last) / len(last)
            squares = total([(norm - mean) * (norm - mean) for norm in last])
            deviation = max(math.sqrt(squares / (len(last) - 1)), 0.01 * mean)
            if not norm <= mean + self.limit.sigmas * deviation:
                if not is_usable:
                    return SPIKE
                self.spikes += 1
                if self.spikes <= self.patience:
                    return SPIKE
                self.taken = []
                self.restarts += 1
        if is_usable:
            self.taken.append(norm)
            self.spikes = 0
        return 0.0

    def words(self) -> Tensor:
        """What a kernel is given at first."""
        assert isinstance(self.limit, Sigmas)
        words = torch.zeros(norm_layout.RING + self.limit.window, dtype=torch.float64)
        words[norm_layout.PATIENCE] = self.patience
        return words

    def assert_are(self, words: Tensor) -> None:
        """Checks the words of a kernel that was given the same norms."""
        assert isinstance(self.limit, Sigmas)
        header = {"COUNT": len(self.taken), "SPIKES": self.spikes}
        header |= {"PATIENCE": self.patience, "RESTARTS": self.restarts}
        for name, number in header.items():
            assert words[getattr(norm_layout, name)] == number, name
        last, count, window = self.taken[-self.limit.window :], len(self.taken), self.limit.window
        ring = words[norm_layout.RING :].tolist()
        assert [ring[place % window] for place in range(count - len(last), count)] == last


def total(values: list[float]) -> float:
    # sum() of Python 3.12 and newer is more exact.
    result = 0.0
    for value in values:
        result += value
    return result


def random_norms(count: int, seed: int) -> list[float]:
    """Norms of changing levels, some of them far off, others 0 or infinite, as float32 has them."""
    chance, level, norms = random.Random(seed), 1.0, []
    scales = [1.0] * 8 + [1.3, 5.0, 1e6, math.inf, 0.0]
    for _ in range(count):
        if chance.random() < 0.05:
            level = chance.choice([0.5, 1.0, 8.0])
        norms.append(level * chance.uniform(0.5, 1.5) * chance.choice(scales))
    return torch.tensor(norms).tolist()


def track_for(parameters: int, *, step: int = 0, device: str | torch.device = "cpu") -> Track:
    """An empty table, between rows that no pass may write."""
    marks = torch.full((parameters + 2, MARK_WORDS), -7, dtype=torch.int64, device=device)
    marks[1:-1] = 0
    now = torch.tensor(step, dtype=torch.int64, device=device)
    return Track(marks[1:-1], now)


def marked(track: Track) -> list[bool]:
    """Whether each parameter ever overflowed."""
    return [row[0] != 0 for row in track.marks.tolist()]


def kinds_in(track: Track) -> list[list[int]]:
    """The last steps and counts of each parameter, as `marks_of`."""
    return [row[:4] for row in track.marks.tolist()]


def marks_of(used: Sequence[torch.Tensor], step: int = 0) -> list[list[int]]:
    """Marks after one step, from the values that the optimizer uses."""
    rows = []
    for values in used:
        bad, nan = bool((~values.isfinite()).any()), bool(values.isnan().any())
        rows.append([(step + 1) * bad, (step + 1) * nan, int(bad), int(nan)])
    return rows


def random_list(seed: int, dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
    """Gradients of many sizes, addresses and ranges: zeros, subnormals, infinities and NaN."""
    generator = torch.Generator().manual_seed(seed)

    def chance(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    found = []
    for _ in range(chance(1, 9)):
        dtype = dtypes[chance(0, len(dtypes))]
        count = (0, 1, 7, 33, 255, 4096, 4100, 20_000)[chance(0, 8)]
        offset = chance(0, 9)
        exponents = torch.rand(count + offset, generator=generator, dtype=torch.float64)
        values = torch.randn(count + offset, generator=generator, dtype=torch.float64)
        values *= 2.0 ** (exponents * chance(1, 60) - chance(0, 45))
        values[torch.rand(count + offset, generator=generator) < 0.1] = 0.0
        values = values.to(dtype)
        if dtype is torch.float16:
            values = values.clamp(-65504, 65504)
        for bad in (torch.inf, -torch.inf, torch.nan):
            if count and chance(0, 6) == 0:
                values[offset + chance(0, count)] = bad
        found.append(values[offset:])
    return found


def copies(grads: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copies at the same offsets to a 16-byte boundary."""
    memories = [storage(grad).to(device, copy=True) for grad in grads]
    places = [(grad.storage_offset(), grad.numel()) for grad in grads]
    return [memory.narrow(0, *place) for memory, place in zip(memories, places, strict=True)]


def widened(grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [g if g.dtype == torch.float64 else g.float() for g in grads]


def assert_squares(squares: torch.Tensor, grads: Sequence[torch.Tensor], factor: float) -> None:
    """Sums of squares by parameter; GPU kernels sum in float32 over windows of 8 KiB."""
    for found, grad in zip(squares.tolist(), widened(grads), strict=True):
        expected = float((grad * factor).double().square().sum())
        if 2.0**-60 < expected < 2.0**110:
            assert found == pytest.approx(expected, rel=1e-4)
        elif not math.isfinite(expected):
            assert not math.isfinite(found) and math.isnan(found) is math.isnan(expected)


def check_passes(kernels: Any, make: Sequence[torch.Tensor], device: torch.device) -> None:
    """Compares marks of every kind of pass, and results with and without tracking."""
    count = len(make)
    inverse, divisor = 1.5, 0.75

    def run(name: str, used: Sequence[torch.Tensor], work: Pass) -> None:
        expected = marks_of(used, 4)
        plain = copies(make, device)
        found = kernels.run(grads_of(plain), work).item()
        grads = copies(make, device)
        track = track_for(count, step=4, device=device)
        assert kernels.run(grads_of(grads), replaced(work, **track._asdict())).item() == found, name
        assert kinds_in(track) == expected, name
        squares = squares_in(track.marks)
        if work.sums is None:
            assert not squares.any(), name
        else:
            assert_squares(squares, make, 1 / divisor if work.how == Factor.DIVIDE else inverse)
        whole = storage(track.marks).view(-1, MARK_WORDS)
        assert (whole[[0, -1]] == -7).all(), "wrote outside the table"
        for ours, theirs in zip(grads, plain, strict=True):
            same = (ours == theirs) | (ours.isnan() & theirs.isnan())
            assert same.all(), f"{name}: another result"

    run("raw", make, Pass(False, Factor.NONE))
    quotients = [g / divisor for g in widened(make)]
    run("divided", quotients, Pass(False, Factor.DIVIDE, flag(divisor).to(device)))
    written = [(w * inverse).to(g.dtype) for w, g in zip(widened(make), make, strict=True)]
    factor = flag(inverse).to(device)
    run("unscaled", written, Pass(True, Factor.TIMES, factor))
    scale = flag(4.0).to(device)
    run("scaled", [g / 4 for g in make], Pass(True, Factor.TIMES_RECIPROCAL, scale))
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    run("norms", written, Pass(False, Factor.TIMES, factor, sums=sums))
    divided = Pass(False, Factor.DIVIDE, flag(divisor).to(device), sums=sums)
    run("norms of quotients", quotients, divided)
    # The reciprocal of this scale is infinite.
    tiny = torch.tensor([2.0**-140, 0.0, 3 * 2.0**-140], device=device)
    work = replaced(divided, factor=flag(2.0**-130).to(device))
    assert kernels.run(grads_of([tiny]), work).item() == 0
    assert sums.tolist() == [10 * 2.0**-20, 3 * 2.0**-10]


def check_random_lists(kernels: Any, device: torch.device, seeds: range) -> None:
    for seed in seeds:
        dtypes = FLOATS if seed % 2 else FLOATS[seed // 2 % 4 :][:1]
        grads = random_list(seed, dtypes)
        if any(g.numel() for g in grads):
            check_passes(kernels, grads, device)


def check_times(kernels: Any, device: torch.device, elements: int = 70_000) -> None:
    """A step counts once in any number of passes, with the kind found by the last one."""
    track = track_for(2, device=device)
    check = Pass(False, Factor.NONE, **track._asdict())
    good, bad = torch.ones(elements, device=device), torch.ones(elements, device=device)
    for step, value in ((0, torch.inf), (1, 1.0), (2, torch.nan), (5, -torch.inf), (6, 1.0)):
        track.now.fill_(step)
        bad.fill_(value)
        for _ in range(3):
            kernels.run(grads_of([good, bad]), check)
    assert kinds_in(track) == [[0, 0, 0, 0], [6, 3, 3, 1]]
    # First infinities, then NaN in the same step, which makes it a step with NaN.
    track.now.fill_(7)
    for value in (torch.inf, torch.nan, torch.inf):
        bad.fill_(value)
        kernels.run(grads_of([bad, good]), check)
    assert kinds_in(track) == [[8, 8, 1, 1], [6, 3, 3, 1]]
