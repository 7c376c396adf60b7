"""Comparison of two results: changes beyond the spread, and rows that only one of them has."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess

import pytest
from sample_results import MACHINE, results

from benchmarks import __main__ as command
from benchmarks import machine
from benchmarks.compare import Comparison
from benchmarks.results import Row, Spread


def _row(low=10, middle=11, high=12, case="list", **more):
    spread = Spread(low, middle, high)
    return Row("kernels", case, "float32", "check", "ampfast", **{"ms": spread, **more})


def _compared(first, second, **changes):
    return Comparison.of(results(first), results(second, **changes))


@pytest.mark.parametrize(
    ("second", "ratio", "verdict"),
    [
        (_row(10, 11, 12), 1.0, "within spread"),
        (_row(5, 6, 9.9), 6 / 11, "faster"),
        (_row(5, 6, 10), 6 / 11, "within spread"),
        (_row(12, 20, 30), 20 / 11, "within spread"),
        (_row(12.1, 20, 30), 20 / 11, "slower"),
    ],
)
def test_faster_means_beyond_both_spreads(second, ratio, verdict):
    (change,) = _compared([_row()], [second]).changes
    assert (change.ratio, change.verdict) == (ratio, verdict)
    assert (change.first, change.second) == (11, second.ms.p50)


def test_counts_differ_by_any_difference():
    first = _row(launches=10, copies=1, syncs=0)
    changes = _compared([first], [_row(launches=3, copies=1, syncs=1)]).changes
    assert [(change.measure, change.verdict) for change in changes[1:]] == [
        ("launches", "fewer"),
        ("syncs", "more"),
    ]
    assert changes[2].ratio is None, "nothing times anything is not one"


def test_slopes_are_compared_though_they_have_no_spread():
    first, second = (_row(ms=None, ns_each=each) for each in (2.0, 1.0))
    (change,) = _compared([first], [second]).changes
    assert (change.measure, change.ratio, change.verdict) == ("ns_each", 0.5, "no spread")


def test_rows_are_paired_by_name_and_the_others_are_counted():
    hot, cold, memory = _row(), _row(case="list, cold"), dataclasses.replace(_row(), subject="a")
    compared = _compared([hot, cold], [memory, dataclasses.replace(cold, ms=Spread(1, 2, 3))])
    assert [(c.row.case, c.verdict) for c in compared.changes] == [("list, cold", "faster")]
    assert compared.summary() == [
        "1 faster",
        "only in the first: kernels, list, float32, rows: 1",
        "only in the second: a, list, float32, rows: 1",
    ]
    assert _compared([hot], [memory]).summary()[0] == "the two have nothing in common"


def test_another_machine_or_torch_is_named_first():
    other = {**MACHINE, "cores": 64, "load": 99.0}
    lines = _compared([], [], machine=other, torch="3.0", complete=False).environments
    assert lines[:3] == [
        "cores differs: 2 and 64",
        "torch differs: 2.99+cpu and 3.0",
        "so times differ for more reasons than ampfast's code",
    ]
    assert "not complete" in lines[4] and "The load average was 99.0" in lines[4]
    assert _compared([], []).environments[0].startswith("first: ampfast 0.0, commit abc, 2030-")


def test_the_table_holds_changes_or_everything():
    compared = _compared([_row(), _row(case="same")], [_row(1, 2, 3), _row(case="same")])
    for everything, cases in ((False, ["list"]), (True, ["list", "same"])):
        lines = compared.table(everything).lines
        assert [line[1] for line in lines] == cases
        assert lines[0][-4:] == ("11", "2", "0.18", "faster")


def test_the_command_prints_it_and_ends_well(tmp_path, capsys):
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    rows = (_row(case="[/b] [red]a"), _row(20, 22, 24, case="[/b] [red]a"))
    for file, row in zip(files, rows, strict=True):
        results([row]).write(file)
    assert command.main(["compare", *map(str, files)]) == 0
    printed = capsys.readouterr().out
    assert "1 slower" in printed
    assert "[/b] [red]a" in printed, "names are no markup"


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
