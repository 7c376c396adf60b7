"""Cost of agreement between ranks: sharded scalers of ampfast and torch in one world."""

from __future__ import annotations

import functools
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import ampfast

from . import counts, processes, providers
from .cases import CASES, GradCase, make_gradients
from .clipping import DRIFT, SCALE
from .device_time import CudaQueue, EventTimer, Queue, host_timer
from .harness import Contender, Effort, Job, Measured, Samples, assert_same, interleave
from .host_time import FUSED, STEP, UNSCALE, NoOptimizer
from .kernels import MEMORY_OF_LISTS
from .machine import REPOSITORY, require_memory
from .results import Goal, Row
from .rows import Timed, dtype_name
from .steps import MOST_LISTS, NEVER, optimizer_over

CLIP = "clip + update"
PATHS = (UNSCALE, STEP, FUSED, CLIP)

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


@dataclass(frozen=True)
class Task:
    """Job of all ranks."""

    case: GradCase
    device: str
    effort: Effort
    ranks: int
    threads: int

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Task:
        content = json.loads(path.read_text(encoding="utf-8"))
        shapes = tuple(map(tuple, content["case"]["shapes"]))
        content["case"] = GradCase(content["case"]["name"], shapes)
        content["effort"] = Effort(**content["effort"])
        return cls(**content)


def jobs(effort: Effort, device: torch.device, cases: Sequence[str] | None = None) -> list[Job]:
    """One job for each list, of the requested or the usual ones."""
    names = cases or (QUICK_CASES if effort.quick else FULL_CASES)
    return [
        Job(
            f"{name} {dtype_name(DTYPE)}",
            functools.partial(measure, CASES[name], device, effort),
        )
        for name in names
    ]


def measure(case: GradCase, device: torch.device, effort: Effort) -> Measured:
    """Starts the ranks, which share list and threads, and returns their measurements.

    Two ranks with gloo on a CPU; on a GPU one, which calls NCCL all the same.

    Raises:
        MemoryError: If the list would not fit.
        RuntimeError: If a rank failed, such as by finding that a result is not torch's.
    """
    on_gpu = device.type == "cuda"
    backend = "nccl" if on_gpu else "gloo"
    if not (dist.is_available() and dist.is_backend_available(backend)):
        return Measured(notes=[f"ranks: not measured, this torch has no {backend}"])
    require_memory(int(MEMORY_OF_LISTS * case.list_bytes(DTYPE)), device)
    ranks = 1 if on_gpu else RANKS
    threads = max(1, torch.get_num_threads() // ranks)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        Task(case, str(device), effort, ranks, threads).write(folder / "task.json")
        commands = [
            [sys.executable, "-m", "benchmarks.ranks", name, str(rank)] for rank in range(ranks)
        ]
        processes.run_together(commands, REPOSITORY, folder, JOB_S)
        content = json.loads((folder / "measured.json").read_text(encoding="utf-8"))
    return Measured(
        [Row(**row) for row in content["rows"]],
        [Goal(**goal) for goal in content["goals"]],
        content["notes"],
    )


def work(folder: Path, rank: int) -> None:
    """Process of a job; the first rank writes the measurements to the folder."""
    task = Task.read(folder / "task.json")
    device = torch.device(task.device)
    torch.set_num_threads(task.threads)
    queue = None
    if device.type == "cuda":
        torch.cuda.set_device(device)
        queue = CudaQueue(device)
    # Ranks on one machine need no other network or host name.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    store = dist.FileStore(str(folder / "store"), task.ranks)
    dist.init_process_group(
        "gloo" if queue is None else "nccl",
        store=store,
        rank=rank,
        world_size=task.ranks,
        timeout=timedelta(seconds=COLLECTIVE_S),
    )
    measured = measure_here(task.case, device, task.effort, queue)
    if rank == 0:
        (folder / "measured.json").write_text(json.dumps(asdict(measured)), encoding="utf-8")
    # Data sent is lost if this process ends before the others have read it.
    store.set(f"done {rank}", "")
    store.wait([f"done {each}" for each in range(task.ranks)])
    dist.destroy_process_group()


def measure_here(
    case: GradCase, device: torch.device, effort: Effort, queue: Queue | None = None
) -> Measured:
    """Times both scalers over this rank's shard of a list; a collective call.

    Raises:
        AssertionError: If a result is not torch's, or the gradients drifted while timed.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
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
            caller(path, name, optimizers[path == FUSED], device, limit),
            # All start together.
            prepare=None if ranks == 1 else lambda number: dist.barrier(),
            waits=queue is not None and path == STEP,
        )
        for path in PATHS
        for name in ("torch", *names)
    ]
    collectives = {contender.key: collectives_of(contender) for contender in contenders}
    host, counted = None, {}
    if queue is None:
        # Equal numbers of calls on every rank: one cycle per round, and rounds by one clock.
        together = replace(effort, comparison_s=effort.comparison_s * len(contenders), sample_s=0.0)
        samples = slowest(interleave(contenders, together, clock=clock_of_first))
        timer_name = "wall"
    else:
        counted = counts.of_contenders(contenders, queue)
        host = interleave(contenders, replace(effort, sample_s=0.0), timer=host_timer(queue))
        timer = EventTimer(queue, counts.launches(counted), 2)
        samples, timer_name = interleave(contenders, effort, timer=timer), timer.name
    for now, before in zip(gradients, first, strict=False):
        torch.testing.assert_close(now, before, rtol=DRIFT, atol=0)

    timed = Timed(
        *("ranks", case, DTYPE, 1, contenders, samples, timer_name), host=host, counts=counted
    )
    rows = [
        replace(row, ranks=ranks, collectives=collectives[row.path, row.provider])
        for row in timed.rows()
    ]
    threads = torch.get_num_threads()
    shared = f"ranks: {ranks}, threads of each: {threads}, each with its part of every tensor"
    measured = Measured(rows, notes=[*notes, shared, FUSED_NOTE])
    if queue is None:
        for name in names:
            measured.goals.append(
                Goal.of_spread(
                    f"{UNSCALE} on {ranks} ranks, time over that of torch's ShardedGradScaler",
                    *(case.name, dtype_name(DTYPE), "<=", GOAL),
                    samples.ratio((UNSCALE, name), (UNSCALE, "torch")),
                    spread_counts=True,
                )
            )
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
    pair = [iteration(path, make_scaler(name, device, s), optimizer, limit) for s in scales]
    return lambda number: pair[number % 2]()


def iteration(
    path: str, scaler: torch.amp.GradScaler, optimizer: NoOptimizer, limit: float
) -> Callable[[], Tensor | None]:
    """Calls of a path, as in a training loop; clipping returns the norm."""

    def unscale_and_update() -> None:
        scaler.unscale_(optimizer)
        scaler.update()

    def step_and_update() -> None:
        scaler.step(optimizer)
        scaler.update()

    def clip_and_update() -> Tensor:
        norm = scaler.clip_grad_norm_(optimizer, limit)  # type: ignore[attr-defined]
        scaler.update()
        return norm

    parameters = optimizer.param_groups[0]["params"]

    def clip_with_torch() -> Tensor:
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters])
        square = norm.square()
        dist.all_reduce(square)
        norm = square.sqrt()
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        scaler.update()
        return norm

    if path == CLIP:
        return clip_and_update if isinstance(scaler, ampfast.GradScaler) else clip_with_torch
    return unscale_and_update if path == UNSCALE else step_and_update


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
    call = iteration(path, scaler, optimizer_over(ours, path == FUSED), limit)
    oracle_path = UNSCALE if path == FUSED else path
    call_theirs = iteration(oracle_path, oracle, optimizer_over(theirs, False), limit)
    tolerance = 0.0
    for bad in (False, False, False, True):
        if bad and is_last:
            for tensors in (kept, ours, theirs):
                max(tensors, key=Tensor.numel)[-1] = math.inf
        exact = norm_of_all(ours) / scaler._scale.item()
        norms = call(), call_theirs()
        state = [scaler._scale, scaler._growth_tracker]
        expected = [oracle._scale, oracle._growth_tracker]
        assert_same(state, expected, f"scale and tracker after {what}")
        if path != CLIP:
            assert_same(ours, kept if path == FUSED else theirs, f"gradients of {what}")
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


if __name__ == "__main__":
    work(Path(sys.argv[1]), int(sys.argv[2]))
    # Without Python's finalization: torch's class keeps the group and thus gloo's threads, which
    # may then still free tensors and abort (pytorch/pytorch#179291).
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
