"""Passes of a backend's kernels over lists of gradients, and their parity with torch's op."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ampfast import _C, functional
from ampfast.backends import core, cpu
from ampfast.backends.core import Clip, Factor, GradList, Pass
from support.comparison import BITS, FLOATS, assert_same

CPU_KERNELS = cpu


class Track(NamedTuple):
    """Tables by parameter, as for `Pass`."""

    marks: torch.Tensor
    now: torch.Tensor


# Instruction sets that machine and binary share.
CAPABILITIES = [*dict.fromkeys((_C.CPU_CAPABILITY, "baseline"))]


def grads_of(tensors: Sequence[torch.Tensor]) -> GradList:
    """The list that kernels take."""
    device = tensors[0].device if tensors else torch.device("cpu")
    grads = core.list_of(list(tensors), device)
    assert grads is not None, "a tensor is irregular"
    return grads


def run_check(
    kernels: Any, grads: GradList, divisor: torch.Tensor | None = None, **more: Any
) -> torch.Tensor:
    """Checks gradients as they are, or their quotients; returns found_inf."""
    how = Factor.NONE if divisor is None else Factor.DIVIDE
    return kernels.run(grads, _pass(False, how, divisor, **more))


def run_unscale(
    kernels: Any, grads: GradList, factor: torch.Tensor, *, is_scale: bool, **more: Any
) -> torch.Tensor:
    """Multiplies gradients by a factor, or by the reciprocal of a scale; returns found_inf."""
    return kernels.run(grads, _pass(True, _how(is_scale), factor, **more))


def run_sums(
    kernels: Any,
    grads: GradList,
    factor: torch.Tensor,
    *,
    is_scale: bool,
    sums: torch.Tensor,
    **more: Any,
) -> torch.Tensor:
    """Writes the sums of the products alone; returns found_inf."""
    return kernels.run(grads, _pass(False, _how(is_scale), factor, sums=sums, **more))


def run_clip(kernels: Any, *arguments: Any) -> None:
    """Writes the norm, the coefficient and the divisor of a clip, and marks a spike."""
    kernels.clip(Clip(*arguments))


def _how(is_scale: bool) -> Factor:
    return Factor.TIMES_RECIPROCAL if is_scale else Factor.TIMES


def _pass(
    write: bool,
    how: Factor,
    factor: torch.Tensor | None,
    *,
    track: Track | None = None,
    **more: Any,
) -> Pass:
    if track is not None:
        more |= {"marks": track.marks, "now": track.now}
    return Pass(write, how, factor, **more)


CHUNK = _C.CHUNK
# More than a window's alignment on both sides of a tensor.
GUARD = 32
VECTOR_BYTES = 16

Make = Callable[[], list[torch.Tensor]]


def flag(value: float = 0.0, device: torch.device | str = "cpu") -> torch.Tensor:
    return torch.full((), value, dtype=torch.float32, device=device)


def torch_unscale_(grads: list[torch.Tensor], inverse: float) -> torch.Tensor:
    found_inf = flag()
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, flag(inverse))
    return found_inf


def storage(tensor: torch.Tensor) -> torch.Tensor:
    """Whole storage of a tensor, where writes outside of the tensor show."""
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())


def window(dtype: torch.dtype) -> int:
    """Elements per window."""
    return core.WINDOW_BYTES // dtype.itemsize


def inverse_of(scale: float) -> float:
    return flag(scale).double().reciprocal().float().item()


def non_finite(grads: Sequence[torch.Tensor]) -> float:
    return float(any(not g.isfinite().all() for g in grads))


def exact_bits(tensor: torch.Tensor) -> torch.Tensor:
    return storage(tensor).view(BITS[tensor.dtype]).clone()


def random_bits(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    width = 8 * dtype.itemsize
    low, high = -(2 ** (width - 1)), 2 ** (width - 1) - 1
    return torch.randint(low, high, (count,), dtype=BITS[dtype], generator=generator).view(dtype)


def check_parity(make: Make, inverse: float) -> None:
    """Unscales and checks copies of the gradients here and in torch and compares all memory."""
    ours, theirs = make(), make()
    raw = non_finite(ours)
    before = [exact_bits(g) for g in ours]
    found = flag()
    functional.check_(ours, found)
    assert found.item() == raw
    for gradient, bits in zip(ours, before, strict=True):
        assert torch.equal(exact_bits(gradient), bits), "check_ wrote to a gradient"

    functional.unscale_(ours, found := flag(), flag(inverse))
    torch_found = torch_unscale_(theirs, inverse)
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert_same(storage(a), storage(b), f"storage of gradient {i}")
    # Ours judges written values: it is set wherever torch's is, and for overflows.
    assert found.item() == non_finite(theirs)
    assert found.item() >= torch_found.item()


def last_finite(dtype: torch.dtype, inverse: float) -> int:
    """Bit pattern of the largest value that torch's op unscales to a finite one."""
    top = torch.tensor(torch.finfo(dtype).max, dtype=dtype).view(BITS[dtype]).item()
    low, high = 0, int(top) + 1
    while high - low > 1:
        middle = (low + high) // 2
        value = torch.tensor([middle], dtype=BITS[dtype]).view(dtype)
        torch_unscale_([value], inverse)
        low, high = (middle, high) if value.isfinite().all() else (low, middle)
    return low


def offsets(dtype: torch.dtype) -> range:
    """Offsets in elements between two 16-byte boundaries."""
    return range(VECTOR_BYTES // dtype.itemsize)


def guarded(values: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """Copies values between guard bands, whose infinities and pattern show reads and writes.

    The copy begins `offset` elements past a 16-byte boundary.
    """
    memory = torch.full((GUARD + offset + values.numel() + GUARD,), 7.5, dtype=values.dtype)
    memory[::2] = torch.inf
    assert memory.data_ptr() % VECTOR_BYTES == 0
    copy = memory[GUARD + offset : GUARD + offset + values.numel()]
    copy.copy_(values)
    if values.numel():
        assert copy.data_ptr() % VECTOR_BYTES == offset * values.itemsize % VECTOR_BYTES
    return copy


def normal(count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)


def mixed(share: Callable[[torch.dtype], int] = window) -> list[torch.Tensor]:
    """All dtypes, at several offsets, with sizes from zero to several windows, or other shares."""
    return [
        guarded(normal(count, dtype, seed), seed % len(offsets(dtype)))
        for seed, (count, dtype) in enumerate(
            (count, dtype)
            for dtype in FLOATS
            for count in (5, 0, 2 * share(dtype) + 3, 1, share(dtype))
        )
    ]


def torch_unscaled(make: Make, inverse: float) -> tuple[list[torch.Tensor], float]:
    """Gradients unscaled by torch's op, and whether a written value is not finite."""
    torch_unscale_(grads := make(), inverse)
    return grads, non_finite(grads)


def assert_same_memory(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> None:
    """Compares the tensors and the guard bands around them."""
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert_same(storage(a), storage(b), f"memory of gradient {i}, {a.dtype}")


def reference_norms(tensors: list[torch.Tensor], inverse: float) -> tuple[float, float]:
    """Norms in plain Python: an exactly rounded sum, and the maximum that torch's op writes."""
    squares, maximum = [0.0], 0.0
    for tensor in tensors:
        values = tensor if tensor.dtype is torch.float64 else tensor.float()
        squares += (values * flag(inverse).to(values.dtype)).double().square().tolist()
        written = tensor.clone()
        torch_unscale_([written], inverse)
        maximum = max([maximum, *written.double().abs().tolist()])
    return math.fsum(squares), maximum


def norms(tensors: list[torch.Tensor], inverse: float) -> tuple[float, float]:
    written = torch.full((2,), math.nan, dtype=torch.float64)
    found = cpu.run(grads_of(tensors), Pass(False, Factor.TIMES, flag(inverse), sums=written))
    assert found.item() == float(not math.isfinite(written[1].item()))
    return tuple(written.tolist())


def wide(value: float, device: str = "cpu") -> torch.Tensor:
    """Coefficient as kernels take it."""
    return torch.tensor(value, dtype=torch.float64, device=device)


def available_gibibytes() -> float:
    with open("/proc/meminfo") as lines:
        fields = dict(line.split(":") for line in lines)
    return int(fields["MemAvailable"].split()[0]) / 2**20
