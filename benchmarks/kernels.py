"""Passes over gradient lists: ours against torch's op and against a copy."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import ceilings, providers
from .cases import CASES, GradCase, make_gradients
from .machine import cache_bytes, require_memory
from .providers import COPY, HALF_COPY, NORM, PATHS, READ, Calls, Scalars
from .results import Row
from .timing import Contender, Job, Measured, Setting, dtype_name, time_contenders

# float64 gradients are rare, and would take a third of the time of all.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
QUICK_DTYPES = (torch.float32, torch.float16)
CPU_CASES = ("1000x1k", "10000x256", "resnet50", "bert_base", "one_64m")
CPU_QUICK_CASES = ("1000x1k", "10000x256", "resnet50", "one_16m")
GPU_CASES = (
    *("1000x1k", "10000x256", "resnet50", "bert_large"),
    *("gpt2_124m", "gpt2_xl", "one_512m"),
)
GPU_QUICK_CASES = ("1000x1k", "10000x256", "bert_large", "gpt2_124m")

MAX_LISTS = 64
# Gradients, both ends of a copy, and a copy to look for drift; or three lists to compare.
MEMORY_OF_LISTS = 4
# Lists below this are replayed from a graph: queued singly, the host would be timed, too.
GRAPH_BELOW_BYTES = 512 << 20
# Most lists in turn for whole calls of the scaler, which keeps some tens of tables: more would
# upload at every call, unlike a loop with one optimizer.
MOST_LISTS = 8


def chosen(on: Setting) -> list[tuple[GradCase, torch.dtype]]:
    """Lists to measure on a device; to rehearse, a small one."""
    if on.rehearses:
        return [(GradCase("1000x1k", 3 * ((25,),)), torch.float32)]
    full, quick = (GPU_CASES, GPU_QUICK_CASES) if on.queue else (CPU_CASES, CPU_QUICK_CASES)
    names, dtypes = (quick, QUICK_DTYPES) if on.effort.quick else (full, DTYPES)
    return [(CASES[name], dtype) for name in names for dtype in dtypes]


def lists_jobs(
    on: Setting,
    of_list: Callable[[GradCase, torch.dtype, Setting], Measured],
    lists: Sequence[tuple[GradCase, torch.dtype]] = (),
) -> list[Job]:
    """One job for each list."""
    return [
        Job(f"{c.name} {dtype_name(d)}", functools.partial(of_list, c, d, on))
        for c, d in lists or chosen(on)
    ]


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
    paths: Sequence[str] = (),
    subject: str = "kernels",
) -> Measured:
    """Times each provider's paths over one list beside a copy; leaves a wrong backend out."""
    device, what = on.device, f"{case.name} {dtype_name(dtype)}"
    rotation, (names, notes) = lists_in_turn(case, dtype, on), providers.available(device)
    # The part "decisive" has norms on a GPU.
    paths = paths or (PATHS if on.queue else (*PATHS, NORM))
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
    measured = Measured(notes=notes)
    # On a CPU one list alone, still cached after it was written, and lists that leave the cache.
    for count in dict.fromkeys([rotation] if on.queue else [1, rotation]):
        lists = Lists(case, dtype, device, count)
        timed = time_contenders(
            *(subject, case, dtype, lists.contenders(scalars, calls, paths), on),
            lists=count,
            graphs=case.list_bytes(dtype) < GRAPH_BELOW_BYTES,
        )
        lists.assert_steady(scalars.found_inf)
        measured.rows += _with_bytes(timed.rows(), case.list_bytes(dtype))
        measured.notes += timed.notes
        why = f"torch {torch.__version__} has no kernel for {dtype_name(dtype)} on this device"
        missing = [timed.name((path, "torch")) for path in paths if not lists.has_torchs(path)]
        measured.rows += [Row(*name, missing=why) for name in missing]
    return measured


def _with_bytes(rows: Sequence[Row], size: int) -> list[Row]:
    """Rows with their bytes, and the bandwidth of a copy of as many, or else of the whole list."""
    rows = [replace(row, bytes=providers.moved_bytes(row.call, size)) for row in rows]
    copies = {row.bytes: row.gb_s for row in rows if row.call in (COPY, HALF_COPY)}
    return [replace(row, copy_gb_s=copies.get(row.bytes, copies[2 * size])) for row in rows]


class Lists:
    """Gradient lists that take turns."""

    def __init__(
        self, case: GradCase, dtype: torch.dtype, device: torch.device, count: int
    ) -> None:
        self.case, self.dtype, self._device = case, dtype, device
        self.lists = [make_gradients(case, dtype, device) for _ in range(count)]
        self._takes = providers.torch_takes(dtype, device)

    def has_torchs(self, path: str) -> bool:
        """Whether torch has a path for the dtype; norms need no op of their own."""
        return self._takes or path not in PATHS

    def contenders(
        self, scalars: Scalars, ours: Sequence[Calls], paths: Sequence[str]
    ) -> list[Contender]:
        """One for each path and provider that has it, and ceilings; a call takes the next list."""
        calls = [providers.torch_calls(scalars), *ours]
        prepared = [list(map(each.prepare, self.lists)) for each in calls]
        contenders = [
            Contender(path, of.provider, in_turn(of.paths[path], lists), of.around)
            for path in paths
            for of, lists in zip(calls, prepared, strict=True)
            if of.provider != "torch" or self.has_torchs(path)
        ]
        # Copies of as many bytes in one piece as unscaling moves, and as a check; a read.
        size = self.case.elements
        make = functools.partial(torch.full, (size,), dtype=self.dtype, device=self._device)
        ends = [(make(0.0), make(1.0)) for _ in self.lists]
        for path, part in ((COPY, size), (HALF_COPY, max(1, size // 2))):
            parts = [(target[:part], source[:part]) for target, source in ends]
            copy = in_turn(lambda ends, turn: ends[0].copy_(ends[1]), parts)
            contenders.append(Contender(path, "torch", copy))
        if self._device.type == "cuda" and ceilings.triton is not None:
            reads = [ceilings.reader(source) for _, source in ends]
            contenders.append(Contender(READ, "torch", in_turn(lambda read, turn: read(), reads)))
        return contenders

    def assert_steady(self, found_inf: Tensor | None = None) -> None:
        """Raises AssertionError if a value has left [0.5, 2] or a flag was set."""
        found = found_inf is not None and bool(found_inf.item())
        for tensors in self.lists:
            # Jointly, as checking each tensor alone would take seconds.
            low, high = torch.aminmax(torch.cat([tensor.reshape(-1) for tensor in tensors]))
            found |= not (low >= 0.5 and high <= 2.0)
        if found:
            what = f"{self.case.name} {dtype_name(self.dtype)}"
            raise AssertionError(f"{what}: the gradients drifted while timed")


def in_turn(call: Callable[[Any, int], object], prepared: Sequence[Any]) -> Callable[[int], object]:
    """Calls over lists in turn: all of them in the first half of a cycle, then in the second."""
    lists = len(prepared)
    return lambda number: call(prepared[number % lists], number // lists % 2)
