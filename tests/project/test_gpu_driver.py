"""Driver of the proof on a GPU, with parts that pass, fail and hang; its tools without a GPU."""

from __future__ import annotations

import datetime
import os
import runpy
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.processes import ROOT, is_alive, python

from benchmarks import providers
from tests.gpu import runner as proof

FOLDER = ROOT / "tests" / "gpu"

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="ends groups of processes")


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(proof, "GRACE_SECONDS", 0.5)
    return proof


@pytest.fixture
def driver() -> Any:
    return SimpleNamespace(**runpy.run_path(str(FOLDER / "__main__.py")))


def program(code: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", code, *map(str, arguments)]


def run(runner: Any, folder: Path, *parts: Any, seconds: float = 3600) -> tuple[int, str]:
    """Exit code, and the verdicts in their file."""
    written = folder / "out" / "verdict.txt"
    code = runner.run(parts, folder / "logs", ROOT, seconds, written, "commit abc")
    text = written.read_text()
    assert text == f"commit abc\n{runner.table(parts)}"
    return code, text


# By verdict: commands of a part, the exit code, and what is said of it.
PARTS: dict[str, tuple[list[list[str]], int, str]] = {
    "ok": ([program("print('all well')")], 0, "    all well\n"),
    "failed": (
        [program("print('FAILED one'); print('last'); exit(3)"), program("print(5)")],
        1,
        "    last\n    5\n    FAILED one\n",
    ),
    "unavailable": ([["no-such-command"]], 0, "    no-such-command: Device not supported, missing"),
    # Hides no failure.
    "failed ": ([["no-such-command"], program("exit(1)")], 1, ""),
}


@pytest.mark.parametrize("vital", [False, True])
@pytest.mark.parametrize("verdict", PARTS)
def test_a_part_and_the_next_one(runner: Any, tmp_path: Path, verdict: str, vital: bool) -> None:
    commands, expected, said = PARTS[verdict]
    first = runner.Part("first", commands, 300, vital=vital)
    last = runner.Part("last", [program("print('end')")], 300)
    code, text = run(runner, tmp_path, first, last)
    assert code == max(expected, vital and verdict != "ok")
    assert f"first      {verdict} " in text and said in text
    runs = verdict == "ok" or not vital
    assert f"last       {'ok' if runs else 'not run'} " in text
    log = tmp_path / "logs" / "last-0.log"
    assert log.read_text() == "end\n" if runs else not log.exists()


HANGS = """
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, lambda *_: print("kept", flush=True))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
pathlib.Path(sys.argv[1]).touch()
while True:
    time.sleep(600)
"""


def test_what_hangs_is_cut_off_with_its_children(
    runner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After it could write its results; with the limit of the run everything ends."""
    sign = tmp_path / "sign"
    # Once the command has begun, the clock is ahead.
    clock = {"monotonic": lambda: time.monotonic() + 4000 * sign.exists(), "sleep": time.sleep}
    monkeypatch.setattr(runner, "time", SimpleNamespace(**clock))
    ended: list[Any] = []
    hangs = [program(HANGS, sign), program("print(1)")]
    parts = [
        runner.Part("hangs", hangs, 9000, after=ended.append),
        runner.Part("next", [program("pass")], 9000),
    ]
    assert run(runner, tmp_path, *parts)[0] == 1
    assert ended == [[None, None]]
    assert [part.verdict for part in parts] == ["cut off", "not run"]
    assert parts[0].lines[0].endswith("kept")
    assert parts[0].lines[1] == "cut off: print(1): not begun"
    child = int((tmp_path / "logs" / "hangs-0.log").read_text().split()[1])
    deadline = time.monotonic() + 300
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.01)  # killed, but it ends when the machine has time
    assert not is_alive(child)


@pytest.mark.slow
@pytest.mark.sweep
def test_the_rehearsal_runs_every_part(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    cache = str(tmp_path / "triton")
    rehearsal = (FOLDER, "--rehearse", "--out", tmp_path / "out")
    done = python(*rehearsal, TRITON_CACHE_DIR=cache, TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stdout
    text = (tmp_path / "out" / "verdict.txt").read_text()
    verdicts = [line.split()[1] for line in text.splitlines()[1:] if not line.startswith(" ")]
    assert verdicts == ["ok"] * 8


def test_parts_of_the_real_run(driver: Any, tmp_path: Path) -> None:
    day = datetime.date(2026, 1, 31)
    name = driver.results_name("NVIDIA H100 80GB HBM3", "2.11.0+cu130", day)
    assert name == "h100-80gb-hbm3-torch2.11.0-2026-01-31.json"
    results, out = tmp_path / "results" / "a.json", tmp_path / "out"
    parts = {part.name: part for part in driver.parts(results, out)}
    # Numbers first.
    assert list(parts)[:5] == ["build", "compile", "smoke", "decisive", "gpu"]
    assert parts["build"].vital
    for part in parts.values():
        for word in (word for command in part.commands for word in command[1:]):
            assert not word.endswith(".py") or (ROOT / word).is_file(), word
    files = [command[-1] for command in parts["gpu"].commands]
    assert files[-1] == "tests/gpu/test_gpu_distributed.py"
    assert sorted(files) == sorted(f"tests/gpu/{file.name}" for file in FOLDER.glob("test_*.py"))
    # One that was cut off may only be slow.
    for codes, left_out in (([0, 0], ""), ([0, 1], "cuda"), ([None, -11], "cuda")):
        parts["smoke"].after(codes)
        assert parts["decisive"].environment[providers.WITHOUT] == left_out
    parts["bench"].after([0])
    assert not results.parent.exists()
    out.mkdir()
    (out / "bench.json").write_text("{}")
    parts["bench"].after([0])
    assert (results.parent / "a-bench.json").read_text() == "{}"


def test_missing_gpu_is_reported(tmp_path: Path) -> None:
    if shutil.which("make") is None:
        pytest.skip("needs make")
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "MAKEFLAGS": ""}
    out = tmp_path / "out"
    command = ["make", "gpu", "VENV=", f"PYTHON={sys.executable}", f"ARGS=--out {out}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=hidden)
    assert done.returncode == 2  # make's own exit code for any failure
    assert "needs a GPU" in done.stderr and "building" not in done.stdout
    assert not out.exists()
