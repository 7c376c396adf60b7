"""Checking and unscaling gradient lists: ours against torch's op and against a copy."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from . import goals, providers
from .cases import CASES, GradCase, make_gradients
from .device_time import GRAPH_BELOW_BYTES
from .harness import REHEARSAL, Contender, Job, Measured, Setting
from .machine import cache_bytes, require_memory
from .providers import COPY, HALF_COPY, NORM, PATHS, Calls, Scalars, moved_bytes
from .timing import dtype_name, time_contenders

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

# Relative tolerance of a norm, as docs/kernels.md has it.
NORM_TOLERANCE = 3e-7
MAX_LISTS = 64
# Gradients, both ends of a copy, and a copy to look for drift; or three lists to compare.
MEMORY_OF_LISTS = 4


def chosen(on: Setting) -> list[tuple[GradCase, torch.dtype]]:
    """Lists to measure on a device; to rehearse, a small one."""
    if on.effort is REHEARSAL:
        return [(GradCase("1000x1k", 3 * ((25,),)), torch.float32)]
    full, quick = (GPU_CASES, GPU_QUICK_CASES) if on.queue else (CPU_CASES, CPU_QUICK_CASES)
    names, dtypes = (quick, QUICK_DTYPES) if on.effort.quick else (full, DTYPES)
    return [(CASES[name], dtype) for name in names for dtype in dtypes]


def jobs(
    on: Setting,
    of_list: Callable[[GradCase, torch.dtype, Setting], Measured],
    lists: Sequence[tuple[GradCase, torch.dtype]] | None = None,
) -> list[Job]:
    """One job for each list."""
    return [
        Job(f"{c.name} {dtype_name(d)}", functools.partial(of_list, c, d, on))
        for c, d in lists or chosen(on)
    ]


def measure(case: GradCase, dtype: torch.dtype, on: Setting) -> Measured:
    """Times every provider's paths and a copy over one list."""
    device, queue = on.device, on.queue
    list_bytes = case.list_bytes(dtype)
    rotation = lists_beyond_cache(list_bytes, device)
    require_memory((MEMORY_OF_LISTS * rotation + 1) * list_bytes, device)
    names, notes = providers.available(device)
    measured = Measured(notes=notes)
    takes = providers.torch_takes(dtype, device)
    if not takes:
        notes.append(
            f"torch: not measured with {dtype_name(dtype)}, its op has no kernel for it on a "
            f"{device.type} device; results were compared with those of its op on the CPU"
        )
    for name in names:
        providers.assert_parity(case, dtype, device, name)

    # The part "decisive" has norms on a GPU.
    paths = PATHS if queue else (*PATHS, NORM)
    if queue is None:
        assert_norm(case, dtype, names[0])
    scalars = Scalars.make(device)
    torchs = [providers.torch_calls(scalars)] if takes else []
    calls = torchs + [providers.public_calls(name, device, scalars) for name in names]
    repeated, rotations = calls, [1, rotation]
    alone = None
    if queue is not None:
        repeated = torchs + [providers.launches(name, device, scalars) for name in names]
        rotations = [rotation]
        alone = Lists(case, dtype, device, 1)
    # On a CPU one list alone, still cached after it was written; and enough lists in turn that even
    # a small one has left the cache.
    for lists in dict.fromkeys(rotations):
        gradients = Lists(case, dtype, device, lists)
        contenders = gradients.contenders(repeated, paths) + gradients.copies()
        timed = time_contenders(
            *("kernels", case, dtype, contenders, on),
            lists=lists,
            alone=alone and alone.contenders(calls),
            graphs=list_bytes < GRAPH_BELOW_BYTES,
        )
        for each in (gradients, alone):
            if each is not None:
                each.assert_steady(scalars.found_inf)
        notes += timed.notes
        rows = [replace(row, bytes=moved_bytes(row.call, list_bytes)) for row in timed.rows()]
        copies = {row.bytes: row.gb_s for row in rows if row.call in (COPY, HALF_COPY)}
        measured.rows += [replace(row, copy_gb_s=copies[row.bytes]) for row in rows]
        for name in names:
            measured.goals += goals.of_kernels(timed, name)
    return measured


def assert_norm(case: GradCase, dtype: torch.dtype, name: str) -> None:
    """Compares the norm of unscaled gradients on the CPU with that in float64."""
    device = torch.device("cpu")
    gradients = make_gradients(case, dtype, device)
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in gradients]
    exact = torch.linalg.vector_norm(torch.stack(norms)).item() / 2
    calls = providers.public_calls(name, device, Scalars.make(device))
    norm = math.sqrt(calls.paths[NORM](gradients, 0)[0])
    if abs(norm - exact) > NORM_TOLERANCE * exact:
        raise AssertionError(
            f"{case.name} {dtype_name(dtype)}: the norm by {name} is {norm}, not {exact}"
        )


def lists_beyond_cache(list_bytes: int, device: torch.device, most: int = MAX_LISTS) -> int:
    """Number of lists in turn for which none stays in the cache."""
    return min(most, max(1, math.ceil(2 * cache_bytes(device) / list_bytes)))


class Lists:
    """Gradient lists that take turns, and equal memory for a copy."""

    def __init__(
        self, case: GradCase, dtype: torch.dtype, device: torch.device, lists: int
    ) -> None:
        self._what = f"{case.name} {dtype_name(dtype)}"
        self._case, self._dtype, self._device = case, dtype, device
        self.lists = [make_gradients(case, dtype, device) for _ in range(lists)]

    def contenders(
        self, calls: Sequence[Calls], paths: Sequence[str] = providers.PATHS
    ) -> list[Contender]:
        """One for each path and provider; a call takes the next list."""
        prepared = {
            provider.provider: [provider.prepare(gradients) for gradients in self.lists]
            for provider in calls
        }
        return [
            Contender(
                path,
                provider.provider,
                self._in_turn(provider.paths[path], prepared[provider.provider]),
                around=functools.partial(_backend_of, provider.provider),
            )
            for path in paths
            for provider in calls
        ]

    def pieces(self) -> list[tuple[Tensor, Tensor]]:
        """Target and source of a copy for each list, of as much memory in one piece."""
        size = self._case.elements
        make = functools.partial(torch.full, (size,), dtype=self._dtype, device=self._device)
        return [(make(0.0), make(1.0)) for _ in self.lists]

    def copies(self, ends: Sequence[tuple[Tensor, Tensor]] | None = None) -> list[Contender]:
        """A copy of as many bytes as unscaling moves, and one of as many as a check."""
        ends = ends or self.pieces()
        elements = self._case.elements
        half = max(1, elements // 2)
        halves = [(target[:half], source[:half]) for target, source in ends]

        def copy(ends: tuple[Tensor, Tensor], turn: int) -> None:
            ends[0].copy_(ends[1])

        return [
            Contender(COPY, "torch", self._in_turn(copy, ends)),
            Contender(HALF_COPY, "torch", self._in_turn(copy, halves)),
        ]

    def assert_steady(self, found_inf: Tensor | None = None) -> None:
        """Raises AssertionError if a value has left [0.5, 2] or a flag was set."""
        found = found_inf is not None and bool(found_inf.item())
        for tensors in self.lists:
            # Jointly, as checking each tensor alone would take seconds.
            low, high = torch.aminmax(torch.cat([tensor.reshape(-1) for tensor in tensors]))
            found |= not (low >= 0.5 and high <= 2.0)
        if found:
            raise AssertionError(f"{self._what}: the gradients drifted while timed")

    def _in_turn(
        self, call: Callable[[object, int], object], prepared: Sequence[object]
    ) -> Callable[[int], object]:
        lists = len(prepared)
        return lambda number: call(prepared[number % lists], number // lists % 2)


def _backend_of(provider: str) -> AbstractContextManager[object]:
    return nullcontext() if provider == "torch" else providers.default_backend(provider)
