"""Warnings of mistakes on which torch is silent: those of `patch` and `run`, a late backward."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.comparison import Hooked
from support.processes import python_in
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import ampfast
from ampfast import GradScaler, StepGuard


class Loop:
    """A model, its optimizer and their scaler, with the parts of an iteration."""

    def __init__(self, scaler: Any = None, fused: bool = False) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 3)
        self.params = list(self.model.parameters())
        self.optimizer: Any = torch.optim.SGD(self.params, lr=0.01, fused=fused)
        self.scaler = torch.amp.GradScaler("cpu") if scaler is None else scaler

    def other(self, **options: Any) -> Loop:
        """One that stays, of the same scaler or of its own."""
        if not hasattr(self, "_other"):
            self._other = Loop(**options)
        return self._other

    def loss(self) -> torch.Tensor:
        return self.model(torch.ones(2, 3)).square().mean()

    def backward(self, factor: float | None = None) -> None:
        loss = self.loss()
        (self.scaler.scale(loss) if factor is None else loss * factor).backward()

    def unscale_(self) -> None:
        self.scaler.unscale_(self.optimizer)

    def clip(self, max_norm: float = 1.0) -> None:
        clip_grad_norm_(self.params, max_norm)

    def own_clip(self) -> None:
        self.scaler.clip_grad_norm_(self.optimizer, 1.0)

    def step(self) -> None:
        self.scaler.step(self.optimizer)

    def update(self) -> None:
        self.scaler.update()

    def clear(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


def by_hand(loop: Loop) -> None:
    loop.scaler.scale(torch.ones(()))  # makes the scale
    loop.scaler.update(1024.0)
    for _ in range(5):
        loop.backward(loop.scaler.get_scale())
        run(loop, END)


def compiled(loop: Loop) -> None:
    """A call of `scale` that nothing sees."""
    if loop.scaler._scale is None:
        loop.scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    loop.backward(65536.0)
    run(loop, END)


def adversaries(loop: Loop) -> None:
    """Two optimizers of one scaler, and the gradients that one leaves to the other."""
    judge = loop.other(scaler=loop.scaler)
    for each, other in ((loop, judge), (judge, loop)):
        out = other.model(each.model(torch.ones(2, 3)))
        loop.scaler.scale(out.square().mean()).backward()
        each.unscale_()
        clip_grad_norm_([*each.params, *other.params], 1.0)
        run(each, [STEP, CLEAR])
        other.clear()
    loop.update()


def two_scalers(loop: Loop) -> None:
    for parts in ([BACK], [UNSCALE, CLIP], END):
        for each in (loop, loop.other()):
            run(each, parts)


def clip_in_parts(loop: Loop) -> None:
    norm = nn.utils.get_total_norm([p.grad for p in loop.params if p.grad is not None])
    nn.utils.clip_grads_with_norm_(loop.params, 1.0, norm)


Parts = list[Callable[[Loop], object]]
BACK, UNSCALE, CLIP, OWN_CLIP = Loop.backward, Loop.unscale_, Loop.clip, Loop.own_clip
STEP, UPDATE, CLEAR = Loop.step, Loop.update, Loop.clear
END: Parts = [STEP, UPDATE, CLEAR]
PLAIN: Parts = [BACK, UNSCALE, CLIP, *END]
WITHOUT_SCALE = partial(BACK, factor=1.0)


def run(loop: Loop, parts: Parts) -> None:
    for part in parts:
        part(loop)


RIGHT: dict[str, Parts] = {
    "plain": PLAIN,
    "accumulation": [BACK] * 3 + PLAIN,
    "in place": [partial(CLEAR, set_to_none=False), *PLAIN[:-1]],
    "limit times scale": [BACK, lambda loop: loop.clip(0.5 * loop.scaler.get_scale()), *END],
    "measured": [BACK, partial(CLIP, max_norm=math.inf), partial(CLIP, max_norm=1e9), *END],
    "values alone": [BACK, UNSCALE, lambda loop: clip_grad_value_(loop.params, 1.0), *END],
    "own clip": [BACK, OWN_CLIP, CLIP, *END],
    # The next iteration has gradients of its own.
    "left unstepped": [BACK, UNSCALE, UPDATE, CLEAR, *PLAIN],
    "by hand": [by_hand],
    "compiled": [compiled],
    "fp32 between": [WITHOUT_SCALE, CLIP, lambda loop: loop.optimizer.step(), CLEAR, *PLAIN],
    "adversaries": [adversaries],
    "two scalers": [two_scalers],
}


class Own(Hooked):
    """A scaler that may scale and divide as it likes."""

    def scale(self, outputs: Any) -> Any:
        return super().scale(outputs)


SCALERS: dict[str, Callable[[], Any]] = {
    "guard": lambda: StepGuard("cpu"),
    "scale of 1": lambda: torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=100),
    "of its own": lambda: Own("cpu"),
    "disabled": lambda: torch.amp.GradScaler("cpu", enabled=False),
    "constant": lambda: torch.amp.GradScaler("cpu", dynamic=False),  # type: ignore[call-arg]
}
CLIPPED = r"clip_grad_norm_\(\) clipped gradients of this SGD that were not unscaled yet"
FORGOTTEN = r"scale\(\) was not called in 3 iterations"
WRONG: dict[str, tuple[Parts, str]] = {
    "clipped before": ([BACK, CLIP, *END], CLIPPED),
    "clipped before unscaling": ([BACK, CLIP, UNSCALE, *END], CLIPPED),
    "clipped in parts": ([BACK, clip_in_parts, *END], CLIPPED),
    "forgotten": ([*PLAIN, *[WITHOUT_SCALE, CLIP, *END] * 3], FORGOTTEN),
}


@pytest.fixture
def patched() -> Iterator[None]:
    with ampfast.patch(clip_grad_norm=True):
        yield


CHECKED = pytest.mark.usefixtures("patched")


@CHECKED
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", RIGHT)
def test_right_loops_are_silent(name: str) -> None:
    run(Loop(), RIGHT[name] * 6)


@CHECKED
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("scaler", SCALERS)
def test_scales_that_do_no_harm_are_silent(scaler: str) -> None:
    for parts, _ in WRONG.values():
        run(Loop(SCALERS[scaler]()), parts)


@CHECKED
@pytest.mark.parametrize("name", WRONG)
def test_wrong_loops_warn_once(name: str) -> None:
    parts, text = WRONG[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(Loop(), parts * 3)
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.raises(UserWarning, match=text):
        raise caught[0].message


@CHECKED
def test_later_iterations_cost_nothing() -> None:
    methods = ("scale", "get_scale", "unscale_", "step", "clip_grad_norm_", "_end_iteration")
    loop = Loop()
    watched = {name: vars(GradScaler)[name] for name in methods}
    run(loop, PLAIN * 40)
    assert all(vars(GradScaler)[name] is watched[name].__wrapped__ for name in methods)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(loop, [BACK, CLIP, *END])
    assert copy.deepcopy(loop.scaler).state_dict() == loop.scaler.state_dict()


@CHECKED
def test_compiled_loops_are_silent() -> None:
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
def test_a_program_under_run(tmp_path: Path) -> None:
    done = python_in(tmp_path, PROGRAM, "-m", "ampfast", "run", "--clip", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Warning: clip_grad_norm_() clipped gradients of this SGD that") == 1
    assert done.stderr.count("Warning: step() of this SGD divides gradients by the scale") == 1
    assert done.stderr.count("Warning") == 2


# A backward after unscale_, whose gradients a step would take as unscaled


def backward_of(loop: Loop, kind: Callable[..., Any]) -> None:
    sum(loop.scaler.scale(kind(loop.loss() for _ in range(2)))).backward()


def closure(loop: Loop, clears: bool = False, evaluates: bool = False) -> None:
    """A step of a closure that scales its loss, or that only evaluates."""

    def call() -> torch.Tensor:
        loss = loop.scaler.scale(loop.loss())
        if clears:
            loop.clear()
        if not evaluates:
            loss.backward()
        return loss.detach()

    loop.backward()
    loop.scaler.step(loop.optimizer, call)
    run(loop, [UPDATE, CLEAR])


def of_lbfgs(loop: Loop) -> None:
    loop.optimizer = torch.optim.LBFGS(loop.params, max_iter=2)
    closure(loop, clears=True)


def write(loop: Loop) -> None:
    """A clip and noise, in place and not, beside a backward of another model."""
    other = Loop(loop.scaler)
    loop.clip(0.1)
    other.backward()
    for param in loop.params:
        assert param.grad is not None
        param.grad = param.grad + torch.full_like(param.grad, 1e-3)
    other.step()


def penalize(loop: Loop) -> None:
    """A loss whose gradients reach no parameter's `grad`."""
    torch.autograd.grad(loop.scaler.scale(loop.loss()), loop.params)


def through_both(loop: Loop) -> None:
    """As of generator and discriminator: a later loss reaches one that was stepped."""
    other = Loop(loop.scaler, fused=loop.optimizer.defaults["fused"])
    loop.step()
    loop.scaler.scale(loop.loss() + other.loss()).backward()
    run(other, [UNSCALE, CLIP, STEP, UPDATE])
    loop.clear()


# Programs that run twice, and whether the first one warns.
PROGRAMS: dict[str, tuple[Parts, bool]] = {
    "cleared": ([BACK, UNSCALE, CLEAR, BACK, STEP, UPDATE], True),
    "accumulated": ([BACK, UNSCALE, BACK, STEP, UPDATE], True),
    "clipped": ([BACK, OWN_CLIP, CLEAR, BACK, STEP, UPDATE], True),
    "list": ([BACK, UNSCALE, partial(backward_of, kind=list), STEP, UPDATE], True),
    "iterator": ([BACK, UNSCALE, partial(backward_of, kind=iter), STEP, UPDATE], True),
    "closure": ([closure], True),
    "closure that clears": ([partial(closure, clears=True)], True),
    "closure of L-BFGS": ([of_lbfgs], True),
    "evaluating closure": ([partial(closure, evaluates=True)], False),
    "in order": ([BACK, BACK, UNSCALE, *END], False),
    "written": ([BACK, UNSCALE, write, *END], False),
    "penalty": ([BACK, UNSCALE, penalize, *END], False),
    "both": ([BACK, UNSCALE, penalize, through_both], False),
}


@pytest.mark.parametrize("scaler", [GradScaler, Hooked, StepGuard])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_late_backwards_warn_once(name: str, fused: bool, scaler: type[Any]) -> None:
    parts, warns = PROGRAMS[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(Loop(scaler("cpu"), fused), parts * 2)
    if scaler is StepGuard or (fused and name in ("closure", "closure that clears")):
        warns = False  # a guard has no scale, and a fused optimizer divides in its step
    assert [each.filename for each in caught] == [__file__] * warns
    assert all("within step(): they were neither" in str(each.message) for each in caught)


@pytest.mark.parametrize("scaler", [GradScaler, StepGuard])
@pytest.mark.parametrize("call", [UNSCALE, OWN_CLIP])
def test_a_call_before_the_first_gradient(
    call: Callable[[Loop], object], scaler: type[Any]
) -> None:
    for fused in (False, True):
        loop = Loop(scaler("cpu"), fused)
        loss = loop.scaler.scale(loop.loss())
        call(loop)
        loss.backward()
        with pytest.raises((AssertionError, AttributeError)) as refused:
            loop.step()
        assert "which belong between backward() and step()" in refused.value.__notes__[0]


def test_a_warning_that_is_an_error_comes_before_the_step() -> None:
    loop = Loop(GradScaler("cpu"))
    run(loop, [BACK, UNSCALE, STEP])
    assert loop.scaler.scale(loop.loss())._backward_hooks is None, "of an ordinary loss"
    loop.update()
    before = [param.tolist() for param in loop.params]
    run(loop, [BACK, UNSCALE, BACK])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="perhaps too large by the factor of the scale"):
            loop.step()
    assert [param.tolist() for param in loop.params] == before
