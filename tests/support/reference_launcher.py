"""Launcher for CPU tensors by torch's ops, which counts launches and bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ampfast.backends import cpu, torch_ops
from ampfast.backends.core import Clip, DeviceTable, Factor, Pass, Segment, Update

_INFINITE = 0x7FF0000000000000


@dataclass
class ReferenceLauncher:
    """Counts launches, and bytes of gradients read and written."""

    launches: list[str] = field(default_factory=list)
    read: int = 0
    written: int = 0
    capturing: bool = False
    _squares: float = 0.0

    def is_capturing(self) -> bool:
        return self.capturing

    def multi_tensor(self, work: Pass, table: DeviceTable, segment: Segment, is_last: bool) -> None:
        self.launches.append("unscale" if work.write else "check")
        header = table.header
        used_peak = torch.tensor(0.0, dtype=torch.float64)
        factor = torch.tensor(1.0) if work.factor is None else work.factor.reshape(())
        if work.how is Factor.TIMES_RECIPROCAL:
            factor = factor.double().reciprocal().float()
        if work.clip is not None:
            coefficient = torch.empty((), dtype=torch.float64)
            cpu.clip(work.clip._replace(coefficient=coefficient))
            work = work._replace(coefficient=coefficient)
        chunks = spans_of(table.words.tolist(), segment)
        if work.coefficient is not None and not segment.is_paired:
            chunks = chunks if factor * work.coefficient != 1 else []
        for chunk in chunks:
            number, gradient = chunk.parameter, chunk.values(segment.dtype)
            self.read += gradient.nbytes
            wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
            if work.how is Factor.DIVIDE:
                used = wide / factor.to(wide.dtype)
            elif work.how is Factor.NONE:
                used = wide
            else:
                used = wide * factor.to(wide.dtype)
                if not segment.is_paired:
                    used = used.to(gradient.dtype)
            if work.sums is not None:
                squares = (wide * factor.to(wide.dtype)).double().square().sum()
                self._squares += squares.item()
                if work.marks is not None:
                    torch_ops.squares_in(work.marks)[number] += squares
            if work.marks is not None:
                peak = torch.linalg.vector_norm(used.reshape(-1), torch.inf)
                torch_ops.mark_(work.marks, work.now, [number], peak.reshape(1))
            if work.write:
                written = used
                if work.coefficient is not None:
                    written = used.to(wide.dtype) * work.coefficient.to(wide.dtype)
                target = chunk.floats(segment.dtype) if segment.is_paired else gradient
                target.copy_(written)
                self.written += target.nbytes
            peak = used.double().abs().max()
            used_peak = torch.maximum(used_peak, peak)  # a NaN wins
        bits = used_peak.view(torch.int64) & 0x7FFFFFFFFFFFFFFF
        header[1] = torch.maximum(header[1], bits)
        if not is_last:
            return
        if work.sums is not None:
            work.sums[0] = self._squares
            work.sums[1] = header[1:2].view(torch.float64)[0]
            self._squares = 0.0
        found = bool(header[1] >= _INFINITE)
        if found or not work.accumulate:
            work.found_inf.fill_(float(found))
        if work.factor_copy is not None:
            work.factor_copy.copy_(work.factor)
        if work.ending is not None and (update := work.ending.update) is not None:
            self._update(update._replace(found_infs=[work.found_inf, *update.found_infs]))
        header.zero_()

    def narrow(self, table: DeviceTable, segment: Segment, found_inf: Tensor | None) -> None:
        self.launches.append("narrow")
        if found_inf is None or not found_inf:
            for chunk in spans_of(table.words.tolist(), segment):
                values = chunk.values(segment.dtype)
                values.copy_(chunk.floats(segment.dtype))
                self.read += 4 * values.numel()
                self.written += values.nbytes

    def update_scale(self, update: Update) -> None:
        self.launches.append("update")
        assert 1 <= len(update.found_infs) <= 4
        self._update(update)

    def clip_coefficient(self, clip: Clip) -> None:
        self.launches.append("clip")
        cpu.clip(clip)

    def _update(self, update: Update) -> None:
        scale, tracker = update.scale.data, update.growth_tracker.data
        assert cpu.update(update._replace(scale=scale, growth_tracker=tracker))


@dataclass
class Chunk:
    """Chunk of a table: its memory, its parameter, and the float32 values of a pair.

    Attributes:
        address: Where it begins.
        size: Its bytes.
        parameter: Number of its parameter.
        wide: Where its float32 values begin; None if it is not of a pair.
    """

    address: int
    size: int
    parameter: int
    wide: int | None

    def values(self, dtype: torch.dtype) -> Tensor:
        return _at(self.address, self.size, dtype)

    def floats(self, dtype: torch.dtype) -> Tensor:
        return _at(self.wide, self.size // dtype.itemsize * 4, torch.float32)


def _at(address: int, size: int, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype)


def spans_of(words: Sequence[int], segment: Segment) -> list[Chunk]:
    """Chunks of a segment."""
    count = 3 if segment.is_paired else 2
    found = []
    for number in range(segment.chunks):
        first = segment.word + count * number
        address, extent, *wide = words[first : first + count]
        found.append(Chunk(address, extent % 2**32, extent >> 32, wide[0] if wide else None))
    return found
