"""The short way over kernels of a device: its cost, its conditions, and what it leaves behind."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from raw_calls import Answers, watched
from reference_launcher import ReferenceLauncher
from support import OPTIMIZERS, assert_same, assert_sides_same, side
from test_short_way import UNUSUAL, Loop, frames_of

from ampfast import _C, GradScaler
from ampfast.backends import gpu
from ampfast.backends.gpu import DeviceKernels

CALLS = ("unscale_groups", "check_groups", "clip_groups", "update_scale")


@pytest.fixture
def answers(launcher: ReferenceLauncher, monkeypatch: pytest.MonkeyPatch) -> Answers:
    """Raw calls by name, and whether each took the short way."""
    return watched(DeviceKernels, CALLS, monkeypatch)


def short(answers: Answers) -> set[str]:
    assert all(all(done) for done in answers.values()), "not every call took it"
    return {name for name, done in answers.items() if done}


@pytest.mark.parametrize("kind", ["plain", "fused"])
@pytest.mark.parametrize("calls", [["step"], ["unscale_", "step"], ["clip_grad_norm_", "step"]])
def test_regular_gradients_take_the_short_way(
    kind: str, calls: list[str], answers: Answers
) -> None:
    loop = Loop(GradScaler("cpu"), kind)
    for done in answers.values():
        done.clear()
    uploads = _C.uploads()
    for _ in range(3):
        for param in loop.params:
            param.grad.fill_(2.0)
        for call in calls:
            extra = (1.0,) if call == "clip_grad_norm_" else ()
            getattr(loop.scaler, call)(loop.optimizer, *extra)
        loop.scaler.update()
    expected = {"update_scale"}
    expected |= {"clip_groups"} if "clip_grad_norm_" in calls else set()
    is_checked = kind == "fused" and calls == ["step"]
    expected |= {"check_groups"} if is_checked else set()
    if "clip_grad_norm_" not in calls and not is_checked:
        expected.add("unscale_groups")
    assert short(answers) == expected
    assert _C.uploads() - uploads <= 1, "the table is kept"


@pytest.mark.parametrize("track", [None, "overflow"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.usefixtures("launcher")
def test_both_ways_give_torchs_result(kind: str, track: str | None) -> None:
    """Tracking takes the general way."""
    sides = [side(torch.amp.GradScaler, kind), side(GradScaler, kind, track=track)]
    for seed in range(6):
        for run in sides:
            run.train(seed)
        assert_sides_same(*sides)


@pytest.mark.parametrize("calls", ["unscale_", "clip_grad_norm_", "step"])
@pytest.mark.parametrize("kind", ["sgd", "fused_sgd"])
def test_the_general_way_makes_the_same_launches(
    kind: str, calls: str, launcher: ReferenceLauncher
) -> None:
    seen = []
    for is_short in (True, False):
        run = side(GradScaler, kind)
        run.scaler.scale(run.loss(3)).backward()
        assert run.scaler._short_way is not None
        if not is_short:
            run.scaler._short_way = None
        launcher.launches.clear()
        getattr(run.scaler, calls)(run.optimizer, *((0.5,) if "clip" in calls else ()))
        run.scaler.update()
        grads = [p.grad for p in run.model.parameters()]
        [state] = [run.scaler.found_inf(run.optimizer)]
        seen.append((grads, state, run.scaler._scale, list(launcher.launches)))
    assert seen[0][3] == seen[1][3]
    assert_same(seen[0][:3], seen[1][:3])


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code objects have no qualified names")
@pytest.mark.parametrize("dtypes", [1, 2])
def test_few_frames(launcher: ReferenceLauncher, dtypes: int) -> None:
    loop = Loop(GradScaler("cpu"))
    loop.backward()
    if dtypes == 2:
        more = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
        more.grad = torch.ones(4, dtype=torch.float64)
        loop.optimizer.param_groups[0]["params"].append(more)

    def nothing(*_: Any) -> None:
        pass

    launcher.multi_tensor = launcher.update_scale = nothing  # type: ignore[method-assign]

    def call() -> None:
        loop.scaler.unscale_(loop.optimizer)
        loop.scaler.update()

    frames = frames_of(call, but=nothing)
    assert len(frames) <= (22 if dtypes == 1 else 26), frames


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


@pytest.mark.parametrize("why", ["capturing", "strided", "elsewhere", "also elsewhere", "empty"])
def test_a_declined_call_changes_nothing(why: str, launcher: ReferenceLauncher) -> None:
    state: dict[str, Any] = {"stage": "ready", "found_inf_per_device": {}}
    param = torch.nn.Parameter(torch.zeros(4))
    param.grad = torch.ones(8)[::2] if why == "strided" else torch.ones(4)
    if why == "elsewhere":
        param = torch.nn.Parameter(torch.zeros(4, device="meta"))
        param.grad = torch.ones(4, device="meta")
    if why == "empty":
        param = torch.nn.Parameter(torch.zeros(0))
        param.grad = torch.ones(0)
    if why == "also elsewhere":
        other = torch.nn.Parameter(torch.zeros(4, device="meta"))
        other.grad = torch.ones(4, device="meta")
    launcher.capturing = why == "capturing"
    params = [param, other] if why == "also elsewhere" else [param]
    groups, scale, kernels = [{"params": params}], torch.tensor(4.0), DeviceKernels(launcher)
    assert kernels.unscale_groups(groups, scale, False, state, "unscaled", None) is None
    clips = (groups, scale, False, state, "unscaled", None, 1.0, False, None, None)
    assert kernels.clip_groups(*clips) is None
    assert kernels.check_groups(groups, scale) is None
    assert state == {"stage": "ready", "found_inf_per_device": {}}
    assert launcher.launches == []
    assert why in ("elsewhere", "empty") or param.grad.eq(1).all()


@pytest.mark.parametrize("call", ["unscale_", "clip_grad_norm_"])
def test_an_interrupted_launch_leaves_a_step_that_is_skipped(
    call: str, launcher: ReferenceLauncher
) -> None:
    loop = Loop(GradScaler("cpu"))
    loop.backward()
    held = loop.scaler._per_optimizer_states[id(loop.optimizer)]

    def interrupted(*_: Any) -> None:
        assert held["stage"].name == "UNSCALED", "not marked before the first write"
        assert [flag.item() for flag in held["found_inf_per_device"].values()] == [1.0]
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "multi_tensor", interrupted)
        with pytest.raises(KeyboardInterrupt):
            getattr(loop.scaler, call)(loop.optimizer, *((1.0,) if "clip" in call else ()))
    before = [param.detach().clone() for param in loop.params]
    assert loop.scaler.step(loop.optimizer) is None
    assert_same(before, [param.detach() for param in loop.params])
    assert loop.scaler.step_skipped(loop.optimizer)


def test_gradients_live_until_the_launch(launcher: ReferenceLauncher) -> None:
    """What runs before a launch may drop them: nobody else gets their memory."""
    loop = Loop(GradScaler("cpu"), parameters=1)
    [param] = loop.params
    plain, held = launcher.multi_tensor, []
    dropped = torch.full((4096,), 8.0)
    param.data = torch.zeros(4096)
    param.grad = dropped.clone()
    address = param.grad.data_ptr()

    def dropping(*work: Any) -> None:
        param.grad = None
        held.extend(torch.full((4096,), 8.0) for _ in range(8))
        plain(*work)

    launcher.multi_tensor = dropping  # type: ignore[method-assign]
    loop.scaler.scale(torch.ones(()))
    loop.scaler.unscale_(loop.optimizer)
    assert all(other.data_ptr() != address and other.eq(8.0).all() for other in held)


def test_both_ways_share_a_table(launcher: ReferenceLauncher) -> None:
    loop = Loop(GradScaler("cpu"))
    loop.params[2].grad = None
    loop.scaler.scale(torch.ones(()))
    loop.scaler.unscale_(loop.optimizer)
    before = _C.uploads()
    loop.scaler.grad_norm(loop.optimizer)
    assert launcher.launches[-1] == "clip"
    assert _C.uploads() == before


def test_another_optimizers_flag_is_its_own(launcher: ReferenceLauncher) -> None:
    """torch's optimizers leave the flag alone; any other may write it."""

    class Own(torch.optim.Optimizer):
        _step_supports_amp_scaling = True

        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        def step(self, closure: Any = None) -> None:
            self.seen = self.found_inf  # type: ignore[attr-defined]
            self.seen.fill_(1.0)

    loop = Loop(GradScaler("cpu"))
    loop.backward()
    optimizer = Own(loop.params)
    loop.scaler.step(optimizer)
    assert optimizer.seen.item() == 1.0
    assert loop.scaler.found_inf(optimizer).item() == 0.0


def test_a_device_that_is_not_current_is_made_so(launcher: ReferenceLauncher) -> None:
    entered: list[torch.device] = []
    inside = 0

    class On:
        def __enter__(self) -> None:
            nonlocal inside
            inside += 1

        def __exit__(self, *_: Any) -> None:
            nonlocal inside
            inside -= 1

    def on(device: torch.device) -> On:
        entered.append(device)
        return On()

    launcher.on = on  # type: ignore[assignment,method-assign]
    for name in ("multi_tensor", "update_scale", "clip_coefficient"):
        plain = getattr(launcher, name)

        def watched(*work: Any, plain: Any = plain) -> None:
            assert inside == 1
            plain(*work)

        setattr(launcher, name, watched)
    for kind in ("plain", "fused"):
        loop = Loop(GradScaler("cpu"), kind)
        loop.backward()
        loop.scaler.clip_grad_norm_(loop.optimizer, 1.0)
        loop.scaler.update()
    assert set(entered) == {torch.device("cpu")} and inside == 0
    assert isinstance(loop.scaler._short_way, gpu.DeviceKernels)
