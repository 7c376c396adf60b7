"""Proof on this machine that ampfast computes what torch computes, with a table of times."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

import ampfast
from ampfast import backends
from ampfast.backends.scalars import allocate
from ampfast.cli import info

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# Around the sizes at which kernels change their way; some are strided.
_SHAPES = ((1,), (7,), (0,), (257,), (64, 65), (4096,), (4097,), (3, 5, 7), (70_001,))
# One that is exact, and one that rounds.
_SCALES = (4.0, 3.0)
_BAD = {"finite": None, "inf": math.inf, "NaN": math.nan}
# Largest relative error of a norm, by its dtype; see "Exactness" in docs/contributing/kernels.md.
_NORM = {torch.float32: 1e-6, torch.float64: 1e-12}
_STEPS = 40


def run() -> int:
    """Compares ampfast with torch on every device of this machine, and prints one block of text.

    Gradient lists of each dtype go through each backend, a small training through both scalers.

    Returns:
        The exit code: 1 if anything differs or fails, else 0.
    """
    lines = [json.dumps(info.collect(), indent=2), ""]
    for device in _devices():
        kinds = [each for each in backends.report() if each.available]
        served = [k.name for k in kinds if not k.device_types or device.type in k.device_types]
        print(f"ampfast check: {device}, {', '.join(served)}", file=sys.stderr)
        for name in served:
            for dtype in _DTYPES if device.type != "mps" else _DTYPES[:3]:
                (found,) = _attempt(_of_lists, device, name, dtype)
                title = str(dtype).removeprefix("torch.")
                lines.append(f"{device.type:5} {name:7} {title:9} {found}")
        lines += [f"{device.type:5} {line}" for line in _attempt(_trainings, device)]
        lines += [f"{device.type:5} {line}" for line in _attempt(_times, device, served)]
    wrong = sum("DIFFERS" in line or "FAILS" in line for line in lines)
    lines.append(f"{wrong} lines differ: please open an issue" if wrong else "Nothing differs.")
    print("ampfast check: in an issue, paste all of the following", file=sys.stderr, flush=True)
    print("\n".join(["```text", *lines, "```"]))
    return int(wrong > 0)


def _devices() -> list[torch.device]:
    found = torch.accelerator.current_accelerator(check_available=True)
    return [torch.device("cpu"), *([] if found is None else [found])]


def _attempt(call: Callable[..., list[str]], *args: Any) -> list[str]:
    try:
        return call(*args)
    except Exception as error:  # which this command is to find
        return [f"FAILS: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"]


def _of_lists(device: torch.device, name: str, dtype: torch.dtype) -> list[str]:
    """Unscales lists beside torch's op, and measures them beside float64."""
    for scale in _SCALES:
        for kind, bad in _BAD.items():
            grads = _grads(dtype, scale, bad)
            ours = [each.to(device) for each in grads]
            scaler = _scaler(ampfast.GradScaler, device, scale, backend=name, allow_fp16=True)
            optimizer = _optimizer(ours)
            scaler.unscale_(optimizer)
            theirs, flag = _by_torch(grads, device, scale)
            found = float(scaler.found_inf(optimizer)) != 0
            pairs = zip(optimizer.param_groups[0]["params"], theirs, strict=True)
            where = [i for i, (p, t) in enumerate(pairs) if not _is_same(p.grad.cpu(), t)]
            if where or found is not flag:
                return [f"DIFFERS: {kind}, scale {scale:g}, tensors {where}, flag {found}"]
    grads = _grads(dtype, 4.0, None)
    scaler = _scaler(ampfast.GradScaler, device, 4.0, backend=name, allow_fp16=True)
    norm = scaler.clip_grad_norm_(_optimizer([each.to(device) for each in grads]), math.inf)
    exact = math.sqrt(sum(float((each.double() / 4).square().sum()) for each in grads))
    worst = abs(float(norm) - exact) / exact
    if worst > _NORM[norm.dtype]:
        return [f"DIFFERS: a norm by {worst:.1e}"]
    count = len(_SCALES) * len(_BAD)
    return [f"equal to torch's op: {count} lists; error of a norm {worst:.1e}"]


def _is_same(a: Tensor, b: Tensor) -> bool:
    # NaN of any bits, as torch's kernels write several kinds.
    same = (a == b) & (a.signbit() == b.signbit()) | (a.isnan() & b.isnan())
    return a.shape == b.shape and bool(same.all())


def _grads(dtype: torch.dtype, scale: float, bad: float | None) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(0)
    grads = [(torch.randn(shape, generator=drawn) * scale).to(dtype) for shape in _SHAPES]
    grads[4] = grads[4].t()
    if bad is not None:
        grads[-1][-1] = bad
    return grads


def _optimizer(grads: list[Tensor]) -> Any:
    params = [torch.nn.Parameter(torch.empty_like(each)) for each in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    return SimpleNamespace(param_groups=[{"params": params}])


def _scaler(kind: Any, device: torch.device, scale: float, **more: Any) -> Any:
    made = kind(device.type, init_scale=scale, **more)
    made.scale(allocate(torch.ones, (), dtype=torch.float32, device=device))
    return made


def _by_torch(grads: list[Tensor], device: torch.device, scale: float) -> tuple[list[Tensor], bool]:
    """What torch's op makes of gradients, and its flag."""
    inverse = allocate(torch.tensor, scale, dtype=torch.float64, device="cpu").reciprocal()
    here = [each.to(device, copy=True) for each in grads]
    flag = allocate(torch.zeros, 1, dtype=torch.float32, device=device)
    torch._amp_foreach_non_finite_check_and_unscale_(here, flag, inverse.float().to(device))
    return [each.cpu() for each in here], bool(flag)


def _trainings(device: torch.device) -> list[str]:
    """Trains a small model in float16 by both scalers, with overflows."""
    theirs, ours = (_trained(device, kind) for kind in (torch.amp.GradScaler, ampfast.GradScaler))
    skipped = sum(b < a for a, b in zip(ours[1], ours[1][1:], strict=False))
    for name, a, b in zip(("losses", "scales", "weights"), theirs, ours, strict=True):
        if not all(repr(x) == repr(y) for x, y in zip(a, b, strict=True)):
            return [f"a training of {_STEPS} steps DIFFERS in its {name}"]
    title = f"a training of {_STEPS} steps in float16, {skipped} skipped"
    return [f"{title}: equal to torch's, bit for bit"]


def _trained(device: torch.device, kind: Any) -> tuple[list[float], ...]:
    torch.manual_seed(0)
    layers = torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)
    batches, model = torch.randn(_STEPS, 8, 16), torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = kind(device.type, init_scale=2.0**24, growth_interval=5)
    losses, scales = [], []
    for batch in batches.to(device):
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.float16):
            loss = model(batch).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    weights = [float(each) for param in model.parameters() for each in param.flatten().tolist()]
    return losses, scales, weights


def _times(device: torch.device, served: list[str]) -> list[str]:
    """Times of an unscaling of many tensors, by torch and by each backend."""
    rows = ["us, unscale_ and update of 100 tensors of 10000 float32 (fastest)"]
    one = allocate(torch.ones, 10_000, dtype=torch.float32, device=device)
    for name in ("torch", *served):
        kind: Any = torch.amp.GradScaler if name == "torch" else ampfast.GradScaler
        more = {} if name == "torch" else {"backend": name}
        known = {"scaler": _scaler(kind, device, 1.0, **more), "optimizer": _optimizer([one] * 100)}
        calls, threads = "scaler.unscale_(optimizer); scaler.update()", torch.get_num_threads()
        timed = Timer(calls, globals=known, num_threads=threads).blocked_autorange()
        rows.append(f"  {name:48} {min(timed.times) * 1e6:8.0f}")
    return rows
