"""Random loops that clip by torch's name: beside torch, and against the rule in float64."""

from __future__ import annotations

import math
import os
import random
from functools import partial
from typing import Any

import torch
from support.comparison import TorchScaler, assert_same
from support.gradients import parameter_with
from support.models import clip_by_hand, exact_norm
from torch import Tensor
from torch.nn import utils

from ampfast import GradScaler, functional

PROGRAMS = int(os.environ.get("AMPFAST_FUZZ", "400")) // 4
FIRST = int(os.environ.get("AMPFAST_FUZZ_FROM", "0"))
DTYPES = (torch.float32, torch.float32, torch.float64, torch.bfloat16)
SIZES = (1, 3, 33, 5000)


class World:
    """One side: parameters of two optimizers, and what clips told."""

    def __init__(self, seed: int, ours: bool) -> None:
        chance = random.Random(seed)
        self.ours = ours
        kind = chance.choice(["scaler", "scaler", "scaler", "disabled", "none"])
        dtypes = chance.choice([DTYPES[:1], DTYPES])
        self.params = [
            torch.nn.Parameter(torch.ones(chance.choice(SIZES), dtype=chance.choice(dtypes)))
            for _ in range(chance.randint(2, 6))
        ]
        cut = chance.randint(1, len(self.params))
        parts = [part for part in (self.params[:cut], self.params[cut:]) if part]
        # Groups in another order than the model's.
        self.optimizers = [
            torch.optim.SGD([{"params": p[1:]}, {"params": p[:1]}], lr=0.25) for p in parts
        ]
        self.scaler: Any = None
        if kind != "none":
            settings: dict[str, Any] = {"init_scale": 4.0, "enabled": kind == "scaler"}
            self.scaler = (GradScaler if ours else TorchScaler)("cpu", **settings)
        self.told: list[Any] = []
        self.exact = True

    @property
    def scale(self) -> float:
        return 1.0 if self.scaler is None else self.scaler.get_scale()

    def backward(self, chance: random.Random) -> None:
        """Gradients of small whole numbers, whose squares add up exactly; also accumulates."""
        if self.scaler is not None:
            self.scaler.scale(torch.ones(()))
        for param in self.params:
            generator = torch.Generator().manual_seed(chance.randrange(2**31))
            grad = torch.randint(-8, 9, param.shape, generator=generator).to(param.dtype)
            if chance.random() < 0.05:
                grad[chance.randrange(len(grad))] = chance.choice([math.inf, math.nan])
            if chance.random() < 0.15:
                param.grad = None
                continue
            scaled = grad * self.scale
            param.grad = scaled if param.grad is None else param.grad + scaled

    def change(self, chance: random.Random) -> None:
        param = chance.choice(self.params)
        how = chance.choice(["times", "view", "other", "drop", "data"])
        if param.grad is None:
            param.grad = torch.full_like(param, 2.0)
        elif how == "times":
            param.grad.mul_(2)
        elif how == "view":
            param.grad[:1].fill_(3.0)
        elif how == "other":
            param.grad = param.grad.clone()
        elif how == "data":
            param.grad.data = param.grad.data + 1
        else:
            param.grad = None

    def clip(self, chance: random.Random) -> None:
        params = chance.choice(
            [self.params, *(o.param_groups[0]["params"] for o in self.optimizers)]
        )
        params = chance.choice([params, params[::-1], params[:1], [*params]])
        given: Any = chance.choice([params, iter(params), tuple(params)])
        limit, order = chance.choice([0.5, 4.0, 1e6, math.inf]), chance.choice([2, 2, "inf", 1.0])
        raises = chance.random() < 0.2
        before = [parameter_with(p.grad.clone()) for p in params if p.grad is not None]
        if not all(p.grad.isfinite().all() for p in before):
            limit = min(limit, 1e6)  # torch makes all of them NaN
        side = functional if self.ours else utils
        try:
            norm = side.clip_grad_norm_(given, limit, order, error_if_nonfinite=raises)
        except RuntimeError as error:
            self.told.append(str(error))
            assert_same([p.grad for p in params if p.grad is not None], [p.grad for p in before])
            return
        self.told.append(norm)
        if self.ours and before and order != 1.0:
            self.check_rule(params, before, norm, limit, float(order))
        self.exact = False

    def check_rule(
        self, params: list[Tensor], before: list[Any], norm: Tensor, limit: float, order: float
    ) -> None:
        """The norm is that of float64, rounded once, and the gradients are its multiples."""
        grads = [p.grad for p in before]
        exact = torch.tensor(exact_norm(grads, 1.0, order), dtype=torch.float64)
        wide = norm.dtype if norm.dtype is torch.float64 else torch.float32
        if self.exact:
            assert_same(norm, exact.to(wide).to(norm.dtype))
        else:
            eps = max(4e-7, torch.finfo(norm.dtype).eps)
            torch.testing.assert_close(norm, exact.to(norm.dtype), rtol=eps, atol=0, equal_nan=True)
        told = exact.to(wide) if self.exact else functional.grad_norm(grads, order)
        clip_by_hand(before, told, limit)
        ours = [p.grad for p in params if p.grad is not None]
        assert_same(ours, grads)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)

    def run(self, chance: random.Random) -> None:
        for _ in range(chance.randint(2, 5)):
            for _ in range(chance.choice([1, 1, 2])):
                self.backward(chance)
            for optimizer in self.optimizers:
                if self.scaler is not None and chance.random() < 0.8:
                    try:
                        self.scaler.unscale_(optimizer)
                    except RuntimeError as error:  # the last update found nothing
                        self.told.append(str(error))
            self.exact = self.scaler is None or not self.scaler.is_enabled() or self.scale >= 1
            for act in chance.choices([self.clip, self.change], [3, 1], k=chance.randint(0, 3)):
                act(chance)
            steps = [partial(self.step, optimizer) for optimizer in self.optimizers]
            for end in [*steps, *([] if self.scaler is None else [self.scaler.update])]:
                try:
                    end()
                except (AssertionError, RuntimeError) as error:  # nothing was checked
                    self.told.append(str(error))
            self.told += [p.detach().clone() for p in self.params]
            for optimizer in self.optimizers:
                optimizer.zero_grad(chance.random() < 0.7)


def test_programs() -> None:
    clips = 0
    for seed in range(FIRST, FIRST + PROGRAMS):
        sides = [World(seed, ours) for ours in (True, False)]
        for side in sides:
            side.run(random.Random(f"program {seed}"))
        ours, theirs = (side.told for side in sides)
        assert len(ours) == len(theirs), seed
        clips += len(ours)
        for a, b in zip(ours, theirs, strict=True):
            if isinstance(b, str):
                assert a == b, seed
                continue
            assert (a.dtype, a.shape) == (b.dtype, b.shape), seed
            # torch rounds the norm of 16-bit gradients, and the coefficient, to 16 bits.
            loose = (
                {"rtol": 0.02, "atol": 0.02}
                if torch.bfloat16 in {p.dtype for p in sides[0].params}
                else {"rtol": 1e-5, "atol": 1e-5}
            )
            text = f"program {seed}: {a} beside {b}"
            torch.testing.assert_close(a, b, equal_nan=True, **loose, msg=text)
    assert clips >= PROGRAMS
