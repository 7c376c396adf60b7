"""From an optimizer's gradients to the kernels, or to torch's ops for irregular ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler as TorchGradScaler

from ampfast import backends
from ampfast.backends import TORCH_OPS, Choice, Kernels, aten, core
from ampfast.backends.aten import TensorList
from ampfast.backends.core import Factor, Pass, Track
from ampfast.backends.scalars import allocate, copies_of, inverse, moved, new_flag, widest
from ampfast.distributed import Layout, LocalShards, Ranks
from ampfast.errors import add_note

Flags = dict[torch.device, Tensor]
Batch = core.GradList | TensorList
_NO_SHARDS = LocalShards((), Ranks())


@dataclass
class Gradients:
    """Gradients of one pass, in lists of one device.

    Attributes:
        lists: Those for torch's ops first, each with the kernels that take it.
        groups: All parameters by group, with or without gradient, for tracking and norms.
        shards: Local shards of the distributed gradients.
        track_on: Tracking tables by device, or None.
    """

    lists: list[tuple[Kernels, Batch]]
    groups: list[list[Tensor]] = field(default_factory=list)
    shards: LocalShards = _NO_SHARDS
    track_on: Callable[[torch.device], Track] | None = None

    @property
    def layouts(self) -> dict[int, Layout]:
        """Layouts of distributed gradients, by parameter number."""
        return self.shards.layouts

    def for_torch(self) -> Iterator[TensorList]:
        """Yields the lists for torch's ops."""
        return (each for _, each in self.lists if isinstance(each, TensorList))

    def split(self, numbers: set[int]) -> tuple[Gradients, Gradients]:
        """Splits the gradients by parameter: the ones with these numbers, and the others."""
        halves = [(kernels, each.split(numbers)) for kernels, each in self.lists]
        inside = [(kernels, here) for kernels, (here, _) in halves if here.chunks]
        outside = [(kernels, there) for kernels, (_, there) in halves if there.chunks]
        return replace(self, lists=inside), replace(self, lists=outside)

    def run(
        self,
        work: Pass,
        *,
        before_write: Callable[[], None] | None = None,
        reduces: bool = True,
    ) -> tuple[Flags, list[Tensor]]:
        """Runs a pass.

        Args:
            work: The pass, with its scalars on any device, and its `found_inf` the initial value of
                the new flags. Its ending is done if all gradients are in one list.
            before_write: Called right before the first write, after torch's refusals.
            reduces: Whether ranks reduce partial gradients; else every list has sums.

        Returns:
            A new found_inf for each device that has a gradient, and the sums of each list.
        """
        if work.write:
            self._begin_write(work, before_write)
        if len(self.lists) != 1 or self.layouts:
            work = work._replace(ending=None)
        flags: Flags = {}
        rows: list[Tensor] = []
        factor_on, coefficient_on = copies_of(work.factor), copies_of(work.coefficient)
        for kernels, each, given in self._passes(work, reduces):
            device, row = each.device, None
            flag, ending = flags.get(device), given.ending
            if flag is None and given.found_inf is not None:
                flag = moved(given.found_inf, device, copy=True)
            if not reduces:
                row = allocate(torch.empty, 2, dtype=widest(device), device=device)
                rows.append(row)
            if ending is not None and ending.scale.device != device:
                ending = None  # the scale is on another GPU
            marks, now = (None, None) if self.track_on is None else self.track_on(device)
            flags[device] = kernels.run(
                each,
                given._replace(
                    factor=None if given.how is Factor.NONE else factor_on(device),
                    found_inf=flag,
                    coefficient=coefficient_on(device),
                    sums=row,
                    marks=marks,
                    now=now,
                    ending=ending,
                ),
            )
        return flags, rows

    def _begin_write(self, work: Pass, before_write: Callable[[], None] | None) -> None:
        if work.coefficient is None:
            # First gradients that torch may refuse, before any other is written.
            for aside in self.for_torch():
                aten.require_unscalable(aside)
        if before_write is not None and self.lists:
            before_write()

    def _passes(self, work: Pass, reduces: bool) -> Iterator[tuple[Kernels, Batch, Pass]]:
        """Yields each list and its pass, to be run before the next one is asked for."""
        for kernels, each in self.lists:
            yield kernels, each, work
        if reduces and work.coefficient is None:
            # All ranks reduce partial gradients here, and check the sums as the optimizer uses
            # them. torch's op writes as it checks.
            work = work._replace(write=False, how=Factor.NONE if work.write else work.how)
            for number, reduced in self.shards.reduced():
                yield TORCH_OPS, TensorList.of([reduced.clone()], [number]), work


def collect(
    param_groups: Iterable[dict[str, Any]],
    *,
    allow_fp16: bool,
    writes: bool,
    choice: Choice,
    clips: bool = False,
    bumps_versions: bool = True,
    shards: LocalShards = _NO_SHARDS,
    tracked: bool = False,
) -> Gradients:
    """Reads the gradients of an optimizer's parameters, in order.

    Args:
        param_groups: Its `param_groups`.
        allow_fp16: Whether float16 gradients are accepted.
        writes: Whether the gradients will be written.
        choice: The kernels.
        clips: Whether to clip: sparse gradients are replaced by coalesced ones, and writes bump
            versions, as in torch's clipping.
        shards: Collector of local shards, which replace distributed gradients.
        bumps_versions: False if gradients are only unscaled, where torch's op bumps none.
        tracked: Whether to list the parameters for tracking; `clips` lists them, too.

    Raises:
        AssertionError: If a parameter is not a tensor.
        ValueError: If a gradient is float16 and `allow_fp16` is false.
        RuntimeError: If the memory of a gradient was freed or is too small for it, or the requested
            backend does not run on its device.
    """
    groups = []
    if tracked or clips:
        # Iterators, too, are consumed once.
        groups = [list(group["params"]) for group in param_groups]
        param_groups = [{"params": params} for params in groups]

    def walk(devices: int, bumps_versions: bool) -> tuple[list[core.GradList], list[Any], Any]:
        return core.walk(param_groups, allow_fp16, writes, devices, bumps_versions, shards)

    regular, irregular, refused = walk(choice.devices, bumps_versions and clips and writes)
    if refused is not None:
        raise _refusal(*refused)
    lists = [(choice.kernels_for(grads.device), grads) for grads in regular]
    if any(kernels is TORCH_OPS for kernels, _ in lists):
        # A GPU without kernels.
        regular, irregular, _ = walk(choice.devices & core.CPU, False)
        lists = [(choice.kernels_for(grads.device), grads) for grads in regular]
    aside = aten.lists_of(irregular, partial(_values_of, coalesce=clips))
    by_torch = [(TORCH_OPS, each) for each in aside]
    return Gradients([*by_torch, *lists], groups, shards)


def of_list(tensors: list[Tensor], device: torch.device) -> Gradients:
    """Returns the gradients of a caller's list, all on one device."""
    kernels = backends.choose().kernels_for(device)
    regular: list[int] = []
    aside: list[int] = []
    tensors = [core.real_view(tensor) for tensor in tensors]
    for number, tensor in enumerate(tensors):
        core.require_storage(tensor)
        known = kernels is not TORCH_OPS and core.list_of([tensor], device) is not None
        (regular if known else aside).append(number)
    lists: list[tuple[Kernels, Batch]] = []
    if aside:
        lists.append((TORCH_OPS, TensorList.of([tensors[i] for i in aside], aside)))
    listed = core.list_of([tensors[i] for i in regular], device, regular)
    if listed is not None and regular:
        lists.append((kernels, listed))
    return Gradients(lists)


def unscaling(scale: Tensor | None, *, divides: bool = False) -> tuple[Factor, Tensor | None]:
    """Returns how a scale unscales, and the factor; None is for unscaled gradients."""
    if scale is None:
        return Factor.NONE, None
    if divides:
        return Factor.DIVIDE, scale.detach().float()
    if scale.dtype is torch.float32:
        return Factor.TIMES_RECIPROCAL, scale
    return Factor.TIMES, inverse(scale)


@torch.no_grad()
def _values_of(param: Tensor, grad: Tensor, coalesce: bool) -> Tensor:
    """Tensor for torch's op: the values of a sparse gradient, as real numbers."""
    if coalesce or grad.dtype in (torch.float16, torch.complex32):
        # Duplicates add up, which overflows easily in float16: the sums are checked.
        param.grad = grad = grad.coalesce()
    return core.real_view(grad._values())


def _refusal(group: int, index: int, param: object) -> Exception:
    place = f"parameter {index} of group {group}"
    if not isinstance(param, Tensor):
        return add_note(_not_a_tensor(param), f"It is {place}.")
    note = (
        f"The gradient is that of {place}, of shape {tuple(param.shape)} and dtype {param.dtype}. "
        "Keep the parameters in float32 and let autocast choose float16; small gradients vanish in "
        "float16 unless a GradScaler scales them. allow_fp16=True takes them all the same, in the "
        "constructor of a GradScaler or of a StepGuard, which scales nothing."
    )
    return add_note(ValueError("Attempting to unscale FP16 gradients."), note)


def _not_a_tensor(param: object) -> Exception:
    """Returns torch's own error, whose text depends on the version."""
    optimizer: Any = SimpleNamespace(param_groups=[{"params": [param]}])
    unused = new_flag(torch.device("cpu"))
    try:
        TorchGradScaler("cpu")._unscale_grads_(optimizer, unused, unused, False)
    except Exception as error:
        return error
    return AssertionError()  # an assert that `python -O` leaves out
