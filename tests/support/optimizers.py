"""Optimizers of every kind, with their parameters and gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ampfast.optim.fused_support import fault_of
from support.gradients import make_gradient

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.5),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9, weight_decay=0.01),
    "adam": lambda params: torch.optim.Adam(params, lr=0.1),
    "fused_sgd": lambda params: torch.optim.SGD(params, lr=0.5, fused=True),
    "fused_adam": lambda params: torch.optim.Adam(params, lr=0.1, fused=True),
    "fused_adamw": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "fused_adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, fused=True),
}
FUSED = tuple(name for name in OPTIMIZERS if name.startswith("fused"))


def takes_scaled(kind: str, dtype: torch.dtype) -> bool:
    """Whether a fused optimizer gets scaled gradients: its kernel is right for them on a CPU.

    That of torch 2.13's SGD leaves 16-bit parameters where they are.
    """
    made = OPTIMIZERS[kind]([torch.nn.Parameter(torch.ones(1))])
    return fault_of(type(made), dtype, torch.device("cpu")) is None


class RigPlan(NamedTuple):
    """Plan of an optimizer and its parameters' gradients."""

    kind: str
    dtypes: tuple[torch.dtype, ...]
    layouts: tuple[str, ...]
    counted: bool


class Bare:
    """Optimizer without attributes but `step` and `param_groups`, new at every access."""

    def __init__(self, params: list[torch.Tensor]) -> None:
        self._params = params
        self.calls = 0

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [{"params": [p]} for p in self._params]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> int:
        self.calls += 1
        for p in self._params:
            if p.grad is not None:
                p.sub_(p.grad.to_dense(), alpha=0.25)
        return self.calls


class Legacy(torch.optim.SGD):
    """Optimizer of torch's legacy contract: takes the scaler as a keyword and checks by itself."""

    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure: Any = None, *, grad_scaler: Any = None) -> str:
        flags = grad_scaler._check_inf_per_device(self)
        if sum(flag.item() for flag in flags.values()):
            return "skipped"
        scale = grad_scaler._get_scale_async()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.to_dense() / scale.to(p.dtype), alpha=0.25)
        return "stepped"


class Reader(torch.optim.SGD):
    """Optimizer that reads `grad_scale` and `found_inf` from its attributes."""

    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> list[Any]:
        flag, scale = self.found_inf, self.grad_scale
        if not flag:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        grad = p.grad.to_dense()
                        p.sub_(
                            grad if scale is None else grad / scale.to(grad.dtype),
                            alpha=group["lr"],
                        )
        # Without gradients torch sets the integer 0, ampfast a tensor.
        return [float(flag), scale]


KINDS: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    **OPTIMIZERS,
    "bare": Bare,
    "legacy": lambda params: Legacy(params, lr=0.1),
    "reader": lambda params: Reader(params, lr=0.25),
}
READS_SCALE = (*FUSED, "reader")


class Rig:
    """Optimizer, its parameters and the layouts of their gradients."""

    def __init__(self, plan: RigPlan) -> None:
        self.plan = plan
        self.layouts = [*plan.layouts, plan.layouts[0]]
        dtypes = [plan.dtypes[i % len(plan.dtypes)] for i in range(len(plan.layouts))]
        self.params = []
        for layout, dtype in zip(self.layouts, [*dtypes, dtypes[0]], strict=True):
            shape = make_gradient(layout).shape
            self.params.append(torch.nn.Parameter(torch.full(shape, 0.75, dtype=dtype)))
        self.build()

    def build(self) -> None:
        self.calls = 0
        self.fails = False
        self.optimizer = KINDS[self.plan.kind](self.params)
        if self.plan.counted:
            inner = self.optimizer.step

            @functools.wraps(inner)
            def step(*args: Any, **kwargs: Any) -> Any:
                self.calls += 1
                if self.fails:
                    self.fails = False
                    raise ArithmeticError("this step was made to fail")
                return inner(*args, **kwargs)

            self.optimizer.step = step

    @property
    def reads_scale(self) -> bool:
        return self.plan.kind in READS_SCALE

    def forget_attributes(self) -> None:
        # Deliberate difference: torch leaves them if such an optimizer's step raises.
        if self.reads_scale:
            for name in ("grad_scale", "found_inf"):
                self.optimizer.__dict__.pop(name, None)

    def observe(self) -> dict[str, Any]:
        optimizer = self.optimizer
        state = getattr(optimizer, "state", {})
        return {
            "params": [p.detach() for p in self.params],
            "grads": [p.grad for p in self.params],
            "versions": [
                None if p.grad is None or p.grad.is_inference() else p.grad._version
                for p in self.params
            ],
            "state": [dict(state[p]) if p in state else None for p in self.params],
            "calls": self.calls,
            "own": {
                name: optimizer.__dict__[name]
                for name in ("grad_scale", "found_inf")
                if name in optimizer.__dict__
            },
        }
