"""Command line of the benchmarks: results are kept in spite of failures."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
import weakref

import pytest
import torch
from simulated import BRIEF, HostQueue, on

from benchmarks import __main__ as command
from benchmarks import machine, report
from benchmarks.harness import Job, Measured
from benchmarks.results import Results, Row, Spread


def _job(result):
    def run():
        if isinstance(result, BaseException):
            raise result
        row = Row("host", result, "float32", "call", "torch", host_us=Spread(1, 2, 3))
        return Measured([row], notes=["a note"])

    return Job("a job", run)


@pytest.fixture
def runs(monkeypatch, tmp_path):
    """Runs jobs into one folder; returns the exit code."""

    def run(*jobs, more=()):
        jobs = [job if isinstance(job, Job) else _job(job) for job in jobs]
        monkeypatch.setattr(command.host_time, "jobs", lambda on: jobs)
        arguments = ["--only", "host", "--folder", str(tmp_path), *more]
        return command.main(arguments)

    return run


def _read(folder):
    return Results.read(folder / command.JSON)


@pytest.mark.parametrize(
    ("middle", "kept", "complete", "exit_code"),
    [
        ("second", ["first", "second", "third"], True, 0),
        (KeyboardInterrupt(), ["first"], False, 130),
        (AssertionError("not torch's [bits]"), ["first", "third"], False, 1),
        (KeyError("shape"), ["first", "third"], False, 1),
        (MemoryError("too large"), ["first", "third"], False, 0),
        (torch.OutOfMemoryError("CUDA out of memory"), ["first", "third"], False, 0),
    ],
    ids=["all", "Ctrl-C", "wrong", "error", "no memory", "no GPU memory"],
)
def test_measurements_are_kept_whatever_happens(
    runs, tmp_path, capsys, middle, kept, complete, exit_code
):
    assert runs("first", middle, "third") == exit_code
    results = _read(tmp_path)
    assert [row.case for row in results.rows] == kept
    assert results.complete is complete
    assert results.asked == {"quick": False, "only": ["host"]}
    assert results.notes.count("a note") == 1
    printed = capsys.readouterr().out
    for told in (*kept, f"the report is {tmp_path / report.PAGE}"):
        assert told in printed
    if isinstance(middle, Exception):
        assert str(middle) in printed
        assert any(str(middle) in note for note in results.notes)
    assert {path.name for path in tmp_path.iterdir()} == {command.JSON, report.PAGE, report.PLOTS}


def test_memory_that_torch_cannot_get_on_a_cpu_is_no_failure(runs, capsys):
    assert runs(Job("large", lambda: torch.empty(1 << 60, dtype=torch.uint8)), "second") == 0
    printed = capsys.readouterr().out
    assert "skipped host: large: " in printed and "FAILED" not in printed


def test_the_file_is_written_after_each_job_as_incomplete(runs, tmp_path):
    seen = []

    def look():
        seen.append(_read(tmp_path))
        return Measured()

    assert runs("first", Job("looks", look)) == 0
    assert [row.case for row in seen[0].rows] == ["first"]
    assert not seen[0].complete
    assert _read(tmp_path).complete


def test_an_earlier_run_is_put_away_unless_the_new_one_has_measured_nothing(
    runs, tmp_path, monkeypatch
):
    def dated(date):
        monkeypatch.setattr(command, "new_results", lambda d: Results({}, "", None, "", None, date))

    dated("monday")
    runs("first")
    before = (tmp_path / command.JSON).read_text()
    dated("tuesday")
    runs(MemoryError("too large"))
    assert (tmp_path / command.JSON).read_text() == before
    runs("second", KeyboardInterrupt())
    (earlier,) = (tmp_path / command.EARLIER).iterdir()
    assert earlier.read_text() == before
    assert [row.case for row in _read(tmp_path).rows] == ["second"]


def test_a_file_that_is_not_of_a_run_is_put_away_too(runs, tmp_path):
    (tmp_path / command.JSON).write_bytes(b"\xff\xfe\x00")
    assert runs("first") == 0
    (earlier,) = (tmp_path / command.EARLIER).iterdir()
    assert earlier.read_bytes() == b"\xff\xfe\x00"
    assert [row.case for row in _read(tmp_path).rows] == ["first"]


def test_a_folder_that_is_removed_is_made_again(runs, tmp_path):
    def remove():
        shutil.rmtree(tmp_path)
        return _job("second").run()

    assert runs("first", Job("removes", remove), "third") == 0
    assert [row.case for row in _read(tmp_path).rows] == ["first", "second", "third"]
    assert (tmp_path / report.PAGE).exists()


def test_results_that_cannot_be_written_are_shown(runs, monkeypatch, tmp_path, capsys):
    def fail(self, path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Results, "write", fail)
    assert runs("first", "second") == 1
    printed = capsys.readouterr().out
    told = [line for line in printed.splitlines() if "No space left" in line]
    assert all(line.startswith(f"cannot write {tmp_path / command.JSON}: ") for line in told)
    assert len(told) == 3, "after each job, and at the end"
    assert "first" in printed and "second" in printed


def test_a_report_that_cannot_be_written_leaves_the_results(runs, tmp_path, capsys):
    (tmp_path / report.PAGE).mkdir()
    assert runs("first") == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "no report" in line]
    assert report.PAGE in line
    assert _read(tmp_path).complete


@pytest.mark.parametrize("interrupted", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_report_is_written_is_ignored(
    runs, monkeypatch, tmp_path, interrupted, number
):
    write = report.write

    def signalled(*arguments):
        signal.raise_signal(number)
        return write(*arguments)

    monkeypatch.setattr(report, "write", signalled)
    last = Job("stops", lambda: signal.raise_signal(number)) if interrupted else "second"
    assert runs("first", last) == (command.INTERRUPTED if interrupted else 0)
    assert _read(tmp_path).complete is not interrupted
    assert (tmp_path / report.PAGE).exists()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_whose_interrupt_is_dropped_ends_the_run_after_its_job(runs, tmp_path):
    class Some:
        pass

    def drop():
        some = Some()
        reference = weakref.ref(some, lambda _: signal.raise_signal(signal.SIGTERM))
        del some
        assert reference() is None
        return _job("second").run()

    assert runs("first", Job("drops", drop), "third") == command.INTERRUPTED
    assert [row.case for row in _read(tmp_path).rows] == ["first", "second"]
    assert not _read(tmp_path).complete


def test_no_job_is_started_when_the_time_is_up(runs, monkeypatch, tmp_path):
    now = [0.0]
    monkeypatch.setattr(command.time, "monotonic", lambda: now[0])

    def slow():
        now[0] += 60
        return _job("slow").run()

    assert runs(Job("slow", slow), Job("slow", slow), "late", more=["--limit", "100"]) == 0
    results = _read(tmp_path)
    assert [row.case for row in results.rows] == ["slow", "slow"]
    assert not results.complete
    assert results.notes == ["a note", "left out host: a job: the time is up"]


@pytest.mark.parametrize("missing", ["rich", "matplotlib"])
def test_a_missing_library_is_one_line_and_results_are_kept(
    runs, monkeypatch, tmp_path, capsys, missing
):
    if missing == "rich":
        monkeypatch.setattr(command, "rich", None)
    else:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert runs("first") == 0
    printed = capsys.readouterr().out
    assert printed.count(f"pip install {missing}") == 1
    assert [row.case for row in _read(tmp_path).rows] == ["first"]
    assert (tmp_path / report.PAGE).exists() is (missing == "rich")


@pytest.mark.skipif(not hasattr(os, "posix_spawn"), reason="sends a POSIX signal")
def test_a_terminated_run_writes_its_results(tmp_path):
    command_line = (sys.executable, "-m", "benchmarks", "--only", "host")
    process = subprocess.Popen(
        [*command_line, "--folder", str(tmp_path)],
        cwd=machine.REPOSITORY,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 600
    path = tmp_path / command.JSON
    while not path.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == command.INTERRUPTED, errors
    assert _read(tmp_path).rows
    assert not _read(tmp_path).complete


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--only", "host,gpu"],
            "'gpu' is not among loops, host, clip, mlp, training, growth, ",
        ),
        (["--limit", "soon"], "invalid float value: 'soon'"),
        (["--cases", "1000x1k"], "unrecognized arguments: --cases 1000x1k"),
        (["--folder", __file__], "File exists"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_measured(capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("why", ["a folder", "not writable"])
def test_a_folder_that_takes_no_results_is_refused_before_anything_is_measured(
    runs, monkeypatch, tmp_path, capsys, why
):
    def fail(dir):
        raise PermissionError(errno.EACCES, "Permission denied", str(dir))

    if why == "a folder":
        (tmp_path / command.JSON).mkdir()
    else:
        monkeypatch.setattr(command.tempfile, "TemporaryFile", fail)
    with pytest.raises(SystemExit) as stopped:
        runs("first")
    assert stopped.value.code == 2
    assert str(tmp_path) in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("name", ["triton", "fastest"])
def test_a_backend_that_cannot_run_is_refused_before_anything_is_measured(
    monkeypatch, tmp_path, capsys, name
):
    monkeypatch.setenv("AMPFAST_BACKEND", name)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(SystemExit) as stopped:
        command.main(["--folder", str(tmp_path)])
    assert stopped.value.code == 2
    assert "AMPFAST_BACKEND" in capsys.readouterr().err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_loops_come_first_and_a_gpu_has_none():
    assert command.jobs_of(command.SUBJECTS, on())[0][0] == "loops: conv net, AdamW"
    assert command.jobs_of(("loops",), on(HostQueue())) == []


def test_one_list_is_measured_and_reported(monkeypatch, tmp_path):
    """Runs the whole command on the smallest list."""
    monkeypatch.setattr(command, "QUICK", BRIEF)
    monkeypatch.setattr(command.kernels, "cache_bytes", lambda device: 1 << 22)
    monkeypatch.setattr(command.kernels, "CPU_QUICK_CASES", ("1000x1k",))
    chosen = ("--only", "kernels,steps", "--folder", str(tmp_path))
    assert command.main(["--quick", *chosen]) == 0
    results = _read(tmp_path)
    assert results.complete
    assert {row.call for row in results.rows} >= {"check", "unscale", "full step", "copy"}
    assert (tmp_path / report.PLOTS / "throughput.svg").exists()
