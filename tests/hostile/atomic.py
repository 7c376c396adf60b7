"""Atomicity of a scaler's calls, interrupted at every point: training goes on correctly.

A call has no effect, its whole effect, or skips its optimizer: gradients that may be written in
part are UNSCALED with a flag, so that `step` does nothing and `update` backs off.
"""

from __future__ import annotations

import contextlib
import copy
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from support.comparison import difference, started
from support.gradients import make_gradient

from ampfast import GradScaler
from ampfast.scaler.grad_scaler import OptState

NEW: dict[str, Any] = {"stage": OptState.READY}
SKIPS = "UNSCALED, with a flag"
NOT_STEPPED = "no step"
LAYOUTS = ("contiguous", "short", "every_other")
SCALE, BACKOFF = 8.0, 0.5


class Counted:
    """Optimizer whose step cannot fail and is counted."""

    def __init__(self) -> None:
        dtypes = (torch.float32, torch.bfloat16, torch.float64)
        self.gradients = [
            make_gradient(layout, dtype) * SCALE
            for layout, dtype in zip(LAYOUTS, dtypes, strict=True)
        ]
        self.params = [torch.nn.Parameter(torch.zeros_like(g)) for g in self.gradients]
        for param, gradient in zip(self.params, self.gradients, strict=True):
            param.grad = gradient
        self.param_groups = [{"params": self.params}]
        self.divisor: Any = NOT_STEPPED

    def step(self) -> None:
        if not self.__dict__.get("found_inf"):
            self.divisor = self.__dict__.get("grad_scale")


class Dividing(Counted):
    _step_supports_amp_scaling = True


class Rig:
    """Scaler and optimizer of one trial."""

    def __init__(self, fused: bool, **arguments: Any) -> None:
        self.optimizer: Any = Dividing() if fused else Counted()
        self.scaler: Any = started(
            GradScaler, SCALE, growth_interval=1, backoff_factor=BACKOFF, **arguments
        )

    def observe(self) -> dict[str, Any]:
        """State that must change together, by name."""
        optimizer, scaler = self.optimizer, self.scaler
        record = scaler._per_optimizer_states.get(id(optimizer), NEW)
        stage = record["stage"]
        if stage is OptState.UNSCALED and any(record["found_inf_per_device"].values()):
            stage = SKIPS
        return {
            "gradients and stage": [[g.clone() for g in optimizer.gradients], stage],
            "scale": [scaler._scale.clone(), scaler._growth_tracker.clone()],
            "counts": replace(scaler.stats(), scale=0.0, growth_tracker=0),
            "divisor": copy.copy(optimizer.divisor),
            "attributes": sorted({"grad_scale", "found_inf"} & set(vars(optimizer))),
        }


Call = Callable[[Rig], Any]


def clip(order: float, in_place: bool = True) -> Call:
    return lambda rig: rig.scaler.clip_grad_norm_(rig.optimizer, 1.0, order, in_place=in_place)


unscale: Call = lambda rig: rig.scaler.unscale_(rig.optimizer)  # noqa: E731
step: Call = lambda rig: rig.scaler.step(rig.optimizer)  # noqa: E731
update: Call = lambda rig: rig.scaler.update()  # noqa: E731
together: Call = lambda rig: rig.scaler.step_and_update(rig.optimizer)  # noqa: E731


class Scenario(NamedTuple):
    """Interrupted call.

    Attributes:
        name: Shown in failures.
        call: Interrupted call.
        finish: Following calls.
        fused: Whether the optimizer divides by `grad_scale`.
        before: Preceding calls, undisturbed.
        ways: Calls whose outcome is also valid, besides none and all of `call`.
    """

    name: str
    call: Call
    finish: tuple[Call, ...] = (step, update)
    fused: bool = False
    before: tuple[Call, ...] = ()
    ways: tuple[Call, ...] = ()


SCENARIOS = (
    Scenario("unscale_", unscale),
    Scenario("clip_grad_norm_", clip(2.0)),
    Scenario("clip_grad_norm_(3)", clip(3.0)),
    Scenario("clip_grad_norm_(fused)", clip(2.0, in_place=False), fused=True),
    Scenario("grad_norm", lambda rig: rig.scaler.grad_norm(rig.optimizer)),
    Scenario("step", step, (update,), ways=(unscale,)),
    Scenario("step after unscale_", step, (update,), before=(unscale,)),
    Scenario("step(fused)", step, (update,), True),
    Scenario("step(fused) after clip", step, (update,), True, (clip(2.0, False),)),
    Scenario("update", update, (), before=(step,)),
    Scenario("update(new_scale)", lambda rig: rig.scaler.update(3.0), (), before=(step,)),
    Scenario("step_and_update", together, (), ways=(unscale, step)),
    Scenario("step_and_update(fused)", together, (), True, ways=(step,)),
    Scenario(
        "load_state_dict",
        lambda rig: rig.scaler.load_state_dict({**rig.scaler.state_dict(), "scale": 4.0}),
    ),
)

BACKED_OFF = [torch.tensor(SCALE * BACKOFF), torch.tensor(0, dtype=torch.int32)]
Fault = Callable[[int], AbstractContextManager[Any]]


def arranged(scenario: Scenario, arguments: dict[str, Any], *calls: Call) -> Rig:
    rig = Rig(scenario.fused, **arguments)
    for call in (*scenario.before, *calls):
        call(rig)
    return rig


class Trials:
    """Trials of one scenario with the given scaler arguments."""

    def __init__(self, scenario: Scenario, **arguments: Any) -> None:
        self.scenario, self.arguments = scenario, arguments
        ways = (scenario.call, *scenario.ways)
        self._right = [self._after(), *map(self._after, ways)]
        self._finished = [self._after(way, *scenario.finish) for way in ways]
        # Clipping may be interrupted between its division and its multiplication.
        divided = [] if scenario.before else [self._after(unscale)]
        ends = [*self._right, *self._finished, *divided]
        self._values = [end["gradients and stage"][0] for end in ends]

    def _after(self, *calls: Call) -> dict[str, Any]:
        return arranged(self.scenario, self.arguments, *calls).observe()

    def run(self, fault: Fault, point: int) -> tuple[bool, list[str]]:
        """Interrupts the call at one point; returns whether it was interrupted, and errors."""
        scenario = self.scenario
        rig = arranged(scenario, self.arguments)
        try:
            with fault(point):
                scenario.call(rig)
        except (Exception, KeyboardInterrupt) as error:
            place = f"{scenario.name} {self.arguments or ''}: {describe(error)}"
        else:
            return False, []
        seen = rig.observe()
        right, finished = self._right, self._finished
        gradients, stage = seen["gradients and stage"]
        # As in torch, an update may be interrupted before it drops its records.
        unsure = {"scale", "counts"}
        if stage is SKIPS and self._are_divided_once(gradients):
            unsure = {"counts"}
            right = [{**each, "gradients and stage": [gradients, SKIPS]} for each in right]
            end = {"gradients and stage": [gradients, OptState.READY], "scale": BACKED_OFF}
            # The optimizer's step may have ended, or not begun.
            finished = [{**each, **end} for each in right]
        if wrong := fault_of(seen, right):
            return True, [f"{place}: {wrong}"]
        # The call is repeated unless it has completed; then training goes on.
        if difference(seen, right[1]) is not None:
            with contextlib.suppress(RuntimeError, AssertionError):
                scenario.call(rig)
        try:
            for call in scenario.finish:
                call(rig)
        except Exception as error:
            return True, [f"{place}; it cannot go on: {describe(error)}"]
        wrong = fault_of({k: v for k, v in rig.observe().items() if k not in unsure}, finished)
        return True, [f"{place}; at the end: {wrong}"] if wrong else []

    def _are_divided_once(self, gradients: list[torch.Tensor]) -> bool:
        return all(
            any(difference(gradient, row[index]) is None for row in self._values)
            for index, gradient in enumerate(gradients)
        )

    def all_points(self, fault: Fault, width: int = 1) -> Iterator[list[str]]:
        """Yields the errors of an interrupt at each `width`-th point, until none is reached."""
        point, untouched = 0, 0
        # A failure that the call handles does not end the loop.
        while untouched < 20:
            was_cut, wrong = self.run(fault, point)
            untouched = 0 if was_cut else untouched + 1
            if was_cut:
                yield wrong
            point += width


def fault_of(seen: dict[str, Any], right: list[dict[str, Any]]) -> str:
    """First observation equal to none of the valid ones, or an empty text."""
    for name, value in seen.items():
        if all(difference(value, one[name]) for one in right):
            return f"{name}: {value[1] if 'stage' in name else value}"
    return ""


def describe(error: BaseException) -> str:
    """Error with its line in ampfast."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{Path(f.filename).name}:{f.lineno}" for f in frames if "/ampfast/" in f.filename]
    text = " ".join(str(error).split())[:80]
    return f"{type(error).__name__}({text}) at {places[-1] if places else 'no line'}"
