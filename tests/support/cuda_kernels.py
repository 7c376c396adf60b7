"""The CUDA kernels' compiler and flags, and compiled kernels without a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
from collections.abc import Iterator, Sequence
from types import ModuleType

from ptx_emulator import Range, cuda, driver, emulation
from torch import Tensor

from ampfast.backends.core import Clip, DeviceTable, Pass, Segment, Update
from support import host_cuda
from support.launchers import spans_of
from support.processes import ROOT, module_at

NVCC = shutil.which("nvcc")


# It builds nothing as it is imported.
SETUP = module_at(ROOT / "setup.py")
FLAGS = SETUP.nvcc_flags()


# Few, so that test lists take several programs with several chunks each.
PROGRAMS = 3
# As in csrc/table_layout.h.
WORDS_OF_LAUNCH = 448


class EmulatedLauncher:
    """Launches of a module, run and checked by the PTX emulator."""

    def __init__(self, module: ModuleType, *, races: bool) -> None:
        self._module = module
        self._races = races
        self.limit_programs(0)

    def limit_programs(self, programs: int) -> None:
        self._module.limit_programs(programs or PROGRAMS)

    def is_capturing(self) -> bool:
        return False

    def prepare(self, work: Pass, table: DeviceTable, segment: Segment, is_last: bool) -> None:
        if prepare := getattr(self._module, "prepare", None):
            prepare(work, table, segment, is_last)

    def multi_tensor(self, work: Pass, table: DeviceTable, segment: Segment, is_last: bool) -> None:
        with self._restricted(
            [
                *_table(table, segment, work.write, in_memory=not self._has_room(table)),
                *_read(work.factor, work.coefficient),
                *_written(work.found_inf, work.sums, work.factor_copy, work.marks, work.now),
                *(() if work.clip is None else _of_clip(work.clip)),
                *(() if work.ending is None else _of_update(work.ending)),
            ]
        ):
            self._module.multi_tensor(work, table, segment, is_last)

    def _has_room(self, table: DeviceTable) -> bool:
        """Whether a table is among the arguments of a launch."""
        return self._module.__name__.endswith("cuda") and table.words.numel() <= WORDS_OF_LAUNCH

    def update_scale(self, update: Update) -> None:
        with self._restricted(_of_update(update)):
            self._module.update_scale(update)

    def clip_coefficient(self, clip: Clip) -> None:
        with self._restricted([*_read(clip.sums), *_of_clip(clip)]):
            self._module.clip_coefficient(clip)

    @contextlib.contextmanager
    def _restricted(self, memory: Sequence[Range]) -> Iterator[None]:
        with emulation(memory=memory, races=self._races):
            yield


def _of_clip(clip: Clip) -> Iterator[Range]:
    yield from _read(clip.scale)
    written = clip.norm, clip.coefficient, clip.divisor, clip.found_inf, clip.accepted_norms
    yield from _written(*written)


def _read(*tensors: Tensor | None) -> Iterator[Range]:
    yield from (Range.of(t, may_write=False) for t in tensors if t is not None)


def _written(*tensors: Tensor | None) -> Iterator[Range]:
    yield from (Range.of(t, may_write=True) for t in tensors if t is not None)


def _of_update(update: Update) -> Iterator[Range]:
    yield from _written(update.scale, update.growth_tracker, update.state)
    yield from _read(update.norm, *update.found_infs)


def _table(
    table: DeviceTable, segment: Segment, write: bool, *, in_memory: bool
) -> Iterator[Range]:
    """Memory of a table: header and partial sums are writable, the rest is read-only.

    Read as raw memory, since tests count reads of tensors.
    """
    yield from _written(table.header[:2], table.partials)
    if in_memory:
        yield from _read(table.words)
    words = (ctypes.c_int64 * table.words.numel()).from_address(table.words.data_ptr())
    for chunk in spans_of(words, segment):
        yield Range(chunk.address, chunk.size, write)


__all__ = ["ARCHITECTURES", "install", "install_idle", "install_on_host"]

# The oldest architecture converts bfloat16 in software.
ARCHITECTURES = ("75", "90")
SOURCES = [ROOT / name for name in SETUP.found(*SETUP.KERNEL_SOURCES)]
SOURCE = ROOT / "csrc" / "cuda" / "multi_tensor.cu"
# Any PTX, since the stand-in only looks whether it may be some.
IMAGE = b"// of kernels that are known by name"


def install(core: ModuleType, architecture: str) -> driver.Driver:
    """Loads the kernels' PTX, which the emulator runs.

    Args:
        core: `ampfast._C`.
        architecture: Target of the code, of `ARCHITECTURES`.
    """
    ptx = cuda.compiled(SOURCE, architecture=architecture, flags=FLAGS, headers=SOURCES)
    made = driver.activate(ptx)
    core.cuda_load_kernels(0, ptx.encode())
    return made


def install_idle(core: ModuleType) -> driver.Driver:
    """Loads kernels that do nothing."""
    made = driver.stand_in()
    core.cuda_load_kernels(0, IMAGE)
    return made


def install_on_host(core: ModuleType, sanitizer: str = "") -> driver.Driver:
    """Loads the kernels as C++ for this machine, `host_cuda.h`.

    Args:
        core: `ampfast._C`.
        sanitizer: "address" or "thread", whose library must be preloaded, or none.
    """
    made = driver.stand_in()
    made.launch_by(host_cuda.launcher(SOURCES, sanitizer))
    core.cuda_load_kernels(0, IMAGE)
    return made
