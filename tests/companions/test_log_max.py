"""A scale that follows the largest gradients, against the rule in plain Python."""

from __future__ import annotations

import copy
import math
import pickle
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.models import Factors, ScaleModel, float32
from torch import nn

from ampfast import GradScaler, LogMax, policies
from ampfast.backends.core import SPIKE
from ampfast.loss_scale import Limits


def plain(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.0)


def fused(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-3, fused=True)


CLIPS: dict[str, dict[str, Any]] = {
    "clipped": {"skip_above": math.inf},
    "clipped by the largest": {"norm_type": math.inf},
    "deferred": {"in_place": False},
    "spike": {"skip_above": 0.0},
}
# How often each happens in a life.
EVENTS = {"step": 3, "together": 2, "unscaled": 2, "clipped": 3, "clipped by the largest": 2}
EVENTS |= {"deferred": 2, "overflow": 3, "spike": 2, "unknown": 2, "set": 1, "factors": 1}
EVENTS |= {"save": 1}
LIMITS: list[tuple[float | None, float | None]] = [
    *((None, None), (0.3, None), (None, 1e5 / 3), (2.0**-9, 700.0), (1e-40, 2.0**90)),
]
KEPT = ("steps", "skipped", "growths", "backoffs", "consecutive_skips", "spikes")


class Loop:
    """Parameters whose largest gradient is given, their scaler, and the model of its scale."""

    def __init__(
        self,
        make: Any = plain,
        limits: Limits | None = None,
        scale: float = 8.0,
        factors: Factors | None = None,
        backend: str = "cpu",
    ) -> None:
        limits = limits or Limits(policy=LogMax(2.0, 1))
        self.model = ScaleModel(scale, 0, factors or Factors(2.0, 0.5, 7), limits)
        self.backend, self.turn = backend, 0
        dtypes = [torch.float32, torch.float64, torch.float32]
        self.params = [nn.Parameter(torch.zeros(5, dtype=dtype)) for dtype in dtypes]
        self.optimizer = make(self.params)
        self.scaler = self.made()

    def made(self, kind: type[GradScaler] = GradScaler) -> Any:
        model, limits = self.model, self.model.limits
        names = ("min_scale", "max_scale", "hysteresis_refill", "policy")
        options = {name: getattr(limits, name) for name in names}
        return kind("cpu", model.scale, *model.factors, backend=self.backend, **options)

    def backward(self, peak: float) -> float:
        """Sets gradients, the largest in one parameter; returns what the policy sees of them."""
        self.scaler.scale(torch.zeros(()))
        scale = torch.tensor(self.scaler.get_scale())
        scaled = torch.tensor(peak) * scale
        for number, param in enumerate(self.params):
            param.grad = torch.full_like(param, scaled.item() / 4)
            if number == self.turn % len(self.params):
                param.grad[3] = -scaled
                wide = scaled.to(param.dtype)
        self.turn += 1
        return (wide * scale.double().reciprocal().float()).abs().item()

    def step(self, peak: float, event: str = "step", new_scale: float = 1.0) -> None:
        """An iteration of both, which are then compared."""
        scaler, optimizer = self.scaler, self.optimizer
        seen, flag = self.backward(peak), 0.0
        if event == "unscaled":
            scaler.unscale_(optimizer)
        elif event == "unknown":
            scaler._unscale_grads_ = lambda optimizer, inv_scale, found_inf, allow: {
                inv_scale.device: found_inf
            }
            seen = 0.0
        elif event in CLIPS and (event != "deferred" or optimizer.param_groups[0].get("fused")):
            norm = scaler.clip_grad_norm_(optimizer, 1.0, **CLIPS[event]).item()
            flag = SPIKE if event == "spike" and norm > 0 else 0.0
        if event != "unknown" and not math.isfinite(seen):
            flag = 1.0
        if event == "together":
            scaler.step_and_update(optimizer)
        else:
            scaler.step(optimizer)
            scaler.update(*[new_scale] * (event == "set"))
        if event == "set":
            self.set_scale(flag, new_scale)
        else:
            self.model.update(flag, None, seen)
        scaler.__dict__.pop("_unscale_grads_", None)
        self.compare()

    def set_scale(self, flag: float, new: float) -> None:
        model = self.model
        factors, limits, tracker = model.factors, model.limits, model.tracker
        model.factors, model.limits = Factors(1.0, 1.0, 0), replace(limits, policy=None)
        model.update(flag)
        model.factors, model.limits, model.tracker = factors, limits, tracker
        model.scale, model.skips_at_minimum = new, 0

    def compare(self) -> None:
        model, scaler = self.model, self.scaler
        stats, history = scaler.stats(), scaler.history()
        assert (scaler.get_scale(), stats.growth_tracker) == (model.scale, model.tracker)
        assert [getattr(stats, name) for name in KEPT] == [getattr(model, name) for name in KEPT]
        entry = scaler.state_dict()["ampfast"]
        assert entry["hysteresis_tracker"] == model.limits.hysteresis - model.tolerated
        assert repr(entry["averages"]) == repr(model.prediction.averages())
        rows = zip(history.scale.tolist(), history.predicted.tolist(), strict=True)
        known = [(scale, predicted) for scale, _, _, predicted in model.history]
        assert repr(list(rows)) == repr(known)

    def reload(self) -> None:
        """Goes on with a new scaler, from a checkpoint."""
        state, model = pickle.loads(pickle.dumps(self.scaler.state_dict())), self.model
        self.scaler = self.made()
        self.scaler.load_state_dict(state)
        kept = {"tolerated": model.tolerated, "prediction": model.prediction}
        self.model = ScaleModel(model.scale, model.tracker, model.factors, model.limits, **kept)

    def averages(self) -> list[float]:
        return self.scaler.state_dict()["ampfast"]["averages"]


@pytest.mark.parametrize("overflowing", [None, 0, 1])
def test_the_largest_or_an_overflow_of_several_optimizers_counts(overflowing: int | None) -> None:
    loops = Loop(fused), Loop()
    scaler, model = loops[0].scaler, loops[1].model
    loops[1].scaler = scaler
    for turn, peak in enumerate((1.0, 4.0, 2.0**-7, 2.0**9)):
        overflows = turn == 3 and overflowing is not None
        for number, loop in enumerate(loops):
            loop.backward(math.inf if overflows and number == overflowing else peak / 8**number)
        for loop in loops[:: 1 if turn % 2 else -1]:
            scaler.step(loop.optimizer)
        scaler.update()
        model.update(float(overflows), peak=peak)
        assert scaler.get_scale() == model.scale


# What is kept


@pytest.mark.parametrize("policy", [None, LogMax(3.0), LogMax(2.0, 2)], ids=str)
def test_another_policys_checkpoint_is_refused(policy: Any) -> None:
    loop = Loop()
    loop.step(1.0)
    other = GradScaler("cpu", init_scale=4.0, policy=policy)
    with pytest.raises(ValueError, match=r"another policy .*LogMax"):
        other.load_state_dict(loop.scaler.state_dict())
    assert other.get_scale() == 4.0


@pytest.mark.parametrize(
    "averages",
    [
        *(None, 1.0, [], [0.0] * 5, [0] * 6, [math.nan] * 6, [0.0] * 5 + [math.inf]),
        *([0.0, 0.5, 0.0, 0.0, 0.0, 0.0], [0.0, -1.0, 0.0, 0.0, 0.5, 0.0]),
        *([1e308, 0.5, 0.0, 0.0, 0.5, 0.0], [0.0, 0.5, 0.0, -1.0, 0.5, 0.0]),
        *([0.0, 0.5, 0.0, 0.0, 0.5, -1.0], [0.0, 0.5, 0.0, 0.0, 1.5, 0.0]),
        *([0.0, 1.5, 0.0, 0.0, 0.5, 0.0], [0.0] * 5 + [0], [0.0, 0.5, 0.0, 0.0, 0.5, 1e300]),
    ],
    ids=str,
)
def test_damaged_averages_are_refused(averages: Any) -> None:
    loop = Loop()
    loop.step(1.0)
    state, before = loop.scaler.state_dict(), loop.scaler.state_dict()
    state["scale"], state["ampfast"]["averages"] = 2.0, averages
    with pytest.raises(ValueError, match="averages must be a list of 6 finite floats"):
        loop.scaler.load_state_dict(state)
    assert loop.scaler.state_dict() == before


# Bad input


FINITE = "must be at least 0 and finite"
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"policy": "LogMax"}, TypeError, "policy must be ampfast.LogMax or None, got str"),
    ({"policy": LogMax(), "dynamic": False}, ValueError, "never changes: it takes no .* policy"),
    ({"policy": LogMax(), "hysteresis": 2}, ValueError, "LogMax takes no hysteresis"),
    ({"sigmas": -1.0}, ValueError, f"sigmas {FINITE}, got -1.0"),
    ({"headroom": -1}, ValueError, f"headroom {FINITE}, got -1"),
    ({"sigmas": math.nan}, ValueError, f"sigmas {FINITE}, got nan"),
    ({"sigmas": math.inf}, ValueError, f"sigmas {FINITE}, got inf"),
    ({"sigmas": 10**400}, ValueError, f"sigmas {FINITE}"),
    ({"sigmas": "3"}, TypeError, "sigmas must be a Python number, got str"),
    ({"headroom": True}, TypeError, "headroom must be a Python number, got bool"),
]


@pytest.mark.parametrize(("options", "error", "text"), BAD, ids=[text for *_, text in BAD])
def test_bad_input(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        GradScaler("cpu", **options) if "policy" in options else LogMax(**options)


def power_of_two(value: float) -> float:
    """The next one, by which no scaling rounds, as fused steps round in another place."""
    return 2.0 ** math.ceil(math.log2(value))


class Life:
    """A loop with random settings, and what happens to its scaler and to the model of it."""

    def __init__(self, seed: int, make: Any = plain, backend: str = "cpu") -> None:
        self.chance = chance = random.Random(f"LogMax {seed}")
        self.near = float32 if make is plain else power_of_two
        least, most = chance.choice(LIMITS)
        if make is fused:
            least, most = (limit and power_of_two(limit) for limit in (least, most))
        policy = LogMax(chance.choice([0.0, 0.5, 2.0, 3.09]), chance.choice([0, 1, 2.5]))
        refill = chance.choice(["growth", "finite_step"])
        scale = self.near(chance.choice([0.5, 3.0, 8.0, 100.0 / 3]))
        growth, backoff = chance.choice([(2.0, 0.5), (1.9, 0.3), (1.001, 0.99), (4.0, 0.125)])
        factors = self.factors(growth, backoff, chance.choice([0, 1, 2, 5]))
        self.loop = Loop(make, Limits(least, most, 1, refill, policy), scale, factors, backend)
        self.level = 0.0

    def factors(self, growth: float, backoff: float, interval: int) -> Factors:
        if self.near is power_of_two:
            growth, backoff = power_of_two(growth), 1 / power_of_two(1 / backoff)
        return Factors(growth, backoff, interval)

    def happen(self, event: str) -> None:
        """One event of `EVENTS`."""
        chance, loop = self.chance, self.loop
        self.level += chance.gauss(0.0, 1.0)
        usual = self.near(2.0 ** (self.level / 3))
        peak = chance.choice([usual] * 12 + [0.0, 2.0**-140, 2.0**60])
        if event == "overflow":
            peak = chance.choice([math.inf, math.nan])
        if event == "factors":
            growth, backoff = chance.choice([(2.0, 0.5), (3.3, 0.7)])
            loop.model.factors = self.factors(growth, backoff, chance.choice([0, 1, 3]))
            loop.scaler.set_growth_factor(loop.model.factors.growth)
            loop.scaler.set_backoff_factor(loop.model.factors.backoff)
            loop.scaler.set_growth_interval(loop.model.factors.interval)
        elif event == "save":
            self.saved()
            loop.compare()
        else:
            loop.step(peak, event, self.near(chance.choice([1.0, 6.0, 1e-3, 1e6 / 3])))

    def saved(self) -> None:
        loop, model, scaler = self.loop, self.loop.model, self.loop.scaler
        way = self.chance.choice(["checkpoint", "into one in use", "pickle", "deepcopy"])
        least, most = model.limits.min_scale or 0.0, model.limits.max_scale or math.inf
        if way == "pickle":
            loop.scaler = pickle.loads(pickle.dumps(scaler))
        elif way == "deepcopy":
            loop.scaler = copy.deepcopy(scaler)
        elif least <= model.scale <= most:  # as that of a loadable checkpoint
            if way == "checkpoint":
                loop.reload()
            else:
                scaler.load_state_dict(pickle.loads(pickle.dumps(scaler.state_dict())))

    def live(self, events: int) -> Life:
        for event in self.chance.choices(list(EVENTS), list(EVENTS.values()), k=events):
            self.happen(event)
        return self


@pytest.mark.parametrize("make", [plain, fused])
@pytest.mark.parametrize("backend", ["cpu", "aten", "device kernels", "device"])
def test_random_lives(
    backend: str, make: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """On a device, as beside a scale on a GPU, where the host reads nothing."""
    moved = 0
    if backend == "device":
        monkeypatch.setattr(policies, "_host_reads", lambda device: False)
    elif backend == "device kernels":
        request.getfixturevalue("launcher")
    for seed in range(10):
        life = Life(seed, make, "aten" if backend == "aten" else "cpu").live(60)
        moved += life.loop.model.growths + life.loop.model.backoffs
        state = life.loop.scaler._loss_scale.follower._state
        assert isinstance(state, torch.Tensor) == (backend == "device")
    assert moved > 50
