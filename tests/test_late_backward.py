"""A backward after unscale_, whose gradients a step would take as unscaled."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ampfast import GradScaler

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "plain": lambda params: torch.optim.SGD(params, lr=0.1),
    "fused": lambda params: torch.optim.SGD(params, lr=0.1, fused=True),
}
KINDS = pytest.mark.parametrize("kind", OPTIMIZERS)


class Model:
    """Two parameters and their optimizer."""

    def __init__(self, kind: str = "plain") -> None:
        self.params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
        self.optimizer = OPTIMIZERS[kind](self.params)

    def loss(self) -> torch.Tensor:
        return sum((param * param).sum() for param in self.params)  # type: ignore[return-value]


def warned(program: Callable[[], object]) -> list[str]:
    """Files at which the warning points, and the text of any other warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program()
    return [
        each.filename if "unscale_() after the last backward()" in str(each.message) else "other"
        for each in caught
    ]


@KINDS
@pytest.mark.parametrize("clears", [True, False], ids=["cleared", "accumulated"])
@pytest.mark.parametrize("way", ["unscale_", "clip_grad_norm_", "list of losses", "generator"])
def test_a_cell_without_update_warns_once(kind: str, clears: bool, way: str) -> None:
    scaler, model = GradScaler("cpu"), Model(kind)

    def notebook() -> None:
        for _ in range(2):
            # A cell that looks at gradients.
            scaler.scale(model.loss()).backward()
            if way == "clip_grad_norm_":
                scaler.clip_grad_norm_(model.optimizer, 1.0)
            else:
                scaler.unscale_(model.optimizer)
            # The cell that trains.
            if clears:
                model.optimizer.zero_grad()
            if way == "list of losses":
                sum(scaler.scale([model.loss(), model.loss()])).backward()
            elif way == "generator":
                sum(scaler.scale(model.loss() for _ in range(2))).backward()
            else:
                scaler.scale(model.loss()).backward()
            scaler.step(model.optimizer)
            scaler.update()

    assert warned(notebook) == [__file__]


def test_a_warning_that_is_an_error_comes_before_the_step() -> None:
    scaler, model = GradScaler("cpu"), Model()
    scaler.scale(model.loss()).backward()
    scaler.unscale_(model.optimizer)
    scaler.scale(model.loss()).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="perhaps too large by the factor of the scale"):
            scaler.step(model.optimizer)
    assert model.params[0].tolist() == [1.0, 1.0, 1.0]


@KINDS
def test_writing_gradients_warns_of_nothing(kind: str) -> None:
    """A clip and noise, in place and not, beside a backward of another model."""
    scaler, model, other = GradScaler("cpu"), Model(kind), Model()

    def program() -> None:
        for _ in range(3):
            for _ in range(2):
                scaler.scale(model.loss() / 2).backward()
            scaler.unscale_(model.optimizer)
            torch.nn.utils.clip_grad_norm_(model.params, 0.1)
            scaler.scale(other.loss()).backward()
            torch.nn.utils.clip_grad_norm_(model.params, 0.05)
            for param in model.params:
                assert param.grad is not None
                param.grad = param.grad + torch.full_like(param.grad, 1e-3)
            scaler.step(model.optimizer)
            scaler.step(other.optimizer)
            scaler.update()
            model.optimizer.zero_grad()
            other.optimizer.zero_grad()

    assert warned(program) == []


@KINDS
def test_two_networks_that_take_turns_warn_of_nothing(kind: str) -> None:
    """As generator and discriminator: each loss reaches the gradients of one, or of both."""
    scaler, one, two = GradScaler("cpu"), Model(kind), Model(kind)

    def program() -> None:
        for _ in range(3):
            one.optimizer.zero_grad()
            scaler.scale(one.loss()).backward()
            scaler.unscale_(one.optimizer)
            penalty = scaler.scale(one.loss())
            torch.autograd.grad(penalty, one.params)
            scaler.step(one.optimizer)
            two.optimizer.zero_grad()
            scaler.scale(one.loss() + two.loss()).backward()
            scaler.unscale_(two.optimizer)
            torch.nn.utils.clip_grad_norm_(two.params, 1.0)
            scaler.step(two.optimizer)
            scaler.update()

    assert warned(program) == []


class ByTorch(GradScaler):
    """Overrides a hook, so torch's own methods run."""

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> Any:
        return super()._unscale_grads_(*args, **kwargs)


CLOSURES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "L-BFGS": lambda params: torch.optim.LBFGS(params, max_iter=2),
}


@pytest.mark.parametrize("clears", [True, False], ids=["cleared", "accumulated"])
@pytest.mark.parametrize("scaler", [GradScaler, ByTorch])
@pytest.mark.parametrize("name", CLOSURES)
def test_a_closure_that_scales_its_loss_warns_once(
    name: str, scaler: type[GradScaler], clears: bool
) -> None:
    of, model = scaler("cpu"), Model()
    optimizer = CLOSURES[name](model.params)

    def closure() -> torch.Tensor:
        if clears:
            optimizer.zero_grad()
        loss = model.loss()
        of.scale(loss).backward()
        return loss.detach()

    def train() -> None:
        for _ in range(2):
            of.scale(model.loss()).backward()
            of.step(optimizer, closure)
            of.update()

    with pytest.warns(UserWarning, match="within the step") as caught:
        train()
    assert [each.filename for each in caught] == [__file__]
