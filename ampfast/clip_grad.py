"""`torch.nn.utils.clip_grad_norm_` and its parts, by ampfast's kernels."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from types import FunctionType, GeneratorType, SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ampfast import backends
from ampfast.backends import TORCH_OPS, Kernels, core
from ampfast.backends.core import Clip, Factor, Pass
from ampfast.backends.scalars import joint_flag, moved, new_flag, widest
from ampfast.capture import is_capturing
from ampfast.clipping import FUSED_ORDERS
from ampfast.errors import warn_caller
from ampfast.optimizers import ByOptimizer
from ampfast.spikes import Sigmas

# torch's own, also where an earlier import of ampfast has patched the name.
_named: Any = torch.nn.utils.clip_grad_norm_
torch_clip_grad_norm_: Any = getattr(_named, "_stands_for", _named)

_READS = Pass(False, Factor.NONE)
_WIDE = torch.float32, torch.float64

# Keys of an optimizer's entry in a scaler's `_per_optimizer_states`: its `Kept`, and the optimizer,
# whose gradients' norm the scaler limits. And what a raw call leaves there for the first one.
KEPT, LIMITED, STAMP = "kept_norm", "limited", "stamp"


class Kept(NamedTuple):
    """What an unscaling measured of its gradients, for the first clip before the scaler's update.

    Attributes:
        sums: As of a `Pass`, of what was written.
        stamp: The gradients.
    """

    sums: Tensor
    stamp: core.Stamp


# The living scalers that have kept norms or limit them.
keepers = ByOptimizer[None]()


def is_patched() -> bool:
    """Whether torch's name is ours."""
    return torch.nn.utils.clip_grad_norm_ is stand_in


def keep(entry: dict[str, Any], optimizer: Any, sums: Tensor, scaler: Any) -> None:
    """Keeps the sums of gradients that were just unscaled, in the entry of their optimizer."""
    keepers.record(scaler, None)
    if scaler.skip_above is not None:
        entry[LIMITED] = optimizer
    stamp = entry.pop(STAMP, None)
    if stamp is None:
        stamp = core.stamped(optimizer.param_groups)
    if stamp is None or stamp.device != sums.device or stamp.overlaps():
        # Written without versions that tell: another's norm may be of some of them.
        forget()
        return
    entry[KEPT] = Kept(sums, stamp)


def forget() -> None:
    """Forgets what is kept, beside a write that raises no versions."""
    for entry in _entries(_living()):
        entry.pop(KEPT, None)


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Multiplies gradients in place by min(1, max_norm / (norm + 1e-6)); no host sync.

    `torch.nn.utils.clip_grad_norm_` in two reads and one write; where the coefficient is 1, in one
    read. Where a scaler with `keep_norm` has just unscaled exactly these gradients, their norm is
    known, and the first read goes, unless there are several ranks, whose collectives may write
    unnoticed. Writes since are noticed by the versions of the gradients, hence not if made through
    `.data`, numpy or torch's own unscaling op. A scaler's `skip_above` applies to the norm.

    torch's function itself takes gradients on several devices, sparse, complex or overlapping ones,
    DTensors, other subclasses and other orders, and compiled code.

    Args:
        parameters: A tensor or an iterable of them; those without gradient are left out.
        max_norm: Limit of the norm; infinity leaves the gradients.
        norm_type: Order of the norm; the kernels know 2 and infinity.
        error_if_nonfinite: Whether to raise if the norm is inf or NaN, with a host sync.
        foreach: As for torch's function; the kernels need no choice.

    Returns:
        The norm before clipping: a new 0-dim tensor of the dtype to which those of the gradients
        promote, on their device. On GPUs squares are summed as by `GradScaler.clip_grad_norm_`.

    Raises:
        RuntimeError: If the norm is not finite and `error_if_nonfinite` is set; else as torch's.

    Source: torch.nn.utils.clip_grad_norm_, whose coefficient is here computed in float64.
    """
    if torch.compiler.is_compiling():
        norm: Tensor = torch_clip_grad_norm_(
            parameters, max_norm, norm_type, error_if_nonfinite, foreach
        )
        return norm
    listed = _listed(parameters)
    if not listed and isinstance(parameters, GeneratorType):
        warn_caller("`parameters` is an empty generator, no gradient clipping will occur.")
    first, given = _first_grad(listed), _numbers(norm_type, max_norm)
    clipped = None
    if first is not None and given is not None:
        try:
            clipped = _clipped(listed, first, *given, error_if_nonfinite)
        except RuntimeError:
            if error_if_nonfinite or not is_capturing():
                raise
    if clipped is None:
        try:
            clipped = torch_clip_grad_norm_(
                listed, max_norm, norm_type, error_if_nonfinite, foreach
            )
        except RuntimeError:
            if error_if_nonfinite:
                grads = [param.grad for param in listed if param.grad is not None]
                norm = torch.nn.utils.get_total_norm(grads, norm_type, foreach=foreach)
                _compare_norm(norm, listed)
            raise
        _compare_norm(clipped, listed)
    return clipped


# The same for torch's name: `unpatch()` must tell that from a name for ampfast's own.
stand_in: Any = FunctionType(
    clip_grad_norm_.__code__, globals(), "clip_grad_norm_", clip_grad_norm_.__defaults__
)
functools.update_wrapper(stand_in, clip_grad_norm_)
stand_in.__qualname__ = "stand_in"  # where pickle finds it
# Where a reloaded or newly imported ampfast finds torch's.
stand_in._stands_for = torch_clip_grad_norm_


def get_total_norm(
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Returns the norm of tensors, as of one vector; they are only read; no host sync.

    `torch.nn.utils.get_total_norm`, which takes what the kernels do not.

    Args:
        tensors: A tensor or an iterable of them.
        norm_type: As for `clip_grad_norm_`.
        error_if_nonfinite: As for `clip_grad_norm_`.
        foreach: As for `clip_grad_norm_`.

    Returns:
        As `clip_grad_norm_`.

    Raises:
        RuntimeError: As `clip_grad_norm_`.
    """
    torchs = torch.nn.utils.get_total_norm
    if torch.compiler.is_compiling():
        return torchs(tensors, norm_type, error_if_nonfinite, foreach)
    listed, given, grads = _listed(tensors), _numbers(norm_type), None
    kernels = _kernels_for(listed[0] if listed else None)
    if given is not None and kernels is not None and not _refuses(listed, given[0]):
        grads = core.list_of(listed, listed[0].device)
    if kernels is None or given is None or grads is None:
        return torchs(listed, norm_type, error_if_nonfinite, foreach)
    clip = _clip_of(kernels, grads, *given)
    kernels.clip(clip)
    norm = clip.norm.to(grads.dtype)
    return torchs([norm], norm_type, True) if error_if_nonfinite else norm


def clip_grads_with_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    total_norm: Tensor,
    foreach: bool | None = None,
) -> None:
    """Multiplies gradients in place by min(1, max_norm / (total_norm + 1e-6)); no host sync.

    `torch.nn.utils.clip_grads_with_norm_`, which takes what the kernels do not. Where the
    coefficient is 1, nothing is read or written.

    Args:
        parameters: As for `clip_grad_norm_`.
        max_norm: As for `clip_grad_norm_`.
        total_norm: 0-dim, the norm of the gradients.
        foreach: As for `clip_grad_norm_`.

    Raises:
        RuntimeError: As torch's.
    """
    if not torch.compiler.is_compiling():
        parameters = listed = _listed(parameters)
        given, kernels = _numbers(2.0, max_norm), _kernels_for(_first_grad(listed))
        is_plain = type(total_norm) is Tensor and total_norm.dim() == 0
        is_plain = is_plain and total_norm.is_floating_point()
        if kernels is not None and given is not None and is_plain:
            grads = core.stamped([{"params": listed}])
            if grads is not None:
                clip = _clip_by(moved(total_norm.detach(), grads.device), given[1])
                kernels.run(grads, Pass(True, Factor.NONE, clip=clip))
                return
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total_norm, foreach)


def _listed(tensors: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _first_grad(params: list[Tensor]) -> Tensor | None:
    return next((param.grad for param in params if param.grad is not None), None)


def _numbers(norm_type: Any, max_norm: Any = math.inf) -> tuple[float, float] | None:
    """Order and limit, if the kernels know them; torch raises for others, in its order."""
    try:
        order, limit = float(norm_type), float(max_norm)
    except Exception:  # whatever a value raises
        return None
    return (order, limit) if order in FUSED_ORDERS and limit >= 0 else None


def _kernels_for(grad: Tensor | None) -> Kernels | None:
    kernels = TORCH_OPS if grad is None else backends.choose().kernels_for(grad.device)
    return None if kernels is TORCH_OPS else kernels


def _refuses(grads: Iterable[Tensor | None], order: float) -> bool:
    """Whether torch has no such norm: of no values there is no largest."""
    return order == math.inf and any(grad is not None and grad.numel() == 0 for grad in grads)


def _has_ranks() -> bool:
    """Whether collectives, which raise no versions, may have written gradients."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _living() -> list[Any]:
    return [scaler for scaler, _ in keepers]


def _entries(scalers: list[Any]) -> list[dict[str, Any]]:
    return [entry for each in scalers for entry in list(each._per_optimizer_states.values())]


def _clipped(
    params: list[Tensor], first: Tensor, order: float, limit: float, raises: bool
) -> Tensor | None:
    """Norm of gradients, which are clipped; None, with nothing written, for torch's function."""
    kernels, groups = _kernels_for(first), [{"params": params}]
    if kernels is None or _refuses((param.grad for param in params), order):
        return None
    entries = _entries(_living())
    is_watched = any(KEPT in entry or LIMITED in entry for entry in entries)
    if not is_watched and not raises and first.dtype in _WIDE:
        optimizer, largest = SimpleNamespace(param_groups=groups), order == math.inf
        clip = core.clip_to(limit, largest)
        norm = kernels.clip_over(optimizer, {}, None, _READS, True, first, clip)
        if norm is not None:
            return norm
    sums, grads = _known(entries, groups) or (None, core.stamped(groups))
    if grads is None:
        return None
    clip = _clip_of(kernels, grads, order, limit, sums)
    is_compared = _compare(kernels, clip, params)
    if (raises or limit == math.inf) and not is_compared:
        kernels.clip(clip)
    if raises:
        torch.nn.utils.get_total_norm([clip.norm.to(grads.dtype)], order, error_if_nonfinite=True)
    if limit != math.inf:
        kernels.run(grads, Pass(True, Factor.NONE, clip=clip))
    return clip.norm.to(grads.dtype)


def _known(entries: list[dict[str, Any]], groups: list[dict[str, Any]]) -> Kept | None:
    """What was kept of exactly these gradients, if nobody has written since; once."""
    for entry in entries if not _has_ranks() else ():
        if KEPT in entry and core.take(entry[KEPT].stamp, groups):
            kept: Kept = entry.pop(KEPT)
            return kept
    return None


def _clip_of(
    kernels: Kernels, grads: core.GradList, order: float, limit: float, sums: Tensor | None = None
) -> Clip:
    """A clipping of gradients, which are measured unless their sums are known."""
    if sums is None:
        sums = torch.empty(2, dtype=torch.float64, device=grads.device)
        kernels.run(grads, _READS._replace(sums=sums))
    norm = torch.empty((), dtype=_WIDE[grads.has_float64], device=grads.device)
    return Clip(sums.unsqueeze(0), limit, order == math.inf, norm)


def _clip_by(norm: Tensor, limit: float) -> Clip:
    """A clipping by a norm that is known."""
    norm = norm.to(widest(norm.device))
    return Clip(norm.repeat(1, 2), limit, True, torch.empty_like(norm))


def _compare_norm(norm: Tensor, params: list[Tensor]) -> None:
    """`_compare` for a norm that torch's function measured."""
    if type(norm) is Tensor and norm.is_floating_point():
        kernels = backends.choose().kernels_for(norm.device)
        _compare(kernels, _clip_by(norm.detach(), math.inf), params)


def _compare(kernels: Kernels, clip: Clip, params: list[Tensor]) -> bool:
    """Skips the steps of optimizers with these gradients if their norm is above a scaler's limit.

    Returns:
        Whether a norm was compared, and hence written.
    """
    scalers = [scaler for scaler in _living() if scaler.skip_above is not None]
    clipped = {id(param) for param in params if param.grad is not None} if scalers else set()

    def is_limited(entry: dict[str, Any]) -> bool:
        if LIMITED not in entry or entry["stage"] is not OptState.UNSCALED:
            return False
        groups = entry[LIMITED].param_groups
        return any(id(param) in clipped for group in groups for param in group["params"])

    is_compared, device = False, clip.sums.device
    for scaler in scalers:
        entries = list(filter(is_limited, _entries([scaler])))
        flags = [flag for entry in entries for flag in entry["found_inf_per_device"].values()]
        if not flags:
            continue
        is_one = len(flags) == 1 and flags[0].device == device
        # What one of several skips for is not the others' reason: this norm is.
        found_inf = flags[0] if is_one else new_flag(device)
        optimizers = [entry[LIMITED] for entry in entries]
        rule = scaler._spike_rules.rule(optimizers, scaler.skip_above, device)
        kernels.clip(Clip(*clip[:7], found_inf, *rule))
        for flag in flags if not is_one else ():
            found = torch.where(clip.norm.isfinite(), found_inf, 1.0)
            flag.copy_(joint_flag([flag, found], flag.device))
        scaler._spike_rules.record(optimizers, rule)
        is_compared = True
        for entry in entries if isinstance(scaler.skip_above, Sigmas) else ():
            # Norms of parts, or of what was clipped, are not of the series.
            entry.pop(LIMITED, None)
    return is_compared
