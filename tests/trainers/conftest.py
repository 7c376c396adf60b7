"""Lets trainers that know GPUs only run on the CPU."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import pytest
import torch
from trajectories import EXAMPLES

import ampfast
from ampfast import grad_scaler


def _import_torchvision() -> None:
    """Makes `import torchvision` work beside a torch without CUDA.

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
    """Scalers for "cuda" stay enabled without one; on tensors of the CPU they work there."""
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(grad_scaler, "amp_definitely_not_available", lambda: False)


@pytest.fixture
def patched() -> Iterator[ampfast.Patch]:
    """The whole test runs under `ampfast.patch()`."""
    with ampfast.patch() as patch:
        yield patch


@pytest.fixture
def run_example(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[str], str]]:
    """Runs a script of examples/trainers in this process and returns what it printed."""

    def run(name: str) -> str:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    yield run
    ampfast.unpatch()
