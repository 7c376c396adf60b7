"""Policies that move a scale by what is observed of its gradients: `LogMax`, `UnderflowTarget`."""

from __future__ import annotations

import ctypes
import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ampfast.backends import aten, cpu
from ampfast.errors import float_of

__all__ = ["Follower", "LogMax", "UnderflowTarget", "float32", "follower"]

# Of the moving averages of LogMax: the logarithm and its weight so far; slower ones of the
# logarithm, its square and their weight.
_SHARE, _SLOW_SHARE = 1 / 128, 1 / 1024
_SHARES = (_SHARE, _SHARE, _SLOW_SHARE, _SLOW_SHARE, _SLOW_SHARE)
_LARGEST_AVERAGE = 1100.0**2
_STEPS = cpu.state_layout.RING_STEPS


@dataclass(frozen=True)
class LogMax:
    """Scale that follows the largest gradients, so that overflows are as rare as is asked for.

    With x = log2 of each step's largest unscaled magnitude, linear between powers of two, the next
    scale is the power of two at or below 2^(16 - headroom - mean(x) - sigmas * std(x)). Moving
    averages: x with a share of 1/128; x and x^2, for the deviation, with 1/1024; of steps taken
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


@dataclass(frozen=True)
class UnderflowTarget:
    """torch's rule, but the scale grows only while too many values vanish.

    Growth that is due waits until more than a share of an optimizer's nonzero gradient values, as
    they are scaled, lie below the smallest number of float16. It needs `track="health"`, which
    counts them. Values that have been rounded to zero do not count, as in float16 gradients.

    Attributes:
        share: Above 0 and below 1.

    Raises:
        TypeError: If it is no number.
        ValueError: If it is out of range.
    """

    share: float = 1e-3

    def __post_init__(self) -> None:
        share = float_of("share", self.share)
        if not 0 < share < 1:
            raise ValueError(f"share must be above 0 and below 1, got {share}")
        object.__setattr__(self, "share", share)


def float32(value: float) -> float:
    """Returns the nearest float32, infinite where a number is too large for one."""
    return ctypes.c_float(value).value


def follower(policy: LogMax | UnderflowTarget | None) -> Follower | None:
    """Returns what carries out a policy; None for torch's rule."""
    if policy is None:
        return None
    return _LogMaxFollower(policy) if isinstance(policy, LogMax) else _TargetFollower(policy)


class Follower:
    """Observer of a scale's updates that may propose the next scale; this one keeps torch's rule.

    A proposal is a word of the scaler's state, which the kernels read and reset: the next scale,
    before the limits; below 0: torch's scale, but no growth; 0: torch's scale.

    Attributes:
        observes: What it needs of each check: "peak" for the largest unscaled magnitude, "share"
            for the fraction of values that vanish.
        observed: These of this iteration, one-element tensors.
    """

    observes = ""

    def __init__(self) -> None:
        self.observed: list[Tensor] = []
        self._on: Any = _Floats
        self._proposal: Any = None
        self._memory: ctypes.c_float | None = None  # of the proposal, on a CPU

    def observe(self, values: list[Tensor] | None) -> None:
        """Adds what was observed in a pass; None if that is not known."""
        self.observed += values or []

    def largest(self, values: list[Tensor] | None, device: torch.device) -> Tensor:
        """Returns the largest observed value, on which ranks agree; None if it is not known."""
        return aten.largest(values or [], device)

    def bind(self, words: Tensor) -> None:
        """Moves to the device of the scaler's state, into which proposals go."""
        self._on = _Floats if _host_reads(words.device) else _Tensors
        with torch.inference_mode(False):
            # The lower half of a word.
            self._proposal = words.view(torch.float32)[2 * cpu.state_layout.PROPOSAL]
        self._memory = None
        if words.device.type == "cpu":
            # An op would take microseconds.
            self._memory = ctypes.c_float.from_address(self._proposal.data_ptr())

    def before_update(
        self,
        scale: Tensor,
        growth_tracker: Tensor,
        found_infs: list[Tensor],
        factors: tuple[Any, Any, Any],
    ) -> None:
        """Proposes a scale, without a host sync.

        Args:
            scale: One-element float32.
            growth_tracker: One-element int32.
            found_infs: The flags of this iteration, at least one, on the device of the scale.
            factors: Growth factor, backoff factor and growth interval.
        """

    def after_update(self, scale: Tensor, growth_tracker: Tensor) -> None:
        """Concludes an update, also one without a call of `before_update`; no host sync."""

    def _propose(self, value: Any) -> None:
        if isinstance(value, float) and self._memory is not None:
            self._memory.value = value
        else:
            self._proposal.fill_(value)

    def end_iteration(self) -> None:
        """Forgets what was observed."""
        self.observed = []

    def predictions(self) -> list[float]:
        """Returns the predictions made in the last 1,024 updates, 0 for none; a host sync."""
        return [0.0] * _STEPS

    def state_dict(self) -> dict[str, Any]:
        """Returns its part of a checkpoint's entry, with a host sync."""
        return {}

    def require_loadable(self, entry: dict[str, Any] | None) -> list[float]:
        """Returns the argument of `load` for a checkpoint's entry; None for a new state.

        Raises:
            ValueError: If the entry is damaged.
        """
        return []

    def load(self, values: list[float]) -> None:
        """Sets the state in place."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "observed": [], "_proposal": None, "_memory": None}


class _TargetFollower(Follower):
    """Lets growth wait; where no share is known, torch's rule applies."""

    observes = "share"

    def __init__(self, policy: UnderflowTarget) -> None:
        super().__init__()
        self._share = policy.share

    def largest(self, values: list[Tensor] | None, device: torch.device) -> Tensor:
        if values is None:  # above every target
            return torch.ones((), dtype=aten.widest(device), device=device)
        return super().largest(values, device)

    def before_update(
        self,
        scale: Tensor,
        growth_tracker: Tensor,
        found_infs: list[Tensor],
        factors: tuple[Any, Any, Any],
    ) -> None:
        if self.observed:
            share = self._on.read(self.largest(self.observed, scale.device))
            self._propose(self._on.select(share > self._share, 0.0, -1.0))


class _LogMaxFollower(Follower):
    """Predicts scales, and keeps them at or below a ceiling once one has overflowed."""

    observes = "peak"

    def __init__(self, policy: LogMax) -> None:
        super().__init__()
        self._policy = policy
        # Predictions, the oldest first, averages and ceiling: floats beside a scale that the host
        # reads without waiting, else one float64 tensor.
        self._state: Any = [0.0] * (_STEPS + len(_SHARES) + 1)
        self._shares: Tensor | None = None
        # The last prediction, averages and ceiling of the update under way.
        self._next: Any = None

    def bind(self, words: Tensor) -> None:
        super().bind(words)
        if self._on is _Floats:
            self._state = self._floats()
        else:
            settings: Any = {"dtype": torch.float64, "device": words.device}
            with torch.inference_mode(False):
                self._state = torch.as_tensor(self._state, **settings)
                self._shares = torch.tensor(_SHARES, **settings)

    def before_update(
        self,
        scale: Tensor,
        growth_tracker: Tensor,
        found_infs: list[Tensor],
        factors: tuple[Any, Any, Any],
    ) -> None:
        on, observed, state = self._on, self.observed, self._state
        growth, backoff, interval = float(factors[0]), float(factors[1]), int(factors[2])
        before, tracker = on.read(scale), on.read(growth_tracker)
        flag = sum(map(on.read, found_infs))
        one_peak = observed[0] if len(observed) == 1 else self.largest(observed, scale.device)
        peak = on.read(one_peak)

        finite, kept = flag == 0, abs(flag) < cpu.SPIKE_BOUND
        grows = finite & (interval >= 1) & (tracker + 1 >= interval)
        # Beyond a scale that overflowed, torch's rule probes for it.
        limit = on.select(kept, state[-1], before)
        ceiling, following = on.by_torch(limit, before, kept, grows, growth, backoff)
        is_known = finite & (peak > 0) & (peak < math.inf)
        averages = on.averages(state[_STEPS:-1], peak, is_known, self._shares)
        mean, weight, slow_mean, slow_square, slow_weight = averages
        is_new = weight == 0
        far = slow_mean / (slow_weight + is_new)
        variance = slow_square / (slow_weight + is_new) - far * far
        deviation = on.sqrt(variance * (variance > 0))
        highest = mean / (weight + is_new) + self._policy.sigmas * deviation
        # A spike predicts nothing.
        predicts = (weight > 0) & (finite == kept)
        power = on.power_of_two(16 - self._policy.headroom - highest)
        prediction = on.select(predicts, power, 0.0)
        wanted = on.select(predicts, power, following)
        self._propose(on.select((ceiling > 0) & (wanted > ceiling), ceiling, prediction))
        self._next = on.joined(prediction, averages, ceiling)

    def after_update(self, scale: Tensor, growth_tracker: Tensor) -> None:
        state, following = self._state, self._next
        self._next = None
        if isinstance(state, list):
            state[_STEPS:] = following or (0.0, *state[_STEPS:])
            del state[0]
        else:
            if following is None:
                following = torch.nn.functional.pad(state[_STEPS:], (1, 0))
            state.copy_(torch.cat([state[1:_STEPS], following]))

    def predictions(self) -> list[float]:
        return self._floats()[:_STEPS]

    def state_dict(self) -> dict[str, Any]:
        return {"averages": self._floats()[_STEPS:]}

    def require_loadable(self, entry: dict[str, Any] | None) -> list[float]:
        count = len(_SHARES) + 1
        saved = [0.0] * count if entry is None else entry.get("averages")
        values: list[Any] = saved if isinstance(saved, list) else []
        is_valid = len(values) == count and all(type(each) is float for each in values)
        if is_valid:
            mean, weight, slow_mean, slow_square, slow_weight, ceiling = values
            # Of exponents of float64; the first one has these shares.
            is_valid = all(abs(each) <= _LARGEST_AVERAGE for each in (mean, slow_mean, slow_square))
            is_valid &= (weight, slow_weight) == (0, 0) or (
                _SHARE <= weight <= 1 and _SLOW_SHARE <= slow_weight <= 1
            )
            is_valid &= slow_square >= 0 and 0 <= ceiling <= torch.finfo(torch.float32).max
        if not is_valid:
            raise ValueError(
                f"the checkpoint's averages must be a list of {count} finite floats, as LogMax "
                f"writes them, got {saved!r}"
            )
        return [*values[:-1], float32(values[-1])]

    def load(self, values: list[float]) -> None:
        state: Any = values
        if isinstance(self._state, Tensor):
            state = torch.tensor(values, dtype=torch.float64, device="cpu")
        self._state[_STEPS:] = state

    def _floats(self) -> list[float]:
        return self._state if isinstance(self._state, list) else self._state.tolist()

    def __getstate__(self) -> dict[str, Any]:
        state = {"_state": self._floats(), "_shares": None, "_next": None}
        return {**super().__getstate__(), **state}


def _host_reads(device: torch.device) -> bool:
    """Whether the host computes: where it reads at no cost, or the device lacks float64."""
    return device.type == "cpu" or aten.widest(device) is not torch.float64


class _Floats:
    """What the rule of LogMax takes besides operators, for Python's floats."""

    joined = staticmethod(lambda prediction, averages, ceiling: [prediction, *averages, ceiling])
    read = staticmethod(Tensor.item)
    select = staticmethod(lambda condition, value, other: value if condition else other)
    sqrt = staticmethod(math.sqrt)

    @staticmethod
    def by_torch(
        limit: float, scale: float, kept: bool, grows: bool, growth: float, backoff: float
    ) -> tuple[float, ...]:
        if kept and not grows:
            return limit, scale
        factor = growth if kept else backoff
        moved = float32(limit * factor), float32(scale * factor)
        return tuple(
            new if math.isfinite(new) else old
            for new, old in zip(moved, (limit, scale), strict=True)
        )

    @staticmethod
    def averages(averages: list[float], peak: float, is_known: bool, _: object) -> list[float]:
        if not is_known:
            return averages
        fraction, exponent = math.frexp(peak)
        log = exponent - 2 + 2 * fraction
        mean, weight, slow_mean, slow_square, slow_weight = averages
        # Without a loop, which would cost more than all of it.
        return [
            mean + _SHARE * (log - mean),
            weight + _SHARE * (1 - weight),
            slow_mean + _SLOW_SHARE * (log - slow_mean),
            slow_square + _SLOW_SHARE * (log * log - slow_square),
            slow_weight + _SLOW_SHARE * (1 - slow_weight),
        ]

    @staticmethod
    def power_of_two(exponent: float) -> float:
        # A sum of positive numbers, which may round up; the exponent of 1 is 127.
        return math.ldexp(1.0, int(min(max(exponent, -126.0), 127.0) + 127) - 127)


class _Tensors:
    """The same for 0-dim float64 tensors, of which the host reads none."""

    read = staticmethod(lambda tensor: tensor.detach().reshape(()).double())
    select = staticmethod(torch.where)
    sqrt = staticmethod(torch.sqrt)

    @staticmethod
    def by_torch(
        limit: Tensor, scale: Tensor, kept: Tensor, grows: Tensor, growth: float, backoff: float
    ) -> Tensor:
        both = torch.stack([limit, scale])
        grown = torch.where(grows, both * growth, both)
        moved = torch.where(kept, grown, both * backoff).float().double()
        return torch.where(moved.abs() < math.inf, moved, both)

    @staticmethod
    def averages(averages: Tensor, peak: Tensor, is_known: Tensor, shares: Tensor) -> Tensor:
        fraction, exponent = torch.frexp(peak)
        log = exponent - 2 + 2 * fraction
        one = torch.ones_like(log)
        targets = torch.stack([log, one, log, log * log, one])
        return torch.where(is_known, averages.lerp(targets, shares), averages)

    @staticmethod
    def joined(prediction: Tensor, averages: Tensor, ceiling: Tensor) -> Tensor:
        return torch.cat([prediction.reshape(1), averages, ceiling.reshape(1)])

    @staticmethod
    def power_of_two(exponent: Tensor) -> Tensor:
        biased = (exponent.clamp(-126.0, 127.0) + 127).to(torch.int32)
        return (biased << 23).view(torch.float32).double()
