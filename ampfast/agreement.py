"""What ranks tell each other of a pass: whether a value is not finite, and parts of a norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ampfast.backends import aten
from ampfast.capture import is_capturing
from ampfast.layouts import Layout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    # What a pass found, by device.
    Flags = dict[torch.device, Tensor]

__all__ = ["Agreement"]

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
