"""Host time of the GPU path without a GPU: real launchers over a driver that does nothing.

`python -m benchmarks.launches triton` prints a row of docs/benchmarks.md; `cuda` takes nvcc. Each
needs a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch

from ampfast import _C, GradScaler, backends
from ampfast.backends.gpu import DeviceKernels

from .steps import NoOptimizer

ROOT = Path(__file__).parents[1]
PARAMETERS = (10, 160, 1000)
# Each of four elements, so that torch's own work on the CPU is small, too.
ELEMENTS = 4
ARCHITECTURE = "90"
# As of an H200, with 132 multiprocessors.
PROGRAMS = 8 * 132

HEADER = f"""\
`unscale_` + `update` over a driver that does nothing: host time only, in microseconds, minima.

| kernels | {" | ".join(f"{count:,} parameters" for count in PARAMETERS)} |
| --- |{" --: |" * len(PARAMETERS)}"""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.launches")
    parser.add_argument("kernels", choices=(*PREPARE, "torch"))
    parser.add_argument("--rounds", type=int, default=40, help="of which the fastest counts")
    parser.add_argument("--calls", type=int, default=200, help="in a round")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    kind, name = torch.amp.GradScaler, f"torch {torch.__version__} on the CPU, its work included"
    if options.kernels != "torch":
        name = give_kernels(options.kernels)
        kind = GradScaler
    times = [best(loop(kind, count), options.rounds, options.calls) for count in PARAMETERS]
    print(HEADER)
    print(f"| {name} | {' | '.join(f'{us:.1f}' for us in times)} |")


def give_kernels(kind: str) -> str:
    """Gives CPU tensors the kernels of a GPU, which do not run; returns their name."""
    sys.path += [str(ROOT / "tests"), str(ROOT / "tools" / "ptx_emulator")]
    os.environ.setdefault("PTX_EMULATOR_CACHE", str(ROOT / "build" / "ptx"))
    name, launcher = PREPARE[kind]()
    # Of the device, which is the CPU, CUDA is not asked.
    here = contextlib.nullcontext()
    launcher.on = lambda device: here  # type: ignore[attr-defined]
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
    from support import emulated_cuda

    emulated_cuda.install(_C, ARCHITECTURE, runs=False)
    from ampfast.backends import cuda

    return "CUDA", cuda


PREPARE = {"triton": prepare_triton, "cuda": prepare_cuda}


def loop(kind: Callable[[str], torch.amp.GradScaler], count: int) -> Callable[[], None]:
    """`unscale_` and `update` of a scaler with so many parameters."""
    params = [torch.nn.Parameter(torch.zeros(ELEMENTS)) for _ in range(count)]
    for param in params:
        param.grad = torch.ones(ELEMENTS)
    optimizer, scaler = NoOptimizer(params), kind("cpu")
    scaler.scale(torch.ones(()))

    def call() -> None:
        scaler.unscale_(optimizer)
        scaler.update()

    call()
    return call


def best(call: Callable[[], object], rounds: int, calls: int) -> float:
    """Microseconds of a call in the fastest round."""
    found = []
    for _ in range(rounds):
        start = time.perf_counter_ns()
        for _ in range(calls):
            call()
        found.append(time.perf_counter_ns() - start)
    return min(found) / calls / 1e3


if __name__ == "__main__":
    main()
