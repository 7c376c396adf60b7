"""The walk over an optimizer's parameters: reads, references, allocations and input types."""

from __future__ import annotations

import gc
import math
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
from support.comparison import TorchScaler, assert_same, started
from support.gradients import parameter_with
from torch.multiprocessing.reductions import StorageWeakRef

from ampfast import GradScaler


def optimizer_of(params: list[torch.nn.Parameter]) -> SimpleNamespace:
    return SimpleNamespace(param_groups=[{"params": params}], step=lambda: None)


class Hidden(torch.nn.Parameter):
    """Whose property hides the gradient that the tensor itself holds."""

    @property
    def grad(self) -> torch.Tensor | None:
        if self.hidden is None:
            raise ZeroDivisionError("no gradient today")
        return self.hidden

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self.hidden = value


def test_gradients_of_subclasses_are_read_through_their_property() -> None:
    for value in (2.0, math.inf):
        sides = []
        for scaler_type in (GradScaler, TorchScaler):
            params = [Hidden(torch.ones(2)), parameter_with(torch.ones(3))]
            params[0].grad = torch.tensor([1.0, value])
            torch.Tensor.grad.__set__(params[0], torch.full((2,), 7.0))
            groups = optimizer_of(params)
            scaler = started(scaler_type)
            scaler.unscale_(groups)
            scaler.step(groups)
            sides.append((params[0].hidden, params[1].grad))
            assert torch.Tensor.grad.__get__(params[0]).tolist() == [7.0, 7.0]
            params[0].grad = None
            scaler.update()
            with pytest.raises(ZeroDivisionError, match="no gradient today"):
                scaler.unscale_(groups)
            sides[-1] += (params[1].grad,)
        assert_same(*sides)


def test_nothing_is_kept_after_the_call() -> None:
    scaler = started()
    params = [parameter_with(torch.ones(n + 1)) for n in range(20)]
    groups = optimizer_of(params)
    counts = [(sys.getrefcount(p), sys.getrefcount(p.grad)) for p in params]
    for _ in range(3):
        scaler.unscale_(groups)
        assert [(sys.getrefcount(p), sys.getrefcount(p.grad)) for p in params] == counts
        scaler.step(groups)
        scaler.update()
    # Python object, tensor and memory are all freed.
    objects = [weakref.ref(p.grad) for p in params]
    storages = [StorageWeakRef(p.grad.untyped_storage()) for p in params]
    for p in params:
        p.grad = None
    gc.collect()
    assert not any(ref() is not None for ref in objects)
    assert all(ref.expired() for ref in storages)
    dying = [weakref.ref(p) for p in params]
    params.clear()
    del p
    gc.collect()
    assert not any(ref() is not None for ref in dying)


def test_no_tensor_is_made_for_the_gradients() -> None:
    params = [parameter_with(torch.ones(50_000)) for _ in range(10)]
    scaler = started()
    groups = optimizer_of(params)
    with torch.profiler.profile(profile_memory=True) as profile:
        scaler.unscale_(groups)
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in profile.key_averages())
    assert allocated < 1024
