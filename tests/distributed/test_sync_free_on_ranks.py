"""`sync_free_` on optimizers of distributed parameters."""

from __future__ import annotations

import pytest
import ranks
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ampfast


def turned(kind: str) -> tuple[str, bool, list[torch.Tensor]]:
    """Message of sync_free_, whether the optimizer is fused, and parameters after a step."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.5)
    said = ""
    try:
        ampfast.sync_free_(optimizer)
    except ValueError as error:
        said = str(error)
    scaler = ampfast.GradScaler("cpu")
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    fused = bool(optimizer.param_groups[0].get("fused"))
    return said, fused, [param.full_tensor().detach() for param in model.parameters()]


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_parameters_without_a_fused_kernel_are_refused(kind: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.5)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    for said, fused, params in ranks.run(turned, kind):
        assert fused == (said == "")
        assert fused or (f"fused {kind} cannot step parameter 0 of group 0" in said)
        assert "DTensor" in said or fused
        for ours, theirs in zip(params, model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)
    if kind in ("Adam", "AdamW"):
        assert fused
