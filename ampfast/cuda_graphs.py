"""Steps that a replay of a CUDA graph skips: bodies of its conditional nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import reduce
from operator import add
from typing import Any

import torch

from ampfast.errors import WARM_UP
from ampfast.optimizers import counts_on_host, makes_state

__all__ = ["require_skippable", "skipped_where"]


def require_skippable(optimizer: torch.optim.Optimizer) -> None:
    """Raises RuntimeError if the graph that is being captured could not skip this step."""
    groups = optimizer.param_groups
    params = [param for group in groups for param in group["params"]]
    grads = [param.grad for param in params if getattr(param, "grad", None) is not None]
    _capturing_graph(grad.device for grad in grads)
    name = type(optimizer).__name__
    if not all(group.get("capturable", True) for group in groups):
        raise RuntimeError(
            f"a CUDA graph cannot capture a step of {name} with capturable=False: "
            "make it with capturable=True"
        )
    if counts_on_host(optimizer):
        raise RuntimeError(
            f"a CUDA graph cannot capture a step of {name}, which counts steps on the host, where "
            "no replay counts: call scaler.step and update outside of the graph"
        )
    if makes_state(optimizer):
        raise RuntimeError(
            f"a CUDA graph cannot capture the first step of {name}, whose state every replay "
            f"would make anew: {WARM_UP}, in which it is not skipped"
        )


@contextmanager
def skipped_where(found_infs: Iterable[Any]) -> Iterator[None]:
    """Captures its body so that a replay skips it if one of these flags is not 0."""
    flags = list(found_infs)
    graph = _capturing_graph(getattr(flag, "device", None) for flag in flags)
    graph.begin_capture_to_if_node(reduce(add, flags) == 0)
    try:
        yield
    finally:
        # Else the rest of the capture would be part of the body.
        graph.end_capture_to_conditional_node()


def _capturing_graph(devices: Iterable[torch.device | None]) -> Any:
    """Returns the graph that is being captured; raises if it cannot skip work on `devices`."""
    kind: Any = torch.cuda.CUDAGraph
    if torch.version.hip is not None or not hasattr(kind, "begin_capture_to_if_node"):
        raise RuntimeError(
            "a CUDA graph cannot capture a step that the host may skip: take torch 2.12 or newer "
            "with CUDA 12.4 or newer, or an optimizer with fused=True, which decides on the "
            "device, and capturable=True if it has that argument"
        )
    current = _current_device()
    others = {str(device) for device in devices if device != current}
    if others:
        raise RuntimeError(
            f"a CUDA graph of {current} cannot capture a step that it may have to skip on "
            f"{', '.join(sorted(others))}, too: give each device an optimizer and a graph"
        )
    return kind.get_currently_capturing_graph()


def _current_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
