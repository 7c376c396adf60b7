"""Random programs with unusual operations, run on torch's scaler and on ours in lockstep."""

from __future__ import annotations

import gc
import random
import sys
from typing import Any

import numpy as np
import torch
from support.gradients import make_gradient
from support.processes import threads
from support.program_world import Op, World
from support.random_programs import LENGTH, OPERATIONS, VARIANTS, draw_program, first_difference
from tally import Tally, main

# Other seeds than the tests use.
FIRST = 1_000_000


class UnusualWorld(World):
    """World with rare operations, on which both scalers must agree."""

    def run(self, op: Op) -> Any:
        for rig in self.rigs:
            owners = [p for g in rig.optimizer.param_groups for p in g["params"]]
            owners = [p for p in owners if p.grad is not None]
            for p in owners:
                # Deliberate difference: both refuse it, but torch has unscaled those of earlier
                # dtypes by then, while an error leaves ours unchanged.
                if p.grad.is_neg() and p.grad.dtype != owners[0].grad.dtype:
                    p.grad = None
        return super().run(op)

    def odd_grad(self, r: int, i: int, kind: str) -> None:
        """Gives a parameter of plain layout an unusual gradient."""
        rig = self.rigs[r]
        if rig.plan.kind.startswith("fused"):
            return  # torch's kernels read raw memory
        p = rig.params[i % len(rig.params)]
        if not p.numel() or p.dim() < 1:
            return
        grad = make_gradient("contiguous", torch.float32, i).flatten()[: p.numel()]
        grad = grad.repeat(p.numel() // max(grad.numel(), 1) + 1)[: p.numel()]
        grad = grad.view(p.shape).to(p.dtype)
        if kind == "inference":
            with torch.inference_mode():
                grad = grad.clone()
        elif kind == "requires_grad":
            grad = grad.clone().requires_grad_()
        elif kind == "non_leaf":
            grad = grad.clone().requires_grad_() * 2
        elif kind == "negative":
            grad = grad._neg_view()
        elif kind == "parameter":
            grad = torch.nn.Parameter(grad)
        elif kind == "view_of_one":
            grad = torch.zeros(p.numel() + 3, dtype=p.dtype)[3:].copy_(grad.flatten()).view(p.shape)
        p.grad = grad

    def numbers(self, s: int, kind: str) -> None:
        """Sets factors and interval to another numeric type."""
        scaler = self.scalers[s]
        kinds = {"numpy": np.float64, "float32": np.float32, "float": float, "int": int}
        make: Any = kinds[kind]
        scaler.set_growth_factor(make(3))
        scaler.set_backoff_factor(make(1) if kind == "int" else make(0.25))
        scaler.set_growth_interval(np.int64(1000) if kind == "numpy" else 1000)

    def flag(self, s: int, r: int, value: float) -> None:
        """Replaces the flags of a checked optimizer, as some projects do."""
        rig = self.rigs[r]
        record = self.scalers[s]._per_optimizer_states.get(id(rig.optimizer))
        if record is None or rig.reads_scale:
            return
        flags = record["found_inf_per_device"]
        for device in flags:
            flags[device] = torch.tensor(value)

    def many_updates(self, s: int, count: int) -> None:
        for _ in range(count):
            self.scalers[s].update()

    def frozen(self, r: int, i: int) -> None:
        """Toggles `requires_grad` of a parameter."""
        p = self.rigs[r].params[i % len(self.rigs[r].params)]
        p.requires_grad_(not p.requires_grad)


UNUSUAL = {
    **OPERATIONS,
    "odd_grad": (
        6,
        "r",
        lambda g: (
            g.randrange(4),
            g.choice(
                ["inference", "requires_grad", "non_leaf", "negative", "parameter", "view_of_one"]
            ),
        ),
    ),
    "numbers": (2, "s", lambda g: (g.choice(["numpy", "float32", "float", "int"]),)),
    "flag": (2, "sr", lambda g: (g.choice([0.0, 1.0]),)),
    "many_updates": (1, "s", lambda g: (g.randrange(3),)),
    "frozen": (1, "r", lambda g: (g.randrange(4),)),
}


def run(count: float, seed: int = 0) -> Tally:
    """Runs at least that many operations, on all variants of the scaler."""
    tally = Tally("operations beside torch")
    variants = list(VARIANTS)
    gc.collect()
    gc.freeze()
    try:
        for number in range(FIRST + seed, FIRST + seed + -(-int(count) // LENGTH)):
            variant = random.Random(number).choice([*variants, "plain", "plain"])
            plan, program = draw_program(number, UNUSUAL)
            with threads(2 if number % 20 == 0 else 1):
                found = first_difference(
                    plan, program, VARIANTS[variant], watch=number % 4 != 0, world=UnusualWorld
                )
            tally.count += len(program)
            if found is not None:
                tally.fail(f"seed {number}, {variant}, {plan}: {found}")
    finally:
        gc.unfreeze()
    return tally


if __name__ == "__main__":
    sys.exit(main(run, "count", 90_000))
