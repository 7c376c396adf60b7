"""The picture of a demo: the losses and the scales of all runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

if TYPE_CHECKING:
    from ampfast.demo import Outcome

__all__ = ["STYLES", "draw"]

# Line and mark of each run: each narrower and darker than the one before, so that curves that
# coincide are all seen, in grey as well.
STYLES: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    (
        {"color": "#9ecae1", "linewidth": 6},
        {"color": "#3182bd", "marker": "o", "markersize": 11, "fillstyle": "none"},
    ),
    (
        {"color": "#e6740b", "linewidth": 2.4},
        {"color": "#b30000", "marker": "x", "markersize": 7, "markeredgewidth": 1.8},
    ),
    (
        {"color": "black", "linewidth": 0.9, "linestyle": (0, (3, 2))},
        {"color": "black", "marker": ".", "markersize": 4},
    ),
)


def draw(outcome: Outcome, caption: str, path: Path) -> None:
    """Writes a PNG: the loss above, the scale below, and the caption.

    Raises:
        OSError: If it cannot be written.
    """
    steps = range(1, len(outcome.runs[0].losses) + 1)
    figure = Figure(figsize=(9, 8), dpi=150, layout="constrained")
    loss_axes, scale_axes = figure.subplots(2, 1, sharex=True)
    for run, (line, mark) in zip(outcome.runs, STYLES, strict=True):
        loss_axes.plot(steps, run.losses, label=run.label, **line)
        scale_axes.step(steps, run.scales[:-1], where="mid", **line)
        skipped = [step for step, was in zip(steps, run.skipped, strict=True) if was]
        scales = [run.scales[step - 1] for step in skipped]
        label = f"step skipped by {run.label}"
        scale_axes.plot(skipped, scales, label=label, linestyle="", zorder=3, **mark)
    loss_axes.set_yscale("log")
    loss_axes.set_ylabel("training loss (cross-entropy, nats)")
    scale_axes.set_yscale("log", base=2)
    scale_axes.set_ylabel("loss scale (factor, no unit)")
    scale_axes.set_xlabel("training step")
    scale_axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (loss_axes, scale_axes):
        axes.grid(color="0.9")
        axes.legend()
    same = "equal bit for bit" if outcome.equal else "the runs DIFFER"
    figure.suptitle(f"The same training under torch's and ampfast's GradScaler: {same}")
    figure.supxlabel(caption, x=0.02, ha="left", fontsize=9)
    figure.savefig(path, format="png")
