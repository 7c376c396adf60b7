"""Transformers' Trainer: the scaler is an attribute of its Accelerator, set before `train`.

pip install transformers accelerate
"""

from __future__ import annotations

import tempfile

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

import ampfast


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(64, 10)

    def forward(self, data: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.net(data), labels)}


def main() -> None:
    rows = [{"data": torch.randn(64), "labels": index % 10} for index in range(128)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            fp16=True,
            max_steps=4,
            per_device_train_batch_size=32,
            save_strategy="no",
            report_to="none",
        )
        trainer = Trainer(Classifier(), arguments, train_dataset=rows)
        accelerator = trainer.accelerator
        if not accelerator.native_amp:
            raise SystemExit(
                "on a CPU Accelerate neither casts to float16 nor unscales: this needs a GPU"
            )
        accelerator.scaler = ampfast.GradScaler(accelerator.device.type)
        trainer.train()
    print(accelerator.scaler.stats())


if __name__ == "__main__":
    main()
