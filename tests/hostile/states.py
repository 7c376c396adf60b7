"""Damaged state dicts and pickles, loaded into torch's scaler and ours."""

from __future__ import annotations

import copy
import pickle
import random
import re
import sys
from collections import UserDict
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from support.comparison import Scaler, TorchScaler, difference, outcome, started
from support.gradients import parameter_with
from tally import Tally, main

from ampfast import GradScaler

KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


class Broken:
    """Object that raises on any access."""

    def __float__(self) -> float:
        raise ArithmeticError("no float")

    def __index__(self) -> int:
        raise ArithmeticError("no int")

    def __eq__(self, other: object) -> bool:
        raise ArithmeticError("no comparison")

    __hash__ = None  # type: ignore[assignment]


VALUES: list[Any] = [
    *(None, "8", "", b"8", [], [8.0], {}, (), object(), Broken(), True, False, 1j, Fraction(7, 2)),
    *(0, 1, 3, -1, 2**31 - 1, 2**31, 2**63, 2**70, -(2**70)),
    *(0.0, -0.0, 0.5, 2.0, 2.7, -8.0, 1e-45, 1e38, 1e300, float("inf"), -float("inf")),
    *(float("nan"), np.float32(6), np.float64(1.5), np.int64(4), np.int32(0), np.bool_(True)),
    *(np.array(5.0), np.array([1.0, 2.0]), torch.tensor(6.0), torch.tensor([6.0])),
    *(torch.tensor(3), torch.tensor([1.0, 2.0]), torch.empty(0), torch.tensor(5.0, device="meta")),
    *(torch.tensor(4.0, requires_grad=True), torch.tensor(2.0, dtype=torch.float16)),
]


def damaged(rng: random.Random) -> Any:
    """State dict with one to three entries missing or of any kind."""
    state: Any = dict(zip(KEYS, [24.0, 3.0, 0.25, 5, 2], strict=True))
    for _ in range(rng.randint(1, 3)):
        key = rng.choice(KEYS)
        if rng.random() < 0.15:
            state.pop(key, None)
        else:
            state[key] = rng.choice(VALUES)
    if rng.random() < 0.1:
        state[rng.choice(["more", 7, None])] = 1
    if rng.random() < 0.05:
        return rng.choice([{}, [], None, "state", UserDict(state), list(state.items())])
    return state


def everything(scaler: TorchScaler) -> list[Any]:
    """State that loading may change."""
    names = ["_init_scale", "_init_growth_tracker", "_scale", "_growth_tracker"]
    names += ["_growth_factor", "_backoff_factor", "_growth_interval"]
    # By type and text without addresses: some values do not compare.
    return [
        v.detach().clone()
        if is_readable(v := getattr(scaler, name))
        else (type(v), re.sub(r" at 0x\w+", "", repr(v)))
        for name in names
    ]


def is_readable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type != "meta"


def number_in(value: Any) -> float | None:
    """Number of an int, float, tensor or numpy value; else None."""
    if isinstance(value, torch.Tensor):
        return value.detach().item() if value.numel() == 1 and is_readable(value) else None
    return float(value) if isinstance(value, (int, float, np.number)) else None


def differs_on_purpose(scaler: TorchScaler) -> bool:
    """Whether torch would write NaN for a scale near 0, or stop growing beyond the interval."""
    scale = number_in(scaler._init_scale if scaler._scale is None else scaler._scale)
    tracker = scaler._growth_tracker
    tracker = number_in(scaler._init_growth_tracker if tracker is None else tracker)
    if tracker is not None and 0 < (number_in(scaler._growth_interval) or 0) <= tracker:
        return True
    return scale is not None and abs(scale) < 1e-30


def train(scaler: TorchScaler) -> list[Any]:
    """Trains three steps, the second of which overflows; stops at the first error."""
    parameter, trace = parameter_with(torch.ones(3)), []
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    for value in (1.0, float("inf"), 2.0):
        if differs_on_purpose(scaler):
            break

        def iteration(value: float = value) -> None:
            parameter.grad = scaler.scale(torch.full((3,), value)).detach()
            scaler.step(optimizer)
            scaler.update()

        trace.append(outcome(iteration).comparable()[0])
        trace += [everything(scaler), parameter.detach().clone()]
        if trace[-3] is not None:
            break
    return trace


def loaded(scaler_type: Scaler, way: str, state: Any) -> list[Any]:
    """Loads a state in one of several ways, and trains."""
    scaler = scaler_type("cpu") if way == "new" else started(scaler_type)

    def load() -> None:
        if way != "pickle":
            scaler.load_state_dict(state)
            return
        names = {"scale": "_init_scale", "_growth_tracker": "_init_growth_tracker"}
        items = state.items() if isinstance(state, dict) else ()
        renamed = {names.get(key, f"_{key}"): value for key, value in items}
        scaler.__setstate__(pickle.loads(pickle.dumps({**scaler.__getstate__(), **renamed})))

    result = [outcome(load).comparable()[0], everything(scaler)]
    return result + train(scaler)


def run(count: float, seed: int = 0) -> Tally:
    """Loads that many states."""
    tally = Tally("states")
    for number in range(int(count)):
        rng = random.Random(seed + number)
        state, way = damaged(rng), rng.choice(["new", "started", "pickle"])
        ours, theirs = (loaded(kind, way, copy_of(state)) for kind in (GradScaler, TorchScaler))
        tally.count += 1
        if found := difference(ours, theirs):
            tally.fail(f"seed {seed + number}, {way}, {state}: {found}")
    return tally


def copy_of(state: Any) -> Any:
    """Shallow copy with tensors of its own."""
    if not isinstance(state, dict):
        return copy.copy(state)
    return {
        k: v.clone() if type(v) is torch.Tensor and v.is_leaf and not v.requires_grad else v
        for k, v in state.items()
    }


if __name__ == "__main__":
    sys.exit(main(run, "count", 5000))
