"""Schedules without skipped steps: the exact recipe, and `LateScheduler`, one step behind."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.captures import pretend_capture
from support.comparison import TorchScaler, assert_same, outcome
from support.optimizers import OPTIMIZERS
from support.steps import Side, side, small_model, through_file
from torch.optim import lr_scheduler as lr
from torch.optim import swa_utils

from ampfast import GradScaler, LateScheduler

INF = float("inf")
# The first step and two in a row are skipped, the last one runs.
SKIPPED = (0, 3, 6, 7)
STEPS = 12
SETTINGS: dict[str, Any] = {"init_scale": 2.0**10, "growth_interval": 2}

KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    **{name: OPTIMIZERS[name] for name in ("momentum", "adam", "fused_adamw")},
    "fused_momentum": lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9, fused=True),
}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": partial(lr.LambdaLR, lr_lambda=lambda epoch: 0.9**epoch),
    "MultiplicativeLR": partial(lr.MultiplicativeLR, lr_lambda=lambda epoch: 1 - 0.01 * epoch),
    "StepLR": partial(lr.StepLR, step_size=3),
    "MultiStepLR": partial(lr.MultiStepLR, milestones=[1, 2, 5]),
    "ConstantLR": partial(lr.ConstantLR, factor=0.5, total_iters=4),
    "LinearLR": partial(lr.LinearLR, start_factor=0.25, total_iters=6),
    "ExponentialLR": partial(lr.ExponentialLR, gamma=0.9),
    "SequentialLR": lambda o: lr.SequentialLR(
        o, [lr.ConstantLR(o, 0.1), lr.ExponentialLR(o, 0.9)], [4]
    ),
    "CosineAnnealingLR": partial(lr.CosineAnnealingLR, T_max=10),
    "ChainedScheduler": lambda o: lr.ChainedScheduler(
        [lr.ConstantLR(o, 0.1, total_iters=3), lr.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": partial(lr.ReduceLROnPlateau, factor=0.5, patience=0),
    "CyclicLR": partial(lr.CyclicLR, base_lr=0.1, max_lr=0.5, step_size_up=3),
    "CosineAnnealingWarmRestarts": partial(lr.CosineAnnealingWarmRestarts, T_0=4),
    "OneCycleLR": partial(lr.OneCycleLR, max_lr=0.4, total_steps=20),
    "PolynomialLR": partial(lr.PolynomialLR, total_iters=10, power=2.0),
    "SWALR": partial(swa_utils.SWALR, swa_lr=0.05, anneal_epochs=5),
}


def arguments_of(scheduler: Any, step: int) -> tuple[float, ...]:
    """Arguments of the scheduler's `step`; the loss alternately falls and rises three times."""
    scheduler = getattr(scheduler, "scheduler", scheduler)
    if isinstance(scheduler, lr.ReduceLROnPlateau):
        return (8.0 - step if step // 3 % 2 else 8.0 + step,)
    return ()


def rates(optimizer: torch.optim.Optimizer) -> list[list[Any]]:
    """Learning rates and momenta."""
    names = ("lr", "momentum", "betas")
    return [[group[name] for name in names if name in group] for group in optimizer.param_groups]


def without_scaler(kind: str, schedule: str) -> list[Any]:
    """Rates by iteration, and finally, of a loop without the skipped iterations."""
    model = small_model()
    optimizer = KINDS[kind](list(model.parameters()))
    scheduler = SCHEDULERS[schedule](optimizer)
    seen = []
    for step in range(STEPS):
        seen.append(rates(optimizer))
        if step not in SKIPPED:
            model(torch.ones(8)).sum().backward()
            optimizer.step()
            scheduler.step(*arguments_of(scheduler, step))
    return [*seen, rates(optimizer)]


def trained(
    one: Side, scheduler: Any, steps: range = range(STEPS), is_exact: bool = False
) -> list[Any]:
    seen = []
    for step in steps:
        seen.append(rates(one.optimizer))
        one.train(step, INF if step in SKIPPED and one.scaler.is_enabled() else None)
        if not (is_exact and one.scaler.step_skipped(one.optimizer)):
            scheduler.step(*arguments_of(scheduler, step))
    return seen


def late_one(
    kind: str = "adam", schedule: str = "ExponentialLR", seed: int = 0
) -> tuple[Side, LateScheduler]:
    one = side(GradScaler, KINDS[kind], seed, **SETTINGS)
    return one, LateScheduler(SCHEDULERS[schedule](one.optimizer), one.scaler, one.optimizer)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schedule", SCHEDULERS)
@pytest.mark.parametrize("is_exact", [True, False])
def test_no_schedule_counts_skipped_steps(is_exact: bool, kind: str, schedule: str) -> None:
    def run() -> list[Any]:
        one = side(GradScaler, KINDS[kind], **SETTINGS)
        scheduler = SCHEDULERS[schedule](one.optimizer)
        if is_exact:
            return [*trained(one, scheduler, is_exact=True), rates(one.optimizer)]
        scheduler = LateScheduler(scheduler, one.scaler, one.optimizer)
        seen = [*trained(one, scheduler), rates(one.optimizer)]
        for _ in range(2):  # the second one finds nothing
            scheduler.flush()
            seen.append(rates(one.optimizer))
        return seen

    ours, theirs = outcome(run), outcome(lambda: without_scaler(kind, schedule))
    exact = theirs.value
    assert_same(ours.value, exact if is_exact else [exact[0], *exact, exact[-1]])
    assert [text for _, text, *_ in ours.warned] == [text for _, text, *_ in theirs.warned]


# Other attributes and methods


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_attributes_are_the_schedulers(kind: str) -> None:
    one, scheduler = late_one("adam", kind)
    wrapped = scheduler.scheduler
    assert scheduler.get_last_lr() == wrapped.get_last_lr()
    assert scheduler.optimizer is one.optimizer
    scheduler.last_epoch = 9
    scheduler.note = "a"
    assert (wrapped.last_epoch, wrapped.note) == (9, "a")
    with pytest.raises(AttributeError, match=f"{kind}.*missing"):
        scheduler.missing  # noqa: B018
    assert copy.copy(scheduler).scheduler is wrapped
    copied = copy.deepcopy(scheduler)
    copied.last_epoch = 4
    assert (scheduler.last_epoch, copied.scheduler.last_epoch) == (9, 4)
    assert type(copied) is LateScheduler


def test_a_method_that_is_replaced_and_restored() -> None:
    one, scheduler = late_one()
    calls: list[str] = []
    scheduler.step = lambda: calls.append("step")
    scheduler.step()
    del scheduler.step
    one.train(1)
    scheduler.step()
    scheduler.flush()
    assert (calls, scheduler.last_epoch) == (["step"], 1)


def test_bad_arguments() -> None:
    optimizer = torch.optim.SGD([torch.ones(1)], lr=0.1)
    with pytest.raises(TypeError, match=r"needs an ampfast\.GradScaler, got torch\.amp\."):
        LateScheduler(SCHEDULERS["StepLR"](optimizer), TorchScaler("cpu"), optimizer)


def test_a_step_that_is_refused_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    one, scheduler = late_one("fused_adamw")
    one.train(1)
    scheduler.step()
    with monkeypatch.context() as patch:
        pretend_capture(patch)
        with pytest.raises(RuntimeError, match="call it after the replay"):
            scheduler.step()
    scheduler._optimizer = torch.optim.SGD([torch.ones(1)], lr=0.1)
    with pytest.raises(LookupError, match="never checked"):
        scheduler.step()
    assert scheduler.last_epoch == 0
    scheduler.flush()
    assert scheduler.last_epoch == 1


@pytest.mark.parametrize("schedule", ["ExponentialLR", "SequentialLR", "ReduceLROnPlateau"])
@pytest.mark.parametrize("kind", KINDS)
def test_resumed_at_any_step(kind: str, schedule: str) -> None:
    """Checkpoints include the pending decision, and saving does not resolve it."""
    whole, scheduler = late_one(kind, schedule)
    expected = [*trained(whole, scheduler), rates(whole.optimizer)]
    for end in range(STEPS + 1):
        first, scheduler = late_one(kind, schedule)
        seen = trained(first, scheduler, range(end))
        things = (first.model, first.optimizer, first.scaler, scheduler)
        states = through_file([thing.state_dict() for thing in things])
        second, scheduler = late_one(kind, schedule, seed=1)
        things = (second.model, second.optimizer, second.scaler, scheduler)
        for thing, state in zip(things, states, strict=True):
            thing.load_state_dict(state)
        seen += trained(second, scheduler, range(end, STEPS))
        assert_same([*seen, rates(second.optimizer)], expected)
        assert_same(
            [first.losses + second.losses, second.observe()["parameters"]],
            [whole.losses, whole.observe()["parameters"]],
        )


def test_loaded_decisions() -> None:
    one, scheduler = late_one()
    fresh = scheduler.state_dict()
    one.train(1)
    scheduler.step()
    state = through_file(scheduler.state_dict())
    scheduler.load_state_dict(fresh)
    scheduler.flush()
    assert scheduler.last_epoch == 0, "the pending one is dropped"
    another, resumed = late_one()
    resumed.load_state_dict(state)
    with warnings.catch_warnings():
        # Of a scheduler created before its optimizer, as in this process.
        warnings.simplefilter("error")
        another.train(0, INF)
        resumed.step()
    assert resumed.last_epoch == 1
    alone = copy.deepcopy(resumed.scheduler.state_dict())
    resumed.load_state_dict(alone)
    assert_same(resumed.state_dict(), {"scheduler": alone, "outstanding": None})
