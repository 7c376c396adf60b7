"""Faults of other gradient scalers that ours must not have."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from support.twins import side

from ampfast import GradScaler

INF = float("inf")


def test_an_id_that_comes_back_is_another_optimizer() -> None:
    class Bare:
        def __init__(self, gradient: torch.Tensor) -> None:
            self.parameter = torch.nn.Parameter(torch.zeros_like(gradient))
            self.parameter.grad = gradient
            self.param_groups = [{"params": [self.parameter]}]

        def step(self) -> list[float]:
            return self.parameter.grad.tolist()

    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    seen: set[int] = set()
    reused = 0
    for size in range(1, 30):
        optimizer = Bare(torch.full((size,), 8.0 * size))
        reused += id(optimizer) in seen
        seen.add(id(optimizer))
        assert scaler.step(optimizer) == [float(size)] * size
        scaler.update()
        del optimizer
    assert reused, "no id came back, so nothing was shown"


def test_the_scale_that_unscales_is_the_one_that_scaled() -> None:
    """DeepSpeed and ColossalAI update first, so a growth step halves the gradients."""
    one = side(GradScaler, "sgd", init_scale=64.0, growth_interval=1)
    for seed in range(4):
        one.optimizer.zero_grad()
        expected = torch.autograd.grad(one.loss(seed), list(one.model.parameters()))
        one.scaler.scale(one.loss(seed)).backward()
        one.scaler.step(one.optimizer)
        # Powers of two scale without rounding.
        for gradient, p in zip(expected, one.model.parameters(), strict=True):
            assert torch.equal(gradient, p.grad)
        one.scaler.update()
    assert one.scaler.get_scale() == 64.0 * 2**4


@pytest.mark.parametrize("count", [1, 4096])
def test_large_finite_gradients_are_no_overflow(count: int) -> None:
    """Apex asks whether a norm is finite, and the square of 1.8e19 is not."""
    gradient = torch.full((count,), 3.0e38)
    parameter = torch.nn.Parameter(torch.zeros(count))
    parameter.grad = gradient
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    assert torch.equal(parameter.detach(), torch.full((count,), -1.5e38))
    assert not scaler.step_skipped(optimizer)


@pytest.mark.parametrize("size", [1, 15, 16, 17, 1000, 40000])
def test_one_nan_among_large_values_is_found(size: int) -> None:
    """Apex's maximum norm drops NaN, since comparisons with NaN are false."""
    for index in {0, size // 2, size - 1}:
        gradient = torch.full((size,), 1.0e30)
        gradient[index] = float("nan")
        parameter = torch.nn.Parameter(torch.zeros(size))
        parameter.grad = gradient
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        scaler = GradScaler("cpu", init_scale=2.0)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        assert not parameter.any() and scaler.step_skipped(optimizer)


def test_growth_comes_after_exactly_interval_steps() -> None:
    """Flax grows one step late."""
    one = side(GradScaler, "sgd", init_scale=4.0, growth_interval=3)
    scales = []
    for seed in range(7):
        one.train(seed)
        scales.append(one.scaler.get_scale())
    assert scales == [4.0, 4.0, 8.0, 8.0, 8.0, 16.0, 16.0]


def test_a_reduced_flag_is_used_on_the_cpu() -> None:
    """Fairscale reduces a copy of the flag on the CPU and discards it."""
    one = side(GradScaler, "sgd", init_scale=4.0)
    before = [p.detach().clone() for p in one.model.parameters()]
    one.scaler.scale(one.loss(0)).backward()
    one.scaler.unscale_(one.optimizer)
    for flag in one.scaler._found_inf_per_device(one.optimizer).values():
        flag.fill_(1.0)
    one.scaler.step(one.optimizer)
    one.scaler.update()
    assert one.scaler.get_scale() == 2.0
    assert all(map(torch.equal, before, one.model.parameters()))


def test_settings_survive_copies() -> None:
    """Jmp loses a setting when its state is flattened and rebuilt."""
    scaler = GradScaler("cpu", 8.0, 3.0, 0.25, 7, backend="aten", allow_fp16=True)
    for other in (copy.deepcopy(scaler), copy.copy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert other.state_dict() == scaler.state_dict()
        parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.float16))
        parameter.grad = torch.full((2,), 8.0, dtype=torch.float16)
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        other.scale(torch.ones(()))
        other.unscale_(optimizer)
        assert parameter.grad.tolist() == [1.0, 1.0]


def test_one_host_read_per_step_whatever_the_number_of_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R's torch reads a flag per parameter."""
    reads = []
    real = torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda self: reads.append(1) or real(self))
    counts = []
    for size in (1, 50):
        parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(size)]
        optimizer = torch.optim.SGD(parameters, lr=1.0, foreach=False)
        scaler = GradScaler("cpu", init_scale=8.0)
        scaler.scale(torch.ones(()))
        for p in parameters:
            p.grad = torch.ones(2)
        reads.clear()
        scaler.step(optimizer)
        scaler.update()
        counts.append(len(reads))
    assert counts[0] == counts[1] <= 1
