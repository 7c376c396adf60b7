"""Recipes of docs/ against torch's scaler and torch's clipping: norms, parameters, counters."""

from __future__ import annotations

import re
from collections.abc import Callable
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
CLOSE = {False: {"rtol": 1e-5, "atol": 1e-6}, True: {"rtol": 5e-3, "atol": 5e-4}}

NORMS = {
    "Several losses of one model": ["optimizer"],
    "Gradient accumulation": ["optimizer"],
    "Gradient penalty": ["optimizer"],
    "A GAN": ["for_critic", "for_maker"],
}


class Reference(TorchScaler):
    """torch's scaler and clipping, with counters on the host."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.counts = dict.fromkeys(
            ("steps", "skipped", "growths", "backoffs", "consecutive_skips"), 0
        )

    def clip_grad_norm_(self, optimizer: Any, max_norm: float) -> torch.Tensor:
        self.unscale_(optimizer)
        params = [p for group in optimizer.param_groups for p in group["params"]]
        return torch.nn.utils.clip_grad_norm_(params, max_norm)

    def update(self, new_scale: Any = None) -> None:
        if not self.is_enabled():
            return
        records = self._per_optimizer_states.values()
        flags = [flag for r in records for flag in r["found_inf_per_device"].values()]
        skipped = any(flag.item() for flag in flags)
        before = self.get_scale()
        super().update(new_scale)
        counts = self.counts
        counts["steps"] += 1
        counts["skipped"] += skipped
        counts["growths"] += self.get_scale() > before
        counts["backoffs"] += self.get_scale() < before
        counts["consecutive_skips"] = counts["consecutive_skips"] + 1 if skipped else 0


class Run:
    """A run of a recipe with one of the scalers."""

    def __init__(
        self, recipe: str, make: Callable[..., Any], bad: set[int], autocast: bool, **arguments: Any
    ) -> None:
        self.norms: list[tuple[str, torch.Tensor]] = []
        self.scales: list[float] = []
        self.bad, self.calls = bad, 0
        self.arguments = arguments
        source = RECIPES[recipe]
        source = source.replace("from ampfast import GradScaler\n", "")
        source = source.replace("for _ in range(3):", f"for _ in range({ITERATIONS}):")
        if not autocast:
            source = source.replace("dtype=torch.float16", "enabled=False")
        self.names: dict[str, Any] = {"GradScaler": lambda device: self.watched(make, device)}
        torch.manual_seed(5)
        exec(source, self.names)

    def watched(self, make: Callable[..., Any], device: str) -> Any:
        """Scaler that records norms and scales, and makes some losses infinite."""
        scaler = make(device, **self.arguments)
        scale, clip, update = scaler.scale, scaler.clip_grad_norm_, scaler.update

        def planting(loss: torch.Tensor) -> Any:
            is_bad = self.calls in self.bad
            self.calls += 1
            return scale(loss * torch.inf) if is_bad else scale(loss)

        def telling(optimizer: Any, max_norm: float) -> torch.Tensor:
            norm = clip(optimizer, max_norm=max_norm)
            name = next(n for n, value in self.names.items() if value is optimizer)
            self.norms.append((name, norm.clone()))
            return norm

        def ending() -> None:
            update()
            self.scales.append(scaler.get_scale())

        scaler.scale, scaler.clip_grad_norm_ = planting, telling
        if not isinstance(scaler, GradScaler):
            scaler.update = ending  # an instance attribute would count as a hook of ours
        self.scaler = scaler
        return scaler

    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {n: v for n, v in self.names.items() if isinstance(v, torch.optim.Optimizer)}


def assert_trained_alike(recipe: str, ours: Run, theirs: Run, close: dict[str, float]) -> None:
    def same(a: Any, b: Any) -> None:
        torch.testing.assert_close(a, b, **close, equal_nan=True)

    assert [name for name, _ in ours.norms] == NORMS[recipe] * ITERATIONS
    assert [name for name, _ in ours.norms] == [name for name, _ in theirs.norms]
    for (_, our_norm), (_, their_norm) in zip(ours.norms, theirs.norms, strict=True):
        assert our_norm.shape == () and bool(our_norm.isfinite()) == bool(their_norm.isfinite())
        if our_norm.isfinite():
            same(our_norm, their_norm)
    for name, optimizer in ours.optimizers().items():
        other = theirs.optimizers()[name]
        same(
            [p.detach() for group in optimizer.param_groups for p in group["params"]],
            [p.detach() for group in other.param_groups for p in group["params"]],
        )
        ours_left, theirs_left = list(optimizer.state.values()), list(other.state.values())
        same([dict(state) for state in ours_left], [dict(state) for state in theirs_left])


def assert_alike(recipe: str, ours: Run, theirs: Run, close: dict[str, float]) -> None:
    assert_trained_alike(recipe, ours, theirs, close)
    stats = ours.scaler.stats()
    assert {name: getattr(stats, name) for name in theirs.scaler.counts} == theirs.scaler.counts
    assert stats.steps == ITERATIONS
    assert stats.scale == theirs.scaler.get_scale()
    assert stats.growth_tracker == theirs.scaler._growth_tracker.item()
    history = ours.scaler.history()
    assert [*history.scale[1:].tolist(), stats.scale] == theirs.scales
    assert int(history.skipped.sum()) == stats.skipped
    # With several norms in an iteration, the norm of all gradients together.
    together = torch.tensor([norm for _, norm in ours.norms]).view(ITERATIONS, -1)
    expected = torch.linalg.vector_norm(together, dim=1)
    finite = expected.isfinite()
    torch.testing.assert_close(history.grad_norm[finite], expected[finite], rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("recipe", "which"), [(recipe, i) for recipe, calls in SCALED.items() for i in range(calls)]
)
def test_a_recipe_with_planted_overflows(recipe: str, which: int) -> None:
    """Overflows in each loss of an iteration in turn, also in the last one alone."""
    calls = SCALED[recipe]
    bad = {calls * iteration + which for iteration in (1, 4, 5)}
    arguments = {"init_scale": 1024.0, "growth_interval": 2}
    ours = Run(recipe, GradScaler, bad, autocast=False, **arguments)
    theirs = Run(recipe, Reference, bad, autocast=False, **arguments)
    assert_alike(recipe, ours, theirs, CLOSE[False])
    assert ours.scaler.stats().skipped == 3
    assert ours.calls == calls * ITERATIONS


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("recipe", SCALED)
def test_a_recipe_trains_as_without_scaling(recipe: str, enabled: bool) -> None:
    """Norms and penalties are those of the unscaled loss, at any scale."""
    ours = Run(recipe, GradScaler, set(), autocast=False, init_scale=512.0, enabled=enabled)
    theirs = Run(recipe, Reference, set(), autocast=False, enabled=False)
    assert_trained_alike(recipe, ours, theirs, CLOSE[False])


@pytest.mark.parametrize("recipe", SCALED)
def test_a_recipe_under_autocast(recipe: str) -> None:
    arguments = {"init_scale": 2.0**20, "growth_interval": 2}
    ours = Run(recipe, GradScaler, set(), autocast=True, **arguments)
    theirs = Run(recipe, Reference, set(), autocast=True, **arguments)
    assert_alike(recipe, ours, theirs, CLOSE[True])
    stats = ours.scaler.stats()
    assert 0 < stats.skipped < ITERATIONS, "the start scale was meant to overflow for a while"
