"""Measured gradient lists, and the goals that are judged on them."""

from __future__ import annotations

import pytest
import torch
from simulated import CPU, SMALL

from benchmarks import goals, kernels, machine
from benchmarks.cases import CASES, make_gradients
from benchmarks.harness import Samples
from benchmarks.results import Goal, Spread
from benchmarks.timing import Timed

MIB = 1 << 20


# Numbers of parameters and tensors from the models' papers and implementations.
@pytest.mark.parametrize(
    ("name", "elements", "tensors"),
    [
        ("1000x1k", 1_024_000, 1000),
        ("10000x256", 2_560_000, 10000),
        ("one_16m", 16 * MIB, 1),
        ("one_64m", 64 * MIB, 1),
        ("one_256m", 256 * MIB, 1),
        ("one_512m", 512 * MIB, 1),
        ("resnet50", 25_557_032, 161),
        ("bert_base", 109_482_240, 199),
        ("bert_large", 335_141_888, 391),
        ("gpt2_124m", 124_439_808, 148),
        ("gpt2_xl", 1_557_611_200, 580),
        ("llama_7b", 6_738_415_616, 291),
        ("500_matrices", 225_000_000, 500),
        ("one_1g", 1024 * MIB, 1),
        ("one_1540m", 1_540_000_000, 1),
    ],
)
def test_the_lists_have_the_sizes_of_their_models(name, elements, tensors):
    assert CASES[name].elements == elements
    assert len(CASES[name].shapes) == tensors
    assert CASES[name].list_bytes(torch.bfloat16) == 2 * elements


def test_halving_and_doubling_gradients_is_exact_in_every_dtype():
    for dtype in kernels.DTYPES:
        gradients = make_gradients(SMALL, dtype, CPU)
        assert [tuple(gradient.shape) for gradient in gradients] == list(SMALL.shapes)
        for gradient in gradients:
            assert torch.equal(gradient * 0.5 * 2.0, gradient)


def test_quantiles():
    assert Spread.of([float(value) for value in range(11)]) == Spread(2.0, 5.0, 8.0)


@pytest.mark.parametrize(
    ("limit", "spread", "lenient", "verdict"),
    [
        (0.1, (0.05, 0.1, 0.2), False, "met"),
        (0.1, (0.05, 0.11, 0.2), False, "not met"),
        (1.0, (0.99, 1.01, 1.2), True, "met within spread"),
        (1.0, (1.01, 1.02, 1.2), True, "not met"),
        (1.0, (0.50, 1.06, 2.0), True, "not met"),
        (1.0, (0.99, 1.01, 1.2), False, "not met"),
    ],
)
def test_a_goal_is_met_only_where_the_median_or_a_spread_that_counts_reaches_it(
    limit, spread, lenient, verdict
):
    goal = Goal("a", "b", "c", "d", "e", "f", Spread(*spread), limit, lenient)
    assert goal.verdict == verdict


def _timed(case="gpt2_xl", dtype=torch.float32, few=110, lists=1, host=None, **seconds):
    """Constant samples by call and provider, as in `unscale_torch=2.0`."""
    samples = Samples({tuple(key.rsplit("_", 1)): 6 * [value] for key, value in seconds.items()})
    if host:
        host = samples
    about = {"lists": lists, "host": host, "tensors_per_launch": few}
    return Timed("subject", CASES[case], dtype, [], samples, **about)


def _found(measured):
    return {(g.case, g.call, g.side, g.over): (g.limit, g.ratio.p50) for g in measured}


GPU = {
    "check_torch": 8.0,
    "unscale_torch": 10.0,
    "unscale+update_torch": 11.0,
    "check_cuda": 0.5,
    "unscale_cuda": 2.0,
    "unscale+update_cuda": 2.5,
    "copy_torch": 1.0,
    "copy of half_torch": 0.5,
}


def test_a_large_list_must_come_near_to_a_copy_and_never_be_slower_than_torch():
    side = "ampfast, cuda"
    assert _found(goals.of_kernels(_timed(lists=2, **GPU), "cuda")) == {
        ("gpt2_xl, cold", "check", side, "copy of half, torch"): (1 / 0.95, 1.0),
        ("gpt2_xl, cold", "check", side, "check, torch"): (1.0, 0.0625),
        ("gpt2_xl, cold", "unscale", side, "copy, torch"): (1 / 0.92, 2.0),
        ("gpt2_xl, cold", "unscale", side, "unscale, torch"): (1.0, 0.2),
    }
    limits = [g.limit for g in goals.of_kernels(_timed("gpt2_124m", **GPU), "cuda")]
    assert limits == [1 / 0.85, 1 / 0.85, 1.0, 1.0], "a smaller list may be further from a copy"
    limits = [g.limit for g in goals.of_kernels(_timed("bert_large", **GPU), "cuda")]
    assert limits == [1 / 0.95, 1 / 0.92, 1 / 1.15, 1 / 1.15], "a real model must be faster"


@pytest.mark.parametrize(("case", "limit"), [("1000x1k", 1 / 2), ("10000x256", 1 / 8)])
@pytest.mark.parametrize("few", [110, 770])
def test_many_small_tensors_are_compared_with_a_torch_of_many_launches(case, limit, few):
    found = _found(goals.of_kernels(_timed(case, few=few, **GPU), "cuda"))
    for call, ratio in (("check", 0.0625), ("unscale", 0.2)):
        name = (case, call, "ampfast, cuda", f"{call}, torch")
        assert found.pop(name) == (limit if few == 110 else 1.0, ratio)
    with_update = [((case, "unscale+update", "ampfast, cuda", "unscale, torch"), (0.5, 0.25))]
    assert list(found.items()) == (with_update if (case, few) == ("1000x1k", 110) else [])


@pytest.mark.parametrize(
    ("case", "few", "on_host"),
    [("1000x1k", 110, True), ("1000x1k", 770, False), ("gpt2_xl", 110, False)],
)
def test_a_whole_step_costs_half_on_the_device_and_a_fifth_on_the_host(case, few, on_host):
    seconds = {
        "full step_torch": 10.0,
        "full step, fused_torch": 8.0,
        "full step_cuda": 1.0,
        "full step, fused_cuda": 2.0,
    }
    measured = goals.of_steps(_timed(case, few=few, host=True, **seconds), "cuda")
    assert [(g.limit, g.ratio.p50, g.over) for g in measured] == [
        (0.5, 0.25, "full step, fused, torch"),
        *([(0.2, 0.1, "full step, torch, host time")] if on_host else []),
        *([(0.2, 0.25, "full step, fused, torch, host time")] if on_host else []),
    ]


def test_a_cpu_has_goals_of_its_own():
    seconds = {"check_torch": 2.0, "unscale_torch": 3.0, "unscale_cpu": 1.0, "check_cpu": 0.5}
    seconds["norm_cpu"] = 0.6
    ours, order = (("check", 0.25), ("unscale", 1 / 3)), ("check", "ampfast", "unscale, ampfast")
    for case, lists, limits in (
        ("1000x1k", 1, (1 / 4, 1 / 2.5)),
        ("1000x1k, cold", 2, (1.0, 1.0)),
        ("resnet50", 1, (1.0, 1.0)),
    ):
        name = case.removesuffix(", cold")
        found = goals.of_kernels(_timed(name, few=None, lists=lists, **seconds), "cpu")
        wanted = {
            (case, call, "ampfast", f"{call}, torch"): (limit, ratio)
            for (call, ratio), limit in zip(ours, limits, strict=True)
        }
        assert _found(found) == {**wanted, (case, *order): (1.0, 0.5)}
    for dtype, limits in (
        (torch.float32, (1 / 0.85, 2 / 1.4)),
        (torch.float16, (1 / 0.75, 2 / 1.3)),
    ):
        found = _found(goals.of_kernels(_timed("bert_base", dtype, None, **seconds), "cpu"))
        assert found["bert_base", "norm", "ampfast", "check, ampfast"] == (limits[0], 1.2)
        assert found["bert_base", "unscale", "ampfast", "check, ampfast"] == (limits[1], 2.0)
    assert goals.of_steps(_timed(few=None, **seconds), "cpu") == []


@pytest.mark.parametrize(
    ("case", "dtype", "few", "limits"),
    [
        ("1000x1k", torch.float32, None, [1 / 5, 1 / 5]),
        ("bert_base", torch.float32, None, [1 / 1.5, 1 / 3.5]),
        ("bert_base", torch.bfloat16, None, []),
        ("one_64m", torch.float32, None, []),
        ("gpt2_xl", torch.bfloat16, 110, [1 / 1.6, 1 / 4]),
        ("1000x1k", torch.float32, 110, []),
    ],
)
def test_goals_of_clipping(case, dtype, few, limits):
    seconds = {"clip_torch": 3.0, "clip_cuda": 1.5, "clip, in_place=False_cuda": 0.5}
    found = goals.of_clipping(_timed(case, dtype, few, **seconds), "cuda")
    assert [goal.limit for goal in found] == limits
    assert [goal.ratio.p50 for goal in found] == ([0.5, 1 / 6] if limits else [])


@pytest.mark.parametrize(
    ("case", "dtype", "few", "met"),
    [
        ("gpt2_xl", torch.float32, 0, [True, False]),
        ("gpt2_xl", torch.float16, 0, [True, True]),
        ("1000x1k", torch.float32, 0, []),
        ("gpt2_xl", torch.float64, 0, []),
        ("gpt2_xl", torch.float32, None, []),
    ],
)
def test_goals_of_tracking(case, dtype, few, met):
    seconds = {
        "check_cuda": 1.0,
        "check, overflow_cuda": 1.05,
        "unscale_cuda": 1.0,
        "unscale, overflow_cuda": 1.3,
    }
    found = goals.of_tracking(_timed(case, dtype, few, **seconds), "cuda")
    assert [goal.verdict == "met" for goal in found] == met


@pytest.mark.parametrize(
    ("few", "seconds", "verdict"),
    [(None, 1.05, "met"), (None, 1.06, "not met"), (0, 1.02, "met"), (0, 1.03, "not met")],
)
def test_goals_of_training(few, seconds, verdict):
    timed = _timed(few=few, AdamW_cpu=seconds, AdamW_none=1.0)
    (goal,) = goals.of_training(timed, ("AdamW", "cpu"), "AdamW")
    assert (goal.over, goal.verdict) == ("AdamW, no scaler", verdict)


def test_missing_measurements_have_no_goal():
    assert goals.of_kernels(_timed("1000x1k", check_cuda=1.0, unscale_cuda=1.0), "cuda") == []


@pytest.mark.parametrize(
    ("torch_version", "cuda", "tensors"),
    [
        ("2.11.0+cu130", "13.0", 110),
        ("2.12.0+cu130", "13.0", 770),
        ("2.13.0+cu128", "12.8", 110),
        ("2.13.1+rocm7.0", None, 110),
        ("2.14.0a0+gitabc", "13.2", 770),
        ("3.0.0", "14.0", 770),
    ],
)
def test_how_many_tensors_torch_takes_in_a_launch(torch_version, cuda, tensors):
    assert machine.tensors_per_launch(torch_version, cuda) == tensors
