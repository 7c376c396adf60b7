"""Model of a pass on a GPU beside its measurement: the table of docs/contributing/kernels.md."""

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
from .cases import GradCase, case_of, dtype_name
from .decisive import LISTS, SUBJECT
from .providers import CHECK, UNSCALE
from .results import OTHERS, Results

PAGE = "docs/contributing/kernels.md"
# What CUB's reduction reaches on an H200, by NVIDIA/cccl#9722.
BYTES_PER_SECOND = 4.3e12
# Of a launch, until the first gradient is read and after the last: estimated from the machine code,
# not measured.
FIXED_SECONDS = 3.2e-6
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


def block(results: Sequence[Results]) -> str:
    """Table of the model, with the measurements of the newest results from a GPU, if any."""
    of_gpus = [each for each in results if any(row.subject == SUBJECT for row in each.rows)]
    newest = max(of_gpus, key=lambda each: each.date, default=None)
    header, lines = ("list", "pass", "launches", "bytes", "table", "expected"), []
    for (name, dtype), call in itertools.product(LISTS, PASSES):
        counted = cost(case_of(name), dtype, call)
        figures = (
            *(f"{counted.launches}", f"{counted.bytes / 1e6:,.1f} MB"),
            *(f"{counted.table_bytes / 1e3:,.1f} kB", f"{counted.seconds * 1e6:,.1f} us"),
        )
        place, measured = f"{name}, {dtype_name(dtype)}", _measured(newest, name, dtype, call)
        lines.append((place, call, *figures, *measured))
    parts = [
        "What a pass of ampfast takes, counted; what it should take; and what was measured, of the "
        "faster backend and of torch's op:",
        tables.markdown((*header, "measured", "torch, measured"), lines, 2),
    ]
    if newest is not None:
        parts.append(f"Measured on {newest.place} with {newest.versions}, {newest.date[:10]}.")
    return "\n\n".join(parts)


def _measured(results: Results | None, name: str, dtype: torch.dtype, call: str) -> tuple[str, str]:
    """Medians of the faster backend and of torch's op, which up to 2.15 lacks bfloat16."""
    wanted = {(SUBJECT, case, dtype_name(dtype), call) for case in (name, f"{name}, cold")}
    rows = [row for row in (results.rows if results else []) if row.name[:4] in wanted]
    ours = [row for row in rows if row.side not in OTHERS]
    if not ours:
        return tables.NOT_MEASURED, tables.NOT_MEASURED
    row = min(ours, key=lambda row: row.ms.p50)
    theirs = (f"{tables.number(1e3 * row.ms.p50)} us" for row in rows if row.side == "torch")
    told = f"{tables.number(1e3 * row.ms.p50)} us, {row.side.removeprefix('ampfast, ')}"
    return told, next(theirs, "-")
