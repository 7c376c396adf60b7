"""Schedules without skipped steps: the exact recipe, and `LateScheduler`, one step behind."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.comparison import assert_same
from support.optimizers import OPTIMIZERS
from support.scalers import TorchScaler
from support.twins import Side, side, small_model
from torch.optim import lr_scheduler, swa_utils

import ampfast
from ampfast import GradScaler, LateScheduler, capture
from ampfast import lr_scheduler as module_under_test

INF = float("inf")
# The first step and two in a row are skipped, the last one runs.
SKIPPED = (0, 3, 6, 7)
STEPS = 12
SETTINGS: dict[str, Any] = {"init_scale": 2.0**10, "growth_interval": 2}

KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "momentum": OPTIMIZERS["momentum"],
    "adam": OPTIMIZERS["adam"],
    "fused_momentum": lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9, fused=True),
    "fused_adamw": OPTIMIZERS["fused_adamw"],
}

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 1 - 0.01 * epoch),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 2, 5]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, total_iters=4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.25, total_iters=6),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.9)], [4]
    ),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.5, step_size_up=3),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.4, total_steps=20),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 10, 2.0),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.05, anneal_epochs=5),
}


def arguments_of(scheduler: Any, step: int) -> tuple[float, ...]:
    """Arguments of the scheduler's `step`; the loss alternately falls and rises three times."""
    scheduler = getattr(scheduler, "scheduler", scheduler)
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        return (8.0 - step if step // 3 % 2 else 8.0 + step,)
    return ()


def rates(optimizer: torch.optim.Optimizer) -> list[list[Any]]:
    """Learning rates and momenta."""
    names = ("lr", "momentum", "betas")
    return [[group[name] for name in names if name in group] for group in optimizer.param_groups]


def without_scaler(kind: str, schedule: str, skipped: tuple[int, ...] = SKIPPED) -> list[Any]:
    """Rates by iteration, and finally, of a loop without the skipped iterations."""
    model = small_model()
    optimizer = KINDS[kind](list(model.parameters()))
    scheduler = SCHEDULERS[schedule](optimizer)
    seen = []
    for step in range(STEPS):
        seen.append(rates(optimizer))
        if step not in skipped:
            model(torch.ones(8)).sum().backward()
            optimizer.step()
            scheduler.step(*arguments_of(scheduler, step))
    return [*seen, rates(optimizer)]


Advance = Callable[[Side, Any, int], None]


def exact(one: Side, scheduler: Any, step: int) -> None:
    if not one.scaler.step_skipped(one.optimizer):
        scheduler.step(*arguments_of(scheduler, step))


def late(one: Side, scheduler: Any, step: int) -> None:
    scheduler.step(*arguments_of(scheduler, step))


def trained(one: Side, scheduler: Any, advance: Advance, steps: range = range(STEPS)) -> list[Any]:
    seen = []
    for step in steps:
        seen.append(rates(one.optimizer))
        one.train(step, INF if step in SKIPPED else None)
        advance(one, scheduler, step)
    return seen


def late_one(kind: str, schedule: str, **arguments: Any) -> tuple[Side, LateScheduler]:
    one = side(GradScaler, KINDS[kind], **{**SETTINGS, **arguments})
    return one, LateScheduler(SCHEDULERS[schedule](one.optimizer), one.scaler, one.optimizer)


def recorded(run: Callable[[], list[Any]]) -> tuple[list[Any], list[str]]:
    """Result of a loop, and its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = run()
    return result, [str(warning.message) for warning in caught]


def test_all_of_torchs_are_here() -> None:
    bases = {"LRScheduler"}
    assert {*lr_scheduler.__all__, "SWALR"} - bases == SCHEDULERS.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_a_schedule_that_counts_skipped_steps_warns(kind: str) -> None:
    """The control: a scheduler stepped in skipped steps warns, unless fused."""
    one = side(GradScaler, KINDS[kind], **SETTINGS)
    scheduler = SCHEDULERS["StepLR"](one.optimizer)
    _, warned = recorded(lambda: trained(one, scheduler, late))
    assert any("before `optimizer.step()`" in text for text in warned) == (kind != "fused_adamw")


def check_exact(kind: str, schedule: str, scaler_type: type[TorchScaler]) -> None:
    def run() -> list[Any]:
        one = side(scaler_type, KINDS[kind], **SETTINGS)
        seen = trained(one, SCHEDULERS[schedule](one.optimizer), exact)
        return [*seen, rates(one.optimizer)]

    ours, reference = recorded(run), recorded(lambda: without_scaler(kind, schedule))
    assert_same(ours[0], reference[0])
    assert ours[1] == reference[1]


def check_late(kind: str, schedule: str, scaler_type: type[TorchScaler]) -> None:
    def run() -> list[Any]:
        one = side(scaler_type, KINDS[kind], **SETTINGS)
        scheduler = SCHEDULERS[schedule](one.optimizer)
        scheduler = LateScheduler(scheduler, one.scaler, one.optimizer)
        seen = [*trained(one, scheduler, late), rates(one.optimizer)]
        scheduler.flush()
        return [*seen, rates(one.optimizer)]

    ours, (exact_rates, warned) = recorded(run), recorded(lambda: without_scaler(kind, schedule))
    assert_same(ours[0], [exact_rates[0], *exact_rates])
    assert ours[1] == warned


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schedule", SCHEDULERS)
@pytest.mark.parametrize("check", [check_exact, check_late])
def test_no_schedule_counts_skipped_steps(check: Any, kind: str, schedule: str) -> None:
    check(kind, schedule, GradScaler)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("check", [check_exact, check_late])
def test_under_patch(check: Any, kind: str) -> None:
    with ampfast.patch():
        check(kind, "ChainedScheduler", torch.amp.GradScaler)


def test_a_flush_comes_once() -> None:
    one, scheduler = late_one("adam", "ExponentialLR")
    trained(one, scheduler, late)
    scheduler.flush()
    epoch = scheduler.last_epoch
    scheduler.flush()
    assert scheduler.last_epoch == epoch == STEPS - len(SKIPPED)


def test_an_iteration_counts_after_the_scheduler_raised() -> None:
    class Full(lr_scheduler.ExponentialLR):
        full = False

        def step(self) -> None:
            if self.full:
                raise ValueError("no more")
            super().step()

    one = side(GradScaler, KINDS["adam"], **SETTINGS)
    scheduler = LateScheduler(Full(one.optimizer, 0.5), one.scaler, one.optimizer)
    one.train(1)
    scheduler.step()
    scheduler.scheduler.full = True
    one.train(2)
    with pytest.raises(ValueError, match="no more"):
        scheduler.step()
    scheduler.scheduler.full = False
    scheduler.flush()
    assert scheduler.last_epoch == 1


class Arrival:
    """Event before which the flag on the host is wrong."""

    def __init__(self, name: int, waits: list[int], flag: torch.Tensor) -> None:
        self.name, self.waits, self.flag = name, waits, flag
        self.right = flag.clone()
        flag.copy_(1 - flag)

    def synchronize(self) -> None:
        self.waits.append(self.name)
        self.flag.copy_(self.right)


@pytest.mark.parametrize("kind", KINDS)
def test_a_flag_is_read_once_it_has_arrived(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits only for the flag of the previous iteration."""
    sent, waits = 0, []

    def send(flag: torch.Tensor) -> tuple[torch.Tensor, Arrival]:
        nonlocal sent
        sent += 1
        return flag, Arrival(sent - 1, waits, flag)

    monkeypatch.setattr(module_under_test.scalars, "copy_to_host_async", send)
    one, scheduler = late_one(kind, "ExponentialLR")
    seen = []
    for step in range(STEPS):
        seen += trained(one, scheduler, late, range(step, step + 1))
        assert waits == list(range(step))
    expected = without_scaler(kind, "ExponentialLR")
    assert_same(seen, [expected[0], *expected[: STEPS - 1]])


def test_a_flag_on_the_host_is_not_changed_later() -> None:
    """Even if the caller accumulates the scaler's own flags in place."""
    one, scheduler = late_one("fused_adamw", "ExponentialLR")
    one.train(0)
    scheduler.step()
    for flag in one.scaler._last_flags(one.optimizer).values():
        flag.fill_(1.0)
    scheduler.flush()
    assert scheduler.last_epoch == 1


@pytest.mark.parametrize("before_update", [False, True])
def test_before_or_after_update(before_update: bool) -> None:
    one, scheduler = late_one("adam", "ExponentialLR")
    seen = []
    for step in range(STEPS):
        seen.append(rates(one.optimizer))
        one.optimizer.zero_grad()
        one.scaler.scale(one.loss(step)).backward()
        if step in SKIPPED:
            one.model[0].bias.grad[1] = INF
        one.scaler.step(one.optimizer)
        if before_update:
            scheduler.step()
        one.scaler.update()
        if not before_update:
            scheduler.step()
    expected = without_scaler("adam", "ExponentialLR")
    assert_same(seen, [expected[0], *expected[: STEPS - 1]])


def test_step_and_update() -> None:
    one, scheduler = late_one("fused_adamw", "ExponentialLR")
    for step in range(4):
        one.scaler.scale(one.loss(step)).backward()
        if step == 1:
            one.model[0].bias.grad[1] = INF
        one.scaler.step_and_update(one.optimizer)
        one.optimizer.zero_grad()
        scheduler.step()
    assert scheduler.last_epoch == 2
    scheduler.flush()
    assert scheduler.last_epoch == 3


@pytest.mark.parametrize("kinds", [("momentum", "fused_adamw"), ("fused_momentum", "adam")])
def test_two_optimizers(kinds: tuple[str, str]) -> None:
    """Each schedule counts the steps of its own optimizer."""
    scaler = GradScaler("cpu", **SETTINGS)
    sides = [side(GradScaler, KINDS[kind], seed) for seed, kind in enumerate(kinds)]
    schedules = [
        LateScheduler(SCHEDULERS["ExponentialLR"](one.optimizer), scaler, one.optimizer)
        for one in sides
    ]
    skipped = (SKIPPED, (1, 3, STEPS - 1))
    seen: list[list[Any]] = [[], []]
    for step in range(STEPS):
        for one, bad, before in zip(sides, skipped, seen, strict=True):
            before.append(rates(one.optimizer))
            one.optimizer.zero_grad()
            scaler.scale(one.loss(step)).backward()
            if step in bad:
                one.model[0].bias.grad[1] = INF
            scaler.step(one.optimizer)
        scaler.update()
        for schedule in schedules:
            schedule.step()
    for kind, bad, ours in zip(kinds, skipped, seen, strict=True):
        expected = without_scaler(kind, "ExponentialLR", bad)
        assert_same(ours, [expected[0], *expected[: STEPS - 1]])


def test_a_disabled_scaler_has_the_same_schedule() -> None:
    one, scheduler = late_one("adam", "ExponentialLR", enabled=False)
    seen = []
    for step in range(STEPS):
        seen.append(rates(one.optimizer))
        one.train(step)
        scheduler.step()
    expected = without_scaler("adam", "ExponentialLR", ())
    assert_same(seen, [expected[0], *expected[: STEPS - 1]])


# Other attributes and methods


def test_attributes_are_the_schedulers() -> None:
    one, scheduler = late_one("adam", "ExponentialLR")
    assert scheduler.get_last_lr() == [0.1]
    assert scheduler.optimizer is one.optimizer
    with pytest.raises(AttributeError, match="ExponentialLR"):
        _ = scheduler.missing
    assert copy.copy(scheduler).scheduler is scheduler.scheduler


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_write_reaches_the_scheduler(kind: str) -> None:
    _, scheduler = late_one("adam", kind)
    wrapped = scheduler.scheduler
    scheduler.last_epoch = 9
    scheduler.note = "a"
    assert (wrapped.last_epoch, wrapped.note) == (9, "a")
    assert {"last_epoch", "note", "flush", "state_dict"} <= set(dir(scheduler))
    del scheduler.note
    assert not hasattr(wrapped, "note")
    assert not hasattr(scheduler, "note")
    with pytest.raises(AttributeError, match="note"):
        del scheduler.note
    assert vars(scheduler).keys() == {"scheduler", "_scaler", "_optimizer", "_outstanding"}


def test_a_write_of_its_own_stays() -> None:
    one, scheduler = late_one("adam", "ExponentialLR")
    calls = []
    scheduler.step = lambda: calls.append("step")
    scheduler.step()
    assert calls == ["step"]
    del scheduler.step
    another = SCHEDULERS["StepLR"](one.optimizer)
    scheduler.scheduler = another
    one.train(1)
    scheduler.step()
    scheduler.flush()
    assert another.last_epoch == 1


def test_within_sequential() -> None:
    """Its constructor writes `last_epoch` of the schedulers that it is given."""
    one, scheduler = late_one("adam", "ConstantLR")
    optimizer = side(GradScaler, KINDS["adam"], **SETTINGS).optimizer
    inner = SCHEDULERS["ConstantLR"](optimizer)
    for first, its in ((scheduler, one.optimizer), (inner, optimizer)):
        lr_scheduler.SequentialLR(its, [first, SCHEDULERS["ExponentialLR"](its)], [2])
    assert scheduler.scheduler.last_epoch == inner.last_epoch


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_copied_and_pickled_after_a_write(kind: str) -> None:
    _, scheduler = late_one("adam", kind)
    scheduler.last_epoch = 9
    copied = copy.deepcopy(scheduler)
    copied.last_epoch = 4
    assert (scheduler.last_epoch, copied.scheduler.last_epoch) == (9, 4)
    assert type(copied) is LateScheduler


class Copied(lr_scheduler.ExponentialLR):
    """Scheduler with protocols of its own, which are not those of its wrapper."""

    def __deepcopy__(self, memo: Any) -> Any:
        return "another"

    def __getstate__(self) -> Any:
        return {"gamma": self.gamma, "last_epoch": self.last_epoch}


def test_protocols_of_the_scheduler_are_not_its_wrappers() -> None:
    one = side(GradScaler, KINDS["adam"], **SETTINGS)
    scheduler = LateScheduler(Copied(one.optimizer, 0.5), one.scaler, one.optimizer)
    assert copy.deepcopy(scheduler).scheduler == "another"
    scheduler = LateScheduler(Copied(one.optimizer, 0.5), one.scaler, one.optimizer)
    assert pickle.loads(pickle.dumps(scheduler)).last_epoch == 0


def test_torchs_scaler_is_refused() -> None:
    optimizer = torch.optim.SGD([torch.ones(1)], lr=0.1)
    with pytest.raises(TypeError, match=r"needs an ampfast\.GradScaler, got torch\.amp\."):
        LateScheduler(SCHEDULERS["StepLR"](optimizer), TorchScaler("cpu"), optimizer)


@pytest.mark.parametrize("given", [None, 0.1, "StepLR"])
def test_what_is_no_scheduler_is_refused(given: object) -> None:
    optimizer = torch.optim.SGD([torch.ones(1)], lr=0.1)
    kind = type(given).__name__
    with pytest.raises(TypeError, match=rf"needs a scheduler with step, got builtins\.{kind}"):
        LateScheduler(given, GradScaler("cpu"), optimizer)


def test_an_optimizer_that_was_never_checked() -> None:
    one, scheduler = late_one("adam", "ExponentialLR")
    one.train(1)
    scheduler.step()
    scheduler._optimizer = torch.optim.SGD([torch.ones(1)], lr=0.1)
    with pytest.raises(LookupError, match="never checked"):
        scheduler.step()
    assert scheduler.last_epoch == 0
    scheduler.flush()
    assert scheduler.last_epoch == 1


def test_is_refused_under_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    one, scheduler = late_one("fused_adamw", "ExponentialLR")
    one.train(1)
    scheduler.step()
    with monkeypatch.context() as patch:
        patch.setattr(capture, "is_capturing", lambda: True)
        with pytest.raises(RuntimeError, match="call it after the replay"):
            scheduler.step()
    assert scheduler.last_epoch == 0


def saved(*things: Any) -> list[Any]:
    """State dicts, saved to and loaded from a file."""
    file = io.BytesIO()
    torch.save([thing.state_dict() for thing in things], file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("schedule", ["ExponentialLR", "SequentialLR", "ReduceLROnPlateau"])
@pytest.mark.parametrize("kind", KINDS)
def test_resumed_at_any_step(kind: str, schedule: str) -> None:
    """Checkpoints include the pending decision, and saving does not resolve it."""
    whole, scheduler = late_one(kind, schedule)
    expected = [*trained(whole, scheduler, late), rates(whole.optimizer)]
    for end in range(STEPS + 1):
        first, scheduler = late_one(kind, schedule)
        seen = trained(first, scheduler, late, range(end))
        states = saved(first.model, first.optimizer, first.scaler, scheduler)
        second, scheduler = late_one(kind, schedule, seed=1)
        for thing, state in zip(
            (second.model, second.optimizer, second.scaler, scheduler), states, strict=True
        ):
            thing.load_state_dict(state)
        seen += trained(second, scheduler, late, range(end, STEPS))
        assert_same([*seen, rates(second.optimizer)], expected)
        assert_same(
            [first.losses + second.losses, second.observe()["parameters"]],
            [whole.losses, whole.observe()["parameters"]],
        )


def test_arguments_by_keyword_are_saved() -> None:
    one, scheduler = late_one("adam", "ReduceLROnPlateau")
    for step, metrics in enumerate((1.0, 2.0)):
        one.train(step)
        scheduler.step(metrics=metrics)
    (state,) = saved(scheduler)
    assert state["outstanding"] == ((), {"metrics": 2.0})
    another, resumed = late_one("adam", "ReduceLROnPlateau")
    resumed.load_state_dict(state)
    resumed.flush()
    assert another.optimizer.param_groups[0]["lr"] == 0.05
    assert one.optimizer.param_groups[0]["lr"] == 0.1, "saving has decided"


def test_resumed_after_the_first_step_before_one_that_is_skipped() -> None:
    one, scheduler = late_one("adam", "ExponentialLR")
    one.train(1)
    scheduler.step()
    (state,) = saved(scheduler)
    another, resumed = late_one("adam", "ExponentialLR")
    resumed.load_state_dict(state)
    with warnings.catch_warnings():
        # Of a scheduler created before its optimizer, as in this process.
        warnings.simplefilter("error")
        another.train(0, INF)
        resumed.step()
    assert resumed.last_epoch == 1


def test_loading_drops_a_pending_decision() -> None:
    one, scheduler = late_one("adam", "ExponentialLR")
    fresh = scheduler.state_dict()
    one.train(1)
    scheduler.step()
    scheduler.load_state_dict(fresh)
    scheduler.flush()
    assert scheduler.last_epoch == 0


def test_a_checkpoint_of_the_scheduler_alone() -> None:
    one, scheduler = late_one("adam", "ExponentialLR")
    trained(one, scheduler, late)
    scheduler.flush()
    alone = scheduler.scheduler.state_dict()
    _, resumed = late_one("adam", "ExponentialLR")
    resumed.load_state_dict(copy.deepcopy(alone))
    assert_same(resumed.state_dict(), {"scheduler": alone, "outstanding": None})
