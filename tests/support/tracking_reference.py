"""Reference for per-parameter reports: marks and ranges by plain float64 comparisons."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ampfast.backends.core import MARK_WORDS, Track

NEVER = [0, 0, 0, 0]


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
