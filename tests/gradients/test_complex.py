"""Complex gradients beside real ones of the same numbers, and torch's norms of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.comparison import assert_same, started
from support.gradients import parameter_like, parameter_with
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ampfast import GradScaler, functional

INF, NAN = math.inf, math.nan
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


def of(*grads: Tensor, divides: bool = False) -> Any:
    """Optimizer whose steps are counted."""
    groups, calls = [{"params": [parameter_with(grad) for grad in grads]}], []
    said = {"_step_supports_amp_scaling": divides, "calls": calls}
    return SimpleNamespace(param_groups=groups, step=lambda: calls.append(1), **said)


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
    # torch's functions write no conjugate ones.
    grads, norm = [numbers(), torch.ones(2)], functional.grad_norm([made], order, half)
    functional.unscale_([made], found, half)
    assert_same(made.resolve_conj(), numbers().conj().resolve_conj() / 2)
    assert norm == pytest.approx(torch.linalg.vector_norm(made, order).item(), rel=1e-6)
    for dtype in (torch.float32, torch.float64):
        total = functional.get_total_norm([made], order, dtype=dtype)
        assert total == pytest.approx(norm.item()) and total.dtype is dtype
    sides = []
    for side in (functional, torch.nn.utils):
        params = [parameter_with(grad.clone()) for grad in grads]
        sides.append([side.clip_grad_norm_(params, 0.5, order), [p.grad for p in params]])
        side.clip_grads_with_norm_(params, 0.1, torch.ones(()))
    torch.testing.assert_close(*sides, rtol=1e-6, atol=0)
    made[1, 1] = complex(0, INF)
    functional.check_([made], found)
    assert found == 1.0


def test_complex32_is_refused_as_float16() -> None:
    scaler, optimizer = started(GradScaler), of(torch.ones(3), numbers(torch.complex32))
    for call in (scaler.unscale_, scaler.step):
        with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
            call(optimizer)
    assert_same(optimizer.param_groups[0]["params"][0].grad, torch.ones(3))


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("placement", [Shard(0), Partial()], ids=str)
@pytest.mark.parametrize("order", [2.0, INF, 3.0])
def test_distributed(mesh: Any, placement: Any, order: float) -> None:
    optimizer = torch.optim.SGD([parameter_like(DTensor.from_local(numbers(), mesh, [placement]))])
    scaler: Any = started(GradScaler, 4.0, track="norms")
    exact = torch.linalg.vector_norm(numbers() / 4, order)
    assert scaler.clip_grad_norm_(optimizer, 1e9, order) == pytest.approx(exact.item(), rel=1e-6)
    grad: Any = optimizer.param_groups[0]["params"][0].grad
    assert_same(grad.to_local(), numbers() / 4)
    assert scaler.grad_norms().parameters[0].last == pytest.approx((numbers() / 4).norm().item())
