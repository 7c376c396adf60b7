"""Gradients that share memory, and parameters that are listed twice, in norms and clips."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.comparison import assert_same

from ampfast import GradScaler, functional, master_weights_

Made = tuple[list[torch.nn.Parameter], torch.optim.Optimizer]


def sgd(params: list[torch.nn.Parameter], grads: list[torch.Tensor]) -> Made:
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of duplicates
        return params, torch.optim.SGD(params, lr=1.0, fused=True)


def zeros(*sizes: int) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(size)) for size in sizes]


def listed_twice() -> Made:
    return sgd(zeros(2) * 2, [torch.tensor([24.0, 32.0])] * 2)


def in_two_groups() -> Made:
    params, optimizer = sgd(zeros(2), [torch.tensor([24.0, 32.0])])
    optimizer.param_groups.append({**optimizer.param_groups[0]})
    return params * 2, optimizer


def one_gradient_of_two() -> Made:
    grad = torch.tensor([24.0, 32.0])
    return sgd(zeros(2, 2), [grad, grad])


def overlapping_views() -> Made:
    base = torch.arange(1.0, 6.0) * 8
    return sgd(zeros(3, 3), [base[:3], base[2:]])


def a_view_of_the_other_with_gaps() -> Made:
    base = torch.arange(1.0, 7.0) * 8
    return sgd(zeros(3, 6), [base[::2], base])


def over_memory_of_numpy() -> Made:
    memory = torch.arange(1.0, 6.0).mul(8).numpy()
    return sgd(zeros(3, 3), [torch.from_numpy(memory)[:3], torch.from_numpy(memory)[2:]])


SHARED = [
    *(listed_twice, in_two_groups, one_gradient_of_two, overlapping_views),
    *(a_view_of_the_other_with_gaps, over_memory_of_numpy),
]


def scaler_of(kind: Any, **arguments: Any) -> Any:
    scaler = kind("cpu", init_scale=8.0, **arguments)
    scaler.scale(torch.ones(()))
    return scaler


def by_torch(make: Callable[[], Made], limit: float, order: float) -> list[torch.Tensor]:
    params, optimizer = make()
    scaler_of(torch.amp.GradScaler).unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(params, limit, order)
    return [norm, *(param.grad for param in params if param.grad is not None)]


@pytest.mark.parametrize("order", [2.0, math.inf, 1.0])
@pytest.mark.parametrize("limit", [1.0, 0.1])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("make", SHARED, ids=lambda make: make.__name__)
def test_a_clip_is_torchs(
    make: Callable[[], Made], in_place: bool, limit: float, order: float
) -> None:
    params, optimizer = make()
    scaler = scaler_of(GradScaler)
    before = [param.grad.tolist() for param in params if param.grad is not None]
    with pytest.warns(UserWarning, match="share memory"):
        norm = scaler.grad_norm(optimizer, order)
    assert [param.grad.tolist() for param in params if param.grad is not None] == before
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it warns once
        clipped = scaler.clip_grad_norm_(optimizer, limit, order, in_place=in_place)
    ours = [clipped, *(param.grad for param in params)]
    expected = by_torch(make, limit, order)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(norm, expected[0], rtol=1e-6, atol=0)
    scaler.step(optimizer)
    assert not scaler.step_skipped(optimizer)
    assert params[0].ne(0).any()


@pytest.mark.parametrize("make", SHARED, ids=lambda make: make.__name__)
def test_the_functions_clip_is_torchs(make: Callable[[], Made]) -> None:
    params, _ = make()
    others, _ = make()
    ours = functional.clip_grad_norm_(params, 0.1)
    theirs = torch.nn.utils.clip_grad_norm_(others, 0.1)
    assert_same([ours, *(p.grad for p in params)], [theirs, *(p.grad for p in others)])


def test_optimizers_whose_gradients_overlap() -> None:
    base = [torch.arange(1.0, 6.0) * 8 for _ in range(2)]
    (a, b), _ = sgd(zeros(3, 3), [base[0][:3], base[0][2:]])
    optimizers = [torch.optim.SGD([a], lr=1.0), torch.optim.SGD([b], lr=1.0)]
    with pytest.warns(UserWarning, match="share memory"):
        norm = scaler_of(GradScaler).clip_grad_norm_(optimizers, 1.0)
    expected = by_torch(overlapping_views, 1.0, 2.0)
    torch.testing.assert_close([norm, a.grad, b.grad], expected, rtol=1e-6, atol=0)


def test_an_overflow_skips_the_step() -> None:
    params, optimizer = listed_twice()
    assert params[0].grad is not None
    params[0].grad[0] = math.inf
    scaler = scaler_of(GradScaler)
    with pytest.warns(UserWarning, match="share memory"):
        assert scaler.clip_grad_norm_(optimizer, 1.0) == math.inf
    scaler.step(optimizer)
    assert scaler.step_skipped(optimizer) and params[0].eq(0).all()


def test_master_weights_of_a_parameter_that_is_listed_twice() -> None:
    """16-bit gradients are unscaled once; the float32 gradient counts and is clipped twice."""
    param = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([param], lr=1.0)
    optimizer.param_groups[0]["params"].append(param)
    optimizer = master_weights_(optimizer)
    param.grad = torch.tensor([24.0, 32.0], dtype=torch.bfloat16)
    scaler = scaler_of(GradScaler)
    with pytest.warns(UserWarning, match="share memory"):
        norms = [scaler.grad_norm(optimizer), scaler.clip_grad_norm_(optimizer, 1.0)]
    grad = torch.tensor([3.0, 4.0]) / (50**0.5 + 1e-6) ** 2
    torch.testing.assert_close(torch.stack(norms), torch.full((2,), 50**0.5))
    torch.testing.assert_close(param.grad.float(), grad)


def test_buckets_are_no_shared_memory() -> None:
    """Views beside each other in one storage, as of DDP."""
    bucket = torch.arange(1.0, 7.0) * 8
    _, optimizer = sgd(zeros(3, 3), [bucket[3:], bucket[:3]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler_of(GradScaler).clip_grad_norm_(optimizer, 1.0)
