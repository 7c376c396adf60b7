"""Reference for per-parameter reports, by plain float64 comparisons, and kernels beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ampfast.backends.core import MARK_WORDS, Factor, Pass, Track
from ampfast.backends.torch_ops import squares_in
from support.comparison import FLOATS
from support.kernel_calls import grads_of
from support.kernel_parity import flag, storage


def track_for(parameters: int, *, step: int = 0, device: str | torch.device = "cpu") -> Track:
    """An empty table, between rows that no pass may write."""
    marks = torch.full((parameters + 2, MARK_WORDS), -7, dtype=torch.int64, device=device)
    marks[1:-1] = 0
    now = torch.tensor(step, dtype=torch.int64, device=device)
    return Track(marks[1:-1], now)


def assert_surroundings_kept(track: Track) -> None:
    rows = track.marks
    whole = rows.new_empty(0).set_(rows.untyped_storage()).view(-1, rows.shape[1])
    assert (whole[[0, -1]] == -7).all(), "wrote outside the table"


def marked(track: Track) -> list[bool]:
    """Whether each parameter ever overflowed."""
    return [row[0] != 0 for row in track.marks.tolist()]


def kinds_in(track: Track) -> list[list[int]]:
    """The last steps and counts of each parameter, as `marks_of`."""
    return [row[:4] for row in track.marks.tolist()]


def marks_of(used: Sequence[torch.Tensor], step: int = 0) -> list[list[int]]:
    """Marks after one step, from the values that the optimizer uses."""
    rows = []
    for values in used:
        bad, nan = bool((~values.isfinite()).any()), bool(values.isnan().any())
        rows.append([(step + 1) * bad, (step + 1) * nan, int(bad), int(nan)])
    return rows


def range_of(values: torch.Tensor) -> list[float]:
    """Elements, nonzero, vanishing, subnormal, overflowing, largest and smallest nonzero."""
    sizes = values.detach().flatten().double().abs()
    nonzero = sizes[~(sizes == 0)]
    numbers = nonzero[~nonzero.isnan()]
    smallest = 0.0
    if len(nonzero):
        smallest = float(numbers.min()) if len(numbers) else torch.nan
    return [
        *(float(len(sizes)), float(len(nonzero))),
        float((nonzero < 2.0**-24).sum()),
        float((nonzero < 2.0**-14).sum()),
        float((~(nonzero <= 65504)).sum()),
        *(float(sizes.max()) if len(sizes) else 0.0, smallest),
    ]


def edges_of_half(dtype: torch.dtype) -> torch.Tensor:
    """Bounds of float16's range and their neighbours, of both signs."""
    infinity = torch.tensor(torch.inf, dtype=dtype)
    found = [torch.tensor([0.0, torch.inf, torch.nan], dtype=dtype)]
    for bound in (0.0, 2.0**-25, 2.0**-24, 2.0**-14, 1.0, 65504.0, 65520.0, 65536.0):
        value = torch.tensor(bound, dtype=torch.float64).to(dtype)
        below, above = torch.nextafter(value, -infinity), torch.nextafter(value, infinity)
        found.append(torch.stack([value, above, below]))
    values = torch.cat(found)
    return torch.cat([values, -values])


def random_list(seed: int, dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
    """Gradients of many sizes, addresses and ranges: zeros, subnormals, infinities and NaN."""
    generator = torch.Generator().manual_seed(seed)

    def chance(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    found = []
    for _ in range(chance(1, 9)):
        dtype = dtypes[chance(0, len(dtypes))]
        count = (0, 1, 7, 33, 255, 4096, 4100, 20_000)[chance(0, 8)]
        offset = chance(0, 9)
        exponents = torch.rand(count + offset, generator=generator, dtype=torch.float64)
        values = torch.randn(count + offset, generator=generator, dtype=torch.float64)
        values *= 2.0 ** (exponents * chance(1, 60) - chance(0, 45))
        values[torch.rand(count + offset, generator=generator) < 0.1] = 0.0
        values = values.to(dtype)
        if dtype is torch.float16:
            values = values.clamp(-65504, 65504)
        for bad in (torch.inf, -torch.inf, torch.nan):
            if count and chance(0, 6) == 0:
                values[offset + chance(0, count)] = bad
        found.append(values[offset:])
    return found


def copies(grads: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copies at the same offsets to a 16-byte boundary."""
    memories = [storage(grad).to(device, copy=True) for grad in grads]
    places = [(grad.storage_offset(), grad.numel()) for grad in grads]
    return [memory.narrow(0, *place) for memory, place in zip(memories, places, strict=True)]


def widened(grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [g if g.dtype == torch.float64 else g.float() for g in grads]


def tracked(work: Pass, track: Track) -> Pass:
    return work._replace(marks=track.marks, now=track.now)


def assert_squares(squares: torch.Tensor, grads: Sequence[torch.Tensor], factor: float) -> None:
    """Sums of squares by parameter; GPU kernels sum in float32 over windows of 8 KiB."""
    for found, grad in zip(squares.tolist(), widened(grads), strict=True):
        expected = float((grad * factor).double().square().sum())
        if 2.0**-60 < expected < 2.0**110:
            assert found == pytest.approx(expected, rel=1e-4)
        elif not math.isfinite(expected):
            assert not math.isfinite(found) and math.isnan(found) is math.isnan(expected)


def check_passes(kernels: Any, make: Sequence[torch.Tensor], device: torch.device) -> None:
    """Compares marks of every kind of pass, and results with and without tracking."""
    count = len(make)
    inverse, divisor = 1.5, 0.75

    def run(name: str, used: Sequence[torch.Tensor], work: Pass) -> None:
        expected = marks_of(used, 4)
        plain = copies(make, device)
        found = kernels.run(grads_of(plain), work).item()
        grads = copies(make, device)
        track = track_for(count, step=4, device=device)
        assert kernels.run(grads_of(grads), tracked(work, track)).item() == found, name
        assert kinds_in(track) == expected, name
        squares = squares_in(track.marks)
        if work.sums is None:
            assert not squares.any(), name
        else:
            assert_squares(squares, make, inverse)
        assert_surroundings_kept(track)
        for ours, theirs in zip(grads, plain, strict=True):
            same = (ours == theirs) | (ours.isnan() & theirs.isnan())
            assert same.all(), f"{name}: another result"

    run("raw", make, Pass(False, Factor.NONE))
    quotients = [g / divisor for g in widened(make)]
    run("divided", quotients, Pass(False, Factor.DIVIDE, flag(divisor).to(device)))
    written = [(w * inverse).to(g.dtype) for w, g in zip(widened(make), make, strict=True)]
    factor = flag(inverse).to(device)
    run("unscaled", written, Pass(True, Factor.TIMES, factor))
    scale = flag(4.0).to(device)
    run("scaled", [g / 4 for g in make], Pass(True, Factor.TIMES_RECIPROCAL, scale))
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    run("norms", written, Pass(False, Factor.TIMES, factor, sums=sums))


def check_random_lists(kernels: Any, device: torch.device, seeds: range) -> None:
    for seed in seeds:
        dtypes = FLOATS if seed % 2 else FLOATS[seed // 2 % 4 :][:1]
        grads = random_list(seed, dtypes)
        if any(g.numel() for g in grads):
            check_passes(kernels, grads, device)


def check_times(kernels: Any, device: torch.device, elements: int = 70_000) -> None:
    """A step counts once in any number of passes, with the kind found by the last one."""
    track = track_for(2, device=device)
    check = tracked(Pass(False, Factor.NONE), track)
    good, bad = torch.ones(elements, device=device), torch.ones(elements, device=device)
    for step, value in ((0, torch.inf), (1, 1.0), (2, torch.nan), (5, -torch.inf), (6, 1.0)):
        track.now.fill_(step)
        bad.fill_(value)
        for _ in range(3):
            kernels.run(grads_of([good, bad]), check)
    assert kinds_in(track) == [[0, 0, 0, 0], [6, 3, 3, 1]]
    # First infinities, then NaN in the same step, which makes it a step with NaN.
    track.now.fill_(7)
    for value in (torch.inf, torch.nan, torch.inf):
        bad.fill_(value)
        kernels.run(grads_of([bad, good]), check)
    assert kinds_in(track) == [[8, 8, 1, 1], [6, 3, 3, 1]]
