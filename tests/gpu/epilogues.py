"""Many launches whose last program must find an infinity seen by any program."""

from __future__ import annotations

import random
from typing import Any

import torch
from gpu_support import flag
from support.kernels import grads_of, run_check

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
    chance, grad = random.Random(11), torch.zeros(elements, dtype=torch.float16, device=device)
    states = [
        (flag(1024.0, device), torch.zeros((), dtype=torch.int32, device=device)) for _ in range(2)
    ]
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    grads = grads_of([grad])
    for _ in range(launches // chunk):
        found, is_bad = [], [chance.random() < 1 / 6 for _ in range(chunk)]
        for bad in is_bad:
            element = grad[chance.randrange(elements)]
            if bad:
                element.fill_(chance.choice((torch.inf, -torch.inf, torch.nan)))
            ending = kernels.ending(Update(*states[0], [], *factors))
            found.append(run_check(kernels, grads, ending=ending))
            if bad:
                element.zero_()
        truth = torch.tensor(is_bad, device=device).float()
        for one in truth.unbind():
            torch._amp_update_scale_(*states[1], one, *factors)
        wrong += (torch.stack(found) != truth).sum()
    ours, theirs = ((scale.item(), tracker.item()) for scale, tracker in states)
    return int(wrong), theirs, ours
