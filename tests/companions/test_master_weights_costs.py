"""Bytes, launches and host reads of a step with master weights, counted on the host."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.reference_launcher import ReferenceLauncher

import ampfast
from ampfast import _C

SIZES = (3, 1000, 70_000)
ELEMENTS = sum(SIZES)
# Bytes that AdamW itself moves: it reads gradient, weight and two moments, and writes three.
ADAMW = 4 * 4 + 3 * 4


class Run:
    """A few parameters of one dtype, after two steps."""

    def __init__(self, dtype: torch.dtype, fused: bool, with_scaler: bool = True) -> None:
        self.params = [torch.nn.Parameter(torch.ones(size, dtype=dtype)) for size in SIZES]
        adamw = torch.optim.AdamW(self.params, lr=0.1, fused=fused)
        self.optimizer: Any = ampfast.master_weights_(adamw)
        self.scaler = ampfast.GradScaler("cpu", init_scale=4.0, enabled=with_scaler)
        self.scaler.scale(torch.ones(()))
        for _ in range(2):
            self.backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.backward()

    def backward(self) -> None:
        self.optimizer.zero_grad()
        torch.autograd.backward(self.params, [torch.full_like(p, 4.0) for p in self.params])

    def state_bytes(self) -> int:
        """Bytes of the tensors that AdamW reads and writes, by its state, and its gradients."""
        weights = [self.optimizer.master_weights[p] for p in self.params]
        moments = [
            entry[name]
            for entry in self.optimizer.state.values()
            for name in ("exp_avg", "exp_avg_sq")
        ]
        grads = [p.grad for p in self.params]
        assert all(t.dtype is torch.float32 for t in (*weights, *moments, *grads))
        return 2 * sum(t.nbytes for t in (*weights, *moments)) + sum(t.nbytes for t in grads)


Step = Callable[[Run], None]


def stepped(run: Run) -> None:
    run.scaler.step(run.optimizer)
    run.scaler.update()


def stepped_and_updated(run: Run) -> None:
    run.scaler.step_and_update(run.optimizer)


def unscaled_before(run: Run) -> None:
    run.scaler.unscale_(run.optimizer)
    stepped(run)


def clipped(run: Run) -> None:
    run.scaler.clip_grad_norm_(run.optimizer, 1.0)
    stepped(run)


def clipped_by_division(run: Run) -> None:
    run.scaler.clip_grad_norm_(run.optimizer, 1.0, in_place=False)
    stepped(run)


def stepped_alone(run: Run) -> None:
    run.optimizer.step()


PLAIN = {
    "step": (stepped, ["unscale", "update", "narrow"], 40),
    "unscale_": (unscaled_before, ["unscale", "update", "narrow"], 40),
    "clip_grad_norm_": (clipped, ["check", "clip", "unscale", "update", "narrow"], 42),
    "step_and_update": (stepped_and_updated, ["unscale", "narrow"], 40),
}
FUSED = {
    **PLAIN,
    "in_place=False": (clipped_by_division, ["check", "clip", "unscale", "update", "narrow"], 42),
}


@pytest.fixture
def host_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Methods by which code of ampfast has waited for a tensor's value."""
    found: list[str] = []

    def watching(name: str) -> Callable[..., Any]:
        original = getattr(torch.Tensor, name)

        def read(self: torch.Tensor, *args: Any) -> Any:
            if sys._getframe(1).f_globals["__name__"].startswith("ampfast"):
                found.append(name)
            return original(self, *args)

        return read

    for name in ("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, watching(name))
    monkeypatch.setattr(_C, "is_found", lambda *_: found.append("is_found"))
    return found


def counted(run: Run, step: Step, launcher: ReferenceLauncher) -> int:
    """Bytes of the kernels' passes in a step."""
    launcher.launches.clear()
    launcher.read = launcher.written = 0
    step(run)
    return launcher.read + launcher.written


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", FUSED)
def test_a_fused_step(
    dtype: torch.dtype, way: str, launcher: ReferenceLauncher, host_reads: list[str]
) -> None:
    step, launches, total = FUSED[way]
    run = Run(dtype, fused=True)
    host_reads.clear()
    moved = counted(run, step, launcher)
    assert sorted(launcher.launches) == sorted(launches)
    assert host_reads == []
    assert run.state_bytes() == ADAMW * ELEMENTS
    assert moved + run.state_bytes() == total * ELEMENTS


@pytest.mark.parametrize("way", PLAIN)
def test_a_plain_step(way: str, launcher: ReferenceLauncher) -> None:
    step, launches, total = PLAIN[way]
    run = Run(torch.float16, fused=False)
    moved = counted(run, step, launcher)
    assert sorted(launcher.launches) == sorted(launches)
    assert moved + run.state_bytes() == total * ELEMENTS


@pytest.mark.parametrize("fused", [False, True])
def test_without_a_scaler(fused: bool, launcher: ReferenceLauncher, host_reads: list[str]) -> None:
    run = Run(torch.bfloat16, fused=fused, with_scaler=False)
    host_reads.clear()
    moved = counted(run, stepped_alone, launcher)
    assert launcher.launches == ["unscale", "narrow"]
    assert host_reads == []
    assert moved + run.state_bytes() == 40 * ELEMENTS


def test_a_skipped_step_moves_no_parameter(launcher: ReferenceLauncher) -> None:
    """Its kernel that rounds back is launched, and writes nothing."""
    run = Run(torch.float16, fused=True)
    run.params[1].grad[5] = torch.inf
    before = [p.detach().clone() for p in run.params]
    moved = counted(run, stepped, launcher)
    assert launcher.launches == ["unscale", "narrow", "update"]
    assert moved == 6 * ELEMENTS
    assert all(map(torch.equal, run.params, before))


def test_memory_of_gradients_is_kept_on_the_cpu() -> None:
    """The same float32 tensors serve step after step; a gradient that is held is left alone."""
    run = Run(torch.float16, fused=True)
    stepped(run)
    addresses = [p.grad.data_ptr() for p in run.params]
    run.backward()
    stepped(run)
    assert [p.grad.data_ptr() for p in run.params] == addresses
    held = [run.params[1].grad.view(10, 100)[3], run.params[2].grad.numpy()]
    run.backward()
    stepped(run)
    now = [p.grad.data_ptr() for p in run.params]
    assert not set(now) & set(addresses)
    assert held[0].tolist() == [1.0] * 100
    assert bool((held[1] == 1).all())
