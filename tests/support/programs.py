"""Random programs of scaler operations, run on torch's scaler and on ours in lockstep.

Hypothesis does not draw them: its programs repeat parts of earlier ones (18 plans in 51 programs),
and missed faults that programs drawn from a seed find.
"""

from __future__ import annotations

import copy
import io
import math
import pickle
import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch

from ampfast import GradScaler
from support.comparison import TorchScaler, difference, outcome
from support.gradients import WRITABLE_LAYOUTS, filled, make_gradient, plant
from support.optimizers import FUSED, KINDS, Rig, RigPlan, takes_scaled
from support.steps import step_together

OptState = torch.amp.grad_scaler.OptState


def current_scale(scaler: TorchScaler) -> float:
    """Current or initial scale."""
    return scaler._init_scale if scaler._scale is None else scaler._scale.item()


def keep_interval_above_tracker(scalers: Iterable[TorchScaler]) -> None:
    """Raises a lowered interval: one below the tracker still grows in ampfast alone."""
    for scaler in scalers:
        tracker = scaler._init_growth_tracker
        if scaler._growth_tracker is not None:
            tracker = max(tracker, scaler._growth_tracker.item())
        if 0 < scaler._growth_interval <= tracker:
            scaler._growth_interval = tracker + 1


def tame(scaler: TorchScaler, rig: Rig) -> None:
    """Drops gradients that overflow when unscaled: ampfast alone skips the step."""
    scale = current_scale(scaler)
    for p in rig.params:
        if p.grad is None:
            continue
        values = p.grad.detach()
        values = values._values() if values.is_sparse else values
        top = values.abs().nan_to_num(0.0, 0.0, 0.0).max().item() if values.numel() else 0.0
        # With a margin, as the scale may have changed since the backward pass.
        limit = 2.0**14 if values.dtype == torch.float16 else 2.0**100
        if scale < 1.0 and max(top, top / scale) > limit:
            p.grad = None


def drop_own_scale(scaler: TorchScaler, rig: Rig) -> None:
    """Drops an optimizer's own scale where ampfast's second check would find more.

    ampfast checks unscaled gradients again for such a scale, torch does not.
    """
    record = scaler._per_optimizer_states.get(id(rig.optimizer))
    if record is None or record["stage"] is not OptState.UNSCALED:
        return
    found = any(record["found_inf_per_device"].values())
    finite = all(
        torch.isfinite(p.grad._values() if p.grad.is_sparse else p.grad).all()
        for p in rig.params
        if p.grad is not None
    )
    if not record["found_inf_per_device"] or not (found or finite):
        rig.forget_attributes()


CPU = torch.device("cpu")


class Op(NamedTuple):
    """Operation of a program: name of a `World` method and its arguments."""

    name: str
    arguments: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(repr, self.arguments))})"


class Plan(NamedTuple):
    """Initial state of a program."""

    scaler: dict[str, Any]
    rigs: tuple[RigPlan, ...]


class World:
    """Two scalers and some rigs; every public method is an operation of a program.

    The same operations must leave worlds of different scaler types equal. Operations that would
    reach a deliberate difference step aside, with the reason.
    """

    def __init__(self, scaler_type: type[torch.amp.GradScaler], plan: Plan, **more: Any) -> None:
        self.scalers = [scaler_type("cpu", **plan.scaler, **more) for _ in range(2)]
        self.rigs = [Rig(rig) for rig in plan.rigs]
        self.saved: dict[str, Any] = {}

    def observe(self) -> dict[str, Any]:
        numbers = {id(rig.optimizer): i for i, rig in enumerate(self.rigs)}
        scalers = [
            {
                "scale": s._scale,
                "scale_version": None if s._scale is None else s._scale._version,
                "tracker": s._growth_tracker,
                "init": [s._init_scale, s._init_growth_tracker],
                "state_dict": s.state_dict(),
                "enabled": s.is_enabled(),
                "get": [s.get_scale(), s._get_growth_tracker()],
                "records_type": type(s._per_optimizer_states),
                "records": [
                    {
                        "rig": numbers.get(key, "none"),
                        "keys": sorted(record),
                        "stage": record["stage"],
                        "flags": {str(d): f for d, f in record["found_inf_per_device"].items()},
                    }
                    for key, record in s._per_optimizer_states.items()
                ],
            }
            for s in self.scalers
        ]
        return {"scalers": scalers, "rigs": [rig.observe() for rig in self.rigs]}

    def run(self, op: Op) -> Any:
        """Runs one operation."""
        keep_interval_above_tracker(self.scalers)
        for rig in self.rigs:
            owners = [p for g in rig.optimizer.param_groups for p in g["params"]]
            owners = [p for p in owners if p.grad is not None]
            for p in owners:
                # Both refuse it, but torch has unscaled those of earlier dtypes by then.
                if p.grad.is_neg() and p.grad.dtype != owners[0].grad.dtype:
                    p.grad = None
        return getattr(self, op.name)(*op.arguments)

    # Losses and gradients

    def scale(self, s: int, form: str, seed: int) -> Any:
        x = make_gradient("contiguous", seed=seed)
        y = make_gradient("transposed", torch.bfloat16, seed).requires_grad_()
        half = make_gradient("scalar", torch.float16, seed)
        outputs = {
            "tensor": lambda: x,
            "graph": lambda: y,
            "half": lambda: half,
            "list": lambda: [x, y],
            "tuple": lambda: (x, half),
            "nested": lambda: [x, (y, [half, x]), ()],
            "generator": lambda: (t for t in (x, y)),
            "generator_in_list": lambda: [(t for t in (x, y))],
            "dict_values": lambda: {"a": x, "b": y}.values(),
            "empty": list,
            "number": lambda: 3.0,
            "number_in_list": lambda: [x, 3],
            "none": lambda: None,
        }[form]()
        result = self.scalers[s].scale(outputs)

        def read(value: Any) -> Any:
            if isinstance(value, torch.Tensor) or value is None:
                return value
            if isinstance(value, (list, tuple)):
                return type(value)(map(read, value))
            if hasattr(value, "__iter__"):
                return [type(value).__name__, *map(read, value)]
            return value

        return read(result)

    def backward(self, s: int, r: int, bad: str, where: str, seed: int) -> None:
        rig = self.rigs[r]
        total = torch.zeros(())
        limit = current_scale(self.scalers[s])
        for i, (p, layout) in enumerate(zip(rig.params, rig.layouts, strict=True)):
            if p.dtype == torch.float16:
                limit = min(limit, 8.0)
            factor = make_gradient(layout, seed=seed + i)
            if bad != "none" and i == seed % len(rig.params):
                # A huge factor is finite, but overflows once multiplied by the scale. Divided by an
                # optimizer's own `grad_scale` of 0.5 it stays finite: only ours checks quotients.
                value = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan, "huge": 1e38}[bad]
                factor = plant(factor.clone(), where, value)
            total = total + (p.float() * factor).sum()
        loss = self.scalers[s].scale(total)
        if loss.requires_grad:
            loss.backward()

    def grads(self, s: int, r: int, bad: str, where: str, seed: int) -> None:
        rig = self.rigs[r]
        scale = min(current_scale(self.scalers[s]), 2.0**60)
        for i, (p, layout) in enumerate(zip(rig.params, rig.layouts, strict=True)):
            grad = make_gradient(layout, p.dtype, seed + i)
            grad.mul_(min(scale, 64.0) if p.dtype == torch.float16 else scale)
            if bad != "none" and i == seed % len(rig.params):
                huge = torch.finfo(p.dtype).max * min(scale, 1.0) / 4
                value = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan, "huge": huge}[bad]
                plant(grad, where, value)
            p.grad = grad

    def sparse_grads(self, r: int, coalesced: bool, bad: str, seed: int) -> None:
        if self.rigs[r].plan.kind.startswith("fused"):
            return  # they raise inside step, after which torch leaves its attributes behind
        value = {"none": 1.0, "inf": math.inf, "-inf": -math.inf, "nan": math.nan, "huge": 3e4}[bad]
        for i, p in enumerate(self.rigs[r].params):
            if p.dim() == 2 and p.numel():
                rows = [0, 2, 2] if p.shape[0] > 2 else [0, 0, 0]
                values = make_gradient("contiguous", torch.float32, seed + i).flatten()
                values = values.repeat(8)[: 3 * p.shape[1]].view(3, -1).clone()
                values[1:] *= value
                p.grad = torch.sparse_coo_tensor([rows], values.to(p.dtype), p.shape)
                if coalesced:
                    p.grad = p.grad.coalesce()

    def zero_grad(self, r: int, set_to_none: bool) -> None:
        for p in self.rigs[r].params:
            if set_to_none:
                p.grad = None
            elif p.grad is not None:
                p.grad.zero_()

    def drop_grad(self, r: int, i: int) -> None:
        params = self.rigs[r].params
        params[i % len(params)].grad = None

    def replace_grad(self, r: int, i: int) -> None:
        params = self.rigs[r].params
        p = params[i % len(params)]
        if p.grad is not None:
            p.grad = p.grad.clone()

    def share_grad(self, r: int) -> None:
        params = self.rigs[r].params
        params[-1].grad = params[0].grad

    # The scaler's own methods

    def unscale_(self, s: int, r: int) -> None:
        tame(self.scalers[s], self.rigs[r])
        return self.scalers[s].unscale_(self.rigs[r].optimizer)

    def step(self, s: int, r: int, form: str) -> Any:
        tame(self.scalers[s], self.rigs[r])
        drop_own_scale(self.scalers[s], self.rigs[r])
        try:
            return self._step(self.scalers[s], self.rigs[r].optimizer, form)
        except Exception:
            self.rigs[r].forget_attributes()
            raise

    def _step(self, scaler: torch.amp.GradScaler, optimizer: Any, form: str) -> Any:
        if form == "none":
            return scaler.step(optimizer, None)
        if form == "closure":
            return scaler.step(optimizer, lambda: torch.tensor(1.5))
        if form == "closure_keyword":
            return scaler.step(optimizer, closure=lambda: 1.0)
        if form == "unknown_keyword":
            return scaler.step(optimizer, speed=1)
        return scaler.step(optimizer)

    def step_and_update(self, s: int, rigs: tuple[int, ...]) -> list[Any]:
        scaler = self.scalers[s]
        for r in rigs:
            tame(self.scalers[s], self.rigs[r])
            drop_own_scale(self.scalers[s], self.rigs[r])
        optimizers = [self.rigs[r].optimizer for r in rigs]
        try:
            return step_together(scaler, optimizers)
        except Exception:
            for r in rigs:
                self.rigs[r].forget_attributes()
            raise

    def update(self, s: int) -> None:
        return self.scalers[s].update()

    def update_to(self, s: int, form: str, value: float) -> None:
        new = {
            "float": lambda: value,
            "tensor": lambda: torch.tensor(value),
            "one_element": lambda: torch.full((1,), value),
            "double": lambda: torch.tensor(value, dtype=torch.float64),
            "int": lambda: 3,
            "int_tensor": lambda: torch.tensor(3),
            "two_elements": lambda: torch.ones(2),
            "requires_grad": lambda: torch.tensor(value, requires_grad=True),
            "other_device": lambda: torch.tensor(value, device="meta"),
            "text": lambda: "2",
        }[form]()
        return self.scalers[s].update(new)

    def factors(self, s: int, growth: float, backoff: float) -> list[float]:
        scaler = self.scalers[s]
        scaler.set_growth_factor(growth)
        scaler.set_backoff_factor(backoff)
        return [scaler.get_growth_factor(), scaler.get_backoff_factor()]

    def interval(self, s: int, interval: int) -> int:
        self.scalers[s].set_growth_interval(interval)
        return self.scalers[s].get_growth_interval()

    def check(self, s: int, r: int) -> dict[str, torch.Tensor]:
        flags = self.scalers[s]._check_inf_per_device(self.rigs[r].optimizer)
        return {str(device): flag for device, flag in flags.items()}

    def found(self, s: int, r: int) -> dict[str, torch.Tensor]:
        flags = self.scalers[s]._found_inf_per_device(self.rigs[r].optimizer)
        return {str(device): flag for device, flag in flags.items()}

    def start(self, s: int, device: Any) -> None:
        return self.scalers[s]._lazy_init_scale_growth_tracker(device)

    # Accesses of other projects to private state

    def write_scale(self, s: int, how: str, value: float) -> None:
        scaler = self.scalers[s]
        if scaler._scale is None:
            scaler._init_scale = value
        elif how == "fill":
            scaler._scale.fill_(value)
        elif how == "data":
            scaler._scale.data.fill_(value)
        elif how == "numpy":
            scaler._scale.numpy()[...] = value
        else:
            scaler._scale = torch.tensor(value)

    def write_tracker(self, s: int, how: str, value: int) -> None:
        scaler = self.scalers[s]
        if scaler._growth_tracker is None:
            scaler._init_growth_tracker = value
        elif how == "fill":
            scaler._growth_tracker.fill_(value)
        else:
            scaler._growth_tracker = torch.tensor(value, dtype=torch.int32)

    def enable(self, s: int, enabled: bool) -> None:
        self.scalers[s]._enabled = enabled

    def records(self, s: int, r: int, how: str) -> None:
        records, key = self.scalers[s]._per_optimizer_states, id(self.rigs[r].optimizer)
        refresh = torch.amp.grad_scaler._refresh_per_optimizer_state
        if how == "pop":
            records.pop(key, None)
        elif how == "clear":
            records.clear()
        elif how == "reset":
            records[key] = refresh()
        elif how == "new":
            self.scalers[s]._per_optimizer_states = defaultdict(refresh)
        elif how == "unscaled":
            flags = {CPU: torch.tensor(1.0)}
            records[key] = {"stage": OptState.UNSCALED, "found_inf_per_device": flags}
        elif how == "stage":
            records[key]["stage"] = OptState.READY

    def reduce(self, s: int, r: int, value: float) -> None:
        flags = self.scalers[s]._found_inf_per_device(self.rigs[r].optimizer)
        for flag in flags.values():
            # Deliberate difference: torch's fused kernels take 2 for "no overflow".
            flag.add_(value if not self.rigs[r].reads_scale else float(value > 0 and not flag))

    # Checkpoints

    def save(self, s: int) -> dict[str, Any]:
        self.saved = self.scalers[s].state_dict()
        return self.saved

    def load(self, s: int, form: str) -> None:
        state = dict(self.saved)
        if form == "extra":
            state["more"] = 1
        elif form == "torch" and state:
            other = torch.amp.GradScaler("cpu")
            other.load_state_dict(state)
            state = other.state_dict()
        return self.scalers[s].load_state_dict(state)

    def pickled(self, s: int) -> None:
        stream = io.BytesIO()
        pickle.dump(self.scalers[s], stream)
        stream.seek(0)
        self.scalers[s] = pickle.load(stream)

    def copied(self, s: int, is_deep: bool) -> None:
        self.scalers[s] = (copy.deepcopy if is_deep else copy.copy)(self.scalers[s])

    # The optimizer

    def grad_scale(self, r: int, value: float) -> None:
        if self.rigs[r].reads_scale:
            self.rigs[r].optimizer.grad_scale = torch.tensor(value)

    def fail_next(self, r: int) -> None:
        # Those that count steps fail before the first write.
        self.rigs[r].fails = True

    def groups(self, r: int, how: str) -> None:
        rig = self.rigs[r]
        if rig.plan.kind == "bare":
            rig.optimizer._params = rig.optimizer._params[1:] + rig.optimizer._params[:1]
            return
        groups = rig.optimizer.param_groups
        if how == "fresh":
            rig.optimizer.param_groups = [dict(g, params=list(g["params"])) for g in groups]
        elif how == "reversed":
            for group in groups:
                group["params"] = group["params"][::-1]
        elif how == "split" and len(groups[0]["params"]) > 1:
            moved = groups[0]["params"].pop()
            rig.optimizer.add_param_group({"params": [moved]})
        elif how == "drop" and len(groups) > 1:
            groups.pop()
        elif how == "add":
            extra = torch.nn.Parameter(torch.full((5,), 0.75))
            rig.params.append(extra)
            rig.layouts.append("short")
            rig.optimizer.add_param_group({"params": [extra]})

    # What is rare

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
        if record is not None and not rig.reads_scale:
            for device in record["found_inf_per_device"]:
                record["found_inf_per_device"][device] = torch.tensor(value)

    def many_updates(self, s: int, count: int) -> None:
        for _ in range(count):
            self.scalers[s].update()

    def frozen(self, r: int, i: int) -> None:
        """Toggles `requires_grad` of a parameter."""
        p = self.rigs[r].params[i % len(self.rigs[r].params)]
        p.requires_grad_(not p.requires_grad)


LENGTH = 40

ODD = {
    "requires_grad": lambda grad: grad.requires_grad_(),
    "non_leaf": lambda grad: grad.requires_grad_() * 2,
    "negative": lambda grad: grad._neg_view(),
    "parameter": torch.nn.Parameter,
    "view_of_one": lambda grad: torch.cat([grad[:1], grad])[1:],
}
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
OPERATIONS: dict[str, tuple[int, str, Draw]] = {
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
    "load": (2, "s", lambda g: (g.choice(["whole"] * 3 + ["torch", "extra"]),)),
    "pickled": (1, "s", lambda g: ()),
    "copied": (1, "s", lambda g: (g.random() < 0.5,)),
    "grad_scale": (2, "r", lambda g: (g.choice([2.0, 0.5, 1.0]),)),
    "fail_next": (2, "r", lambda g: ()),
    "groups": (3, "r", lambda g: (g.choice(["fresh", "reversed", "split", "drop", "add"]),)),
    "odd_grad": (6, "r", lambda g: (g.randrange(4), g.choice([*ODD]))),
    "flag": (2, "sr", lambda g: (g.choice([0.0, 1.0]),)),
    "many_updates": (1, "s", lambda g: (g.randrange(3),)),
    "frozen": (1, "r", lambda g: (g.randrange(4),)),
}


def draw_operation(name: str, rng: random.Random, rigs: int) -> Op:
    """Draws the arguments of one operation."""
    _, subjects, draw = OPERATIONS[name]
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


def draw_program(seed: int) -> tuple[Plan, list[Op]]:
    """Draws a plan and `LENGTH` operations from one seed."""
    rng = random.Random(seed)
    plan = draw_plan(rng)
    rigs = len(plan.rigs)
    names = list(OPERATIONS)
    weights = [OPERATIONS[name][0] for name in names]
    # One program in eight starts without a scaled loss, to reach the errors about that.
    program = [Op("scale", (s, "tensor", 0)) for s in range(2)] if rng.random() < 7 / 8 else []
    while len(program) < LENGTH:
        if rng.random() < 0.15:
            program += draw_step(rng, rigs)
        else:
            name = rng.choices(names, weights)[0]
            program.append(draw_operation(name, rng, rigs))
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
) -> str | None:
    """Runs a program on both classes and describes the first difference.

    Without `watch` worlds are compared only at the end, so that a read of the state between
    operations cannot hide a write that comes late.
    """
    ours, theirs, more = sides
    our_world, their_world = World(ours, plan, **more), World(theirs, plan)
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
