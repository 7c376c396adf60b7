"""Global gradient norm, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ampfast import gradients
from ampfast.backends import Choice, aten
from ampfast.backends.aten import TensorList, p_norm
from ampfast.backends.core import Clip, Factor, Pass, is_scalar
from ampfast.backends.core import share_memory as lists_share_memory
from ampfast.backends.scalars import (
    allocate,
    any_found,
    joint_flag,
    moved,
    new_flag,
    widest,
)
from ampfast.clip.norm_history import ClipLimit, SkipRule
from ampfast.distributed import Agreement, marks_of
from ampfast.errors import float_of
from ampfast.optim.fused_support import divides_by_itself, takes_grad_scaler

# Orders whose norm is computed in the pass of the check.
FUSED_ORDERS = (2.0, math.inf)


@dataclass
class NormTerm:
    """Gradients of one optimizer, or of a list of tensors, in a global norm.

    Attributes:
        optimizer: The optimizer, or the list.
        grads: The gradients, as kernels take them.
        unscaling: How and by what they are unscaled, as by `gradients.unscaling`.
        writes: Whether they will be clipped in place.
        unscales: Whether they are unscaled in place as they are measured, and not clipped.
        flags: found_inf of the check, by device.
        decided: These, where a hook has decided on them; else None.
        sums: Sums of each list, as of a `Pass`.
        counted: The sums that this rank counts; another rank counts the others.
    """

    optimizer: Any
    grads: gradients.Gradients
    unscaling: tuple[Factor, Tensor | None]
    writes: bool
    unscales: bool = False
    flags: dict[torch.device, Tensor] = field(default_factory=dict)
    decided: dict[torch.device, Tensor] | None = None
    sums: list[Tensor] = field(default_factory=list)
    counted: list[Tensor] = field(default_factory=list)

    def unscaling_on(self, device: torch.device) -> tuple[Factor, Tensor | None]:
        """Returns how, and by what factor on a device, gradients are still to be unscaled."""
        how, factor = self.unscaling
        if factor is None or self.unscales:
            return Factor.NONE, None
        return how, moved(factor, device)


def order_of(norm_type: object) -> float:
    """Returns the order of a norm as a float; raises for invalid ones."""
    if type(norm_type) is float and norm_type > 0:
        return norm_type
    if isinstance(norm_type, str):
        order = math.inf if norm_type == "inf" else math.nan
    else:
        order = float_of("norm_type", norm_type)
    if not order > 0:
        raise ValueError(f'norm_type must be a number above 0 or "inf", got {norm_type!r}')
    return order


def measure(
    choice: Choice,
    terms: list[NormTerm],
    order: float,
    limit: float | Callable[[Tensor, Tensor | None], Tensor],
    scale: Tensor | None,
    divisor: Tensor | None = None,
    agreement: Agreement | None = None,
    skip_rule: SkipRule | None = None,
    turns: Sequence[Any] = (),
) -> tuple[Tensor, Tensor]:
    """Global norm and clip coefficient; sets the terms' flags, also of a spike, and `divisor`.

    Writes only the gradients of terms that unscale, of which none may be one that
    `require_writable` refuses. The limit may be a function of the norm and the joint flag. Turns
    get this rank's flags, on which `update` agrees if the collective fails.
    """
    for term in terms:
        _read(term, agreement)
    for turn, term in zip(turns, terms, strict=False):
        turn["found_inf_per_device"], turn.agreement = term.flags, agreement
    lists = [grads for term in terms for _, grads in term.grads.lists]
    lists.sort(key=lambda grads: isinstance(grads, TensorList))
    device = torch.device("cpu") if scale is None else scale.device
    # As in torch, the norm is on the device of the first gradient; it is compared where the norms
    # of earlier steps are.
    place = lists[0].device if lists else device
    device = place if skip_rule is None else device
    dtype = torch.float64 if any(grads.has_float64 for grads in lists) else torch.float32
    norm = allocate(torch.empty, (), dtype=dtype, device=device)
    coefficient = allocate(torch.empty, (), dtype=widest(device), device=device)
    sums = _sums_of_all(terms, order, device, agreement)
    flag = None if skip_rule is None else _joint(terms, device)
    given = None if divisor is None else scale
    rule = () if skip_rule is None else skip_rule
    number = limit if isinstance(limit, float) else math.inf
    clip = Clip(sums, number, order != 2.0, norm, coefficient, given, divisor, flag, *rule)
    if is_scalar(coefficient, torch.float64) and (given is None or _is_float32_on(given, device)):
        choice.kernels_for(device).clip(clip)
    else:
        aten.clip(clip)
    if not isinstance(limit, float):
        found = _joint(terms, device) if flag is None else flag
        coefficient.copy_(_coefficient(norm.to(coefficient.dtype), limit(norm, found)))
        if divisor is not None and scale is not None:
            aten.set_divisor(divisor, scale, coefficient)
    if flag is not None:
        _set_all(terms, flag)
    return norm if place == device else moved(norm, place), coefficient


def _coefficient(norm: Tensor, limit: Tensor) -> Tensor:
    """Clip coefficient of a limit that is a tensor, NaN if nothing is known yet."""
    clipped = aten.clip_coefficient(norm, limit)
    # Limits are of norms in float32.
    clipped = torch.where((norm.float() <= limit) | limit.isnan(), 1.0, clipped)
    # As by a limit that is a number: the norm of finite gradients has overflowed.
    return torch.where(norm.isinf(), 0.0, clipped)


def _sums_of_all(
    terms: list[NormTerm], order: float, device: torch.device, agreement: Agreement | None
) -> Tensor:
    """The sums of a `Clip`; of all ranks if they agree, as the flags of the terms are then."""
    wide, flags = widest(device), [term.flags for term in terms]
    if order in FUSED_ORDERS:
        counted = [each for term in terms for each in term.counted]
        if order != 2.0:
            # Of complex gradients the passes have read the parts.
            others = (_p_norms(term, order, agreement, only_complex=True) for term in terms)
            counted += [norm.repeat(2) for norm in chain.from_iterable(others)]
        counted = counted or [allocate(torch.zeros, 2, dtype=wide, device=device)]
        if len(counted) == 1 and counted[0].device == device:
            sums = counted[0].unsqueeze(0)
        else:
            sums = torch.stack([moved(each, device) for each in counted])
        if agreement is None:
            return sums
        largest = order != 2.0
        mine = sums[:, 1].amax() if largest else sums[:, 0].sum()
        flags, total = agreement.all_reduce_norm(flags, device, mine, largest=largest)
    else:
        norms = [allocate(torch.zeros, (), dtype=wide, device=device)]
        norms += [moved(n, device) for term in terms for n in _p_norms(term, order, agreement)]
        total = torch.linalg.vector_norm(torch.stack(norms), order)
        if agreement is not None:
            flags = agreement.all_reduce(flags, device)
            total = agreement.norm(total, order)
    for term, agreed in zip(terms, flags, strict=True):
        term.flags = agreed if term.decided is None else term.decided
    # A total that is known is in both columns.
    return torch.stack([total, total]).unsqueeze(0)


def require_writable(terms: list[NormTerm], defers: Sequence[bool] = ()) -> None:
    """Raises the error of torch's ops for the first gradient that they refuse to write.

    Optimizers that clip in their own step write their gradients there, without a check.
    """
    for term, deferred in zip(terms, defers or [False] * len(terms), strict=True):
        for aside in term.grads.for_torch() if term.writes or deferred else ():
            if term.unscaling[0] is not Factor.NONE:
                aten.require_unscalable(aside)
            aten.require_writable(aside)


def unscale_as_read(terms: list[NormTerm], order: float, limit: float | ClipLimit) -> bool:
    """Has gradients without a limit unscaled by the pass that measures them; whether it writes."""
    for term in terms if order in FUSED_ORDERS and limit == math.inf else ():
        term.unscales = term.writes
    return any(term.unscales for term in terms)


def take_flags(terms: list[NormTerm], turns: Sequence[Any], *, copies: bool) -> None:
    """Has terms decided by the flags of their optimizers' turns, on which all ranks agree."""
    for turn, term in zip(turns, terms, strict=True):
        flags = term.decided = turn["found_inf_per_device"]
        if copies:
            term.decided = {at: joint_flag([each], each.device) for at, each in flags.items()}


def give_flags(
    terms: list[NormTerm], turns: Sequence[Any], defers: list[bool], divisor: Tensor | None
) -> None:
    """Gives turns the flags of their terms, and the divisor of a clip that their step does."""
    for turn, term, deferred in zip(turns, terms, defers, strict=True):
        if deferred:
            turn.divisor = divisor
        turn["found_inf_per_device"] = term.flags


def share_memory(terms: list[NormTerm]) -> bool:
    """Whether gradients of these terms share memory, as if a parameter is listed twice."""
    return lists_share_memory([group for term in terms for group in term.grads.groups])


def clip_(terms: list[NormTerm], coefficient: Tensor) -> None:
    """Multiplies gradients in place by the inverse scale, then by the coefficient."""
    for term in terms:
        if term.writes and not term.unscales:
            # Their overflows were marked as they were read.
            grads = replace(term.grads, track_on=None)
            grads.run(Pass(True, *term.unscaling, coefficient=coefficient))


def _read(term: NormTerm, agreement: Agreement | None) -> None:
    """Computes flags and sums of a term, some of whose gradients another rank may count."""
    work = Pass(term.unscales, *term.unscaling)
    flags: dict[torch.device, list[Tensor]] = {}
    marks = {} if agreement is None else marks_of(term.grads.groups)
    split = [term.grads] if agreement is None else _split(term, agreement, marks)
    for grads, counts in zip(split, (True, False), strict=False):
        found, sums = grads.run(work, reduces=False)
        term.sums += sums
        term.counted += sums if counts else []
        for device, flag in found.items():
            flags.setdefault(device, []).append(flag)
    if agreement is not None:
        # Partial sums are replaced by reduced ones.
        for number, reduced in term.grads.shards.reduced():
            row = aten.norms([reduced], *term.unscaling_on(reduced.device))
            term.sums.append(row)
            if term.grads.track_on is not None:
                table, now = term.grads.track_on(reduced.device)
                aten.mark_(table, now, [number], row[1:])
            counts = agreement.counts(term.grads.layouts[number], marks.get(number))
            term.counted += [row] if counts else []
            flags.setdefault(row.device, []).append((~row[1].isfinite()).float())
        for _, each in term.grads.lists:
            # A device whose shards are all empty has no flag yet.
            flags.setdefault(each.device, [new_flag(each.device)])
    term.flags = {
        device: found[0] if len(found) == 1 else any_found(found, device)
        for device, found in flags.items()
    }
    if term.decided is not None:
        term.flags = term.decided


def _split(
    term: NormTerm, agreement: Agreement, marks: dict[int, tuple[int, ...]]
) -> tuple[gradients.Gradients, gradients.Gradients]:
    """Splits the gradients into those whose norm this rank counts, and the others."""
    # The norm of a partial sum is not that of a summand.
    counts = {
        number: not layout.is_partial and agreement.counts(layout, marks.get(number))
        for number, layout in term.grads.layouts.items()
    }
    for number, mark in marks.items():
        counts.setdefault(number, agreement.counts(None, mark))
    counts_others = agreement.counts(None)
    numbers = {number for number, here in counts.items() if here != counts_others}
    apart, others = term.grads.split(numbers) if numbers else (gradients.Gradients([]), term.grads)
    return (others, apart) if counts_others else (apart, others)


def _is_float32_on(tensor: Tensor | None, device: torch.device) -> bool:
    return tensor is not None and is_scalar(tensor, torch.float32) and tensor.device == device


def _joint(terms: list[NormTerm], device: torch.device) -> Tensor | None:
    """The flag of all gradients of a norm, on its device; None for none."""
    flags = [flag for term in terms for flag in term.flags.values()]
    if len(flags) == 1 and _is_float32_on(flags[0], device):
        return flags[0]
    return joint_flag(flags, device) if flags else None


def _set_all(terms: list[NormTerm], found: Tensor) -> None:
    """Replaces each flag by the joint flag, on its device."""
    for term in terms:
        term.flags = {
            at: flag if flag is found else moved(found, flag.device, copy=True)
            for at, flag in term.flags.items()
        }


def _p_norms(
    term: NormTerm, order: float, agreement: Agreement | None, only_complex: bool = False
) -> Iterator[Tensor]:
    """Norm, of an order without kernels, of each gradient that this rank counts."""
    grads, groups = term.optimizer, term.grads.groups
    if not isinstance(grads, list):
        grads = [param.grad for params in groups for param in params]
    marks = {} if agreement is None else marks_of(groups)
    for number, grad in enumerate(grads):
        if only_complex and (grad is None or not (grad.is_complex() and grad.numel())):
            continue
        layout = term.grads.layouts.get(number)
        if grad is not None and layout is not None:
            grad = layout.local_tensor(grad)
        counts = agreement is None or agreement.counts(layout, marks.get(number))
        if grad is not None and counts:
            values = grad._values() if grad.is_sparse else grad
            yield p_norm(values, order, *term.unscaling_on(values.device))


def optimizers_of(optimizer: object) -> list[Any]:
    """Returns the optimizers of a call: one, or a list or tuple of them."""
    given: Any = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    if not given:
        raise ValueError("the list of optimizers is empty")
    for each in given:
        if not hasattr(each, "param_groups"):
            raise TypeError(
                "expected an optimizer or a list of optimizers, not parameters; got "
                f"{type(each).__name__}, which has no param_groups"
            )
    if len(given) > 1:
        if len({id(each) for each in given}) < len(given):
            raise ValueError("the same optimizer is given twice")
        params = [p for each in given for group in each.param_groups for p in group["params"]]
        if len({id(param) for param in params}) < len(params):
            raise ValueError("two optimizers share a parameter, which would be unscaled twice")
    return list(given)


def can_defer(optimizer: Any, overridden: bool) -> bool:
    """Whether an optimizer can clip in its step; raises ValueError if it cannot even unscale."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        raise ValueError(
            f"in_place=False needs an optimizer that takes grad_scale, which "
            f"{type(optimizer).__name__} does not: create it with fused=True, or use "
            "in_place=True"
        )
    if not divides_by_itself(optimizer):
        return False
    if takes_grad_scaler(optimizer.step):
        return False
    refuse_own_grad_scale(optimizer)
    if overridden:
        raise ValueError(
            "in_place=False would bypass this scaler's override of unscale_, _unscale_grads_ or "
            "_check_inf_per_device: use in_place=True"
        )
    return True


def refuse_own_grad_scale(optimizer: object) -> None:
    """Raises ValueError if the user set the `grad_scale` by which the optimizer is to clip."""
    if hasattr(optimizer, "grad_scale"):
        raise ValueError(
            f"in_place=False sets the grad_scale of {type(optimizer).__name__}, which has one "
            "already: delete it, or use in_place=True"
        )


def skip_together(terms: list[NormTerm], device: torch.device) -> None:
    """Skips all optimizers if one must skip: its overflow is in the coefficient of all."""
    if len(terms) > 1:
        _set_all(
            terms, joint_flag([flag for each in terms for flag in each.flags.values()], device)
        )
