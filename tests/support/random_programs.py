"""Random programs of scaler operations, run on torch's scaler and on ours in lockstep.

Hypothesis does not draw them: its programs repeat parts of earlier ones (18 plans in 51 programs),
and missed faults that programs drawn from a seed find.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ampfast import GradScaler
from support.comparison import difference
from support.gradients import WRITABLE_LAYOUTS
from support.optimizers import FUSED, KINDS, RigPlan, takes_scaled
from support.outcomes import outcome
from support.program_world import Op, Plan, World
from support.scalers import TorchScaler

LENGTH = 40

BAD = ["none"] * 6 + ["inf", "-inf", "nan", "huge"]
WHERE = ["first", "middle", "last"]
SCALES = [2.0**16, 2.0**-10, 1000.3, 3.0, 1.0, 2.0**30]
INTERVALS = [1, 1, 2, 3, 2000, 0, -1]
BETWEEN = ["reduce", "records", "groups", "write_scale", "write_scale", "replace_grad", "fail_next"]
OUTPUTS = ["tensor", "graph", "half", "list", "tuple", "nested", "generator", "empty"]
OUTPUTS += ["generator_in_list", "dict_values", "number", "number_in_list", "none"]
NEW_SCALES = ["float", "tensor", "one_element", "double", "int", "int_tensor", "two_elements"]
NEW_SCALES += ["requires_grad", "other_device", "text"]
FORMS = ["plain"] * 8 + ["none", "closure", "closure_keyword", "unknown_keyword"]
WRITES = ["fill", "data", "numpy", "rebind"]
RECORDS = ["pop", "clear", "reset", "new", "unscaled", "stage"]
DTYPES: list[tuple[torch.dtype, ...]] = [
    (torch.float32,),
    (torch.float32,),
    (torch.float64,),
    (torch.bfloat16,),
    (torch.float32, torch.bfloat16, torch.float64),
]


def draw_plan(rng: random.Random) -> Plan:
    """Draws scaler arguments and one to three optimizers."""
    rigs = []
    for _ in range(rng.choice([1, 1, 2, 3])):
        kind = rng.choice(list(KINDS))
        dtypes = rng.choice(DTYPES)
        if kind in ("fused_adam", "fused_sgd", "legacy", "reader") and rng.random() < 0.2:
            dtypes = (torch.float16,)
        if kind in FUSED:  # else a deliberate difference
            dtypes = tuple(x if takes_scaled(kind, x) else torch.float32 for x in dtypes)
        # torch's fused kernels walk raw memory: an overlapping gradient is read beyond its end.
        choice = [x for x in WRITABLE_LAYOUTS if kind not in FUSED or x != "overlapping"]
        layouts = tuple(rng.choices(choice, k=rng.randint(1, 4)))
        rigs.append(RigPlan(kind, dtypes, layouts, rng.random() < 0.5))
    arguments = {
        "init_scale": rng.choice(SCALES),
        "growth_factor": rng.choice([2.0, 1.1, 1.7]),
        "backoff_factor": rng.choice([0.5, 0.5, 0.9, 1 / 3]),
        "growth_interval": rng.choice(INTERVALS),
    }
    return Plan(arguments, tuple(rigs))


def _seed(rng: random.Random) -> int:
    return rng.randrange(1000)


Draw = Callable[[random.Random], tuple[Any, ...]]
# Weight and arguments of every operation; `s` is a scaler's index and `r` a rig's.
Operations = dict[str, tuple[int, str, Draw]]
OPERATIONS: Operations = {
    "scale": (4, "s", lambda g: (g.choice(OUTPUTS), _seed(g))),
    "backward": (10, "sr", lambda g: (g.choice(BAD), g.choice(WHERE), _seed(g))),
    "grads": (16, "sr", lambda g: (g.choice(BAD), g.choice(WHERE), _seed(g))),
    "sparse_grads": (4, "r", lambda g: (g.random() < 0.5, g.choice(BAD), _seed(g))),
    "zero_grad": (3, "r", lambda g: (g.random() < 0.5,)),
    "drop_grad": (2, "r", lambda g: (g.randrange(4),)),
    "replace_grad": (2, "r", lambda g: (g.randrange(4),)),
    "share_grad": (2, "r", lambda g: ()),
    "unscale_": (10, "sr", lambda g: ()),
    "step": (22, "sr", lambda g: (g.choice(FORMS),)),
    "update": (22, "s", lambda g: ()),
    "update_to": (3, "s", lambda g: (g.choice(NEW_SCALES), g.choice(SCALES))),
    "factors": (1, "s", lambda g: (g.choice([2.0, 1.1, 4.0, 0.5]), g.choice([0.5, 0.3, 1.0]))),
    "interval": (2, "s", lambda g: (g.choice(INTERVALS),)),
    "check": (2, "sr", lambda g: ()),
    "found": (2, "sr", lambda g: ()),
    "start": (1, "s", lambda g: (g.choice(["cpu", torch.device("cpu")]),)),
    "write_scale": (3, "s", lambda g: (g.choice(WRITES), g.choice(SCALES))),
    "write_tracker": (2, "s", lambda g: (g.choice(["fill", "rebind"]), g.randrange(3))),
    "enable": (1, "s", lambda g: (g.random() < 0.8,)),
    "records": (4, "sr", lambda g: (g.choice(RECORDS),)),
    "reduce": (3, "sr", lambda g: (g.choice([0.0, 1.0, 2.0, 0.5]),)),
    "save": (2, "s", lambda g: ()),
    "load": (2, "s", lambda g: (g.choice(["whole", "whole", "torch", "partial", "extra"]),)),
    "pickled": (1, "s", lambda g: ()),
    "copied": (1, "s", lambda g: ()),
    "grad_scale": (2, "r", lambda g: (g.choice([2.0, 0.5, 1.0]),)),
    "fail_next": (2, "r", lambda g: ()),
    "groups": (3, "r", lambda g: (g.choice(["fresh", "reversed", "split", "drop", "add"]),)),
}


def draw_operation(
    name: str, rng: random.Random, rigs: int, operations: Operations = OPERATIONS
) -> Op:
    """Draws the arguments of one operation."""
    _, subjects, draw = operations[name]
    arguments: list[Any] = []
    if "s" in subjects:
        arguments.append(int(rng.random() < 0.15))
    if "r" in subjects:
        arguments.append(rng.randrange(rigs))
    return Op(name, (*arguments, *draw(rng)))


def draw_step(rng: random.Random, rigs: int) -> list[Op]:
    """Draws a whole training step, which independent operations rarely form."""
    s = int(rng.random() < 0.1)
    program, stepped = [], []
    for r in sorted(rng.sample(range(rigs), rng.randint(1, rigs))):
        source = rng.choice(["grads", "grads", "backward"])
        program.append(Op(source, (s, r, rng.choice(BAD), rng.choice(WHERE), _seed(rng))))
        if rng.random() < 0.4:
            program.append(Op("unscale_", (s, r)))
        if rng.random() < 0.3:
            program.append(draw_operation(rng.choice(BETWEEN), rng, rigs))
        stepped.append(r)
        program.append(Op("step", (s, r, "plain")))
    if rng.random() < 0.3:
        program = [op for op in program if op.name != "step"]
        return [*program, Op("step_and_update", (s, tuple(stepped)))]
    return [*program, Op("update", (s,))]


def draw_program(seed: int, operations: Operations = OPERATIONS) -> tuple[Plan, list[Op]]:
    """Draws a plan and `LENGTH` operations from one seed."""
    rng = random.Random(seed)
    plan = draw_plan(rng)
    rigs = len(plan.rigs)
    names = list(operations)
    weights = [operations[name][0] for name in names]
    # One program in eight starts without a scaled loss, to reach the errors about that.
    program = [Op("scale", (s, "tensor", 0)) for s in range(2)] if rng.random() < 7 / 8 else []
    while len(program) < LENGTH:
        if rng.random() < 0.15:
            program += draw_step(rng, rigs)
        else:
            name = rng.choices(names, weights)[0]
            program.append(draw_operation(name, rng, rigs, operations))
    return plan, program[:LENGTH]


def passes_through(base: type[TorchScaler], hook: str) -> type[TorchScaler]:
    """A subclass whose hook only calls the original."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(base, hook)(self, *args, **kwargs)

    name = f"{base.__module__}_{hook}".replace(".", "_")
    # In this module, so that instances can be pickled.
    globals()[name] = type(name, (base,), {hook: method, "__module__": __name__})
    return globals()[name]


HOOKS = ["_unscale_grads_", "_check_inf_per_device", "_maybe_opt_step", "_get_scale_async"]
HOOKS += ["unscale_", "step", "update"]
Sides = tuple[type[TorchScaler], type[TorchScaler], dict[str, Any]]
# Our class, torch's class, and keywords for ours alone. Overridden hooks and named backends take
# other paths through our code, with the same results.
VARIANTS: dict[str, Sides] = {
    "plain": (GradScaler, TorchScaler, {}),
    "aten": (GradScaler, TorchScaler, {"backend": "aten"}),
    **{
        hook: (passes_through(GradScaler, hook), passes_through(TorchScaler, hook), {})
        for hook in HOOKS
    },
}


def variant_of(seed: int) -> str:
    """The plain class for two programs out of three, the other variants in turn."""
    others = [name for name in VARIANTS if name != "plain"]
    return others[seed // 3 % len(others)] if seed % 3 == 0 else "plain"


def first_difference(
    plan: Plan,
    program: list[Op],
    sides: Sides = VARIANTS["plain"],
    *,
    watch: bool = True,
    world: type[World] = World,
) -> str | None:
    """Runs a program on both classes and describes the first difference.

    Without `watch` worlds are compared only at the end, so that a read of the state between
    operations cannot hide a write that comes late.
    """
    ours, theirs, more = sides
    our_world, their_world = world(ours, plan, **more), world(theirs, plan)
    for number, op in enumerate(program):
        outcomes = [outcome(partial(each.run, op)) for each in (our_world, their_world)]
        if op.name == "step_and_update":
            # torch's side is two calls on different lines.
            for side in outcomes:
                side.warned = [(*warning[:2], "", 0) for warning in side.warned]
        found = difference(outcomes[0].comparable(), outcomes[1].comparable(), "outcome")
        if found is None and (watch or number == len(program) - 1):
            found = difference(our_world.observe(), their_world.observe(), "world")
        if found is not None:
            return f"after {number} {op}: {found}"
    return None


def shrink(program: list[Op], fails: Callable[[list[Op]], bool]) -> list[Op]:
    """Drops operations, the last first, as long as the program still fails."""
    for number in reversed(range(len(program))):
        shorter = program[:number] + program[number + 1 :]
        program = shorter if fails(shorter) else program
    return program


def explain(seed: int, found: str, watch: bool) -> str:
    """Shrinks a failing program and lists it."""
    plan, program = draw_program(seed)
    sides = VARIANTS[variant_of(seed)]

    def fails(shorter: list[Op]) -> bool:
        return first_difference(plan, shorter, sides, watch=watch) is not None

    short = shrink(program, fails)
    lines = [f"seed {seed}: {first_difference(plan, short, sides, watch=watch) or found}"]
    lines += [f"variant {variant_of(seed)}, scaler {plan.scaler}"]
    lines += [f"rig {i} {rig}" for i, rig in enumerate(plan.rigs)]
    return "\n".join([*lines, *(f"  {i} {op}" for i, op in enumerate(short))])
