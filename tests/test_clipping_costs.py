"""Cost of clipping on a device: launches and bytes, counted on the host."""

from __future__ import annotations

import math

import pytest
import torch
from support.clipping_reference import coefficient_of, grads_of
from support.comparison import FLOATS, assert_same
from support.gradients import sgd_with
from support.one_step import TAKE_GRAD_SCALE
from support.reference_launcher import ReferenceLauncher
from support.scalers import started
from support.twins import side

from ampfast import _C, GradScaler


def list_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(grad.nbytes for grad in grads_of(optimizer))


@pytest.mark.parametrize("order", [2.0, math.inf])
def test_in_place_reads_twice_and_writes_once(launcher: ReferenceLauncher, order: float) -> None:
    optimizer = sgd_with(*(torch.full((n,), 8.0) for n in (5, 5000, 1)))
    scaler = started(GradScaler, 4.0)
    norm = scaler.clip_grad_norm_(optimizer, 1.0, order)
    assert launcher.launches == ["check", "unscale"]
    size = list_bytes(optimizer)
    assert (launcher.read, launcher.written) == (2 * size, size)
    for grad in grads_of(optimizer):
        assert_same(grad, torch.full_like(grad, 2.0) * coefficient_of(norm, 1.0).float())
    scaler.step_and_update(optimizer)
    assert launcher.launches[2:] == ["update"]


@pytest.mark.parametrize("kind", TAKE_GRAD_SCALE)
def test_deferred_reads_once(launcher: ReferenceLauncher, kind: str) -> None:
    run = side(GradScaler, kind, init_scale=4.0)
    for seed in range(2):  # the first step of a momentum asks the host
        run.optimizer.zero_grad()
        run.scaler.scale(run.loss(seed)).backward()
        launcher.launches.clear()
        launcher.read = launcher.written = 0
        run.scaler.clip_grad_norm_(run.optimizer, 1.0, in_place=False)
        assert launcher.launches == ["check", "clip"]
        run.scaler.step(run.optimizer)
        run.scaler.update()
    assert launcher.launches == ["check", "clip", "update"]
    assert (launcher.read, launcher.written) == (list_bytes(run.optimizer), 0)


def test_step_and_update_after_a_deferred_clip(launcher: ReferenceLauncher) -> None:
    run = side(GradScaler, "fused_adam", init_scale=4.0, growth_interval=1)
    run.scaler.scale(run.loss(0)).backward()
    run.scaler.clip_grad_norm_(run.optimizer, 1.0, in_place=False)
    run.scaler.step_and_update(run.optimizer)
    assert launcher.launches == ["check", "clip", "update"]
    assert run.scaler.get_scale() == 8.0


def test_the_norm_alone_reads_once(launcher: ReferenceLauncher) -> None:
    optimizer = sgd_with(torch.full((4,), 8.0))
    assert started(GradScaler, 4.0).grad_norm(optimizer).item() == 4.0
    assert launcher.launches == ["check", "clip"]
    assert (launcher.read, launcher.written) == (list_bytes(optimizer), 0)


def test_one_coefficient_for_all_lists(launcher: ReferenceLauncher) -> None:
    optimizers = [sgd_with(torch.full((n,), 8.0, dtype=FLOATS[n % 2])) for n in range(1, 7)]
    norm = started(GradScaler, 4.0).clip_grad_norm_(optimizers, 1.0)
    assert norm.item() == pytest.approx(math.sqrt(21 * 4))
    assert launcher.launches == ["check"] * 6 + ["clip"] + ["unscale"] * 6


def test_all_dtypes_share_a_table(launcher: ReferenceLauncher) -> None:
    optimizer = sgd_with(*(torch.full((3,), 8.0, dtype=dtype) for dtype in FLOATS))
    before = _C.tables_made()
    norm = started(GradScaler, 4.0, allow_fp16=True).clip_grad_norm_(optimizer, 1.0)
    assert norm.item() == pytest.approx(math.sqrt(12 * 4))
    assert launcher.launches == ["check"] * 4 + ["unscale"] * 4
    assert _C.tables_made() == before + 1


def test_nothing_is_read_for_nothing(launcher: ReferenceLauncher) -> None:
    optimizer = sgd_with(torch.zeros(0))
    assert started(GradScaler).clip_grad_norm_(optimizer, 1.0).item() == 0.0
    assert launcher.launches == ["clip"]
