"""All kernels for GPUs, compiled without one; skips the importing module elsewhere.

Variants come from recorded launches.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import track_for

from ampfast.backends import core
from ampfast.backends.core import Factor, Pass, Update
from ampfast.backends.core import state_layout as layout

try:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ampfast.backends.triton import kernels, launch
except ModuleNotFoundError as error:
    pytest.skip(f"Triton is missing: {error}", allow_module_level=True)
if launch.INTERPRETED:
    pytest.skip("compiles kernels: needs TRITON_INTERPRET unset", allow_module_level=True)

TARGETS = {
    **{f"sm_{sm}": GPUTarget("cuda", sm, 32) for sm in (80, 90, 100, 120)},
    **{name: GPUTarget("hip", name, 64) for name in ("gfx90a", "gfx942")},
    "gfx1100": GPUTarget("hip", "gfx1100", 32),
}
CUDA = tuple(name for name, target in TARGETS.items() if target.backend == "cuda")
HIP = tuple(name for name, target in TARGETS.items() if target.backend == "hip")

# It is tried beside the newest, with less.
IS_OLDEST = tuple(map(int, triton.__version__.split(".")[:2])) <= (3, 6)

STATE = torch.zeros(layout.STATE_WORDS, dtype=torch.int64)

_POINTERS = {
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
}


@dataclass(frozen=True)
class Variant:
    """Arguments of a launch that select its code."""

    dtype: torch.dtype
    write: bool
    how: Factor
    norm: bool = False
    coefficient: bool = False
    clip: bool = False
    marks: bool = False
    is_last: bool = True
    updates: bool = False
    accumulate: bool = False
    other: bool = False

    def __str__(self) -> str:
        """A readable test id."""
        words = [str(self.dtype).removeprefix("torch."), "unscale" if self.write else "check"]
        words += [self.how.name.lower()]
        words += [n for n in ("norm", "coefficient", "clip", "marks") if getattr(self, n)]
        words += ["update" if self.updates else "finish" if self.is_last else "nothing"]
        words += [n for n in ("accumulate", "other") if getattr(self, n)]
        return " ".join(words)


def of_clips(dtype: torch.dtype) -> list[Variant]:
    """The passes of a clipping of unscaled gradients."""
    return [
        Variant(dtype, False, Factor.NONE, norm=True),
        *(Variant(dtype, False, how, True, clip=True) for how in (Factor.NONE, Factor.DIVIDE)),
    ]


def modes(dtype: torch.dtype) -> list[Variant]:
    """Modes of `DeviceKernels`, without epilogues."""
    times = (Factor.TIMES, Factor.TIMES_RECIPROCAL)
    reads = [Variant(dtype, False, how) for how in (Factor.NONE, Factor.DIVIDE)]
    norms = [Variant(dtype, False, how, norm=True) for how in times]
    writes = [Variant(dtype, True, how) for how in times]
    scale = writes[1]
    return [
        *reads,
        *(replace(r, marks=True) for r in reads),
        *norms,
        *writes,
        replace(scale, norm=True),
        *(replace(mode, coefficient=True) for mode in writes),
        *(of_clips(dtype) if dtype is torch.float32 else ()),
        *(replace(mode, marks=True) for mode in (*norms, *writes)),
        replace(scale, norm=True, marks=True),
    ]


def updating(dtype: torch.dtype) -> Variant:
    return Variant(dtype, False, Factor.DIVIDE, updates=True)


def everywhere(dtype: torch.dtype) -> list[Variant]:
    """Variants compiled for every target: those whose arithmetic differs most."""
    return [
        Variant(dtype, False, Factor.NONE),
        updating(dtype),
        Variant(dtype, True, Factor.TIMES_RECIPROCAL),
        Variant(dtype, True, Factor.TIMES, norm=True, marks=True),
        Variant(dtype, True, Factor.TIMES, coefficient=True),
    ]


def variants(dtype: torch.dtype) -> list[Variant]:
    """Every mode with all of its epilogues; for one dtype in every combination.

    Marks precede the epilogue, so one of each suffices. With the oldest Triton all modes, and an
    update.
    """
    if IS_OLDEST:
        return [*modes(dtype), updating(dtype)]
    found = [] if dtype is torch.float32 else of_clips(dtype)
    for mode in modes(dtype):
        found.append(mode)
        if mode.marks:
            continue
        found.append(replace(mode, is_last=False))
        if mode.norm and not mode.write:
            continue  # returns a flag of its own and takes no update
        update = replace(mode, updates=True)
        found.append(replace(update, accumulate=True, other=True))
        if dtype == torch.float32:
            found += [replace(mode, accumulate=True), update]
            found += [replace(update, accumulate=True), replace(update, other=True)]
    return found


class _Recorded(Exception):  # noqa: N818
    """Raised with the arguments of a launch."""


class _Recorder:
    def warmup(self, *args: Any, grid: Any, **switches: Any) -> None:
        raise _Recorded(args, switches)


CPU = torch.device("cpu")


def table_of(dtype: torch.dtype, device: torch.device = CPU) -> core.DeviceTable:
    grads = core.list_of([torch.ones(3, dtype=dtype, device=device)], device)
    assert grads is not None
    return core.DeviceTable.of(grads, False)


def work_of(variant: Variant, device: torch.device = CPU) -> Pass:
    """The pass of a variant."""
    one = torch.ones((), device=device)
    tracker = torch.zeros((), dtype=torch.int32, device=device)
    flags = [one] if variant.other else []
    update = Update(one, tracker, flags, 2.0, 0.5, 2000, STATE.to(device))
    track = track_for(1, device=device) if variant.marks else None
    wide = torch.promote_types(variant.dtype, torch.float32)
    defers = variant.how == Factor.DIVIDE
    return Pass(
        variant.write,
        variant.how,
        None if variant.how == Factor.NONE else one,
        one,
        variant.accumulate,
        coefficient=one.double() if variant.coefficient else None,
        clip=clip_of(wide, False, defers, defers, device) if variant.clip else None,
        sums=torch.ones(2, dtype=torch.float64, device=device) if variant.norm else None,
        **({} if track is None else track._asdict()),
        ending=update if variant.updates else None,
    )


def recorded(name: str, call: Callable[[], None], target: Any) -> tuple[Any, dict[str, Any]]:
    """Arguments and options with which a call launches a kernel on a device like `target`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_threads", lambda device: 4 * target.warp_size)
        patch.setattr(launch, "is_capturing", lambda: False)
        patch.setattr(kernels, name, _Recorder())
        with pytest.raises(_Recorded) as launched:
            call()
    return launched.value.args


def clip_of(
    norm: torch.dtype, largest: bool, divisor: bool, sigmas: bool, device: torch.device = CPU
) -> core.Clip:
    """A clipping, with a flag where there is a divisor."""
    one = torch.ones((), device=device)
    return core.Clip(
        *(torch.ones(3, 2, dtype=torch.float64, device=device), 1.0, largest),
        *(one.to(norm), one.double(), one, one if divisor else None),
        *(one if divisor or sigmas else None, 6.0),
        torch.ones(128 + core.norm_layout.RING, dtype=torch.float64, device=device)
        if sigmas
        else None,
    )


def source_of(function: Any, args: tuple[Any, ...], switches: dict[str, Any]) -> Any:
    """Source that Triton compiles for these arguments, specialized as in a launch."""
    names = function.arg_names
    constants = {name: value for name, value in switches.items() if name in names}
    signature, attributes = {}, {}
    given = {**dict(zip(names, args, strict=False)), **constants}
    for index, parameter in enumerate(function.params):
        value = given[parameter.name]
        if parameter.is_constexpr or value is None:
            constants[parameter.name] = value
            signature[parameter.name] = "constexpr"
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = _POINTERS[value.dtype]
            if not parameter.do_not_specialize:
                attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = parameter.annotation_type or "fp32"
        else:
            signature[parameter.name] = parameter.annotation_type or "i32"
    keys = {(names.index(name),): value for name, value in constants.items()}
    return ASTSource(function, signature, keys, attributes)


def _compiled(name: str, call: Callable[[], None], target_name: str) -> Any:
    function, target = getattr(kernels, name), TARGETS[target_name]
    args, switches = recorded(name, call, target)
    options = {name: v for name, v in switches.items() if name not in function.arg_names}
    return triton.compile(source_of(function, args, switches), target=target, options=options)


@cache
def compiled(variant: Variant, target: str) -> Any:
    """Compiles a variant; the result has the texts of all stages."""
    work, table = work_of(variant), table_of(variant.dtype)
    given = work, table, table.segments[0], variant.is_last
    return _compiled("multi_tensor", lambda: launch.multi_tensor(*given), target)


@cache
def compiled_update(target: str) -> Any:
    one, tracker = torch.ones(()), torch.zeros((), dtype=torch.int32)
    update = Update(one, tracker, [one], 2.0, 0.5, 2000, STATE, one)
    return _compiled("update_scale", lambda: launch.update_scale(update), target)


@cache
def compiled_clip(target: str, norm: torch.dtype, *switches: bool) -> Any:
    """As `clip_of`: by the largest magnitude, with a divisor, with a limit of `Sigmas`."""
    clip = clip_of(norm, *switches)
    return _compiled("clip_coefficient", lambda: launch.clip_coefficient(clip), target)


def usage(kernel: Any) -> dict[str, int]:
    """Bytes of `STACK` and `LOCAL` memory and registers (`REG`) per thread, as ptxas gives them.

    By the tool that Triton has beside it.
    """
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.cubin")
        Path(path).write_bytes(kernel.asm["cubin"])
        shown = subprocess.run(
            [tool, "-res-usage", path], capture_output=True, text=True, check=True
        ).stdout
    found = re.findall(r"\b(REG|STACK|LOCAL):(\d+)", shown)
    return {name: int(number) for name, number in found}
