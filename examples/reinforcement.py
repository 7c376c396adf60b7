"""Teaches a policy to balance CartPole's pole by REINFORCE, in float16 mixed precision.

Needs gymnasium: pip install gymnasium. The last line is the same for both scalers:

    python examples/reinforcement.py --scaler torch
    python examples/reinforcement.py --scaler ampfast
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import ampfast

try:
    import gymnasium
except ImportError:
    raise SystemExit("this example needs gymnasium: pip install gymnasium") from None

EPISODES = 8
DISCOUNT = 0.99


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scaler", choices=("torch", "ampfast"), default="ampfast")
    parser.add_argument("--updates", type=int, default=60, help="eight episodes each")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)

    device = torch.device(options.device)
    torch.manual_seed(0)
    environment = gymnasium.make("CartPole-v1")
    environment.reset(seed=0)
    policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2)).to(device)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    classes = {"torch": torch.amp.GradScaler, "ampfast": ampfast.GradScaler}
    # Overflows in the first steps, which are skipped.
    scaler = classes[options.scaler](device.type, init_scale=2.0**24, growth_interval=10)

    def choices(observations: torch.Tensor) -> torch.distributions.Categorical:
        """Actions for float32 observations of shape (moments, 4)."""
        with torch.autocast(device.type, dtype=torch.float16):
            logits = policy(observations.to(device))
        return torch.distributions.Categorical(logits=logits.float().cpu())

    for update in range(options.updates):
        seen, done, worth = [], [], []
        for _ in range(EPISODES):
            rewards = []
            observation, _ = environment.reset()
            over = False
            while not over:
                seen.append(torch.from_numpy(observation))
                with torch.no_grad():
                    done.append(choices(seen[-1][None]).sample())
                observation, reward, fell, timed_out, _ = environment.step(done[-1].item())
                rewards.append(reward)
                over = fell or timed_out
            discounted = 0.0
            for place, reward in reversed(list(enumerate(rewards))):
                discounted = rewards[place] = reward + DISCOUNT * discounted
            worth += rewards

        advantage = torch.tensor(worth)
        advantage = (advantage - advantage.mean()) / advantage.std()
        optimizer.zero_grad()
        loss = -(choices(torch.stack(seen)).log_prob(torch.cat(done)) * advantage).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        length = len(worth) / EPISODES
        if update % 5 == 0:
            print(f"update {update}: {length:.1f} steps, scale {scaler.get_scale():g}", flush=True)

    if isinstance(scaler, ampfast.GradScaler):
        print(scaler.stats())
    checksum = sum(parameter.double().sum().item() for parameter in policy.parameters())
    print(f"an episode takes {length:.1f} steps, sum of all parameters {checksum!r}")


if __name__ == "__main__":
    main()
