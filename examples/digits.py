"""Trains a small convolutional network on scikit-learn's digits in float16 mixed precision.

Needs scikit-learn: pip install scikit-learn. The last line is the same for both scalers:

    python examples/digits.py --scaler torch
    python examples/digits.py --scaler ampfast
    python examples/digits.py --scaler ampfast --together
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import ampfast

try:
    from sklearn.datasets import load_digits
except ImportError:
    raise SystemExit("this example needs scikit-learn: pip install scikit-learn") from None

BATCH = 64


def loaded(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns images, float32 of shape (1797, 1, 8, 8), and their digits."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32, device=device) / 16
    return images.unsqueeze(1), torch.tensor(digits.target, device=device)


def network() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 16, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scaler", choices=("torch", "ampfast"), default="ampfast")
    parser.add_argument("--together", action="store_true", help="step_and_update(), ampfast only")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    if options.together and options.scaler == "torch":
        parser.error("torch's scaler has no step_and_update()")

    device = torch.device(options.device)
    torch.manual_seed(0)
    images, targets = loaded(device)
    train, test = slice(0, 1500), slice(1500, None)
    model = network().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    classes = {"torch": torch.amp.GradScaler, "ampfast": ampfast.GradScaler}
    # Overflows in the first steps, which are skipped.
    scaler = classes[options.scaler](device.type, init_scale=2.0**24, growth_interval=50)

    for epoch in range(options.epochs):
        order = torch.randperm(len(images[train]), generator=torch.Generator().manual_seed(epoch))
        for batch in order.to(device).split(BATCH):
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype=torch.float16):
                loss = nn.functional.cross_entropy(model(images[batch]), targets[batch])
            scaler.scale(loss).backward()
            if options.together:
                scaler.step_and_update(optimizer)
            else:
                scaler.step(optimizer)
                scaler.update()
        print(f"epoch {epoch}: loss {loss.item():.4f}, scale {scaler.get_scale():g}")

    if isinstance(scaler, ampfast.GradScaler):
        print(scaler.stats())
    with torch.no_grad():
        right = (model(images[test]).argmax(1) == targets[test]).float().mean().item()
    checksum = sum(parameter.double().sum().item() for parameter in model.parameters())
    print(f"accuracy {right:.2%}, sum of all parameters {checksum!r}")


if __name__ == "__main__":
    main()
