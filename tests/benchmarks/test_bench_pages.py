"""Files, tables, pictures, pages and comparisons of results."""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ampfast import GradScaler
from benchmarks import __main__ as command
from benchmarks import launches, machine, pages, tables
from benchmarks.results import Results, Row, Spread

ROOT = machine.REPOSITORY
CPU, GPU = (next((ROOT / pages.RESULTS).glob(name)) for name in ("cpu-*", "*-decisive.json"))
MACHINE = {"cpu": "a cpu", "cores": 2, "threads": 1, "load": 0.0}


def results(rows, **changes):
    made = Results(MACHINE, "2.99+cpu", None, "0.0", "abc", "2030-01-02T03:04:05+00:00", rows=rows)
    return dataclasses.replace(made, **changes)


def _row(low=10, middle=11, high=12, case="list", **more):
    name = {"subject": "kernels", "case": case, "dtype": "float32", "call": "check"}
    return Row(**{**name, "side": "ampfast", "ms": Spread(low, middle, high), **more})


def test_the_pages_agree_with_the_results_that_they_name():
    """Every table, sentence and figure of the pages is what the code makes of the file."""
    for page, block in pages.PAGES.items():
        _, section, _ = pages.split(ROOT / page)
        (name,) = re.findall(rf"{pages.RESULTS}/([^)\s]+\.json)\)", section)
        assert section == f"\n{block(Results.read(ROOT / pages.RESULTS / name))}\n"
        for picture in re.findall(r"!\[.+?\]\((.+?)\)", section):
            assert ((ROOT / page).parent / picture).is_file()
        if page == pages.DOCS:
            assert section.count("\n|") == 2 + 10 and tables.NOT_MEASURED not in section
    for path in (ROOT / pages.RESULTS).rglob("*.json"):
        for table in tables.of(Results.read(path)):
            assert len(table.header) <= tables.MOST_COLUMNS
            assert len({*map(len, table.text().splitlines()[2:])}) == 1
        assert path.stat().st_size < 300_000


def test_only_text_between_the_markers_is_replaced_and_links_lead_to_files(tmp_path):
    (tmp_path / "docs" / "contributing").mkdir(parents=True)
    for page in pages.PAGES:
        (tmp_path / page).write_text(f"before\n{pages.START}\nold\n{pages.END}\nafter\n")
    file, made = tmp_path / "run.json", Results.read(CPU)
    write = ["readme", str(file), "--write", str(tmp_path)]
    for year in ("2030", "2031"):
        made.date = f"{year}-01-02T00:00:00+00:00"
        made.write(file)
        assert command.main(write) == 0
        (kept,) = (tmp_path / pages.RESULTS).iterdir()
        assert kept.name == f"cpu-torch2.13.0-{year}-01-02.json"
        assert kept.read_bytes() == file.read_bytes()
    for page, block in pages.PAGES.items():
        text = f"before\n{pages.START}\n{block(made)}\n{pages.END}\nafter\n"
        assert (tmp_path / page).read_text() == text
        for link in re.findall(r"\]\((.+?)\)", text):
            assert ((tmp_path / page).parent / link).is_file()


@pytest.mark.parametrize(
    ("second", "ratio", "verdict"),
    [
        *[(_row(10, 11, 12), 1, "within spread"), (_row(5, 6, 9.9), 6 / 11, "faster")],
        *[(_row(5, 6, 10), 6 / 11, "within spread"), (_row(12, 20, 30), 20 / 11, "within spread")],
        (_row(12.1, 20, 30), 20 / 11, "slower"),
        (_row(ms=None, host_us=Spread(1, 2, 3)), 2 / 3, "within spread"),
    ],
)
def test_faster_means_beyond_both_spreads(second, ratio, verdict):
    first = _row(host_us=Spread(2, 3, 4))
    ((*_, before, after, said),) = tables.changes(results([first]), results([second]))
    assert (after / before, said) == (pytest.approx(ratio), verdict)
    text = "\n".join(tables.comparison(results([first]), results([second])))
    assert text.count("  list  ") == (verdict != "within spread")


# The figures of launches are of the present code: those of code that is gone are an error


LAUNCHES = "docs/contributing/benchmarks_full.md"
# Of kernels on a GPU alone, which the test's calls on a CPU do not enter.
OF_GPUS = ("backends/gpu.py", "backends/cuda.py", "backends/triton/launch.py")


def git(*arguments: str) -> str | None:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else None


def measured_sources() -> list[str]:
    """Files that run while launches are measured."""
    entered: set[str] = set()

    def profile(frame: Any, event: str, _: object) -> None:
        entered.add(frame.f_code.co_filename)

    for path in launches.CALLS:
        call = launches.call_of(path, GradScaler, 10)
        call()
        sys.setprofile(profile)
        call()
        sys.setprofile(None)
    folder = ROOT / "ampfast"
    files = {Path(name) for name in entered if name.startswith(f"{folder}/")}
    assert {folder / "scaler" / "grad_scaler.py", folder / "scaler" / "passes.py"} <= files
    files |= {folder / name for name in OF_GPUS}
    files |= {path for path in (ROOT / "csrc").iterdir() if path.suffix in (".cpp", ".h")}
    return sorted(str(path.relative_to(ROOT)) for path in files)


def code_of(path: str, text: str) -> str:
    """What of a file runs: neither comments nor docstrings."""
    if not path.endswith(".py"):
        return " ".join(re.sub("//.*", "", text).split())
    tree = ast.parse(text)
    for node in ast.walk(tree):
        has_docstring = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        if has_docstring and ast.get_docstring(node) is not None:
            del node.body[0]
    return ast.dump(tree)


def test_launches_were_measured_with_the_present_code() -> None:
    [commit] = re.findall(r"commit (\w+), nothing else running:", (ROOT / LAUNCHES).read_text())
    if git("cat-file", "-e", f"{commit}^{{commit}}") is None:
        pytest.skip(f"the repository lacks {commit}, with which launches were measured")
    changed = [
        path
        for path in measured_sources()
        if code_of(path, git("show", f"{commit}:{path}") or "")
        != code_of(path, (ROOT / path).read_text())
    ]
    assert changed == [], f"measure `python -m benchmarks.launches` again, for {LAUNCHES}"
