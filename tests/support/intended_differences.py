"""Guards that keep random programs away from deliberate differences."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from support.optimizers import Rig
from support.scalers import TorchScaler

OptState = torch.amp.grad_scaler.OptState


def current_scale(scaler: TorchScaler) -> float:
    """Current or initial scale."""
    return scaler._init_scale if scaler._scale is None else scaler._scale.item()


def keep_interval_above_tracker(scalers: Iterable[TorchScaler]) -> None:
    """Raises a lowered interval: one below the tracker still grows in ampfast alone."""
    for scaler in scalers:
        tracker = scaler._init_growth_tracker
        if scaler._growth_tracker is not None:
            tracker = max(tracker, scaler._growth_tracker.item())
        if 0 < scaler._growth_interval <= tracker:
            scaler._growth_interval = tracker + 1


def tame(scaler: TorchScaler, rig: Rig) -> None:
    """Drops gradients that overflow when unscaled: ampfast alone skips the step."""
    scale = current_scale(scaler)
    for p in rig.params:
        if p.grad is None:
            continue
        values = p.grad.detach()
        values = values._values() if values.is_sparse else values
        top = values.abs().nan_to_num(0.0, 0.0, 0.0).max().item() if values.numel() else 0.0
        # With a margin, as the scale may have changed since the backward pass.
        limit = 2.0**14 if values.dtype == torch.float16 else 2.0**100
        if scale < 1.0 and max(top, top / scale) > limit:
            p.grad = None


def drop_own_scale(scaler: TorchScaler, rig: Rig) -> None:
    """Drops an optimizer's own scale where ampfast's second check would find more.

    ampfast checks unscaled gradients again for such a scale, torch does not.
    """
    record = scaler._per_optimizer_states.get(id(rig.optimizer))
    if record is None or record["stage"] is not OptState.UNSCALED:
        return
    found = any(record["found_inf_per_device"].values())
    finite = all(
        torch.isfinite(p.grad._values() if p.grad.is_sparse else p.grad).all()
        for p in rig.params
        if p.grad is not None
    )
    if not record["found_inf_per_device"] or not (found or finite):
        rig.forget_attributes()
