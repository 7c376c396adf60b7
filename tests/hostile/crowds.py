"""Threads that train side by side, and threads that free gradients during a pass."""

from __future__ import annotations

import random
import sys
import threading
import time
from typing import Any

import torch
from support.comparison import TorchScaler, difference, started
from support.programs import Op, Plan, World, draw_program
from tally import Tally, main

from ampfast import GradScaler

THREADS = 8
PROGRAMS = 20
# Long enough for a pass to release the GIL.
LIST, SIZE, SCALE = 24, 40_000, 8.0


def played(scaler_type: type[TorchScaler], plan: Plan, program: list[Op]) -> dict[str, Any]:
    """Runs a program; returns its result and errors."""
    world, errors = World(scaler_type, plan), []
    for number, op in enumerate(program):
        try:
            world.run(op)
        except Exception as error:
            errors.append(f"{number} {type(error).__name__}: {error}")
    return {"errors": errors, **world.observe()}


class Crowd:
    """State shared by the threads."""

    def __init__(self, seconds: float, seed: int) -> None:
        self.tally = Tally("rounds of threads")
        # With the results of torch's scaler alone.
        self.programs = []
        for plan, program in map(draw_program, range(seed, seed + PROGRAMS)):
            self.programs.append((plan, program, played(TorchScaler, plan, program)))
        self.end = time.monotonic() + seconds
        self._lock = threading.Lock()

    def report(self, wrong: str | None) -> None:
        with self._lock:
            self.tally.count += 1
            if wrong is not None:
                self.tally.fail(wrong)

    def train(self, rng: random.Random) -> str | None:
        plan, program, expected = rng.choice(self.programs)
        found = difference(played(GradScaler, plan, program), expected)
        return found and f"{plan}: {found}"

    def disturbed(self, rng: random.Random) -> str | None:
        """Pass during which another thread frees gradients and reuses their memory."""
        params = [torch.nn.Parameter(torch.zeros(SIZE)) for _ in range(LIST)]
        for param in params:
            param.grad = torch.full((SIZE,), SCALE)
        optimizer, scaler = torch.optim.SGD(params, lr=1.0), started(GradScaler, SCALE)
        bystanders: list[torch.Tensor] = []
        begun = threading.Event()

        def disturb() -> None:
            begun.set()
            for param in rng.sample(params, LIST // 2):
                # torch frees a gradient before its parameter drops it, and releases the GIL
                # between.
                before = param.grad
                param.grad = None if rng.random() < 0.5 else torch.full((SIZE,), SCALE)
                del before
                bystanders.append(torch.full((SIZE,), 5.0))

        other = threading.Thread(target=disturb)
        other.start()
        begun.wait()
        call = rng.choice(["unscale_", "clip_grad_norm_", "grad_norm"])
        more = () if call == "unscale_" else (1e30,) if call == "clip_grad_norm_" else ()
        getattr(scaler, call)(optimizer, *more)
        other.join()
        if any(not (tensor == 5.0).all() for tensor in bystanders):
            return f"{call} wrote to memory that it had let go"
        for param in params:
            if param.grad is not None:
                least, most = param.grad.min().item(), param.grad.max().item()
                if least != most or least not in (SCALE, 1.0):
                    return f"{call} left a gradient from {least} to {most}"
        return None

    def work(self, number: int, seed: int) -> None:
        rng = random.Random(1000 * seed + number)
        tasks = [self.train, self.train, self.disturbed] if number % 4 else [self.disturbed]
        while time.monotonic() < self.end:
            try:
                self.report(rng.choice(tasks)(rng))
            except Exception as error:
                self.report(f"{type(error).__name__}: {error}")


def run(seconds: float, seed: int = 0) -> Tally:
    """Runs the threads for that many seconds."""
    crowd = Crowd(seconds, seed)
    workers = [
        threading.Thread(target=crowd.work, args=(number, seed)) for number in range(THREADS)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return crowd.tally


if __name__ == "__main__":
    sys.exit(main(run, "seconds", 60))
