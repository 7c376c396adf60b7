"""Recipes of docs/ against torch's scaler and torch's clipping: norms, parameters, scales."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.comparison import TorchScaler

from ampfast import GradScaler

pytestmark = pytest.mark.sweep

PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")
# First code block below a heading, after nothing but prose.
RECIPES = dict(
    re.findall(
        r"^##+ ([^\n]+)\n(?:(?![#`])[^\n]*\n)*```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL
    )
)
# Calls of `scale` per iteration.
SCALED = {
    "Several losses of one model": 2,
    "Gradient accumulation": 4,
    "Gradient penalty": 3,
    "A GAN": 2,
}
ITERATIONS = 8
# The norms differ in their last bits, since torch sums in another order. Where autocast narrows
# parameters, such a bit can move one to the next float16.
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6, "equal_nan": True}
CLOSE_UNDER_AUTOCAST: dict[str, Any] = {"rtol": 5e-3, "atol": 5e-4, "equal_nan": True}


class Torchs(TorchScaler):
    """torch's scaler with torch's clipping."""

    def clip_grad_norm_(self, optimizer: Any, max_norm: float) -> torch.Tensor:
        self.unscale_(optimizer)
        params = [p for group in optimizer.param_groups for p in group["params"]]
        return torch.nn.utils.clip_grad_norm_(params, max_norm)


def trained(
    recipe: str, kind: type[Any], bad: Sequence[int] = (), autocast: bool = False, **arguments: Any
) -> tuple[Any, list[Any]]:
    """Scaler of a run, and its norms, parameters and states; `bad` calls get an infinite loss."""
    scalers: list[Any] = []
    norms: list[torch.Tensor] = []
    calls = itertools.count()

    def make(device: str) -> Any:
        scaler = kind(device, **arguments)
        scale, clip = scaler.scale, scaler.clip_grad_norm_

        def clipped(optimizer: Any, max_norm: float) -> torch.Tensor:
            norms.append(clip(optimizer, max_norm=max_norm).clone())
            return norms[-1]

        scaler.scale = lambda loss: scale(loss * torch.inf if next(calls) in bad else loss)
        scaler.clip_grad_norm_ = clipped
        scalers.append(scaler)
        return scaler

    source = RECIPES[recipe].replace("from ampfast import GradScaler\n", "")
    source = source.replace("for _ in range(3):", f"for _ in range({ITERATIONS}):")
    if not autocast:
        source = source.replace("dtype=torch.float16", "enabled=False")
    names: dict[str, Any] = {"GradScaler": make}
    torch.manual_seed(5)
    exec(source, names)
    assert next(calls) == SCALED[recipe] * ITERATIONS
    optimizers = [each for each in names.values() if isinstance(each, torch.optim.Optimizer)]
    assert len(norms) == len(optimizers) * ITERATIONS
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    params = [param.detach() for group in groups for param in group["params"]]
    states = [dict(state) for optimizer in optimizers for state in optimizer.state.values()]
    [scaler] = scalers
    # Of infinite gradients torch's may be NaN.
    return scaler, [torch.stack(norms).nan_to_num(nan=torch.inf), params, states]


@pytest.mark.parametrize(
    ("recipe", "which"), [(recipe, i) for recipe, calls in SCALED.items() for i in range(calls)]
)
def test_a_recipe_with_planted_overflows(recipe: str, which: int) -> None:
    """Overflows in each loss of an iteration in turn, also in the last one alone."""
    bad = [SCALED[recipe] * iteration + which for iteration in (1, 4, 5)]
    arguments = {"init_scale": 1024.0, "growth_interval": 2}
    ours, mine = trained(recipe, GradScaler, bad, **arguments)
    theirs, expected = trained(recipe, Torchs, bad, **arguments)
    torch.testing.assert_close(mine, expected, **CLOSE)
    assert ours.state_dict() == theirs.state_dict()
    assert (ours.stats().steps, ours.stats().skipped) == (ITERATIONS, 3)


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("recipe", SCALED)
def test_a_recipe_trains_as_without_scaling(recipe: str, enabled: bool) -> None:
    """Norms and penalties are those of the unscaled loss, at any scale."""
    _, mine = trained(recipe, GradScaler, init_scale=512.0, enabled=enabled)
    torch.testing.assert_close(mine, trained(recipe, Torchs, enabled=False)[1], **CLOSE)


@pytest.mark.parametrize("recipe", SCALED)
def test_a_recipe_under_autocast(recipe: str) -> None:
    arguments: Any = {"autocast": True, "init_scale": 2.0**20, "growth_interval": 2}
    ours, mine = trained(recipe, GradScaler, **arguments)
    theirs, expected = trained(recipe, Torchs, **arguments)
    torch.testing.assert_close(mine, expected, **CLOSE_UNDER_AUTOCAST)
    assert ours.state_dict() == theirs.state_dict()
    assert 0 < ours.stats().skipped < ITERATIONS, "the start scale was meant to overflow"
