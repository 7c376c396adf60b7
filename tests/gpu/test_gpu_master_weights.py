"""Master weights on a GPU, against master weights written by hand, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_support import flag, kernels_of
from support.comparison import assert_same
from support.kernel_calls import grads_of, run_unscale

import ampfast

pytestmark = pytest.mark.gpu

HALVES = (torch.float16, torch.bfloat16)
SIZES = ((64, 33), (129,), (1,), (257, 512))
STEPS = 8
BAD = 3

Make = Callable[[list[torch.Tensor]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "plain AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "fused AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "capturable AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, capturable=True),
    "fused SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, fused=True),
}


def parameters(dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator(device).manual_seed(1)
    drawn = [torch.randn(size, generator=generator, device=device) for size in SIZES]
    return [torch.nn.Parameter(each.to(dtype)) for each in drawn]


def gradients(step: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator(device).manual_seed(100 + step)
    grads = [torch.randn(size, generator=generator, device=device) for size in SIZES]
    if step == BAD:
        grads[1][5] = torch.inf
    return [(16 * grad).to(dtype) for grad in grads]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_steps_are_those_of_masters_by_hand(
    backend: str, device: torch.device, dtype: torch.dtype, name: str
) -> None:
    ours, theirs = parameters(dtype, device), parameters(dtype, device)
    masters = [torch.nn.Parameter(each.detach().float()) for each in theirs]
    optimizer: Any = ampfast.master_weights_(OPTIMIZERS[name](ours))
    by_hand = OPTIMIZERS[name](masters)
    scaler = ampfast.GradScaler(device.type, init_scale=16.0, backend=backend)
    for step in range(STEPS):
        scale = scaler.scale(torch.ones((), device=device)).item()
        grads = gradients(step, dtype, device)
        for param, grad in zip(ours, grads, strict=True):
            param.grad = grad.clone()
        scaler.step(optimizer)
        scaler.update()
        wide = [grad.float() * torch.tensor(1 / scale, device=device) for grad in grads]
        if all(each.isfinite().all() for each in wide):
            for master, grad in zip(masters, wide, strict=True):
                master.grad = grad
            by_hand.step()
            for master, param in zip(masters, theirs, strict=True):
                param.data.copy_(master)
        assert_same([p.detach() for p in ours], [p.detach() for p in theirs], f"step {step}")
        optimizer.zero_grad()
    assert scaler.stats().skipped == 1
    found = [optimizer.master_weights[param] for param in ours]
    assert_same(found, [master.detach() for master in masters], "master weights")


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_value_is_widened_and_rounded_back(
    backend: str, device: torch.device, dtype: torch.dtype
) -> None:
    kernels: Any = kernels_of(backend, device)
    every = torch.arange(2**16, dtype=torch.int32, device=device).to(torch.int16).view(dtype)
    for offset in range(8):
        memory = torch.zeros(2**16 + 8, dtype=dtype, device=device)
        half = memory[offset : offset + 2**16]
        half.copy_(every)
        for shift in range(4):
            floats = torch.empty(2**16 + 4, device=device)[shift : shift + 2**16]
            pairs = grads_of([half], [floats])
            found = run_unscale(kernels, pairs, flag(1 / 3, device), is_scale=False)
            assert found.item() == 1
            assert_same(floats, every.float() * flag(1 / 3, device))
            back = torch.zeros(2**16 + 8, dtype=dtype, device=device)[offset : offset + 2**16]
            kernels.narrow(grads_of([back], [floats]), flag(1.0, device))
            assert not back.view(torch.int16).any(), "written in spite of the flag"
            kernels.narrow(grads_of([back], [floats]), flag(0.0, device))
            assert_same(back, floats.to(dtype))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_master_weights_follow_a_model_that_moves(device: torch.device, dtype: torch.dtype) -> None:
    model = torch.nn.Linear(5, 3).to(dtype)
    optimizer: Any = ampfast.master_weights_(torch.optim.SGD(model.parameters(), lr=0.5))
    low = optimizer.master_weights[model.weight].add_(2.0**-20).clone()
    for place in (device, torch.device("cpu"), device):
        model.to(place)
        optimizer.zero_grad()
        model(torch.ones(2, 5, dtype=dtype, device=place)).sum().backward()
        optimizer.step()
        weight = optimizer.master_weights[model.weight]
        low = low.to(place) - 0.5 * model.weight.grad
        assert_same(weight, low)
        assert_same(model.weight.detach(), low.to(dtype))
