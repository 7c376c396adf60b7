"""Steps of optimizers that divide by the scale and skip in their step, as torch's fused ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ampfast.backends import scalars
from ampfast.backends.core import Factor, Pass, flag_of
from ampfast.backends.cuda_graphs import refuse_capture
from ampfast.gradients import READY, UNSCALED, Turn, new_turn
from ampfast.optim.fused_support import lacks_momentum, legacy_step, own_grad_scale
from ampfast.scaler.passes import Passes, joint_flags


def step_fused(
    scaler: Any, optimizer: Any, turn: Turn, scale: Tensor, by: str | None, args: Any, kwargs: Any
) -> float | None:
    """Steps an optimizer that divides by `grad_scale` and skips by `found_inf` itself.

    Its gradients are only read before.
    """
    if by == "grad_scaler" and turn.divisor is None:
        return legacy_step(optimizer, scaler, args, kwargs)
    found_inf, grad_scale = _found_by_division(scaler._passes, optimizer, turn, scale)
    flags = turn["found_inf_per_device"]
    turn.last_flags = flags  # there may be none
    try:
        optimizer.grad_scale = grad_scale
        optimizer.found_inf = found_inf
        if isinstance(optimizer, torch.optim.SGD) and flags and lacks_momentum(optimizer):
            refuse_capture(
                "the first step of a fused SGD with momentum, which may have to be skipped"
            )
            if found_inf.item():
                return None
        result: float | None = optimizer.step(*args, **kwargs)
        return result
    except BaseException as error:
        if grad_scale is not None and not isinstance(error, Exception):
            # The kernels may have divided gradients before the interrupt. Nothing tells whether an
            # error came before them, as from a hook, so that the step may be repeated, or after.
            skip = scalars.allocate(torch.ones, (), dtype=torch.float32, device="cpu")
            turn["found_inf_per_device"], turn["stage"] = {skip.device: skip}, UNSCALED
            turn.divisor = None
        raise
    finally:
        # In one statement without a call, in which an interrupt would leave one.
        try:  # noqa: SIM105
            del optimizer.grad_scale, optimizer.found_inf
        except AttributeError:
            pass


def _found_by_division(
    passes: Passes, optimizer: Any, turn: Turn, scale: Tensor
) -> tuple[Any, Any]:
    """Returns the `found_inf` and the `grad_scale` for an optimizer that divides by it."""
    if passes.is_guard and turn["stage"] is READY:
        passes.unscale(optimizer, turn, scale)
    is_unscaled, is_new = turn["stage"] is UNSCALED, False
    grad_scale: Any = None
    if turn.divisor is not None:
        if hasattr(optimizer, "grad_scale"):
            raise own_grad_scale(optimizer)
        grad_scale = turn.divisor.clone()
    elif not is_unscaled:
        by = scale * optimizer.grad_scale if hasattr(optimizer, "grad_scale") else scale
        grad_scale, is_new = passes.check_by_scale(optimizer, turn, by), True
    elif isinstance(grad_scale := getattr(optimizer, "grad_scale", None), Tensor):
        found = new_turn()
        found.record = turn.record
        work = Pass(False, Factor.DIVIDE, grad_scale.detach().float())
        flags = passes.check(optimizer, found, work, scale)
        # What unscale_ found counts too; in new tensors, for a caller may hold its own.
        turn["found_inf_per_device"] = joint_flags(turn["found_inf_per_device"], flags)
    flags = turn["found_inf_per_device"]
    on_cpu = flag_of(flags) if scale.is_cpu and flags else None
    if on_cpu is not None:
        return on_cpu, grad_scale
    if is_new and not turn.may_spike and len(flags) == 1 and scale.device in flags:
        # Exactly 0 or 1; only another's optimizer may write it.
        flag = flags[scale.device]
        is_torchs = type(optimizer).__module__.startswith("torch.optim.")
        return flag if is_torchs else flag.clone(), grad_scale
    # A spike's flag is 1 for torch's fused optimizers. Nothing checked is 0, as torch's sum over
    # nothing.
    return scalars.any_found(flags.values(), scale.device) if flags else 0, grad_scale
