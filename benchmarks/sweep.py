"""The kernels with other switches, which change no result: which are fastest on this card?"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ampfast import errors
from ampfast.backends import gpu

from . import ceilings, decisive, providers, tables
from .cases import GradCase, make_gradients
from .harness import Contender, Job, Measured, Setting
from .kernels import Lists
from .machine import REPOSITORY
from .providers import CHECK, COPY, READ, UNSCALE, Scalars
from .results import Results
from .timing import side

SUBJECT, BULK = "sweep", "bulk"
BACKENDS = ("triton", "cuda")
LISTS = (
    ("one_256m", torch.float32),
    ("bert_large", torch.float32),
    ("llama_7b", torch.bfloat16),
    ("1000x1k", torch.float32),
)
PATHS = (CHECK, UNSCALE)
# Sizes around those of vectors, windows and chunks.
COMPARED = GradCase("compared", ((3, 5), (0,), (7,), (), (1025,), (70_001,), (140_001,)))
# Of 128 threads, a window has so many KiB for each vector that a thread loads at once.
KIB_OF_LOAD = 2
# In the order of the kernels' enumeration of dtypes.
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
SOURCE = Path(__file__).with_suffix(".cu")
BULK_SOURCE = SOURCE.with_name("bulk.cu")
FLAGS = ("-O3", "--fmad=false", "-std=c++17", "-shared", "-Xcompiler", "-fPIC")
# Registers of a thread that holds more than the usual window.
MORE_REGISTERS = {8: 96, 16: 168}


@dataclass(frozen=True)
class Variant:
    """Backend with its switches.

    Attributes:
        backend: "triton" or "cuda".
        programs: Most programs of a multiprocessor; None for as many as it holds at once.
        loads: Vectors of 16 bytes that a thread loads at once.
        contiguous: Whether each program takes chunks that follow one another.
        prefetch: Whether the next window is loaded before one is written.
        stream: Whether gradients are marked as used once, for the caches.
    """

    backend: str
    programs: int | None = None
    loads: int = 4
    contiguous: bool = False
    prefetch: bool = False
    stream: bool = False

    @property
    def name(self) -> str:
        """Its changes of the default, as in "cuda, 16 KiB, prefetch"."""
        changes = [
            self.programs and f"{self.programs} programs",
            self.loads != Variant.loads and f"{self.loads * KIB_OF_LOAD} KiB",
            *(switch for switch in ("contiguous", "prefetch", "stream") if getattr(self, switch)),
        ]
        return ", ".join([self.backend, *filter(None, changes)])

    @property
    def defines(self) -> tuple[str, ...]:
        """Macros of the CUDA kernels."""
        values = {
            "VECTORS": self.loads,
            "CONTIGUOUS": self.contiguous,
            "PREFETCH": self.prefetch,
            "STREAM": self.stream,
            # So many programs are promised to fit, which limits a thread's registers.
            "LEAST_PROGRAMS": 65536 // 128 // MORE_REGISTERS.get(self.loads, 64),
        }
        return tuple(f"-DAMPFAST_{name}={int(value)}" for name, value in values.items())


FIRST = Variant("triton")


def variants(backends: Sequence[str]) -> list[Variant]:
    """All variants; those that change least come first, in case the time is up.

    Triton's come before CUDA's, which are being compiled meanwhile.
    """
    booleans = (False, True)
    switches = itertools.product((None, 4, 6, 8, 12, 16), (4, 8, 16), *(3 * [booleans]))
    usual = astuple(Variant(""))[1:]

    def changes(variant: Variant) -> int:
        return sum(a != b for a, b in zip(astuple(variant)[1:], usual, strict=True))

    found = [Variant(name, *each) for each in switches for name in backends]
    return sorted(found, key=lambda v: (max(1, changes(v)), v.backend == "cuda", changes(v)))


def jobs(on: Setting) -> list[Job]:
    """One job for each variant."""
    if on.queue is None:
        return []
    on = replace(on, effort=replace(on.effort, comparison_s=0.0, profiled=False))
    names, _ = providers.available(on.device)
    found = variants([name for name in names if name in BACKENDS])
    defines = tuple(dict.fromkeys(each.defines for each in found if each.backend == "cuda"))
    return [Job(each.name, functools.partial(measure, each, defines, on)) for each in found]


def bulk_jobs(on: Setting) -> list[Job]:
    """One job, for reads by bulk copies."""
    names, _ = providers.available(on.device)
    return [Job("bulk copies", functools.partial(measure_bulk, on))] if "cuda" in names else []


def measure(variant: Variant, libraries: Sequence[tuple[str, ...]], on: Setting) -> Measured:
    """Times the passes of a variant over every list, after comparing their results.

    The first time, all `libraries` begin to be compiled.
    """
    device = on.device
    for defines in libraries:
        _compiler(SOURCE, defines, device)
    measured = Measured()
    with applied(variant, device) as kernels:

        def calls(scalars: Scalars) -> providers.Calls:
            return providers.launches(variant.name, device, scalars, kernels)

        small = [torch.rand(shape, device=device) + 0.5 for shape in COMPARED.shapes]
        for dtype in dict.fromkeys(dtype for _, dtype in LISTS):
            decisive.assert_parity([each.to(dtype) for each in small], calls, PATHS)
        scalars = Scalars.make(device)
        for case, dtype in [(decisive.case_for(name, device), dtype) for name, dtype in LISTS]:
            gradients, copies = _lists(case, dtype, device)
            contenders = [*copies, *gradients.contenders([calls(scalars)], PATHS)]
            lists = len(gradients.lists)
            timed = decisive.time_on_device(SUBJECT, case, dtype, contenders, lists, on)
            measured.rows += decisive.rows_of(timed)
            measured.notes += timed.notes
            gradients.assert_steady(scalars.found_inf)
    measured.rows = [row for row in measured.rows if row.call != COPY or variant == FIRST]
    return measured


@functools.cache
def _lists(
    case: GradCase, dtype: torch.dtype, device: torch.device
) -> tuple[Lists, list[Contender]]:
    """Lists that all variants share, and a copy beside them."""
    gradients = Lists(case, dtype, device, decisive.lists_in_turn(case, dtype, device))
    return gradients, [each for each in gradients.copies() if each.path == COPY]


@contextlib.contextmanager
def applied(variant: Variant, device: torch.device) -> Iterator[gpu.DeviceKernels]:
    """Kernels of a variant."""
    processors = 1
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    most = variant.programs and variant.programs * processors
    if variant.backend == "cuda":
        library = Library(built(SOURCE, variant.defines, device))
        library.limit_programs(most)
        yield gpu.DeviceKernels(library)
        return
    from ampfast.backends.triton import launch

    switches: dict[str, Any] = {
        "CONTIGUOUS": variant.contiguous,
        "PREFETCH": variant.prefetch,
        "EVICT": "evict_first" if variant.stream else "",
    }
    if variant.loads in MORE_REGISTERS and torch.version.hip is None:
        switches["maxnreg"] = MORE_REGISTERS[variant.loads]
    launch.tune(variant.loads, **switches)
    launch.limit_programs(most)
    try:
        yield gpu.DeviceKernels(launch)
    finally:
        launch.tune()
        launch.limit_programs(None)


class Library:
    """Launcher of the CUDA kernels in a shared library; for passes of `providers.launches`."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.sweep_launch.restype = ctypes.c_char_p

    def limit_programs(self, programs: int | None) -> None:
        self._library.sweep_limit(ctypes.c_int64(programs or 0))

    def on(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        return gpu.on_gpu(device)

    def is_capturing(self) -> bool:
        return errors.is_capturing()

    def multi_tensor(self, work: gpu.Pass, segment: Any, epilogue: gpu.Epilogue) -> None:
        """Launches a pass without norm, coefficient, tracking and update."""
        words = map(ctypes.c_int64, (segment.word, segment.chunks, segment.partials))
        _call(
            self._library.sweep_launch,
            DTYPES.index(segment.dtype),
            work.table.buffer,
            *words,
            int(work.write),
            int(work.use),
            work.factor,
            work.found_inf,
        )


def _call(function: Callable[..., bytes | None], *arguments: Any) -> None:
    """Calls a function of a library, on the current stream."""
    given = [
        ctypes.c_void_p(each.data_ptr()) if isinstance(each, Tensor) else each for each in arguments
    ]
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    if error := function(*given, stream):
        raise RuntimeError(error.decode())


def built(source: Path, defines: tuple[str, ...], device: torch.device) -> Path:
    """Library with these macros; waits until it is compiled."""
    path, compiler = _compiler(source, defines, device)
    if compiler.wait():
        told = path.with_suffix(".log").read_text().strip().splitlines()
        raise RuntimeError(f"nvcc: {(told or [compiler.returncode])[-1]}")
    return path


@functools.cache
def _compiler(
    source: Path, defines: tuple[str, ...], device: torch.device
) -> tuple[Path, subprocess.Popen[bytes]]:
    """What is compiled, and its compiler, which runs beside others."""
    from torch.utils.cpp_extension import CUDA_HOME

    values = "-".join(define.partition("=")[2] for define in defines)
    path = REPOSITORY / "build" / "sweep" / f"{source.stem}-{values}.so"
    path.parent.mkdir(parents=True, exist_ok=True)
    nvcc = str(Path(CUDA_HOME, "bin", "nvcc")) if CUDA_HOME else "nvcc"
    architecture = "-arch=sm_{}{}".format(*torch.cuda.get_device_capability(device))
    command = [nvcc, *FLAGS, architecture, *defines, str(source), "-o", str(path)]
    with open(path.with_suffix(".log"), "wb") as log:
        return path, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def measure_bulk(on: Setting) -> Measured:
    """Times reads by bulk copies beside plain ones, over the largest list's memory in one piece."""
    device, (name, dtype) = on.device, LISTS[0]
    case = decisive.case_for(name, device)
    library = ctypes.CDLL(str(built(BULK_SOURCE, (), device)))
    library.bulk_read.restype = ctypes.c_char_p
    memory = torch.randint(0, 2**31 - 1, (case.elements,), dtype=torch.int32, device=device)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    read = ceilings.reader(memory)
    contenders = [Contender(READ, "torch", lambda _: read())]
    for programs in (1, 2, 4):
        partials = torch.zeros(programs * processors, dtype=torch.int32, device=device)
        size = ctypes.c_int64(memory.nbytes)
        call = functools.partial(_call, library.bulk_read, memory, size, partials.numel(), partials)
        call()
        if partials.max() != memory.max():
            raise AssertionError(f"bulk copies: {partials.max()} as maximum, not {memory.max()}")
        provider = f"bulk copies, {programs} programs"
        contenders.append(Contender(READ, provider, lambda _, call=call: call()))
    gradients, copies = _lists(case, dtype, device)
    contenders += copies
    timed = decisive.time_on_device(BULK, case, dtype, contenders, len(gradients.lists), on)
    return Measured(decisive.rows_of(timed))


def chosen(results: Results) -> list[Variant]:
    """Each backend without a change, and its best variant of a sweep."""
    known = {side(each.name): each for each in variants(BACKENDS)}
    found = []
    ranked = [known[line[0]] for line in tables.ranking(results.rows).lines if line[0] in known]
    for backend in BACKENDS:
        of_backend = [each for each in ranked if each.backend == backend]
        found += dict.fromkeys([*(e for e in of_backend if e == Variant(backend)), *of_backend[:1]])
    return found


def profile(results: Results, device: torch.device) -> None:
    """Runs the chosen variants of a sweep for a profiler: each pass once, over one list."""
    name, dtype = LISTS[0]
    gradients = make_gradients(decisive.case_for(name, device), dtype, device)
    scalars = Scalars.make(device)
    for variant in chosen(results):
        print(f"{variant.name}: {' and '.join(PATHS)} of {name}", flush=True)
        with applied(variant, device) as kernels:
            calls = providers.launches(variant.name, device, scalars, kernels)
            prepared = calls.prepare(gradients)
            # First unprofiled: it compiles.
            for profiled in (False, True):
                torch.cuda.synchronize()
                if profiled:
                    torch.cuda.profiler.start()
                for path in PATHS:
                    calls.paths[path](prepared, int(profiled))
                torch.cuda.synchronize()
            torch.cuda.profiler.stop()


if __name__ == "__main__":
    current = torch.device("cuda", torch.cuda.current_device())
    profile(Results.read(Path(sys.argv[1])), current)
