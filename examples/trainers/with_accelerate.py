"""Accelerate: the scaler is an attribute, set before `prepare`.

pip install accelerate
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn

import ampfast


def main() -> None:
    accelerator = Accelerator(mixed_precision="fp16")
    if not accelerator.native_amp:
        raise SystemExit(
            "on a CPU Accelerate neither casts to float16 nor unscales: this needs a GPU"
        )
    accelerator.scaler = ampfast.GradScaler(accelerator.device.type)
    model = nn.Linear(64, 10)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))

    for _ in range(4):
        data = torch.randn(32, 64, device=accelerator.device)
        target = torch.randint(10, (32,), device=accelerator.device)
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(data), target))
        optimizer.step()
    print(accelerator.scaler.stats())


if __name__ == "__main__":
    main()
