"""Lightning Fabric with FSDP on all GPUs: the scaler is an attribute of its precision plugin.

pip install lightning
"""

from __future__ import annotations

import lightning
import torch
from lightning.fabric.plugins import FSDPPrecision
from lightning.fabric.strategies import FSDPStrategy
from torch import nn

import ampfast


def main() -> None:
    # The plugin's argument for it refuses every scaler.
    precision = FSDPPrecision("16-mixed")
    precision.scaler = scaler = ampfast.ShardedGradScaler()
    fabric = lightning.Fabric(accelerator="cuda", strategy=FSDPStrategy(), plugins=[precision])
    fabric.launch()
    model = fabric.setup_module(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3))

    for _ in range(4):
        data = torch.randn(32, 64, device=fabric.device)
        target = torch.randint(10, (32,), device=fabric.device)
        optimizer.zero_grad()
        fabric.backward(nn.functional.cross_entropy(model(data), target))
        optimizer.step()
    fabric.print(scaler.stats())


if __name__ == "__main__":
    main()
