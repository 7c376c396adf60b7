"""A scale that follows the largest gradients, against the rule in plain Python."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import random
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from support.reference_launcher import ReferenceLauncher
from support.scale_model import Factors, ScaleModel, float32
from torch import nn

import ampfast
from ampfast import LogMax, policies
from ampfast.backends import core
from ampfast.backends.core import SPIKE, Update
from ampfast.loss_scale import Limits

FACTORS = Factors(2.0, 0.5, 7)


def plain(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-3)


def fused(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-3, fused=True)


def stepped(scaler: Any, optimizer: Any) -> None:
    scaler.step(optimizer)
    scaler.update()


def together(scaler: Any, optimizer: Any) -> None:
    scaler.step_and_update(optimizer)


def unscaled(scaler: Any, optimizer: Any) -> None:
    scaler.unscale_(optimizer)
    stepped(scaler, optimizer)


def clipped(scaler: Any, optimizer: Any) -> None:
    scaler.clip_grad_norm_(optimizer, 1.0)
    stepped(scaler, optimizer)


def clipped_by_largest(scaler: Any, optimizer: Any) -> None:
    scaler.clip_grad_norm_(optimizer, 1.0, math.inf)
    stepped(scaler, optimizer)


def deferred(scaler: Any, optimizer: Any) -> None:
    if optimizer.param_groups[0].get("fused"):
        scaler.clip_grad_norm_(optimizer, 1.0, in_place=False)
    stepped(scaler, optimizer)


WAYS: dict[str, Callable[[Any, Any], None]] = {
    each.__name__: each
    for each in (stepped, together, unscaled, clipped, clipped_by_largest, deferred)
}


def random_peaks(count: int, seed: int) -> list[float]:
    """Powers of two, which no scaling rounds, drifting; some steps overflow, some are zero."""
    chance, level = random.Random(seed), 0.0
    peaks = []
    for _ in range(count):
        level += chance.gauss(0.0, 0.7)
        usual = 2.0 ** round(level + chance.gauss(0.0, 1.0))
        peaks.append(chance.choice([usual] * 12 + [0.0, math.inf]))
    return peaks


class Loop:
    """Parameters whose largest gradient is given, and the model of their scale."""

    def __init__(self, make: Any = plain, policy: Any = None, **options: Any) -> None:
        self.policy = LogMax(2.0, 1) if policy is None else policy
        shapes = [(3,), (5, 2), (4, 3)]
        dtypes = [torch.float32, torch.float64, torch.float32]
        self.params = [
            nn.Parameter(torch.zeros(shape, dtype=dtype))
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        self.optimizer = make(self.params)
        self.scaler = ampfast.GradScaler(
            "cpu", init_scale=8.0, growth_interval=7, policy=self.policy, **options
        )
        limits = (options.get("min_scale"), options.get("max_scale"))
        self.model = ScaleModel(8.0, 0, FACTORS, Limits(*limits, policy=self.policy))
        self.turn = 0

    def backward(self, peak: float) -> None:
        self.scaler.scale(torch.zeros(()))
        scale = self.scaler.get_scale()
        for number, param in enumerate(self.params):
            param.grad = torch.full_like(param, peak * scale / 4)
            if number == self.turn % len(self.params):
                param.grad.view(-1)[1] = -peak * scale
        self.turn += 1

    def step(self, peak: float, way: Any = stepped) -> None:
        self.backward(peak)
        way(self.scaler, self.optimizer)
        self.model.update(float(math.isinf(peak)), peak=peak)
        assert self.scaler.get_scale() == self.model.scale


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [plain, fused])
@pytest.mark.parametrize("backend", ["cpu", "aten"])
def test_every_way_follows_the_rule(backend: str, make: Any, way: str) -> None:
    loop = Loop(make, backend=backend)
    scales = set()
    for peak in random_peaks(80, seed=1):
        loop.step(peak, WAYS[way])
        scales.add(loop.scaler.get_scale())
    assert len(scales) > 5
    averages = loop.scaler.state_dict()["ampfast"]["averages"]
    prediction = loop.model.prediction
    assert averages == [
        *(prediction.mean, prediction.weight, prediction.slow_mean),
        *(prediction.slow_square, prediction.slow_weight, prediction.ceiling),
    ]
    assert loop.scaler.stats().skipped == loop.model.skipped > 0


@pytest.mark.parametrize("make", [plain, fused])
def test_device_kernels_follow_the_rule(launcher: ReferenceLauncher, make: Any) -> None:
    loop = Loop(make)
    for turn, peak in enumerate(random_peaks(60, seed=2)):
        loop.step(peak, list(WAYS.values())[turn % len(WAYS)])


def test_the_largest_of_several_optimizers_counts() -> None:
    loop, other = Loop(), Loop(fused)
    other.scaler = loop.scaler
    for peak in (1.0, 4.0, 2.0**-7, 2.0**9):
        loop.backward(peak)
        other.backward(peak / 8)
        for each in (other, loop):
            loop.scaler.step(each.optimizer)
        loop.scaler.update()
        loop.model.update(0.0, peak=peak)
        assert loop.scaler.get_scale() == loop.model.scale


@pytest.mark.parametrize("overflowing", [0, 1])
def test_an_overflow_of_one_of_several_optimizers_counts(overflowing: int) -> None:
    loops = Loop(), Loop()
    scaler = loops[1].scaler = loops[0].scaler
    for turn in range(3):
        before = scaler.get_scale()
        for number, loop in enumerate(loops):
            loop.backward(math.inf if turn == 2 and number == overflowing else 1.0)
        for loop in loops:
            scaler.step(loop.optimizer)
        scaler.update()
    assert scaler.get_scale() == before / 2


def test_a_subclass_may_make_the_scale_itself() -> None:
    class Own(ampfast.GradScaler):
        def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
            self._scale = torch.full((), self._init_scale, device=dev)
            self._growth_tracker = torch.zeros((), dtype=torch.int32, device=dev)

    loop = Loop()
    loop.scaler = Own("cpu", init_scale=8.0, growth_interval=7, policy=loop.policy)
    for peak in random_peaks(20, seed=5):
        loop.step(peak)


def test_a_scale_that_overflowed_is_probed_as_torch_probes() -> None:
    """Where gradients are small, and something else overflows at 2^12 and above."""
    loop = Loop()
    overflows = []
    for turn in range(60):
        if turn % 5 == 4:
            loop.scaler = by_checkpoint(loop)
        if loop.scaler.get_scale() >= 2.0**12:
            overflows.append(turn)
            loop.step(math.inf)
        else:
            loop.step(2.0**-10)
    late = overflows[-4:]
    assert loop.model.prediction.weight > 0
    assert [b - a for a, b in itertools.pairwise(late)] == [8, 8, 8]


@pytest.mark.parametrize("reads", [True, False])
def test_neither_scale_nor_ceiling_exceeds_float32(
    reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policies, "_host_reads", lambda device: reads)
    loop = Loop()
    for peak in (2.0**-130, math.inf, *[2.0**-130] * 15):
        loop.step(peak)
        averages = loop.scaler.state_dict()["ampfast"]["averages"]
        assert averages == loop.model.prediction.averages()
    assert averages[-1] == loop.scaler.get_scale() == 2.0**127


@pytest.mark.parametrize("reads", [True, False])
def test_a_scale_that_is_set_falls_below_one_that_overflowed(
    reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nothing is predicted."""
    monkeypatch.setattr(policies, "_host_reads", lambda device: reads)
    loop = Loop()
    loop.step(math.inf)
    loop.scaler.update(64.0)
    loop.model.scale = 64.0
    loop.step(0.0)
    assert loop.scaler.get_scale() == 4.0


def test_instead_of_0_the_scale_is_the_prediction_again() -> None:
    loop = Loop()
    loop.step(1.0)
    first = loop.scaler.get_scale()
    scales = []
    for _ in range(165):
        loop.step(math.inf)
        scales.append(loop.scaler.get_scale())
    assert scales[scales.index(2.0**-149) + 1] == first


def test_sparse_gradients_count() -> None:
    table = nn.Embedding(4, 3, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    scaler = ampfast.GradScaler("cpu", init_scale=8.0, policy=LogMax(0.0, 1))
    scaler.scale(4 * table(torch.tensor([1])).sum()).backward()
    stepped(scaler, optimizer)
    assert scaler.get_scale() == 2.0**13


def test_an_optimizers_own_grad_scale_is_not_observed() -> None:
    loop = Loop(fused)
    loop.step(1.0)
    before = loop.scaler.state_dict()
    loop.backward(2.0**9)
    loop.optimizer.grad_scale = torch.tensor(0.25)
    stepped(loop.scaler, loop.optimizer)
    assert loop.scaler.state_dict()["ampfast"] == before["ampfast"]


# What is kept


def by_checkpoint(loop: Loop) -> Any:
    saved = Loop(policy=loop.policy).scaler
    saved.load_state_dict(pickle.loads(pickle.dumps(loop.scaler.state_dict())))
    return saved


def test_torchs_checkpoint_begins_anew() -> None:
    loop = Loop()
    loop.step(1.0)
    theirs = torch.amp.GradScaler("cpu", init_scale=4.0)
    theirs.load_state_dict(loop.scaler.state_dict())
    assert theirs.get_scale() == loop.scaler.get_scale()
    loop.scaler.load_state_dict(torch.amp.GradScaler("cpu", init_scale=4.0).state_dict())
    assert loop.scaler.state_dict()["ampfast"]["averages"] == [0.0] * 6


@pytest.mark.parametrize("policy", [None, LogMax(3.0), LogMax(2.0, 2)], ids=str)
def test_another_policys_checkpoint_is_refused(policy: Any) -> None:
    loop = Loop()
    loop.step(1.0)
    other = ampfast.GradScaler("cpu", init_scale=4.0, policy=policy)
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


def test_the_largest_averages_are_loaded() -> None:
    scaler = Loop().scaler
    state = scaler.state_dict()
    averages = [-(1100.0**2), 1.0, 1100.0**2, 1100.0**2, 1.0, torch.finfo(torch.float32).max]
    state["ampfast"]["averages"] = averages
    scaler.load_state_dict(state)
    assert scaler.state_dict()["ampfast"]["averages"] == averages


# Bad input


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: LogMax(-1.0), ValueError, "sigmas must be at least 0 and finite, got -1.0"),
        (lambda: LogMax(3.0, -1), ValueError, "headroom must be at least 0 and finite, got -1"),
        (lambda: LogMax(math.nan), ValueError, "sigmas must be at least 0 and finite, got nan"),
        (lambda: LogMax(math.inf), ValueError, "sigmas must be at least 0 and finite, got inf"),
        (lambda: LogMax(10**400), ValueError, "sigmas must be at least 0 and finite"),
        (lambda: LogMax("3"), TypeError, "sigmas must be a Python number, got str"),
        (lambda: LogMax(3.0, True), TypeError, "headroom must be a Python number, got bool"),
        (
            lambda: ampfast.GradScaler("cpu", policy="LogMax"),
            TypeError,
            "policy must be ampfast.LogMax or None, got str",
        ),
        (
            lambda: ampfast.GradScaler("cpu", policy=LogMax(), dynamic=False),
            ValueError,
            "dynamic=False never changes: it takes no .* policy",
        ),
        (
            lambda: ampfast.GradScaler("cpu", policy=LogMax(), hysteresis=2),
            ValueError,
            "LogMax takes no hysteresis",
        ),
    ],
)
def test_bad_input(make: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()


def test_bounds() -> None:
    assert LogMax(0, 0) == LogMax(0.0, 0.0)


def test_numbers_are_kept_as_floats() -> None:
    scaler = ampfast.GradScaler(
        "cpu", policy=LogMax(Fraction(3), 1), min_scale=Fraction(2), max_scale=2**20
    )
    entry = scaler.state_dict()["ampfast"]
    policy = entry["policy"]
    kept = [entry["min_scale"], entry["max_scale"], policy["sigmas"], policy["headroom"]]
    assert [str(each) for each in kept] == ["2.0", "1048576.0", "3.0", "1.0"]


def test_a_disabled_scaler_keeps_nothing_of_its_clips() -> None:
    scaler = ampfast.GradScaler("cpu", policy=LogMax(), enabled=False)
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer = torch.optim.SGD([parameter])
    for _ in range(3):
        scaler.clip_grad_norm_(optimizer, 1.0)
    assert scaler._loss_scale.follower.observed == []


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
