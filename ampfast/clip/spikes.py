"""Steps that are skipped since the norm of their gradients is too large."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ampfast.backends import scalars
from ampfast.backends.core import norm_layout, state_layout
from ampfast.backends.cuda_graphs import is_capturing, refuse_capture
from ampfast.errors import float_of, require_int, warn_caller
from ampfast.optim.fused_support import ByOptimizer

# Norms of a checkpoint, in a dict if spikes followed.
_Saved: TypeAlias = list[float] | dict[str, Any]

# On a GPU, clips from one copy of an optimizer's counters to the next.
_CLIPS_PER_COPY = 64


@dataclass(frozen=True)
class Sigmas:
    """Limit of a gradient norm by the norms of the last steps: mean plus standard deviations.

    The first `window` steps that are taken are never skipped. Norms of 0 do not count as steps. The
    deviation is taken as at least 1% of the mean, since more equal norms, as of one batch again and
    again, do not tell how much batches differ. After `patience` spikes in a row, with any steps of
    norm 0 between them, the next one is taken as the new usual, with a warning, and the window
    starts again. Source: the rule of OLMo's SkipStep optimizers, here over the steps that were
    taken.

    Attributes:
        sigmas: Number of standard deviations (of a sample) above the mean; at least 0.
        window: Number of norms, from 2 to 1,024.
        patience: The most spikes that are skipped in a row, from 1 to 2^31 - 1; None for half the
            window, at most 32.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.
    """

    sigmas: float = 6.0
    window: int = 128
    patience: int | None = None

    def __post_init__(self) -> None:
        sigmas = float_of("sigmas", self.sigmas)
        if not 0 <= sigmas < math.inf:
            raise ValueError(f"sigmas must be at least 0 and finite, got {self.sigmas}")
        object.__setattr__(self, "sigmas", sigmas)
        require_int("window", self.window, 2, state_layout.RING_STEPS)
        if self.patience is not None:
            require_int("patience", self.patience, 1, 2**31 - 1)


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
    others = " or ampfast.Sigmas (Percentile and ZScore are for max_norm)"
    return float_of("skip_above", skip_above, others, least=0)


@dataclass
class _Window:
    """The norms of the steps taken by one optimizer.

    Attributes:
        place: Its number in a checkpoint.
        words: As `SpikeRule.accepted_norms`.
        patience: As the words have it.
        is_captured: Whether a CUDA graph captured a clip, whose replays clip without a call.
        clips: Number of calls.
        restarts: Restarts that were warned of.
    """

    place: int
    words: Tensor
    patience: int
    is_captured: bool = False
    clips: int = 0
    restarts: int = 0
    copies: scalars.HostCopies = field(default_factory=scalars.HostCopies)

    def __post_init__(self) -> None:
        self.header = self.words[: norm_layout.RING]

    def saved(self) -> _Saved:
        """Returns the norms, oldest first, with a host sync."""
        numbers = self.words.tolist()
        self._warn(numbers)
        count, ring = int(numbers[norm_layout.COUNT]), numbers[norm_layout.RING :]
        start, spikes = count % len(ring), int(numbers[norm_layout.SPIKES])
        norms = (ring[start:] + ring[:start])[max(0, len(ring) - count) :]
        return {"norms": norms, "spikes": spikes} if spikes else norms

    def load(self, saved: _Saved) -> None:
        """Takes what `saved` returned, in the same memory."""
        window = self.words.numel() - norm_layout.RING
        self.words.copy_(_words_of(saved, window, self.patience, self.words.device))
        self.restarts, self.copies = 0, scalars.HostCopies()

    def check(self) -> None:
        """Warns if the window has started again; on a GPU from a copy that has arrived."""
        header, self.clips = self.header, self.clips + 1
        # Of other devices every copy waits.
        if self.clips % _CLIPS_PER_COPY == 0 if header.is_cuda else header.is_cpu:
            self._warn(self.copies.latest(header) or [])

    def _warn(self, numbers: list[float]) -> None:
        if numbers and numbers[norm_layout.RESTARTS] > self.restarts:
            self.restarts = int(numbers[norm_layout.RESTARTS])
            skips = "step was" if self.patience == 1 else "steps in a row were"
            warn_caller(
                f"The gradient norm stayed above the limit of ampfast.Sigmas: {self.patience} "
                f"{skips} skipped. The next one was taken as the new usual, and the window of "
                "norms starts anew. If the norm should not have changed, look at the data and at "
                "the learning rate; Sigmas(patience=...) skips more or fewer."
            )


class SpikeRules:
    """The norms of the steps taken, by optimizer, for limits of `Sigmas`.

    They are saved in the order in which optimizers first met this limit. Loaded norms belong to
    the optimizers that meet one next, in this order, which alone tells which of the checkpoint's
    optimizers is which one here. An optimizer whose clip was captured gets those in its place at
    once, in the same memory: replays ask for nothing.
    """

    def __init__(self) -> None:
        # Windows in use, and windows that clips were given, of which some were refused.
        self._windows, self._given = ByOptimizer[_Window](), ByOptimizer[_Window]()
        # Of a checkpoint or a pickle, by place, for optimizers yet to come.
        self._kept: dict[int, _Saved] = {}
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
        window, size = self._windows.get(optimizers[0]), norm_layout.RING + limit.window
        patience = min(limit.window // 2, 32) if limit.patience is None else limit.patience
        if window is None or window.words.device != device or window.words.numel() != size:
            refuse_capture("the creation of the norms of Sigmas, which every replay would reset")
            if window is None:
                places = self._places()
                place = min(self._kept, default=places[-1] + 1 if places else 0)
                saved = self._kept.get(place, [])
            else:
                place, saved = window.place, window.saved()
            window = _Window(place, _words_of(saved, limit.window, patience, device), patience)
            self._given.record(optimizers[0], window)
        elif window.patience != patience:
            window.words[norm_layout.PATIENCE] = window.patience = patience
        return SpikeRule(limit.sigmas, window.words)

    def record(self, optimizers: Sequence[Any], rule: SpikeRule) -> None:
        """Keeps the norms of a rule that was used, before one of other optimizers is asked for."""
        self._is_compared = True
        if rule.accepted_norms is None:
            return
        window = self._windows.get(optimizers[0])
        if window is None or window.words is not rule.accepted_norms:
            window = self._given.get(optimizers[0])
            if window is None:
                return
            self._windows.record(optimizers[0], window)
            self._kept.pop(window.place, None)
        if is_capturing():
            window.is_captured = True
        else:
            window.check()

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

    def _places(self) -> list[int]:
        return sorted([*self._kept, *(window.place for _, window in self._windows)])

    def accepted_norms(self) -> list[_Saved]:
        """Returns the norms by optimizer, oldest first, with a host sync for each."""
        saved = {**self._kept, **{each.place: each.saved() for _, each in self._windows}}
        return [saved[place] for place in self._places()]

    def load(self, norms: list[_Saved]) -> None:
        """Takes what `accepted_norms` returned, for captured clips and those to come."""
        places, before = self._places(), self._windows
        self._kept, self._windows = dict(enumerate(norms)), ByOptimizer()
        for optimizer, window in before:
            if window.is_captured:
                window.place = places.index(window.place)
                window.load(self._kept.pop(window.place, []))
                self._windows.record(optimizer, window)

    def __getstate__(self) -> dict[str, Any]:
        # An optimizer is not the same in another process.
        return {**SpikeRules().__dict__, "_kept": dict(enumerate(self.accepted_norms()))}


def require_accepted_norms(saved: object) -> list[_Saved]:
    """Returns the norms of a checkpoint.

    Raises:
        ValueError: If they are not lists of finite numbers, or dicts of one and a number of spikes.
    """
    if not isinstance(saved, list) or not all(map(_is_valid, saved)):
        raise ValueError(
            "the checkpoint's norms of steps taken must be lists of at most "
            f"{state_layout.RING_STEPS} finite floats, or dicts of such norms and a number of "
            f"spikes, got {saved!r}"
        )
    return saved


def _is_valid(saved: object) -> bool:
    norms, spikes = saved, 0
    if isinstance(saved, dict) and set(saved) == {"norms", "spikes"}:
        norms, spikes = saved["norms"], saved["spikes"]
    return (
        isinstance(norms, list)
        and len(norms) <= state_layout.RING_STEPS
        and all(type(norm) is float and 0 <= norm < math.inf for norm in norms)
        and type(spikes) is int
        and 0 <= spikes < 2**31
    )


def _words_of(saved: _Saved, window: int, patience: int, device: torch.device) -> Tensor:
    norms, spikes = (saved["norms"], saved["spikes"]) if isinstance(saved, dict) else (saved, 0)
    # Older checkpoints have norms of 0.
    last = [norm for norm in norms if norm > 0][-window:]
    header = {"COUNT": len(last), "SPIKES": spikes, "PATIENCE": patience, "RESTARTS": 0}
    words = [0.0] * norm_layout.RING + last + [0.0] * (window - len(last))
    for name, number in header.items():
        words[getattr(norm_layout, name)] = float(number)
    return scalars.allocate(torch.tensor, words, dtype=scalars.widest(device), device=device)
