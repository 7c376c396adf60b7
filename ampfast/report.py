"""Statistics and history of a scaler, with figures for loggers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ampfast.scaler.loss_scale import History, ScalerStats

if TYPE_CHECKING:
    from ampfast.scaler.grad_scaler import GradScaler

__all__ = ["History", "ScalerStats", "figures"]


def figures(scaler: GradScaler, since: int = 0) -> dict[str, float]:
    """Returns a scaler's figures for a logger, with two host syncs, or three with `Sigmas`.

    Args:
        scaler: The scaler.
        since: Number of its steps that are not counted, such as the "steps" of the last
            call. At most the last 1,024 steps are counted.

    Returns:
        Of the scaler's whole life, "steps" and, unless it is a guard or its scale is 0,
        "log2_scale"; "skip_limit" if there is one. Of the counted steps, "skipped", "nonfinite" and
        "spikes" (numbers of steps) and "skipped_share" (from 0 to 1). "grad_norm" (of the last of
        these steps with a finite norm) and "largest_grad_norm", if norms were taken.
    """
    stats, history = scaler.stats(), scaler.history()
    new = history.step >= since
    skipped, spikes = int((history.skipped & new).sum()), int((history.spiked & new).sum())
    found = {"steps": float(stats.steps), "skipped": float(skipped), "spikes": float(spikes)}
    found["nonfinite"] = found["skipped"] - found["spikes"]
    found["skipped_share"] = skipped / max(1, int(new.sum()))
    if stats.scale > 0 and not scaler._is_guard:
        found["log2_scale"] = math.log2(stats.scale)
    if (limit := scaler.skip_limit()) is not None:
        found["skip_limit"] = limit
    norms = history.grad_norm[new & history.grad_norm.isfinite()]
    if len(norms):
        found["grad_norm"], found["largest_grad_norm"] = float(norms[-1]), float(norms.max())
    return found
