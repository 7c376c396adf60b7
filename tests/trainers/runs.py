"""Helpers of the trainer tests: runs in two halves, with a trainer's checkpoint between them.

A run is compared bit for bit with the same one with torch's scaler or, for 16-bit models, with one
that keeps master weights by hand.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from support.comparison import TorchScaler, assert_same
from support.optimizers import OPTIMIZERS
from support.steps import small_model
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

import ampfast

EXAMPLES = Path(__file__).parents[2] / "examples" / "trainers"
STEPS = 16
# Overflows float16 in the first steps, and again later as it grows fast.
SETTINGS: dict[str, Any] = {"init_scale": 2.0**20, "growth_interval": 3}
OVERFLOWS = (5, 11)  # Besides those of the first scales.
# Steps with an infinite gradient in `planted`: the first, a later one, and two in a row.
PLANTED = (0, 3, 8, 9)


class Net(nn.Module):
    """Maps tensors of shape (n, 8) to float32 of shape (n, 3); a float32 model autocasts itself.

    Some trainers start CUDA's autocast only.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = small_model().to(dtype)

    def forward(self, data: Tensor) -> Tensor:
        dtype = self.layers[0].weight.dtype
        with torch.autocast("cpu", torch.float16, enabled=dtype is torch.float32):
            return self.layers(data.to(dtype)).float()


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Yields `STEPS` batches: data of shape (5, 8) and its classes below 3."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        yield (torch.randn(5, 8, generator=generator), torch.randint(3, (5,), generator=generator))


def loader(batches: Iterable[tuple[Tensor, Tensor]]) -> DataLoader:
    """Loader of ready batches."""
    return DataLoader(list(batches), batch_size=None)


def optimizer_for(model: nn.Module, name: str = "adam") -> torch.optim.Optimizer:
    """An optimizer of `OPTIMIZERS`, with a learning rate that lets overflows go on."""
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    for group in optimizer.param_groups:
        group["lr"] = 0.02
    return optimizer


def planted(loss: Tensor, model: nn.Module, step: int) -> Tensor:
    """The loss, with one infinite gradient in the steps of `PLANTED`."""
    if step not in PLANTED:
        return loss
    return loss + next(model.parameters()).flatten()[0] * float("inf")


@dataclass(frozen=True)
class Case:
    """A kind of run.

    Attributes:
        dtype: Type of the model; bfloat16 has no scaler, float32 no master weights.
        optimizer: Name in `OPTIMIZERS`.
        clip: Norm to which gradients are clipped, or None.
    """

    dtype: torch.dtype
    optimizer: str
    clip: float | None = None

    def __str__(self) -> str:
        words = [str(self.dtype).removeprefix("torch."), self.optimizer]
        return "-".join(words + ["clip"] * (self.clip is not None))

    @property
    def scaled(self) -> bool:
        return self.dtype is not torch.bfloat16

    @property
    def has_masters(self) -> bool:
        return self.dtype is not torch.float32

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """Batches, two with an infinity if scaled; tanh keeps it from the loss."""
        made = list(batches())
        for step in OVERFLOWS if self.scaled else ():
            made[step][0][0, 0] = math.inf
        return made


CASES = [
    Case(dtype, name, clip)
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
    for name in ("adam", "fused_adam")
    for clip in (None, 0.05)
]
# Without what Lightning and Fabric refuse of a scaler: to clip with a fused optimizer.
CLIPS_NO_FUSED = [
    case for case in CASES if not (case.scaled and case.clip and case.optimizer == "fused_adam")
]


@dataclass
class Part:
    """One of the two halves of a run, which a trainer trains.

    Attributes:
        case: Kind of the run.
        ours: Whether its scaler is ampfast's.
        batches: Its batches.
        folder: Place of the checkpoint that ends the first half and begins the second.
        resumes: Whether it is the second half.
        model: The model.
        optimizer: Its optimizer, once made.
        scaler: The trainer's scaler, if any.
        more: What else must be equal with torch's scaler.
    """

    case: Case
    ours: bool
    batches: list[tuple[Tensor, Tensor]]
    folder: Path
    resumes: bool
    model: Net = field(init=False)
    optimizer: Any = None
    scaler: Any = None
    losses: list[Tensor] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    more: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = Net(self.case.dtype)

    def make_optimizer(self) -> Any:
        """The optimizer of the case, with master weights."""
        return self.with_masters(optimizer_for(self.model, self.case.optimizer))

    def with_masters(self, optimizer: torch.optim.Optimizer) -> Any:
        if self.case.has_masters:
            optimizer = ampfast.master_weights_(optimizer)
        self.optimizer = optimizer
        return optimizer

    def patching(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which a trainer makes the scaler of the run."""
        return ampfast.patch() if self.ours else contextlib.nullcontext()

    def make_scaler(self) -> TorchScaler:
        return self.adopt((ampfast.GradScaler if self.ours else TorchScaler)("cpu"))

    def adopt(self, scaler: Any) -> TorchScaler:
        """Gives an unused scaler, which a trainer may have made, the settings of the tests."""
        assert isinstance(scaler, ampfast.GradScaler) is self.ours
        scaler._init_scale = SETTINGS["init_scale"]
        scaler.set_growth_interval(SETTINGS["growth_interval"])
        self.scaler = scaler
        return scaler

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross entropy, recorded with the scale."""
        loss = nn.functional.cross_entropy(output, target)
        self.losses.append(loss.detach().clone())
        self.scales.append(self.scaler.get_scale() if self.scaler else 1.0)
        return loss

    def state(self) -> dict[str, Any]:
        """What must be equal after the last step."""
        params = list(self.model.parameters())
        masters = self.optimizer.master_weights if self.case.has_masters else {}
        return {
            "parameters": [param.detach() for param in params],
            "masters": [masters[param] for param in params if masters],
            "optimizer": [self.optimizer.state[param] for param in params],
            "scale": self.scaler.get_scale() if self.scaler else 1.0,
            "tracker": self.scaler._growth_tracker.item() if self.scaler else 0,
        }


@dataclass
class Run:
    """Losses, scales and final state of a whole run."""

    losses: list[Tensor]
    scales: list[float]
    state: dict[str, Any]


def in_halves(train: Callable[[Part], None], case: Case, folder: Path, ours: bool = True) -> Run:
    """A run whose halves are trained by new objects."""
    every = case.batches()
    folder.mkdir(exist_ok=True)
    first = Part(case, ours, every[: STEPS // 2], folder, resumes=False)
    second = Part(case, ours, every[STEPS // 2 :], folder, resumes=True)
    train(first)
    train(second)
    more = first.more + second.more
    state = second.state() if case.has_masters else {**second.state(), "more": more}
    return Run(first.losses + second.losses, first.scales + second.scales, state)


def by_hand(case: Case) -> Run:
    """A whole run: master weights, loss scaling and the rule of the scale, written out."""
    model, run = Net(case.dtype), Run([], [], {})
    params = list(model.parameters())
    masters = nn.ParameterList(param.detach().float() for param in params)
    optimizer = optimizer_for(masters, case.optimizer)
    scale, tracker = SETTINGS["init_scale"] if case.scaled else 1.0, 0
    for data, target in case.batches():
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(data), target)
        run.losses.append(loss.detach())
        run.scales.append(scale)
        (loss * scale).backward()
        if case.clip is not None and not case.scaled:
            clip_grad_norm_(params, case.clip)
        for param, master in zip(params, masters, strict=True):
            master.grad = param.grad.float() / scale
        if case.clip is not None and case.scaled:
            clip_grad_norm_(masters, case.clip)
        if not all(param.grad.isfinite().all() for param in params):
            scale, tracker = scale / 2, 0
            continue
        optimizer.step()
        with torch.no_grad():
            for param, master in zip(params, masters, strict=True):
                param.copy_(master)
        tracker += case.scaled
        if tracker == SETTINGS["growth_interval"]:
            scale, tracker = scale * 2, 0
    run.state = {
        "parameters": [param.detach() for param in params],
        "masters": [master.detach() for master in masters],
        "optimizer": [optimizer.state[master] for master in masters],
        "scale": scale,
        "tracker": tracker,
    }
    rounded = [param.float() for param in params]
    assert not all(map(torch.equal, rounded, masters)), "low bits must be in use"
    return run


def assert_same_run(train: Callable[[Part], None], case: Case, folder: Path) -> None:
    """Asserts that a run with our scaler is torch's or, with master weights, the one by hand."""
    ours = in_halves(train, case, folder / "ours")
    if case.has_masters:
        theirs = by_hand(case)
    else:
        theirs = in_halves(train, case, folder / "torch", ours=False)
    assert_same(ours.losses, theirs.losses, "losses")
    assert_same(ours.scales, theirs.scales, "scales")
    assert_same(ours.state, theirs.state, "state")
    assert len(ours.losses) == STEPS
    changes = [b / a for a, b in pairwise(ours.scales)]
    assert min(changes.count(0.5), changes.count(2.0)) >= 2 or not case.scaled
