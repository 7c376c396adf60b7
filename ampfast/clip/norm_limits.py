"""Limits of a clip that follow the norms of the steps taken: `Percentile` and `ZScore`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ampfast.backends import scalars
from ampfast.backends.core import state_layout
from ampfast.backends.cuda_graphs import refuse_capture
from ampfast.errors import float_of, require_int
from ampfast.optim.fused_support import ByOptimizer


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
        # From 3, so that no history is as long as one of ZScore.
        require_int("window", self.window, 3, state_layout.RING_STEPS)

    @property
    def _words(self) -> int:
        """Number of the floats of a history: a count, and the norms."""
        return 1 + self.window

    def _take(self, history: Tensor, norm: Tensor, taken: Tensor) -> Tensor:
        """Returns the limit of a norm, which joins the history if the step is `taken`."""
        count, norms = history[:1], history[1:]
        places = torch.arange(self.window, device=history.device)
        norms.copy_(torch.where((places == count % self.window) & taken, norm, norms))
        count.add_(taken)
        known = torch.where(places < count, norms, torch.nan)
        return torch.nanquantile(known, self.percentile / 100)


@dataclass(frozen=True)
class ZScore:
    """Clips norms by how many standard deviations they lie above the moving average.

    A norm g whose z = (g - mean) / deviation is above `zscore` is clipped to
    mean + zscore^2 / z * deviation, which is closer to the mean the larger g is. Mean and variance
    are moving averages of norms after clipping, which begin with the mean and the variance of the
    first `warmup` steps, none of which is clipped. Steps that are skipped, and norms of 0, do not
    count. Source: Kumar et al., ZClip: Adaptive Spike Mitigation for LLM Pre-Training
    (arXiv:2504.02507).

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

    def __post_init__(self) -> None:
        for name, most in (("zscore", math.inf), ("alpha", 1.0)):
            value = float_of(name, getattr(self, name))
            if not 0 < value < most:
                raise ValueError(f"{name} must be above 0 and below {most:g}, got {value}")
            object.__setattr__(self, name, value)
        require_int("warmup", self.warmup, 2, 2**31 - 1)

    @property
    def _words(self) -> int:
        """Number of the floats of a history: a count, the mean and the variance."""
        return 3

    def _take(self, history: Tensor, norm: Tensor, taken: Tensor) -> Tensor:
        """Returns the limit of a norm, which joins the history if the step is `taken`."""
        count, mean, variance = history.unbind()
        deviation = variance.sqrt()
        z = (norm - mean) / deviation
        # Without a deviation z is infinite for every larger norm, which is clipped to the mean.
        clipped = mean + self.zscore * self.zscore / z * deviation
        is_warm = count >= self.warmup
        limit = torch.where(is_warm & (z > self.zscore), clipped, norm)
        # The weight of this norm: equal ones while it warms up.
        weight = torch.where(is_warm, 1 - self.alpha, 1 / (count + 1))
        ahead = mean + weight * (limit - mean)
        # Of equal weights the variance is that of a population.
        before = torch.where(is_warm, limit - ahead, limit - mean)
        spread = variance + weight * (before * (limit - ahead) - variance)
        spread = spread.clamp(min=0.0)  # however it is rounded
        following = torch.stack([count + 1, ahead, spread])
        history.copy_(torch.where(taken, following, history))
        return limit


NormLimit: TypeAlias = Percentile | ZScore

_KINDS = ", ampfast.Percentile or ampfast.ZScore (Sigmas is for skip_above)"


def limit_of(max_norm: object) -> float | NormLimit:
    """Returns the limit of a clip, checked.

    Raises:
        TypeError: If it is neither a number nor a limit that follows norms.
        ValueError: If it is NaN or below 0.
    """
    if isinstance(max_norm, (Percentile, ZScore)):
        return max_norm
    return float_of("max_norm", max_norm, _KINDS, least=0)


class Histories:
    """What limits know of the norms of each optimizer's steps, float64 words on a device.

    They are saved in the order in which optimizers first met a limit. Loaded ones belong to the
    optimizers of this order: first to the ones that have a history, which keeps its memory.
    """

    def __init__(self) -> None:
        self._histories = ByOptimizer[Tensor]()
        self._loaded: list[list[float]] = []

    def limit(
        self, optimizer: Any, rule: NormLimit, norm: Tensor, found_inf: Tensor | None
    ) -> Tensor:
        """Returns the limit of a norm, which joins the optimizer's history; no host sync."""
        history = self._histories.get(optimizer)
        if history is None or history.device != norm.device or history.numel() != rule._words:
            refuse_capture("the creation of a limit's norms, which every replay would reset")
            words = [0.0] * rule._words
            if history is None and self._loaded:
                saved = self._loaded.pop(0)
                words = saved if len(saved) == rule._words else words
            elif history is not None and history.numel() == rule._words:
                words = history.tolist()
            dtype = scalars.widest(norm.device)
            history = scalars.allocate(torch.tensor, words, dtype=dtype, device=norm.device)
            self._histories.record(optimizer, history)
        # Rounded, so that all ranks take the same limit.
        norm = norm.detach().float().to(history.dtype).reshape(())
        taken = norm.isfinite() & (norm > 0)
        if found_inf is not None:
            taken &= found_inf.reshape(()) == 0
        return rule._take(history, norm, taken)

    def saved(self) -> list[list[float]]:
        """Returns the histories, with a host sync for each."""
        return [history.tolist() for _, history in self._histories] + self._loaded

    def load(self, saved: list[list[float]]) -> None:
        """Takes what `saved` returned."""
        self._loaded = list(saved)
        before, self._histories = self._histories, ByOptimizer()
        for optimizer, history in before:
            words = self._loaded.pop(0) if self._loaded else []
            fits = len(words) == history.numel()
            words = words if fits else [0.0] * history.numel()
            history.copy_(scalars.allocate(torch.tensor, words, dtype=history.dtype, device="cpu"))
            self._histories.record(optimizer, history)

    def __getstate__(self) -> dict[str, Any]:
        # An optimizer is not the same in another process.
        return {**Histories().__dict__, "_loaded": self.saved()}


def require_histories(saved: object) -> list[list[float]]:
    """Returns the histories of a checkpoint.

    Raises:
        ValueError: If they are not lists of finite floats, of which the first is a count.
    """

    def is_valid(words: object) -> bool:
        floats: list[Any] = words if isinstance(words, list) else [None]
        are_floats = all(type(each) is float and 0 <= each < math.inf for each in floats)
        return are_floats and all(each.is_integer() and each < 2**53 for each in floats[:1])

    if not isinstance(saved, list) or not all(map(is_valid, saved)):
        raise ValueError(
            "the checkpoint's norms of limits must be lists of finite floats, of which the first "
            f"is a count, got {saved!r}"
        )
    return saved
