"""Benchmark of clipping: parity before timing, on a CPU and a simulated GPU, and goals."""

from __future__ import annotations

import pytest
import torch
from simulated import SMALL, HostQueue, on

import ampfast
from benchmarks import clipping, harness, kernels, timing
from benchmarks.cases import make_gradients

PATHS = ["clip", "clip", "clip, in_place=False"]


@pytest.fixture(autouse=True)
def small_cache(monkeypatch):
    """Shrinks the cache, so that few lists overflow it."""
    monkeypatch.setattr(kernels, "cache_bytes", lambda device: 1 << 13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("queue", [None, HostQueue()], ids=["on a CPU", "as on a GPU"])
def test_both_calls_are_compared_with_torchs_two(dtype, queue):
    measured = clipping.measure(SMALL, dtype, on(queue))
    assert [row.call for row in measured.rows] == PATHS
    assert [row.side for row in measured.rows] == ["torch", "ampfast", "ampfast"]
    list_bytes = SMALL.elements * dtype.itemsize
    assert [row.bytes // list_bytes for row in measured.rows] == [3, 3, 1]
    for row in measured.rows:
        assert row.subject == "clip"
        assert (row.vs_torch is None) is (row.side == "torch")
        assert (row.host_us is None) is (queue is None)
        assert row.gb_s == pytest.approx(row.bytes / row.ms.p50 / 1e6)
    assert measured.goals == []


def test_samples_in_16_bit_begin_with_the_same_gradients(monkeypatch):
    made, seen = [], []

    def make(*arguments):
        made.append(make_gradients(*arguments))
        return made[-1]

    def interleaved(contenders, *rest, **settings):
        first = [tensor.clone() for tensor in made[-1]]
        for contender in contenders:
            torch._foreach_mul_(made[-1], 3.0)
            with contender.around():
                seen.append(all(map(torch.equal, made[-1], first)))
        return harness.interleave(contenders, *rest, **settings)

    monkeypatch.setattr(clipping, "make_gradients", make)
    monkeypatch.setattr(timing, "interleave", interleaved)
    clipping.measure(SMALL, torch.bfloat16, on())
    assert seen == [True] * 3


def test_float16_is_left_out_as_torch_refuses_it():
    measured = clipping.measure(SMALL, torch.float16, on())
    assert measured.rows == []
    assert measured.notes == ["clip: torch refuses to unscale float16 gradients"]


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ("norm", "the norm is"),
        ("gradients", "not close"),
        ("in place", "which are only read"),
        ("divisor", "the divisor is"),
    ],
)
def test_a_clip_that_is_wrong_is_not_timed(monkeypatch, wrong, match):
    plain = ampfast.GradScaler.clip_grad_norm_

    def clip(self, optimizer, max_norm, norm_type=2.0, *, in_place=True):
        if wrong == "in place":
            return plain(self, optimizer, max_norm, norm_type)
        limit = max_norm * 1.001 if wrong == ("gradients" if in_place else "divisor") else max_norm
        norm = plain(self, optimizer, limit, norm_type, in_place=in_place)
        return norm * 1.00001 if wrong == "norm" else norm

    monkeypatch.setattr(ampfast.GradScaler, "clip_grad_norm_", clip)
    monkeypatch.setattr(timing, "interleave", lambda *arguments: pytest.fail("was timed"))
    with pytest.raises(AssertionError, match=match):
        clipping.measure(SMALL, torch.float32, on())
