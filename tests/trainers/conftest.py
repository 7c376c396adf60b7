"""Fixtures that run GPU-only trainers on the CPU."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from runs import EXAMPLES
from support.steps import host_reads

import ampfast
from ampfast.scaler import out_of_turn


def _import_torchvision() -> None:
    """Makes `import torchvision` work with a CPU build of torch.

    The torchvision of PyPI is built for CUDA on Linux. Without it its library does not load, and
    its package stumbles over two operators that are missing; nothing here calls them.
    """
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(
                f"torchvision::{name}",
                "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
            )


if find_spec("torchvision"):
    _import_torchvision()


@pytest.fixture
def cuda_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps scalers for "cuda" enabled without CUDA; they work on CPU tensors."""
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(out_of_turn, "amp_definitely_not_available", lambda: False)


@pytest.fixture
def float16_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets Accelerate take the path of a GPU."""
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate")
    always = property(lambda _: True, lambda *_: None)
    monkeypatch.setattr(accelerate.Accelerator, "native_amp", always, raising=False)


@pytest.fixture
def fastai_on_cpu(cuda_on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    basics = pytest.importorskip("fastai.basics", reason="needs fastai")
    monkeypatch.setattr(basics.defaults, "use_cuda", False)


@pytest.fixture(autouse=True)
def _accelerates_state_is_forgotten() -> Iterator[None]:
    """That of an accelerator, which the next one of the process would share."""
    yield
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


@pytest.fixture
def patched() -> Iterator[ampfast.Patch]:
    """Runs the test under `ampfast.patch()`."""
    with ampfast.patch() as patch:
        yield patch


@pytest.fixture
def step_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Host reads in each step of an optimizer that Accelerate has prepared."""
    prepared = pytest.importorskip("accelerate.optimizer", reason="needs accelerate")
    step, reads = prepared.AcceleratedOptimizer.step, []

    def counted(*args: Any) -> None:
        reads.append(host_reads(lambda: step(*args)))

    monkeypatch.setattr(prepared.AcceleratedOptimizer, "step", counted)
    return reads


@pytest.fixture
def run_example(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[str], str]]:
    """Runs a script of examples/trainers in this process and returns its output."""

    def run(name: str) -> str:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    yield run
    ampfast.unpatch()
