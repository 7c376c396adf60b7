"""The rule of spikes in plain Python, and norms to try it on."""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor

from ampfast import Sigmas
from ampfast.backends.core import SPIKE, norm_layout


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
