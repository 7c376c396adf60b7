"""From an optimizer's gradients to the kernels, or to torch's ops for irregular ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from ampfast import backends
from ampfast.backends import Choice, Kernels, Update, aten, cpu
from ampfast.backends.cpu import Track
from ampfast.distributed import Layout, LocalShards
from ampfast.errors import add_note

Flags = dict[torch.device, Tensor]

__all__ = [
    "SIXTEEN_BIT",
    "Copies",
    "Gradients",
    "UnscaleFactor",
    "cast_",
    "check_",
    "collect",
    "inverse",
    "local_tensor",
    "narrow_on_devices",
    "narrow_pairs",
    "new_flag",
    "norms",
    "of_list",
    "stamp_of",
    "unscale_",
]

SIXTEEN_BIT = (torch.float16, torch.bfloat16)
_PLAIN = (Tensor, torch.nn.Parameter)


def _is_dense(grad: Tensor) -> bool:
    return type(grad) is Tensor and grad.layout is torch.strided


@dataclass(frozen=True)
class Gradients:
    """Gradients of one pass.

    Attributes:
        lists: Regular gradients, one list per device.
        set_aside: Gradients for torch's own op, by device: sparse, overlapping, subclasses,
            complex, or on a device without kernels.
        numbers: Numbers of the parameters whose gradients are set aside, by device.
        groups: All parameters by group, with or without gradient, for tracking and norms.
        shards: Local shards of the distributed gradients, or None if none is distributed.
        track_on: Tracking tables by device, or None.
        casts: Casts by a pass that writes, which are to be finished, or None.
    """

    lists: list[cpu.GradList]
    set_aside: dict[torch.device, list[Tensor]]
    numbers: dict[torch.device, list[int]] = field(default_factory=dict)
    groups: list[list[Tensor]] = field(default_factory=list)
    shards: LocalShards | None = None
    track_on: Callable[[torch.device], Track] | None = None
    casts: cpu.Casts | None = None

    @property
    def layouts(self) -> dict[int, Layout]:
        """Layouts of distributed gradients, by parameter number."""
        return {} if self.shards is None else self.shards.layouts

    def reduced(self) -> Iterator[tuple[int, Tensor]]:
        """Yields parameter number and reduced local tensor of gradients that are partial sums."""
        return iter(()) if self.shards is None else self.shards.reduced()

    def track(self, device: torch.device) -> Track | None:
        """Returns the tracking tables on a device, or None."""
        return None if self.track_on is None else self.track_on(device)

    def split(self, numbers: set[int]) -> tuple[Gradients, Gradients]:
        """Splits the gradients into those of the parameters of these numbers, and the others."""
        inside: list[cpu.GradList] = []
        outside: list[cpu.GradList] = []
        for grads in self.lists:
            for some, lists in zip(grads.split(numbers), (inside, outside), strict=True):
                if some.chunks:
                    lists.append(some)
        return (
            self._only(inside, lambda number: number in numbers),
            self._only(outside, lambda number: number not in numbers),
        )

    def _only(self, lists: list[cpu.GradList], has: Callable[[int], bool]) -> Gradients:
        aside: dict[torch.device, list[Tensor]] = {}
        numbers: dict[torch.device, list[int]] = {}
        for device, tensors in self.set_aside.items():
            for number, tensor in zip(self.numbers[device], tensors, strict=True):
                if has(number):
                    aside.setdefault(device, []).append(tensor)
                    numbers.setdefault(device, []).append(number)
        return replace(self, lists=lists, set_aside=aside, numbers=numbers)


def collect(
    param_groups: Iterable[dict[str, Any]],
    *,
    allow_fp16: bool,
    writes: bool,
    choice: Choice,
    clips: bool = False,
    shards: LocalShards | None = None,
    tracked: bool = False,
    casts: cpu.Casts | None = None,
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
        tracked: Whether to list the parameters for tracking; `clips` lists them, too.
        casts: Casts of 16-bit gradients, which are then accepted; those that the kernels cannot
            cast are cast here, if the pass writes.

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
    allow_fp16 = allow_fp16 or casts is not None
    casts = casts if writes else None

    def walk(bumps_versions: bool) -> tuple[list[cpu.GradList], list[Any], Any]:
        if casts is not None:
            _cast_by_torch(cpu.irregular_casts(param_groups, choice.devices))
        return cpu.walk(
            param_groups, allow_fp16, writes, choice.devices, bumps_versions, shards, casts
        )

    lists, irregular, refused = walk(clips and writes)
    if refused is not None:
        raise _refusal(*refused)
    if any(choice.kernels_for(grads.device) is None for grads in lists):
        # One of several GPUs differs, which the choice has recorded.
        lists, irregular, _ = walk(False)
    set_aside: dict[torch.device, list[Tensor]] = {}
    numbers: dict[torch.device, list[int]] = {}
    if irregular:
        with torch.no_grad():
            for param, grad, number in irregular:
                values = _values_of(param, grad, clips)
                set_aside.setdefault(values.device, []).append(values)
                numbers.setdefault(values.device, []).append(number)
    if shards is not None and not shards.layouts:
        shards = None
    return Gradients(lists, set_aside, numbers, groups, shards, casts=casts)


def of_list(tensors: list[Tensor], device: torch.device) -> Gradients:
    """Returns the gradients of a caller's list, all on one device with kernels."""
    regular: list[int] = []
    irregular: list[int] = []
    for number, tensor in enumerate(tensors):
        known = cpu.list_of([tensor], device) is not None
        (regular if known else irregular).append(number)
    listed = cpu.list_of([tensors[number] for number in regular], device, regular)
    set_aside = {device: [tensors[number] for number in irregular]} if irregular else {}
    return Gradients([listed] if listed and regular else [], set_aside, {device: irregular})


class UnscaleFactor:
    """Factor that unscales: the inverse scale, or the scale itself, on any device.

    Attributes:
        value: One-element float32, or None for unscaled gradients.
        is_scale: Whether the value is the scale.
    """

    def __init__(self, value: Tensor | None, *, is_scale: bool = False) -> None:
        self.value, self.is_scale = value, is_scale
        self._copies = Copies(value)
        self._inverses = Copies(None) if is_scale else self._copies

    @classmethod
    def of_scale(cls, scale: Tensor | None) -> UnscaleFactor:
        if scale is None or scale.dtype is torch.float32:
            return cls(scale, is_scale=scale is not None)
        return cls(inverse(scale))

    def on(self, device: torch.device) -> Tensor:
        """Returns the value on a device; 1 where there is none."""
        return self._copies[device]

    def inverse_on(self, device: torch.device) -> Tensor | None:
        """Returns the inverse scale on a device, if there is one."""
        if self.value is None:
            return None
        if device not in self._inverses and self.is_scale:
            self._inverses[device] = inverse(self._copies[device])
        return self._inverses[device]


def unscale_(
    gradients: Gradients,
    factor: UnscaleFactor,
    *,
    choice: Choice,
    found_inf: Tensor | None = None,
    update: Update | None = None,
    before_write: Callable[[], None] | None = None,
    peaks: list[Tensor] | None = None,
) -> Flags:
    """Unscales in place; returns a new found_inf for each device that has a gradient.

    Args:
        gradients: The gradients.
        factor: The factor.
        choice: The kernels.
        found_inf: Initial value of the new flags, zero by default.
        update: Applied after the check, if all gradients are in one list.
        before_write: Called right before the first write.
        peaks: Gets the largest unscaled magnitude of each list, as a one-element tensor.
    """
    _measure(gradients, choice)
    flags: Flags = {}
    # First gradients that torch may refuse, before any other is written.
    if len(gradients.set_aside) > 1 or before_write is not None:
        for tensors in gradients.set_aside.values():
            aten.require_unscalable(tensors)
    if before_write is not None and (gradients.set_aside or gradients.lists):
        before_write()
    for device, tensors in gradients.set_aside.items():
        flags[device] = new_flag(device, found_inf)
        aten.unscale_(tensors, cast(Tensor, factor.inverse_on(device)), flags[device])
        _mark(gradients, device)
        if peaks is not None:
            peaks.append(_peak_of(tensors, None))
    for grads in gradients.lists:
        device = grads.device
        if found_inf is not None and device not in flags:
            flags[device] = new_flag(device, found_inf)
        flags[device] = _kernels(choice, device).unscale_(
            grads,
            factor.on(device),
            is_scale=factor.is_scale,
            found_inf=flags.get(device),
            update=_riding(gradients, update),
            track=gradients.track(device),
            norms=_row_for(peaks, device),
        )
    if gradients.casts is not None:
        gradients.casts.finish()
    _check_reduced(gradients, flags, None, peaks)
    return flags


def check_(
    gradients: Gradients,
    grad_scale: Tensor | None = None,
    *,
    choice: Choice,
    update: Update | None = None,
    peaks: list[Tensor] | None = None,
) -> Flags:
    """Checks gradients; returns a new found_inf for each device that has a gradient. Reads only.

    Args:
        gradients: The gradients.
        grad_scale: One-element float32 that will divide the gradients, or None.
        choice: The kernels.
        update: Applied after the check, if all gradients are in one list.
        peaks: As for `unscale_`, of the values once divided.
    """
    _measure(gradients, choice)
    flags: Flags = {}
    divisors = None if grad_scale is None else Copies(grad_scale)
    for device, tensors in gradients.set_aside.items():
        flags[device] = new_flag(device)
        divisor = None if divisors is None else divisors[device]
        aten.check_(tensors, flags[device], divisor)
        _mark(gradients, device, divisor)
        if peaks is not None:
            peaks.append(_peak_of(tensors, divisor))
    for grads in gradients.lists:
        device = grads.device
        flags[device] = _kernels(choice, device).check_(
            grads,
            None if divisors is None else divisors[device],
            found_inf=flags.get(device),
            update=_riding(gradients, update),
            track=gradients.track(device),
            norms=_row_for(peaks, device),
        )
    _check_reduced(gradients, flags, divisors, peaks)
    return flags


def norms(
    gradients: Gradients, factor: UnscaleFactor, *, choice: Choice, writes: bool
) -> tuple[Flags, list[Tensor]]:
    """Computes norms of the unscaled values and checks them, in a single read; no writes.

    Nothing is written.

    Args:
        gradients: The gradients; sparse ones must be coalesced.
        factor: The factor.
        choice: The kernels.
        writes: Whether they will be clipped in place: raises torch's refusals beforehand.

    Returns:
        New flags as from `unscale_`, and for each list, on its device, the result of `cpu.norms`.
    """
    _measure(gradients, choice)
    flags: Flags = {}
    rows: list[Tensor] = []
    for device, tensors in gradients.set_aside.items():
        flags[device] = new_flag(device)
        inv_scale = factor.inverse_on(device)
        if writes:
            if inv_scale is not None:
                aten.check_(tensors, flags[device])
            aten.require_writable(tensors)
        rows.append(aten.norms(tensors, inv_scale))
        _mark(gradients, device, None if inv_scale is None else inv_scale.reciprocal())
        flags[device].masked_fill_(~rows[-1][1].isfinite(), 1.0)
    for grads in gradients.lists:
        device = grads.device
        row = torch.empty(2, dtype=torch.float64, device=device)
        found = _kernels(choice, device).norms(
            grads,
            factor.on(device),
            is_scale=factor.is_scale,
            norms=row,
            track=gradients.track(device),
        )
        if device in flags:
            found = aten.any_found([flags[device], found], device)
        flags[device] = found
        rows.append(row)
    return flags, rows


def cast_(param_groups: Iterable[dict[str, Any]], casts: cpu.Casts, choice: Choice) -> None:
    """Casts 16-bit gradients to float32, without a factor.

    Args:
        param_groups: As for `collect`.
        casts: As for `collect`.
        choice: The kernels.
    """
    found = collect(param_groups, allow_fp16=True, writes=True, choice=choice, casts=casts)
    for grads in found.lists:
        pairs = grads.pairs()
        if pairs.chunks:
            one = torch.ones((), dtype=torch.float32, device=grads.device)
            _kernels(choice, grads.device).unscale_(pairs, one, is_scale=False)
    casts.finish()


@torch.no_grad()
def _cast_by_torch(params: list[Tensor]) -> None:
    grads = [cast(Tensor, param.grad) for param in params]
    dense = [grad for grad in grads if _is_dense(grad)]
    wide = [torch.empty_like(grad, dtype=torch.float32) for grad in dense]
    if wide:
        torch._foreach_copy_(wide, dense)
    done = iter(wide)
    for param, grad in zip(params, grads, strict=True):
        cast_grad = next(done) if _is_dense(grad) else grad.to(torch.float32)
        if param.grad_dtype not in (None, torch.float32):
            param.grad_dtype = None
        param.grad = cast_grad


def narrow_pairs(pairs: cpu.GradList, found_inf: Tensor | None) -> bool:
    """Narrows a list of pairs by kernels; False, with nothing written, if they cannot."""
    kernels = backends.choose().kernels_for(pairs.device)
    if kernels is None or not (found_inf is None or cpu.is_scalar(found_inf, torch.float32)):
        return False
    if pairs.chunks:
        at = None if found_inf is None else aten.moved(found_inf, pairs.device)
        kernels.narrow_(pairs, at)
    return True


def narrow_on_devices(
    params: list[Tensor], weights: list[Tensor], found_inf: Tensor | None
) -> None:
    """Rounds master weights to parameters on any devices, DTensors too, unless a flag is set.

    Args:
        params: 16-bit parameters.
        weights: float32 tensors of their shapes and devices.
        found_inf: One-element float32, or None.
    """
    flags = None if found_inf is None else Copies(found_inf.detach())
    by_device: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
    for param, weight in zip(params, weights, strict=True):
        narrow, wide = by_device.setdefault(param.device, ([], []))
        narrow.append(local_tensor(param))
        wide.append(local_tensor(weight))
    for device, (narrow, wide) in by_device.items():
        flag = None if flags is None else flags[device]
        pairs = cpu.list_of(narrow, device, None, wide)
        if pairs is not None and narrow_pairs(pairs, flag):
            torch.autograd.graph.increment_version(narrow)
        else:
            aten.narrow_(narrow, wide, flag)


def local_tensor(tensor: Tensor) -> Tensor:
    """Returns the local shard of a DTensor, else the tensor."""
    if type(tensor) in _PLAIN:
        return tensor
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def stamp_of(param_groups: list[dict[str, Any]]) -> object:
    """Returns a part for each parameter, which differs after an edit or in another group.

    Edits are those that autograd sees.
    """
    stamp = cpu.stamp_of(param_groups)
    if stamp is not None:
        return stamp
    stamps = []
    for place, group in enumerate(param_groups):
        for param in group["params"]:
            each, needs = local_tensor(param), param.requires_grad or param.grad is not None
            seen = (each.data_ptr(), each._version, each.dtype, each.shape, each.stride())
            stamps.append((id(param), place, needs, seen))
    return stamps


def inverse(scale: Tensor) -> Tensor:
    """Returns the inverse scale as float32, from a float64 reciprocal if the device has one."""
    if scale.device.type == "mps":
        return scale.reciprocal()
    return scale.double().reciprocal().float()


def new_flag(device: torch.device, found_inf: Tensor | None = None) -> Tensor:
    """Returns a new 0-dim float32 flag: 0, or a copy of another one."""
    if found_inf is None:
        return torch.zeros((), dtype=torch.float32, device=device)
    return aten.moved(found_inf, device, copy=True)


class Copies(dict[torch.device, Tensor]):
    """Copies of a scalar by device, made on demand; float32 ones of None."""

    def __init__(self, scalar: Tensor | None) -> None:
        super().__init__({} if scalar is None else {scalar.device: scalar})

    def __missing__(self, device: torch.device) -> Tensor:
        for tensor in self.values():
            return self.setdefault(device, aten.moved(tensor, device))
        return self.setdefault(device, torch.ones((), dtype=torch.float32, device=device))


def _measure(gradients: Gradients, choice: Choice) -> None:
    """Measures the gradient health of each parameter, before unscaling."""
    if gradients.track_on is None:
        return
    for device, tensors in gradients.set_aside.items():
        health = gradients.track_on(device).health
        if health is not None:
            aten.measure_(health, gradients.numbers[device], tensors)
    for grads in gradients.lists:
        health = gradients.track_on(grads.device).health
        if health is not None:
            _kernels(choice, grads.device).measure_(grads, health)


def vanishing_shares(gradients: Gradients) -> list[Tensor]:
    """Returns, by device, the share of measured nonzero values that float16 rounds away."""
    shares = []
    for device in {*gradients.set_aside, *(grads.device for grads in gradients.lists)}:
        track = gradients.track(device)
        if track is not None and track.health is not None:
            _, nonzero, vanishing, *_ = track.health.sum(0).to(aten.widest(device)).unbind()
            shares.append(vanishing / nonzero.clamp(min=1))
    return shares


def _mark(gradients: Gradients, device: torch.device, divisor: Tensor | None = None) -> None:
    """Marks overflows of the gradients set aside on a device, if they are tracked."""
    track = gradients.track(device)
    if track is not None:
        aten.mark_(track, gradients.numbers[device], gradients.set_aside[device], divisor)


def _check_reduced(
    gradients: Gradients, flags: Flags, divisors: Copies | None, peaks: list[Tensor] | None
) -> None:
    """Checks reduced partial sums, as the optimizer uses them."""
    for number, reduced in gradients.reduced():
        device = reduced.device
        divisor = None if divisors is None else divisors[device]
        copy = reduced.clone()  # torch's op writes as it checks
        aten.check_([copy], flags.setdefault(device, new_flag(device)), divisor)
        if peaks is not None:
            peaks.append(_peak_of([copy], divisor))
        track = gradients.track(device)
        if track is not None:
            aten.mark_(track, [number], [copy], divisor)


def _row_for(peaks: list[Tensor] | None, device: torch.device) -> Tensor | None:
    """The row of norms for a pass whose largest magnitude joins the peaks."""
    if peaks is None:
        return None
    row = torch.zeros(2, dtype=torch.float64, device=device)
    peaks.append(row[1])
    return row


def _peak_of(tensors: list[Tensor], divisor: Tensor | None) -> Tensor:
    largest = aten.norms(tensors)[1]
    return largest if divisor is None else largest / divisor.detach().reshape(())


def _kernels(choice: Choice, device: torch.device) -> Kernels:
    kernels = choice.kernels_for(device)
    if kernels is None:
        raise RuntimeError(f"no backend has kernels for gradients on {device}")
    return kernels


def _riding(gradients: Gradients, update: Update | None) -> Update | None:
    if update is None or len(gradients.lists) != 1 or gradients.set_aside:
        return None
    return update if gradients.lists[0].device == update.scale.device else None


def _values_of(param: Tensor, grad: Tensor, coalesce: bool) -> Tensor:
    """Tensor for torch's op: the values of a sparse gradient, else the gradient."""
    if not grad.is_sparse:
        return grad
    if coalesce or grad.dtype is torch.float16:
        # Duplicates add up, which overflows easily in float16: the sums are checked.
        param.grad = grad = grad.coalesce()
    return grad._values()


def _refusal(group: int, index: int, param: object) -> Exception:
    place = f"parameter {index} of group {group}"
    if not isinstance(param, Tensor):
        found = f"expected param to be torch.Tensor, got {type(param).__name__}"
        return add_note(AssertionError(found), f"It is {place}.")
    note = (
        f"The gradient is that of {place}, of shape {tuple(param.shape)} and dtype {param.dtype}. "
        "Keep the parameters in float32 and let autocast choose float16, or say "
        "GradScaler(allow_fp16=True) to unscale float16 gradients all the same."
    )
    return add_note(ValueError("Attempting to unscale FP16 gradients."), note)
