"""CUDA graphs and torch.compile: captures, replays, refusals and compiled iterations."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from gpu_support import flag, kernels_of
from support.captures import (
    OPTIMIZERS,
    SETTINGS,
    SKIPPABLE,
    Training,
    assert_no_more_breaks,
)
from support.comparison import assert_same
from support.kernel_calls import grads_of, run_check, run_sums, run_unscale
from support.scalers import TorchScaler

from ampfast import _C, GradScaler

pytestmark = pytest.mark.gpu

HAS_NODES = hasattr(torch.cuda.CUDAGraph, "begin_capture_to_if_node") and not torch.version.hip
needs_nodes = pytest.mark.skipif(
    not HAS_NODES, reason="steps are skipped by conditional nodes: torch 2.12 or newer, CUDA"
)
CAPTURABLE = (
    *("fused_sgd", "fused_adam", "fused_adamw"),
    *(pytest.param(kind, marks=needs_nodes) for kind in SKIPPABLE),
)
ITERATIONS = 14


def trainings(backend: str, kind: str, device: torch.device) -> tuple[Training, Training]:
    """Our training, to be captured, and torch's eager one, after three warm-up iterations."""
    ours = Training(GradScaler(backend=backend, **SETTINGS), kind, device)
    theirs = Training(TorchScaler(**SETTINGS), kind, device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for iteration in range(3):
            # Compiles the captured work beforehand.
            ours.iterate(iteration, together=iteration == 1)
    torch.cuda.current_stream().wait_stream(stream)
    for iteration in range(3):
        theirs.iterate(iteration)
    assert_same(ours.observe(), theirs.observe(), "before the capture")
    return ours, theirs


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_backward_is_captured_and_the_scale_changes_in_place(
    backend: str, device: torch.device, kind: str
) -> None:
    ours, theirs = trainings(backend, kind, device)
    ours.optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours.backward()
    for iteration in range(3, ITERATIONS):
        ours.feed(iteration)
        graph.replay()
        ours.step(together=iteration % 2 == 0)
        theirs.iterate(iteration)
        assert_same(ours.observe(), theirs.observe(), f"iteration {iteration}")


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("kind", CAPTURABLE)
def test_step_and_update_are_captured(
    backend: str, device: torch.device, kind: str, together: bool
) -> None:
    ours, theirs = trainings(backend, kind, device)
    before = copy.deepcopy(ours.observe())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours.step(together)
    assert_same(ours.observe(), before, "a capture runs nothing")
    for iteration in range(3, ITERATIONS):
        # Eagerly, into gradients at the captured addresses.
        ours.feed(iteration)
        ours.optimizer.zero_grad(set_to_none=False)
        ours.backward()
        graph.replay()
        theirs.iterate(iteration)
        assert_same(ours.observe(), theirs.observe(), f"iteration {iteration}")


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("kind", CAPTURABLE)
def test_a_whole_iteration_is_captured(
    backend: str, device: torch.device, kind: str, together: bool
) -> None:
    ours, theirs = trainings(backend, kind, device)
    ours.optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours.backward()
        ours.step(together)
    for iteration in range(3, ITERATIONS):
        ours.feed(iteration)
        graph.replay()
        theirs.iterate(iteration)
        assert_same(ours.observe(), theirs.observe(), f"iteration {iteration}")


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
            optimizers = []  # alive until the update, since scalers key them by id
            for count in range(3):
                p = torch.nn.Parameter(torch.zeros(1_000 * count + iteration, device=device))
                p.grad = torch.full_like(p, 8.0) * side.scaler._scale
                optimizers.append(torch.optim.SGD([p], lr=1.0))
                side.scaler.step(optimizers[-1])
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
    # And eagerly again.
    for iteration in range(3):
        for side in (ours, theirs):
            side.iterate(iteration, together)
        assert_same(ours.observe(), theirs.observe(), f"after the graph, {iteration}")


def test_two_graphs_of_one_scaler(backend: str, device: torch.device) -> None:
    ours, theirs = trainings(backend, "fused_sgd", device)
    graphs = []
    for together in (False, True):
        ours.optimizer.zero_grad()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            ours.backward()
            ours.step(together)
    for iteration in range(3, ITERATIONS):
        ours.feed(iteration)
        graphs[iteration % 2].replay()
        theirs.iterate(iteration)
        assert_same(ours.observe(), theirs.observe(), f"iteration {iteration}")


def test_every_replay_reads_its_own_list(backend: str, device: torch.device) -> None:
    kernels = kernels_of(backend, device)
    grads = [torch.full((n,), 8.0, device=device) for n in (5, 70_003)]
    inverse = flag(0.5, device)
    run_check(kernels, grads_of(grads))
    run_unscale(kernels, grads_of(grads), inverse, is_scale=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run_unscale(kernels, grads_of(grads), inverse, is_scale=False)
    for replay in range(5):
        # Freed pinned memory is reused at once; that which a graph reads is never freed.
        for _ in range(50):
            run_check(kernels, grads_of([torch.ones(replay + 1, device=device) for _ in range(20)]))
            _C.clear_tables()
        graph.replay()
        assert found.item() == 0.0
        assert all(bool((g == 4.0 / 2 ** (replay + 1)).all()) for g in grads)
    grads[1][-1] = torch.inf
    graph.replay()
    assert found.item() == 1.0


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


def refused(call: Callable[[], object], remedy: str, device: torch.device) -> None:
    """Capture around a refused call, which can still be ended and replayed."""
    counter = torch.zeros((), device=device)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph):
            counter.add_(1)
            with pytest.raises(RuntimeError, match=remedy):
                call()
            counter.add_(1)
    finally:
        # A broken capture may leave its own error.
        torch.cuda.set_stream(stream)
    for _ in range(3):
        graph.replay()
    assert counter.item() == 6.0


WITHOUT_CAPTURE = "cannot capture .*: run one iteration without capturing first"


def test_refused_the_creation_of_the_scale(backend: str, device: torch.device) -> None:
    scaler = GradScaler(backend=backend)
    loss = torch.ones((), device=device)
    refused(lambda: scaler.scale(loss), WITHOUT_CAPTURE, device)
    assert scaler._scale is None
    scaler.scale(loss)
    assert scaler.get_scale() == 2.0**16


@pytest.mark.skipif(HAS_NODES, reason="this torch captures it")
@pytest.mark.parametrize("together", [False, True])
def test_refused_a_plain_step(backend: str, device: torch.device, together: bool) -> None:
    ours, _ = trainings(backend, "sgd", device)
    scale = ours.scaler.get_scale()
    refused(lambda: ours.step(together), "cannot capture a step .*fused=True", device)
    assert ours.scaler.get_scale() == scale
    # Else the next step would take the scaled gradients.
    state = ours.scaler._per_optimizer_states[id(ours.optimizer)]
    assert state["stage"] is torch.amp.grad_scaler.OptState.READY
    assert not state["found_inf_per_device"]


def test_refused_the_first_step_with_momentum(backend: str, device: torch.device) -> None:
    ours, _ = trainings(backend, "fused_adam", device)
    optimizer = OPTIMIZERS["fused_sgd"](ours.params)
    refused(lambda: ours.scaler.step(optimizer), WITHOUT_CAPTURE, device)
    assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")


@needs_nodes
@pytest.mark.parametrize("kind", ["momentum", "adam"])
def test_refused_the_first_plain_step(backend: str, device: torch.device, kind: str) -> None:
    ours, _ = trainings(backend, "sgd", device)
    optimizer = OPTIMIZERS[kind](ours.params)
    refused(lambda: ours.scaler.step(optimizer), "cannot capture the first step of", device)
    assert not ours.scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    assert ours.scaler.step(optimizer) is None
    assert not ours.scaler.step_skipped(optimizer)


@needs_nodes
@pytest.mark.parametrize("together", [False, True])
def test_a_plain_step_that_raises_ends_its_body(
    backend: str, device: torch.device, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, _ = trainings(backend, "sgd", device)

    def fails() -> None:
        raise RuntimeError("the step fails")

    monkeypatch.setattr(ours.optimizer, "step", fails)
    refused(lambda: ours.step(together), "the step fails", device)
    state = ours.scaler._per_optimizer_states[id(ours.optimizer)]
    assert state["stage"] is torch.amp.grad_scaler.OptState.UNSCALED


def test_refused_a_kernel_that_is_not_compiled(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = pytest.importorskip("ampfast.backends.triton.launch")
    kernels = kernels_of("triton", device)
    grad = torch.full((5,), 3.0, device=device)
    run_check(kernels, grads_of([grad]))
    monkeypatch.setattr(launch, "_launched", {})
    refused(lambda: run_check(kernels, grads_of([grad])), "cannot capture.*one iteration", device)
    assert run_check(kernels, grads_of([grad])).item() == 0.0


@pytest.mark.parametrize("kind", ["sgd", "fused_adam"])
def test_compiled_steps_break_no_more_often(backend: str, device: torch.device, kind: str) -> None:
    assert_no_more_breaks(kind, device, backend)


def test_a_compiled_iteration_gives_the_same(backend: str, device: torch.device) -> None:
    """The forward pass compiled alone, and the whole iteration."""
    sides = []
    for compiles in (False, True):
        training = Training(
            GradScaler(device.type, backend=backend, **SETTINGS), "fused_sgd", device
        )
        run = torch.compile(training.iterate, backend="eager") if compiles else training.iterate
        for iteration in range(8):
            run(iteration)
        sides.append(training.observe())
    torch._dynamo.reset()
    assert_same(*sides)


def test_the_memory_of_captured_lists_is_never_given_back(
    backend: str, device: torch.device
) -> None:
    """Many large lists in graphs, then eager ones of the same size."""
    kernels = kernels_of(backend, device)
    inverse = flag(0.5, device)
    captured = []
    for _ in range(24):
        memory = torch.full((20_000,), 8.0, device=device)
        grads = grads_of(list(memory.split(2)))
        run_unscale(kernels, grads, inverse, is_scale=False)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run_unscale(kernels, grads, inverse, is_scale=False)
        captured.append((graph, memory, grads))
    decoy = torch.full((200_000,), 8.0, device=device)
    for tensors in (2_000, 10_000, 40_000, 100_000):
        for _ in range(4):
            run_check(kernels, grads_of(list(decoy[: 2 * tensors].split(2))))
            _C.clear_tables()
    for graph, _, _ in captured:
        graph.replay()
    torch.cuda.synchronize()
    for number, (_, memory, _) in enumerate(captured):
        assert bool((memory == 2.0).all()), f"graph {number}"
    assert bool((decoy == 8.0).all())


def test_memory_is_pinned_for_tables_alone(backend: str, device: torch.device) -> None:
    kernels = kernels_of(backend, device)
    memory = torch.ones(40_000, device=device)
    pinned = []
    for _ in range(3):
        pinned.append(torch.cuda.host_memory_stats()["allocated_bytes.current"])
        run_check(kernels, grads_of(list(memory.split(2))))
        torch.cuda.synchronize()
        _C.clear_tables()
    # At most 8 words for each of 20,000 tensors, rounded up to a power of two; reused.
    assert pinned[1] - pinned[0] <= 2 * 8 * 8 * 20_000
    assert pinned[2] == pinned[1]


# Last, since a capture that it breaks cannot be repaired in this process.
@pytest.mark.parametrize("read", ["get_scale", "step_skipped", "state_dict"])
def test_refuses_reads_by_the_host(backend: str, device: torch.device, read: str) -> None:
    ours, _ = trainings(backend, "fused_adam", device)
    arguments = (ours.optimizer,) if read == "step_skipped" else ()
    refused(lambda: getattr(ours.scaler, read)(*arguments), "cannot capture", device)
