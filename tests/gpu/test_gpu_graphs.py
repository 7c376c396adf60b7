"""CUDA graphs, streams, and tables of gradients while steps are in flight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_support import A_WHILE, kernels_of, no_syncs, side_stream
from support.captures import BAD_AT, ITERATIONS, OPTIMIZERS, SETTINGS, SKIPPABLE, Training
from support.comparison import FLOATS, TorchScaler, assert_same
from support.gradients import make_gradient
from support.kernels import flag, grads_of, run_check, run_sums, run_unscale
from support.models import unscaled

import ampfast
from ampfast import _C, GradScaler

HAS_NODES = hasattr(torch.cuda.CUDAGraph, "begin_capture_to_if_node") and not torch.version.hip


def trainings(
    backend: str, kind: str, device: torch.device, **more: Any
) -> tuple[Training, Training]:
    """Our training, to be captured, and torch's eager one, after three warm-up iterations."""
    ours = Training(GradScaler(backend=backend, **SETTINGS, **more), kind, device)
    theirs = Training(TorchScaler(**SETTINGS), kind, device)
    with side_stream():
        for iteration in range(3):
            # Compiles the captured work beforehand.
            ours.iterate(iteration, together=iteration == 1)
    for iteration in range(3):
        theirs.iterate(iteration)
    assert_same(ours.observe(), theirs.observe(), "before the capture")
    return ours, theirs


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("captured", ["backward", "step", "iteration"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_replays_are_as_torchs_eager_steps(
    backend: str, device: torch.device, kind: str, captured: str, together: bool
) -> None:
    if captured != "backward" and kind in SKIPPABLE and not HAS_NODES:
        pytest.skip("steps are skipped by conditional nodes: torch 2.12 or newer, CUDA")
    ours, theirs = trainings(backend, kind, device, track="overflow")
    if captured != "step":
        ours.optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        if captured != "step":
            ours.backward()
        if captured != "backward":
            ours.step(together)
    for iteration in range(3, ITERATIONS):
        ours.feed(iteration)
        if captured == "step":
            # Eagerly, into gradients at the captured addresses.
            ours.optimizer.zero_grad(set_to_none=False)
            ours.backward()
        graph.replay()
        if captured == "backward":
            ours.step(together)
        theirs.iterate(iteration)
        assert_same(ours.observe(), theirs.observe(), f"iteration {iteration}")
    assert ours.scaler.stats().skipped == len(BAD_AT)
    assert {p.step for p in ours.scaler.overflow_report().parameters} == {BAD_AT[-1]}


@pytest.mark.parametrize("together", [False, True])
def test_eager_steps_between_the_replays(
    backend: str, device: torch.device, together: bool
) -> None:
    """With the graph's scaler and other gradients, so that tables come and go."""
    ours, theirs = trainings(backend, "fused_adam", device)
    ours.optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours.backward()
        ours.step(together)
    for iteration in range(3, ITERATIONS):
        for side in (ours, theirs):
            p = torch.nn.Parameter(torch.zeros(1_000 + iteration, device=device))
            p.grad = torch.full_like(p, 8.0) * side.scaler._scale
            other = torch.optim.SGD([p], lr=1.0)
            side.scaler.step(other)
            assert bool((p == -8.0).all())
            side.scaler.update()
        for size in range(40):  # more than the number of kept tables
            run_check(kernels_of(backend, device), grads_of([torch.ones(size + 1, device=device)]))
        _C.clear_tables()
        ours.feed(iteration)
        torch.cuda._sleep(1_000_000)
        graph.replay()
        theirs.iterate(iteration)
        assert_same(ours.observe(), theirs.observe(), f"iteration {iteration}")


def test_graphs_replayed_at_the_same_time(backend: str, device: torch.device) -> None:
    """On three streams, beside eager passes: each has a header of its own."""
    kernels, factor = kernels_of(backend, device), flag(1.0, device)
    lists = [torch.ones(1 << 22, device=device) for _ in range(4)]
    norms = [torch.zeros(2, dtype=torch.float64, device=device) for _ in lists]
    streams, graphs, founds = [torch.cuda.Stream() for _ in lists], [], []
    lists[1][-1] = torch.inf

    def check(number: int) -> torch.Tensor:
        grads = grads_of([lists[number]])
        return run_sums(kernels, grads, factor, is_scale=False, sums=norms[number])

    for number in range(4):
        check(number)
    torch.cuda.synchronize()
    for number in range(3):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            founds.append(check(number))
    for _ in range(50):
        for stream, graph in zip(streams, graphs, strict=False):
            with torch.cuda.stream(stream):
                for _ in range(5):
                    graph.replay()
        with torch.cuda.stream(streams[-1]):
            eager = [check(3) for _ in range(5)]
        torch.cuda.synchronize()
        assert [found.item() for found in founds] == [0.0, 1.0, 0.0]
        assert not torch.stack(eager).any()
        squares = [norm[0].item() for norm in norms]
        assert squares == [2.0**22, torch.inf, 2.0**22, 2.0**22]


def test_many_steps_in_flight(backend: str, device: torch.device) -> None:
    """More lists than kept tables, so that buffers come and go while the device works."""
    kernels = kernels_of(backend, device)
    lists = [
        [make_gradient("long", dtype, seed)[: 900 * seed + 5].to(device) for dtype in FLOATS]
        for seed in range(45)
    ]
    for seed in range(0, 45, 3):
        lists[seed][seed % 4][-1] = torch.inf
    expected = [unscaled([g.cpu() for g in grads], 4.0) for grads in lists]
    inverse = flag(0.5, device)
    run_unscale(kernels, grads_of([g.clone() for g in lists[0]]), inverse, is_scale=False)
    torch.cuda.synchronize()
    found = []
    before = _C.tables_made()
    with no_syncs():
        torch.cuda._sleep(A_WHILE)
        for _ in range(2):
            for grads in lists:
                found.append(run_unscale(kernels, grads_of(grads), inverse, is_scale=False))
    assert _C.tables_made() - before >= len(lists), "there were no new tables"
    for grads, reference in zip(lists, expected, strict=True):
        assert_same([g.cpu() for g in grads], reference)
    assert torch.stack(found).tolist() == [float(seed % 3 == 0) for seed in range(45)] * 2


def new_step(kind: str) -> Callable[[Training], object]:
    return lambda training: training.scaler.step(OPTIMIZERS[kind](training.params))


# What is refused under a capture; last, reads by the host.
REFUSED: dict[str, Callable[[Training], object]] = {
    "the scale is made": lambda training: GradScaler().scale(training.input.sum()),
    "first fused step with momentum": new_step("fused_sgd"),
    "first plain step": new_step("momentum"),
    "sync_free_": lambda training: ampfast.sync_free_(training.optimizer),
    "stats": lambda training: training.scaler.stats(),
    "get_scale": lambda training: training.scaler.get_scale(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_under_a_capture(backend: str, device: torch.device, name: str) -> None:
    """The capture can still be ended and replayed, and training goes on."""
    training, theirs = trainings(backend, "fused_adam", device, track="overflow")
    counter, stream = torch.zeros((), device=device), torch.cuda.current_stream()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            counter.add_(1)
            with pytest.raises(RuntimeError, match=r"^a CUDA graph .*cannot capture"):
                REFUSED[name](training)
            counter.add_(1)
    finally:
        # A broken capture may leave its own error.
        torch.cuda.set_stream(stream)
    for _ in range(3):
        graph.replay()
    assert counter.item() == 6.0
    for each in (training, theirs):
        each.iterate(3)
    assert_same(training.observe(), theirs.observe())


def test_a_watched_model(device: torch.device) -> None:
    """The host never waits, and the values of a replay replace those of the one before."""
    layers = torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64)
    model, x = torch.nn.Sequential(*layers).to(device), torch.rand(8, 64, device=device)
    graph = torch.cuda.CUDAGraph()
    with ampfast.find_nonfinite(model) as finder:
        with side_stream():
            model(x).square().sum().backward()
        with no_syncs():
            model(x).square().sum().backward()
        with torch.cuda.graph(graph):
            model(x).square().sum().backward()
        for value in (1.0, torch.inf, 1.0):
            x.fill_(value)
            graph.replay()
            fault = finder.report()
            assert fault is None if value == 1.0 else fault is not None and fault.module == "0"
