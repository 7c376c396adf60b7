"""Bytes, launches and host reads of a step with master weights, counted on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.launchers import ReferenceLauncher
from support.steps import adamw, host_reads, take_step

import ampfast

SIZES = (3, 1000, 70_000)
ELEMENTS = sum(SIZES)
# Bytes that AdamW itself moves: it reads gradient, weight and two moments, and writes three.
ADAMW = 4 * 4 + 3 * 4


class Run:
    """A few parameters of one dtype, after two steps."""

    def __init__(self, dtype: torch.dtype, fused: bool, with_scaler: bool = True) -> None:
        self.params = [torch.nn.Parameter(torch.ones(size, dtype=dtype)) for size in SIZES]
        self.optimizer: Any = ampfast.master_weights_(adamw(self.params, fused=fused))
        self.scaler = ampfast.GradScaler("cpu", init_scale=4.0, enabled=with_scaler)
        self.scaler.scale(torch.ones(()))
        for _ in range(2):
            self.backward()
            self.step("step")
        self.backward()

    def backward(self) -> None:
        self.optimizer.zero_grad()
        torch.autograd.backward(self.params, [torch.full_like(p, 4.0) for p in self.params])

    def step(self, way: str) -> None:
        if way == "without a scaler":
            self.optimizer.step()
            return
        if way == "in_place=False":
            self.scaler.clip_grad_norm_(self.optimizer, 1.0, in_place=False)
        take_step(self.scaler, self.optimizer, way=way)


CLIP = ["check", "clip", "unscale", "update", "narrow"]
# Launches, and bytes for each element.
WAYS = {
    "step": (["unscale", "update", "narrow"], 40),
    "unscale_": (["unscale", "update", "narrow"], 40),
    "clip_grad_norm_": (CLIP, 42),
    "step_and_update": (["unscale", "narrow"], 40),
    "in_place=False": (CLIP, 42),
    "without a scaler": (["unscale", "narrow"], 40),
}
CASES = [(way, True, dtype) for way in WAYS for dtype in (torch.float16, torch.bfloat16)]
CASES += [(way, False, torch.float16) for way in [*WAYS][:4]]
CASES += [("without a scaler", False, torch.bfloat16)]


def counted(run: Run, way: str, launcher: ReferenceLauncher) -> int:
    """Bytes of the kernels' passes in a step."""
    launcher.launches.clear()
    launcher.read = launcher.written = 0
    run.step(way)
    return launcher.read + launcher.written


@pytest.mark.parametrize(("way", "fused", "dtype"), CASES, ids=str)
def test_a_step(way: str, fused: bool, dtype: torch.dtype, launcher: ReferenceLauncher) -> None:
    launches, total = WAYS[way]
    run = Run(dtype, fused, way != "without a scaler")
    moved = counted(run, way, launcher)
    assert sorted(launcher.launches) == sorted(launches)
    assert "update" in launches or launcher.launches == launches
    assert moved == (total - ADAMW) * ELEMENTS
    assert all(p.grad.dtype is torch.float32 for p in run.params)


@pytest.mark.parametrize("way", WAYS)
def test_the_host_reads_nothing_of_a_fused_step(way: str) -> None:
    run = Run(torch.float16, True, way != "without a scaler")
    assert host_reads(lambda: run.step(way)) == 0


def test_a_skipped_step_moves_no_parameter(launcher: ReferenceLauncher) -> None:
    """Its kernel that rounds back is launched, and writes nothing."""
    run = Run(torch.float16, fused=True)
    run.params[1].grad[5] = torch.inf
    before = [p.detach().clone() for p in run.params]
    moved = counted(run, "step", launcher)
    assert launcher.launches == ["unscale", "narrow", "update"]
    assert moved == 6 * ELEMENTS
    assert all(map(torch.equal, run.params, before))


def test_memory_of_gradients_is_kept_on_the_cpu() -> None:
    """The same float32 tensors serve step after step; a gradient that is held is left alone."""
    run = Run(torch.float16, fused=True)
    run.step("step")
    addresses = [p.grad.data_ptr() for p in run.params]
    run.backward()
    run.step("step")
    assert [p.grad.data_ptr() for p in run.params] == addresses
    held = [run.params[1].grad.view(10, 100)[3], run.params[2].grad.numpy()]
    run.backward()
    run.step("step")
    now = [p.grad.data_ptr() for p in run.params]
    assert not set(now) & set(addresses)
    assert held[0].tolist() == [1.0] * 100
    assert bool((held[1] == 1).all())
