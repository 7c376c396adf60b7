"""Passes over lists: sizes, bytes, comparison before timing, on a CPU and a simulated GPU."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch
from simulated import CPU, SMALL, HostQueue, NoGraphs, kernels_over_tables, on

from ampfast.backends import BackendReport
from benchmarks import decisive, kernels, machine, providers, tables, timing
from benchmarks.cases import CASES, make_gradients
from benchmarks.providers import CLIP, COPY, HALF_COPY, NORM, PATHS
from benchmarks.timing import FULL, Setting

DTYPES = (*kernels.DTYPES, torch.float64)
TORCH_OP = torch._amp_foreach_non_finite_check_and_unscale_
SIZE = SMALL.list_bytes(torch.float32)


@pytest.fixture(autouse=True)
def small_cache(monkeypatch):
    """Shrinks the cache, so that few lists overflow it, and passes kernels over tables off."""
    monkeypatch.setattr(kernels, "cache_bytes", lambda device: 1 << 13)
    monkeypatch.setattr(providers, "device_kernels", kernels_over_tables())


# Numbers of parameters and tensors from the models' papers and implementations.
@pytest.mark.parametrize(
    ("name", "elements", "tensors"),
    [
        *[("10x1k", 10_240, 10), ("1000x1k", 1_024_000, 1000), ("10000x256", 2_560_000, 10000)],
        *[("one_16m", 1 << 24, 1), ("one_64m", 1 << 26, 1), ("one_256m", 1 << 28, 1)],
        *[("one_512m", 1 << 29, 1), ("one_1g", 1 << 30, 1), ("one_1540m", 1_540_000_000, 1)],
        *[("resnet50", 25_557_032, 161), ("bert_base", 109_482_240, 199)],
        *[("bert_large", 335_141_888, 391), ("gpt2_124m", 124_439_808, 148)],
        *[("gpt2_xl", 1_557_611_200, 580), ("llama_7b", 6_738_415_616, 291)],
        ("500_matrices", 225_000_000, 500),
    ],
)
def test_the_lists_have_the_sizes_of_their_models(name, elements, tensors):
    case = CASES[name]
    assert (case.elements, len(case.shapes)) == (elements, tensors)
    assert case.list_bytes(torch.bfloat16) == 2 * elements


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_path_is_timed_beside_torchs_and_a_copy_on_a_cpu(dtype):
    measured = kernels.measure(SMALL, dtype, on())
    assert measured.notes == []
    calls = [call for call in (*PATHS, NORM) for _ in range(2)] + [COPY, HALF_COPY]
    assert [row.call for row in measured.rows] == 2 * calls
    assert [row.case for row in measured.rows] == 10 * ["small"] + 10 * ["small, cold"]
    size = SMALL.list_bytes(dtype)
    assert [row.bytes / size for row in measured.rows] == 2 * [1, 1, 2, 2, 2, 2, 1, 1, 2, 1]
    for rows in (measured.rows[:10], measured.rows[10:]):
        copies = {row.bytes: row for row in rows[8:]}
        for row in rows:
            assert row.gb_s == pytest.approx(row.bytes / row.ms.p50 / 1e6)
            assert row.copy_gb_s == copies[row.bytes].gb_s
            assert (row.timer, row.host_us) == ("wall", None)
            assert (row.vs_torch is None) is (row.side == "torch")
        assert rows[9].percent_of_copy == pytest.approx(100)
    for gradient in make_gradients(SMALL, dtype, CPU):
        assert torch.equal(gradient * 0.5 * 2.0, gradient), "else values drift"


@pytest.mark.parametrize("queue", [HostQueue(), NoGraphs()])
def test_a_gpu_is_timed_by_graphs_or_else_by_events(queue):
    paths = (*PATHS, NORM, CLIP)
    measured = kernels.measure(SMALL, torch.float32, on(queue), paths, "decisive")
    assert [row.bytes // SIZE for row in measured.rows] == [1, 1, 2, 2, 2, 2, 1, 1, 3, 3, 2, 1]
    is_graph = not isinstance(queue, NoGraphs)
    assert {row.timer for row in measured.rows} == {"graph" if is_graph else "events"}
    assert ["operation not permitted" in note for note in measured.notes] == [True][is_graph:]
    assert {(row.subject, row.case) for row in measured.rows} == {("decisive", "small, cold")}
    assert all(f"{tables.number(row.gb_s)} GB/s" in tables.line(row) for row in measured.rows)


def test_a_dtype_without_a_kernel_of_torch_has_rows_that_say_so(monkeypatch):
    monkeypatch.setattr(providers, "torch_takes", lambda dtype, device: False)
    measured = kernels.measure(SMALL, torch.bfloat16, on(HostQueue()), (*PATHS, NORM))
    rows = {(row.call, row.side): row for row in measured.rows}
    for call in PATHS:
        row = rows[call, "torch"]
        assert row.ms is None and "has no kernel for bfloat16" in tables.line(row)
        assert rows[call, "ampfast"].vs_torch is None
    assert rows[NORM, "torch"].ms and rows[NORM, "ampfast"].vs_torch
    assert tables.of_subject("kernels", measured.rows).lines


def does_nothing(gradients, found_inf, inv_scale):
    pass


def never_finds(gradients, found_inf, inv_scale):
    torch._foreach_mul_(gradients, inv_scale)


def one_ulp_off(gradients, found_inf, inv_scale):
    TORCH_OP(gradients, found_inf, torch.nextafter(inv_scale, inv_scale + 1))


def check_that_writes(gradients, found_inf):
    TORCH_OP(gradients, found_inf, torch.tensor(0.5))


def no_update(scale, *more):
    pass


@pytest.mark.parametrize(
    ("name", "wrong", "told"),
    [
        *(("unscale_", each, "unscale by") for each in (does_nothing, one_ulp_off)),
        ("unscale_", never_finds, "flag of unscale by"),
        ("check_", check_that_writes, "check by"),
        ("update_scale_", no_update, r"scale and tracker of unscale\+update by"),
    ],
)
def test_a_wrong_function_is_not_timed(monkeypatch, name, wrong, told):
    monkeypatch.setattr(providers.functional, name, wrong)
    monkeypatch.setattr(timing, "interleave", lambda *arguments: pytest.fail("was timed"))
    with pytest.raises(AssertionError, match=f"FAILED cpu, small float32: {told} cpu, small"):
        kernels.measure(SMALL, torch.float32, on())


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("value", "unscale by cpu, small float32, all finite, tensor 0: "),
        ("writes nothing", "unscale by cpu, small float32, all finite, tensor 0"),
        ("finds", "flag of check by cpu, small float32, all finite, tensor 0: 1.0, not 0.0"),
        (
            "finds nothing",
            "flag of check by cpu, small float32, not all finite, tensor 0: 0.0, not 1.0",
        ),
        ("norm", "the norm is "),
        ("coefficient", "norm and clip by cpu, small float32, all finite, tensor 0: "),
        ("no update", "scale and tracker of unscale+update by cpu"),
    ],
)
@pytest.mark.parametrize("takes", [True, False], ids=["torch's op", "elementwise"])
def test_wrong_launches_are_not_timed(monkeypatch, wrong, told, takes):
    monkeypatch.setattr(providers, "device_kernels", kernels_over_tables(wrong))
    monkeypatch.setattr(providers, "torch_takes", lambda dtype, device: takes)
    monkeypatch.setattr(timing, "interleave", lambda *arguments: pytest.fail("was timed"))
    with pytest.raises(AssertionError) as failed:
        kernels.measure(SMALL, torch.float32, on(HostQueue()), (*PATHS, NORM, CLIP))
    assert str(failed.value).startswith(f"FAILED cpu, small float32: {told}")


def test_of_two_backends_a_wrong_one_is_left_out_with_a_note(monkeypatch):
    right, wrong = kernels_over_tables(), kernels_over_tables("value")
    monkeypatch.setattr(providers, "available", lambda device: (["cuda", "triton"], []))
    monkeypatch.setattr(
        providers, "device_kernels", lambda name, d: (wrong if name == "cuda" else right)(name, d)
    )
    measured = kernels.measure(SMALL, torch.float32, on(HostQueue()))
    assert {row.side for row in measured.rows} == {"torch", "ampfast, triton"}
    assert [note[:12] for note in measured.notes] == ["FAILED cuda,"]


def test_gradients_that_drift_are_not_reported(monkeypatch):
    def halves_when_timed(gradients, found_inf, inv_scale):
        TORCH_OP(gradients, found_inf, torch.clamp(inv_scale, max=0.5))

    # Equal to torch in the comparison, where the inverse scale is smaller.
    monkeypatch.setattr(providers.functional, "unscale_", halves_when_timed)
    with pytest.raises(AssertionError, match="drifted"):
        kernels.measure(SMALL, torch.float32, on())
    lists = kernels.Lists(SMALL, torch.float16, CPU, 2)
    lists.assert_steady(torch.zeros(()))
    with pytest.raises(AssertionError, match="drifted"):
        lists.assert_steady(torch.ones(()))
    for value in (0.25, 4.0, math.nan):
        lists.lists[1][-1].view(-1)[-1] = value
        with pytest.raises(AssertionError, match="drifted"):
            lists.assert_steady()


@pytest.mark.parametrize(("queue", "calls", "lists"), [(None, 1, 4), (HostQueue(), 2, 2)])
def test_lists_take_turns_beyond_the_cache_and_must_fit(monkeypatch, queue, calls, lists):
    assert 3 * SIZE < 2 << 13
    assert kernels.lists_in_turn(SMALL, torch.float32, on(queue)) == lists
    assert kernels.lists_in_turn(SMALL, torch.float32, on(queue), whole_calls=True) == calls
    seen = []
    for number in range(5):
        kernels.in_turn(lambda name, turn: seen.append((name, turn)), "ab")(number)
    assert seen == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 0)]
    monkeypatch.setattr(machine, "left_to_group", lambda: 4 * lists * SIZE - 1)
    with pytest.raises(MemoryError, match="needs 0 MiB, 0 MiB are available"):
        kernels.measure(SMALL, torch.float32, on(queue))
    monkeypatch.setattr(machine, "left_to_group", lambda: 4 * lists * SIZE)
    kernels.lists_in_turn(SMALL, torch.float32, on(queue))


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({}, None),
        ({"memory.max": "max\n", "memory.current": "10\n", "memory.stat": "anon 1\n"}, None),
        ({"memory.max": "9", "memory.current": "7", "memory.stat": "a 5\ninactive_file 2"}, 4),
    ],
)
def test_the_limit_of_a_container_counts_as_memory(tmp_path, files, left):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert machine.left_to_group(tmp_path) == left


def test_backends_that_cannot_run_or_are_named_are_left_out_with_their_reason(monkeypatch):
    reports = [
        BackendReport("triton", True, "", ("cuda",)),
        BackendReport("cuda", False, "built without it", ("cuda",)),
        BackendReport("aten", True, "", ("cuda",)),
        BackendReport("cpu", True, "", ("cpu",)),
    ]
    monkeypatch.setattr(providers.backends, "report", lambda: reports)
    monkeypatch.setenv(providers.WITHOUT, "aten")
    assert providers.available(torch.device("cuda", 0)) == (
        ["triton"],
        [
            "cuda: not measured, built without it",
            f"aten: not measured, {providers.WITHOUT} names it",
        ],
    )


def test_jobs_are_of_the_lists_of_their_device():
    assert decisive.jobs(on()) == []
    labels = [job.label for job in decisive.jobs(on(HostQueue()))]
    assert labels[0] == "10x1k float32" and labels[-1] == "one_1540m bfloat16"
    gpu, cpu = (kernels.chosen(Setting(torch.device("cuda"), FULL, q)) for q in (HostQueue(), None))
    assert (len(gpu), len(cpu)) == (21, 15)


READ = """
import torch
from benchmarks.ceilings import reader
for dtype, count in ((torch.int32, 20_001), (torch.int16, 7), (torch.int16, 16_384)):
    memory = torch.arange(count).to(dtype)
    words = memory[: count * dtype.itemsize // 4 * 4 // dtype.itemsize].view(torch.int32)
    partials = reader(memory)()
    assert partials.max() == words.max(), (dtype, count)
    assert partials[0] == words[:8192].max()
print("read")
"""


def test_the_ceiling_reads_all():
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", READ],
        cwd=machine.REPOSITORY,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "read\n", done.stderr
