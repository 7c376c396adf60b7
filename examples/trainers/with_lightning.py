"""Lightning's Trainer: the scaler is an argument of its precision plugin.

pip install lightning
"""

from __future__ import annotations

import lightning
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ampfast

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(64, 10)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        data, target = batch
        return nn.functional.cross_entropy(self.net(data), target)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    data = TensorDataset(torch.randn(128, 64), torch.randint(10, (128,)))
    scaler = ampfast.GradScaler(DEVICE)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator=DEVICE,
        devices=1,
        plugins=[MixedPrecision("16-mixed", DEVICE, scaler=scaler)],
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Classifier(), DataLoader(data, batch_size=32))
    print(scaler.stats())


if __name__ == "__main__":
    main()
