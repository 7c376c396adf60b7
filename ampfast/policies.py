"""Policies that move a scale by what is observed of its gradients: `LogMax`."""

from __future__ import annotations

import ctypes
import math
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ampfast.backends import core, scalars
from ampfast.backends.core import Pass, Update
from ampfast.errors import float_of

# Of the moving averages of LogMax: the logarithm and its weight so far; slower ones of the
# logarithm, its square and their weight.
_FRACTION, _SLOW_FRACTION = 1 / 128, 1 / 1024
_FRACTIONS = (_FRACTION, _FRACTION, _SLOW_FRACTION, _SLOW_FRACTION, _SLOW_FRACTION)
_LARGEST_AVERAGE = 1100.0**2
# The averages of LogMax before the first step, and its ceiling.
NO_AVERAGES = [0.0] * (len(_FRACTIONS) + 1)
_STEPS = core.state_layout.RING_STEPS


@dataclass(frozen=True)
class LogMax:
    """Scale that follows the largest gradients, so that overflows are as rare as is asked for.

    With x = log2 of each step's largest unscaled magnitude, linear between powers of two, the next
    scale is the power of two at or below 2^(16 - headroom - mean(x) - sigmas * std(x)). Moving
    averages: x with a fraction of 1/128; x and x^2, for the deviation, with 1/1024; of steps taken
    only. After an overflow the scale stays below the one that overflowed, until torch's rule
    has grown that limit: growth_interval steps without overflow for each factor of growth.

    Source: the LogMax scaling of OpenSeq2Seq.

    Attributes:
        sigmas: Standard deviations between the mean and the largest value that does not overflow;
            at least 0. With normal x, 3.09 lets one step in a thousand overflow, without headroom.
        headroom: Powers of two that stay free above it; at least 0.

    Raises:
        TypeError: If an argument is no number.
        ValueError: If an argument is below 0 or not finite.
    """

    sigmas: float = 3.09
    headroom: float = 1

    def __post_init__(self) -> None:
        for name, given in asdict(self).items():
            value = float_of(name, given)
            if not 0 <= float32(value) < math.inf:
                raise ValueError(f"{name} must be at least 0 and finite, got {value}")
            object.__setattr__(self, name, value)


def float32(value: float) -> float:
    """Returns the nearest float32, infinite where a number is too large for one."""
    return ctypes.c_float(value).value


class Follower:
    """Observer of a scale's updates that proposes the next scale, as `LogMax` describes it.

    Once a scale has overflowed, proposals stay at or below a ceiling. A proposal is a word of the
    scaler's state, which the kernels read and reset: the next scale, before the limits, or 0 for
    torch's scale.

    Attributes:
        observed: What was observed in this iteration, one-element tensors.
    """

    def __init__(self, policy: LogMax) -> None:
        self._policy = policy
        self.observed: list[Tensor] = []
        self._propose: Any = None  # writes the proposal
        # Predictions, the oldest first, and averages: floats beside a scale that the host reads
        # without waiting, else one float64 tensor.
        self._state: Any = [0.0] * _STEPS + NO_AVERAGES
        self._fractions: Tensor | None = None
        # The last prediction and the averages of the update under way.
        self._next: Any = None

    def before(self, work: Pass, device: torch.device) -> Pass:
        """Returns a pass over gradients, still scaled, with the sums that it is to observe."""
        # Without a Python frame.
        wide = torch.float64 if scalars.has_float64(device) else torch.float32
        sums = torch.zeros(2, dtype=wide, device=device)
        return Pass(*work[:6], sums, *work[7:])

    def bind(self, words: Tensor) -> None:
        """Moves to the device of the scaler's state, into which proposals go."""
        with torch.inference_mode(False):
            # The lower half of a word.
            proposal = words.view(torch.float32)[2 * core.state_layout.PROPOSAL]
        self._propose = proposal.fill_
        if words.device.type == "cpu":
            # An op would take microseconds.
            memory = ctypes.c_float.from_address(proposal.data_ptr())
            self._propose = partial(setattr, memory, "value")
        if _host_reads(words.device):
            self._state = self._floats()
        else:
            settings: Any = {"dtype": torch.float64, "device": words.device}
            with torch.inference_mode(False):
                self._state = torch.as_tensor(self._state, **settings)
                self._fractions = torch.tensor(_FRACTIONS, **settings)

    def before_update(self, update: Update) -> None:
        """Proposes a scale, without a host sync."""
        observed, state = self.observed, self._state
        device = update.scale.device
        peak = observed[0] if len(observed) == 1 else scalars.largest(observed, device)
        if not isinstance(state, list):
            self._propose_on_device(update, peak)
            return
        _, _, flags, growth, backoff, interval, *_ = update
        before, tracker, largest = update.scale.item(), update.growth_tracker.item(), peak.item()
        flag = sum(map(Tensor.item, flags))
        finite, kept = flag == 0, scalars.leaves_scale(flag)
        grows = finite and 1 <= interval <= tracker + 1
        factor = growth if grows else 1.0 if kept else backoff
        mean, weight, slow_mean, slow_square, slow_weight, ceiling = state[_STEPS:]
        # Beyond a scale that overflowed, torch's rule probes for it.
        ceiling, following = ceiling if kept else before, before
        if factor != 1:
            ceiling, following = _times(ceiling, factor), _times(before, factor)
        if finite and 0 < largest < math.inf:
            fraction, exponent = math.frexp(largest)
            log = exponent - 2 + 2 * fraction
            mean += _FRACTION * (log - mean)
            weight += _FRACTION * (1 - weight)
            slow_mean += _SLOW_FRACTION * (log - slow_mean)
            slow_square += _SLOW_FRACTION * (log * log - slow_square)
            slow_weight += _SLOW_FRACTION * (1 - slow_weight)
        prediction = 0.0
        # A spike predicts nothing.
        if weight > 0 and finite == kept:
            far = slow_mean / slow_weight
            variance = slow_square / slow_weight - far * far
            deviation = math.sqrt(max(variance, 0.0))
            highest = mean / weight + self._policy.sigmas * deviation
            power = 16 - self._policy.headroom - highest
            # A sum of positive numbers, which may round up; the exponent of 1 is 127.
            biased = int(min(max(power, -126.0), 127.0) + 127)
            prediction = math.ldexp(1.0, biased - 127)
        wanted = prediction or following
        proposal = ceiling if 0 < ceiling < wanted else prediction
        self._propose(proposal)
        averages = mean, weight, slow_mean, slow_square, slow_weight
        self._next = [prediction, *averages, ceiling]

    def _propose_on_device(self, update: Update, peak: Tensor) -> None:
        """The same in torch's ops, of which the host reads nothing."""
        scale, growth_tracker, flags, growth, backoff, interval, *_ = update
        before, tracker, peak, *rest = (
            scalars.moved(tensor.detach(), scale.device).reshape(()).double()
            for tensor in (scale, growth_tracker, peak, *flags)
        )
        flag = torch.stack(rest).sum()
        finite, kept = flag == 0, scalars.leaves_scale(flag)
        grows = finite & (interval >= 1) & (tracker + 1 >= interval)
        one = torch.ones_like(before)
        factor = torch.where(grows, one * growth, torch.where(kept, one, one * backoff))

        def times(value: Tensor) -> Tensor:
            moved = (value * factor).float().double()
            return torch.where(moved.abs() < math.inf, moved, value)

        ceiling = times(torch.where(kept, self._state[-1], before))
        fraction, exponent = torch.frexp(peak)
        log = exponent - 2 + 2 * fraction
        averages, targets = self._state[_STEPS:-1], torch.stack([log, one, log, log * log, one])
        is_known = finite & (peak > 0) & (peak < math.inf)
        averages = torch.where(is_known, averages.lerp(targets, self._fractions), averages)
        mean, weight, slow_mean, slow_square, slow_weight = averages
        far = slow_mean / slow_weight
        variance = slow_square / slow_weight - far * far
        highest = mean / weight + self._policy.sigmas * variance.clamp(min=0.0).sqrt()
        power = (16 - self._policy.headroom - highest).clamp(-126.0, 127.0)
        predicted = ((power + 127).to(torch.int32) << 23).view(torch.float32).double()
        # Of no weight all of this is NaN.
        predicts = (weight > 0) & (finite == kept)
        prediction = torch.where(predicts, predicted, 0.0)
        wanted = torch.where(predicts, predicted, times(before))
        self._propose(torch.where((ceiling > 0) & (wanted > ceiling), ceiling, prediction))
        self._next = torch.cat([prediction.reshape(1), averages, ceiling.reshape(1)])

    def after_update(self) -> None:
        """Concludes an update, also one without a call of `before_update`; no host sync."""
        state, following = self._state, self._next
        self._next = None
        if isinstance(state, list):
            state[_STEPS:] = following or (0.0, *state[_STEPS:])
            del state[:1]
        else:
            if following is None:
                following = torch.nn.functional.pad(state[_STEPS:], (1, 0))
            state.copy_(torch.cat([state[1:_STEPS], following]))

    def predictions(self) -> list[float]:
        """Returns the predictions of the last 1,024 updates, 0 for none; a host sync."""
        return self._floats()[:_STEPS]

    def averages(self) -> list[float]:
        """Returns what a checkpoint keeps, with a host sync."""
        return self._floats()[_STEPS:]

    def load(self, averages: list[float]) -> None:
        """Sets what a checkpoint kept, in place."""
        given: Any = averages
        if isinstance(self._state, Tensor):
            given = torch.tensor(averages, dtype=torch.float64, device="cpu")
        self._state[_STEPS:] = given

    def _floats(self) -> list[float]:
        return self._state if isinstance(self._state, list) else self._state.tolist()

    def __getstate__(self) -> dict[str, Any]:
        nothing = dict.fromkeys(("_propose", "_fractions", "_next"))
        return {**self.__dict__, **nothing, "observed": [], "_state": self._floats()}


def require_averages(saved: object) -> list[float]:
    """Returns the averages of a checkpoint.

    Raises:
        ValueError: If they are not as LogMax writes them.
    """
    values: list[Any] = saved if isinstance(saved, list) else []
    is_valid = len(values) == len(NO_AVERAGES) and all(type(each) is float for each in values)
    if is_valid:
        mean, weight, slow_mean, slow_square, slow_weight, ceiling = values
        # Of exponents of float64; the first one has these fractions.
        is_valid = all(abs(each) <= _LARGEST_AVERAGE for each in (mean, slow_mean, slow_square))
        is_valid &= (weight, slow_weight) == (0, 0) or (
            _FRACTION <= weight <= 1 and _SLOW_FRACTION <= slow_weight <= 1
        )
        is_valid &= slow_square >= 0 and 0 <= ceiling <= torch.finfo(torch.float32).max
    if not is_valid:
        raise ValueError(
            f"the checkpoint's averages must be a list of {len(NO_AVERAGES)} finite floats, as "
            f"LogMax writes them, got {saved!r}"
        )
    return [*values[:-1], float32(values[-1])]


def _host_reads(device: torch.device) -> bool:
    """Whether the host computes: where it reads at no cost, or the device lacks float64."""
    return device.type == "cpu" or not scalars.has_float64(device)


def _times(value: float, factor: float) -> float:
    """The product as float32, or the value where that is not finite."""
    moved = float32(value * factor)
    return moved if math.isfinite(moved) else value
