"""PyTorch-Ignite: the scaler is an argument of `create_supervised_trainer`.

pip install pytorch-ignite
"""

from __future__ import annotations

import torch
from ignite.engine import create_supervised_trainer
from torch import nn

import ampfast

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main() -> None:
    model = nn.Linear(64, 10).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = ampfast.GradScaler(DEVICE)
    trainer = create_supervised_trainer(
        model, optimizer, nn.functional.cross_entropy, DEVICE, amp_mode="amp", scaler=scaler
    )
    trainer.run([(torch.randn(32, 64), torch.randint(10, (32,))) for _ in range(4)])
    print(scaler.stats())


if __name__ == "__main__":
    main()
