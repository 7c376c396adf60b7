"""torch's own ops over lists of tensors: the reference, and the path of irregular gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ampfast.backends import core
from ampfast.backends.core import (
    CLIP_EPSILON,
    LEAST_DEVIATION,
    SPIKE,
    SPIKE_BOUND,
    Clip,
    Factor,
    Pass,
    Update,
    compiled,
    norm_layout,
    state_layout,
)
from ampfast.backends.cuda_graphs import refuse_capture
from ampfast.backends.scalars import allocate, inverse, moved, new_flag, widest

_COUNTED = state_layout.COUNTED
_check_and_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_


class _Group(NamedTuple):
    """Gradients that an op takes at once, or a single one.

    Attributes:
        numbers: Numbers of their parameters.
        tensors: The gradients.
        is_usual: Whether torch's multi-tensor ops take them as they are: plain tensors of one dtype
            whose elements do not overlap. Else it is one gradient of any kind.
    """

    numbers: list[int]
    tensors: list[Tensor]
    is_usual: bool

    def norms(self, order: float) -> list[Tensor]:
        """Norm of each gradient, the 2-norm in the widest dtype; none of empty ones."""
        first = self.tensors[0]
        if not first.numel():
            return []
        if not self.is_usual:
            return [p_norm(first, order)]
        # The maximum is exact in any dtype.
        dtype = None if order == torch.inf else widest(first.device)
        return list(torch._foreach_norm(self.tensors, order, dtype=dtype))


@dataclass(frozen=True)
class TensorList:
    """Gradients of one device for torch's ops: sparse, overlapping, subclasses and others.

    Attributes:
        device: The device.
        groups: The gradients, first the ones which torch's ops may refuse.
    """

    device: torch.device
    groups: list[_Group]

    @classmethod
    def of(cls, tensors: list[Tensor], numbers: Sequence[int] = (0,)) -> TensorList:
        """Returns a list of tensors of one device."""
        [listed] = lists_of(zip(tensors, tensors, numbers, map(core.kind_of, tensors), strict=True))
        return listed

    @property
    def has_float64(self) -> bool:
        return any(group.tensors[0].dtype is torch.float64 for group in self.groups)

    def split(self, numbers: set[int]) -> tuple[TensorList, TensorList]:
        """Splits the list into the gradients of the parameters of these numbers, and the others."""
        inside, outside = TensorList(self.device, []), TensorList(self.device, [])
        for group in self.groups:
            for half, is_in in ((inside, True), (outside, False)):
                pairs = zip(group.numbers, group.tensors, strict=True)
                found = [pair for pair in pairs if (pair[0] in numbers) is is_in]
                if found:
                    there = [number for number, _ in found], [tensor for _, tensor in found]
                    half.groups.append(_Group(*there, group.is_usual))
        return inside, outside


def lists_of(
    found: Iterable[tuple[Any, Tensor, int, int]],
    values_of: Callable[[Any, Tensor], Tensor] | None = None,
) -> list[TensorList]:
    """Returns the gradients that a walk has set apart, in a list for each device.

    Args:
        found: Parameters, gradients, numbers of the parameters, and kinds of the gradients.
        values_of: Makes a tensor for torch's ops of a parameter and its sparse gradient.
    """
    others: list[_Group] = []
    usual: dict[int, _Group] = {}
    for param, grad, number, kind in found:
        if kind < 0:
            values = values_of(param, grad) if values_of is not None and grad.is_sparse else grad
            others.append(_Group([number], [values], False))
            continue
        group = usual.setdefault(kind, _Group([], [], True))
        group.numbers.append(number)
        group.tensors.append(grad)
    lists: dict[torch.device, TensorList] = {}
    for group in (*others, *usual.values()):
        device = group.tensors[0].device
        lists.setdefault(device, TensorList(device, [])).groups.append(group)
    return list(lists.values())


@torch.no_grad()
def run(grads: TensorList, work: Pass) -> Tensor:
    """Runs a pass over a list; returns its found_inf. It includes no update.

    Its ops are as many for a thousand gradients of a dtype as for one.
    """
    sums, divides, factor = work.sums, work.how == Factor.DIVIDE, _factor_of(work)
    found_inf = new_flag(grads.device) if work.found_inf is None else work.found_inf
    if work.coefficient is not None:
        _multiply_(grads, factor, work.coefficient)
        return found_inf
    observes = sums is not None or work.marks is not None
    measures = observes or (factor is not None and _may_overflow(factor, divides))
    if measures and sums is None and not work.write:
        # A clip measures what it may yet write, which was refused nothing.
        require_unscalable(grads, found_inf)
    squares, peaks = [], []
    for group in grads.groups:
        # Norms come before the write, for products that are not rounded to 16 bits.
        norms = group.norms(2.0) if sums is not None else []
        if work.write or not measures:
            by = factor if work.write and factor is not None else _one(grads.device)
            _check_and_unscale_(group.tensors, found_inf, by)
        used = _peaks(group, work, factor) if measures else []
        if used:
            # torch's op checks values before it multiplies them: a product may have overflowed.
            by = _one(grads.device) if observes or factor is None else factor
            _check_and_unscale_(used, found_inf, by)
            if work.marks is not None and work.now is not None:
                mark_(work.marks, work.now, group.numbers, used[0])
        if norms:
            peaks += used
            squares.append(torch.stack(norms))
            if factor is not None:
                squares[-1] = _product(squares[-1], factor, divides)
            if work.marks is not None:
                table = _by_parameter(work.marks, group.numbers, squares[-1].square())
                squares_in(work.marks).add_(table)
    if sums is not None:
        sums.zero_()
        if squares:
            sums[0] = torch.cat(squares).square().sum()
            sums[1] = torch.cat([peak.to(sums.dtype) for peak in peaks]).amax()
    return found_inf


def _factor_of(work: Pass) -> Tensor | None:
    """What values are multiplied or, by `Factor.DIVIDE`, divided by."""
    if work.factor is None or work.how == Factor.NONE:
        return None
    return inverse(work.factor) if work.how == Factor.TIMES_RECIPROCAL else work.factor


def _peaks(group: _Group, work: Pass, factor: Tensor | None) -> list[Tensor]:
    """Largest magnitude of each gradient as it is used, in one tensor, or as they were written.

    None of empty gradients, and of subclasses only for sums: they define their own norms.
    """
    first, observes = group.tensors[0], work.sums is not None or work.marks is not None
    if not (group.is_usual or work.sums is not None or type(first) is Tensor):
        return []
    peaks = group.norms(torch.inf)
    if peaks and (observes or not work.write):
        by = None if work.write else factor
        peaks = [_used(torch.stack(peaks), first.dtype, by, work.how == Factor.DIVIDE)]
    return peaks


def _may_overflow(factor: Tensor, divides: bool) -> bool:
    """Whether finite values may be infinite as they are used.

    On a CPU, where norms take long, the factor shows it. On other devices a read of the values
    does; a check uses this read instead of torch's op, which writes.
    """
    if not _is_on_host(factor):
        return True
    number = abs(factor.item())
    return not (number >= 1 if divides else number <= 1)


def _one(device: torch.device) -> Tensor:
    return allocate(torch.ones, (), dtype=torch.float32, device=device)


def _is_on_host(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.is_cpu


def _used(peaks: Tensor, dtype: torch.dtype, factor: Tensor | None, divides: bool) -> Tensor:
    """Largest magnitudes as they are used, of gradients of a dtype; 16-bit ones in float32.

    Products are rounded as when they are written; fused optimizers divide in float32.
    """
    dtype = dtype.to_real()
    if factor is None:
        return peaks.to(dtype).to(torch.promote_types(dtype, torch.float32))
    used = _product(peaks.to(dtype), factor, divides)
    return used if divides else used.abs().to(dtype).to(used.dtype)


def _multiply_(grads: TensorList, factor: Tensor | None, coefficient: Tensor) -> None:
    """Multiplies gradients in place by the inverse scale, if any, then by a coefficient."""
    flag = new_flag(grads.device)
    for group in grads.groups:
        if factor is not None:
            _check_and_unscale_(group.tensors, flag, factor)
        first = group.tensors[0]
        # It writes in place as torch's clip, which counts where a gradient overlaps itself.
        is_strided = type(first) is Tensor and first.layout is torch.strided
        if is_strided and first.dtype.itemsize >= 4:
            torch._foreach_mul_(group.tensors, coefficient.to(first.dtype))
        elif group.is_usual and factor is not None:
            # It multiplies 16-bit values in float32.
            _check_and_unscale_(group.tensors, flag, coefficient.float())
            torch.autograd.graph.increment_version(group.tensors)  # which torch's op leaves
        else:
            for grad in group.tensors:
                grad.copy_(_product(grad, coefficient))


class _State:
    """Words of a scaler's state, as the ops of an update take them, and the memory of one.

    Attributes:
        counters: The counters that an update changes.
        steps: The first of them, of shape (1,).
        ring: The last steps, a row for each.
        before: float32 memory for the scale before the update, in the new row of the ring.
        norm: float32 memory for the norm there.
        status: The status there.
        row: The new row.
        left: float32 memory for numbers that are compared.
        right: What they are compared with.
        compared: The values of both that are no constant zeros at the end.
        bits: What is larger to the left: status, and of each counter whether it grows and stays.
        grows: These.
        stays: These.
        zero: 0-dim float32.
        one: 0-dim float32.
    """

    @torch.inference_mode(False)
    def __init__(self, words: Tensor) -> None:
        refuse_capture("the first update without kernels")
        long: Any = {"dtype": torch.int64, "device": words.device}
        floats: Any = {**long, "dtype": torch.float32}
        # No view, which would hold the words.
        state = allocate(torch.empty, 0, **long).set_(words)  # type: ignore[call-overload]
        memory = allocate(torch.zeros, 3 + 2 * _COUNTED, **long)
        numbers = allocate(torch.zeros, 2 * (2 + 2 * _COUNTED), **floats)
        self.zero, self.one = (allocate(torch.full, (), each, **floats) for each in (0.0, 1.0))
        self.counters, self.steps = state[:_COUNTED], state[:1]
        self.ring = state[state_layout.RING :].view(-1, state_layout.RING_WORDS)
        # The lower half of a word.
        halves = memory.view(torch.float32)
        self.before, self.norm = halves[0], halves[2 * state_layout.RING_NORM]
        self.status, self.row, self.bits = memory[1], memory[:3].view(1, 3), memory[1:]
        self.left, self.right = numbers.chunk(2)
        self.compared = numbers[: len(self.left) + 2 + state_layout.BACKOFFS + 1]
        self.grows, self.stays = memory[3:].chunk(2)


def update(given: Update, limits: Any = None, may_spike: bool = False) -> bool:
    """torch's `_amp_update_scale_`, except that a tracker beyond a lowered interval grows, too.

    A state on a CPU is the compiled core's; on other devices torch's ops write it, with no copy to
    the host.

    Args:
        given: As for `Kernels.update`.
        limits: What the state's scale is held to (`loss_scale.Limits`); None, with a state on
            another device than a CPU, for False.
        may_spike: Whether a flag may be that of a spike, as a norm was compared.
    """
    if _is_on_host(given.scale):
        # The core takes no tensors under a mode, which an update does not concern.
        with _disable_current_modes():
            if compiled.update(given):
                return True
    if given.state is not None and limits is None:
        return False
    _update(given, limits, may_spike)
    return True


@torch.no_grad()
def _update(given: Update, limits: Any, may_spike: bool) -> None:
    """`update` by torch's ops, of which the host reads nothing."""
    words: Any = given.state
    interval, norm = given.growth_interval, given.norm
    first, *others = [moved(flag, given.scale.device) for flag in given.found_infs]
    # Out of place, since callers may hold the flags.
    found = given.scale, given.growth_tracker, sum(others, start=first)
    scale, tracker, flag = (each.reshape(()) if each.dim() else each for each in found)
    rule = given.growth_factor, given.backoff_factor, interval
    tracker_before = tracker.clone() if may_spike else tracker
    # torch's op grows where the tracker equals the interval, which may have been lowered.
    if isinstance(interval, int) and interval >= 1:
        tracker.clamp_(max=min(interval - 1, 2**31 - 1))
    if words is None:
        torch._amp_update_scale_(scale, tracker, flag, *rule)
        return
    state: _State | None = getattr(words, "_of_ops", None)
    if state is None:
        state = words._of_ops = _State(words)
    before, zero, one = state.before, state.zero, state.one
    before.copy_(scale)
    spiked, overflow = zero, flag
    if may_spike:
        spiked = (flag != 0) & (flag.abs() < SPIKE_BOUND)
        overflow = torch.where(spiked, zero, flag)
    torch._amp_update_scale_(scale, tracker, overflow, *rule)
    # The tracker is 0 after an overflow, and where the scale was to grow.
    keeps = overflow + tracker
    if limits.hysteresis > 1:
        is_below = words[state_layout.TOLERATED] < words[state_layout.MOST_TOLERATED]
        is_tolerated = (overflow != 0) & is_below
        scale.copy_(torch.where(is_tolerated, before, scale))
    # A scale that was set beyond them is not moved the wrong way.
    if limits.max_scale is not None:
        scale.copy_(torch.minimum(scale, before.clamp(min=limits.max_scale)))
    if limits.min_scale is not None:
        scale.copy_(torch.maximum(scale, before.clamp(max=limits.min_scale)))
    if may_spike:
        scale.copy_(torch.where(spiked, before, scale))
        tracker.copy_(torch.where(spiked, tracker_before, tracker))
        keeps = keeps + spiked
    # A counter grows or stays if its entry here, in the order of the state, is set; else it is 0.
    grows = [one, flag, scale, before, flag, overflow, spiked]
    stays = [one, one, one, one, flag, keeps, one]
    least = [zero, zero, zero, zero, before, scale]  # the others stay 0
    torch.stack([flag, zero, *grows, *stays, *least], out=state.compared)
    torch.gt(state.left, state.right, out=state.bits)
    if norm is not None:
        state.norm.copy_(norm.reshape(()))
        state.status.add_(2)
    if may_spike:
        state.status.add_(spiked, alpha=4)
    place = torch.bitwise_and(state.steps, state_layout.RING_STEPS - 1)
    state.ring.index_copy_(0, place, state.row)
    torch.addcmul(state.grows, state.counters, state.stays, out=state.counters)


@torch.no_grad()
def clip(clip: Clip) -> None:
    """Writes norm, clip coefficient and divisor, and the flag of a spike."""
    squares, peaks = clip.sums.unbind(1)
    clip.norm.copy_(peaks.amax() if clip.largest else squares.sum().sqrt())
    if clip.found_inf is not None:
        spike_(clip.found_inf, clip.norm, clip.skip_above, clip.accepted_norms)
    wide = clip.norm.to(widest(clip.norm.device))
    if clip.max_norm > torch.finfo(wide.dtype).max:
        coefficient = torch.ones_like(wide)  # inf / inf would be NaN
    else:
        # A number over a tensor would be a reciprocal and a product, rounded twice.
        coefficient = clip_coefficient(wide, torch.full_like(wide, clip.max_norm))
    if clip.coefficient is not None:
        clip.coefficient.copy_(coefficient)
    if clip.divisor is not None and clip.scale is not None:
        set_divisor(clip.divisor, clip.scale, coefficient)


def clip_coefficient(norm: Tensor, limit: Tensor) -> Tensor:
    """Returns torch's coefficient of a clipping, at most 1."""
    return (limit / (norm + CLIP_EPSILON)).clamp(max=1.0)


def set_divisor(divisor: Tensor, scale: Tensor, coefficient: Tensor) -> None:
    """Writes the scale over a coefficient, by which an optimizer clips as it divides."""
    divisor.copy_(scale.detach().reshape(()) / moved(coefficient, scale.device))


@torch.no_grad()
def require_unscalable(grads: TensorList, found_inf: Tensor | None = None) -> None:
    """Raises torch's error for the first gradient that its op refuses; no value changes.

    Single gradients are checked.
    """
    for group in grads.groups:
        if group.is_usual:
            _require_op(grads.device, group.tensors[0].dtype)
        else:
            flag = new_flag(grads.device) if found_inf is None else found_inf
            _check_and_unscale_(group.tensors, flag, _one(grads.device))


@cache
def _require_op(device: torch.device, dtype: torch.dtype) -> None:
    """Raises torch's error if its op does not take plain tensors of a dtype."""
    with _disable_current_modes():
        none = allocate(torch.empty, 0, dtype=dtype, device=device)
        _check_and_unscale_([none], new_flag(device), _one(device))


def norms(grads: list[Tensor], how: Factor, factor: Tensor | None) -> Tensor:
    """Returns sum of squares and largest magnitude of the gradients as they are used.

    Args:
        grads: Tensors of one device.
        how: As for `Pass`.
        factor: As for `Pass`.

    Returns:
        Two elements, float64 where the device has it.
    """
    device = grads[0].device
    sums = allocate(torch.empty, 2, dtype=widest(device), device=device)
    run(TensorList.of(grads), Pass(False, how, factor, sums=sums))
    return sums


@torch.no_grad()
def p_norm(
    grad: Tensor, order: float, how: Factor = Factor.NONE, factor: Tensor | None = None
) -> Tensor:
    """Returns the norm of a tensor as a pass would use it, in the widest dtype of its device.

    Products are not rounded to 16 bit.
    """
    by, values = _factor_of(Pass(False, how, factor)), core.real_view(grad.detach())
    if by is not None:
        values = _product(values, by, how == Factor.DIVIDE)
    if grad.is_complex():
        values = torch.view_as_complex(values)
    # The maximum of real numbers is exact in any dtype.
    is_exact = order == torch.inf and not grad.is_complex()
    dtype = None if is_exact else torch.promote_types(widest(grad.device), values.dtype)
    norm: Tensor = torch.linalg.vector_norm(values, order, dtype=dtype)
    if type(norm) is not Tensor:
        # It is of an unknown subclass.
        norm = allocate(torch.tensor, norm.item(), dtype=widest(grad.device), device=grad.device)
    return norm.to(widest(grad.device))


@torch.no_grad()
def require_writable(grads: TensorList) -> None:
    """Raises the error of clipping for tensors made in inference mode, before any write."""
    for group in grads.groups:
        for grad in group.tensors:
            if not group.is_usual or grad.is_inference():
                grad.copy_(grad)  # writes nothing


def sigmas_limit(norms: Tensor, sigmas: float) -> Tensor:
    """Returns the limit of `ampfast.Sigmas` over a window of norms, of shape (N,)."""
    std, mean = torch.std_mean(norms)
    return mean + sigmas * torch.maximum(std, LEAST_DEVIATION * mean)


def spike_(
    found_inf: Tensor, norm: Tensor, skip_above: float, accepted_norms: Tensor | None
) -> None:
    """Turns a flag of 0 into that of a spike if the norm is one; no host sync.

    The rule is that of csrc/scale.h.

    Args:
        found_inf: 0-dim float32 on the device of the norm.
        norm: 0-dim.
        skip_above: As for `Clip`.
        accepted_norms: As for `Clip`, but of any floating-point dtype.
    """
    is_finite, norm = found_inf == 0, norm.float()
    if accepted_norms is None:
        spiked = ~(norm <= skip_above)
    else:
        count, spikes, patience, restarts = accepted_norms[: norm_layout.RING].unbind()
        ring = accepted_norms[norm_layout.RING :]
        is_usable = is_finite & (norm > 0) & norm.isfinite()
        limit = sigmas_limit(ring, skip_above)
        is_above = (count >= ring.numel()) & ~(norm <= limit)
        restarted = is_above & is_usable & (spikes >= patience)
        spiked = is_above & ~restarted
        is_taken = is_usable & ~spiked
        count.masked_fill_(restarted, 0)
        place = torch.arange(ring.numel(), device=ring.device) == count % ring.numel()
        ring.copy_(torch.where(place & is_taken, norm.to(ring.dtype), ring))
        count.add_(is_taken)
        spikes.add_(is_usable & spiked).masked_fill_(is_taken, 0)
        restarts.add_(restarted)
    found_inf.masked_fill_(is_finite & spiked, SPIKE)


def mark_(marks: Tensor, now: Tensor, numbers: Iterable[int], used: Tensor) -> None:
    """Counts the step for the parameters with inf/NaN gradients; no host sync.

    Args:
        marks: As for `Pass`.
        now: As for `Pass`.
        numbers: Numbers of the parameters.
        used: Largest magnitudes of their gradients as they are used, of shape (N,).
    """
    table = _by_parameter(marks, numbers, used)
    found = torch.stack([~table.isfinite(), table.isnan()], dim=1)
    last, times = marks[:, :2], marks[:, 2:4]
    step = now.reshape(-1)[0] + 1
    # Counts once per step, in any number of passes.
    counted = torch.where(found, step, last), times + (found & (last < step))
    marks[:, : core.MARK_SQUARES] = torch.cat(counted, dim=1)


def _by_parameter(marks: Tensor, numbers: Iterable[int], values: Tensor) -> Tensor:
    """A value for each row of overflow counters, -0 where its parameter is none of `numbers`."""
    zero = allocate(torch.full, (), -0.0, dtype=values.dtype, device=values.device)
    rows = [zero] * len(marks)
    for number, value in zip(numbers, values.unbind(), strict=True):
        rows[number] = value
    return torch.stack(rows)


def squares_in(marks: Tensor) -> Tensor:
    """Returns the sums of squares in overflow counters, a view of shape (P,), in widest dtype."""
    dtype = widest(marks.device)
    return marks.view(dtype)[:, core.MARK_SQUARES * marks.itemsize // dtype.itemsize]


def local_of(tensor: Tensor) -> Tensor:
    """Returns what this rank has of a tensor: the shard of a DTensor, else the tensor."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _product(grad: Tensor, factor: Tensor, divides: bool = False) -> Tensor:
    """Products or quotients in opmath, before they are rounded to their dtype."""
    opmath = torch.promote_types(grad.dtype, torch.float32)
    values, by = grad.to(opmath), factor.reshape(()).to(opmath)
    return values / by if divides else values * by
