"""Random lives of a scaler with a policy, bit for bit against the rules in plain Python."""

from __future__ import annotations

import copy
import math
import pickle
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.scale_model import Factors, ScaleModel, float32
from torch import nn

import ampfast
from ampfast import LogMax, policies
from ampfast.backends import core
from ampfast.backends.core import SPIKE, Update
from ampfast.loss_scale import Limits

SIZE = 10
EVENTS = {"step": 12, "overflow": 3, "spike": 2, "unknown": 2, "set": 1, "factors": 1, "save": 1}
LIMITS: list[tuple[float | None, float | None]] = [
    *((None, None), (0.3, None), (None, 1e5 / 3), (2.0**-9, 700.0), (1e-40, 2.0**90)),
]
KEPT = (
    *("steps", "skipped", "growths", "backoffs", "consecutive_skips"),
    *("spikes",),
)


class Life:
    """A scaler, its model, and what happens to both.

    Attributes:
        trace: Everything observable, as text, after each event.
    """

    def __init__(self, seed: int, backend: str = "cpu") -> None:
        self.chance = chance = random.Random(f"LogMax {seed}")
        least, most = chance.choice(LIMITS)
        policy = LogMax(chance.choice([0.0, 0.5, 2.0, 3.09]), chance.choice([0, 1, 2.5]))
        refill = chance.choice(["growth", "finite_step"])
        self.settings: dict[str, Any] = {
            "min_scale": least,
            "max_scale": most,
            "policy": policy,
            "hysteresis_refill": refill,
            "backend": backend,
        }
        scale = float32(chance.choice([0.5, 3.0, 8.0, 100.0 / 3]))
        growth, backoff = chance.choice([(2.0, 0.5), (1.9, 0.3), (1.001, 0.99), (4.0, 0.125)])
        self.model = ScaleModel(
            *(scale, 0, Factors(growth, backoff, chance.choice([0, 1, 2, 5]))),
            Limits(least, most, 1, refill, policy),
        )
        self.scaler = self.made()
        self.param = nn.Parameter(torch.zeros(SIZE))
        self.optimizer = torch.optim.SGD([self.param], lr=0.0)
        self.level = 0.0
        self.trace: list[str] = []

    def made(self) -> Any:
        model = self.model
        return ampfast.GradScaler("cpu", model.scale, *model.factors, **self.settings)

    def backward(self, peak: float) -> float:
        """Sets gradients, and returns what the policy sees of them."""
        self.scaler.scale(torch.zeros(()))
        scale = torch.tensor(self.model.scale)
        scaled = torch.tensor(peak) * scale
        self.param.grad = torch.full((SIZE,), scaled.item() / 4)
        self.param.grad[3] = -scaled
        return (scaled * scale.double().reciprocal().float()).abs().item()

    def happen(self, event: str) -> None:
        """One event of `EVENTS`, to both; then both are compared."""
        chance, model = self.chance, self.model
        self.level += chance.gauss(0.0, 1.0)
        usual = 2.0 ** (self.level / 3)
        peak = chance.choice([usual] * 12 + [0.0, 2.0**-140, 2.0**60])
        if event == "overflow":
            peak = chance.choice([math.inf, math.nan])
        if event == "factors":
            model.factors = Factors(
                *chance.choice([(2.0, 0.5), (3.3, 0.7)]), chance.choice([0, 1, 3])
            )
            growth, backoff, interval = model.factors
            self.scaler.set_growth_factor(growth)
            self.scaler.set_backoff_factor(backoff)
            self.scaler.set_growth_interval(interval)
        elif event == "save":
            self.saved()
        else:
            self.iterate(event, peak)
        self.compare()

    def iterate(self, event: str, peak: float) -> None:
        model, scaler = self.model, self.scaler
        seen = self.backward(peak)
        if event == "unknown":
            scaler._unscale_grads_ = lambda optimizer, inv_scale, found_inf, allow: {
                inv_scale.device: found_inf
            }
            seen = 0.0
        norm, flag = None, 0.0
        if event == "spike" or (event == "step" and self.chance.random() < 0.2):
            limit = 0.0 if event == "spike" else math.inf
            norm = scaler.clip_grad_norm_(self.optimizer, math.inf, skip_above=limit).item()
            flag = SPIKE if norm > limit else 0.0
        scaler.step(self.optimizer)
        if event != "unknown" and not self.param.grad.isfinite().all():
            flag = 1.0
        if event == "set":
            new = float32(self.chance.choice([1.0, 6.0, 1e-3, 1e6 / 3]))
            scaler.update(new)
            self.set_scale(flag, norm, new)
        else:
            scaler.update()
            model.update(flag, norm, seen)
        scaler.__dict__.pop("_unscale_grads_", None)

    def set_scale(self, flag: float, norm: float | None, new: float) -> None:
        model = self.model
        factors, limits, tracker = model.factors, model.limits, model.tracker
        model.factors, model.limits = Factors(1.0, 1.0, 0), replace(limits, policy=None)
        model.update(flag, norm)
        model.factors, model.limits, model.tracker = factors, limits, tracker
        model.scale, model.skips_at_minimum = new, 0

    def saved(self) -> None:
        model, scaler = self.model, self.scaler
        way = self.chance.choice(["checkpoint", "into one in use", "pickle", "deepcopy"])
        if way == "pickle":
            self.scaler = pickle.loads(pickle.dumps(scaler))
        elif way == "deepcopy":
            self.scaler = copy.deepcopy(scaler)
        elif self.limited():
            state = pickle.loads(pickle.dumps(scaler.state_dict()))
            if way == "checkpoint":
                self.scaler = self.made()
                self.model = ScaleModel(model.scale, model.tracker, model.factors, model.limits)
                self.model.tolerated, self.model.prediction = model.tolerated, model.prediction
            self.scaler.load_state_dict(state)

    def limited(self) -> bool:
        """Whether the scale is within its limits, as that of a loadable checkpoint."""
        policy, scale = self.model.limits, self.model.scale
        return (policy.min_scale or 0.0) <= scale <= (policy.max_scale or math.inf)

    def compare(self) -> None:
        model, scaler = self.model, self.scaler
        stats, state, history = scaler.stats(), scaler.state_dict(), scaler.history()
        assert (scaler.get_scale(), stats.growth_tracker) == (model.scale, model.tracker)
        assert [getattr(stats, name) for name in KEPT] == [getattr(model, name) for name in KEPT]
        entry = state["ampfast"]
        assert entry["hysteresis_tracker"] == model.limits.hysteresis - model.tolerated
        assert repr(entry["averages"]) == repr(model.prediction.averages())
        rows = zip(history.scale.tolist(), history.predicted.tolist(), strict=True)
        known = [(scale, predicted) for scale, _, _, predicted in model.history]
        assert repr(list(rows)) == repr(known)
        self.trace.append(repr((state, stats, history.predicted.tolist()[-2:])))

    def live(self, events: int) -> Life:
        names, weights = list(EVENTS), list(EVENTS.values())
        for event in self.chance.choices(names, weights, k=events):
            self.happen(event)
        return self


@pytest.mark.parametrize("backend", ["cpu", "aten"])
def test_random_lives(backend: str) -> None:
    moved = 0
    for seed in range(12):
        life = Life(seed, backend).live(60)
        moved += life.model.growths + life.model.backoffs
    assert moved > 50


# As beside a scale on a GPU, where the host reads nothing.


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "_host_reads", lambda device: False)


@pytest.mark.usefixtures("on_device")
def test_random_lives_in_torchs_ops() -> None:
    for seed in range(12):
        life = Life(seed).live(60)
        assert isinstance(life.scaler._loss_scale.follower._state, torch.Tensor)


def test_nothing_is_read() -> None:
    follower = policies.Follower(LogMax())
    with torch.device("meta"):  # whose tensors have no values
        scale, tracker = torch.zeros(()), torch.zeros((), dtype=torch.int32)
        follower.bind(torch.zeros(core.state_layout.STATE_WORDS, dtype=torch.int64))
        follower.observed += [torch.zeros((), dtype=torch.float64)] * 2
        follower.before_update(Update(scale, tracker, [torch.zeros(())] * 2, 1.9, 0.3, 5))
        follower.after_update()
        follower.after_update()


@pytest.mark.usefixtures("on_device")
def test_a_graph_finds_the_state_where_it_was() -> None:
    """Replays read and write the memory of the capture."""
    life = Life(0).live(20)
    follower = life.scaler._loss_scale.follower
    tensors, propose = (follower._state, follower._fractions), follower._propose
    places = [each.data_ptr() for each in tensors]
    life.happen("step")
    life.happen("set")
    life.scaler.load_state_dict(life.made().state_dict())
    assert follower._propose is propose
    assert all(
        each is now
        for each, now in zip(tensors, (follower._state, follower._fractions), strict=True)
    )
    assert [each.data_ptr() for each in tensors] == places
