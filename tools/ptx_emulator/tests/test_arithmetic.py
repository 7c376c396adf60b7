"""Arithmetic of instructions, against torch."""

from __future__ import annotations

import math

import pytest
import torch
from small_kernels import THREADS, kernel, numbers, tried


def calculated(body: str, values: torch.Tensor, result: torch.dtype) -> torch.Tensor:
    """One element per thread: from %rs1, %r2 or %rd4, by its size, into %rs2, %r3 or %rd5."""
    registers = {2: ("%rs1", "%rs2"), 4: ("%r2", "%r3"), 8: ("%rd4", "%rd5")}
    source, target = registers[values.itemsize][0], registers[result.itemsize][1]
    text = f"""
    mul.wide.u32 %rd6, %r1, {values.itemsize};
    add.s64 %rd6, %rd1, %rd6;
    ld.global.b{8 * values.itemsize} {source}, [%rd6];
    {body}
    mul.wide.u32 %rd6, %r1, {result.itemsize};
    add.s64 %rd6, %rd2, %rd6;
    st.global.b{8 * result.itemsize} [%rd6], {target};
    """
    program = kernel(text)
    found = []
    for part in values.split(THREADS):
        given = torch.zeros(THREADS, dtype=values.dtype)
        given[: part.numel()] = part
        into = torch.zeros(THREADS, dtype=result)
        tried(program, given, into)
        found.append(into[: part.numel()])
    return torch.cat(found)


def bits_of_floats(seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**31), 2**31, (1024,), generator=generator, dtype=torch.int64)
    if dtype is torch.float64:
        more = torch.randint(-(2**31), 2**31, (1024,), generator=generator, dtype=torch.int64)
        return (words << 32 | more & 0xFFFFFFFF).view(torch.float64)
    return words.to(torch.int32).view(torch.float32)


def assert_equal(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "dtype"), [("f16", torch.float16), ("bf16", torch.bfloat16)], ids=["f16", "bf16"]
)
def test_conversions_of_16_bits(name: str, dtype: torch.dtype) -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    wide = calculated(f"cvt.f32.{name} %r3, %rs1;", every, torch.float32)
    assert_equal(wide, every.float())
    values = torch.cat([bits_of_floats(1, torch.float32), wide * 1.0003, wide * 0.9997])
    assert_equal(calculated(f"cvt.rn.{name}.f32 %rs2, %r2;", values, dtype), values.to(dtype))
    pairs = calculated(f"cvt.rn.{name}x2.f32 %r3, %r2, %r2;", values[:2048], torch.int32)
    halves = pairs.view(dtype)
    assert_equal(halves[::2], values[:2048].to(dtype))
    assert_equal(halves[1::2], values[:2048].to(dtype))


def test_arithmetic_of_floats() -> None:
    small, large = bits_of_floats(2, torch.float32), bits_of_floats(3, torch.float64)
    third = "mov.b32 %r4, 0f3EAAAAAB;"
    for op, theirs in (
        ("mul.rn", small * torch.tensor(1 / 3)),
        ("add.rn", small + torch.tensor(1 / 3)),
        ("div.rn", small / torch.tensor(1 / 3)),
    ):
        ours = calculated(f"{third} {op}.f32 %r3, %r2, %r4;", small, torch.float32)
        assert_equal(ours, theirs)
    twice = "mov.b64 %rd4, {%r2, %r2}; mul.rn.f32x2 %rd5, %rd4, %rd4; mov.b64 {_, %r3}, %rd5;"
    assert_equal(calculated(twice, small, torch.float32), small * small)
    assert_equal(calculated("rcp.rn.f32 %r3, %r2;", small, torch.float32), 1 / small)
    assert_equal(calculated("rcp.rn.f64 %rd5, %rd4;", large, torch.float64), 1 / large)
    roots = [math.sqrt(x) if x >= 0 else math.nan for x in large.tolist()]
    assert_equal(
        calculated("sqrt.rn.f64 %rd5, %rd4;", large, torch.float64),
        torch.tensor(roots, dtype=large.dtype),
    )
    assert_equal(calculated("cvt.rn.f32.f64 %r3, %rd4;", large, torch.float32), large.float())
    assert_equal(calculated("cvt.f64.f32 %rd5, %r2;", small, torch.float64), small.double())
    assert_equal(calculated("abs.f32 %r3, %r2;", small, torch.float32), small.abs())
    assert_equal(calculated("neg.f64 %rd5, %rd4;", large, torch.float64), -large)


def test_a_fused_product_is_rounded_once() -> None:
    values = bits_of_floats(4, torch.float32)
    third = "mov.b32 %r4, 0f3EAAAAAB;"
    fused = calculated(f"{third} fma.rn.f32 %r3, %r2, %r4, %r4;", values, torch.float32)
    once = (values.double() * torch.tensor(1 / 3).double() + torch.tensor(1 / 3).double()).float()
    exact = values.abs() > 2**-20  # where float64 holds the sum before the rounding
    assert_equal(fused[exact], once[exact])
    twice = values * torch.tensor(1 / 3) + torch.tensor(1 / 3)
    assert not torch.equal(fused[exact], twice[exact])


def test_minimum_and_maximum_of_floats_prefer_numbers_and_order_zeros() -> None:
    values = torch.tensor([-0.0, 0.0, 1.0, -1.0, torch.nan, torch.inf])
    zero = "mov.b32 %r4, 0f00000000;"
    most = calculated(f"{zero} max.f32 %r3, %r2, %r4;", values, torch.float32)
    assert_equal(most, torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, torch.inf]))
    least = calculated(f"{zero} min.f32 %r3, %r4, %r2;", values, torch.float32)
    assert_equal(least, torch.tensor([-0.0, 0.0, 0.0, -1.0, 0.0, 0.0]))
    assert least.signbit().tolist() == [True, False, False, True, False, False]
    assert most.signbit().tolist() == [False] * 6


def test_conversions_to_integers_saturate() -> None:
    values = torch.tensor([1.9, -1.9, 3e9, -3e9, 5e9, torch.nan, torch.inf, -torch.inf])
    top, bottom = 2**31 - 1, -(2**31)
    signed = calculated("cvt.rzi.s32.f32 %r3, %r2;", values, torch.int32)
    assert signed.tolist() == [1, -1, top, bottom, top, 0, top, bottom]
    unsigned = calculated("cvt.rzi.u32.f32 %r3, %r2;", values, torch.int32).view(torch.uint32)
    assert unsigned.tolist() == [1, 0, 3_000_000_000, 0, 2**32 - 1, 0, 2**32 - 1, 0]
    wide = calculated("cvt.rzi.s64.f32 %rd5, %r2;", values, torch.int64)
    assert wide.tolist() == [
        *(1, -1, 3_000_000_000, -3_000_000_000, 5_000_000_000),
        *(-(2**63), 2**63 - 1, -(2**63)),
    ]
    floats = calculated("cvt.rn.f32.s32 %r3, %r2;", INTEGERS, torch.float32)
    assert_equal(floats, INTEGERS.float())
    floats = calculated("cvt.rn.f32.u32 %r3, %r2;", INTEGERS, torch.float32)
    assert_equal(floats, INTEGERS.view(torch.uint32).float())


INTEGERS = torch.tensor([0, 1, -1, 5, -7, 2**31 - 1, -(2**31), 1234567], dtype=torch.int32)


@pytest.mark.parametrize(
    ("body", "theirs"),
    [
        ("max.s32 %r3, %r2, -3;", INTEGERS.clamp(min=-3)),
        ("min.u32 %r3, %r2, 9;", torch.tensor([0, 1, 9, 5, 9, 9, 9, 9])),
        ("shr.s32 %r3, %r2, 40;", torch.where(INTEGERS < 0, -1, 0)),
        ("shr.u32 %r3, %r2, 31;", torch.where(INTEGERS < 0, 1, 0)),
        ("shl.b32 %r3, %r2, 32;", torch.zeros(8)),
        ("bfe.u32 %r3, %r2, 4, 8;", INTEGERS >> 4 & 0xFF),
        ("bfe.u32 %r3, %r2, 64, 8;", torch.zeros(8)),
        ("bfe.u32 %r3, %r2, 0, 255;", INTEGERS),
        ("prmt.b32 %r3, %r2, %r2, 0x0123;", INTEGERS.view(torch.uint8).reshape(8, 4).flip(1)),
        ("mul.hi.s32 %r3, %r2, 1000000;", (INTEGERS.long() * 1_000_000) >> 32),
        ("mul.hi.u32 %r3, %r2, 16;", INTEGERS >> 28 & 15),
        ("mad.lo.s32 %r3, %r2, 3, 4;", INTEGERS * 3 + 4),
        ("div.s32 %r3, %r2, -1;", -INTEGERS),
        ("div.s32 %r3, %r2, 4;", INTEGERS.div(4, rounding_mode="trunc")),
        ("rem.s32 %r3, %r2, 4;", INTEGERS.fmod(4)),
        ("rem.s32 %r3, %r2, -1;", torch.zeros(8)),
        ("popc.b32 %r3, %r2;", torch.tensor([0, 1, 32, 2, 30, 31, 1, 11])),
        ("not.b32 %r3, %r2;", ~INTEGERS),
        ("cvt.s64.s32 %rd5, %r2; shr.u64 %rd5, %rd5, 32; cvt.u32.u64 %r3, %rd5;", INTEGERS >> 31),
        ("mul.wide.s32 %rd5, %r2, 3; cvt.u32.u64 %r3, %rd5;", INTEGERS * 3),
        ("max.u16x2 %r3, %r2, 65537;", None),
        ("setp.gt.s32 %p1, %r2, 0; selp.b32 %r3, 7, 8, %p1;", torch.where(INTEGERS > 0, 7, 8)),
        ("mov.b32 {%rs1, %rs2}, %r2; mov.b32 %r3, {%rs2, %rs1};", None),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else "",
)
def test_arithmetic_of_integers(body: str, theirs: torch.Tensor | None) -> None:
    ours = calculated(body, INTEGERS, torch.int32)
    if theirs is None:
        halves = INTEGERS.view(torch.uint16).reshape(8, 2).int()
        halves = halves.clamp(min=1) if "max" in body else halves.flip(1)
        theirs = halves.to(torch.uint16).view(torch.int32)
    elif theirs.dtype is torch.uint8:
        theirs = theirs.contiguous().view(torch.int32)
    assert ours.flatten().tolist() == theirs.flatten().tolist()


@pytest.mark.parametrize("how", ["eq", "ne", "lt", "le", "gt", "ge"])
@pytest.mark.parametrize("unordered", ["", "u"])
def test_comparisons_with_nan(how: str, unordered: str) -> None:
    values = torch.tensor([-1.0, 0.5, 2.0, torch.inf, torch.nan])
    body = f"setp.{how}{unordered}.f32 %p1, %r2, 0f3F000000; selp.b32 %r3, 1, 0, %p1;"
    expected = getattr(torch, how)(values, 0.5) & ~values.isnan()
    expected |= values.isnan() & bool(unordered)
    assert calculated(body, values, torch.int32).tolist() == expected.int().tolist()


def test_reductions_over_a_warp() -> None:
    target = torch.zeros(THREADS, dtype=torch.int32)
    for body, expected in (
        ("redux.sync.add.s32 %r2, %r1, 0xffffffff;", [496] * 32 + [1520] * 32),
        ("redux.sync.max.u32 %r2, %r1, 0xffffffff;", [31] * 32 + [63] * 32),
        ("shfl.sync.idx.b32 %r2, %r1, 3, 31, -1;", [3] * 32 + [35] * 32),
        ("shfl.sync.bfly.b32 %r2|%p1, %r1, 1, 31, -1;", (numbers() ^ 1).tolist()),
    ):
        text = kernel(f"{body} add.s64 %rd5, %rd2, %rd3; st.global.b32 [%rd5], %r2;")
        tried(text, numbers(), target)
        assert target.tolist() == expected, body
