"""Kernels of a few instructions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from ptx_emulator import Emulation, Kernel, Range, emulation, launch, load

THREADS = 64


def kernel(body: str, shared: str = "") -> str:
    """Kernel of two pointers in %rd1 and %rd2; %r1 is the thread's index."""
    return f"""
.version 8.0
.target sm_75
.visible .entry tried(.param .u64 tried_0, .param .u64 .ptr .global .align 4 tried_1)
.reqntid {THREADS}
{{
    .reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<9>; .reg .b64 %rd<9>;
    {shared}
    ld.param.u64 %rd1, [tried_0];
    ld.param.u64 %rd2, [tried_1];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd3, %r1, 4;
    {body}
    ret;
}}"""


@cache
def assembled(text: str) -> Kernel:
    return load(text)["tried"]


def tried(
    text: str,
    first: torch.Tensor,
    second: torch.Tensor,
    *,
    programs: int = 1,
    writes: Sequence[bool] = (True, True),
    races: bool = False,
    seed: int = 0,
) -> Emulation:
    memory = [Range.of(t, may_write=w) for t, w in zip((first, second), writes, strict=True)]
    with emulation(memory=memory, races=races, seed=seed) as record:
        launch(assembled(text), programs, THREADS, first, second)
    return record


def numbers(count: int = THREADS) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int32)
