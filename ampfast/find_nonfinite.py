"""The module whose output, or whose gradient, was the first that is not finite."""

from __future__ import annotations

import math
import sys
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from ampfast import backends
from ampfast.backends import TORCH_OPS, core
from ampfast.backends.core import Factor, Pass
from ampfast.backends.scalars import allocate, new_flag
from ampfast.backends.torch_ops import TensorList
from ampfast.capture import refuse_capture
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
# What holds no tensors, as most arguments that are none.
_PLAIN = {bool, float, int, str, type(None)}


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
        passes_ago: Number of later forward passes of the model.
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


@dataclass(eq=False, slots=True)
class _Value:
    """A tensor of a pass: the rows of the largest magnitudes of itself and of its gradients.

    A block that runs again in backward does not read its tensors again: they have no row.
    """

    row: int | None
    dtype: torch.dtype
    gradients: tuple[int, ...] = ()


@dataclass(slots=True)
class _Call:
    """A module's call: its place among the modules, what it was given and what it returned."""

    module: int
    inputs: list[_Value]
    outputs: list[_Value] = field(default_factory=list)


class _Table:
    """Rows for the sums of squares and largest magnitudes of tensors of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rows = allocate(torch.zeros, _ROWS, 2, dtype=torch.float64, device=device)
        self._run = backends.choose().kernels_for(device).run
        flag = new_flag(device)
        # Made at once, as a view for each read takes as long as the read.
        self._passes = [
            Pass(False, Factor.NONE, found_inf=flag, accumulate=False, sums=row)
            for row in self.rows.unbind()
        ]

    def read(self, tensor: Tensor, number: int) -> None:
        """Writes a row; NaN wins over other magnitudes."""
        while _functorch.is_functorch_wrapped_tensor(tensor):
            tensor = _functorch.get_unwrapped(tensor)
        if hasattr(tensor, "to_local"):
            with torch.no_grad():
                tensor = tensor.to_local()
        grads = core.list_of([tensor], self.device)
        if grads is None:
            TORCH_OPS.run(TensorList.of([tensor.detach()]), self._passes[number])
        else:
            self._run(grads, self._passes[number])


class _Pass:
    """One forward pass of the model, and its backward.

    Args:
        unused: Tables of earlier passes by device, to take from. New ones at every pass would have
            Python collect garbage for as long as the reads take.
        leaves: The hook of each leaf that a module was given, by id: leaves outlive their passes.
    """

    def __init__(
        self, unused: dict[torch.device, list[_Table]], leaves: dict[int, RemovableHandle]
    ) -> None:
        self._unused, self._leaves = unused, leaves
        # Calls in the order of their ends; calls that run now, the outermost first.
        self.ended: list[_Call] = []
        self.running: list[_Call] = []
        self.tables: list[_Table] = []
        self.rows = 0
        # Rows in the order in which gradients came.
        self.gradients: list[int] = []
        self.modules: set[int] = set()
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
                earlier = self._leaves.get(id(tensor))
                if earlier is not None:
                    earlier.remove()
                self._leaves[id(tensor)] = handle
        return value

    def is_over_before(self, number: int, module: Any) -> bool:
        """Whether a module's call begins another pass, as models may be called by their parts."""
        if number == 0 and self.running:
            return not _calls_itself(module)  # else the calls that run were interrupted
        is_another = number == 0 or bool(self.gradients) or number in self.modules
        return is_another and not self.running

    def forget(self) -> None:
        """Ends the forward pass: tensors may be freed, and others come to their addresses."""
        self._values.clear()

    def drop(self) -> None:
        """Gives its tables to later passes; a backward that still comes has others."""
        for table in self.tables:
            self._unused[table.device].append(table)
        self.tables, self.rows = [], 0

    def _came(self, value: _Value, gradient: Tensor) -> None:
        row = self._measure(gradient)
        value.gradients += (row,)
        self.gradients.append(row)

    def _measure(self, tensor: Tensor) -> int:
        """Writes the largest magnitude of a tensor to a new row."""
        number = self.rows % _ROWS
        if number == 0 or self.tables[-1].device != tensor.device:
            self.rows += -self.rows % _ROWS
            number = 0
            unused = self._unused[tensor.device]
            self.tables.append(unused.pop() if unused else _Table(tensor.device))
        row = self.rows
        self.rows += 1
        self.tables[-1].read(tensor, number)
        return row


class NonFiniteFinder:
    """Watches the modules of a model; `report` names the first whose values were not finite.

    Made by `find_nonfinite`; a context manager, whose end removes the hooks. Copies and pickles of
    the model are not watched.
    """

    _is_copy = False

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = list(model.named_modules())
        self._passes: deque[_Pass] = deque()
        self._unused: dict[torch.device, list[_Table]] = defaultdict(list)
        self._handles: list[Any] = []
        self._leaves: dict[int, RemovableHandle] = {}
        for number, (_, module) in enumerate(self._modules):
            before, after = partial(self._before, number), partial(self._after, number)
            self._handles += [
                module.register_forward_pre_hook(before, with_kwargs=True),
                # Also of a forward that raises, as a checkpointed block does once it has made all
                # that backward needs.
                module.register_forward_hook(after, with_kwargs=True, always_call=True),
            ]

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the model has copies of the hooks, which nothing could remove.
        names = ("_modules", "_passes", "_handles")
        return {**{name: [] for name in names}, "_leaves": {}, "_is_copy": True}

    def __enter__(self) -> NonFiniteFinder:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Removes the hooks; what was found stays."""
        for handle in (*self._handles, *self._leaves.values()):
            handle.remove()
        self._handles.clear()
        self._leaves.clear()

    def report(self) -> ModuleFault | None:
        """Returns the fault of the last pass that had one, with one host sync; None if none had.

        Raises:
            RuntimeError: Under capture.
        """
        refuse_capture("a report that the host reads", "ask after the replay")
        tables = [table for each in self._passes for table in each.tables]
        if not tables:
            return None
        rows = [table.rows.to(tables[0].device) for table in tables]
        on_host = iter(torch.cat(rows)[:, 1].tolist())
        peaks = [list(islice(on_host, _ROWS * len(each.tables))) for each in self._passes]
        pairs = zip(reversed(self._passes), reversed(peaks), strict=True)
        for ago, (each, found) in enumerate(pairs):
            fault = self._fault_of(each, found, ago)
            if fault is not None:
                return fault
        return None

    def _fault_of(self, one: _Pass, peaks: list[float], ago: int) -> ModuleFault | None:
        """The first fault of a pass, by the largest magnitudes."""
        for call in one.ended:
            for value in call.outputs:
                if value.row is not None and not math.isfinite(peaks[value.row]):
                    given = [each.row for each in call.inputs]
                    return self._fault(call, "output", value, value.row, given, peaks, ago)
        for row in one.gradients:
            if math.isfinite(peaks[row]):
                continue
            # Of the modules that took the tensor and did not pass it on, inner ones ended first.
            for call in one.ended:
                for value in call.inputs:
                    if row in value.gradients and value not in call.outputs:
                        given = [number for each in call.outputs for number in each.gradients]
                        return self._fault(call, "gradient", value, row, given, peaks, ago)
            # Else none took it: its gradient is that of a loss, or of another function.
            for call in one.ended:
                for value in call.outputs:
                    if row in value.gradients:
                        return self._fault(call, "gradient", value, row, [row], peaks, ago)
        return None

    def _fault(
        self,
        call: _Call,
        where: str,
        value: _Value,
        row: int,
        given: Sequence[int | None],
        peaks: list[float],
        ago: int,
    ) -> ModuleFault:
        name, module = self._modules[call.module]
        kind = "nan" if math.isnan(peaks[row]) else "inf"
        before = [peaks[each] for each in given if each is not None]
        is_finite = all(map(math.isfinite, before))
        largest = max(before, default=None) if is_finite else None
        label = name, type(module).__name__, where, kind, value.dtype
        return ModuleFault(*label, is_finite, largest, ago)

    @not_compiled
    def _before(self, number: int, module: Any, args: Any, kwargs: Any) -> None:
        if self._is_copy:
            return
        is_again = _is_in_backward()
        if not is_again and (not self._passes or self._passes[-1].is_over_before(number, module)):
            for key, handle in list(self._leaves.items()):
                if handle.hooks_dict_ref() is None:  # the tensor was freed
                    del self._leaves[key]
            self._passes.append(_Pass(self._unused, self._leaves))
            if len(self._passes) > _KEPT:
                self._passes.popleft().drop()
        if not self._passes:
            return
        one = self._passes[-1]
        one.modules.add(number)
        inputs = [one.value_of(tensor, is_again) for tensor in _floating((args, kwargs))]
        one.running.append(_Call(number, inputs))

    @not_compiled
    def _after(self, number: int, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if not self._passes:
            return
        one, is_again = self._passes[-1], _is_in_backward()
        if any(call.module == number for call in one.running):
            call = one.running.pop()
            while call.module != number:
                call = one.running.pop()
            has_raised = output is None and sys.exc_info()[0] is not None
            if not has_raised:
                call.outputs = [one.value_of(tensor, is_again) for tensor in _floating(output)]
                one.ended.append(call)
        if not one.running:
            one.forget()


def remove_with(owner: object, finder: NonFiniteFinder) -> None:
    """Has the hooks removed when an object dies, which does not keep them alive."""
    reference = weakref.ref(finder)

    def remove() -> None:
        living = reference()
        if living is not None:
            living.remove()

    weakref.finalize(owner, remove).atexit = False


def _is_in_backward() -> bool:
    """Whether this is a checkpointed block that runs again."""
    return torch._C._current_graph_task_id() != -1


def _calls_itself(module: Any) -> bool:
    """Whether a call of a module that begins now is inside of another one."""
    calls, frame = 0, cast(Any, sys._getframe())
    while frame is not None:
        is_call = frame.f_code is torch.nn.Module._call_impl.__code__
        calls += is_call and frame.f_locals.get("self") is module
        frame = frame.f_back
    return calls > 1


def _floating(values: Any, depth: int = 16) -> Iterator[Tensor]:
    """The tensors in a structure, of at most a depth, whose values may be infinite."""
    if isinstance(values, Tensor):
        if values.dtype in _DTYPES and _is_readable(values):
            yield values
    elif type(values) in _PLAIN or depth == 0:
        return
    elif type(values) in (tuple, list):
        for each in values:
            yield from _floating(each, depth - 1)
    elif isinstance(values, Mapping):
        yield from _floating(tuple(values.values()), depth - 1)
    elif is_dataclass(values):
        found = [getattr(values, each.name, None) for each in fields(values)]
        yield from _floating(found, depth - 1)
    else:
        leaves = tree_leaves(values)
        if leaves and leaves[0] is not values:  # else it is a leaf
            yield from _floating(leaves, depth - 1)


def _is_readable(tensor: Tensor) -> bool:
    """Whether a tensor's values are in memory as of a dense one; fake tensors have none."""
    is_dense = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta
    return is_dense and (type(tensor) is Tensor or not hasattr(tensor, "fake_mode"))


def find_nonfinite(model: torch.nn.Module) -> NonFiniteFinder:
    """Watches every module of a model for values that are not finite, without a host sync.

    Hooks read the inputs and outputs of each module once, and their gradients in backward; on a GPU
    each read is one launch, and nothing is copied but the largest magnitude. The last 64 forward
    passes are kept. Under `torch.compile` each module ends a graph.

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
    return NonFiniteFinder(model)
