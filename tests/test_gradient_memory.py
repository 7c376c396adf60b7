"""Memory of gradients: lazy copies, freed or resized, and shared by several."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.comparison import assert_same
from support.gradients import parameter_with
from support.scalers import TorchScaler
from torch.utils.flop_counter import FlopCounterMode

from ampfast import GradScaler, functional, master_weights_


class Calls(GradScaler):
    """Override that calls the original."""

    def _unscale_grads_(self, *args: Any) -> dict[torch.device, torch.Tensor]:
        return super()._unscale_grads_(*args)


class Divides:
    """Optimizer that only divides by `grad_scale`."""

    _step_supports_amp_scaling = True

    def __init__(self, param: torch.nn.Parameter) -> None:
        self.param_groups = [{"params": [param]}]

    def step(self) -> None:
        pass


def lazy() -> tuple[torch.Tensor, torch.nn.Parameter]:
    """Tensor, and parameter whose gradient is a lazy copy of it."""
    original, param = torch.full((3,), 8.0), torch.nn.Parameter(torch.zeros(3))
    param.grad = torch._lazy_clone(original)
    assert torch._C._is_cow_tensor(param.grad)
    return original, param


def started(kind: type) -> Any:
    scaler = kind("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    return scaler


@pytest.mark.parametrize("kind", [TorchScaler, GradScaler, Calls])
def test_unscaling_leaves_the_original(kind: type) -> None:
    original, param = lazy()
    started(kind).unscale_(torch.optim.SGD([param]))
    assert param.grad.tolist() == [2.0] * 3
    assert original.tolist() == [8.0] * 3


@pytest.mark.parametrize("method", ["step", "_check_inf_per_device", "grad_norm"])
def test_looking_copies_nothing(method: str) -> None:
    """Asking for writable memory would copy."""
    _, param = lazy()
    getattr(started(GradScaler), method)(Divides(param))
    assert torch._C._is_cow_tensor(param.grad)


def test_unscaling_by_the_general_way_leaves_the_original() -> None:
    original, param = lazy()
    scaler = GradScaler("cpu", init_scale=4.0, track="overflow")
    scaler.scale(torch.ones(()))
    scaler.unscale_(torch.optim.SGD([param]))
    assert (param.grad.tolist(), original.tolist()) == ([2.0] * 3, [8.0] * 3)


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
