"""The README's performance section and its pictures are those of result files, byte for byte."""

from __future__ import annotations

import dataclasses
import re

import pytest
from sample_results import cpu_results, gpu_results, training_results

from benchmarks import machine, readme
from benchmarks.results import Row


def _file(path, results):
    results.write_json(path)
    return path


def test_the_section_shows_figures_of_the_file_and_says_what_was_not_measured(tmp_path):
    path = tmp_path / "results.json"
    cpu_results().write_json(path)
    section = readme.markdown(path)
    assert "a cpu (2 cores, threads: 1) with torch 2.99, commit abc, 2030-01-02." in section
    assert "| 10 | unscale_ + update | 20.0 | 5.0 | 4.1x |" in section
    not_measured = "not measured | not measured | not measured |"
    assert f"| 1000x1k | float16 | 1.500 | 0.500 | 3.02x | {not_measured}" in section
    assert "On GPUs: not measured." in section
    assert "not complete" not in section
    cpu_results(complete=False).write_json(path)
    assert "The run was not complete." in readme.markdown(path)


def test_only_what_stands_between_the_markers_is_replaced(tmp_path):
    page = tmp_path / "README.md"
    file = _file(tmp_path / "run.json", cpu_results(complete=False))
    page.write_text(f"before\n{readme.START}\nold\n{readme.END}\nafter\n")
    readme.write(page, file)
    cpu_results().write_json(file)
    readme.write(page, file)
    section = readme.markdown(file)
    assert page.read_text() == f"before\n{readme.START}\n{section}{readme.END}\nafter\n"
    assert readme.section_of(page) == section


@pytest.mark.parametrize("text", ["", readme.START, readme.END + readme.START, 2 * readme.START])
def test_a_page_without_the_markers_is_left_alone(tmp_path, text):
    page = tmp_path / "README.md"
    page.write_text(text)
    with pytest.raises(ValueError, match="must contain"):
        readme.write(page, _file(tmp_path / "run.json", cpu_results()))
    assert page.read_text() == text
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["README.md", "run.json"]


def test_nothing_is_written_for_a_file_that_is_no_result(tmp_path):
    page, bad = tmp_path / "README.md", tmp_path / "bad.json"
    text = f"{readme.START}\nold\n{readme.END}"
    page.write_text(text)
    bad.write_text("{")
    with pytest.raises(ValueError, match=r"bad\.json is damaged"):
        readme.write(page, _file(tmp_path / "good.json", cpu_results()), bad)
    assert page.read_text() == text
    assert not (tmp_path / readme.PICTURES).exists()


def test_the_pictures_of_a_page_are_written_and_earlier_ones_go_away(tmp_path):
    page = tmp_path / "README.md"
    page.write_text(f"{readme.START}{readme.END}")
    files = [
        _file(tmp_path / "a.json", cpu_results()),
        _file(tmp_path / "b.json", training_results()),
    ]
    readme.write(page, *files)
    names = {path.name for path in (tmp_path / readme.PICTURES).iterdir()}
    shown = re.findall(r"!\[.+\]\(docs/measured/(.+)\)", readme.section_of(page))
    assert sorted(shown) == sorted(names)
    assert names == {
        *("a-host.svg", "b-mlp.svg", "b-training.svg"),
        *("b-growth-tensors.svg", "b-growth-elements.svg"),
    }
    readme.write(page, files[0])
    assert [path.name for path in (tmp_path / readme.PICTURES).iterdir()] == ["a-host.svg"]


def test_goals_that_were_not_met_are_named(tmp_path):
    met = cpu_results().goals[0]
    missed = dataclasses.replace(met, ratio=2.0, ratio_p80=2.1)
    file = _file(tmp_path / "run.json", cpu_results(goals=[met, missed]))
    heading = readme.markdown(file)
    assert "Goals met: 1 of 2; not met: faster, 1000x1k float16 (2, promised >= 2.5)." in heading
    assert "Goals met: 1 of 1." in readme.markdown(_file(file, cpu_results()))


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
    kept = {path.name: path.read_text() for path in (page.parent / readme.PICTURES).iterdir()}
    drawn = {f"{picture.name}.svg": picture.file() for picture in readme.pictures(*named)}
    assert kept == drawn


def test_the_section_of_a_gpu_has_a_line_for_each_backend_and_step(tmp_path):
    path = tmp_path / "gpu.json"
    gpu_results().write_json(path)
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
    cpu_results().write_json(cpu)
    gpu_results().write_json(gpu)
    section = readme.markdown(cpu, gpu)
    assert "On GPUs: not measured" not in section
    assert section.index("Measured on a cpu") < section.index("Measured on a gpu")


def test_training_is_shown_beside_the_same_without_a_scaler(tmp_path):
    section = readme.markdown(_file(tmp_path / "run.json", training_results()))
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
    section = readme.markdown(_file(tmp_path / "run.json", cpu_results(rows=rows)))
    assert "| by tensors | 1,000 to 3,000 tensors | ampfast | 900 | 60 | 15.00x |" in section
