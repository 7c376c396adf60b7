"""Steps that are skipped since the norm of their gradients is too large."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampfast.backends import scalars
from ampfast.backends.core import state_layout
from ampfast.capture import is_capturing, refuse_capture
from ampfast.errors import float_of, warn_caller
from ampfast.optimizers import ByOptimizer


@dataclass(frozen=True)
class Sigmas:
    """Limit of a gradient norm by the norms of the last steps: mean plus standard deviations.

    The first `window` steps that are taken are never skipped. Source: the rule of OLMo's
    SkipStep optimizers, here over the steps that were taken.

    Attributes:
        sigmas: Number of standard deviations (of a sample) above the mean; at least 0.
        window: Number of norms, from 2 to 1,024.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.
    """

    sigmas: float = 6.0
    window: int = 128

    def __post_init__(self) -> None:
        sigmas = float_of("sigmas", self.sigmas)
        if not 0 <= sigmas < math.inf:
            raise ValueError(f"sigmas must be at least 0 and finite, got {self.sigmas}")
        object.__setattr__(self, "sigmas", sigmas)
        if isinstance(self.window, bool) or not isinstance(self.window, int):
            raise TypeError(f"window must be an int, got {type(self.window).__name__}")
        if not 2 <= self.window <= state_layout.RING_STEPS:
            raise ValueError(
                f"window must be from 2 to {state_layout.RING_STEPS}, got {self.window}"
            )


class SpikeRule(NamedTuple):
    """The arguments of a clipping that skips spikes.

    Attributes:
        skip_above: As for `core.Clip`.
        accepted_norms: As for `core.Clip`, in the widest dtype of its device.
    """

    skip_above: float
    accepted_norms: Tensor | None = None


def skip_limit_of(skip_above: object) -> float | Sigmas | None:
    """Returns the limit of norms, checked.

    Raises:
        TypeError: If it is neither a number nor `Sigmas` nor None.
        ValueError: If it is NaN or below 0.
    """
    if skip_above is None or isinstance(skip_above, Sigmas):
        return skip_above
    return float_of("skip_above", skip_above, " or ampfast.Sigmas", least=0)


class _Ring(NamedTuple):
    """The norms of the steps taken by one optimizer.

    Attributes:
        words: As `SpikeRule.accepted_norms`.
        clip: Number of its last clip.
        wait: The most clips from one of its own to the next, 0 after its first one; infinite if a
            CUDA graph captured one, since a replay clips without a call.
    """

    words: Tensor
    clip: int
    wait: float


class SpikeRules:
    """The norms of the steps taken, by optimizer, for limits of `Sigmas`.

    Loaded norms belong to the optimizers that are clipped next, in this order, which alone tells
    which of the checkpoint's optimizers is which one here. An optimizer whose clip was captured
    gets those in its place at once, in the same memory: replays ask for nothing.

    They are saved in the order of the first clips, but those of optimizers that have waited longer
    than ever for their next clip come last: they are not in use any more, as those of a stage that
    is over.
    """

    def __init__(self) -> None:
        self._rings = ByOptimizer[_Ring]()
        # Of a checkpoint or a pickle, for optimizers yet to come, in this order.
        self._kept: list[list[float]] = []
        self._clips = 0
        # Whether a norm was compared in this iteration, and whether to warn if none was.
        self._is_compared, self._warns = False, True

    def rule(
        self, optimizers: Sequence[Any], limit: float | Sigmas, device: torch.device
    ) -> SpikeRule:
        """Returns the rule for the joint norm of optimizers, which is known by the first one.

        What is new about it is kept by `record`, once the clipping has succeeded.
        """
        if not isinstance(limit, Sigmas):
            return SpikeRule(limit)
        ring, window = self._rings.get(optimizers[0]), limit.window
        words = None if ring is None else ring.words
        if words is None or words.device != device or words.numel() != 1 + window:
            refuse_capture("the creation of the norms of Sigmas, which every replay would reset")
            kept = self._kept[0] if self._kept else []
            words = _ring_of(kept if words is None else _norms_in(words), window, device)
        return SpikeRule(limit.sigmas, words)

    def record(self, optimizers: Sequence[Any], rule: SpikeRule) -> None:
        """Keeps the norms of a rule that was used."""
        self._is_compared = True
        if rule.accepted_norms is None:
            return
        self._clips += 1
        ring, wait = self._rings.get(optimizers[0]), 0.0
        if ring is None:
            del self._kept[:1]
        else:
            wait = max(ring.wait, self._clips - ring.clip)
        if is_capturing():
            wait = math.inf
        self._rings.record(optimizers[0], _Ring(rule.accepted_norms, self._clips, wait))

    def end_iteration(self) -> None:
        """Ends an iteration with a default limit; warns once if no norm was compared with it."""
        if self._warns and not self._is_compared:
            self._warns = False
            warn_caller(
                "skip_above had no effect: since the last update() no gradient norm was compared "
                "with it. Where a method of the scaler is overridden, or an optimizer's step takes "
                "grad_scaler, only scaler.clip_grad_norm_ compares."
            )
        self._is_compared = False

    def _in_order(self) -> list[tuple[Any, _Ring]]:
        # Last those of a stage that is over.
        return sorted(
            self._rings, key=lambda entry: 0 < entry[1].wait < self._clips - entry[1].clip
        )

    def accepted_norms(self) -> list[list[float]]:
        """Returns the norms by optimizer, oldest first, with a host sync for each."""
        return [_norms_in(ring.words) for _, ring in self._in_order()] + self._kept

    def load(self, norms: list[list[float]]) -> None:
        """Takes what `accepted_norms` returned, for captured clips and those to come."""
        places = dict(enumerate(norms))
        before, self._rings = self._in_order(), ByOptimizer()
        for place, (optimizer, ring) in enumerate(before):
            if ring.wait == math.inf:
                words, given = ring.words, places.pop(place, [])
                words.copy_(_ring_of(given, words.numel() - 1, words.device))
                self._rings.record(optimizer, ring)
        self._kept = list(places.values())

    def __getstate__(self) -> dict[str, Any]:
        # An optimizer is not the same in another process.
        return {**SpikeRules().__dict__, "_kept": self.accepted_norms()}


def require_accepted_norms(saved: object) -> list[list[float]]:
    """Returns the norms of a checkpoint.

    Raises:
        ValueError: If they are not lists of finite numbers.
    """
    is_valid = isinstance(saved, list) and all(
        isinstance(norms, list)
        and len(norms) <= state_layout.RING_STEPS
        and all(type(norm) is float and 0 <= norm < math.inf for norm in norms)
        for norms in saved
    )
    if not is_valid:
        raise ValueError(
            "the checkpoint's norms of steps taken must be lists of at most "
            f"{state_layout.RING_STEPS} finite floats, got {saved!r}"
        )
    return saved  # type: ignore[return-value]


def _ring_of(norms: list[float], window: int, device: torch.device) -> Tensor:
    last = norms[-window:]
    words = [float(len(last)), *last, *[0.0] * (window - len(last))]
    with torch.inference_mode(False):
        return torch.tensor(words, dtype=scalars.widest(device), device=device)


def _norms_in(words: Tensor) -> list[float]:
    count, *ring = words.tolist()
    start = int(count) % len(ring)
    return (ring[start:] + ring[:start])[max(0, len(ring) - int(count)) :]
