"""Choice of a backend and its report; equal bits with each."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from support.one_step import floats, setup
from support.optimizers import FUSED, OPTIMIZERS
from support.twins import assert_sides_same, side

from ampfast import GradScaler, backends

NAMES = ["cuda", "triton", "cpu", "aten"]
CPU = torch.device("cpu")


def test_report_names_every_backend() -> None:
    report = backends.report()
    assert sorted(r.name for r in report) == sorted(NAMES)
    for entry in report:
        assert type(entry) is backends.BackendReport
        assert entry.available == (entry.reason == ""), "a reason exactly where it cannot run"
        assert all(isinstance(kind, str) for kind in entry.device_types)
        with pytest.raises(dataclasses.FrozenInstanceError):
            entry.name = "other"
    available = {r.name for r in report if r.available}
    assert {"cpu", "aten"} <= available
    by_name = {r.name: r for r in report}
    assert "cpu" in by_name["cpu"].device_types
    assert by_name["aten"].device_types == (), "it takes every device"


def test_default_for_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AMPFAST_BACKEND", raising=False)
    assert backends.default_for(CPU) == "cpu"
    # No kernels of ours: torch's own op runs.
    assert backends.default_for(torch.device("meta")) == "aten"


def test_default_for_each_device_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AMPFAST_BACKEND", raising=False)
    available = {r.name for r in backends.report() if r.available}
    for device in ("cpu", "cuda", "meta", "mps", "xpu"):
        assert backends.default_for(torch.device(device)) in available


def train(backend: str | None, kind: str) -> Any:
    arguments: dict[str, Any] = {"init_scale": 2.0**12, "growth_interval": 2}
    run = side(GradScaler, kind, backend=backend, **arguments)
    generator = torch.Generator().manual_seed(3)
    for seed in range(25):
        bad = {0: math.inf, 1: math.nan}.get(int(torch.randint(6, (), generator=generator)))
        run.train(seed, bad)
    return run


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_aten_and_cpu_give_the_same_bits(kind: str) -> None:
    ours, oracle, default = (train(name, kind) for name in ("cpu", "aten", None))
    assert_sides_same(ours, oracle)
    assert_sides_same(ours, default)
    assert ours.scaler.get_scale() != 2.0**12, "the scale should have moved"


@pytest.mark.parametrize("backend", ["cpu", "aten"])
@pytest.mark.parametrize("kind", ["sgd", *FUSED])
def test_every_backend_never_corrupts_parameters(kind: str, backend: str) -> None:
    for scale, value in ((2.0**-128, 1.0), (0.5, torch.finfo(torch.float32).max), (0.0, 0.0)):
        run = side(GradScaler, kind, backend=backend, init_scale=scale)
        before = [p.detach().clone() for p in run.model.parameters()]
        run.scaler.scale(torch.ones(()))
        for p in run.model.parameters():
            p.grad = torch.full_like(p, value)
        run.scaler.step(run.optimizer)
        assert run.scaler.step_skipped(run.optimizer)
        assert all(torch.equal(p, b) for p, b in zip(run.model.parameters(), before, strict=True))


FUSED_QUOTIENTS = [
    (torch.float16, 2.0**-30, 2.0**-24, 0.0),
    (torch.float16, 2.0**-30, 2.0**-10, 0.0),
    (torch.float16, 2.0**17, 6e4, 0.0),
    (torch.float16, 2.0**-140, 1.0, 1.0),
    (torch.bfloat16, 3.0, 1e-3, 0.0),
    (torch.bfloat16, 0.5, torch.finfo(torch.bfloat16).max, 1.0),
    (torch.bfloat16, 1 - 2.0**-12, torch.finfo(torch.bfloat16).max, 0.0),
    (torch.float64, 2.0**-100, 1e300, 1.0),
    (torch.float64, 2.0**-100, 1e270, 0.0),
    (torch.float32, 1 - 2.0**-24, torch.finfo(torch.float32).max, 1.0),
]


@pytest.mark.parametrize(("dtype", "scale", "value", "expected"), FUSED_QUOTIENTS)
@pytest.mark.parametrize("backend", ["cpu", "aten"])
def test_fused_quotients_are_judged_alike(
    backend: str, dtype: torch.dtype, scale: float, value: float, expected: float
) -> None:
    run = setup(
        lambda *args, **kwargs: GradScaler(*args, backend=backend, **kwargs),
        "fused_adam",
        [floats(1.0, value, dtype=dtype)],
        scale,
    )
    run.step()
    assert run.calls[0][1].item() == expected


@pytest.mark.parametrize("backend", [1, b"cpu", ["cpu"], True])
def test_backend_of_a_wrong_type(backend: Any) -> None:
    with pytest.raises(TypeError, match=rf"backend.*{type(backend).__name__}"):
        GradScaler("cpu", backend=backend)


@pytest.mark.parametrize("backend", ["cudnn", "", "CPU", " cpu"])
def test_unknown_backend(backend: str) -> None:
    with pytest.raises(ValueError, match="backend") as raised:
        GradScaler("cpu", backend=backend)
    assert repr(backend) in str(raised.value)
    assert all(name in str(raised.value) for name in NAMES)


def test_unavailable_backend_gives_a_reason() -> None:
    missing = [r for r in backends.report() if not r.available]
    for entry in missing:
        with pytest.raises(RuntimeError, match=entry.name) as raised:
            GradScaler("cpu", backend=entry.name)
        assert entry.reason in str(raised.value)


TRAIN = """
import torch, ampfast
parameter = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([parameter], lr=0.5)
scaler = ampfast.GradScaler("cpu")
scaler.scale(parameter.sum()).backward()
with torch.profiler.profile() as profile:
    scaler.step(optimizer)
print(ampfast.backends.default_for(torch.device("cpu")))
print(parameter.tolist())
print(any("_amp_foreach_non_finite" in event.key for event in profile.key_averages()))
"""


def trained(name: str) -> list[str]:
    """Output of TRAIN; torch's own op runs for aten alone."""
    return [name, "[0.5, 0.5, 0.5]", str(name == "aten")]


@pytest.mark.parametrize(("value", "name"), [(None, "cpu"), ("", "cpu"), ("aten", "aten")])
def test_environment_sets_the_default(
    value: str | None,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("AMPFAST_BACKEND", raising=False)
    if value is not None:
        monkeypatch.setenv("AMPFAST_BACKEND", value)
    exec(TRAIN, {})
    assert capsys.readouterr().out.splitlines() == trained(name)


@pytest.mark.slow
def test_environment_at_the_start() -> None:
    environment = {**os.environ, "AMPFAST_BACKEND": "aten"}
    done = subprocess.run(
        [sys.executable, "-c", TRAIN], capture_output=True, text=True, env=environment, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:3] == trained("aten")


def test_environment_that_cannot_be_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMPFAST_BACKEND", "cudnn")
    for call in (lambda: GradScaler("cpu"), lambda: backends.default_for(CPU)):
        with pytest.raises(ValueError, match="AMPFAST_BACKEND") as raised:
            call()
        assert "cudnn" in str(raised.value)


def test_environment_that_names_an_unavailable_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    for entry in backends.report():
        if not entry.available:
            monkeypatch.setenv("AMPFAST_BACKEND", entry.name)
            for call in (lambda: GradScaler("cpu"), lambda: backends.default_for(CPU)):
                with pytest.raises(RuntimeError, match="AMPFAST_BACKEND") as raised:
                    call()
                assert entry.reason in str(raised.value)


def test_argument_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMPFAST_BACKEND", "aten")
    run = side(GradScaler, "sgd", backend="cpu")
    run.scaler.scale(torch.ones(()))
    for p in run.model.parameters():
        p.grad = torch.ones_like(p)
    with torch.profiler.profile() as profile:
        run.scaler.step(run.optimizer)
    assert not any("_amp_foreach" in event.key for event in profile.key_averages())
