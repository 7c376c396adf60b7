"""Accelerate's checkpoints of FSDP2 on two ranks: the scaler as docs/trainers.md loads it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.scalers import Scaler, TorchScaler
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ampfast
from tests.distributed import ranks

accelerate = pytest.importorskip("accelerate", reason="needs accelerate")

PAGE = Path(__file__).parents[2] / "docs" / "trainers.md"
(RECIPE,) = (
    dedent(block)
    for block in re.findall(r"(?:^ {4}.*\n)+", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    if "scaler.pt" in block
)
PLAIN = "accelerator.load_state(folder)"
INITIALIZED = "AssertionError: _growth_tracker initialized before _scale"


def accelerator_of(kind: str) -> Any:
    """An Accelerator that takes the path of FSDP2, which it refuses on a CPU."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    os.environ |= {
        **{f"{prefix}RANK": str(dist.get_rank()) for prefix in ("", "LOCAL_")},
        **{f"{prefix}WORLD_SIZE": str(dist.get_world_size()) for prefix in ("", "LOCAL_")},
        "OMP_NUM_THREADS": "1",
    }
    accelerator = accelerate.Accelerator(cpu=True)
    fsdp = accelerate.DistributedType.FSDP
    accelerate.state.PartialState._shared_state["distributed_type"] = fsdp
    accelerate.state.AcceleratorState()  # copies it
    accelerator.state.fsdp_plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type=kind, cpu_offload=False
    )
    assert accelerator.is_fsdp2
    return accelerator


def build(accelerator: Any, scaler_type: Scaler) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    accelerator.scaler = scaler_type("cpu", init_scale=1024.0, growth_interval=2)
    optimizer = accelerate.optimizer.AcceleratedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        device_placement=False,
        scaler=accelerator.scaler,
    )
    accelerator._models[:], accelerator._optimizers[:] = [model], [optimizer]
    return model, optimizer


def train(accelerator: Any, model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    accelerator.scaler.scale(model(torch.ones(4, 8)).square().mean()).backward()
    optimizer.step()


def loaded(scaler_type: Scaler, kind: str, folder: str, code: str, is_new: bool) -> Any:
    """What loading raised, or the scaler's state before saving and after loading, and weights."""
    accelerator = accelerator_of(kind)
    model, optimizer = build(accelerator, scaler_type)
    train(accelerator, model, optimizer)
    accelerator.save_state(folder)
    saved = accelerator.scaler.state_dict()
    weights = [each.full_tensor().detach().clone() for each in model.parameters()]
    train(accelerator, model, optimizer)
    if is_new:
        model, optimizer = build(accelerator, scaler_type)
    dist.barrier()
    try:
        exec(code, {"accelerator": accelerator, "folder": folder, "torch": torch})
    except AssertionError as error:
        return f"AssertionError: {error}"
    assert accelerator.scaler is optimizer.scaler
    after = [each.full_tensor().detach() for each in model.parameters()]
    torch.testing.assert_close(after, weights, rtol=0, atol=0)
    scale, tracker = saved["scale"], saved["_growth_tracker"]
    now = accelerator.scaler.state_dict()
    return (scale, tracker), (now["scale"], now["_growth_tracker"])


@pytest.mark.parametrize("scaler_type", [TorchScaler, ampfast.GradScaler], ids=["torch", "ours"])
@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
@pytest.mark.parametrize("is_new", [True, False], ids=["new", "trained"])
def test_the_scaler_is_loaded_last(
    is_new: bool, kind: str, scaler_type: Scaler, tmp_path: Path
) -> None:
    def run(code: str, name: str) -> Any:
        first, second = ranks.run(
            loaded, scaler_type, kind, str(tmp_path / name), code, is_new, ranks=2
        )
        assert first == second
        return first

    broken = ((1024.0, 1), (2048.0, 0)) if is_new else INITIALIZED
    assert run(PLAIN, "plain") == broken
    assert run(RECIPE, "recipe") == ((1024.0, 1), (1024.0, 1))
