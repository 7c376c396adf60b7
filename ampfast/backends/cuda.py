"""Launches of the CUDA kernels in the compiled core."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache

import torch

from ampfast.backends.core import DeviceTable, Pass, Segment, compiled
from ampfast.backends.gpu import on_gpu
from ampfast.capture import is_capturing as is_capturing

if not compiled.WITH_CUDA:
    raise ImportError("the compiled core was built without its CUDA kernels")

# As in _C.pyi.
measure = compiled.cuda_measure
narrow = compiled.cuda_narrow
update_scale = compiled.cuda_update_scale
clip_coefficient = compiled.cuda_clip_coefficient
limit_programs = compiled.cuda_limit_programs
_load_kernels = cache(compiled.cuda_load_kernels)


def on(device: torch.device) -> AbstractContextManager[object]:
    """Makes a device current, with all kernels loaded."""
    _load_kernels(device.index)
    return on_gpu(device)


def multi_tensor(work: Pass, table: DeviceTable, segment: Segment, is_last: bool) -> None:
    """Launches one pass over the gradients of one dtype."""
    update = work.ending.update if is_last and work.ending is not None else None
    compiled.cuda_multi_tensor(table, segment, work, is_last, update)
