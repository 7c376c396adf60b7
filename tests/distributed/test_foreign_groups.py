"""Process groups unknown to torch.distributed: only rank(), size() and allreduce()."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from exact_training import OPTIMIZERS
from support.gradients import parameter_with
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import ampfast
from ampfast import GradScaler, ShardedGradScaler

Found = tuple[list[float], float]


class Alone:
    """Group of one rank, as in torch's tests of its scaler for FSDP."""

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return 1

    def allreduce(self, *args: Any, **kwargs: Any) -> Any:
        return SimpleNamespace(wait=lambda: None)


class Foreign:
    """Foreign group that forwards to a real one and counts collectives."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.calls = 0

    def rank(self) -> int:
        return self._group.rank()

    def size(self) -> int:
        return self._group.size()

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
        self.calls += 1
        return self._group.allreduce(tensors, options)


class Derived(dist.ProcessGroup):
    """Foreign group that is a ProcessGroup, but not registered."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())
        self._group = group

    def rank(self) -> int:
        return self._group.rank()

    def size(self) -> int:
        return self._group.size()

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        return self._group.allreduce(tensors, options)


def scaler_of(kind: type[GradScaler], group: Any, **arguments: Any) -> GradScaler:
    scaler = kind("cpu", init_scale=2.0, process_group=group, **arguments)
    scaler.scale(torch.full((1,), 4.0))
    return scaler


@pytest.mark.parametrize("kind", [GradScaler, ShardedGradScaler])
def test_as_torchs_suite_uses_it(kind: type[GradScaler]) -> None:
    assert not dist.is_initialized()
    param = torch.tensor([math.inf])
    param.grad = param.clone()
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler = scaler_of(kind, Alone())
    assert scaler.step(optimizer) is None
    assert scaler.step_skipped(optimizer)
    scaler.update()
    assert scaler.get_scale() == 1.0
    indices, values = [[0, 1, 1], [2, 0, 2]], torch.tensor([16.0, 32.0, 64.0])
    sparse = torch.sparse_coo_tensor(indices, values, (2, 3), check_invariants=True)
    param = sparse.clone()
    param.grad = sparse.clone()
    optimizer = torch.optim.SGD([param], lr=1.0)
    half, zero = torch.full((1,), 0.5), torch.zeros(1)
    assert scaler._unscale_grads_(optimizer, half, zero)[param.device] == 0.0
    assert torch.equal(param.grad.to_dense(), sparse.to_dense() / 2)


PATHS: dict[str, Callable[[GradScaler, Any], Any]] = {
    "step": lambda scaler, optimizer: scaler.step(optimizer),
    "unscale_": lambda scaler, optimizer: scaler.unscale_(optimizer),
    "step_and_update": lambda scaler, optimizer: scaler.step_and_update(optimizer),
    **{
        f"clip {order}": lambda scaler, optimizer, order=order: scaler.clip_grad_norm_(
            optimizer, 1.0, order
        )
        for order in (2.0, 3.0, math.inf)
    },
    "_check_inf_per_device": lambda scaler, optimizer: scaler._check_inf_per_device(optimizer),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["sgd", "fused_sgd"])
def test_every_path_of_one_rank(kind: str, path: str) -> None:
    for bad in (False, True):
        optimizer = OPTIMIZERS[kind](
            [parameter_with(torch.tensor([2.0, math.nan if bad else 4.0]))]
        )
        scaler = scaler_of(GradScaler, Alone(), track="overflow")
        PATHS[path](scaler, optimizer)
        if "step" not in path:
            scaler.step(optimizer)
        assert scaler.step_skipped(optimizer) is bad
        assert len(scaler.overflow_report().parameters) == int(bad)
        if "update" not in path:
            scaler.update()
        scaler.check_ranks()
        copy.deepcopy(scaler).check_ranks()


def by_all_paths(group: str, kind: str, bad: int | None) -> list[Found]:
    """Flag and norms of each path; one rank's gradients may overflow."""
    rank = dist.get_rank()
    pair = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    real = pair if group == "pairs" else dist.group.WORLD
    made: Any = Derived(real) if group == "derived" else Foreign(real)
    seen = []
    for call in PATHS.values():
        own = parameter_with(torch.tensor([6.0, 2.0 * rank]))
        same = parameter_with(torch.tensor([4.0]))
        ampfast.mark_replicated([same])
        if rank == bad:
            own.grad[0] = math.inf
        optimizer = OPTIMIZERS[kind]([own, same])
        scaler = scaler_of(GradScaler, made)
        norms = [scaler.grad_norm(optimizer, order).item() for order in (1.0, 2.0, math.inf)]
        call(scaler, optimizer)
        flags = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
        found = [flag.item() for flag in flags] or [scaler.found_inf(optimizer).item()]
        seen.append((norms, *found))
    return seen


@pytest.mark.parametrize("bad", [None, 2])
@pytest.mark.parametrize("kind", ["sgd", "fused_sgd"])
@pytest.mark.parametrize("group", ["world", "derived", "pairs"])
def test_flags_and_norms_of_all_ranks(group: str, kind: str, bad: int | None) -> None:
    for rank, seen in enumerate(ranks.run(by_all_paths, group, kind, bad, ranks=4)):
        members = range(rank % 2, 4, 2) if group == "pairs" else range(4)
        values = torch.tensor([2.0, *(v for r in members for v in (3.0, float(r)))])
        is_bad = bad in members
        norms = [torch.linalg.vector_norm(values, order).item() for order in (1.0, 2.0, math.inf)]
        for found, flag in seen:
            assert flag == float(is_bad)
            assert found == ([math.inf] * 3 if is_bad else pytest.approx(norms, rel=1e-6))


def beside_meshes() -> list[float]:
    """Norms of DTensors on a mesh equal to the foreign group, or across it."""
    rank = dist.get_rank()
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    mesh = init_device_mesh("cpu", (2, 2))
    group = Foreign(pair)
    norms = []
    for placements in ([Replicate(), Shard(0)], [Shard(0), Replicate()], [Shard(0), Shard(0)]):
        param = torch.nn.Parameter(DTensor.from_local(torch.zeros(1), mesh, placements))
        param.grad = DTensor.from_local(torch.full((1,), 2.0 * (rank + 1)), mesh, placements)
        scaler = scaler_of(GradScaler, group)
        norms.append(scaler.grad_norm(torch.optim.SGD([param], lr=1.0), 1.0).item())
    norms.append(group.calls)
    return norms


def test_norms_of_distributed_gradients() -> None:
    # Ranks 0 and 1 lie along the second dimension; the first replica counts.
    for rank, norms in enumerate(ranks.run(beside_meshes, ranks=4)):
        row = rank // 2
        assert norms[0] == 4 * row + 3
        assert norms[1] == 1 + 3
        assert norms[2] == 1 + 2 + 3 + 4
        assert norms[3] > 0


def compared(odd: int | None) -> list[str | None]:
    errors: list[str | None] = []
    rank = dist.get_rank()
    pair = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    for real in (dist.group.WORLD, pair):
        scaler = GradScaler(
            "cpu", init_scale=4.0 if rank == odd else 2.0, process_group=Foreign(real)
        )
        try:
            scaler.check_ranks()
            errors.append(None)
        except RuntimeError as error:
            errors.append(str(error))
    return errors


def test_ranks_are_compared() -> None:
    assert ranks.run(compared, None, ranks=4) == [[None, None]] * 4
    text = "the ranks' scalers differ: scale: 2.0 on {}, 4.0 on rank 3"
    world, pair = text.format("rank 0"), text.format("rank 1")
    assert ranks.run(compared, 3, ranks=4) == [[world, None], [world, pair]] * 2


def test_non_groups_are_refused() -> None:
    class Half:
        def rank(self) -> int:
            return 0

        def size(self) -> int:
            return 1

    with pytest.raises(TypeError, match=r"process_group must be .* got Half"):
        GradScaler("cpu", process_group=Half())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="process_group does not contain this rank"):
        GradScaler("cpu", process_group=Alone(rank=-1))
