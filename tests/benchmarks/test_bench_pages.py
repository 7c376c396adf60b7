"""Files, tables, sentences, pictures and pages of results, and comparisons of two."""

from __future__ import annotations

import dataclasses
import json
import re
import sys

import pytest
from sample_results import MACHINE, both, cpu_results, gpu_results, results

from benchmarks import __main__ as command
from benchmarks import machine, pages, pictures, tables
from benchmarks.results import Results, Row, Spread

ROOT = machine.REPOSITORY
NAME = "cpu-torch2.99-2030-01-02.json"


@pytest.mark.parametrize("made", [cpu_results, gpu_results])
def test_a_file_is_read_as_it_was_written_and_fields_of_earlier_ones_are_not_read(tmp_path, made):
    path = tmp_path / "results.json"
    made().write(path)
    assert Results.read(path) == made()
    content = json.loads(path.read_text())
    content |= {"goals": [1], "rows": [{**row, "launches": 1} for row in content["rows"]]}
    path.write_text(json.dumps(content))
    assert Results.read(path) == made()
    assert [entry.name for entry in tmp_path.iterdir()] == ["results.json"]
    results([dataclasses.replace(made().rows[0], vs_torch=1 / 3)]).write(path)
    assert Results.read(path).rows[0].vs_torch == 0.33333


def test_a_failed_write_leaves_the_file_unchanged(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    cpu_results().write(path)
    before = path.read_text()

    def fail(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(path), "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        gpu_results().write(path)
    assert path.read_text() == before and list(tmp_path.iterdir()) == [path]


BAD = {
    "missing": (None, "No such file"),
    "cut": (b'{"format":3,"rows"', "is no result of"),
    "bytes": (b"\xff\xfe\x00", "is no result of"),
    "list": (b"[]", "is no result of"),
    "older": (b'{"format":2,"rows":[]}', "its format is 2, not 3"),
    "short": (b'{"format":3,"rows":[]}', "missing 6 required"),
    "row": (b'{"format":3,"rows":[{"ms":[1]}]}', "is no result of"),
}


@pytest.mark.parametrize("what", ["compare", "report", "readme"])
@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_one_line_of_error(tmp_path, capsys, what, name):
    content, told = BAD[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    files = [str(tmp_path / name)] * (2 if what == "compare" else 1)
    assert command.main([what, *files]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path / name) in line and told in line


def test_a_busy_machine_and_a_run_that_is_not_complete_are_caveats():
    for load, told in ((3.0, []), (3.1, ["The load average was 3.1 when it began."])):
        made = cpu_results(machine={**MACHINE, "load": load})
        assert made.caveats == told
        broken = dataclasses.replace(made, complete=False, notes=["FAILED a"])
        begin = ["The run was not complete; its notes say why.", "1 of its parts failed."]
        assert broken.caveats == [*begin, *told]


# Case and call of the first line, columns behind them, and their cells in the first lines.
TABLES = {
    "loops": (
        *("conv net, 10 parameters|AdamW", "torch, us|ampfast, us|faster|spread"),
        "130|50|2.60x|±10%",
    ),
    "host": (
        *("1000x4|unscale_ + update", "torch, us|ampfast, us|faster|spread"),
        "800|80|10.00x|±10%",
    ),
    "clip": (
        *("bert_base|clip", "torch, ms|ampfast, ms|faster|spread"),
        "4|2|2.00x|±10%\n4|2|8.00x|±10%",
    ),
    "training": (
        *("gpt2|AdamW", "no scaler, ms|torch, ms|ampfast, ms|faster"),
        "10|12.5|10|1.25x\n10|12.5|12.5|1.00x\n10|12.5|9|1.39x",
    ),
    "growth": ("10x100|by tensors", "torch, ms|ampfast, ms|faster|spread", "10|1|10.00x|±10%"),
    "slopes": ("tensors|slope", "torch, ns each|ampfast, ns each|faster", "9|3|3.00x"),
    "kernels": (
        *("bert_base, float32|unscale", "torch, ms|ampfast, ms|faster|of a copy"),
        "2|1|2.00x|80%",
    ),
    "masters": (
        *("1000x4|master weights", "a loop, ms|torch, ms|ampfast, ms|faster"),
        "8|4|1|4.00x",
    ),
    "steps": (
        *("1000x1k, cold|full step, triton", "torch, ms|ampfast, ms|faster|spread"),
        "1|1|2.00x|±10%\n1|1|2.00x|±10%",
    ),
}


def test_both_sides_of_a_call_stand_on_one_line_of_at_most_six_columns():
    slope = [
        Row("growth", "tensors", "float32", "slope", side, ns_each=ns, vs_torch=ratio)
        for side, ns, ratio in (("torch", 9.0, None), ("ampfast", 3.0, 3.0))
    ]
    more = both("kernels", "bert_base", "float16", "unscale", 2.0, 1.0)
    on_cpu = results([*cpu_results().rows, *slope, *more])
    found = [*tables.of(on_cpu), *tables.of(gpu_results())]
    for table, (names, columns, cells) in zip(found, TABLES.values(), strict=True):
        assert "|".join(table.header) == f"case|call|{columns}"
        assert "|".join(table.lines[0]).startswith(f"{names}|")
        assert "\n".join("|".join(line[2:]) for line in table.lines).startswith(cells)
        assert all(len(line) == len(table.header) <= 6 for line in table.lines)
        text = table.text().splitlines()
        assert text[1] == table.title and len({*map(len, text[2:])}) == 1
    assert found[4].how.endswith(" All rows are of float32.")
    assert found[6].how == tables.SUBJECTS["kernels"][1]
    assert len(found[6].lines) == 2, "a copy has no line of its own"


@pytest.mark.parametrize(
    ("show", "value", "text"),
    [
        *((tables.number, *each) for each in [(None, "-"), (0, "0"), (0.0043, "0.0043")]),
        *((tables.number, *each) for each in [(0.5, "0.50"), (12.34, "12.3"), (1234, "1,234")]),
        *((tables.times, *each) for each in [(2.0, "2.00x"), (0.998, "1.00x"), (None, "-")]),
        *[(tables.times, 0.5, "2.00x slower"), (tables.faster, 1.5, "1.50x faster")],
        *[(tables.faster, 0.4, "2.50x slower"), (tables.percent, 0.123, "0.12%")],
        (tables.percent, 123.4, "123%"),
    ],
)
def test_figures_are_rounded_and_say_what_is_slower(show, value, text):
    assert show(value) == text


def test_score_counts_what_is_won_tied_and_lost():
    times = (5.0, 9.6, 10.0, 10.4, 12.0, 20.0)
    rows = [row for ours in times for row in both("host", f"{ours}", "f", "unscale", 10.0, ours)]
    told = "Against torch, of 6 measurements: 1 faster, 3 as fast within 5%, 2 slower."
    assert tables.score(results(rows)) == told
    assert tables.score(results([])) == "Against torch: not measured."


def test_a_step_gains_what_torchs_takes_longer():
    rows = [
        *both("training", "a", "bfloat16", "SGD", 100.0, 95.0),
        *both("training", "b", "bfloat16", "SGD", 99.0, 100.0),
    ]
    # Clipping by the scaler is another call than torch's.
    clip = dataclasses.replace(rows[1], replaces="SGD, clip", vs_torch=2.0)
    assert tables.gain_of_the_import(results([*rows, clip])) == (
        "On the nets measured (a; b), the import alone makes a whole training step 2.0% shorter "
        "than with torch's scaler: the median of 2 kinds of step, between 1.0% longer and 5.0% "
        "shorter."
    )
    for over, told in (((0.9, 0.95, 1.2), "5.0% shorter"), ((1.02,), "2.0% longer")):
        clips = [dataclasses.replace(clip, over_none=each) for each in over]
        said = tables.gain_of_clipping(results([rows[1], *clips]))
        assert f"a whole training step is {told} (median) than with torch's clipping" in said


def test_the_readme_has_three_loops_steps_that_clip_and_the_gain_of_clipping():
    made = cpu_results()
    gain, table, heading = pages.readme_block(made).split("\n\n")
    assert gain == tables.gain_of_clipping(made)
    assert table.splitlines() == [
        "| time under bfloat16 of | no scaler | torch's scaler | ampfast | faster than torch's |",
        "| --- | --: | --: | --: | --: |",
        "| scaler alone: conv net, 10 parameters | - | 130 us | 50 us | 2.60x |",
        "| scaler alone: perceptron 31x32, batch 64, 62 parameters | - | 200 us | 80 us | 2.50x |",
        "| scaler alone: perceptron 3x512, batch 128, 6 parameters | - | 100 us | 80 us | 1.25x |",
        "| whole step, clipped: rn, SGD | 10 ms | 12.5 ms | 9 ms | 1.39x |",
    ]
    assert heading == (
        "Measured on a cpu (2 cores, threads: 1) with torch 2.99+cpu, commit abc, 2030-01-02. "
        "Medians, both sides in one run; all of it: "
        f"[`{NAME}`](benchmarks/results/{NAME}). {tables.score(made)}"
    )
    none = pages.readme_block(results([]))
    assert ": conv net | - | not measured | not measured | - |" in none
    assert none.startswith("What clipping by the scaler gains in a whole training step: not ")
    loop = both("loops", "conv net", "bfloat16", "AdamW, schedule", 200.0, 50.0, tensors=9)
    scheduled = results([*made.rows, *loop])
    assert "9 parameters, schedule | - | 200 us | 50 us | 4.00x |" in pages.readme_block(scheduled)
    (axes,) = pictures.draw(scheduled)["loops"].axes
    (label,) = [text.get_text() for text in axes.get_yticklabels()]
    assert label == "conv net\n9 parameters, AdamW, schedule"
    block = pages.full_block(gpu_results())
    assert "Measured on a gpu (driver 1.2), a cpu" in block and "(110 tensors a launch)" in block


def test_only_text_between_the_markers_is_replaced_and_links_lead_to_files(tmp_path, monkeypatch):
    (tmp_path / "docs").mkdir()
    for page in pages.PAGES:
        (tmp_path / page).write_text(f"before\n{pages.START}\nold\n{pages.END}\nafter\n")
    file, made = tmp_path / "run.json", cpu_results()
    made.write(file)
    write = ["readme", str(file), "--write", str(tmp_path)]
    assert command.main(write) == 0
    for page, block in pages.PAGES.items():
        text = f"before\n{pages.START}\n{block(made)}\n{pages.END}\nafter\n"
        assert (tmp_path / page).read_text() == text
        for link in re.findall(r"\]\((.+?)\)", text):
            assert ((tmp_path / page).parent / link).is_file()
    assert Results.read(tmp_path / pages.RESULTS / NAME) == made
    dataclasses.replace(made, date="2031-01-01T00:00:00+00:00").write(file)
    assert command.main(write) == 0
    (kept,) = (tmp_path / pages.RESULTS).iterdir()
    assert kept.name == "cpu-torch2.99-2031-01-01.json"

    def refuses(told):
        before = {path: path.read_text() for path in tmp_path.rglob("*.*")}
        with pytest.raises(ValueError, match=told):
            pages.write_pages(tmp_path, file)
        assert {path: path.read_text() for path in tmp_path.rglob("*.*")} == before

    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        refuses("pictures need matplotlib: pip install matplotlib")
    rows = [row for row in made.rows if row.case != pages.LOOPS[1]]
    dataclasses.replace(made, rows=rows).write(file)
    refuses(f"run.json lacks .*: {pages.LOOPS[1]}$")
    made.write(file)
    for text in ("", pages.START, pages.END + pages.START, 2 * pages.START + pages.END):
        (tmp_path / pages.DOCS).write_text(text)
        refuses(f"{pages.DOCS} must contain")


def test_the_pages_agree_with_the_results_that_they_name():
    for page, block in pages.PAGES.items():
        _, section, _ = pages.split(ROOT / page)
        (name,) = re.findall(rf"{pages.RESULTS}/([^)\s]+\.json)\)", section)
        assert section == f"\n{block(Results.read(ROOT / pages.RESULTS / name))}\n"
        for picture in re.findall(r"!\[.+?\]\((.+?)\)", section):
            assert ((ROOT / page).parent / picture).is_file()
        if page == pages.DOCS:
            assert section.count("\n|") == 2 + 10 and tables.NOT_MEASURED not in section
    for path in (ROOT / pages.RESULTS).rglob("*.json"):
        assert tables.of(Results.read(path))
        assert path.stat().st_size < 300_000


def test_pictures_show_what_was_measured(tmp_path):
    drawn = pictures.draw(cpu_results())
    assert list(drawn) == ["loops", "host", "throughput", "training", "clip", "growth"]
    assert pictures.draw(results([])) == {}
    widths = {
        name: [bar.get_width() for bar in figure.axes[0].patches if bar.get_width()]
        for name, figure in drawn.items()
    }
    assert widths["loops"] == [130.0, 50.0, 200.0, 80.0, 100.0, 80.0]
    assert (widths["throughput"], widths["clip"]) == ([4.0, 8.0], [2.0, 8.0])
    assert widths["training"] == [1.25, 1.0, 1.25, 1.25, 0.9, 0.9]
    ends = {}
    for name in ("loops", "clip"):
        [segment] = drawn[name].axes[0].collections[0].get_segments()
        ends[name] = segment[:, 0].tolist()
    assert ends["loops"] == pytest.approx([117.0, 143.0])
    assert ends["clip"] == pytest.approx([2 / 1.1, 2 / 0.9]), "as fast as its time is short"
    (axes,) = drawn["growth"].axes
    curves = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    assert curves == {"torch": [10, 100], "ampfast": [1.0, 1.0]}
    text = pictures.svg(drawn["loops"])
    assert "Scaler's own time in training loops" in text and "50 (2.60x faster)" in text
    assert pictures.svg(pictures.draw(cpu_results())["loops"]) == text
    for name in ("old.svg", "kept.txt"):
        (tmp_path / name).touch()
    pictures.write(pictures.draw(results(cpu_results().rows[:2])), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"loops.svg", "loops.png", "kept.txt"}


def test_the_report_opens_with_the_score_and_pictures_and_folds_tables(tmp_path):
    made = cpu_results(complete=False, notes=["FAILED <b>: torch's bits"])
    made.write(tmp_path / "run.json")
    assert command.main(["report", str(tmp_path / "run.json")]) == 0
    text = (tmp_path / pages.REPORT).read_text()
    parts = ("Against torch, of ", "On the nets measured", "data:image", "<details", "<table>")
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    for told in ("The run was not complete", "FAILED &lt;b&gt;: torch&#39;s bits"):
        assert told in text
    assert not re.search(r"https?://", text), "nothing is fetched"
    assert re.findall(r'<details id="(\w+)">', text) == [t.subject for t in tables.of(made)]


def _row(low=10, middle=11, high=12, case="list", **more):
    ms = Spread(low, middle, high)
    return Row("kernels", case, "float32", "check", "ampfast", **{"ms": ms, **more})


@pytest.mark.parametrize(
    ("second", "ratio", "verdict"),
    [
        *[(_row(10, 11, 12), 1, "within spread"), (_row(5, 6, 9.9), 6 / 11, "faster")],
        *[(_row(5, 6, 10), 6 / 11, "within spread"), (_row(12, 20, 30), 20 / 11, "within spread")],
        (_row(12.1, 20, 30), 20 / 11, "slower"),
        (_row(ms=None, host_us=Spread(1, 2, 3)), 2 / 3, "within spread"),
        (_row(ms=None, ns_each=1.0), 0.5, "no spread"),
    ],
)
def test_faster_means_beyond_both_spreads(second, ratio, verdict):
    first = _row(host_us=Spread(2, 3, 4), ns_each=2.0)
    ((*_, before, after, said),) = tables.changes(results([first]), results([second]))
    assert (after / before, said) == (pytest.approx(ratio), verdict)
    for everything in (False, True):
        text = "\n".join(tables.comparison(results([first]), results([second]), everything))
        assert text.count("  list  ") == (everything or verdict != "within spread")


def test_rows_are_paired_by_name_and_other_machines_are_named_first(tmp_path, capsys):
    hot, cold = _row(), _row(case="list, cold")
    second = results(
        [_row(1, 2, 3, case="list, cold"), dataclasses.replace(hot, subject="steps")],
        machine={**MACHINE, "cores": 64, "load": 99.0},
        torch="3.0",
        complete=False,
    )
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, made in zip(files, (results([hot, cold]), second), strict=True):
        made.write(file)
    assert command.main(["compare", *map(str, files)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["cores differs: 2 and 64", "torch differs: 2.99+cpu and 3.0"]
    assert lines[2] == "so times differ for more reasons than ampfast's code"
    assert lines[4].endswith("its notes say why. The load average was 99.0 when it began.")
    only = ["only in the first: 1 rows (kernels)", "only in the second: 1 rows (steps)"]
    assert lines[-3:] == ["1 faster", *only]
    assert "the two have nothing in common" in tables.comparison(results([hot]), results([]))
