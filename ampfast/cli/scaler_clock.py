"""Times and values of every scaler of a program, taken around the methods of its class."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from hashlib import blake2b
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ampfast.backends.aten import local_of
from ampfast.backends.cuda_graphs import is_capturing
from ampfast.scaler.late_backward import visited

_METHODS = ("scale", "unscale_", "clip_grad_norm_", "step", "update", "step_and_update")
_ENDS = ("update", "step_and_update")
# Iterations that warm up.
_WARM_UP = 4


def checksum(tensor: Tensor) -> int:
    """Returns a hash of a tensor's bits.

    The bits of all NaNs count as equal, as torch's kernels write several kinds.
    """
    values = local_of(tensor).detach()
    values = (values if values.layout is torch.strided else values.to_dense()).cpu()
    if values.element_size() > 1 and (values.is_floating_point() or values.is_complex()):
        values = values.where(values == values, math.nan)
    bits: Any = values.reshape(-1).view(torch.uint8).numpy()
    return int.from_bytes(blake2b(bits, digest_size=8).digest(), "big")


class Record:
    """What one scaler did, by iteration; an iteration ends with `update()`.

    Attributes:
        scaler: The scaler.
        times: By name, microseconds of each iteration: "own" (host time in the scaler's methods,
            without the optimizer's step), "step" (since the end of the one before, or first use).
        values: By name, pairs of iteration and number, still on its device: "losses" (arguments
            of `scale`, one of many elements as their sum), "scales" (before `update`), "skips" (1
            for a flag that is set).
    """

    def __init__(self, scaler: Any) -> None:
        self.scaler = scaler
        self.times: dict[str, list[float]] = {"own": [], "step": []}
        names = ("losses", "scales", "skips")
        self.values: dict[str, list[tuple[int, Tensor]]] = {name: [] for name in names}
        # Times of this iteration.
        self.spent_ns, self.end_ns = 0, time.perf_counter_ns()

    @property
    def steps(self) -> int:
        """Number of iterations."""
        return len(self.times["own"])

    def medians(self) -> dict[str, float]:
        """Returns the medians of the times, without a warm-up, and the scaler's share."""
        after = {name: times[_WARM_UP:] or times for name, times in self.times.items()}
        found = {name: median(times) for name, times in after.items() if times}
        return {**found, "share": found["own"] / found["step"]} if found else found

    def see(self, outputs: Any) -> Any:
        """Keeps the losses in an argument of `scale`; returns what takes the argument's place."""
        return visited(outputs, lambda loss: self._keep("losses", local_of(loss).detach().sum()))

    def see_state(self) -> None:
        """Keeps the scale and the flags that `update` is about to use."""
        if self.scaler._scale is not None:
            self._keep("scales", self.scaler._scale)
            for entry in self.scaler._per_optimizer_states.values():
                for flag in entry["found_inf_per_device"].values():
                    self._keep("skips", (flag != 0).float())

    def _keep(self, kind: str, value: Tensor) -> None:
        # torch's update writes the scale, and sums the flags into the first.
        self.values[kind].append((self.steps, value.detach().clone()))

    def end(self) -> None:
        """Ends the iteration."""
        self.times["step"].append((time.perf_counter_ns() - self.end_ns) / 1e3)
        self.times["own"].append(self.spent_ns / 1e3)
        self.spent_ns = 0
        self.end_ns = time.perf_counter_ns()


class ScalerClock:
    """Times the scalers of some classes; sees the optimizers that are made from now on.

    Args:
        kinds: Classes, whose methods are replaced by timed ones.
        keeps_values: Whether losses, scales and skips are recorded, too, and optimizers held.
        ended: Called with the record at the end of each iteration.

    Attributes:
        records: The record of each scaler, by its id.
    """

    def __init__(self, *kinds: type, keeps_values: bool, ended: Callable[[Record], object]) -> None:
        self.records: dict[int, Record] = {}
        # Of the scaler whose method a thread runs, unless its optimizer steps.
        self._inside = threading.local()
        self._optimizers: dict[int, Any] = {}
        self._keeps_values, self._ended = keeps_values, ended
        for kind in kinds:
            for name in set(_METHODS) & vars(kind).keys():
                original, timed = vars(kind)[name], self._timed(name, vars(kind)[name])
                setattr(kind, name, timed)
                for hooks in vars(kind).get("_originals", ()):
                    if hooks.get(name) is original:
                        hooks[name] = timed  # it is no hook
        # Around torch's own wrapper, whose time would count as the scaler's.
        optimizer: Any = torch.optim.Optimizer
        profiled = optimizer.profile_hook_step
        optimizer.profile_hook_step = staticmethod(lambda step: self._excluded(profiled(step)))

    def weights(self) -> int:
        """Returns a checksum of the parameters of all optimizers that stepped."""
        found = []
        for optimizer in self._optimizers.values():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    # Other layouts have no bits, such as a nested tensor's.
                    with suppress(RuntimeError, TypeError, ValueError):
                        found.append(checksum(parameter))
        return hash(tuple(sorted(found)))  # threads may step in any order

    def _hold(self, *arguments: Any) -> None:
        for optimizer in arguments:
            if self._keeps_values and hasattr(optimizer, "param_groups"):
                self._optimizers[id(optimizer)] = optimizer

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or getattr(self._inside, "record", None):
                return method(scaler, *args, **kwargs)
            record = self.records.setdefault(id(scaler), Record(scaler))
            if not scaler._enabled or is_capturing():
                return method(scaler, *args, **kwargs)
            self._hold(*args, *kwargs.values())
            if self._keeps_values and name == "scale":
                args = tuple(map(record.see, args))
                kwargs = {key: record.see(value) for key, value in kwargs.items()}
            elif self._keeps_values and name in _ENDS:
                record.see_state()
            try:
                return self._clocked(record, 1, method, scaler, *args, **kwargs)
            finally:
                if name in _ENDS:  # also where max_skips raises, after the update
                    record.end()
                    self._ended(record)

        return call

    def _excluded(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(step)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                self._hold(*args[:1])
                if (record := getattr(self._inside, "record", None)) is not None:
                    return self._clocked(record, -1, step, *args, **kwargs)
            return step(*args, **kwargs)

        return call

    def _clocked(
        self, record: Record, sign: int, call: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Calls; adds the time to the record's, or takes it away."""
        self._inside.record = record if sign > 0 else None
        begin = time.perf_counter_ns()
        try:
            return call(*args, **kwargs)
        finally:
            record.spent_ns += sign * (time.perf_counter_ns() - begin)
            self._inside.record = None if sign > 0 else record
