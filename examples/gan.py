"""Trains a GAN, two optimizers and four losses on one scaler, in float16 mixed precision.

The points it learns to make lie in eight clouds on a circle; the critic tells made points from real
ones, and which cloud a point is from. The last line is the same for both scalers:

    python examples/gan.py --scaler torch
    python examples/gan.py --scaler ampfast
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import nn

import ampfast

CLOUDS = 8
SPREAD = 0.1
NOISE = 8
WIDTH = 64
BATCH = 256


def centres(clouds: torch.Tensor) -> torch.Tensor:
    """Returns the positions of the clouds, float32 of shape (points, 2)."""
    angles = clouds * (2 * math.pi / CLOUDS)
    return 2 * torch.stack([angles.cos(), angles.sin()], dim=1)


class Maker(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            *(nn.Linear(NOISE + CLOUDS, WIDTH), nn.ReLU()),
            *(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2)),
        )

    def forward(self, clouds: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Generates a point for each requested cloud."""
        return super().forward(torch.cat([nn.functional.one_hot(clouds, CLOUDS), noise], dim=1))


class Critic(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            *(nn.Linear(2, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(0.2)),
            nn.Linear(WIDTH, 1 + CLOUDS),
        )

    def forward(self, points: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns float32 logits: of being real, (points,), and of each cloud, (points, 8)."""
        real, clouds = super().forward(points).float().split([1, CLOUDS], dim=1)
        return real.flatten(), clouds


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scaler", choices=("torch", "ampfast"), default="ampfast")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)

    device = torch.device(options.device)
    torch.manual_seed(0)
    maker, critic = Maker().to(device), Critic().to(device)
    for_maker = torch.optim.Adam(maker.parameters(), lr=1e-3, betas=(0.5, 0.9))
    for_critic = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    classes = {"torch": torch.amp.GradScaler, "ampfast": ampfast.GradScaler}
    # Overflows in the first steps, which are skipped.
    scaler = classes[options.scaler](device.type, init_scale=2.0**26, growth_interval=100)

    for step in range(options.steps):
        clouds = torch.randint(CLOUDS, (BATCH,)).to(device)
        real = centres(clouds) + SPREAD * torch.randn(BATCH, 2).to(device)
        with torch.autocast(device.type, dtype=torch.float16):
            made = maker(clouds, torch.randn(BATCH, NOISE).to(device))

            seems_real, seems_from = critic(real)
            seems_made, _ = critic(made.detach())
            telling = nn.functional.softplus(torch.cat([-seems_real, seems_made])).mean()
            naming = nn.functional.cross_entropy(seems_from, clouds)
        for_critic.zero_grad()
        # Every loss is scaled, and their gradients accumulate.
        scaler.scale(telling).backward(retain_graph=True)
        scaler.scale(naming).backward()
        scaler.step(for_critic)

        with torch.autocast(device.type, dtype=torch.float16):
            seems_real, seems_from = critic(made)
            fooling = nn.functional.softplus(-seems_real).mean()
            belonging = nn.functional.cross_entropy(seems_from, clouds)
        for_maker.zero_grad()
        scaler.scale(fooling).backward(retain_graph=True)
        scaler.scale(belonging).backward()
        scaler.step(for_maker)
        # Once for both: optimizers skip separately, and the scale backs off if either did.
        scaler.update()
        if step % 100 == 0:
            print(
                f"step {step}: critic {(telling + naming).item():.3f}, "
                f"maker {(fooling + belonging).item():.3f}, scale {scaler.get_scale():g}",
                flush=True,
            )

    if isinstance(scaler, ampfast.GradScaler):
        print(scaler.stats())
    with torch.no_grad():
        clouds = torch.arange(CLOUDS).repeat(100).to(device)
        made = maker(clouds, torch.randn(len(clouds), NOISE).to(device))
        near = ((made - centres(clouds)).norm(dim=1) < 3 * SPREAD).float().mean().item()
    parameters = [*maker.parameters(), *critic.parameters()]
    checksum = sum(parameter.double().sum().item() for parameter in parameters)
    print(f"{near:.1%} of the points in their clouds, sum of all parameters {checksum!r}")


if __name__ == "__main__":
    main()
