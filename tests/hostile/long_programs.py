"""Random programs with unusual operations, run on torch's scaler and on ours in lockstep."""

from __future__ import annotations

import gc
import sys
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from programs import Op, World
from random_programs import OPERATIONS, VARIANTS, Lockstep, lockstep, run_programs
from support import make_gradient
from tally import Tally, main

# Other seeds than the tests use.
FIRST = 1_000_000


class UnusualWorld(World):
    """World with rare operations, on which both scalers must agree."""

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
        *(6, "r"),
        (
            st.integers(0, 3),
            st.sampled_from(
                ["inference", "requires_grad", "non_leaf", "negative", "parameter", "view_of_one"]
            ),
        ),
    ),
    "numbers": (2, "s", (st.sampled_from(["numpy", "float32", "float", "int"]),)),
    "flag": (2, "sr", (st.sampled_from([0.0, 1.0]),)),
    "many_updates": (1, "s", (st.integers(0, 2),)),
    "frozen": (1, "r", (st.integers(0, 3),)),
}


class UnusualLockstep(Lockstep):
    """State machine of such worlds, which counts operations."""

    world = UnusualWorld
    table = UNUSUAL
    operations = 0

    def _run(self, op: Op) -> None:
        super()._run(op)
        UnusualLockstep.operations += 1


def run(count: float, seed: int = 0) -> Tally:
    """Runs at least that many operations, on all variants of the scaler."""
    tally = Tally("operations beside torch")
    UnusualLockstep.operations = 0
    gc.collect()
    gc.freeze()
    try:
        while tally.count < count and not tally.failures:
            for variant, sides in VARIANTS.items():
                machine = lockstep(sides, UnusualLockstep)
                programs = 12 if variant == "plain" else 4
                try:
                    run_programs(machine, programs, seed=FIRST + seed)
                except AssertionError as error:
                    tally.fail(f"seed {FIRST + seed}, {variant}: {error}")
            tally.count = UnusualLockstep.operations
            seed += 1
    finally:
        gc.unfreeze()
    return tally


if __name__ == "__main__":
    sys.exit(main(run, "count", 90_000))
