"""Files, tables and pictures show what was measured, and say what was not."""

from __future__ import annotations

import csv
import dataclasses
import json

import pytest

from benchmarks import host_time, machine, plot, readme, report
from benchmarks.results import Goal, Results, Row


def _results(**changes):
    results = Results(
        machine={"cpu": "a cpu", "cores": 2, "threads": 1, "load": 0.0},
        torch="2.99",
        triton=None,
        ampfast="0.0",
        commit="abc",
        date="2030-01-02T03:04:05+00:00",
        rows=[
            Row("host", "10x4", "float32", host_time.UNSCALE, "torch", host_us_p50=20.0),
            Row(
                "host",
                "10x4",
                "float32",
                host_time.UNSCALE,
                "cpu",
                host_us_p50=5.0,
                vs_torch=4.1,
            ),
            Row("kernels", "1000x1k", "float16", "unscale", "torch", ms_p50=1.5),
            Row(
                "kernels",
                "1000x1k",
                "float16",
                "unscale",
                "cpu",
                ms_p50=0.5,
                vs_torch=3.02,
            ),
        ],
        goals=[Goal("faster", "1000x1k", "float16", ">=", 2.5, 3.02, 2.9, 3.1)],
    )
    return dataclasses.replace(results, **changes)


def test_a_json_file_reads_back_as_it_was_and_names_what_was_not_measured(tmp_path):
    path = tmp_path / "results.json"
    _results().write_json(path)
    assert Results.read_json(path) == _results()
    content = json.loads(path.read_text())
    assert content["rows"][0]["ms_p50"] is None
    assert content["goals"][0]["met"] is True
    assert content["goals"][0]["ratio"] == 3.02


def test_a_csv_file_has_a_line_for_each_row(tmp_path):
    path = tmp_path / "results.csv"
    _results().write_csv(path)
    lines = list(csv.DictReader(path.read_text().splitlines()))
    assert [line["host_us_p50"] for line in lines] == ["20.0", "5.0", "", ""]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": [{"speed": 1}], "goals": []}'])
def test_a_file_that_is_not_a_result_is_named(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other\.json is not a result"):
        Results.read_json(path)


def test_the_section_shows_figures_of_the_file_and_says_what_was_not_measured(tmp_path):
    path = tmp_path / "results.json"
    _results().write_json(path)
    section = readme.markdown(path)
    assert "a cpu (2 cores, threads: 1) with torch 2.99, commit abc, 2030-01-02." in section
    assert "| 10 | unscale_ + update | 20.0 | 5.0 | 4.1x |" in section
    not_measured = "not measured | not measured | not measured |"
    assert f"| 1000x1k | float16 | 1.500 | 0.500 | 3.02x | {not_measured}" in section
    assert "On GPUs: not measured." in section
    assert "not complete" not in section
    _results(complete=False).write_json(path)
    assert "The run was not complete." in readme.markdown(path)


def test_only_what_stands_between_the_markers_is_replaced(tmp_path):
    page = tmp_path / "README.md"
    page.write_text(f"before\n{readme.START}\nold\n{readme.END}\nafter\n")
    readme.write(page, "new\n")
    readme.write(page, "newer\n")
    assert page.read_text() == f"before\n{readme.START}\nnewer\n{readme.END}\nafter\n"
    assert readme.section_of(page) == "newer\n"


@pytest.mark.parametrize("text", ["", readme.START, readme.END + readme.START, 2 * readme.START])
def test_a_page_without_the_markers_is_left_alone(tmp_path, text):
    page = tmp_path / "README.md"
    page.write_text(text)
    with pytest.raises(ValueError, match="must contain"):
        readme.write(page, "new\n")
    assert page.read_text() == text


def test_the_readme_agrees_with_the_results_that_it_names():
    page = machine.REPOSITORY / "README.md"
    if not page.exists() or readme.START not in page.read_text():
        pytest.skip("README.md has no performance section")
    section = readme.section_of(page)
    if not section:
        pytest.skip("the performance section of README.md is empty")
    places = {
        path: section.find(f"({path.relative_to(machine.REPOSITORY).as_posix()})")
        for path in (machine.REPOSITORY / "benchmarks/results").glob("*.json")
    }
    named = sorted((path for path, place in places.items() if place >= 0), key=places.get)
    assert named, "the section must name a file of benchmarks/results"
    assert section == readme.markdown(*named)


REQUIRED = {
    *("case", "dtype", "path", "provider", "ms_p20", "ms_p50", "ms_p80", "host_us_p50"),
    *("list_bytes", "bytes", "gb_s", "copy_gb_s", "launches", "syncs"),
}


def test_a_file_has_the_keys_that_readers_rely_on(tmp_path):
    path = tmp_path / "results.json"
    _gpu_results().write_json(path)
    content = json.loads(path.read_text())
    assert {"machine", "torch", "triton", "commit", "rows", "goals", "complete"} <= set(content)
    for row in content["rows"]:
        assert set(row) >= REQUIRED
    assert [entry.name for entry in tmp_path.iterdir()] == ["results.json"]


def _gpu_results(**changes):
    rows = []
    for case in ("1000x1k", "gpt2_xl"):
        shared = {"lists": 25 if case == "1000x1k" else 1, "list_bytes": 4000}
        for path in ("check", "unscale"):
            for provider, gb_s in (("torch", 1500.0), ("triton", 2700.0), ("cuda", 2600.0)):
                rows.append(
                    Row(
                        *("kernels", case, "float32", path, provider),
                        ms_p50=1.0,
                        host_us_p50=20.0,
                        gb_s=gb_s,
                        copy_gb_s=3000.0,
                        launches=1,
                        syncs=0,
                        timer="graph",
                        vs_torch=None if provider == "torch" else gb_s / 1500,
                        **shared,
                    )
                )
        for path, gb_s in (("copy", 3000.0), ("copy of half", 2900.0)):
            rows.append(
                Row(
                    *("kernels", case, "float32", path, "torch"),
                    ms_p50=0.5,
                    gb_s=gb_s,
                    copy_gb_s=gb_s,
                    **shared,
                )
            )
    steps = [
        ("full step, fused", "torch", 900.0, 17, None),
        ("full step, fused", "triton", 90.0, 3, 10.0),
        ("step_and_update, fused", "triton", 80.0, 2, 11.3),
    ]
    for path, provider, microseconds, launches, faster in steps:
        rows.append(
            Row(
                *("steps", "1000x1k", "float32", path, provider),
                ms_p50=0.1,
                host_us_p50=microseconds,
                launches=launches,
                syncs=0,
                lists=8,
                host_vs_torch=faster,
                timer="events",
            )
        )
    gpu = {"gpu": "a gpu", "driver": "1.2", "tensors_per_launch": 110}
    machine = {**_results().machine, **gpu}
    changes = {"rows": rows, "goals": [], "machine": machine, "triton": "3.6", **changes}
    return _results(**changes)


def test_the_section_of_a_gpu_has_a_line_for_each_backend_and_step(tmp_path):
    path = tmp_path / "gpu.json"
    _gpu_results().write_json(path)
    section = readme.markdown(path)
    assert "Measured on a gpu (driver 1.2), a cpu" in section
    assert "torch 2.99 (110 tensors a launch), triton 3.6, commit abc" in section
    assert "| gpt2_xl | float32 | triton | 1.000 | 1.000 | 1.80x | 90% | 1.000 | 1.80x | 90% |" in (
        section
    )
    assert "| gpt2_xl | float32 | cuda |" in section
    step = "| 1000x1k, cold | float32 | triton | step_and_update, fused | 900.0 | 80.0 | 11.3x |"
    assert f"{step} 0.100 | 0.100 | 17 | 2 | 0 | 0 |" in section
    assert "On GPUs: not measured" not in section
    assert "MiB" not in section


def test_a_section_of_two_files_says_of_neither_that_gpus_were_not_measured(tmp_path):
    cpu, gpu = tmp_path / "cpu.json", tmp_path / "gpu.json"
    _results().write_json(cpu)
    _gpu_results().write_json(gpu)
    section = readme.markdown(cpu, gpu)
    assert "On GPUs: not measured" not in section
    assert section.index("Measured on a cpu") < section.index("Measured on a gpu")


def _tables(results):
    tables = []
    report.show(results, tables.append)
    return {table.title: table for table in tables}


def test_the_tables_hold_a_line_for_each_row_and_a_dash_for_what_is_missing():
    tables = _tables(_gpu_results())
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


def test_a_cpu_has_no_columns_for_what_only_a_gpu_has():
    (table,) = (table for title, table in _tables(_results()).items() if "Kernels" in title)
    assert "kernels" not in table.numbers


def test_a_table_as_text_has_its_columns_below_one_another():
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


@pytest.mark.parametrize("tall", [False, True])
def test_the_picture_has_a_panel_for_each_path_and_dtype(tmp_path, monkeypatch, tall):
    figure = pytest.importorskip("matplotlib.figure", reason="pictures are drawn by matplotlib")
    drawn = []
    save = figure.Figure.savefig
    monkeypatch.setattr(
        figure.Figure,
        "savefig",
        lambda self, *args, **kwargs: (drawn.append(self), save(self, *args, **kwargs)),
    )
    path = tmp_path / "picture.png"
    results = _gpu_results(complete=False)
    if tall:
        # Another dtype with higher bars, which the scale that the panels share must hold too.
        results.rows += [
            dataclasses.replace(row, dtype="float16", gb_s=9000.0)
            for row in results.rows
            if row.subject == "kernels"
        ]
    plot.draw(results, path)
    assert path.read_bytes()[:4] == b"\x89PNG"
    (picture,) = drawn
    dtypes = ["float32", "float16"] if tall else ["float32"]
    titles = [f"{path}, {dtype}" for path in ("unscale", "check") for dtype in dtypes]
    assert [axis.get_title() for axis in picture.axes] == titles
    for axis, copy in zip(picture.axes[:: len(dtypes)], (3000, 2900), strict=True):
        assert axis.get_ylim() == pytest.approx((0, 1.2 * (9000 if tall else copy)))
        labels = [text.get_text() for text in axis.get_xticklabels()]
        assert labels == ["1000x1k, cold", "gpt2_xl"]
        heights = sorted(bar.get_height() for bar in axis.patches)
        assert heights == [1500, 1500, 2600, 2600, 2700, 2700]
        # The copy, over the whole width of each list.
        assert [segment[0][1] for segment in axis.collections[0].get_segments()] == [copy, copy]
        assert "90%" in [text.get_text() for text in axis.texts]
    assert {text.get_text() for text in picture.legends[0].get_texts()} == {
        *("torch", "triton", "cuda", "copy")
    }
    assert "the run was not complete" in picture.get_suptitle()


def test_without_kernels_there_is_nothing_to_draw(tmp_path):
    pytest.importorskip("matplotlib", reason="pictures are drawn by matplotlib")
    with pytest.raises(ValueError, match="nothing to draw"):
        plot.draw(_results(rows=[]), tmp_path / "picture.png")
