"""Launches of the CUDA kernels in the compiled core."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache

import torch

from ampfast.backends.core import _C, Clip, DeviceTable, Pass, Segment
from ampfast.backends.gpu import Epilogue, on_gpu
from ampfast.capture import is_capturing as is_capturing

if not _C.WITH_CUDA:
    raise ImportError("the compiled core was built without its CUDA kernels")

# As in _C.pyi.
measure = _C.cuda_measure
narrow = _C.cuda_narrow
update_scale = _C.cuda_update_scale


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


def clip_coefficient(clip: Clip) -> None:
    """Launches the clip coefficient from norms."""
    _C.cuda_clip_coefficient(clip)
