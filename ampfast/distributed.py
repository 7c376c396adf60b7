"""Distributed gradients: layouts, agreement of ranks on flags and norms."""

from __future__ import annotations

import itertools
import math
import pickle
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ampfast.backends import aten, core, scalars
from ampfast.backends.cuda_graphs import is_capturing

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    Flags = dict[torch.device, Tensor]

Value = TypeVar("Value")

# The ranks that hold a marked parameter, ascending; none where all ranks of a scaler's group do.
# torch cannot convert parameters that have weak references (`torch.utils.swap_tensors` refuses), so
# these are held. If nothing else holds one, it is dropped at the next call.
_marks: dict[Tensor, tuple[int, ...]] = {}
_INT64: Any = {"dtype": torch.int64, "device": "cpu"}
# Larger than any number of ranks, as in csrc/finder.cpp; a sum over all ranks is exact in float64.
_FOUND = 2**32


@dataclass(frozen=True, eq=False)
class Layout:
    """Placements of a distributed gradient on its mesh.

    Attributes:
        mesh: The mesh.
        unreplicated: Mesh dimensions along which the ranks' local tensors differ.
        sharded: Those dimensions along which the ranks hold different elements, which is assumed of
            placements that torch does not know.
    """

    mesh: DeviceMesh
    unreplicated: tuple[int, ...]
    sharded: tuple[int, ...]

    @property
    def is_partial(self) -> bool:
        """Whether ranks hold partial sums of the same elements."""
        return self.unreplicated != self.sharded

    def counts_among(self, ranks: Sequence[int], *, is_own_group: bool) -> bool:
        """Whether this rank, of all `ranks` with the same elements, contributes their norm.

        Args:
            ranks: Ranks along a mesh dimension or of a group, this one among them.
            is_own_group: Whether ranks outside of the mesh hold other gradients, as in a scaler's
                own group. Else they hold replicas if the mesh is a slice of a larger one.
        """
        if self.mesh.get_coordinate() is None:
            return True
        is_slice = self.mesh._get_root_mesh().size() > self.mesh.size()
        if is_slice and not is_own_group and ranks[0] not in self.mesh.mesh:
            return False
        unsharded = [dim for dim in range(self.mesh.ndim) if dim not in self.sharded]
        alike = _ranks_along(self.mesh, unsharded)
        return dist.get_rank() == next(rank for rank in alike if rank in ranks)

    @torch.no_grad()
    def local_tensor(self, grad: DTensor) -> Tensor:
        """Returns the local tensor, partial sums reduced."""
        from torch.distributed.tensor import Replicate

        if self.is_partial:
            placements = [Replicate() if p.is_partial() else p for p in grad.placements]
            grad = grad.redistribute(placements=placements)
        return grad.to_local()


class LocalShards:
    """Collector of local shards, called by the walk for each distributed gradient.

    Attributes:
        ranks: The ranks, which know layouts and agreements.
        layouts: Layout by parameter number.
        partial: Gradients that are partial sums, by parameter number.
    """

    def __init__(self, dtensor: type[DTensor] | tuple[()], ranks: Ranks) -> None:
        self.layouts: dict[int, Layout] = {}
        self.partial: dict[int, DTensor] = {}
        self._dtensor = dtensor
        self.ranks = ranks

    def __call__(self, param: Tensor, grad: Tensor | None, number: int) -> Tensor | None:
        """Returns the local shard of a distributed gradient."""
        if grad is None:
            # Another rank may have a shard of this gradient, whose flag all ranks reduce.
            if self.is_distributed(param) and param.requires_grad:
                self.layouts[number] = self.ranks.layout_of(param)
            return None
        if not self.is_distributed(grad):
            return None
        layout = self.layouts[number] = self.ranks.layout_of(grad)
        if layout.is_partial:
            self.partial[number] = grad
        local = grad._local_tensor  # no autograd node
        if type(local) is Tensor:
            return local
        with torch.no_grad():
            return grad.to_local()  # waits for an asynchronous collective

    def is_distributed(self, tensor: object) -> TypeGuard[DTensor]:
        return isinstance(tensor, self._dtensor)

    def reduced(self) -> Iterator[tuple[int, Tensor]]:
        """Yields parameter number and local tensor of the gradients in `partial`, reduced."""
        for number, grad in self.partial.items():
            yield number, core.real_view(self.layouts[number].local_tensor(grad))

    def agree_(self, found_inf: Tensor) -> None:
        """Reduces a flag of 0 or 1 over the ranks, with reduced partial sums checked, too."""
        for _, reduced in self.reduced():
            work = core.Pass(False, core.Factor.NONE, found_inf=found_inf)
            aten.run(aten.TensorList.of([reduced.clone()]), work)
        agreement = self.ranks.agreement(self.layouts.values())
        if agreement is not None:
            agreement.reduce_(found_inf, dist.ReduceOp.MAX)


class Group:
    """Process group; a foreign one, unknown to torch.distributed, by rank(), size(), allreduce().

    None is the default group, with torch's error if there is none.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self.process_group = dist.distributed_c10d._get_default_group() if group is None else group
        self._is_alone = self.size() == 1
        # Device types whose tensors its backend supports; empty if they are not known.
        self._types = [each.type for each in getattr(self.process_group, "_device_types", ())]

    @cached_property
    def ranks(self) -> list[int]:
        """Global ranks, or those within a foreign group if there is no default group."""
        if self.process_group in dist.distributed_c10d._world.pg_group_ranks:
            return dist.get_process_group_ranks(self.process_group)
        if not dist.is_initialized():
            return list(range(self.size()))
        rank = scalars.allocate(torch.tensor, dist.get_rank(), **_INT64)
        ranks: list[int] = self.gather(rank).tolist()
        return ranks

    def rank(self) -> int:
        """Global rank of this process, an element of `ranks`."""
        return dist.get_rank() if dist.is_initialized() else self.process_group.rank()

    def size(self) -> int:
        return self.process_group.size()

    def all_reduce_(self, tensor: Tensor, op: Any) -> None:
        if self._is_alone:
            return
        there, types = tensor, self._types
        if types and tensor.device.type not in types:
            # A group of gloo names CUDA, too, where there is none.
            there = tensor.to("cpu" if "cpu" in types else types[0])
        # torch's function of this name takes as long to get here as a small collective does.
        options = dist.AllreduceOptions()
        options.reduceOp, options.asyncOp = op, False
        work = self.process_group.allreduce([there], options)
        if work is not None:
            work.wait()
        if there is not tensor:
            tensor.copy_(there)

    def gather(self, tensor: Tensor) -> Tensor:
        """Returns every rank's tensor, stacked."""
        shape = self.size(), *tensor.shape
        rows = scalars.allocate(torch.zeros, shape, dtype=tensor.dtype, device=tensor.device)
        rows[self.process_group.rank()] = tensor
        self.all_reduce_(rows, dist.ReduceOp.SUM)
        return rows

    def gather_object(self, value: Value) -> list[Value]:
        """Returns every rank's value, which can be pickled."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = self.gather(scalars.allocate(torch.tensor, len(data), **_INT64)).tolist()
        rows = self.gather(torch.nn.functional.pad(data, (0, max(sizes) - len(data))))
        pickles = (row[:size].numpy().tobytes() for row, size in zip(rows, sizes, strict=True))
        return [pickle.loads(each) for each in pickles]


@dataclass(frozen=True, eq=False)
class Agreement:
    """Reduction of flags and norms over ranks.

    Attributes:
        groups: Process groups, reduced over one after the other.
        ranks: All ranks that these groups reach.
        own: Ranks of the scaler's own groups, in each of which ranks hold different parameters.
        lines: Ranks along each dimension of a mesh of gradients, this one among them.
        known: What `counts` has returned.
    """

    groups: list[Group]
    ranks: frozenset[int]
    own: list[list[int]]
    lines: list[list[int]]
    known: dict[object, bool] = field(default_factory=dict)

    def counts(self, layout: Layout | None, mark: tuple[int, ...] | None = None) -> bool:
        """Whether this rank, of those with the same elements, contributes a gradient's norm.

        Args:
            layout: Its layout; None if it is not distributed.
            mark: The ranks of its parameter's mark, empty for all; None without one.
        """
        key = layout, mark
        if key not in self.known:
            self.known[key] = self._counts(layout, mark)
        return self.known[key]

    def _counts(self, layout: Layout | None, mark: tuple[int, ...] | None) -> bool:
        if layout is not None:
            return all(layout.counts_among(each, is_own_group=True) for each in self.own) and all(
                layout.counts_among(line, is_own_group=bool(mark)) for line in self.lines
            )
        rank = self.groups[-1].rank()
        if mark:
            return rank == next(each for each in mark if each in self.ranks)
        replicas = [*self.lines, *self.own]
        if mark is None:
            # Replicas on the ranks of a mesh, but shards within the own group.
            own = [set(each) for each in self.own]
            replicas = [line for line in self.lines if not any(set(line) <= each for each in own)]
        return all(line[0] == rank for line in replicas)

    def all_reduce(self, found: list[Flags], device: torch.device) -> list[Flags]:
        """Returns each optimizer's flags, 0 or 1, equal on all ranks; one collective per group.

        An optimizer without gradients on this rank has none in `found`, and gets one on `device`
        unless no rank has any, for which only ranks without wait.
        """
        if len(found) == 1 and len(found[0]) == 1:
            flag = next(iter(found[0].values()))
            if flag.dim() == 0:
                self.reduce_(flag, dist.ReduceOp.MAX)
                return found
        # -1: no gradient. Other ranks may reduce their own flag, as above.
        levels = [scalars.joint_flag(flags.values(), device) - int(not flags) for flags in found]
        reduced = torch.stack(levels)
        self.reduce_(reduced, dist.ReduceOp.MAX)
        return _joint_flags(found, reduced, reduced >= 0, device)

    def all_reduce_norm(
        self, found: list[Flags], device: torch.device, value: Tensor, *, largest: bool
    ) -> tuple[list[Flags], Tensor]:
        """Returns flags as `all_reduce` and, in the same collectives, a sum of all ranks' values.

        Args:
            found: As for `all_reduce`.
            device: Device of `value`.
            value: 0-dim float64 or float32, not negative.
            largest: Maximum instead of sum; NaN is above infinity.
        """
        # 0: no gradient; 1: finite ones; _FOUND and above: an overflow, also when summed.
        levels = [
            scalars.any_found(flags.values(), device).to(value) * _FOUND + int(bool(flags))
            for flags in found
        ]
        reduced = torch.stack([value, *levels])
        if largest:
            # The bits of non-negative floats, as integers, keep their order, with NaN on top.
            bits = torch.int64 if value.dtype is torch.float64 else torch.int32
            self.reduce_(reduced.view(bits), dist.ReduceOp.MAX)
        else:
            self.reduce_(reduced, dist.ReduceOp.SUM)
        flags = _joint_flags(found, reduced[1:] >= _FOUND, reduced[1:] > 0, device)
        return flags, reduced[0].clone()

    def norm(self, norm: Tensor, order: float) -> Tensor:
        """Returns the global norm from each rank's local norm."""
        for group in self.groups:
            norm = torch.linalg.vector_norm(group.gather(norm), order)
        return norm

    def reduce_(self, tensor: Tensor, op: Any) -> None:
        """All-reduces a tensor in place, with one collective per group."""
        for group in self.groups:
            group.all_reduce_(tensor, op)


def _joint_flags(
    found: list[Flags], reduced: Tensor, is_known: Tensor, device: torch.device
) -> list[Flags]:
    """Returns the joint flags on the devices of this rank's flags; none where no rank has any."""
    joint: list[Flags] = []
    for local, flag, known in zip(found, reduced.float().clamp(min=0), is_known, strict=True):
        places = local or ([device] if is_capturing() or known.item() else [])
        joint.append({at: scalars.joint_flag([flag], at) for at in places})
    return joint


def mark_replicated(
    params: Iterable[Tensor], group: ProcessGroup | DeviceMesh | None = None
) -> None:
    """Marks parameters whose gradients are the same on every rank of a group.

    Their gradients count once in a norm over the ranks that a scaler agrees with; all others are
    taken for shards, whose norms add up. DTensor parameters need a mark only if ranks outside of
    their mesh hold other parameters, as experts: the group is then their mesh. Marks outlive
    conversions of the model, but `fully_shard` replaces parameters: mark them after it. Copies of
    the parameters are not marked. A later mark replaces an earlier one.

    Args:
        params: Parameters, of any scaler's optimizers.
        group: The ranks that hold these parameters, this one among them; other ranks hold other
            ones, as with experts. None if all ranks of a scaler's `process_group` hold them.

    Raises:
        TypeError: If one is not a tensor, or the group is no group.
        ValueError: If the group does not contain this rank, or is a mesh of another device type.
    """
    given: list[Any] = [params] if isinstance(params, (Tensor, torch.nn.Module)) else list(params)
    for param in given:
        if not isinstance(param, Tensor):
            hint = ": write module.parameters()" if isinstance(param, torch.nn.Module) else ""
            raise TypeError(f"mark_replicated takes parameters, got {type(param).__name__}{hint}")
    mark: tuple[int, ...] = ()
    if group is not None:
        for param in given:
            require_group(group, param.device, "group")
        mark = _ranks_in(group) if _is_mesh(group) else tuple(sorted(Group(cast(Any, group)).ranks))
        for param in given:
            if isinstance(param, _dtensor()) and _ranks_in(param.device_mesh) != mark:
                raise ValueError(
                    f"the group of a DTensor must have the ranks of its {param.device_mesh}, "
                    f"got {[*mark]}"
                )
    _marks.update(dict.fromkeys(given, mark))
    core.drop_unheld(_marks)


def marks_of(groups: Iterable[Iterable[Tensor]]) -> dict[int, tuple[int, ...]]:
    """Returns the marks of parameters, by number, as `Agreement.counts` takes them."""
    core.drop_unheld(_marks)
    if not _marks:
        return {}
    params = itertools.chain.from_iterable(groups)
    return {number: _marks[param] for number, param in enumerate(params) if param in _marks}


class Ranks:
    """Ranks that a scaler agrees with: its process group, and the meshes of gradients.

    Attributes:
        group: The scaler's process group or mesh, or None.
        is_alone: Whether there is no group: only distributed gradients need agreement.
    """

    def __init__(
        self, group: ProcessGroup | DeviceMesh | None = None, is_default: bool = False
    ) -> None:
        self.group = group
        self.is_alone = group is None and not is_default
        self._layouts: dict[Any, Layout] = {}
        self._agreements: dict[tuple[Layout, ...], Agreement | None] = {}
        self._mesh = group if _is_mesh(group) else None

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return Ranks(self.group, is_default=not self.is_alone)

    def __reduce__(self) -> Any:
        if self.group is not None:
            raise TypeError(
                "a scaler with a process_group cannot be pickled, for the group is of this "
                "process: save its state_dict()"
            )
        return Ranks, (None, not self.is_alone)

    def local_shards(self) -> LocalShards:
        """Returns a collector of local shards."""
        return LocalShards(_dtensor(), self)

    def layout_of(self, tensor: DTensor) -> Layout:
        mesh, placements = tensor.device_mesh, tensor.placements
        # The layout keeps its mesh alive, and so also its id.
        key = (id(mesh), placements)
        if key not in self._layouts:
            apart = [dim for dim, each in enumerate(placements) if not each.is_replicate()]
            sharded = [dim for dim in apart if not placements[dim].is_partial()]
            self._layouts[key] = Layout(mesh, tuple(apart), tuple(sharded))
        return self._layouts[key]

    def agreement(self, layouts: Iterable[Layout]) -> Agreement | None:
        """Returns the agreement on gradients of these layouts, or None if none is needed."""
        key = tuple(dict.fromkeys(layouts))
        if key not in self._agreements:
            self._agreements[key] = self._new_agreement(key)
        return self._agreements[key]

    def agreement_on(self, optimizer: object) -> Agreement | None:
        """Returns the agreement on gradients that a subclass's override reads."""
        shards = self.local_shards()
        groups = getattr(optimizer, "param_groups", ())
        for number, param in enumerate(param for group in groups for param in group["params"]):
            if shards.is_distributed(param):
                shards(param, param.grad, number)
        return self.agreement(shards.layouts.values())

    @cached_property
    def _own(self) -> list[Group]:
        """The scaler's own group; several for a mesh that no group spans.

        Raises:
            ValueError: If it is the default group and there is none.
        """
        if self._mesh is not None:
            return _groups_along(self._mesh, range(self._mesh.ndim))
        return [] if self.is_alone else [Group(cast(Any, self.group))]

    def gathered(self, value: Value) -> list[Value]:
        """Returns the values of all ranks that this scaler has agreed with, by rank."""
        agreements = [agreed for agreed in self._agreements.values() if agreed is not None]
        seen = None
        for group in _without_subsets([g for agreed in agreements for g in agreed.groups]):
            seen = seen or {group.rank(): value}
            seen = {rank: each[rank] for each in group.gather_object(seen) for rank in each}
        return [value] if seen is None else [seen[rank] for rank in sorted(seen)]

    def _new_agreement(self, layouts: tuple[Layout, ...]) -> Agreement | None:
        own = [group.ranks for group in self._own]
        if self._mesh is not None:
            own = [_ranks_along(self._mesh, range(self._mesh.ndim))]
        reached = set(itertools.chain.from_iterable(own))
        groups: list[Group] = []
        lines: list[list[int]] = []
        # Sorted, as ranks may order parameters differently.
        meshes = {id(layout.mesh): layout.mesh for layout in layouts}.values()
        for mesh in sorted(meshes, key=_sort_key):
            if mesh.get_coordinate() is not None:
                dims = sorted({d for at in layouts if at.mesh is mesh for d in at.unreplicated})
                groups += _groups_along(mesh, dims)
                lines += [_ranks_along(mesh, [dim]) for dim in dims]
                reached.update(_ranks_along(mesh, dims))
        # The scaler's own last: some of its ranks may not be in these meshes.
        groups = _without_subsets([*groups, *self._own])
        if not groups:
            return None
        return Agreement(groups, frozenset(reached), own, lines)


def require_group(group: Any, device: Any, name: str = "process_group") -> None:
    """Checks a group of ranks with tensors on a device, or on any; `name` is the argument's.

    Raises:
        TypeError: If it is neither a group nor a mesh.
        ValueError: If this rank is not in it, or a mesh is of another device type.
    """
    if group is None:
        return
    if _is_mesh(group):
        is_member = group.get_coordinate() is not None
        if device is not None and group.device_type != torch.device(device).type:
            raise ValueError(f"{name} is a mesh of {group.device_type!r}, not of {str(device)!r}")
    elif all(callable(getattr(group, name, None)) for name in ("rank", "size", "allreduce")):
        is_member = group.rank() >= 0
    elif group is dist.GroupMember.NON_GROUP_MEMBER:
        is_member = False
    else:
        raise TypeError(
            f"{name} must be a torch.distributed.ProcessGroup, a DeviceMesh or an object "
            f"with rank(), size() and allreduce(), got {type(group).__name__}"
        )
    if not is_member:
        raise ValueError(
            f"{name} does not contain this rank: give the group that this rank is in, or none"
        )


def _groups_along(mesh: DeviceMesh, dims: Iterable[int]) -> list[Group]:
    """Process groups along mesh dimensions, or the default group if they span all ranks."""
    groups = [Group(mesh.get_group(dim)) for dim in dims]
    size = math.prod(group.size() for group in groups)
    if len(groups) > 1 and size == dist.get_world_size():
        return [Group()]
    return groups


def _dtensor() -> type[DTensor] | tuple[()]:
    """Returns the class, or none before its import; a partially imported module lacks the name."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())


def _is_mesh(group: object) -> TypeGuard[DeviceMesh]:
    return group is not None and isinstance(group, dist.DeviceMesh)  # type: ignore[attr-defined]


def _ranks_along(mesh: DeviceMesh, dims: Iterable[int]) -> list[int]:
    """Ranks along mesh dimensions through this rank's coordinates, in the order of the mesh."""
    index: list[Any] = list(mesh.get_coordinate() or ())
    for dim in dims:
        index[dim] = slice(None)
    ranks: list[int] = mesh.mesh[tuple(index)].flatten().tolist()
    return ranks


def _ranks_in(mesh: DeviceMesh) -> tuple[int, ...]:
    """All ranks of a mesh, ascending."""
    return tuple(sorted(mesh.mesh.flatten().tolist()))


def _without_subsets(groups: list[Group]) -> list[Group]:
    """The groups that are not subsets of another."""
    sets = [set(group.ranks) for group in groups]
    return [
        group
        for i, group in enumerate(groups)
        if not any(sets[i] < other or (sets[i] == other and j < i) for j, other in enumerate(sets))
    ]


def _sort_key(mesh: DeviceMesh) -> tuple[list[int], tuple[str, ...], list[int]]:
    """Order of meshes: slices of one mesh together, by the names of their dimensions."""
    root = mesh._get_root_mesh()
    return root.mesh.flatten().tolist(), mesh.mesh_dim_names or (), mesh.mesh.flatten().tolist()
