"""Raw calls of `step` and `update`: what they decline, and what Python may do beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.frames import Loop
from support.optimizers import Reader

from ampfast import GradScaler

CPU = torch.device("cpu")


def test_flags_of_several_optimizers_are_summed() -> None:
    """As torch does, which only shows where a flag is neither 0 nor 1."""
    scales = []
    for kind in (torch.amp.GradScaler, GradScaler):
        scaler = kind("cpu", init_scale=4.0, growth_interval=1)
        scaler.scale(torch.ones(()))
        for key, flag in enumerate((1.0, -1.0)):
            scaler._per_optimizer_states[key] = {"found_inf_per_device": {CPU: torch.tensor(flag)}}
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [8.0, 8.0]


def scaled_alone(count: int = 1000) -> tuple[GradScaler, Any, torch.nn.Parameter]:
    scaler, param = GradScaler("cpu", init_scale=4.0), torch.nn.Parameter(torch.ones(count))
    scaler.scale(torch.ones(()))
    param.grad = torch.full((count,), 8.0)
    return scaler, torch.optim.SGD([param], lr=0.1), param


@pytest.mark.parametrize("call", ["unscale_", "clip_grad_norm_"])
def test_python_that_runs_while_a_state_is_marked(call: str) -> None:
    """Replaced entries of the state live until the gradients are written."""
    scaler, optimizer, param = scaled_alone()
    held: list[torch.Tensor] = []

    class Ends:
        def __del__(self) -> None:
            param.grad = None
            held.append(torch.full((1000,), 7.0))

    scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {"x": Ends()}  # type: ignore[dict-item]
    getattr(scaler, call)(optimizer, *((1e9,) if call == "clip_grad_norm_" else ()))
    assert held[0].eq(7).all()


@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_a_step_that_clears_its_entry(kind: str) -> None:
    loop = Loop(GradScaler("cpu"), kind)
    loop.backward()
    entry = loop.scaler._per_optimizer_states
    loop.optimizer.step = lambda: entry[id(loop.optimizer)].clear()  # type: ignore[method-assign]
    assert loop.scaler.step(loop.optimizer) is None


def test_a_property_of_a_subclass_counts() -> None:
    class Paused(GradScaler):
        @property
        def _enabled(self) -> bool:  # type: ignore[override]
            return self.__dict__.get("_enabled", False) and not self.__dict__.get("paused")

        @_enabled.setter
        def _enabled(self, value: bool) -> None:
            self.__dict__["_enabled"] = value

    scaler, (_, optimizer, param) = Paused("cpu", init_scale=4.0), scaled_alone()
    scaler.scale(torch.ones(()))
    scaler.paused = True  # type: ignore[attr-defined]
    scaler.step(optimizer)
    assert param.grad is not None and param.grad.eq(8).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_scale_that_is_written_in_place_counts(dtype: torch.dtype) -> None:
    scaler, optimizer, param = scaled_alone()
    scaler._scale = torch.tensor(4.0, dtype=dtype)
    for scale in (4.0, 8.0):
        scaler._scale.fill_(scale)
        param.grad = torch.full_like(param, 8.0)
        scaler.unscale_(optimizer)
        assert param.grad.eq(8 / scale).all()
        scaler._per_optimizer_states.clear()


def test_a_hook_takes_an_optimizer_without_groups() -> None:
    class Several:
        def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
            self.optimizers = optimizers

        def step(self) -> None:
            for each in self.optimizers:
                each.step()

    class Each(GradScaler):
        def _unscale_grads_(self, optimizer: Any, *given: Any) -> Any:
            found = {}
            for each in optimizer.optimizers:
                found |= super()._unscale_grads_(each, *given)
            return found

    params = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
    scaler, several = (
        Each("cpu", init_scale=4.0),
        Several(*(torch.optim.SGD([p], 1.0) for p in params)),
    )
    scaler.scale(torch.ones(()))
    for param in params:
        param.grad = torch.full((3,), 4.0)
    scaler.step(several)  # type: ignore[arg-type]
    scaler.update()
    assert all(param.eq(-1).all() for param in params)


def test_a_new_scale_in_place_of_one_of_another_dtype() -> None:
    scaler, optimizer, _ = scaled_alone()
    scaler._scale = torch.tensor(4.0, dtype=torch.float64)
    scaler.unscale_(optimizer)
    scaler.update(16.0)
    assert scaler._scale.item() == 16.0


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kernels", ["cpu", "launcher"])
def test_an_optimizer_gets_a_copy_of_any_scale(
    kernels: str, dtype: torch.dtype, is_sparse: bool, request: pytest.FixtureRequest
) -> None:
    if kernels == "launcher":
        request.getfixturevalue("launcher")
    scaler, (_, _, param) = GradScaler("cpu"), scaled_alone(3)
    scaler.scale(torch.ones(()))
    scaler._scale = torch.tensor(4.0, dtype=dtype)
    other = torch.nn.Parameter(torch.ones(3))
    other.grad = torch.ones(3).to_sparse() if is_sparse else torch.ones(3)
    flag, divisor = scaler.step(Reader([param, other], lr=0.1))  # type: ignore[misc]
    assert (flag, divisor.item(), divisor.dtype) == (0.0, 4.0, dtype)
    assert divisor.data_ptr() != scaler._scale.data_ptr()
