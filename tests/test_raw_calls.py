"""Raw calls of `step` and `update`: what they decline, and what Python may do beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.frames import Loop
from support.optimizers import Reader
from torch.utils._python_dispatch import TorchDispatchMode

from ampfast import GradScaler
from ampfast.backends import cpu
from ampfast.backends.core import Factor, Pass, Update, clip_to, is_found, state_layout

CPU = torch.device("cpu")


def sparse(params: list[Any]) -> Any:
    params[1].grad = torch.sparse_coo_tensor([[0]], [1.0], (4,))
    return params


def strided(params: list[Any]) -> Any:
    params[1].grad = torch.ones(8)[::2]
    return params


def subclass(params: list[Any]) -> Any:
    class Tensor(torch.Tensor):
        pass

    params[1].grad = torch.ones(4).as_subclass(Tensor)
    return params


def in_a_tuple(params: list[Any]) -> Any:
    return tuple(params)


def none(params: list[Any]) -> Any:
    for param in params:
        param.grad = None
    return params


UNUSUAL = {each.__name__: each for each in (sparse, strided, subclass, in_a_tuple, none)}


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Groups:
    """Optimizer of nothing but groups."""

    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": params}]


def with_ones() -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter(torch.zeros(4)) for _ in range(3)]
    for param in params:
        param.grad = torch.ones(4)
    return params


def calls_over(optimizer: Any, entry: dict[str, Any], scale: torch.Tensor) -> list[Any]:
    """Answers of all calls over an optimizer's gradients."""
    unscaling, given = Pass(True, Factor.TIMES_RECIPROCAL, scale), (optimizer, entry, "unscaled")
    check = Pass(False, Factor.DIVIDE, scale)
    return [
        cpu.pass_over(*given, unscaling, False, scale),
        cpu.clip_over(*given, unscaling._replace(write=False), False, scale, clip_to(1.0, False)),
        cpu.pass_over(optimizer, None, None, check, False, scale),
    ]


@pytest.mark.parametrize("make", UNUSUAL.values(), ids=UNUSUAL)
def test_a_declined_call_changes_nothing(make: Callable[[list[Any]], Any]) -> None:
    """A raw call that answers None has neither marked the entry nor written a gradient."""
    entry: dict[str, Any] = {"stage": "ready", "found_inf_per_device": {}}
    params = with_ones()
    optimizer = Groups(make(params))
    assert calls_over(optimizer, entry, torch.tensor(4.0)) == [None] * 3
    assert entry == {"stage": "ready", "found_inf_per_device": {}}
    assert all(param.grad is None or param.grad.to_dense().max() == 1 for param in params)


@pytest.mark.parametrize(
    "scale",
    [torch.tensor(4.0, dtype=torch.float64), torch.tensor([4.0]), torch.tensor(4.0, device="meta")],
    ids=["float64", "one dimension", "elsewhere"],
)
def test_an_unusual_scale_is_declined(scale: torch.Tensor) -> None:
    entry: dict[str, Any] = {"stage": "ready"}
    params = with_ones()
    assert calls_over(Groups(params), entry, scale) == [None] * 3
    assert entry == {"stage": "ready"}
    assert all(param.grad is not None and param.grad.eq(1).all() for param in params)


def test_a_dispatch_mode_sees_all() -> None:
    entry: dict[str, Any] = {"stage": "ready"}
    params, scale, tracker = with_ones(), torch.tensor(4.0), torch.zeros((), dtype=torch.int32)
    flag = torch.zeros(())
    with Watching():
        assert calls_over(Groups(params), entry, scale) == [None] * 3
        assert is_found({CPU: flag}) is None
        assert cpu.update(Update(scale, tracker, [flag], 2.0, 0.5, 1)) is None
    assert entry == {"stage": "ready"} and scale == 4


def test_float16_is_torchs_to_refuse() -> None:
    params = with_ones()
    params[1] = torch.nn.Parameter(torch.zeros(4, dtype=torch.float16))
    params[1].grad = torch.ones(4, dtype=torch.float16)
    entry: dict[str, Any] = {"stage": "ready"}
    assert calls_over(Groups(params), entry, torch.tensor(4.0))[:2] == [None] * 2
    assert entry == {"stage": "ready"}
    assert all(param.grad is not None and param.grad.eq(1).all() for param in params)


def test_what_is_no_dict_is_no_turn() -> None:
    params = with_ones()
    for entry in ([], torch.nn.ParameterDict()):
        with pytest.raises(TypeError, match="expected the turn of an optimizer"):
            calls_over(Groups(params), entry, torch.tensor(4.0))
    assert all(param.grad is not None and param.grad.eq(1).all() for param in params)


@pytest.mark.parametrize(
    "flag",
    [
        *(0.0, torch.zeros((), dtype=torch.float64), torch.zeros(1), None),
        torch.zeros((), device="meta"),
    ],
    ids=["a number", "float64", "one dimension", "none", "elsewhere"],
)
def test_unusual_flags_are_not_read(flag: Any) -> None:
    assert is_found({CPU: torch.ones(()), "x": flag}) is None


def test_flags_are_read() -> None:
    assert is_found({}) is False
    assert is_found({CPU: torch.zeros(()), "x": torch.tensor(float("nan"))}) is True


UNUSUAL_UPDATES: dict[str, dict[str, Any]] = {
    "a flag that is none": {"found_infs": [torch.zeros(()), None]},
    "float64 flag": {"found_infs": [torch.zeros((), dtype=torch.float64)]},
    "a flag elsewhere": {"found_infs": [torch.zeros((), device="meta")]},
    "float64 scale": {"scale": torch.tensor(4.0, dtype=torch.float64)},
    "scale elsewhere": {"scale": torch.tensor(4.0, device="meta")},
    "scale with a gradient": {"scale": torch.tensor(4.0, requires_grad=True)},
    "no scale": {"scale": None},
    "int64 tracker": {"growth_tracker": torch.zeros((), dtype=torch.int64)},
    "integer growth factor": {"growth_factor": 2},
    "no backoff factor": {"backoff_factor": None},
    "bool interval": {"growth_interval": True},
    "huge interval": {"growth_interval": 2**64},
    "other words": {"state": torch.zeros(3, dtype=torch.int64)},
    "norm of another type": {"norm": torch.tensor(1.0, dtype=torch.float64)},
}


@pytest.mark.parametrize("change", UNUSUAL_UPDATES.values(), ids=UNUSUAL_UPDATES)
def test_unusual_updates_change_nothing(change: dict[str, Any]) -> None:
    scale, tracker = torch.tensor(4.0), torch.zeros((), dtype=torch.int32)
    words = torch.zeros(state_layout.STATE_WORDS, dtype=torch.int64)
    usual = Update(scale, tracker, [torch.zeros(())], 2.0, 0.5, 1, words)
    assert cpu.update(usual._replace(**change)) is None
    assert (scale.item(), tracker.item()) == (4.0, 0) and not words.any()
    assert cpu.update(usual) is True
    assert (scale.item(), tracker.item(), int(words[state_layout.STEPS])) == (8.0, 0, 1)


def test_flags_that_are_no_tensors() -> None:
    """A number is left to torch's op; what is no sequence is refused."""
    scale, tracker = torch.tensor(4.0), torch.zeros((), dtype=torch.int32)
    assert cpu.update(Update(scale, tracker, [0.0], 2.0, 0.5, 1)) is None  # type: ignore[list-item]
    with pytest.raises(TypeError):
        cpu.update(Update(scale, tracker, 3, 2.0, 0.5, 1))  # type: ignore[arg-type]
    assert (scale.item(), tracker.item()) == (4.0, 0)


def test_flags_of_several_optimizers_are_summed() -> None:
    """As torch does, which only shows where a flag is neither 0 nor 1."""
    scales = []
    for kind in (torch.amp.GradScaler, GradScaler):
        scaler = kind("cpu", init_scale=4.0, growth_interval=1)
        scaler.scale(torch.ones(()))
        for key, flag in enumerate((1.0, -1.0)):
            scaler._per_optimizer_states[key] = {"found_inf_per_device": {CPU: torch.tensor(flag)}}
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [8.0, 8.0]


def scaled_alone(count: int = 1000) -> tuple[GradScaler, Any, torch.nn.Parameter]:
    scaler, param = GradScaler("cpu", init_scale=4.0), torch.nn.Parameter(torch.ones(count))
    scaler.scale(torch.ones(()))
    param.grad = torch.full((count,), 8.0)
    return scaler, torch.optim.SGD([param], lr=0.1), param


@pytest.mark.parametrize("call", ["unscale_", "clip_grad_norm_"])
def test_python_that_runs_while_a_state_is_marked(call: str) -> None:
    """Replaced entries of the state live until the gradients are written."""
    scaler, optimizer, param = scaled_alone()
    held: list[torch.Tensor] = []

    class Ends:
        def __del__(self) -> None:
            param.grad = None
            held.append(torch.full((1000,), 7.0))

    scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {"x": Ends()}  # type: ignore[dict-item]
    getattr(scaler, call)(optimizer, *((1e9,) if call == "clip_grad_norm_" else ()))
    assert held[0].eq(7).all()


@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_a_step_that_clears_its_entry(kind: str) -> None:
    loop = Loop(GradScaler("cpu"), kind)
    loop.backward()
    entry = loop.scaler._per_optimizer_states
    loop.optimizer.step = lambda: entry[id(loop.optimizer)].clear()  # type: ignore[method-assign]
    assert loop.scaler.step(loop.optimizer) is None


def test_a_property_of_a_subclass_counts() -> None:
    class Paused(GradScaler):
        @property
        def _enabled(self) -> bool:  # type: ignore[override]
            return self.__dict__.get("_enabled", False) and not self.__dict__.get("paused")

        @_enabled.setter
        def _enabled(self, value: bool) -> None:
            self.__dict__["_enabled"] = value

    scaler, (_, optimizer, param) = Paused("cpu", init_scale=4.0), scaled_alone()
    scaler.scale(torch.ones(()))
    scaler.paused = True  # type: ignore[attr-defined]
    scaler.step(optimizer)
    assert param.grad is not None and param.grad.eq(8).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_scale_that_is_written_in_place_counts(dtype: torch.dtype) -> None:
    scaler, optimizer, param = scaled_alone()
    scaler._scale = torch.tensor(4.0, dtype=dtype)
    for scale in (4.0, 8.0):
        scaler._scale.fill_(scale)
        param.grad = torch.full_like(param, 8.0)
        scaler.unscale_(optimizer)
        assert param.grad.eq(8 / scale).all()
        scaler._per_optimizer_states.clear()


def test_a_hook_takes_an_optimizer_without_groups() -> None:
    class Several:
        def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
            self.optimizers = optimizers

        def step(self) -> None:
            for each in self.optimizers:
                each.step()

    class Each(GradScaler):
        def _unscale_grads_(self, optimizer: Any, *given: Any) -> Any:
            found = {}
            for each in optimizer.optimizers:
                found |= super()._unscale_grads_(each, *given)
            return found

    params = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
    scaler, several = (
        Each("cpu", init_scale=4.0),
        Several(*(torch.optim.SGD([p], 1.0) for p in params)),
    )
    scaler.scale(torch.ones(()))
    for param in params:
        param.grad = torch.full((3,), 4.0)
    scaler.step(several)  # type: ignore[arg-type]
    scaler.update()
    assert all(param.eq(-1).all() for param in params)


def test_a_new_scale_in_place_of_one_of_another_dtype() -> None:
    scaler, optimizer, _ = scaled_alone()
    scaler._scale = torch.tensor(4.0, dtype=torch.float64)
    scaler.unscale_(optimizer)
    scaler.update(16.0)
    assert scaler._scale.item() == 16.0


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kernels", ["cpu", "launcher"])
def test_an_optimizer_gets_a_copy_of_any_scale(
    kernels: str, dtype: torch.dtype, is_sparse: bool, request: pytest.FixtureRequest
) -> None:
    if kernels == "launcher":
        request.getfixturevalue("launcher")
    scaler, (_, _, param) = GradScaler("cpu"), scaled_alone(3)
    scaler.scale(torch.ones(()))
    scaler._scale = torch.tensor(4.0, dtype=dtype)
    other = torch.nn.Parameter(torch.ones(3))
    other.grad = torch.ones(3).to_sparse() if is_sparse else torch.ones(3)
    flag, divisor = scaler.step(Reader([param, other], lr=0.1))  # type: ignore[misc]
    assert (flag, divisor.item(), divisor.dtype) == (0.0, 4.0, dtype)
    assert divisor.data_ptr() != scaler._scale.data_ptr()
