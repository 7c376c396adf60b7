"""Groups of a scaler: what other ranks say, and collectives that fail."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from support.comparison import Hooked, TorchScaler
from support.comparison import started as started_by
from support.gradients import parameter_like, parameter_with
from support.groups import Alone, Pair
from support.launchers import ReferenceLauncher
from support.processes import python
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchSharded
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import SGD
from torch.testing._internal.distributed.fake_pg import FakeStore

import ampfast
from ampfast import GradScaler, ShardedGradScaler

pytestmark = pytest.mark.skipif(
    sys.platform == "win32" or not dist.is_available() or not dist.is_gloo_available(),
    reason="needs gloo",
)

KINDS: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "plain": lambda params: torch.optim.SGD(params, lr=1.0),
    "fused": lambda params: torch.optim.SGD(params, lr=1.0, fused=True),
}
started = partial(started_by, growth_interval=1)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """The other rank of torch's groups."""
    pair = Pair()
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    told = lambda _, tensors, options: pair.allreduce(tensors, options)  # noqa: E731
    monkeypatch.setattr(dist.ProcessGroup, "allreduce", told)
    yield pair
    dist.destroy_process_group()


def optimizer_of(kind: str, count: int = 2) -> torch.optim.Optimizer:
    return KINDS[kind]([parameter_with(torch.ones(count))])


def test_the_group_is_the_given_one(world: dist.ProcessGroup) -> None:
    scaler = started(process_group=world)
    assert scaler.process_group is world
    with pytest.raises(TypeError, match="process_group must be"):
        scaler.process_group = "world"
    assert scaler.process_group is world
    assert copy.copy(scaler).process_group is world


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_does_not_ride_before_the_ranks_agree(
    kind: str, launcher: ReferenceLauncher
) -> None:
    pair, optimizer = Pair(), optimizer_of(kind)
    scaler, pair.finds = started(process_group=pair), True
    scaler.step_and_update(optimizer)
    assert launcher.launches == ["check" if kind == "fused" else "unscale", "update"]
    assert scaler.step_skipped(optimizer) and scaler.get_scale() == 4.0


class Own(GradScaler):
    def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, _: bool) -> Any:
        return {found_inf.device: found_inf}


@pytest.mark.parametrize("kernels", ["cpu", "launcher"])
@pytest.mark.parametrize("make", [GradScaler, Own])
@pytest.mark.parametrize("kind", KINDS)
def test_without_a_group_distributed_gradients_alone_are_agreed_on(
    kind: str, make: type[GradScaler], kernels: str, pair: Pair, request: pytest.FixtureRequest
) -> None:
    if kernels == "launcher":
        request.getfixturevalue("launcher")
    mesh = init_device_mesh("cpu", (2,))
    scaler = started(make)
    scaler.step_and_update(optimizer_of(kind))
    assert pair.sent == [] and scaler.get_scale() == 16.0
    for finds, scale in ((False, 16.0), (True, 4.0)):
        scaler, pair.sent, pair.finds = started(make), [], finds
        gradient = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
        params = [parameter_like(gradient)]  # torch has no fused SGD for them
        scaler.step_and_update(torch.optim.Adam(params, fused=kind == "fused"))
        assert pair.sent == [[0.0]]
        assert scaler.get_scale() == scale


def test_the_quotient_by_the_users_scale_is_agreed_on() -> None:
    """After the ranks agreed on finite gradients."""
    pair, optimizer = Pair(), optimizer_of("fused")
    scaler = started(process_group=pair)
    scaler.unscale_(optimizer)
    optimizer.grad_scale = torch.tensor(1e-20)
    pair.sent, pair.finds = [], True
    scaler.step(optimizer)
    scaler.update()
    assert pair.sent == [[0.0]]
    assert scaler.step_skipped(optimizer) and scaler.get_scale() == 4.0


@pytest.mark.parametrize("is_left", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("world")
def test_a_tracked_model_of_dtensors_can_be_converted(dtype: torch.dtype, is_left: bool) -> None:
    """torch swaps DTensors for others, which it refuses if something refers to them weakly."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)).to(dtype)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    inputs = torch.ones(5, 3, dtype=dtype)
    optimizer = ampfast.master_weights_(torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = started(track="overflow")
    scaler.name_parameters(model)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(model(inputs).float().square().sum()).backward()
        model[1].bias.grad.fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
    if not is_left:
        optimizer.zero_grad()
    model.to(torch.float16)
    (row,) = scaler.overflow_report().parameters
    assert (row.name, row.infinities) == ("1.bias", 2)


# Collectives that fail: gradients are divided once, and `step` agrees again

SCALE, GRADIENT = 4.0, 16.0
STEPPED = 1.0 - GRADIENT
Call = Callable[[GradScaler, Any], Any]


def clip(order: float, in_place: bool = True, limit: float = 1e3) -> Call:
    options: Any = {"in_place": in_place}
    return lambda scaler, given: scaler.clip_grad_norm_(given, limit, order, **options)


# Calls that write before the ranks agree.
DIVIDING: dict[str, tuple[str, Call]] = {
    "unscale_": ("plain", GradScaler.unscale_),
    "unscale_, fused": ("fused", GradScaler.unscale_),
    "step": ("plain", GradScaler.step),
    "step_and_update": ("plain", GradScaler.step_and_update),
}
READING: dict[str, tuple[str, Call]] = {
    "clip 3": ("plain", clip(3.0)),
    **{f"clip {order}": ("plain", clip(order)) for order in (2.0, math.inf)},
    "clip a list": ("plain", lambda scaler, optimizer: clip(3.0)(scaler, [optimizer])),
    **{f"clip {order}, fused": ("fused", clip(order)) for order in (2.0, 3.0, math.inf)},
    **{f"defer {order}": ("fused", clip(order, in_place=False)) for order in (2.0, 3.0, math.inf)},
    "grad_norm": ("plain", GradScaler.grad_norm),
    "step, fused": ("fused", GradScaler.step),
    "step_and_update, fused": ("fused", GradScaler.step_and_update),
}


def fail(scaler: GradScaler, call: Callable[..., Any], *arguments: Any) -> None:
    """Calls while the next collective fails."""
    group: Any = scaler.process_group
    group.failing = (group.calls + 1,)
    with pytest.raises(ConnectionError, match="connection closed by peer"):
        call(*arguments)
    assert group.calls == group.failing[0]


def failed(call: Call, kind: str, make: Any = GradScaler) -> tuple[Any, Any, Any]:
    """Scaler, optimizer and parameter after a call whose collective failed."""
    param = parameter_with(torch.full((3,), SCALE * GRADIENT))
    scaler: Any = make("cpu", init_scale=SCALE, process_group=Pair())
    scaler.scale(torch.ones(()))
    optimizer = KINDS[kind]([param])
    fail(scaler, call, scaler, optimizer)
    return scaler, optimizer, param


def assert_equal(tensor: torch.Tensor, value: float) -> None:
    assert tensor.tolist() == [value] * 3


@pytest.mark.parametrize("make", [GradScaler, Hooked])
@pytest.mark.parametrize("path", DIVIDING)
def test_gradients_are_divided_once_and_the_step_agrees_again(path: str, make: Any) -> None:
    kind, call = DIVIDING[path]
    scaler, optimizer, param = failed(call, kind, make)
    for again in (GradScaler.unscale_, clip(2.0), clip(3.0)):
        with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
            again(scaler, optimizer)
        assert_equal(param.grad, GRADIENT)
    fail(scaler, scaler.step, optimizer)
    assert_equal(param, 1.0)
    assert not any(hasattr(optimizer, name) for name in ("grad_scale", "found_inf"))
    scaler.step(optimizer)
    scaler.update()
    assert_equal(param, STEPPED)
    assert_equal(param.grad, GRADIENT)
    assert scaler.stats().skipped == 0


@pytest.mark.parametrize("path", [path for path in (*DIVIDING, *READING) if path != "grad_norm"])
def test_the_update_agrees_again(path: str) -> None:
    kind, call = {**DIVIDING, **READING}[path]
    scaler, _, param = failed(call, kind)
    fail(scaler, scaler.update)
    assert scaler.stats().steps == 0
    scaler.update()
    assert (scaler.stats().steps, scaler.stats().skipped) == (1, 0)
    assert_equal(param, 1.0)
    # The other ranks, whose collective was the same, wait for it.
    scaler, _, _ = failed(call, kind)
    pair: Any = scaler.process_group
    pair.finds = True
    scaler.update(32.0)
    assert len(pair.sent) == 1
    assert (scaler.stats().skipped, scaler.get_scale()) == (1, 32.0)


MEASURING = partial(GradScaler, skip_above=1e6), partial(GradScaler, track="norms")


@pytest.mark.parametrize(
    ("path", "make"),
    [(path, GradScaler) for path in READING]
    + [(path, make) for path in (*READING, *DIVIDING) for make in MEASURING],
)
def test_a_call_that_wrote_nothing_may_be_repeated(path: str, make: Any) -> None:
    """So may one that measures, since the ranks agree before it writes."""
    kind, call = {**DIVIDING, **READING}[path]
    scaler, optimizer, param = failed(call, kind, make)
    assert_equal(param.grad, SCALE * GRADIENT)
    assert_equal(param, 1.0)
    call(scaler, optimizer)
    if "step" not in path:
        scaler.step(optimizer)
    assert_equal(param, STEPPED)


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
