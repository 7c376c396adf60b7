"""Code of every variant of the Triton kernels, inspected without a GPU."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
from support.comparison import FLOATS
from support.registers_table import DOCUMENTED, cells, registers_table
from variants import (
    CUDA,
    HIP,
    IS_OLDEST,
    Variant,
    compiled,
    compiled_clip,
    compiled_narrow,
    compiled_update,
    everywhere,
    kernels,
    modes,
    usage,
    variants,
)

from ampfast.backends.core import Factor

IS_DOCUMENTED = triton.__version__.startswith("3.9.")
# Registers per thread left by eight programs of 128 threads on a multiprocessor.
REGISTERS = 64
SIXTEEN_BIT = (torch.float16, torch.bfloat16)

VECTOR_LOAD = r"ld\.global(?:\.\w+)*\.(?:v4\.[bf]32|v2\.[bf]64)\b"
VECTOR_STORE = r"st\.global(?:\.\w+)*\.(?:v4\.[bf]32|v2\.[bf]64)\b"
FINISHED = r"\batom\.global\.gpu\.acq_rel\.add\.u64\b"

# `make test` compiles each mode once.
ONCE = [pytest.param("sm_90", v) for dtype in FLOATS for v in modes(dtype)]
MORE = [
    *(("sm_90", v) for dtype in FLOATS for v in variants(dtype) if v not in modes(dtype)),
    *((t, v) for t in CUDA if t != "sm_90" for dtype in FLOATS for v in everywhere(dtype)),
]
CASES = [*ONCE, *(pytest.param(*case, marks=pytest.mark.sweep) for case in MORE)]
HIP_CASES = [(t, v) for t in HIP for dtype in FLOATS for v in everywhere(dtype)]

cuda_cases = pytest.mark.parametrize(("target", "variant"), CASES, ids=str)


def hip_cases(test: Any) -> Any:
    return pytest.mark.sweep(
        pytest.mark.parametrize(("target", "variant"), HIP_CASES, ids=str)(test)
    )


def most_registers(variant: Variant) -> int:
    """Registers for eight programs, or for the four to six of other variants."""
    if variant.write and variant.norm:
        return 128
    needs_more = variant.paired or (variant.norm and variant.dtype == torch.float64)
    return 80 if needs_more else REGISTERS


def ptx(target: str, variant: Variant) -> str:
    return compiled(variant, target).asm["ptx"]


@cuda_cases
def test_code(target: str, variant: Variant) -> None:
    """All of one variant in one test, so that it is compiled once."""
    check_resources(target, variant)
    check_vectors(target, variant)
    check_arithmetic(target, variant)
    check_last_program(target, variant)


def check_resources(target: str, variant: Variant) -> None:
    used = usage(compiled(variant, target))
    assert (used.stack, used.local) == (0, 0)
    assert used.registers <= most_registers(variant)


def check_vectors(target: str, variant: Variant) -> None:
    code = ptx(target, variant)
    loads = 4
    loaded = [m.start() for m in re.finditer(VECTOR_LOAD, code)]
    stored = [m.start() for m in re.finditer(VECTOR_STORE, code)]
    # The same for whole windows and others; edges alone are loaded one by one, once a chunk.
    assert len(loaded) == loads
    assert len(stored) == (loads if variant.write else 0)
    assert not stored or max(loaded) < min(stored), "a load waits for a store"
    size = {8: "64", 4: "32", 2: "16"}[variant.dtype.itemsize]
    assert re.search(rf"@%p\d+ ld\.global\.b{size}\b", code[: min(loaded)]), "edges load late"


def check_arithmetic(target: str, variant: Variant) -> None:
    code = ptx(target, variant)
    for refused in (r"\.ftz\b", r"\.approx\b", r"\bdiv\.full\b", r"\bfma\b", r"\bmad\.\w+\.f\d\d"):
        assert not re.search(refused, code), refused
    wide = "f64" if variant.dtype == torch.float64 else "f32"
    if variant.how is Factor.DIVIDE:
        assert f"div.rn.{wide}" in code
    if variant.how is Factor.TIMES_RECIPROCAL:
        assert re.search(r"(div|rcp)\.rn\.f64", code)
        assert "cvt.rn.f32.f64" in code
    if variant.dtype == torch.float16 and variant.how in (Factor.TIMES, Factor.TIMES_RECIPROCAL):
        assert re.search(r"\bcvt\.rn\.f16(x2)?\.f32\b", code)
    if variant.dtype == torch.bfloat16 and variant.how in (Factor.TIMES, Factor.TIMES_RECIPROCAL):
        assert re.search(r"\bcvt\.rn\.bf16(x2)?\.f32\b", code)


def check_last_program(target: str, variant: Variant) -> None:
    code = ptx(target, variant)
    if not variant.is_last:
        assert not re.search(FINISHED, code)
        return
    [finished] = re.finditer(FINISHED, code)
    before, behind = code[: finished.start()], code[finished.end() :]
    stores = [m.start() for m in re.finditer(r"\bst\.global\b|\b(?:atom|red)\S*\.max\b", before)]
    # A check of one launch stores nothing before.
    assert before.rfind("bar.sync") > max(stores, default=0), "no barrier before the count"
    # Ours, whatever barriers Triton adds.
    counted = [
        line
        for line in compiled(variant, target).asm["ttir"].splitlines()
        if re.search(r"barrier|tt\.store|tt\.atomic_rmw", line)
    ]
    [place] = [i for i, line in enumerate(counted) if "acq_rel" in line]
    assert "barrier" in counted[place - 1] and "barrier" in counted[place + 1]
    first_access = re.search(r"\b(ld|st|atom)\.global\b", behind)
    assert first_access is not None
    assert "bar.sync" in behind[: first_access.start()], "no barrier behind the count"
    # Bypasses the first-level cache.
    assert ("ld.global.cg.b64" in behind) == variant.norm
    # All reads precede the stores of the flag, the reset of the scratch and the new scale.
    stores = 3 if variant.norm else 2  # the peak's reset is the norm's
    assert "barrier" in counted[-1 - stores]
    assert not variant.updates or "barrier" in counted[-4 - stores]


@pytest.mark.parametrize("how", [Factor.NONE, Factor.DIVIDE, Factor.TIMES_RECIPROCAL])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_marks_make_nobody_wait(dtype: torch.dtype, how: Factor) -> None:
    plain = Variant(dtype, how is Factor.TIMES_RECIPROCAL, how)
    marked = replace(plain, marks=True)
    barriers = [ptx("sm_90", v).count("bar.sync") for v in (plain, marked)]
    # The oldest Triton moves what is marked from one layout to another, once a chunk.
    assert IS_OLDEST or barriers[0] == barriers[1]
    # Only for a bad value.
    added = re.findall(r"^.*\b(?:atom|red)\.\S*relaxed.*$", ptx("sm_90", marked), re.MULTILINE)
    assert added
    assert all(line.lstrip().startswith("@") for line in added)


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_pairs(target: str, dtype: torch.dtype) -> None:
    """Float32 values are accessed 16 bytes at a time, and threads exchange nothing for it."""
    plain = Variant(dtype, True, Factor.TIMES_RECIPROCAL, paired=True)
    for variant in (plain, replace(plain, coefficient=True), replace(plain, norm=True)):
        kernel = compiled(variant, target)
        check_resources(target, variant)
        code = kernel.asm["ptx"]
        # Twice as many, of eight bytes each.
        assert len(re.findall(r"ld\.global(?:\.\w+)*\.v2\.b32", code)) == 8
        assert len(re.findall(VECTOR_STORE, code)) == 8
        assert "ldmatrix" not in code
    kernel = compiled_narrow(target, dtype)
    used = usage(kernel)
    assert (used.stack, used.local) == (0, 0)
    assert used.registers <= (96 if IS_OLDEST else REGISTERS)
    code = kernel.asm["ptx"]
    assert len(re.findall(VECTOR_LOAD, code)) == 8
    assert len(re.findall(r"st\.global(?:\.\w+)*\.v2\.b32", code)) == 8
    assert "ldmatrix" not in code and "bar.sync" not in code


KINDS = {
    "check": Variant(torch.float32, False, Factor.DIVIDE),
    "check and norm": Variant(torch.float32, False, Factor.TIMES_RECIPROCAL, norm=True),
    "unscale": Variant(torch.float32, True, Factor.TIMES_RECIPROCAL),
    "unscale and clip": Variant(torch.float32, True, Factor.TIMES_RECIPROCAL, coefficient=True),
}


@pytest.mark.sweep
@pytest.mark.skipif(not IS_DOCUMENTED, reason="the table of the docs is of Triton 3.9")
def test_registers_in_the_docs() -> None:
    for kind, variant in KINDS.items():
        used = [usage(compiled(replace(variant, dtype=d), "sm_90")).registers for d in DOCUMENTED]
        assert registers_table()["Triton", kind] == cells(used), kind


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_factors_are_float64(dtype: torch.dtype) -> None:
    update = Variant(dtype, True, Factor.TIMES_RECIPROCAL, updates=True)
    # Two of the update, one of a clipping.
    assert len(re.findall(r"\.param \.f64", ptx("sm_90", update))) == 3
    assert ".param .f32" not in ptx("sm_90", update)
    assert re.search(r"\bmul\.(rn\.)?f64\b", ptx("sm_90", update))


@pytest.mark.parametrize(
    ("name", "wide", "count"),
    [
        ("multi_tensor", ("growth_factor", "backoff_factor"), "growth_interval"),
        ("narrow", (), "word"),
        ("update_scale", ("growth_factor", "backoff_factor"), "growth_interval"),
        ("clip_coefficient", ("max_norm",), "rows"),
    ],
)
def test_arguments_are_not_specialized(name: str, wide: tuple[str, ...], count: str) -> None:
    parameters = {p.name: p for p in getattr(kernels, name).params}
    assert all(parameters[factor].annotation_type == "fp64" for factor in wide)
    assert parameters[count].annotation_type == "i64"
    # Else a count of 1, or an unaligned address, would compile in mid-training.
    specialized = {p.name for p in parameters.values() if not p.is_constexpr}
    specialized -= {p.name for p in parameters.values() if p.do_not_specialize}
    assert specialized == ({"table_ptr"} if name in ("multi_tensor", "narrow") else set())


@pytest.mark.parametrize("target", CUDA)
def test_update_alone(target: str) -> None:
    kernel = compiled_update(target)
    used = usage(kernel)
    assert (used.stack, used.local) == (0, 0)
    code = kernel.asm["ptx"]
    last_load = max(m.start() for m in re.finditer(r"\bld\.global\b", code))
    first_store = code.index("st.global")
    assert "bar." in code[last_load:first_store], "stores before all threads have read"
    for refused in (".ftz", ".approx", "div.full", "fma.", "sqrt.", "div."):
        assert refused not in code


@pytest.mark.parametrize(("divisor", "sigmas"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("norm", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("target", CUDA)
def test_clip_coefficient(
    target: str, norm: torch.dtype, largest: bool, divisor: bool, sigmas: bool
) -> None:
    kernel = compiled_clip(target, norm, largest, divisor, sigmas)
    used = usage(kernel)
    assert (used.stack, used.local) == (0, 0)
    code = kernel.asm["ptx"]
    assert "div.rn.f64" in code
    assert ("sqrt.rn.f64" in code) == (sigmas or not largest)
    assert ("cvt.rn.f32.f64" in code) == (divisor or norm == torch.float32)
    for refused in (".ftz", ".approx", "div.full", "fma."):
        assert refused not in code


@pytest.mark.parametrize("target", HIP)
def test_clip_coefficient_on_amd(target: str) -> None:
    for largest in (False, True):
        code = compiled_clip(target, torch.float32, largest, True, True).asm["amdgcn"]
        assert re.findall(r"\.amdhsa_private_segment_fixed_size (\d+)", code) == ["0"]
        assert re.search(r"\bv_div_fixup_f64\b", code)
        assert re.search(r"\bv_(rsq|sqrt)_f64", code)


@hip_cases
def test_amd(target: str, variant: Variant) -> None:
    code = compiled(variant, target).asm["amdgcn"]
    wide = r"(dwordx4|b128)\b"
    loads = 4 if target == "gfx1100" else 2
    assert len(re.findall(rf"\b(global|buffer)_load_{wide}", code)) >= loads
    stores = len(re.findall(rf"\b(global|buffer)_store_{wide}", code))
    assert not variant.write or stores >= loads
    assert re.findall(r"\.amdhsa_private_segment_fixed_size (\d+)", code) == ["0"]
    assert not re.search(r"\bscratch_(load|store)", code)
    *_, finished = re.finditer(r"\bglobal_atomic_add_(x2|u64)\b", code)
    assert "s_barrier" in code[: finished.start()]
    if variant.how is Factor.DIVIDE:
        assert re.search(r"\bv_div_fixup_f(32|64)\b", code)


@pytest.mark.parametrize("target", HIP)
def test_update_alone_on_amd(target: str) -> None:
    code = compiled_update(target).asm["amdgcn"]
    assert re.findall(r"\.amdhsa_private_segment_fixed_size (\d+)", code) == ["0"]
