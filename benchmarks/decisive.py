"""What a GPU is asked first: ceilings and passes over a few lists, host time, one training."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch

from . import kernels, steps, training
from .cases import CASES, GradCase
from .loops import Kind
from .nets import nets, perceptron
from .providers import CHECK, CLIP, NORM, UNSCALE
from .timing import Job, Setting, dtype_name

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
COMPARISON_S = 0.5


def jobs(on: Setting) -> list[Job]:
    """Lists, host time, and a training; on a CPU small ones, to rehearse it all."""
    if on.queue is None:
        return []
    effort = replace(on.effort, comparison_s=min(COMPARISON_S, on.effort.comparison_s))
    on = replace(on, effort=effort)
    net = perceptron(2, 8, 4) if on.rehearses else nets(on.device)[0]
    kind = Kind(fused=True)
    host = functools.partial(steps.measure_host, on=on)
    return [
        *_of_lists(LISTS, on),
        *(
            Job(f"{path}, {count} parameters", functools.partial(host, count, (path,)))
            for count in ((3,) if on.rehearses else steps.HOST_PARAMETERS)
            for path in (steps.UNSCALE, steps.STEP, steps.FUSED_STEP)
        ),
        Job(f"{net.name}, {kind.call(net)}", functools.partial(training.measure, net, kind, on)),
        *_of_lists(LAST_LISTS, on),
    ]


def _of_lists(lists: Sequence[tuple[str, torch.dtype, Sequence[str]]], on: Setting) -> list[Job]:
    return [
        Job(
            f"{name} {dtype_name(dtype)}",
            functools.partial(
                kernels.measure, case_for(name, on), dtype, on, paths, subject=SUBJECT
            ),
        )
        for name, dtype, paths in lists
    ]


def case_for(name: str, on: Setting) -> GradCase:
    """List of a name; to rehearse, a small one."""
    shapes = CASES[name].shapes
    if on.rehearses:
        shapes = tuple(tuple(min(size, 25) for size in shape) for shape in shapes[:3])
    return GradCase(name, shapes)
