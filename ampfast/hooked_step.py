"""torch's own methods, where a subclass or an instance overrides what they call."""

from __future__ import annotations

from typing import Any

import torch

from ampfast.master_weights import MasterWeights
from ampfast.optimizers import (
    divides_by_itself,
    explain,
    legacy_step,
    no_inf_checks,
    takes_grad_scaler,
)
from ampfast.passes import Passes
from ampfast.turn import READY, Flags, TorchGradScaler, Turn


class HookedSteps(Passes):
    """Steps by torch's `step`, which calls the hooks of its scaler."""

    def _torchs_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> float | None:
        try:
            return TorchGradScaler.step(self, optimizer, *args, **kwargs)
        except AttributeError as error:
            explain(error, optimizer, "step")
            raise

    def _step_hooked(
        self,
        optimizer: torch.optim.Optimizer,
        turn: Turn,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> float | None:
        """torch's `step` where a subclass or an instance overrides one of the hooks.

        Except for an optimizer that torch would misjudge, or warn of at a line of this file.
        """
        if isinstance(optimizer, MasterWeights) and turn["stage"] is READY:
            self.unscale_(optimizer)  # which casts
        asks = getattr(optimizer, "_step_supports_amp_scaling", False)
        divides = asks and divides_by_itself(optimizer)
        is_legacy = divides and takes_grad_scaler(optimizer.step)
        if not asks or (divides and not is_legacy):
            return self._torchs_step(optimizer, args, kwargs)
        self._check_scale_growth_tracker("step")
        if is_legacy:
            return legacy_step(optimizer, self, args, kwargs)
        # A wrapper of one that divides is stepped as a plain optimizer.
        if turn["stage"] is READY:
            self.unscale_(optimizer)
        if not turn["found_inf_per_device"]:
            raise no_inf_checks(optimizer)
        return self._maybe_opt_step(optimizer, turn, *args, **kwargs)

    def _agree_beside_hooks(self, optimizer: torch.optim.Optimizer) -> Flags:
        """Returns the flags of all ranks, after a hook has decided on this one's."""
        turn = self._turn(optimizer)
        agreement = self._ranks.agreement_on(optimizer)
        flags: Flags = turn["found_inf_per_device"]
        if agreement is not None and self._scale is not None:
            turn.agreement = agreement
            flags = self._agree(turn, agreement, self._scale.device)
        return flags
