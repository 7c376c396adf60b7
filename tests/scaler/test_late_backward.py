"""A backward after `unscale_`, whose gradients a step would take as unscaled."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.comparison import Hooked
from torch import nn
from torch.nn.utils import clip_grad_norm_

from ampfast import GradScaler, StepGuard


class Loop:
    """A model, its optimizer and their scaler, with the parts of an iteration."""

    def __init__(self, scaler: Any, fused: bool = False) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 3)
        self.params = list(self.model.parameters())
        self.optimizer: Any = torch.optim.SGD(self.params, lr=0.01, fused=fused)
        self.scaler = scaler

    def loss(self) -> torch.Tensor:
        return self.model(torch.ones(2, 3)).square().mean()

    def backward(self) -> None:
        self.scaler.scale(self.loss()).backward()

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

    def clear(self) -> None:
        self.optimizer.zero_grad()


Parts = list[Callable[[Loop], object]]
BACK, UNSCALE, CLIP, OWN_CLIP = Loop.backward, Loop.unscale_, Loop.clip, Loop.own_clip
STEP, UPDATE, CLEAR = Loop.step, Loop.update, Loop.clear
END: Parts = [STEP, UPDATE, CLEAR]


def run(loop: Loop, parts: Parts) -> None:
    for part in parts:
        part(loop)


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
