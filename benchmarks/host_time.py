"""Host time of the scaler's calls, warm: parameters of four elements leave only its overhead."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch

from . import providers, steps
from .cases import GradCase
from .harness import Job, Measured, Setting
from .results import Row, Spread
from .steps import UNSCALE

ELEMENTS = 4
# By parameters: limit of ampfast's `unscale_` and `update` as a fraction of torch's time.
GOALS = {1000: 0.04, 160: 0.06, 10: 0.15}
PATHS = ((UNSCALE,), steps.PATHS[:2], steps.PATHS[2:])


def jobs(on: Setting) -> list[Job]:
    """One job for each number of parameters and kind of step."""
    return [
        Job(f"{count} parameters, {paths[0]}", functools.partial(measure, count, paths, on))
        for count in GOALS
        for paths in PATHS
    ]


def measure(parameters: int, paths: Sequence[str], on: Setting) -> Measured:
    """Times calls until they return."""
    case = GradCase(f"{parameters}x{ELEMENTS}", parameters * ((ELEMENTS,),))
    timed, notes = steps.time_calls("host", paths, case, torch.float32, on)
    measured = Measured([_of_host(row) for row in timed.rows()], notes=notes)
    # Set for the kernels of a CPU.
    for name in providers.available(on.device)[0] if on.queue is None else ():
        measured.goals += timed.goal((UNSCALE, name), (UNSCALE, "torch"), GOALS[parameters])
    return measured


def _of_host(row: Row) -> Row:
    """Row with host time only: on a CPU the call does the work itself."""
    if row.host_us is None and row.ms is not None:
        row = replace(row, host_us=Spread(*(1e3 * ms for ms in row.ms)), host_vs_torch=row.vs_torch)
    return replace(row, ms=None, timer=None, vs_torch=row.host_vs_torch, host_vs_torch=None)
