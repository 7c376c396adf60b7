"""Steps skipped for the norm of their gradients, against the rule in plain Python."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import warnings
from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from support.captures import pretend_capture
from support.comparison import assert_same
from support.models import SPIKE, Rule, random_norms
from support.steps import Training, adamw, take_step
from torch import Tensor
from torch.distributed import checkpoint

import ampfast
from ampfast import Sigmas

BACKENDS = pytest.mark.parametrize("backend", ["cpu", "aten"])
WINDOW = 4
LIMITS = [1.2, 0.0, Sigmas(2.0, 4), Sigmas(0.0, 2), Sigmas(6.0, 128), Sigmas(3.0, 5, patience=1)]
LIMITS += [Sigmas(1.0, 7, patience=9)]
MAKES: dict[str, Any] = {
    "adam": adamw,
    "fused_adam": partial(adamw, fused=True),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
}


class Loop(Training):
    """Its gradients are clipped, and each step is as the reason of its skip says."""

    def __init__(self, make: str = "adam", count: int = 1, **options: Any) -> None:
        options = {"init_scale": 8.0, "growth_interval": 3, **options}
        super().__init__(ampfast.GradScaler("cpu", **options), MAKES[make], count)

    def clip(self, norm: float, above: Any, *more: Any, which: int = 0, **options: Any) -> Tensor:
        self.backward(norm, first=which)
        optimizer = self.optimizers[which]
        return self.scaler.clip_grad_norm_(optimizer, 1.0, *more, skip_above=above, **options)

    def clipped(self, norm: float, *args: Any, which: int = 0, **options: Any) -> str | None:
        """Reason of the skip of a clipped step; None for one that is taken."""
        self.clip(norm, *args, which=which, **options)
        return self.finish(which)[0]

    def run(self, norms: Sequence[float], limit: Any = None, which: int = 0) -> list[str | None]:
        limit = limit or Sigmas(2.0, WINDOW)
        return [self.clipped(norm, limit, which=which) for norm in norms]

    def finish(self, *which: int) -> list[str | None]:
        """Reasons of the skips of these optimizers' steps, or of all."""
        places = which or range(len(self.params))
        optimizers = [self.optimizers[place] for place in places]
        before = [self.params[place].detach().clone() for place in places]
        moves = [bool(self.params[place].grad.any()) for place in places]
        states = [copy.deepcopy(each.state_dict()["state"]) for each in optimizers]
        take_step(self.scaler, *optimizers, way=self.way)
        reasons = [self.scaler.skip_reason(each) for each in optimizers]
        for number, (optimizer, reason) in enumerate(zip(optimizers, reasons, strict=True)):
            skipped = reason is not None
            assert self.scaler.step_skipped(optimizer) == skipped
            assert self.scaler.found_inf(optimizer).item() == float(skipped)
            if moves[number]:
                assert torch.equal(before[number], self.params[places[number]]) == skipped
            if skipped and states[number]:
                assert_same(optimizer.state_dict()["state"], states[number])
        return reasons

    def now(self) -> tuple[float, int]:
        return self.scaler.get_scale(), self.scaler.stats().growth_tracker

    def norms(self) -> Any:
        """Norms of each optimizer, oldest first; the number of spikes in a row before others."""
        saved = self.scaler.state_dict().get("ampfast", {}).get("norms", [])
        words = [each for [(_, each)] in saved]
        return [each[4:] if each[1] == 0 else [int(each[1]), *each[4:]] for each in words]


PROGRAM = [
    *((1.0, None, 8.0, 1), (1.5, None, 8.0, 2), (50.0, "spike", 8.0, 2), (20.0, None, 16.0, 0)),
    *((math.inf, "nonfinite", 8.0, 0), (2.0, None, 8.0, 1), (21.0, "spike", 8.0, 1)),
    *((math.nan, "nonfinite", 4.0, 0), (30.0, "spike", 4.0, 0), (1.0, None, 4.0, 1)),
]


@pytest.mark.parametrize("way", ["step", "step_and_update"])
@pytest.mark.parametrize("order", [2.0, math.inf, 3.0])
@pytest.mark.parametrize(
    ("make", "in_place"),
    [("adam", True), *itertools.product(("fused_adam", "momentum"), (True, False))],
)
@BACKENDS
def test_a_spike_is_skipped_and_leaves_the_scale(
    backend: str, make: str, order: float, in_place: bool, way: str
) -> None:
    loop = Loop(make, backend=backend)
    loop.way = way
    # Norms of the other orders are smaller.
    shrink = {2.0: 1.0, math.inf: 0.8, 3.0: (0.6**3 + 0.8**3) ** (1 / 3)}[order]
    above = 20.5 * shrink
    for norm, reason, *state in PROGRAM:
        found = loop.clipped(norm, above, order, in_place=in_place)
        assert (found, *loop.now()) == (reason, *state)
    stats, history = loop.scaler.stats(), loop.scaler.history()
    assert (stats.steps, stats.skipped, stats.spikes) == (10, 5, 3)
    assert (stats.growths, stats.backoffs, stats.consecutive_skips) == (1, 2, 0)
    reasons = [reason for _, reason, *_ in PROGRAM]
    assert history.spiked.tolist() == [reason == "spike" for reason in reasons]
    assert history.skipped.tolist() == [reason is not None for reason in reasons]


@pytest.mark.filterwarnings("ignore:The gradient norm stayed above")
@pytest.mark.parametrize("limit", LIMITS, ids=str)
@BACKENDS
def test_steps_follow_the_rule(backend: str, limit: float | Sigmas) -> None:
    loop, rule = Loop("fused_adam", backend=backend), Rule(limit)
    reasons = []
    for norm in random_norms(400, seed=5):
        # A new one in each step, as loops are written.
        total = loop.clip(norm, copy.copy(limit)).item()
        (reason,) = loop.finish()
        overflows = not math.isfinite(loop.param.grad.sum())
        expected = 1.0 if overflows else rule.flag(total)
        assert reason == {0.0: None, 1.0: "nonfinite", SPIKE: "spike"}[expected]
        reasons.append(reason)
    assert set(reasons) == {None, "nonfinite", "spike"}
    if isinstance(limit, Sigmas):
        (norms,) = loop.norms()
        assert norms[-limit.window :] == rule.taken[-limit.window :]
        assert rule.restarts or rule.patience > 9


@BACKENDS
def test_an_infinite_norm_of_finite_gradients_is_a_spike_at_any_time(backend: str) -> None:
    """It takes no patience, and none makes it usual."""
    loop = Loop("adam", backend=backend, init_scale=1.0, growth_interval=100)
    limit, reasons = Sigmas(2.0, 4, patience=1), []
    for norm in (1.0, 1.1, 0.9, 1.0, 3.5e38, 50.0, 3.5e38, 50.0):
        assert math.isinf(loop.clip(norm, limit)) == (norm > 50)
        reasons += loop.finish()
    assert reasons == [None] * 4 + ["spike"] * 3 + [None]


@pytest.mark.parametrize("above", [20.0, None])
@pytest.mark.parametrize("order", [2.0, 3.0])
@pytest.mark.parametrize(
    ("make", "in_place"), [("adam", True), ("fused_adam", True), ("fused_adam", False)]
)
def test_optimizers_clipped_together_are_skipped_together(
    make: str, in_place: bool, order: float, above: float | None
) -> None:
    loop, joint = Loop(make, 2, growth_interval=1), []
    for norms, reason in (
        *(((1.0, 1.0), None), ((40.0, 1.0), "spike"), ((math.inf, 1.0), "nonfinite")),
        *(((1.0, math.nan), "nonfinite"), ((1.0, 40.0), "spike"), ((1.0, 1.0), None)),
    ):
        loop.backward(*norms)
        options: Any = {"skip_above": above, "in_place": in_place}
        norm = loop.scaler.clip_grad_norm_(loop.optimizers, 1.0, order, **options)
        joint.append(math.hypot(*norms) if order == 2 else norm.item())
        assert norm.item() == pytest.approx(joint[-1], nan_ok=True)
        flags = [loop.scaler._found_inf_per_device(each) for each in loop.optimizers]
        assert len({flag.data_ptr() for each in flags for flag in each.values()}) == 2
        reasons = [reason if above or reason == "nonfinite" else None] * 2
        skipped = [loop.scaler.step_skipped(each) for each in loop.optimizers]
        assert skipped == [each is not None for each in reasons]
        assert loop.finish() == reasons
    grown = (2, 8.0) if above else (0, 32.0)
    assert (loop.scaler.stats().spikes, loop.scaler.get_scale()) == grown
    assert loop.scaler.history().grad_norm.tolist() == pytest.approx(joint, nan_ok=True)


def test_a_spike_beside_a_step_and_beside_an_overflow() -> None:
    loop = Loop(count=2)
    for norms, reasons, after in (
        ((1.0, 50.0), [None, "spike"], (8.0, 0)),
        ((math.inf, 50.0), ["nonfinite", "spike"], (4.0, 0)),
        ((1.0, 1.0), [None, None], (4.0, 1)),
    ):
        for which, norm in enumerate(norms):
            loop.clip(norm, 20.0, which=which)
        assert (loop.finish(), loop.now()) == (reasons, after)
    assert loop.scaler.history().spiked.tolist() == [True, False, False]


def test_the_hysteresis_does_not_count_spikes() -> None:
    loop = Loop(hysteresis=2)
    for norm in (math.inf, 50.0, 50.0, math.inf):
        loop.clipped(norm, 20.0)
    assert loop.now() == (4.0, 0)
    for _ in range(3):
        assert loop.clipped(50.0, 20.0) == "spike"


# A training goes on. Limits, norms, and what becomes of each: "." a step, "s" a spike, "o" an
# overflow, "r" one that is taken as the new usual, with a warning.
Program: TypeAlias = list[tuple[Sigmas, list[float], str]]
REASONS = {".": None, "s": "spike", "o": "nonfinite", "r": None}

USUAL, LONELY = [1.0, 1.1, 1.0, 1.1], [0.0, 0.0, 50.0, 0.0, 0.0, 0.0, 1.05]
PROGRAMS: dict[str, Program] = {
    "norms of 0 neither end nor lengthen a run": [
        (Sigmas(6.0, 4, patience=2), USUAL + LONELY * 3, "...." + "..s...." * 3),
        (Sigmas(6.0, 4, patience=2), [50.0, 0.0, 50.0, 0.0, math.inf, 0.0, 50.0], "s.s.o.r"),
    ],
    "anew": [(Sigmas(6.0, 4, patience=1), [*USUAL, 4.0, 4.0, 40.0, 4.0, 4.0], "....sr...")],
    "another window": [
        (Sigmas(2.0, WINDOW), [1.0, 2.0, 3.0, 2.5, 2.6], "....."),
        (Sigmas(2.0, 3), [2.0, 3.3], ".s"),
    ],
    "another patience": [
        *((Sigmas(6.0, 4), USUAL, "...."), (Sigmas(6.0, 4, patience=50), [5.0] * 5, "sssss")),
        (Sigmas(6.0, 4, patience=3), [5.0], "r"),
    ],
}


@BACKENDS
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_training_goes_on(name: str, backend: str) -> None:
    loop, skips = Loop(backend=backend, growth_interval=10**6), 0
    for limit, norms, events in PROGRAMS[name]:
        patience = Rule(limit).patience
        steps = "1 step was" if patience == 1 else f"{patience} steps in a row were"
        for norm, event in zip(norms, events, strict=True):
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                assert loop.clipped(norm, limit) == REASONS[event]
            skips = skips + 1 if REASONS[event] else 0
            assert loop.scaler.stats().consecutive_skips == skips
            assert [record.filename for record in told] == [__file__] * (event == "r")
            for record in told:
                assert f"ampfast.Sigmas: {steps} skipped" in str(record.message)
                assert "new usual" in str(record.message)


# What is kept


def keep(way: str, loop: Loop, into: Loop) -> None:
    """Goes on with what is kept of a loop's scaler."""
    if way == "copy":
        into.scaler = copy.copy(loop.scaler)
    elif way == "pickle":
        into.scaler = pickle.loads(pickle.dumps(loop.scaler))
    else:
        into.run([3.0, 2.0] if way == "checkpoint later" else [])
        into.scaler.load_state_dict(pickle.loads(pickle.dumps(loop.scaler.state_dict())))


@pytest.mark.filterwarnings("ignore:The gradient norm stayed above")
@pytest.mark.parametrize("way", ["pickle", "copy", "checkpoint", "checkpoint later"])
def test_what_is_kept(way: str) -> None:
    """A run of spikes goes on, too."""
    limit = Sigmas(6.0, WINDOW, patience=3)
    norms = [*USUAL, *[9.0] * 3, 1.05, *[9.0] * 4, 8.0, 8.7, 9.1, 50.0]
    expected = Loop().run(norms, limit)
    assert expected == [*[None] * 4, *["spike"] * 3, None, *["spike"] * 3, *[None] * 4, "spike"]
    for end in range(len(norms)):
        loop, other = Loop(), Loop()
        loop.run(norms[:end], limit)
        if end == 6:
            assert loop.norms() == [[2, *torch.tensor(USUAL).tolist()]]
        keep(way, loop, other)
        for each in (other, loop):
            assert each.run(norms[end:], limit) == expected[end:]
        assert other.norms() == loop.norms()


STAGE = torch.tensor([1.0, 1.1, 1.0, 1.1, 1.0]).tolist()


@pytest.mark.parametrize("how", ["state_dict", "same process", "pickle", "distributed"])
def test_norms_are_saved_in_the_order_of_the_first_clips(how: str, tmp_path: Path) -> None:
    loop = Loop(count=3, max_scale=8.0)
    for which, factor in ((1, 1000.0), (0, 1.0), (1, 1000.0)):
        loop.run([factor * norm for norm in STAGE], which=which)
    other = loop if how == "same process" else Loop(count=3, max_scale=8.0)
    if how == "pickle":
        other.scaler = pickle.loads(pickle.dumps(loop.scaler))
    elif how == "distributed":
        checkpoint.save({"scaler": loop.scaler}, checkpoint_id=tmp_path)
        checkpoint.load({"scaler": other.scaler}, checkpoint_id=tmp_path)
    else:
        other.scaler.load_state_dict(loop.scaler.state_dict())
    assert other.run([1e6], which=1) == ["spike"]
    assert other.run([1000.0], which=2) == ["spike"]
    other.scaler.load_state_dict(other.scaler.state_dict())
    assert other.run([1050.0], which=1) == [None]
    assert other.run([1000.0], which=0) == ["spike"]
    assert other.run([1000.0], which=2) == [None]  # the checkpoint had no third ones


def load_norms(loop: Loop, norms: Any) -> None:
    state = loop.scaler.state_dict()
    words = [[float(len(each)), 0.0, 0.0, 0.0, *each] for each in norms]
    state["ampfast"]["norms"] = [[("Sigmas", each)] for each in words]
    loop.scaler.load_state_dict(state)


def test_checkpoints_of_any_kind() -> None:
    loop = Loop()
    loop.clipped(1.0, 20.0)
    theirs = torch.amp.GradScaler("cpu")
    fresh = theirs.state_dict()
    assert set(loop.scaler.state_dict()) == set(fresh), "only sigmas add to it"
    loop.run([1.0])
    theirs.load_state_dict(loop.scaler.state_dict())
    assert theirs.get_scale() == 8.0
    load_norms(loop, [[2.0] * 1024])
    assert loop.run([0.0, 9.0, 2.0]) == [None, "spike", None]
    assert loop.norms() == [[2.0] * WINDOW]
    load_norms(loop, [[]])
    loop.run([3.0])
    other = Loop(min_scale=1.0)  # norms bind to no policy
    other.scaler.load_state_dict(loop.scaler.state_dict())
    assert other.norms() == loop.norms() == [[3.0]]
    loop.scaler.load_state_dict({**fresh, "scale": 8.0})
    assert loop.norms() == []


def test_captured_clips_go_on_with_the_norms_of_their_place(monkeypatch: Any) -> None:
    loop, limit = Loop(count=2), Sigmas(2.0, WINDOW)

    def captured(norm: float) -> str | None:
        with monkeypatch.context() as patched:
            pretend_capture(patched)
            loop.clip(norm, limit, which=1)
        return loop.finish(1)[0]

    for which in (0, 1):
        loop.run([1.0], limit, which)
    captured(1.0)
    load_norms(loop, [[7.0], USUAL])
    assert [captured(50.0) for _ in range(3)] == ["spike", "spike", None]
    with pytest.warns(UserWarning, match="taken as the new usual"):
        assert loop.norms() == [[7.0], [50.0]]


# Bad input

FINITE, NUMBER = "at least 0 and finite, got", r"a Python number or .* \(.* are for max_norm\), got"
# Arguments of Sigmas, or a limit of a clip.
BAD: list[tuple[Any, type[Exception], str]] = [
    ((-1.0,), ValueError, f"sigmas must be {FINITE} -1.0"),
    ((math.nan,), ValueError, f"sigmas must be {FINITE} nan"),
    ((math.inf,), ValueError, f"sigmas must be {FINITE} inf"),
    ((10**400,), ValueError, f"sigmas must be {FINITE}"),
    (("6",), TypeError, "sigmas must be a Python number, got str"),
    ((6, 1), ValueError, "window must be from 2 to 1024, got 1"),
    ((6, 1025), ValueError, "window must be from 2 to 1024, got 1025"),
    ((6, 2.0), TypeError, "window must be an int, got float"),
    ((6, True), TypeError, "window must be an int, got bool"),
    ((6, 9, 0), ValueError, "patience must be from 1 to 2147483647, got 0"),
    ((6, 9, 2**31), ValueError, "patience must be from 1 to 2147483647"),
    ((6, 9, True), TypeError, "patience must be an int, got bool"),
    (math.nan, ValueError, "skip_above must be at least 0, got nan"),
    (-1, ValueError, "skip_above must be at least 0, got"),
    (ampfast.Percentile(), TypeError, f"skip_above must be {NUMBER} Percentile"),
    ("20", TypeError, f"skip_above must be {NUMBER} str"),
    (True, TypeError, f"skip_above must be {NUMBER} bool"),
    (torch.tensor(2.0), TypeError, f"skip_above must be {NUMBER} Tensor"),
]


@pytest.mark.parametrize(("given", "error", "text"), BAD, ids=[text for *_, text in BAD])
def test_bad_numbers(given: Any, error: type[Exception], text: str) -> None:
    loop = Loop()
    calls = [partial(loop.clip, 1.0, given), partial(setattr, loop.scaler, "skip_above", given)]
    calls += [partial(Loop, skip_above=given), partial(ampfast.StepGuard, "cpu", skip_above=given)]
    for call in [partial(Sigmas, *given)] if isinstance(given, tuple) else calls:
        with pytest.raises(error, match=text):
            call()
    assert loop.scaler.skip_above is None


def test_a_clip_that_is_refused_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(growth_interval=10**6)
    loop.run(USUAL)
    before = loop.norms()
    for above, options, text in (
        (-1, {}, "skip_above must be"),
        (Sigmas(2.0, 2), {"in_place": False}, "in_place=False needs an optimizer"),
    ):
        with pytest.raises(ValueError, match=text):
            loop.clip(1.0, above, **options)
        assert loop.norms() == before
        assert loop.param.grad.norm().item() == pytest.approx(8.0)
    assert loop.clipped(50.0, Sigmas(2.0, WINDOW)) == "spike"
    pretend_capture(monkeypatch)
    with pytest.raises(RuntimeError, match="the norms of Sigmas, which every replay"):
        Loop().clip(1.0, Sigmas())
    with pytest.raises(RuntimeError, match="a question that the host asks"):
        loop.scaler.skip_reason(loop.optimizer)


def test_limits_at_their_bounds() -> None:
    loop = Loop()
    assert loop.clipped(1.0, Fraction(1, 2)) == "spike"
    assert loop.clipped(1.0, 10**400) is None
    assert Loop().clipped(1.0, Sigmas(Fraction(13, 2)), 3.0) is None
    assert loop.clipped(1.0, 0) == loop.clipped(0.7, 0.6) == "spike"
    assert loop.clipped(1.0, Sigmas(0.0, 1024)) is None
    assert repr(Sigmas(Fraction(1, 2))) == "Sigmas(sigmas=0.5, window=128, patience=None)"
    loop = Loop(enabled=False)
    assert (loop.clipped(50.0, 20.0), loop.scaler.stats().spikes) == (None, 0)
