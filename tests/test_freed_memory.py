"""Gradients whose memory was freed or became too small: an error on every path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.gradients import parameter_with
from torch.utils.flop_counter import FlopCounterMode

from ampfast import GradScaler, functional

REFUSED = pytest.raises(RuntimeError, match="storage of a gradient was freed or resized: ")


class Subclass(torch.Tensor):
    pass


def shrunk(tensor: torch.Tensor, size: int) -> torch.Tensor:
    tensor.untyped_storage().resize_(size)
    return tensor


def sparse(size: int, part: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    indices, values = torch.tensor([[0, 2]]), torch.ones(2, 3)
    made = torch.sparse_coo_tensor(
        indices, values, (4, 3), is_coalesced=True, check_invariants=True
    )
    shrunk(part(made), size)
    return made


# By fault, gradients with so many bytes left.
GRADIENTS: dict[str, Callable[[int], torch.Tensor]] = {
    "dense": lambda size: shrunk(torch.ones(4, 3), size),
    "strided": lambda size: shrunk(torch.ones(4, 6)[:, ::2], size),
    "behind": lambda size: shrunk(torch.ones(40)[28:].view(4, 3), 4 * 28 + size),
    "overlapping": lambda size: shrunk(torch.ones(12).as_strided((4, 3), (1, 2)), size),
    "complex": lambda size: shrunk(torch.ones(4, 3, dtype=torch.complex64), size),
    "negative": lambda size: shrunk(torch.ones(4, 3)._neg_view(), size),
    "subclass": lambda size: shrunk(torch.ones(4, 3), size).as_subclass(Subclass),
    "sparse values": lambda size: sparse(size, torch.Tensor._values),
    "sparse indices": lambda size: sparse(min(size, 8), torch.Tensor._indices),
}
CALLS: dict[str, Callable[[GradScaler, Any], object]] = {
    "unscale_": lambda scaler, optimizer: scaler.unscale_(optimizer),
    "step": lambda scaler, optimizer: scaler.step(optimizer),
    "step_and_update": lambda scaler, optimizer: scaler.step_and_update(optimizer),
    "clip_grad_norm_": lambda scaler, optimizer: scaler.clip_grad_norm_(optimizer, 1.0),
    "grad_norm": lambda scaler, optimizer: scaler.grad_norm(optimizer),
    "other norm": lambda scaler, optimizer: scaler.grad_norm(optimizer, 3.0),
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("backend", [None, "aten"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("size", [0, 16])
@pytest.mark.parametrize("kind", GRADIENTS)
def test_the_scaler_refuses_it(
    kind: str, size: int, call: str, backend: str | None, fused: bool
) -> None:
    good, bad = parameter_with(torch.full((3,), 8.0)), torch.nn.Parameter(torch.ones(4, 3))
    if kind == "complex":
        bad = torch.nn.Parameter(torch.ones(4, 3, dtype=torch.complex64))
    bad.grad = GRADIENTS[kind](size)
    optimizer = torch.optim.SGD([good, bad], lr=1.0)
    # torch's fused optimizers have this attribute, and this one becomes fused.
    optimizer._step_supports_amp_scaling = fused
    scaler = GradScaler("cpu", init_scale=4.0, backend=backend, track="overflow")
    scaler.scale(torch.ones(()))
    with REFUSED:
        CALLS[call](scaler, optimizer)
    assert good.grad.tolist() == [8.0] * 3
    assert good.tolist() == [1.0] * 3
    good.grad, bad.grad = torch.full((3,), 8.0), None
    scaler.unscale_(optimizer)
    assert good.grad.tolist() == [2.0] * 3, "unscaled once"


@pytest.mark.parametrize("size", [0, 16])
@pytest.mark.parametrize("kind", GRADIENTS)
def test_the_functions_refuse_it(kind: str, size: int) -> None:
    good, found, scale = torch.full((3,), 8.0), torch.zeros(()), torch.full((), 4.0)
    ops = torch.ops.ampfast  # called as by a compiled function
    tracker = torch.zeros((), dtype=torch.int32)
    calls: list[Callable[[list[torch.Tensor]], object]] = [
        lambda grads: functional.unscale_(grads, found, scale),
        lambda grads: functional.check_(grads, found),
        lambda grads: functional.grad_norm(grads),
    ]
    if kind in ("dense", "strided", "behind", "overlapping", "complex"):
        calls.append(lambda grads: ops.unscale_(grads, found, scale))
        calls.append(lambda grads: ops.check_(grads, found))
        calls.append(lambda grads: ops.grad_norm(grads, 3.0, None))
    for call in calls:
        with REFUSED:
            call([good, GRADIENTS[kind](size)])
    assert (good.tolist(), found.item(), scale.item(), tracker.item()) == ([8.0] * 3, 0.0, 4.0, 0)


def test_a_mode_that_watches_does_not_hide_it() -> None:
    scaler, good = GradScaler("cpu", init_scale=4.0), parameter_with(torch.full((3,), 8.0))
    scaler.scale(torch.ones(()))
    bad = parameter_with(shrunk(torch.ones(3), 4))
    with FlopCounterMode(display=False), REFUSED:
        scaler.unscale_(torch.optim.SGD([good, bad], lr=1.0))
    assert good.grad.tolist() == [8.0] * 3


def test_memory_that_is_larger_than_needed_or_not_needed_is_fine() -> None:
    grads = [
        torch.ones(40)[28:].view(4, 3),
        torch.ones(4, 6)[:, ::2],
        torch.ones(12).as_strided((4, 3), (3, 1)),
        shrunk(torch.ones(4)[:0], 0),
        shrunk(torch.ones(4, 6)[:0, ::2], 0),
        torch.ones(3).as_subclass(Subclass),
    ]
    params = [parameter_with(grad) for grad in grads]
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(torch.optim.SGD(params, lr=1.0))
    assert [p.grad.unique().tolist() for p in params if p.numel()] == [[0.25]] * 4
