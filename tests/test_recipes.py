"""Whole training recipes, bit for bit as with torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.optimizers import OPTIMIZERS
from support.outcomes import agree
from support.scalers import Scaler
from support.twins import side, small_model

OptState = torch.amp.grad_scaler.OptState
INF = float("inf")


def inputs(seed: int) -> torch.Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(seed))


def state_of(*things: Any) -> list[Any]:
    """Values of modules, optimizers and scalers."""
    return [thing.state_dict() for thing in things]


# Recipes of torch's documentation


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_clipping(optimizer: str) -> None:
    def use(scaler_type: Scaler) -> Any:
        one = side(scaler_type, optimizer, init_scale=512.0, growth_interval=2)
        norms = []
        for seed in range(5):
            one.optimizer.zero_grad()
            one.scaler.scale(one.loss(seed)).backward()
            if seed == 2:
                one.model[0].bias.grad[1] = INF
            one.scaler.unscale_(one.optimizer)
            norms.append(torch.nn.utils.clip_grad_norm_(one.model.parameters(), 0.01))
            one.scaler.step(one.optimizer)
            one.scaler.update()
        return [norms, one.observe()]

    agree(use)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "fused_adam"])
def test_accumulation(optimizer: str) -> None:
    def use(scaler_type: Scaler) -> Any:
        one = side(scaler_type, optimizer, init_scale=512.0, growth_interval=2)
        for seed in range(12):
            one.scaler.scale(one.loss(seed) / 3).backward()
            if seed == 4:
                one.model[0].bias.grad[1] = INF
            if seed % 3 == 2:
                one.scaler.step(one.optimizer)
                one.scaler.update()
                one.optimizer.zero_grad()
        return one.observe()

    agree(use)


def test_gradient_penalty() -> None:
    def use(scaler_type: Scaler) -> Any:
        one = side(scaler_type, "adam", init_scale=512.0, growth_interval=2)
        for seed in range(4):
            one.optimizer.zero_grad()
            loss = one.loss(seed)
            parameters = list(one.model.parameters())
            scaled = torch.autograd.grad(one.scaler.scale(loss), parameters, create_graph=True)
            inverse = 1.0 / one.scaler.get_scale()
            norm = sum((g * inverse).square().sum() for g in scaled).sqrt()
            one.scaler.scale(loss + norm).backward()
            one.scaler.unscale_(one.optimizer)
            one.scaler.step(one.optimizer)
            one.scaler.update()
        return one.observe()

    agree(use)


@pytest.mark.parametrize("bad", [None, 0, 1])
def test_two_models_two_losses(bad: int | None) -> None:
    def use(scaler_type: Scaler) -> Any:
        models = [small_model(0), small_model(1)]
        optimizers = [
            OPTIMIZERS[name](list(m.parameters()))
            for name, m in zip(("sgd", "adam"), models, strict=True)
        ]
        scaler = scaler_type("cpu", init_scale=512.0, growth_interval=2)
        for seed in range(5):
            for optimizer in optimizers:
                optimizer.zero_grad()
            outputs = [m(inputs(seed)) for m in models]
            first = (2 * outputs[0] + 3 * outputs[1]).square().mean()
            second = (3 * outputs[0] - 5 * outputs[1]).square().mean()
            scaler.scale(first).backward(retain_graph=True)
            scaler.scale(second).backward()
            if seed == 2 and bad is not None:
                models[bad][0].bias.grad[0] = INF
            scaler.unscale_(optimizers[0])
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
        return state_of(*models, *optimizers, scaler)

    agree(use)


@pytest.mark.parametrize("scalers", [1, 2])
def test_gan(scalers: int) -> None:
    def use(scaler_type: Scaler) -> Any:
        generator, critic = small_model(0), torch.nn.Sequential(small_model(1))
        back = torch.nn.Linear(3, 8)
        with torch.no_grad():
            back.weight.copy_(torch.linspace(-1, 1, 24).view(8, 3))
            back.bias.zero_()
        make = OPTIMIZERS["adam"]
        for_generator = make([*generator.parameters(), *back.parameters()])
        for_critic = make(list(critic.parameters()))
        owned = [scaler_type("cpu", init_scale=256.0, growth_interval=3) for _ in range(scalers)]
        first, second = owned[0], owned[-1]
        for seed in range(6):
            fake = back(generator(inputs(seed)))
            for_critic.zero_grad()
            first.scale((critic(fake.detach()) - critic(inputs(seed + 9))).mean()).backward()
            if seed == 3:
                critic[0][0].bias.grad[0] = float("nan")
            first.step(for_critic)
            if scalers == 2:
                first.update()
            for_generator.zero_grad()
            second.scale(-critic(fake).mean()).backward()
            second.step(for_generator)
            second.update()
        return state_of(generator, critic, back, for_generator, for_critic, *owned)

    agree(use)


def test_autocast_training() -> None:
    def use(scaler_type: Scaler) -> Any:
        one = side(scaler_type, "adam", init_scale=2.0**24, growth_interval=3)
        scales = []
        for seed in range(12):
            one.optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = one.model(inputs(seed)).float().square().mean()
            one.scaler.scale(loss).backward()
            one.scaler.step(one.optimizer)
            one.scaler.update()
            scales.append(one.scaler.get_scale())
        return [scales, one.observe()]

    scales = agree(use).value[0]
    assert scales[0] < 2.0**24, "the start scale was meant to overflow"


# Without assertions

OPTIMIZED = """
import sys, torch
sys.path[:0] = {path!r}
if __debug__:
    raise SystemExit("assertions are on")
from ampfast import GradScaler
from support.comparison import difference
from support.outcomes import outcome
from support.scalers import TorchScaler
from support.twins import side

def use(scaler_type):
    one = side(scaler_type, "adam", init_scale=64.0, growth_interval=2)
    for seed, bad in enumerate([None, float("inf"), None, None, float("nan"), None]):
        one.train(seed, bad)
    results = [outcome(call).comparable() for call in (
        lambda: scaler_type("cpu", growth_factor=1.0),
        lambda: scaler_type("cpu").update(),
        lambda: one.scaler.update(),
        lambda: one.scaler.update(torch.ones(2)),
        lambda: one.scaler.step(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)),
    )]
    return [results, one.observe()]

found = difference(use(GradScaler), use(TorchScaler))
if found is not None:
    raise SystemExit(found)
"""


@pytest.mark.sweep
def test_without_assertions() -> None:
    """`python -O` removes `assert`, but no error."""
    program = OPTIMIZED.format(path=[str(Path(__file__).parent), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-O", "-c", program], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
