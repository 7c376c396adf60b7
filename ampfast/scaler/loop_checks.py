"""Mistakes of training loops on which torch is silent, looked for in the first iterations."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ampfast.backends.core import overrides
from ampfast.backends.cuda_graphs import is_capturing
from ampfast.clip import torch_functions
from ampfast.errors import not_compiled, warn_caller
from ampfast.gradients import READY, grads_of
from ampfast.scaler.overrides import replace_method

# Updates, of all scalers, after which the checks are over.
_ITERATIONS = 32
# Iterations in a row without the scale, after which scale() counts as forgotten.
_FORGOTTEN = 3

_CLIPPED = (
    "clip_grad_norm_() clipped gradients of this {} that were not unscaled yet: they are "
    "multiplied by the scale, {:g}, and max_norm is not. Call scaler.unscale_(optimizer) before."
)
_UNUSED = (
    "step() of this {} divides gradients by the scale, {:g}, but scale() was not called in "
    f"{_FORGOTTEN} iterations: is a loss.backward() to be scaler.scale(loss).backward()?"
)


class _Loop:
    """What the loop of one scaler did.

    Attributes:
        has_read: Whether it ever read or set the scale, by which it may multiply or divide.
        has_scaled: Whether it ever called `scale`.
        has_used: Whether it did one of both in this iteration.
        unused: The last iterations in a row in which it used no scale.
    """

    has_read = has_scaled = has_used = False
    unused = 0


class _LoopChecks:
    """Watches the methods of a class of scalers, and torch's clipping, for some iterations."""

    def __init__(self, kind: Any) -> None:
        self._kind, self._is_over = kind, False
        self._loops: weakref.WeakKeyDictionary[Any, _Loop] = weakref.WeakKeyDictionary()
        self._updates, self._told = 0, set[str]()
        # By the id of a gradient that was clipped: a reference to it, its version, and the limit.
        self._clipped: dict[int, tuple[weakref.ref[Tensor], int, float]] = {}
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        seen: dict[str, Callable[..., None]] = {"scale": self._scales, "_end_iteration": self._ends}
        seen |= dict.fromkeys(("get_scale", "_set_scale"), self._reads)
        seen |= dict.fromkeys(("unscale_", "step", "clip_grad_norm_"), self._before_division)
        for name, see in seen.items():
            self._replace(kind, name, self._watched(vars(kind)[name], see))
        torch_functions.on_clip = self.see_clip
        for name in ("clip_grad_norm_", "clip_grads_with_norm_"):
            torchs = getattr(torch_functions, f"torch_{name}")
            for place in (torch.nn.utils, torch.nn.utils.clip_grad):
                if vars(place).get(name) is torchs:  # patch() may have replaced it
                    self._replace(place, name, self._seen_clipping(torchs))

    def _replace(self, place: Any, name: str, ours: Any) -> None:
        self._replaced.append((place, name, vars(place)[name], ours))
        replace_method(place, name, ours)

    def remove(self) -> None:
        """Ends the checks, and what they cost."""
        self._is_over, self._clipped = True, {}
        torch_functions.on_clip = None
        for place, name, original, ours in self._replaced:
            if vars(place)[name] is ours:
                replace_method(place, name, original)

    def _watched(self, method: Any, see: Callable[..., None]) -> Any:
        @wraps(method)
        def call(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            is_off = self._is_over or torch.compiler.is_compiling() or not scaler._enabled
            # A guard's scale is 1, and a constant one may be known to the loop.
            if not is_off and scaler._dynamic and not is_capturing():
                see(scaler, self._loops.setdefault(scaler, _Loop()), *args, **kwargs)
            return method(scaler, *args, **kwargs)

        return call if see in (self._scales, self._reads) else not_compiled(call)

    def _seen_clipping(self, function: Any) -> Any:
        @wraps(function)
        def call(parameters: Any, max_norm: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_over or torch.compiler.is_compiling():
                return function(parameters, max_norm, *args, **kwargs)
            listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            # torch warns of an empty generator.
            result = function(listed or parameters, max_norm, *args, **kwargs)
            self.see_clip(listed, max_norm)
            return result

        return call

    def see_clip(self, params: list[Tensor], max_norm: Any) -> None:
        """Keeps which gradients were clipped, and to which norm."""
        if isinstance(max_norm, Real):
            for grad in grads_of(params):
                if not grad.is_inference():  # which has no version
                    self._clipped[id(grad)] = weakref.ref(grad), grad._version, float(max_norm)

    def _scales(self, scaler: Any, loop: _Loop, *_: Any, **__: Any) -> None:
        loop.has_scaled = loop.has_used = True

    def _reads(self, scaler: Any, loop: _Loop, *_: Any) -> None:
        loop.has_read = loop.has_used = True

    def _before_division(
        self, scaler: Any, loop: _Loop, optimizer: Any, *_: Any, **__: Any
    ) -> None:
        if overrides(scaler, self._kind._originals[0]):
            return  # who knows what it divides
        for each in optimizer if isinstance(optimizer, (list, tuple)) else (optimizer,):
            turn = scaler._per_optimizer_states.get(id(each))
            if turn is not None and turn["stage"] is not READY:
                continue
            groups = getattr(each, "param_groups", ())
            params = (param for group in groups for param in group["params"])
            known = ((grad, self._clipped.get(id(grad))) for grad in grads_of(params))
            # Of gradients that nothing has written since.
            limits = [k[2] for grad, k in known if k and k[0]() is grad and k[1] == grad._version]
            if limits and loop.has_used and not loop.has_read:
                self._tell(_CLIPPED, each, scaler, least=max(limits))

    def _ends(self, scaler: Any, loop: _Loop, **_: bool) -> None:
        loop.unused = 0 if loop.has_used else loop.unused + 1
        # One that overrides scale() may scale without ours.
        is_ours = type(scaler).scale is vars(self._kind)["scale"] and "scale" not in vars(scaler)
        if loop.unused >= _FORGOTTEN and loop.has_scaled and is_ours:
            for optimizer, _ in scaler._records.in_iteration(scaler._per_optimizer_states):
                self._tell(_UNUSED, optimizer, scaler)
        loop.has_used = False
        self._updates += 1
        if self._updates >= _ITERATIONS:
            self.remove()

    def _tell(self, text: str, optimizer: Any, scaler: Any, least: float = 1.0) -> None:
        """Warns once, unless the scale is 1 or a limit is as large, as one times the scale is."""
        if text not in self._told and scaler._scale is not None:
            scale = float(scaler._scale)
            if scale > max(least, 1.0):
                self._told.add(text)
                warn_caller(text.format(type(optimizer).__name__, scale))


_current: _LoopChecks | None = None


def start(kind: Any) -> None:
    """Looks for mistakes of loops with a class of scalers from now on; ends earlier checks."""
    global _current
    stop()
    _current = _LoopChecks(kind)


def stop() -> None:
    """Ends the checks."""
    if _current is not None:
        _current.remove()
