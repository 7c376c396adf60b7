"""Host time of the GPU path without a GPU: launchers over an idle driver.

`python -m benchmarks.launches triton` prints rows of docs/contributing/benchmarks_full.md; each
needs a process
of its own.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from ampfast import _C, GradScaler, Sigmas, backends
from ampfast.backends.gpu import DeviceKernels

from .steps import optimizer_over

ROOT = Path(__file__).parents[1]
PARAMETERS = (10, 160, 1000)
# Each of four elements, so that torch's own work on the CPU is small, too.
ELEMENTS = 4
ARCHITECTURE = "90"
# As of an H200, with 132 multiprocessors.
PROGRAMS = 8 * 132


def main(arguments: list[str] | None = None) -> None:
    """Prints a Markdown table of microseconds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.launches")
    parser.add_argument("kernels", choices=(*PREPARE, "torch"))
    parser.add_argument("--rounds", type=int, default=40, help="of which the fastest counts")
    parser.add_argument("--calls", type=int, default=200, help="in a round")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    kind: type[torch.amp.GradScaler] = torch.amp.GradScaler
    name = f"torch {torch.__version__} on the CPU, its work included"
    if options.kernels != "torch":
        kind, name = GradScaler, give_kernels(options.kernels)
    print("Over a driver that does nothing: host time only, in microseconds, minima.\n")
    print(f"| kernels | calls | {' | '.join(f'{each:,} parameters' for each in PARAMETERS)} |")
    print(f"| --- | --- |{' --: |' * len(PARAMETERS)}")
    for path in (*CALLS, *(FEATURES if options.kernels != "torch" else ())):
        rounds, calls = options.rounds, options.calls
        times = [best(call_of(path, kind, count), rounds, calls) for count in PARAMETERS]
        print(f"| {name} | {path} | {' | '.join(f'{us:.1f}' for us in times)} |")
    if options.kernels == "cuda":
        print(f"\nA tensor under find_nonfinite: {watching(options.rounds):.1f} us")


def watching(rounds: int) -> float:
    """Microseconds of a tensor that `find_nonfinite` reads by a launch, hooks included."""
    finder: Any = sys.modules["ampfast.diagnose.find_nonfinite"]
    finder.backends = SimpleNamespace(default_for=lambda device: "cuda")
    nets = [nn.Sequential(*[nn.Linear(ELEMENTS, ELEMENTS) for _ in range(100)]) for _ in range(2)]
    with finder.find_nonfinite(nets[1]):
        steps = [
            lambda net=net: net(torch.ones(1, ELEMENTS)).square().sum().backward() for net in nets
        ]
        plain, watched = (best(step, rounds, 1) for step in steps)
    # The input, 100 outputs and their gradients.
    return (watched - plain) / 201


def give_kernels(kind: str) -> str:
    """Gives CPU tensors the kernels of a GPU, which do not run; returns their name."""
    if torch.version.cuda is not None:
        sys.exit("launches: needs a CPU build of torch; others call the idle driver themselves")
    sys.path += [str(ROOT / "tests"), str(ROOT / "tools" / "ptx_emulator")]
    os.environ.setdefault("PTX_EMULATOR_CACHE", str(ROOT / "build" / "ptx"))
    name, launcher = PREPARE[kind]()
    kernels = DeviceKernels(launcher)  # type: ignore[arg-type]
    backends.Choice.kernels_for = lambda choice, device: kernels  # type: ignore
    return name


def prepare_triton() -> tuple[str, ModuleType]:
    import triton
    from ptx_emulator import triton_driver

    from ampfast.backends.triton import launch

    triton_driver.activate(ARCHITECTURE, runs=False)
    launch._threads = lambda device: 128  # type: ignore[assignment]
    launch.limit_programs(PROGRAMS)
    return f"Triton {triton.__version__}", launch


def prepare_cuda() -> tuple[str, ModuleType]:
    from support import cuda_kernels

    cuda_kernels.install_idle(_C)
    _C.cuda_limit_programs(PROGRAMS)
    from ampfast.backends import cuda

    return "CUDA", cuda


PREPARE = {"triton": prepare_triton, "cuda": prepare_cuda}


UNSCALE, FUSED, CLIP, DEFERRED = CALLS = (
    *("`unscale_` + `update`", "fused `step_and_update`", "clip + `step` + `update`"),
    "deferred clip + fused `step` + `update`",
)
# The first of these calls with a feature, which torch's scaler lacks.
FEATURES: dict[str, dict[str, Any]] = {
    "`unscale_` + `update`, `skip_above=Sigmas(6)`": {"skip_above": Sigmas(6)},
    '`unscale_` + `update`, `track="norms"`': {"track": "norms"},
}


def call_of(path: str, kind: Callable[..., Any], count: int) -> Callable[[], None]:
    """Calls of a scaler of ours, or the nearest of torch's, over so many parameters."""
    gradients = [torch.ones(ELEMENTS) for _ in range(count)]
    optimizer = optimizer_over(gradients, path in (FUSED, DEFERRED))
    scaler = kind("cpu", **FEATURES.get(path, {}))
    params, is_ours = optimizer.param_groups[0]["params"], isinstance(scaler, GradScaler)
    scaler.scale(torch.ones(()))

    def call() -> None:
        if path == FUSED and is_ours:
            scaler.step_and_update(optimizer)
            return
        if path in (CLIP, DEFERRED) and is_ours:
            scaler.clip_grad_norm_(optimizer, 1.0, in_place=path == CLIP)
        elif path != FUSED:
            scaler.unscale_(optimizer)
        if path in (CLIP, DEFERRED) and not is_ours:
            torch.nn.utils.clip_grad_norm_(params, 1.0)
        if path in (FUSED, CLIP, DEFERRED):
            scaler.step(optimizer)
        scaler.update()

    return call


def best(call: Callable[[], object], rounds: int, calls: int) -> float:
    """Microseconds of a call in the fastest round."""
    call()
    found = []
    for _ in range(rounds):
        start = time.perf_counter_ns()
        for _ in range(calls):
            call()
        found.append(time.perf_counter_ns() - start)
    return min(found) / calls / 1e3


if __name__ == "__main__":
    main()
