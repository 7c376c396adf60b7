"""The short way from `step` and `update` to the kernels: its cost and its conditions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from raw_calls import Answers, watched
from torch.utils._python_dispatch import TorchDispatchMode

from ampfast import GradScaler
from ampfast.backends import cpu

CALLS = ("unscale_groups", "check_groups", "clip_groups", "update_scale", "any_found")


class Loop:
    """Scaler and optimizer with new gradients for every iteration."""

    def __init__(self, scaler: Any, kind: str = "plain", *, parameters: int = 10) -> None:
        self.params = [torch.nn.Parameter(torch.randn(4)) for _ in range(parameters)]
        options: dict[str, Any] = {"fused": True} if kind == "fused" else {"foreach": False}
        self.optimizer = torch.optim.AdamW(self.params, **options)
        self.scaler = scaler
        for _ in range(2):
            self.backward()
            scaler.step(self.optimizer)
            scaler.update()

    def backward(self) -> None:
        self.scaler.scale(torch.ones(()))
        for param in self.params:
            param.grad = torch.randn(4)


def frames_of(call: Callable[[], object], *, but: Callable[..., Any]) -> list[str]:
    """Python functions entered by a call, without one of them and its callees."""
    names: list[str] = []
    inside = 0

    def profile(frame: Any, event: str, _: object) -> None:
        nonlocal inside
        left_out = frame.f_code is but.__code__
        if event == "call":
            inside += left_out
            if not inside:
                names.append(frame.f_code.co_qualname)
        elif event == "return":
            inside -= left_out

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return names[1:]  # `call` itself


def step_of(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Outermost function of an optimizer's step, wrapped by torch for hooks."""
    return type(optimizer).step


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code objects have no qualified names")
@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_step_and_update_take_few_frames(kind: str) -> None:
    loop = Loop(GradScaler("cpu"), kind)
    loop.backward()

    def call() -> None:
        loop.scaler.step(loop.optimizer)
        loop.scaler.update()

    frames = frames_of(call, but=step_of(loop.optimizer))
    assert len(frames) <= 16, frames


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code objects have no qualified names")
@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_clipping_takes_few_frames(kind: str) -> None:
    loop = Loop(GradScaler("cpu"), kind)
    loop.backward()
    frames = frames_of(
        lambda: loop.scaler.clip_grad_norm_(loop.optimizer, 1.0), but=step_of(loop.optimizer)
    )
    assert len(frames) <= 20, frames


def aten_calls(scaler: Any, kind: str) -> int:
    """ATen calls of scale, step and update, without the optimizer's own step."""
    loop = Loop(scaler, kind)
    loop.backward()
    loop.optimizer.step = lambda: None  # type: ignore[method-assign]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        scaler.scale(torch.ones(()))
        scaler.step(loop.optimizer)
        scaler.update()
    return sum(event.name.startswith("aten::") for event in profile.events())


@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_no_more_aten_calls_than_torch(kind: str) -> None:
    ours, theirs = (
        aten_calls(GradScaler("cpu"), kind),
        aten_calls(torch.amp.GradScaler("cpu"), kind),
    )
    # Four calls are of `ones`, one is the product with the scale.
    assert ours <= 5 < theirs


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """Raw calls by name, and whether each took the short way."""
    return watched(cpu, CALLS, monkeypatch)


def short(answers: Answers) -> set[str]:
    """Raw calls that took the short way."""
    return {name for name, done in answers.items() if any(done)}


@pytest.mark.parametrize("kind", ["plain", "fused"])
@pytest.mark.parametrize("calls", [["step"], ["unscale_", "step"], ["clip_grad_norm_", "step"]])
def test_regular_gradients_take_the_short_way(
    kind: str, calls: list[str], answers: Answers
) -> None:
    loop = Loop(GradScaler("cpu"), kind)
    for done in answers.values():
        done.clear()
    loop.backward()
    for call in calls:
        extra = (1.0,) if call == "clip_grad_norm_" else ()
        getattr(loop.scaler, call)(loop.optimizer, *extra)
    loop.scaler.update()
    expected = {"update_scale"}
    if "unscale_" in calls or (kind == "plain" and calls == ["step"]):
        expected.add("unscale_groups")
    if "clip_grad_norm_" in calls:
        expected.add("clip_groups")
    expected |= {"any_found"} if kind == "plain" and calls != ["step"] else set()
    expected |= {"check_groups"} if kind == "fused" and calls == ["step"] else set()
    assert short(answers) == expected
    assert all(all(done) for done in answers.values())


class Overriding(GradScaler):
    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> Any:
        return super()._unscale_grads_(*args, **kwargs)


def overridden_later() -> GradScaler:
    scaler = GradScaler("cpu")
    scaler._unscale_grads_ = scaler._unscale_grads_  # type: ignore[method-assign]
    return scaler


GENERAL: dict[str, Callable[[], GradScaler]] = {
    "tracked": lambda: GradScaler("cpu", track="overflow"),
    "aten": lambda: GradScaler("cpu", backend="aten"),
    "overridden": lambda: Overriding("cpu"),
    "overridden on the instance": overridden_later,
}


@pytest.mark.parametrize("kind", ["plain", "fused"])
@pytest.mark.parametrize("scaler", GENERAL.values(), ids=GENERAL)
def test_settings_and_hooks_take_the_general_way(
    scaler: Callable[[], GradScaler], kind: str, answers: Answers
) -> None:
    loop = Loop(scaler(), kind)
    loop.backward()
    loop.scaler.clip_grad_norm_(loop.optimizer, 1.0)
    assert short(answers) & {"unscale_groups", "check_groups", "clip_groups"} == set()


def sparse(loop: Loop) -> None:
    loop.params[3].grad = torch.sparse_coo_tensor([[0]], [1.0], (4,))


def strided(loop: Loop) -> None:
    loop.params[3].grad = torch.randn(8)[::2]


def subclass(loop: Loop) -> None:
    class Tensor(torch.Tensor):
        pass

    loop.params[3].grad = torch.randn(4).as_subclass(Tensor)


def other_groups(loop: Loop) -> None:
    loop.optimizer.param_groups[0]["params"] = tuple(loop.params)


def integer_factor(loop: Loop) -> None:
    loop.scaler._growth_factor = 2


UNUSUAL = {each.__name__: each for each in (sparse, strided, subclass, other_groups)}


@pytest.mark.parametrize("kind", ["plain", "fused"])
@pytest.mark.parametrize("make", UNUSUAL.values(), ids=UNUSUAL)
def test_unusual_gradients_take_the_general_way(
    make: Callable[[Loop], None], kind: str, answers: Answers
) -> None:
    loop = Loop(GradScaler("cpu"), kind)
    loop.backward()
    make(loop)
    for done in answers.values():
        done.clear()
    loop.optimizer.step = lambda: None  # type: ignore[method-assign]
    loop.scaler.step(loop.optimizer)
    assert not any(answers["unscale_groups"] + answers["check_groups"])


def test_an_integer_factor_takes_the_general_update(answers: Answers) -> None:
    loop = Loop(GradScaler("cpu"))
    integer_factor(loop)
    loop.backward()
    loop.scaler.step(loop.optimizer)
    answers["update_scale"].clear()
    loop.scaler.update()
    assert answers["update_scale"] == [False]


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_all(answers: Answers) -> None:
    loop = Loop(GradScaler("cpu"))
    loop.backward()
    for done in answers.values():
        done.clear()
    with Watching():
        loop.scaler.step(loop.optimizer)
        loop.scaler.update()
    assert short(answers) == set()


def test_a_declined_call_changes_nothing() -> None:
    """A raw call that answers None has neither marked the state nor written a gradient."""
    state: dict[str, Any] = {"stage": "ready", "found_inf_per_device": {}}
    grads = [torch.ones(4), torch.ones(8)[::2]]
    params = [torch.nn.Parameter(torch.zeros(4)) for _ in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    groups, scale = [{"params": params}], torch.tensor(4.0)
    assert cpu.unscale_groups(groups, scale, False, state, "unscaled", None) is None
    clips = (groups, scale, False, state, "unscaled", None, 1.0, False, None, None)
    assert cpu.clip_groups(*clips) is None
    assert cpu.check_groups(groups, scale) is None
    assert state == {"stage": "ready", "found_inf_per_device": {}}
    assert all(grad.eq(1).all() for grad in grads)


CPU = torch.device("cpu")
UNUSUAL_UPDATES: dict[str, tuple[str, Any]] = {
    "no check": ("_per_optimizer_states", {}),
    "a check of something else": (
        "_per_optimizer_states",
        {1: {"found_inf_per_device": {CPU: 0.0}}},
    ),
    "an agreement to come": (
        "_per_optimizer_states",
        {1: {"found_inf_per_device": {CPU: torch.zeros(())}, "agreement": None}},
    ),
    "no dict of states": ("_per_optimizer_states", []),
    "float64 scale": ("_scale", torch.tensor(4.0, dtype=torch.float64)),
    "scale of one dimension": ("_scale", torch.tensor([4.0])),
    "scale with a gradient": ("_scale", torch.tensor(4.0, requires_grad=True)),
    "int64 tracker": ("_growth_tracker", torch.zeros((), dtype=torch.int64)),
    "integer growth factor": ("_growth_factor", 2),
    "no backoff factor": ("_backoff_factor", None),
    "bool interval": ("_growth_interval", True),
    "huge interval": ("_growth_interval", 2**64),
    "other words": ("words", torch.zeros(3, dtype=torch.int64)),
    "no words": ("words", None),
    "norm of another type": ("norm", torch.tensor(1.0, dtype=torch.float64)),
    "disabled": ("_enabled", False),
    "a hook": ("_found_inf_per_device", lambda optimizer: {}),
}


@pytest.mark.parametrize("change", UNUSUAL_UPDATES.values(), ids=UNUSUAL_UPDATES)
def test_unusual_updates_change_nothing(change: tuple[str, Any]) -> None:
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=1)
    scaler.scale(torch.ones(()))
    scale, tracker, words = scaler._scale, scaler._growth_tracker, scaler._loss_scale.words
    assert scale is not None and tracker is not None
    scaler._per_optimizer_states[1] = {"found_inf_per_device": {CPU: torch.zeros(())}}
    arguments = {"words": words, "norm": None}
    usual = dict(scaler.__dict__)

    name, value = change
    holder = arguments if name in arguments else scaler.__dict__
    holder[name] = value
    assert cpu.update_scale(scaler, *arguments.values()) is None
    assert (scale.item(), tracker.item()) == (4.0, 0)

    scaler.__dict__.clear()
    scaler.__dict__.update(usual)
    assert cpu.update_scale(scaler, words, None) is True
    assert (scale.item(), tracker.item()) == (8.0, 0)


def test_flags_of_several_optimizers_are_summed() -> None:
    """As torch does, which only shows where a flag is neither 0 nor 1."""
    scales = []
    for kind in (torch.amp.GradScaler, GradScaler):
        scaler = kind("cpu", init_scale=4.0, growth_interval=1)
        scaler.scale(torch.ones(()))
        for key, flag in enumerate((1.0, -1.0)):
            scaler._per_optimizer_states[key] = {"found_inf_per_device": {CPU: torch.tensor(flag)}}
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [8.0, 8.0]


def scaled_alone(count: int = 1000) -> tuple[GradScaler, Any, torch.nn.Parameter]:
    scaler, param = GradScaler("cpu", init_scale=4.0), torch.nn.Parameter(torch.ones(count))
    scaler.scale(torch.ones(()))
    param.grad = torch.full((count,), 8.0)
    return scaler, torch.optim.SGD([param], lr=0.1), param


@pytest.mark.parametrize("call", ["unscale_", "clip_grad_norm_"])
def test_python_that_runs_while_a_state_is_marked(call: str) -> None:
    """Replaced entries of the state live until the gradients are written."""
    scaler, optimizer, param = scaled_alone()
    held: list[torch.Tensor] = []

    class Ends:
        def __del__(self) -> None:
            param.grad = None
            held.append(torch.full((1000,), 7.0))

    scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {"x": Ends()}  # type: ignore[dict-item]
    getattr(scaler, call)(optimizer, *((1e9,) if call == "clip_grad_norm_" else ()))
    assert held[0].eq(7).all()


@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_a_step_that_clears_its_entry(kind: str) -> None:
    loop = Loop(GradScaler("cpu"), kind)
    loop.backward()
    entry = loop.scaler._per_optimizer_states
    loop.optimizer.step = lambda: entry[id(loop.optimizer)].clear()  # type: ignore[method-assign]
    assert loop.scaler.step(loop.optimizer) is None


def test_the_entries_own_default_counts() -> None:
    scaler, optimizer, param = scaled_alone()
    scaler._per_optimizer_states = {}  # type: ignore[assignment]
    with pytest.raises(KeyError):
        scaler.step(optimizer)
    assert param.grad is not None and param.grad.eq(8).all()


def test_a_property_of_a_subclass_counts() -> None:
    class Paused(GradScaler):
        @property
        def _enabled(self) -> bool:  # type: ignore[override]
            return self.__dict__.get("_enabled", False) and not self.__dict__.get("paused")

        @_enabled.setter
        def _enabled(self, value: bool) -> None:
            self.__dict__["_enabled"] = value

    scaler, (_, optimizer, param) = Paused("cpu", init_scale=4.0), scaled_alone()
    scaler.scale(torch.ones(()))
    scaler.paused = True  # type: ignore[attr-defined]
    scaler.step(optimizer)
    assert param.grad is not None and param.grad.eq(8).all()
