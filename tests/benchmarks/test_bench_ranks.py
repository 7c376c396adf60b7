"""Benchmark of ranks: parity before timing, timing in step, and shutdown."""

from __future__ import annotations

import math
import sys

import pytest
import torch
import torch.distributed as dist
from simulated import CPU, SMALL, HostQueue, on

import ampfast
from ampfast.distributed import Agreement
from benchmarks import harness, ranks
from benchmarks.harness import Contender, Effort, Samples, Setting

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this torch has no gloo"
)
# Collectives per iteration of each scaler and path.
COLLECTIVES = {
    ranks.UNSCALE: (1, 1),
    ranks.STEP: (1, 1),
    ranks.FUSED_STEP: (0, 1),
    ranks.CLIP: (2, 1),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Single-rank world in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        store = dist.FileStore(str(tmp_path_factory.mktemp("world") / "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        yield
        dist.destroy_process_group()


@pytest.fixture
def started(monkeypatch):
    """Processes that the test started."""
    found = []
    spawn = ranks.multiprocessing.spawn

    def recorded(*arguments, **settings):
        context = spawn(*arguments, **settings)
        found.extend(context.processes)
        return context

    monkeypatch.setattr(ranks.multiprocessing, "spawn", recorded)
    return found


def _assert_ended(started):
    assert len(started) == 2
    assert all(process.exitcode is not None for process in started)


def test_two_ranks_share_a_list_and_the_first_reports(started):
    measured = ranks.measure(SMALL, on())
    _assert_ended(started)
    assert [(row.call, row.side, row.collectives) for row in measured.rows] == [
        (path, provider, count)
        for path, counts in COLLECTIVES.items()
        for provider, count in zip(("torch", "ampfast"), counts, strict=True)
    ]
    for row in measured.rows:
        assert (row.subject, row.case, row.dtype, row.ranks) == ("ranks", "small", "float32", 2)
        assert row.list_bytes == SMALL.list_bytes(torch.float32)
        assert 0 < row.ms.p20 <= row.ms.p50 <= row.ms.p80
        assert (row.vs_torch is None) is (row.side == "torch")
    (goal,) = measured.goals
    assert (goal.case, goal.call, goal.limit) == ("small", ranks.UNSCALE, 1.0)
    # The goal has our time over torch's, the row torch's over ours, of the same rounds: their
    # medians come from the same ratios unless the number of rounds is even.
    ours = next(row for row in measured.rows if row.call == ranks.UNSCALE and row.vs_torch)
    assert goal.ratio.p20 <= 1 / ours.vs_torch <= goal.ratio.p80
    assert ranks.FUSED_NOTE in measured.notes


def _disagrees(rank, *task):
    Agreement.share = lambda self, found, device: found
    ranks._rank(rank, *task)


def test_a_rank_that_fails_ends_the_job(monkeypatch, started):
    spawn = ranks.multiprocessing.spawn
    monkeypatch.setattr(
        ranks.multiprocessing, "spawn", lambda f, *rest, **more: spawn(_disagrees, *rest, **more)
    )
    match = r"scale and tracker after unscale_ \+ update by cpu, small"
    with pytest.raises(Exception, match=match):
        ranks.measure(SMALL, on())
    _assert_ended(started)


def test_ranks_that_do_not_end_are_ended(monkeypatch, started):
    monkeypatch.setattr(ranks, "JOB_S", 0.0)
    with pytest.raises(RuntimeError, match="2 ranks had not ended after 0 s"):
        ranks.measure(SMALL, on())
    _assert_ended(started)


@pytest.mark.usefixtures("alone")
def test_a_gpu_has_the_time_of_the_host_apart():
    measured = ranks.measure_here(SMALL, on(HostQueue()))
    assert [row.timer for row in measured.rows] == 2 * ["events"] + 2 * ["waits"] + 4 * ["events"]
    for row in measured.rows:
        assert row.ranks == 1
        assert row.host_us.p50 > 0
        assert (row.host_vs_torch is None) is (row.side == "torch")
    assert measured.goals == []


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ("gradients", "gradients of unscale_"),
        ("scale", "scale and tracker after unscale_"),
        ("written", "gradients of full step, fused"),
        ("norm", "the norm is"),
        ("clipped", "clip [+] update .* tensor 0"),
        ("finite", "with an infinity"),
    ],
)
def test_wrong_results_are_not_timed(monkeypatch, wrong, match):
    kind = ampfast.ShardedGradScaler
    unscale, update, clip, step = (
        getattr(kind, name) for name in ("unscale_", "update", "clip_grad_norm_", "step")
    )

    def largest(optimizer):
        return max((p.grad for p in optimizer.param_groups[0]["params"]), key=torch.Tensor.numel)

    def wrong_unscale(self, optimizer):
        unscale(self, optimizer)
        largest(optimizer)[0] *= 1 + 2e-7

    def wrong_update(self):
        update(self)
        self._growth_tracker += 1

    def wrong_step(self, optimizer):
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            largest(optimizer)[0] *= 2
        return step(self, optimizer)

    def wrong_clip(self, optimizer, limit):
        norm = clip(self, optimizer, limit * (1 + 1e-4 * (wrong == "clipped")))
        if wrong == "finite":
            return norm.nan_to_num(1.0, 1.0)
        return norm * (1 + 1e-5 * (wrong == "norm"))

    if wrong == "gradients":
        monkeypatch.setattr(kind, "unscale_", wrong_unscale)
    elif wrong == "scale":
        monkeypatch.setattr(kind, "update", wrong_update)
    elif wrong == "written":
        monkeypatch.setattr(kind, "step", wrong_step)
    else:
        monkeypatch.setattr(kind, "clip_grad_norm_", wrong_clip)
    monkeypatch.setattr(ranks, "interleave", lambda *arguments, **more: pytest.fail("was timed"))
    with pytest.raises(AssertionError, match=match):
        ranks.measure_here(SMALL, on())


@pytest.mark.usefixtures("alone")
def test_gradients_that_drift_while_timed_are_noticed(monkeypatch):
    monkeypatch.setattr(ranks, "caller", lambda path, name, optimizer, *rest: _drifting(optimizer))
    with pytest.raises(AssertionError, match="not close"):
        ranks.measure_here(SMALL, on())


def _drifting(optimizer):
    parameters = optimizer.param_groups[0]["params"]
    return lambda number: torch._foreach_mul_([p.grad for p in parameters], 1.01)


def test_the_given_clock_limits_the_rounds():
    def rounds(clock):
        contender = Contender("path", "provider", lambda number: None)
        samples = harness.interleave([contender], Effort(True, 10.0, 0.0), clock=clock)
        return len(samples.seconds["path", "provider"])

    late = iter([0.0, 9.0, 9.9, 10.1])
    assert rounds(lambda: next(late)) == harness.MIN_ROUNDS + 2
    assert rounds(lambda: 0.0) == harness.MAX_ROUNDS


def test_a_round_takes_as_long_as_its_slowest_rank(monkeypatch):
    other = torch.tensor([[3.0, 1.0], [5.0, 9.0]], dtype=torch.float64)

    def all_reduce(tensor, op):
        assert op == dist.ReduceOp.MAX
        tensor.copy_(tensor.maximum(other))

    monkeypatch.setattr(ranks.dist, "all_reduce", all_reduce)
    slowest = ranks.slowest(Samples({("a", "b"): [2.0, 4.0], ("a", "c"): [6.0, 8.0]}))
    assert slowest.seconds == {("a", "b"): [3.0, 4.0], ("a", "c"): [6.0, 9.0]}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_parts_make_up_the_list(count):
    parts = [ranks.part_of(SMALL, rank, count).shapes for rank in range(count)]
    for shape, *pieces in zip(SMALL.shapes, *parts, strict=True):
        elements = [math.prod(piece) for piece in pieces]
        assert sum(elements) == math.prod(shape)
        assert max(elements) - min(elements) <= 1


def test_a_torch_without_the_backend_is_named(monkeypatch):
    monkeypatch.setattr(ranks.dist, "is_backend_available", lambda name: False)
    measured = ranks.measure(SMALL, on())
    assert measured.rows == []
    assert measured.notes == ["ranks: not measured, this torch has no gloo"]


def test_the_lists_of_a_run():
    def labels(quick, cases=None):
        return [job.label for job in ranks.jobs(Setting(CPU, Effort(quick, 1.0)), cases)]

    assert labels(quick=False) == ["bert_base float32", "1000x1k float32"]
    assert labels(quick=True) == ["1000x1k float32"]
    assert labels(quick=True, cases=("resnet50",)) == ["resnet50 float32"]
