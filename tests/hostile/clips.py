"""`clip_grad_norm_` at extreme magnitudes against long double arithmetic."""

from __future__ import annotations

import math
import random
import sys
import warnings
from typing import Any, NamedTuple

import numpy as np
import torch
from support.clipping_reference import inverse_of, ordered_bits, unscaled
from support.comparison import FLOATS
from support.scalers import started
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


def long(tensor: torch.Tensor) -> Any:
    """Long double values, exact for every float64."""
    return tensor.detach().double().numpy().astype(np.longdouble)


def long_norm(values: list[Any], order: float) -> tuple[Any, Any]:
    """Norm, and the sum of powers behind it."""
    magnitudes = np.abs(np.concatenate([np.zeros(1, np.longdouble), *values]))
    if order == INF:
        return magnitudes.max(), np.longdouble(1)
    total = (magnitudes**order).sum()
    return total ** (np.longdouble(1) / order), total


def norm_fault(
    norm: torch.Tensor, choices: list[list[Any]], order: float, tolerance: float
) -> str | None:
    """Compares a norm with that of each list of values; returns the error, if any."""
    faults = []
    for values in choices:
        exact, total = long_norm(values, order)
        ours, info = norm.item(), torch.finfo(norm.dtype)
        slack = exact * tolerance + 4 * info.smallest_normal * info.eps
        if total < LEAST_SUM:
            rounded_up = total + 2 * sum(v.size for v in values) * SMALLEST
            right = 0 <= ours <= rounded_up ** (1 / np.longdouble(order)) + slack
        elif ours == INF:
            right = total > MOST_SUM or exact + slack >= info.max
        else:
            right = total <= MOST_SUM * 1.01 and abs(ours - exact) <= slack
        if right:
            return None
        faults.append(f"norm {ours}, exact {exact}")
    return faults[0]


def written(values: torch.Tensor, coefficient: float) -> torch.Tensor:
    """Products rounded in opmath, then to the gradient's dtype."""
    opmath = torch.promote_types(values.dtype, torch.float32)
    factor = torch.tensor(coefficient, dtype=torch.float64).to(opmath)
    kind = np.float32 if opmath is torch.float32 else np.float64
    return torch.from_numpy((long(values) * long(factor)).astype(kind)).to(values.dtype)


def ulps(ours: torch.Tensor, exact: torch.Tensor) -> int:
    return int((ordered_bits(ours) - ordered_bits(exact)).abs().max())


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
    overflows = any(not g.isfinite().all() for g in plain)
    if any(not p.isfinite().all() for p in moved):
        return "not finite: a parameter"
    if scaler.step_skipped(optimizer) is not overflows:
        return f"overflow: {overflows}, which does not decide on the step"
    if overflows:
        return "a skipped step moved a parameter" if any(p.any() for p in moved) else None

    inverse = inverse_of(case.scale)
    wide = [torch.promote_types(g.dtype, torch.float32) for g in before]
    exact = [long(g.to(w) * inverse.to(w)) for g, w in zip(before, wide, strict=True)]
    tolerance = WIDE_TOLERANCE if set(wide) == {torch.float64} else TOLERANCE
    unrounded = [long(g) * long(inverse) for g in before]
    choices = [exact, [*map(long, plain)], unrounded]
    wrong = norm_fault(norm, choices, case.order, tolerance)
    if wrong is not None:
        return wrong
    # By the returned norm.
    quotient = np.longdouble(case.limit) / (long(norm) + np.longdouble(1e-6))
    coefficient = 1.0 if case.limit == INF else float(min(quotient, np.longdouble(1)))
    for index, values in enumerate(plain):
        if case.in_place:
            wanted = values if coefficient == 1.0 else written(values, coefficient)
            # Sum, quotient and product are rounded to float64.
            allowed = 0 if coefficient == 1.0 else 3 if values.dtype is torch.float64 else 1
            if (distance := ulps(clipped[index], wanted)) > allowed:
                return f"gradient {index}: {distance} ulps off, coefficient {coefficient}"
            if not torch.equal(moved[index], -clipped[index]):
                return f"parameter {index} is not what its gradient says"
            continue
        if not torch.equal(clipped[index], before[index]):
            return f"gradient {index} was written with in_place=False"
        with np.errstate(over="ignore", divide="ignore"):
            divisor = np.float32(np.float64(case.scale) / np.float64(coefficient))
        stepped, info = -long(moved[index]), torch.finfo(values.dtype)
        wanted_step = long(before[index]) / np.longdouble(divisor)
        slack = np.abs(wanted_step) * max(4 * info.eps, 1e-6) + 2 * info.smallest_normal * info.eps
        if (np.abs(stepped - wanted_step) > slack).any():
            return f"parameter {index}: {stepped.flat[0]} for {wanted_step.flat[0]}"
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
