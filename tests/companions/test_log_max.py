"""A scale that follows the largest gradients, against the rule in plain Python."""

from __future__ import annotations

import copy
import math
import pickle
import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support.models import SPIKE, Factors, Limits, ScaleModel, float32
from support.steps import Training, adamw, take_step

from ampfast import GradScaler, LogMax, policies


def training_of(policy: LogMax, make: Any = adamw) -> Training:
    return Training(GradScaler("cpu", 8.0, growth_interval=7, policy=policy), make)


@pytest.mark.parametrize("overflowing", [None, 0, 1])
def test_the_largest_or_an_overflow_of_several_optimizers_counts(overflowing: int | None) -> None:
    policy = LogMax(2.0, 1)
    sgd = partial(torch.optim.SGD, lr=0.1)  # takes sparse gradients, too
    sides = training_of(policy, sgd), training_of(policy, partial(adamw, fused=True))
    scaler = sides[1].scaler = sides[0].scaler
    model = ScaleModel(8.0, 0, Factors(2.0, 0.5, 7), Limits(policy=policy))
    for turn, norm in enumerate((1.0, 4.0, 2.0**-7, 2.0**9)):
        overflows = turn == 3 and overflowing is not None
        for number, side in enumerate(sides):
            side.backward(math.inf if overflows and number == overflowing else norm / 8**number)
        if turn == 1:
            sides[0].param.grad = sides[0].param.grad.to_sparse()
        for side in sides[:: 1 if turn % 2 else -1]:
            scaler._check_inf_per_device(side.optimizer)  # of gradients as they are
            scaler.step(side.optimizer)
        scaler.update()
        model.update(float(overflows), peak=float32(0.8) * norm)
        assert scaler.get_scale() == model.scale


def test_an_optimizers_own_grad_scale_is_not_observed() -> None:
    training = training_of(LogMax(2.0, 1), partial(adamw, fused=True)).step(1.0)
    before = training.scaler.state_dict()["ampfast"]
    training.backward(2.0**9)
    training.optimizer.grad_scale = torch.tensor(0.25)
    training.scaler.step_and_update(training.optimizer)
    assert training.scaler.state_dict()["ampfast"] == before


# What is kept


@pytest.mark.parametrize("policy", [None, LogMax(3.0), LogMax(2.0, 2)], ids=str)
def test_another_policys_checkpoint_is_refused(policy: Any) -> None:
    state = training_of(LogMax(2.0, 1)).step(1.0).scaler.state_dict()
    other = GradScaler("cpu", init_scale=4.0, policy=policy)
    with pytest.raises(ValueError, match=r"another policy .*LogMax"):
        other.load_state_dict(state)
    assert other.get_scale() == 4.0
    assert repr(LogMax(2, 1)) == "LogMax(sigmas=2.0, headroom=1.0)", "as the checkpoint has it"


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
    scaler = training_of(LogMax(2.0, 1)).step(1.0).scaler
    state, before = scaler.state_dict(), scaler.state_dict()
    state["scale"], state["ampfast"]["averages"] = 2.0, averages
    with pytest.raises(ValueError, match="averages must be a list of 6 finite floats"):
        scaler.load_state_dict(state)
    assert scaler.state_dict() == before


FINITE = "must be at least 0 and finite"


def test_bad_input() -> None:
    for options, error, text in (
        ({"policy": "LogMax"}, TypeError, "policy must be ampfast.LogMax or None, got str"),
        ({"policy": LogMax(), "dynamic": False}, ValueError, "it takes no .* policy"),
        ({"policy": LogMax(), "hysteresis": 2}, ValueError, "LogMax takes no hysteresis"),
        ({"sigmas": -1.0}, ValueError, f"sigmas {FINITE}, got -1.0"),
        ({"headroom": -1}, ValueError, f"headroom {FINITE}, got -1"),
        ({"sigmas": math.nan}, ValueError, f"sigmas {FINITE}, got nan"),
        ({"sigmas": math.inf}, ValueError, f"sigmas {FINITE}, got inf"),
        ({"sigmas": 10**400}, ValueError, f"sigmas {FINITE}"),
        ({"sigmas": "3"}, TypeError, "sigmas must be a Python number, got str"),
        ({"headroom": True}, TypeError, "headroom must be a Python number, got bool"),
    ):
        made: Any = partial(GradScaler, "cpu") if "policy" in options else LogMax
        with pytest.raises(error, match=text):
            made(**options)


CLIPS: dict[str, dict[str, Any]] = {
    "clipped": {"skip_above": math.inf},
    "clipped by the largest": {"norm_type": math.inf},
    "deferred": {"in_place": False},
    "spike": {"skip_above": 0.0},
}
# How often each happens in a life.
EVENTS = {"step": 3, "step_and_update": 2, "unscale_": 2, "clipped": 3}
EVENTS |= {"clipped by the largest": 2, "deferred": 2, "overflow": 3, "spike": 2, "unknown": 2}
EVENTS |= {"set": 1, "save": 1}
KEPT = ("steps", "skipped", "growths", "backoffs", "consecutive_skips", "spikes")


# Whether the optimizer is fused: its step rounds in another place, but not by powers of two.
LIMITS = {
    False: [(None, None), (0.3, None), (None, 33333.0), (2.0**-9, 700.0), (1e-40, 2.0**90)],
    True: [(None, None), (0.25, None), (None, 2.0**15), (2.0**-9, 1024.0), (1e-40, 2.0**90)],
}
SCALES = {False: [0.5, 3.0, 8.0, float32(100.0 / 3)], True: [0.5, 4.0, 8.0, 64.0]}
GROWTHS = {False: [(2.0, 0.5), (1.9, 0.3), (1.001, 0.99)], True: [(2.0, 0.5), (4.0, 0.125)]}


class Life:
    """Random events of a scaler with random settings, and the model of its scale."""

    def __init__(self, seed: int, fused: bool = False, backend: str = "cpu") -> None:
        self.chance = chance = random.Random(f"LogMax {seed}")
        policy = LogMax(chance.choice([0.0, 0.5, 2.0, 3.09]), chance.choice([0, 1, 2.5]))
        limits, scale = chance.choice(LIMITS[fused]), chance.choice(SCALES[fused])
        refill = chance.choice(["growth", "finite_step"])
        factors = Factors(*chance.choice(GROWTHS[fused]), chance.choice([0, 1, 2, 5]))
        self.model = ScaleModel(scale, 0, factors, Limits(*limits, 1, refill, policy))
        self.fused, self.backend, self.turn, self.level = fused, backend, 0, 0.0
        dtypes = [torch.float32, torch.float64, torch.float32]
        self.params = [torch.nn.Parameter(torch.zeros(5, dtype=dtype)) for dtype in dtypes]
        self.optimizer = adamw(self.params, fused=fused)
        self.scaler = self.made()

    def made(self) -> Any:
        model, names = self.model, ("min_scale", "max_scale", "hysteresis_refill", "policy")
        options = {name: getattr(model.limits, name) for name in names}
        return GradScaler("cpu", model.scale, *model.factors, backend=self.backend, **options)

    def backward(self, peak: float) -> float:
        """Sets gradients, the largest in one parameter; returns what the policy sees of them."""
        self.scaler.scale(torch.zeros(()))
        scale = torch.tensor(self.scaler.get_scale())
        scaled = torch.tensor(peak) * scale
        for param in self.params:
            param.grad = torch.full_like(param, scaled.item() / 4)
        largest = self.params[self.turn % len(self.params)]
        largest.grad[3] = -scaled
        self.turn += 1
        return (scaled.to(largest.dtype) * scale.double().reciprocal().float()).item()

    def happen(self, event: str) -> None:
        """One event of `EVENTS`."""
        self.level += self.chance.gauss(0.0, 1.0)
        usual = float32(2.0 ** (self.level / 3))
        peak = self.chance.choice([usual] * 12 + [0.0, 2.0**-140, 2.0**60])
        if event == "overflow":
            peak = self.chance.choice([math.inf, math.nan])
        if event == "save":
            self.save()
        else:
            self.step(event, peak)
        self.compare()

    def step(self, event: str, peak: float) -> None:
        scaler, optimizer, model = self.scaler, self.optimizer, self.model
        seen, flag = abs(self.backward(peak)), 0.0
        if event == "unknown":
            scaler._unscale_grads_ = lambda optimizer, inv_scale, found_inf, allow: {
                inv_scale.device: found_inf
            }
            seen = 0.0
        elif event in CLIPS and (event != "deferred" or self.fused):
            norm = scaler.clip_grad_norm_(optimizer, 1.0, **CLIPS[event]).item()
            flag = SPIKE if event == "spike" and norm > 0 else 0.0
        flag = flag if math.isfinite(seen) else 1.0
        if event == "set":
            scaler.step(optimizer)
            new_scale = self.chance.choice([1.0, 8.0, 2.0**-9, 2.0**18])
            scaler.update(new_scale)
            factors, limits, tracker = model.factors, model.limits, model.tracker
            model.factors, model.limits = Factors(1.0, 1.0, 0), replace(limits, policy=None)
            model.update(flag)
            model.factors, model.limits, model.tracker = factors, limits, tracker
            model.scale, model.skips_at_minimum = new_scale, 0
        else:
            take_step(scaler, optimizer, way=event)
            model.update(flag, None, seen)
        scaler.__dict__.pop("_unscale_grads_", None)

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

    def save(self) -> None:
        """Goes on with a copy, or from a checkpoint."""
        model, scaler = self.model, self.scaler
        way = self.chance.choice(["checkpoint", "into one in use", "pickle", "deepcopy"])
        least, most = model.limits.min_scale or 0.0, model.limits.max_scale or math.inf
        if way == "pickle":
            self.scaler = pickle.loads(pickle.dumps(scaler))
        elif way == "deepcopy":
            self.scaler = copy.deepcopy(scaler)
        elif least <= model.scale <= most:  # as that of a loadable checkpoint
            state = pickle.loads(pickle.dumps(scaler.state_dict()))
            if way == "checkpoint":
                self.scaler = self.made()
                kept = {"tolerated": model.tolerated, "prediction": model.prediction}
                known = (model.scale, model.tracker, model.factors, model.limits)
                self.model = ScaleModel(*known, **kept)
            self.scaler.load_state_dict(state)
            self.model.consecutive_skips = 0  # a new series begins


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("backend", ["cpu", "aten", "device kernels", "device"])
def test_random_lives(
    backend: str, fused: bool, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """On a device, as beside a scale on a GPU, where the host reads nothing."""
    moved = 0
    if backend == "device":
        monkeypatch.setattr(policies, "_host_reads", lambda device: False)
    elif backend == "device kernels":
        request.getfixturevalue("launcher")
    for seed in range(10):
        life = Life(seed, fused, "aten" if backend == "aten" else "cpu")
        for event in life.chance.choices(list(EVENTS), list(EVENTS.values()), k=60):
            life.happen(event)
        moved += life.model.growths + life.model.backoffs
        state = life.scaler._loss_scale.follower._state
        assert isinstance(state, torch.Tensor) == (backend == "device")
    assert moved > 50
