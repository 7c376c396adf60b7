"""Launches of Triton kernels: grids, compile-time switches, devices."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ampfast import capture
from ampfast.backends.core import Clip, DeviceTable, Pass, Segment, Update, norm_layout
from ampfast.backends.gpu import on_gpu
from ampfast.backends.triton import kernels

# Whether the kernels run on CPU tensors, as under TRITON_INTERPRET=1.
INTERPRETED = not isinstance(kernels.multi_tensor, triton.JITFunction)

_interpreter_lock = threading.Lock()

# Of every NVIDIA GPU from compute capability 7.5 on.
REGISTERS_PER_SM = 65_536
# Few, so that test lists take several programs with several chunks each.
INTERPRETED_PROGRAMS = 3
_most_programs = 0

_Arguments = tuple[Any, ...]

# Of variants that were launched, hence compiled and loaded, their most programs and how they are
# launched again: with a number of programs and the kernel's arguments.
_launched: dict[tuple[object, ...], tuple[int, Callable[[int, _Arguments], object]]] = {}


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
    return not INTERPRETED and capture.is_capturing()


def multi_tensor(
    work: Pass, table: DeviceTable, segment: Segment, is_last: bool, *, launches: bool = True
) -> None:
    """Launches one pass over the gradients of one dtype, or only compiles its kernel."""
    update: Update | None = work.ending.update if is_last and work.ending is not None else None
    scale = tracker = state = other = None
    factors: list[Any] = [1.0, 1.0, 0]
    if update is not None:
        scale, tracker, flags, *factors, state, _ = update
        other = flags[0] if flags else None
    coefficient, norm, clipping = work.coefficient, None, (0.0, 0)
    if (clip := work.clip) is not None:
        coefficient, norm = clip.sums, clip.norm
        clipping = float(clip.max_norm), int(clip.largest)
    arguments = (
        *(table.words, segment.word, segment.chunks, segment.first, table.partials.numel()),
        *(table.header, table.partials),
        *(work.factor, coefficient, work.found_inf, work.sums, work.factor_copy),
        *(work.marks, work.now, scale, tracker, state, other, *factors, norm, *clipping),
    )
    switches = (
        *(segment.dtype, segment.is_paired, segment.is_aligned),
        *(work.write, work.how, work.sums is not None, is_last, work.accumulate),
        None if norm is None else norm.dtype,
    )
    chunks = segment.chunks if launches else 0
    _launch("multi_tensor", table.header.device, chunks, arguments, _options, *switches)


# Compiles the kernel of a launch; refuses captures of uncompiled ones.
prepare = partial(multi_tensor, launches=False)


def _options(device: torch.device, *switches: Any) -> dict[str, Any]:
    """Switches and compiler options of a pass."""
    dtype, is_paired, is_aligned, write, how, norm, is_last, accumulate, _ = switches
    options = _geometry(device, dtype, is_paired, is_aligned)
    options |= {"WRITE": write, "FACTOR": int(how), "NORM": norm}
    options |= {"IS_LAST": is_last, "ACCUMULATE": accumulate}
    if torch.version.hip is None:
        # Without a limit the compiler may assign too few registers, and with a lower one it spills.
        more = is_paired or (norm and dtype is torch.float64)
        options["maxnreg"] = 128 if write and norm else 80 if more else 64
    return options


def _geometry(
    device: torch.device, dtype: torch.dtype, is_paired: bool, is_aligned: bool
) -> dict[str, Any]:
    """Switches and compiler options of all kernels over a table."""
    paired = 2 if is_paired and is_aligned else int(is_paired)
    triton_dtype = getattr(tl, str(dtype).removeprefix("torch."))
    shape = {"DTYPE": triton_dtype, "THREADS": _threads(device), "PAIRED": paired}
    return {**shape, "num_warps": 4, "enable_fp_fusion": False}


def _over(name: str, table: DeviceTable, segment: Segment, tensor: Tensor | None) -> None:
    arguments = (table.words, segment.word, segment.chunks, tensor)
    switches = (segment.dtype, segment.is_paired, segment.is_aligned)
    _launch(name, table.header.device, segment.chunks, arguments, _geometry, *switches)


# Launch the rounding of the float32 values of one dtype's pairs, and the health pass over gradients
# of one dtype.
narrow, measure = partial(_over, "narrow"), partial(_over, "measure")


def update_scale(update: Update) -> None:
    """Launches the update of the scale; takes one to four flags."""
    scale, growth_tracker, found_infs, *factors, state, norm = update
    flags = [*found_infs, *[found_infs[0]] * (4 - len(found_infs))]
    arguments = (scale, growth_tracker, state, norm, *flags, *factors)
    _launch("update_scale", scale.device, 1, arguments, _of_one_warp)


def clip_coefficient(clip: Clip) -> None:
    """Launches the clip coefficient from norms."""
    sums, max_norm, largest, norm, coefficient, scale, divisor, found_inf, skip_above, norms = clip
    arguments = (
        *(sums, sums.shape[0], float(max_norm), norm, coefficient),
        *(None if divisor is None else scale, divisor, found_inf, float(skip_above)),
        *(norms, 1 if norms is None else norms.numel() - norm_layout.RING),
    )
    _launch("clip_coefficient", sums.device, 1, arguments, _of_one_warp, largest, norm.dtype)


def _of_one_warp(device: torch.device, *switches: Any) -> dict[str, Any]:
    """Switches and compiler options of kernels that are no pass."""
    largest = {"LARGEST": switches[0]} if switches else {}
    return {**largest, "num_warps": 1, "enable_fp_fusion": False}


def _launch(
    name: str,
    device: torch.device,
    chunks: int,
    arguments: _Arguments,
    options: Callable[..., dict[str, Any]],
    *switches: Any,
) -> None:
    """Launches a kernel: the first time as Triton does, which compiles it, then directly.

    Only the first time `options(device, *switches)` is called. Without chunks nothing is launched,
    but the kernel is compiled.
    """
    # A None among the arguments is compiled in.
    variant = (name, device, switches, *map(type, arguments))
    known = _launched.get(variant)
    if known is not None:
        resident, again = known
        if chunks:
            again(min(chunks, resident), arguments)
        return
    capture.refuse_capture("this", f"its kernel is not compiled yet; {capture.WARM_UP}")
    function, given = getattr(kernels, name), options(device, *switches)
    compiled = None if INTERPRETED else function.warmup(*arguments, grid=(1,), **given)
    if not chunks:
        return
    resident = _most_programs or _resident_programs(compiled, device)
    kernel = function[(min(chunks, resident),)](*arguments, **given)
    _launched[variant] = resident, _again(function, kernel, arguments, given)


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


def _again(
    function: Any, kernel: Any, arguments: _Arguments, options: dict[str, Any]
) -> Callable[[int, _Arguments], object]:
    """How a compiled kernel is launched from its second time on.

    Directly, where this Triton does it in a known way. `JITFunction.run` takes ten times as long:
    it specializes the arguments, of which the variant tells all (tables, which alone are
    specialized by alignment, are aligned as torch's allocator does), and looks for changes of the
    kernel's source, of globals and of Triton's settings. These apply only to variants that are
    launched later.
    """
    kind: Any = type(kernel)
    if not _is_known(kind):
        return lambda programs, arguments: function[(programs,)](*arguments, **options)
    constants = [options[name] for name in function.arg_names[len(arguments) :]]
    tensors = [place for place, each in enumerate(arguments) if isinstance(each, Tensor)]
    run, code, metadata = kernel.run, kernel.function, kernel.packed_metadata
    active, hooks = triton.runtime.driver.active, triton.knobs.runtime
    stream_on, device = active.get_current_stream, active.get_current_device()

    def launch(programs: int, arguments: _Arguments) -> None:
        given = [*arguments, *constants]
        for place in tensors:
            # Of a tensor Triton would ask the driver, too, whether the device can access it.
            given[place] = given[place].data_ptr()
        stream, told = stream_on(device), None
        enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            told = kernel.launch_metadata((programs, 1, 1), stream, *given)
        else:
            enter = leave = None  # chains without a link
        run(programs, 1, 1, stream, code, metadata, told, enter, leave, *given)

    return launch


@cache
def _is_known(kind: Any) -> bool:
    """Whether Triton launches compiled kernels of this type as `_again` does.

    Its own launch of them is asked, with a stand-in for a kernel that records the call.
    """
    calls = []

    class Recorder:
        function, packed_metadata = object(), object()

        def _init_handles(self) -> None:
            pass

        def launch_metadata(self, *arguments: Any) -> Any:
            return arguments

        def run(self, *arguments: Any) -> None:
            calls.append(arguments)

    try:
        kind.__getitem__(Recorder(), (2, 3, 4))("argument", stream=5)
        active, hooks = triton.runtime.driver.active, triton.knobs.runtime
        active.get_current_stream(active.get_current_device())
        expected = (
            *(2, 3, 4, 5, Recorder.function, Recorder.packed_metadata),
            ((2, 3, 4), 5, "argument"),
            *(hooks.launch_enter_hook, hooks.launch_exit_hook, "argument"),
        )
    except Exception:  # of whatever is missing
        return False
    return calls == [expected]
