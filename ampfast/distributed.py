"""Agreement of ranks on flags and norms; layouts of distributed gradients."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ampfast.backends import aten
from ampfast.errors import is_capturing, warn_caller

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

    Flags = dict[torch.device, Tensor]

__all__ = [
    "Agreement",
    "Layout",
    "Parts",
    "Ranks",
    "Shards",
    "differences",
    "gathered",
    "mark_replicated",
    "marked",
    "part_of",
    "replicated",
    "require_group",
    "require_same",
    "root_of",
    "shards_of",
]

# The classes of placements of which was warned.
_warned: set[type] = set()


@dataclass(frozen=True, eq=False)
class Layout:
    """How a distributed gradient lies on its mesh, as seen from this rank.

    Attributes:
        mesh: The mesh.
        parted: The dimensions of the mesh along which ranks hold different values.
        sharded: Those of them along which they hold different elements.
        is_known: Whether all placements are known: if not, torch's own op takes the gradient.
    """

    mesh: DeviceMesh
    parted: tuple[int, ...]
    sharded: tuple[int, ...]
    is_known: bool

    @property
    def is_partial(self) -> bool:
        """Whether ranks hold summands of the same elements."""
        return self.is_known and self.parted != self.sharded

    @property
    def has_twins(self) -> bool:
        """Whether other ranks have such a mesh, too: then it is one of the slices of a larger."""
        root = root_of(self.mesh)
        return root is None or root.size() > self.mesh.size()

    @cached_property
    def places(self) -> dict[int, tuple[int, ...]]:
        """The coordinates of every rank of the mesh."""
        every = itertools.product(*map(range, self.mesh.mesh.shape))
        return dict(zip(self.mesh.mesh.flatten().tolist(), every, strict=True))

    def counts_among(self, ranks: Sequence[int], *, has_parts: bool) -> bool:
        """Whether this rank gives the norm of its elements to `ranks`, or another that has them.

        Args:
            ranks: A line of a mesh, from its begin, or a group; this one is among them.
            has_parts: Whether ranks that are not in the mesh have other gradients, as those of a
                scaler's own group. Else, if the mesh is a slice of one, they have the same ones.
        """
        mine = self.places.get(dist.get_rank())
        if mine is None:
            return True
        if not has_parts and self.has_twins and ranks[0] not in self.places:
            return False
        same = [place for rank in ranks if (place := self.places.get(rank)) is not None]
        return mine == min(p for p in same if all(p[dim] == mine[dim] for dim in self.sharded))


class Parts:
    """What a walk over parameters calls for those that may be distributed.

    Attributes:
        layouts: By the number of the parameter.
        partial: The gradients of which ranks hold summands, likewise.
    """

    def __init__(self, kind: type[DTensor], known: dict[Any, Layout]) -> None:
        self.layouts: dict[int, Layout] = {}
        self.partial: dict[int, DTensor] = {}
        self._kind = kind
        self._known = known

    def __call__(self, param: Tensor, grad: Tensor | None, number: int) -> Tensor | None:
        """Returns what this rank holds of a distributed gradient whose placements are known."""
        if grad is None:
            # Another rank may have this one's gradient, and will tell what it found.
            if self.is_distributed(param) and param.requires_grad:
                self.layouts[number] = self._layout_of(param)
            return None
        if not self.is_distributed(grad):
            return None
        layout = self.layouts[number] = self._layout_of(grad)
        if not layout.is_known:
            return None
        if layout.is_partial:
            self.partial[number] = grad
        local = grad._local_tensor  # without a step of autograd
        if type(local) is Tensor:
            return local
        with torch.no_grad():
            return grad.to_local()  # waits for what is still on its way

    def sums(self) -> Iterator[tuple[int, Tensor]]:
        """Gives, by number, what this rank holds of the gradients in `partial`, summed up."""
        for number, grad in self.partial.items():
            yield number, part_of(grad, self.layouts[number])

    def is_distributed(self, tensor: object) -> TypeGuard[DTensor]:
        return isinstance(tensor, self._kind)

    def _layout_of(self, tensor: DTensor) -> Layout:
        mesh, placements = tensor.device_mesh, tensor.placements
        # A layout holds its mesh, so that the id is not another's.
        key = (id(mesh), placements)
        layout = self._known.get(key)
        if layout is None:
            layout = self._known[key] = _layout(mesh, placements)
        return layout


def part_of(grad: DTensor, layout: Layout) -> Tensor:
    """Returns what this rank holds of a gradient, summed up where ranks hold summands.

    All of it where the placements are unknown.
    """
    from torch.distributed.tensor import Replicate

    with torch.no_grad():
        if not layout.is_known:
            return grad.full_tensor()
        if layout.is_partial:
            placements = [Replicate() if p.is_partial() else p for p in grad.placements]
            grad = grad.redistribute(placements=placements)
        return grad.to_local()


def root_of(mesh: DeviceMesh) -> DeviceMesh | None:
    """Returns the mesh of which this is a slice, or itself; None where torch does not tell."""
    root: DeviceMesh | None = getattr(mesh, "_get_root_mesh", lambda: None)()
    return root


def replicated(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    """Returns a tensor that every rank of a mesh has, as a distributed one; tells nobody."""
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _layout(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Layout:
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    dims = list(enumerate(placements))
    parted = tuple(dim for dim, placement in dims if type(placement) is not Replicate)
    sharded = tuple(dim for dim, p in dims if type(p) in (Shard, _StridedShard))
    unknown = [p for p in placements if type(p) not in (Replicate, Shard, _StridedShard, Partial)]
    if not unknown:
        return Layout(mesh, parted, sharded, True)
    kind = type(unknown[0])
    if kind not in _warned:
        _warned.add(kind)
        warn_caller(
            f"ampfast does not know the placement {kind.__name__} of a DTensor gradient: such "
            "gradients take torch's own op."
        )
    return Layout(mesh, parted, (), False)


# More than there are ranks; a sum of it over all of them is exact in float64.
_FOUND = 2**32


@dataclass(frozen=True, eq=False)
class Agreement:
    """What the ranks that take part in a pass tell each other.

    Attributes:
        groups: They are told along these, one after the other.
        counted: Whether the norm of a gradient counts here rather than at another rank that has
            the same.
        counts_plain: The same for a gradient that is not distributed.
        counts_marked: The same for one whose parameter is marked as replicated.
    """

    groups: tuple[ProcessGroup, ...]
    counted: dict[Layout, bool]
    counts_plain: bool
    counts_marked: bool

    def counts(self, layout: Layout | None, is_marked: bool = False) -> bool:
        """Whether the norm of a gradient of a layout, or of none, counts here."""
        if layout is not None:
            return self.counted[layout]
        return self.counts_marked if is_marked else self.counts_plain

    def share(self, found: list[Flags], device: torch.device) -> list[Flags]:
        """Tells the other ranks what was found, with one collective per group.

        Args:
            found: For each optimizer its flags, none if it has no gradient here.
            device: Where a flag is put if there is none.

        Returns:
            For each optimizer flags that are equal on all ranks, each 0 or 1; none if no rank has a
            gradient of it, which only ranks without have to wait for.
        """
        if len(found) == 1 and len(found[0]) == 1:
            flag = next(iter(found[0].values()))
            if flag.dim() == 0:
                self.reduce_(flag, dist.ReduceOp.MAX)
                return found
        # Below 0 is who has no gradient.
        levels = [aten.any_found(flags.values(), device) - int(not flags) for flags in found]
        told = torch.stack(levels)
        self.reduce_(told, dist.ReduceOp.MAX)
        return _taken(found, told > 0, told >= 0, device)

    def share_norm(
        self, found: list[Flags], device: torch.device, value: Tensor, *, largest: bool
    ) -> tuple[list[Flags], Tensor]:
        """`share`, and in the same collective what a norm is made of.

        Args:
            found: As for `share`.
            device: That of `value`.
            value: 0-dim float64, not negative.
            largest: Whether the ranks' values are to be compared instead of summed; NaN wins.

        Returns:
            The flags as `share`, and the value of all ranks.
        """
        # As integers, their bits have the order of the numbers, and NaN is above infinity.
        first = value.view(torch.int64) if largest else value
        # Above 0 is who has a gradient, from _FOUND on who has a bad one, summed up or not.
        levels = [
            aten.any_found(each.values(), device).to(first) * _FOUND + int(bool(each))
            for each in found
        ]
        told = torch.stack([first, *levels])
        self.reduce_(told, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
        agreed = _taken(found, told[1:] >= _FOUND, told[1:] > 0, device)
        value = told[0].clone()
        return agreed, value.view(torch.float64) if largest else value

    def norm(self, norm: Tensor, order: float) -> Tensor:
        """Returns the norm of what all ranks have of which `norm` is this one's."""
        for group in self.groups:
            mine = norm.to(_place(group, norm.device))
            others = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
            dist.all_gather(others, mine, group=group)
            norm = torch.linalg.vector_norm(torch.stack(others), order).to(norm.device)
        return norm

    def reduce_(self, tensor: Tensor, op: Any) -> None:
        """Reduces a tensor in place, with one collective per group."""
        for group in self.groups:
            place = _place(group, tensor.device)
            if place == tensor.device:
                dist.all_reduce(tensor, op, group=group)
            else:
                there = tensor.to(place)
                dist.all_reduce(there, op, group=group)
                tensor.copy_(there)


def _taken(found: list[Flags], bad: Tensor, known: Tensor, device: torch.device) -> list[Flags]:
    """Takes what all ranks say in place of what this one found, if a rank knows something."""
    agreed = []
    for before, flag, is_known in zip(found, bad.float(), known, strict=True):
        if before or is_capturing() or is_known.item():
            agreed.append({at: aten.any_found([flag], at) for at in before or [device]})
        else:
            agreed.append({})
    return agreed


def _place(group: ProcessGroup, device: torch.device) -> torch.device:
    """Where a group takes a tensor from: where it is, if the group can."""
    types = [each.type for each in group._device_types]
    if device.type in types:
        return device
    if "cuda" in types:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(types[0])


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


def require_same(settings: Mapping[str, object], others: Ranks) -> None:
    """Raises the same error on every rank unless all were given the same; one call on each.

    Args:
        settings: Values by name, with a `repr` that tells them apart. A name that only some ranks
            have is compared among those.
        others: The ranks to compare with, all of the default group if there are none. Where there
            is no such group, nothing is compared.

    Raises:
        RuntimeError: Naming what differs, and where.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    groups = others.groups()
    size = math.prod(group.size() for group in groups) if groups else None
    found = differences({**settings, "process_group size": size}, groups or [None])
    if found:
        raise RuntimeError(f"the ranks' scalers differ: {found}")


def differences(settings: Mapping[str, object], groups: Iterable[ProcessGroup | None]) -> str:
    """Returns which settings differ on which ranks, or an empty text; the same on every rank.

    Args:
        settings: As for `require_same`.
        groups: As for `distributed.gathered`.
    """
    seen = gathered({name: repr(value) for name, value in settings.items()}, groups)
    names = {name: None for values in seen.values() for name in values}
    found = []
    for name in names:
        ranks: dict[str, list[int]] = {}
        for rank, values in seen.items():
            if name in values:
                ranks.setdefault(values[name], []).append(rank)
        if len(ranks) > 1:
            where = [f"{value} on {_in_words(held_by)}" for value, held_by in ranks.items()]
            found.append(f"{name}: {', '.join(where)}")
    return "; ".join(found)


def _in_words(ranks: list[int]) -> str:
    """Ascending ranks, neighbours together, as in "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(parts)}"
