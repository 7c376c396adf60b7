"""What a scaler tells about its steps: statistics, history, and pictures and logs of them."""

from __future__ import annotations

import importlib
import os
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["History", "ScalerStats", "SummaryWriter", "log", "plot"]


@dataclass(frozen=True)
class ScalerStats:
    """Counts since the scaler was made. A step is an iteration, which `update()` ends.

    Attributes:
        steps: How many there were.
        skipped: Those in which some optimizer's gradients were not all finite.
        growths: Those that raised the scale.
        backoffs: Those that lowered it.
        consecutive_skips: How many were skipped in a row, up to the last one.
        scale: The scale now.
        growth_tracker: Steps without overflow since the scale last changed.
    """

    steps: int
    skipped: int
    growths: int
    backoffs: int
    consecutive_skips: int
    scale: float
    growth_tracker: int


@dataclass(frozen=True)
class History:
    """The last steps, at most 1,024, oldest first; all tensors are on the CPU and of one length.

    Attributes:
        step: int64, the number of the step, from 0.
        scale: float32, the scale that the step was taken with.
        skipped: bool, whether some optimizer's gradients were not all finite.
        grad_norm: float32, the unscaled norm of the gradients; NaN where none was taken.
        has_norm: bool, whether one was taken.
    """

    step: Tensor
    scale: Tensor
    skipped: Tensor
    grad_norm: Tensor
    has_norm: Tensor

    def __len__(self) -> int:
        return self.step.numel()


class SummaryWriter(Protocol):
    """What `log` needs of a writer; TensorBoard's `SummaryWriter` is one."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...


def log(writer: SummaryWriter, step: int, stats: ScalerStats, prefix: str = "scaler/") -> None:
    """Writes every figure of `stats` as a scalar.

    Args:
        writer: Anything with `add_scalar(tag, value, step)`, such as TensorBoard's `SummaryWriter`.
        step: The step under which they are written.
        stats: What `GradScaler.stats()` returned.
        prefix: What the tags begin with.

    Raises:
        TypeError: If `writer` has no `add_scalar`, or `stats` is something else.
    """
    if not callable(getattr(writer, "add_scalar", None)):
        raise TypeError(
            f"writer must have add_scalar(tag, value, step), got {type(writer).__name__}"
        )
    if not isinstance(stats, ScalerStats):
        raise TypeError(f"stats must be what scaler.stats() returns, got {type(stats).__name__}")
    for name, value in asdict(stats).items():
        writer.add_scalar(prefix + name, value, step)


def plot(history: History, path: str | os.PathLike[str] | None = None) -> Any:
    """Draws the scale, the skipped steps and, where they were taken, the norms.

    Args:
        history: What `GradScaler.history()` returned.
        path: Where the picture is saved; its suffix decides the format. None: it is not.

    Returns:
        The `matplotlib.figure.Figure`.

    Raises:
        ImportError: If matplotlib is missing.
        TypeError: If `history` is something else.
    """
    if not isinstance(history, History):
        raise TypeError(
            f"history must be what scaler.history() returns, got {type(history).__name__}"
        )
    figure_module = _matplotlib("figure")
    with_norm = bool(history.has_norm.any())
    figure = figure_module.Figure(figsize=(8, 5 if with_norm else 3), layout="constrained")
    panels = figure.subplots(2 if with_norm else 1, sharex=True, squeeze=False)[:, 0]
    steps, scale = history.step.tolist(), history.scale
    panels[0].step(steps, scale.tolist(), where="post", color="tab:blue", label="scale")
    panels[0].set_yscale("log", base=2)
    panels[0].set_ylabel("scale")
    skipped = history.skipped
    panels[0].plot(
        history.step[skipped].tolist(),
        scale[skipped].tolist(),
        linestyle="none",
        marker="x",
        color="tab:red",
        label=f"skipped: {int(skipped.sum())} of {len(history)}",
    )
    panels[0].legend(loc="best")
    if with_norm:
        shown = history.has_norm & history.grad_norm.isfinite()
        norms = history.grad_norm[shown]
        panels[1].plot(history.step[shown].tolist(), norms.tolist(), color="tab:green")
        if bool((norms > 0).any()):
            panels[1].set_yscale("log")
        panels[1].set_ylabel("gradient norm")
    panels[-1].set_xlabel("step")
    for panel in panels:
        panel.grid(alpha=0.3)
    if path is not None:
        figure.savefig(path)
    return figure


def empty_history() -> History:
    """Returns the history of no step."""
    none = torch.empty(0)
    return History(none.long(), none, none.bool(), none, none.bool())


def _matplotlib(name: str) -> ModuleType:
    try:
        return importlib.import_module(f"matplotlib.{name}")
    except ImportError as error:
        raise ImportError("drawing needs matplotlib: pip install matplotlib") from error
