"""Trainings under conditions that must change nothing, beside usual ones."""

from __future__ import annotations

import contextlib
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from support.comparison import difference
from support.groups import Pair
from tally import Tally, main

from ampfast import GradScaler, Sigmas, StepGuard
from ampfast.scaler.grad_scaler import OptState

SCALES = [8.0, 3.0, 2.0**16, 2.0**-130]
FEATURES: list[dict[str, Any]] = [
    *({}, {"track": "overflow"}, {"track": "norms"}, {"max_skips": 50}, {"skip_above": 1e37}),
    {"skip_above": Sigmas(6, window=64), "track": "norms"},
]


class Plan(NamedTuple):
    """What is trained: a class of optimizer, and for each step a call, a size and a bad value."""

    kind: str
    fused: bool
    guards: bool
    grouped: bool
    scale: float
    steps: list[tuple[str, float, float]]


class Conditions(NamedTuple):
    """What must change nothing.

    Attributes:
        dtype: The default dtype.
        inference: Whether calls that step nothing run in inference mode.
        features: Arguments of the scaler.
        fails: Numbers of the collectives that fail, whose call is repeated.
        is_complex: Whether two real numbers are the parts of a complex one.
        scales: Whether `scale` is called.
        loads: Whether a fused optimizer has loaded the state of a plain one.
    """

    dtype: torch.dtype = torch.float32
    inference: bool = False
    features: Mapping[str, Any] = MappingProxyType({})
    fails: tuple[int, ...] = ()
    is_complex: bool = False
    scales: bool = True
    loads: bool = False


def draw(seed: int) -> tuple[Plan, Conditions]:
    rng = random.Random(seed)
    often = lambda chance: rng.random() < chance  # noqa: E731
    fused, guards, grouped = often(0.5), often(0.4), often(0.4)
    calls = ["step", "unscale_", "step_and_update", "clip", "defer", "grad_norm"]
    bad = [0.0] * 6 + [float("inf"), float("nan"), 1e30]
    steps = [(rng.choice(calls), rng.uniform(-10, 8), rng.choice(bad)) for _ in range(6)]
    kind, scale = rng.choice(["SGD", "AdamW"]), 1.0 if guards else rng.choice(SCALES)
    plan = Plan(kind, fused, guards, grouped, scale, steps)
    given = Conditions(
        dtype=rng.choice([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
        inference=often(0.3),
        features=rng.choice(FEATURES),
        fails=tuple(rng.sample(range(1, 12), 3)) if grouped and often(0.7) else (),
        is_complex=not fused and often(0.4),
        scales=not (guards and often(0.5)),
    )
    return plan, given._replace(loads=not fused and not given.is_complex and often(0.4))


def optimizer_of(plan: Plan, given: Conditions, params: list[torch.Tensor]) -> Any:
    make, lr = getattr(torch.optim, plan.kind), 0.5
    if not given.loads:
        return make(params, lr=lr, fused=True) if plan.fused else make(params, lr=lr)
    optimizer = make(params, lr=lr, fused=True)
    optimizer.load_state_dict(make(params, lr=lr).state_dict())
    return optimizer


@contextlib.contextmanager
def under(given: Conditions, inference: bool) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(given.dtype)
    try:
        with torch.inference_mode() if inference and given.inference else contextlib.nullcontext():
            yield
    finally:
        torch.set_default_dtype(before)


def trained(plan: Plan, given: Conditions) -> list[Any]:
    """Decisions, norms, parameters and counts of a training."""
    group = Pair(given.fails) if plan.grouped else None
    more: dict[str, Any] = {"process_group": group, **given.features}
    with under(given, False):
        scaler: Any = StepGuard(**more) if plan.guards else None
        if scaler is None:
            scaler = GradScaler("cpu", plan.scale, growth_interval=2, **more)
    generator, params = torch.Generator().manual_seed(len(plan.steps)), []
    for is_complex in (given.is_complex, False):
        param = torch.zeros(5, 2, dtype=torch.float32)
        params.append(torch.nn.Parameter(torch.view_as_complex(param) if is_complex else param))
    optimizer, seen = optimizer_of(plan, given, params), []

    def call(method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """A call that is repeated after a failure, where it is one that may be."""
        steps = method.__name__.startswith("step")
        for _ in range(len(given.fails)):
            with contextlib.suppress(ConnectionError), under(given, inference=not steps):
                return method(*args, **options)
            state = scaler._per_optimizer_states[id(optimizer)]
            if method.__name__ == "unscale_" and state["stage"] is OptState.UNSCALED:
                return None  # `step` makes the ranks agree
        with under(given, inference=not steps):
            return method(*args, **options)

    for way, exponent, bad in plan.steps:
        scale = 1.0 if plan.guards else scaler.get_scale()
        if given.scales:
            with under(given, False):
                scaler.scale(torch.ones((), dtype=torch.float32))
        for param in params:
            numbers = torch.randn(5, 2, generator=generator, dtype=torch.float64)
            numbers = (numbers * 2.0**exponent * scale).float()
            numbers[3, 1] += bad
            param.grad = torch.view_as_complex(numbers) if param.is_complex() else numbers
        if way == "grad_norm":
            seen.append(call(scaler.grad_norm, optimizer))
        elif way in ("clip", "defer"):
            in_place = way == "clip" or not plan.fused
            seen.append(call(scaler.clip_grad_norm_, optimizer, 1.0, in_place=in_place))
        elif way == "unscale_":
            call(scaler.unscale_, optimizer)
        if way == "step_and_update":
            call(scaler.step_and_update, optimizer)
        else:
            call(scaler.step, optimizer)
            call(scaler.update)
        seen.append(scaler.step_skipped(optimizer))
    numbers = [torch.view_as_real(p.detach()) if p.is_complex() else p.detach() for p in params]
    return [*seen, numbers, scaler.get_scale(), repr(scaler.stats())]


def run(count: float, seed: int = 0) -> Tally:
    """Runs `count` trainings, each twice."""
    tally = Tally("trainings")
    for number in range(seed, seed + int(count)):
        plan, given = draw(number)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            usual = trained(plan, Conditions())
            try:
                found = difference(trained(plan, given), usual)
            except Exception as error:
                found = f"{type(error).__name__}: {error}"
        tally.count += 1
        if found is not None:
            tally.fail(f"seed {number}, {found}; {plan} {given}")
    return tally


if __name__ == "__main__":
    sys.exit(main(run, "count", 3000))
