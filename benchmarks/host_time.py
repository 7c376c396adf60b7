"""Host time of the scaler's calls, warm: parameters of four elements leave only its overhead."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import ampfast

from .device_time import Queue, host_timer
from .harness import Contender, Effort, Job, Measured, assert_same, interleave
from .results import Goal, Row

ELEMENTS = 4
# By parameters: limit of ampfast's `unscale_` and `update` as a fraction of torch's time.
GOALS = {1000: 0.04, 160: 0.06, 10: 0.15}

UNSCALE = "unscale_ + update"
STEP = "step + update"
FUSED = "step + update, fused"
# Paths without a counterpart in torch are compared with the calls that they replace.
REPLACES = {
    "step_and_update": STEP,
    "step_and_update, fused": FUSED,
}


class NoOptimizer(torch.optim.Optimizer):
    """Optimizer that leaves its parameters alone."""

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Callable[[], float] | None = None) -> None:
        return None


class NoFusedOptimizer(NoOptimizer):
    """The same with `grad_scale` and `found_inf`."""

    _step_supports_amp_scaling = True


@dataclass
class Subject:
    """Scaler with an optimizer of its own; equal seeds give equal gradients."""

    scaler: torch.amp.GradScaler
    optimizer: NoOptimizer

    @classmethod
    def make(
        cls,
        scaler_class: type[torch.amp.GradScaler],
        optimizer_class: type[NoOptimizer],
        parameters: int,
        device: torch.device,
    ) -> Subject:
        generator = torch.Generator(device).manual_seed(parameters)
        optimizer = optimizer_class(
            [torch.zeros(ELEMENTS, device=device, requires_grad=True) for _ in range(parameters)]
        )
        scaler = scaler_class(device.type, init_scale=2.0)
        scaler.scale(torch.zeros((), device=device))
        subject = cls(scaler, optimizer)
        for parameter in subject.parameters:
            parameter.grad = torch.empty(ELEMENTS, device=device).uniform_(
                0.5, 2.0, generator=generator
            )
        return subject

    @property
    def parameters(self) -> list[Tensor]:
        return self.optimizer.param_groups[0]["params"]

    def set_scale(self, call: int) -> None:
        """Doubles gradients in one call and halves them in the next, so that they do not drift."""
        self.scaler._scale.fill_(0.5 if call % 2 else 2.0)

    def caller(self, path: str) -> Callable[[int], None]:
        """Calls of a path, as in a training loop."""
        scaler, optimizer = self.scaler, self.optimizer

        def unscale_and_update(call: int) -> None:
            scaler.unscale_(optimizer)
            scaler.update()

        def step_then_update(call: int) -> None:
            scaler.step(optimizer)
            scaler.update()

        def step_and_update(call: int) -> None:
            scaler.step_and_update(optimizer)

        if path in REPLACES:
            return step_and_update
        return unscale_and_update if path == UNSCALE else step_then_update

    def state(self) -> list[Tensor]:
        gradients = [parameter.grad for parameter in self.parameters]
        return [*gradients, self.scaler._scale, self.scaler._growth_tracker]


def jobs(effort: Effort, device: torch.device, queue: Queue | None) -> list[Job]:
    """One job for each number of parameters and kind of step; `queue` is that of a GPU."""
    return [
        Job(
            f"{parameters} parameters, {paths[0]}",
            functools.partial(measure, parameters, paths, device, effort, queue),
        )
        for parameters in GOALS
        for paths in (
            (UNSCALE,),
            (STEP, "step_and_update"),
            (FUSED, "step_and_update, fused"),
        )
    ]


def measure(
    parameters: int,
    paths: tuple[str, ...],
    device: torch.device,
    effort: Effort,
    queue: Queue | None = None,
) -> Measured:
    """Times ampfast's paths against torch's first one; on a GPU until the calls return.

    Raises:
        AssertionError: If gradients, scale or growth tracker are not torch's.
    """
    backend = ampfast.backends.default_for(device)
    optimizer_class = NoFusedOptimizer if paths[0] == FUSED else NoOptimizer
    for path in paths:
        assert_parity(path, optimizer_class, parameters, device)

    contenders = []
    for provider, provider_paths in (("torch", paths[:1]), (backend, paths)):
        scaler_class = torch.amp.GradScaler if provider == "torch" else ampfast.GradScaler
        for path in provider_paths:
            subject = Subject.make(scaler_class, optimizer_class, parameters, device)
            contenders.append(Contender(path, provider, subject.caller(path), subject.set_scale))
    if queue is None:
        samples = interleave(contenders, effort)
    else:
        samples = interleave(contenders, effort, timer=host_timer(queue))

    measured = Measured()
    list_bytes = parameters * ELEMENTS * torch.float32.itemsize
    for contender in contenders:
        key = contender.key
        seconds = samples.spread(*key)
        row = Row(
            subject="host",
            case=f"{parameters}x{ELEMENTS}",
            dtype="float32",
            path=contender.path,
            provider=contender.provider,
            host_us_p20=seconds.p20 * 1e6,
            host_us_p50=seconds.p50 * 1e6,
            host_us_p80=seconds.p80 * 1e6,
            list_bytes=list_bytes,
            vs_torch=None
            if contender.provider == "torch"
            else samples.ratio((paths[0], "torch"), key).p50,
        )
        if queue is None:
            # On a CPU the call does the work itself.
            milliseconds = {f"ms_p{q}": getattr(seconds, f"p{q}") * 1e3 for q in (20, 50, 80)}
            row = replace(row, **milliseconds)
        measured.rows.append(row)
    # Set for the kernels of a CPU.
    if paths[0] == UNSCALE and queue is None:
        ratio = samples.ratio((UNSCALE, backend), (UNSCALE, "torch"))
        measured.goals.append(
            Goal.of_spread(
                f"{UNSCALE}, host time over torch's",
                f"{parameters}x{ELEMENTS}",
                "float32",
                "<=",
                GOALS[parameters],
                ratio,
            )
        )
    return measured


def assert_parity(
    path: str, optimizer_class: type[NoOptimizer], parameters: int, device: torch.device
) -> None:
    """Compares states after a path without an infinity, and after one with an infinity."""
    theirs = Subject.make(torch.amp.GradScaler, optimizer_class, parameters, device)
    ours = Subject.make(ampfast.GradScaler, optimizer_class, parameters, device)
    for bad in (False, True):
        for subject in (theirs, ours):
            if bad:
                subject.parameters[parameters // 2].grad[-1] = torch.inf
        theirs.caller(REPLACES.get(path, path))(0)
        ours.caller(path)(0)
        what = f"{path} over {parameters} parameters, {'with' if bad else 'without'} an infinity"
        assert_same(ours.state(), theirs.state(), what)
