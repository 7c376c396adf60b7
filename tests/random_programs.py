"""Random programs of scaler operations, and a state machine that runs them on two scalers."""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import hypothesis
import torch
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)
from programs import Op, Plan, World
from rigs import KINDS, RigPlan
from support import FUSED, WRITABLE_LAYOUTS, TorchScaler, difference, outcome, threads

from ampfast import GradScaler

BAD = st.sampled_from(["none"] * 6 + ["inf", "-inf", "nan", "huge"])
WHERE = st.sampled_from(["first", "middle", "last"])
SCALES = st.sampled_from([2.0**16, 2.0**-10, 1000.3, 3.0, 1.0, 2.0**30])
INTERVALS = st.sampled_from([1, 1, 2, 3, 2000, 0, -1])
SEEDS = st.integers(0, 999)
FLAGS = st.booleans()
FOURTHS = st.integers(0, 3)
CHECKS = st.sampled_from(["unscale_", "step", "_check_inf_per_device"])
OUTPUTS = ["tensor", "graph", "half", "list", "tuple", "nested", "generator", "named", "empty"]
OUTPUTS += ["generator_in_list", "dict_values", "number", "number_in_list", "none"]
NEW_SCALES = ["float", "tensor", "one_element", "double", "int", "int_tensor", "two_elements"]
NEW_SCALES += ["requires_grad", "other_device", "text"]
FORMS = ["plain"] * 8 + ["none", "closure", "closure_keyword", "unknown_keyword"]
BETWEEN = ["reduce", "records", "groups", "write_scale", "write_scale", "replace_grad", "fail_next"]

LENGTH = 30

# Weight, subjects and further arguments of every operation; subject `s` is a scaler's index, `r` a
# rig's.
Operations = dict[str, tuple[int, str, tuple[st.SearchStrategy[Any], ...]]]
OPERATIONS: Operations = {
    "scale": (4, "s", (st.sampled_from(OUTPUTS), SEEDS)),
    "backward": (10, "sr", (BAD, WHERE, SEEDS)),
    "grads": (16, "sr", (BAD, WHERE, SEEDS)),
    "sparse_grads": (4, "r", (FLAGS, BAD, SEEDS)),
    "zero_grad": (3, "r", (FLAGS,)),
    "drop_grad": (2, "r", (FOURTHS,)),
    "replace_grad": (2, "r", (FOURTHS,)),
    "share_grad": (2, "r", ()),
    "refused_grad": (1, "sr", (CHECKS,)),
    "unscale_": (10, "sr", ()),
    "step": (22, "sr", (st.sampled_from(FORMS),)),
    "update": (22, "s", ()),
    "update_to": (3, "s", (st.sampled_from(NEW_SCALES), SCALES)),
    "factors": (1, "s", (st.sampled_from([2.0, 1.1, 4.0, 0.5]), st.sampled_from([0.5, 0.3, 1.0]))),
    "interval": (2, "s", (INTERVALS,)),
    "check": (2, "sr", ()),
    "found": (2, "sr", ()),
    "start": (1, "s", (st.sampled_from(["cpu", torch.device("cpu")]),)),
    "write_scale": (3, "s", (st.sampled_from(["fill", "data", "numpy", "rebind"]), SCALES)),
    "write_tracker": (2, "s", (st.sampled_from(["fill", "rebind"]), st.integers(0, 2))),
    "share_scale": (1, "", ()),
    "enable": (1, "s", (st.sampled_from([True] * 4 + [False]),)),
    "records": (
        *(4, "sr"),
        (st.sampled_from(["pop", "clear", "reset", "new", "unscaled", "stage"]),),
    ),
    "reduce": (3, "sr", (st.sampled_from([0.0, 1.0, 2.0, 0.5]),)),
    "save": (2, "s", ()),
    "load": (2, "s", (st.sampled_from(["whole", "whole", "torch", "partial", "extra"]),)),
    "pickled": (1, "s", ()),
    "copied": (1, "s", ()),
    "grad_scale": (2, "r", (st.sampled_from([2.0, 0.5, 1.0]),)),
    "fail_next": (2, "r", ()),
    "groups": (3, "r", (st.sampled_from(["fresh", "reversed", "split", "drop", "add"]),)),
    "reborn": (1, "r", ()),
    "half_grad": (1, "sr", (CHECKS,)),
    "stranger": (
        *(1, "s"),
        (st.sampled_from(["no_groups", "not_a_tensor", "none", "empty"]), CHECKS),
    ),
}


@st.composite
def rig_plans(draw: st.DrawFn) -> RigPlan:
    kind = draw(st.sampled_from(list(KINDS)))
    f32, f64, bf16 = torch.float32, torch.float64, torch.bfloat16
    dtypes = [(f32,), (f32,), (f64,), (bf16,), (f32, bf16, f64)]
    if kind in ("fused_adam", "fused_sgd", "legacy", "reader"):
        dtypes.append((torch.float16,))
    # torch's fused kernels walk raw memory: an overlapping gradient is read beyond its end.
    layouts = [x for x in WRITABLE_LAYOUTS if kind not in FUSED or x != "overlapping"]
    chosen = draw(st.lists(st.sampled_from(layouts), min_size=1, max_size=4))
    return RigPlan(kind, draw(st.sampled_from(dtypes)), tuple(chosen), draw(FLAGS))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Scaler arguments and one to three optimizers."""
    count = draw(st.sampled_from([1, 1, 2, 3]))
    arguments = {
        "init_scale": draw(SCALES),
        "growth_factor": draw(st.sampled_from([2.0, 1.1, 1.7])),
        "backoff_factor": draw(st.sampled_from([0.5, 0.5, 0.9, 1 / 3])),
        "growth_interval": draw(INTERVALS),
    }
    return Plan(arguments, tuple(draw(rig_plans()) for _ in range(count)))


def operations(rigs: int, table: Operations = OPERATIONS) -> dict[str, st.SearchStrategy[Op]]:
    """Strategy of each operation in a world with that many rigs."""
    indices = {"s": st.sampled_from([0] * 6 + [1]), "r": st.integers(0, rigs - 1)}
    return {
        name: st.tuples(*(indices[x] for x in subjects), *arguments).map(partial(Op, name))
        for name, (_, subjects, arguments) in table.items()
    }


@st.composite
def training_steps(draw: st.DrawFn, rigs: int) -> list[Op]:
    """A whole training step, which independent operations rarely form."""
    single = operations(rigs)
    s = draw(st.sampled_from([0] * 9 + [1]))
    chosen = draw(st.sets(st.integers(0, rigs - 1), min_size=1).map(sorted))
    together = draw(st.sampled_from([True, False, False]))
    program = []
    for r in chosen:
        source = draw(st.sampled_from(["grads", "grads", "backward"]))
        program.append(Op(source, (s, r, draw(BAD), draw(WHERE), draw(SEEDS))))
        if draw(FLAGS):
            program.append(Op("unscale_", (s, r)))
        if draw(st.sampled_from([True, False, False])):
            program.append(draw(single[draw(st.sampled_from(BETWEEN))]))
        if not together:
            program.append(Op("step", (s, r, "plain")))
    last = Op("step_and_update", (s, tuple(chosen))) if together else Op("update", (s,))
    return [*program, last]


def parts(rigs: int, table: Operations) -> st.SearchStrategy[list[Op]]:
    """One operation, or now and then a whole training step."""
    single = operations(rigs, table)
    names = [name for name, (weight, *_) in table.items() for _ in range(weight)]
    one = st.sampled_from(names).flatmap(single.__getitem__).map(lambda op: [op])
    whole = training_steps(rigs)
    return st.integers(0, 6).flatmap(lambda number: one if number else whole)


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


class Lockstep(RuleBasedStateMachine):
    """A world of torch's scalers and one of ours, equal bit for bit after every operation."""

    world: type[World] = World
    table: Operations = OPERATIONS
    sides: Sides = VARIANTS["plain"]

    @initialize(
        plan=plans(),
        watch=st.sampled_from([True, True, True, False]),
        # The tensors are small: a second thread mostly adds waiting, so few programs use it.
        cores=st.sampled_from([1] * 19 + [2]),
        # One program in eight starts without a scaled loss, to reach the errors about that.
        scaled=st.sampled_from([True] * 7 + [False]),
    )
    def start(self, plan: Plan, watch: bool, cores: int, scaled: bool) -> None:
        ours, theirs, more = self.sides
        self.rigs = len(plan.rigs)
        torch.set_num_threads(cores)
        # Without `watch` worlds are compared only at the end, so that a read of the state between
        # operations cannot hide a write that comes late.
        self.watch, self.agree = watch, True
        self.worlds = self.world(ours, plan, **more), self.world(theirs, plan)
        if scaled:
            self._run(Op("scale", (0, "tensor", 0)))
            self._run(Op("scale", (1, "tensor", 0)))

    @rule(program=st.runner().flatmap(lambda self: _parts(type(self), self.rigs)))
    def play(self, program: list[Op]) -> None:
        for op in program:
            self._run(op)

    def teardown(self) -> None:
        if hasattr(self, "worlds") and self.agree:
            self._compare(*(world.observe() for world in self.worlds), "world at the end")

    def _run(self, op: Op) -> None:
        outcomes = [outcome(partial(world.run, op)) for world in self.worlds]
        if op.name == "step_and_update":
            # torch's side is two calls on different lines.
            for side in outcomes:
                side.warned = [(*warning[:2], "", 0) for warning in side.warned]
        self._compare(*(each.comparable() for each in outcomes), f"outcome of {op}")
        if self.watch:
            self._compare(*(world.observe() for world in self.worlds), f"world after {op}")

    def _compare(self, ours: Any, theirs: Any, place: str) -> None:
        found = difference(ours, theirs, place)
        self.agree = found is None
        assert found is None, found


@functools.cache
def _parts(machine: type[Lockstep], rigs: int) -> st.SearchStrategy[list[Op]]:
    return parts(rigs, machine.table)


def lockstep(sides: Sides, base: type[Lockstep] = Lockstep) -> type[Lockstep]:
    """State machine for other scalers."""
    return type(base.__name__, (base,), {"sides": sides})


def run_programs(
    machine: type[Lockstep], count: int, *, seed: int = 0, shrink: bool = True
) -> None:
    """Runs random programs and fails with the shortest on which the worlds differ.

    Args:
        machine: State machine.
        count: Number of programs.
        seed: Equal ones draw equal programs.
        shrink: Whether to look for the shortest one.
    """
    with threads(1):
        run_state_machine_as_test(
            hypothesis.seed(seed)(lockstep(machine.sides, machine)),
            settings=_settings(count, shrink),
        )


def draw_programs(count: int, seed: int = 0) -> list[tuple[Plan, list[Op]]]:
    """Draws that many programs."""
    programs = []

    @hypothesis.seed(seed)
    @_settings(count, shrink=False)
    @hypothesis.given(st.data())
    def draw(data: st.DataObject) -> None:
        plan = data.draw(plans())
        drawn = data.draw(st.lists(parts(len(plan.rigs), OPERATIONS), min_size=LENGTH))
        started = [Op("scale", (s, "tensor", 0)) for s in range(2)]
        programs.append((plan, [*started, *(op for part in drawn for op in part)]))

    draw()
    return programs


def _settings(count: int, shrink: bool) -> hypothesis.settings:
    return hypothesis.settings(
        max_examples=count,
        stateful_step_count=LENGTH,
        phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
        database=None,
        deadline=None,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
