"""Training steps whose modules are watched by `find_nonfinite`, beside the same steps."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import torch

from ampfast import backends, find_nonfinite

from .cases import GradCase
from .loops import Kind, Lesson, Loop
from .machine import require_memory
from .nets import Net, nets
from .timing import WITHOUT, Contender, Job, Measured, Setting, ratio, time_contenders
from .training import BYTES_PER_ELEMENT, LONGER, STEPS_IN_TURN


def jobs(on: Setting) -> list[Job]:
    """One job for the transformer, and one for the convolutional net."""
    return [Job(net.name, functools.partial(measure, net, on)) for net in nets(on.device)[:2]]


def measure(net: Net, on: Setting) -> Measured:
    """Times steps of a net without a scaler, and those of a copy that is watched."""
    device, case = on.device, GradCase(net.name, net.shapes())
    require_memory(2 * BYTES_PER_ELEMENT * case.elements + net.step_bytes, device)
    lesson = Lesson.of(net, device)
    assert_found(net, lesson)
    kind, watched = Kind(), Lesson.of(net, device)
    plain = Loop(net, kind, WITHOUT, lesson)
    loop = Loop(net, replace(kind, feature="find_nonfinite"), WITHOUT, watched)
    key = loop.key[0], backends.default_for(device)
    contenders = [
        Contender(*plain.key, plain.step, waits=True),
        Contender(*key, loop.step, waits=True),
    ]
    with find_nonfinite(watched.module) as finder:
        longer = LONGER[device.type] * on.effort.comparison_s
        timed = time_contenders(
            *("watched", case, lesson.dtype, contenders),
            replace(on, effort=replace(on.effort, comparison_s=longer)),
            cycle=STEPS_IN_TURN,
            alone=contenders,
        )
        if (found := finder.report()) is not None:
            raise AssertionError(f"{net.name}: {found}")
    without, row = timed.rows()
    over = ratio(timed.samples, key, plain.key)
    return Measured([without, replace(row, over_none=over)], timed.notes)


def assert_found(net: Net, lesson: Lesson) -> None:
    """Raises unless an infinite weight of the first module is found there."""
    name, weight = next(lesson.module.named_parameters())
    before = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(math.inf)
    with find_nonfinite(lesson.module) as finder:
        lesson.loss()
    with torch.no_grad():
        weight.copy_(before)
    found = finder.report()
    if found is None or found.module != name.removesuffix(".weight"):
        raise AssertionError(f"{net.name}: {name} is infinite, and the report is {found}")
