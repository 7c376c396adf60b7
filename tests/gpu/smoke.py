"""Parity of one backend with torch's op, in seconds: `python tests/gpu/smoke.py triton`.

`python tests/gpu/smoke.py triton 0` runs every mode of every kernel once, for compute-sanitizer.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS.parent), str(TESTS), str(TESTS / "gpu")]

import torch  # noqa: E402
from batches import KINDS, check_epilogues, random_batch, run_batch  # noqa: E402
from gpu_support import REHEARSES, gpu, kernels_of, unavailable_reason  # noqa: E402
from support.models import check_random_lists, check_times  # noqa: E402

# Time for random lists, behind what the first of them compiles.
SECONDS = 5.0
LISTS, FEW_LISTS = 40, 4


def run_modes(kernels: Any, device: torch.device) -> None:
    """Norms and marks of every pass, and updates behind checks."""
    check_random_lists(kernels, device, range(8))
    check_times(kernels, device, 9_000)
    check_epilogues(kernels, device, 9_000, 60, 20)


def main(backend: str, seconds: float) -> int:
    """Returns 0 if all is right."""
    if reason := unavailable_reason(backend):
        print(f"WRONG {reason}")
        return 1
    device, begin, seed = gpu(), time.monotonic(), 0
    lists = LISTS if seconds else FEW_LISTS
    kernels = kernels_of(backend, device)
    try:
        while seed < len(KINDS) or time.monotonic() < begin + seconds:
            how: Any = {"kind": KINDS[seed % len(KINDS)], "is_scale": seed % 2 == 1}
            run_batch(kernels, random_batch(seed, lists), device, seed=seed, factor=1 / 3, **how)
            seed += 1
        if not seconds:
            run_modes(kernels, device)
    except Exception as error:
        print(f"WRONG {backend}: {type(error).__name__}: {error}")
        return 1
    print(f"{backend}: {seed * lists} lists as torch's in {time.monotonic() - begin:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2]) if sys.argv[2:] else SECONDS * (not REHEARSES)))
