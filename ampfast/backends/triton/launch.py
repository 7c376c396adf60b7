"""Launches of Triton kernels: grids, compile-time switches, devices."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ampfast.backends import core, cuda_graphs
from ampfast.backends.core import Clip, norm_layout
from ampfast.backends.triton import kernels

# Whether the kernels run on CPU tensors, as under TRITON_INTERPRET=1.
INTERPRETED = not isinstance(kernels.multi_tensor, triton.JITFunction)

# Every NVIDIA GPU that Triton supports has as many.
REGISTERS_PER_SM = 65_536
# Few, so that test lists take several programs with several chunks each.
INTERPRETED_PROGRAMS = 3
_most_programs = 0

_Arguments = tuple[Any, ...]

# Variants that were launched, so they are compiled and loaded. Their most programs, how they are
# launched again, with a number of programs and the kernel's arguments, and whether these are
# addresses instead of tensors.
_launched: dict[object, tuple[int, Callable[[int, _Arguments], object], bool]] = {}


@cache
def _threads(device: torch.device) -> int:
    """Threads of a program: four warps."""
    if INTERPRETED:
        return 128
    return 4 * getattr(torch.cuda.get_device_properties(device), "warp_size", 32)


def limit_programs(programs: int) -> None:
    """Limits the grid, for tests and measurements; 0 restores the default.

    That is as many programs as a device holds at once.
    """
    global _most_programs
    _most_programs = programs
    _launched.clear()


# Whether the current stream is being captured into a CUDA graph.
is_capturing = bool if INTERPRETED else cuda_graphs.is_stream_capturing

# As in _C.pyi: the core makes the arguments, and looks in `_launched`. `prepare` compiles the
# kernel of a launch, and refuses captures of uncompiled ones.
_HERE = sys.modules[__name__]
multi_tensor = partial(core.triton_multi_tensor, _HERE, True)
prepare = partial(core.triton_multi_tensor, _HERE, False)
update_scale = partial(core.triton_update_scale, _HERE)


def _options(name: str, device: torch.device, *switches: Any) -> dict[str, Any]:
    """Switches and compiler options of a kernel."""
    if name != "multi_tensor":
        known = {"LARGEST": switches[0]} if switches else {}
        return {**known, "num_warps": 1, "enable_fp_fusion": False}
    dtype, write, how, norm, largest, compares, is_last, accumulate = switches
    triton_dtype = getattr(tl, str(dtype).removeprefix("torch."))
    options: dict[str, Any] = {"DTYPE": triton_dtype, "THREADS": _threads(device)}
    options |= {"WRITE": write, "FACTOR": int(how), "NORM": norm}
    options |= {"LARGEST": largest, "COMPARES": compares}
    options |= {"IS_LAST": is_last, "ACCUMULATE": accumulate}
    options |= {"num_warps": 4, "enable_fp_fusion": False}
    if torch.version.hip is None:
        # Without a limit the compiler may assign too few registers, and with a lower one it spills.
        more = norm and dtype is torch.float64
        options["maxnreg"] = 128 if write and norm else 80 if more else 64
    return options


def clip_coefficient(clip: Clip) -> None:
    """Launches the clip coefficient from norms."""
    name, sums, norms = "clip_coefficient", clip.sums, clip.accepted_norms
    arguments = (
        *(sums, sums.numel() // 2, clip.max_norm, clip.norm, clip.coefficient),
        *(None if clip.divisor is None else clip.scale, clip.divisor, clip.found_inf),
        *(clip.skip_above, norms, 1 if norms is None else norms.numel() - norm_layout.RING),
    )
    # A None among the arguments is compiled in.
    variant = (name, sums.device, clip.largest, clip.norm.dtype, *map(type, arguments))
    known = _launched.get(variant)
    if known is None:
        _first(variant, name, sums.device, 1, arguments, (clip.largest,))
        return
    _, again, takes_addresses = known
    again(1, _addresses(arguments) if takes_addresses else arguments)


def _first(
    variant: object,
    name: str,
    device: torch.device,
    chunks: int,
    arguments: _Arguments,
    switches: tuple[Any, ...],
) -> None:
    """Launches a variant for the first time, as Triton does, which compiles it.

    Without chunks nothing is launched, but the kernel is compiled.
    """
    cuda_graphs.refuse_capture("this", f"its kernel is not compiled yet; {cuda_graphs.WARM_UP}")
    function = getattr(kernels, name)
    options = _options(name, device, *switches)
    compiled = None if INTERPRETED else function.warmup(*arguments, grid=(1,), **options)
    if not chunks:
        return
    resident = _most_programs or _resident_programs(compiled, device)

    def usual(programs: int, arguments: _Arguments) -> object:
        return function[(programs,)](*arguments, **options)

    kernel = usual(min(chunks, resident), arguments)
    constants = tuple(options[name] for name in function.arg_names[len(arguments) :])
    again = _direct(kernel, constants, arguments)
    _launched[variant] = resident, again or usual, again is not None


def _addresses(arguments: _Arguments) -> _Arguments:
    # For a tensor Triton would ask the driver, too, whether the device can access it.
    return tuple(each.data_ptr() if isinstance(each, Tensor) else each for each in arguments)


def _resident_programs(kernel: Any, device: torch.device) -> int:
    """Programs of a compiled kernel that a device holds at once."""
    if INTERPRETED:
        return INTERPRETED_PROGRAMS
    properties = torch.cuda.get_device_properties(device)
    threads = _threads(device)
    of_each = properties.max_threads_per_multi_processor // threads
    if torch.version.hip is None:
        with contextlib.suppress(AttributeError):  # of a Triton with other internals
            kernel._init_handles()
            # Registers are given to a warp in units of 8 a thread.
            registers = threads * -(-kernel.n_regs // 8) * 8
            of_each = min(of_each, REGISTERS_PER_SM // registers)
    return of_each * int(properties.multi_processor_count)


def _direct(
    kernel: Any, constants: _Arguments, arguments: _Arguments
) -> Callable[[int, _Arguments], object] | None:
    """How a compiled kernel is launched from its second time on, with addresses for tensors.

    `JITFunction.run` takes ten times as long: it specializes the arguments, of which the variant
    tells all (tables, which alone are specialized by alignment, are aligned as torch's allocator
    does), and looks for changes of the kernel's source, of globals and of Triton's settings. These
    apply only to variants that are launched later. None, for the usual way, with a Triton that
    does not take this launch: one without programs is tried, which launches nothing.
    """
    try:
        run, code, metadata = kernel.run, kernel.function, kernel.packed_metadata
        active, hooks = triton.runtime.driver.active, triton.knobs.runtime
        stream_on, device = active.get_current_stream, active.get_current_device()

        def launch(programs: int, arguments: _Arguments) -> None:
            stream, told = stream_on(device), None
            enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
            if programs and (getattr(enter, "calls", enter) or getattr(leave, "calls", leave)):
                grid = programs, 1, 1
                told = kernel.launch_metadata(grid, stream, *arguments, *constants)
            else:
                enter = leave = None  # chains without a link
            given = *arguments, *constants
            run(programs, 1, 1, stream, code, metadata, told, enter, leave, *given)

        launch(0, _addresses(arguments))
    except Exception:  # of whatever is missing
        return None
    return launch
