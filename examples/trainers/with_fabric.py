"""Lightning Fabric: the scaler is an argument of its precision plugin.

pip install lightning
"""

from __future__ import annotations

import lightning
import torch
from lightning.fabric.plugins import MixedPrecision
from torch import nn

import ampfast

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main() -> None:
    scaler = ampfast.GradScaler(DEVICE)
    precision = MixedPrecision("16-mixed", DEVICE, scaler=scaler)
    fabric = lightning.Fabric(accelerator=DEVICE, devices=1, plugins=[precision])
    model = nn.Linear(64, 10)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))

    for _ in range(4):
        data = torch.randn(32, 64, device=fabric.device)
        target = torch.randint(10, (32,), device=fabric.device)
        optimizer.zero_grad()
        fabric.backward(nn.functional.cross_entropy(model(data), target))
        optimizer.step()
    print(scaler.stats())


if __name__ == "__main__":
    main()
