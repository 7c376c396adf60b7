"""A group of two ranks in one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist


class Pair:
    """The other rank has the same values, or finds an overflow, or is lost for a call.

    Attributes:
        sent: Values of each tensor that was reduced.
        finds: Whether the other rank finds an overflow.
        failing: Numbers of the calls that fail, from 1.
        calls: Number of calls.
    """

    def __init__(self, failing: tuple[int, ...] = ()) -> None:
        self.sent: list[list[float]] = []
        self.finds, self.failing, self.calls = False, failing, 0

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
        self.calls += 1
        if self.calls in self.failing:
            raise ConnectionError("connection closed by peer")
        for tensor in tensors:
            self.sent.append(tensor.reshape(-1).tolist())
            if self.finds:
                tensor.fill_(1.0)
            elif options.reduceOp == dist.ReduceOp.SUM:
                tensor.mul_(2)
        return SimpleNamespace(wait=lambda: None)
