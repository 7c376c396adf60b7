"""Training steps of real nets: with each scaler and none, and watched by `find_nonfinite`."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ampfast import backends, find_nonfinite

from . import providers
from .cases import GradCase
from .loops import Kind, Loop, assert_no_skip, assert_parity, optimizer_over
from .machine import require_memory
from .nets import Net, nets
from .results import NO_SCALER, Row
from .timing import Job, Measured, Setting, Subject

# Steps are long, so samples have few of them and more time in total: most on a CPU, where the time
# of the same step varies by a third.
STEPS_IN_TURN = 3
LONGER = {"cpu": 5.0, "cuda": 2.0}
# Three ways to clip differ by a hundredth of a step.
CLIP_LONGER = 3.0


def jobs(on: Setting) -> list[Job]:
    """One job for each net, kind of optimizer, and clipping or not."""
    kinds = [Kind(fused, clip) for fused in (False, True) for clip in (False, True)]
    return [job(net, kind, on) for net in nets(on.device) for kind in kinds]


def job(net: Net, kind: Kind, on: Setting) -> Job:
    return Job(f"{net.name}, {kind.call(net)}", functools.partial(measure, net, kind, on))


def watched_jobs(on: Setting) -> list[Job]:
    """One job for the transformer, and one for the convolutional net."""
    chosen = nets(on.device)[:2]
    return [Job(net.name, functools.partial(measure_watched, net, on)) for net in chosen]


def measure(net: Net, kind: Kind, on: Setting) -> Measured:
    """Times steps of a net with its optimizer and batch, with each scaler in turn."""
    names, notes = providers.available(on.device)
    ours = [kind, replace(kind, by_scaler=True)] if kind.clip else [kind]
    require_memory((1 + len(ours) * len(names)) * _bytes_of(net), on.device)
    lesson = net.lesson(on.device)
    assert_parity(net, lesson, ours, names)
    # All step the same parameters with the same optimizer, so only the scaler differs.
    parameters = list(lesson.module.parameters())
    optimizer = optimizer_over(net, kind, parameters)
    sides = [(kind, NO_SCALER), (kind, "torch"), *((each, name) for name in names for each in ours)]
    loops = [Loop(net, each, name, lesson, parameters, optimizer) for each, name in sides]
    replaces = {each.call(net): kind.call(net) for each in ours if each.by_scaler}
    on = on.lasting(CLIP_LONGER if kind.clip else 1.0)
    rows = _time("training", net, loops, on, replaces)
    assert_no_skip(net, loops)
    return Measured(rows, notes)


def measure_watched(net: Net, on: Setting) -> Measured:
    """Times steps of a net without a scaler, and those of a copy that is watched."""
    require_memory(2 * _bytes_of(net), on.device)
    bad = net.lesson(on.device)
    name, weight = next(bad.module.named_parameters())
    torch.nn.init.constant_(weight, math.inf)
    with find_nonfinite(bad.module) as finder:
        bad.loss()
    found = finder.report()
    if found is None or found.module != name.removesuffix(".weight"):
        raise AssertionError(f"{net.name}: {name} is infinite, and the report is {found}")
    lesson, watched = (net.lesson(on.device) for _ in range(2))
    loops = [Loop(net, Kind(), NO_SCALER, lesson)]
    loops.append(Loop(net, Kind(feature="find_nonfinite"), NO_SCALER, watched))
    loops[1].key = loops[1].key[0], backends.default_for(on.device)
    with find_nonfinite(watched.module) as finder:
        rows = _time("watched", net, loops, on)
        if (found := finder.report()) is not None:
            raise AssertionError(f"{net.name}: {found}")
    return Measured(rows)


def _bytes_of(net: Net) -> int:
    """Parameter, gradient and two optimizer states, in float32."""
    return 16 * GradCase.of(net).elements


def _time(
    subject: str, net: Net, loops: Sequence[Loop], on: Setting, replaces: Any = None
) -> list[Row]:
    """Times steps relative to those of the first loop."""
    over = Subject(subject, GradCase.of(net), loops[0].lesson.dtype, replaces=replaces or {})
    over = replace(over, without=loops[0].key)
    steps = {loop.key: loop.step for loop in loops}
    return over.time(steps, on.lasting(LONGER[on.device.type]), STEPS_IN_TURN)
