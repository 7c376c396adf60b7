"""Passes over gradient lists: ours against torch's op and against a copy."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import providers
from .cases import GradCase, case_of, dtype_name, make_gradients
from .machine import cache_bytes, require_memory
from .providers import COPY, HALF_COPY, NORM, PATHS, Calls, Scalars
from .timing import Contenders, Job, Measured, Setting, Subject

# float64 gradients are rare, and would take a third of the time of all.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
QUICK_DTYPES = (torch.float32, torch.float16)
CPU_CASES = ("1000x1k", "10000x256", "resnet50", "bert_base", "one_64m")
CPU_QUICK_CASES = ("1000x1k", "10000x256", "resnet50", "one_16m")
GPU_CASES = ("1000x1k", "10000x256", "resnet50", "bert_large", "gpt2_124m", "one_512m")
GPU_QUICK_CASES = ("1000x1k", "10000x256", "bert_large", "gpt2_124m")

MAX_LISTS = 64
# Lists below this are replayed from a graph: queued singly, the host would be timed, too. Above it
# a copy in a graph is slower than a call's.
GRAPH_BELOW_BYTES = 512 << 20
# Gradients, both ends of a copy, and a copy to look for drift; or three lists to compare.
MEMORY_OF_LISTS = 4
# Most lists in turn for whole calls of the scaler, which keeps some tens of tables: more would
# upload at every call, unlike a loop with one optimizer.
MOST_LISTS = 8


def lists_jobs(
    on: Setting,
    of_list: Callable[[GradCase, torch.dtype, Setting], Measured],
    lists: Sequence[tuple[str, torch.dtype]] = (),
) -> list[Job]:
    """One job for each list, by default those of a device; to rehearse, for small ones."""
    full, quick = (GPU_CASES, GPU_QUICK_CASES) if on.queue else (CPU_CASES, CPU_QUICK_CASES)
    names, dtypes = (quick, QUICK_DTYPES) if on.effort.quick else (full, DTYPES)
    jobs, most = [], 1 if on.rehearses else None
    for name, dtype in lists or [*itertools.product(names, dtypes)][:most]:
        case = case_of(name)
        if on.rehearses:
            case = GradCase(name, tuple(tuple(min(n, 25) for n in s) for s in case.shapes[:3]))
        jobs.append(Job(f"{name} {dtype_name(dtype)}", functools.partial(of_list, case, dtype, on)))
    return jobs


def lists_in_turn(
    case: GradCase, dtype: torch.dtype, on: Setting, whole_calls: bool = False
) -> int:
    """Number of lists in turn for which none stays in the cache, and all fit into memory."""
    size, most = case.list_bytes(dtype), MOST_LISTS if whole_calls else MAX_LISTS
    # A rehearsal takes two turns, to see that they are taken.
    most = 1 if whole_calls and on.queue is None else 2 if on.rehearses else most
    lists = min(most, max(1, math.ceil(2 * cache_bytes(on.device) / size)))
    require_memory(MEMORY_OF_LISTS * lists * size, on.device)
    return lists


def measure(
    case: GradCase,
    dtype: torch.dtype,
    on: Setting,
    paths: Sequence[str] = (*PATHS, NORM),
    subject: str = "kernels",
) -> Measured:
    """Times each provider's paths over one list beside a copy; leaves a wrong backend out."""
    device, what = on.device, f"{case.name} {dtype_name(dtype)}"
    rotation, (names, notes) = lists_in_turn(case, dtype, on), providers.available(device)
    make = providers.launches if on.queue else providers.public_calls
    scalars, calls = Scalars.make(device), []
    gradients = make_gradients(case, dtype, device)
    for name in names:
        of_backend = functools.partial(make, name, device)
        try:
            providers.assert_parity(gradients, of_backend, paths, what)
            calls.append(of_backend(scalars))
        except Exception as error:
            notes.append(f"FAILED {name}, {what}: {error}")
    if not calls:
        raise AssertionError("; ".join(notes))
    del gradients
    if not providers.torch_takes(dtype, device):
        notes.append(f"torch {torch.__version__} has no kernel for {dtype_name(dtype)} here")
    rows, size = [], case.list_bytes(dtype)
    # On a CPU one list alone, still cached after it was written, and lists that leave the cache.
    for count in dict.fromkeys([rotation] if on.queue else [1, rotation]):
        lists = [make_gradients(case, dtype, device) for _ in range(count)]
        contenders = _contenders(lists, [providers.torch_calls(scalars), *calls], paths)
        over = Subject(subject, case, dtype, count)
        found = over.time(contenders, on, graphs=size < GRAPH_BELOW_BYTES)
        assert_steady(lists, what, scalars.found_inf)
        # With their bytes, and the bandwidth of a copy of as many, or else of the whole list.
        found = [replace(row, bytes=providers.moved_bytes(row.call, size)) for row in found]
        copies = {row.bytes: row.gb_s for row in found if row.call in (COPY, HALF_COPY)}
        whole = copies[2 * size]
        rows += [replace(row, copy_gb_s=copies.get(row.bytes, whole)) for row in found]
    return Measured(rows, notes)


def _contenders(
    lists: Sequence[list[Tensor]], calls: Sequence[Calls], paths: Sequence[str]
) -> Contenders:
    """One for each path and provider that has it, and ceilings; a call takes the next list."""
    size, like = sum(tensor.numel() for tensor in lists[0]), lists[0][0]
    # Norms need no op of their own.
    missing = () if providers.torch_takes(like.dtype, like.device) else PATHS
    prepared = [[of.prepare(each) for each in lists] for of in calls]
    contenders: Contenders = {
        (path, of.provider): in_turn(of.paths[path], each)
        for path in paths
        for of, each in zip(calls, prepared, strict=True)
        if of.provider != "torch" or path not in missing
    }
    # Copies of as many bytes in one piece as unscaling moves, and as a check.
    ends = [(like.new_zeros(size), like.new_ones(size)) for _ in lists]
    for path, part in ((COPY, size), (HALF_COPY, max(1, size // 2))):
        parts = [(target[:part], source[:part]) for target, source in ends]
        contenders[path, "torch"] = in_turn(lambda ends, turn: ends[0].copy_(ends[1]), parts)
    return contenders


def assert_steady(
    lists: Sequence[list[Tensor]], what: str, found_inf: Tensor | None = None, drift: float = 0.0
) -> None:
    """Raises AssertionError if a value left [0.5, 2] by more than a share, or a flag was set."""
    found = found_inf is not None and bool(found_inf.item())
    for tensors in lists:
        # Jointly, as checking each tensor alone would take seconds.
        low, high = torch.aminmax(torch.cat([tensor.reshape(-1) for tensor in tensors]))
        found |= not (low >= 0.5 * (1 - drift) and high <= 2.0 * (1 + drift))
    if found:
        raise AssertionError(f"{what}: the gradients drifted while timed")


def in_turn(call: Callable[[Any, int], object], prepared: Sequence[Any]) -> Callable[[int], object]:
    """Calls over lists in turn: all of them in the first half of a cycle, then in the second."""
    lists = len(prepared)
    return lambda number: call(prepared[number % lists], number // lists % 2)
