"""Launches, and illegal operations that they must detect."""

from __future__ import annotations

import struct
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from ptx_emulator import (
    RACE_CHECK_LIMIT,
    PtxError,
    Range,
    UnsupportedPtxError,
    emulation,
    launch,
    load,
)
from small_kernels import THREADS, assembled, kernel, numbers, tried

COPY = """
    add.s64 %rd4, %rd1, %rd3;
    ld.global.b32 %r2, [%rd4];
    add.s64 %rd5, %rd2, %rd3;
    st.global.b32 [%rd5], %r2;
"""


def test_a_copy_and_its_bytes() -> None:
    target = torch.zeros(THREADS, dtype=torch.int32)
    watched = tried(kernel(COPY), numbers(), target, writes=(False, True))
    assert torch.equal(target, numbers())
    assert (watched.launches, watched.read, watched.written) == (["tried"], 256, 256)


def test_buffers_among_the_arguments_are_the_memory_by_default() -> None:
    source, target = numbers(), torch.zeros(THREADS, dtype=torch.int32)
    launch(assembled(kernel(COPY)), 1, THREADS, source, target)
    assert torch.equal(target, source)
    address = target.data_ptr()
    with pytest.raises(PtxError, match="writes memory that the launch was not given"):
        launch(assembled(kernel(COPY)), 1, THREADS, source, address)
    with emulation(memory=[Range.of(source, may_write=False), Range.of(target)]):
        launch(assembled(kernel(COPY)), 1, THREADS, source, address)


def test_memory_of_any_buffer() -> None:
    strided = torch.zeros(3, 4)[:, :2]
    assert Range.of(strided).bytes == 4 * (2 * 4 + 2)
    assert Range.of(torch.zeros(0)).bytes == 0
    array = np.arange(THREADS, dtype=np.int32)
    target = bytearray(4 * THREADS)
    launch(assembled(kernel(COPY)), 1, THREADS, array, target)
    assert bytes(target) == array.tobytes()
    for nothing in (np.zeros((4, 4))[:, :2], None, "text"):
        with pytest.raises(TypeError, match="no memory to give to a kernel"):
            Range.of(nothing)
    with pytest.raises(TypeError, match="CPU tensors, got one on meta"):
        Range.of(torch.zeros(1, device="meta"))


def test_memory_that_overlaps_is_one() -> None:
    words = numbers(2 * THREADS)
    with emulation(memory=[Range.of(words, may_write=False), Range.of(words[4:8])]) as record:
        launch(assembled(kernel(COPY)), 1, THREADS, words, words[THREADS:])
    assert record.written == 4 * THREADS


def test_sizes_along_three_axes() -> None:
    axes = [f"mov.u32 %r2, %{name}.{axis};" for name in ("tid", "ctaid") for axis in "xyz"]
    sizes = [f"mov.u32 %r2, %{name}.{axis};" for name in ("ntid", "nctaid") for axis in "xyz"]
    # Each digit has a base of 8: ctaid.z, ctaid.y, ctaid.x, tid.z, tid.y, tid.x.
    digits = "".join(f"{a} mad.lo.u32 %r4, %r4, 8, %r2;" for a in reversed(axes))
    more = "".join(f"{a} mad.lo.u32 %r5, %r5, 8, %r2;" for a in reversed(sizes))
    body = f"""
    mov.u32 %r4, 0; mov.u32 %r5, 0; {digits} {more}
    mul.wide.u32 %rd4, %r4, 4; add.s64 %rd5, %rd1, %rd4; st.global.b32 [%rd5], %r5;
    """
    grid, block = (1, 2, 3), (4, 3, 2)
    seen = torch.zeros(8**6, dtype=torch.int32)
    launch(assembled(kernel(body)), grid, block, seen, seen)
    expected = torch.zeros(8, 8, 8, 8, 8, 8, dtype=torch.int32)
    expected[:3, :2, :1, :2, :3, :4] = int("321234", 8)
    assert torch.equal(seen, expected.flatten())


def test_races_in_large_grids_are_not_checked_but_listed() -> None:
    one = assembled(kernel("st.global.b32 [%rd2], %r1;"))
    with emulation(races=True) as record:
        launch(one, RACE_CHECK_LIMIT + 1, THREADS, numbers(), numbers())
        assert record.unchecked == ["tried"]
        with pytest.raises(PtxError, match="races with a write"):
            launch(one, RACE_CHECK_LIMIT, THREADS, numbers(), numbers())
    assert (record.launches, record.unchecked) == (["tried", "tried"], ["tried"])


# Errors before a kernel starts


@pytest.mark.parametrize(
    ("grid", "block", "shared", "why"),
    [
        (0, 1, 0, "grid must be one to three positive sizes, got 0"),
        (1, (1, 1, 1, 1), 0, "block must be one to three positive sizes"),
        (1, (64, 32), 0, "at most 1024 threads per program, got 2048"),
        (1, 1, -1, "shared_bytes must not be negative, got -1"),
    ],
)
def test_impossible_sizes(grid: int, block: int, shared: int, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        launch(assembled(kernel("")), grid, block, numbers(), numbers(), shared_bytes=shared)


TYPED = """
.entry typed(.param .u32 a, .param .f32 b, .param .u8 c, .param .align 8 .b8 d[16], .param .f64 e)
{ ret; }
"""


def test_arguments_are_packed_by_type() -> None:
    typed = load(TYPED)["typed"]
    structure = bytes(range(16))
    packed = typed.pack([-2, 0.5, True, structure, 0.25])
    assert packed == struct.pack("<ifB7x16sd", -2, 0.5, 1, structure, 0.25)
    launch(typed, 1, 1, 2**32 - 1, 1, False, structure, 1)


@pytest.mark.parametrize(
    ("place", "argument", "why"),
    [
        (0, 0.5, r"argument 0 of typed \(.u32\): takes an int, a buffer or bytes, got a float"),
        (0, 2**32, r"argument 0 of typed \(.u32\): int too big"),
        (1, 1e39, r"argument 1 of typed \(.f32\): float too large"),
        (3, b"short", r"argument 3 of typed \(.b8\): takes 16 bytes, got 5"),
        (4, None, r"argument 4 of typed \(.f64\): no memory"),
    ],
)
def test_an_argument_that_does_not_fit(place: int, argument: object, why: str) -> None:
    arguments = [1, 1.0, 1, bytes(16), 1.0]
    arguments[place] = argument
    with emulation() as record, pytest.raises(TypeError, match=why):
        launch(load(TYPED)["typed"], 1, 1, *arguments)
    assert record.launches == []
    with pytest.raises(TypeError, match="typed has 5 parameters, got 2 arguments"):
        launch(load(TYPED)["typed"], 1, 1, 1, 2)


def test_an_unknown_setting() -> None:
    with pytest.raises(TypeError, match="no setting 'race': there are memory, races, seed"):
        emulation(race=True).__enter__()


def test_a_text_without_kernels() -> None:
    with pytest.raises(UnsupportedPtxError, match="no kernel"):
        load("not PTX")
    with pytest.raises(UnsupportedPtxError, match="without a closing brace"):
        load(".entry tried() { ret;")


# Errors that end a kernel


def test_memory_that_was_not_given() -> None:
    longer = numbers(THREADS + 1)
    with pytest.raises(PtxError, match=r"`ld.global.b32.*reads memory that the launch"):
        tried(kernel(COPY), longer[:-2], longer.clone())
    with pytest.raises(PtxError, match=r"`st.global.b32.*writes memory that the launch"):
        tried(kernel(COPY), longer, torch.zeros(THREADS + 1, dtype=torch.int32)[:-2])
    with pytest.raises(PtxError, match="writes memory that the launch was not given"):
        tried(kernel(COPY), longer, longer.clone(), writes=(False, False))


def test_another_thread_is_watched_apart() -> None:
    other = emulation(memory=())
    with ThreadPoolExecutor(1) as elsewhere, emulation() as mine:
        others = elsewhere.submit(other.__enter__).result()
        tried(kernel(COPY), numbers(), numbers())
        elsewhere.submit(other.__exit__, None, None, None).result()
    assert (mine.launches, others.launches) == (["tried"], [])


def test_an_address_that_is_not_aligned() -> None:
    halves = torch.zeros(2 * THREADS + 2, dtype=torch.int16)[1:]
    with pytest.raises(PtxError, match="misaligned"):
        tried(kernel(COPY), numbers(), halves)


def test_shared_memory_that_does_not_exist() -> None:
    for place in ("buffer+8", "buffer+-4"):
        body = f"st.shared.b32 [{place}], %r1;"
        with pytest.raises(PtxError, match="beyond the end of its state space"):
            tried(kernel(body, ".shared .align 4 .b8 buffer[8];"), numbers(), numbers())


DIVERGED = """
    setp.lt.u32 %p1, %r1, 5;
    @%p1 bra $over;
    shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;
$over:
"""


def test_a_shuffle_that_some_lanes_do_not_reach() -> None:
    with pytest.raises(PtxError, match="not reached by all lanes"):
        tried(kernel(DIVERGED), numbers(), numbers())


# Each thread writes, then its neighbour reads; the tests leave out barriers.
EXCHANGE = """
    mov.u32 %r2, buffer;
    cvt.u32.u64 %r3, %rd3;
    add.s32 %r4, %r2, %r3;
    st.shared.b32 [%r4], %r1;
    {barrier}
    xor.b32 %r5, %r3, 128;
    add.s32 %r6, %r2, %r5;
    ld.shared.b32 %r7, [%r6];
    add.s64 %rd5, %rd2, %rd3;
    st.global.b32 [%rd5], %r7;
"""
BUFFER = f".shared .align 4 .b8 buffer[{4 * THREADS}];"


def test_a_barrier_that_is_missing() -> None:
    target = torch.zeros(THREADS, dtype=torch.int32)
    text = kernel(EXCHANGE.format(barrier="bar.sync 0;"), BUFFER)
    for seed in range(10):
        tried(text, numbers(), target, races=True, seed=seed)
        assert torch.equal(target, numbers() ^ 32)
    without = kernel(EXCHANGE.format(barrier=""), BUFFER)
    with pytest.raises(PtxError, match="races with a"):
        tried(without, numbers(), target, races=True)
    # Even without race detection, some order soon gives a wrong result.
    wrong = 0
    for seed in range(10):
        tried(without, numbers(), target, seed=seed)
        wrong += not torch.equal(target, numbers() ^ 32)
    assert wrong > 0


# Programs store their numbers, and the last to count itself sums them up.
LAST = """
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra $done;
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %nctaid.x;
    mul.wide.u32 %rd4, %r2, 4;
    add.s64 %rd5, %rd2, %rd4;
    st.global.b32 [%rd5], %r2;
    {release}
    sub.s32 %r4, %r3, 1;
    atom.global{ordered}.inc.u32 %r5, [%rd1], %r4;
    {acquire}
    setp.ne.u32 %p2, %r5, %r4;
    @%p2 bra $done;
    mov.u32 %r6, 0;
    mov.u32 %r7, 0;
$more:
    mul.wide.u32 %rd4, %r6, 4;
    add.s64 %rd5, %rd2, %rd4;
    ld.global.cg.b32 %r8, [%rd5];
    add.s32 %r7, %r7, %r8;
    add.s32 %r6, %r6, 1;
    setp.lt.u32 %p3, %r6, %r3;
    @%p3 bra $more;
    st.global.b32 [%rd1+4], %r7;
$done:
"""


@pytest.mark.parametrize(
    ("release", "ordered", "acquire", "is_right"),
    [
        ("membar.gl;", "", "membar.gl;", True),
        ("", ".gpu.acq_rel", "", True),
        ("fence.acq_rel.gpu;", ".gpu.relaxed", "fence.acq_rel.gpu;", True),
        ("", "", "membar.gl;", False),
        ("membar.gl;", "", "", False),
        ("", ".gpu.relaxed", "", False),
    ],
)
def test_fences_around_a_count(release: str, ordered: str, acquire: str, is_right: bool) -> None:
    text = kernel(LAST.format(release=release, ordered=ordered, acquire=acquire))
    for seed in range(5):
        count = torch.zeros(2, dtype=torch.int32)
        parts = torch.full((8,), -1, dtype=torch.int32)
        if is_right:
            tried(text, count, parts, programs=8, races=True, seed=seed)
            assert count.tolist() == [0, 28]
        else:
            with pytest.raises(PtxError, match=r"ld\.global\.cg\.b32.*races with a write"):
                tried(text, count, parts, programs=8, races=True, seed=seed)


@pytest.mark.parametrize(
    "body",
    [
        LAST.format(release="membar.cta;", ordered="", acquire="membar.gl;"),
        LAST.format(release="fence.acq_rel.cta;", ordered="", acquire="membar.gl;"),
        LAST.format(release="", ordered=".cta.acq_rel", acquire=""),
    ],
)
def test_a_barrier_of_one_program_does_not_order_others(body: str) -> None:
    with pytest.raises(UnsupportedPtxError, match=r"\.cta|needs one of \.gpu"):
        load(kernel(body))


def test_every_program_must_release_its_writes() -> None:
    # The atomic of each program comes before its fence, but for the first program's.
    body = """
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra $done;
    mov.u32 %r2, %ctaid.x;
    setp.eq.u32 %p2, %r2, 0;
    @%p2 membar.gl;
    red.global.gpu.relaxed.max.s32 [%rd2], %r2;
    @!%p2 membar.gl;
    mov.u32 %r3, %nctaid.x;
    sub.s32 %r4, %r3, 1;
    atom.global.inc.u32 %r5, [%rd1], %r4;
    setp.ne.u32 %p3, %r5, %r4;
    @%p3 bra $done;
    membar.gl;
    ld.global.cg.b32 %r6, [%rd2];
$done:
"""
    races = 0
    for seed in range(20):
        count, most = numbers(2) * 0, numbers(1)
        try:
            tried(kernel(body), count, most, programs=4, races=True, seed=seed)
        except PtxError as error:
            assert "races with an atomic" in str(error)
            races += 1
    assert races > 10  # not where the first program is the last


@pytest.mark.parametrize(
    "body",
    [
        "setp.lt.u32 %p1, %r1, 5; @%p1 bar.sync 0;",
        "setp.lt.u32 %p1, %r1, 5; @%p1 ret; bar.sync 0;",
        "and.b32 %r2, %r1, 1; setp.eq.u32 %p1, %r2, 0;"
        "@%p1 bra $a; bar.sync 0; bra $b; $a: bar.sync 0; $b:",
    ],
)
def test_a_barrier_that_some_threads_do_not_reach(body: str) -> None:
    with pytest.raises(PtxError, match="not reached by all threads"):
        tried(kernel(body), numbers(), numbers())


def test_lanes_of_a_warp_run_in_any_order() -> None:
    # Each reads the result of the one below it.
    body = """
    add.s64 %rd4, %rd2, %rd3;
    st.global.b32 [%rd4+4], %r1;
    ld.global.b32 %r2, [%rd4];
    add.s64 %rd5, %rd1, %rd3;
    st.global.b32 [%rd5], %r2;
"""
    seen = set()
    for seed in range(10):
        target = numbers()
        tried(kernel(body), target, numbers(THREADS + 1) * 0 - 1, seed=seed)
        seen.add(tuple(target.tolist()))
    assert len(seen) > 5


def test_threads_that_write_the_same_do_no_harm() -> None:
    same = kernel("mov.u32 %r2, 7; st.global.b32 [%rd2], %r2;")
    target = torch.zeros(1, dtype=torch.int32)
    tried(same, numbers(), target, races=True)
    assert target.item() == 7
    with pytest.raises(PtxError, match="races with a write"):
        tried(kernel("st.global.b32 [%rd2], %r1;"), numbers(), target, races=True)


@pytest.mark.parametrize(
    ("instruction", "why"),
    [
        ("ex2.approx.f32 %r2, %r1;", "unsupported instruction ex2"),
        ("mul.ftz.f32 %r2, %r1, %r1;", "unsupported modifier .ftz"),
        ("ld.b32 %r2, [%rd1];", "generic addresses"),
        ("bar.sync 1;", "only barrier 0"),
        ("setp.lo.u32 %p1, %r2, 9;", "modifier .lo"),
        ("setp.u32 %p1, %r2, 9;", "needs one of"),
        ("setp.lt.u32 %p1|%p2, %r2, 9;", "a second result"),
        ("mul.u32 %r2, %r1, %r1;", "needs .lo, .hi or .wide"),
        ("mul.f32 %r2, %r1, %r1;", "needs .rn"),
        ("add.s32 %r2, %r1;", "takes 3 operands, got 2"),
        ("add.s32 %r2, %r1, %r1, %r1;", "takes 3 operands, got 4"),
        ("st.param.b64 [tried_0], %rd1;", "modifier .param"),
        ("mov.b128 %rd4, {%rd1, %rd2};", "b128"),
        ("$here: $here: ret;", "duplicate label"),
        ("mov.b32 %r2, %laneid;", "operand %laneid"),
        ("bra $nowhere;", "no such label"),
        ("cvt.rni.s32.f32 %r2, %r1;", "modifier .rni"),
        ("cvt.rzi.f32.f32 %r2, %r1;", "takes .rzi"),
        ("mul.rn.bf16 %rs2, %rs1, %rs1;", "not supported for these operands"),
    ],
)
def test_unsupported_ptx_is_an_error(instruction: str, why: str) -> None:
    with pytest.raises(UnsupportedPtxError, match=why):
        tried(kernel(instruction), numbers(), numbers())
