"""Batches of gradient lists in a few large tensors, and updates behind many checks.

What torch's ops make of them is computed on the device, too. Lists are views. The memory between
them holds infinities, so that a read outside of a view shows in a flag and a write shows in a
comparison. One comparison serves a whole batch.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from support.comparison import BITS, FLOATS, assert_same
from support.kernels import flag, grads_of, inverse_of, run_check, run_unscale, window

from ampfast.backends.core import Update

ALIGNMENT = 16
KINDS = ("normal", "wide", "bits")

# Of each list the views: dtype, gap in front and length, in elements.
Batch = list[list[tuple[torch.dtype, int, int]]]
Lists = list[list[torch.Tensor]]


def random_batch(seed: int, lists: int) -> Batch:
    """Lists of one to six views of one to three dtypes, at any offset."""
    chance = random.Random(seed)
    batch: Batch = []
    for _ in range(lists):
        dtypes = chance.sample(FLOATS, chance.choice((1, 1, 2, 3)))
        batch.append([])
        for _ in range(chance.randint(1, 6)):
            dtype = chance.choice(dtypes)
            one = window(dtype)
            near = chance.choice((one, one, 2 * one, 3 * one)) + chance.randint(-9, 9)
            count = chance.choice((near, chance.randint(1, 40), chance.randint(1, 2 * one)))
            batch[-1].append((dtype, chance.randint(1, 2 * ALIGNMENT), count))
    return batch


def values(
    dtype: torch.dtype, count: int, kind: str, generator: torch.Generator, device: torch.device
) -> torch.Tensor:
    """Normal values; or values of any exponent, with subnormals; or random bits."""
    if kind == "normal":
        return (64 * torch.randn(count, generator=generator, device=device)).to(dtype)
    width = 8 * dtype.itemsize
    low, high = -(2 ** (width - 1)), 2 ** (width - 1) - 1
    bits = torch.randint(low, high, (count,), dtype=BITS[dtype], generator=generator, device=device)
    drawn = bits.view(dtype)
    return drawn if kind == "bits" else torch.where(drawn.isfinite(), drawn, 1.5)


def views_of(memory: dict[torch.dtype, torch.Tensor], batch: Batch) -> Lists:
    """Views of each list, dtype by dtype."""
    ends, lists = dict.fromkeys(memory, 0), []
    for spans in batch:
        views = []
        for dtype, gap, count in spans:
            begin = ends[dtype] + gap
            ends[dtype] = begin + count
            views.append(memory[dtype][begin : begin + count])
        lists.append(sorted(views, key=lambda view: FLOATS.index(view.dtype)))
    return lists


def non_finite(lists: Lists, divisor: torch.Tensor | None = None) -> torch.Tensor:
    """For each list, whether one of its values, or quotients, is not finite."""

    def is_bad(view: torch.Tensor) -> torch.Tensor:
        if divisor is not None:
            wide = view if view.dtype is torch.float64 else view.float()
            view = wide / divisor.to(wide.dtype)
        return ~view.isfinite().all()

    return torch.stack([torch.stack([*map(is_bad, views)]).any() for views in lists]).float()


def unscale_with_torch_(views: list[torch.Tensor], inverse: float) -> None:
    """torch's op, on the CPU for the dtype that it does not take on a GPU."""
    found, factor = flag(0.0, views[0].device), flag(inverse, views[0].device)
    for view in views:
        if view.dtype is torch.bfloat16:
            there, scratch = view.to("cpu", copy=True), torch.zeros(())
            torch._amp_foreach_non_finite_check_and_unscale_([there], scratch, factor.cpu())
            view.copy_(there)
        else:
            torch._amp_foreach_non_finite_check_and_unscale_([view], found, factor)


def run_batch(
    kernels: Any,
    batch: Batch,
    device: torch.device,
    *,
    kind: str,
    factor: float,
    is_scale: bool,
    seed: int,
    bad: float = 0.2,
) -> None:
    """Checks and unscales every list of a batch and compares all of its memory with torch's.

    A share `bad` of the views has a value that is not finite.
    """
    where = f"seed {seed}, {kind}, factor {factor!r}, is_scale {is_scale}"
    generator, chance = torch.Generator(device).manual_seed(seed), random.Random(seed)
    ours: dict[torch.dtype, torch.Tensor] = {}
    for dtype in {dtype for spans in batch for dtype, _, _ in spans}:
        size = sum(gap + count for spans in batch for each, gap, count in spans if each is dtype)
        ours[dtype] = torch.full((size + ALIGNMENT,), torch.inf, dtype=dtype, device=device)
    lists = views_of(ours, batch)
    for view in (view for views in lists for view in views):
        view.copy_(values(view.dtype, view.numel(), kind, generator, device))
        if chance.random() < bad:
            at = chance.choice((0, view.numel() - 1, chance.randrange(view.numel())))
            view[at] = chance.choice((torch.inf, -torch.inf, torch.nan))
    theirs = {dtype: memory.clone() for dtype, memory in ours.items()}
    references, grads = views_of(theirs, batch), [*map(grads_of, lists)]
    scalar = flag(factor, device)

    raw = torch.stack([run_check(kernels, each) for each in grads])
    divided = torch.stack([run_check(kernels, each, scalar) for each in grads])
    assert_same(ours, theirs, f"written by a check: {where}")
    assert torch.equal(raw, non_finite(references)), f"check: {where}"
    assert torch.equal(divided, non_finite(references, scalar)), f"check of quotients: {where}"

    found = [run_unscale(kernels, each, scalar, is_scale=is_scale) for each in grads]
    inverse = inverse_of(factor) if is_scale else factor
    for views in references:
        unscale_with_torch_(views, inverse)
    assert_same(ours, theirs, f"unscale: {where}")
    assert torch.equal(torch.stack(found), non_finite(references)), f"flags: {where}"


def check_epilogues(
    kernels: Any, device: torch.device, elements: int, launches: int, chunk: int
) -> None:
    """Updates behind checks, whose last program must find an infinity that any program saw."""
    chance, grad = random.Random(11), torch.zeros(elements, dtype=torch.float16, device=device)
    factors, grads = (2.0, 0.5, 3), grads_of([grad])
    ours, theirs = (
        (flag(1024.0, device), torch.zeros((), dtype=torch.int32, device=device)) for _ in range(2)
    )
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(launches // chunk):
        found, is_bad = [], [chance.random() < 1 / 6 for _ in range(chunk)]
        for bad in is_bad:
            element = grad[chance.randrange(elements)]
            if bad:
                element.fill_(chance.choice((torch.inf, -torch.inf, torch.nan)))
            ending = kernels.ending(Update(*ours, [], *factors))
            found.append(run_check(kernels, grads, ending=ending))
            if bad:
                element.zero_()
        truth = torch.tensor(is_bad, device=device).float()
        for one in truth.unbind():
            torch._amp_update_scale_(*theirs, one, *factors)
        wrong += (torch.stack(found) != truth).sum()
    assert wrong.item() == 0, f"{wrong} of {launches} flags are wrong"
    assert_same(ours, theirs, "scale and tracker")
