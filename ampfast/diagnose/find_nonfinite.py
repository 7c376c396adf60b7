"""The module whose output, or whose gradient, was the first that is not finite."""

from __future__ import annotations

import math
import sys
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ampfast import backends
from ampfast.backends import TORCH_OPS, core
from ampfast.backends.aten import TensorList
from ampfast.backends.core import Factor, Pass
from ampfast.backends.cuda_graphs import refuse_capture
from ampfast.backends.scalars import allocate, new_flag, widest
from ampfast.errors import not_compiled

_functorch = torch._C._functorch
# Forward passes of the model that are kept.
_KEPT = 64
_DTYPES = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128),
}
# Rows of a table that is added when the others are full.
_ROWS = 32
# What torch.nn.Module calls instead of `_call_impl`, if it is not None, and the code that looks.
_PLACE = "_compiled_call_impl"
_CALLED = torch.nn.Module._wrapped_call_impl.__code__
_MARK: Any = "ampfast"
# Numbers reads in their order, over all models.
_TIME = count()


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
        told = f"{given} finite"
        if not self.inputs_finite:
            told = f"{given} not finite either: what no module computes is at fault"
        if self.inputs_finite and self.largest is not None:
            told += f", largest {self.largest:,.6g}"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{name} ({self.type}): {what} {became} in {dtype} ({told})"


# When, in which table and in which row of it a tensor's largest magnitude was written.
_Row = tuple[int, "_Table", int]


@dataclass(eq=False, slots=True)
class _Value:
    """A tensor of a pass: the rows of itself and of its gradients.

    A block that runs again in backward does not read its tensors again: they have no row.
    """

    row: _Row | None
    dtype: torch.dtype
    gradients: tuple[_Row, ...] = ()


@dataclass(slots=True)
class _Call:
    """A module's call: name and class of the module, what it was given and what it returned."""

    module: tuple[str, str]
    within: _Pass
    inputs: list[_Value]
    outputs: list[_Value] = field(default_factory=list)


class _Table:
    """Rows for the sums of squares and largest magnitudes of tensors of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.used = device, 0
        self._run = backends.choose().kernels_for(device).run
        self.rows = allocate(torch.zeros, _ROWS, 2, dtype=widest(device), device=device)
        flag = new_flag(device)
        # Views that are made in inference mode cannot be written later.
        with torch.inference_mode(False):
            # Made at once, as a view for each read takes as long as the read.
            self._passes = [
                Pass(False, Factor.NONE, found_inf=flag, accumulate=False, sums=row)
                for row in self.rows.unbind()
            ]

    def take(self) -> int:
        """Returns the number of a row that is not used yet."""
        number = self.used
        self.used = number + 1
        return number

    def read(self, tensor: Tensor) -> int:
        """Writes a row and returns its number; NaN wins over other magnitudes."""
        while _functorch.is_functorch_wrapped_tensor(tensor):
            tensor = _functorch.get_unwrapped(tensor)
        if hasattr(tensor, "to_local"):
            with torch.no_grad():
                tensor = tensor.to_local()
        number = self.take()
        grads = core.list_of([tensor], self.device)
        if grads is None:
            TORCH_OPS.run(TensorList.of([tensor.detach()]), self._passes[number])
        else:
            self._run(grads, self._passes[number])
        return number


class _Pass:
    """One forward pass of a model, and its backward."""

    def __init__(self, finder: NonFiniteFinder) -> None:
        self._finder = finder
        self.watches: set[_Watch] = set()
        # Calls in the order of their ends; rows in the order in which gradients came.
        self.ended: list[_Call] = []
        self.gradients: list[_Row] = []
        # A scaler's number of completed updates when the first gradient came.
        self.updates: _Row | None = None
        self.tables: list[_Table] = []
        self._filling: dict[torch.device, _Table] = {}
        self._values: dict[int, tuple[weakref.ref[Tensor], int, _Value]] = {}

    def value_of(self, tensor: Tensor, is_again: bool) -> _Value:
        """The value of a tensor, which is read unless it was before, or its block runs again."""
        version = -1 if tensor.is_inference() else tensor._version
        known = self._values.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == version:
            return known[2]
        value = _Value(None if is_again else self._measure(tensor), tensor.dtype)
        self._values[id(tensor)] = weakref.ref(tensor), version, value
        if tensor.requires_grad:
            handle = tensor.register_hook(partial(self._came, value))
            if tensor.is_leaf:
                self._finder.keep_hook(tensor, handle)
        return value

    def forget(self) -> None:
        """Ends the forward pass: tensors may be freed, and others come to their addresses."""
        self._values.clear()

    def drop(self) -> None:
        """Gives its tables to later passes; a backward that still comes has others."""
        for table in self.tables:
            table.used = 0
            self._finder.unused[table.device].append(table)
        self.tables.clear()
        self._filling.clear()

    def _came(self, value: _Value, gradient: Tensor) -> None:
        if not self.gradients:
            self._keep_updates()
        row = self._measure(gradient)
        value.gradients += (row,)
        self.gradients.append(row)

    @torch.no_grad()
    def _keep_updates(self) -> None:
        # On the device: neither does the host wait, nor does a replayed graph keep an old number.
        words = self._finder.words()
        if words is not None:
            table = self._table_on(words.device)
            number = table.take()
            table.rows[number].copy_(words[0])
            self.updates = next(_TIME), table, number

    def _measure(self, tensor: Tensor) -> _Row:
        table = self._table_on(tensor.device)
        return next(_TIME), table, table.read(tensor)

    def _table_on(self, device: torch.device) -> _Table:
        """A table with a row that is not used yet."""
        table = self._filling.get(device)
        if table is None or table.used == _ROWS:
            unused = self._finder.unused[device]
            table = self._filling[device] = unused.pop() if unused else _Table(device)
            self.tables.append(table)
        return table


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
        self.name, self.type, self.is_root = "", type(module).__name__, False
        # Of another finder, or a compiled call.
        self.inner: Any = vars(module).get(_PLACE)
        vars(module)[_PLACE] = self
        # Else torch.compile goes past this, to the forward of a module without hooks.
        module._forward_hooks_with_kwargs[_MARK] = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self.module()
        if (
            self.is_off
            or torch.compiler.is_exporting()
            or torch._C._get_tracing_state() is not None
        ):
            return (self.inner or module._call_impl)(*args, **kwargs)
        running = self.finder.running.passes
        depth = len(running)
        try:
            forward, call = self.finder.begin(self, module, running, args, kwargs)
            output = forward(*args, **kwargs)
            if call is not None:
                self.finder.end(call, output)
            return output
        finally:
            if depth == 0 and running:
                running[0].forget()
            del running[depth:]

    def __deepcopy__(self, memo: object) -> None:
        """Leaves the place empty in modules that copy all of their attributes."""

    def __reduce__(self) -> tuple[Any, ...]:
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
        self._watches: dict[int, _Watch] = {}  # by the id of a module
        self._passes: deque[_Pass] = deque()
        self.running = _Running()
        # Tables of earlier passes by device, to take from. New ones at every pass would have
        # Python collect garbage for as long as the reads take.
        self.unused: dict[torch.device, list[_Table]] = defaultdict(list)
        # The hook of each leaf that a module was given, by id: leaves outlive their passes.
        self._leaves: dict[int, RemovableHandle] = {}

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
        self._watches = {k: each for k, each in self._watches.items() if each.module() is not None}
        for name, module in model.named_modules():
            own = self._watches.get(id(module)) or _Watch(self, module)
            own.name, own.is_root = name, module is model
            self._watches[id(module)] = own

    def remove(self) -> None:
        """Ends the watch; what was found stays."""
        for own in self._watches.values():
            own.is_off, module = True, own.module()
            if module is None:
                continue
            # One that another finder's is around stays in there, and does nothing.
            top = vars(module).get(_PLACE)
            while isinstance(top, _Watch) and top.is_off:
                vars(module)[_PLACE] = top = top.inner
            if top is None:
                vars(module).pop(_PLACE, None)
            if not isinstance(top, _Watch):
                module._forward_hooks_with_kwargs.pop(_MARK, None)
        for handle in self._leaves.values():
            handle.remove()
        self._watches.clear()
        self._leaves.clear()

    def report(self) -> ModuleFault | None:
        """Returns the fault of the last pass that had one, with one host sync; None if none had.

        Raises:
            RuntimeError: Under capture.
        """
        faults = self._faults()
        return faults[-1][-1] if faults else None

    def report_of(self, step: int) -> ModuleFault | None:
        """Returns the first fault in passes whose gradients came after a number of updates."""
        faults = [each for each in self._faults() if each[0] == step]
        return min(faults, key=lambda each: each[1])[-1] if faults else None

    def _faults(self) -> list[tuple[int | None, int, ModuleFault]]:
        """The fault of each pass that had one, its time, and the updates before its gradients."""
        refuse_capture("a report that the host reads", "ask after the replay")
        tables = [table for each in self._passes for table in each.tables]
        if not tables:
            return []
        rows = torch.cat([table.rows.to(tables[0].device) for table in tables])
        on_host = iter(rows[:, 1].tolist())
        known: dict[_Table, list[float]] = {each: list(islice(on_host, _ROWS)) for each in tables}

        def peak(row: _Row) -> float:
            return known[row[1]][row[2]]

        faults = []
        for ago, one in zip(reversed(range(len(self._passes))), self._passes, strict=True):
            fault = _fault_of(one, peak, ago)
            if fault is not None:
                updates = 0 if one.updates is None else int(peak(one.updates))
                faults.append((updates if one.gradients else None, *fault))
        return faults

    @not_compiled
    def begin(
        self, watch: _Watch, module: Any, running: list[_Pass], args: Any, kwargs: Any
    ) -> tuple[Callable[..., Any], _Call | None]:
        """Begins a module's call, and a pass unless the call is part of one.

        Returns what to call, and the call; None if it is not watched.
        """
        caller = sys._getframe(2)
        if caller.f_code is _CALLED and caller.f_locals["self"] is not module:
            # It has the attributes of the module, as replicas of torch.nn.DataParallel do.
            return caller.f_locals["self"]._call_impl, None
        forward = watch.inner or module._call_impl
        is_again = _is_in_backward()
        one = running[-1] if running else self._last(watch, is_again, args, kwargs)
        if one is None:
            return forward, None
        running.append(one)
        one.watches.add(watch)
        inputs = [one.value_of(tensor, is_again) for tensor in _floating((args, kwargs))]
        return forward, _Call((watch.name, watch.type), one, inputs)

    @not_compiled
    def end(self, call: _Call, output: Any) -> None:
        """Ends a module's call, which has returned."""
        one, is_again = call.within, _is_in_backward()
        call.outputs = [one.value_of(tensor, is_again) for tensor in _floating(output)]
        one.ended.append(call)

    def keep_hook(self, leaf: Tensor, handle: RemovableHandle) -> None:
        """Keeps the hook of a leaf, in the place of its earlier one."""
        earlier = self._leaves.get(id(leaf))
        if earlier is not None:
            earlier.remove()
        self._leaves[id(leaf)] = handle

    def _last(self, watch: _Watch, is_again: bool, args: Any, kwargs: Any) -> _Pass | None:
        """The pass that an outermost call is part of, as models may be called by their parts."""
        last = self._passes[-1] if self._passes else None
        if is_again:
            return last
        # A reentrant checkpoint calls its block without grad mode, with inputs that require grad.
        if self._needs_graph and not (
            torch.is_grad_enabled() or any(x.requires_grad for x in _floating((args, kwargs)))
        ):
            return None
        is_part = last is not None and not (
            watch.is_root or last.gradients or watch in last.watches
        )
        if is_part:
            return last
        for key, handle in list(self._leaves.items()):
            if handle.hooks_dict_ref() is None:  # the tensor was freed
                del self._leaves[key]
        self._passes.append(_Pass(self))
        if len(self._passes) > _KEPT:
            self._passes.popleft().drop()
        return self._passes[-1]


def _fault_of(
    one: _Pass, peak: Callable[[_Row], float], ago: int
) -> tuple[int, ModuleFault] | None:
    """The time and the fault of a pass, by the largest magnitudes."""

    def fault(
        call: _Call, where: str, value: _Value, row: _Row, given: Iterable[_Row | None]
    ) -> tuple[int, ModuleFault]:
        kind = "nan" if math.isnan(peak(row)) else "inf"
        before = [peak(each) for each in given if each is not None]
        is_finite = all(map(math.isfinite, before))
        largest = max(before, default=None) if is_finite else None
        label = *call.module, where, kind, value.dtype
        return row[0], ModuleFault(*label, is_finite, largest, ago)

    for call in one.ended:
        for value in call.outputs:
            if value.row is not None and not math.isfinite(peak(value.row)):
                return fault(call, "output", value, value.row, [each.row for each in call.inputs])
    for row in one.gradients:
        if math.isfinite(peak(row)):
            continue
        # Of the modules that took the tensor and did not pass it on, inner ones ended first.
        for call in one.ended:
            for value in call.inputs:
                if row in value.gradients and value not in call.outputs:
                    given = [each for output in call.outputs for each in output.gradients]
                    return fault(call, "gradient", value, row, given)
        # Else none took it: its gradient is that of a loss, or of another function.
        for call in one.ended:
            for value in call.outputs:
                if row in value.gradients:
                    return fault(call, "gradient", value, row, [row])
    return None


def _is_in_backward() -> bool:
    """Whether this is a checkpointed block that runs again."""
    return torch._C._current_graph_task_id() != -1


def _floating(values: Any, depth: int = 16) -> Iterator[Tensor]:
    """The tensors in a structure, of at most a depth, whose values may be infinite."""
    if isinstance(values, Tensor):
        if values.dtype in _DTYPES and _is_readable(values):
            yield values
    elif depth and isinstance(values, (tuple, list)):
        for each in values:
            yield from _floating(each, depth - 1)
    elif depth and isinstance(values, Mapping):
        yield from _floating(tuple(values.values()), depth - 1)
    elif depth and is_dataclass(values):
        found = [getattr(values, each.name, None) for each in fields(values)]
        yield from _floating(found, depth - 1)


def _is_readable(tensor: Tensor) -> bool:
    """Whether a tensor's values are in memory as of a dense one; fake tensors have none."""
    is_dense = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta
    return is_dense and (type(tensor) is Tensor or not hasattr(tensor, "fake_mode"))


def find_nonfinite(model: torch.nn.Module) -> NonFiniteFinder:
    """Watches every module of a model for values that are not finite, without a host sync.

    The inputs and outputs of each module are read once, and their gradients in backward; on a GPU
    each read is one launch, and nothing is copied but the largest magnitude. The last 64 forward
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
