"""Comparison of two results: changes beyond the spread, and rows that only one of them has."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess

import pytest
from sample_results import cpu_results, training_results

from benchmarks import __main__ as command
from benchmarks import machine, terminal
from benchmarks.compare import Comparison
from benchmarks.results import Row


def _row(low, middle, high, case="list", **more):
    return Row(
        *("kernels", case, "float32", "check", "cpu"),
        **{"ms_p20": low, "ms_p50": middle, "ms_p80": high, **more},
    )


def _compared(first, second, **changes):
    return Comparison.of(cpu_results(rows=first), cpu_results(rows=second, **changes))


@pytest.mark.parametrize(
    ("second", "ratio", "verdict"),
    [
        (_row(10, 11, 12), 1.0, "within spread"),
        (_row(5, 6, 9.9), 6 / 11, "faster"),
        (_row(5, 6, 10), 6 / 11, "within spread"),
        (_row(12, 20, 30), 20 / 11, "within spread"),
        (_row(12.1, 20, 30), 20 / 11, "slower"),
        (_row(None, 99, None), 9.0, "within spread"),
    ],
)
def test_faster_means_beyond_both_spreads(second, ratio, verdict):
    (change,) = _compared([_row(10, 11, 12)], [second]).changes
    assert (change.ratio, change.verdict) == (ratio, verdict)
    assert (change.first, change.second) == (11, second.ms_p50)


def test_counts_differ_by_any_difference():
    first = _row(10, 11, 12, launches=10, syncs=1, collectives=0)
    second = _row(10, 11, 12, launches=3, syncs=1, collectives=1)
    changes = _compared([first], [second]).changes
    assert [(c.measure, c.verdict) for c in changes[1:]] == [
        ("launches", "fewer"),
        ("collectives", "more"),
    ]
    assert changes[2].ratio is None, "nothing times anything is not one"


def test_slopes_and_memory_are_compared_though_they_have_no_spread():
    def row(slope, memory):
        return Row("growth", "a", "float32", "b", "cpu", ns_each=slope, extra_bytes=memory)

    changes = _compared([row(2.0, 512)], [row(1.0, 1024)]).changes
    assert [(c.measure, c.first, c.second, c.ratio) for c in changes] == [
        ("ns each", 2.0, 1.0, 0.5),
        ("extra bytes", 512, 1024, 2.0),
    ]
    assert {change.verdict for change in changes} == {"no spread"}


def test_names_of_files_are_no_markup(capsys):
    rows = [_row(1, 1, 1, case="[/b] [red]a")]
    shown = terminal.make()
    _compared(rows, rows).show(shown.line, shown.table, everything=True)
    assert "[/b] [red]a" in capsys.readouterr().out


def test_rows_are_paired_by_their_names():
    hot, cold = _row(1, 1, 1, lists=1), _row(2, 2, 2, lists=25)
    other_cold = dataclasses.replace(cold, lists=8, ms_p50=3)
    again = dataclasses.replace(hot, ms_p50=5)
    compared = _compared([hot, cold, again], [other_cold, again, hot])
    assert [(c.row.lists, c.first, c.second) for c in compared.changes] == [
        *((1, 1, 5), (8, 2, 3), (1, 5, 1))
    ]
    assert compared.only_first == compared.only_second == []
    grown = [row for row in training_results().rows if row.subject == "growth"]
    assert len(_compared(grown, grown).changes) == len(grown)


def test_a_cpus_host_time_is_compared_once():
    row = dataclasses.replace(
        _row(1, 1, 1), subject="host", host_us_p20=1e3, host_us_p50=1e3, host_us_p80=1e3
    )
    assert [change.measure for change in _compared([row], [row]).changes] == ["host us"]


def _shown(compared, everything=False):
    lines, tables = [], []
    compared.show(lines.append, tables.append, everything)
    return lines, tables


def test_another_machine_or_torch_is_named_first():
    machine = {**cpu_results().machine, "cores": 64, "load": 9.0, "new fact": 1}
    rows = [_row(1, 1, 1)]
    lines, _ = _shown(_compared(rows, rows, machine=machine, torch="3.0", complete=False))
    assert lines[:3] == [
        "cores differs: 2 and 64",
        "torch differs: 2.99 and 3.0",
        "so times differ for more reasons than ampfast's code",
    ]
    assert lines[4].endswith("load 9.0, not complete")
    lines, _ = _shown(_compared(rows, rows))
    assert lines[0].startswith("first: ampfast 0.0, commit abc, 2030-01-02")


def test_rows_of_one_side_are_counted_by_list():
    shared = _row(1, 1, 1)
    other = dataclasses.replace(shared, case="other", dtype="float16")
    memory = dataclasses.replace(shared, subject="memory")
    lines, tables = _shown(_compared([shared, other, memory], [shared]))
    assert tables == [], "nothing changed"
    assert lines[-3:] == [
        "1 within spread",
        "only in the first: kernels other (float16), 1 row",
        "only in the first: all of memory, 1 row",
    ]
    lines, _ = _shown(_compared([shared], [memory]))
    assert "the two have nothing in common" in lines


def test_the_table_holds_changes_or_everything():
    first = [_row(10, 11, 12), _row(10, 11, 12, "same", tensors=7)]
    second = [_row(1, 2, 3), _row(10, 11, 12, "same", tensors=7)]
    compared = _compared(first, second)
    for everything, cases in ((False, ["list"]), (True, ["list", "same, 7 tensors"])):
        _, (table,) = _shown(compared, everything)
        assert [line[1] for line in table.lines] == cases
        assert table.lines[0][-3:] == ("2.00", "0.182", "faster")


@pytest.mark.parametrize("with_rich", [True, False])
def test_the_command_prints_it_and_ends_well(monkeypatch, tmp_path, capsys, with_rich):
    if not with_rich:
        monkeypatch.setattr(terminal, "Console", None)
    elif terminal.Console is None:
        pytest.skip("the tables are drawn by rich")
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, row in zip(files, (_row(10, 11, 12), _row(20, 22, 24)), strict=True):
        cpu_results(rows=[row]).write_json(file)
    assert command.main(["compare", *map(str, files)]) == 0
    printed = capsys.readouterr().out
    assert "slower" in printed
    assert "2.000" in printed


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_asks_for_both_files():
    def make(*arguments):
        return subprocess.run(
            ["make", *arguments, "bench-compare", "VENV=", "PYTHON=true"],
            cwd=machine.REPOSITORY,
            capture_output=True,
            text=True,
        )

    asked = make("A=a.json")
    assert asked.returncode == 2
    assert "make bench-compare A=before.json B=after.json" in asked.stderr
    assert 'true -m benchmarks compare "a.json" "b.json"' in make("A=a.json", "B=b.json").stdout
