"""Cost of a step on a GPU: launches, copies, host syncs, uploads of tables and allocations."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from epilogues import epilogues
from gpu_support import Quiet, QuietFused, flag, kernels_of, no_syncs
from support.comparison import FLOATS
from support.gradients import make_gradient
from support.kernel_calls import grads_of, run_check, run_unscale
from support.optimizers import OPTIMIZERS
from tracing import Counts, counted, why_profiler_is_blind

from ampfast import _C, GradScaler, functional

pytestmark = pytest.mark.gpu

FUSED = ("fused_sgd", "fused_adam", "fused_adamw")


@pytest.fixture
def profiler() -> None:
    if reason := _why_blind():
        pytest.skip(reason)


_why_blind = cache(why_profiler_is_blind)


class Loop:
    """Scaler, loss, and parameters with fixed gradient memory."""

    def __init__(self, backend: str, device: torch.device, make: Callable[..., Any]) -> None:
        self.scaler = GradScaler(backend=backend)
        self.loss = torch.ones((), device=device)
        self.scaler.scale(self.loss)
        self.params = [torch.nn.Parameter(torch.ones(n, device=device)) for n in (5, 70_003, 4096)]
        for p in self.params:
            p.grad = torch.full_like(p, 64.0)
        self.optimizer = make(self.params)
        for _ in range(3):
            self.iteration()
            self.iteration_together()

    def iteration(self) -> None:
        self.scaler.scale(self.loss)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def iteration_together(self) -> None:
        self.scaler.scale(self.loss)
        self.scaler.step_and_update(self.optimizer)


def assert_counts(counts: Counts, kernels: int, syncs: int) -> None:
    assert len(counts.kernels) == kernels, counts
    assert len(counts.syncs) == syncs, counts
    # Every host sync is a copy to the host; nothing else is copied.
    assert len(counts.copies) == syncs, counts


@pytest.mark.usefixtures("profiler")
def test_plain_step_takes_three_kernels_and_one_sync(backend: str, device: torch.device) -> None:
    loop = Loop(backend, device, Quiet)
    assert_counts(counted(loop.iteration), kernels=3, syncs=1)
    assert_counts(counted(loop.iteration_together), kernels=2, syncs=1)


@pytest.mark.usefixtures("profiler")
def test_fused_step_takes_at_most_five_kernels_and_no_sync(
    backend: str, device: torch.device
) -> None:
    loop = Loop(backend, device, QuietFused)
    apart = counted(loop.iteration)
    assert len(apart.kernels) <= 5, apart
    assert not apart.syncs and not apart.copies, apart
    together = counted(loop.iteration_together)
    assert len(together.kernels) == len(apart.kernels) - 1, together
    assert not together.syncs and not together.copies, together


@pytest.mark.usefixtures("profiler")
@pytest.mark.parametrize("kind", FUSED)
def test_torch_fused_optimizers_never_wait(backend: str, device: torch.device, kind: str) -> None:
    loop = Loop(backend, device, OPTIMIZERS[kind])
    for run in (loop.iteration, loop.iteration_together):
        counts = counted(run)
        assert not counts.syncs and not counts.copies, counts


@pytest.mark.usefixtures("profiler")
def test_one_launch_for_any_number_of_tensors_of_a_dtype(
    backend: str, device: torch.device
) -> None:
    kernels = kernels_of(backend, device)
    for count in (1, 111, 10_000):
        grads = [torch.ones(3, device=device) for _ in range(count)]
        found = flag(0.0, device)
        run_check(kernels, grads_of(grads), found_inf=found)

        def check(grads: Any = grads, found: Any = found) -> None:
            run_check(kernels, grads_of(grads), found_inf=found)

        assert_counts(counted(check), kernels=1, syncs=0)
    mixed = [make_gradient("long", dtype).to(device) for dtype in FLOATS]
    inverse = flag(0.5, device)
    run_unscale(kernels, grads_of(mixed), inverse, is_scale=False)
    counts = counted(lambda: run_unscale(kernels, grads_of(mixed), inverse, is_scale=False))
    assert_counts(counts, kernels=len(FLOATS), syncs=0)


@pytest.mark.usefixtures("profiler")
@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_clipping_by_torchs_name_takes_two_kernels(
    backend: str, device: torch.device, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMPFAST_BACKEND", backend)
    loop = Loop(backend, device, Quiet)

    def clip() -> None:
        functional.clip_grad_norm_(loop.params, limit)

    loop.scaler.scale(loop.loss)
    loop.scaler.unscale_(loop.optimizer)
    for _ in range(2):  # compiles
        clip()
    assert_counts(counted(clip), kernels=2, syncs=0)


@pytest.mark.usefixtures("profiler")
def test_a_new_small_table_is_not_copied(backend: str, device: torch.device) -> None:
    kernels = kernels_of(backend, device)
    first = [torch.ones(300, device=device) for _ in range(50)]
    second = [torch.ones(301, device=device) for _ in range(50)]
    run_check(kernels, grads_of(first))
    counts = counted(lambda: run_check(kernels, grads_of(second)))
    assert_counts(counts, kernels=1, syncs=0)


@pytest.mark.usefixtures("profiler")
def test_a_new_long_table_is_one_copy_without_waiting(backend: str, device: torch.device) -> None:
    kernels = kernels_of(backend, device)
    memory = torch.ones(20_000, device=device)
    run_check(kernels, grads_of(list(memory[10_000:].split(2))))
    second = list(memory[:10_000].split(2))
    counts = counted(lambda: run_check(kernels, grads_of(second)))
    assert len(counts.kernels) == 1 and len(counts.copies) == 1, counts
    assert "HtoD" in counts.copies[0] and "Pinned" in counts.copies[0], counts
    assert not counts.syncs, counts


@pytest.mark.usefixtures("profiler")
@pytest.mark.parametrize("tensors", [3, 5_000])
def test_replays_copy_nothing(backend: str, device: torch.device, tensors: int) -> None:
    kernels = kernels_of(backend, device)
    memory = torch.full((2 * tensors,), 8.0, device=device)
    grads = grads_of(list(memory.split(2)))
    inverse, found = flag(0.5, device), flag(0.0, device)
    run_unscale(kernels, grads, inverse, is_scale=False, found_inf=found)
    graph, before = torch.cuda.CUDAGraph(), _C.uploads()
    with torch.cuda.graph(graph):
        run_unscale(kernels, grads, inverse, is_scale=False, found_inf=found)
    assert _C.uploads() == before
    counts = counted(graph.replay)
    assert_counts(counts, kernels=1, syncs=0)
    assert len({*memory.tolist()}) == 1 and found.item() == 0.0


@pytest.mark.parametrize("kind", [*FUSED, "quiet"])
def test_nothing_waits_for_the_device(backend: str, device: torch.device, kind: str) -> None:
    loop = Loop(backend, device, OPTIMIZERS.get(kind, QuietFused))
    with no_syncs():
        for step in range(6):
            if step > 2:  # at other addresses
                for p in loop.params:
                    p.grad = torch.full_like(p, 64.0)
            loop.iteration()
            loop.iteration_together()


@pytest.mark.parametrize(
    "make",
    [Quiet, QuietFused, OPTIMIZERS["fused_adam"]],
    ids=["plain", "reads_scale", "fused_adam"],
)
def test_nothing_is_uploaded_while_nothing_changes(
    backend: str, device: torch.device, make: Callable[..., Any]
) -> None:
    loop = Loop(backend, device, make)
    before = _C.uploads()
    for _ in range(10):
        loop.iteration()
        loop.iteration_together()
    assert _C.uploads() == before
    tables = _C.tables_made()
    kept = loop.params[0].grad  # else the new tensor may take its address
    loop.params[0].grad = torch.full((5,), 64.0, device=device)
    loop.iteration()
    assert kept.data_ptr() != loop.params[0].grad.data_ptr()
    assert (_C.tables_made(), _C.uploads()) == (tables + 1, before)
    for _ in range(6):
        loop.iteration()
    assert (_C.tables_made(), _C.uploads()) == (tables + 1, before + 1)


def allocations(call: Callable[[], object], device: torch.device) -> int:
    name = "allocation.all.allocated"
    before = torch.cuda.memory_stats(device)[name]
    call()
    return torch.cuda.memory_stats(device)[name] - before


@pytest.mark.parametrize(("make", "most"), [(Quiet, 1), (QuietFused, 2)])
def test_only_the_flag_is_allocated(
    backend: str, device: torch.device, make: Callable[..., Any], most: int
) -> None:
    loop = Loop(backend, device, make)

    def apart() -> None:
        loop.scaler.step(loop.optimizer)
        loop.scaler.update()

    def together() -> None:
        loop.scaler.step_and_update(loop.optimizer)

    # A fused optimizer also gets a grad_scale of its own.
    for run in (apart, together):
        assert [allocations(run, device) for _ in range(5)] == [most] * 5


def test_gradients_of_fused_optimizers_are_only_read(backend: str, device: torch.device) -> None:
    loop = Loop(backend, device, QuietFused)
    for p in loop.params:
        p.grad = torch.randn_like(p)
    before = [p.grad.clone() for p in loop.params]
    loop.iteration()
    loop.iteration_together()
    for p, kept in zip(loop.params, before, strict=True):
        assert torch.equal(p.grad, kept)


def test_many_launches_find_every_infinity(backend: str, device: torch.device) -> None:
    """100,000 epilogues, each with an infinity in a random program or none."""
    launches, chunk = 100_000, 2_000
    programs = 8 * torch.cuda.get_device_properties(device).multi_processor_count
    elements = programs * _C.WINDOW_BYTES // 2
    found, expected, state = epilogues(
        kernels_of(backend, device), device, elements, launches, chunk, (2.0, 0.5, 3)
    )
    assert found == 0, f"{found} of {launches} flags are wrong"
    assert state == expected
