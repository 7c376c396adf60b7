"""Steps of optimizers that divide by the scale and skip in their step, as torch's fused ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ampfast.backends import scalars
from ampfast.backends.core import Factor, Pass, riding
from ampfast.backends.cuda_graphs import refuse_capture
from ampfast.backends.gpu import DeviceKernels, Ending
from ampfast.backends.scalars import joint_flag
from ampfast.clip import global_norm
from ampfast.optim.fused_support import lacks_momentum, legacy_step, takes_grad_scaler
from ampfast.scaler.passes import Passes
from ampfast.scaler.turn import READY, UNSCALED, Flags, Turn, begin, new_turn


class FusedSteps(Passes):
    """Steps that get `grad_scale` and `found_inf`; their gradients are only read before."""

    def _step_fused(
        self,
        optimizer: torch.optim.Optimizer,
        turn: Turn,
        scale: Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> float | None:
        """Steps an optimizer that divides by `grad_scale` and skips by `found_inf` itself."""
        if takes_grad_scaler(optimizer.step):
            return legacy_step(optimizer, self, args, kwargs)
        found_inf, grad_scale = self._found_by_division(optimizer, turn, scale)
        flags = turn["found_inf_per_device"]
        turn.last_flags = flags  # there may be none
        try:
            optimizer.grad_scale = grad_scale  # type: ignore[attr-defined]
            optimizer.found_inf = found_inf  # type: ignore[attr-defined]
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
                # The kernels may have divided gradients before the interrupt.
                begin([turn])
                turn.divisor = None
            raise
        finally:
            # Without a call or loop, in which an interrupt would leave one.
            try:  # noqa: SIM105
                del optimizer.grad_scale  # type: ignore[attr-defined]
            except AttributeError:
                pass
            try:  # noqa: SIM105
                del optimizer.found_inf  # type: ignore[attr-defined]
            except AttributeError:
                pass

    def _found_by_division(
        self, optimizer: torch.optim.Optimizer, turn: Turn, scale: Tensor
    ) -> tuple[Any, Any]:
        """Returns the `found_inf` and the `grad_scale` for an optimizer that divides by it."""
        if self._is_guard and turn["stage"] is READY:
            self.unscale_(optimizer)
        is_unscaled, is_new = turn["stage"] is UNSCALED, False
        deferred = turn.divisor
        if deferred is not None:
            global_norm.refuse_own_grad_scale(optimizer)
            grad_scale: Any = deferred.clone()
        elif is_unscaled:
            grad_scale = getattr(optimizer, "grad_scale", None)
        elif hasattr(optimizer, "grad_scale"):
            grad_scale = scale * optimizer.grad_scale
            if self._skip_limit is not None:
                grad_scale, is_new = self._checked_by_scale(optimizer, turn, grad_scale), True
        else:
            grad_scale, is_new = self._checked_by_scale(optimizer, turn, scale), True
        if not is_new and deferred is None and isinstance(grad_scale, Tensor):
            work = Pass(False, Factor.DIVIDE, grad_scale.detach().float())
            found = new_turn() if is_unscaled else turn
            flags = self._pass(optimizer, found, work, scale, checks=True)
            if is_unscaled:
                # What unscale_ found counts too; in new tensors, for a caller may hold its own.
                turn["found_inf_per_device"] = _joint(turn["found_inf_per_device"], flags)
        flags = turn["found_inf_per_device"]
        if is_new and len(flags) == 1 and scale.device in flags and self._skip_limit is None:
            # Exactly 0 or 1; only another's optimizer may write it.
            flag = flags[scale.device]
            is_torchs = type(optimizer).__module__.startswith("torch.optim.")
            return flag if is_torchs else flag.clone(), grad_scale
        # A spike's flag is 1 for torch's fused optimizers. Nothing checked is 0, as torch's sum
        # over nothing.
        return scalars.any_found(flags.values(), scale.device) if flags else 0, grad_scale

    def _checked_by_scale(
        self, optimizer: torch.optim.Optimizer, turn: Turn, scale: Tensor
    ) -> Tensor | None:
        """Checks still scaled gradients; returns the scale by which the optimizer divides them."""
        if self._passes_scale is not scale:
            self._make_passes(scale)
        before = turn["found_inf_per_device"] if turn.is_measured else {}
        if self._skip_limit is not None and not turn.is_measured:
            self._unscale_below(self._skip_limit, optimizer, turn, scale, defers=True)
            # As nothing was written, a step that raises may be repeated, and checks again.
            turn.is_measured, divisor = True, turn.divisor
            turn.divisor, turn["stage"] = None, READY
            return divisor
        work, ending = self._check_pass, None
        if scale.dtype is torch.float32 and isinstance(self._kernels, DeviceKernels):
            ending, turn.ending = turn.ending or Ending(None, scale), None
            work = riding(work, ending)
        flags = self._pass(optimizer, turn, work, scale, checks=True)
        turn["found_inf_per_device"] = _joint(before, flags) if before else flags
        return ending.divisor if ending is not None and ending.applied else scale.clone()


def _joint(before: Flags, flags: Flags) -> Flags:
    """Flags that are set where one of two checks has set them, in new tensors."""
    joint = dict(flags)
    for device, flag in before.items():
        joint[device] = joint_flag([flag, flags.get(device, flag)], flag.device)
    return joint
