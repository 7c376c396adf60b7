"""Random programs with unusual operations, run on torch's scaler and on ours in lockstep."""

from __future__ import annotations

import gc
import random
import sys
from typing import Any

import torch
from support.gradients import filled
from support.processes import threads
from support.programs import LENGTH, OPERATIONS, VARIANTS, Op, World, draw_program, first_difference
from tally import Tally, main

# Other seeds than the tests use.
FIRST = 1_000_000
ODD = {
    "requires_grad": lambda grad: grad.requires_grad_(),
    "non_leaf": lambda grad: grad.requires_grad_() * 2,
    "negative": lambda grad: grad._neg_view(),
    "parameter": torch.nn.Parameter,
    "view_of_one": lambda grad: torch.cat([grad[:1], grad])[1:],
}


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
        p = rig.params[i % len(rig.params)]
        # torch's fused kernels read raw memory.
        if p.numel() and p.dim() and not rig.plan.kind.startswith("fused"):
            p.grad = ODD[kind](filled((p.numel(),), p.dtype, i)).view(p.shape)

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
    "odd_grad": (6, "r", lambda g: (g.randrange(4), g.choice([*ODD]))),
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
            given: Any = {"watch": number % 4 != 0, "world": UnusualWorld}
            with threads(2 if number % 20 == 0 else 1):
                found = first_difference(plan, program, VARIANTS[variant], **given)
            tally.count += len(program)
            if found is not None:
                tally.fail(f"seed {number}, {variant}, {plan}: {found}")
    finally:
        gc.unfreeze()
    return tally


if __name__ == "__main__":
    sys.exit(main(run, "count", 90_000))
