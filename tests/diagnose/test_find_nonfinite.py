"""The module whose output, or gradient, was the first that is not finite: a zoo of broken nets."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import warnings
import weakref
from collections import Counter, UserDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import ampfast
from ampfast import GradScaler

INF, NAN = float("inf"), float("nan")
quant: Any = torch.ao.quantization


class Op(nn.Module):
    """A module that applies a function."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


class Around(nn.Module):
    """A module whose forward calls another."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.call = module, call

    def forward(self, x: Tensor) -> Any:
        return self.call(self.module, x)


def broken() -> nn.Module:
    return Op(lambda x: (x * 0).sqrt())


def checkpointed(module: nn.Module, use_reentrant: bool) -> nn.Module:
    return Around(module, partial(checkpoint, use_reentrant=use_reentrant))


# By name: what stands in the middle of the net, the name of what breaks, where, and how.
ZOO: dict[str, tuple[Callable[[], nn.Module], str, str, str]] = {
    "log of 0": (lambda: Op(lambda x: torch.log(x * 0)), "2", "output", "inf"),
    "division of 0": (lambda: Op(lambda x: x * 0 / (x * 0)), "2", "output", "nan"),
    "backward": (broken, "2", "gradient", "nan"),
    "residual": (lambda: Around(broken(), lambda m, x: x + m(x)), "2.module", "gradient", "nan"),
    "passed on": (lambda: nn.Sequential(nn.Identity(), broken()), "2.1", "gradient", "nan"),
    "container": (lambda: chain(chain(nn.Tanh(), lambda x: x + INF)), "2.0.1", "output", "inf"),
    **{
        f"checkpointed, {where}, {again}": (
            lambda op=op, again=again: checkpointed(chain(nn.Linear(8, 8), op()), again),
            *("2.module.1", where, kind),
        )
        for again in (False, True)
        for op, where, kind in (
            (lambda: Op(lambda x: torch.exp(x * 1e4)), "output", "inf"),
            (broken, "gradient", "nan"),
        )
    },
}


def chain(*modules: Any) -> nn.Module:
    return nn.Sequential(*(m if isinstance(m, nn.Module) else Op(m) for m in modules))


def net_around(module: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    # In place, as in many networks.
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), module, nn.Linear(8, 8))


def train(model: nn.Module, x: Tensor | None = None) -> None:
    model(torch.rand(4, 8) if x is None else x).float().sum().backward()


def told(fault: Any, **expected: Any) -> bool:
    """Whether a fault has these values."""
    return {name: getattr(fault, name) for name in expected} == expected


Step = Callable[[Tensor], Tensor]


def after(*makes: Callable[[Any], Any]) -> Callable[[Any], Step]:
    """What is made of a watched model is trained, broken, and no longer there."""

    def form(model: Any) -> Step:
        for make in makes:
            train(make(model), torch.full((4, 8), NAN))
        return model  # type: ignore[no-any-return]

    return form


def quantized(model: Any) -> Any:
    model.qconfig = quant.get_default_qat_qconfig()
    return quant.prepare_qat(model)


FORMS: dict[str, Callable[[Any], Step]] = {
    "eager": lambda model: model,
    **{
        f"checkpointed, {again}": (
            lambda model, again=again: (
                lambda x: checkpoint(model, x.requires_grad_(), use_reentrant=again)
            )
        )
        for again in (False, True)
    },
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "in a compiled function": lambda model: torch.compile(lambda x: model(x), backend="eager"),
    "after what is made of it": after(
        copy.deepcopy, quantized, lambda model: torch.jit.script(model[0])
    ),
    "DDP": nn.parallel.DistributedDataParallel,
    "FSDP2": lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (1,))),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ZOO)
def test_a_scaler_names_the_module(name: str, form: str, request: pytest.FixtureRequest) -> None:
    if form in ("DDP", "FSDP2"):
        request.getfixturevalue("world")
    if "compiled" in form:
        torch._dynamo.reset()
    make, module, where, kind = ZOO[name]
    training = Trained(model := net_around(make()))
    training.models = (FORMS[form](model),)
    training.optimizers = [torch.optim.SGD(model.parameters())]  # of FSDP2's
    training.scaler.name_parameters(model)
    name = type(model.get_submodule(module)).__name__
    training.step()
    expected = {"module": module, "where": where, "kind": kind, "type": name}
    assert told(training.module, **expected, inputs_finite=True, passes_ago=0)


class Between(nn.Module):
    """What no module computes is not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return self.second(self.first(x) * INF)


@dataclass
class Outputs:
    hidden: Any
    loss: Tensor | None = None


class Batch(dict[str, Tensor]):
    """A mapping that torch's trees take for a leaf, as `transformers.BatchEncoding` is one."""


def holds_itself(x: Tensor) -> Outputs:
    outputs = Outputs(None)
    outputs.hidden = [outputs] * 9
    return outputs


class Refused(dict[str, Tensor]):
    """A mapping, with a tensor whose class refuses every op, that cannot be looked into."""

    class Wrapper(Tensor):
        @classmethod
        def __torch_dispatch__(cls, *call: Any) -> Any:
            raise NotImplementedError

    values = None  # type: ignore[assignment]


def refused(x: Tensor) -> Any:
    return torch.Tensor._make_wrapper_subclass(Refused.Wrapper, (2,)), Refused(), x  # type: ignore[attr-defined]


def without_values(x: Tensor) -> list[Tensor]:
    nested = torch.nested.nested_tensor([x, x[:1]], layout=torch.jagged)
    with FakeTensorMode():
        fake = torch.ones(2)
    return [x.to_sparse(), fake, nested]


def shared() -> nn.Module:
    linear = nn.Linear(8, 8)
    return nn.Sequential(linear, nn.Tanh(), linear, nn.Tanh())


def early() -> nn.Module:
    """Its second forward, in backward, ends before the last module."""
    return net_around(checkpointed(nn.Sequential(nn.Linear(8, 8), nn.Sigmoid()), False))


def recursive() -> nn.Module:
    model = Op(lambda x: model(x[0]) if x.ndim else x * 2)
    return model


PLAIN, STRUCTURED = {"module": "0", "inputs_finite": False}, {"module": "1", "inputs_finite": True}

# By name: a model, values of its inputs in one pass each, and the fault.
PASSES: dict[str, tuple[Callable[[], nn.Module], list[float], dict[str, Any] | None]] = {
    "finite": (lambda: net_around(nn.Tanh()), [1, 2], None),
    "no module": (Between, [1], {"module": "second", "inputs_finite": False, "largest": None}),
    "more modules than rows of a table": (
        lambda: chain(*[lambda x: x + 1] * 300, lambda x: 1 / x),
        [-300, 1, 1],
        {"module": "300", "passes_ago": 2},
    ),
    "a shared module": (shared, [NAN, 1, 1], PLAIN | {"passes_ago": 2}),
    "a second forward that stops early": (early, [INF, 1, 1, 1], PLAIN | {"passes_ago": 3}),
    "a model that calls itself": (recursive, [INF, 1], {"passes_ago": 1}),
    "the newest": (lambda: chain(nn.Identity(), lambda x: 1 / x), [0, 1, INF], PLAIN),
    "as long as it is kept": (lambda: chain(nn.Tanh()), [NAN] + [1] * 63, {"passes_ago": 63}),
    "no longer": (lambda: nn.Linear(8, 8), [NAN] + [1] * 64, None),
    "an empty tensor in a row that had one": (
        lambda: chain(lambda x: 1 * (x if x.any() else x[:0])),
        [NAN] + [0] * 64,
        None,
    ),
    "in place": (
        lambda: chain(nn.Identity(), lambda x: x.mul_(INF)),
        [1],
        {"module": "1", "largest": 1.0},
    ),
    "no device": (lambda: nn.Linear(8, 8, device="meta"), [INF], None),
    **{
        f"structure {number}": (
            lambda structure=structure: chain(nn.Linear(8, 8), lambda x: structure(x * INF)),
            [1],
            STRUCTURED,
        )
        for number, structure in enumerate(
            (
                Outputs,
                lambda x: Batch(x=x),
                lambda x: [Outputs({"x": UserDict(x=x)})],
            )
        )
    },
    "a structure that holds itself": (lambda: chain(holds_itself, nn.Identity()), [1], None),
    "what refuses": (
        lambda: chain(refused, lambda values: values[2] * INF),
        [1],
        {"module": "1", "largest": 1.0},
    ),
    "tensors without dense values": (
        lambda: chain(without_values, lambda values: values[0].to_dense() * INF),
        [1],
        {"module": "1", "largest": None},
    ),
}


@pytest.mark.parametrize("name", PASSES)
def test_passes(name: str) -> None:
    make, values, expected = PASSES[name]
    model = make()
    device = next((p.device for p in model.parameters()), None)
    finder = ampfast.find_nonfinite(model)
    assert finder.report() is None
    losses = []
    for value in values:
        output = model(torch.full((4, 8), float(value), device=device))
        if isinstance(output, Tensor) and output.requires_grad:
            losses.append(output.sum())
            losses[-1].backward(retain_graph=True)
    for loss in losses[:-64]:
        loss.backward()  # of a pass that is no longer kept
    fault = finder.report()
    assert fault is None if expected is None else told(fault, **expected)


def test_a_nan_in_the_weights_is_of_the_pass_that_made_it() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Op(lambda x: x))
    optimizer, finder = torch.optim.SGD(model.parameters(), lr=0.1), ampfast.find_nonfinite(model)
    for factor in (1.0, NAN, 1.0, 1.0):
        model[1].function = lambda x, factor=factor: x * factor
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
    assert told(finder.report(), module="1", passes_ago=2)


def test_the_text() -> None:
    model = nn.Sequential(nn.Identity(), Op(lambda x: x.half() * 2), nn.Linear(2, 2).half())
    finder = ampfast.find_nonfinite(model)
    model(torch.tensor([[1.0, -61440.0]]))
    text = "1 (Op): output overflowed in float16 (inputs finite, largest 61,440)"
    assert str(finder.report()) == text
    model(torch.ones(1, 2))
    model[1].function = lambda x: x.half() * NAN
    model(torch.tensor([[INF, 1.0]]))
    assert str(finder.report()) == (
        "0 (Identity): output overflowed in float32 (inputs not finite either: what no module "
        "computes is at fault)"
    )
    model = net_around(broken())
    with ampfast.find_nonfinite(model) as finder:
        train(model)
    told = str(fault := finder.report())
    assert told.startswith("2 (Op): in backward, the gradient of an input became NaN in float32 (g")
    model(torch.rand(4, 8))
    assert finder.report() == fault, "as its hooks are removed"
    model = net_around(nn.Tanh())
    finder = ampfast.find_nonfinite(model)
    (model(torch.rand(4, 8)) * 0).sqrt().sum().backward()
    assert str(finder.report()) == (
        "3 (Linear): in backward, the gradient of an input became NaN in float32 (gradients of its "
        "outputs not finite either: what no module computes is at fault)"
    )


def test_parts_that_are_called_alone_have_passes_of_their_own() -> None:
    again = checkpointed(nn.Linear(8, 8), False)
    model = nn.ModuleDict({"a": again, "b": Op(lambda x: x), "c": nn.Tanh()})
    finder = ampfast.find_nonfinite(model)
    for value in (1.0, INF, 1.0):
        model["b"](model["a"](torch.full((2, 8), value))).sum().backward()
    assert told(finder.report(), module="a.module", passes_ago=1)
    model["b"](torch.ones(2))
    with torch.no_grad():
        for _ in range(3):
            model["a"](torch.ones(2, 8))
    assert told(finder.report(), passes_ago=4)
    model["b"](torch.ones(2, requires_grad=True)).sum().backward()
    model["c"](torch.ones(2))
    assert told(finder.report(), passes_ago=5)
    # The first part has ended when the next takes its output.
    model["c"] = broken()
    with ampfast.find_nonfinite(model) as finder:
        model["c"](model["a"](torch.ones(2, 8))).sum().backward()
    assert told(finder.report(), module="c", inputs_finite=True)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_passes_end_after_a_forward_that_raises(error: type[BaseException]) -> None:
    def fails(x: Tensor) -> Tensor:
        raise error

    model = net_around(Op(fails))
    finder = ampfast.find_nonfinite(model)
    with pytest.raises(error):
        train(model)
    model[2].function = lambda x: x  # type: ignore[union-attr]
    train(model, torch.full((4, 8), INF))
    assert told(finder.report(), passes_ago=0)
    train(model)
    assert told(finder.report(), passes_ago=1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "layout",
    [
        lambda x: x,
        lambda x: x.t()[:, ::2],
        lambda x: x[:1].expand(4, 8),
        lambda x: x[:0],
        lambda x: torch.complex(x.float(), x.float()),
    ],
)
def test_dtypes_also_by_default_and_layouts(
    dtype: torch.dtype, layout: Callable[[Tensor], Tensor], request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
    torch.set_default_dtype(dtype)
    finder = ampfast.find_nonfinite(model := chain(layout))
    with torch.inference_mode():
        model(torch.ones(4, 8))
    assert finder.report() is None
    output = model(torch.full((4, 8), INF))
    fault = finder.report()
    assert (fault is None) is (output.numel() == 0)
    assert fault is None or told(fault, dtype=output.dtype, passes_ago=0)


def test_tensors_in_structures_and_keywords() -> None:
    class Many(nn.Module):
        def forward(self, x: Tensor, *, other: dict[str, Tensor], number: int) -> Any:
            return {"a": [x], "b": (number, other["x"] * NAN), "c": None, "d": torch.arange(3)}

    model = Many()
    finder = ampfast.find_nonfinite(model)
    model(torch.ones(2), other={"x": torch.full((2,), 7.0)}, number=3)
    fault = finder.report()
    assert fault is not None and (fault.module, fault.kind, fault.largest) == ("", "nan", 7.0)
    assert str(fault).startswith("the model (Many): output became NaN")


class Trained:
    """Models that a scaler with `track="modules"` trains."""

    def __init__(self, *models: nn.Module, **arguments: Any) -> None:
        self.models: tuple[Any, ...] = models
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
        self.scaler = ampfast.GradScaler("cpu", 4.0, track="modules", **arguments)
        for model in models:
            self.scaler.name_parameters(model)

    def step(self, value: float = 1.0, overflows: bool = False) -> None:
        x = torch.full((4, 8), value)
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            optimizer.zero_grad()
            x = model(x)
        self.scaler.scale(x.sum()).backward()
        if overflows:
            self.optimizers[-1].param_groups[0]["params"][0].grad[0] = INF
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()

    @property
    def module(self) -> Any:
        return self.scaler.overflow_report().module


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad, None])
def test_a_scaler_blames_no_pass_but_those_of_the_step(mode: Any) -> None:
    training = Trained(net_around(nn.Tanh()))
    training.step(overflows=True)  # before any update
    assert training.module is None
    training.step()
    if mode is None:
        training.step(NAN)
        assert told(training.module, module="0", passes_ago=0)
    else:
        with mode():
            training.models[0](torch.full((4, 8), NAN))
    training.step(overflows=True)
    assert training.scaler.overflow_report().step == (2 if mode else 3)
    assert training.module is None
    training.step(NAN)
    for _ in range(9):
        with torch.no_grad():
            training.models[0](torch.full((4, 8), INF))
        training.step()
    assert told(training.module, kind="nan")


def test_a_scaler_watches_several_models() -> None:
    broken_first = Trained(net_around(Op(lambda x: x * INF)), nn.Linear(8, 8))
    broken_last = Trained(nn.Linear(8, 8), net_around(Op(lambda x: x * INF)))
    in_backward = Trained(nn.Linear(8, 8), net_around(broken()))
    for training in (broken_first, broken_last, in_backward):
        training.step()
        assert told(training.module, module="2", inputs_finite=True)


def test_a_scaler_keeps_neither_models_nor_watches() -> None:
    scaler = ampfast.GradScaler("cpu", track="modules")
    kept = nn.Tanh()
    for _ in range(3):
        scaler.name_parameters(model := net_around(nn.Tanh()))
        scaler.name_parameters(kept)
        training = Trained(model)
        model(torch.rand(4, 8)).sum().backward()
        again = copy.deepcopy(scaler)  # which watches nothing
    lives = [weakref.ref(each) for each in (*model.parameters(), model[0])]
    finalizers = len(weakref.finalize._registry)  # type: ignore[attr-defined]
    del model, training
    gc.collect()
    assert not any(each() is not None for each in lives)
    place = vars(kept)["_compiled_call_impl"]
    for _ in range(3):
        scaler.name_parameters(kept)
    assert len(weakref.finalize._registry) == finalizers - 1  # type: ignore[attr-defined]
    assert vars(kept)["_compiled_call_impl"] is place and place.inner is None
    del scaler, again
    assert "_compiled_call_impl" not in vars(kept)
    ampfast.GradScaler("cpu", track="overflow").name_parameters(kept)
    assert "_compiled_call_impl" not in vars(kept)


class Kept(nn.Tanh):
    """A module that gives all of its attributes to copies."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()


def quantizable() -> Any:
    net = chain(quant.QuantStub(), nn.Linear(8, 8), nn.ReLU(), Kept(), quant.DeQuantStub())
    net.qconfig = quant.get_default_qat_qconfig()  # type: ignore[assignment]
    return net


ONES = (torch.ones(4, 8),)
MADE: dict[str, Callable[[Any], Any]] = {
    "copies of modules": lambda net: chain(*map(copy.copy, net)),
    "deepcopy": copy.deepcopy,
    "pickle": lambda net: pickle.loads(pickle.dumps(net)),
    "a replica": lambda net: net[3]._replicate_for_data_parallel(),
    "script": torch.jit.script,
    "script of a copy": lambda net: torch.jit.script(copy.deepcopy(net)),
    "trace": lambda net: torch.jit.trace(net, ONES),
    "export": lambda net: torch.export.export(net, ONES).module(),
    "strict export": lambda net: torch.export.export(net, ONES, strict=True).module(),
    "fuse_modules": lambda net: quant.fuse_modules(net.eval(), [["1", "2"]]),
    "prepare_qat": lambda net: quant.prepare_qat(net.train()),
    "prepare and convert": lambda net: quant.convert(quant.prepare_qat(net.train()).eval()),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", MADE)
def test_what_is_made_of_a_model_is_as_of_one_that_is_not_watched(name: str) -> None:
    outputs, x = [], torch.rand(4, 8)
    for is_watched in (False, True):
        torch.manual_seed(0)
        model = quantizable()
        keys = [vars(each).keys() for each in model.modules()]
        finder = ampfast.find_nonfinite(model if is_watched else nn.Tanh())
        model(x)
        made = MADE[name](model)
        outputs.append(made(x))
        made(torch.full((4, 8), NAN))
        assert finder.report() is None
        model(torch.full((4, 8), NAN))
        assert (finder.report() is not None) is is_watched
        finder.remove()
        assert keys == [vars(each).keys() for each in model.modules()]
        assert not any(each._forward_hooks_with_kwargs for each in model.modules())
    assert torch.equal(*outputs)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_replica_runs_itself_traced_and_after_the_watch() -> None:
    module, x = nn.Linear(2, 2), torch.rand(2, 2)
    with ampfast.find_nonfinite(module):
        replica = module._replicate_for_data_parallel()
        replica._parameters = {"weight": torch.eye(2), "bias": None}
        traced = torch.jit.trace(replica, x)
    del module
    assert torch.equal(traced(x), x) and torch.equal(replica(x), x)


def test_finders_and_compiled_calls_of_one_module() -> None:
    model = chain(lambda x: x * INF)
    model.compile(backend="eager")
    compiled = vars(model)["_compiled_call_impl"]
    finders = [ampfast.find_nonfinite(model) for _ in range(3)]
    for number in (1, 2, 0):
        finders[number].remove()
        model(torch.ones(2))
    assert [len(each._passes) for each in finders] == [2, 0, 1]
    assert vars(model)["_compiled_call_impl"] is compiled
    with ampfast.find_nonfinite(model) as finder:
        model.compile(backend="eager")
        model(torch.ones(2))
    assert told(finder.report(), module="0") and model._compiled_call_impl is not None


def test_others_compile_as_if_no_model_were_watched() -> None:
    torch._dynamo.reset()
    with ampfast.find_nonfinite(net_around(nn.Tanh())), warnings.catch_warnings():
        warnings.simplefilter("error")
        other = torch.compile(net_around(nn.Tanh()), backend="eager", fullgraph=True)
        other(torch.rand(4, 8))


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"must be a torch.nn.Module, got function"):
        ampfast.find_nonfinite(lambda x: x)  # type: ignore[arg-type]


def test_a_scaler_reports_the_module_first() -> None:
    model = net_around(nn.Tanh())
    training = Trained(model, max_skips=1)
    training.step()
    assert training.module is None
    model[2] = Op(lambda x: x * INF)
    training.scaler.name_parameters(model)
    model(torch.rand(4, 8))
    assert str(training.scaler.overflow_report()) == "No infinite or NaN gradients so far."
    with pytest.raises(FloatingPointError, match=r"\n2 \(Op\): output became NaN in float32 \(inp"):
        training.step()
    report = training.scaler.overflow_report()
    assert str(report).startswith("2 (Op): output became NaN") and "0.weight" in str(report)
    assert pickle.loads(pickle.dumps(training.scaler)).overflow_report().module is None


TRANSFORMS: list[Callable[[Any], Any]] = [
    lambda call: call,
    lambda call: torch.func.vmap(call, (None, 0)),
    torch.func.functionalize,
]


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_under_transforms(transform: Callable[[Any], Any]) -> None:
    model = net_around(Op(lambda x: x * INF))
    params = dict(model.named_parameters())

    def loss(params: dict[str, Tensor], x: Tensor) -> Any:
        return torch.func.functional_call(model, params, (x,)).sum()

    with ampfast.find_nonfinite(model) as finder:
        transform(torch.func.grad(loss))(params, torch.rand(4, 8))
    fault = finder.report()
    assert fault is not None and told(fault, module="2", inputs_finite=True)


def test_modes_neither_see_nor_change_what_a_watch_calls() -> None:
    calls: list[Any] = []

    def see(mode: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        calls.append(getattr(function, "__name__", function))
        return function(*args, **(kwargs or {}))

    seen, model = [], net_around(Op(lambda x: torch.complex(x, x).real))
    dispatch = type("Dispatch", (TorchDispatchMode,), {"__torch_dispatch__": see})
    functions = type("Functions", (TorchFunctionMode,), {"__torch_function__": see})
    for scaler in (torch.amp.GradScaler("cpu"), GradScaler("cpu", track="modules")):
        if isinstance(scaler, GradScaler):
            scaler.name_parameters(model)
        loss = scaler.scale(torch.ones(()))
        model.zero_grad()
        with dispatch(), functions():
            (model(torch.rand(4, 8)).sum() * loss).backward()
        seen.append(calls.copy())
        calls.clear()
    assert seen[0] == seen[1]
    with ampfast.find_nonfinite(model) as finder, FakeTensorMode(allow_non_fake_inputs=True):
        model(torch.rand(4, 8))
    model[0](torch.full((4, 8), NAN))
    assert finder.report() is None


def test_a_report_while_other_threads_run_the_model(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-5)
    model = net_around(nn.Tanh())
    with ampfast.find_nonfinite(model) as finder:
        threads = [Thread(target=lambda: [train(model) for _ in range(99)]) for _ in range(3)]
        for each in threads:
            each.start()
        while any(each.is_alive() for each in threads):
            assert finder.report() is None


def test_a_leaf_is_read_for_the_newest_pass_of_a_finder_and_not_after_it() -> None:
    weight, net = nn.Parameter(torch.ones(8)), chain(Op(lambda w: w * 1))
    seen: list[Tensor] = []
    weight.register_hook(seen.append)
    with ampfast.find_nonfinite(net) as finder, ampfast.find_nonfinite(net) as other:
        for _ in range(3):
            net(weight).sum().backward()
    net(weight).sum().backward()
    passes = (*finder._passes, *other._passes)
    assert [len(each.so_far()[1]) for each in passes] == 6 * [2]
    assert len(seen) == 4
    assert pickle.loads(pickle.dumps(weight))._backward_hooks in (None, {})


def test_tensors_are_read_once_not_on_the_host_and_not_kept() -> None:
    def to_local(self: Tensor) -> Tensor:
        reads.append(1)
        return self.as_subclass(Tensor)

    # Which a distributed tensor has, too.
    reads, kind = [], type("Local", (Tensor,), {"to_local": to_local})
    block, x = chain(nn.Tanh(), nn.Identity()), torch.rand(4, 8).as_subclass(kind)
    model = chain(nn.Linear(8, 8), block, checkpointed(chain(nn.Linear(8, 8), nn.Tanh()), False))
    with ampfast.find_nonfinite(model) as finder:
        train(model, x)
        assert weakref.getweakrefcount(x) == 0
    assert len(reads) == 5, "the input, and the outputs of linear layers and tanh"
    assert finder.report() is None


def test_a_watched_step_calls_no_op_of_torch_but_a_copy_of_a_count() -> None:
    """Nothing is copied or waited for, and a table is made for 128 reads."""
    plain = chain(*[nn.Linear(8, 8) for _ in range(40)])
    watched, tracked = copy.deepcopy(plain), copy.deepcopy(plain)
    finder, scaler = ampfast.find_nonfinite(watched), ampfast.GradScaler("cpu", track="modules")
    scaler.name_parameters(tracked)
    counts = []
    for model in (plain, watched, tracked):
        scaler.scale(model(torch.ones(4, 8)).square().sum()).backward()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            scaler.scale(model(torch.ones(4, 8)).square().sum()).backward()
        counts.append(Counter(event.name.removeprefix("aten::") for event in profile.events()))
    assert finder.report() is None
    table = Counter(("zeros", "empty", "zero_"))
    assert counts[1] - counts[0] == table
    copies = Counter(("narrow", "slice", "as_strided", "clone", "empty_like", "copy_"))
    assert counts[2] - counts[0] <= table + (copies | Counter(as_strided=2, empty_strided=1))
