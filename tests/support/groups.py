"""Groups and meshes of a rank's tests, made once, and groups unknown to torch.distributed."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


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


@functools.cache
def line() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


@functools.cache
def square() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))


@functools.cache
def pair(first: tuple[int, ...], second: tuple[int, ...]) -> Any:
    """The one of two groups that this rank is in."""
    groups = [dist.new_group([*first]), dist.new_group([*second])]
    return groups[dist.get_rank() in second]


class Alone:
    """Group of one rank, as in torch's tests of its scaler for FSDP."""

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return 1

    def allreduce(self, *args: Any, **kwargs: Any) -> Any:
        return SimpleNamespace(wait=lambda: None)


class Foreign:
    """Foreign group that forwards to a real one."""

    def __init__(self, group: Any) -> None:
        self.rank, self.size, self.allreduce = group.rank, group.size, group.allreduce


class Derived(dist.ProcessGroup):
    """Foreign group that is a ProcessGroup, but not registered."""

    def __init__(self, group: Any) -> None:
        super().__init__(group.rank(), group.size())
        self._group = group

    def rank(self) -> int:
        return self._group.rank()

    def size(self) -> int:
        return self._group.size()

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        return self._group.allreduce(tensors, options)
