"""Groups and meshes of a rank's tests, made once, and groups unknown to torch.distributed."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


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
