"""The ranks with which a scaler agrees, and which of them counts the norm of what several have."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ampfast.agreement import Agreement
from ampfast.backends import aten
from ampfast.layouts import Layout, Parts, root_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "Ranks",
    "Shards",
    "gathered",
    "mark_replicated",
    "marked",
    "require_group",
    "shards_of",
]

Value = TypeVar("Value")

_replicated = WeakTensorKeyDictionary()
# Of so many layouts and lists of them a scaler keeps what it found out.
_MOST_KNOWN = 1000


def mark_replicated(params: Iterable[Tensor]) -> None:
    """Says of parameters that every rank of a `process_group` has the same gradient of them.

    Their gradients count once in a norm that is taken over the group; those of all others are
    taken for parts, such as shards, whose norms add up. DTensor parameters need no mark. It is of
    these parameters, not of copies of them.

    Args:
        params: Parameters, of any scaler's optimizers.

    Raises:
        TypeError: If one is not a tensor.
    """
    if isinstance(params, torch.nn.Module):
        raise TypeError(
            f"mark_replicated takes parameters, got {type(params).__name__}: write "
            "module.parameters()"
        )
    params = [params] if isinstance(params, Tensor) else list(params)
    for param in params:
        if not isinstance(param, Tensor):
            raise TypeError(f"mark_replicated takes parameters, got {type(param).__name__}")
    for param in params:
        _replicated[param] = True


def marked(param_groups: Iterable[dict[str, Any]]) -> set[int]:
    """Returns the numbers of the parameters that were marked as replicated."""
    if not len(_replicated):
        return set()
    params = (param for group in param_groups for param in group["params"])
    return {number for number, param in enumerate(params) if param in _replicated}


class Ranks:
    """The ranks with which a scaler agrees.

    Attributes:
        group: A group or a mesh that the scaler was given, or None.
        is_alone: Whether there is no group: then only distributed gradients are agreed on.
    """

    def __init__(
        self, group: ProcessGroup | DeviceMesh | None = None, is_default: bool = False
    ) -> None:
        self.group = group
        # The group of all, as it is when it is needed.
        self._is_default = is_default and group is None
        self.is_alone = group is None and not is_default
        self._layouts: dict[Any, Layout] = {}
        self._agreements: dict[tuple[Layout, ...], Agreement | None] = {}
        self._all: ProcessGroup | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return Ranks(self.group, is_default=self._is_default)

    def __reduce__(self) -> Any:
        if self.group is not None:
            raise TypeError(
                "a scaler with a process_group cannot be pickled, for the group is of this "
                "process: save its state_dict()"
            )
        return Ranks, (None, self._is_default)

    def parts(self) -> Parts | None:
        """Returns what a walk calls for distributed tensors, or None where there can be none."""
        module = sys.modules.get("torch.distributed.tensor")
        # It has no such name yet while it is imported.
        if module is None or not hasattr(module, "DTensor"):
            return None
        return Parts(module.DTensor, self._layouts)

    def agreement(self, layouts: Iterable[Layout]) -> Agreement | None:
        """Returns how the ranks agree on gradients of these layouts; None if there is no need."""
        if self._is_default and self._all is not (world := _world()):
            self._agreements.clear()
            self._all = world
        key = tuple(dict.fromkeys(layouts))
        if key not in self._agreements:
            if len(self._layouts) + len(self._agreements) > _MOST_KNOWN:
                self._layouts.clear()
                self._agreements.clear()
            self._agreements[key] = self._new_agreement(key)
        return self._agreements[key]

    def agreement_on(self, param_groups: Iterable[dict[str, Any]]) -> Agreement | None:
        """The same for gradients that somebody else reads."""
        parts = self.parts()
        if parts is not None:
            params = (param for group in param_groups for param in group["params"])
            for number, param in enumerate(params):
                if parts.is_distributed(param):
                    parts(param, param.grad, number)
        return self.agreement([] if parts is None else parts.layouts.values())

    def groups(self) -> list[ProcessGroup]:
        """Returns the scaler's own group; several if it is a mesh that no group spans.

        Raises:
            ValueError: If it is that of all ranks, and there is none.
        """
        if self._is_default:
            return [_world()]
        if self.group is None or isinstance(self.group, dist.ProcessGroup):
            return [] if self.group is None else [self.group]
        return _groups_along(self.group, range(self.group.ndim))

    def gathered(self, value: Value) -> list[Value]:
        """Returns the values of all ranks with which this scaler has agreed, by rank."""
        groups = [
            g for agreement in self._agreements.values() if agreement for g in agreement.groups
        ]
        return list(gathered(value, _maximal(groups)).values()) if groups else [value]

    def _new_agreement(self, layouts: tuple[Layout, ...]) -> Agreement | None:
        own, along, lines = self.groups(), [], []
        # In an order on which all ranks agree, whatever that of their parameters.
        meshes = {id(layout.mesh): layout.mesh for layout in layouts}.values()
        for mesh in sorted(meshes, key=_place_of):
            if mesh.get_coordinate() is not None:
                dims = sorted({dim for at in layouts if at.mesh is mesh for dim in at.parted})
                along += _groups_along(mesh, dims)
                lines += [_line(mesh, dim) for dim in dims]
        # The scaler's own last: other ranks of it may not have these meshes.
        groups = _maximal([*along, *own])
        if not groups:
            return None
        me = dist.get_rank()
        with_parts = self._lines()

        def counts(layout: Layout) -> bool:
            among_others = all(layout.counts_among(line, has_parts=True) for line in with_parts)
            return among_others and all(
                layout.counts_among(line, has_parts=False) for line in lines
            )

        # The ranks of a mesh hold what is not distributed alike; those of an own group, parts.
        alike = [line for line in lines if not any(set(line) <= set(each) for each in with_parts)]
        return Agreement(
            tuple(groups),
            {layout: counts(layout) for layout in layouts},
            counts_plain=all(line[0] == me for line in alike),
            counts_marked=all(line[0] == me for line in (*lines, *with_parts)),
        )

    def _lines(self) -> list[list[int]]:
        """The ranks of the scaler's own group, or of each dimension of its mesh."""
        if self.group is None or isinstance(self.group, dist.ProcessGroup):
            return [dist.get_process_group_ranks(group) for group in self.groups()]
        return [_line(self.group, dim) for dim in range(self.group.ndim)]


@dataclass(frozen=True)
class Shards:
    """What this rank holds of a list of gradients.

    Attributes:
        tensors: The list, with the local parts of those that are distributed.
        parts: How these lie on their meshes, by place in the list.
        agreement: How the ranks agree, or None.
    """

    tensors: list[Tensor]
    parts: Parts
    agreement: Agreement | None

    def agree_(self, found_inf: Tensor) -> None:
        """Writes 1 if a rank has, or if a sum of what ranks hold is not finite.

        Else it must be 0 or 1 here.
        """
        for _, summed in self.parts.sums():
            aten.check_([summed.clone()], found_inf)
        if self.agreement is not None:
            self.agreement.reduce_(found_inf, dist.ReduceOp.MAX)


def shards_of(grads: list[Tensor]) -> Shards | None:
    """Returns what this rank holds of a list, or None if none of it is distributed."""
    ranks = Ranks()
    parts = ranks.parts()
    if parts is None:
        return None
    tensors = [
        part if (part := parts(grad, grad, number)) is not None else grad
        for number, grad in enumerate(grads)
    ]
    if not parts.layouts:
        return None
    return Shards(tensors, parts, ranks.agreement(parts.layouts.values()))


def gathered(value: Value, groups: Iterable[ProcessGroup | None]) -> dict[int, Value]:
    """Returns the values that the ranks of groups call this with, by rank in ascending order.

    Args:
        value: What can be pickled.
        groups: Of this rank; with several, as of a mesh, each next one joins what the ranks of the
            groups before have seen. None is the default group.
    """
    seen = {dist.get_rank(): value}
    for group in groups:
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, seen, group=group)
        seen = {rank: of_rank for part in parts for rank, of_rank in part.items()}
    return dict(sorted(seen.items()))


def require_group(group: object, device: Any) -> None:
    """Checks a `process_group` for a scaler of a device.

    Raises:
        TypeError: If it is neither a group nor a mesh.
        ValueError: If this rank is not in it, or a mesh is of another device type.
    """
    if group is None:
        return
    if not dist.is_available():
        raise TypeError("process_group needs a torch that was built with torch.distributed")
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(group, DeviceMesh):
        is_member = group.get_coordinate() is not None
        if group.device_type != torch.device(device).type:
            raise ValueError(
                f"process_group is a mesh of {group.device_type!r}, but the scaler is for "
                f"{str(device)!r}"
            )
    elif isinstance(group, dist.ProcessGroup):
        is_member = dist.get_rank(group) >= 0
    elif group is dist.GroupMember.NON_GROUP_MEMBER:
        is_member = False
    else:
        raise TypeError(
            "process_group must be a torch.distributed.ProcessGroup or a DeviceMesh, got "
            f"{type(group).__name__}"
        )
    if not is_member:
        raise ValueError(
            f"process_group does not contain this rank, {dist.get_rank()}: make the scaler with "
            "the group that this rank is in, or without one"
        )


def _place_of(mesh: DeviceMesh) -> tuple[list[int], list[int], list[int]]:
    """Orders meshes: those of a larger one together, by its dimensions."""
    root = root_of(mesh) or mesh
    names = list(root.mesh_dim_names or ())
    dims = [names.index(n) if n in names else len(names) for n in mesh.mesh_dim_names or ()]
    return root.mesh.flatten().tolist(), dims, mesh.mesh.flatten().tolist()


def _groups_along(mesh: DeviceMesh, dims: Iterable[int]) -> list[ProcessGroup]:
    """The groups along dimensions of a mesh, or the group of all if these span all ranks."""
    groups = [mesh.get_group(dim) for dim in dims]
    size = math.prod(group.size() for group in groups)
    if len(groups) > 1 and size == dist.get_world_size():
        return [_world()]
    return groups


def _line(mesh: DeviceMesh, dim: int) -> list[int]:
    """The ranks along a dimension of a mesh that are in line with this one, from its begin."""
    place: list[Any] = list(mesh.get_coordinate() or ())
    place[dim] = slice(None)
    return mesh.mesh[tuple(place)].tolist()


def _maximal(groups: list[ProcessGroup]) -> list[ProcessGroup]:
    """Each set of ranks once, and none that is part of another."""
    sets = [set(dist.get_process_group_ranks(group)) for group in groups]
    return [
        group
        for i, group in enumerate(groups)
        if not any(sets[i] < other or (sets[i] == other and j < i) for j, other in enumerate(sets))
    ]


def _world() -> ProcessGroup:
    # Raises what torch raises where there is none.
    return dist.distributed_c10d._get_default_group()
