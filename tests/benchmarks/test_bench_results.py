"""Result files, tables and pictures, with missing measurements left out."""

from __future__ import annotations

import csv
import json

import pytest
from sample_results import cpu_results, gpu_results, training_results

from benchmarks import machine, report
from benchmarks.results import FORMAT, Results, Row


def test_a_json_file_round_trips_and_names_missing_measurements(tmp_path):
    path = tmp_path / "results.json"
    cpu_results().write_json(path)
    assert Results.read_json(path) == cpu_results()
    content = json.loads(path.read_text())
    assert content["rows"][0]["ms_p50"] is None
    assert content["goals"][0]["met"] is True
    assert content["goals"][0]["ratio"] == 3.02


def test_a_csv_file_has_a_line_for_each_row(tmp_path):
    path = tmp_path / "results.csv"
    cpu_results().write_csv(path)
    lines = list(csv.DictReader(path.read_text().splitlines()))
    assert [line["host_us_p50"] for line in lines] == ["20.0", "5.0", "", ""]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is damaged or was cut off: it is not JSON"),
        ('{"rows": [{"subject": "ho', "is damaged or was cut off: it is not JSON"),
        ("[]", "it holds something else"),
        ("3", "it holds something else"),
        ("{}", "it holds something else"),
        ('{"name": "a package", "version": "1.0"}', "it holds something else"),
        ('{"rows": [{"speed": 1}], "goals": []}', "'speed'"),
        ('{"rows": [7], "goals": []}', "is not a result"),
        ('{"format": 2, "rows": []}', "it has no 'goals'"),
        ('{"format": 3, "rows": [], "goals": []}', "its format is 3; known formats are 1"),
        ('{"format": "two"}', "its format is 'two'; known formats are 1"),
        (f"{'[' * 100_000}", "is not a result"),
    ],
)
def test_a_file_that_is_not_a_result_is_named_with_the_reason(tmp_path, text, why):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other\.json is ") as refused:
        Results.read_json(path)
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda content: content["rows"][0].update(ms_p50="fast"), "ms_p50 of a Row is 'fast'"),
        (lambda content: content["rows"][0].update(path=None), "path of a Row is None"),
        (lambda content: content["rows"][0].update(launches=1.5), "launches of a Row is 1.5"),
        (lambda content: content["goals"][0].update(ratio=None), "ratio of a Goal is None"),
        (lambda content: content["goals"][0].update(sense="=>"), "sense of a Goal is '=>'"),
        (lambda content: content.update(machine=[]), "machine of a Results is []"),
        (lambda content: content.update(notes=[3]), "a note is not a text"),
        (lambda content: content.pop("date"), "date"),
    ],
)
def test_a_value_of_the_wrong_kind_is_found_when_the_file_is_read(tmp_path, change, why):
    path = tmp_path / "results.json"
    cpu_results().write_json(path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"results\.json is not a result") as refused:
        Results.read_json(path)
    assert why in str(refused.value)


def test_files_of_the_first_format_are_read(tmp_path):
    path = tmp_path / "results.json"
    cpu_results().write_json(path)
    content = json.loads(path.read_text())
    assert content.pop("format") == FORMAT
    for name in ("asked", "seconds"):
        del content[name]
    for row in content["rows"]:
        del row["ranks"]
    path.write_text(json.dumps(content))
    assert Results.read_json(path) == cpu_results()


def test_the_committed_results_are_read():
    files = sorted((machine.REPOSITORY / "benchmarks/results").glob("*.json"))
    if not files:
        pytest.skip("there are no results in this copy")
    for path in files:
        assert Results.read_json(path).rows


REQUIRED = {
    *("case", "dtype", "path", "provider", "ms_p20", "ms_p50", "ms_p80", "host_us_p50"),
    *("list_bytes", "bytes", "gb_s", "copy_gb_s", "launches", "syncs"),
}


def test_a_file_has_the_keys_that_readers_rely_on(tmp_path):
    path = tmp_path / "results.json"
    gpu_results().write_json(path)
    content = json.loads(path.read_text())
    assert {"machine", "torch", "triton", "commit", "rows", "goals", "complete"} <= set(content)
    for row in content["rows"]:
        assert set(row) >= REQUIRED
    assert [entry.name for entry in tmp_path.iterdir()] == ["results.json"]


def _tables(results):
    tables = []
    report.show(results, tables.append)
    return {table.title: table for table in tables}


def test_the_tables_hold_a_line_for_each_row_and_a_dash_for_missing_values():
    tables = _tables(gpu_results())
    kernels = tables["Kernels over gradient lists"]
    assert len(kernels.lines) == 16
    assert kernels.sections == {8, 16}
    header = kernels.names + kernels.numbers
    line = dict(zip(header, kernels.lines[1], strict=True))
    assert line["list"] == "1000x1k, cold"
    assert line["provider"] == "triton"
    assert (line["GB/s"], line["% of copy"], line["x torch"]) == ("2,700", "90.0", "1.80")
    assert (line["ms p20"], line["host us"], line["kernels"]) == ("-", "20.0", "1")
    assert line["timed by"] == "graph"
    steps = tables["Whole steps of the scaler, scale(loss) to update()"]
    assert steps.lines[2][-1] == "11.3"


def test_an_unknown_subject_has_a_table_of_its_values():
    rows = [
        Row("news", "a", "float32", "path", "torch", ms_p50=2.0, over_none=1.25),
        Row("news", "a", "float32", "path", "cpu", ms_p50=1.0, tensors=12345),
    ]
    table = _tables(cpu_results(rows=rows))["News"]
    assert table.numbers == ("tensors", "p50", "over none")
    assert [line[4:] for line in table.lines] == [("-", "2.00", "1.250"), ("12,345", "1.00", "-")]


def test_training_and_growth_have_tables():
    tables = list(_tables(training_results()).values())
    assert [len(table.lines) for table in tables] == [3, 3, 10]
    assert tables[0].lines[1][-1] == "1.250"


def test_a_cpu_has_no_gpu_columns():
    (table,) = (table for title, table in _tables(cpu_results()).items() if "Kernels" in title)
    assert "kernels" not in table.numbers


def test_a_text_table_has_aligned_columns():
    table = report.Table("Title", ("name", "kind"), ("number",))
    table.add("a", "long", "1.00")
    table.add_section()
    table.add("long", "b", "-")
    table.add_section()
    assert table.plain().split("\n") == [
        "Title",
        "name  kind  number",
        "----  ----  ------",
        "a     long    1.00",
        "",
        "long  b          -",
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0.00"),
        (0.0043, "0.0043"),
        (0.5, "0.50"),
        (12.34, "12.3"),
        (1234, "1,234"),
    ],
)
def test_numbers_have_three_digits_and_no_exponent(value, text):
    assert report.number(value) == text
