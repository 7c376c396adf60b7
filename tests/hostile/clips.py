"""`clip_grad_norm_` at extreme magnitudes against long double arithmetic."""

from __future__ import annotations

import math
import random
import sys
import warnings
from typing import Any, NamedTuple

import numpy as np
import torch
from support.comparison import FLOATS, started
from support.kernels import inverse_of
from support.models import clip_by_hand, coefficient_of, exact_norm, ulps, unscaled
from tally import Tally, main

from ampfast import GradScaler

INF = math.inf
SCALES = [1.0, 3.0, 2.0**-20, 2.0**16, 1000.3, 2.0**60, 2.0**-60]
LIMITS = [0.0, 1e-320, 1e-30, 1e-3, 1.0, 1.0, 1e4, 1e30, 1e300, INF, INF]
ORDERS = [1.0, 2.0, 2.0, 3.0, INF]
# Relative error of a norm: rounding of products and of the result; for float64 gradients also of
# the sum.
TOLERANCE, WIDE_TOLERANCE = 5e-7, 5e-13
# Where sums of powers leave float64's range, the norm is infinite or loses digits, as torch's: a
# subnormal power is rounded to a multiple of the smallest one, per element and per tensor.
MOST_SUM, LEAST_SUM, SMALLEST = 1.7e308, 1e-290, np.longdouble(2) ** -1074


class Case(NamedTuple):
    """Arguments of a clipping."""

    dtypes: tuple[torch.dtype, ...]
    scale: float
    limit: float
    order: float
    fused: bool
    in_place: bool
    backend: str
    seed: int


class Divider(torch.optim.SGD):
    """Optimizer that divides by `grad_scale` in the arithmetic of torch's fused optimizers."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        scale = getattr(self, "grad_scale", None)
        if getattr(self, "found_inf", 0.0):
            return
        for parameter in self.param_groups[0]["params"]:
            wide = parameter.grad.float()
            parameter.sub_(wide if scale is None else wide / scale)


def draw(seed: int) -> Case:
    rng = random.Random(seed)
    dtypes = (rng.choice(FLOATS),) if rng.random() < 0.7 else FLOATS[:2]
    fused, drawn = rng.random() < 0.5, map(rng.choice, (SCALES, LIMITS, ORDERS))
    in_place, backend = not fused or rng.random() < 0.4, rng.choice(["cpu", "cpu", "aten"])
    return Case(dtypes, *drawn, fused, in_place, backend, seed)


def draw_gradients(case: Case) -> list[torch.Tensor]:
    """Gradients around one magnitude, from subnormals to the dtype's largest value."""
    rng, random_state = random.Random(case.seed + 1), np.random.default_rng(case.seed)
    info = torch.finfo(case.dtypes[-1])
    lowest, highest = math.log2(info.smallest_normal) - 8, math.log2(info.max)
    center, spread = rng.uniform(lowest, highest), rng.choice([0, 1, 4, 40])
    center = rng.choice([center, highest, -12.0])
    gradients = []
    for _ in range(rng.randint(1, 4)):
        dtype = rng.choice(case.dtypes)
        size = rng.choice([1, 3, 17, 40, 40, 3000])
        exponents = center + spread * random_state.uniform(-1, 1, size)
        with np.errstate(over="ignore"):
            values = np.exp2(exponents) * random_state.choice([-1.0, 1.0], size)
        most = torch.finfo(dtype).max
        made = torch.from_numpy(values).clamp(-most, most).to(dtype)
        made = made.nan_to_num(0.0, most, -most)  # rounded up to infinity
        # torch's fused optimizers read raw memory, whatever the strides.
        strided = not case.fused and rng.random() < 0.3
        gradients.append(made.repeat_interleave(2)[::2] if strided else made)
    if rng.random() < 0.1:
        gradients[0].zero_()
    if rng.random() < 0.15:
        gradients[-1][-1] = rng.choice([INF, -INF, math.nan])
    return gradients


def norm_fault(norm: torch.Tensor, exact: float, case: Case, elements: int, wide: bool) -> str:
    """Compares a norm with the exact one; returns the error, or an empty text."""
    info, ours = torch.finfo(norm.dtype), norm.item()
    order, most = (1.0, INF) if case.order == INF else (case.order, MOST_SUM)
    total = np.longdouble(1) if case.order == INF else np.longdouble(exact) ** order
    if case.backend == "aten" and not case.in_place:
        # Of the gradients as they are; the root is divided.
        most /= max(np.longdouble(case.scale), 1) ** order
    slack = exact * (WIDE_TOLERANCE if wide else TOLERANCE) + 4 * info.smallest_normal * info.eps
    if total < LEAST_SUM:
        right = 0 <= ours <= (total + 2 * elements * SMALLEST) ** (1 / np.longdouble(order)) + slack
    elif ours == INF:
        right = total > most or exact + slack >= info.max
    else:
        right = abs(ours - exact) <= slack
    return "" if right else f"norm {ours}, exact {exact}"


def fault(case: Case) -> str | None:
    """Runs a case; returns its error, or None."""
    gradients = draw_gradients(case)
    before = [g.clone() for g in gradients]
    parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    # torch's fused SGD leaves most of a 16-bit parameter unchanged on a CPU.
    kind = Divider if case.fused and case.dtypes[0].itemsize == 2 else torch.optim.SGD
    optimizer = kind(parameters, lr=1.0, fused=case.fused)
    scaler: Any = started(GradScaler, case.scale, backend=case.backend, allow_fp16=True)
    norm = scaler.clip_grad_norm_(optimizer, case.limit, case.order, in_place=case.in_place)
    clipped = [g.clone() for g in gradients]
    scaler.step(optimizer)

    plain, moved = unscaled(before, case.scale), [p.detach() for p in parameters]
    if not case.in_place:
        # What the optimizer divides: 16-bit gradients in float32.
        wide_ones = [g if g.dtype is torch.float64 else g.float() for g in before]
        plain = [g / torch.tensor(case.scale) for g in wide_ones]
    overflows = any(not g.isfinite().all() for g in plain)
    if any(not p.isfinite().all() for p in moved):
        too_large = any(not g.to(case.dtypes[0]).isfinite().all() for g in plain)
        # A finite quotient may be too large for a 16-bit parameter, as without a scaler.
        return None if too_large and not case.in_place else "not finite: a parameter"
    if scaler.step_skipped(optimizer) is not overflows:
        return f"overflow: {overflows}, which does not decide on the step"
    if overflows:
        return "a skipped step moved a parameter" if any(p.any() for p in moved) else None

    wide = {g.dtype for g in before} == {torch.float64}
    elements = sum(g.numel() for g in before)
    unrounded = [g.double() * inverse_of(case.scale) for g in before]
    if not case.in_place:
        unrounded = [g.double() / case.scale for g in before]
    # Of the products, of what torch's op writes, or of exact products, as those of gradients with
    # gaps; subnormal products differ in this.
    products = (before, case.scale), (plain, 1.0), (unrounded, 1.0)
    exact = [exact_norm(values, by, case.order) for values, by in products]
    wrong = [norm_fault(norm, each, case, elements, wide) for each in exact]
    if all(wrong) and not min(exact) <= norm.item() <= max(exact):
        return wrong[0]
    # By the returned norm.
    coefficient = coefficient_of(norm, case.limit)
    for index, values in enumerate(plain):
        if case.in_place:
            wanted = torch.zeros_like(values)
            wanted.grad = values.clone()
            clip_by_hand([wanted], norm, case.limit)
            # Sum, quotient and product are rounded to float64.
            allowed = 0 if coefficient == 1.0 else 3 if values.dtype is torch.float64 else 1
            if (distance := ulps(clipped[index], wanted.grad.double())) > allowed:
                return f"gradient {index}: {distance} ulps off, coefficient {coefficient}"
            if not torch.equal(moved[index], -clipped[index]):
                return f"parameter {index} is not what its gradient says"
            continue
        if not torch.equal(clipped[index], before[index]):
            return f"gradient {index} was written with in_place=False"
        divisor = (case.scale / coefficient).float()
        info = torch.finfo(before[index].dtype)
        step = before[index].double() / divisor.double()
        slack = step.abs() * max(4 * info.eps, 1e-6) + 2 * info.smallest_normal * info.eps
        if bool(((-moved[index].double() - step).abs() > slack).any()):
            return f"parameter {index}: {-moved[index].view(-1)[0]} for {step.view(-1)[0]}"
    return None


def run(count: float, seed: int = 0) -> Tally:
    """Runs `count` clippings, one for each seed."""
    tally = Tally("clips")
    for number in range(int(count)):
        case = draw(seed + number)
        with warnings.catch_warnings(), np.errstate(over="ignore"):
            warnings.simplefilter("ignore")
            wrong = fault(case)
        tally.count += 1
        if wrong is not None:
            tally.fail(f"{wrong}; {case}")
    return tally


if __name__ == "__main__":
    sys.exit(main(run, "count", 8000))
