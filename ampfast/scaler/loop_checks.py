"""Mistakes of training loops on which torch is silent, looked for in the first iterations."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import wraps
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ampfast.backends.core import overrides
from ampfast.backends.cuda_graphs import is_capturing
from ampfast.clip import torch_functions
from ampfast.errors import not_compiled, warn_caller
from ampfast.gradients import READY, is_unscaled
from ampfast.scaler.overrides import replace_method

# Updates, of all scalers, after which the checks are over.
_ITERATIONS = 32
# Iterations in a row without the scale, after which scale() counts as forgotten.
_FORGOTTEN = 3

_CLIPPED = (
    "{} clipped gradients of this {} that were not unscaled yet: they are multiplied by the scale, "
    "{:g}, and max_norm is not. Call scaler.unscale_(optimizer) before the clip."
)
_UNUSED = (
    "{} of this {} divides gradients by the scale, {:g}, but scale() was not called in "
    f"{_FORGOTTEN} iterations: is a loss.backward() to be scaler.scale(loss).backward()?"
)
_TWICE = (
    "{} divides gradients of this {} by the scale, {:g}, a second time: unscale_() has done it "
    "before the last update(), and no backward() has written them since. Call unscale_() only in "
    "iterations that call step()."
)


class _Loop:
    """What the loop of one scaler did.

    Attributes:
        has_read: Whether it ever read or set the scale, by which it may multiply or divide.
        has_scaled: Whether it ever called `scale`.
        has_used: Whether it did one of both in this iteration.
        unused: The last iterations in a row in which it used no scale.
    """

    def __init__(self) -> None:
        self.has_read = self.has_scaled = self.has_used = False
        self.unused = 0


class _LoopChecks:
    """Watches the methods of a class of scalers, and torch's clipping, for some iterations."""

    def __init__(self, kind: Any, *, is_whole: bool) -> None:
        self._kind, self._is_whole, self._is_over = kind, is_whole, False
        self._loops: weakref.WeakKeyDictionary[Any, _Loop] = weakref.WeakKeyDictionary()
        self._updates, self._told = 0, set[str]()
        # By the id of a gradient: a reference to it, its version, and the limit to which it was
        # clipped, or None if it was unscaled and not stepped.
        self._written: dict[int, tuple[weakref.ref[Tensor], int, float | None]] = {}
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        seen: dict[str, Callable[..., None]] = {"scale": self._scales, "_end_iteration": self._ends}
        seen |= dict.fromkeys(("get_scale", "_set_scale"), self._reads)
        seen |= dict.fromkeys(("unscale_", "step", "clip_grad_norm_"), self._before_division)
        for name, see in seen.items():
            self._replace(kind, name, self._watched(vars(kind)[name], see))
        torch_functions.on_clip = self.see_clip
        if is_whole:
            utils = torch.nn.utils
            for place, name in (
                (utils, "clip_grad_norm_"),
                (utils.clip_grad, "clip_grad_norm_"),
                (utils, "clip_grads_with_norm_"),
            ):
                torchs = getattr(place, name)
                if torchs is getattr(torch_functions, f"torch_{name}"):
                    self._replace(place, name, self._seen_clipping(torchs))

    def _replace(self, place: Any, name: str, ours: Any) -> None:
        self._replaced.append((place, name, vars(place)[name], ours))
        (replace_method if place is self._kind else setattr)(place, name, ours)

    def remove(self) -> None:
        """Ends the checks, and what they cost."""
        if self._is_over:
            return
        self._is_over, self._written = True, {}
        torch_functions.on_clip = None
        for place, name, original, ours in self._replaced:
            if vars(place)[name] is ours:
                (replace_method if place is self._kind else setattr)(place, name, original)

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
            self._keep(_grads_of(params), float(max_norm))

    def _keep(self, grads: list[Tensor], limit: float | None) -> None:
        for grad in grads:
            self._written[id(grad)] = weakref.ref(grad), grad._version, limit

    def _limits_of(self, grads: list[Tensor]) -> list[float | None]:
        """The limit, or None, of each gradient that nothing has written since it was kept."""
        found = ((grad, self._written.get(id(grad))) for grad in grads)
        return [k[2] for grad, k in found if k and k[0]() is grad and k[1] == grad._version]

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
            grads = _grads_of_optimizer(each)
            found = self._limits_of(grads)
            if grads and found == [None] * len(grads):
                self._tell(_TWICE, "unscaling", each, scaler)
            limits = [limit for limit in found if limit is not None]
            if limits and loop.has_used and not loop.has_read:
                self._tell(_CLIPPED, "clip_grad_norm_()", each, scaler, least=max(limits))

    def _ends(self, scaler: Any, loop: _Loop, **_: bool) -> None:
        loop.unused = 0 if loop.has_used else loop.unused + 1
        turns = scaler._records.in_iteration(scaler._per_optimizer_states)
        for optimizer, turn in turns if self._is_whole else ():
            if is_unscaled(turn):
                self._keep(_grads_of_optimizer(optimizer), None)
            # One that overrides scale() may scale without ours.
            is_ours = type(scaler).scale is vars(self._kind)["scale"] and "scale" not in vars(
                scaler
            )
            if loop.unused >= _FORGOTTEN and loop.has_scaled and is_ours:
                self._tell(_UNUSED, "step()", optimizer, scaler)
        loop.has_used = False
        self._updates += 1
        if self._updates >= _ITERATIONS:
            self.remove()

    def _tell(self, text: str, call: str, optimizer: Any, scaler: Any, least: float = 1.0) -> None:
        """Warns once, unless the scale is 1 or a limit is as large, as one times the scale is."""
        if text not in self._told and scaler._scale is not None:
            scale = float(scaler._scale)
            if scale > max(least, 1.0):
                self._told.add(text)
                warn_caller(text.format(call, type(optimizer).__name__, scale))


def _grads_of(params: Iterable[Tensor]) -> list[Tensor]:
    grads = []
    for param in params:
        # Reading the gradient of a non-leaf tensor warns.
        grad = param.grad if param.is_leaf or param.retains_grad else None
        if grad is not None and not grad.is_inference():  # which has no version
            grads.append(grad)
    return grads


def _grads_of_optimizer(optimizer: Any) -> list[Tensor]:
    groups = getattr(optimizer, "param_groups", ())
    return _grads_of(param for group in groups for param in group["params"])


_current: _LoopChecks | None = None


def start(kind: Any, *, is_whole: bool = False) -> None:
    """Looks for mistakes from now on; ends earlier checks.

    Args:
        kind: The class of scalers.
        is_whole: Whether to look for the mistakes of which `run` warns, too, and to watch torch's
            own clipping functions; else `patch(clip_grad_norm=True)` has replaced them.
    """
    global _current
    stop()
    _current = _LoopChecks(kind, is_whole=is_whole)


def stop() -> None:
    """Ends the checks."""
    global _current
    if _current is not None:
        _current.remove()
        _current = None
