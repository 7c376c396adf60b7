"""The module whose output, or gradient, was the first that is not finite: a zoo of broken nets."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import ampfast
from ampfast.find_nonfinite import _Table

INF, NAN = float("inf"), float("nan")


class Op(nn.Module):
    """A module that applies a function."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


class Attention(nn.Module):
    """Attention whose scores overflow in float16."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.scores = Op(lambda q, k: (q * 3000) @ (k * 3000).transpose(-1, -2))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.scores(self.query(x).half(), self.key(x).half()).float()
        return torch.softmax(scores, -1) @ self.value(x)


class Checkpointed(nn.Module):
    def __init__(self, module: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.module, self.use_reentrant = module, use_reentrant

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.module, x, use_reentrant=self.use_reentrant)


class Residual(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Any:
        return x + self.module(x)


# By name: what stands in the middle of the net, the name of what breaks, where, and how.
ZOO: dict[str, tuple[Callable[[], nn.Module], str, str, str]] = {
    "attention scores": (Attention, "2.scores", "output", "inf"),
    "log of 0": (lambda: Op(lambda x: torch.log(x * 0)), "2", "output", "inf"),
    "norm of a zero vector": (lambda: Op(lambda x: x * 0 / (x * 0).norm()), "2", "output", "nan"),
    "exp": (lambda: Op(lambda x: torch.exp(x * 1e4)), "2", "output", "inf"),
    "division": (lambda: Op(lambda x: (x + 1) / (x * 0)), "2", "output", "inf"),
    "backward alone": (lambda: Op(lambda x: (x * 0).sqrt()), "2", "gradient", "nan"),
    "backward of a residual": (
        lambda: Residual(Op(lambda x: (x * 0).sqrt())),
        "2.module",
        "gradient",
        "nan",
    ),
    "behind one that passes on": (
        lambda: nn.Sequential(nn.Identity(), Op(lambda x: (x * 0).sqrt())),
        "2.1",
        "gradient",
        "nan",
    ),
    "in a container": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Sequential(Op(lambda x: x * INF))),
        "2.1.0",
        "output",
        "inf",
    ),
    **{
        f"checkpointed, {name}, {use_reentrant}": (
            lambda op=op, use_reentrant=use_reentrant: Checkpointed(
                nn.Sequential(nn.Linear(8, 8), Op(op)), use_reentrant
            ),
            "2.module.1",
            where,
            kind,
        )
        for use_reentrant in (False, True)
        for name, op, where, kind in (
            ("forward", lambda x: torch.exp(x * 1e4), "output", "inf"),
            ("backward", lambda x: (x * 0).sqrt(), "gradient", "nan"),
        )
    },
}


def net_around(module: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    # In place, as in many networks.
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), module, nn.Linear(8, 8))


def train(model: nn.Module, x: Tensor | None = None) -> None:
    model(torch.rand(4, 8) if x is None else x).float().sum().backward()


@pytest.mark.parametrize("name", ZOO)
def test_the_module_is_named(name: str) -> None:
    make, module, where, kind = ZOO[name]
    model = net_around(make())
    with ampfast.find_nonfinite(model) as finder:
        train(model)
    fault = finder.report()
    assert fault is not None
    assert (fault.module, fault.where, fault.kind) == (module, where, kind)
    assert fault.inputs_finite and fault.passes_ago == 0
    assert fault.type == type(model.get_submodule(module)).__name__


def test_finite_values_are_no_fault() -> None:
    model = net_around(nn.Tanh())
    with ampfast.find_nonfinite(model) as finder:
        assert finder.report() is None
        train(model)
    assert finder.report() is None


def test_the_text() -> None:
    model = nn.Sequential(nn.Identity(), Op(lambda x: x.half() * 2), nn.Linear(2, 2).half())
    finder = ampfast.find_nonfinite(model)
    model(torch.tensor([[1.0, -61440.0]]))
    text = "1 (Op): output overflowed in float16 (inputs finite, largest 61,440)"
    assert str(finder.report()) == text
    model[1].function = lambda x: x.half() * NAN
    model(torch.tensor([[INF, 1.0]]))
    assert str(finder.report()) == (
        "0 (Identity): output overflowed in float32 (inputs not finite either: what no module "
        "computes is at fault)"
    )
    broken = net_around(Op(lambda x: (x * 0).sqrt()))
    with ampfast.find_nonfinite(broken) as finder:
        train(broken)
    told = str(finder.report())
    assert told.startswith("2 (Op): in backward, the gradient of an input became NaN in float32 (g")


def test_what_no_module_computes_is_told() -> None:
    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            return self.second(self.first(x) * INF)

    model = Between()
    with ampfast.find_nonfinite(model) as finder:
        train(model)
    fault = finder.report()
    assert fault is not None and (fault.module, fault.inputs_finite) == ("second", False)
    assert fault.largest is None


def test_the_gradient_of_a_loss_is_told() -> None:
    model = net_around(nn.Tanh())
    with ampfast.find_nonfinite(model) as finder:
        (model(torch.rand(4, 8)) * 0).sqrt().sum().backward()
    fault = finder.report()
    assert fault is not None
    assert (fault.module, fault.where, fault.inputs_finite) == ("3", "gradient", False)
    assert str(fault).endswith(
        "(gradients of its outputs not finite either: what no module computes is at fault)"
    )


def test_more_modules_than_rows_of_a_table() -> None:
    model = nn.Sequential(*(Op(lambda x: x + 1) for _ in range(300)), Op(lambda x: x * INF))
    finder = ampfast.find_nonfinite(model)
    model(torch.ones(2))
    assert finder.report() is not None and finder.report().module == "300"  # type: ignore[union-attr]
    for _ in range(2):
        model[300].function = lambda x: x  # type: ignore[union-attr]
        model(torch.ones(2))
    fault = finder.report()
    assert fault is not None and (fault.module, fault.passes_ago) == ("300", 2)


def test_a_shared_module_is_called_twice_in_a_pass() -> None:
    shared = nn.Linear(8, 8)
    model = nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh())
    finder = ampfast.find_nonfinite(model)
    train(model, torch.full((1, 8), NAN))
    train(model)
    train(model)
    fault = finder.report()
    assert fault is not None and (fault.module, fault.passes_ago) == ("0", 2)


def test_a_forward_that_is_caught() -> None:
    def fails(x: Tensor) -> Tensor:
        raise ValueError

    class Tries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fails = Op(fails)

        def forward(self, x: Tensor) -> Any:
            try:
                return self.fails(x)
            except ValueError:
                return x * INF

    model = net_around(Tries())
    with ampfast.find_nonfinite(model) as finder:
        train(model)
    fault = finder.report()
    assert fault is not None and (fault.module, fault.type) == ("2", "Tries")


def test_a_model_on_no_device() -> None:
    model = nn.Linear(2, 2, device="meta")
    finder = ampfast.find_nonfinite(model)
    model(torch.ones(2, device="meta"))
    assert finder.report() is None


@pytest.mark.usefixtures("world")
def test_distributed_tensors_are_read_where_they_are() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    model = nn.Sequential(Op(lambda x: x), Op(lambda x: x * INF))
    finder = ampfast.find_nonfinite(model)
    x = torch.ones(4, requires_grad=True)
    model(distribute_tensor(x, mesh, [Shard(0)])).sum().backward()
    fault = finder.report()
    assert fault is not None and (fault.module, fault.largest) == ("1", 1.0)


def test_an_earlier_pass_is_found_as_long_as_it_is_kept() -> None:
    model = net_around(nn.Tanh())
    with ampfast.find_nonfinite(model) as finder:
        train(model, torch.full((4, 8), INF))
        for later in range(1, 64):
            train(model)
            if later in (1, 63):
                fault = finder.report()
                assert fault is not None and fault.passes_ago == later
        train(model)
    assert finder.report() is None


def test_a_late_backward_of_a_dropped_pass_spoils_no_later_one() -> None:
    model = net_around(nn.Tanh())
    with ampfast.find_nonfinite(model) as finder:
        late = model(torch.rand(4, 8)).sum()
        for _ in range(64 + 8):
            train(model)
        assert len(finder._passes) == 64
        late.backward(torch.tensor(INF))
        assert finder.report() is None
        train(model, torch.full((4, 8), INF))
        fault = finder.report()
        assert fault is not None and fault.passes_ago == 0


def test_tables_of_two_devices_are_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_two_devices(self: _Table, device: torch.device) -> None:
        made.append(device)
        make(self, torch.device("cpu"))
        self.device = device

    made: list[torch.device] = []
    make, devices = _Table.__init__, [torch.device("cuda", 0), torch.device("cuda", 1)]
    monkeypatch.setattr(_Table, "__init__", of_two_devices)
    monkeypatch.setattr(_Table, "read", lambda *arguments: None)
    finder = ampfast.find_nonfinite(nn.Identity())
    for _ in range(64 + 8):
        finder._before(0, None, (), {})
        for device in devices:
            finder._passes[-1]._measure(SimpleNamespace(device=device))  # type: ignore[arg-type]
        finder._after(0, None, (), {}, None)
    assert len(made) == 2 * 64  # of the passes that are kept


def test_the_newest_fault_is_told() -> None:
    model = net_around(Op(lambda x: x * INF))
    finder = ampfast.find_nonfinite(model)
    train(model)
    model[2].function = lambda x: x  # type: ignore[union-attr]
    train(model)
    model[0].weight.data.fill_(NAN)  # type: ignore[union-attr]
    train(model)
    fault = finder.report()
    assert fault is not None and (fault.module, fault.passes_ago) == ("0", 0)


def test_parts_that_are_called_alone_have_passes_of_their_own() -> None:
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": Op(lambda x: x), "c": nn.Tanh()})
    finder = ampfast.find_nonfinite(model)
    for value in (1.0, INF, 1.0):
        model["b"](model["a"](torch.full((2, 8), value))).sum().backward()
    fault = finder.report()
    assert fault is not None and (fault.module, fault.passes_ago) == ("a", 1)
    model["b"](torch.ones(2))
    with torch.no_grad():
        for _ in range(3):
            model["a"](torch.ones(2, 8))
    fault = finder.report()
    assert fault is not None and fault.passes_ago == 4
    model["b"](torch.ones(2, requires_grad=True)).sum().backward()
    model["c"](torch.ones(2))
    fault = finder.report()
    assert fault is not None and fault.passes_ago == 5


def test_a_forward_that_raises_is_left_behind() -> None:
    def fails(x: Tensor) -> Tensor:
        raise ValueError("of the model")

    model = net_around(Op(fails))
    finder = ampfast.find_nonfinite(model)
    with pytest.raises(ValueError, match="of the model"):
        train(model)
    model[2].function = lambda x: x * INF  # type: ignore[union-attr]
    train(model)
    fault = finder.report()
    assert fault is not None and (fault.module, fault.passes_ago) == ("2", 0)


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
    train(model)
    fault = finder.report()
    assert fault is not None and fault.passes_ago == 1
    assert not finder._passes[-1].running


def test_passes_end_after_a_block_whose_second_forward_stops_early() -> None:
    model = net_around(Checkpointed(nn.Sequential(nn.Linear(8, 8), nn.Sigmoid()), False))
    finder = ampfast.find_nonfinite(model)
    train(model, torch.full((4, 8), INF))
    for _ in range(3):
        train(model)
    fault = finder.report()
    assert fault is not None and fault.passes_ago == 3
    assert not any(each.running for each in finder._passes)


def test_a_model_that_calls_itself_has_one_pass() -> None:
    class Tree(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.leaf = nn.Linear(8, 8)

        def forward(self, x: Tensor, depth: int = 3) -> Any:
            return self.leaf(x if depth == 0 else self(x, depth - 1))

    model = Tree()
    finder = ampfast.find_nonfinite(model)
    train(model, torch.full((4, 8), INF))
    train(model)
    fault = finder.report()
    assert fault is not None and (fault.module, fault.passes_ago) == ("leaf", 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("layout", ["dense", "strided", "expanded", "empty", "complex"])
def test_dtypes_and_layouts(dtype: torch.dtype, layout: str) -> None:
    def shaped(x: Tensor) -> Tensor:
        made = {
            "dense": lambda: x,
            "strided": lambda: x.t()[:, ::2],
            "expanded": lambda: x[:1].expand(4, 8),
            "empty": lambda: x[:0],
            "complex": lambda: torch.complex(x.float(), x.float()),
        }
        return made[layout]()

    model = nn.Sequential(Op(shaped))
    finder = ampfast.find_nonfinite(model)
    model(torch.ones(4, 8, dtype=dtype))
    assert finder.report() is None
    model(torch.full((4, 8), INF, dtype=dtype))
    fault = finder.report()
    assert (fault is None) is (layout == "empty")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Callable[[], Any]) -> None:
    model = net_around(Op(lambda x: x * INF))
    finder = ampfast.find_nonfinite(model)
    with mode():
        model(torch.rand(4, 8))
    fault = finder.report()
    assert fault is not None and fault.module == "2"


def test_a_tensor_that_is_written_in_place_is_read_again() -> None:
    model = nn.Sequential(nn.Identity(), Op(lambda x: x.mul_(INF)))
    finder = ampfast.find_nonfinite(model)
    model(torch.ones(2))
    fault = finder.report()
    assert fault is not None and (fault.module, fault.largest) == ("1", 1.0)


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


@dataclass
class Outputs:
    hidden: Any
    loss: Tensor | None = None


class Batch(dict[str, Tensor]):
    """A mapping that torch's trees take for a leaf, as `transformers.BatchEncoding` is one."""


@pytest.mark.parametrize(
    "structure",
    [
        Outputs,
        lambda x: Outputs([x]),
        lambda x: Batch(x=x),
        lambda x: UserDict(x=x),
        lambda x: [Outputs({"x": UserDict(x=x)})],
    ],
)
def test_tensors_in_dataclasses_and_mappings(structure: Callable[[Tensor], Any]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Op(lambda x: structure(x * INF)))
    with ampfast.find_nonfinite(model) as finder:
        model(torch.rand(4, 8))
    fault = finder.report()
    assert fault is not None and (fault.module, fault.inputs_finite) == ("1", True)


def test_a_structure_that_holds_itself() -> None:
    outputs = Outputs(None)
    outputs.hidden = [outputs]
    with ampfast.find_nonfinite(nn.Identity()) as finder:
        finder._modules[0][1](outputs)
    assert finder.report() is None


def test_tensors_without_dense_values_are_left_alone() -> None:
    def made(x: Tensor) -> list[Tensor]:
        nested = torch.nested.nested_tensor([x, x[:1]], layout=torch.jagged)
        with FakeTensorMode():
            fake = torch.ones(2)
        return [x.to_sparse(), fake, nested]

    model = nn.Sequential(Op(made), Op(lambda values: values[0].to_dense() * INF))
    with ampfast.find_nonfinite(model) as finder:
        model(torch.ones(2, 2))
    fault = finder.report()
    assert fault is not None and (fault.module, fault.largest) == ("1", None)


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "grad": lambda f, params, x: torch.func.grad(f)(params, x),
    "vmap": lambda f, params, x: torch.func.vmap(f, in_dims=(None, 0))(params, x),
    "by sample": lambda f, params, x: torch.func.vmap(torch.func.grad(f), (None, 0))(params, x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_under_transforms(name: str) -> None:
    model = net_around(Op(lambda x: x * INF))
    params = dict(model.named_parameters())

    def loss(params: dict[str, Tensor], x: Tensor) -> Any:
        return torch.func.functional_call(model, params, (x,)).sum()

    with ampfast.find_nonfinite(model) as finder:
        TRANSFORMS[name](loss, params, torch.rand(4, 8))
    fault = finder.report()
    assert fault is not None and (fault.module, fault.inputs_finite) == ("2", True)


def test_removed_hooks_see_nothing() -> None:
    model = net_around(Op(lambda x: x * INF))
    with ampfast.find_nonfinite(model) as finder:
        pass
    train(model)
    assert finder.report() is None
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_parameter_that_modules_are_given_has_one_hook() -> None:
    """It outlives the passes, each of which wants its gradient."""

    class Queries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries, self.times = nn.Parameter(torch.ones(8)), Op(torch.mul)

        def forward(self, x: Tensor) -> Any:
            return self.times(self.queries, x)

    model = Queries()
    with ampfast.find_nonfinite(model) as finder:
        for _ in range(3):
            train(model)
        rows = finder._passes[0].rows
        model(torch.rand(4, 8, requires_grad=True)).sum().backward(torch.tensor(NAN))
        assert finder._passes[0].rows == rows
        assert len(model.queries._backward_hooks or {}) == 1
        fault = finder.report()
        assert fault is not None and (fault.where, fault.passes_ago) == ("gradient", 0)
        train(model)
        assert len(finder._leaves) == 1
    assert not model.queries._backward_hooks


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_the_model_are_not_watched(copied: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    with ampfast.find_nonfinite(model) as finder:
        train(model)
        again = copied(model)
        [hook] = again._forward_pre_hooks.values()
        train(again, torch.full((4, 8), INF))
        assert finder.report() is None
        watching = hook.func.__self__
        assert watching is not finder
        assert not watching._passes and watching.report() is None
        train(model, torch.full((4, 8), INF))
        assert finder.report() is not None


def test_the_hooks_of_a_scaler_go_with_it() -> None:
    model = net_around(nn.Tanh())
    for _ in range(3):
        scaler = ampfast.GradScaler("cpu", track="modules")
        scaler.name_parameters(model)
        again = copy.deepcopy(scaler)
        assert [len(each._forward_hooks) for each in model.modules()] == [1] * 5
        del scaler
        for each in model.modules():
            assert not each._forward_hooks
        again.name_parameters(model)
        del again
    scaler = ampfast.GradScaler("cpu", track="modules")
    scaler.name_parameters(model)
    model_lives = weakref.ref(model)
    scaler.name_parameters(nn.Tanh())
    del model, each
    gc.collect()
    assert model_lives() is None


class Waits(TorchDispatchMode):
    """Notes the ops for which a host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero"):
            self.waits.append(func)
        return func(*args, **(kwargs or {}))


def test_nothing_is_read_on_the_host_until_asked() -> None:
    model = net_around(nn.Tanh())
    finder = ampfast.find_nonfinite(model)
    x = torch.rand(4, 8)
    with Waits() as calls:
        train(model, x)
    assert calls.waits == []
    finder.remove()
    assert finder.report() is None


def test_tensors_are_read_once_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    kernels = ampfast.backends.choose().kernels_for(torch.device("cpu"))

    class Counting:
        def run(self, grads: Any, work: Any) -> Any:
            seen.append(1)
            return kernels.run(grads, work)

    monkeypatch.setattr(ampfast.backends.Choice, "kernels_for", lambda *_: Counting())
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Tanh(), nn.Identity()), nn.Linear(8, 8))
    with ampfast.find_nonfinite(model) as finder:
        model(torch.rand(4, 8)).square().sum().backward()
    # The input, the outputs of two linear layers and of tanh; and their gradients.
    assert len(seen) == 4 + 3
    [one] = finder._passes
    assert not one._values and len(one.tables) == 1


def test_a_block_that_runs_again_is_not_read_again() -> None:
    rows = []
    for again in (False, True):
        block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        model = nn.Sequential(nn.Linear(8, 8), Checkpointed(block, False) if again else block)
        with ampfast.find_nonfinite(model) as finder:
            train(model)
        rows.append(finder._passes[0].rows)
    # But for the gradient of its input, which is asked for once more.
    assert rows[1] == rows[0] + 1


@pytest.mark.slow
def test_under_compile() -> None:
    model = net_around(Op(lambda x: torch.exp(x * 1e4)))
    with ampfast.find_nonfinite(model) as finder:
        train(torch.compile(model, backend="eager"))
    fault = finder.report()
    assert fault is not None and (fault.module, fault.where) == ("2", "output")


def test_autocast_names_the_dtype_of_the_output() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight.data.fill_(6e4)
    with ampfast.find_nonfinite(model) as finder, torch.autocast("cpu", torch.float16):
        train(model)
    fault = finder.report()
    assert fault is not None and (fault.module, fault.dtype) == ("1", torch.float16)


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"must be a torch.nn.Module, got function"):
        ampfast.find_nonfinite(lambda x: x)  # type: ignore[arg-type]


class Trained:
    """A net, its optimizer and a scaler that watches the modules."""

    def __init__(self, module: nn.Module, **arguments: Any) -> None:
        self.model = net_around(module)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scaler = ampfast.GradScaler("cpu", track="modules", **arguments)
        self.scaler.name_parameters(self.model)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(self.model(torch.rand(4, 8)).float().sum()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


def test_a_scaler_reports_the_module_first() -> None:
    trained = Trained(nn.Tanh(), max_skips=1)
    trained.step()
    assert trained.scaler.overflow_report().module is None
    trained.model[2] = Op(lambda x: x * INF)
    trained.scaler.name_parameters(trained.model)
    with pytest.raises(FloatingPointError, match=r"\n2 \(Op\): output became NaN in float32 \(inp"):
        trained.step()
    report = trained.scaler.overflow_report()
    assert report.module is not None and str(report).startswith("2 (Op): output became NaN")
    assert "0.weight" in str(report)
    # One set of hooks, for the last model.
    assert len(trained.model[0]._forward_hooks) == 1


def test_a_module_is_told_before_any_step() -> None:
    trained = Trained(Op(lambda x: x * INF))
    trained.model(torch.rand(4, 8))
    text = str(trained.scaler.overflow_report())
    assert text.startswith("2 (Op)") and text.endswith("\nNo infinite or NaN gradients so far.")


def test_a_pickle_watches_no_modules() -> None:
    trained = Trained(nn.Tanh())
    trained.step()
    copied = pickle.loads(pickle.dumps(trained.scaler))
    assert copied._finder is None and copied.overflow_report().module is None


def test_only_modules_are_watched_and_only_on_request() -> None:
    model = net_around(nn.Tanh())
    for track, given in (("overflow", model), ("modules", list(model.named_parameters()))):
        ampfast.GradScaler("cpu", track=track).name_parameters(given)
        assert not model._forward_hooks
