"""An end for a training whose steps are all skipped."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ampfast

# By kind: scaler, optimizer, and what happens between backward and update.
KINDS: dict[str, tuple[Callable[..., Any], Callable[..., Any], str]] = {
    "plain": (ampfast.GradScaler, torch.optim.SGD, "step"),
    "fused": (ampfast.GradScaler, lambda params, lr: torch.optim.AdamW(params, lr, fused=True), ""),
    "guard": (ampfast.StepGuard, torch.optim.SGD, "step"),
    "at once": (ampfast.GradScaler, torch.optim.SGD, "step_and_update"),
    "clip": (ampfast.GradScaler, torch.optim.SGD, "clip"),
    "hooked": (
        type(
            "Hooked",
            (ampfast.GradScaler,),
            {"unscale_": lambda s, o: super(type(s), s).unscale_(o)},
        ),
        torch.optim.SGD,
        "step",
    ),
}
# Good and bad steps, the limit, and the number of the step at which it is reached.
CASES = [
    ("xxxx", 1, 0),
    ("..xxx", 3, 4),
    ("xx.xx.xxx", 3, 8),
    ("x.x.x.x.", 2, None),
    ("xx", 3, None),
]


class Training:
    """A parameter, its optimizer and a scaler."""

    def __init__(self, kind: str, **arguments: Any) -> None:
        make, optimizer, self.call = KINDS[kind]
        self.scaler = make("cpu", **arguments)
        self.param = torch.nn.Parameter(torch.zeros(3))
        self.optimizer = optimizer([self.param], lr=0.1)

    def step(self, value: float) -> None:
        scaler = self.scaler
        self.param.grad = scaler.scale(torch.ones(())) * torch.full((3,), value)
        if self.call == "step_and_update":
            scaler.step_and_update(self.optimizer)
            return
        if self.call == "clip":
            scaler.clip_grad_norm_(self.optimizer, 1.0)
        scaler.step(self.optimizer)
        scaler.update()

    def ends_at(self, steps: str, bad: float) -> int | None:
        """Number of the step whose update raises; None if none does."""
        for number, each in enumerate(steps):
            try:
                self.step(bad if each == "x" else 1.0)
            except FloatingPointError:
                return number
        return None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("steps", "limit", "expected"), CASES)
def test_it_ends_after_so_many_steps_in_a_row(
    kind: str, steps: str, limit: int, expected: int | None
) -> None:
    assert Training(kind, max_skips=limit).ends_at(steps, math.nan) == expected
    assert Training(kind).ends_at(steps, math.nan) is None


@pytest.mark.parametrize("kind", ["plain", "fused", "guard", "clip"])
def test_steps_skipped_for_their_norm_count(kind: str) -> None:
    training = Training(kind, max_skips=2, skip_above=10.0)
    assert training.ends_at(".x.xx", 20.0) == 4
    assert training.scaler.stats().spikes == 3


def test_the_error_has_counts_and_report() -> None:
    training = Training("plain", max_skips=2, track="overflow", init_scale=8.0)
    training.scaler.name_parameters([("a name", training.param)])
    training.step(1.0)
    training.step(math.inf)
    with pytest.raises(FloatingPointError) as caught:
        training.step(math.inf)
    first, _, report = str(caught.value).partition("\n")
    assert first == (
        "2 steps in a row were skipped, and max_skips is 2. Of 3 steps 2 were skipped, 0 of them "
        "for their norm; the scale is 2."
    )
    assert report == str(training.scaler.overflow_report()) and "a name" in report
    # The iteration is over: training may go on, and each further skip raises.
    with pytest.raises(FloatingPointError, match=r"^3 steps in a row"):
        training.step(math.inf)
    training.step(1.0)
    training.step(math.inf)


def test_the_error_tells_why_it_has_no_report() -> None:
    """It is no other error, for which a handler would not be made."""

    class Own(ampfast.GradScaler):
        def _unscale_grads_(self, optimizer: Any, *args: Any) -> dict[torch.device, torch.Tensor]:
            return {torch.device("cpu"): torch.ones(())}

    param = torch.nn.Parameter(torch.zeros(3))
    optimizer, scaler = torch.optim.SGD([param]), Own("cpu", max_skips=1, track="overflow")
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    with pytest.raises(FloatingPointError, match=r"\n.*Own overrides a hook, and"):
        scaler.update()
    training = Training("plain", max_skips=1, track="overflow")
    training.scaler.name_parameters(torch.nn.Linear(1, 1))
    with pytest.raises(FloatingPointError, match="none of the optimizers' 1 parameters has a name"):
        training.step(math.inf)


def test_a_checkpoint_that_is_loaded_begins_a_new_series() -> None:
    training = Training("plain", max_skips=2)
    training.step(1.0)
    good = training.scaler.state_dict()
    for _ in range(3):
        training.step(math.inf)
        with pytest.raises(FloatingPointError, match="2 steps in a row were skipped"):
            training.step(math.inf)
        training.scaler.load_state_dict(good)
        assert training.scaler.stats().consecutive_skips == 0


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))]
)
def test_the_limit_is_an_attribute_and_is_copied(copied: Callable[[Any], Any]) -> None:
    training = Training("plain")
    assert training.scaler.max_skips is None
    training.scaler.max_skips = 3
    training.step(math.nan)
    before = training.scaler
    training.scaler = copied(before)
    assert training.scaler.max_skips == 3
    assert training.scaler._skip_limit is not before._skip_limit  # each has counts that arrive late
    assert training.ends_at("xx", math.nan) == 1
    training.scaler.max_skips = None
    assert training.ends_at("xxxx", math.nan) is None


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize(
    ("wrong", "error"), [(0, ValueError), (-1, ValueError), (True, TypeError), (2.0, TypeError)]
)
def test_other_limits_are_refused(enabled: bool, wrong: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"max_skips must be (an int or None|at least 1), got"):
        ampfast.GradScaler("cpu", enabled=enabled, max_skips=wrong)
    scaler = ampfast.GradScaler("cpu", enabled=enabled, max_skips=2)
    with pytest.raises(error, match="max_skips must be"):
        scaler.max_skips = wrong
    assert scaler.max_skips == 2


def test_a_disabled_scaler_never_raises() -> None:
    assert Training("plain", enabled=False, max_skips=1).ends_at("xxx", math.nan) is None
