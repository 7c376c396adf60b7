"""Launches of the CUDA kernels in the compiled core."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache

import torch
from torch import Tensor

from ampfast import _C
from ampfast.backends.cpu import DeviceTable, Segment
from ampfast.backends.gpu import NO_FACTORS, Clip, Epilogue, Pass, ScaleUpdate, on_gpu
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


def multi_tensor(work: Pass, segment: Segment, epilogue: Epilogue) -> None:
    """Launches one pass over the gradients of one dtype."""
    update = work.update if epilogue is Epilogue.UPDATE else None
    _C.cuda_multi_tensor(
        work.table,
        segment,
        write=work.write,
        use=int(work.use),
        factor=work.factor,
        coefficient=work.coefficient,
        norms=work.norms,
        marks=None if work.track is None else work.track[:2],
        epilogue=epilogue is not Epilogue.NOTHING,
        found_inf=work.found_inf,
        accumulate=work.accumulate,
        scale=None if update is None else update.scale,
        growth_tracker=None if update is None else update.growth_tracker,
        state=None if update is None else update.state,
        other_found_inf=None if update is None else update.other,
        factors=NO_FACTORS if update is None else update.factors,
        divisor=work.divisor,
    )


def measure(table: DeviceTable, segment: Segment, health: Tensor) -> None:
    """Launches the health pass over gradients of one dtype."""
    _C.cuda_measure(table, segment, health)


def narrow(table: DeviceTable, segment: Segment, found_inf: Tensor | None) -> None:
    """Launches the rounding of the float32 values of one dtype's pairs."""
    _C.cuda_narrow(table, segment, found_inf)


def update_scale(update: ScaleUpdate, found_infs: list[Tensor]) -> None:
    """Launches the update of the scale; takes one to four flags."""
    _C.cuda_update_scale(
        *(update.scale, update.growth_tracker, found_infs, update.factors),
        *(update.state, update.norm),
    )


def clip_coefficient(clip: Clip) -> None:
    """Launches the clip coefficient from norms."""
    _C.cuda_clip_coefficient(*clip)
