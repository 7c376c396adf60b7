"""Replays the gradients of a float16 training with other policies of the scale.

A transformer with float16 parameters and float32 master weights is trained. The gradients of a
float32 copy know no limits: their magnitudes are counted by power of two, step by step. Then each
policy scales those steps: a step overflows if its largest gradient does in float16, and a value
vanishes if it is rounded to 0. The output has a line for each interval of
torch's rule. The line below it is a LogMax, of the most sigmas with which no more values vanish
than with that interval:

    python examples/policies.py
"""

from __future__ import annotations

import argparse
import bisect
import copy

import torch
from language import Writer, library, windows
from torch import Tensor, nn

import ampfast

INTERVALS = (2000, 200, 50, 20, 10)
# Exponents of half of float16's smallest subnormal number, below which values are rounded to 0, and
# of the smallest float32, where counts begin.
LEAST, FIRST = -25, -149


def magnitudes(grads: list[Tensor]) -> tuple[float, Tensor]:
    """Largest magnitude of gradients, and the number of nonzero ones by power of two."""
    values = torch.cat([grad.flatten() for grad in grads]).abs()
    exponents = values[values > 0].frexp().exponent.long() - 1 - FIRST
    return values.max().item(), torch.bincount(exponents, minlength=300)


def loss_of(model: nn.Module, characters: Tensor, following: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(characters).float().flatten(0, 1), following.flatten())


def recorded(steps: int, device: str) -> list[tuple[float, Tensor]]:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    text, model = library(), Writer(width=32).to(device).half()
    optimizer = ampfast.master_weights_(torch.optim.AdamW(model.parameters(), lr=3e-3))
    scaler, found = ampfast.GradScaler(device), []
    for _ in range(steps):
        characters, following = (part.to(device) for part in windows(text, generator))
        optimizer.zero_grad()
        wide = copy.deepcopy(model).float()
        loss_of(wide, characters, following).backward()
        found.append(magnitudes([param.grad for param in wide.parameters()]))
        scaler.scale(loss_of(model, characters, following)).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step_and_update(optimizer)
    return found


def replayed(steps: list[tuple[float, Tensor]], options: dict) -> tuple[int, float, float]:
    """Skipped steps, the share of values that vanish in the others, and their mean log2 scale."""
    param = nn.Parameter(torch.zeros(1, dtype=torch.float16))
    optimizer = ampfast.master_weights_(torch.optim.SGD([param], lr=0.0))
    scaler = ampfast.GradScaler("cpu", **options)
    vanished = logs = taken = 0.0
    for peak, counts in steps:
        scaler.scale(torch.zeros(()))
        scale = scaler.get_scale()
        param.grad = torch.tensor([peak * scale]).half()
        scaler.step(optimizer)
        scaler.update()
        if not scaler.step_skipped(optimizer):
            exponent = torch.tensor(scale).log2().item()
            below = max(0, round(LEAST - exponent) - FIRST)
            vanished += (counts[:below].sum() / counts.sum()).item()
            logs += exponent
            taken += 1
    return len(steps) - int(taken), vanished / taken, logs / taken


def log_max(sigmas: float, headroom: float = 0) -> dict:
    return {"policy": ampfast.LogMax(sigmas, headroom)}


def sigmas_for(steps: list[tuple[float, Tensor]], vanished: float) -> float | None:
    """The most sigmas, in tenths up to 6, with which no larger share of values vanishes."""
    tenths = range(61)
    count = bisect.bisect(tenths, vanished, key=lambda each: replayed(steps, log_max(each / 10))[1])
    return tenths[count - 1] / 10 if count else None


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    steps = recorded(options.steps, options.device)
    print(f"{'policy':<26} {'skipped':>8} {'vanished':>10} {'mean log2 scale':>16}")

    def show(name: str, policy: dict) -> float:
        skipped, vanished, log = replayed(steps, policy)
        print(f"{name:<26} {skipped:>8} {vanished:>10.2e} {log:>16.1f}", flush=True)
        return vanished

    for interval in INTERVALS:
        vanished = show(f"torch, interval {interval}", {"growth_interval": interval})
        sigmas = sigmas_for(steps, vanished)
        if sigmas is not None:
            show(f"LogMax({sigmas}, headroom=0)", log_max(sigmas))
    show("LogMax()", {"policy": ampfast.LogMax()})


if __name__ == "__main__":
    main()
