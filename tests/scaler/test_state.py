"""Checkpoints, pickles, copies and disabled scalers."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from support.comparison import Scaler, TorchScaler, agree, assert_same, outcome, started
from support.steps import side
from torch._subclasses import FakeTensorMode

import ampfast
from ampfast import GradScaler

KEYS = ["scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"]
FIVE = dict(zip(KEYS, [24.0, 3.0, 0.25, 5, 2], strict=True))
INF = float("inf")
ODD = (7, True, 2**70, INF, float("nan"), np.float32(6), torch.tensor(6.0))


def everything(scaler: TorchScaler) -> list[Any]:
    """State that loading can change."""
    names = ["_init_scale", "_init_growth_tracker", "_scale", "_growth_tracker"]
    return [scaler.state_dict(), [getattr(scaler, name) for name in names]]


# state_dict and load_state_dict


@pytest.mark.parametrize(
    "change",
    [
        *({key: value} for key in KEYS for value in ODD),
        *({"growth_interval": 0}, {"_growth_tracker": 2.7}, {"growth_factor": 0.5}, {"more": 1}),
    ],
    ids=str,
)
@pytest.mark.parametrize("begun", [False, True])
def test_odd_states(change: dict[str, Any], begun: bool) -> None:
    def use(scaler_type: Scaler) -> Any:
        scaler = started(scaler_type) if begun else scaler_type("cpu")
        state = {**FIVE, **change}
        error = outcome(lambda: scaler.load_state_dict(state)).comparable()[0]
        # Entries before the fault stay loaded, as in torch.
        return [error, everything(scaler)]

    agree(use)


# Disabled scalers


DISABLED = [
    "[s.scale(x) is x for x in (torch.ones(2), [torch.ones(1)], 3, None)]",
    *("s.unscale_(o)", "s.unscale_(None)", "s.step(o)", "s.step(o, lambda: 3.5)"),
    *("s.step(o, closure=lambda: 2.5)", "[s.step(o), s.step(o)]", "s.update()", "s.update('x')"),
    *("s.get_scale()", "s.is_enabled()", "s._get_growth_tracker()", "s.state_dict()"),
    *("s.load_state_dict(FIVE)", "s.get_growth_factor()", "s.get_backoff_factor()"),
    *("s.get_growth_interval()", "[s.set_growth_factor(3.0), s.get_growth_factor()]"),
    "[hasattr(s, name) for name in ('_scale', '_init_scale', '_growth_tracker')]",
    *("s._per_optimizer_states", "s._check_inf_per_device(o)", "copy.deepcopy(s).is_enabled()"),
]


@pytest.mark.parametrize("call", DISABLED)
def test_disabled(call: str) -> None:
    def use(scaler_type: Scaler) -> Any:
        one = side(scaler_type, enabled=False)
        one.loss(0).backward()
        return [eval(call, {**globals(), "s": one.scaler, "o": one.optimizer}), one.observe()]

    agree(use)


def test_repr_without_a_wait_of_the_host() -> None:
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = GradScaler("cpu", init_scale=1024.0)
    assert repr(scaler) == "<GradScaler: scale 1024, on no device yet>"
    assert repr(GradScaler("cpu", enabled=False)) == "<GradScaler: disabled>"
    for value in (1.0, math.inf, 1.0):
        weight.grad = torch.full((2,), value)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
    backend = scaler._choice.name_for(torch.device("cpu"))
    assert repr(scaler) == f"<GradScaler: scale 512, 3 steps, 1 skipped, backend {backend}>"
    assert repr(copy.deepcopy(scaler)) == "<GradScaler: scale 512, on no device yet>"
    scaler = GradScaler("cpu", backend="aten")
    for _ in range(2):  # attributes missing in one pickle are present in the next
        scaler = pickle.loads(pickle.dumps(scaler))
    scaler.scale(torch.ones(()))
    assert repr(scaler).endswith("backend aten>")
    with FakeTensorMode():  # a number of this tensor cannot be read
        scaler._scale = torch.ones((), device="cuda")
    assert repr(scaler) == "<GradScaler: scale, steps and skipped on cuda:0: see stats()>"


def test_the_package_lists_its_public_names_alone() -> None:
    assert set(dir(ampfast)) == set(ampfast.__all__)


# What is made in inference mode


@pytest.mark.parametrize("backend", ["cpu", "aten"])
@pytest.mark.parametrize("kind", ["plain", "fused", "sparse"])
@pytest.mark.parametrize("limit", [None, ampfast.Percentile(100), ampfast.ZScore()], ids=str)
@pytest.mark.parametrize("track", [None, "overflow", "norms"])
def test_a_first_step_in_inference_mode(track: Any, limit: Any, kind: str, backend: str) -> None:
    """Later steps write what it made; torch's own scale cannot be written then."""
    param = torch.nn.Parameter(torch.zeros(4, 2))
    optimizer = torch.optim.SGD([param], lr=1.0, fused=kind == "fused")
    options: Any = {"backend": backend, "track": track, "growth_interval": 1}
    scaler = GradScaler("cpu", 8.0, **options, skip_above=None if limit else ampfast.Sigmas())
    for step in range(3):
        with torch.inference_mode(step == 0):
            grad = torch.full((4, 2), float(scaler.scale(torch.ones(()))))
            param.grad = grad.to_sparse(1) if kind == "sparse" else grad
            if limit:
                scaler.clip_grad_norm_(optimizer, limit)
            scaler.step(optimizer)
            scaler.update()
    assert_same(param.detach(), torch.full((4, 2), -3.0))
    assert scaler.get_scale() == 64
