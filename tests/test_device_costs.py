"""What a step costs on a device: launches, bytes, uploads and flags, counted on the host."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from reference_launcher import ReferenceLauncher
from support import FLOATS, OPTIMIZERS, assert_same, assert_sides_same, side

from ampfast import _C, GradScaler, backends, functional
from ampfast.backends.passes import DeviceKernels

CPU = torch.device("cpu")
PLAIN = ("sgd", "adam")
FUSED = ("fused_sgd", "fused_adam")


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[ReferenceLauncher]:
    """The kernels that CPU tensors get are those of a device."""
    launcher = ReferenceLauncher()
    kernels = DeviceKernels(launcher)
    monkeypatch.setattr(backends.Choice, "kernels_for", lambda choice, device: kernels)
    _C.clear_tables()
    yield launcher
    _C.clear_tables()


def warmed(kind: str, launcher: ReferenceLauncher, **arguments: Any) -> Any:
    run = side(GradScaler, kind, **arguments)
    run.train(0)
    run.train(1)
    run.scaler.scale(run.loss(2)).backward()
    launcher.launches.clear()
    launcher.read = launcher.written = 0
    return run


def gradient_bytes(run: Any) -> int:
    return sum(p.grad.nbytes for p in run.model.parameters())


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_is_torchs_bit_for_bit(launcher: ReferenceLauncher, kind: str) -> None:
    settings: dict[str, Any] = {"init_scale": 2.0**12, "growth_interval": 2}
    ours, theirs = side(GradScaler, kind, **settings), side(torch.amp.GradScaler, kind, **settings)
    for seed in range(12):
        bad = {4: math.inf, 9: math.nan}.get(seed)
        for run in (ours, theirs):
            run.train(seed, bad)
        assert_sides_same(ours, theirs)
    assert {"update"} < set(launcher.launches)


@pytest.mark.parametrize("kind", PLAIN)
def test_plain_step_reads_and_writes_once(launcher: ReferenceLauncher, kind: str) -> None:
    run = warmed(kind, launcher)
    run.scaler.step(run.optimizer)
    run.scaler.update()
    assert launcher.launches == ["unscale", "update"]
    assert launcher.read == launcher.written == gradient_bytes(run)


@pytest.mark.parametrize("kind", FUSED)
def test_fused_step_only_reads(launcher: ReferenceLauncher, kind: str) -> None:
    run = warmed(kind, launcher)
    run.scaler.step(run.optimizer)
    run.scaler.update()
    assert launcher.launches == ["check", "update"]
    assert (launcher.read, launcher.written) == (gradient_bytes(run), 0)


@pytest.mark.parametrize("kind", [*PLAIN, *FUSED])
def test_step_and_update_is_one_launch(launcher: ReferenceLauncher, kind: str) -> None:
    run = warmed(kind, launcher)
    run.scaler.step_and_update(run.optimizer)
    assert launcher.launches == ["check" if kind in FUSED else "unscale"]


def test_explicit_unscale_is_not_repeated(launcher: ReferenceLauncher) -> None:
    run = warmed("sgd", launcher)
    run.scaler.unscale_(run.optimizer)
    run.scaler.step(run.optimizer)
    run.scaler.update()
    assert launcher.launches == ["unscale", "update"]


@pytest.mark.parametrize("count", [1, 2, 4, 5, 9])
def test_one_update_for_any_number_of_optimizers(launcher: ReferenceLauncher, count: int) -> None:
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=1)
    scaler.scale(torch.ones(()))
    optimizers = []
    for i in range(count):
        parameter = torch.nn.Parameter(torch.zeros(3))
        parameter.grad = torch.full((3,), math.inf if i == count - 1 else 1.0)
        optimizers.append(torch.optim.SGD([parameter], lr=1.0))
        scaler.step(optimizers[-1])
    scaler.update()
    assert launcher.launches == ["unscale"] * count + ["update"]
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("bad", [0, 1, None])
def test_the_update_rides_in_the_last_of_two_checks(
    launcher: ReferenceLauncher, bad: int | None
) -> None:
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=1)
    scaler.scale(torch.ones(()))
    optimizers = []
    for i in range(2):
        parameter = torch.nn.Parameter(torch.zeros(3))
        parameter.grad = torch.full((3,), math.inf if i == bad else 1.0)
        optimizers.append(torch.optim.SGD([parameter], lr=1.0))
    scaler.step_and_update(*optimizers)
    assert launcher.launches == ["unscale", "unscale"]
    assert scaler.get_scale() == (8.0 if bad is None else 2.0)


def test_an_update_that_heeds_many_flags_is_a_launch_of_its_own(
    launcher: ReferenceLauncher,
) -> None:
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=1)
    scaler.scale(torch.ones(()))
    optimizers = []
    for i in range(3):
        parameter = torch.nn.Parameter(torch.zeros(3))
        parameter.grad = torch.full((3,), math.inf if i == 0 else 1.0)
        optimizers.append(torch.optim.SGD([parameter], lr=1.0))
    scaler.step_and_update(*optimizers)
    assert launcher.launches == ["unscale"] * 3 + ["update"]
    assert scaler.get_scale() == 2.0


def test_a_launch_that_fails_leaves_no_flag_behind(
    launcher: ReferenceLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    grads = [torch.full((3,), math.inf), torch.ones(3, dtype=torch.float16)]
    plain = launcher.multi_tensor

    def fails(work: Any, segment: Any, epilogue: Any) -> None:
        if segment.dtype is torch.float16:
            raise RuntimeError("no compiler")
        plain(work, segment, epilogue)

    with monkeypatch.context() as broken:
        broken.setattr(launcher, "multi_tensor", fails)
        with pytest.raises(RuntimeError, match="no compiler"):
            functional.check_(grads, torch.zeros(()))
    grads[0].fill_(1.0)
    functional.check_(grads, found := torch.zeros(()))
    assert found.item() == 0.0


def test_empty_gradients_get_a_float32_flag(launcher: ReferenceLauncher) -> None:
    parameter = torch.nn.Parameter(torch.zeros(0))
    parameter.grad = torch.zeros(0)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=1)
    scaler.scale(torch.ones(()))
    torch.set_default_dtype(torch.float64)
    try:
        scaler.step_and_update(optimizer)
    finally:
        torch.set_default_dtype(torch.float32)
    assert scaler.found_inf(optimizer).dtype == torch.float32
    assert scaler.get_scale() == 8.0


def test_a_raising_step_takes_the_update_back(launcher: ReferenceLauncher) -> None:
    run = warmed("sgd", launcher, init_scale=3.0, growth_interval=100)
    state = run.scaler.state_dict()

    def fails() -> None:
        raise ValueError("no step")

    run.optimizer.step = fails
    with pytest.raises(ValueError, match="no step"):
        run.scaler.step_and_update(run.optimizer)
    assert_same(run.scaler.state_dict(), state)


@pytest.mark.parametrize("kind", ["sgd", "fused_adam"])
def test_every_dtype_is_a_launch_and_all_share_a_table(
    launcher: ReferenceLauncher, kind: str
) -> None:
    grads = [torch.full((n,), 8.0, dtype=dtype) for n in (1, 5000) for dtype in FLOATS]
    before = _C.uploads()[0]
    functional.unscale_(grads, found := torch.zeros(()), torch.tensor(0.5))
    assert launcher.launches == ["unscale"] * len(FLOATS)
    assert _C.uploads()[0] == before + 1
    assert found.item() == 0.0
    for gradient in grads:
        assert_same(gradient, torch.full_like(gradient, 4.0))


def test_nothing_is_launched_for_nothing(launcher: ReferenceLauncher) -> None:
    functional.unscale_([], torch.zeros(()), torch.tensor(0.5))
    functional.check_([torch.zeros(0, 3)], torch.zeros(()))
    assert launcher.launches == []


# Tables


def unscale(grads: list[torch.Tensor]) -> int:
    """Unscales by 1/2 and returns how many tables were uploaded for it."""
    before = _C.uploads()[0]
    functional.unscale_(grads, torch.zeros(()), torch.tensor(0.5))
    return _C.uploads()[0] - before


def test_a_table_is_uploaded_once(launcher: ReferenceLauncher) -> None:
    grads = [torch.ones(n) for n in (3, 5000, 1)]
    assert [unscale(grads) for _ in range(4)] == [1, 0, 0, 0]
    assert_same(grads[1], torch.full((5000,), 0.5**4))


def test_any_change_uploads_again(launcher: ReferenceLauncher) -> None:
    memory = torch.ones(64)
    grads = [memory[:8], memory[16:24]]
    assert unscale(grads) == 1
    for changed in (
        [memory[:8], memory[17:25]],  # another address
        [memory[:8], memory[16:25]],  # another length
        [memory[:8].view(torch.float16), memory[16:24]],  # another dtype, at the same address
        [memory[:8]],
        [memory[16:24], memory[:8]],  # another order
        [memory[:8], memory[16:24], memory[32:40]],
    ):
        assert unscale(changed) == 1
        assert unscale(changed) == 0
    assert unscale(grads) == 0, "the first is still known"


def test_another_dtype_at_the_same_address(launcher: ReferenceLauncher) -> None:
    half = torch.ones(8, dtype=torch.float16)
    assert unscale([half]) == 1
    assert unscale([half.view(torch.bfloat16)]) == 1


def test_lists_in_turn_keep_their_tables(launcher: ReferenceLauncher) -> None:
    lists = [[torch.ones(4) for _ in range(3)] for _ in range(8)]
    assert [unscale(grads) for grads in lists] == [1] * 8
    assert [unscale(grads) for grads in lists * 3] == [0] * 24


def test_tables_do_not_pile_up(launcher: ReferenceLauncher) -> None:
    grads = [torch.ones(4)]
    assert unscale(grads) == 1
    others = [[torch.ones(4)] for _ in range(200)]
    for other in others:
        unscale(other)
    assert unscale(grads) == 1, "long unused tables are forgotten"


def test_more_programs_than_windows_and_more_windows_than_programs(
    launcher: ReferenceLauncher,
) -> None:
    for programs in (1, 2, 5, 1000):
        launcher.programs = programs
        _C.clear_tables()
        unscale([torch.ones(n + 3)[3:] for n in (1, 2047, 2048, 2049, 40_000)])


def test_a_captured_table_is_never_one_that_eager_steps_use(launcher: ReferenceLauncher) -> None:
    grads = [torch.ones(4)]
    assert unscale(grads) == 1
    launcher.capturing = True
    with pytest.raises(RuntimeError, match="run one iteration without capturing first"):
        # On the CPU nothing is pinned, so nothing was made ready for captures.
        unscale(grads)
    launcher.capturing = False
    assert unscale(grads) == 0
