"""Agreement through NCCL with a single rank: same bits, no host sync, graphs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_support import Twin, no_syncs
from support.comparison import assert_same
from support.gradients import make_gradient
from support.optimizers import OPTIMIZERS
from support.scalers import TorchScaler
from support.twins import small_model
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from tracing import counted, why_profiler_is_blind

from ampfast import GradScaler

pytestmark = pytest.mark.gpu

BAD = (None, math.inf, None, None, math.nan, None)
SETTINGS: dict[str, Any] = {"init_scale": 2.0**10, "growth_interval": 2}
CAPTURABLE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.25, fused=True),
    "adam": lambda params: torch.optim.Adam(params, lr=0.1, fused=True, capturable=True),
}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    """Mesh of this GPU, in an NCCL world of one rank."""
    if not dist.is_available() or not dist.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    store = tmp_path_factory.mktemp("nccl") / "store"
    dist.init_process_group(
        "nccl",
        init_method=store.as_uri(),
        rank=0,
        world_size=1,
        device_id=torch.device("cuda", torch.cuda.current_device()),
    )
    yield init_device_mesh("cuda", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("way", ["step", "unscale_", "together", "clip", "defer"])
@pytest.mark.parametrize("kind", ["momentum", "fused_adam"])
def test_a_group_of_one_changes_nothing(
    backend: str, device: torch.device, mesh: DeviceMesh, kind: str, way: str
) -> None:
    if way == "defer" and kind == "momentum":
        pytest.skip("only optimizers that take grad_scale can defer a clip")
    sides = [
        Twin(GradScaler, kind, device, backend=backend, process_group=group, **SETTINGS)
        for group in (None, dist.group.WORLD, mesh)
    ]
    for seed, bad in enumerate(BAD):
        seen = []
        for side in sides:
            side.backward(seed, bad=bad)
            norms = []
            if way == "unscale_":
                side.scaler.unscale_(side.optimizers[0])
            elif way in ("clip", "defer"):
                norms = [
                    side.scaler.clip_grad_norm_(side.optimizers[0], 1.0, in_place=way == "clip")
                ]
            if way != "together":
                side.step()
            side.finish(together=way == "together")
            found = side.scaler.found_inf(side.optimizers[0])
            assert found.shape == () and found.item() == float(bad is not None)
            seen.append([side.observe(), norms])
        for other in seen[1:]:
            assert_same(other, seen[0], f"step {seed}")


def distributed(tensor: torch.Tensor, mesh: DeviceMesh, placement: Any) -> DTensor:
    return DTensor.from_local(tensor.clone(), mesh, [placement])


@pytest.mark.parametrize("way", ["step", "clip"])
@pytest.mark.parametrize("kind", ["sgd", "fused_adam"])
def test_distributed_gradients_as_plain_ones(
    backend: str, device: torch.device, mesh: DeviceMesh, kind: str, way: str
) -> None:
    values = [make_gradient(layout).to(device) for layout in ("contiguous", "long", "short")]
    placements = [Shard(0), Replicate(), Partial()]
    plain = [torch.nn.Parameter(value.clone()) for value in values]
    spread = [
        torch.nn.Parameter(distributed(value, mesh, Replicate() if p.is_partial() else p))
        for value, p in zip(values, placements, strict=True)
    ]
    sides = [
        (params, OPTIMIZERS[kind](params), GradScaler(backend=backend, **SETTINGS))
        for params in (plain, spread)
    ]
    for seed, bad in enumerate(BAD):
        seen = []
        for params, optimizer, scaler in sides:
            scaler.scale(torch.ones((), device=device))
            for i, (param, placement) in enumerate(zip(params, placements, strict=True)):
                grad = (values[i] + seed) * scaler._scale
                if bad is not None and i == seed % 3:
                    grad.view(-1)[-1] = bad
                spreads = isinstance(param, DTensor)
                param.grad = distributed(grad, mesh, placement) if spreads else grad
            norms = [scaler.grad_norm(optimizer)]
            if way == "clip":
                norms.append(scaler.clip_grad_norm_(optimizer, 1.0))
            scaler.step(optimizer)
            assert scaler.step_skipped(optimizer) is (bad is not None)
            scaler.update()
            locals_ = [p.to_local() if isinstance(p, DTensor) else p for p in params]
            seen.append([[p.detach() for p in locals_], norms, scaler._scale])
        assert_same(seen[1], seen[0], f"step {seed}")


@pytest.mark.parametrize("offloads", [False, True], ids=["on_the_gpu", "offloaded"])
def test_fully_shard(backend: str, device: torch.device, mesh: DeviceMesh, offloads: bool) -> None:
    policy: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()} if offloads else {}
    sharded: Any = fully_shard(small_model().to(device), mesh=mesh, **policy)
    sides: list[tuple[Any, Any, Any]] = [
        (model, torch.optim.AdamW(model.parameters(), lr=0.1), scaler)
        for model, scaler in (
            (sharded, GradScaler(backend=backend, **SETTINGS)),
            (small_model().to(device), TorchScaler(**SETTINGS)),
        )
    ]
    for seed, bad in enumerate(BAD):
        seen = []
        for model, optimizer, scaler in sides:
            optimizer.zero_grad()
            inputs = make_gradient("every_other", seed=seed)[:, :8].to(device)
            if bad is not None:
                inputs[0, 0] = bad
            scaler.scale(model(inputs).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            params = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
            seen.append((scaler.get_scale(), [p.detach().cpu() for p in params]))
        assert seen[0][0] == seen[1][0]
        if offloads:
            # Arithmetic of the CPU, not of the GPU.
            torch.testing.assert_close(seen[0][1], seen[1][1])
        else:
            assert_same(seen[0][1], seen[1][1], f"step {seed}")


class Fed:
    """Parameters with fixed gradient memory and new values."""

    def __init__(self, kind: str, device: torch.device, scaler: GradScaler) -> None:
        self.params = [
            torch.nn.Parameter(make_gradient(layout).to(device)) for layout in ("long", "short")
        ]
        for param in self.params:
            param.grad = torch.zeros_like(param)
        self.optimizer = CAPTURABLE[kind](self.params)
        self.scaler = scaler
        self.norm = torch.zeros((), device=device)
        scaler.scale(torch.ones((), device=device))

    def feed(self, seed: int, bad: float | None) -> None:
        for param, layout in zip(self.params, ("long", "short"), strict=True):
            value = make_gradient(layout, seed=seed + 1).to(param.device)
            param.grad.copy_(value * self.scaler._scale)
        if bad is not None:
            self.params[seed % 2].grad[-1] = bad

    def step(self, way: str) -> None:
        if way == "clip":
            self.norm.copy_(self.scaler.clip_grad_norm_(self.optimizer, 1.0))
        elif way == "defer":
            self.norm.copy_(self.scaler.clip_grad_norm_(self.optimizer, 1.0, in_place=False))
        if way == "together":
            self.scaler.step_and_update(self.optimizer)
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def observe(self) -> list[Any]:
        scaler = self.scaler
        params = [p.detach() for p in self.params]
        return [params, self.norm, scaler.get_scale(), scaler._get_growth_tracker()]


WAYS = ("step", "together", "clip", "defer")


def pair(backend: str, kind: str, way: str, device: torch.device) -> tuple[Fed, Fed]:
    """Scalers with a group and without, after two warm-up steps."""
    sides = (
        Fed(kind, device, GradScaler(backend=backend, process_group=group, **SETTINGS))
        for group in (dist.group.WORLD, None)
    )
    with_group, without = sides
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for seed in range(2):
            for side in (with_group, without):
                side.feed(seed, None)
                side.step(way)
    torch.cuda.current_stream().wait_stream(stream)
    assert_same(with_group.observe(), without.observe(), "after two steps")
    return with_group, without


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", CAPTURABLE)
def test_a_step_with_a_group_is_captured(
    backend: str, device: torch.device, mesh: DeviceMesh, kind: str, way: str
) -> None:
    with_group, without = pair(backend, kind, way, device)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    # NCCL's watchdog thread is not part of this capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        with_group.step(way)
    for seed, bad in enumerate(BAD):
        with_group.feed(seed, bad)
        graph.replay()
        without.feed(seed, bad)
        without.step(way)
        assert_same(with_group.observe(), without.observe(), f"step {seed}")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", CAPTURABLE)
def test_nothing_waits(
    backend: str, device: torch.device, mesh: DeviceMesh, kind: str, way: str
) -> None:
    side, _ = pair(backend, kind, way, device)
    for seed, bad in enumerate(BAD):
        side.feed(seed, bad)
        torch.cuda.synchronize()
        with no_syncs():
            side.step(way)
        assert side.scaler.step_skipped(side.optimizer) is (bad is not None)
    if reason := why_profiler_is_blind():
        pytest.skip(reason)
    side.feed(0, None)
    assert not counted(lambda: side.step(way)).syncs
