"""Benchmark of kernels and whole steps: parity before timing, on a CPU and a simulated GPU."""

from __future__ import annotations

import math

import pytest
import torch
from simulated import CPU, SMALL, HostQueue, TableLauncher, kernels_over_tables, on

import ampfast
from ampfast.backends import cpu
from benchmarks import counts, host_time, kernels, machine, providers, steps, timing
from benchmarks.cases import CASES
from benchmarks.counts import Counts

CACHE_BYTES = 1 << 13
DTYPES = (*kernels.DTYPES, torch.float64)
TORCH_OP = torch._amp_foreach_non_finite_check_and_unscale_


@pytest.fixture
def small_cache(monkeypatch):
    """Shrinks the cache, so that few lists overflow it."""
    monkeypatch.setattr(kernels, "cache_bytes", lambda device: CACHE_BYTES)


@pytest.fixture
def tables(monkeypatch, small_cache):
    """Passes kernels over tables off as the backend "cpu"."""
    monkeypatch.setattr(providers, "device_kernels", kernels_over_tables)


@pytest.mark.usefixtures("small_cache")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_yield_a_row_for_each_contender(dtype):
    measured = kernels.measure(SMALL, dtype, on())
    paths = [path for path in (*providers.PATHS, "norm") for _ in range(2)]
    paths += ["copy", "copy of half"]
    assert [row.call for row in measured.rows] == paths + paths
    assert len({row.side for row in measured.rows}) == 2
    list_bytes = SMALL.elements * dtype.itemsize
    # One list alone, and enough lists in turn to overflow the cache.
    rotation = math.ceil(2 * CACHE_BYTES / list_bytes)
    assert rotation > 1
    assert [row.case for row in measured.rows] == 10 * ["small"] + 10 * ["small, cold"]
    moved = [factor * list_bytes for factor in (1, 1, 2, 2, 2, 2, 1, 1, 2, 1)]
    assert [row.bytes for row in measured.rows] == moved + moved
    for row in measured.rows:
        assert row.ms.p20 <= row.ms.p50 <= row.ms.p80
        assert row.gb_s == pytest.approx(row.bytes / row.ms.p50 / 1e6)
        assert row.timer == "wall"
        # Not measured on a CPU.
        assert row.launches is row.copies is row.syncs is row.host_us is None
    for row in measured.rows[8:10]:
        assert row.percent_of_copy == pytest.approx(100)
    # A check is compared with a copy that moves as many bytes as it reads.
    assert measured.rows[1].copy_gb_s == measured.rows[9].gb_s
    assert measured.rows[3].copy_gb_s == measured.rows[8].gb_s
    assert [goal.case for goal in measured.goals] == 3 * ["small"] + 3 * ["small, cold"]
    assert measured.notes == []


@pytest.mark.usefixtures("small_cache")
def test_a_wrong_norm_is_not_timed(monkeypatch):
    right = cpu.run

    def wrong(grads, work):
        found = right(grads, work)
        if work.sums is not None:
            work.sums[0] *= 1 + 1e-6
        return found

    monkeypatch.setattr(cpu, "run", wrong)
    with pytest.raises(AssertionError, match="small float32: the norm by cpu is"):
        kernels.measure(SMALL, torch.float32, on())


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize("by_graph", [True, False])
def test_a_gpu_has_host_times_and_counts_beside_its_device_times(monkeypatch, by_graph):
    monkeypatch.setattr(kernels, "GRAPH_BELOW_BYTES", (1 << 30) if by_graph else 0)
    monkeypatch.setattr(
        counts,
        "of_contenders",
        lambda contenders, queue: {c.key: Counts(3, 2, 1) for c in contenders},
    )
    queue = HostQueue()
    measured = kernels.measure(SMALL, torch.float32, on(queue))
    paths = [path for path in providers.PATHS for _ in range(2)] + ["copy", "copy of half"]
    assert [row.call for row in measured.rows] == paths
    assert [row.side for row in measured.rows] == 3 * ["torch", "ampfast"] + 2 * ["torch"]
    assert ("capture" in queue.asked) is by_graph
    for row in measured.rows:
        assert row.timer == ("graph" if by_graph else "events")
        assert row.case == "small, cold"
        if "copy" in row.call:
            assert row.launches is row.host_us is None
        else:
            assert (row.launches, row.copies, row.syncs) == (3, 2, 1)
            assert row.host_us.p20 <= row.host_us.p50 <= row.host_us.p80
        assert (row.vs_torch is None) is (row.side == "torch")
        assert (row.host_vs_torch is None) is (row.side == "torch")
    assert [goal.over for goal in measured.goals] == ["check, torch", "unscale, torch"]
    assert measured.notes == []


@pytest.mark.usefixtures("tables")
def test_where_no_graph_can_be_captured_all_are_timed_by_events():
    class NoGraphs(HostQueue):
        def capture(self, body):
            raise RuntimeError("operation not permitted")

    measured = kernels.measure(SMALL, torch.float16, on(NoGraphs()))
    assert {row.timer for row in measured.rows} == {"events"}
    (note,) = measured.notes
    assert "operation not permitted" in note


@pytest.mark.usefixtures("tables")
def test_a_dtype_that_torch_does_not_know_is_measured_without_torch(monkeypatch):
    monkeypatch.setattr(providers, "torch_takes", lambda dtype, device: False)
    measured = kernels.measure(SMALL, torch.bfloat16, on(HostQueue()))
    rows = {(row.call, row.side): row for row in measured.rows}
    assert ("unscale", "torch") not in rows
    assert rows["unscale", "ampfast"].vs_torch is None
    assert rows["unscale", "ampfast"].percent_of_copy > 0
    assert measured.goals == []
    assert "torch: not measured with bfloat16" in measured.notes[0]
    whole = steps.measure(SMALL, torch.bfloat16, on(HostQueue()))
    assert {row.side for row in whole.rows} == {"ampfast"}


def _wrong_launches(wrong):
    class Wrong(TableLauncher):
        def multi_tensor(self, work, *more):
            if wrong == "writes nothing" and work.write:
                return
            super().multi_tensor(work, *more)
            if wrong == "finds" and not work.write:
                work.found_inf.fill_(1)
            if wrong == "no update" and work.ending is not None:
                work.ending.update.growth_tracker.zero_()

    return Wrong()


@pytest.mark.usefixtures("small_cache")
@pytest.mark.parametrize(
    "wrong",
    ["writes nothing", "finds", "no update"],
)
def test_wrong_launches_are_not_timed(monkeypatch, wrong):
    found = kernels_over_tables("cpu", CPU)
    monkeypatch.setattr(found, "_launcher", _wrong_launches(wrong))
    monkeypatch.setattr(providers, "device_kernels", lambda name, device: found)
    monkeypatch.setattr(timing, "interleave", lambda *arguments: pytest.fail("was timed"))
    with pytest.raises(AssertionError, match="launches of cpu, small float32"):
        kernels.measure(SMALL, torch.float32, on(HostQueue()))


def _does_nothing(gradients, found_inf, inv_scale):
    pass


def _never_finds(gradients, found_inf, inv_scale):
    torch._foreach_mul_(gradients, inv_scale)


def _one_ulp_off(gradients, found_inf, inv_scale):
    TORCH_OP(gradients, found_inf, torch.nextafter(inv_scale, inv_scale + 1))


@pytest.mark.parametrize("wrong", [_does_nothing, _never_finds, _one_ulp_off])
def test_a_wrong_unscale_is_not_timed(monkeypatch, wrong):
    monkeypatch.setattr(providers.functional, "unscale_", wrong)
    with pytest.raises(AssertionError, match="small float32"):
        kernels.measure(SMALL, torch.float32, on())


def test_a_check_that_writes_is_not_timed(monkeypatch):
    def halves(gradients, found_inf):
        TORCH_OP(gradients, found_inf, torch.tensor(0.5))

    monkeypatch.setattr(providers.functional, "check_", halves)
    with pytest.raises(AssertionError, match="small float32"):
        kernels.measure(SMALL, torch.float32, on())


@pytest.mark.usefixtures("small_cache")
def test_gradients_that_drift_are_not_reported(monkeypatch):
    def halves_when_timed(gradients, found_inf, inv_scale):
        TORCH_OP(gradients, found_inf, torch.clamp(inv_scale, max=0.5))

    # Equal to torch in the parity test, where the inverse scale is smaller.
    monkeypatch.setattr(providers.functional, "unscale_", halves_when_timed)
    with pytest.raises(AssertionError, match="drifted"):
        kernels.measure(SMALL, torch.float32, on())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_value_that_drifted_is_seen_wherever_it_is(dtype):
    gradients = kernels.Lists(SMALL, dtype, CPU, 2)
    gradients.assert_steady(torch.zeros(()))
    with pytest.raises(AssertionError, match="drifted"):
        gradients.assert_steady(torch.ones(()))
    for value in (0.25, 4.0, math.nan):
        gradients.lists[1][-1].view(-1)[-1] = value
        with pytest.raises(AssertionError, match="drifted"):
            gradients.assert_steady()


@pytest.mark.parametrize("subject", [kernels, steps], ids=["kernels", "steps"])
def test_lists_that_do_not_fit_are_refused_before_they_are_made(monkeypatch, subject):
    monkeypatch.setattr(machine, "available_bytes", lambda device: 1 << 20)
    monkeypatch.setattr(kernels, "make_gradients", lambda *arguments: pytest.fail("was made"))
    monkeypatch.setattr(steps, "make_gradients", lambda *arguments: pytest.fail("was made"))
    with pytest.raises(MemoryError, match="1 MiB are available"):
        subject.measure(CASES["one_64m"], torch.float32, on())


def test_backends_that_cannot_run_are_left_out_with_their_reason(monkeypatch):
    report = ampfast.backends.BackendReport
    monkeypatch.setattr(
        providers.backends,
        "report",
        lambda: [
            report("triton", True, "", ("cuda",)),
            report("cuda", False, "built without it", ("cuda",)),
            report("cpu", True, "", ("cpu",)),
            report("aten", True, "", ()),
        ],
    )
    names, reasons = providers.available(torch.device("cuda", 0))
    assert names == ["triton"]
    assert reasons == ["cuda: not measured, built without it"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("queue", [None, HostQueue()], ids=["on a CPU", "as on a GPU"])
def test_whole_steps_are_compared_with_the_steps_that_they_replace(small_cache, dtype, queue):
    measured = steps.measure(SMALL, dtype, on(queue))
    plain = ["full step", "full step", "step_and_update"]
    fused = ["full step, fused", "full step, fused", "step_and_update, fused"]
    # torch does not unscale float16 gradients.
    expected = fused if dtype is torch.float16 else plain + fused
    assert sorted(row.call for row in measured.rows) == sorted(expected)
    for row in measured.rows:
        assert row.subject == "steps"
        assert (row.vs_torch is None) is (row.side == "torch")
        assert (row.host_us is None) is (queue is None)
        waits = queue is not None and not row.call.endswith("fused")
        assert row.timer == ("wall" if queue is None else "waits" if waits else "events")
        assert row.case == ("small" if queue is None else "small, cold")
    goals = [] if queue is None else ["full step, fused, torch"]
    assert [goal.over for goal in measured.goals] == goals


def test_a_step_that_forgets_to_update_is_not_timed(monkeypatch):
    monkeypatch.setattr(ampfast.GradScaler, "update", lambda self: self._end_iteration())
    monkeypatch.setattr(timing, "interleave", lambda *arguments: pytest.fail("was timed"))
    with pytest.raises(AssertionError, match="full step by cpu, small float32"):
        steps.measure(SMALL, torch.float32, on())


def test_the_parameters_of_a_timed_optimizer_need_no_memory_of_their_own():
    gradients = [torch.ones(1 << 10, 3), torch.ones(())]
    optimizer = steps.optimizer_over(gradients, fused=True)
    for parameter, gradient in zip(optimizer.param_groups[0]["params"], gradients, strict=True):
        assert parameter.grad is gradient
        assert parameter.is_leaf
        assert parameter.untyped_storage().nbytes() == 4


@pytest.mark.parametrize(
    "paths",
    [
        (steps.UNSCALE,),
        steps.PATHS[:2],
        steps.PATHS[2:],
    ],
    ids=lambda paths: paths[0],
)
@pytest.mark.parametrize("queue", [None, HostQueue()], ids=["on a CPU", "as on a GPU"])
def test_host_time_compares_each_path_with_the_calls_it_replaces(paths, queue):
    measured = host_time.measure(10, paths, on(queue))
    assert [row.call for row in measured.rows] == [paths[0], *paths]
    assert measured.rows[0].side == "torch"
    assert measured.rows[0].vs_torch is None
    for row in measured.rows:
        assert row.host_us.p20 <= row.host_us.p50 <= row.host_us.p80
        assert row.ms is None
    for row in measured.rows[1:]:
        assert row.side == "ampfast"
        assert row.vs_torch > 0
    limits = [host_time.GOALS[10]] if len(paths) == 1 and queue is None else []
    assert [goal.limit for goal in measured.goals] == limits


def test_a_scaler_that_unscales_twice_is_not_timed(monkeypatch):
    class Twice(torch.amp.GradScaler):
        def __init__(self, *arguments, backend, **settings):
            super().__init__(*arguments, **settings)

        def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
            super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)

    monkeypatch.setattr(ampfast, "GradScaler", Twice)
    with pytest.raises(AssertionError, match="by cpu, 10x4 float32, without an infinity"):
        host_time.measure(10, (steps.UNSCALE,), on())
