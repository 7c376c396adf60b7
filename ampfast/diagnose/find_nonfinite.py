"""The module whose output, or whose gradient, was the first that is not finite."""

from __future__ import annotations

import math
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from ampfast import backends
from ampfast.backends import aten, core
from ampfast.backends.cuda_graphs import refuse_capture
from ampfast.backends.scalars import allocate, widest
from ampfast.errors import not_compiled

# Forward passes of the model that are kept.
_KEPT = 64
# What torch.nn.Module calls instead of `_call_impl`, if it is not None, and the code that looks.
_PLACE = "_compiled_call_impl"
_CALLED = torch.nn.Module._wrapped_call_impl.__code__
_MARK: Any = "ampfast"


@dataclass(frozen=True)
class ModuleFault:
    """The first value of a pass that was not finite.

    Attributes:
        module: Name of the module in the model, "" for the model itself.
        type: Name of its class.
        where: "output" of its forward, or "gradient": of its inputs, in its backward.
        kind: "nan" or "inf".
        dtype: dtype of these values.
        inputs_finite: Whether all that it was given was finite: its inputs or, in backward, the
            gradients of its outputs.
        largest: Largest magnitude of what it was given; None if that had no floating-point values.
        passes_ago: Number of later forward passes.
    """

    module: str
    type: str
    where: str
    kind: str
    dtype: torch.dtype
    inputs_finite: bool
    largest: float | None
    passes_ago: int

    def __str__(self) -> str:
        name = self.module or "the model"
        became = "became NaN" if self.kind == "nan" else "overflowed"
        what = "output" if self.where == "output" else "in backward, the gradient of an input"
        given = "inputs" if self.where == "output" else "gradients of its outputs"
        largest = "" if self.largest is None else f", largest {self.largest:,.6g}"
        told = f"{given} finite{largest}"
        if not self.inputs_finite:
            told = f"{given} not finite either: what no module computes is at fault"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{name} ({self.type}): {what} {became} in {dtype} ({told})"


class _Pass(core.Reads):
    """One forward pass of a model, and its backward."""

    def __init__(self, words: Callable[[], Tensor | None]) -> None:
        super().__init__(words)
        self.begun: set[_Watch] = set()
        # In the order of their ends, with the numbers of the values given and returned.
        self.ended: list[tuple[_Watch, list[int], list[int]]] = []


class _Running(threading.local):
    """The passes of the calls that run in this thread, the outermost first."""

    def __init__(self) -> None:
        self.passes: list[_Pass] = []


class _Watch:
    """Replaces the call of a module, for one finder.

    `torch.nn.Module.compile` has a compiled call there, so that torch copies and pickles modules
    without it. Hooks are copied; `torch.ao.quantization` gives them to other modules, and
    `torch.jit.script` compiles them.
    """

    def __init__(self, finder: NonFiniteFinder, module: torch.nn.Module) -> None:
        self.finder, self.module, self.is_off = finder, weakref.ref(module), False
        self.name, self.type = "", type(module).__name__
        # Of another finder, or a compiled call.
        self.inner: Any = vars(module).get(_PLACE)
        vars(module)[_PLACE] = self
        # Else torch.compile goes past this, to the forward of a module without hooks.
        module._forward_hooks_with_kwargs[_MARK] = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_exporting():
            module: Any = self.module()
            return (self.inner or module._call_impl)(*args, **kwargs)
        running = self.finder.running.passes
        depth = len(running)
        try:
            forward, inputs = self.finder.begin(self, running, args, kwargs)
            output = forward(*args, **kwargs)
            if inputs is not None:
                self.finder.end(self, running[depth], inputs, output)
            return output
        finally:
            if depth == 0 and running:
                running[0].forget()
            del running[depth:]

    def __reduce__(self) -> tuple[Any, ...]:
        """Leaves the place empty in copies of modules that copy all of their attributes."""
        return type(None), ()


class NonFiniteFinder:
    """Watches the modules of models; `report` names the first whose values were not finite.

    Made by `find_nonfinite`; a context manager, whose end ends the watch. Neither copies and
    pickles of a model are watched, nor modules that it gets later.

    Args:
        words: Returns a scaler's state, whose first word is its number of completed updates. Then
            only passes with a graph are watched.
    """

    def __init__(self, words: Callable[[], Tensor | None] | None = None) -> None:
        self.words = words or (lambda: None)
        self._needs_graph = words is not None
        self._watches: WeakKeyDictionary[torch.nn.Module, _Watch] = WeakKeyDictionary()
        self._passes: deque[_Pass] = deque(maxlen=_KEPT)
        self.running = _Running()

    def __enter__(self) -> NonFiniteFinder:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def watch(self, model: torch.nn.Module) -> None:
        """Watches a model, besides others; its modules get the names that they have in it."""
        # torch scripts the attributes of modules, and its list of its own lacks this one.
        ignored = torch.jit._recursive.ignored_attributes
        if _PLACE not in ignored:
            ignored.append(_PLACE)
        for name, module in model.named_modules():
            own = self._watches.get(module) or _Watch(self, module)
            own.name = name
            self._watches[module] = own

    def remove(self) -> None:
        """Ends the watch; what was found stays."""
        for module, own in self._watches.items():
            own.is_off = True
            # One that another finder's is around stays in there, and does nothing.
            top = vars(module).get(_PLACE)
            while isinstance(top, _Watch) and top.is_off:
                vars(module)[_PLACE] = top = top.inner
            if top is None:
                vars(module).pop(_PLACE, None)
            if not isinstance(top, _Watch):
                module._forward_hooks_with_kwargs.pop(_MARK, None)
        for one in self._passes:
            one.is_off = True
        self._watches.clear()

    def report(self) -> ModuleFault | None:
        """Returns the fault of the last pass that had one, with one host sync; None if none had.

        If the passes right before it had one, too, as weights were NaN by then, of the first of
        these.

        Raises:
            RuntimeError: Under capture.
        """
        found: ModuleFault | None = None
        for _, fault in reversed(self._faults()):
            if found is not None and fault.passes_ago != found.passes_ago + 1:
                break
            found = fault
        return found

    def report_of(self, step: int) -> ModuleFault | None:
        """Returns the first fault in passes whose gradients came after a number of updates.

        One whose inputs were finite goes before those to which it may have spread.
        """
        faults = [fault for updates, fault in self._faults() if updates == step]
        faults.sort(key=lambda fault: (not fault.inputs_finite, fault.where == "gradient"))
        return faults[0] if faults else None

    def _faults(self) -> list[tuple[float | None, ModuleFault]]:
        """The fault of each pass that had one, and the updates before its gradients."""
        refuse_capture("a report that the host reads", "ask after the replay")
        # As they are now: other threads may run the models.
        passes = [(list(each.ended), *each.so_far()) for each in tuple(self._passes)]
        tables = [table[:, 0] for *_, tables in passes for table in tables]
        if not tables:
            return []
        on_host = iter(torch.cat([each.to(tables[0]) for each in tables]).tolist())
        faults = []
        for later, (ended, values, gradients, tables) in enumerate(passes, 1 - len(passes)):
            peaks = list(islice(on_host, sum(map(len, tables))))
            fault = _fault_of(ended, values, gradients, peaks, -later)
            if fault is not None:
                faults.append((peaks[-1] if gradients else None, fault))
        return faults

    @not_compiled
    def begin(
        self, watch: _Watch, running: list[_Pass], args: Any, kwargs: Any
    ) -> tuple[Callable[..., Any], list[int] | None]:
        """Begins a module's call, and a pass unless the call is part of one.

        Returns what to call, and the numbers of what it is given; None if it is not watched.
        """
        module: Any = watch.module()
        caller = sys._getframe(2)
        # Replicas of torch.nn.DataParallel have the attributes of the module.
        called = caller.f_locals["self"] if caller.f_code is _CALLED else module
        forward = (watch.inner if called is module else None) or called._call_impl
        if called is not module or watch.is_off or torch._C._get_tracing_state() is not None:
            return forward, None
        given = (args, kwargs) if kwargs else args
        one = running[-1] if running else self._last(watch, given)
        if one is None:
            return forward, None
        running.append(one)
        one.begun.add(watch)
        return forward, one.values_of(given)

    @not_compiled
    def end(self, watch: _Watch, one: _Pass, inputs: list[int], output: Any) -> None:
        """Ends a module's call."""
        one.ended.append((watch, inputs, one.values_of(output)))

    def _last(self, watch: _Watch, given: Any) -> _Pass | None:
        """The pass that an outermost call is part of, as models may be called by their parts."""
        last = self._passes[-1] if self._passes else None
        if torch._C._current_graph_task_id() != -1:  # a checkpointed block runs again
            return last
        # A reentrant checkpoint calls its block without grad mode, with inputs that require grad.
        if self._needs_graph and not (
            torch.is_grad_enabled()
            or any(getattr(each, "requires_grad", False) for each in tree_leaves(given))
        ):
            return None
        # A model has no name in itself.
        if last is None or not watch.name or watch in last.begun or last.has_gradients:
            last = _Pass(self.words)
            self._passes.append(last)
        return last


def _fault_of(
    ended: list[tuple[_Watch, list[int], list[int]]],
    values: list[tuple[int | None, torch.dtype]],
    gradients: list[tuple[int, int]],
    peaks: list[float],
    ago: int,
) -> ModuleFault | None:
    """The fault of a pass, by the largest magnitudes in its rows."""

    def fault(
        watch: _Watch, where: str, value: int, peak: float, given: list[float]
    ) -> ModuleFault:
        kind = "nan" if math.isnan(peak) else "inf"
        finite = all(map(math.isfinite, given))
        largest = max(given, default=None) if finite else None
        dtype = values[value][1]
        return ModuleFault(watch.name, watch.type, where, kind, dtype, finite, largest, ago)

    read = {value: peaks[row] for value, (row, _) in enumerate(values) if row is not None}
    for watch, inputs, outputs in ended:
        for value in outputs:
            if not math.isfinite(peak := read.get(value, 0.0)):
                given = [read[each] for each in inputs if each in read]
                return fault(watch, "output", value, peak, given)
    came = [(value, peaks[row]) for value, row in gradients]
    broken = [(value, peak) for value, peak in came if not math.isfinite(peak)]
    for value, peak in broken:
        # Of the modules that took the tensor and did not pass it on, inner ones ended first.
        for watch, inputs, outputs in ended:
            if value in inputs and value not in outputs:
                given = [each for output, each in came if output in outputs]
                return fault(watch, "gradient", value, peak, given)
    # Else none took it: its gradient is that of a loss, or of another function.
    for value, peak in broken:
        for watch, _, outputs in ended:
            if value in outputs:
                return fault(watch, "gradient", value, peak, [peak])
    return None


@contextmanager
def _unseen() -> Iterator[None]:
    """Hides calls of torch from modes and transforms that are around a forward."""
    hidden = torch._C.DisableTorchFunction(), torch._C._DisableFuncTorch()
    with hidden[0], hidden[1], torch.no_grad(), _disable_current_modes():
        yield


@_unseen()
def _new_table(device: torch.device, *shape: int) -> tuple[Tensor, str]:
    """A table, and the backend of the device, which reads for it."""
    table = allocate(torch.zeros, *shape, dtype=widest(device), device=device)
    return table, backends.default_for(device)


@_unseen()
def _updates_in(words: Tensor) -> Tensor:
    return words[:1].clone()


@_unseen()
def _read_by_ops(tensor: Tensor, table: Tensor, row: int) -> bool:
    """Writes the largest magnitude of any tensor, where NaN wins; returns whether it could."""
    try:
        values = aten.local_of(torch.func.debug_unwrap(tensor))
        values = core.real_view(values.detach())
        peak = values.numel() and torch.linalg.vector_norm(values, math.inf, dtype=table.dtype)
        table[row, 0] = peak
    except Exception:  # a class may refuse any op
        return False
    return True


def _parts_of(value: Any) -> list[Any]:
    """What a mapping or a dataclass holds, unless it refuses."""
    with suppress(Exception):
        if isinstance(value, Mapping):
            return list(value.values())
        if is_dataclass(value):
            return [getattr(value, each.name, None) for each in fields(value)]
    return []


def find_nonfinite(model: torch.nn.Module) -> NonFiniteFinder:
    """Watches every module of a model for values that are not finite, without a host sync.

    The inputs and outputs of each module are read once, and their gradients in backward; on a GPU
    each read is one launch, and nothing is kept but the largest magnitude. The last 64 forward
    passes are kept. Under `torch.compile` each module ends a graph. What is made of the model is
    not watched: copies, pickles, exports, scripts and modules that replace others, as in
    quantization. Neither models nor parameters are kept alive.

    Args:
        model: The model, before it is compiled.

    Returns:
        What `report` is asked for. A context manager; `remove` ends it, too.

    Raises:
        TypeError: If it is no module.

    Example:
        >>> with ampfast.find_nonfinite(model) as finder:
        ...     train_one_step()
        >>> print(finder.report())
        decoder.fc2 (Linear): output overflowed in float16 (inputs finite, largest 61,440)
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    finder = NonFiniteFinder()
    finder.watch(model)
    return finder
