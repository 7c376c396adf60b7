"""Command line of the benchmarks: results are kept in spite of failures, with rich and without."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
import weakref

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import machine, outputs, readme, terminal, whole_files
from benchmarks.harness import Job, Measured
from benchmarks.results import Results, Row


def _job(result):
    def run():
        if isinstance(result, BaseException):
            raise result
        return Measured([Row("host", result, "float32", "path", "torch")], notes=["a note"])

    return Job("a job", run)


@pytest.fixture(params=["rich", "plain"])
def printed(request, monkeypatch):
    """Runs a test with and without rich."""
    if request.param == "plain":
        monkeypatch.setattr(terminal, "Console", None)
    elif terminal.Console is None:
        pytest.skip("the tables are drawn by rich")


@pytest.mark.usefixtures("printed")
@pytest.mark.parametrize(
    ("middle", "kept", "complete", "exit_code"),
    [
        ("second", ["first", "second", "third"], True, 0),
        (KeyboardInterrupt(), ["first"], False, 130),
        (AssertionError("not torch's [bits]"), ["first", "third"], False, 1),
        (MemoryError("too large"), ["first", "third"], False, 0),
        (torch.OutOfMemoryError("CUDA out of memory"), ["first", "third"], False, 0),
    ],
    ids=["all", "Ctrl-C", "wrong", "no memory", "no GPU memory"],
)
def test_measurements_are_kept_whatever_happens(
    monkeypatch, tmp_path, capsys, middle, kept, complete, exit_code
):
    jobs = [_job("first"), _job(middle), _job("third")]
    monkeypatch.setattr(command.host_time, "jobs", lambda *arguments: jobs)
    path = tmp_path / "results.json"
    arguments = ["--only", "host", "--device", "cpu", "--json", str(path)]
    assert command.main([*arguments, "--csv", str(tmp_path / "results.csv")]) == exit_code
    results = Results.read_json(path)
    assert [row.case for row in results.rows] == kept
    assert results.complete is complete
    assert (tmp_path / "results.csv").read_text().count("\n") == 1 + len(kept)
    printed = capsys.readouterr().out
    for case in kept:
        assert case in printed
    if isinstance(middle, Exception):
        assert str(middle) in printed
        assert any(str(middle) in note for note in results.notes)
    assert results.notes.count("a note") == 1


def test_memory_that_torch_cannot_get_on_a_cpu_is_no_failure(monkeypatch, capsys):
    jobs = [Job("large", lambda: torch.empty(1 << 60, dtype=torch.uint8)), _job("second")]
    monkeypatch.setattr(command.host_time, "jobs", lambda *arguments: jobs)
    assert command.main(["--only", "host", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "skipped host: large: " in printed and "FAILED" not in printed


def test_a_run_that_measured_nothing_leaves_an_earlier_file(monkeypatch, tmp_path):
    path = tmp_path / "results.json"
    arguments = ["--only", "host", "--device", "cpu", "--json", str(path)]
    arguments += ["--csv", str(tmp_path / "results.csv")]
    monkeypatch.setattr(command.host_time, "jobs", lambda *arguments: [_job("first")])
    assert command.main(arguments) == 0
    before = [file.read_bytes() for file in sorted(tmp_path.iterdir())]
    monkeypatch.setattr(command.host_time, "jobs", lambda *arguments: [_job(KeyboardInterrupt())])
    assert command.main(arguments) == command.INTERRUPTED
    assert [file.read_bytes() for file in sorted(tmp_path.iterdir())] == before


def test_the_file_is_written_after_each_job_as_incomplete(monkeypatch, tmp_path):
    path = tmp_path / "results.json"
    seen = []

    def look():
        seen.append(Results.read_json(path))
        return Measured()

    jobs = [_job("first"), Job("looks", look)]
    monkeypatch.setattr(command.host_time, "jobs", lambda *arguments: jobs)
    assert command.main(["--only", "host", "--device", "cpu", "--json", str(path)]) == 0
    assert [row.case for row in seen[0].rows] == ["first"]
    assert not seen[0].complete
    assert Results.read_json(path).complete


def test_no_job_is_started_when_the_time_is_up(monkeypatch, tmp_path):
    now = [0.0]
    monkeypatch.setattr(command.time, "monotonic", lambda: now[0])

    def slow():
        now[0] += 60
        return Measured([Row("host", "slow", "float32", "path", "torch")])

    jobs = [Job("slow", slow), Job("slow", slow), _job("late")]
    monkeypatch.setattr(command.host_time, "jobs", lambda *arguments: jobs)
    path = tmp_path / "results.json"
    arguments = ["--only", "host", "--device", "cpu", "--limit", "100", "--json", str(path)]
    assert command.main(arguments) == 0
    results = Results.read_json(path)
    assert [row.case for row in results.rows] == ["slow", "slow"]
    assert not results.complete
    assert results.notes == ["left out host: a job: the time is up"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_request_to_end_is_not_lost_where_python_drops_it(monkeypatch, tmp_path, number):
    dropped = []
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: dropped.append(lost.exc_type))

    def told_in_a_callback():
        optimizer = torch.optim.SGD([torch.zeros(1)])
        reference = weakref.ref(optimizer, lambda _: signal.raise_signal(number))
        del optimizer
        assert reference() is None
        return _job("second").run()

    jobs = [_job("first"), Job("told", told_in_a_callback), _job("third")]
    monkeypatch.setattr(command.host_time, "jobs", lambda *arguments: jobs)
    path = tmp_path / "results.json"
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    code = command.main(["--only", "host", "--device", "cpu", "--json", str(path)])
    assert dropped == [KeyboardInterrupt]
    assert code == command.INTERRUPTED
    results = Results.read_json(path)
    assert [row.case for row in results.rows] == ["first", "second"]
    assert not results.complete
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_who_asks_again_while_files_are_written_gets_them_whole(monkeypatch, tmp_path):
    finish = outputs.Outputs.finish

    def asked_again(written, results):
        signal.raise_signal(signal.SIGTERM)
        finish(written, results)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(outputs.Outputs, "finish", asked_again)
    jobs = [_job("first"), _job(KeyboardInterrupt())]
    monkeypatch.setattr(command.host_time, "jobs", lambda *arguments: jobs)
    arguments = ["--only", "host", "--device", "cpu", "--folder", str(tmp_path)]
    assert command.main(arguments) == command.INTERRUPTED
    for name in (outputs.JSON, outputs.CSV, outputs.PAGE):
        assert (tmp_path / name).exists()


@pytest.mark.parametrize("option", ["--folder", "--json", "--csv"])
def test_an_unwritable_file_is_reported_before_measuring(monkeypatch, tmp_path, capsys, option):
    def refuses(dir):
        raise PermissionError(errno.EACCES, "Permission denied", str(dir))

    monkeypatch.setattr(whole_files.tempfile, "TemporaryFile", refuses)
    monkeypatch.setattr(command, "_jobs", lambda *arguments: pytest.fail("it measured"))
    path = tmp_path if option == "--folder" else tmp_path / "results"
    with pytest.raises(SystemExit) as ended:
        command.main(["--only", "host", "--device", "cpu", option, str(path)])
    assert ended.value.code == 2
    assert f"Permission denied: '{tmp_path}'" in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(os, "posix_spawn"), reason="sends a POSIX signal")
def test_a_terminated_run_writes_its_results(tmp_path):
    path = tmp_path / "results.json"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "benchmarks", "--only", "host", "--device", "cpu"),
            *("--json", str(path)),
        ],
        cwd=machine.REPOSITORY,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 600
    while not path.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == command.INTERRUPTED, errors
    results = Results.read_json(path)
    assert results.rows
    assert not results.complete


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--only", "host,gpu"],
            "'gpu' is not among loops, host, mlp, training, growth, kernels, steps",
        ),
        (["--cases", "1000x2k"], "'1000x2k' is not among"),
        (["--dtypes", "float8"], "'float8' is not among"),
        (["--threads", "0"], "must be at least 1"),
        (["--device", "mps"], "must be cpu or cuda"),
        (["--json", "missing/directory/file"], "is not a directory"),
        (["--plot", "missing/directory/file.svg"], "is not a directory"),
        (["--plot", "a.png"], "'a.png' does not end in .svg"),
        (["--folder", __file__], "File exists"),
        (["--json", "."], "is a directory, not a file to write"),
        (["--json", "a.json", "--csv", "./a.json"], "must name different files"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_measured(capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_missing_gpu_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        command.main(["--device", "cuda"])
    assert "torch sees no GPU" in capsys.readouterr().err
    assert machine.default_device() == torch.device("cpu")


@pytest.mark.parametrize("name", ["triton", "fastest"])
def test_a_backend_that_cannot_run_is_refused_before_anything_is_measured(
    monkeypatch, tmp_path, capsys, name
):
    monkeypatch.setenv("AMPFAST_BACKEND", name)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(SystemExit) as stopped:
        command.main(["--device", "cpu", "--json", str(tmp_path / "results.json")])
    assert stopped.value.code == 2
    assert "AMPFAST_BACKEND" in capsys.readouterr().err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def runs(monkeypatch, tmp_path):
    """Runs jobs into one folder; returns it with the exit code."""

    def run(*results):
        monkeypatch.setattr(command.host_time, "jobs", lambda *arguments: map(_job, results))
        folder = tmp_path / "new" / "folder"
        return folder, command.main(["--only", "host", "--device", "cpu", "--folder", str(folder)])

    return run


def test_a_folder_has_all_that_was_measured_in_every_form(runs, capsys):
    folder, code = runs("first", "second")
    assert code == 0
    assert {path.name for path in folder.iterdir()} == {
        *(outputs.JSON, outputs.CSV, outputs.PAGE, outputs.PLOTS)
    }
    results = Results.read_json(folder / outputs.JSON)
    assert results.asked["subjects"] == ["host"]
    assert results.seconds > 0
    page = (folder / outputs.PAGE).read_text()
    assert "first" in page and "second" in page and "Not complete" not in page
    assert f"the report is {folder / outputs.PAGE}" in capsys.readouterr().out


def test_an_earlier_run_is_put_away_unless_the_new_one_has_measured_nothing(runs):
    folder, _ = runs("first")
    before = (folder / outputs.JSON).read_text()
    runs(MemoryError("too large"))
    assert (folder / outputs.JSON).read_text() == before
    assert not (folder / outputs.EARLIER).exists()
    runs("second", KeyboardInterrupt())
    (earlier,) = (folder / outputs.EARLIER).iterdir()
    assert earlier.read_text() == before
    assert [row.case for row in Results.read_json(folder / outputs.JSON).rows] == ["second"]
    assert "Not complete" in (folder / outputs.PAGE).read_text()


def test_an_unwritable_file_stops_nothing_and_is_reported_once(monkeypatch, tmp_path, capsys):
    folder = tmp_path / "folder"

    def lose_the_folder():
        folder.rmdir()
        return _job("first").run()

    jobs = [Job("loses", lose_the_folder), _job("second")]
    monkeypatch.setattr(command.host_time, "jobs", lambda *arguments: jobs)
    folder.mkdir()
    kept, lost = tmp_path / "results.csv", folder / "results.json"
    arguments = ["--only", "host", "--device", "cpu", "--csv", str(kept), "--json", str(lost)]
    assert command.main(arguments) == 1
    assert kept.read_text().count("\n") == 3
    printed = capsys.readouterr().out.replace("\n", "")
    assert printed.count("was not written: No such file or directory") == 1


def test_a_failing_part_is_reported_and_the_others_are_measured(runs, capsys):
    folder, code = runs("first", KeyError("shape"), "third")
    assert code == 1
    results = Results.read_json(folder / outputs.JSON)
    assert [row.case for row in results.rows] == ["first", "third"]
    assert results.notes == ["a note", "FAILED host: a job: 'shape'"]


def test_one_list_is_measured_drawn_and_put_on_a_page(tmp_path, capsys):
    """Runs the whole command on the smallest list."""
    files = {name: tmp_path / f"r.{name}" for name in ("json", "csv", "svg")}
    code = command.main(
        [
            *("--quick", "--device", "cpu", "--only", "kernels,steps"),
            *("--cases", "1000x1k", "--dtypes", "float32"),
            *("--json", str(files["json"]), "--csv", str(files["csv"])),
            *("--plot", str(files["svg"])),
        ]
    )
    assert code == 0
    content = json.loads(files["json"].read_text())
    assert content["complete"] is True
    assert {row["path"] for row in content["rows"]} >= {"check", "unscale", "full step", "copy"}
    assert "unscale, float32" in files["svg"].read_text()
    assert "unscale+norm: not measured" in capsys.readouterr().out

    (tmp_path / "docs").mkdir()
    for page in readme.PAGES:
        (tmp_path / page.place).write_text(f"{readme.START}{readme.END}")
    assert command.main(["readme", str(files["json"])]) == 0
    assert capsys.readouterr().out == readme.WHOLE.section(files["json"])
    assert command.main(["readme", str(files["json"]), "--write", str(tmp_path)]) == 0
    for page in readme.PAGES:
        assert page.section_in(tmp_path) == page.section(files["json"])
