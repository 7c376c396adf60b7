"""Parity of one backend with torch's op, in seconds: `python tests/gpu/smoke.py triton`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS.parent), str(TESTS), str(TESTS / "gpu")]

from batches import KINDS, random_batch, run_batch  # noqa: E402
from gpu_support import REHEARSES, gpu, kernels_of, unavailable_reason  # noqa: E402

# Time for random lists, behind what the first of them compiles.
SECONDS = 0.0 if REHEARSES else 5.0
LISTS = 40


def main(backend: str) -> int:
    if reason := unavailable_reason(backend):
        print(f"WRONG {reason}")
        return 1
    device, begin, seed = gpu(), time.monotonic(), 0
    kernels = kernels_of(backend, device)
    while seed < len(KINDS) or time.monotonic() < begin + SECONDS:
        batch = random_batch(seed, LISTS)
        arguments = {"kind": KINDS[seed % len(KINDS)], "factor": 1 / 3, "is_scale": seed % 2 == 1}
        try:
            run_batch(kernels, batch, device, seed=seed, **arguments)
        except Exception as error:
            print(f"WRONG {backend}: {error}")
            return 1
        seed += 1
    print(f"{backend}: {seed * LISTS} lists as torch's in {time.monotonic() - begin:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
