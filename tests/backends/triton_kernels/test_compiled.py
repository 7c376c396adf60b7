"""Code of every variant of the Triton kernels, inspected without a GPU."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from support.comparison import FLOATS
from variants import (
    CUDA,
    HIP,
    Variant,
    compiled,
    compiled_clip,
    compiled_update,
    everywhere,
    kernels,
    modes,
    usage,
    variants,
)

from ampfast.backends.core import Factor

# Registers per thread left by eight programs of 128 threads on a multiprocessor.
REGISTERS = 64

VECTOR_LOAD = r"ld\.global(?:\.\w+)*\.(?:v4\.[bf]32|v2\.[bf]64)\b"
VECTOR_STORE = r"st\.global(?:\.\w+)*\.(?:v4\.[bf]32|v2\.[bf]64)\b"

# `make test` compiles each mode once.
CASES = [
    *(pytest.param("sm_90", v) for dtype in FLOATS for v in modes(dtype)),
    *(
        pytest.param(target, v, marks=pytest.mark.sweep)
        for target in CUDA
        for dtype in FLOATS
        for v in (variants(dtype) if target == "sm_90" else everywhere(dtype))
        if target != "sm_90" or v not in modes(dtype)
    ),
]


def most_registers(variant: Variant) -> int:
    """Registers for eight programs, or for the four to six of other variants."""
    if variant.write and variant.norm:
        return 128
    needs_more = variant.norm and variant.dtype == torch.float64
    return 80 if needs_more else REGISTERS


def code_of(kernel: Any, registers: int = 255) -> str:
    """Text of a kernel that keeps nothing in local memory and computes as it is written."""
    if "amdgcn" in kernel.asm:
        code = kernel.asm["amdgcn"]
        assert re.findall(r"\.amdhsa_private_segment_fixed_size (\d+)", code) == ["0"]
        assert not re.search(r"\bscratch_(load|store)", code)
        return code
    used, code = usage(kernel), kernel.asm["ptx"]
    assert (used["STACK"], used["LOCAL"]) == (0, 0)
    assert used["REG"] <= registers
    for refused in (r"\.ftz\b", r"\.approx\b", r"\bdiv\.full\b", r"\bfma\b", r"\bmad\.\w+\.f\d\d"):
        assert not re.search(refused, code), refused
    return code


@pytest.mark.parametrize(("target", "variant"), CASES, ids=str)
def test_code(target: str, variant: Variant) -> None:
    """All of one variant in one test, so that it is compiled once."""
    code = code_of(compiled(variant, target), most_registers(variant))
    check_vectors(code, variant)
    check_arithmetic(code, variant)


def check_vectors(code: str, variant: Variant) -> None:
    loads = 4
    loaded = [m.start() for m in re.finditer(VECTOR_LOAD, code)]
    stored = [m.start() for m in re.finditer(VECTOR_STORE, code)]
    # The same for whole windows and others; edges alone are loaded one by one, once a chunk.
    assert len(loaded) == loads
    assert len(stored) == (loads if variant.write else 0)
    assert not stored or max(loaded) < min(stored), "a load waits for a store"
    size = {8: "64", 4: "32", 2: "16"}[variant.dtype.itemsize]
    assert re.search(rf"@%p\d+ ld\.global\.b{size}\b", code[: min(loaded)]), "edges load late"


def check_arithmetic(code: str, variant: Variant) -> None:
    wide = "f64" if variant.dtype == torch.float64 else "f32"
    if variant.how == Factor.DIVIDE:
        assert f"div.rn.{wide}" in code
    if variant.how == Factor.TIMES_RECIPROCAL:
        assert re.search(r"(div|rcp)\.rn\.f64", code)
        assert "cvt.rn.f32.f64" in code
    narrow = {torch.float16: "f16", torch.bfloat16: "bf16"}.get(variant.dtype)
    if narrow and variant.how in (Factor.TIMES, Factor.TIMES_RECIPROCAL):
        assert re.search(rf"\bcvt\.rn\.{narrow}(x2)?\.f32\b", code)


@pytest.mark.parametrize("name", ["multi_tensor", "update_scale", "clip_coefficient"])
def test_arguments_are_not_specialized(name: str) -> None:
    """Else a count of 1, or an unaligned address, would compile in mid-training."""
    parameters = [p for p in getattr(kernels, name).params if not p.is_constexpr]
    specialized = {p.name for p in parameters if not p.do_not_specialize}
    assert specialized == ({"table_ptr"} if name == "multi_tensor" else set())
    # A number from Python would be 32 bits wide.
    wide = [p.annotation_type for p in parameters if p.annotation_type]
    assert wide and all(each in ("fp64", "i64", "i32") for each in wide)


@pytest.mark.parametrize("target", [*CUDA, *HIP])
def test_update_alone(target: str) -> None:
    code = code_of(compiled_update(target))
    if target in CUDA:
        last_load = max(m.start() for m in re.finditer(r"\bld\.global\b", code))
        first_store = code.index("st.global")
        assert "bar." in code[last_load:first_store], "stores before all threads have read"


@pytest.mark.parametrize(("divisor", "sigmas"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("target", [*CUDA, *HIP])
def test_clip_coefficient(target: str, largest: bool, divisor: bool, sigmas: bool) -> None:
    for norm in (torch.float32, torch.float64):
        code = code_of(compiled_clip(target, norm, largest, divisor, sigmas))
        if target in HIP:
            assert re.search(r"\bv_div_fixup_f64\b", code)
            assert largest or re.search(r"\bv_(rsq|sqrt)_f64", code)
            continue
        assert "div.rn.f64" in code
        assert ("sqrt.rn.f64" in code) == (sigmas or not largest)
        assert ("cvt.rn.f32.f64" in code) == (divisor or norm == torch.float32)


@pytest.mark.sweep
@pytest.mark.parametrize("variant", [v for d in FLOATS for v in everywhere(d)], ids=str)
@pytest.mark.parametrize("target", HIP)
def test_amd(target: str, variant: Variant) -> None:
    code = code_of(compiled(variant, target))
    wide = r"(dwordx4|b128)\b"
    loads = 4 if target == "gfx1100" else 2
    assert len(re.findall(rf"\b(global|buffer)_load_{wide}", code)) >= loads
    stores = len(re.findall(rf"\b(global|buffer)_store_{wide}", code))
    assert not variant.write or stores >= loads
    *_, finished = re.finditer(r"\bglobal_atomic_add_(x2|u64)\b", code)
    assert "s_barrier" in code[: finished.start()]
    if variant.how == Factor.DIVIDE:
        assert re.search(r"\bv_div_fixup_f(32|64)\b", code)
