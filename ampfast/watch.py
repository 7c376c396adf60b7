"""Times and values of every scaler of a program, taken around the methods of its class."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ampfast.hooks import replace_method

_METHODS = ("scale", "unscale_", "clip_grad_norm_", "step", "update", "step_and_update")
_ENDS = ("update", "step_and_update")
# Iterations that warm up; in those after the first, reads of the host are counted.
_WARM_UP = 4
# Number of values and events that may wait on a device.
_PENDING = 1000


class Record:
    """What one scaler did, by iteration; an iteration ends with `update()`.

    Attributes:
        scaler: The scaler.
        times: By name, microseconds of each iteration: "own" (host time in the scaler's methods,
            without the optimizer's step), "gpu" (likewise, none on a CPU), "step" (since the end of
            the iteration before).
        values: By name, pairs of iteration and number: "losses" (arguments of `scale`, one of many
            elements as their sum), "scales" (before `update`), "skips" (1 for a flag that is set).
        waits: Numbers that the host read from the GPU in one iteration; None on a CPU.
    """

    def __init__(self, scaler: Any) -> None:
        self.scaler = scaler
        self.times: dict[str, list[float]] = {"own": [], "gpu": [], "step": []}
        self.values: dict[str, list[tuple[int, float]]] = {"losses": [], "scales": [], "skips": []}
        self.waits: int | None = None
        # Of this iteration; then what is still on a device, of earlier ones, too.
        self.spent_ns, self.reads, self.end_ns = 0, 0, 0
        self.events: list[tuple[int, Any, Any]] = []
        self.tensors: list[tuple[str, int, Tensor]] = []

    @property
    def steps(self) -> int:
        """Number of iterations."""
        return len(self.times["own"])

    @property
    def on_gpu(self) -> bool:
        """Whether the scale is on a GPU, as far as it is known."""
        # A disabled scaler has none, an enabled one from its first call on.
        return getattr(getattr(self.scaler, "_scale", None), "is_cuda", False)

    def medians(self) -> dict[str, float]:
        """Returns the medians of the times, less those of a warm-up, and the scaler's share."""
        after = {name: times[_WARM_UP:] or times for name, times in self.times.items()}
        found = {name: median(times) for name, times in after.items() if times}
        return {**found, "share": found["own"] / found["step"]} if "step" in found else found

    def keep(self, name: str, argument: Any) -> None:
        """Keeps what a method is about to use: losses, or the scale and the flags."""
        if name == "scale":
            losses = argument if isinstance(argument, (list, tuple)) else [argument]
            local = [getattr(loss, "to_local", lambda loss=loss: loss)() for loss in losses]
            found = [("losses", loss.detach().sum()) for loss in local if isinstance(loss, Tensor)]
        elif name in _ENDS and self.scaler._scale is not None:
            entries = self.scaler._per_optimizer_states.values()
            found = [("scales", self.scaler._scale)]
            for entry in entries:
                found += [("skips", flag) for flag in entry["found_inf_per_device"].values()]
        else:
            return
        # torch's update writes the scale, and sums the flags into the first.
        self.tensors += [(kind, self.steps, value.detach().clone()) for kind, value in found]

    def end(self) -> None:
        """Ends the iteration."""
        if self.end_ns:
            self.times["step"].append((time.perf_counter_ns() - self.end_ns) / 1e3)
        if self.events and 0 < self.steps < _WARM_UP:
            self.waits = self.reads
        self.times["own"].append(self.spent_ns / 1e3)
        self.spent_ns = self.reads = 0
        if len(self.tensors) + len(self.events) > _PENDING:
            self.flush()
        self.end_ns = time.perf_counter_ns()

    def flush(self) -> None:
        """Reads what is still on a device."""
        for kind, step, tensor in self.tensors:
            value = tensor.item()
            self.values[kind].append((step, float(value != 0) if kind == "skips" else value))
        gpu = self.times["gpu"]
        for step, begin, end in self.events:
            end.synchronize()
            gpu += [0.0] * (abs(step) - len(gpu))
            gpu[-1] += begin.elapsed_time(end) * (1e3 if step > 0 else -1e3)
        self.tensors, self.events = [], []


class _Reads(TorchDispatchMode):
    """Counts the numbers that the host reads from a GPU in a scaler's methods."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch = watch

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        record = self._watch.inside
        if record is not None and op is torch.ops.aten._local_scalar_dense.default:
            record.reads += args[0].is_cuda
        return op(*args, **(kwargs or {}))


class Watch:
    """Watches the scalers of some classes, and the optimizers that are made from now on.

    Args:
        kinds: Classes, whose methods are replaced by timed ones.
        keeps_values: Whether losses, scales and skips are recorded, too.
        ended: Called with the record at the end of each iteration.

    Attributes:
        records: The record of each scaler, by its id.
        inside: The record of the scaler whose method runs, unless its optimizer steps.
    """

    def __init__(self, *kinds: type, keeps_values: bool, ended: Callable[[Record], object]) -> None:
        self.records: dict[int, Record] = {}
        self.inside: Record | None = None
        self._keeps_values, self._ended = keeps_values, ended
        for kind in kinds:
            for name in set(_METHODS) & vars(kind).keys():
                replace_method(kind, name, self._timed(name, vars(kind)[name]))
        # Around torch's own wrapper, whose time would count as the scaler's.
        optimizer: Any = torch.optim.Optimizer
        profiled = optimizer.profile_hook_step
        optimizer.profile_hook_step = staticmethod(lambda step: self._excluded(profiled(step)))

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self.inside is not None:
                return method(scaler, *args, **kwargs)
            record = self.records.setdefault(id(scaler), Record(scaler))
            on_gpu = record.on_gpu
            if not scaler._enabled or (on_gpu and torch.cuda.is_current_stream_capturing()):
                return method(scaler, *args, **kwargs)
            if self._keeps_values:
                record.keep(name, args[0] if args else None)
            counts = on_gpu and 0 < record.steps < _WARM_UP
            with _Reads(self) if counts else nullcontext():
                result = self._clocked(record, 1, method, scaler, *args, **kwargs)
            if name in _ENDS:
                record.end()
                self._ended(record)
            return result

        return call

    def _excluded(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(step)
        def call(*args: Any, **kwargs: Any) -> Any:
            record = self.inside
            if torch.compiler.is_compiling() or record is None:
                return step(*args, **kwargs)
            return self._clocked(record, -1, step, *args, **kwargs)

        return call

    def _clocked(
        self, record: Record, sign: int, call: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Calls; adds the time to the record's, or takes it away with that of its own events."""
        on_gpu = record.on_gpu
        begin, end = (torch.cuda.Event(enable_timing=True) if on_gpu else None for _ in range(2))
        outer = time.perf_counter_ns()
        if begin is not None:
            begin.record()
        inner = time.perf_counter_ns()
        self.inside = record if sign > 0 else None
        try:
            return call(*args, **kwargs)
        finally:
            self.inside = None if sign > 0 else record
            inner = time.perf_counter_ns() - inner
            if end is not None:
                end.record()
                record.events.append((sign * (record.steps + 1), begin, end))
            record.spent_ns += inner if sign > 0 else outer - time.perf_counter_ns()
