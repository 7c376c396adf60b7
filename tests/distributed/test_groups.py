"""Groups of a scaler: refused, copied, replaced, of one rank, and of worlds that come and go."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
import textwrap
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from groups import Alone
from support.comparison import TorchScaler, started
from support.gradients import parameter_like, parameter_with
from support.processes import python
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchSharded
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import SGD

import ampfast
from ampfast import GradScaler, ShardedGradScaler


def agreed(scaler: TorchScaler) -> float:
    """Whether this rank skips a step with an infinity on rank 1."""
    optimizer = SGD([parameter_with(torch.full((2,), math.inf if dist.get_rank() else 1.0))], lr=1)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    return scaler.found_inf(optimizer).item()


def copies() -> list[object]:
    world = dist.group.WORLD
    scaler = GradScaler("cpu", process_group=world)
    twin = copy.deepcopy(scaler)
    seen: list[object] = [copy.copy(scaler).process_group is world, agreed(twin)]
    try:
        pickle.dumps(scaler)
    except TypeError as error:
        seen.append("state_dict" in str(error))
    alone = pickle.loads(pickle.dumps(GradScaler("cpu")))
    for group in (None, world, None):
        alone.process_group = group
        seen.append(agreed(alone))
    sharded = pickle.loads(pickle.dumps(ShardedGradScaler("cpu")))
    return [*seen, sharded.process_group, agreed(sharded)]


def guarded() -> list[bool]:
    """Skips of guards without a device; rank 1 has no gradient, then no parameter."""
    skips = []
    for group in (dist.group.WORLD, init_device_mesh("cpu", (2,))):
        for count in (1, 0):
            param, guard = nn.Parameter(torch.ones(2)), ampfast.StepGuard(process_group=group)
            optimizer = SGD([param], lr=1.0)
            if dist.get_rank() == 0:
                param.grad = torch.full((2,), math.nan)
            else:
                optimizer.param_groups[0]["params"] = [param][:count]
            guard.step_and_update(optimizer)
            skips.append(guard.step_skipped(optimizer))
    return skips


def test_guards_need_no_device() -> None:
    assert ranks.run(guarded) == [[True] * 4] * 2


def test_copies_and_pickles() -> None:
    for rank, seen in enumerate(ranks.run(copies)):
        own = float(rank == 1)
        assert seen == [True, 1.0, True, own, 1.0, own, None, 1.0]


def anew() -> list[Any]:
    """Steps in one world and then in another, with scalers made before or after."""
    rank, found = dist.get_rank(), []
    before = started(ShardedGradScaler)
    store = dist.distributed_c10d._get_default_store()
    for world in range(2):
        for scaler in (before, ShardedGradScaler("cpu")):
            found.append(agreed(scaler))
            # Some collectives still work after their world was destroyed.
            group = scaler._ranks.agreement([]).groups[0].process_group
            found.append(group is dist.group.WORLD)
        if world == 0:
            dist.barrier()
            dist.destroy_process_group()
            again = dist.PrefixStore("again", store)
            dist.init_process_group("gloo", store=again, rank=rank, world_size=2)
    return found


def test_a_world_after_another() -> None:
    assert ranks.run(anew) == [[1.0, True] * 4] * 2


def test_a_world_older_than_the_import_of_torchs_class() -> None:
    code = """
        import torch.distributed as dist
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        import ampfast
        ampfast.ShardedGradScaler("cpu")
        dist.destroy_process_group()
        ampfast.ShardedGradScaler("cpu")
    """
    done = python("-c", textwrap.dedent(code))
    assert done.returncode == 0, done.stderr


def test_without_a_world() -> None:
    """A disabled scaler needs none, an enabled one says what torch's does."""
    scaler = ShardedGradScaler("cpu", enabled=False)
    optimizer = SGD([parameter_like(torch.tensor([3.0, 4.0]))], lr=1.0)
    assert scaler.grad_norm(optimizer).item() == 5.0
    assert scaler.clip_grad_norm_(optimizer, 1.0).item() == 5.0
    scaler.step(optimizer)
    scaler.update()
    said = []
    for kind in (TorchSharded, ShardedGradScaler):
        optimizer = SGD([parameter_with(torch.ones(2))], lr=1.0)
        with pytest.raises(ValueError) as caught:
            started(kind).step(optimizer)
        said.append(str(caught.value))
        assert optimizer.param_groups[0]["params"][0].tolist() == [1.0, 1.0]
    assert said[0] == said[1]


def test_the_sharded_scaler_has_torchs_arguments_and_dtypes() -> None:
    theirs = list(inspect.signature(TorchSharded).parameters.values())
    ours = list(inspect.signature(ShardedGradScaler).parameters.values())
    for our, their in zip(ours[: len(theirs)], theirs, strict=True):
        assert str(our).split(":")[0] == str(their).split(":")[0]
    scaler = ShardedGradScaler("cpu", 4.0, 0.25, 4.0, 3)
    assert scaler.state_dict() == TorchSharded("cpu", 4.0, 0.25, 4.0, 3).state_dict()
    assert isinstance(scaler, TorchSharded)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        losses = [torch.tensor(1.5, dtype=dtype), torch.tensor(2.0)]
        assert scaler.scale(losses[0]).dtype is dtype
        scaled = scaler.scale(losses)
        assert [loss.dtype for loss in scaled] == [dtype, torch.float32]
        assert [loss.item() for loss in scaled] == [6.0, 8.0]


@pytest.mark.parametrize("kind", [GradScaler, ShardedGradScaler])
def test_as_torchs_suite_uses_a_group_of_one_rank(kind: type[GradScaler]) -> None:
    assert not dist.is_initialized()
    optimizer = SGD([parameter_like(torch.tensor([math.inf]))], lr=1.0)
    scaler = copy.deepcopy(kind("cpu", process_group=Alone()))
    scaler.scale(torch.ones(()))
    assert scaler.step(optimizer) is None
    assert scaler.step_skipped(optimizer)
    if kind is ShardedGradScaler:  # which takes gradients of FSDP's mixed precision
        scaler.unscale_(SGD([parameter_like(torch.ones(2, dtype=torch.float16))], lr=1.0))


def other_mesh() -> Any:
    grad = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (2,)), [Shard(0)])
    group = DeviceMesh("cpu", [dist.get_rank()], _init_backend=False)
    return ampfast.mark_replicated([parameter_like(grad)], group=group)


NOT_IN_IT = "ValueError: {} does not contain this rank"
NO_GROUP = "TypeError: {} must be a torch.distributed.ProcessGroup"
# Groups that are refused on rank 0 of two.
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: dist.new_group([1]), NOT_IN_IT),
    (lambda: DeviceMesh("cpu", [1]), NOT_IN_IT),
    (lambda: Alone(rank=-1), NOT_IN_IT),
    (lambda: init_device_mesh("meta", (2,)), "ValueError: {} is a mesh of 'meta', not of 'cpu'"),
    (lambda: [0, 1], NO_GROUP),
    (lambda: SimpleNamespace(rank=lambda: 0, size=lambda: 1), NO_GROUP),
]
TAKES = "TypeError: mark_replicated takes parameters, got "
# Calls that are refused on rank 0, by their error.
INVALID: list[tuple[Callable[[], Any], str]] = [
    *(
        (lambda make=make: GradScaler("cpu", process_group=make()), said.format("process_group"))
        for make, said in REFUSED
    ),
    *(
        (lambda make=make: ampfast.mark_replicated([torch.ones(2)], make()), said.format("group"))
        for make, said in REFUSED
    ),
    (other_mesh, "ValueError: the group of a DTensor must have the ranks of its DeviceMesh"),
    (lambda: ampfast.mark_replicated([torch.ones(1), "weight"]), f"{TAKES}str"),
    (
        lambda: ampfast.mark_replicated(torch.nn.Linear(1, 1)),
        f"{TAKES}Linear: write module.parameters()",
    ),
]


def misused() -> list[str]:
    said = []
    for call, _ in INVALID:
        try:
            call()
            said.append("nothing raised")
        except (TypeError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_invalid_groups_are_refused() -> None:
    for said, (_, starts) in zip(ranks.run(misused)[0], INVALID, strict=True):
        assert said.startswith(starts)
