"""Kernels between 16-bit and float32 tensors, against torch's arithmetic on float32 copies."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_parity import CHUNK, flag
from support import WRITABLE_LAYOUTS, assert_same, make_gradient, threads
from torch._subclasses.fake_tensor import FakeTensorMode

from ampfast import functional

HALVES = (torch.float16, torch.bfloat16)
FACTORS = (1.0, 0.5, 2.0**-16, 1 / 3, 3.0, 2.0**100, 2.0**-140, 0.0, math.inf, math.nan, -0.75)

Pair = tuple[list[torch.Tensor], list[torch.Tensor]]


def all_patterns(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def special_floats() -> torch.Tensor:
    """Every 16-bit pattern as the upper half, with lower halves around a tie; random bits."""
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    around = [upper | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x0FFF, 0x1000, 0x1001)]
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(-(2**31), 2**31, (200_000,), generator=generator).to(torch.int32)
    return torch.cat([*around, random]).view(torch.float32)


def poisoned(like: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.empty_like(each, dtype=dtype).fill_(77.0) for each in like]


def dense(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.contiguous() for tensor in tensors]


def check_widen(grads: list[torch.Tensor], inverse: float) -> None:
    before = [grad.clone() for grad in grads]
    out, found = poisoned(grads, torch.float32), flag()
    functional.widen_(out, grads, found, flag(inverse))
    expected = [grad.float() if inverse == 1 else grad.float() * inverse for grad in grads]
    assert_same(dense(out), dense(expected), "out")
    finite = all(bool(each.isfinite().all()) for each in expected)
    assert_same(found, flag(0.0 if finite else 1.0), "found_inf")
    assert_same(dense(grads), dense(before), "gradients")


def check_narrow(params: list[torch.Tensor], masters: list[torch.Tensor]) -> None:
    expected = [master.to(param.dtype) for param, master in zip(params, masters, strict=True)]
    functional.narrow_(params, masters)
    for ours, theirs in zip(params, expected, strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(ours.nan_to_num().signbit(), theirs.nan_to_num().signbit())
        assert torch.equal(ours[~ours.isnan()], theirs[~theirs.isnan()])


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_widen_all_patterns(capability: str, dtype: torch.dtype, factor: float) -> None:
    values = all_patterns(dtype)
    check_widen([values], factor)
    finite = values[values.isfinite()]
    check_widen([finite], factor)
    check_widen([finite[finite.float().abs() < 1], finite[:5]], factor)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_narrow_special_bits(capability: str, dtype: torch.dtype) -> None:
    masters = special_floats()
    check_narrow([torch.full(masters.shape, 77.0, dtype=dtype)], [masters])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_narrowed_pattern_is_itself(capability: str, dtype: torch.dtype) -> None:
    values = all_patterns(dtype)
    values = values[~values.isnan()]
    back = torch.zeros_like(values)
    functional.narrow_([back], [values.float()])
    assert torch.equal(back.view(torch.int16), values.view(torch.int16))


@pytest.mark.parametrize("layout", WRITABLE_LAYOUTS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_layouts(capability: str, dtype: torch.dtype, layout: str) -> None:
    grads = [make_gradient(layout, dtype, seed) for seed in range(3)]
    check_widen(grads, 1 / 3)
    if layout != "overlapping":
        check_narrow(grads, [make_gradient(layout, torch.float32, seed) for seed in range(3, 6)])
    # Another order in memory on one side.
    if grads[0].dim() == 2 and grads[0].numel():
        out = [torch.empty(g.shape[::-1]).t() for g in grads]
        functional.widen_(out, grads, flag(), flag(0.5))
        assert_same(dense(out), dense([g.float() * 0.5 for g in grads]))


@pytest.mark.parametrize("start", range(9))
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_alignment_and_length(capability: str, dtype: torch.dtype, start: int) -> None:
    values = torch.randn(70, generator=torch.Generator().manual_seed(start))
    for length in (0, 1, 7, 8, 9, 15, 16, 17, 33, 61):
        narrow = values.to(dtype).clone()
        wide = torch.full((80,), 77.0)
        out, found = wide[start : start + length], flag()
        functional.widen_([out], [narrow[start : start + length]], found, flag(0.5))
        expected = torch.full((80,), 77.0)
        expected[start : start + length] = narrow[start : start + length].float() * 0.5
        assert_same(wide, expected)
        functional.narrow_([narrow[start : start + length]], [wide[1 : 1 + length]])
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


def test_both_dtypes_in_one_list(capability: str) -> None:
    grads = [torch.randn(37).to(HALVES[i % 2]) for i in range(9)]
    check_widen(grads, 1 / 3)
    check_narrow(grads, [torch.randn(37) for _ in grads])


def test_a_product_beyond_float16_is_finite() -> None:
    out, found = [torch.zeros(1)], flag()
    functional.widen_(out, [torch.full((1,), 60000.0, dtype=torch.float16)], found, flag(4.0))
    assert out[0].item() == 240000.0
    assert found.item() == 0


@pytest.mark.parametrize("found", [0.0, 1.0, math.nan])
def test_a_set_flag_keeps_the_parameters(capability: str, found: float) -> None:
    for dtype in HALVES:
        params = all_patterns(dtype).clone()
        functional.narrow_([params], [torch.ones(2**16)], flag(found))
        expected = all_patterns(dtype) if found else torch.ones(2**16, dtype=dtype)
        assert torch.equal(params.view(torch.int16), expected.view(torch.int16))


def test_a_flag_that_is_set_stays() -> None:
    found = flag(1.0)
    functional.widen_([torch.zeros(3)], [torch.ones(3, dtype=torch.bfloat16)], found, flag(1.0))
    assert found.item() == 1


@pytest.mark.parametrize("factor", [1.0, 0.5, 3.0, math.inf])
def test_torchs_own_ops_give_the_same(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    monkeypatch.setenv("AMPFAST_BACKEND", "aten")
    for dtype in HALVES:
        values = all_patterns(dtype)
        check_widen([values[values.isfinite()], values[:3]], factor)
        masters = special_floats()
        check_narrow([torch.zeros(masters.shape, dtype=dtype)], [masters])
    test_a_set_flag_keeps_the_parameters("", 1.0)
    test_a_set_flag_keeps_the_parameters("", 0.0)


def test_versions_are_bumped() -> None:
    out, param, found = torch.zeros(3), torch.zeros(3, dtype=torch.float16), flag()
    functional.widen_([out], [param], found, flag())
    functional.narrow_([param], [out])
    assert (out._version, param._version) == (1, 1)


def test_empty_lists() -> None:
    found = flag()
    functional.widen_([], [], found, flag())
    functional.narrow_([], [])
    functional.narrow_([], [], found)
    assert found.item() == 0


HALF, FLOAT = torch.zeros(3, dtype=torch.float16), torch.zeros(3)
ERRORS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "not_a_list": (lambda: functional.narrow_(HALF, [FLOAT]), TypeError, "params must be a list"),
    "no_tensor": (lambda: functional.narrow_([HALF], [1.0]), TypeError, r"masters\[0\] must be a"),
    "params_float32": (
        lambda: functional.narrow_([FLOAT], [FLOAT]),
        RuntimeError,
        r"params\[0\] must be torch.float16 or torch.bfloat16 on cpu, got torch.float32",
    ),
    "masters_half": (
        lambda: functional.narrow_([HALF], [HALF]),
        RuntimeError,
        r"masters\[0\] must be torch.float32 on cpu, got torch.float16",
    ),
    "lengths": (
        lambda: functional.widen_([], [HALF], flag(), flag()),
        RuntimeError,
        "grads has 1 tensors, and out has 0",
    ),
    "shapes": (
        lambda: functional.widen_([torch.zeros(4)], [HALF], flag(), flag()),
        RuntimeError,
        r"out\[0\] must have the shape of grads\[0\], \(3,\), got \(4,\)",
    ),
    "device": (
        lambda: functional.widen_([FLOAT], [HALF.to("meta")], flag(), flag()),
        RuntimeError,
        r"grads\[0\] must be .* on cpu, got torch.float16 on meta",
    ),
    "flag": (
        lambda: functional.narrow_([HALF], [FLOAT], torch.zeros(2)),
        RuntimeError,
        "found_inf must be a one-element",
    ),
    "factor": (
        lambda: functional.widen_([FLOAT], [HALF], flag(), torch.ones((), dtype=torch.float64)),
        RuntimeError,
        "inv_scale must be a one-element",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    call, kind, text = ERRORS[name]
    with pytest.raises(kind, match=text):
        call()
    assert not HALF.any() and not FLOAT.any()


def test_custom_ops() -> None:
    half = torch.randn(5).to(torch.float16)
    samples = {
        torch.ops.ampfast.widen_.default: ([torch.zeros(5)], [half], flag(), flag(0.5)),
        torch.ops.ampfast.narrow_.default: ([half.clone()], [torch.randn(5)], flag()),
    }
    for op, arguments in samples.items():
        torch.library.opcheck(op, arguments)
    with FakeTensorMode():
        torch.ops.ampfast.narrow_([torch.empty(2, dtype=torch.float16)], [torch.empty(2)], None)


def test_in_a_compiled_function() -> None:
    def cast(params: list[torch.Tensor], masters: list[torch.Tensor]) -> None:
        functional.narrow_(params, masters)

    params, masters = [torch.zeros(5, dtype=torch.bfloat16)], [torch.randn(5)]
    torch.compile(cast, backend="eager", fullgraph=True)(params, masters)
    assert_same(params, [masters[0].bfloat16()])


def test_freed_memory_is_refused() -> None:
    half = torch.zeros(5, dtype=torch.float16)
    half.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError):
        functional.widen_([torch.zeros(5)], [half], flag(), flag())


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
