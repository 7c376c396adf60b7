"""How distributed gradients lie on their meshes, and what of them is on this rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from ampfast.notes import warn_caller

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

__all__ = ["Layout", "Parts", "part_of", "replicated", "root_of"]

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
