"""A backward after unscale_, whose gradients a step would take as unscaled."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from ampfast import GradScaler, StepGuard


class ByTorch(GradScaler):
    """Overrides a hook, so torch's own methods run."""

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> Any:
        return super()._unscale_grads_(*args, **kwargs)


class Model:
    """Two parameters, their optimizer and a scaler."""

    def __init__(self, scaler: Any, fused: bool = False) -> None:
        self.params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
        self.optimizer: Any = torch.optim.SGD(self.params, lr=0.1, fused=fused)
        self.scaler = scaler

    def loss(self) -> torch.Tensor:
        return sum((param * param).sum() for param in self.params)  # type: ignore[return-value]

    def backward(self) -> None:
        self.scaler.scale(self.loss()).backward()

    def unscale_(self) -> None:
        self.scaler.unscale_(self.optimizer)

    def clip(self) -> None:
        self.scaler.clip_grad_norm_(self.optimizer, 1.0)

    def clear(self) -> None:
        self.optimizer.zero_grad()

    def end(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()


Program = Callable[[Model], object]


def backward_of(model: Model, kind: Callable[..., Any]) -> None:
    sum(model.scaler.scale(kind(model.loss() for _ in range(2)))).backward()


def closure(model: Model, clears: bool = False, evaluates: bool = False) -> None:
    """A step of a closure that scales its loss, or that only evaluates."""

    def call() -> torch.Tensor:
        loss = model.scaler.scale(model.loss())
        if clears:
            model.clear()
        if not evaluates:
            loss.backward()
        return loss.detach()

    model.backward()
    model.scaler.step(model.optimizer, call)
    model.scaler.update()
    model.clear()


def of_lbfgs(model: Model) -> None:
    model.optimizer = torch.optim.LBFGS(model.params, max_iter=2)
    closure(model, clears=True)


def write(model: Model) -> None:
    """A clip and noise, in place and not, beside a backward of another model."""
    other = Model(model.scaler)
    torch.nn.utils.clip_grad_norm_(model.params, 0.1)
    other.backward()
    for param in model.params:
        assert param.grad is not None
        param.grad = param.grad + torch.full_like(param.grad, 1e-3)
    model.scaler.step(other.optimizer)


def penalize(model: Model) -> None:
    """A loss whose gradients reach no parameter's `grad`."""
    torch.autograd.grad(model.scaler.scale(model.loss()), model.params)


def through_both(model: Model) -> None:
    """As of generator and discriminator: a later loss reaches one that was stepped."""
    other = Model(model.scaler, fused=model.optimizer.defaults["fused"])
    model.scaler.step(model.optimizer)
    model.scaler.scale(model.loss() + other.loss()).backward()
    other.unscale_()
    torch.nn.utils.clip_grad_norm_(other.params, 1.0)
    other.end()
    model.clear()


BACK, UNSCALE, CLIP, CLEAR, END = Model.backward, Model.unscale_, Model.clip, Model.clear, Model.end
# Programs that run twice, and whether the first one warns.
PROGRAMS: dict[str, tuple[list[Program], bool]] = {
    "cleared": ([BACK, UNSCALE, CLEAR, BACK, END], True),
    "accumulated": ([BACK, UNSCALE, BACK, END], True),
    "clipped": ([BACK, CLIP, CLEAR, BACK, END], True),
    "list": ([BACK, UNSCALE, partial(backward_of, kind=list), END], True),
    "iterator": ([BACK, UNSCALE, partial(backward_of, kind=iter), END], True),
    "closure": ([closure], True),
    "closure that clears": ([lambda model: closure(model, clears=True)], True),
    "L-BFGS": ([of_lbfgs], True),
    "evaluating closure": ([lambda model: closure(model, evaluates=True)], False),
    "in order": ([BACK, BACK, UNSCALE, END, CLEAR], False),
    "written": ([BACK, UNSCALE, write, END, CLEAR], False),
    "penalty": ([BACK, UNSCALE, penalize, END, CLEAR], False),
    "both": ([BACK, UNSCALE, penalize, through_both], False),
}


@pytest.mark.parametrize("scaler", [GradScaler, ByTorch, StepGuard])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_warn_once_or_of_nothing(name: str, fused: bool, scaler: type[Any]) -> None:
    program, warns = PROGRAMS[name]
    model = Model(scaler("cpu"), fused)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for call in program * 2:
            call(model)
    is_within = name.startswith("closure") or name == "L-BFGS"
    said = "within the step" if is_within else "after the last backward()"
    if scaler is StepGuard or (fused and name.startswith("closure")):
        warns = False  # a guard has no scale, and a fused optimizer divides in its step
    assert [each.filename for each in caught] == [__file__] * warns
    assert all(said in str(each.message) for each in caught)


@pytest.mark.parametrize("scaler", [GradScaler, StepGuard])
@pytest.mark.parametrize("call", [UNSCALE, CLIP])
def test_a_call_before_the_first_gradient(call: Program, scaler: type[Any]) -> None:
    for fused in (False, True):
        model = Model(scaler("cpu"), fused)
        loss = model.scaler.scale(model.loss())
        call(model)
        loss.backward()
        with pytest.raises((AssertionError, AttributeError)) as refused:
            model.end()
        assert "which belong between backward() and step()" in refused.value.__notes__[0]


def test_a_warning_that_is_an_error_comes_before_the_step() -> None:
    model = Model(GradScaler("cpu"))
    for call in (BACK, UNSCALE):
        call(model)
    model.scaler.step(model.optimizer)
    assert model.scaler.scale(model.loss())._backward_hooks is None, "of an ordinary loss"
    model.scaler.update()
    before = model.params[0].tolist()
    for call in (BACK, UNSCALE, BACK):
        call(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="perhaps too large by the factor of the scale"):
            model.end()
    assert model.params[0].tolist() == before
