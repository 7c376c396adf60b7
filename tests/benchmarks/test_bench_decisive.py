"""The decisive benchmark over small lists, with launches by torch's ops or Triton's interpreter."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import pytest
import torch
from simulated import CPU, SMALL, HostQueue, TableLauncher, kernels_over_tables, on

from ampfast import backends
from ampfast.backends import core
from ampfast.backends.core import Factor
from ampfast.backends.gpu import DeviceKernels
from benchmarks import __main__ as command
from benchmarks import ceilings, decisive, machine, providers, tables
from benchmarks.cases import GradCase
from benchmarks.decisive import PASSES
from benchmarks.providers import CHECK, CLIP, COPY, HALF_COPY, NORM, UNSCALE
from benchmarks.results import Results


@pytest.fixture(autouse=True)
def tables_of(monkeypatch):
    """Passes kernels over tables off as the backend "cpu"; a read is timed elsewhere."""
    monkeypatch.setattr(providers, "device_kernels", kernels_over_tables)
    monkeypatch.setattr(ceilings, "triton", None)
    # So that what a rehearsal puts there goes with the test.
    monkeypatch.setattr(backends.Choice, "kernels_for", backends.Choice.kernels_for)


def test_each_pass_is_timed_beside_torchs_and_a_copy():
    measured = decisive.measure(SMALL, torch.float32, on(HostQueue()), (*PASSES, CLIP))
    calls = (CHECK, UNSCALE, NORM, CLIP)
    expected = [(call, side) for side in ("torch", "ampfast") for call in calls]
    sides = [(row.call, row.side) for row in measured.rows]
    assert sides == [(COPY, "torch"), (HALF_COPY, "torch"), *expected]
    size = SMALL.list_bytes(torch.float32)
    assert [row.bytes // size for row in measured.rows] == [2, 1, 1, 2, 1, 3, 1, 2, 1, 3]
    for row in measured.rows:
        assert row.subject == "decisive" and row.timer == "graph" and row.case == "small, cold"
        assert row.copy_gb_s == measured.rows[0].gb_s
        assert (row.vs_torch is None) is (row.side == "torch")
        assert f"{tables.number(row.gb_s)} GB/s" in tables.line(row)
    assert [goal.call for goal in measured.goals] == [CHECK, UNSCALE]
    assert measured.notes == []


def test_a_dtype_without_a_kernel_of_torch_has_rows_that_say_so(monkeypatch):
    monkeypatch.setattr(providers, "torch_takes", lambda dtype, device: False)
    measured = decisive.measure(SMALL, torch.bfloat16, on(HostQueue()), PASSES)
    rows = {(row.call, row.side): row for row in measured.rows}
    for call in (CHECK, UNSCALE):
        row = rows[call, "torch"]
        assert row.ms is None and "has no kernel for bfloat16" in tables.line(row)
        assert rows[call, "ampfast"].vs_torch is None
    assert rows[NORM, "torch"].ms is not None
    assert tables.of_subject("decisive", measured.rows).lines


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("value", "unscale by cpu, tensor 0: "),
        ("finds", "check by cpu: wrong flag without an infinity"),
        ("finds nothing", "check by cpu: wrong flag with an infinity"),
        ("norm", "as sum of squares, not "),
        ("coefficient", "norm and clip by cpu, tensor 0: "),
    ],
)
def test_a_wrong_backend_is_left_out_with_a_note(monkeypatch, wrong, told):
    class Wrong(TableLauncher):
        def multi_tensor(self, work, *more):
            super().multi_tensor(work, *more)
            if wrong.startswith("finds"):
                work.found_inf.fill_(wrong == "finds")
            if wrong == "value" and work.write:
                super().multi_tensor(work._replace(how=Factor.TIMES), *more)
            if wrong == "norm" and work.sums is not None:
                work.sums.mul_(1 + 1e-5)

        def clip_coefficient(self, clip):
            super().clip_coefficient(clip)
            if wrong == "coefficient":
                clip.coefficient.mul_(0.5)

    monkeypatch.setattr(providers, "device_kernels", lambda name, device: DeviceKernels(Wrong()))
    measured = decisive.measure(SMALL, torch.float32, on(HostQueue()), (*PASSES, CLIP))
    (note,) = measured.notes
    assert note.startswith("FAILED cpu, small float32: ") and told in note
    assert {row.side for row in measured.rows} == {"torch"}
    assert measured.goals == []


def test_passes_are_timed_with_chunks_of_several_sizes(monkeypatch):
    made = []

    class Counting(TableLauncher):
        def multi_tensor(self, work, table, *more):
            made.append(table.segments[0].chunks)
            super().multi_tensor(work, table, *more)

    many, set_chunks = GradCase("many", ((1 << 17,),)), core.set_chunks
    monkeypatch.setattr(core, "set_chunks", functools.partial(set_chunks, enough=1))
    monkeypatch.setattr(providers, "device_kernels", lambda name, device: DeviceKernels(Counting()))
    try:
        measured = decisive.measure_chunks(many, torch.float32, on(HostQueue()))
    finally:
        set_chunks()
    calls = {row.call: row.bytes // many.list_bytes(torch.float32) for row in measured.rows}
    ours = {f"{path}, {kib} KiB" for path in (CHECK, UNSCALE) for kib in decisive.CHUNKS_KIB}
    assert calls.keys() == {COPY, HALF_COPY} | ours
    assert all(
        size == (1 if call.startswith(CHECK) else 2) for call, size in calls.items() if call in ours
    )
    most = [(512 << 10) // (kib << 10) for kib in decisive.CHUNKS_KIB]
    assert {*made} <= {count + more for count in most for more in (0, 1)}
    assert len({*made}) == len(most)


@pytest.mark.parametrize("graphs", [True, False])
def test_new_tables_are_timed(graphs):
    class NoGraphs(HostQueue):
        def capture(self, body):
            raise RuntimeError("not permitted")

    before = core.tables_made()
    measured = decisive.measure_tables(
        SMALL, torch.float32, on(HostQueue() if graphs else NoGraphs())
    )
    calls = [(row.call, row.timer) for row in measured.rows]
    assert calls == [(decisive.MOVED, "events"), (decisive.REPLAYED, "graph")][: 1 + graphs]
    assert measured.rows[0].host_us is not None
    assert core.tables_made() > before + 4
    assert any("not permitted" in note for note in measured.notes) is not graphs


def test_without_graphs_all_is_timed_by_events():
    class NoGraphs(HostQueue):
        def capture(self, body):
            raise RuntimeError("not permitted")

    measured = decisive.measure(SMALL, torch.float32, on(NoGraphs()), PASSES)
    assert {row.timer for row in measured.rows} == {"events"}
    assert "not permitted" in measured.notes[0]


def test_every_job_is_written_and_printed_at_once(monkeypatch, tmp_path, capsys):
    file = tmp_path / "out" / "decisive.json"
    seen = []
    write = Results.write

    def written(self, path):
        write(self, path)
        seen.append((path, len(Results.read(path).rows), capsys.readouterr().out.splitlines()))

    monkeypatch.setattr(Results, "write", written)
    arguments = ["--only", "decisive", "--rehearse", "--json", str(file)]
    assert command.main(arguments) == 0
    jobs = decisive.jobs(on(HostQueue()))
    assert len(seen) == len(jobs) + 1
    lines = 0
    for path, rows, printed in seen[:-1]:
        assert path == file
        lines += sum(line.startswith(("decisive, ", "host, ", "training, ")) for line in printed)
        assert rows == lines
    assert {row.subject for row in Results.read(file).rows} == {"decisive", "host", "training"}
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_failure_in_one_backend_fails_the_run(monkeypatch, tmp_path):
    monkeypatch.setattr(decisive, "LISTS", decisive.LISTS[1:2])
    monkeypatch.setattr(decisive, "assert_parity", lambda *arguments: 1 / 0)
    file = tmp_path / "decisive.json"
    assert command.main(["--only", "decisive", "--rehearse", "--json", str(file)]) == 1
    assert any(note.startswith("FAILED cpu, 1000x1k") for note in Results.read(file).notes)


def test_a_cpu_has_no_decisive_jobs():
    assert decisive.jobs(on()) == []


def test_a_backend_that_is_named_is_left_out(monkeypatch):
    report = providers.backends.BackendReport
    reports = [report(name, True, "", ("cuda",)) for name in ("triton", "cuda")]
    monkeypatch.setattr(providers.backends, "report", lambda: reports)
    monkeypatch.setenv(providers.WITHOUT, "cuda")
    names, reasons = providers.available(torch.device("cuda", 0))
    assert names == ["triton"]
    assert reasons == [f"cuda: not measured, {providers.WITHOUT} names it"]


def test_the_commit_is_told_where_git_does_not_know_it(monkeypatch, tmp_path):
    monkeypatch.delenv("AMPFAST_COMMIT", raising=False)
    monkeypatch.setattr(machine, "REPOSITORY", tmp_path)
    assert machine.new_results(CPU).commit is None
    monkeypatch.setenv("AMPFAST_COMMIT", "abc")
    assert machine.new_results(CPU).commit == "abc"


READ = """
import torch
from benchmarks.ceilings import reader
for dtype, count in ((torch.int32, 20_001), (torch.int16, 7), (torch.int16, 16_384)):
    memory = torch.arange(count).to(dtype)
    words = memory[: count * dtype.itemsize // 4 * 4 // dtype.itemsize].view(torch.int32)
    partials = reader(memory)()
    assert len(partials) == -(-len(words) // 8192)
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


COMPILE = """
import re, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from benchmarks import ceilings
types = {"words_ptr": "*i32", "partials_ptr": "*i32", "count": "i64"}
types |= {"BLOCK": "constexpr", "BLOCKS": "constexpr"}
values = {"BLOCK": ceilings.BLOCK, "BLOCKS": ceilings.BLOCKS}
aligned = {(place,): [["tt.divisibility", 16]] for place in (0, 1)}
source = ASTSource(ceilings._largest_word, types, values, aligned)
options = {"num_warps": 4, "enable_fp_fusion": False}
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
print(len(re.findall(r"ld\\.global\\.v4", compiled.asm["ptx"])))
"""


def test_the_ceiling_reads_16_bytes_at_a_time():
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        cwd=machine.REPOSITORY,
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "16\n", done.stderr


@pytest.mark.slow
@pytest.mark.sweep
def test_the_rehearsal_runs_the_kernels(tmp_path):
    pytest.importorskip("triton")
    file = tmp_path / "decisive.json"
    command = [sys.executable, "-m", "benchmarks"]
    done = subprocess.run(
        [*command, "--only", "decisive", "--rehearse", "--json", file, "--limit", "5"],
        cwd=machine.REPOSITORY,
        env={**os.environ, "TRITON_INTERPRET": "1", "AMPFAST_BACKEND": "triton"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = Results.read(file).rows
    assert {row.side for row in rows} == {"torch", "ampfast, triton"}
    assert "read" in {row.call for row in rows}
