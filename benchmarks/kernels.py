"""Checking and unscaling gradient lists: ours against torch's op and against a copy."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from . import counts, goals, providers
from .cases import CASES, GradCase, make_gradients
from .device_time import GRAPH_BELOW_BYTES, EventTimer, GraphTimer, Queue, host_timer
from .harness import Contender, Key, Measured, Setting, interleave
from .machine import cache_bytes, require_memory, tensors_per_launch
from .providers import COPY, HALF_COPY, Calls, Scalars, moved_bytes
from .timing import Timed, dtype_name

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# float64 gradients are rare, and take a third of the time of all.
FULL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
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


def chosen(
    on: Setting, cases: Sequence[str] | None = None, dtypes: Sequence[torch.dtype] = ()
) -> list[tuple[GradCase, torch.dtype]]:
    """Lists to measure on a device: the requested ones, else those that the time allows."""
    effort = on.effort
    if on.device.type == "cuda":
        usual = GPU_QUICK_CASES if effort.quick else GPU_CASES
    else:
        usual = CPU_QUICK_CASES if effort.quick else CPU_CASES
    dtypes = dtypes or (QUICK_DTYPES if effort.quick else FULL_DTYPES)
    return [(CASES[name], dtype) for name in cases or usual for dtype in dtypes]


def measure(case: GradCase, dtype: torch.dtype, on: Setting) -> Measured:
    """Times every provider's paths and a copy over one list.

    Raises:
        AssertionError: If a result is not torch's, or the gradients drifted while timed.
        MemoryError: If the lists would not fit.
    """
    device, effort, queue = on.device, on.effort, on.queue
    rotation = lists_beyond_cache(case.list_bytes(dtype), device)
    require_memory(int(MEMORY_OF_LISTS * rotation * case.list_bytes(dtype)), device)
    names, notes = providers.available(device)
    measured = Measured(notes=notes)
    takes = providers.torch_takes(dtype, device)
    if not takes:
        measured.notes.append(
            f"torch: not measured with {dtype_name(dtype)}, its op has no kernel for it on a "
            f"{device.type} device; results were compared with those of its op on the CPU"
        )
    for name in names:
        providers.assert_parity(case, dtype, device, name)

    scalars = Scalars.make(device)
    ours = [providers.public_calls(name, device, scalars) for name in names]
    torchs = [providers.torch_calls(scalars)] if takes else []
    public = torchs + ours
    if queue is None:
        # One list alone, still cached after it was written; and enough lists in turn that even a
        # small one has left the cache.
        for lists in sorted({1, rotation}):
            gradients = Lists(case, dtype, device, lists)
            contenders = gradients.contenders(public) + gradients.copies()
            samples = interleave(contenders, effort, cycle=2 * lists)
            gradients.assert_steady(scalars.found_inf)
            _add(measured, Timed("kernels", case, dtype, contenders, samples, lists=lists), names)
        return measured

    alone = Lists(case, dtype, device, 1)
    calls = alone.contenders(public)
    counted = counts.of_contenders(calls, queue)
    host = interleave(calls, replace(effort, sample_s=0.0), timer=host_timer(queue))
    alone.assert_steady(scalars.found_inf)
    del alone, calls

    gradients = Lists(case, dtype, device, rotation)
    launched = torchs + [providers.launches(name, device, scalars) for name in names]
    contenders = gradients.contenders(launched) + gradients.copies()
    cycle = 2 * rotation
    timer = _device_timer(
        *(contenders, case.list_bytes(dtype), cycle, queue),
        *(counts.launches(counted), measured.notes),
    )
    samples = interleave(contenders, effort, cycle=cycle, timer=timer)
    gradients.assert_steady(scalars.found_inf)
    timed = Timed(
        *("kernels", case, dtype, contenders, samples, timer.name, rotation),
        host=host,
        counts=counted,
        tensors_per_launch=tensors_per_launch(torch.__version__, torch.version.cuda),
    )
    _add(measured, timed, names)
    return measured


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

    def contenders(self, calls: Sequence[Calls]) -> list[Contender]:
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
            for path in providers.PATHS
            for provider in calls
        ]

    def copies(self) -> list[Contender]:
        """A copy of as many bytes as unscaling moves, and one of as many as a check."""
        elements = self._case.elements
        ends = [
            tuple(
                torch.full((elements,), value, dtype=self._dtype, device=self._device)
                for value in (0.0, 1.0)
            )
            for _ in self.lists
        ]
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


def _device_timer(
    contenders: Sequence[Contender],
    list_bytes: int,
    cycle: int,
    queue: Queue,
    launches: dict[Key, int | None],
    notes: list[str],
) -> GraphTimer | EventTimer:
    """Timer that suits the size, the same for all contenders."""
    if list_bytes < GRAPH_BELOW_BYTES:
        try:
            return GraphTimer(queue, contenders, cycle)
        except RuntimeError as error:
            notes.append(f"timed by events, since a graph could not be captured: {error}")
    return EventTimer(queue, launches, cycle)


def _add(measured: Measured, timed: Timed, names: Sequence[str]) -> None:
    rows = [replace(row, bytes=moved_bytes(row.call, timed.list_bytes)) for row in timed.rows()]
    copies = {row.bytes: row.gb_s for row in rows if row.call in (COPY, HALF_COPY)}
    measured.rows += [replace(row, copy_gb_s=copies[row.bytes]) for row in rows]
    for name in names:
        measured.goals += goals.of_kernels(timed, name)
