"""What a GPU is asked first: clipped training steps, calls over a few lists, host time."""

from __future__ import annotations

import functools

import torch

from . import kernels, steps, training
from .providers import CHECK, NORM, UNSCALE
from .timing import Job, Setting

SUBJECT = "decisive"
LISTS = (
    *(("10x1k", torch.float32), ("1000x1k", torch.float32)),
    *(("bert_large", torch.float32), ("bert_large", torch.bfloat16)),
    *(("one_1g", torch.float32), ("llama_7b", torch.bfloat16)),
)


def jobs(on: Setting) -> list[Job]:
    """Trainings, lists, and host time; on a CPU small ones, to rehearse it all."""
    if on.queue is None:
        return []
    on = on.lasting(0.5)
    of_list = functools.partial(kernels.measure, paths=(CHECK, UNSCALE, NORM), subject=SUBJECT)
    return [
        *training.clipped_jobs(on),
        *kernels.lists_jobs(on, of_list, LISTS),
        *(
            steps.small_job("host", count, (path,), on)
            for count in ((3,) if on.rehearses else steps.HOST_PARAMETERS)
            for path in (steps.UNSCALE, steps.STEP, steps.FUSED_STEP)
        ),
    ]
