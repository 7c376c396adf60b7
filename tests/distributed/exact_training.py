"""Training with bitwise equal gradients for any split of a batch, and its trace."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from support.comparison import TorchScaler
from support.steps import take_step
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ampfast import GradScaler

# Shards of a weight are whole vectors: tail elements may be rounded differently.
WIDTH = 16
ROWS = (7, 5, 1, 2)
SAMPLES = 2
# The scale grows and backs off, twice in a row.
STEPS = 20
# So that the scale also grows between overflows.
SETTINGS: dict[str, Any] = {"device": "cpu", "init_scale": 2.0**6, "growth_interval": 7}
# Ranks that overflow, by step; some twice in a row.
OVERFLOWS: Mapping[int, tuple[int, ...]] = {0: (0,), 11: (1,), 12: (0, 1, 2, 3)}

SCALERS: dict[str, Any] = {"ours": GradScaler, "torch": TorchScaler}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=2.0**-9),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.003, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    # Factors that make the update exact at any position of an element.
    "fused_sgd": lambda params: torch.optim.SGD(params, lr=2.0**-9, momentum=0.5, fused=True),
    "fused_adam": lambda params: torch.optim.Adam(params, lr=0.01, fused=True),
    "fused_adamw": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
}


class Heads(nn.Module):
    """Parallel linear maps with the L1 error as their loss.

    The gradients are sums of products of a sign and a small integer: exact in any order.
    """

    def __init__(self, rows: Iterable[int] = ROWS) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, count) for count in rows)
        for parameter in self.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.cat([head(inputs) for head in self.heads], dim=1)


@dataclass
class Batch:
    """Inputs and targets of one rank."""

    inputs: Tensor
    targets: Tensor

    def loss(self, model: nn.Module) -> Tensor:
        outputs = model(self.inputs)
        return (outputs - self.targets[:, : outputs.shape[1]]).abs().sum()


def batch_of(step: int, part: int, rank: int, overflows: bool) -> Batch:
    """Random integers, with targets so far apart that no error is near 0."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + part)
    inputs = torch.randint(-3, 4, (SAMPLES, WIDTH), generator=generator).float()
    targets = torch.randint(-40, 40, (SAMPLES, sum(ROWS)), generator=generator) + 0.5
    if overflows:
        inputs[-1, rank] = torch.inf
    return Batch(inputs, targets)


def batches_of(
    ranks: Sequence[int], overflows: Mapping[int, tuple[int, ...]] = OVERFLOWS
) -> Callable[[int, int], Batch]:
    """Joint batches of these ranks, by step and microbatch."""

    def joined(step: int, part: int) -> Batch:
        each = [batch_of(step, part, rank, rank in overflows.get(step, ())) for rank in ranks]
        return Batch(torch.cat([b.inputs for b in each]), torch.cat([b.targets for b in each]))

    return joined


def whole(tensor: Tensor) -> Tensor:
    """Full tensor of a distributed one; a collective call."""
    tensor = tensor.detach()
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor.clone()


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a distributed tensor, or the tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def plant(params: Iterable[Tensor], step: int = 0) -> None:
    """Makes one element of this rank's first gradient with local elements infinite."""
    grads = [local(param.grad) for param in params if param.grad is not None]
    for grad in [grad for grad in grads if grad.numel()][:1]:
        grad.view(-1)[step % grad.numel()] = torch.inf


@dataclass
class Trace:
    """Record of a training.

    Attributes:
        steps: Scale, growth tracker and whether the step was skipped, of every step.
        norms: Norms returned by clipping.
        parameters: Final parameters.
    """

    steps: list[tuple[float, int, bool]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)


# Ends of an iteration, see `take_step`; "accumulate" is a step after two backward passes.
WAYS = ("step", "unscale", "together", "accumulate", "clip", "defer")
# Every optimizer, and every way with one plain and one fused optimizer.
PAIRS = [
    *((kind, "step") for kind in OPTIMIZERS),
    *(("momentum", way) for way in ("unscale", "together", "accumulate", "clip")),
    *(("fused_adamw", way) for way in ("unscale", "together", "accumulate", "clip", "defer")),
]


def train(
    model: Any,
    optimizer: Any,
    scaler: Any,
    batches: Callable[[int, int], Batch],
    way: str = "step",
    *,
    divisor: float = 1.0,
    params: Callable[[], Sequence[Tensor]] | None = None,
    prepare: Callable[[int], None] | None = None,
    every_part: Callable[[bool], contextlib.AbstractContextManager[None]] | None = None,
) -> Trace:
    """Trains and records a trace.

    Args:
        model: Module for `Batch.loss`.
        optimizer: Optimizer of the model's parameters.
        scaler: Ours or torch's.
        batches: Batches by step and microbatch.
        way: One of `WAYS`.
        divisor: Divisor of the loss: the number of ranks if their batches are joined.
        params: Returns the parameters to record; those of the model by default.
        prepare: Called with the step number after the backward passes.
        every_part: Context of a backward pass, given whether it is the step's last.
    """
    trace, parts = Trace(), 1 + (way == "accumulate")
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(parts):
            last = part == parts - 1
            with every_part(last) if every_part else contextlib.nullcontext():
                loss = batches(step, part).loss(model)
                scaler.scale(loss / (divisor * parts)).backward()
        if prepare is not None:
            prepare(step)
        before = scaler.get_scale()
        norm = take_step(scaler, optimizer, way=way, max_norm=8.0)
        trace.norms += [] if norm is None else [norm.item()]
        # torch shows a skipped step in the scale alone.
        skipped = scaler.get_scale() < before
        if isinstance(scaler, GradScaler):
            assert scaler.step_skipped(optimizer) is skipped, f"step {step}"
        trace.steps.append((scaler.get_scale(), scaler._get_growth_tracker(), skipped))
    trace.parameters = [whole(param) for param in (params or model.parameters)()]
    return trace
