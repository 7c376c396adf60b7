"""Launches of the CUDA kernels in the compiled core."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache

import torch
from torch import Tensor

from ampfast.backends.core import _C, Clip, DeviceTable, Pass, Segment, Update
from ampfast.backends.gpu import Epilogue, on_gpu
from ampfast.errors import is_capturing

__all__ = [
    "clip_coefficient",
    "is_capturing",
    "limit_programs",
    "measure",
    "multi_tensor",
    "narrow",
    "on",
    "update_scale",
]

if not _C.WITH_CUDA:
    raise ImportError("the compiled core was built without its CUDA kernels")


def on(device: torch.device) -> AbstractContextManager[object]:
    """Makes a device current, with all kernels loaded."""
    _load_kernels(device.index)
    return on_gpu(device)


@cache
def _load_kernels(index: int | None) -> None:
    _C.cuda_load_kernels(index)


def limit_programs(programs: int | None) -> None:
    """Limits the grid, for tests and measurements; None restores the default.

    That is as many programs as a device holds at once.
    """
    _C.cuda_limit_programs(programs or 0)


def multi_tensor(work: Pass, table: DeviceTable, segment: Segment, epilogue: Epilogue) -> None:
    """Launches one pass over the gradients of one dtype."""
    update = work.ending.update if epilogue is Epilogue.UPDATE else None
    _C.cuda_multi_tensor(table, segment, work, epilogue is not Epilogue.NOTHING, update)


def measure(table: DeviceTable, segment: Segment, health: Tensor) -> None:
    """Launches the health pass over gradients of one dtype."""
    _C.cuda_measure(table, segment, health)


def narrow(table: DeviceTable, segment: Segment, found_inf: Tensor | None) -> None:
    """Launches the rounding of the float32 values of one dtype's pairs."""
    _C.cuda_narrow(table, segment, found_inf)


def update_scale(update: Update) -> None:
    """Launches the update of the scale; takes one to four flags."""
    _C.cuda_update_scale(update)


def clip_coefficient(clip: Clip) -> None:
    """Launches the clip coefficient from norms."""
    _C.cuda_clip_coefficient(clip)
