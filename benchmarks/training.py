"""Training steps of real nets: without a scaler, with torch's and with ampfast's."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch

from . import providers
from .cases import GradCase
from .loops import SCALE, Kind, Lesson, Loop, assert_parity, optimizer_over
from .machine import require_memory
from .nets import Net, nets
from .timing import WITHOUT, Contender, Job, Measured, Setting, ratio, time_contenders

# Steps are long, so samples have few of them and more time in total: most on a CPU, where the time
# of the same step varies by a third.
STEPS_IN_TURN = 3
LONGER = {"cpu": 5.0, "cuda": 2.0}
# Three ways to clip differ by a hundredth of a step.
CLIP_LONGER = 3.0
# Parameter, gradient and two optimizer states, in float32.
BYTES_PER_ELEMENT = 16


def jobs(on: Setting) -> list[Job]:
    """One job for each net, kind of optimizer, and clipping or not."""
    kinds = [Kind(fused, clip) for fused in (False, True) for clip in (False, True)]
    return [
        Job(f"{net.name}, {kind.call(net)}", functools.partial(measure, net, kind, on))
        for net in nets(on.device)
        for kind in kinds
    ]


def measure(net: Net, kind: Kind, on: Setting) -> Measured:
    """Times steps of a net with its optimizer and batch, with each scaler in turn."""
    device = on.device
    names, notes = providers.available(device)
    case = GradCase(net.name, net.shapes())
    ours = [kind, replace(kind, by_scaler=True)] if kind.clip else [kind]
    copies = 1 + len(ours) * len(names)
    require_memory(copies * BYTES_PER_ELEMENT * case.elements + net.step_bytes, device)
    lesson = Lesson.of(net, device)
    assert_parity(net, lesson, ours, names)

    # All step the same parameters with the same optimizer, so only the scaler differs.
    parameters = list(lesson.module.parameters())
    optimizer = optimizer_over(net, kind, parameters)
    sides = [(kind, WITHOUT), (kind, "torch"), *((each, name) for name in names for each in ours)]
    loops = [Loop(net, each, name, lesson, parameters, optimizer) for each, name in sides]
    # Longer than a queue, so none can be queued behind another.
    contenders = [Contender(*loop.key, loop.step, waits=True) for loop in loops]
    times = LONGER[device.type] * (CLIP_LONGER if kind.clip else 1.0)
    longer = replace(on.effort, comparison_s=times * on.effort.comparison_s)
    timed = time_contenders(
        *("training", case, lesson.dtype, contenders, replace(on, effort=longer)),
        cycle=STEPS_IN_TURN,
        alone=contenders,
        replaces={each.call(net): kind.call(net) for each in ours if each.by_scaler},
    )
    if on.queue is not None:
        timed = replace(timed, timer="loop")
    _assert_no_skip(net, loops)
    without, *others = (loop.key for loop in loops)
    over_none = {key: ratio(timed.samples, key, without) for key in others}
    rows = [
        replace(
            row,
            vs_torch=row.vs_torch if key in over_none else None,
            over_none=over_none.get(key),
            # That of the gradients.
            list_bytes=case.list_bytes(torch.float32),
            tensors=len(case.shapes),
            elements=case.elements,
        )
        for (key, row) in zip((loop.key for loop in loops), timed.rows(), strict=True)
    ]
    return Measured(rows, notes + timed.notes)


def _assert_no_skip(net: Net, loops: Sequence[Loop]) -> None:
    """Raises if a step was skipped: it lacks the optimizer's work, which would flatter its time."""
    for loop in loops:
        if loop.scaler is not None and loop.scaler.get_scale() != SCALE:
            told = f"{net.name}, {' by '.join(loop.key)}: a step was skipped while timed"
            raise AssertionError(told)
    largest = torch.stack([each.detach().abs().max() for each in loops[0].parameters])
    if not bool(largest.isfinite().all()):
        raise AssertionError(f"{net.name}: parameters overflowed while timed")
