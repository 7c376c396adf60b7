"""MMEngine, which needs a GPU for float16: `patch()` replaces the name that it has imported.

pip install mmengine
"""

from __future__ import annotations

import torch
from mmengine.model import BaseModel
from mmengine.optim import AmpOptimWrapper
from torch import Tensor, nn

import ampfast


class Classifier(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(64, 10)

    def forward(self, data: Tensor, target: Tensor, mode: str) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.net(data), target)}


def main() -> None:
    ampfast.patch()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Classifier().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    wrapper = AmpOptimWrapper(optimizer=optimizer)
    for _ in range(4):
        batch = (torch.randn(32, 64, device=device), torch.randint(10, (32,), device=device))
        model.train_step(batch, wrapper)
    print(wrapper.loss_scaler.stats())


if __name__ == "__main__":
    main()
