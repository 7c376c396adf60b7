"""Policy, device state, counters and history of the loss scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from ampfast.backends import Choice, Update, aten, cpu
from ampfast.backends.cpu import state_layout as layout
from ampfast.errors import is_capturing, refuse_capture, warn_caller
from ampfast.report import History, ScalerStats, empty_history

__all__ = ["LossScale", "ScalePolicy", "is_static"]

_ON_MIN_SCALE = ("ignore", "warn", "raise")
_REFILLS = ("growth", "finite_step")


@dataclass(frozen=True)
class ScalePolicy:
    """How a scale differs from torch's; `GradScaler` says what each field means."""

    min_scale: float | None = None
    max_scale: float | None = None
    hysteresis: int = 1
    hysteresis_refill: str = "growth"

    def __post_init__(self) -> None:
        for name in ("min_scale", "max_scale"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{name} must be a number or None, got {type(value).__name__}")
            if not 0 < _float32(value) < math.inf:
                raise ValueError(f"{name} must be above 0 and finite in float32, got {value}")
        least, most = self.min_scale, self.max_scale
        if least is not None and most is not None and least > most:
            raise ValueError(f"min_scale must not be above max_scale, got {least} and {most}")
        if isinstance(self.hysteresis, bool) or not isinstance(self.hysteresis, int):
            raise TypeError(f"hysteresis must be an int, got {type(self.hysteresis).__name__}")
        if not 1 <= self.hysteresis < 2**31:
            raise ValueError(f"hysteresis must be at least 1, got {self.hysteresis}")
        if self.hysteresis_refill not in _REFILLS:
            raise ValueError(
                f"hysteresis_refill must be one of {', '.join(_REFILLS)}, "
                f"got {self.hysteresis_refill!r}"
            )

    @property
    def is_torchs(self) -> bool:
        """Whether it changes nothing."""
        return self == ScalePolicy()

    def require_within(self, init_scale: float, name: str = "init_scale") -> None:
        """Raises ValueError unless a scale can start there."""
        low_enough = self.max_scale is None or init_scale <= self.max_scale
        if not low_enough or not (self.min_scale is None or init_scale >= self.min_scale):
            raise ValueError(
                f"{name} must be from min_scale to max_scale, got {init_scale} with "
                f"min_scale={self.min_scale} and max_scale={self.max_scale}"
            )

    def state_dict(self, hysteresis_tracker: int) -> dict[str, Any]:
        """Returns what a checkpoint keeps; the tracker is as Megatron-LM's: it counts down."""
        return {**asdict(self), "hysteresis_tracker": hysteresis_tracker}

    def require_loadable(self, state_dict: dict[str, Any]) -> int:
        """Returns the hysteresis tracker of a scaler's checkpoint that this policy can go on with.

        Raises:
            ValueError: If the checkpoint has another policy, a scale beyond the limits or, where
                this policy changes something, a static one.
        """
        tracker = self.hysteresis
        if "ampfast" in state_dict:
            tracker = self._tracker_of(state_dict["ampfast"])
        if not self.is_torchs:
            self.require_within(state_dict["scale"], "the checkpoint's scale")
            if is_static(state_dict):
                raise ValueError(
                    "the checkpoint's scale is static, but this scaler was made with limits or "
                    "hysteresis, which are for one that changes"
                )
        return tracker

    def _tracker_of(self, saved: object) -> int:
        """Returns the hysteresis tracker of a checkpoint, which must have this policy.

        Raises:
            ValueError: If it has not, or is damaged.
        """
        names = list(self.state_dict(0))
        if not isinstance(saved, dict) or set(saved) != set(names):
            raise ValueError(
                f"the checkpoint's 'ampfast' entry must be a dict of {', '.join(names)}, "
                f"got {saved!r}"
            )
        differences = [
            f"{name} {saved[name]!r} there, {value!r} here"
            for name, value in asdict(self).items()
            if saved[name] != value
        ]
        if differences:
            raise ValueError(
                f"the checkpoint is of a scaler with another policy ({'; '.join(differences)}): "
                "make the scaler with the checkpoint's, or delete its entry 'ampfast' to keep "
                "this scaler's"
            )
        tracker = saved["hysteresis_tracker"]
        is_int = isinstance(tracker, int) and not isinstance(tracker, bool)
        if not is_int or not -(2**31) < tracker <= self.hysteresis:
            raise ValueError(
                f"the checkpoint's hysteresis_tracker must be an int of at most "
                f"{self.hysteresis}, got {tracker!r}"
            )
        return int(tracker)


class LossScale:
    """Updates of a scale, with policy, counters and history in one int64 tensor.

    Attributes:
        policy: How the scale differs from torch's.
        words: As `backends.cpu.state_layout` says; None until there is a device.
        watches_minimum: Whether `check_min_scale` has something to do.
        norms: The norms that were taken in this iteration and their orders, by the optimizers whose
            gradients they are of.
    """

    def __init__(self, policy: ScalePolicy, on_min_scale: str = "ignore") -> None:
        if on_min_scale not in _ON_MIN_SCALE:
            raise ValueError(
                f"on_min_scale must be one of {', '.join(_ON_MIN_SCALE)}, got {on_min_scale!r}"
            )
        if on_min_scale != "ignore" and policy.min_scale is None:
            raise ValueError(f"on_min_scale={on_min_scale!r} needs a min_scale")
        self.policy = policy
        self.words: Tensor | None = None
        self.norms: dict[frozenset[int], tuple[Tensor, float]] = {}
        self._tolerated = 0
        self.watches_minimum = on_min_scale != "ignore"
        self._watch = _MinimumWatch(on_min_scale == "raise") if self.watches_minimum else None

    @property
    def on_min_scale(self) -> str:
        if self._watch is None:
            return "ignore"
        return "raise" if self._watch.raises else "warn"

    def settings(self) -> dict[str, object]:
        """Returns what all ranks must have in common, with a host sync."""
        tracker = self.hysteresis_tracker()
        return {**self.policy.state_dict(tracker), "on_min_scale": self.on_min_scale}

    def update_(
        self,
        scale: Tensor,
        growth_tracker: Tensor,
        found_infs: list[Tensor],
        factors: tuple[Any, Any, Any],
        choice: Choice,
    ) -> None:
        """Updates a scale in place.

        Args:
            scale: One-element float32.
            growth_tracker: One-element int32.
            found_infs: The flags of this iteration, at least one, on the device of the scale.
            factors: Growth factor, backoff factor and growth interval; any real numbers.
            choice: The kernels.
        """
        update_factors, kernels = _factors(factors), choice.kernels_for(scale.device)
        words, norm = self.words_on(scale.device), self.joint_norm(scale.device)
        if (
            update_factors is None
            or kernels is None
            or not kernels.update_scale_(
                scale, growth_tracker, found_infs, update_factors, words, norm
            )
        ):
            first, *others = found_infs
            # Out of place: a flag that was handed out stays as it is.
            found_inf = sum(others, start=first)
            given = update_factors or cpu.UpdateFactors(*factors)
            aten.update_scale_(scale, growth_tracker, found_inf, given, words, norm)

    def riding_update(
        self,
        scale: Tensor,
        growth_tracker: Tensor,
        found_infs: list[Tensor],
        factors: tuple[Any, Any, Any],
        choice: Choice,
    ) -> Update | None:
        """Returns the update of `update_` for a check to apply, or None where none can."""
        update_factors, kernels = _factors(factors), choice.kernels_for(scale.device)
        if update_factors is None or kernels is None:
            return None
        words, norm = self.words_on(scale.device), self.joint_norm(scale.device)
        return kernels.scale_update(scale, growth_tracker, found_infs, update_factors, words, norm)

    def note_norm(self, optimizers: Sequence[object], norm: Tensor, order: float) -> None:
        """Keeps the joint norm of these optimizers' gradients for the history of this iteration.

        A norm of these together with others stays in its place.
        """
        names = frozenset(map(id, optimizers))
        if not any(names < others for others in self.norms):
            kept = {others: entry for others, entry in self.norms.items() if not names & others}
            self.norms = {**kept, names: (norm, order)}

    def joint_norm(self, device: torch.device) -> Tensor | None:
        """Returns the norm over all that was measured in this iteration, if of one order."""
        norms = list(self.norms.values())
        if not norms or any(order != norms[0][1] for _, order in norms):
            return None
        parts = [aten.moved(norm.detach(), device).float().reshape(()) for norm, _ in norms]
        if len(parts) == 1:
            return parts[0]
        joint: Tensor = torch.linalg.vector_norm(torch.stack(parts), norms[0][1])
        return joint

    def words_on(self, device: torch.device) -> Tensor:
        """Returns the words on `device`, where they are made or moved to if need be."""
        if self.words is None or self.words.device != device:
            if device.type != "cpu":
                refuse_capture("the creation of the scaler's state, which every replay would reset")
            with torch.inference_mode(False):
                words = self._new_words() if self.words is None else self.words
                self.words = words.to(device)
        return self.words

    def stats(self, scale: Tensor, growth_tracker: Tensor) -> ScalerStats:
        """Reads the counters with one host sync."""
        words = self.words_on(scale.device)
        now = [aten.word_of(scale.detach().reshape(1)), growth_tracker.detach().reshape(1).long()]
        *counters, scale_word, tracker = torch.cat([words[: layout.COUNTERS], *now]).tolist()
        if self._watch is not None:
            self._watch.report(counters, self.policy)
        return ScalerStats(
            steps=counters[layout.STEPS],
            skipped=counters[layout.SKIPPED],
            growths=counters[layout.GROWTHS],
            backoffs=counters[layout.BACKOFFS],
            consecutive_skips=counters[layout.CONSECUTIVE_SKIPS],
            scale=aten.float_of(torch.tensor(scale_word, device="cpu")).item(),
            growth_tracker=tracker,
        )

    def history(self) -> History:
        """Reads the ring with one host sync."""
        if self.words is None:
            return empty_history()
        words = self.words.cpu()
        end = int(words[layout.STEPS])
        step = torch.arange(max(0, end - layout.RING_STEPS), end, device="cpu")
        ring = words[layout.RING :].view(layout.RING_STEPS, layout.RING_WORDS)
        entries = ring[step % layout.RING_STEPS]
        status = entries[:, layout.RING_STATUS]
        has_norm = status & 2 != 0
        norm = aten.float_of(entries[:, layout.RING_NORM])
        return History(
            step=step,
            scale=aten.float_of(entries[:, layout.RING_SCALE]),
            skipped=status & 1 != 0,
            grad_norm=norm.masked_fill(~has_norm, math.nan),
            has_norm=has_norm,
        )

    def hysteresis_tracker(self) -> int:
        """Returns how many overflows are left before the scale backs off, with a host sync."""
        if self.words is not None:
            return self.policy.hysteresis - int(self.words[layout.TOLERATED])
        return self.policy.hysteresis - self._tolerated

    def set_hysteresis_tracker(self, tracker: int) -> None:
        self._tolerated = self.policy.hysteresis - tracker
        if self.words is not None:
            self.words[layout.TOLERATED] = self._tolerated

    def reset_minimum(self) -> None:
        """Begins anew with a scale that was set: what was skipped before it says nothing."""
        if self._watch is not None:
            self._watch = _MinimumWatch(self._watch.raises)
            if self.words is not None:
                self.words[layout.SKIPS_AT_MINIMUM] = 0

    def check_min_scale(self) -> None:
        """Warns or raises if steps are skipped with a scale that cannot get smaller; no host sync.

        On a GPU it knows of the last update whose outcome has arrived.
        """
        if self._watch is not None and self.words is not None and not is_capturing():
            counters = self._watch.arrived(self.words[: layout.COUNTERS])
            if counters is not None:
                self._watch.report(counters, self.policy)

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "norms": {}}
        if self.words is not None:
            # Numbers, those that are in use: a tensor would be shared with other processes.
            words = self.words.tolist()
            steps = min(words[layout.STEPS], layout.RING_STEPS)
            state["words"] = words[: layout.RING + steps * layout.RING_WORDS]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.words is not None:
            given, self.words = state["words"], None
            with torch.inference_mode(False):
                self.words = self._new_words()
                self.words[: len(given)] = torch.tensor(given, dtype=torch.int64, device="cpu")

    def _new_words(self) -> Tensor:
        words = torch.zeros(layout.STATE_WORDS, dtype=torch.int64, device="cpu")
        limits = {layout.MIN_SCALE: self.policy.min_scale, layout.MAX_SCALE: self.policy.max_scale}
        for word, limit in limits.items():
            if limit is not None:
                words[word] = aten.word_of(torch.tensor(limit, dtype=torch.float32, device="cpu"))
        words[layout.MOST_TOLERATED] = self.policy.hysteresis - 1
        words[layout.REFILLS_ON_FINITE_STEPS] = int(self.policy.hysteresis_refill == "finite_step")
        words[layout.TOLERATED] = self._tolerated
        return words


class _MinimumWatch:
    """Brings the counters to the host without waiting for them, and says what they mean."""

    def __init__(self, raises: bool) -> None:
        self.raises = raises
        self._told = 0
        self._raised_at = 0
        self._on_its_way: tuple[Tensor, torch.cuda.Event | None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_on_its_way": None}

    def arrived(self, counters: Tensor) -> list[int] | None:
        """Returns the newest counters that are on the host already, and sends for the next."""
        if not counters.is_cuda:
            return counters.tolist()
        seen = None
        if self._on_its_way is not None:
            buffer, arrival = self._on_its_way
            if arrival is None or arrival.query():
                seen, self._on_its_way = buffer.tolist(), None
        if self._on_its_way is None:
            self._on_its_way = aten.copy_to_host_async(counters)
        return seen

    def report(self, counters: list[int], policy: ScalePolicy) -> None:
        if counters[layout.SKIPS_AT_MINIMUM] == 0:
            self._told = 0
            return
        skips = counters[layout.CONSECUTIVE_SKIPS]
        text = (
            f"The scale is at its minimum, {policy.min_scale}, and {skips} "
            f"{'step was' if skips == 1 else 'steps in a row were'} skipped: it cannot go lower. "
            "Either that is too high for these gradients, or the model or its input gives NaN or "
            "infinity at any scale."
        )
        if self.raises:
            if counters[layout.STEPS] > self._raised_at:
                self._raised_at = counters[layout.STEPS]
                raise FloatingPointError(text)
            return
        if skips >= 2 * self._told:
            self._told = skips
            warn_caller(text)


def _float32(value: float) -> float:
    try:
        return torch.tensor(value, dtype=torch.float32, device="cpu").item()
    except OverflowError:  # an int beyond all floats
        return math.inf


def is_static(state_dict: dict[str, Any]) -> bool:
    """Whether a scaler's checkpoint is of a scale that never changes."""
    if not state_dict:
        return True  # which torch refuses
    return state_dict.get("growth_interval") == 0 and state_dict.get("backoff_factor") == 1.0


def _factors(given: tuple[Any, Any, Any]) -> cpu.UpdateFactors | None:
    """The factors of an update as the kernels take them; None where torch's op takes or refuses."""
    growth_factor, backoff_factor, interval = given
    if not isinstance(growth_factor, (int, float)) or not isinstance(backoff_factor, (int, float)):
        return None
    # As torch's op takes it: an integer of numpy's counts as one, a bool does not.
    if type(interval) is bool or not isinstance(interval, Integral):
        return None
    return cpu.UpdateFactors(growth_factor, backoff_factor, int(interval))
