"""Driver of the proof on a GPU, with parts that pass, fail, hang and time out."""

from __future__ import annotations

import datetime
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support.processes import is_alive

from benchmarks import providers

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "gpu"

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="ends groups of processes")


def loaded(name: str) -> ModuleType:
    """Imports a file of the driver as a module, which then runs nothing."""
    spec = importlib.util.spec_from_file_location(f"gpu_{name.strip('_')}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = loaded("runner")
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.5)
    return module


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return loaded("__main__")


def python(code: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", code, *map(str, arguments)]


def run(runner: ModuleType, folder: Path, *parts: Any, seconds: float = 3600) -> tuple[int, str]:
    """Exit code, and the verdicts in their file."""
    written = folder / "out" / "verdict.txt"
    code = runner.run(parts, folder / "logs", ROOT, seconds, written, "commit abc")
    text = written.read_text()
    assert text == f"commit abc\n{runner.table(parts)}"
    return code, text


def hanging(runner: ModuleType, sign: Path, seconds: float, first: str = "") -> list[str]:
    """A command that hangs; once it has begun, the runner's clock is ahead by `seconds`."""
    runner.time = SimpleNamespace(
        monotonic=lambda: time.monotonic() + seconds * sign.exists(), sleep=time.sleep
    )
    code = f"{first}\nimport pathlib, sys, time\npathlib.Path(sys.argv[1]).touch()\ntime.sleep(600)"
    return python(code, sign)


# By verdict: commands of a part, the exit code, and what is said of it.
PARTS: dict[str, tuple[list[list[str]], int, str]] = {
    "ok": ([python("print('all well')")], 0, "    all well\n"),
    "failed": (
        [python("print('FAILED one'); print('last'); exit(3)"), python("print(5)")],
        1,
        "    last\n    5\n    FAILED one\n",
    ),
    "unavailable": ([["no-such-command"]], 0, "    no-such-command: Device not supported, missing"),
}


@pytest.mark.parametrize("verdict", PARTS)
def test_a_part_and_the_next_one(runner: ModuleType, tmp_path: Path, verdict: str) -> None:
    commands, expected, said = PARTS[verdict]
    last = runner.Part("last", [python("print('end')")], 300)
    code, text = run(runner, tmp_path, runner.Part("first", commands, 300), last)
    assert code == expected
    assert f"first      {verdict} " in text and said in text
    assert "last       ok " in text
    assert (tmp_path / "logs" / "last-0.log").read_text() == "end\n"


def test_what_is_unavailable_hides_no_failure(runner: ModuleType, tmp_path: Path) -> None:
    part = runner.Part("both", [["no-such-command"], python("exit(1)")], 300)
    assert run(runner, tmp_path, part)[0] == 1 and part.verdict == "failed"


WAITS_FOR_THE_OTHER = """
import pathlib, sys, time
mine, other = map(pathlib.Path, sys.argv[1:])
mine.touch()
while not other.exists():
    time.sleep(0.01)
"""


def test_commands_of_a_part_may_run_side_by_side(runner: ModuleType, tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    both = [python(WAITS_FOR_THE_OTHER, a, b), python(WAITS_FOR_THE_OTHER, b, a)]
    assert run(runner, tmp_path, runner.Part("two", both, 300, at_once=2))[0] == 0


def test_a_command_that_hangs_is_cut_off_with_its_children(
    runner: ModuleType, tmp_path: Path
) -> None:
    first = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)"""
    ended: list[Any] = []
    hangs = hanging(runner, tmp_path / "sign", 400, first)
    part = runner.Part("hangs", [hangs, python("print(1)")], 300, after=ended.append)
    code, text = run(runner, tmp_path, part, runner.Part("next", [python("pass")], 300))
    assert code == 1 and ended == [[None, None]]
    assert (part.verdict, "next       ok " in text) == ("cut off", True)
    assert part.lines[1] == "cut off: print(1): not begun"
    child = int(part.lines[0].split()[-1])
    deadline = time.monotonic() + 300
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.01)  # killed, but it ends when the machine has time
    assert not is_alive(child)


def test_a_terminated_command_may_write_its_results(runner: ModuleType, tmp_path: Path) -> None:
    first = """
import signal
def end(*_):
    print("kept", flush=True)
    raise SystemExit(0)
signal.signal(signal.SIGTERM, end)"""
    runner.GRACE_SECONDS = 300
    part = runner.Part("slow", [hanging(runner, tmp_path / "sign", 400, first)], 300)
    run(runner, tmp_path, part)
    assert part.verdict == "cut off" and part.lines[0].endswith("kept")


def test_the_whole_run_has_a_limit(runner: ModuleType, tmp_path: Path) -> None:
    hangs = hanging(runner, tmp_path / "sign", 4000)
    parts = [runner.Part(name, [hangs], 9000) for name in "abc"]
    assert run(runner, tmp_path, *parts)[0] == 1
    assert [part.verdict for part in parts] == ["cut off", "not run", "not run"]


def test_a_command_knows_the_seconds_that_are_left(runner: ModuleType, tmp_path: Path) -> None:
    part = runner.Part("asks", [python("import sys; print(sys.argv[1])", runner.LEFT)], 900)
    assert run(runner, tmp_path, part, seconds=400)[0] == 0
    assert 200 < int(part.lines[0]) <= 400 - runner.MARGIN_SECONDS


def test_nothing_runs_behind_a_build_that_fails(runner: ModuleType, tmp_path: Path) -> None:
    build = runner.Part("build", [python("print('make: ***'); exit(2)")], 300, vital=True)
    tests = runner.Part("tests", [python("pass")], 300)
    code, text = run(runner, tmp_path, build, tests)
    assert (code, build.verdict, tests.verdict) == (1, "failed", "not run")
    assert "    make: ***\n" in text


def test_output_is_shown_where_asked_for(
    runner: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, shown in (("shown", True), ("hidden", False)):
        run(runner, tmp_path, runner.Part(name, [python(f"print('of {name}')")], 300, shown=shown))
    assert "of shown" in (said := capsys.readouterr().out) and "of hidden" not in said


def test_being_stopped_leaves_a_verdict(tmp_path: Path) -> None:
    script = tmp_path / "stopped.py"
    script.write_text(f"""
import runpy, sys
sys.path.insert(0, {str(FOLDER)!r})
from pathlib import Path
import runner
driver = runpy.run_path({str(FOLDER / "__main__.py")!r})
slow = [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(600)"]
made = [runner.Part(name, [slow], 300) for name in ("build", "gpu")]
variables = driver["main"].__globals__
variables.update(LOGS=Path({str(tmp_path / "logs")!r}), facts=lambda: ("a card", "2.11.0"))
variables.update(parts=lambda *_: made)
sys.exit(driver["main"](["--out", {str(tmp_path / "out")!r}, "--commit", "abc"]))
""")
    process = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    log, begin = tmp_path / "logs" / "build-0.log", time.monotonic()
    while not (log.exists() and "begun" in log.read_text()):
        assert time.monotonic() - begin < 300 and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 1
    text = (tmp_path / "out" / "verdict.txt").read_text()
    assert text.startswith("commit abc, GPU a card, torch 2.11.0\nbuild      cut off ")
    assert "gpu        not run" in text and said.endswith(text.partition("\n")[2] + "\n")


@pytest.mark.slow
@pytest.mark.sweep
def test_the_rehearsal_runs_every_part(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    command = [sys.executable, str(FOLDER), "--rehearse", "--out", str(tmp_path / "out")]
    variables = {"TRITON_CACHE_DIR": str(tmp_path / "triton"), "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    text = (tmp_path / "out" / "verdict.txt").read_text()
    verdicts = [line.split()[1] for line in text.splitlines()[1:] if not line.startswith(" ")]
    assert verdicts == ["ok"] * 9


def test_results_are_named_after_card_torch_and_day(driver: ModuleType) -> None:
    day = datetime.date(2026, 1, 31)
    name = driver.results_name("NVIDIA H100 80GB HBM3", "2.11.0+cu130", day)
    assert name == "h100-80gb-hbm3-torch2.11.0-2026-01-31.json"


def test_parts_of_the_real_run(driver: ModuleType, tmp_path: Path) -> None:
    results, out = tmp_path / "results" / "a.json", tmp_path / "out"
    parts = {part.name: part for part in driver.parts(results, out)}
    # Numbers first.
    assert list(parts)[:5] == ["build", "compile", "smoke", "decisive", "gpu"]
    assert parts["build"].vital
    for part in parts.values():
        for word in (word for command in part.commands for word in command[1:]):
            assert not word.endswith(".py") or (ROOT / word).is_file(), word
    files = [command[-1] for command in parts["gpu"].commands]
    assert files[:3] == [f"tests/gpu/test_gpu_{name}.py" for name in ("streams", "graphs", "costs")]
    assert files[-1] == "tests/gpu/test_gpu_distributed.py"
    assert sorted(files) == sorted(f"tests/gpu/{file.name}" for file in FOLDER.glob("test_*.py"))
    parts["bench"].after([0])
    assert not results.parent.exists()
    out.mkdir()
    (out / "bench.json").write_text("{}")
    parts["bench"].after([0])
    assert (results.parent / "a-bench.json").read_text() == "{}"


def test_a_backend_with_wrong_results_is_not_measured(driver: ModuleType, tmp_path: Path) -> None:
    parts = {part.name: part for part in driver.parts(tmp_path / "a.json", tmp_path)}
    # One that was cut off may only be slow.
    for codes, left_out in (([0, 0], ""), ([0, 1], "cuda"), ([None, -11], "cuda")):
        parts["smoke"].after(codes)
        assert parts["decisive"].environment[driver.WITHOUT] == left_out
    assert driver.WITHOUT == providers.WITHOUT


def test_it_builds_with_its_interpreter(
    driver: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("make") is None:
        pytest.skip("needs make")
    # As from `make -k gpu VENV=.venv`, whose settings must not be inherited.
    monkeypatch.setenv("MAKEFLAGS", "k -- VENV=.venv PYTHON=no-such-python")
    build = driver.parts(tmp_path / "a.json", tmp_path / "b.json")[0]
    said = subprocess.run(
        [*build.commands[0], "--dry-run"],
        cwd=ROOT,
        env={**os.environ, **build.environment},
        capture_output=True,
        text=True,
    )
    assert said.returncode == 0, said.stderr
    assert f"{sys.executable} setup.py" in said.stdout
    assert ".venv/" not in said.stdout.replace(sys.executable, "")
    monkeypatch.setenv("PATH", str(tmp_path))
    build = driver.parts(tmp_path / "a.json", tmp_path)[0]
    assert build.commands[0][-4:] == [sys.executable, "setup.py", "build_ext", "--inplace"]


def test_unknown_parts_are_refused(driver: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        driver.main(["--parts", "gpu,fast"])
    assert refused.value.code == 2
    assert "fast: not among build, compile, smoke, decisive, gpu" in capsys.readouterr().err


@pytest.mark.parametrize("by_make", [False, True])
def test_missing_gpu_is_reported(tmp_path: Path, by_make: bool) -> None:
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "MAKEFLAGS": ""}
    command = [sys.executable, str(FOLDER), "--out", str(tmp_path / "out")]
    if by_make:
        if shutil.which("make") is None:
            pytest.skip("needs make")
        command = ["make", "gpu", "VENV=", f"PYTHON={sys.executable}", f"ARGS=--out {command[-1]}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=hidden)
    assert done.returncode == (2 if by_make else 1)  # make's own exit code for any failure
    assert "needs a GPU" in done.stderr and "building" not in done.stdout
    assert not (tmp_path / "out").exists()


def test_an_interpreter_without_torch_is_reported(
    driver: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "FACTS", "import no_such_torch")
    with pytest.raises(SystemExit, match=r"GPU: ModuleNotFoundError: No module named 'no_such"):
        driver.facts()
