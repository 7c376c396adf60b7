"""Check and unscaling of BERT-large by each backend, for a profiler."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS.parent), str(TESTS), str(TESTS / "gpu")]

import torch  # noqa: E402
from gpu_support import BACKENDS, REHEARSES, flag, gpu, kernels_of, unavailable_reason  # noqa: E402
from support.kernel_calls import grads_of, run_check, run_unscale  # noqa: E402

from benchmarks.cases import CASES, make_gradients  # noqa: E402


def main() -> int:
    device = gpu()
    case = CASES["10x1k" if REHEARSES else "bert_large"]
    gradients = make_gradients(case, torch.float32, device)
    for backend in BACKENDS:
        if unavailable_reason(backend):
            continue
        kernels = kernels_of(backend, device)
        run_check(kernels, grads_of(gradients))
        run_unscale(kernels, grads_of(gradients), flag(1.0, device), is_scale=True)
        print(f"{backend}: check and unscaling of {case.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
