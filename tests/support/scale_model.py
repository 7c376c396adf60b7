"""Models in plain Python, the reference for all kernels: the scale with its policies; spikes."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ampfast import Sigmas
from ampfast.backends.core import SPIKE, Update, norm_layout
from ampfast.backends.core import state_layout as layout
from ampfast.loss_scale import Limits, LossScale
from ampfast.policies import LogMax


class Factors(NamedTuple):
    """Growth factor, backoff factor and growth interval."""

    growth: float
    backoff: float
    interval: int


def float32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float64).float().item()


@dataclass
class Prediction:
    """LogMax in plain Python."""

    mean: float = 0.0
    weight: float = 0.0
    slow_mean: float = 0.0
    slow_square: float = 0.0
    slow_weight: float = 0.0
    ceiling: float = 0.0

    def see(self, peak: float) -> None:
        fraction, exponent = math.frexp(peak)
        value = exponent - 1 + (2 * fraction - 1)
        for name, target, share in (
            *(("mean", value, 1 / 128), ("weight", 1.0, 1 / 128)),
            *(("slow_mean", value, 1 / 1024), ("slow_square", value * value, 1 / 1024)),
            ("slow_weight", 1.0, 1 / 1024),
        ):
            average = getattr(self, name)
            setattr(self, name, average + share * (target - average))

    def scale(self, policy: LogMax) -> float:
        far = self.slow_mean / self.slow_weight
        variance = self.slow_square / self.slow_weight - far * far
        highest = self.mean / self.weight + policy.sigmas * math.sqrt(max(variance, 0.0))
        exponent = min(max(16 - policy.headroom - highest, -126.0), 127.0)
        return 2.0 ** (math.floor(exponent + 127) - 127)

    def averages(self) -> list[float]:
        averages = [*(self.mean, self.weight, self.slow_mean), self.slow_square, self.slow_weight]
        return [*averages, self.ceiling]


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
    skips_at_minimum: int = 0
    tolerated: int = 0
    spikes: int = 0
    history: list[tuple[float, float, float | None, float]] = field(default_factory=list)
    prediction: Prediction = field(default_factory=Prediction)
    predicted: float = math.nan  # for the next step

    def update(self, flag: float, norm: float | None = None, peak: float = 0.0) -> None:
        self.history.append((self.scale, flag, norm, self.predicted))
        self.predicted = math.nan
        self.steps += 1
        self.skipped += flag != 0
        self.consecutive_skips = self.consecutive_skips + 1 if flag else 0
        if flag == SPIKE:
            self.spikes += 1
        else:
            self._move(bool(flag), peak)

    def _move(self, found: bool, peak: float) -> None:
        growth, backoff, interval = self.factors
        before, limits, policy = self.scale, self.limits, self.limits.policy
        after = before
        if found:
            self.tracker = 0
            self.tolerated += 1
            if self.tolerated >= limits.hysteresis:
                after = float32(before * backoff)
        else:
            self.tracker += 1
            if limits.hysteresis_refill == "finite_step":
                self.tolerated = 0
            if 1 <= interval <= self.tracker:
                self.tracker = 0
                self.tolerated = 0
                grown = float32(before * growth)
                after = grown if math.isfinite(grown) else before
        if isinstance(policy, LogMax):
            after = self._predicted(found, after, peak)
        if after > before and limits.max_scale is not None:
            after = min(after, max(before, float32(limits.max_scale)))
        elif after < before and limits.min_scale is not None:
            after = max(after, min(before, float32(limits.min_scale)))
        self.growths += after > before
        self.backoffs += after < before
        stuck = found and limits.min_scale is not None and before <= float32(limits.min_scale)
        self.skips_at_minimum = self.skips_at_minimum + 1 if stuck else 0
        self.scale = after

    def _predicted(self, found: bool, by_torch: float, peak: float) -> float:
        prediction, policy = self.prediction, self.limits.policy
        if found:
            prediction.ceiling = by_torch
        else:
            if self.tracker == 0 and self.factors.interval >= 1:
                grown = float32(prediction.ceiling * self.factors.growth)
                prediction.ceiling = grown if math.isfinite(grown) else prediction.ceiling
            if 0 < peak < math.inf:
                prediction.see(peak)
        after = by_torch
        if prediction.weight:
            after = self.predicted = prediction.scale(policy)
        return min(after, prediction.ceiling) if prediction.ceiling > 0 else after

    def counters(self) -> list[int]:
        known = [
            *(self.steps, self.skipped, self.growths, self.backoffs, self.consecutive_skips),
            *(self.skips_at_minimum, self.tolerated, self.spikes),
        ]
        return known + [0] * (layout.COUNTERS - len(known))


POLICIES = {
    "torch's": Limits(),
    "limits": Limits(min_scale=0.3, max_scale=40.0),
    "minimum": Limits(min_scale=1.1),
    "maximum": Limits(max_scale=7.7),
    "hysteresis": Limits(hysteresis=3),
    "hysteresis refilled": Limits(hysteresis=2, hysteresis_refill="finite_step"),
    "all": Limits(0.5, 30.0, 2, "growth"),
    "log max": Limits(policy=LogMax()),
    "log max, limits": Limits(2.0**-20, 2.0**20, policy=LogMax(0.5, 2.5)),
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


def random_peaks(count: int, limits: Limits) -> list[float | None]:
    """Peaks for a policy that needs them, else None: a walk, with zeros and extremes."""
    if limits.policy is None:
        return [None] * count
    chance, level = random.Random(count), 0.0
    peaks = []
    for _ in range(count):
        level += chance.gauss(0.0, 1.0)
        usual = 2.0 ** (level / 4)
        peaks.append(chance.choice([usual] * 20 + [0.0, 1e-300, 2.0**-149, 3e38, math.inf]))
    return peaks


def update_of(
    kept: LossScale, scale: torch.Tensor, tracker: torch.Tensor, found: float, norm: float | None
) -> Update:
    """An update of these by `FACTORS`."""
    device = scale.device
    given = None if norm is None else torch.tensor(norm, device=device)
    words = kept.words_on(device)
    return Update(scale, tracker, [torch.tensor(found, device=device)], *FACTORS, words, given)


def propose(kept: LossScale, update: Update, peak: float | None) -> None:
    """Lets the policy, if there is one, propose a scale for an update."""
    if kept.follower is not None:
        peaks = torch.tensor(peak, dtype=torch.float64, device=update.scale.device)
        kept.follower.observed.append(peaks)
        kept.follower.before_update(update)


def conclude(kept: LossScale) -> None:
    """Tells the policy that the update is done."""
    if kept.follower is not None:
        kept.follower.after_update()
        kept.follower.observed = []


def assert_state(kept: LossScale, model: ScaleModel) -> None:
    """Compares counters, averages and ring with those of the model."""
    words = kept.words.cpu()
    assert words[: layout.COUNTERS].tolist() == model.counters()
    assert words[layout.PROPOSAL] == 0
    if isinstance(model.limits.policy, LogMax):
        assert kept.state_dict()["averages"] == model.prediction.averages()
    history = kept.history()
    expected = model.history[-layout.RING_STEPS :]
    if model.steps > len(expected):
        expected[0] = (*expected[0][:3], math.nan)  # that entry is overwritten
    assert history.step.tolist() == list(range(model.steps - len(expected), model.steps))
    columns = (history.scale, history.skipped, history.spiked, history.grad_norm)
    rows = zip(*(each.tolist() for each in (*columns, history.predicted)), strict=True)
    assert repr(list(rows)) == repr(
        [
            (scale, flag != 0, flag == SPIKE, math.nan if norm is None else norm, predicted)
            for scale, flag, norm, predicted in expected
        ]
    )
    assert history.has_norm.tolist() == [norm is not None for _, _, norm, _ in expected]


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
