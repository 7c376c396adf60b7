"""`step_and_update` against `step` for each optimizer and then `update`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.comparison import assert_same
from support.optimizers import FUSED, OPTIMIZERS
from support.outcomes import outcome
from support.scalers import TorchScaler, started
from support.twins import assert_sides_same, side

from ampfast import GradScaler
from ampfast.backends.core import Factor, Pass
from ampfast.backends.gpu import Ending
from ampfast.backends.torch_ops import TensorList
from ampfast.gradients import Gradients

GROUPS = [
    ("sgd",),
    ("fused_adam",),
    ("momentum", "adam"),
    ("fused_sgd", "fused_adamw", "fused_adagrad"),
    ("adam", "fused_adam"),
    ("fused_sgd", "sgd", "momentum"),
]
# Optimizers with a bad gradient, step by step.
PATTERNS = [(), (0,), (), (-1,), (0, -1), (), (), ()]


class Trial:
    """Several small models that share one scaler."""

    def __init__(self, scaler_type: type, kinds: tuple[str, ...], **arguments: Any) -> None:
        defaults = {"init_scale": 2.0**10, "growth_interval": 2, "growth_factor": 1.7}
        self.sides = [
            side(scaler_type, kind, seed, **{**defaults, **arguments})
            for seed, kind in enumerate(kinds)
        ]
        self.scaler: Any = self.sides[0].scaler
        for each in self.sides:
            each.scaler = self.scaler

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [each.optimizer for each in self.sides]

    def backward(self, seed: int, bad: tuple[int, ...] = (), value: float = math.inf) -> None:
        for each in self.sides:
            each.optimizer.zero_grad()
            self.scaler.scale(each.loss(seed)).backward()
        for index in bad:
            next(self.sides[index].model.parameters()).grad.view(-1)[3] = value

    def apart(self) -> list[Any]:
        results = [self.scaler.step(optimizer) for optimizer in self.optimizers]
        self.scaler.update()
        return results

    def at_once(self) -> list[Any]:
        return self.scaler.step_and_update(*self.optimizers)

    def same_as(self, other: Trial) -> None:
        for ours, theirs in zip(self.sides, other.sides, strict=True):
            assert_sides_same(ours, theirs)


Prepare = Callable[[Trial], object]


def trials(kinds: tuple[str, ...], prepare: Prepare | None = None) -> tuple[Trial, Trial]:
    """Ours and torch's, both prepared."""
    both = Trial(GradScaler, kinds), Trial(TorchScaler, kinds)
    if prepare is not None:
        for trial in both:
            prepare(trial)
    return both


def assert_end_alike(ours: Trial, theirs: Trial) -> None:
    """Ends the iteration of ours in one call."""
    ends = outcome(ours.at_once), outcome(theirs.apart)
    assert_same(ends[0].comparable()[:2], ends[1].comparable()[:2])
    ours.same_as(theirs)


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("explicit", [(), (0,), (-1,), (0, -1)])
@pytest.mark.parametrize("kinds", GROUPS, ids="+".join)
def test_equals_step_then_update(
    kinds: tuple[str, ...], explicit: tuple[int, ...], value: float
) -> None:
    ours, theirs = trials(kinds)
    for seed, bad in enumerate(PATTERNS):
        for trial in (ours, theirs):
            trial.backward(seed, bad, value)
            for index in {i % len(kinds) for i in explicit}:
                trial.scaler.unscale_(trial.optimizers[index])
        results = ours.at_once()
        assert type(results) is list
        assert results == theirs.apart()
        ours.same_as(theirs)
        for index, optimizer in enumerate(ours.optimizers):
            hit = index in {i % len(kinds) for i in bad}
            assert ours.scaler.step_skipped(optimizer) is hit
            assert ours.scaler.found_inf(optimizer).item() == float(hit)


IRREGULAR: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": lambda: torch.sparse_coo_tensor(
        [[0, 2, 2]], [1.0, 2.0, 3.0], (4,), check_invariants=True
    ),
    "complex": lambda: torch.tensor([1 + 2j, 3.0]),
    "overlapping": lambda: torch.arange(6.0).as_strided((3, 3), (1, 1)),
    "expanded": lambda: torch.ones(1).expand(4),
    "float64": lambda: torch.ones(4, dtype=torch.float64),
    "bfloat16": lambda: torch.ones(4, dtype=torch.bfloat16),
    "empty": lambda: torch.empty(0),
    "integer": lambda: torch.ones(2, dtype=torch.int32),
    "float16": lambda: torch.ones(2, dtype=torch.float16),
}


class Stub:
    """Optimizer that only counts its steps; its gradients may be of any kind."""

    def __init__(self, grads: list[torch.Tensor]) -> None:
        self.params = []
        for gradient in grads:
            floating = gradient.is_floating_point() or gradient.is_complex()
            shape, dtype = gradient.shape, gradient.dtype
            param = torch.zeros(shape, dtype=dtype, requires_grad=floating)
            param.grad = gradient
            self.params.append(param)
        self.steps = 0

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [{"params": list(self.params)}]

    def step(self, *args: Any) -> int:
        self.steps += 1
        return self.steps


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("kind", IRREGULAR)
def test_irregular_gradients(kind: str, bad: bool, last: bool) -> None:
    both = []
    for scaler_type in (GradScaler, TorchScaler):
        scaler = started(scaler_type, 4.0, growth_interval=1)
        regular = torch.tensor([1.0, math.inf if bad else 2.0])
        stubs = [Stub([regular]), Stub([torch.ones(3), IRREGULAR[kind](), torch.ones(2)])]
        order = stubs if last else stubs[::-1]

        def run(s: Any = scaler, order: Any = order) -> list[Any]:
            if isinstance(s, GradScaler):
                return s.step_and_update(*order)
            results = [s.step(stub) for stub in order]
            s.update()
            return results

        result = outcome(run)
        grads = [[p.grad for p in stub.params] for stub in stubs] if not result.error else None
        both.append((result.comparable()[:2], scaler._scale, scaler._growth_tracker, grads))
    assert_same(*both)


def raises_in_step(trial: Trial, index: int) -> None:
    def step(*args: Any, **kwargs: Any) -> None:
        raise MemoryError("no room")

    trial.optimizers[index].step = step


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("kinds", [("sgd", "adam"), ("fused_sgd", "fused_adam")], ids="+".join)
def test_a_step_that_raises_leaves_the_scale_alone(kinds: tuple[str, ...], index: int) -> None:
    arguments = {"growth_interval": 1}
    ours, theirs = (Trial(kind, kinds, **arguments) for kind in (GradScaler, TorchScaler))
    before = [2.0**10, 0]
    for trial, call in ((ours, ours.at_once), (theirs, theirs.apart)):
        trial.backward(0)
        raises_in_step(trial, index)
        with pytest.raises(MemoryError, match="no room"):
            call()
        assert [trial.scaler._scale, trial.scaler._growth_tracker] == before
        for optimizer in trial.optimizers:
            # Not compared: the test's stand-in, and attributes that torch's scaler leaves on a
            # fused optimizer.
            for name in ("step", "grad_scale", "found_inf"):
                optimizer.__dict__.pop(name, None)
    ours.same_as(theirs)
    # A loop that catches the error goes on with update().
    for trial in (ours, theirs):
        trial.scaler.update()
    ours.same_as(theirs)


@pytest.mark.parametrize("kind", ["sgd", "fused_adam"])
def test_an_update_that_no_kernel_does(kind: str) -> None:
    ours, theirs = Trial(GradScaler, (kind,), backend="aten"), Trial(TorchScaler, (kind,))
    for trial in (ours, theirs):
        trial.backward(0)
    assert_end_alike(ours, theirs)

    ours.backward(1)
    raises_in_step(ours, 0)
    with pytest.raises(MemoryError, match="no room"):
        ours.at_once()


def no_gradients(trial: Trial) -> None:
    trial.scaler.scale(torch.ones(()))


def stepped(trial: Trial) -> None:
    trial.backward(0)
    trial.scaler.step(trial.optimizers[0])


def overflowed(trial: Trial) -> None:
    trial.backward(0, (0,))
    trial.scaler.step(trial.optimizers[0])


def unscaled(trial: Trial) -> None:
    trial.backward(0, (0,))
    trial.scaler.unscale_(trial.optimizers[0])


def checked(trial: Trial) -> None:
    """By a check of the same optimizer that does not count."""
    trial.backward(0, (0,))
    trial.scaler._check_inf_per_device(trial.optimizers[0])
    trial.backward(0)


CASES = [(prepare, "cpu") for prepare in (no_gradients, stepped, unscaled, None)]
CASES += [(prepare, "launcher") for prepare in (unscaled, checked)]


@pytest.mark.parametrize(("prepare", "kernels"), CASES)
@pytest.mark.parametrize("kinds", [("sgd",), ("fused_adam",), ("fused_adam", "sgd")], ids="+".join)
def test_errors_and_states_match_separate_calls(
    kinds: tuple[str, ...], prepare: Prepare | None, kernels: str, request: pytest.FixtureRequest
) -> None:
    if kernels == "launcher":
        request.getfixturevalue("launcher")
    ours, theirs = trials(kinds, prepare)
    assert_end_alike(ours, theirs)
    if kernels == "launcher":
        # An update that could not ride rides in no later check.
        for trial in (ours, theirs):
            trial.backward(1)
            trial.apart()
        ours.same_as(theirs)


@pytest.mark.parametrize("kernels", ["cpu", "launcher"])
def test_without_optimizers_it_is_update(kernels: str, request: pytest.FixtureRequest) -> None:
    if kernels == "launcher":
        request.getfixturevalue("launcher")
    ours, theirs = trials(("sgd",), overflowed)
    assert ours.scaler.step_and_update() == []
    theirs.scaler.update()
    ours.same_as(theirs)
    assert ours.scaler.get_scale() == 2.0**9
    with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
        ours.scaler.step_and_update()


def test_an_optimizer_stepped_before_counts_too() -> None:
    kinds = ("sgd", "fused_adam")
    ours, theirs = trials(kinds, overflowed)
    ours.scaler.step_and_update(ours.optimizers[1])
    theirs.scaler.step(theirs.optimizers[1])
    theirs.scaler.update()
    ours.same_as(theirs)
    assert ours.scaler.get_scale() == 2.0**9


def test_returns_the_value_of_each_step() -> None:
    stubs = [Stub([torch.tensor([value])]) for value in (1.0, math.nan, 1.0)]
    stubs[2].steps = 4
    assert started(GradScaler).step_and_update(*stubs) == [1, None, 5]


HOOKS = ("_unscale_grads_", "_maybe_opt_step", "_check_inf_per_device")


@pytest.mark.parametrize("hook", [*HOOKS, "unscale_", "step", "update"])
@pytest.mark.parametrize("kinds", [("sgd",), ("fused_adam",)], ids="+".join)
def test_overridden_hooks_run_as_often_as_apart(kinds: tuple[str, ...], hook: str) -> None:
    def overriding(base: type, seen: list[str]) -> type:
        def override(self: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(hook)
            return getattr(base, hook)(self, *args, **kwargs)

        return type("GradScaler", (base,), {hook: override})

    counts: list[list[str]] = [[], []]
    ours = Trial(overriding(GradScaler, counts[0]), kinds)
    theirs = Trial(overriding(TorchScaler, counts[1]), kinds)
    for seed, bad in enumerate(PATTERNS):
        for trial in (ours, theirs):
            trial.backward(seed, bad)
        ours.at_once()
        theirs.apart()
        ours.same_as(theirs)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("own", [None, 2.0])
@pytest.mark.parametrize("kind", FUSED)
def test_a_bad_gradient_that_was_mended_after_unscale_still_counts(
    kind: str, own: float | None
) -> None:
    at_once, apart = (Trial(GradScaler, (kind,)) for _ in range(2))
    for trial in (at_once, apart):
        unscaled(trial)
        for param in trial.sides[0].model.parameters():
            param.grad.nan_to_num_(0.0, 0.0, 0.0)
        if own is not None:
            trial.optimizers[0].grad_scale = torch.tensor(own)
    assert_end_alike(at_once, apart)
    assert at_once.scaler.get_scale() == 2.0**9


def test_every_kind_of_optimizer_was_tried() -> None:
    assert {kind for kinds in GROUPS for kind in kinds} == set(OPTIMIZERS)


@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_no_update_rides_to_the_scale_of_another_device(place: str) -> None:
    scale, rode = torch.tensor(4.0), []

    class Recording:
        def run(self, grads: TensorList, work: Pass) -> torch.Tensor:
            rode.append(work.ending)
            return torch.zeros((), device=grads.device)

    device = torch.device(place)
    grads: Any = [(Recording(), TensorList.of([torch.ones(3, device=device)]))]
    ending = Ending(None, scale)
    Gradients(grads).run(Pass(False, Factor.DIVIDE, scale, ending=ending))
    assert rode == [ending if place == "cpu" else None]
