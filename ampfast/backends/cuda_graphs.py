"""CUDA graphs: what a capture refuses, and steps that a replay skips."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

# Tells whether the current stream of a GPU in use is being captured; adds no Python frame.
is_stream_capturing: Any = (
    torch._C._cuda_isCurrentStreamCapturing if torch.backends.cuda.is_built() else bool
)

WARM_UP = "run one iteration without capturing first"


def is_capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    # The second call fails in a torch without CUDA.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def refuse_capture(what: str, remedy: str = WARM_UP) -> None:
    """Raises RuntimeError, naming `what` and its `remedy`, if the current stream is captured."""
    # Compiled code runs later.
    if not torch.compiler.is_compiling() and is_capturing():
        raise RuntimeError(f"a CUDA graph cannot capture {what}: {remedy}")


def require_skippable(optimizer: torch.optim.Optimizer) -> None:
    """Raises RuntimeError if the graph that is being captured could not skip this step."""
    states: Mapping[Any, Any] = getattr(optimizer, "state", {})
    used = [
        (group, param.grad.device, states.get(param, {}))
        for group in optimizer.param_groups
        for param in group["params"]
        if getattr(param, "grad", None) is not None
    ]
    _capturing_graph(device for _, device, _ in used)
    name = type(optimizer).__name__
    if any(getattr(s["step"], "device", None) != at for _, at, s in used if "step" in s):
        raise RuntimeError(
            f"a CUDA graph cannot capture a step of {name}, which counts steps on the host, where "
            "no replay counts: make it with capturable=True if it has that argument, else call "
            "scaler.step and update outside of the graph"
        )
    if any(_lacks_state(optimizer, group, state) for group, _, state in used):
        raise RuntimeError(
            f"a CUDA graph cannot capture the first step of {name}, whose state every replay "
            f"would make anew: {WARM_UP}, in which it is not skipped"
        )


def _lacks_state(optimizer: object, group: dict[str, Any], state: dict[str, Any]) -> bool:
    """Whether the next step would make the state of a parameter.

    Known of torch's optimizers, and of others that have `capturable`: all but SGD keep state.
    """
    if isinstance(optimizer, torch.optim.SGD):
        return group["momentum"] != 0 and state.get("momentum_buffer") is None
    is_torchs = type(optimizer).__module__.startswith("torch.optim")
    return not state and (is_torchs or "capturable" in group)


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


def step_unless(
    flags: dict[Any, Tensor], optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> float | None:
    """Steps an optimizer unless a flag is set; under a capture each replay decides.

    Elsewhere the host waits for the flags, once.
    """
    step: Callable[..., float | None] = optimizer.step
    found: list[Any] = list(flags.values())
    on_gpu = [flag for flag in found if getattr(flag, "is_cuda", False)]
    if on_gpu and is_capturing():
        graph = _capturing_graph(getattr(flag, "device", None) for flag in found)
        graph.begin_capture_to_if_node(reduce(add, found) == 0)
        try:
            return step(*args, **kwargs)
        finally:
            # Else the rest of the capture would be part of the body.
            graph.end_capture_to_conditional_node()
    if len(on_gpu) > 1:
        found = [flag for flag in found if not getattr(flag, "is_cuda", False)]
        found.append(sum(flag.to(on_gpu[0].device, non_blocking=True) for flag in on_gpu))
    return None if sum(flag.item() for flag in found) else step(*args, **kwargs)
