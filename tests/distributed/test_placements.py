"""Lists of distributed gradients from a caller, and placements unknown to torch."""

from __future__ import annotations

import math
import warnings

import pytest
import ranks
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from ampfast import GradScaler, functional

ORDERS = (1.0, 2.0, 3.0, math.inf)


def listed(bad: int | None) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Gradients of all kinds, and all their elements."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(1.0, 10.0)
    if bad is not None:
        whole[bad] = math.inf
    strided = torch.full((2, 6), 2.0)[:, ::2]
    summand = torch.full((2,), 0.5)
    grads = [
        distribute_tensor(whole, mesh, [Shard(0)]),
        torch.ones(3),
        distribute_tensor(torch.full((3,), 3.0), mesh, [Replicate()]),
        strided,
        DTensor.from_local(summand, mesh, [Partial()]),
        distribute_tensor(torch.ones(1, dtype=torch.float64), mesh, [Shard(0)]),
    ]
    summed = summand * dist.get_world_size()
    parts = [
        whole,
        torch.ones(3),
        torch.full((3,), 3.0),
        strided.reshape(-1),
        summed,
        torch.ones(1),
    ]
    return grads, torch.cat([part.double() for part in parts])


def values(grads: list[torch.Tensor]) -> torch.Tensor:
    full = [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]
    return torch.cat([g.reshape(-1).double() for g in full])


def called(bad: int | None) -> None:
    found = float(bad is not None)
    grads, elements = listed(bad)
    flag = torch.zeros(())
    functional.check_(grads, flag)
    assert flag.item() == found
    for order in ORDERS:
        norm = functional.grad_norm(grads, order, torch.tensor(0.5))
        torch.testing.assert_close(norm, torch.linalg.vector_norm(elements / 2, order))
    flag = torch.zeros(())
    functional.unscale_(grads, flag, torch.tensor(0.5))
    assert flag.item() == found
    assert torch.equal(values(grads), elements / 2)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("bad", [None, 0, 8])
def test_functional(bad: int | None, world: int) -> None:
    ranks.run(called, bad, ranks=world)


def reported(way: str) -> list[str]:
    """Parameters in the report on sums that overflow, of finite summands."""
    mesh = init_device_mesh("cpu", (2,))
    params = [torch.nn.Parameter(DTensor.from_local(torch.ones(2), mesh)) for _ in range(2)]
    optimizer = torch.optim.SGD(params, lr=1.0)
    scaler = GradScaler("cpu", init_scale=1.0, track="norms" if way == "norms" else "overflow")
    scaler.scale(torch.ones(()))
    for param, value in zip(params, (1.0, 3e38), strict=True):
        param.grad = DTensor.from_local(torch.full((2,), value), mesh, [Partial()])
    if way == "clip":
        scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    assert scaler.skip_reason(optimizer) == "overflow"
    scaler.update()
    return [each.name for each in scaler.overflow_report().parameters]


@pytest.mark.parametrize("way", ["step", "clip", "norms"])
def test_sums_that_overflow_are_reported(way: str) -> None:
    assert ranks.run(reported, way) == [["group 0, parameter 1"]] * 2


class Halves(Shard):
    """User-defined placement."""


def stepped(way: str) -> tuple[float, list[bool], list[float], list[str]]:
    """Gradients and warnings after two steps with an unknown placement among others."""
    mesh = init_device_mesh("cpu", (2,))
    rank = dist.get_rank()
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.SGD(params, lr=1.0)
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    skipped, norms = [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for bad in (False, True):
            local = torch.full((1,), math.inf if bad and rank else 4.0 + 4.0 * rank)
            odd = torch.nn.Parameter(DTensor.from_local(torch.zeros(1), mesh, [Halves(0)]))
            odd.grad = DTensor.from_local(local, mesh, [Halves(0)])
            params[0].grad = torch.full((2,), 4.0)
            params[1].grad = distribute_tensor(torch.full((2,), 8.0), mesh, [Replicate()])
            optimizer.param_groups[0]["params"] = [*params, odd]
            if way == "clip":
                norms.append(scaler.clip_grad_norm_(optimizer, 1e9).item())
            else:
                scaler.unscale_(optimizer)
            if not bad:
                unscaled = odd.grad.to_local().item()
            skipped.append(scaler.step_skipped(optimizer))
            scaler.update()
    said = [str(w.message) for w in caught if "placement" in str(w.message)]
    return unscaled, skipped, norms, said


@pytest.mark.parametrize("way", ["unscale", "clip"])
def test_an_unknown_placement_takes_torchs_op(way: str) -> None:
    for rank, (unscaled, skipped, norms, said) in enumerate(ranks.run(stepped, way)):
        assert unscaled == 1.0 + rank
        assert skipped == [False, True]
        assert norms == ([pytest.approx(math.sqrt(15)), math.inf] if way == "clip" else [])
        assert len(said) == 1
        assert "Halves" in said[0]
