"""Figures of README.md and docs/benchmarks.md, those of the result file that they name."""

from __future__ import annotations

import dataclasses
import re

import pytest
from sample_results import both, cpu_results, gpu_results, results, spread

from benchmarks import machine, pictures, readme, tables
from benchmarks.results import Results, Row

NAME = "cpu-torch2.99-2030-01-02.json"


@pytest.fixture
def pages(tmp_path):
    """Folder with both pages, empty between the markers."""
    (tmp_path / "docs").mkdir()
    for page in readme.PAGES:
        (tmp_path / page).write_text(f"before\n{readme.START}\nold\n{readme.END}\nafter\n")
    return tmp_path


def _file(folder, made):
    made.write(folder / "run.json")
    return folder / "run.json"


def test_the_readme_has_three_loops_steps_that_clip_and_the_gain_of_a_step():
    made = cpu_results()
    call, net = "SGD, clip", ("training", "resnet50", "bfloat16")
    made.rows.append(Row(*net, call, "no scaler", ms=spread(10.0)))
    made.rows += both(*net, call, 12.5, 12.5)
    (ours,) = [row for row in both(*net, f"{call} by the scaler", 12.5, 9.0) if row.vs_torch]
    made.rows.append(dataclasses.replace(ours, replaces=call, over_none=0.9))
    fused = {"call": f"fused {call} by the scaler", "replaces": f"fused {call}"}
    made.rows.append(dataclasses.replace(ours, **fused))
    assert readme.readme_block(made) == (
        "For example, a whole step, clipped: resnet50, SGD: torch clips it in 10 ms without a "
        "scaler and in 12.5 ms with its scaler; ampfast's scaler, which clips, too, takes 9 ms. "
        "On the nets measured (gpt2; resnet50), the import alone makes a whole training step "
        "10.0% shorter than with torch's scaler: the median of 2 kinds of step, between 0.0% "
        "shorter and 20.0% shorter. "
        "A whole step that ampfast's scaler scales, checks and clips takes 0.90 to 0.90 of the "
        "time of the same step that torch clips without any scaler (median 0.90).\n"
        "\n"
        "| time under bfloat16 of | no scaler | torch's scaler | ampfast | faster than torch's |\n"
        "| --- | --: | --: | --: | --: |\n"
        "| scaler alone: conv net, 10 parameters | - | 130 us | 50 us | 2.60x |\n"
        "| scaler alone: perceptron 31x32, batch 64, 62 parameters | - | 200 us | 80 us | 2.50x |\n"
        "| scaler alone: perceptron 3x512, batch 128, 6 parameters | - | 100 us | 80 us | 1.25x |\n"
        "| whole step, clipped: resnet50, SGD | 10 ms | 12.5 ms | 9 ms | 1.39x |\n"
        "\n"
        "Measured on a cpu (2 cores, threads: 1) with torch 2.99+cpu, commit abc, 2030-01-02. "
        "Medians, both sides in one run; all of it: "
        f"[`{NAME}`](benchmarks/results/{NAME}). {tables.score(made)}"
    )


def test_loops_with_a_schedule_are_shown_first():
    made = cpu_results()
    more = {"tensors": 62, "parts_us": (1.0, 2.0, 3.0), "share": 0.01}
    loop = ("loops", "perceptron 31x32, batch 64", "bfloat16")
    for call, ours in (("AdamW, schedule", 50.0), ("AdamW, LogMax", 400.0)):
        made.rows += both(*loop, call, 200.0, ours, **more)
    block = readme.readme_block(made)
    assert "62 parameters, schedule | - | 200 us | 50 us | 4.00x |" in block
    assert ": conv net | - | not measured | not measured | - |" in block
    (axes,) = pictures.draw(made)["loops"].axes
    (label,) = [text.get_text() for text in axes.get_yticklabels()]
    assert label == "perceptron 31x32, batch 64\n62 parameters, AdamW, schedule"
    assert "over all 1 rows 4.00x to 4.00x" in tables.sentences(made)[0]


def test_what_was_not_measured_is_named():
    block = readme.readme_block(results([], complete=False))
    assert ": conv net | - | not measured | not measured | - |" in block
    assert "a whole training step gains: not measured." in block
    assert "The run was not complete; its notes say why." in block
    assert "measured/" not in block


def test_a_gpu_is_named():
    block = readme.docs_block(gpu_results())
    assert "Measured on a gpu (driver 1.2), a cpu" in block
    assert "(110 tensors a launch), triton 3.6, commit abc" in block


def test_only_text_between_the_markers_is_replaced_and_links_lead_to_files(pages):
    readme.write(pages, _file(pages, cpu_results()))
    for page, block in readme.PAGES.items():
        text = (pages / page).read_text()
        made = block(cpu_results())
        assert text == f"before\n{readme.START}\n{made}\n{readme.END}\nafter\n"
        for link in re.findall(r"\]\((.+?)\)", made):
            assert ((pages / page).parent / link).is_file()
    assert Results.read(pages / "benchmarks/results" / NAME) == cpu_results()
    later = dataclasses.replace(cpu_results(), date="2031-01-01T00:00:00+00:00")
    readme.write(pages, _file(pages, later))
    (kept,) = (pages / "benchmarks/results").iterdir()
    assert kept.name == "cpu-torch2.99-2031-01-01.json"


def test_a_result_without_the_loops_of_the_readme_is_refused(pages):
    made = cpu_results()
    rows = [row for row in made.rows if row.case != readme.LOOPS[1]]
    file = _file(pages, dataclasses.replace(made, rows=rows))
    before = {path: path.read_text() for path in pages.rglob("*.*")}
    with pytest.raises(ValueError, match=f"run.json lacks .*: {readme.LOOPS[1]}$"):
        readme.write(pages, file)
    assert {path: path.read_text() for path in pages.rglob("*.*")} == before


@pytest.mark.parametrize("text", ["", readme.START, readme.END + readme.START, 2 * readme.START])
@pytest.mark.parametrize("page", readme.PAGES)
def test_pages_are_left_alone_if_one_has_not_its_markers(pages, page, text):
    (pages / page).write_text(text)
    file = _file(pages, cpu_results())
    before = {path: path.read_text() for path in pages.rglob("*.*")}
    with pytest.raises(ValueError, match=f"{page} must contain"):
        readme.write(pages, file)
    assert {path: path.read_text() for path in pages.rglob("*.*")} == before


def test_the_pages_agree_with_the_results_that_they_name():
    root = machine.REPOSITORY
    for page, block in readme.PAGES.items():
        _, section, _ = readme.split(root / page)
        (name,) = re.findall(rf"{readme.RESULTS}/([^)\s]+\.json)\)", section)
        assert section == f"\n{block(Results.read(root / readme.RESULTS / name))}\n"
        for picture in re.findall(r"!\[.+?\]\((.+?)\)", section):
            assert ((root / page).parent / picture).is_file()


def test_the_first_screen_tells_what_a_clipped_step_gains():
    """Its rounded figure is that of the measurements below it."""
    before, section, _ = readme.split(machine.REPOSITORY / readme.README)
    (told,) = re.findall(r"scales, checks and clips takes about (\d+)% less time than", before)
    (measured,) = re.findall(r"without any scaler \(median (\d\.\d\d)\)", section)
    assert int(told) == round(100 * (1 - float(measured)))
