"""Measured gradient lists, and the goals that are judged on them."""

from __future__ import annotations

import pytest
import torch
from simulated import CPU, SMALL

from benchmarks import goals, kernels, machine
from benchmarks.cases import CASES, make_gradients
from benchmarks.goals import Place
from benchmarks.harness import Samples
from benchmarks.results import Goal, Spread

MIB = 1 << 20


# Numbers of parameters and tensors from the models' papers and implementations.
@pytest.mark.parametrize(
    ("name", "elements", "tensors"),
    [
        ("1000x1k", 1_024_000, 1000),
        ("10000x256", 2_560_000, 10000),
        ("one_16m", 16 * MIB, 1),
        ("one_64m", 64 * MIB, 1),
        ("one_512m", 512 * MIB, 1),
        ("resnet50", 25_557_032, 161),
        ("bert_base", 109_482_240, 199),
        ("bert_large", 335_141_888, 391),
        ("gpt2_124m", 124_439_808, 148),
        ("gpt2_xl", 1_557_611_200, 580),
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
    ("sense", "limit", "p20", "p50", "p80", "spread_counts", "verdict"),
    [
        ("<=", 0.1, 0.05, 0.1, 0.2, False, "met"),
        ("<=", 0.1, 0.05, 0.11, 0.2, False, "not met"),
        ("<=", 1.0, 0.99, 1.01, 1.2, True, "met within spread"),
        ("<=", 1.0, 1.01, 1.02, 1.2, True, "not met"),
        ("<=", 1.0, 0.50, 1.06, 2.0, True, "not met"),
        (">=", 1.0, 0.9, 0.99, 1.0, True, "met within spread"),
        (">=", 1.0, 0.5, 0.94, 2.0, True, "not met"),
        (">=", 1.0, 0.9, 0.98, 0.99, True, "not met"),
        (">=", 2.5, 2.4, 2.5, 2.6, False, "met"),
        (">=", 2.5, 2.3, 2.4, 2.6, False, "not met"),
        ("<", 64, 63, 64, 65, False, "not met"),
    ],
)
def test_a_goal_is_met_only_where_the_median_or_a_spread_that_counts_reaches_it(
    sense, limit, p20, p50, p80, spread_counts, verdict
):
    spread = Spread(p20, p50, p80)
    goal = Goal.of_spread("name", "case", "float32", sense, limit, spread, spread_counts)
    assert goal.verdict == verdict
    assert goal.as_json()["met"] is (verdict != "not met")


def _samples(**seconds):
    """Constant samples by path and provider, as in `unscale_torch=2.0`."""
    return Samples({tuple(key.rsplit("_", 1)): 6 * [value] for key, value in seconds.items()})


def _place(case, list_bytes, tensors_per_launch):
    return Place(case, f"{case}, cold", "float32", list_bytes, tensors_per_launch)


GPU_SAMPLES = Samples(
    {
        ("check", "torch"): 6 * [8.0],
        ("unscale", "torch"): 6 * [10.0],
        ("unscale+update", "torch"): 6 * [11.0],
        ("check", "cuda"): 6 * [0.5],
        ("unscale", "cuda"): 6 * [2.0],
        ("unscale+update", "cuda"): 6 * [2.5],
        ("copy", "torch"): 6 * [1.5],
        ("copy of half", "torch"): 6 * [0.4],
    }
)


def _found(measured):
    return {goal.name: (goal.sense, goal.limit, goal.ratio) for goal in measured}


def test_a_large_list_must_come_near_to_a_copy_and_never_be_slower_than_torch():
    measured = goals.of_kernels(_place("gpt2_xl", 10**9, 110), "cuda", GPU_SAMPLES)
    assert _found(measured) == {
        "cuda: check, part of a copy's bandwidth": (">=", 0.90, 0.8),
        "cuda: unscale, part of a copy's bandwidth": (">=", 0.90, 0.75),
        "cuda: check, times as fast as torch": (">=", 1.0, 16.0),
        "cuda: unscale, times as fast as torch": (">=", 1.0, 5.0),
    }
    assert {goal.case for goal in measured} == {"gpt2_xl, cold"}


@pytest.mark.parametrize(
    ("list_bytes", "part"),
    [(255_999_999, None), (256_000_000, 0.85), (999_999_999, 0.85), (1_000_000_000, 0.9)],
)
def test_how_near_to_a_copy_depends_on_the_size(list_bytes, part):
    assert goals.part_of_copy(list_bytes) == part


@pytest.mark.parametrize(("case", "speedup"), [("1000x1k", 5.0), ("10000x256", 8.0)])
def test_many_small_tensors_are_compared_with_a_torch_of_many_launches(case, speedup):
    found = _found(goals.of_kernels(_place(case, 10**6, 110), "cuda", GPU_SAMPLES))
    for path, ratio in (("check", 16.0), ("unscale", 5.0)):
        name = f"cuda: {path}, times as fast as torch's many launches"
        assert found.pop(name) == (">=", speedup, ratio)
    update = found.pop("cuda: unscale+update, times as fast as torch's unscale alone", None)
    assert update == ((">=", 4.0, 4.0) if case == "1000x1k" else None)
    assert len(found) == 2


def test_a_torch_of_few_launches_is_not_held_to_goals_for_many():
    found = _found(goals.of_kernels(_place("1000x1k", 10**6, 770), "cuda", GPU_SAMPLES))
    assert list(found) == [
        "cuda: check, times as fast as torch",
        "cuda: unscale, times as fast as torch",
    ]


def test_missing_measurements_have_no_goal():
    without_torch = Samples({("check", "cuda"): 6 * [1.0], ("unscale", "cuda"): 6 * [1.0]})
    assert goals.of_kernels(_place("1000x1k", 10**9, 110), "cuda", without_torch) == []
    assert goals.of_steps(_place("1000x1k", 10**6, 110), "cuda", without_torch, None) == []


STEPS = Samples(
    {
        ("full step", "torch"): 6 * [10.0],
        ("full step, fused", "torch"): 6 * [8.0],
        ("full step", "cuda"): 6 * [1.0],
        ("full step, fused", "cuda"): 6 * [2.0],
    }
)


@pytest.mark.parametrize(
    ("case", "tensors", "on_host"),
    [("1000x1k", 110, True), ("1000x1k", 770, False), ("gpt2_xl", 110, False)],
)
def test_a_whole_step_costs_half_on_the_device_and_a_fifth_on_the_host(case, tensors, on_host):
    found = _found(goals.of_steps(_place(case, 10**6, tensors), "cuda", STEPS, STEPS))
    assert found.pop("cuda: full step, fused, device time over torch's") == ("<=", 0.5, 0.25)
    expected = {
        "cuda: full step, torch's host time over ours": (">=", 5.0, 10.0),
        "cuda: full step, fused, torch's host time over ours": (">=", 5.0, 4.0),
    }
    assert found == (expected if on_host else {})


def test_a_cpu_has_goals_of_its_own():
    samples = _samples(unscale_torch=3.0, unscale_cpu=1.0, check_cpu=0.5)
    alone = Place("1000x1k", "1000x1k", "float32", 10**6, None)
    assert _found(goals.of_kernels(alone, "cpu", samples)) == {
        "unscale_, times as fast as torch": (">=", 2.5, 3.0),
        "check_, time over that of unscale_": ("<=", 1.0, 0.5),
    }
    cold = Place("1000x1k", "1000x1k, cold", "float32", 10**6, None)
    assert list(_found(goals.of_kernels(cold, "cpu", samples))) == [
        "check_, time over that of unscale_"
    ]
    assert goals.of_steps(alone, "cpu", samples, None) == []


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
