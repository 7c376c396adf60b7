"""Memory of gradients: lazy copies, freed or resized, and shared by several."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.comparison import TorchScaler, started
from support.gradients import parameter_with

from ampfast import GradScaler


class Calls(GradScaler):
    """Override that calls the original."""

    def _unscale_grads_(self, *args: Any) -> dict[torch.device, torch.Tensor]:
        return super()._unscale_grads_(*args)


def lazy() -> tuple[torch.Tensor, torch.nn.Parameter]:
    """Tensor, and parameter whose gradient is a lazy copy of it."""
    original = torch.full((3,), 8.0)
    param = parameter_with(torch._lazy_clone(original))
    assert torch._C._is_cow_tensor(param.grad)
    return original, param


WAYS = [(TorchScaler, {}), (GradScaler, {}), (GradScaler, {"track": "overflow"}), (Calls, {})]


@pytest.mark.parametrize(("kind", "arguments"), WAYS)
def test_unscaling_leaves_the_original(kind: type, arguments: dict[str, Any]) -> None:
    original, param = lazy()
    started(kind, 4.0, **arguments).unscale_(torch.optim.SGD([param]))
    assert param.grad.tolist() == [2.0] * 3
    assert original.tolist() == [8.0] * 3


@pytest.mark.parametrize("method", ["_check_inf_per_device", "grad_norm"])
def test_looking_copies_nothing(method: str) -> None:
    """Asking for writable memory would copy."""
    _, param = lazy()
    getattr(started(), method)(torch.optim.SGD([param]))
    assert torch._C._is_cow_tensor(param.grad)


REFUSED = pytest.raises(RuntimeError, match="storage of a gradient was freed or resized: ")


def shrunk(tensor: torch.Tensor, size: int) -> torch.Tensor:
    tensor.untyped_storage().resize_(size)
    return tensor


def sparse(size: int, part: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    places, values, valid = torch.tensor([[0, 2]]), torch.ones(2, 3), {"check_invariants": True}
    made = torch.sparse_coo_tensor(places, values, (4, 3), is_coalesced=True, **valid)
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
    "sparse values": lambda size: sparse(size, torch.Tensor._values),
    "sparse indices": lambda size: sparse(min(size, 8), torch.Tensor._indices),
}
CALLS: list[tuple[Any, ...]] = [
    *(("unscale_",), ("step",), ("step_and_update",)),
    *(("clip_grad_norm_", 1.0), ("grad_norm",), ("grad_norm", 3.0)),
]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("backend", [None, "aten"])
@pytest.mark.parametrize("call", CALLS, ids=str)
@pytest.mark.parametrize("size", [0, 16])
@pytest.mark.parametrize("kind", GRADIENTS)
def test_the_scaler_refuses_it(
    kind: str, size: int, call: tuple[Any, ...], backend: str | None, fused: bool
) -> None:
    good, bad = parameter_with(torch.full((3,), 8.0)), torch.nn.Parameter(torch.ones(4, 3))
    if kind == "complex":
        bad = torch.nn.Parameter(torch.ones(4, 3, dtype=torch.complex64))
    bad.grad = GRADIENTS[kind](size)
    optimizer = torch.optim.SGD([good, bad], lr=1.0)
    # As of torch's fused optimizers, whose constructor takes no complex parameter.
    optimizer.param_groups[0]["fused"] = optimizer._step_supports_amp_scaling = fused
    scaler = started(scale=4.0, backend=backend, track="overflow")
    with REFUSED:
        getattr(scaler, call[0])(optimizer, *call[1:])
    assert good.grad.tolist() == [8.0] * 3
    assert good.tolist() == [1.0] * 3
    good.grad, bad.grad = torch.full((3,), 8.0), None
    scaler.unscale_(optimizer)
    assert good.grad.tolist() == [2.0] * 3, "unscaled once"


Made = tuple[list[torch.nn.Parameter], torch.optim.Optimizer]
# Gradients by their views of one memory; of the first two kinds there is one parameter.
VIEWS: dict[str, Callable[[torch.Tensor], list[torch.Tensor]]] = {
    "listed twice": lambda base: [base],
    "in two groups": lambda base: [base],
    "one gradient of two": lambda base: [base, base],
    "overlapping views": lambda base: [base[:3], base[2:]],
    "a view of the other with gaps": lambda base: [base[::2], base],
    "overlapping itself": lambda base: [base.as_strided((5, 2), (1, 1))],
    "over memory of NumPy": lambda base: [torch.from_numpy(base.numpy())[:3], base[2:]],
}


def shared(kind: str) -> Made:
    """Parameters, in the order in which they are listed, and their optimizer."""
    params = [parameter_with(view, fill=0.0) for view in VIEWS[kind](torch.arange(1.0, 7.0) * 8)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of duplicates
        listed = params * 2 if kind == "listed twice" else params
        optimizer = torch.optim.SGD(listed, lr=1.0, fused=True)
    if kind == "in two groups":
        optimizer.param_groups.append({**optimizer.param_groups[0]})
    return [p for group in optimizer.param_groups for p in group["params"]], optimizer


def by_torch(kind: str, limit: float, order: float) -> list[torch.Tensor]:
    params, optimizer = shared(kind)
    started(TorchScaler).unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(params, limit, order)
    return [norm, *(param.grad for param in params if param.grad is not None)]


@pytest.mark.parametrize("order", [2.0, math.inf, 1.0])
@pytest.mark.parametrize("limit", [1.0, 0.1])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("kind", VIEWS)
def test_a_clip_is_torchs(kind: str, in_place: bool, limit: float, order: float) -> None:
    params, optimizer = shared(kind)
    scaler = started()
    before = [param.grad.tolist() for param in params if param.grad is not None]
    with pytest.warns(UserWarning, match="share memory"):
        norm = scaler.grad_norm(optimizer, order)
    assert [param.grad.tolist() for param in params if param.grad is not None] == before
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it warns once
        clipped = scaler.clip_grad_norm_(optimizer, limit, order, in_place=in_place)
    ours = [clipped, *(param.grad for param in params)]
    expected = by_torch(kind, limit, order)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(norm, expected[0], rtol=1e-6, atol=0)
    scaler.step(optimizer)
    assert not scaler.step_skipped(optimizer)
    assert params[0].ne(0).any()
