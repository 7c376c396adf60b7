"""Training twins, single steps of a scaler, and what a step calls and reads."""

from __future__ import annotations

import gc
import io
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ampfast import GradScaler
from support.comparison import TorchScaler
from support.gradients import filled, parameter_with, plant
from support.optimizers import OPTIMIZERS


@dataclass
class Side:
    """Scaler, small model and optimizer; one of two twins."""

    scaler: TorchScaler
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    losses: list[torch.Tensor] = field(default_factory=list)

    def loss(self, seed: int) -> torch.Tensor:
        """Mean square of the model's output for inputs drawn from `seed`."""
        dtype = next(self.model.parameters()).dtype
        return self.model(filled((5, 8), dtype, seed)).float().square().mean()

    def backward(self, seed: int, bad: float | None = None) -> None:
        """Scaled gradients, one of them `bad` if given."""
        self.optimizer.zero_grad()
        loss = self.loss(seed)
        self.losses.append(loss.detach())
        self.scaler.scale(loss).backward()
        if bad is not None:
            plant(next(self.model.parameters()).grad, "middle", bad)

    def train(self, seed: int, bad: float | None = None) -> Any:
        """One ordinary step; returns step's value."""
        self.backward(seed, bad)
        result = self.scaler.step(self.optimizer)
        self.scaler.update()
        return result

    def observe(self) -> dict[str, Any]:
        """State that must be equal on both sides."""
        scaler = self.scaler
        return {
            "losses": self.losses,
            "parameters": [p.detach() for p in self.model.parameters()],
            "gradients": [p.grad for p in self.model.parameters()],
            "optimizer": self.optimizer.state_dict(),
            "scale": scaler._scale if scaler.is_enabled() else None,
            "tracker": scaler._growth_tracker if scaler.is_enabled() else None,
            "state_dict": scaler.state_dict(),
            "records": records_of(scaler) if scaler.is_enabled() else [],
        }


def records_of(scaler: TorchScaler) -> list[Any]:
    """Stages and flags of the optimizers in this iteration."""
    records = scaler._per_optimizer_states.values()
    return [[each["stage"], *each["found_inf_per_device"].values()] for each in records]


def small_model(seed: int = 0) -> torch.nn.Module:
    """Two-layer network with weights drawn from `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(8, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))


def side(
    scaler_type: type[TorchScaler],
    optimizer: str | Callable[..., Any] = "sgd",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **scaler_arguments: Any,
) -> Side:
    """Returns one twin; `optimizer` is a name in `OPTIMIZERS` or makes one from the parameters."""
    scaler_arguments.setdefault("device", "cpu")
    model = small_model(seed).to(dtype)
    make = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    return Side(scaler_type(**scaler_arguments), model, make(list(model.parameters())))


F32_MAX = torch.finfo(torch.float32).max
# An inverse of this scale or a smaller one is infinite in float32.
TINY = 2.0**-128


# Scalers take the fused Adagrad of torch 2.11 for a plain optimizer.
TAKE_GRAD_SCALE = tuple(
    kind
    for kind, make in OPTIMIZERS.items()
    if hasattr(make([torch.nn.Parameter(torch.ones(1))]), "_step_supports_amp_scaling")
)


@dataclass
class Setup:
    """Started scaler, parameters of value 1 with given gradients, and their optimizer."""

    scaler: Any
    optimizer: Any
    parameters: list[torch.nn.Parameter]
    calls: list[tuple[Any, Any]]

    def step(self) -> Any:
        return self.scaler.step(self.optimizer)

    def finite(self) -> bool:
        return all(bool(p.isfinite().all()) for p in self.parameters)

    def untouched(self) -> bool:
        return all(bool((p == 1).all()) for p in self.parameters)

    def values(self) -> list[torch.Tensor]:
        return [p.detach() for p in self.parameters]


def setup(
    scaler_type: type,
    optimizer: str | Callable[..., Any],
    gradients: Sequence[torch.Tensor],
    scale: float = 2.0**16,
    **arguments: Any,
) -> Setup:
    parameters = [parameter_with(g.clone()) for g in gradients]
    make = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    scaler = scaler_type("cpu", init_scale=scale, **arguments)
    scaler.scale(torch.ones(()))
    made = make(parameters)
    calls: list[tuple[Any, Any]] = []
    real_step = made.step

    def counted(_: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append((getattr(made, "grad_scale", None), getattr(made, "found_inf", None)))
        return real_step(*args, **kwargs)

    # Learning rate schedules require a bound method.
    made.step = types.MethodType(counted, made)
    return Setup(scaler, made, parameters, calls)


def floats(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def both(*arguments: Any, **keywords: Any) -> tuple[Setup, Setup]:
    return setup(GradScaler, *arguments, **keywords), setup(TorchScaler, *arguments, **keywords)


def flags(run: Setup) -> list[float]:
    return [t.item() for t in run.scaler._found_inf_per_device(run.optimizer).values()]


def host_reads(call: Callable[[], Any]) -> int:
    """Number of tensor values read by the host in a call, outside of torch's own kernels."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    items = [event for event in profile.events() if event.name == "aten::item"]
    # torch's fused kernels read their step counters in this way on the CPU.
    return sum(not (e.cpu_parent and "_fused_" in e.cpu_parent.name) for e in items)


def through_file(value: Any) -> Any:
    """What `torch.save` writes, as it is loaded."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def step_together(scaler: Any, optimizers: Sequence[Any]) -> list[Any]:
    """What the steps return, before an update: in one call of ours, in several of torch's."""
    if isinstance(scaler, GradScaler):
        return scaler.step_and_update(*optimizers)
    results = [scaler.step(optimizer) for optimizer in optimizers]
    scaler.update()
    return results


def take_step(
    scaler: Any, *optimizers: Any, way: str = "step", max_norm: float = 0.5
) -> torch.Tensor | None:
    """Steps and updates in a way; returns the last norm if one was asked for.

    "unscale", "norm" or "clip" precede the step, where "clip 3" is one by the norm of that order;
    "defer" is a clip with `in_place=False`, "together" `step_and_update`.
    """
    (name, _, order), norm = way.partition(" "), None
    if name == "together":
        step_together(scaler, optimizers)
        return None
    for optimizer in optimizers:
        if name == "unscale":
            scaler.unscale_(optimizer)
        elif name == "norm":
            norm = scaler.grad_norm(optimizer)
        elif name in ("clip", "defer"):
            in_place, p = name == "clip", float(order or 2)
            norm = scaler.clip_grad_norm_(optimizer, max_norm, p, in_place=in_place)
        scaler.step(optimizer)
    scaler.update()
    return norm


def adamw(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1, **options)


class Training:
    """Parameters of two zeros, an optimizer for each, their scaler, and gradients of given norms.

    A first loss is scaled.

    Attributes:
        way: How `take_step` ends an iteration.
    """

    def __init__(self, scaler: Any, make: Any = adamw, count: int = 1, way: str = "step") -> None:
        self.scaler, self.way = scaler, way
        kinds = [make] * count if callable(make) else make
        self.params = [torch.nn.Parameter(torch.zeros(2)) for _ in kinds]
        self.optimizers = [kind([param]) for kind, param in zip(kinds, self.params, strict=True)]
        self.param, self.optimizer = self.params[0], self.optimizers[0]
        scaler.scale(torch.ones(()))

    def backward(self, *norms: float, first: int = 0) -> None:
        """Scaled gradients of the parameters from number `first` on."""
        for param, norm in zip(self.params[first:], norms, strict=False):
            param.grad = self.scaler.scale(torch.tensor([0.6 * norm, 0.8 * norm]))

    def step(self, *norms: float) -> Training:
        """Steps the first parameter, once for each norm."""
        for norm in norms:
            self.backward(norm)
            take_step(self.scaler, self.optimizer, way=self.way)
        return self

    def observe(self) -> dict[str, Any]:
        """State to compare with that of another training."""
        return {
            "params": [[param.detach(), param.grad] for param in self.params],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "scaler": [self.scaler._scale, self.scaler._growth_tracker, self.scaler.state_dict()],
            "records": records_of(self.scaler),
        }


RANKS = str(Path(dist.__file__).parent)


def frames_of(call: Callable[[], object], *, but: Callable[..., Any]) -> list[str]:
    """Python functions entered by a call, without one of them, torch.distributed's, and callees."""
    names: list[str] = []
    left_out: list[Any] = []
    code = getattr(but, "__func__", but).__code__

    def profile(frame: Any, event: str, _: object) -> None:
        if event == "call":
            if left_out or frame.f_code is code or frame.f_code.co_filename.startswith(RANKS):
                left_out.append(frame)
            else:
                names.append(frame.f_code.co_qualname)
        elif event == "return" and left_out:
            left_out.pop()

    gc.disable()  # what it ends may run Python
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return names[1:]  # `call` itself
