"""Captures on CPU tensors: ops and launches are recorded, not run, and replayed like a CUDA graph.

Tensors that the scaler asks for their device claim to be on a GPU.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from ampfast import GradScaler
from ampfast.backends import core, cuda_graphs
from ampfast.backends.gpu import DeviceKernels
from ampfast.clip import norm_history
from ampfast.gradients import Turn
from ampfast.scaler import grad_scaler, skips
from support.comparison import assert_same, replaced
from support.launchers import serve_by
from support.steps import take_step

SHAPE = (37, 129)
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.25),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.25, momentum=0.5),
    "adam": lambda params: torch.optim.Adam(params, lr=0.1, capturable=True),
    "one_by_one_adam": lambda params: torch.optim.Adam(
        params, lr=torch.tensor(0.1, device=params[0].device), capturable=True, foreach=False
    ),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.1, capturable=True),
    "fused_sgd": lambda params: torch.optim.SGD(params, lr=0.25, momentum=0.5, fused=True),
    "fused_adam": lambda params: torch.optim.Adam(params, lr=0.1, fused=True, capturable=True),
    "fused_adamw": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True, capturable=True),
}
# Plain ones, whose steps the replays of a CUDA graph can skip.
SKIPPABLE = ("sgd", "momentum", "adam", "one_by_one_adam", "rmsprop")
# More finite iterations in a row than the interval, and more than one overflow.
BAD_AT = (4, 5, 9)
SETTINGS: dict[str, Any] = {"init_scale": 2.0**10, "growth_interval": 2}


class Training:
    """Net of elementwise operations, so that captured and eager gradients have the same bits."""

    def __init__(self, scaler: Any, kind: str, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(4)
        self.scaler = scaler
        self.weight, self.bias = (
            torch.nn.Parameter(torch.randn(SHAPE, generator=generator, device=device))
            for _ in range(2)
        )
        self.params = [self.weight, self.bias]
        self.optimizer = OPTIMIZERS[kind](self.params)
        self.input = torch.zeros(SHAPE, device=device)

    def feed(self, iteration: int) -> None:
        """Sets the input in place; some make gradients overflow."""
        generator = torch.Generator(self.input.device).manual_seed(iteration)
        drawn = torch.randn(SHAPE, generator=generator, device=self.input.device)
        if iteration in BAD_AT:
            drawn[3, 5] = torch.inf
        self.input.copy_(drawn)

    def backward(self) -> None:
        loss = ((self.input * self.weight + self.bias).square() / 64).sum()
        self.scaler.scale(loss).backward()

    def step(self, together: bool = False, way: str = "step") -> None:
        take_step(self.scaler, self.optimizer, way="together" if together else way)

    def iterate(self, iteration: int, together: bool = False) -> None:
        self.feed(iteration)
        self.repeat(together)

    def repeat(self, together: bool = False) -> None:
        """An iteration over the last input."""
        self.optimizer.zero_grad()
        self.backward()
        self.step(together)

    def observe(self) -> list[Any]:
        scaler = self.scaler
        return [
            [p.detach() for p in self.params],
            self.optimizer.state_dict()["state"],
            scaler.get_scale(),
            scaler._get_growth_tracker(),
        ]


ITERATIONS = 12
LAUNCHES = ("multi_tensor", "update_scale", "clip_coefficient")

Node = Callable[[], None]


class OnGpu(torch.Tensor):
    """CPU tensor that claims to be on a GPU."""

    is_cuda = property(lambda self: True)


class Capture(TorchDispatchMode):
    """A graph of CPU tensors, and the mode that captures it.

    Attributes:
        calls: The calls that began and ended the bodies of conditional nodes, and `note`d ones.
        fails: Name of the call that raises.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.fails = ""
        self.is_active = False
        self._nodes: list[Node] = []
        self._open: list[list[Node]] = []

    def note(self, call: str) -> None:
        self.calls.append(call)
        if call == self.fails:
            raise RuntimeError(f"{call} fails")

    def record(self, node: Node) -> None:
        (self._open[-1] if self._open else self._nodes).append(node)

    def replay(self) -> None:
        assert not self._open, "the body of a conditional node was not ended"
        with torch.no_grad():
            for node in self._nodes:
                node()

    # As torch.cuda.CUDAGraph.

    def get_currently_capturing_graph(self) -> Capture:
        assert self.is_active
        self.note("get")
        return self

    def begin_capture_to_if_node(self, predicate: torch.Tensor) -> None:
        self.note("begin")
        assert predicate.dtype is torch.bool and predicate.numel() == 1
        body: list[Node] = []

        def run() -> None:
            if predicate.tolist():
                for node in body:
                    node()

        self.record(run)
        self._open.append(body)

    def end_capture_to_conditional_node(self) -> None:
        self._open.pop()
        self.note("end")

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if op.namespace != "aten":
            return op(*args, **kwargs)
        assert op is not torch.ops.aten._local_scalar_dense.default, "the host reads a value"
        named = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False))
        written = [
            {**named, **kwargs}[argument.name]
            for argument in op._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if written:  # which must not happen before a replay
            self.record(functools.partial(op, *args, **kwargs))
            return written[0] if op._schema.returns else None
        result = op(*args, **kwargs)
        if not any(argument.alias_info for argument in op._schema.arguments):  # no view
            self.record(lambda: _copy_all(result, op(*args, **kwargs)))
        return result


def _copy_all(targets: Any, sources: Any) -> None:
    for target, source in zip(tree_leaves(targets), tree_leaves(sources), strict=True):
        if isinstance(target, torch.Tensor):
            target.copy_(source)


class _Recorded:
    """A launcher whose launches become nodes under a capture."""

    def __init__(self, launcher: Any, capture: Capture) -> None:
        self._launcher, self._capture = launcher, capture

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._launcher, name)
        if name not in LAUNCHES or not self._capture.is_active:
            return call
        return lambda *args, **kwargs: self._capture.record(
            functools.partial(call, *args, **kwargs)
        )

    def is_capturing(self) -> bool:
        return self._capture.is_active


class _Kernels(DeviceKernels):
    """Kernels that take and return tensors that claim to be on a GPU under a capture."""

    def __init__(self, launcher: Any, capture: Capture) -> None:
        super().__init__(_Recorded(launcher, capture))
        for name in ("run", "clip", "update", "ending"):
            setattr(self, name, _unobserved(getattr(self, name), capture))


def _unobserved(call: Callable[..., Any], capture: Capture) -> Callable[..., Any]:
    """A call into the core, which takes plain tensors, and whose launches are nodes."""

    def over(*args: Any) -> Any:
        if not capture.is_active:
            return call(*args)
        turns = [each for each in tree_leaves(args) if isinstance(each, Turn)]
        with _disable_current_modes():
            result = call(*_as(torch.Tensor, args, capture))
            # An ending is for the core.
            result = result if isinstance(result, core.Update) else _as(OnGpu, result)
        for turn in turns:
            turn |= _as(OnGpu, dict(turn))
            turn.divisor = _as(OnGpu, turn.divisor)
        return result

    return over


_UPDATED = ("scale", "growth_tracker", "found_infs", "state", "norm")


def _as(kind: type[torch.Tensor], values: Any, capture: Capture | None = None) -> Any:
    def one(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.as_subclass(kind)
        names = {core.Pass: ("factor",), core.Update: _UPDATED}.get(type(value), ())
        if names:
            return replaced(value, **{name: _as(kind, getattr(value, name)) for name in names})
        if inspect.isfunction(value) and capture is not None:

            def call(*args: Any) -> Any:  # with torch's ops, which are captured
                with capture:
                    return value(*args)

            return call
        return value

    return tree_map(one, values)


def pretend_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch says that the current stream is captured."""
    for name in ("is_initialized", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)


def counters_on_gpu(scaler: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A scaler's counters claim to be there; returns the events that tell if a copy has come."""
    made: list[Any] = []

    class Event(threading.Event):
        query, synchronize = threading.Event.is_set, threading.Event.set
        record = lambda self: made.append(self)  # noqa: E731

    plain = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=0, **given: plain(*size, **given))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    scaler._loss_scale.words = scaler._loss_scale.words.as_subclass(OnGpu)
    return made


class Capturing:
    """Captures of a scaler's calls, over the kernels of `launcher`."""

    def __init__(self, launcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.graph = Capture()
        graph = self.graph
        kernels = _Kernels(launcher, graph)
        serve_by(kernels, monkeypatch)
        for module in (cuda_graphs, grad_scaler, skips, norm_history):
            monkeypatch.setattr(module, "is_capturing", lambda: graph.is_active)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
        monkeypatch.setattr(cuda_graphs, "_current_device", lambda: torch.device("cpu"))
        for name in ("set_scale", "take", "norm"):
            call = _unobserved(getattr(core.Finder, name), graph)
            monkeypatch.setattr(core.Finder, name, call)
        for optimizer in (torch.optim.Adam, torch.optim.RMSprop):
            module = sys.modules[optimizer.__module__]
            monkeypatch.setattr(module, "_get_capturable_supported_devices", lambda **_: ["cpu"])

    @contextlib.contextmanager
    def of(self, scaler: Any) -> Iterator[Capture]:
        """Captures the calls in its body."""
        scale = scaler._scale
        scaler._scale = scale.as_subclass(OnGpu)
        self.graph.is_active = True
        try:
            with self.graph:
                yield self.graph
        finally:
            self.graph.is_active = False
            scaler._scale = scale


def assert_replays_are_eager(
    capturing: Capturing, kind: str, calls: Callable[[Training], None], rival: Any
) -> None:
    """Compares replays of captured `calls` of our scaler with eager steps of `rival`."""
    settings: dict[str, Any] = {"device": "cpu", **SETTINGS}
    ours = Training(GradScaler(**settings), kind, torch.device("cpu"))
    theirs = Training(rival(**settings), kind, torch.device("cpu"))
    for iteration in range(2):
        ours.iterate(iteration)
        theirs.iterate(iteration)
    before = copy.deepcopy(ours.observe())
    ours.optimizer.zero_grad(set_to_none=False)
    with capturing.of(ours.scaler) as graph:
        calls(ours)
    assert_same(ours.observe(), before, "a capture runs nothing")
    for iteration in range(2, ITERATIONS):
        for side in (ours, theirs):
            side.feed(iteration)
            side.optimizer.zero_grad(set_to_none=False)
            side.backward()
        graph.replay()
        calls(theirs)
        assert_same(ours.observe(), theirs.observe(), f"iteration {iteration}")
        assert ours.scaler.step_skipped(ours.optimizer) == (iteration in BAD_AT)
