"""Copied and pickled scalers of several ranks, and scalers given another group."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import ranks
import torch
import torch.distributed as dist
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchSharded

import ampfast
from ampfast import GradScaler


def agreed(scaler: GradScaler) -> float:
    """Whether this rank skips a step with an infinity on rank 1."""
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler.scale(torch.ones(()))
    param.grad = torch.full((2,), torch.inf if dist.get_rank() else 1.0)
    scaler.step(optimizer)
    scaler.update()
    return scaler.found_inf(optimizer).item()


def copies() -> list[object]:
    world = dist.group.WORLD
    scaler = GradScaler("cpu", process_group=world)
    twin = copy.deepcopy(scaler)
    seen: list[object] = [
        copy.copy(scaler).process_group is world,
        twin.process_group is world,
        agreed(twin),
    ]
    try:
        pickle.dumps(scaler)
    except TypeError as error:
        seen.append(str(error))
    alone = pickle.loads(pickle.dumps(GradScaler("cpu")))
    seen += [alone.process_group, agreed(alone)]
    alone.process_group = world
    seen.append(agreed(alone))
    alone.process_group = None
    seen.append(agreed(alone))
    sharded = pickle.loads(pickle.dumps(ampfast.ShardedGradScaler("cpu")))
    seen += [sharded.process_group, agreed(sharded)]
    return seen


def test_copies_and_pickles() -> None:
    for rank, seen in enumerate(ranks.run(copies)):
        *twins, refusal, group, alone, with_group, without, default, sharded = seen
        assert twins == [True, True, 1.0]
        assert "state_dict" in refusal and "process_group" in refusal
        assert group is None and default is None
        assert alone == without == float(rank == 1)
        assert with_group == sharded == 1.0


def test_the_sharded_scaler_has_torchs_arguments() -> None:
    theirs = list(inspect.signature(TorchSharded).parameters.values())
    ours = list(inspect.signature(ampfast.ShardedGradScaler).parameters.values())
    assert [str(p).split(":")[0] for p in ours[: len(theirs)]] == [
        str(p).split(":")[0] for p in theirs
    ]
    scaler = ampfast.ShardedGradScaler("cpu", 8.0, 0.25, 4.0, 3)
    assert scaler.state_dict() == TorchSharded("cpu", 8.0, 0.25, 4.0, 3).state_dict()
    assert isinstance(scaler, TorchSharded)
    assert not ampfast.ShardedGradScaler("cpu", enabled=False).is_enabled()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_sharded_scaler_keeps_the_dtype_of_a_loss(dtype: torch.dtype) -> None:
    scaler = ampfast.ShardedGradScaler("cpu", init_scale=4.0)
    losses = [torch.tensor(1.5, dtype=dtype), torch.tensor(2.0)]
    assert scaler.scale(losses[0]).dtype is dtype
    scaled = scaler.scale(losses)
    assert [loss.dtype for loss in scaled] == [dtype, torch.float32]
    assert [loss.item() for loss in scaled] == [6.0, 8.0]


def test_a_world_that_was_not_made_is_missed_as_by_torchs() -> None:
    said = []
    for kind in (TorchSharded, ampfast.ShardedGradScaler):
        param = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([param], lr=1.0)
        scaler = kind("cpu")
        scaler.scale(param.sum()).backward()
        with pytest.raises(ValueError) as caught:
            scaler.step(optimizer)
        said.append(str(caught.value))
        assert param.tolist() == [1.0, 1.0]
    assert said[0] == said[1]


def test_only_parameters_can_be_marked() -> None:
    with pytest.raises(TypeError, match="mark_replicated takes parameters, got str"):
        ampfast.mark_replicated([torch.ones(1), "weight"])
