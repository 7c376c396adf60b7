"""Compiles the Triton kernels for this GPU, side by side: `python tests/gpu/precompile.py`.

Tests and benchmarks then find them in Triton's cache, instead of compiling one after the other.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS.parent), str(TESTS), str(TESTS / "gpu")]
sys.path.append(str(TESTS / "backends" / "triton_kernels"))
sys.path.append(str(TESTS.parent / "tools" / "ptx_emulator"))

import torch  # noqa: E402
from gpu_support import REHEARSES, gpu, unavailable_reason  # noqa: E402
from support.comparison import FLOATS  # noqa: E402

MOST_PROCESSES = 16
# Of a rehearsal, which compiles for a GPU that is not there.
ARCHITECTURE = 90
FEW = 6


def kernels() -> list[Callable[[], object]]:
    """Calls that compile a kernel each."""
    import variants as known

    from ampfast.backends.triton import launch

    device = gpu()

    def prepare(variant: known.Variant) -> None:
        table = known.table_of(variant.dtype, device)
        work, segment = known.work_of(variant, device), table.segments[0]
        launch.prepare(work, table, segment, variant.is_last)

    updating = known.replace(known.updating(torch.float32), other=True)
    scales = known.work_of(updating, device).ending
    calls: list[Callable[[], object]] = [partial(launch.update_scale, scales)]
    for dtype in FLOATS:
        calls += [partial(prepare, variant) for variant in known.variants(dtype)]
    norms = (torch.float32, torch.float64)
    for norm, largest, divisor, sigmas in itertools.product(norms, *(3 * [(False, True)])):
        clip = known.clip_of(norm, largest, divisor, sigmas, device)
        calls.append(partial(launch.clip_coefficient, clip))
    return calls


def share(number: int, processes: int) -> tuple[int, list[str]]:
    """Compiles every so manieth kernel; returns how many, and what failed."""
    if REHEARSES:
        from ptx_emulator import triton_driver

        from ampfast.backends.triton import launch

        triton_driver.activate(ARCHITECTURE)
        launch._threads = lambda device: 128  # type: ignore[assignment]
        launch.limit_programs(1)
    mine, failed = kernels()[number::processes], []
    for call in mine[:FEW] if REHEARSES else mine:
        try:
            call()
        except Exception as error:  # compilers raise errors of many types
            failed.append(f"{type(error).__name__}: {error}".splitlines()[0])
    return len(mine), failed


def main() -> int:
    begin = time.monotonic()
    if reason := unavailable_reason("triton"):
        print(reason)
        return 0
    count = min(MOST_PROCESSES, os.cpu_count() or 1)
    # Forked processes cannot use CUDA.
    with ProcessPoolExecutor(count, get_context("spawn")) as pool:
        done = list(pool.map(share, range(count), [count] * count))
    failed = sorted({line for _, lines in done for line in lines})
    for line in failed:
        print(f"WRONG {line}")
    total = sum(number for number, _ in done)
    print(f"{total} kernels by {count} processes in {time.monotonic() - begin:.1f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
