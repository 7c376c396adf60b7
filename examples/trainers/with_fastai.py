"""fastai, which needs a GPU for float16: `patch()` replaces the name that it has imported.

pip install fastai
"""

from __future__ import annotations

import torch
from fastai.basics import Callback, DataLoaders, Learner
from fastai.callback.fp16 import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ampfast


class Report(Callback):
    order = MixedPrecision.order - 1  # fastai drops the scaler after the fit

    def after_fit(self) -> None:
        print(self.learn.scaler.stats())


def main() -> None:
    ampfast.patch()
    data = TensorDataset(torch.randn(128, 64), torch.randint(10, (128,)))
    loaders = DataLoaders(DataLoader(data, batch_size=32), DataLoader(data, batch_size=32))
    learner = Learner(loaders, nn.Linear(64, 10), loss_func=nn.CrossEntropyLoss(), cbs=Report())
    learner.to_fp16().fit(1)


if __name__ == "__main__":
    main()
