"""Recipes of docs/ against torch's scaler and torch's clipping: norms, parameters, counters."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.one_step import host_reads
from support.scalers import TorchScaler
from torch.optim.swa_utils import AveragedModel

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


class Sam:
    """A run of the recipe of SAM in float32, with infinities planted in one gradient of a pass.

    Attributes:
        before: Parameters and their momentum at each `scale`, twice an iteration.
        ends: The same after each `step`, and the scale that it had.
    """

    def __init__(self, bad: set[int]) -> None:
        source = RECIPES["Two passes a step, as SAM and L-BFGS"]
        source = source.replace("from ampfast import GradScaler\n", "")
        source = source.replace("range(3)", f"range({ITERATIONS})")
        source = source.replace("dtype=torch.float16", "enabled=False")
        self.bad, self.passes = bad, 0
        self.before: list[list[torch.Tensor]] = []
        self.ends: list[tuple[list[torch.Tensor], float]] = []
        self.names: dict[str, Any] = {"GradScaler": self.watched}
        torch.manual_seed(5)
        exec(source, self.names)

    def state(self) -> list[torch.Tensor]:
        momenta = [state["momentum_buffer"] for state in self.names["optimizer"].state.values()]
        return [value.detach().clone() for value in (*self.names["params"], *momenta)]

    def watched(self, device: str) -> GradScaler:
        arguments = {"init_scale": 1024.0, "growth_interval": 2, "track": "overflow"}
        self.scaler = scaler = GradScaler(device, **arguments)
        scale, step = scaler.scale, scaler.step

        def planting(loss: torch.Tensor) -> Any:
            is_bad = self.passes in self.bad
            self.passes += 1
            self.before.append(self.state())
            if is_bad:
                bias = self.names["model"][0].bias
                handle = bias.register_hook(lambda grad: one_infinity(grad, handle))
            return scale(loss)

        def stepping(optimizer: torch.optim.Optimizer) -> None:
            step(optimizer)
            self.ends.append((self.state(), scaler.get_scale()))

        scaler.scale, scaler.step = planting, stepping
        return scaler


def one_infinity(grad: torch.Tensor, handle: Any) -> torch.Tensor:
    handle.remove()
    grad = grad.clone()
    grad[3] = torch.inf
    return grad


def sam_by_hand(skipped: set[int]) -> list[list[torch.Tensor]]:
    """Parameters after each iteration of float32 training without a scaler."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10))
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    ends = []
    for iteration in range(ITERATIONS):
        data, target = torch.randn(32, 64), torch.randint(10, (32,))
        if iteration not in skipped:
            loss = torch.nn.functional.cross_entropy(model(data), target)
            grads = torch.autograd.grad(loss, params)
            length = torch.sqrt(sum(grad.square().sum() for grad in grads))
            moved = {
                name: param + 0.05 * grad / length
                for (name, param), grad in zip(model.named_parameters(), grads, strict=True)
            }
            loss = torch.nn.functional.cross_entropy(
                torch.func.functional_call(model, moved, data), target
            )
            grads = torch.autograd.grad(loss, list(moved.values()))
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
            torch.nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()
        ends.append([param.detach().clone() for param in params])
    return ends


@pytest.mark.parametrize("which", [(), (0,), (1,), (0, 1)], ids=["", "first", "second", "both"])
def test_both_passes_of_sam_are_one_step(which: tuple[int, ...]) -> None:
    skipped = {1, 4, 5} if which else set()
    run = Sam({2 * iteration + number for iteration in skipped for number in which})
    expected, scale, finite_steps = sam_by_hand(skipped), 1024.0, 0
    for iteration, (state, used) in enumerate(run.ends):
        start, moved = run.before[2 * iteration : 2 * iteration + 2]
        distance = torch.cat([(a - b).flatten() for a, b in zip(moved, start, strict=True)]).norm()
        if iteration not in skipped or 0 not in which:
            torch.testing.assert_close(distance, torch.tensor(0.05), rtol=1e-4, atol=0)
        else:
            assert distance == 0
        if iteration in skipped:
            torch.testing.assert_close(state, start, rtol=0, atol=0)
        torch.testing.assert_close(state[:4], expected[iteration], **CLOSE[False])
        assert used == scale
        finite_steps = 0 if iteration in skipped else finite_steps + 1
        scale *= 0.5 if iteration in skipped else 1.0
        if finite_steps == 2:
            scale, finite_steps = 2 * scale, 0
    stats = run.scaler.stats()
    assert (stats.steps, stats.skipped, stats.scale) == (ITERATIONS, len(skipped), scale)
    listed = len(run.scaler.overflow_report().parameters)
    assert listed == (4 if 0 in which else len(which))


def clamps_by_hand() -> list[torch.Tensor]:
    """Parameters and master weights of the recipe with clamps, and one step of gradients of 0."""
    torch.manual_seed(5)
    params = list(torch.nn.Linear(64, 1).to(torch.float16).parameters())
    masters = [param.detach().float().requires_grad_() for param in params]
    optimizer = torch.optim.RMSprop(masters, lr=5e-3)
    scale = 2.0**16
    for _ in range(ITERATIONS):
        real, made = torch.randn(2, 32, 64, dtype=torch.float16)
        output = [torch.nn.functional.linear(data, *params).float().mean() for data in (made, real)]
        grads = torch.autograd.grad((output[0] - output[1]) * scale, params)
        is_finite = all(grad.isfinite().all() for grad in grads)
        for master, grad in zip(masters, grads, strict=True):
            master.grad = grad.float() / scale
        if is_finite:
            optimizer.step()
        else:
            scale /= 2
        with torch.no_grad():
            for param, master in zip(params, masters, strict=True):
                param.copy_(master)
                clamped = param.clamp(-0.01, 0.01)
                master.copy_(torch.where(clamped == param, master, clamped.float()))
                param.copy_(clamped)
    for master in masters:
        master.grad.zero_()
    optimizer.step()
    return [value.detach() for value in (*(each.half() for each in masters), *masters)]


@pytest.mark.parametrize("way", ["no_grad", "data"])
def test_a_clamp_reaches_master_weights_unless_through_data(way: str) -> None:
    source = RECIPES["Weight clamps, as in WGAN"].replace("range(3)", f"range({ITERATIONS})")
    if way == "data":
        source = source.replace("param.clamp_", "param.data.clamp_")
    names: dict[str, Any] = {}
    torch.manual_seed(5)
    exec(source, names)
    params, masters = zip(*names["optimizer"].master_weights.items(), strict=True)
    largest = torch.tensor(0.01, dtype=torch.float16)
    assert all(param.abs().max() <= largest for param in params)
    for param in params:
        param.grad.zero_()
    names["optimizer"].step()
    after = [value.detach() for value in (*params, *masters)]
    # Half of the last bit that float16 has there.
    is_clamped = all(value.abs().max() <= largest.float() + 2.0**-18 for value in after)
    if way == "data":
        assert not is_clamped
        assert max(value.abs().max() for value in after) > 0.05
        return
    assert is_clamped
    assert names["scaler"].stats().steps == ITERATIONS > names["scaler"].stats().skipped
    torch.testing.assert_close(after, clamps_by_hand(), rtol=0, atol=0)


class Layers:
    """A run of the recipe of frozen layers, with changes of its text.

    Attributes:
        moved: Names of the layers that moved, by iteration.
    """

    def __init__(self, fused: bool, changes: dict[str, str]) -> None:
        source = RECIPES["Freezing and thawing layers"]
        source = source.replace("from ampfast import GradScaler\n", "")
        changes = {f"lr={lr})": f"lr={lr}, fused={fused})" for lr in ("1e-2", "0.1")} | changes
        for old, new in changes.items():
            assert source.count(old) == 1
            source = source.replace(old, new)
        self.seen: list[list[list[torch.Tensor]]] = []
        self.names: dict[str, Any] = {"GradScaler": self.watched}
        torch.manual_seed(5)
        exec(source, self.names)
        self.see()
        self.moved = [
            {
                name
                for name, old, new in zip(("body", "head", "probe"), before, after, strict=True)
                if not all(map(torch.equal, old, new))
            }
            for before, after in pairwise(self.seen)
        ]

    def see(self) -> None:
        layers = (self.names[name] for name in ("body", "head", "probe"))
        self.seen.append([[p.detach().clone() for p in layer.parameters()] for layer in layers])

    def watched(self, device: str) -> GradScaler:
        scaler = self.scaler = GradScaler(device)
        scale = scaler.scale

        def seeing(loss: torch.Tensor) -> Any:
            self.see()
            return scale(loss)

        scaler.scale = seeing
        return scaler


AS_WRITTEN = [
    {"head", "probe"},
    {"head"},
    {"body", "head", "probe"},
    {"body", "head"},
    {"body", "probe"},
    {"body"},
]
ZERO_GRAD = "    optimizer.zero_grad()  # also the last gradients of the frozen head\n"
KEEPS_OLD = "    body.zero_grad(), [each.zero_grad() for each in [head][step >= 4 :]]\n"


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("case", ["as written", "old gradient", "zeros", "infinity"])
def test_what_moves_of_frozen_layers(case: str, fused: bool) -> None:
    freezing = "        head.requires_grad_(False)\n"
    changes = {
        "as written": {},
        "old gradient": {ZERO_GRAD: KEEPS_OLD},
        "zeros": {ZERO_GRAD: "    optimizer.zero_grad(set_to_none=False)\n"},
        "infinity": {
            ZERO_GRAD: KEEPS_OLD,
            freezing: f"{freezing}        head.weight.grad[0, 0] = torch.inf\n",
        },
    }[case]
    run = Layers(fused, changes)
    expected = [set(moved) for moved in AS_WRITTEN]
    for moved in expected[4:]:
        if case == "infinity":
            moved -= {"body"}
        elif case != "as written":
            moved |= {"head"}
    assert run.moved == expected
    stats = run.scaler.stats()
    assert (stats.steps, stats.skipped) == (6, 2 if case == "infinity" else 0)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_an_optimizer_without_gradients(fused: bool) -> None:
    always = {"    if probe.weight.grad is not None:": "    if True:"}
    if fused:
        assert Layers(fused, always).moved == AS_WRITTEN
    else:
        with pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer"):
            Layers(fused, always)
    with pytest.raises(AssertionError, match=r"No inf checks were recorded (for this|prior to)"):
        Layers(fused, {"    scaler.scale(loss).backward()": "    scaler.scale(loss)"})


@pytest.mark.parametrize(("when", "expected"), [("before", 1.0), ("after", 1024.0)])
def test_gradients_of_a_group_added_around_unscale(when: str, expected: float) -> None:
    layers = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(layers[0].parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=1024.0)
    scaler.scale(sum(layer(torch.ones(1, 4)).sum() for layer in layers)).backward()
    calls = [
        lambda: optimizer.add_param_group({"params": layers[1].parameters()}),
        lambda: scaler.unscale_(optimizer),
    ]
    for call in calls if when == "before" else calls[::-1]:
        call()
    assert [layer.bias.grad.item() for layer in layers] == [1.0, expected]


class Average:
    """A run of a recipe of a moving average, with infinite losses.

    Attributes:
        ends: Parameters and their averages after each iteration, and at first those at the start.
    """

    def __init__(self, source: str, skipped: set[int]) -> None:
        source = source.replace("from ampfast import GradScaler\n", "")
        source = source.replace("range(3)", f"range({ITERATIONS})")
        self.skipped, self.calls = skipped, 0
        self.ends: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        self.names: dict[str, Any] = {"GradScaler": self.watched}
        torch.manual_seed(5)
        exec(source, self.names)
        self.see()

    def see(self) -> None:
        both = self.names["model"], self.names["average"]
        self.ends.append(tuple([p.detach().clone() for p in each.parameters()] for each in both))

    def watched(self, device: str) -> GradScaler:
        scaler = self.scaler = GradScaler(device, init_scale=1024.0)
        scale = scaler.scale

        def planting(loss: torch.Tensor) -> Any:
            self.see()
            is_bad = self.calls in self.skipped
            self.calls += 1
            return scale(loss * torch.inf if is_bad else loss)

        scaler.scale = planting
        return scaler


AVERAGES = dict(
    zip(
        ("plain", "fused"),
        re.findall(
            r"^```python\n(.*?)^```",
            PAGE.split("### A moving average of the weights\n")[1].split("\n## ")[0],
            re.MULTILINE | re.DOTALL,
        ),
        strict=True,
    )
)


@pytest.mark.parametrize("skipped", [set(), {0}, {2, 3, 6}], ids=["none", "first", "some"])
@pytest.mark.parametrize("kind", AVERAGES)
def test_an_average_of_the_steps_that_were_taken(kind: str, skipped: set[int]) -> None:
    run = Average(AVERAGES[kind], skipped)
    assert run.scaler.stats().skipped == len(skipped)
    expected: list[torch.Tensor] | None = None if kind == "plain" else run.ends[0][1]
    for iteration, (before, (params, means)) in enumerate(pairwise(run.ends)):
        if iteration in skipped:
            torch.testing.assert_close((params, means), before, rtol=0, atol=0)
        elif expected is None:  # AveragedModel starts from the first weights that it gets
            expected = params
        else:
            expected = [0.99 * mean + 0.01 * p for mean, p in zip(expected, params, strict=True)]
        if expected is not None:
            torch.testing.assert_close(means, expected, rtol=1e-6, atol=1e-7)
    assert (kind == "plain") == isinstance(run.names["average"], AveragedModel)


@pytest.mark.parametrize("recipe", ["average", "SAM"])
def test_a_fused_loop_reads_nothing(recipe: str) -> None:
    source, line = AVERAGES["fused"], "mean.lerp_(param, weight)"
    reading, reads = "mean.lerp_(param, weight.item())", 6
    if recipe == "SAM":
        source, line = RECIPES["Two passes a step, as SAM and L-BFGS"], "norm.isfinite(), 1.0"
        source = source.replace("momentum=0.9", "fused=True").replace("optim.SGD", "optim.AdamW")
        reading, reads = "norm.isfinite(), norm.isfinite().item()", 3
    assert "fused=True" in source
    exec(source, {})  # the first fused step of a process is tried
    assert host_reads(lambda: exec(source, {})) == 0
    assert host_reads(lambda: exec(source.replace(line, reading), {})) == reads


class Policy:
    """A run of the recipe of reinforcement learning, with changes of its text.

    Attributes:
        ratios: The ratios of each backward, two for each step.
        weights: The first weight of the policy before each backward, and at the end.
    """

    def __init__(self, changes: dict[str, str], bad: int | None = None) -> None:
        source = RECIPES["Reinforcement learning"].replace("from ampfast import GradScaler\n", "")
        for old, new in changes.items():
            assert source.count(old) == 1
            source = source.replace(old, new)
        self.bad = bad
        self.ratios: list[torch.Tensor] = []
        self.weights: list[torch.Tensor] = []
        self.names: dict[str, Any] = {"GradScaler": self.watched}
        torch.manual_seed(5)
        exec(source, self.names)
        self.see()

    def see(self) -> None:
        self.weights.append(self.names["policy"][0].weight.detach().clone())

    def watched(self, device: str) -> GradScaler:
        scaler = self.scaler = GradScaler(device, init_scale=1024.0)
        scale = scaler.scale

        def planting(loss: torch.Tensor) -> Any:
            is_bad = len(self.ratios) == self.bad
            self.see()
            self.ratios.append(self.names["ratio"].detach())
            return scale(loss * torch.inf if is_bad else loss)

        scaler.scale = planting
        return scaler


OLD = "        old = log_probs(states, actions)\n"
LIMIT = "change.clamp(-20, 20)"


def test_the_first_ratios_of_a_rollout() -> None:
    def share_of_ones(changes: dict[str, str]) -> float:
        # Kernels may round a part of a batch differently, and this changes few float16 values.
        ratios = torch.cat(Policy(changes).ratios[::8])
        return (ratios == 1).float().mean().item()

    assert share_of_ones({}) > 0.75
    float32 = "policy(states).log_softmax(-1).gather(1, actions[:, None])[:, 0]"
    assert share_of_ones({OLD: f"        old = {float32}\n"}) < 0.5


def test_an_infinite_ratio_is_no_matter_of_the_scale() -> None:
    unlikely = {OLD: f"{OLD}        old -= 100\n"}
    stats = Policy(unlikely).scaler.stats()
    assert (stats.steps, stats.skipped, stats.scale) == (12, 0, 1024.0)
    stats = Policy({**unlikely, LIMIT: "change"}).scaler.stats()
    assert (stats.steps, stats.skipped, stats.scale) == (12, 12, 1024.0 / 2**12)


@pytest.mark.parametrize("bad", [6, 7])
def test_an_overflow_skips_one_minibatch(bad: int) -> None:
    run = Policy({}, bad)
    assert (run.scaler.stats().steps, run.scaler.stats().skipped) == (12, 1)
    ends = run.weights[::2]
    moved = [not torch.equal(before, after) for before, after in pairwise(ends)]
    assert moved == [step != 3 for step in range(12)]
