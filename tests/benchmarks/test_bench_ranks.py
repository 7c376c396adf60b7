"""Benchmark of ranks: parity before timing, timing in step, and shutdown."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from simulated import BRIEF, CPU, SMALL, HostQueue

import ampfast
from benchmarks import harness, processes, ranks, readme, report
from benchmarks.harness import Contender, Effort, Samples
from benchmarks.machine import REPOSITORY
from benchmarks.results import Results

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this torch has no gloo"
)
# Collectives per iteration of each scaler and path.
COLLECTIVES = {ranks.UNSCALE: (1, 1), ranks.STEP: (1, 1), ranks.FUSED: (0, 1), ranks.CLIP: (2, 1)}
WORK = "import pathlib; ranks.work(pathlib.Path(sys.argv[1]), int(sys.argv[2]))"


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

    class Recorded(subprocess.Popen):
        def __init__(self, *arguments, **settings):
            super().__init__(*arguments, **settings)
            found.append(self)

    monkeypatch.setattr(processes.subprocess, "Popen", Recorded)
    return found


def _assert_ended(started, count=2):
    assert len(started) == count
    # Set once a process has been waited for.
    assert all(process.returncode is not None for process in started)


def _python(code, rank):
    return [sys.executable, "-I", "-S", "-c", code, str(rank)]


def test_two_ranks_share_a_list_and_the_first_reports(started):
    measured = ranks.measure(SMALL, CPU, BRIEF)
    _assert_ended(started)
    backend = ampfast.backends.default_for(CPU)
    assert [(row.path, row.provider, row.collectives) for row in measured.rows] == [
        (path, provider, count)
        for path, counts in COLLECTIVES.items()
        for provider, count in zip(("torch", backend), counts, strict=True)
    ]
    for row in measured.rows:
        assert (row.subject, row.case, row.dtype, row.ranks) == ("ranks", "small", "float32", 2)
        assert row.list_bytes == SMALL.list_bytes(torch.float32)
        assert 0 < row.ms_p20 <= row.ms_p50 <= row.ms_p80
        assert (row.vs_torch is None) is (row.provider == "torch")
    (goal,) = measured.goals
    assert goal.name.startswith(f"{ranks.UNSCALE} on 2 ranks")
    assert (goal.case, goal.sense, goal.limit) == ("small", "<=", 1.0)
    # The goal has our time over torch's, the row torch's over ours, of the same rounds: their
    # medians come from the same ratios unless the number of rounds is even.
    ours = next(row for row in measured.rows if row.path == ranks.UNSCALE and row.vs_torch)
    assert goal.ratio_p20 <= 1 / ours.vs_torch <= goal.ratio_p80
    assert ranks.FUSED_NOTE in measured.notes


@pytest.mark.parametrize(
    ("code", "match"),
    [
        (
            "from ampfast.distributed import Agreement\n"
            "Agreement.share = lambda self, found, device: found",
            r"ended with code .*scale and tracker after unscale_ \+ update by cpu, small",
        ),
        (
            "if sys.argv[2] == '1': ranks.slowest = lambda samples: os._exit(7)",
            "rank 1 ended with code 7",
        ),
    ],
    ids=["does not agree", "dies"],
)
def test_a_rank_that_fails_ends_the_job(monkeypatch, started, code, match):
    run = processes.run_together

    def spoiled(commands, *rest):
        head = f"import os, sys\nfrom benchmarks import ranks\n{code}\n{WORK}"
        run([[sys.executable, "-c", head, *command[-2:]] for command in commands], *rest)

    monkeypatch.setattr(processes, "run_together", spoiled)
    with pytest.raises(RuntimeError, match=f"(?s){match}"):
        ranks.measure(SMALL, CPU, BRIEF)
    _assert_ended(started)


def test_the_first_failure_ends_waiting_ranks(tmp_path, started):
    code = "import sys, time\nif sys.argv[1] == '1': sys.exit('a reason')\ntime.sleep(600)"
    commands = [_python(code, rank) for rank in range(3)]
    with pytest.raises(RuntimeError, match=r"^rank 1 ended with code 1; rank 1 wrote: a reason$"):
        processes.run_together(commands, REPOSITORY, tmp_path, 300)
    _assert_ended(started, 3)


def test_all_output_is_shown_whichever_process_ends_first(tmp_path, started):
    code = f"""
import sys, time
if sys.argv[1] == "0":
    print("the cause", flush=True)
    time.sleep(600)
while not open({str(tmp_path / "rank0.log")!r}).read():
    time.sleep(0.01)
sys.exit("lost rank 0")
"""
    match = r"^rank 1 ended with code 1; rank 0 wrote: the cause; rank 1 wrote: lost rank 0$"
    with pytest.raises(RuntimeError, match=match):
        processes.run_together([_python(code, rank) for rank in range(2)], tmp_path, tmp_path, 300)
    _assert_ended(started)


def test_ranks_that_do_not_end_are_ended(tmp_path, monkeypatch, started):
    def clock():
        """Clock that passes the time limit once the first process has ended."""
        return 3.0 if started and started[0].returncode is not None else 0.0

    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
    code = "import sys, time\nif sys.argv[1] != '0': time.sleep(600)"
    commands = [_python(code, rank) for rank in range(3)]
    with pytest.raises(RuntimeError, match=r"^rank 1 and rank 2 had not ended after 2 s$"):
        processes.run_together(commands, REPOSITORY, tmp_path, 2)
    _assert_ended(started, 3)


def test_who_is_interrupted_leaves_no_rank(tmp_path, monkeypatch, started):
    def interrupted(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(processes.time, "sleep", interrupted)
    commands = [_python("import time\ntime.sleep(600)", rank) for rank in range(2)]
    with pytest.raises(KeyboardInterrupt):
        processes.run_together(commands, REPOSITORY, tmp_path, 300)
    _assert_ended(started)


@pytest.mark.usefixtures("alone")
def test_a_gpu_has_the_time_of_the_host_apart():
    measured = ranks.measure_here(SMALL, CPU, BRIEF, HostQueue())
    assert [row.timer for row in measured.rows] == 2 * ["events"] + 2 * ["waits"] + 4 * ["events"]
    for row in measured.rows:
        assert row.ranks == 1
        assert row.host_us_p50 > 0
        assert (row.host_vs_torch is None) is (row.provider == "torch")
    assert measured.goals == []


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ("gradients", "gradients of unscale_"),
        ("scale", "scale and tracker after unscale_"),
        ("written", "gradients of step [+] update, fused"),
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
        ranks.measure_here(SMALL, CPU, BRIEF)


@pytest.mark.usefixtures("alone")
def test_gradients_that_drift_while_timed_are_noticed(monkeypatch):
    monkeypatch.setattr(ranks, "caller", lambda path, name, optimizer, *rest: _drifting(optimizer))
    with pytest.raises(AssertionError, match="not close"):
        ranks.measure_here(SMALL, CPU, BRIEF)


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
    measured = ranks.measure(SMALL, CPU, BRIEF)
    assert measured.rows == []
    assert measured.notes == ["ranks: not measured, this torch has no gloo"]


def test_the_lists_of_a_run():
    def labels(quick, cases=None):
        return [job.label for job in ranks.jobs(Effort(quick, 1.0), CPU, cases)]

    assert labels(quick=False) == ["bert_base float32", "1000x1k float32"]
    assert labels(quick=True) == ["1000x1k float32"]
    assert labels(quick=True, cases=("resnet50",)) == ["resnet50 float32"]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("gpu", [None, "a card"])
def test_the_section_of_the_readme(tmp_path, gpu):
    rows = ranks.measure_here(SMALL, CPU, BRIEF, HostQueue() if gpu else None).rows
    machine = {"cpu": "a CPU", "cores": 1, "threads": 1, "gpu": gpu, "tensors_per_launch": 110}
    results = Results(machine, "2.13", None, "0", None, "2026-01-01", rows=rows)
    path = tmp_path / "results.json"
    results.write_json(path)
    assert Results.read_json(path) == results
    lines = [x for x in readme.WHOLE.section(path).splitlines() if x.startswith("| small")]
    assert len(lines) == len(ranks.PATHS)
    for line, theirs, ours in zip(lines, rows[::2], rows[1::2], strict=True):
        cells = line.strip("| ").split(" | ")
        if gpu:
            assert cells.pop(2) == "cpu"
        faulty = " (torch's ranks do not agree)" if ours.path == ranks.FUSED else ""
        times = (f"{theirs.ms_p50:.3f}", f"{ours.ms_p50:.3f}", f"{ours.vs_torch:.2f}x")
        counts = map(str, COLLECTIVES[ours.path])
        assert cells == ["small", "1", f"{ours.path}{faulty}", *times, *counts]
    tables = []
    report.show(results, tables.append)
    (table,) = tables
    assert [line[:3] for line in table.lines] == [("small", row.path, row.provider) for row in rows]
    assert ("host us" in table.numbers) is bool(gpu)

    Results(machine, "2.13", None, "0", None, "2026-01-01").write_json(path)
    assert "ShardedGradScaler" not in readme.WHOLE.section(path)
