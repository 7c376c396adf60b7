"""Figures of README.md and docs/benchmarks.md, byte for byte those of the result files."""

from __future__ import annotations

import dataclasses
import re

import pytest
from sample_results import cpu_results, gpu_results, loop_results, training_results

from benchmarks import machine, readme
from benchmarks.results import Row


def _file(path, results):
    results.write_json(path)
    return path


def test_the_section_shows_the_files_figures_and_names_missing_ones(tmp_path):
    path = tmp_path / "results.json"
    cpu_results().write_json(path)
    section = readme.WHOLE.section(path)
    assert "a cpu (2 cores, threads: 1) with torch 2.99, commit abc, 2030-01-02." in section
    assert "| 10 of 4 | unscale_ + update | 20.0 | 5.0 | 4.1x |" in section
    not_measured = "not measured | not measured | not measured |"
    assert f"| 1000x1k | float16 | 1.500 | 0.500 | 3.02x | {not_measured}" in section
    assert "On GPUs: not measured." in section
    assert "not complete" not in section
    cpu_results(complete=False).write_json(path)
    assert "The run was not complete." in readme.WHOLE.section(path)


@pytest.fixture
def pages(tmp_path):
    """Folder with both pages, empty between the markers."""
    (tmp_path / "docs").mkdir()
    for page in readme.PAGES:
        (tmp_path / page.place).write_text(f"before\n{readme.START}\nold\n{readme.END}\nafter\n")
    return tmp_path


def _texts(folder):
    return [(folder / page.place).read_text() for page in readme.PAGES]


def test_only_text_between_the_markers_is_replaced(pages):
    file = _file(pages / "run.json", cpu_results(complete=False))
    readme.write(pages, file)
    cpu_results().write_json(file)
    readme.write(pages, file)
    sections = [page.section(file) for page in readme.PAGES]
    assert _texts(pages) == [
        f"before\n{readme.START}\n{section}{readme.END}\nafter\n" for section in sections
    ]
    assert [page.section_in(pages) for page in readme.PAGES] == sections
    assert len(sections[0]) < len(sections[1])


@pytest.mark.parametrize("text", ["", readme.START, readme.END + readme.START, 2 * readme.START])
@pytest.mark.parametrize("page", readme.PAGES, ids=lambda page: page.place.stem)
def test_pages_are_left_alone_if_one_has_not_its_markers(pages, page, text):
    (pages / page.place).write_text(text)
    before = _texts(pages)
    with pytest.raises(ValueError, match=f"{page.place} must contain"):
        readme.write(pages, _file(pages / "run.json", cpu_results()))
    assert _texts(pages) == before
    assert not (pages / readme.PICTURES).exists()


def test_nothing_is_written_for_a_file_that_is_no_result(pages):
    bad = pages / "bad.json"
    bad.write_text("{")
    before = _texts(pages)
    with pytest.raises(ValueError, match=r"bad\.json is damaged"):
        readme.write(pages, _file(pages / "good.json", cpu_results()), bad)
    assert _texts(pages) == before
    assert not (pages / readme.PICTURES).exists()


def test_the_pictures_of_the_pages_are_written_and_earlier_ones_go_away(pages):
    files = [_file(pages / "a.json", loop_results()), _file(pages / "b.json", training_results())]
    readme.write(pages, *files)
    names = {path.name for path in (pages / readme.PICTURES).iterdir()}
    assert names == {
        *("a-loops.svg", "a-host.svg", "b-mlp.svg", "b-training.svg"),
        *("b-growth-tensors.svg", "b-growth-elements.svg"),
    }
    short, whole = (page.section_in(pages) for page in readme.PAGES)
    assert sorted(re.findall(r"!\[.+\]\(measured/(.+)\)", whole)) == sorted(names)
    assert re.findall(r"!\[.+\]\(docs/measured/(.+)\)", short) == [
        *("a-loops.svg", "b-training.svg")
    ]
    readme.write(pages, files[0])
    names = {path.name for path in (pages / readme.PICTURES).iterdir()}
    assert names == {"a-loops.svg", "a-host.svg"}


def test_the_short_table_has_the_calls_that_were_measured(tmp_path):
    path = _file(tmp_path / "run.json", cpu_results())
    section = readme.README.section(path)
    assert (
        "| `unscale_` and `update`, 10 parameters of 4 elements, warm; us | 20.0 | 5.0 | 4.10x |"
        in section
    )
    assert "clipping" not in section
    assert "training" not in section
    trained = readme.README.section(_file(path, training_results()))
    assert (
        "1 kinds of training step, over the same without a scaler | 1.25 to 1.25 | 1.02 to 1.02"
        in trained
    )


def test_the_short_table_has_the_training_of_each_backend(tmp_path):
    both = ("AdamW", "AdamW, clip by the scaler")
    rows = [
        Row("training", "net", "float16", path, provider, ms_p50=1.0, over_none=1.25)
        for provider in ("none", "torch", "triton", "cuda")
        for path in (both if provider in ("triton", "cuda") else both[:1])
    ]
    section = readme.README.section(_file(tmp_path / "run.json", gpu_results(rows=rows)))
    for backend in ("triton", "cuda"):
        assert f"1 kinds of training step, over the same without a scaler ({backend}) |" in section
        assert f"1 more that clip by the scaler ({backend}) | - | 1.25 to 1.25 |" in section


def test_the_short_table_compares_a_deferred_clip_with_torchs_only_one(tmp_path):
    rows = [
        Row(*("clip", case, dtype, path, provider), ms_p50=ms, vs_torch=faster, lists=lists)
        for case, dtype, lists in (("1000x1k", "float32", 4), ("odd", "float32", 4))
        for path, provider, ms, faster in (
            ("clip", "torch", 4.0, None),
            ("clip", "triton", 1.0, 4.1),
            ("clip, in_place=False", "triton", 0.5, 8.2),
        )
    ]
    section = readme.README.section(_file(tmp_path / "run.json", gpu_results(rows=rows)))
    assert "`unscale_` and clipping, 1000x1k, cold; ms (triton) | 4.00 | 1.00 | 4.10x |" in section
    assert "`in_place=False`, 1000x1k, cold; ms (triton) | 4.00 | 0.50 | 8.20x |" in section
    assert "odd" not in section


def test_goals_that_were_not_met_are_named(tmp_path):
    met = cpu_results().goals[0]
    missed = dataclasses.replace(met, ratio=2.0, ratio_p80=2.1)
    file = _file(tmp_path / "run.json", cpu_results(goals=[met, missed]))
    heading = readme.WHOLE.section(file)
    assert "Goals met: 1 of 2; not met: faster, 1000x1k float16 (2, promised >= 2.5)." in heading
    assert "Goals met: 1 of 1." in readme.WHOLE.section(_file(file, cpu_results()))


def test_the_pages_agree_with_the_results_that_they_name():
    results = machine.REPOSITORY / "benchmarks/results"
    drawn = {}
    for page in readme.PAGES:
        section = page.section_in(machine.REPOSITORY)
        places = {
            path: section.find(f"benchmarks/results/{path.name})")
            for path in results.glob("*.json")
        }
        named = sorted((path for path, place in places.items() if place >= 0), key=places.get)
        assert named, f"{page.place} must name a file of benchmarks/results"
        assert section == page.section(*named)
        drawn |= {f"{picture.name}.svg": picture.file() for picture in page.pictures(*named)}
    folder = machine.REPOSITORY / readme.PICTURES
    assert {path.name: path.read_text() for path in folder.iterdir()} == drawn


def test_the_section_of_a_gpu_has_a_line_for_each_backend_and_step(tmp_path):
    path = tmp_path / "gpu.json"
    gpu_results().write_json(path)
    section = readme.WHOLE.section(path)
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


def test_a_section_with_a_gpu_file_claims_no_missing_gpu(tmp_path):
    cpu, gpu = tmp_path / "cpu.json", tmp_path / "gpu.json"
    cpu_results().write_json(cpu)
    gpu_results().write_json(gpu)
    section = readme.WHOLE.section(cpu, gpu)
    assert "On GPUs: not measured" not in section
    assert section.index("Measured on a cpu") < section.index("Measured on a gpu")


def test_training_is_shown_beside_the_same_without_a_scaler(tmp_path):
    section = readme.WHOLE.section(_file(tmp_path / "run.json", training_results()))
    header = (
        "| net | dtype | step | no scaler, ms | torch, ms | over none | ampfast, ms | over none |"
    )
    assert section.count(header) == 2
    line = "| a net | float16 | AdamW, clip | 10.0 | 12.5 | 1.250 | 10.2 | 1.020 |"
    assert line in section
    assert "host time of" not in section, "what was not asked for has no table"


def test_growth_is_shown_by_its_slopes(tmp_path):
    rows = [
        Row(
            *("growth", "1,000 to 3,000 tensors", "float32", "by tensors, slope", provider),
            ns_each=each,
            vs_torch=faster,
        )
        for provider, each, faster in (("torch", 900.0, None), ("cpu", 60.0, 15.0))
    ]
    section = readme.WHOLE.section(_file(tmp_path / "run.json", cpu_results(rows=rows)))
    assert "| by tensors | 1,000 to 3,000 tensors | ampfast | 900 | 60 | 15.00x |" in section
