"""Driver of the proof on a GPU, with parts that pass, fail, hang and time out; its fuzz."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from support.processes import is_alive

from ampfast.backends import cpu
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


@pytest.mark.parametrize("kind", ["normal", "wide", "bits"])
def test_batches_find_wrong_kernels(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The GPU tests' fuzz passes with the CPU's kernels and fails with wrong ones."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import batches

    device = torch.device("cpu")
    arguments: dict[str, Any] = {"kind": kind, "is_scale": False, "seed": 3, "factor": 1 / 3}
    for seed in range(10):
        arguments["seed"] = seed
        batches.run_batch(cpu, batches.random_batch(seed, 20), device, **arguments)

    class Wrong:
        def __init__(self, name: str) -> None:
            self.name = name

        def run(self, grads: Any, work: Any) -> torch.Tensor:
            if self.name == "value" and work.write:
                work = work._replace(factor=work.factor * (1 + 1e-6))
            found = cpu.run(grads, work)
            if self.name == "flag" and not work.write:
                return 1 - found
            return torch.zeros(()) if self.name == "found_inf" and work.write else found

    for name in ("flag", "value", "found_inf"):
        with pytest.raises(AssertionError):
            batches.run_batch(Wrong(name), batches.random_batch(5, 40), device, **arguments)
