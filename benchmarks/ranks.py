"""Cost of agreement between ranks: sharded scalers of ampfast and torch in one world."""

from __future__ import annotations

import functools
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing

import ampfast

from . import counts, providers, steps
from .cases import CASES, GradCase, make_gradients
from .clipping import DRIFT, SCALE
from .device_time import CudaQueue
from .harness import Contender, Job, Measured, Samples, Setting, assert_same, interleave
from .kernels import MEMORY_OF_LISTS
from .machine import require_memory
from .steps import (
    FUSED_STEP,
    MOST_LISTS,
    NEVER,
    STEP,
    UNSCALE,
    NoOptimizer,
    optimizer_over,
    scaler_state,
)
from .timing import Timed, dtype_name, time_contenders

CLIP = "clip + update"
PATHS = (UNSCALE, STEP, FUSED_STEP, CLIP)

FULL_CASES = ("bert_base", "1000x1k")
QUICK_CASES = ("1000x1k",)
DTYPE = torch.float32
RANKS = 2
GOAL = 1.0

# Timeout of a rank for another one, after which all end.
COLLECTIVE_S = 60.0
JOB_S = 300.0

FUSED_NOTE = (
    "ranks: torch's ShardedGradScaler does not reduce the flag of a fused optimizer, so its ranks "
    "diverge there: its time is that of a fault"
)


def jobs(on: Setting, cases: Sequence[str] | None = None) -> list[Job]:
    """One job for each list, of the requested or the usual ones."""
    names = cases or (QUICK_CASES if on.effort.quick else FULL_CASES)
    return [
        Job(
            f"{name} {dtype_name(DTYPE)}",
            functools.partial(measure, CASES[name], on),
        )
        for name in names
    ]


def measure(case: GradCase, on: Setting) -> Measured:
    """Starts the ranks, which share list and threads, and returns their measurements.

    Two ranks with gloo on a CPU; on a GPU one, which calls NCCL all the same.

    Raises:
        MemoryError: If the list would not fit.
        RuntimeError: If a rank failed, such as by finding that a result is not torch's.
    """
    device = on.device
    on_gpu = device.type == "cuda"
    backend = "nccl" if on_gpu else "gloo"
    if not (dist.is_available() and dist.is_backend_available(backend)):
        return Measured(notes=[f"ranks: not measured, this torch has no {backend}"])
    require_memory(int(MEMORY_OF_LISTS * case.list_bytes(DTYPE)), device)
    ranks = 1 if on_gpu else RANKS
    threads = max(1, torch.get_num_threads() // ranks)
    results = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        task = (ranks, threads, f"{folder}/store", case, replace(on, queue=None), results)
        started = multiprocessing.spawn(_rank, task, nprocs=ranks, join=False)
        try:
            deadline = time.monotonic() + JOB_S
            # Ends the others when one fails.
            while not started.join(1.0):
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{ranks} ranks had not ended after {JOB_S:g} s")
        finally:
            for process in started.processes:
                process.kill()
                process.join()
        return results.get()


def _rank(
    rank: int,
    ranks: int,
    threads: int,
    store_file: str,
    case: GradCase,
    on: Setting,
    results: Any,
) -> None:
    """Process of a job; the first rank hands over the measurements."""
    torch.set_num_threads(threads)
    on_gpu = on.device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(on.device)
        on = replace(on, queue=CudaQueue(on.device))
    # Ranks on one machine need no other network or host name.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    store = dist.FileStore(store_file, ranks)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=COLLECTIVE_S),
    )
    measured = measure_here(case, on)
    if rank == 0:
        results.put(measured)
    # Data sent is lost if this process ends before the others have read it.
    store.set(f"done {rank}", "")
    store.wait([f"done {each}" for each in range(ranks)])
    dist.destroy_process_group()
    # Without Python's finalization: torch's class keeps the group and thus gloo's threads, which
    # may then still free tensors and abort (pytorch/pytorch#179291).
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def measure_here(case: GradCase, on: Setting) -> Measured:
    """Times both scalers over this rank's shard of a list; a collective call.

    Raises:
        AssertionError: If a result is not torch's, or the gradients drifted while timed.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device, queue, effort = on.device, on.queue, on.effort
    torch.manual_seed(rank)
    mine = part_of(case, rank, ranks)
    names, notes = providers.available(device)
    for name in names:
        for path in PATHS:
            assert_parity(mine, device, path, name)

    gradients = make_gradients(mine, DTYPE, device)
    first = [gradient.clone() for gradient in gradients[:MOST_LISTS]]
    optimizers = {fused: optimizer_over(gradients, fused) for fused in (False, True)}
    limit = norm_of_all(gradients)
    contenders = [
        Contender(
            path,
            name,
            caller(path, name, optimizers[path == FUSED_STEP], device, limit),
            # All start together.
            prepare=None if ranks == 1 else lambda number: dist.barrier(),
            waits=queue is not None and path == STEP,
        )
        for path in PATHS
        for name in ("torch", *names)
    ]
    collectives = {contender.key: collectives_of(contender) for contender in contenders}
    if queue is None:
        # Equal numbers of calls on every rank: one cycle per round, and rounds by one clock.
        together = replace(effort, comparison_s=effort.comparison_s * len(contenders), sample_s=0.0)
        samples = slowest(interleave(contenders, together, clock=clock_of_first))
        timed = Timed("ranks", case, DTYPE, contenders, samples)
    else:
        timed = time_contenders("ranks", case, DTYPE, contenders, on)
    for now, before in zip(gradients, first, strict=False):
        torch.testing.assert_close(now, before, rtol=DRIFT, atol=0)

    rows = [
        replace(row, ranks=ranks, collectives=collectives[contender.key])
        for contender, row in zip(contenders, timed.rows(), strict=True)
    ]
    threads = torch.get_num_threads()
    shared = f"ranks: {ranks}, threads of each: {threads}, each with its part of every tensor"
    measured = Measured(rows, notes=[*notes, shared, FUSED_NOTE])
    for name in names if queue is None else ():
        measured.goals += timed.goal((UNSCALE, name), (UNSCALE, "torch"), GOAL, lenient=True)
    return measured


def part_of(case: GradCase, rank: int, ranks: int) -> GradCase:
    """Shard of a list on one rank: its part of every tensor's elements, as in FSDP."""
    shapes = []
    for shape in case.shapes:
        elements = math.prod(shape)
        shapes.append(((rank + 1) * elements // ranks - rank * elements // ranks,))
    return GradCase(case.name, tuple(shapes))


def make_scaler(
    name: str, device: torch.device, scale: float, growth_interval: int = NEVER
) -> torch.amp.GradScaler:
    """Started sharded scaler of torch, or with one of ampfast's backends."""
    # Where torch was built without distributed, this module can still be imported.
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    settings = {"init_scale": scale, "growth_interval": growth_interval}
    if name == "torch":
        scaler = ShardedGradScaler(device.type, **settings)
    else:
        scaler = ampfast.ShardedGradScaler(device.type, **settings, backend=name)
    scaler.scale(torch.zeros((), device=device))
    return scaler


def caller(
    path: str, name: str, optimizer: NoOptimizer, device: torch.device, limit: float
) -> Callable[[int], object]:
    """Iterations that restore the gradients in pairs: halved, then doubled."""
    scales = (SCALE, SCALE) if path == CLIP else (2.0, 0.5)
    pair = [iteration(path, make_scaler(name, device, scale), limit) for scale in scales]
    return lambda number: pair[number % 2](optimizer)


def iteration(
    path: str, scaler: torch.amp.GradScaler, limit: float
) -> Callable[[NoOptimizer], Tensor | None]:
    """Calls of a path, as in a training loop; clipping returns the norm."""

    def clip_and_update(optimizer: NoOptimizer) -> Tensor:
        norm = scaler.clip_grad_norm_(optimizer, limit)  # type: ignore[attr-defined]
        scaler.update()
        return norm

    def clip_with_torch(optimizer: NoOptimizer) -> Tensor:
        scaler.unscale_(optimizer)
        parameters = optimizer.param_groups[0]["params"]
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters])
        square = norm.square()
        dist.all_reduce(square)
        norm = square.sqrt()
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        scaler.update()
        return norm

    if path != CLIP:
        return steps.iteration(path, scaler, torch.ones_like(scaler_state(scaler)[0]))
    return clip_and_update if isinstance(scaler, ampfast.GradScaler) else clip_with_torch


def assert_parity(case: GradCase, device: torch.device, path: str, name: str) -> None:
    """Compares states after two iterations that let the scale grow, a third, and an overflow.

    The infinity is on the last rank only. For fused optimizers, whose checks torch's scaler does
    not reduce, its plain unscaling gives the expected scale.
    """
    what = f"{path} by {name}, {case.name} on rank {dist.get_rank()}"
    is_last = dist.get_rank() == dist.get_world_size() - 1
    kept = make_gradients(case, DTYPE, device)
    ours, theirs = ([gradient.clone() for gradient in kept] for _ in range(2))
    limit = norm_of_all(kept) / 9
    scaler, oracle = (make_scaler(each, device, 3.0, 2) for each in (name, "torch"))
    call, of_ours = iteration(path, scaler, limit), optimizer_over(ours, path == FUSED_STEP)
    oracle_path = UNSCALE if path == FUSED_STEP else path
    call_theirs, of_theirs = iteration(oracle_path, oracle, limit), optimizer_over(theirs, False)
    tolerance = 0.0
    for bad in (False, False, False, True):
        if bad and is_last:
            for tensors in (kept, ours, theirs):
                max(tensors, key=Tensor.numel)[-1] = math.inf
        exact = norm_of_all(ours) / scaler._scale.item()
        norms = call(of_ours), call_theirs(of_theirs)
        assert_same(scaler_state(scaler), scaler_state(oracle), f"scale and tracker after {what}")
        if path != CLIP:
            assert_same(ours, kept if path == FUSED_STEP else theirs, f"gradients of {what}")
            continue
        our, their = (norm.item() for norm in norms if norm is not None)
        if bad:
            if math.isfinite(our):
                raise AssertionError(f"{what}: the norm is {our} with an infinity")
            continue
        if abs(our - exact) > 1e-6 * exact:
            raise AssertionError(f"{what}: the norm is {our}, not {exact}")
        # torch's norm is a float32 sum, with its error in the clipped gradients.
        tolerance += abs(their - exact) / exact + 4 * torch.finfo(DTYPE).eps
        for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            torch.testing.assert_close(
                *(a, b),
                rtol=tolerance,
                atol=0,
                msg=lambda text, index=index: f"{what}, tensor {index}: {text}",
            )


def norm_of_all(gradients: Sequence[Tensor]) -> float:
    """float64 norm over all ranks."""
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
    square = torch.stack(norms).square().sum()
    dist.all_reduce(square)
    return math.sqrt(square.item())


def collectives_of(contender: Contender) -> int:
    """Number of collectives per call; the profiler sees them with every backend."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        # Two calls, after which the gradients are restored.
        for number in (0, 1):
            contender.call(number)
    return sum(event.name.startswith("c10d::") for event in counts.events_of(profile)) // 2


def clock_of_first() -> float:
    """Clock of the first rank in seconds, for equal decisions; a collective call."""
    now = torch.tensor(time.perf_counter(), dtype=torch.float64)
    dist.broadcast(now, 0)
    return now.item()


def slowest(samples: Samples) -> Samples:
    """Per round and contender, the time of the slowest rank."""
    seconds = torch.tensor(list(samples.seconds.values()), dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return Samples(dict(zip(samples.seconds, seconds.tolist(), strict=True)))
