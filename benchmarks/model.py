"""Model of a pass on a GPU beside its measurement: the table of docs/kernels.md."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ampfast.backends import core, gpu
from ampfast.backends.core import Factor, Pass

from . import tables
from .cases import CASES, GradCase, dtype_name
from .decisive import LISTS, SUBJECT
from .providers import CHECK, UNSCALE
from .results import Results

PAGE = "docs/kernels.md"
# What CUB's reduction reaches on an H200, by NVIDIA/cccl#9722.
BYTES_PER_SECOND = 4.3e12
# Of a launch, until the first gradient is read and after the last: estimated from the machine code,
# not measured. A program of torch's op takes its part of the list from the launch's arguments, and
# nobody waits for the last one.
FIXED_SECONDS = 3.2e-6
TORCH_FIXED_SECONDS = 2.5e-6
# Tensors and blocks of a launch of torch's op, and elements of a block.
TORCH_LAUNCHES = {"torch 2.11": (110, 320), "torch 2.12, CUDA 13": (770, 2240)}
TORCH_BLOCK = 1 << 16
PASSES = {
    CHECK: Pass(False, Factor.NONE),
    UNSCALE: Pass(True, Factor.TIMES_RECIPROCAL, torch.ones(())),
}


@dataclass
class Cost:
    """Launcher that runs nothing and adds up what launches would move."""

    launches: int = 0
    bytes: int = 0
    table_bytes: int = 0

    @property
    def seconds(self) -> float:
        """Least time to launch and to move it all."""
        moved = (self.bytes + self.table_bytes) / BYTES_PER_SECOND
        return self.launches * FIXED_SECONDS + moved

    def is_capturing(self) -> bool:
        return False

    def multi_tensor(
        self, work: Pass, table: core.DeviceTable, segment: Any, is_last: bool
    ) -> None:
        self.launches += 1
        words = table.words[segment.word :][: 2 * segment.chunks]
        covered = int((words[1::2] & 0xFFFFFFFF).sum())
        self.bytes += (2 if work.write else 1) * covered
        self.table_bytes = table.words.nbytes


def cost(case: GradCase, dtype: torch.dtype, call: str) -> Cost:
    """Counts a pass over a list of a case, whose memory is never touched."""
    size = max(torch.Size(shape).numel() for shape in case.shapes) * dtype.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    memory = torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=dtype)
    tensors = [memory[: torch.Size(shape).numel()].view(shape) for shape in case.shapes]
    counted = Cost()
    gpu.DeviceKernels(counted).run(core.list_of(tensors, memory.device), PASSES[call])
    return counted


def torch_launches(case: GradCase, tensors: int, blocks: int) -> int:
    """Launches of torch's op over a list, of at most so many tensors and blocks each."""
    launches, of_launch, blocks_left = 0, 0, blocks
    for shape in case.shapes:
        left = -(-torch.Size(shape).numel() // TORCH_BLOCK)
        of_launch += 1
        while left >= blocks_left:
            # What is left of a tensor begins the next launch.
            left -= blocks_left
            launches, of_launch, blocks_left = launches + 1, int(left > 0), blocks
        blocks_left -= left
        if of_launch == tensors:
            launches, of_launch, blocks_left = launches + 1, 0, blocks
    return launches + (of_launch > 0)


def _torch(case: GradCase, dtype: torch.dtype, tensors: int, blocks: int) -> str:
    """Launches and time of torch's op, which always writes; up to 2.15 it lacks bfloat16."""
    if dtype is torch.bfloat16:
        return "none"
    launches = torch_launches(case, tensors, blocks)
    moved = 2 * case.list_bytes(dtype) / BYTES_PER_SECOND
    return f"{launches:,}: {(launches * TORCH_FIXED_SECONDS + moved) * 1e6:,.1f} us"


def block(results: Sequence[Results]) -> str:
    """Tables of the model, with the measurements of the newest results from a GPU, if any."""
    of_gpus = [each for each in results if each.machine.get("gpu")]
    of_gpus = [each for each in of_gpus if any(row.subject == SUBJECT for row in each.rows)]
    newest = max(of_gpus, key=lambda each: each.date, default=None)
    counts, times = [], []
    for (name, dtype), call in itertools.product(LISTS, PASSES):
        case, counted = CASES[name], cost(CASES[name], dtype, call)
        place = (f"{name}, {dtype_name(dtype)}", call)
        moved = f"{counted.bytes / 1e6:,.1f} MB", f"{counted.table_bytes / 1e3:,.1f} kB"
        counts.append((*place, f"{len(case.shapes):,}", f"{counted.launches}", *moved))
        torchs = (_torch(case, dtype, *most) for most in TORCH_LAUNCHES.values())
        expected = f"{counted.seconds * 1e6:,.1f} us"
        times.append((*place, expected, *torchs, _measured(newest, name, dtype, call)))
    header = ("list", "pass", "tensors", "launches", "bytes", "table")
    names = ("list", "pass", "expected", *TORCH_LAUNCHES, "measured")
    parts = [
        "What a pass of ampfast takes, counted:",
        tables.Table("", "", "", header, counts, 2).markdown(),
        "What it should take, beside torch's (launches: expected time), and what was measured:",
        tables.Table("", "", "", names, times, 2).markdown(),
    ]
    if newest is not None:
        parts.append(f"Measured on {newest.place} with {newest.versions}, {newest.date[:10]}.")
    return "\n\n".join(parts)


def _measured(results: Results | None, name: str, dtype: torch.dtype, call: str) -> str:
    """The faster backend's median."""
    wanted = {(SUBJECT, case, dtype_name(dtype), call) for case in (name, f"{name}, cold")}
    rows = results.rows if results else []
    rows = [row for row in rows if row.name[:4] in wanted and row.side not in tables.OTHERS]
    if not rows:
        return tables.NOT_MEASURED
    row = min(rows, key=lambda row: row.ms.p50)
    return f"{tables.number(1e3 * row.ms.p50)} us, {row.side.removeprefix('ampfast, ')}"
