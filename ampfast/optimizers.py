"""Optimizers: who divides in its step, signatures, momentum buffers, values by optimizer."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain
from types import MethodType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ampfast import fused_trial
from ampfast.backends import core
from ampfast.capture import is_capturing
from ampfast.errors import add_note, warn_caller
from ampfast.master_weights import MasterWeights

Value = TypeVar("Value")

# By the id of a callable that lives: reading a signature takes longer than checking a thousand
# gradients.
_signatures: dict[int, tuple[weakref.ref[Callable[..., Any]], bool]] = {}


def takes_grad_scaler(step: Callable[..., Any]) -> bool:
    """Whether an optimizer's step takes torch's legacy keyword `grad_scaler`."""
    # Each access makes a new bound method; a schedule puts a plain function on the instance.
    function = step.__func__ if type(step) is MethodType else step
    known = _signatures.get(id(function))
    if known is not None and known[0]() is function:
        return known[1]
    takes = "grad_scaler" in inspect.signature(step).parameters
    key = id(function)
    with suppress(TypeError):  # Some callables take no weak reference.
        _signatures[key] = weakref.ref(function, partial(_signatures.pop, key)), takes
    return takes


def legacy_step(
    optimizer: Any, scaler: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> float | None:
    """Steps an optimizer of torch's older contract, which unscales by the given scaler."""
    warn_caller(
        "GradScaler is going to stop passing itself as a keyword argument to the passed "
        "optimizer. In the near future GradScaler registers `grad_scale: Tensor` and "
        "`found_inf: Tensor` to the passed optimizer and let the optimizer use them directly.",
        FutureWarning,
    )
    result: float | None = optimizer.step(*args, **{**kwargs, "grad_scaler": scaler})
    return result


def lacks_momentum(optimizer: torch.optim.SGD) -> bool:
    """Whether a skipped step of this fused SGD would leave a momentum buffer uninitialised.

    torch allocates the buffer before its kernel, which does not write it in a skipped step.
    """
    state = optimizer.state if isinstance(optimizer.state, dict) else dict(optimizer.state)
    params = chain.from_iterable(
        group["params"]
        for group in optimizer.param_groups
        if group.get("fused") and group["momentum"] != 0
    )
    # All groups at once, since the whole state is read.
    return core.lacks_state(params, state, "momentum_buffer")


def no_inf_checks(optimizer: torch.optim.Optimizer) -> AssertionError:
    """torch's error for an optimizer without a checked gradient, with a note on the reason."""
    groups = optimizer.param_groups
    params = [param for group in groups for param in group["params"] if isinstance(param, Tensor)]
    if not params:
        why = "The optimizer has no parameters."
    # Reading the gradient of a non-leaf tensor warns.
    elif not any((p.is_leaf or p.retains_grad) and p.grad is not None for p in params):
        frozen = sum(not param.requires_grad for param in params)
        why = (
            f"None of the optimizer's {len(params)} parameters has a gradient ({frozen} of them do "
            "not require one): backward() was not called, zero_grad() ran in between, or the "
            "loss does not depend on them."
        )
    else:
        why = "The gradients came after unscale_(), or an override of it recorded no check."
    return add_note(AssertionError("No inf checks were recorded for this optimizer."), why)


def explain(error: AttributeError, given: object, *needed: str) -> None:
    """Adds a note, once, to the error if the object lacks an attribute that is needed of it."""
    lacks = not all(hasattr(given, name) for name in needed)
    if lacks and not getattr(error, "__notes__", None):
        kind = f"{type(given).__module__}.{type(given).__qualname__}"
        add_note(error, f"expected an optimizer, an object with param_groups and step, got {kind}")


class ByOptimizer(Generic[Value]):
    """Values keyed by optimizer identity, since ids are reused.

    Optimizers are held by weak reference, or, if they take none, as long as this object.

    Attributes:
        values: By the id of an optimizer that lives.
    """

    def __init__(self) -> None:
        self.values: dict[int, Value] = {}
        self._references: dict[int, list[Callable[[], object]]] = {}

    def __iter__(self) -> Iterator[tuple[Any, Value]]:
        """Iterates over living optimizers and their values, in order of their first record."""
        for key, references in list(self._references.items()):
            optimizer = references[0]()
            if optimizer is not None:
                yield optimizer, self.values[key]

    def record(self, optimizer: object, value: Value) -> None:
        """Sets the value of an optimizer."""
        key, values, references = id(optimizer), self.values, self._references
        values[key] = value
        if key in references:
            return
        # No Python code, in which an interrupt would be lost and with it the end of the record.
        ends = [partial(each.pop, key) for each in (values, references)]
        try:
            references[key] = [weakref.ref(optimizer, end) for end in ends]
        except TypeError:
            references[key] = [lambda: optimizer]

    def get(self, optimizer: object) -> Value | None:
        """Returns the value of this object, or None."""
        return self.values.get(id(optimizer))


_STATEMENT, _HOOKS = "_step_supports_amp_scaling", "_optimizer_step_pre_hooks"
_UNSAID = object()

# By optimizer: its class and parameters when it was last judged, and the answer.
_judged = ByOptimizer[tuple[list[Any], bool]]()
_warned: set[tuple[Any, ...]] = set()


def divides_by_itself(optimizer: Any) -> bool:
    """Whether an optimizer's own step divides by `grad_scale` and skips by `found_inf`.

    The object that gets these two attributes must say so itself: not another one, to which its
    `__getattr__` or a property leads, or from which it has its attributes. And torch's kernels must
    do it. Any other optimizer gets unscaled gradients, and the host skips its step.
    """
    try:
        # vars() would ask __getattr__ where there is no __dict__.
        own: dict[str, Any] = object.__getattribute__(optimizer, "__dict__")
    except AttributeError:
        own = {}
    stated = own.get(_STATEMENT, _UNSAID)
    if stated is _UNSAID:
        stated = getattr(type(optimizer), _STATEMENT, False)
        if hasattr(type(stated), "__get__"):
            is_own = _HOOKS in own and _is_alone(optimizer, own)
            if isinstance(stated, property) and not is_own:
                return False
            stated = getattr(optimizer, _STATEMENT, False)
    if not stated:
        return False
    if not isinstance(optimizer, torch.optim.Optimizer):
        return _is_alone(optimizer, own)
    seen: list[Any] = [type(optimizer), fused_trial.operators(torch)]
    for group in optimizer.param_groups:
        params = group["params"]
        first = next(iter(params), None)
        seen += (
            id(params),
            len(params),
            getattr(first, "dtype", None),
            getattr(first, "device", None),
        )
    known = _judged.values.get(id(optimizer))
    if known is not None and known[0] == seen:
        return known[1]
    divides = _is_alone(optimizer, own) or _has_own_hooks(optimizer, own)
    if divides and is_capturing():
        return True  # nothing can be tried here
    divides = divides and _has_right_kernels(optimizer)
    _judged.record(optimizer, (seen, divides))
    return divides


def _is_alone(optimizer: object, own: dict[str, Any]) -> bool:
    """Whether an object has neither another optimizer nor the attributes of one."""
    if _HOOKS in own and not isinstance(optimizer, torch.optim.Optimizer):
        return False
    return not _held_optimizers(optimizer, own)


def _has_own_hooks(optimizer: object, own: dict[str, Any]) -> bool:
    """Whether an optimizer has hooks that torch made for it, and not for one that it holds."""
    hooks, held = own.get(_HOOKS), _held_optimizers(optimizer, own)
    return hooks is not None and all(getattr(each, _HOOKS, None) is not hooks for each in held)


def _held_optimizers(optimizer: object, own: dict[str, Any]) -> list[Any]:
    """Other optimizers among an object's attributes, also by a method of one or in a container.

    Torch's own attributes are containers without optimizers, some with an entry per parameter.
    """
    values: list[Any] = []
    for name, each in own.items():
        if isinstance(each, (list, tuple)) and name != "param_groups":
            values += each
        elif isinstance(each, dict) and name not in ("state", "defaults"):
            values += each.values()
        else:
            values.append(each.__self__ if type(each) is MethodType else each)
    return [
        value
        for value in values
        if hasattr(type(value), "step")
        and value is not optimizer
        and hasattr(value, "param_groups")
        and getattr(value, "__dict__", None) is not own
    ]


def _has_right_kernels(optimizer: torch.optim.Optimizer) -> bool:
    """Whether torch's fused kernels, if the optimizer has these, are right for its parameters."""
    has_masters, kind = False, type(optimizer)
    if isinstance(optimizer, MasterWeights):
        has_masters, kind = True, optimizer._master_weights_of
    torchs = fused_trial.torchs_class(kind)
    if torchs is None:
        return True
    devices: dict[tuple[torch.dtype, str], torch.device] = {}
    for param in chain.from_iterable(group["params"] for group in optimizer.param_groups):
        dtype = torch.float32 if has_masters and param.dtype.itemsize == 2 else param.dtype
        if dtype.is_floating_point:
            devices[dtype, param.device.type] = param.device
    is_right = True
    for (dtype, device_type), device in devices.items():
        try:
            fault = fused_trial.fault_of(torchs, dtype, device)
        except Exception:
            continue  # so does the optimizer's step
        if fault is not None:
            is_right = False
            if (torchs, dtype, device_type) not in _warned:
                _warned.add((torchs, dtype, device_type))
                warn_caller(
                    f"torch's fused {torchs.__name__} {fault}, for {dtype} on {device_type}, as a "
                    "trial has found: the scaler unscales and skips by itself, as for an "
                    "optimizer that is not fused. Make the optimizer with fused=False"
                )
    return is_right
