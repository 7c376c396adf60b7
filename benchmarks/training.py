"""Training steps of real nets: with each scaler, none, and what ampfast's does besides."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ampfast import Sigmas, find_nonfinite

from . import providers
from .cases import GradCase
from .loops import Kind, Loop, assert_no_skip, assert_parity, optimizer_over
from .machine import require_memory
from .nets import Net, conv_net, nets, perceptron
from .results import NO_SCALER, Row
from .timing import Job, Measured, Setting, Subject

# Steps are long, so samples have few of them and more time in total: most on a CPU, where the time
# of the same step varies by a third.
STEPS_IN_TURN = 3
LONGER = {"cpu": 5.0, "cuda": 2.0}
# Three ways to clip differ by a hundredth of a step.
CLIP_LONGER = 3.0
# What the scaler does besides: the fused step, clipped; each of these with the default backend.
CLIPPED = Kind(fused=True, clip=True, max_norm=1.0)
BY_SCALER, WATCHED = replace(CLIPPED, by_scaler=True), "find_nonfinite"
BESIDES = (
    replace(BY_SCALER, in_place=True),
    replace(BY_SCALER, feature='track="norms"', options={"track": "norms"}),
    replace(BY_SCALER, feature="skip_above=Sigmas(6)", options={"skip_above": Sigmas(6)}),
    replace(BY_SCALER, feature=WATCHED),
)


def jobs(on: Setting) -> list[Job]:
    """One job for each net, kind of optimizer, and clipping or not."""
    kinds = [Kind(fused, clip) for fused in (False, True) for clip in (False, True)]
    found = clipped_jobs(on)
    others = [job(net, kind, on) for net in nets(on.device) for kind in kinds]
    known = {each.label for each in found}
    return found + [each for each in others if each.label not in known]


def clipped_jobs(on: Setting) -> list[Job]:
    """Clipped steps of a transformer and a convolutional net with AdamW, in every way."""
    chosen = [perceptron(2, 8, 4), conv_net()] if on.rehearses else nets(on.device)[:2]
    named = [replace(net, optimizer=torch.optim.AdamW, options={"lr": 1e-4}) for net in chosen]
    return [job(net, CLIPPED, on, BESIDES) for net in named]


def job(net: Net, kind: Kind, on: Setting, besides: Sequence[Kind] = ()) -> Job:
    return Job(f"{net.name}, {kind.call(net)}", functools.partial(measure, net, kind, on, besides))


def measure(net: Net, kind: Kind, on: Setting, besides: Sequence[Kind] = ()) -> Measured:
    """Times steps of a net with its optimizer and batch, with each scaler in turn."""
    names, notes = providers.available(on.device)
    ours = [kind, replace(kind, by_scaler=True)] if kind.clip else [kind]
    require_memory((1 + max(2, len(ours)) * len(names) + len(besides)) * _bytes_of(net), on.device)
    lesson = net.lesson(on.device)
    assert_parity(net, lesson, ours, names)
    if besides:
        assert_parity(net, lesson, [kind, *besides], names[:1])
    # All step the same parameters with the same optimizer, so only the scaler differs.
    parameters = list(lesson.module.parameters())
    optimizer = optimizer_over(net, kind, parameters)
    sides = [(kind, NO_SCALER), (kind, "torch"), *((each, name) for name in names for each in ours)]
    sides += [(each, names[0]) for each in besides]
    sides += [(replace(kind, clip=False), NO_SCALER)] if besides else []
    loops = [
        Loop(net, each, name, net.lesson(on.device))
        if each.feature == WATCHED
        else Loop(net, each, name, lesson, parameters, optimizer)
        for each, name in sides
    ]
    finders = [find_nonfinite(each.lesson.module) for each in loops if each.lesson is not lesson]
    replaces = {each.call(net): kind.call(net) for each in (*ours, *besides) if each.by_scaler}
    on = on.lasting(CLIP_LONGER if kind.clip else 1.0)
    rows = _time("training", net, loops, on, replaces)
    assert_no_skip(net, loops)
    for finder in finders:
        if (found := finder.report()) is not None:
            raise AssertionError(f"{net.name}: {found}")
        finder.remove()
    return Measured(rows, notes)


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
