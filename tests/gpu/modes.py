"""Runs every mode of every kernel once over small lists, for compute-sanitizer.

`python tests/gpu/modes.py [backend...]`
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS.parent), str(TESTS), str(TESTS / "gpu")]

import torch  # noqa: E402
from gpu_support import BACKENDS, flag, gpu, kernels_of, unavailable_reason  # noqa: E402
from support.comparison import FLOATS  # noqa: E402
from support.kernel_calls import (  # noqa: E402
    grads_of,
    run_check,
    run_sums,
    run_unscale,
)
from support.kernel_parity import wide  # noqa: E402
from support.tracking_reference import track_for  # noqa: E402

from ampfast.backends import core  # noqa: E402
from ampfast.backends.core import (  # noqa: E402
    WINDOW_BYTES,
    Track,
    Update,
)
from ampfast.loss_scale import Limits, LossScale  # noqa: E402

FACTORS = (2.0, 0.5, 1)


def gradients(dtypes: Sequence[torch.dtype], device: torch.device) -> list[torch.Tensor]:
    """Gradients of 8, each in an allocation of its own that ends with it."""
    grads = []
    for dtype in dtypes:
        one = WINDOW_BYTES // dtype.itemsize
        for count, offset in ((1, 0), (5, 1), (one, 0), (one + 3, 1), (2 * one + 1, 0)):
            memory = torch.full((count + offset,), 8.0, dtype=dtype, device=device)
            grads.append(memory[offset:])
    return grads


def modes(kernels: Any, device: torch.device) -> list[tuple[str, Callable[..., Any], float]]:
    """Name of each mode, its call on a list, and the expected gradients."""
    scale = flag(4.0, device)

    def unscale(**more: Callable[[], Any]) -> Callable[..., Any]:
        def call(grads: core.GradList) -> torch.Tensor:
            # New ones for each launch, which may write them.
            arguments = {name: make() for name, make in more.items()}
            return run_unscale(kernels, grads, scale, is_scale=True, **arguments)

        return call

    def zero() -> torch.Tensor:
        return flag(0.0, device)

    def sums() -> torch.Tensor:
        return torch.zeros(2, dtype=torch.float64, device=device)

    def marks() -> Track:
        return track_for(1_000, device=device)

    def ending(others: int = 0) -> Any:
        state = (flag(4.0, device), torch.zeros((), dtype=torch.int32, device=device))
        words = LossScale(Limits()).words_on(device)
        return kernels.ending(Update(*state, [zero()] * others, *FACTORS, words))

    return [
        ("check", lambda g: run_check(kernels, g), 8.0),
        ("check of quotients", lambda g: run_check(kernels, g, scale), 8.0),
        ("check, accumulated", lambda g: run_check(kernels, g, found_inf=zero()), 8.0),
        ("check with marks", lambda g: run_check(kernels, g, track=marks()), 8.0),
        ("check and update", lambda g: run_check(kernels, g, scale, ending=ending(1)), 8.0),
        ("norms", lambda g: run_sums(kernels, g, scale, is_scale=True, sums=sums()), 8.0),
        ("unscale", unscale(), 2.0),
        ("unscale by the inverse", lambda g: run_unscale(kernels, g, scale, is_scale=False), 32.0),
        ("unscale, accumulated", unscale(found_inf=zero), 2.0),
        ("unscale with norms", unscale(sums=sums), 2.0),
        ("unscale with marks", unscale(track=marks), 2.0),
        ("unscale with a coefficient", unscale(coefficient=lambda: wide(0.5, device)), 1.0),
        ("unscale and update", unscale(ending=ending), 2.0),
        ("all at once", unscale(sums=sums, track=marks, ending=lambda: ending(1)), 2.0),
    ]


def wrong_pairs(backend: str, kernels: Any, device: torch.device) -> int:
    """Returns the number of wrong launches over pairs of 16-bit and float32 tensors."""
    wrong = 0
    for dtype, shift in itertools.product((torch.float16, torch.bfloat16), (0, 1)):
        halves = gradients([dtype], device)
        floats = [torch.zeros(half.numel() + shift, device=device)[shift:] for half in halves]
        pairs = grads_of(halves, floats)
        run_unscale(kernels, pairs, flag(4.0, device), is_scale=True)
        run_unscale(kernels, pairs, flag(4.0, device), is_scale=True, coefficient=wide(1.0, device))
        widened = all(bool((each == 2).all()) for each in floats)
        kernels.narrow(pairs, flag(0.0, device))
        if not widened or not all(bool((each == 2).all()) for each in halves):
            wrong += 1
            print(f"WRONG {backend}: pairs of {dtype}, shifted by {shift}")
    return wrong


def run(backend: str, device: torch.device) -> int:
    """Returns the number of wrong launches."""
    kernels = kernels_of(backend, device)
    wrong = wrong_pairs(backend, kernels, device)
    lists = [[dtype] for dtype in FLOATS] + [list(FLOATS)]
    for dtypes, (name, call, expected) in itertools.product(lists, modes(kernels, device)):
        for bad in (False, True):
            tensors = gradients(dtypes, device)
            if bad:
                tensors[-1][-1] = torch.inf
                expected_last = torch.inf
            else:
                expected_last = expected
            found = call(grads_of(tensors)).item()
            values = torch.cat([t[:-1].double() for t in tensors if t.numel() > 1])
            right = bool((values == expected).all()) and tensors[-1][-1].item() == expected_last
            if not right or found != float(bad):
                wrong += 1
                print(f"WRONG {backend}: {name}, {dtypes}, bad {bad}: found {found}")
    scale, tracker = flag(4.0, device), torch.zeros((), dtype=torch.int32, device=device)
    kernels.update(Update(scale, tracker, [flag(0.0, device) for _ in range(6)], *FACTORS))
    return wrong


def main(names: Sequence[str]) -> int:
    begin = time.monotonic()
    wrong = 0
    for backend in names or BACKENDS:
        if reason := unavailable_reason(backend):
            print(f"WRONG {backend}: {reason}")
            wrong += 1
            continue
        wrong += run(backend, gpu())
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        print(f"{backend}: every mode ran")
    print(f"{wrong} wrong in {time.monotonic() - begin:.1f}s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
