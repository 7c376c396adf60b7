"""Values that the scaler writes and hands to optimizers, against torch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.frames import Loop
from support.gradients import parameter_with, sgd_with
from support.optimizers import FUSED, OPTIMIZERS, Reader
from support.outcomes import agree, outcome
from support.scalers import Scaler, started
from support.twins import side

from ampfast import GradScaler, optimizers
from ampfast.optimizers import takes_grad_scaler

# Written values


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_are_written_in_place(name: str) -> None:
    def use(scaler_type: Scaler) -> Any:
        one = side(scaler_type, name, init_scale=8.0)
        one.scaler.scale(one.loss(0)).backward()
        before = [(p.grad, p.grad.data_ptr()) for p in one.model.parameters()]
        one.scaler.unscale_(one.optimizer)
        after = [p.grad for p in one.model.parameters()]
        assert all(a is b and a.data_ptr() == at for (b, at), a in zip(before, after, strict=True))
        return [[g._version for g in after], after]

    assert agree(use).error is None


def test_version_counters_move_as_torchs_do() -> None:
    def use(scaler_type: Scaler) -> Any:
        scaler, gradient = started(scaler_type), torch.ones(3)
        optimizer, seen = sgd_with(gradient), []
        for call in (
            lambda: scaler.unscale_(optimizer),
            lambda: scaler.step(optimizer),
            scaler.update,
            lambda: scaler.update(4.0),
            lambda: scaler.update(torch.tensor(2.0)),
            lambda: scaler.load_state_dict(scaler.state_dict()),
        ):
            call()
            tensors = (gradient, scaler._scale, scaler._growth_tracker)
            seen.append([tensor._version for tensor in tensors])
        return seen

    agree(use)


def test_update_between_scale_and_backward_is_detected() -> None:
    def use(scaler_type: Scaler) -> None:
        one = side(scaler_type, init_scale=8.0)
        one.train(0)
        pending = one.scaler.scale(one.loss(1))
        one.scaler.unscale_(one.optimizer)
        one.scaler.update()
        pending.backward()

    error = agree(use).error
    assert error is not None and "modified by an inplace operation" in str(error)


def test_unscale_after_create_graph() -> None:
    def use(scaler_type: Scaler) -> Any:
        one = side(scaler_type, init_scale=8.0)
        scaled = one.scaler.scale(one.loss(1))
        scaled.backward(create_graph=True)
        parameters = list(one.model.parameters())
        one.scaler.unscale_(one.optimizer)
        penalty = sum(p.grad.square().sum() for p in parameters)
        # torch decides whether autograd allows a second backward pass; ours must agree.
        more = torch.autograd.grad(penalty, parameters)
        return [list(more), [p.grad.detach() for p in parameters]]

    agree(use)


def test_a_flag_handed_out_is_never_written_again() -> None:
    scaler, gradient = started(GradScaler), torch.tensor([float("inf")])
    optimizer = sgd_with(gradient)
    scaler.unscale_(optimizer)
    [kept] = scaler._found_inf_per_device(optimizer).values()
    address = kept.data_ptr()
    scaler.update()
    for _ in range(3):
        gradient.fill_(1.0)
        scaler.step(optimizer)
        scaler.update()
    assert kept.item() == 1.0 and kept.data_ptr() == address


# Updates


@pytest.mark.parametrize("flag", [0.0, 1.0])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("_growth_factor", value) for value in (None, "2", 3, torch.tensor(3.0))),
        ("_backoff_factor", float("inf")),
        *(("_growth_interval", value) for value in (2.0, None, True, 2**40)),
    ],
    ids=str,
)
def test_update_with_odd_settings(name: str, value: Any, flag: float) -> None:
    def use(scaler_type: Scaler) -> Any:
        gradient = torch.tensor([float("inf") if flag else 1.0])
        scaler, optimizer = started(scaler_type, growth_interval=1), sgd_with(gradient)
        setattr(scaler, name, value)
        scaler.step(optimizer)
        error = outcome(scaler.update).error
        # The text is the dispatcher's, which lists the arguments of the op.
        assert error is None or isinstance(error, (TypeError, RuntimeError, ValueError))
        return [type(error).__name__, scaler._scale, scaler._growth_tracker]

    agree(use)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scale_rebound_to_other_tensors(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    def use(scaler_type: Scaler) -> Any:
        scaler, optimizer = started(scaler_type, growth_interval=1), sgd_with(torch.ones(2))
        scaler._scale = torch.full(shape, 3.0, dtype=dtype)
        errors = [outcome(lambda: scaler.step(optimizer)).error, outcome(scaler.update).error]
        assert all(isinstance(error, (RuntimeError, TypeError)) for error in errors if error)
        seen = [type(error).__name__ for error in errors]
        return [*seen, scaler._scale, optimizer.param_groups[0]["params"][0].detach()]

    agree(use)


# Optimizers that read the scale themselves


class Legacy(torch.optim.SGD):
    """Optimizer that asks the scaler for flags and scale."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None, *, grad_scaler: Any = None) -> Any:
        flags = grad_scaler._check_inf_per_device(self)
        return [list(flags.values()), grad_scaler._get_scale_async(), grad_scaler.get_scale()]


def legacy() -> Any:
    return Legacy([parameter_with(torch.ones(2))], lr=0.1)


def test_legacy_optimizers_get_the_scaler_and_a_warning_at_the_users_line() -> None:
    def use(scaler_type: Scaler) -> Any:
        scaler, optimizer = started(scaler_type), legacy()
        seen = scaler.step(optimizer)
        scaler.update()
        return [seen, scaler.state_dict(), hasattr(optimizer, "grad_scale")]

    [(category, _, filename, _)] = agree(use).warned
    assert category is FutureWarning and filename == __file__


class Slotted:
    """Callable that wraps a step, and takes no weak reference."""

    __slots__ = ("step",)

    def __init__(self, step: Callable[..., Any]) -> None:
        self.step = step

    def __call__(self, *, grad_scaler: Any = None) -> Any:
        return self.step(grad_scaler=grad_scaler)


class Unhashable(Slotted):
    """Callable that equals every other one, and has the attribute of a method."""

    def __init__(self, step: Callable[..., Any]) -> None:
        self.step, self.__func__ = step, getattr(step, "__func__", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.step(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unhashable)


def scheduled(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """The plain function that a schedule puts on the instance."""
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5)
    return optimizer.step


STEPS: dict[str, Callable[[torch.optim.Optimizer], Callable[..., Any]]] = {
    "method": lambda optimizer: optimizer.step,
    "schedule": scheduled,
    "partial": lambda optimizer: functools.partial(optimizer.step),
    "callable": lambda optimizer: Unhashable(optimizer.step),
}


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("name", FUSED)
def test_a_signature_is_read_in_the_first_step_only(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaler, optimizer = started(GradScaler), OPTIMIZERS[name]([parameter_with(torch.ones(2))])
    optimizer.step = STEPS[kind](optimizer)  # type: ignore[method-assign]
    read: list[Any] = []
    signature = inspect.signature
    monkeypatch.setattr(inspect, "signature", lambda c: (read.append(c), signature(c))[1])
    for _ in range(3):
        read.clear()
        scaler.step(optimizer)
        scaler.update()
    assert read == []


@pytest.mark.parametrize("kind", [*STEPS, "slots"])
def test_legacy_optimizers_whose_step_is_wrapped(kind: str) -> None:
    wrap = STEPS.get(kind, lambda optimizer: Slotted(optimizer.step))

    def use(scaler_type: Scaler) -> Any:
        scaler, optimizer = started(scaler_type), legacy()
        seen = []
        for _ in range(3):
            seen.append(outcome(lambda: scaler.step(optimizer)).comparable())
            scaler.update()
            optimizer.step = wrap(optimizer)  # type: ignore[method-assign]
        return seen

    agree(use)


@pytest.mark.parametrize("weak", [True, False])
def test_a_step_at_the_address_of_another_has_a_signature_of_its_own(weak: bool) -> None:
    def kind(call: Callable[..., None]) -> type:
        return type("Step", (), {"__call__": call, **({} if weak else {"__slots__": ()})})

    kinds = kind(lambda self, grad_scaler=None: None), kind(lambda self: None)
    known = len(optimizers._signatures)
    addresses = set()
    for number in range(20):
        step = kinds[number % 2]()
        addresses.add(id(step))
        for _ in range(2):
            assert takes_grad_scaler(step) is not bool(number % 2)
        del step
    assert len(addresses) < 20, "each had an address of its own"
    assert len(optimizers._signatures) == known


class Overriding(GradScaler):
    """Override that calls `step` and `update`."""

    def update(self, new_scale: Any = None) -> None:
        super().update(new_scale)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("scaler_type", [GradScaler, Overriding])
def test_step_and_update_warns_at_the_users_line(scaler_type: Scaler, count: int) -> None:
    scaler = started(scaler_type)
    optimizers = [legacy() for _ in range(count)]
    result = outcome(lambda: scaler.step_and_update(*optimizers))
    assert result.error is None
    assert [(w[0], w[2]) for w in result.warned] == [(FutureWarning, __file__)] * count


# Gradients that share memory


def test_flags_of_several_optimizers_are_summed() -> None:
    """As torch does, which only shows where a flag is neither 0 nor 1."""

    def use(scaler_type: Scaler) -> Any:
        scaler = started(scaler_type, 4.0, growth_interval=1)
        for key, flag in enumerate((1.0, -1.0)):
            flags = {torch.device("cpu"): torch.tensor(flag)}
            scaler._per_optimizer_states[key] = {"found_inf_per_device": flags}
        scaler.update()
        return scaler.get_scale()

    assert agree(use).value == 8.0


def scaled_alone(count: int = 1000) -> tuple[GradScaler, Any, torch.nn.Parameter]:
    param = parameter_with(torch.full((count,), 8.0))
    return started(GradScaler, 4.0), torch.optim.SGD([param], lr=0.1), param


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


class Paused(GradScaler):
    paused = False
    _enabled = property(
        lambda self: vars(self).get("_enabled", False) and not self.paused,
        lambda self, value: vars(self).update(_enabled=value),
    )


def test_a_property_of_a_subclass_counts() -> None:
    scaler, (_, optimizer, param) = started(Paused, 4.0), scaled_alone()
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
    scaler.unscale_(optimizer)
    scaler.update(16.0)
    assert scaler._scale.item() == 16.0, "in place of one of another dtype"


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


def test_a_hook_takes_an_optimizer_without_groups() -> None:
    params = [parameter_with(torch.full((3,), 4.0), fill=0.0) for _ in range(2)]
    several: Any = Several(*(torch.optim.SGD([p], 1.0) for p in params))
    scaler = started(Each, 4.0)
    scaler.step(several)
    scaler.update()
    assert all(param.eq(-1).all() for param in params)


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kernels", ["cpu", "launcher"])
def test_an_optimizer_gets_a_copy_of_any_scale(
    kernels: str, dtype: torch.dtype, is_sparse: bool, request: pytest.FixtureRequest
) -> None:
    if kernels == "launcher":
        request.getfixturevalue("launcher")
    scaler, _, param = scaled_alone(3)
    scaler._scale = torch.tensor(4.0, dtype=dtype)
    other = parameter_with(torch.ones(3).to_sparse() if is_sparse else torch.ones(3))
    flag, divisor = scaler.step(Reader([param, other], lr=0.1))  # type: ignore[misc]
    assert (flag, divisor.item(), divisor.dtype) == (0.0, 4.0, dtype)
    assert divisor.data_ptr() != scaler._scale.data_ptr()
