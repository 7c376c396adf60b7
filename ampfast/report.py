"""Statistics and history of a scaler, with plots and figures for loggers."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

from ampfast.scaler.history import History, ScalerStats

if TYPE_CHECKING:
    from ampfast.scaler.grad_scaler import GradScaler

__all__ = ["History", "ScalerStats", "figures", "plot"]


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


def plot(history: History, path: str | os.PathLike[str] | None = None) -> Any:
    """Plots the scale, the skipped steps and the gradient norms, if any were taken.

    Red crosses are steps with inf or NaN, orange triangles spikes.

    Args:
        history: Result of `GradScaler.history()`.
        path: File to save the plot to, in the format of its suffix; None saves nothing.

    Returns:
        The `matplotlib.figure.Figure`.

    Raises:
        ImportError: If matplotlib is missing.
        ValueError: If `history` is empty.
    """
    if not len(history):
        raise ValueError("nothing to plot: no step was taken")
    has_norm = history.has_norm
    with_norm = bool(has_norm.any())
    figure = figure_of(8, 5 if with_norm else 3)
    panels = figure.subplots(1 + with_norm, sharex=True, squeeze=False)[:, 0]
    steps, scale, spiked = history.step, history.scale, history.spiked
    line = {"color": "tab:blue", "label": "scale", **_POINTS}
    panels[0].step(steps.tolist(), scale.tolist(), where="post", **line)
    if bool((scale > 0).any()):
        panels[0].set_yscale("log", base=2)
    panels[0].set_ylabel("scale")
    nonfinite = history.skipped & ~spiked
    for kind, where, marker in (("inf or NaN", nonfinite, _CROSSES), ("spikes", spiked, _SPIKES)):
        if marker is _CROSSES or bool(where.any()):
            label = f"{kind}: {int(where.sum())} of {len(history)}"
            panels[0].plot(steps[where].tolist(), scale[where].tolist(), label=label, **marker)
    panels[0].legend(loc="best")
    if with_norm:
        steps, norms, spiked = steps[has_norm], history.grad_norm[has_norm], spiked[has_norm]
        # A gap in the line and a cross above it stand for a norm that is not finite.
        nonfinite = ~norms.isfinite()
        finite = norms.masked_fill(nonfinite, math.nan).tolist()
        panels[1].plot(steps.tolist(), finite, color="tab:green", **_POINTS)
        top = {"transform": panels[1].get_xaxis_transform(), "clip_on": False}
        panels[1].plot(steps[nonfinite].tolist(), [1.0] * int(nonfinite.sum()), **top, **_CROSSES)
        panels[1].plot(steps[spiked].tolist(), norms[spiked].tolist(), **_SPIKES)
        if bool((norms[~nonfinite] > 0).any()):
            panels[1].set_yscale("log")
        panels[1].set_ylabel("gradient norm")
    panels[-1].set_xlabel("step")
    for panel in panels:
        panel.grid(alpha=0.3)
    if path is not None:
        figure.savefig(path)
    return figure


# Markers, so that a single point is visible.
_POINTS = {"marker": ".", "markersize": 4}
_CROSSES = {"marker": "x", "linestyle": "none", "color": "tab:red"}
_SPIKES = {"marker": "^", "linestyle": "none", "color": "tab:orange"}


def figure_of(width: float, height: float) -> Any:
    """Returns an empty figure of this size in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")
