"""What a GPU is asked first: ceilings and passes over a few lists, host time, one training."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ampfast.backends import core

from . import ceilings, goals, host_time, providers, steps, training
from .cases import CASES, GradCase
from .device_time import GRAPH_BELOW_BYTES, EventTimer, GraphTimer, host_timer
from .harness import Contender, Job, Measured, Setting, assert_same, interleave
from .kernels import Lists, lists_beyond_cache
from .machine import require_memory, tensors_per_launch
from .models import nets, perceptron
from .providers import CHECK, CLIP, COPY, NORM, READ, UNSCALE, Calls, Gradients, Scalars
from .results import Row
from .timing import Timed, dtype_name

SUBJECT = "decisive"
PASSES = (CHECK, UNSCALE, NORM)
LISTS = (
    ("10x1k", torch.float32, PASSES),
    ("1000x1k", torch.float32, PASSES),
    ("bert_large", torch.float32, PASSES),
    ("bert_large", torch.bfloat16, PASSES),
    ("one_1g", torch.float32, PASSES),
    ("llama_7b", torch.bfloat16, PASSES),
)
# Those of NVIDIA-NeMo/Automodel#3685, when all else is done.
LAST_LISTS = (
    ("500_matrices", torch.float32, (NORM, CLIP)),
    ("500_matrices", torch.bfloat16, (NORM, CLIP)),
    ("one_1540m", torch.bfloat16, (NORM, CLIP)),
)
# Largest chunks of a list that is measured with each.
CHUNKS_KIB = (32, 64, 128, 256)
# A check behind the upload of its table, queued as after a move of the gradients, and in a replay.
MOVED, REPLAYED = f"{CHECK}, moved", f"{CHECK}, replayed"
# Of torch's paths, those that need its op for unscaling.
BY_OP = (CHECK, UNSCALE)
COMPARISON_S = 0.5
# Gradients, both ends of a copy, and a copy to compare.
MEMORY_OF_LISTS = 4
PIECE = 1 << 26
INVERSE = 1 / 3
# Relative tolerance of a norm of float32 squares summed in float64.
NORM_TOLERANCE = 1e-6


def jobs(on: Setting) -> list[Job]:
    """Lists, host time, and a training; on a CPU small ones, to rehearse it all."""
    if on.queue is None:
        return []
    effort = replace(
        on.effort, comparison_s=min(COMPARISON_S, on.effort.comparison_s), profiled=False
    )
    on = replace(on, effort=effort)
    on_cpu = on.device.type == "cpu"
    net = perceptron(2, 8, 4, torch.optim.AdamW) if on_cpu else nets(on.device)[0]
    plan = training.Plan(net, fused=True, clip=False)
    counts = (3,) if on_cpu else tuple(host_time.GOALS)
    kinds = ((steps.UNSCALE,), (steps.STEP,), (steps.FUSED_STEP,))

    def over(name: str, dtype: torch.dtype, what: str, run: Callable[..., Measured]) -> Job:
        label = f"{name} {dtype_name(dtype)}{what}"
        return Job(label, functools.partial(run, case_for(name, on.device), dtype, on))

    def lists(named: Sequence[tuple[str, torch.dtype, Sequence[str]]]) -> list[Job]:
        return [over(n, dtype, "", functools.partial(measure, paths=p)) for n, dtype, p in named]

    return [
        *lists(LISTS),
        over("bert_large", torch.float32, ", chunk sizes", measure_chunks),
        over("bert_large", torch.bfloat16, ", chunk sizes", measure_chunks),
        over("1000x1k", torch.float32, ", new tables", measure_tables),
        *(
            Job(
                f"{kind[0]}, {count} parameters",
                functools.partial(host_time.measure, count, kind, on),
            )
            for count in counts
            for kind in kinds
        ),
        Job(f"{net.name}, {plan.path}", functools.partial(training.measure, plan, on)),
        *lists(LAST_LISTS),
    ]


def case_for(name: str, device: torch.device) -> GradCase:
    """List of a name; on a CPU a small one."""
    shapes = CASES[name].shapes
    if device.type == "cpu":
        shapes = tuple(tuple(min(size, 25) for size in shape) for shape in shapes[:3])
    return GradCase(name, shapes)


def lists_in_turn(case: GradCase, dtype: torch.dtype, device: torch.device) -> int:
    """Number of lists that take turns, for which there must be memory."""
    size = case.list_bytes(dtype)
    # A rehearsal takes two turns, to see that they are taken.
    lists = 2 if device.type == "cpu" else lists_beyond_cache(size, device)
    require_memory((MEMORY_OF_LISTS * lists + 1) * size, device)
    return lists


def measure(case: GradCase, dtype: torch.dtype, on: Setting, paths: Sequence[str]) -> Measured:
    """Times each provider's passes over existing tables, beside a copy and a read.

    A backend with wrong results is left out, with a note.
    """
    device = on.device
    lists = lists_in_turn(case, dtype, device)
    names, notes = providers.available(device)
    gradients = Lists(case, dtype, device, lists)
    scalars = Scalars.make(device)
    calls = []
    for name in names:
        launches = functools.partial(providers.launches, name, device)
        try:
            assert_parity(gradients.lists[0], launches, paths)
            calls.append(launches(scalars))
        except Exception as error:
            notes.append(f"FAILED {name}, {case.name} {dtype_name(dtype)}: {error}")
    takes = providers.torch_takes(dtype, device)
    torchs = [path for path in paths if takes or path not in BY_OP]
    contenders = [
        *_ceilings(gradients),
        *gradients.contenders([providers.torch_calls(scalars)], torchs),
        *gradients.contenders(calls, paths),
    ]
    timed = time_on_device(SUBJECT, case, dtype, contenders, lists, on)
    gradients.assert_steady(scalars.found_inf)
    measured = Measured(rows_of(timed), notes=notes + timed.notes)
    for path in [path for path in paths if path not in torchs]:
        why = f"torch {torch.__version__} has no kernel for {dtype_name(dtype)} here"
        measured.rows.append(Row(*timed.name((path, "torch")), missing=why))
    for name in names:
        measured.goals += goals.of_kernels(timed, name)
    return measured


def measure_chunks(case: GradCase, dtype: torch.dtype, on: Setting) -> Measured:
    """Times each backend's passes with chunks of several sizes."""
    device = on.device
    lists = lists_in_turn(case, dtype, device)
    gradients, scalars = Lists(case, dtype, device, lists), Scalars.make(device)
    names, notes = providers.available(device)
    contenders = _ceilings(gradients)
    for kib, name in itertools.product(CHUNKS_KIB, names):
        core.set_chunks(most_bytes=kib << 10)
        try:
            calls = providers.launches(name, device, scalars)
            paths = {f"{path}, {kib} KiB": calls.paths[path] for path in (CHECK, UNSCALE)}
            contenders += gradients.contenders([replace(calls, paths=paths)], list(paths))
        finally:
            core.set_chunks()
    timed = time_on_device(SUBJECT, case, dtype, contenders, lists, on)
    gradients.assert_steady(scalars.found_inf)
    return Measured(rows_of(timed), notes=notes + timed.notes)


def measure_tables(case: GradCase, dtype: torch.dtype, on: Setting) -> Measured:
    """Times checks with a new table: queued and on the host, and replayed from a graph."""
    device, queue = on.device, on.queue
    assert queue is not None
    gradients, scalars = Lists(case, dtype, device, 1), Scalars.make(device)
    names, notes = providers.available(device)
    grads = providers.listed(gradients.lists[0])

    def checks(path: str, is_captured: bool) -> list[Contender]:
        def check_by(name: str) -> Callable[[int], object]:
            calls = providers.launches(name, device, scalars)

            def call(number: int) -> None:
                core.clear_tables()
                calls.paths[CHECK](core.DeviceTable.of(grads, is_captured), 0)

            return call

        return [Contender(path, name, check_by(name)) for name in names]

    measured = Measured(notes=notes)
    moved, replayed = checks(MOVED, False), checks(REPLAYED, device.type == "cuda")
    events = EventTimer(queue, {})
    samples = interleave(moved, on.effort, timer=events)
    host = interleave(moved, on.effort, timer=host_timer(queue))
    timed = Timed(SUBJECT, case, dtype, moved, samples, events.name, host=host)
    measured.rows += timed.rows()
    try:
        graphs = GraphTimer(queue, replayed, 2)
    except RuntimeError as error:
        notes.append(f"{case.name}: no replays, since no graph could be captured: {error}")
        return measured
    samples = interleave(replayed, on.effort, timer=graphs)
    measured.rows += Timed(SUBJECT, case, dtype, replayed, samples, graphs.name).rows()
    return measured


def assert_parity(
    gradients: Gradients, launches: Callable[[Scalars], Calls], paths: Sequence[str]
) -> None:
    """Compares each path with torch's elementwise operations on the same device."""
    device = gradients[0].device
    for path in paths:
        ours = Scalars.make(device, INVERSE)
        calls = launches(ours)
        copies = [gradient.clone() for gradient in gradients]
        prepared = calls.prepare(copies)
        squares = calls.paths[path](prepared, 0)
        what = f"{path} by {calls.provider}"
        factor = ours.inverses[0] if path in (UNSCALE, CLIP) else ours.one
        for copy, gradient in zip(copies, gradients, strict=True):
            pieces = [each.reshape(-1).split(PIECE) for each in (copy, gradient)]
            for our, before in zip(*pieces, strict=True):
                expected = (before.float() * factor).to(before.dtype)
                assert_same([our], [expected], what)
        if path == NORM:
            norms = [torch.linalg.vector_norm(each, dtype=torch.float64) for each in gradients]
            exact = (torch.stack(norms).square().sum() * ours.inverses[0].double() ** 2).item()
            if not abs(squares.item() - exact) <= NORM_TOLERANCE * exact:
                raise AssertionError(f"{what}: {squares.item()} as sum of squares, not {exact}")
        copies[len(copies) // 2].view(-1)[-1] = torch.inf
        for planted in (False, True):
            if ours.found_inf.item() != planted:
                state = "with" if planted else "without"
                raise AssertionError(f"{what}: wrong flag {state} an infinity")
            if not planted:
                calls.paths[path](prepared, 0)


def _ceilings(gradients: Lists) -> list[Contender]:
    """A copy, and a read of its source."""
    pieces = gradients.pieces()
    contenders = gradients.copies(pieces)
    if ceilings.triton is not None:
        reads = [ceilings.reader(source) for _, source in pieces]
        read = Contender(READ, "torch", lambda number: reads[number % len(reads)]())
        contenders.append(read)
    return contenders


def time_on_device(
    subject: str,
    case: GradCase,
    dtype: torch.dtype,
    contenders: Sequence[Contender],
    lists: int,
    on: Setting,
) -> Timed:
    """Device time alone, of small lists by graphs if they can be captured."""
    assert on.queue is not None
    cycle, notes = 2 * lists, []
    timer: GraphTimer | EventTimer = EventTimer(on.queue, {}, cycle)
    if case.list_bytes(dtype) < GRAPH_BELOW_BYTES:
        try:
            timer = GraphTimer(on.queue, contenders, cycle)
        except RuntimeError as error:
            notes.append(f"{case.name}: by events, since no graph could be captured: {error}")
    return Timed(
        *(subject, case, dtype, contenders, interleave(contenders, on.effort, cycle, timer)),
        timer=timer.name,
        lists=lists,
        tensors_per_launch=tensors_per_launch(torch.__version__, torch.version.cuda),
        notes=notes,
    )


def rows_of(timed: Timed) -> list[Row]:
    """Rows with bytes, relative to the copy of the whole list."""
    size = timed.list_bytes
    rows = [replace(row, bytes=providers.moved_bytes(row.call, size)) for row in timed.rows()]
    [copy] = [row.gb_s for row in rows if row.call == COPY]
    return [replace(row, copy_gb_s=copy) for row in rows]
