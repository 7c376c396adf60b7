"""Gradients: their memory, complex ones beside real ones of the same numbers, and what is kept."""

from __future__ import annotations

import gc
import math
import sys
import warnings
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.comparison import Hooked, TorchScaler, assert_same, started
from support.gradients import parameter_like, parameter_with
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.multiprocessing.reductions import StorageWeakRef

from ampfast import GradScaler, functional

INF, NAN = math.inf, math.nan


def optimizer_of(params: list[torch.nn.Parameter], divides: bool = False) -> Any:
    """Optimizer whose steps are counted."""
    calls: list[int] = []
    said = {"_step_supports_amp_scaling": divides, "calls": calls}
    groups = [{"params": params}]
    return SimpleNamespace(param_groups=groups, step=lambda: calls.append(1), **said)


def of(*grads: Tensor, divides: bool = False) -> Any:
    return optimizer_of([parameter_with(grad) for grad in grads], divides)


# Lazy copies, memory that was freed or resized, and memory that several share


def lazy() -> tuple[Tensor, torch.nn.Parameter]:
    """Tensor, and parameter whose gradient is a lazy copy of it."""
    original = torch.full((3,), 8.0)
    param = parameter_with(torch._lazy_clone(original))
    assert torch._C._is_cow_tensor(param.grad)
    return original, param


WAYS = [(TorchScaler, {}), (GradScaler, {}), (GradScaler, {"track": "overflow"}), (Hooked, {})]


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


def shrunk(tensor: Tensor, size: int) -> Tensor:
    tensor.untyped_storage().resize_(size)
    return tensor


def sparse(size: int, part: Callable[[Tensor], Tensor]) -> Tensor:
    places, values, valid = torch.tensor([[0, 2]]), torch.ones(2, 3), {"check_invariants": True}
    made = torch.sparse_coo_tensor(places, values, (4, 3), is_coalesced=True, **valid)
    shrunk(part(made), size)
    return made


# By fault, gradients with so many bytes left.
GRADIENTS: dict[str, Callable[[int], Tensor]] = {
    "dense": lambda size: shrunk(torch.ones(4, 3), size),
    "strided": lambda size: shrunk(torch.ones(4, 6)[:, ::2], size),
    "behind": lambda size: shrunk(torch.ones(40)[28:].view(4, 3), 4 * 28 + size),
    "overlapping": lambda size: shrunk(torch.ones(12).as_strided((4, 3), (1, 2)), size),
    "complex": lambda size: shrunk(torch.ones(4, 3, dtype=torch.complex64), size),
    "negative": lambda size: shrunk(torch.ones(4, 3)._neg_view(), size),
    "sparse values": lambda size: sparse(size, Tensor._values),
    "sparse indices": lambda size: sparse(min(size, 8), Tensor._indices),
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
# Gradients of each kind; of the first two there is one parameter.
VIEWS: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "listed twice": lambda base: [base],
    "in two groups": lambda base: [base],
    "one gradient of two": lambda base: [base, base],
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


def by_torch(kind: str, limit: float, order: float) -> list[Tensor]:
    params, optimizer = shared(kind)
    started(TorchScaler).unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(params, limit, order)
    return [norm, *(param.grad for param in params if param.grad is not None)]


@pytest.mark.parametrize("order", [2.0, INF, 1.0])
@pytest.mark.parametrize("limit", [1.0, 0.1])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("kind", VIEWS)
def test_a_clip_is_torchs(kind: str, in_place: bool, limit: float, order: float) -> None:
    params, optimizer = shared(kind)
    scaler = started()
    before = [param.grad.tolist() for param in params if param.grad is not None]
    once = [param.grad / scaler.get_scale() for param in params if param.grad is not None]
    expected = torch.nn.utils.get_total_norm(once, order)
    torch.testing.assert_close(scaler.grad_norm(optimizer, order), expected, rtol=1e-6, atol=0)
    assert [param.grad.tolist() for param in params if param.grad is not None] == before
    with pytest.warns(UserWarning, match="listed twice"):
        clipped = scaler.clip_grad_norm_(optimizer, limit, order, in_place=in_place)
    ours = [clipped, *(param.grad for param in params)]
    expected = by_torch(kind, limit, order)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)
    scaler.step(optimizer)
    assert not scaler.step_skipped(optimizer)
    assert params[0].ne(0).any()


# Complex gradients, and torch's norms of them

DTYPES = [torch.complex64, torch.complex128, torch.complex32]
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "conjugate": lambda x: x.conj(),
    "negative": lambda x: x._neg_view(),
    "negative conjugate": lambda x: x._neg_view().conj(),
    "transposed": lambda x: x.t(),
    "every other": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "empty": lambda x: x[:0],
    "sparse": lambda x: torch.sparse_coo_tensor([[0, 3, 0]], x[:3], check_invariants=True),
}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "aten": {"backend": "aten"},
    "track": {"track": "norms"},
    "skip_above": {"skip_above": 1e3},
    "guard": {"dynamic": False, "scale": 1.0, "track": "overflow"},
}


def numbers(dtype: torch.dtype = torch.complex64) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(4, 3, 2, generator=generator, dtype=torch.float64)
    return torch.view_as_complex(parts.to(dtype.to_real()))


def parts(tensor: Tensor) -> Tensor:
    """Real and imaginary parts, as the memory has them."""
    if not tensor.is_complex():
        return tensor
    if tensor.is_sparse:
        values = torch.view_as_real(tensor._values())
        shape, kept = (*tensor.shape, 2), {"is_coalesced": tensor.is_coalesced()}
        return torch.sparse_coo_tensor(tensor._indices(), values, shape, **kept)
    plain = tensor.conj() if tensor.is_conj() else tensor
    return torch.view_as_real(plain._neg_view() if plain.is_neg() else plain)


def results(dtype: torch.dtype, layout: str, feature: str, is_real: bool) -> list[Any]:
    scaler: Any = started(GradScaler, allow_fp16=True, **FEATURES[feature])
    seen: list[Any] = []
    for call in ("step", "clip", "divide"):
        for bad in (0.0, NAN, 5e4):
            given = numbers(dtype)
            given[0, 1] = complex(1.0, bad)
            first = LAYOUTS[layout](given)
            first = parts(first) if is_real else first
            optimizer = of(first, torch.ones(3), divides=call == "divide")
            seen.append(scaler.grad_norm(optimizer))
            if call == "clip":
                seen.append(scaler.clip_grad_norm_(optimizer, 0.5))
            scaler.step(optimizer)
            scaler.update()
            grads = [param.grad for param in optimizer.param_groups[0]["params"]]
            seen += [[parts(grad).clone() for grad in grads], optimizer.calls]
            seen += [scaler.found_inf(optimizer), grads[0]._version]
    reports = [scaler.overflow_report(), scaler.grad_norms()] if scaler._track == "norms" else []
    return [*seen, scaler.state_dict(), str([scaler.stats(), *map(str, reports)])]


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_as_real_numbers(dtype: torch.dtype, layout: str, feature: str) -> None:
    if layout == "sparse" and dtype is torch.complex32:
        pytest.skip("torch does not coalesce them")
    ours = results(dtype, layout, feature, is_real=False)
    assert_same(ours, results(dtype, layout, feature, is_real=True))


def clipped_by_torch(layout: str, dtype: torch.dtype, order: float, limit: float) -> list[Tensor]:
    """Norm of the complex numbers, and the gradients clipped by it, divided by 4 first."""
    given = LAYOUTS[layout](numbers(dtype))
    given = given.to_dense() if given.is_sparse else given.clone()
    params = [parameter_with(given / 4), parameter_with(torch.full((3,), 0.5))]
    norm = torch.nn.utils.clip_grad_norm_(params, limit, order)
    return [norm, *(param.grad for param in params)]


@pytest.mark.parametrize("order", [INF, 3.0, 2.0])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "empty"])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_norms_are_those_of_the_complex_numbers(
    dtype: torch.dtype, layout: str, order: float
) -> None:
    for limit in (0.5, INF):
        scaler: Any = started(GradScaler, 4.0)
        optimizer = of(LAYOUTS[layout](numbers(dtype)), torch.full((3,), 2.0))
        theirs = clipped_by_torch(layout, dtype, order, limit)
        ours = [scaler.grad_norm(optimizer, order)]
        assert_same(ours[0], scaler.clip_grad_norm_(optimizer, limit, order))
        ours += [param.grad.to_dense() for param in optimizer.param_groups[0]["params"]]
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("order", [2.0, INF])
def test_functions(order: float) -> None:
    made, found, half = numbers().conj(), torch.zeros(()), torch.full((), 0.5)
    norm = functional.grad_norm([made], order, half)
    functional.unscale_([made], found, half)
    assert_same(made.resolve_conj(), numbers().conj().resolve_conj() / 2)
    assert norm == pytest.approx(torch.linalg.vector_norm(made, order).item(), rel=1e-6)
    for dtype in (torch.float32, torch.float64):
        total = functional.get_total_norm([made], order, dtype=dtype)
        assert total == pytest.approx(norm.item()) and total.dtype is dtype
    made[1, 1] = complex(0, INF)
    functional.check_([made], found)
    assert found == 1.0


def test_complex32_is_refused_as_float16() -> None:
    scaler, optimizer = started(), of(torch.ones(3), numbers(torch.complex32))
    for call in (scaler.unscale_, scaler.step):
        with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
            call(optimizer)
    assert_same(optimizer.param_groups[0]["params"][0].grad, torch.ones(3))


@pytest.mark.parametrize("placement", [Shard(0), Partial()], ids=str)
@pytest.mark.parametrize("order", [2.0, INF, 3.0])
def test_distributed(world: Any, placement: Any, order: float) -> None:
    mesh = init_device_mesh("cpu", (1,))
    optimizer = torch.optim.SGD([parameter_like(DTensor.from_local(numbers(), mesh, [placement]))])
    scaler: Any = started(GradScaler, 4.0, track="norms")
    exact = torch.linalg.vector_norm(numbers() / 4, order)
    assert scaler.clip_grad_norm_(optimizer, 1e9, order) == pytest.approx(exact.item(), rel=1e-6)
    grad: Any = optimizer.param_groups[0]["params"][0].grad
    assert_same(grad.to_local(), numbers() / 4)
    assert scaler.grad_norms().parameters[0].last == pytest.approx((numbers() / 4).norm().item())


# Reads, references and allocations


class Hidden(torch.nn.Parameter):
    """Whose property hides the gradient that the tensor itself holds."""

    @property
    def grad(self) -> Tensor | None:
        if self.hidden is None:
            raise ZeroDivisionError("no gradient today")
        return self.hidden

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.hidden = value


def test_gradients_of_subclasses_are_read_through_their_property() -> None:
    for value in (2.0, INF):
        sides = []
        for scaler_type in (GradScaler, TorchScaler):
            params = [Hidden(torch.ones(2)), parameter_with(torch.ones(3))]
            params[0].grad = torch.tensor([1.0, value])
            Tensor.grad.__set__(params[0], torch.full((2,), 7.0))
            groups = optimizer_of(params)
            scaler = started(scaler_type)
            scaler.unscale_(groups)
            scaler.step(groups)
            sides.append((params[0].hidden, params[1].grad))
            assert Tensor.grad.__get__(params[0]).tolist() == [7.0, 7.0]
            params[0].grad = None
            scaler.update()
            with pytest.raises(ZeroDivisionError, match="no gradient today"):
                scaler.unscale_(groups)
            sides[-1] += (params[1].grad,)
        assert_same(*sides)


def test_nothing_is_kept_after_the_call() -> None:
    scaler = started()
    params = [parameter_with(torch.ones(n + 1)) for n in range(20)]
    groups = optimizer_of(params)
    counts = [(sys.getrefcount(p), sys.getrefcount(p.grad)) for p in params]
    for _ in range(3):
        scaler.unscale_(groups)
        assert [(sys.getrefcount(p), sys.getrefcount(p.grad)) for p in params] == counts
        scaler.step(groups)
        scaler.update()
    # Python object, tensor and memory are all freed.
    objects = [weakref.ref(p.grad) for p in params]
    storages = [StorageWeakRef(p.grad.untyped_storage()) for p in params]
    for p in params:
        p.grad = None
    gc.collect()
    assert not any(ref() is not None for ref in objects)
    assert all(ref.expired() for ref in storages)
    dying = [weakref.ref(p) for p in params]
    params.clear()
    del p
    gc.collect()
    assert not any(ref() is not None for ref in dying)


def test_no_optimizer_is_held_until_the_update() -> None:
    optimizer, scaler = torch.optim.SGD([parameter_with(torch.ones(3))], lr=1.0), started()
    scaler.grad_norm(optimizer)
    scaler.clip_grad_norm_(optimizer, 1.0)
    held = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert held() is None


def test_no_tensor_is_made_for_the_gradients() -> None:
    params = [parameter_with(torch.ones(50_000)) for _ in range(10)]
    scaler = started()
    groups = optimizer_of(params)
    with torch.profiler.profile(profile_memory=True) as profile:
        scaler.unscale_(groups)
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in profile.key_averages())
    assert allocated < 1024
