"""Many launches whose last program must find an infinity seen by any program."""

from __future__ import annotations

from typing import Any

import torch
from gpu_support import flag
from support.kernel_calls import grads_of, run_check

from ampfast.backends.core import Update


def epilogues(
    kernels: Any,
    device: torch.device,
    elements: int,
    launches: int,
    chunk: int,
    factors: tuple[float, float, int],
) -> tuple[int, tuple[float, ...], tuple[float, ...]]:
    """Checks with a scale update in the same launch, compared on the device.

    Returns the number of wrong flags, scale and tracker of torch's op, and ours.
    """
    generator = torch.Generator().manual_seed(11)
    grad = torch.zeros(elements, dtype=torch.float16, device=device)
    places = torch.randint(0, elements, (launches + 1,), generator=generator)
    # Consecutive ones differ, as the first is restored while the second is planted.
    same = places[1:] == places[:-1]
    places[1:][same] = (places[1:][same] + 1) % elements
    bad = torch.rand(launches, generator=generator) < 1 / 6
    kinds = torch.tensor([torch.inf, -torch.inf, torch.nan], dtype=torch.float16)
    what = kinds[torch.randint(0, 3, (launches,), generator=generator)].where(bad, torch.zeros(()))
    pairs = torch.stack([places[:-1], places[1:]], 1).to(device)
    values = torch.stack([torch.zeros_like(what), what], 1).to(device, torch.float16)
    truth = bad.float().to(device)
    states = [
        (flag(1024.0, device), torch.zeros((), dtype=torch.int32, device=device)) for _ in range(2)
    ]
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    grads = grads_of([grad])
    for begin in range(0, launches, chunk):
        found = []
        where, put = pairs[begin : begin + chunk].unbind(), values[begin : begin + chunk].unbind()
        for index, value in zip(where, put, strict=True):
            grad.scatter_(0, index, value)
            ending = kernels.ending(Update(*states[0], [], *factors))
            found.append(run_check(kernels, grads, ending=ending))
        for one in truth[begin : begin + chunk].unbind():
            torch._amp_update_scale_(*states[1], one, *factors)
        wrong += (torch.stack(found) != truth[begin : begin + chunk]).sum()
    ours, theirs = ((scale.item(), tracker.item()) for scale, tracker in states)
    return int(wrong), theirs, ours
