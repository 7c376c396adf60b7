"""Unscaling and checking gradient lists: ours against torch's op and against a copy."""

from __future__ import annotations

import functools
import itertools
import math

import torch
from torch import Tensor

from ampfast import backends, functional

from .cases import CASES, GradCase, make_gradients
from .harness import Contender, Effort, Job, Measured, Samples, assert_same, interleave
from .machine import available_bytes, cache_bytes
from .results import Goal, Row

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FULL_CASES = ("1000x1k", "10000x256", "resnet50", "bert_base", "one_64m")
QUICK_CASES = ("1000x1k", "10000x256", "resnet50", "one_16m")
QUICK_DTYPES = (torch.float32, torch.float16)

MAX_LISTS = 64

# torch's time over ours for `unscale_`; a single huge tensor and a real model must not get slower.
SPEEDUP_GOALS = {"1000x1k": 2.5, "bert_base": 1.0, "bert_large": 1.0, "one_64m": 1.0}


def jobs(effort: Effort, cases: tuple[str, ...] | None = None) -> list[Job]:
    """One job for each list and dtype."""
    names = cases or (QUICK_CASES if effort.quick else FULL_CASES)
    dtypes = QUICK_DTYPES if effort.quick else DTYPES
    device = torch.device("cpu")
    return [
        Job(
            f"{name} {_name(dtype)}",
            functools.partial(measure, CASES[name], dtype, device, effort),
        )
        for name in names
        for dtype in dtypes
    ]


def measure(case: GradCase, dtype: torch.dtype, device: torch.device, effort: Effort) -> Measured:
    """Times torch's op, `unscale_`, `check_` and a copy over one list.

    Raises:
        AssertionError: If ampfast's results are not torch's, or the gradients drifted while timed.
        MemoryError: If the lists would not fit.
    """
    # A list alone, as it is found right after it was written; and enough lists in turn that a small
    # one has always left the cache.
    list_bytes = case.list_bytes(dtype)
    rotation = min(MAX_LISTS, max(1, math.ceil(2 * cache_bytes() / list_bytes)))
    needed = int(3.5 * rotation * list_bytes)
    available = available_bytes()
    if available is not None and available < needed:
        raise MemoryError(f"needs {needed >> 20} MiB, {available >> 20} MiB are available")

    assert_parity(case, dtype, device)
    backend = backends.default_for(device)
    measured = Measured()
    for lists in sorted({1, rotation}):
        samples = _time(case, dtype, device, backend, lists, effort)
        rows = _rows(case, dtype, backend, samples, lists)
        measured.rows += rows
        measured.goals += _goals(case, rows[0].list_name, dtype, backend, samples)
    return measured


def assert_parity(case: GradCase, dtype: torch.dtype, device: torch.device) -> None:
    """Compares gradients and flags with torch's, for finite gradients and for some that are not."""
    theirs = make_gradients(case, dtype, device)
    ours = [gradient.clone() for gradient in theirs]
    inv_scale = torch.tensor(1 / 3, device=device)
    for finite in (True, False):
        if not finite:
            for gradients in (theirs, ours):
                gradients[len(gradients) // 2].view(-1)[-1] = math.inf
                gradients[-1].view(-1)[0] = math.nan
        their_flag, our_flag, checked = (torch.zeros((), device=device) for _ in range(3))
        functional.check_(ours, checked)
        torch._amp_foreach_non_finite_check_and_unscale_(theirs, their_flag, inv_scale)
        functional.unscale_(ours, our_flag, inv_scale)
        what = f"{case.name} {_name(dtype)}, {'all' if finite else 'not all'} finite"
        expected = torch.full((), float(not finite), device=device)
        assert_same([their_flag, our_flag, checked], 3 * [expected], f"found_inf of {what}")
        assert_same(ours, theirs, f"gradients of {what}")


def _time(
    case: GradCase,
    dtype: torch.dtype,
    device: torch.device,
    backend: str,
    lists: int,
    effort: Effort,
) -> Samples:
    gradients = [make_gradients(case, dtype, device) for _ in range(lists)]
    sources = [torch.ones(case.elements, dtype=dtype, device=device) for _ in range(lists)]
    targets = [torch.zeros(case.elements, dtype=dtype, device=device) for _ in range(lists)]
    # Halved in one turn and doubled in the next: the values never drift, and an inverse scale of 1,
    # for which no multiplication is needed, does not occur.
    inverses = [torch.tensor(value, device=device) for value in (0.5, 2.0)]
    found_inf = torch.zeros((), device=device)
    torch_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_

    def inverse(call: int) -> Tensor:
        return inverses[call // lists % 2]

    samples = interleave(
        [
            Contender(
                "unscale",
                "torch",
                lambda call: torch_unscale_(gradients[call % lists], found_inf, inverse(call)),
            ),
            Contender(
                "unscale",
                backend,
                lambda call: functional.unscale_(gradients[call % lists], found_inf, inverse(call)),
            ),
            Contender(
                "check",
                backend,
                lambda call: functional.check_(gradients[call % lists], found_inf),
            ),
            Contender(
                "copy",
                "torch",
                lambda call: targets[call % lists].copy_(sources[call % lists]),
            ),
        ],
        effort,
        cycle=2 * lists,
    )
    steady = all(
        bool(((gradient >= 0.5) & (gradient <= 2.0)).all())
        for gradient in itertools.chain.from_iterable(gradients)
    )
    if found_inf.item() or not steady:
        raise AssertionError(f"{case.name} {_name(dtype)}: the gradients drifted while timed")
    return samples


def moved_bytes(path: str, list_bytes: int) -> int:
    """What a path has to move: a check reads the list; unscaling and a copy also write as much."""
    return list_bytes if path == "check" else 2 * list_bytes


def _rows(
    case: GradCase, dtype: torch.dtype, backend: str, samples: Samples, lists: int
) -> list[Row]:
    list_bytes = case.list_bytes(dtype)
    copy_gb_s = moved_bytes("copy", list_bytes) / samples.spread("copy", "torch").p50 / 1e9
    rows = []
    for path, provider in (
        ("unscale", "torch"),
        ("unscale", backend),
        ("check", backend),
        ("copy", "torch"),
    ):
        seconds = samples.spread(path, provider)
        moved = moved_bytes(path, list_bytes)
        # torch has no check that does not write, so both of ours are compared with its one op.
        ours = provider != "torch"
        vs_torch = samples.ratio(("unscale", "torch"), (path, provider)).p50 if ours else None
        rows.append(
            Row(
                subject="kernels",
                case=case.name,
                dtype=_name(dtype),
                path=path,
                provider=provider,
                ms_p20=seconds.p20 * 1e3,
                ms_p50=seconds.p50 * 1e3,
                ms_p80=seconds.p80 * 1e3,
                lists=lists,
                list_bytes=list_bytes,
                bytes=moved,
                gb_s=moved / seconds.p50 / 1e9,
                copy_gb_s=copy_gb_s,
                vs_torch=vs_torch,
            )
        )
    return rows


def _goals(
    case: GradCase, list_name: str, dtype: torch.dtype, backend: str, samples: Samples
) -> list[Goal]:
    place = (list_name, _name(dtype))
    goals = []
    # A list that is not in the cache takes the time of its way from memory, with torch too: float32
    # is as fast as a copy there, so "faster" is asked of a list alone.
    limit = SPEEDUP_GOALS.get(case.name)
    if limit is not None and (limit == 1.0 or list_name == case.name):
        ratio = samples.ratio(("unscale", "torch"), ("unscale", backend))
        goals.append(
            Goal.of_spread(
                "unscale_, times as fast as torch",
                *place,
                ">=",
                limit,
                ratio,
                limit == 1.0,
            )
        )
    ratio = samples.ratio(("check", backend), ("unscale", backend))
    goals.append(
        Goal.of_spread("check_, time over that of unscale_", *place, "<=", 1.0, ratio, True)
    )
    return goals


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
