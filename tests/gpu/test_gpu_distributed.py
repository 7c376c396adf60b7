"""Agreement through NCCL with a single rank: same bits, no host sync, graphs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_support import Twin, gpu, no_syncs, side_stream
from support.comparison import assert_same
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ampfast import GradScaler

BAD = (None, math.inf, None, None, math.nan, None)
SETTINGS: dict[str, Any] = {"init_scale": 2.0**10, "growth_interval": 2}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    """Mesh of this GPU, in an NCCL world of one rank."""
    if not dist.is_available() or not dist.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    store = tmp_path_factory.mktemp("nccl") / "store"
    alone: Any = {"rank": 0, "world_size": 1, "device_id": gpu()}
    dist.init_process_group("nccl", init_method=store.as_uri(), **alone)
    yield init_device_mesh("cuda", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("way", ["step", "together", "unscale", "clip", "defer"])
@pytest.mark.parametrize("kind", ["momentum", "capturable_sgd", "capturable_adam"])
def test_a_group_of_one_changes_nothing(
    backend: str, device: torch.device, mesh: DeviceMesh, kind: str, way: str
) -> None:
    """Eagerly, without a wait if the optimizer is fused, and in replays."""
    fused = kind != "momentum"
    if way == "defer" and not fused:
        pytest.skip("only optimizers that take grad_scale can defer a clip")
    sides = [
        Twin(GradScaler(backend=backend, process_group=group, **SETTINGS), kind, device)
        for group in (None, dist.group.WORLD, mesh)
    ]
    with side_stream():
        for seed in range(2):
            for side in sides:
                side.feed(seed)
                side.iterate(way)
    for seed, bad in enumerate(BAD, 2):
        for side in sides:
            side.feed(seed, bad)
            torch.cuda.synchronize()
            with no_syncs() if fused and way != "unscale" else contextlib.nullcontext():
                side.iterate(way)
            found = side.scaler.found_inf(side.optimizers[0])
            assert found.shape == () and found.item() == float(bad is not None)
        for side in sides[1:]:
            assert_same(side.observe(), sides[0].observe(), f"step {seed}")
    if not fused or way == "unscale":
        return
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    # NCCL's watchdog thread is not part of this capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        sides[1].iterate(way)
    for seed, bad in enumerate(BAD, 8):
        for side in sides[:2]:
            side.feed(seed, bad)
        graph.replay()
        sides[0].iterate(way)
        assert_same(sides[1].observe(), sides[0].observe(), f"replay {seed}")
