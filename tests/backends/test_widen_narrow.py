"""Casts of master weights on a CPU, against torch's arithmetic on float32 copies."""

from __future__ import annotations

import math

import pytest
import torch
from support.comparison import assert_same
from support.kernels import CHUNK, CPU_KERNELS, flag, grads_of, narrow_, run_unscale
from support.processes import threads

HALVES = (torch.float16, torch.bfloat16)
FACTORS = (1.0, 0.5, 2.0**-16, 1 / 3, 3.0, 2.0**100, 2.0**-140, 0.0, math.inf, math.nan, -0.75)


def all_patterns(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def special_floats() -> torch.Tensor:
    """Every 16-bit pattern as the upper half, with lower halves around a tie; random bits."""
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    around = [upper | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x0FFF, 0x1000, 0x1001)]
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(-(2**31), 2**31, (200_000,), generator=generator).to(torch.int32)
    return torch.cat([*around, random]).view(torch.float32)


def poisoned(like: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.empty_like(each, dtype=torch.float32).fill_(77.0) for each in like]


def dense(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.contiguous() for tensor in tensors]


def widen_(out: list[torch.Tensor], grads: list[torch.Tensor], by: float) -> torch.Tensor:
    return run_unscale(CPU_KERNELS, grads_of(grads, out), flag(by), is_scale=False)


def check_widen(grads: list[torch.Tensor], inverse: float) -> None:
    before = [grad.clone() for grad in grads]
    out = poisoned(grads)
    found = widen_(out, grads, inverse)
    expected = [grad.float() if inverse == 1 else grad.float() * inverse for grad in grads]
    assert_same(dense(out), dense(expected), "out")
    finite = all(bool(each.isfinite().all()) for each in expected)
    assert_same(found, flag(0.0 if finite else 1.0), "found_inf")
    assert_same(dense(grads), dense(before), "gradients")


def check_narrow(params: list[torch.Tensor], masters: list[torch.Tensor]) -> None:
    expected = [master.to(param.dtype) for param, master in zip(params, masters, strict=True)]
    narrow_(params, masters)
    assert_same(dense(params), dense(expected))


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_widen_all_patterns(capability: str, dtype: torch.dtype, factor: float) -> None:
    values = all_patterns(dtype)
    check_widen([values], factor)
    finite = values[values.isfinite()]
    check_widen([finite], factor)
    check_widen([finite[finite.float().abs() < 1], finite[:5]], factor)


@pytest.mark.parametrize("backend", ["cpu", "aten"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_narrow_special_bits(
    capability: str, dtype: torch.dtype, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMPFAST_BACKEND", backend)
    masters = special_floats()
    check_narrow([torch.full(masters.shape, 77.0, dtype=dtype)], [masters])


@pytest.mark.parametrize("start", range(9))
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_alignment_and_length(capability: str, dtype: torch.dtype, start: int) -> None:
    values = torch.randn(70, generator=torch.Generator().manual_seed(start))
    for length in (0, 1, 7, 8, 9, 15, 16, 17, 33, 61):
        narrow = values.to(dtype).clone()
        wide = torch.full((80,), 77.0)
        widen_([wide[start : start + length]], [narrow[start : start + length]], 0.5)
        expected = torch.full((80,), 77.0)
        expected[start : start + length] = narrow[start : start + length].float() * 0.5
        assert_same(wide, expected)
        narrow_([narrow[start : start + length]], [wide[1 : 1 + length]])
        rounded = values.to(dtype).clone()
        rounded[start : start + length] = wide[1 : 1 + length].to(dtype)
        assert_same(narrow, rounded)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_chunks_and_threads(capability: str, dtype: torch.dtype, count: int, bad: float) -> None:
    sizes = (CHUNK - 1, 3, CHUNK, 0, CHUNK + 1, 5 * CHUNK + 3)
    with threads(count):
        grads = [torch.randn(size).to(dtype) for size in sizes]
        check_widen(grads, 1 / 3)
        check_narrow(grads, [torch.randn(size) for size in sizes])
        for place in (0, CHUNK, 5 * CHUNK + 2):
            grads[-1][place] = bad
            check_widen(grads, 0.5)
            grads[-1][place] = 0


@pytest.mark.parametrize("backend", ["cpu", "aten"])
@pytest.mark.parametrize("found", [0.0, 1.0, math.nan])
def test_a_set_flag_keeps_the_parameters(
    capability: str, found: float, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMPFAST_BACKEND", backend)
    for dtype in HALVES:
        params = all_patterns(dtype).clone()
        narrow_([params], [torch.ones(2**16)], flag(found))
        expected = all_patterns(dtype) if found else torch.ones(2**16, dtype=dtype)
        assert torch.equal(params.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_lists_beyond_the_caches(dtype: torch.dtype) -> None:
    """From 64 MiB of float32 on it is stored past the caches, where addresses allow."""
    patterns = all_patterns(dtype)
    large = patterns.repeat(256)
    offset = torch.cat([patterns[:3], patterns])[3:]
    grads = [large[1:], patterns.clone(), offset[:1001], large.clone()]
    check_widen(grads, 1 / 3)
    check_widen([patterns.clone(), large], 1.0)
    values = special_floats()
    values = values.repeat(-(-(2**24) // values.numel()))
    params = [torch.zeros_like(values, dtype=dtype), torch.zeros(1004, dtype=dtype)[1:]]
    check_narrow(params, [values, values[-1003:].clone()])
