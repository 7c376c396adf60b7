"""timm: its NativeScaler makes the scaler, so `patch()` comes first.

pip install timm torchvision
"""

from __future__ import annotations

import timm
import torch
from timm.utils import NativeScaler
from torch import nn

import ampfast

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main() -> None:
    with ampfast.patch():
        loss_scaler = NativeScaler(DEVICE)
    model = timm.create_model("test_vit", num_classes=10).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for _ in range(4):
        images = torch.randn(4, 3, 160, 160, device=DEVICE)
        target = torch.randint(10, (4,), device=DEVICE)
        optimizer.zero_grad()
        with torch.autocast(DEVICE, dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(images).float(), target)
        loss_scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
    print(loss_scaler._scaler.stats())


if __name__ == "__main__":
    main()
