"""Limits that follow the norms of an optimizer's steps, and the history of these norms."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias, get_args

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ampfast.backends import aten, scalars
from ampfast.backends.core import Clip, norm_layout, state_layout
from ampfast.backends.cuda_graphs import is_capturing, refuse_capture
from ampfast.errors import float_of, require_int, warn_caller
from ampfast.gradients import Record, Records

# On a GPU, clips from one copy of a history's header to the next.
_CLIPS_PER_COPY = 64
# Clips in a row from which on ZScore warns.
_MANY_CLIPS = 100


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
        object.__setattr__(self, "sigmas", float_of("sigmas", self.sigmas, least=0))
        require_int("window", self.window, 2, state_layout.RING_STEPS)
        if self.patience is not None:
            require_int("patience", self.patience, 1, 2**31 - 1)

    @property
    def _patience(self) -> int:
        return min(self.window // 2, 32) if self.patience is None else self.patience

    @property
    def _warning(self) -> str:
        skips = "step was" if self._patience == 1 else "steps in a row were"
        return (
            f"The gradient norm stayed above the limit of ampfast.Sigmas: {self._patience} {skips} "
            "skipped. The next one was taken as the new usual, and the window of norms starts "
            "anew. If the norm should not have changed, look at the data and at the learning rate; "
            "Sigmas(patience=...) skips more or fewer."
        )


@dataclass(frozen=True)
class Percentile:
    """Clips norms at a percentile of the norms of the last steps, this one's among them.

    Norms count before clipping. Steps that are skipped, and norms of 0, do not count. Source:
    Seetharaman et al., AutoClip: Adaptive Gradient Clipping for Source Separation Networks
    (arXiv:2007.14469), which keeps the norms of all steps.

    Attributes:
        percentile: From 0 to 100, interpolated linearly between two norms.
        window: Number of norms, from 3 to 1,024.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.
    """

    percentile: float = 10.0
    window: int = 1024

    def __post_init__(self) -> None:
        percentile = float_of("percentile", self.percentile)
        if not 0 <= percentile <= 100:
            raise ValueError(f"percentile must be from 0 to 100, got {self.percentile}")
        object.__setattr__(self, "percentile", percentile)
        require_int("window", self.window, 3, state_layout.RING_STEPS)

    def _take(self, words: Tensor, norm: Tensor, taken: Tensor) -> Tensor:
        """Returns the limit of a norm, which joins the history if the step is `taken`."""
        count, norms = words[: norm_layout.COUNT + 1], words[norm_layout.RING :]
        place = (count % self.window).long()
        norms.index_copy_(0, place, torch.where(taken, norm, norms.index_select(0, place)))
        count.add_(taken)
        # As torch.quantile of the known norms, in a third of its operators.
        ranked = norms.sort()[0]
        rank = (count.clamp(1, self.window) - 1) * (self.percentile / 100)
        below = rank.long()
        low, high = ranked.index_select(0, below), ranked.index_select(0, rank.ceil().long())
        return low.lerp(high, rank - below).squeeze(0)


@dataclass(frozen=True)
class ZScore:
    """Clips norms by how many standard deviations they lie above the moving average.

    A norm g whose z = (g - mean) / deviation is above `zscore` is clipped to
    mean + zscore^2 / z * deviation, which is closer to the mean the larger g is. Mean and variance
    are moving averages of norms after clipping, which begin with the mean and the variance of the
    first `warmup` steps, none of which is clipped. Steps that are skipped, and norms of 0, do not
    count. After a lasting change it clips far below the norm for thousands of steps: 100 clips in a
    row give one warning. Source: Kumar et al., ZClip: Adaptive Spike Mitigation for LLM
    Pre-Training (arXiv:2504.02507).

    Attributes:
        zscore: Standard deviations above the mean; above 0.
        alpha: Weight of the past in the moving averages, from 0 to 1.
        warmup: Number of steps, at least 2.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.
    """

    zscore: float = 2.5
    alpha: float = 0.97
    warmup: int = 25

    _warning = (
        f"ampfast.ZScore has clipped {_MANY_CLIPS} steps in a row: the gradient norm has changed "
        "for good, and the moving average follows norms after clipping, so slowly. "
        "ampfast.Percentile follows norms before clipping."
    )

    def __post_init__(self) -> None:
        for name, most in (("zscore", math.inf), ("alpha", 1.0)):
            value = float_of(name, getattr(self, name))
            if not 0 < value < most:
                raise ValueError(f"{name} must be above 0 and below {most:g}, got {value}")
            object.__setattr__(self, name, value)
        require_int("warmup", self.warmup, 2, 2**31 - 1)

    def _take(self, words: Tensor, norm: Tensor, taken: Tensor) -> Tensor:
        """Returns the limit of a norm, which joins the history if the step is `taken`."""
        count, mean, variance, clips = words.unbind()
        deviation = variance.sqrt()
        z = (norm - mean) / deviation
        # Without a deviation z is infinite for every larger norm, which is clipped to the mean.
        clipped = mean + self.zscore * self.zscore / z * deviation
        is_warm = count >= self.warmup
        clips_this = is_warm & (z > self.zscore)
        limit = torch.where(clips_this, clipped, norm)
        # The weight of this norm: equal ones while it warms up.
        weight = torch.where(is_warm, 1 - self.alpha, 1 / (count + 1))
        ahead = mean + weight * (limit - mean)
        # Of equal weights the variance is that of a population.
        before = torch.where(is_warm, limit - ahead, limit - mean)
        spread = variance + weight * (before * (limit - ahead) - variance)
        # However it is rounded; in float32 squares of norms may overflow.
        largest = torch.finfo(norm.dtype).max
        spread = spread.nan_to_num(largest, largest).clamp(min=0.0)
        following = torch.stack([count + 1, ahead, spread, (clips + 1) * clips_this])
        words.copy_(torch.where(taken, following, words))
        return limit.nan_to_num(largest, largest)


ClipLimit: TypeAlias = Percentile | ZScore
# Of an optimizer in a checkpoint: the names of rules, each with the header and norms it knows.
Saved: TypeAlias = list[tuple[str, list[float]]]


def sigmas_limit(rule: Sigmas, norms: list[float]) -> float | None:
    """Returns the limit that follows these norms, or None if they do not fill the window."""
    if len(norms) < rule.window:
        return None
    with _disable_current_modes():  # the host's own ops, not the device's
        there = scalars.allocate(torch.tensor, norms, dtype=torch.float64, device="cpu")
        return float(aten.sigmas_limit(there, rule.sigmas))


def skip_limit_of(skip_above: object) -> float | Sigmas | None:
    """Returns the limit above which a norm skips its step, checked.

    Raises:
        TypeError: If it is neither a number nor `Sigmas` nor None.
        ValueError: If it is NaN or below 0.
    """
    if skip_above is None or isinstance(skip_above, Sigmas):
        return skip_above
    others = " or ampfast.Sigmas(6) (Percentile and ZScore are for max_norm)"
    return float_of("skip_above", skip_above, others, least=0)


def clip_limit_of(max_norm: object) -> float | ClipLimit:
    """Returns the limit of a clip, checked.

    Raises:
        TypeError: If it is neither a number nor a limit that follows norms.
        ValueError: If it is NaN or below 0.
    """
    if isinstance(max_norm, (Percentile, ZScore)):
        return max_norm
    others = ", ampfast.Percentile or ampfast.ZScore (Sigmas is for skip_above)"
    return float_of("max_norm", max_norm, others, least=0)


class History:
    """The norms of an optimizer's steps that one rule knows, on a device.

    Its words are a header and a ring of norms, laid out as `norm_layout`; of `ZScore` a header
    alone, which has the mean, the variance and the clips in a row after the count. Unknown norms
    are the largest number, so that they rank last and limit nothing.

    Attributes:
        words: Floats of the widest dtype of the device.
        rule: The rule as it was last given.
        device: The device.
    """

    def __init__(self, rule: Sigmas | ClipLimit, saved: list[float], device: torch.device) -> None:
        self.rule, self.device, self._clips = rule, device, 0
        dtype, size = scalars.widest(device), norm_layout.RING + _window_of(rule)
        self.words = scalars.allocate(torch.zeros, size, dtype=dtype, device=device)
        self._header = self.words[: norm_layout.RING]
        self.load(saved)

    def saved(self) -> list[float]:
        """Returns the header and the norms, oldest first, with a host sync."""
        words: list[float] = self.words.tolist()
        self._warn(words)
        header, ring = words[: norm_layout.RING], words[norm_layout.RING :]
        if ring:
            count = int(header[norm_layout.COUNT])
            start = count % len(ring)
            ring = (ring[start:] + ring[:start])[max(0, len(ring) - count) :]
            header[norm_layout.COUNT] = float(len(ring))
        return header + ring

    def load(self, saved: list[float]) -> None:
        """Takes what `saved` returned, as many norms as fit, in the same memory."""
        window = _window_of(self.rule)
        header = saved[: norm_layout.RING] or [0.0] * norm_layout.RING
        norms = saved[norm_layout.RING :][-window:]
        if window:
            header[norm_layout.COUNT] = float(len(norms))
        if isinstance(self.rule, Sigmas):
            header[norm_layout.PATIENCE] = self.rule._patience
        unknown = torch.finfo(self.words.dtype).max
        words = header + norms + [unknown] * (window - len(norms))
        here = scalars.allocate(torch.tensor, words, dtype=self.words.dtype, device="cpu")
        self.words.copy_(here)
        self._most, self._copies = self._most_after(words), scalars.HostCopies()

    def follow(self, clip: Clip, found_inf: Tensor | None) -> None:
        """Decides a clip by the limit of its norm, which joins these; no host sync."""
        rule: Any = self.rule
        coefficient: Any = clip.coefficient
        # Rounded, so that all ranks take the same limit.
        norm = clip.norm.float().to(self.words.dtype)
        taken = (norm > 0) & (norm < math.inf)
        if found_inf is not None:
            taken &= found_inf == 0
        limit = rule._take(self.words, norm, taken)
        clipped = aten.clip_coefficient(clip.norm.to(coefficient.dtype), limit)
        # A norm of finite gradients that has overflowed makes it 0.
        coefficient.copy_(clipped.masked_fill_(norm <= limit, 1.0))
        if clip.divisor is not None and clip.scale is not None:
            aten.set_divisor(clip.divisor, clip.scale, coefficient)
        self.check()

    def check(self) -> None:
        """Warns of a restart or of many clips; on a GPU from a copy that has arrived."""
        header: list[float] | None = None
        if self._header.is_cpu:
            header = self._header.tolist()
        elif self._header.is_cuda and not is_capturing():  # of other devices every copy waits
            self._clips += 1
            if self._clips % _CLIPS_PER_COPY == 0:
                header = self._copies.latest(self._header)
        if header is not None and header[norm_layout.RESTARTS] > self._most:
            self._warn(header)

    def _most_after(self, header: list[float]) -> float:
        """The restarts of `Sigmas`, or the clips of `ZScore` in a row, above which it warns."""
        word = header[norm_layout.RESTARTS]
        if isinstance(self.rule, Sigmas):
            return float(word)
        return _MANY_CLIPS - 1 if word < _MANY_CLIPS else math.inf

    def _warn(self, header: list[float]) -> None:
        if header[norm_layout.RESTARTS] > self._most:
            self._most = self._most_after(header)
            warn_caller(self.rule._warning)  # type: ignore[union-attr]


def _window_of(rule: Sigmas | ClipLimit) -> int:
    return 0 if isinstance(rule, ZScore) else rule.window


class NormHistories:
    """The norms of the steps of each optimizer, for limits that follow them.

    They are saved in the order in which optimizers first met one, which alone tells which of the
    checkpoint's optimizers is which one here. Loaded norms belong to the known ones, in the same
    memory, since a captured graph asks for nothing, and then to new ones, which meet one next.

    Args:
        records: The records of the optimizers, which have their histories.
        saved: What `saved` returned, for optimizers yet to come.
    """

    def __init__(self, records: Records, saved: Iterable[Saved] = ()) -> None:
        self._records = records
        # In the order in which they met a limit.
        self._known: list[Record] = []
        # Of a checkpoint or a pickle, for optimizers yet to come.
        self._loaded = list(map(dict, saved))
        # Whether a norm was compared in this iteration, and whether to warn if none was.
        self.is_compared, self._warns = False, True

    def of(self, record: Record, rule: Sigmas | ClipLimit, device: torch.device) -> History:
        """Returns the optimizer's history of a rule, on a device."""
        name = type(rule).__name__
        known: Any = record.norms.get(name)
        is_here = type(known) is History and known.device == device
        if is_here and (known.rule is rule or known.rule == rule):
            return known  # type: ignore[no-any-return]
        if not is_here or _window_of(known.rule) != _window_of(rule):
            refuse_capture(f"the creation of the norms of {name}, which every replay would reset")
            if record not in self._known:
                self._known = [*self._living(), record]
                record.norms = self._loaded.pop(0) if self._loaded else {}
            known = record.norms[name] = History(rule, _saved(record).get(name, []), device)
        if isinstance(rule, Sigmas):
            known.words[norm_layout.PATIENCE] = rule._patience
        known.rule = rule
        return known  # type: ignore[no-any-return]

    def warn_of_no_use(self) -> None:
        """Warns once that an iteration compared no norm with a default limit."""
        if self._warns:
            self._warns = False
            warn_caller(
                "skip_above had no effect: since the last update() no gradient norm was compared "
                "with it. Where a method of the scaler is overridden, or an optimizer's step takes "
                "grad_scaler, only scaler.clip_grad_norm_ compares."
            )

    def limit(self, rule: float | Sigmas | None, optimizer: Any) -> float | None:
        """Returns the limit of an optimizer's next norm, as `window`; None if there is none."""
        if not isinstance(rule, Sigmas):
            return rule
        refuse_capture("a limit that the host reads", "ask after the replay")
        return sigmas_limit(rule, self.window(optimizer))

    def window(self, optimizer: Any = None) -> list[float]:
        """Returns the norms of an optimizer's `Sigmas`, or of the first one's, with a host sync."""
        records: list[Any] = self._living()
        if optimizer is not None:
            self._records.last_flags(optimizer)  # which raises, if it was never checked
            records = [self._records.get(optimizer)]
        norms = [*map(_saved, records[:1]), *self._loaded, {}][0]
        return norms.get(Sigmas.__name__, [])[norm_layout.RING :]

    def _living(self) -> list[Record]:
        return [record for record in self._known if record.optimizer() is not None]

    def saved(self) -> list[Saved]:
        """Returns the norms by optimizer and name of the rule, with a host sync for each."""
        saved = [*map(_saved, self._living()), *self._loaded]
        return [list(norms.items()) for norms in saved]

    def load(self, saved: list[Saved]) -> None:
        """Takes what `saved` returned, for known optimizers and then for those to come."""
        self._loaded = list(map(dict, saved))
        for record in self._living():
            mine = self._loaded.pop(0) if self._loaded else {}
            known = {name: each for name, each in record.norms.items() if type(each) is History}
            for name, history in known.items():
                history.load(mine.pop(name, []))
            record.norms = {**known, **mine}


def _saved(record: Record) -> dict[str, list[float]]:
    """The norms of an optimizer by the name of their rule; what was loaded until one asks."""
    norms = record.norms.items()
    return {name: each.saved() if isinstance(each, History) else each for name, each in norms}


def require_norms(saved: Any) -> list[Saved]:
    """Returns the norms of a checkpoint.

    Raises:
        ValueError: If they are not, for each optimizer, pairs of a rule's name and finite floats.
    """
    names = [rule.__name__ for rule in (Sigmas, *get_args(ClipLimit))]
    with suppress(TypeError, ValueError):  # of what is no list of pairs
        if type(saved) is list and all(
            name in names
            and len(words) >= norm_layout.RING
            and all(type(word) is float and 0 <= word < math.inf for word in words)
            for pairs in saved
            for name, words in pairs
        ):
            return saved
    raise ValueError(
        f"the checkpoint's norms must be lists of pairs, of a name among {names} and "
        f"{norm_layout.RING} or more finite floats, the first one a count, got {saved!r}"
    )
