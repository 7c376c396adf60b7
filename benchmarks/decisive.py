"""What a GPU is asked first: passes over a few lists, host time, one training."""

from __future__ import annotations

import functools

import torch

from . import kernels, steps, training
from .loops import Kind
from .nets import nets, perceptron
from .providers import CHECK, NORM, UNSCALE
from .timing import Job, Setting

SUBJECT = "decisive"
LISTS = (
    *(("10x1k", torch.float32), ("1000x1k", torch.float32)),
    *(("bert_large", torch.float32), ("bert_large", torch.bfloat16)),
    *(("one_1g", torch.float32), ("llama_7b", torch.bfloat16)),
)


def jobs(on: Setting) -> list[Job]:
    """Lists, host time, and a training; on a CPU small ones, to rehearse it all."""
    if on.queue is None:
        return []
    on = on.lasting(0.5)
    net = perceptron(2, 8, 4) if on.rehearses else nets(on.device)[0]
    of_list = functools.partial(kernels.measure, paths=(CHECK, UNSCALE, NORM), subject=SUBJECT)
    return [
        *kernels.lists_jobs(on, of_list, LISTS),
        *(
            steps.small_job("host", count, (path,), on)
            for count in ((3,) if on.rehearses else steps.HOST_PARAMETERS)
            for path in (steps.UNSCALE, steps.STEP, steps.FUSED_STEP)
        ),
        training.job(net, Kind(fused=True), on),
    ]
