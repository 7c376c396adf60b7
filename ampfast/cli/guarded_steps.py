"""A guard for each torch optimizer of a program, for `run --guard`."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from ampfast.backends.cuda_graphs import is_capturing
from ampfast.cli.scaler_clock import ScalerClock
from ampfast.scaler.step_guard import StepGuard

_CLOSURE = (
    "ampfast: steps of {} with a closure are not guarded (for Lightning, which passes closures, "
    "see ampfast.callbacks.guard)"
)
_CLIPS = {"clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"}


class _Guard(StepGuard):
    """One that the program did not make."""


class GuardedSteps:
    """Guards the outermost step of every torch optimizer that is made from now on.

    A clip by torch's functions is preceded by the check, so that a spike is one before it. Where
    the program has an enabled scaler, this one decides.

    Args:
        clock: What sees the scalers of the program.
        given: Arguments of each guard.
    """

    def __init__(self, clock: ScalerClock, given: dict[str, Any]) -> None:
        # Whether a thread is in a guarded step.
        self._clock, self._given, self._inside = clock, given, threading.local()
        self._said: set[type] = set()
        self._guards = weakref.WeakKeyDictionary[torch.optim.Optimizer, StepGuard]()
        kind: Any = torch.optim.Optimizer
        hooked, init = kind.profile_hook_step, kind.__init__
        kind.profile_hook_step = staticmethod(lambda step: self._guarded(hooked(step)))

        @wraps(init)
        def made(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            init(optimizer, *args, **kwargs)
            self._guard_of(optimizer)

        kind.__init__ = made
        for place in (torch.nn.utils, torch.nn.utils.clip_grad):
            for name in _CLIPS & vars(place).keys():
                setattr(place, name, self._checked(getattr(place, name)))

    def _guard_of(self, optimizer: torch.optim.Optimizer) -> StepGuard:
        if optimizer not in self._guards:  # as is a copy, which no constructor made
            # Of 16-bit models, too, which train without a scaler.
            self._guards[optimizer] = _Guard(allow_fp16=True, **self._given)
        return self._guards[optimizer]

    def _is_off(self) -> bool:
        if torch.compiler.is_compiling() or is_capturing():
            return True
        scalers = [one.scaler for one in list(self._clock.records.values())]
        return any(each._enabled and not isinstance(each, _Guard) for each in scalers)

    def _guarded(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(step)
        def call(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(self._inside, "step", False) or self._is_off():
                return step(optimizer, *args, **kwargs)
            if any(callable(each) for each in (*args, *kwargs.values())):
                if type(optimizer) not in self._said:
                    self._said.add(type(optimizer))
                    print(_CLOSURE.format(type(optimizer).__name__), file=sys.stderr)
                return step(optimizer, *args, **kwargs)
            guard = self._guard_of(optimizer)
            kwargs.pop("closure", None)  # a scaler refuses the name, also for None
            self._inside.step = True
            try:
                result = guard.step(optimizer, *args, **kwargs)
            finally:
                self._inside.step = False
            guard.update()
            return result

        return call

    def _checked(self, clip: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(clip)
        def call(parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
            if self._is_off():
                return clip(parameters, *args, **kwargs)
            listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            clipped = set(map(id, listed))
            for optimizer, guard in list(self._guards.items()):
                groups = optimizer.param_groups
                if any(id(each) in clipped for group in groups for each in group["params"]):
                    # Again, where gradients are clipped after each of several backward().
                    guard._per_optimizer_states.pop(id(optimizer), None)
                    guard.unscale_(optimizer)
            return clip(listed, *args, **kwargs)

        return call
