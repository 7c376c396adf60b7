"""Helpers of the tests with 16-bit models: runs in a trainer and by hand, bit for bit alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from support.comparison import assert_same
from support.twins import small_model
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from trajectories import SETTINGS, STEPS, batches, optimizer_for

import ampfast

OVERFLOWS = (5, 11)  # Besides those of the first scales.


class Net(nn.Module):
    """Maps tensors of shape (n, 8) to float32 of shape (n, 3)."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = small_model().to(dtype)

    def forward(self, data: Tensor) -> Tensor:
        return self.layers(data.to(self.layers[0].weight.dtype)).float()


@dataclass(frozen=True)
class Case:
    """A kind of run.

    Attributes:
        scaled: Whether it is a float16 model with a scaler, or a bfloat16 model without.
        optimizer: Name in `OPTIMIZERS`.
        clip: Norm to which gradients are clipped, or None.
        wide: Whether the backward pass writes float32 gradients.
    """

    scaled: bool
    optimizer: str
    clip: float | None = None
    wide: bool = False

    def __str__(self) -> str:
        words = [str(self.dtype).removeprefix("torch."), self.optimizer]
        return "-".join(words + ["clip"] * (self.clip is not None) + ["wide"] * self.wide)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float16 if self.scaled else torch.bfloat16

    @property
    def clips_fused(self) -> bool:
        """Whether a scaler meets what Lightning and Fabric refuse."""
        return self.scaled and self.clip is not None and self.optimizer == "fused_adam"

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """Batches, two with an infinity if scaled; tanh keeps it from the loss."""
        made = list(batches())
        for step in OVERFLOWS if self.scaled else ():
            made[step][0][0, 0] = math.inf
        return made


CASES = [
    *(Case(scaled, name) for scaled in (True, False) for name in ("adam", "fused_adam")),
    *(Case(scaled, name, 0.05) for scaled in (True, False) for name in ("adam", "fused_adam")),
    Case(False, "adam", 0.05, wide=True),
]


@dataclass
class Part:
    """One of the two halves of a run, which a trainer trains.

    Attributes:
        case: Kind of the run.
        batches: Its batches.
        folder: Place of the checkpoint that ends the first half and begins the second.
        resumes: Whether it is the second half.
        model: The model.
        optimizer: Its optimizer, once made.
        scaler: The trainer's scaler, if any.
    """

    case: Case
    batches: list[tuple[Tensor, Tensor]]
    folder: Path
    resumes: bool
    model: Net = field(init=False)
    optimizer: Any = None
    scaler: Any = None
    losses: list[Tensor] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = Net(self.case.dtype)

    def make_optimizer(self) -> Any:
        """The optimizer of the case, with master weights."""
        return self.with_masters(optimizer_for(self.model, self.case.optimizer))

    def with_masters(self, optimizer: torch.optim.Optimizer) -> Any:
        self.optimizer = ampfast.master_weights_(optimizer)
        for param in self.model.parameters() if self.case.wide else ():
            param.grad_dtype = torch.float32
        return self.optimizer

    def make_scaler(self) -> ampfast.GradScaler:
        return self.adopt(ampfast.GradScaler("cpu"))

    def adopt(self, scaler: Any) -> ampfast.GradScaler:
        """Gives an unused scaler, which a trainer may have made, the settings of the tests."""
        assert isinstance(scaler, ampfast.GradScaler)
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
        params, masters = list(self.model.parameters()), self.optimizer.master_weights
        return {
            "parameters": [param.detach() for param in params],
            "masters": [masters[param] for param in params],
            "optimizer": [self.optimizer.state[param] for param in params],
            "scale": self.scaler.get_scale() if self.scaler else 1.0,
            "tracker": self.scaler._growth_tracker.item() if self.scaler else 0,
        }


class ByHand:
    """A whole run: master weights, loss scaling and the rule of the scale, written out."""

    def __init__(self, case: Case) -> None:
        model, self.losses, self.scales = Net(case.dtype), [], []
        params = list(model.parameters())
        masters = nn.ParameterList(param.detach().float() for param in params)
        optimizer = optimizer_for(masters, case.optimizer)
        scale, tracker = SETTINGS["init_scale"] if case.scaled else 1.0, 0
        for data, target in case.batches():
            model.zero_grad()
            loss = nn.functional.cross_entropy(model(data), target)
            self.losses.append(loss.detach())
            self.scales.append(scale)
            (loss * scale).backward()
            if case.clip is not None and not case.scaled and not case.wide:
                clip_grad_norm_(params, case.clip)
            for param, master in zip(params, masters, strict=True):
                master.grad = param.grad.float() / scale
            if case.clip is not None and (case.scaled or case.wide):
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
        self.state = {
            "parameters": [param.detach() for param in params],
            "masters": [master.detach() for master in masters],
            "optimizer": [optimizer.state[master] for master in masters],
            "scale": scale,
            "tracker": tracker,
        }


def assert_as_by_hand(train: Callable[[Part], None], case: Case, folder: Path) -> None:
    """Asserts that two halves, each trained by new objects, equal a run by hand."""
    every, hand = case.batches(), ByHand(case)
    first = Part(case, every[: STEPS // 2], folder, resumes=False)
    second = Part(case, every[STEPS // 2 :], folder, resumes=True)
    train(first)
    train(second)
    assert_same(first.losses + second.losses, hand.losses, "losses")
    assert_same(first.scales + second.scales, hand.scales, "scales")
    assert_same(second.state(), hand.state, "state")
    rounded = [param.float() for param in hand.state["parameters"]]
    assert not all(map(torch.equal, rounded, hand.state["masters"])), "low bits must be in use"
    if case.scaled:
        changes = [b / a for a, b in pairwise(hand.scales)]
        assert changes.count(0.5) > len(OVERFLOWS)
        assert changes.count(2.0) >= 2
