"""Warnings of mistakes on which torch is silent, in the first iterations of a loop."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import python_in
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import ampfast
from ampfast import GradScaler
from ampfast.scaler import loop_checks


class Loop:
    """A model, its optimizer and their scaler, with the parts of an iteration."""

    def __init__(self, scaler: Any = None) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.scaler = torch.amp.GradScaler("cpu") if scaler is None else scaler

    def backward(self, factor: float | None = None) -> None:
        loss = self.model(torch.ones(2, 3)).square().mean()
        (self.scaler.scale(loss) if factor is None else loss * factor).backward()

    def clip(self, max_norm: float = 1.0) -> None:
        clip_grad_norm_(self.model.parameters(), max_norm)

    def step(self, *, update: bool = True) -> None:
        self.scaler.step(self.optimizer)
        self.optimizer.zero_grad()
        if update:
            self.scaler.update()


def plain(loop: Loop) -> None:
    loop.backward()
    loop.scaler.unscale_(loop.optimizer)
    loop.clip()
    loop.step()


def accumulation(loop: Loop) -> None:
    for _ in range(3):
        loop.backward()
    plain(loop)


def in_place(loop: Loop) -> None:
    loop.optimizer.zero_grad(set_to_none=False)
    loop.backward()
    loop.scaler.unscale_(loop.optimizer)
    loop.clip()
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()


def limit_times_scale(loop: Loop) -> None:
    loop.backward()
    loop.clip(0.5 * loop.scaler.get_scale())
    loop.step()


def limit_times_attribute(loop: Loop) -> None:
    loop.backward()
    loop.clip(0.5 * loop.scaler._scale.item())
    loop.step()


def measured(loop: Loop) -> None:
    loop.backward()
    loop.clip(float("inf"))
    loop.clip(1e9)
    loop.step()


def values_alone(loop: Loop) -> None:
    loop.backward()
    loop.scaler.unscale_(loop.optimizer)
    clip_grad_value_(loop.model.parameters(), 1.0)
    loop.step()


def own_clip(loop: Loop) -> None:
    loop.backward()
    loop.scaler.clip_grad_norm_(loop.optimizer, 1.0)
    loop.clip()
    loop.step()


def left_unstepped(loop: Loop) -> None:
    """The step is left out, and the next iteration has gradients of its own."""
    loop.backward()
    loop.scaler.unscale_(loop.optimizer)
    loop.scaler.update()
    loop.optimizer.zero_grad()
    plain(loop)


def by_hand(loop: Loop) -> None:
    loop.scaler.scale(torch.ones(()))  # makes the scale
    loop.scaler.update(1024.0)
    for _ in range(4):
        loop.backward(loop.scaler.get_scale())
        loop.step()
    loop.backward(loop.scaler.get_scale())
    loop.step()


def compiled(loop: Loop) -> None:
    """A call of `scale` that nothing sees."""
    if vars(loop.scaler)["_scale"] is None:
        loop.scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    loop.backward(65536.0)
    loop.step()


def without_scale(loop: Loop) -> None:
    """fp32 steps between, by the optimizer alone."""
    loop.backward(1.0)
    loop.clip()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    plain(loop)


def adversaries(loop: Loop) -> None:
    """Two optimizers of one scaler, and the gradients that one leaves to the other."""
    judge = getattr(loop, "judge", None) or Loop(loop.scaler)
    loop.judge = judge  # type: ignore[attr-defined]
    for each, other in ((loop, judge), (judge, loop)):
        out = other.model(each.model(torch.ones(2, 3)))
        loop.scaler.scale(out.square().mean()).backward()
        loop.scaler.unscale_(each.optimizer)
        clip_grad_norm_([*each.model.parameters(), *other.model.parameters()], 1.0)
        each.step(update=False)
        other.optimizer.zero_grad()
    loop.scaler.update()


def two_scalers(loop: Loop) -> None:
    judge = getattr(loop, "judge", None) or Loop()
    loop.judge = judge  # type: ignore[attr-defined]
    for each in (loop, judge):
        each.backward()
    for each in (loop, judge):
        each.scaler.unscale_(each.optimizer)
        each.clip()
    for each in (loop, judge):
        each.step()


def closure(loop: Loop) -> None:
    """As Lightning's: unscale_ and clip within what the optimizer's wrapper calls."""

    def run() -> None:
        loop.optimizer.zero_grad()
        loop.backward()

    run()
    loop.scaler.unscale_(loop.optimizer)
    loop.clip()
    loop.step()


RIGHT = [
    *(plain, accumulation, in_place, limit_times_scale, limit_times_attribute, measured),
    *(values_alone, own_clip, left_unstepped, by_hand, without_scale, adversaries, two_scalers),
    *(closure, compiled),
]


class Own(ampfast.GradScaler):
    """A scaler that may scale and divide as it likes."""

    def scale(self, outputs: Any) -> Any:
        return super().scale(outputs)

    def _unscale_grads_(self, *args: Any) -> Any:
        return super()._unscale_grads_(*args)


SCALERS: dict[str, Callable[[], Any]] = {
    "guard": lambda: ampfast.StepGuard("cpu"),
    "scale of 1": lambda: torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=100),
    "of its own": lambda: Own("cpu"),
    "disabled": lambda: torch.amp.GradScaler("cpu", enabled=False),
    "constant": lambda: torch.amp.GradScaler("cpu", dynamic=False),  # type: ignore[call-arg]
}


def clipped_before(loop: Loop) -> None:
    loop.backward()
    loop.clip()
    loop.step()


def clipped_before_unscaling(loop: Loop) -> None:
    loop.backward()
    loop.clip()
    loop.scaler.unscale_(loop.optimizer)
    loop.step()


def clipped_in_parts(loop: Loop) -> None:
    loop.backward()
    params = list(loop.model.parameters())
    norm = nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
    nn.utils.clip_grads_with_norm_(params, 1.0, norm)
    loop.step()


def forgotten(loop: Loop) -> None:
    plain(loop)
    for _ in range(3):
        loop.backward(1.0)
        loop.clip()
        loop.step()


def unscaled_twice(loop: Loop) -> None:
    loop.backward()
    loop.scaler.unscale_(loop.optimizer)
    loop.scaler.update()
    loop.step()


CLIPPED = r"clip_grad_norm_\(\) clipped gradients of this SGD that were not unscaled yet"
WRONG = {
    clipped_before: CLIPPED,
    clipped_before_unscaling: CLIPPED,
    clipped_in_parts: CLIPPED,
    forgotten: r"scale\(\) was not called in 3 iterations",
    unscaled_twice: "gradients of this SGD by the scale, 65536, a second time",
}


@pytest.fixture(params=["patch", "run"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Under `patch(clip_grad_norm=True)`, and with all that `run` looks for."""
    with ampfast.patch(clip_grad_norm=True):
        if request.param == "run":
            loop_checks.start(GradScaler, is_whole=True)
        yield request.param


@pytest.mark.parametrize("iteration", RIGHT)
def test_right_loops_are_silent(way: str, iteration: Callable[[Loop], None]) -> None:
    loop = Loop()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(6):
            iteration(loop)


@pytest.mark.parametrize("scaler", SCALERS)
def test_scales_that_do_no_harm_are_silent(way: str, scaler: str) -> None:
    for iteration in WRONG:
        loop = Loop(SCALERS[scaler]())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            iteration(loop)


@pytest.mark.parametrize("iteration", WRONG)
def test_wrong_loops_warn_once(way: str, iteration: Callable[[Loop], None]) -> None:
    loop = Loop()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            iteration(loop)
    is_told = way == "run" or WRONG[iteration] == CLIPPED
    assert [warning.filename for warning in caught] == [__file__] * is_told
    if is_told:
        with pytest.raises(UserWarning, match=WRONG[iteration]):
            raise caught[0].message


def test_later_iterations_cost_nothing(way: str) -> None:
    methods = ("scale", "unscale_", "step", "clip_grad_norm_", "_end_iteration")
    loop = Loop()
    watched = {name: vars(GradScaler)[name] for name in methods}
    for _ in range(40):
        plain(loop)
    assert all(vars(GradScaler)[name] is watched[name].__wrapped__ for name in methods)
    assert "_scale" not in vars(GradScaler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clipped_before(loop)
    assert copy.deepcopy(loop.scaler).state_dict() == loop.scaler.state_dict()


def test_compiled_loops_are_silent(way: str) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaled = torch.compile(lambda loss: scaler.scale(loss), backend="eager", fullgraph=True)
    assert scaled(torch.ones(())) == 65536
    assert scaler.get_scale() == 65536


PROGRAM = """
import torch
from torch.nn.utils.clip_grad import clip_grad_norm_
weight = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([weight], lr=0.1)
scaler = torch.amp.GradScaler("cpu")
for step in range(4):
    optimizer.zero_grad()
    scaler.scale(weight.sum()).backward()
    clip_grad_norm_((p for p in [weight]), max_norm=1.0)
    scaler.step(optimizer)
    scaler.update()
for step in range(3):
    weight.sum().backward()
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--clip",)])
def test_a_program_under_run(tmp_path: Path, options: tuple[str, ...]) -> None:
    done = python_in(tmp_path, PROGRAM, "-m", "ampfast", "run", *options, "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Warning: clip_grad_norm_() clipped gradients of this SGD that") == 1
    assert done.stderr.count("Warning: step() of this SGD divides gradients by the scale") == 1
    assert done.stderr.count("Warning") == 2
