"""Benchmark of clipping: parity before timing, on a CPU and a simulated GPU, and goals."""

from __future__ import annotations

import pytest
import torch
from simulated import BRIEF, CPU, SMALL, HostQueue

import ampfast
from benchmarks import clipping, goals, harness, kernels, readme, report
from benchmarks.cases import make_gradients
from benchmarks.harness import Samples
from benchmarks.results import Results

PATHS = ["clip", "clip", "clip, in_place=False"]


@pytest.fixture(autouse=True)
def small_cache(monkeypatch):
    """Shrinks the cache, so that few lists overflow it."""
    monkeypatch.setattr(kernels, "cache_bytes", lambda device: 1 << 13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("queue", [None, HostQueue()], ids=["on a CPU", "as on a GPU"])
def test_both_calls_are_compared_with_torchs_two(dtype, queue):
    measured = clipping.measure(SMALL, dtype, CPU, BRIEF, queue)
    assert [row.path for row in measured.rows] == PATHS
    assert [row.provider for row in measured.rows] == ["torch", "cpu", "cpu"]
    list_bytes = SMALL.elements * dtype.itemsize
    assert [row.bytes // list_bytes for row in measured.rows] == [3, 3, 1]
    for row in measured.rows:
        assert row.subject == "clip"
        assert (row.vs_torch is None) is (row.provider == "torch")
        assert (row.host_us_p50 is None) is (queue is None)
        assert row.gb_s == pytest.approx(row.bytes / row.ms_p50 / 1e6)
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
    monkeypatch.setattr(clipping, "interleave", interleaved)
    clipping.measure(SMALL, torch.bfloat16, CPU, BRIEF)
    assert seen == [True, True, True]


def test_float16_is_left_out_as_torch_refuses_it():
    measured = clipping.measure(SMALL, torch.float16, CPU, BRIEF)
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
    monkeypatch.setattr(clipping, "interleave", lambda *arguments: pytest.fail("was timed"))
    with pytest.raises(AssertionError, match=match):
        clipping.measure(SMALL, torch.float32, CPU, BRIEF)


@pytest.mark.parametrize(
    ("case", "dtype", "list_bytes", "few", "limits"),
    [
        ("1000x1k", "float32", 4096000, None, [5.0, 5.0]),
        ("bert_base", "float32", 438 * 10**6, None, [1.3, 2.0]),
        ("bert_base", "bfloat16", 219 * 10**6, None, []),
        ("one_64m", "float32", 2**28, None, []),
        ("gpt2_xl", "bfloat16", 3 * 10**9, 110, [1.6, 4.0]),
        ("1000x1k", "float32", 4096000, 110, []),
    ],
)
def test_goals(case, dtype, list_bytes, few, limits):
    samples = Samples(
        {
            ("clip", "torch"): [3.0, 3.0],
            ("clip", "ours"): [1.0, 1.0],
            ("clip, in_place=False", "ours"): [0.5, 0.5],
        }
    )
    place = goals.Place(case, case, dtype, list_bytes, few)
    found = goals.of_clipping(place, "ours", samples)
    assert [goal.limit for goal in found] == limits
    assert [goal.ratio for goal in found] == ([3.0, 6.0] if limits else [])


@pytest.mark.parametrize("gpu", [None, "a card"])
def test_the_section_of_the_readme(tmp_path, gpu):
    rows = clipping.measure(SMALL, torch.float32, CPU, BRIEF).rows
    machine = {"cpu": "a CPU", "cores": 1, "threads": 1, "gpu": gpu, "tensors_per_launch": 110}
    results = Results(machine, "2.13", None, "0", None, "2026-01-01", rows=rows)
    path = tmp_path / "results.json"
    results.write_json(path)
    [line] = [x for x in readme.WHOLE.section(path).splitlines() if x.startswith("| small")]
    cells = line.strip("| ").split(" | ")
    if gpu:
        assert cells.pop(2) == "cpu"
    assert cells[:3] == ["small", "float32", f"{rows[0].ms_p50:.3f}"]
    assert cells[4:6] == [f"{rows[1].vs_torch:.2f}x", f"{rows[2].ms_p50:.3f}"]
    assert cells[6] == f"{rows[2].vs_torch:.2f}x"
    tables = []
    report.show(results, tables.append)
    assert [table.title for table in tables] == ["Unscaling and clipping by the norm, whole calls"]
