"""Commands over result files: one line of error for a damaged file, and nothing overwritten."""

from __future__ import annotations

import json

import pytest
from sample_results import cpu_results, gpu_results

from benchmarks import __main__ as command
from benchmarks import machine, readme, whole_files
from benchmarks.results import Results

OUTPUTS = {
    "page": ["out.html"],
    "compare": ["good.json"],
    "plot": ["out.svg"],
    "readme": ["--write", "."],
}
BAD = {
    "missing.json": "No such file or directory",
    "folder.json": "Is a directory",
    "cut.json": "was cut off",
    "bytes.json": "is not a result",
    "other.json": "is not a result",
    "newer.json": "its format is 3",
    "nan.json": "limit of a Goal is nan",
    "endless.json": "limit of a Goal is inf",
    "huge.json": "limit of a Goal is 1000000",
    "below.json": "ms_p50 of a Row is -1.0",
    "load.json": "load of the machine is 'high'",
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Current directory with results of every kind."""
    monkeypatch.chdir(tmp_path)
    gpu_results().write_json(tmp_path / "good.json")
    text = (tmp_path / "good.json").read_text()
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "cut.json").write_text(text[: len(text) // 2])
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00results")
    (tmp_path / "other.json").write_text(json.dumps({"name": "package"}))
    (tmp_path / "newer.json").write_text(json.dumps({**json.loads(text), "format": 3}))
    for name, limit in (("nan", "NaN"), ("endless", "1e999"), ("huge", 10**400)):
        goals = [{"name": "a", "case": "b", "dtype": "c", "sense": "<=", "limit": 0, "ratio": 1.0}]
        changed = json.dumps({**json.loads(text), "goals": goals})
        changed = changed.replace('"limit": 0', f'"limit": {limit}')
        (tmp_path / f"{name}.json").write_text(changed)
    (tmp_path / "below.json").write_text(text.replace('"ms_p50": 1.0', '"ms_p50": -1', 1))
    (tmp_path / "load.json").write_text(text.replace('"load": 0.0', '"load": "high"'))
    for name in ("out.html", "out.svg"):
        (tmp_path / name).write_text("before")
    (tmp_path / "docs").mkdir()
    for page in readme.PAGES:
        (tmp_path / page.place).write_text(f"{readme.START}{readme.END}")
    return tmp_path


def _content(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("what", OUTPUTS)
def test_a_bad_file_is_one_line_of_error_and_nothing_is_overwritten(place, capsys, what, name):
    before = _content(place)
    assert command.main([what, name, *OUTPUTS[what]]) == 1
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert line.startswith(name)
    assert BAD[name] in line
    assert printed.out == ""
    assert _content(place) == before


@pytest.mark.parametrize("what", OUTPUTS)
def test_a_good_file_is_taken_and_leaves_nothing_unfinished(place, what):
    before = set(_content(place))
    assert command.main([what, "good.json", *OUTPUTS[what]]) == 0
    made = {path.relative_to(place).parts[:2] for path in set(_content(place)) - before}
    assert made <= {("docs", "measured")}
    for name in ("out.html", "out.svg"):
        written = (place / name).read_text() != "before"
        assert written is (name in OUTPUTS[what])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["page", "good.json"], "the following arguments are required: page"),
        (["page", "good.json", "cut.json"], "'cut.json' does not end in .html or .htm"),
        (["plot", "good.json", "cut.json"], "'cut.json' does not end in .svg"),
        (["compare", "good.json"], "the following arguments are required: second"),
    ],
)
def test_a_result_file_is_never_taken_for_an_output(place, capsys, arguments, message):
    before = _content(place)
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert _content(place) == before


@pytest.mark.parametrize("what", ["page", "plot"])
def test_an_unwritable_page_is_one_line_of_error(place, capsys, what):
    out = OUTPUTS[what][0]
    assert command.main([what, "good.json", f"nowhere/{out}"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("nowhere/")
    assert "No such file or directory" in line


def test_a_failed_write_leaves_the_file_unchanged(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    cpu_results().write_json(path)
    before = path.read_text()

    def fail(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(path), "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        Results.write_json(gpu_results(), path)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]
    assert whole_files.reason(OSError(28, "No space left on device")) == "No space left on device"


def _group(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


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
        (
            {
                "memory/memory.limit_in_bytes": "1000\n",
                "memory/memory.usage_in_bytes": "900\n",
                "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 300\n",
            },
            400,
        ),
    ],
    ids=["none", "no limit", "second version", "first version"],
)
def test_the_limit_of_a_container_counts_as_memory(tmp_path, files, left):
    _group(tmp_path, files)
    assert machine.left_to_group(tmp_path) == left


def test_lists_that_do_not_fit_are_refused_before_allocation(monkeypatch):
    monkeypatch.setattr(machine, "left_to_group", lambda: 5 << 20)
    cpu = machine.torch.device("cpu")
    assert machine.available_bytes(cpu) <= 5 << 20
    machine.require_memory(1 << 20, cpu)
    with pytest.raises(MemoryError, match="needs 6 MiB, 5 MiB are available"):
        machine.require_memory(6 << 20, cpu)
