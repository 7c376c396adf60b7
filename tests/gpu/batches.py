"""Batches of gradient lists in a few large tensors, compared with torch's op on the device.

Lists are views. The memory between them holds infinities, so that a read outside of a view
shows in a flag and a write shows in a comparison. One comparison serves a whole batch.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from gpu_support import flag
from support.comparison import BITS, FLOATS
from support.kernel_calls import grads_of, run_check, run_unscale
from support.kernel_parity import inverse_of

from ampfast.backends import core

ALIGNMENT = 16


@dataclass
class Batch:
    """Positions of the views of each list.

    Attributes:
        spans: By dtype, (list, begin, elements) of each view, in order of memory.
        sizes: Elements of the whole memory by dtype.
        lists: Number of lists.
    """

    spans: dict[torch.dtype, list[tuple[int, int, int]]] = field(default_factory=dict)
    sizes: dict[torch.dtype, int] = field(default_factory=dict)
    lists: int = 0

    def add(self, views: Iterable[tuple[torch.dtype, int, int]]) -> None:
        """Adds a list of views, each with dtype, gap before it and length in elements."""
        for dtype, gap, count in views:
            begin = self.sizes.get(dtype, 0) + gap
            self.spans.setdefault(dtype, []).append((self.lists, begin, count))
            self.sizes[dtype] = begin + count
        self.lists += 1

    def close(self) -> None:
        """Leaves a gap behind the last views."""
        for dtype in self.sizes:
            self.sizes[dtype] += ALIGNMENT


def window(dtype: torch.dtype) -> int:
    return core.WINDOW_BYTES // dtype.itemsize


def random_batch(seed: int, lists: int) -> Batch:
    """Lists of one to six views of one to three dtypes, at any offset."""
    chance = random.Random(seed)
    batch = Batch()
    for _ in range(lists):
        dtypes = chance.sample(FLOATS, chance.choice((1, 1, 2, 3)))
        views = []
        for _ in range(chance.randint(1, 6)):
            dtype = chance.choice(dtypes)
            one = window(dtype)
            near = chance.choice((one, one, 2 * one, 3 * one)) + chance.randint(-9, 9)
            count = chance.choice((near, chance.randint(1, 40), chance.randint(1, 2 * one)))
            views.append((dtype, chance.randint(1, 2 * ALIGNMENT), count))
        batch.add(views)
    batch.close()
    return batch


def every_offset_batch(dtype: torch.dtype) -> Batch:
    """One view per list: small sizes and those around a window, at every offset within 16 bytes."""
    one = window(dtype)
    per_vector = ALIGNMENT // dtype.itemsize
    sizes = [*range(1, 2 * per_vector + 2)]
    for windows in (1, 2):
        sizes += range(windows * one - per_vector - 1, windows * one + per_vector + 2)
    batch = Batch()
    for size in sizes:
        for offset in range(per_vector):
            end = batch.sizes.get(dtype, 0)
            gap = 1 + (offset - end - 1) % per_vector
            batch.add([(dtype, gap, size)])
    batch.close()
    return batch


KINDS = ("normal", "wide", "bits")


def values(
    dtype: torch.dtype, count: int, kind: str, generator: torch.Generator, device: torch.device
) -> torch.Tensor:
    """Normal values; or values of any exponent, with subnormals; or random bits."""
    if kind == "normal":
        drawn = torch.randn(count, generator=generator, device=device, dtype=torch.float32)
        return (64 * drawn).to(dtype)
    width = 8 * dtype.itemsize
    low, high = -(2 ** (width - 1)), 2 ** (width - 1) - 1
    bits = torch.randint(low, high, (count,), dtype=BITS[dtype], generator=generator, device=device)
    drawn = bits.view(dtype)
    return drawn if kind == "bits" else torch.where(drawn.isfinite(), drawn, 1.5)


class Memory:
    """Memory of a batch on a device: views, gaps and values."""

    def __init__(self, batch: Batch, kind: str, seed: int, device: torch.device) -> None:
        self.batch = batch
        self.device = device
        generator = torch.Generator(device).manual_seed(seed)
        chance = random.Random(seed)
        self.tensors: dict[torch.dtype, torch.Tensor] = {}
        self._where: dict[torch.dtype, tuple[torch.Tensor, ...]] = {}
        for dtype, spans in batch.spans.items():
            size = batch.sizes[dtype]
            places = [
                torch.tensor(column, dtype=torch.int64, device=device)
                for column in (
                    [number for number, _, _ in spans],
                    [begin for _, begin, _ in spans],
                    [begin + count for _, begin, count in spans],
                )
            ]
            self._where[dtype] = tuple(places)
            edges = torch.zeros(size + 1, dtype=torch.int64, device=device)
            edges.index_add_(0, places[1], torch.ones_like(places[1]))
            edges.index_add_(0, places[2], -torch.ones_like(places[2]))
            inside = edges.cumsum(0)[:size] > 0
            memory = torch.where(inside, values(dtype, size, kind, generator, device), torch.inf)
            bad = [span for span in spans if chance.random() < 0.2]
            if bad:
                at = [
                    begin + chance.choice((0, count - 1, chance.randrange(count)))
                    for _, begin, count in bad
                ]
                what = [chance.choice((torch.inf, -torch.inf, torch.nan)) for _ in bad]
                memory[torch.tensor(at, device=device)] = torch.tensor(
                    what, dtype=torch.float64
                ).to(device, dtype)
            self.tensors[dtype] = memory

    def copy(self) -> Memory:
        copy = object.__new__(Memory)
        copy.batch, copy.device, copy._where = self.batch, self.device, self._where
        copy.tensors = {dtype: tensor.clone() for dtype, tensor in self.tensors.items()}
        return copy

    def lists(self) -> list[list[torch.Tensor]]:
        """Views of each list, dtype by dtype."""
        lists: list[list[torch.Tensor]] = [[] for _ in range(self.batch.lists)]
        for dtype, spans in self.batch.spans.items():
            memory = self.tensors[dtype]
            for number, begin, count in spans:
                lists[number].append(memory[begin : begin + count])
        return lists

    def found(self, divisor: torch.Tensor | None = None) -> torch.Tensor:
        """For each list, whether one of its values, or quotients, is not finite."""
        found = torch.zeros(self.batch.lists, dtype=torch.int64, device=self.device)
        for dtype, (numbers, begins, ends) in self._where.items():
            memory = self.tensors[dtype]
            if divisor is not None:
                wide = memory if dtype is torch.float64 else memory.float()
                memory = wide / divisor.to(wide.dtype)
            bad = torch.zeros(memory.numel() + 1, dtype=torch.int64, device=self.device)
            torch.cumsum(~memory.isfinite(), 0, out=bad[1:])
            found.index_add_(0, numbers, bad[ends] - bad[begins])
        return (found > 0).float()

    def differences(self, other: Memory) -> torch.Tensor:
        """Number of elements that differ, on the device; all NaNs are equal."""
        total = torch.zeros((), dtype=torch.int64, device=self.device)
        for dtype, ours in self.tensors.items():
            theirs = other.tensors[dtype]
            same = ours.view(BITS[dtype]) == theirs.view(BITS[dtype])
            total += (~(same | (ours.isnan() & theirs.isnan()))).sum()
        return total

    def unscale_with_torch_(self, inverse: float) -> torch.Tensor:
        """Applies torch's op to every list; returns its flags.

        On the CPU if torch has no kernel for a dtype on this device.
        """
        found = torch.zeros(self.batch.lists, dtype=torch.float32, device=self.device)
        flags = list(found.unbind())
        for dtype, spans in self.batch.spans.items():
            on_cpu = dtype is torch.bfloat16
            place = torch.device("cpu") if on_cpu else self.device
            memory = self.tensors[dtype].to(place)
            factor = flag(inverse, place)
            by_list: dict[int, list[torch.Tensor]] = {}
            for number, begin, count in spans:
                by_list.setdefault(number, []).append(memory[begin : begin + count])
            for number, views in by_list.items():
                scratch = torch.zeros((), device=place) if on_cpu else flags[number]
                torch._amp_foreach_non_finite_check_and_unscale_(views, scratch, factor)
            self.tensors[dtype].copy_(memory)
        return found


def run_batch(
    kernels: Any,
    batch: Batch,
    device: torch.device,
    *,
    kind: str,
    factor: float,
    is_scale: bool,
    seed: int,
) -> None:
    """Checks and unscales every list of a batch and compares all of its memory with torch's."""
    ours = Memory(batch, kind, seed, device)
    theirs = ours.copy()
    where = f"seed {seed}, {kind}, factor {factor!r}, is_scale {is_scale}"

    lists = [grads_of(views) for views in ours.lists()]
    scalar = flag(factor, device)
    raw = torch.stack([run_check(kernels, grads) for grads in lists])
    divided = torch.stack([run_check(kernels, grads, scalar) for grads in lists])
    assert int(ours.differences(theirs)) == 0, f"a check wrote: {where}"
    assert torch.equal(raw, theirs.found()), f"check: {where}"
    assert torch.equal(divided, theirs.found(scalar)), f"check of quotients: {where}"

    found = [run_unscale(kernels, grads, scalar, is_scale=is_scale) for grads in lists]
    torch_found = theirs.unscale_with_torch_(inverse_of(factor) if is_scale else factor)
    assert int(ours.differences(theirs)) == 0, f"unscale: {where}"
    expected = theirs.found()
    assert torch.equal(torch.stack(found), expected), f"flags: {where}"
    # torch judges float64 as float32, and all values before it multiplies them.
    if torch.float64 not in batch.spans:
        assert bool((expected >= torch_found).all()), f"torch's flags: {where}"
