"""Who divides by `grad_scale` itself: wrappers of optimizers, and torch's kernels on trial."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.captures import pretend_capture
from support.comparison import FLOATS, HookedUnscale
from support.optimizers import Reader
from support.steps import take_step

import ampfast


class Wrapper:
    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def step(self) -> object:
        return self.inner.step()


class Delegating(Wrapper):
    """As Lightning's wrappers do."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class PropertyOfOptimizer(torch.optim.Optimizer):
    _step_supports_amp_scaling = property(lambda self: self.inner._step_supports_amp_scaling)  # type: ignore[assignment]

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    step = Wrapper.step  # type: ignore[assignment]


class Copying(Wrapper):
    """Has the attributes of the other one, as Lightning's wrapper once did."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        vars(self).update(vars(inner), inner=inner)


class CopyingLate(torch.optim.SGD):
    """Also after torch's constructor."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        torch.optim.Optimizer.__init__(self, inner.param_groups, {})
        vars(self).update(vars(inner), inner=inner)

    step = Wrapper.step  # type: ignore[assignment]


def bound(inner: Any) -> Any:
    return types.SimpleNamespace(
        param_groups=inner.param_groups, step=inner.step, _step_supports_amp_scaling=True
    )


def of_plain_groups(inner: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """As after loading a checkpoint of a plain optimizer."""
    state = inner.state_dict()
    state["param_groups"][0]["fused"] = None
    inner.load_state_dict(state)
    return inner


def of_a_plain_group(inner: Any) -> Any:
    inner.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "fused": False})
    return inner


def of_a_subclass(inner: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Its step calls torch's."""
    names: Any = {"step": lambda self: super(Subclass, self).step()}
    return of_plain_groups(type("Own", (Subclass,), names)(inner))


WRAPPERS: list[Callable[[Any], Any]] = [
    *(Delegating, PropertyOfOptimizer, Copying, CopyingLate, bound),
    *(of_plain_groups, of_a_plain_group, of_a_subclass),
]


class Forwarding(torch.optim.Optimizer):
    """Gives the optimizer that it holds what it gets."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self._step_supports_amp_scaling = inner, True

    def step(self) -> None:  # type: ignore[override]
        inner: Any = self.inner
        inner.grad_scale, inner.found_inf = self.grad_scale, self.found_inf
        inner.step()
        del inner.grad_scale, inner.found_inf


class Subclass(torch.optim.SGD):
    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, fused=True)


def reader(inner: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Divides and skips on its own."""
    return Reader(inner.param_groups, lr=0.125)


def itself(inner: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return inner


DIVIDING: list[Callable[[Any], Any]] = [
    *(itself, Subclass, Forwarding, reader, ampfast.master_weights_)
]


def calls_of(*optimizers: torch.optim.Optimizer) -> list[object]:
    """Grows with each step of these."""
    calls: list[object] = []
    for each in optimizers:
        each.register_step_pre_hook(lambda *call: calls.append(call))
    return calls


@pytest.mark.parametrize("factor", [2.0, torch.inf], ids=["finite", "overflow"])
@pytest.mark.parametrize(
    "kind", [ampfast.GradScaler, HookedUnscale], ids=lambda kind: kind.__name__
)
@pytest.mark.parametrize("way", ["step", "unscale", "clip", "defer"])
@pytest.mark.parametrize("make", [*WRAPPERS, *DIVIDING], ids=lambda make: make.__name__)
def test_a_step_is_right_or_skipped(
    make: Callable[[Any], Any], kind: Any, way: str, factor: float
) -> None:
    if kind is HookedUnscale and way == "defer":
        way = "clip"
    param = torch.nn.Parameter(torch.ones(2))
    inner = torch.optim.SGD([param], lr=0.125, fused=True)
    optimizer = make(inner)
    is_torchs = isinstance(optimizer, torch.optim.Optimizer)
    calls = calls_of(inner, optimizer) if is_torchs else calls_of(inner)
    scaler = kind("cpu", 1024.0)
    scaler.scale((param * torch.tensor([1.0, factor])).sum()).backward()
    take_step(scaler, optimizer, way=way, max_norm=100.0)
    assert param.tolist() == ([0.875, 0.75] if factor == 2 else [1.0, 1.0])
    assert scaler.step_skipped(optimizer) == (factor != 2)
    assert bool(calls) == (factor == 2 or make in DIVIDING), "who skips it?"


def test_what_an_optimizer_says_later_counts() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    optimizer: Any = torch.optim.SGD([param], lr=0.1)
    calls, scaler = calls_of(optimizer), ampfast.GradScaler("cpu")

    def is_called_to_skip() -> bool:
        calls.clear()
        scaler.scale((param * torch.inf).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        return bool(calls)

    assert not is_called_to_skip()
    ampfast.sync_free_(optimizer)
    assert is_called_to_skip()
    optimizer._step_supports_amp_scaling = False
    assert not is_called_to_skip()
    optimizer._step_supports_amp_scaling = torch.ones(2)
    with pytest.raises(RuntimeError, match="ambiguous"):  # torch's error
        is_called_to_skip()
    assert param.tolist() == [1.0, 1.0]


# Trials of torch's fused kernels, and what is done where one fails

KERNELS: dict[Any, str] = {
    kind: f"_fused_{kind.__name__.lower()}_"
    for kind in (torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
}
EACH_KIND = pytest.mark.parametrize("kind", KERNELS, ids=lambda kind: kind.__name__)


def without(name: str, operator: Any) -> Callable[..., Any]:
    """A fused operator that ignores an argument."""
    return lambda *args, **kwargs: operator(*args, **{**kwargs, name: None})


FAULTS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "does not skip where found_inf is 1": partial(without, "found_inf"),
    "does not divide by grad_scale": partial(without, "grad_scale"),
    "computes other values than torch's unfused one": lambda _: lambda *args, **kwargs: None,
}


def ones() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(64))


@EACH_KIND
@pytest.mark.parametrize("words", FAULTS)
def test_a_kernel_that_ignores_what_it_is_told(
    kind: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scaler divides and skips by itself; sync_free_ refuses."""
    param, trusted = ones(), ones()
    optimizer, before = kind([param], lr=0.5, fused=True), kind([trusted], lr=0.5, fused=True)
    if not hasattr(before, "_step_supports_amp_scaling"):
        pytest.skip("to a scaler, the fused Adagrad of this torch is a plain optimizer")
    scaler = ampfast.GradScaler("cpu", 1024.0)
    scaler.scale((trusted * torch.inf).sum()).backward()
    scaler.step(before)
    scaler.update()
    monkeypatch.setattr(torch, KERNELS[kind], FAULTS[words](getattr(torch, KERNELS[kind])))
    found = []
    for each, p in ((optimizer, param), (before, trusted)):
        scaler.scale((p * torch.inf).sum()).backward()
        scaler.step(each)
        found.append(p.tolist() == [1.0] * 64 and scaler.step_skipped(each))
        scaler.update()
    assert found == [True, True]
    with pytest.raises(
        ValueError, match=f"parameter 0 of group 0, a torch.float32 on cpu: it {words}"
    ):
        ampfast.sync_free_(kind([ones()]))


def test_a_wrong_kernel_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the line of the program, as Python has it."""
    words, name = "does not skip where found_inf is 1", KERNELS[torch.optim.Adam]
    monkeypatch.setattr(torch, name, FAULTS[words](getattr(torch, name)))
    scaler, param = ampfast.GradScaler("cpu"), torch.nn.Parameter(torch.ones(2).double())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        with pytest.raises(AssertionError, match="_scale is None"):
            scaler.step(torch.optim.Adam([param], fused=True))
        assert not caught, "a step that is refused tries nothing"
        for _ in range(2):
            param = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
            optimizer = torch.optim.Adam([param], fused=True)
            scaler.scale(param.sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    (warning,) = caught
    assert f"fused Adam {words}, for torch.float64 on cpu" in str(warning.message)
    assert warning.filename == __file__
    param.grad = torch.full_like(param, torch.inf)
    pretend_capture(monkeypatch)
    scaler.step(torch.optim.Adam([param], fused=True))
    assert not param.isnan().any(), "what a trial has found counts in a capture, too"
    scaler.update()
    monkeypatch.setattr(torch, name, FAULTS[words](getattr(torch, name)))
    scaler.step(torch.optim.Adam([param], fused=True))
    assert param.isnan().all(), "without a trial, which cannot be captured, it is taken for right"


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_layer_may_change_its_dtype(
    default: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that are trained are judged, a frozen one is not; the default dtype plays no part."""

    def idle(params: Any, *args: Any, **kwargs: Any) -> None:
        if params[0].dtype is not torch.bfloat16:
            operator(params, *args, **kwargs)

    operator, params = torch._fused_sgd_, [ones(), ones(), ones()]
    monkeypatch.setattr(torch, "_fused_sgd_", idle)
    optimizer: Any = torch.optim.SGD(params, lr=0.5, fused=True)
    scaler, params[0].data = ampfast.GradScaler("cpu", 2.0), torch.ones(64, dtype=torch.float8_e5m2)
    params[0].requires_grad_(False)
    seen: list[bool] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(hasattr(optimizer, "grad_scale")))
    torch.set_default_dtype(default)
    try:
        for dtype in (torch.float32, torch.float32, torch.bfloat16):
            params[2].data = params[2].data.to(dtype)
            scaler.scale(torch.ones((), dtype=torch.float32))
            for param in params[1:]:
                param.grad = torch.full_like(param, 2.0)
            scaler.step(optimizer)
            scaler.update()
    finally:
        torch.set_default_dtype(torch.float32)
    assert seen == [True, True, False]


def test_a_trial_that_raises_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails_once(*args: Any, **kwargs: Any) -> None:
        if len(seen) == 0:
            raise MemoryError
        operator(*args, **kwargs)

    operator, param = torch._fused_adagrad_, torch.nn.Parameter(torch.ones(64).double())
    monkeypatch.setattr(torch, "_fused_adagrad_", fails_once)
    optimizer: Any = torch.optim.Adagrad([param], fused=True)
    if not hasattr(optimizer, "_step_supports_amp_scaling"):
        pytest.skip("to a scaler, the fused Adagrad of this torch is a plain optimizer")
    seen: list[bool] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(hasattr(optimizer, "grad_scale")))
    scaler = ampfast.GradScaler("cpu", 2.0)
    with pytest.warns(UserWarning, match=r"fused Adagrad could not be tried \(MemoryError"):
        for _ in range(2):
            scaler.scale(torch.ones(()))
            param.grad = torch.full_like(param, 2.0)
            scaler.step(optimizer)
            scaler.update()
    assert seen == [False, False]


def test_kernels_as_of_a_gpu_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """They round beta2 to float32; of master weights that is the only dtype that counts."""

    def rounding(params: Any, *args: Any, beta2: float, **kwargs: Any) -> None:
        if params[0].dtype is torch.float32:
            operator(params, *args, beta2=float(torch.tensor(beta2)), **kwargs)

    operator, param = torch._fused_adam_, torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    monkeypatch.setattr(torch, "_fused_adam_", rounding)
    optimizer: Any = ampfast.master_weights_(torch.optim.Adam([param], fused=True))
    optimizer.step = lambda: optimizer.found_inf
    scaler = ampfast.GradScaler("cpu")
    scaler.scale(param.sum()).backward()
    assert scaler.step(optimizer) == 0, "only one that divides in its step is given it"


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@EACH_KIND
def test_an_optimizer_moves_or_is_refused(kind: Any, dtype: torch.dtype) -> None:
    """torch 2.13's fused SGD leaves 16-bit parameters on a CPU where they are."""
    param = torch.nn.Parameter(torch.ones(40, dtype=dtype))
    try:
        optimizer = ampfast.sync_free_(kind([param], lr=0.5))
    except ValueError as error:
        assert "computes other values" in str(error)
        assert dtype.itemsize == 2
        optimizer = kind([param], lr=0.5)
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert int((param != 1).sum()) == 40


def test_what_cannot_be_tried_is_left_to_its_step() -> None:
    """Where no flag can be read, either."""
    param = torch.nn.Parameter(torch.ones(2, device="meta"))
    optimizer: Any = torch.optim.Adam([param], fused=True)
    scaler = ampfast.GradScaler("cpu", backend="aten")
    scale, calls = scaler.scale(torch.ones((), device="meta")), []
    param.grad = torch.ones_like(param) * scale
    optimizer.step = lambda: calls.append(optimizer.grad_scale)
    scaler.step(optimizer)
    assert [each.device for each in calls] == [param.device]
