"""Result files: small, read as they were written, and one clear line for anything else."""

from __future__ import annotations

import json
import math
import sys

import pytest
from sample_results import cpu_results, gpu_results

from benchmarks import __main__ as command
from benchmarks import machine, readme
from benchmarks.results import FORMAT, Results

ROW = {"subject": "a", "case": "b", "dtype": "c", "call": "d", "side": "e"}
COMMANDS = {"compare": ["good.json"], "report": [], "readme": ["--write", "."]}
BAD = {
    "missing.json": "No such file or directory",
    "folder.json": "Is a directory",
    "cut.json": "is damaged or cut off",
    "bytes.json": "is not a result",
    "list.json": "it has no rows",
    "other.json": "it has no rows",
    "older.json": "is of version 2, not 3: `make bench` makes a new one",
    "first.json": "is of version 1, not 3: `make bench` makes a new one",
    "unknown.json": "unexpected keyword argument 'speed'",
    "nan.json": "limit is nan",
    "text.json": "ms is [1, 'fast', 2]",
    "short.json": "it has no 'machine'",
    "digits.json": "is not a result",
}
# Each makes a good file a bad one: top level, machine, and a row or goal.
WRONG = {
    "machine is None": {"machine": None},
    "machine is []": {"machine": []},
    "machine.load is 'high'": {"machine": {"load": "high"}},
    "machine.cores is [2]": {"machine": {"cores": [2]}},
    "date is None": {"date": None},
    "notes is 3": {"notes": 3},
    "notes is [3]": {"notes": [3]},
    "seconds is 'long'": {"seconds": "long"},
    "asked is []": {"asked": []},
    "rows is None": {"rows": None},
    "rows is [1]": {"rows": [1]},
    "case is 1": {"rows": [{**ROW, "case": 1}]},
    "host_us is 5": {"rows": [{**ROW, "host_us": 5}]},
    "ms is [0, 0, 0]": {"rows": [{**ROW, "ms": [0, 0, 0]}]},
    "vs_torch is 'x'": {"rows": [{**ROW, "vs_torch": "x"}]},
    "bytes is 1000": {"rows": [{**ROW, "bytes": 10**400}]},
    "ratio is 1": {"goals": [{**ROW, "over": "f", "ratio": 1, "limit": 1}]},
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Current directory with results of every kind."""
    monkeypatch.chdir(tmp_path)
    cpu_results().write(tmp_path / "good.json")
    text = (tmp_path / "good.json").read_text()
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00results")

    def changed(**changes):
        return json.dumps({**json.loads(text), **changes})

    goal = {**ROW, "over": "f", "ratio": [1, 1, 1], "limit": math.nan}
    for name, content in {
        "cut": text[: len(text) // 2],
        "list": "[]",
        "other": '{"name": "a package"}',
        "older": changed(format=2),
        "first": '{"rows": [], "goals": []}',
        "unknown": changed(rows=[{**ROW, "speed": 1}]),
        "nan": changed(goals=[goal]),
        "text": changed(rows=[{**ROW, "ms": [1, "fast", 2]}]),
        "short": json.dumps({"format": FORMAT, "rows": []}),
        "digits": f"[{'1' * 5000}]",
    }.items():
        (tmp_path / f"{name}.json").write_text(content)
    (tmp_path / "docs").mkdir()
    for page in readme.PAGES:
        (tmp_path / page).write_text(f"{readme.START}{readme.END}")
    return tmp_path


def _content(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("what", COMMANDS)
def test_a_bad_file_is_one_line_of_error_and_nothing_is_overwritten(place, capsys, what, name):
    before = _content(place)
    assert command.main([what, name, *COMMANDS[what]]) == 1
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert line.startswith(name)
    assert BAD[name] in line
    assert printed.out == ""
    assert _content(place) == before


@pytest.mark.parametrize("what", COMMANDS)
@pytest.mark.parametrize("told", WRONG)
def test_a_value_of_another_type_is_one_line_of_error(place, capsys, what, told):
    content = {**json.loads((place / "good.json").read_text()), **WRONG[told]}
    (place / "bad.json").write_text(json.dumps(content))
    assert command.main([what, "bad.json", *COMMANDS[what]]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("bad.json is not a result of `python -m benchmarks`: " + told)


@pytest.mark.parametrize("what", ["report", "readme"])
def test_without_matplotlib_one_line_names_it_and_nothing_is_overwritten(
    place, capsys, monkeypatch, what
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    before = _content(place)
    assert command.main([what, "good.json", *COMMANDS[what]]) == 1
    assert capsys.readouterr().err == "pictures need matplotlib: pip install matplotlib\n"
    assert _content(place) == before


@pytest.mark.parametrize("made", [cpu_results, gpu_results])
def test_a_file_is_read_as_it_was_written(tmp_path, made):
    path = tmp_path / "results.json"
    made().write(path)
    assert Results.read(path) == made()
    assert [entry.name for entry in tmp_path.iterdir()] == ["results.json"]
    names = [row.name for row in made().rows]
    assert len(set(names)) == len(names), "a name is that of one row"


def test_subjects_of_earlier_files_are_not_read(tmp_path):
    """Reads a file with rows whose fields no longer exist."""
    path = tmp_path / "results.json"
    made = cpu_results()
    made.write(path)
    content = json.loads(path.read_text())
    name = {"case": "a", "dtype": "b", "call": "c", "side": "d"}
    content["rows"].insert(0, {"subject": "memory", **name, "extra_bytes": 1})
    content["goals"].append({"subject": "ranks", **name, "ratio": [1, 1, 1]})
    path.write_text(json.dumps(content))
    assert Results.read(path) == made


@pytest.mark.parametrize(("load", "told"), [(0.0, 0), (3.0, 0), (3.1, 1)])
def test_only_a_load_beyond_three_halves_of_a_core_is_a_caveat(load, told):
    made = cpu_results(machine={"cores": 2, "load": load})
    assert len(made.caveats) == told


def test_a_failed_write_leaves_the_file_unchanged(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    cpu_results().write(path)
    before = path.read_text()

    def fail(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(path), "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        gpu_results().write(path)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


def test_committed_results_are_read_and_small():
    files = list((machine.REPOSITORY / "benchmarks/results").glob("*.json"))
    assert files
    for path in files:
        assert Results.read(path).rows
        assert path.stat().st_size < 300_000


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({}, None),
        ({"memory.max": "max\n", "memory.current": "10\n", "memory.stat": "anon 1\n"}, None),
        (
            {
                "memory.max": "1000\n",
                "memory.current": "700\n",
                "memory.stat": "anon 500\ninactive_file 150\n",
            },
            450,
        ),
    ],
    ids=["none", "no limit", "a limit"],
)
def test_the_limit_of_a_container_counts_as_memory(tmp_path, files, left):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert machine.left_to_group(tmp_path) == left


def test_lists_that_do_not_fit_are_refused_before_allocation(monkeypatch):
    monkeypatch.setattr(machine, "left_to_group", lambda: 5 << 20)
    cpu = machine.torch.device("cpu")
    machine.require_memory(1 << 20, cpu)
    with pytest.raises(MemoryError, match="needs 6 MiB, 5 MiB are available"):
        machine.require_memory(6 << 20, cpu)
