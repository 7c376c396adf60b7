"""Launches of Triton kernels: grids, compile-time switches, devices."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ampfast import errors
from ampfast.backends.cpu import WINDOW_BYTES, DeviceTable, Segment
from ampfast.backends.gpu import (
    CLIP_EPSILON,
    NO_FACTORS,
    Clip,
    Epilogue,
    Pass,
    ScaleUpdate,
    on_gpu,
)
from ampfast.backends.triton import kernels

__all__ = [
    "INTERPRETED",
    "clip_coefficient",
    "is_capturing",
    "max_programs",
    "measure",
    "multi_tensor",
    "on",
    "prepare",
    "update_scale",
]

# Whether the kernels run on CPU tensors, as under TRITON_INTERPRET=1.
INTERPRETED = not isinstance(kernels.multi_tensor, triton.JITFunction)

_interpreter_lock = threading.Lock()

# Programs per multiprocessor: 128 threads of at most 64 registers.
PROGRAMS_PER_SM = 8
# Few, so that test lists take several programs with several windows each.
INTERPRETED_PROGRAMS = 3

_DTYPES = {
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}

# Variants that were launched, hence compiled.
_launched: set[tuple[object, ...]] = set()


@cache
def _threads(device: torch.device) -> int:
    """Threads of a program: four warps."""
    return 4 * (getattr(torch.cuda.get_device_properties(device), "warp_size", 32))


@cache
def max_programs(device: torch.device) -> int:
    """Returns the largest grid: all plain programs that can be resident at once."""
    if INTERPRETED:
        return INTERPRETED_PROGRAMS
    return PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count


def on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Makes a device current."""
    return _interpreter() if INTERPRETED else on_gpu(device)


@contextlib.contextmanager
def _interpreter() -> Iterator[None]:
    """Runs one thread at a time, since all share the interpreter's state."""
    import numpy as np

    with _interpreter_lock, np.errstate(all="ignore"):
        yield


def is_capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    return not INTERPRETED and errors.is_capturing()


def prepare(work: Pass, segment: Segment, epilogue: Epilogue) -> None:
    """Compiles the kernel of a launch; refuses captures of uncompiled ones."""
    variant, arguments, options = _call(work, segment, epilogue)
    _require_compiled(variant)
    if variant not in _launched and not INTERPRETED:
        kernels.multi_tensor.warmup(*arguments, **options, grid=(segment.programs,))


def multi_tensor(work: Pass, segment: Segment, epilogue: Epilogue) -> None:
    """Launches one pass over the gradients of one dtype."""
    variant, arguments, options = _call(work, segment, epilogue)
    _require_compiled(variant)
    kernels.multi_tensor[(segment.programs,)](*arguments, **options)
    _launched.add(variant)


def _geometry(table: DeviceTable, segment: Segment) -> dict[str, Any]:
    """Switches of all kernels over a table."""
    threads = 128 if INTERPRETED else _threads(table.buffer.device)
    return {
        "DTYPE": _DTYPES[segment.dtype],
        "LOADS": WINDOW_BYTES // (16 * threads),
        "THREADS": threads,
        "SOFT": INTERPRETED,
    }


def _call(
    work: Pass, segment: Segment, epilogue: Epilogue
) -> tuple[tuple[object, ...], tuple[object, ...], dict[str, Any]]:
    """Key of the compiled code of a launch, the kernel's arguments, its switches and options."""
    update = work.update if epilogue is Epilogue.UPDATE else None
    factors = NO_FACTORS if update is None else update.factors
    switches: dict[str, Any] = {
        **_geometry(work.table, segment),
        "WRITE": work.write,
        "FACTOR": int(work.use),
        "NORM": work.norms is not None,
        "EPILOGUE": int(epilogue),
        "ACCUMULATE": work.accumulate,
    }
    state = None if update is None else update.state
    other = None if update is None else update.other
    marks, now = (None, None) if work.track is None else work.track[:2]
    if marks is not None and torch.version.hip is None and segment.dtype is torch.float64:
        # Without it the compiler assigns too few registers, as the division is a call, and spills.
        switches["maxnreg"] = 64
    optional = (work.coefficient, work.norms, marks, state, other)
    variant = (work.table.buffer.device, *switches.values(), *(o is None for o in optional))
    arguments = (
        work.table.buffer,
        segment.word,
        work.factor,
        work.coefficient,
        work.found_inf,
        work.norms,
        marks,
        now,
        None if update is None else update.scale,
        None if update is None else update.growth_tracker,
        state,
        other,
        factors.growth_factor,
        factors.backoff_factor,
        factors.growth_interval,
    )
    return variant, arguments, {**switches, "num_warps": 4, "enable_fp_fusion": False}


def measure(table: DeviceTable, segment: Segment, health: Tensor) -> None:
    """Launches the health pass over gradients of one dtype."""
    switches = _geometry(table, segment)
    variant = (table.buffer.device, "measure", *switches.values())
    _require_compiled(variant)
    kernels.measure[(segment.programs,)](
        *(table.buffer, segment.word, health), **switches, num_warps=4, enable_fp_fusion=False
    )
    _launched.add(variant)


def update_scale(update: ScaleUpdate, found_infs: list[Tensor]) -> None:
    """Launches the update of the scale; takes one to four flags."""
    optional = (update.state, update.norm)
    variant = (update.device, "update_scale", *(o is None for o in optional))
    _require_compiled(variant)
    flags = [*found_infs, *(found_infs[:1] * (4 - len(found_infs)))]
    kernels.update_scale[(1,)](
        update.scale,
        update.growth_tracker,
        *optional,
        *flags,
        update.factors.growth_factor,
        update.factors.backoff_factor,
        update.factors.growth_interval,
        num_warps=1,
        enable_fp_fusion=False,
    )
    _launched.add(variant)


def clip_coefficient(clip: Clip) -> None:
    """Launches the clip coefficient from norms."""
    what = ("clip_coefficient", clip.norm.dtype, clip.largest, clip.divisor is None)
    variant = (clip.norms.device, *what)
    _require_compiled(variant)
    kernels.clip_coefficient[(1,)](
        clip.norms,
        clip.norms.shape[0],
        clip.max_norm,
        CLIP_EPSILON,
        clip.norm,
        clip.coefficient,
        None if clip.divisor is None else clip.scale,
        clip.divisor,
        LARGEST=clip.largest,
        num_warps=1,
        enable_fp_fusion=False,
    )
    _launched.add(variant)


def _require_compiled(variant: tuple[object, ...]) -> None:
    if variant not in _launched:
        remedy = f"its kernel is not compiled yet; {errors.WARM_UP}"
        errors.refuse_capture("this", remedy)
