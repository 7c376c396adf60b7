"""`torch.nn.utils.clip_grad_norm_` and its parts, by ampfast's kernels."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from types import FunctionType, GeneratorType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ampfast import backends
from ampfast.backends import TORCH_OPS, Kernels, core, torch_ops
from ampfast.backends.core import Clip, Factor, Pass
from ampfast.backends.scalars import moved
from ampfast.capture import is_capturing
from ampfast.clipping import FUSED_ORDERS
from ampfast.errors import warn_caller
from ampfast.spikes import SpikeRule, SpikeRules

# torch's own, also where an earlier import of ampfast has patched the name.
_named: Any = torch.nn.utils.clip_grad_norm_
torch_clip_grad_norm_: Any = getattr(_named, "_stands_for", _named)

_READS = Pass(False, Factor.NONE)
_WIDE = torch.float32, torch.float64

# Key of an optimizer's entry in a scaler's `_per_optimizer_states`: its `Kept`.
KEPT = "kept_norm"


@dataclass(eq=False)
class Kept:
    """What an unscaling measured of its gradients, until the scaler's update.

    Attributes:
        sums: As of a `Pass`, of what was written.
        grads: The gradients, held so that no others take their place in memory.
        versions: Their versions.
        optimizer: Their optimizer.
        scaler: The scaler, whose `skip_above` applies.
    """

    sums: Tensor
    grads: core.GradList
    versions: bytes
    optimizer: Any
    scaler: weakref.ref[Any]

    def rule(self, device: torch.device) -> tuple[SpikeRules, Tensor, SpikeRule] | None:
        """The scaler's rules, the flag that one may turn into a spike's, and that one; or None."""
        scaler = self.scaler()
        if scaler is None or scaler.skip_above is None:
            return None
        entry = scaler._per_optimizer_states.get(id(self.optimizer))
        if entry is None or entry["stage"] is not OptState.UNSCALED:
            return None  # it has decided
        rules: SpikeRules = scaler._spike_rules
        rule = rules.rule([self.optimizer], scaler.skip_above, device)
        return rules, entry["found_inf_per_device"][device], rule


def is_patched() -> bool:
    """Whether torch's name is ours."""
    return torch.nn.utils.clip_grad_norm_ is stand_in


# By the places of the gradients in memory.
_kept: weakref.WeakValueDictionary[bytes, Kept] = weakref.WeakValueDictionary()


def keep(entry: dict[str, Any], optimizer: Any, sums: Tensor, scaler: Any) -> None:
    """Keeps the sums of gradients that were just unscaled, in the entry of their optimizer."""
    stamp = core.stamped(optimizer.param_groups, True)
    if stamp is not None and stamp[0].device == sums.device:
        grads, places, versions = stamp
        kept = Kept(sums, grads, versions, optimizer, weakref.ref(scaler))
        entry[KEPT] = _kept[places] = kept


def forget() -> None:
    """Forgets what is kept, before a write that raises no versions."""
    _kept.clear()


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
    unnoticed; the scaler's `skip_above` applies then. Writes since are noticed by the versions of
    the gradients, hence not if made through `.data`, numpy or torch's own unscaling op.

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
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if not listed and isinstance(parameters, GeneratorType):
        warn_caller("`parameters` is an empty generator, no gradient clipping will occur.")
    first = next((param.grad for param in listed if param.grad is not None), None)
    given = _numbers(norm_type, max_norm)
    clipped = None
    if first is not None and given is not None:
        try:
            clipped = _clipped(listed, first, *given, error_if_nonfinite)
        except RuntimeError:
            if error_if_nonfinite or not is_capturing():
                raise
    if clipped is None:
        clipped = torch_clip_grad_norm_(listed, max_norm, norm_type, error_if_nonfinite, foreach)
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
    listed = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    given, grads = _numbers(norm_type), None
    kernels = _kernels_for(listed[0]) if listed else None
    if given is not None and kernels is not None and not _refuses(listed, given[0]):
        grads = core.list_of(listed, listed[0].device)
    if kernels is None or given is None or grads is None:
        return torchs(listed, norm_type, error_if_nonfinite, foreach)
    norm, _ = _measured(kernels, grads, None, math.inf, given[0])
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
    listed = parameters
    if not torch.compiler.is_compiling():
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        first = next((param.grad for param in listed if param.grad is not None), None)
        given = _numbers(2.0, max_norm)
        kernels = None if first is None else _kernels_for(first)
        is_plain = type(total_norm) is Tensor and total_norm.dim() == 0
        is_plain = is_plain and total_norm.is_floating_point()
        if kernels is not None and given is not None and is_plain:
            stamp = core.stamped([{"params": listed}], False)
            if stamp is not None:
                norm = moved(total_norm.detach().reshape(()), stamp[0].device)
                coefficient = torch_ops.coefficient_of(norm, given[1])
                kernels.run(stamp[0], Pass(True, Factor.NONE, coefficient=coefficient))
                return
    torch.nn.utils.clip_grads_with_norm_(listed, max_norm, total_norm, foreach)


def _numbers(norm_type: Any, max_norm: Any = math.inf) -> tuple[float, float] | None:
    """Order and limit, if the kernels know them; torch raises for others, in its order."""
    try:
        order, limit = float(norm_type), float(max_norm)
    except Exception:  # whatever a value raises
        return None
    return (order, limit) if order in FUSED_ORDERS and limit >= 0 else None


def _kernels_for(grad: Tensor) -> Kernels | None:
    kernels = backends.choose().kernels_for(grad.device)
    return None if kernels is TORCH_OPS else kernels


def _refuses(grads: Iterable[Tensor | None], order: float) -> bool:
    """Whether torch has no such norm: of no values there is no largest."""
    return order == math.inf and any(grad is not None and grad.numel() == 0 for grad in grads)


def _has_ranks() -> bool:
    """Whether collectives, which raise no versions, may have written gradients."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _clipped(
    params: list[Tensor], first: Tensor, order: float, limit: float, raises: bool
) -> Tensor | None:
    """Norm of gradients, which are clipped; None, with nothing written, for torch's function."""
    kernels, groups = _kernels_for(first), [{"params": params}]
    if kernels is None or _refuses((param.grad for param in params), order):
        return None
    if not _kept and not raises and first.dtype in _WIDE:
        optimizer, largest = SimpleNamespace(param_groups=groups), order == math.inf
        norm = kernels.clip_over(optimizer, {}, None, _READS, True, limit, largest, None, None)
        if norm is not None:
            return norm
    stamp = core.stamped(groups, False)
    if stamp is None:
        return None
    grads, places, versions = stamp
    # Once: a second clip is of other values.
    kept = _kept.pop(places, None)
    is_unwritten = kept is not None and kept.versions == versions and not _has_ranks()
    norm, coefficient = _measured(kernels, grads, kept, limit, order, is_unwritten)
    if raises:
        torch.nn.utils.get_total_norm([norm], order, error_if_nonfinite=True)
    if limit != math.inf:
        kernels.run(grads, Pass(True, Factor.NONE, coefficient=coefficient))
    return norm


def _measured(
    kernels: Kernels,
    grads: core.GradList,
    kept: Kept | None,
    limit: float,
    order: float,
    is_unwritten: bool = False,
) -> tuple[Tensor, Tensor]:
    """Norm and clip coefficient; a kept flag becomes that of a spike if the norm is too large."""
    device = grads.device
    if kept is not None and is_unwritten:
        sums = kept.sums
    else:
        sums = torch.empty(2, dtype=torch.float64, device=device)
        kernels.run(grads, _READS._replace(sums=sums))
    norm = torch.empty((), dtype=_WIDE[grads.has_float64], device=device)
    coefficient = torch.empty((), dtype=torch.float64, device=device)
    clip = Clip(sums.unsqueeze(0), limit, order == math.inf, norm, coefficient)
    spikes = None if kept is None else kept.rule(device)
    if spikes is not None:
        clip = Clip(*clip[:7], spikes[1], *spikes[2])
    kernels.clip(clip)
    if kept is not None and spikes is not None:
        spikes[0].record([kept.optimizer], spikes[2])
    if kept is not None and (scaler := kept.scaler()) is not None:
        # Which would hold the gradients until the update.
        scaler._per_optimizer_states.get(id(kept.optimizer), {}).pop(KEPT, None)
    return norm.to(grads.dtype), coefficient
