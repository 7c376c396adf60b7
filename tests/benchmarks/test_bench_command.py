"""Command line of the benchmarks: results are kept in spite of failures."""

from __future__ import annotations

import signal

import pytest
import torch
from simulated import BRIEF

from ampfast import backends
from benchmarks import __main__ as command
from benchmarks import kernels, pages
from benchmarks.results import Results, Row, Spread
from benchmarks.timing import Job, Measured


def _job(result):
    def run():
        if callable(result):
            return result()
        if isinstance(result, BaseException):
            raise result
        row = Row("host", result, "float32", "call", "torch", host_us=Spread(1, 2, 3))
        return Measured([row], ["a note"])

    return Job("a job", run)


@pytest.fixture
def runs(monkeypatch, tmp_path):
    """Runs jobs into one folder; returns the exit code."""

    def run(*jobs, more=()):
        monkeypatch.setitem(command.SUBJECTS, "host", lambda on: list(map(_job, jobs)))
        return command.main(["--only", "host", "--folder", str(tmp_path), *more])

    return run


@pytest.mark.parametrize(
    ("middle", "kept", "complete", "exit_code"),
    [
        ("second", ["first", "second", "third"], True, 0),
        (lambda: signal.raise_signal(signal.SIGTERM), ["first"], False, 130),
        (AssertionError("not torch's [bits]"), ["first", "third"], False, 1),
        (lambda: Measured(notes=["FAILED cuda: wrong"]), ["first", "third"], False, 1),
        (MemoryError("too large"), ["first", "third"], False, 0),
        (lambda: torch.empty(1 << 60, dtype=torch.uint8), ["first", "third"], False, 0),
    ],
)
def test_measurements_are_kept_whatever_happens(
    runs, tmp_path, capsys, middle, kept, complete, exit_code
):
    seen = []

    def look():
        seen.append(Results.read(tmp_path / command.JSON))
        return Measured()

    assert runs("first", look, middle, "third") == exit_code
    assert [row.case for row in seen[0].rows] == ["first"] and not seen[0].complete
    results = Results.read(tmp_path / command.JSON)
    assert ([row.case for row in results.rows], results.complete) == (kept, complete)
    assert results.asked == {"quick": False, "only": ["host"]}
    assert results.notes.count("a note") == 1
    lines = capsys.readouterr().out.splitlines()
    assert f"the report is {tmp_path / pages.REPORT}" in lines
    for told in kept:
        assert f"host, {told}, float32, call, torch: 2 us ±50%" in lines
    if isinstance(middle, Exception):
        assert f"{'FAILED' if exit_code else 'skipped'} host: a job: {middle}" in lines
    assert {path.name for path in tmp_path.iterdir()} == {command.JSON, pages.REPORT, pages.PLOTS}
    before = (tmp_path / command.JSON).read_text()
    runs("another")
    assert (tmp_path / (command.EARLIER + command.JSON)).read_text() == before


def test_no_job_is_started_when_the_time_is_up(runs, monkeypatch, tmp_path):
    now = [0.0]
    monkeypatch.setattr(command.time, "monotonic", lambda: now[0])

    def slow():
        now[0] += 60
        return Measured()

    assert runs("first", slow, slow, "late", "later", more=["--limit", "100"]) == 0
    results = Results.read(tmp_path / command.JSON)
    assert ([row.case for row in results.rows], results.complete) == (["first"], False)
    told = "left out host: a job and 1 more: the time is up"
    assert (results.notes, results.seconds) == (["a note", told], 120.0)


def test_the_whole_command_measures_and_reports(monkeypatch, tmp_path):
    monkeypatch.setattr(command, "QUICK", BRIEF)
    monkeypatch.setattr(kernels, "CPU_QUICK_CASES", ("1000x1k",))
    monkeypatch.setattr(kernels, "QUICK_DTYPES", (torch.float32,))
    some = "aten,clip,kernels,steps"
    assert command.main(["--quick", "--only", some, "--folder", str(tmp_path)]) == 0
    results = Results.read(tmp_path / command.JSON)
    assert results.complete and results.asked["quick"]
    assert ",".join({row.subject: None for row in results.rows}) == some
    drawn = {path.name for path in (tmp_path / pages.PLOTS).glob("*.svg")}
    assert drawn == {"kernels.svg", "clip.svg"}


def test_a_rehearsal_of_what_decides_writes_every_subject(monkeypatch, tmp_path):
    # So that what a rehearsal puts there goes with the test.
    monkeypatch.setattr(backends.Choice, "kernels_for", backends.Choice.kernels_for)
    monkeypatch.setenv("AMPFAST_COMMIT", "abc")
    file = tmp_path / "out" / "decisive.json"
    assert command.main(["--only", "decisive", "--rehearse", "--json", str(file)]) == 0
    results = Results.read(file)
    assert {row.subject for row in results.rows} == {"decisive", "host", "training"}
    assert {row.side for row in results.rows} >= {"torch", "ampfast"} and results.commit == "abc"
    assert [path.name for path in file.parent.iterdir()] == [file.name]
