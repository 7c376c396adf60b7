"""Driver of the proof on a GPU, with parts that pass, fail, hang and time out."""

from __future__ import annotations

import datetime
import importlib.util
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
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


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def run(
    runner: ModuleType, out: Path, *stages: list[Any], seconds: float = 3600
) -> tuple[int, Any]:
    """Returns exit code and outcomes by name."""
    it = runner.Run(stages, out, ROOT, seconds, logs_of(out), {"commit": "abc"})
    code = it.run()
    assert (out / "verdict.txt").read_text() == it.verdict() + "\n"
    content = json.loads((out / "run.json").read_text())
    assert content["commit"] == "abc"
    outcomes = {outcome.part.name: outcome for outcome in it.outcomes}
    assert [(p["name"], p["verdict"]) for p in content["parts"]] == [
        (name, outcome.verdict) for name, outcome in outcomes.items()
    ]
    return code, outcomes


def logs_of(out: Path) -> Path:
    return out.with_name(f"{out.name}-logs")


def late_from(runner: ModuleType, sign: Path, seconds: float) -> Path:
    """Advances the runner's clock once a file exists, independently of the machine's speed."""
    runner.time = SimpleNamespace(monotonic=lambda: time.monotonic() + seconds * sign.exists())
    return sign


def test_all_parts_run_whatever_fails(runner: ModuleType, tmp_path: Path) -> None:
    code, outcomes = run(
        runner,
        tmp_path / "out",
        [runner.Part("first", [python("print('FAILED one'); exit(3)"), python("print(5)")], 300)],
        [
            runner.Part("second", [python("print('all well')")], 300),
            runner.Part("third", [["no-such-command-here"]], 300),
        ],
    )
    assert code == 1
    assert {name: o.verdict for name, o in outcomes.items()} == {
        "first": "failed",
        "second": "ok",
        "third": "failed",
    }
    assert outcomes["first"].details == ["FAILED one"]
    assert outcomes["first"].line == "FAILED one; 5"
    assert outcomes["second"].line == "all well"
    assert outcomes["third"].line == "no-such-command-here is not installed"
    with tarfile.open(tmp_path / "out" / "logs.tar.gz") as packed:
        assert packed.getnames() == ["first.log", "second.log", "third.log"]
        log = packed.extractfile("first.log")
        assert log is not None and log.read() == b"FAILED one\n5\n"
    verdict = (tmp_path / "out" / "verdict.txt").read_text().splitlines()
    assert verdict[0] == "commit abc"
    assert [line.split()[0] for line in verdict[1:4]] == ["first", "second", "third"]
    assert verdict[-1] == "  FAILED one"


def test_success_is_zero(runner: ModuleType, tmp_path: Path) -> None:
    parts = [runner.Part(name, [python("pass")], 300) for name in "ab"]
    code, outcomes = run(runner, tmp_path, parts)
    assert code == 0
    assert all(o.verdict == "ok" and o.line == "" for o in outcomes.values())


WAITS_FOR_THE_OTHER = """
import pathlib, sys, time
mine, other = map(pathlib.Path, sys.argv[1:])
mine.touch()
while not other.exists():
    time.sleep(0.01)
"""


def test_parts_of_a_stage_run_side_by_side(runner: ModuleType, tmp_path: Path) -> None:
    files = [tmp_path / name for name in "ab"]
    parts = [
        runner.Part(a.name, [[*python(WAITS_FOR_THE_OTHER), str(a), str(b)]], 300)
        for a, b in (files, files[::-1])
    ]
    assert run(runner, tmp_path / "out", parts)[0] == 0


def test_commands_of_a_part_may_run_side_by_side(runner: ModuleType, tmp_path: Path) -> None:
    signs = [tmp_path / name for name in "ab"]
    verdict = """
print("WRONG" if mine.name == "b" else "right", mine.name)
print("1 passed in 1s")
sys.exit(mine.name == "b")
"""
    both = [
        [*python(WAITS_FOR_THE_OTHER + verdict), str(a), str(b)] for a, b in (signs, signs[::-1])
    ]
    part = runner.Part("two", both, 300, summary="passed", at_once=2)
    code, outcomes = run(runner, tmp_path / "out", [part])
    assert code == 1 and outcomes["two"].verdict == "failed"
    assert outcomes["two"].line == "2 passed" and outcomes["two"].details == ["WRONG b"]
    logs = sorted(path.name for path in logs_of(tmp_path / "out").iterdir())
    assert logs == ["two-0.log", "two-1.log"]


@pytest.mark.slow
@pytest.mark.sweep
def test_the_rehearsal_runs_every_part(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    command = [sys.executable, str(FOLDER), "--rehearse", "--out", str(tmp_path / "out")]
    variables = {"TRITON_CACHE_DIR": str(tmp_path / "triton"), "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True
    )
    content = json.loads((tmp_path / "out" / "run.json").read_text())
    assert done.returncode == 0, done.stdout
    parts = [(part["name"], part["verdict"]) for part in content["parts"]]
    assert len(parts) == 9 and {verdict for _, verdict in parts} == {"ok"}


def test_a_part_that_hangs_is_cut_off_with_its_children(runner: ModuleType, tmp_path: Path) -> None:
    code = """
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
pathlib.Path(sys.argv[1]).touch()
time.sleep(600)
"""
    sign = late_from(runner, tmp_path / "sign", 400)
    ended = []
    hangs = runner.Part(
        *("hangs", [[*python(code), str(sign)], python("print(1)")], 300),
        after=ended.append,
    )
    code, outcomes = run(runner, tmp_path, [hangs], [runner.Part("next", [python("pass")], 300)])
    assert code == 1
    assert outcomes["hangs"].verdict == "cut off"
    assert outcomes["next"].verdict == "ok"
    assert ended == [[None, None]]
    child = int(outcomes["hangs"].line.split()[1])
    deadline = time.monotonic() + 300
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.01)  # killed, but it ends when the machine has time
    assert not is_alive(child)


def test_a_terminated_part_may_write_its_results(runner: ModuleType, tmp_path: Path) -> None:
    code = """
import pathlib, signal, sys, time
def end(*_):
    print("kept", flush=True)
    raise SystemExit(0)
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
pathlib.Path(sys.argv[1]).touch()
time.sleep(600)
"""
    runner.GRACE_SECONDS = 300
    sign = late_from(runner, tmp_path / "sign", 400)
    _, outcomes = run(runner, tmp_path, [runner.Part("slow", [[*python(code), str(sign)]], 300)])
    assert outcomes["slow"].verdict == "cut off"
    assert outcomes["slow"].line == "kept"


def test_the_whole_run_has_a_limit(runner: ModuleType, tmp_path: Path) -> None:
    sleeps = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(600)"
    sign = late_from(runner, tmp_path / "sign", 4000)
    parts = [[runner.Part(name, [[*python(sleeps), str(sign)]], 9000)] for name in "abc"]
    code, outcomes = run(runner, tmp_path, *parts)
    assert code == 1
    assert [o.verdict for o in outcomes.values()] == ["cut off", "not run", "not run"]


def test_a_command_may_have_a_limit_of_its_own(runner: ModuleType, tmp_path: Path) -> None:
    hangs = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(600)"
    sign = late_from(runner, tmp_path / "sign", 100)
    first, last = python("print('2 passed in 1s')"), python("print('3 passed in 1s')")
    commands = [first, [*python(hangs), str(sign), "hangs.py"], last]
    part = runner.Part("files", commands, 300, each=60)
    code, outcomes = run(runner, tmp_path / "out", [part])
    assert code == 1
    assert outcomes["files"].verdict == "cut off"
    assert outcomes["files"].line == "5 passed"
    assert outcomes["files"].details == ["cut off: hangs.py"]
    assert "  cut off: hangs.py" in (tmp_path / "out" / "verdict.txt").read_text()


def test_parts_that_did_not_begin_are_reported(runner: ModuleType, tmp_path: Path) -> None:
    sign = late_from(runner, tmp_path / "sign", 400)
    hangs = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(600)"
    late = [[*python("pass"), name] for name in ("b.py", "c.py")]
    part = runner.Part("files", [[*python(hangs), str(sign)], *late], 300)
    _, outcomes = run(runner, tmp_path / "out", [part])
    assert outcomes["files"].details == [
        f"cut off: {sign}",
        "not begun: b.py",
        "not begun: c.py",
    ]


def test_nothing_runs_behind_a_build_that_fails(runner: ModuleType, tmp_path: Path) -> None:
    mark = [*python("import pathlib, sys; pathlib.Path(sys.argv[1]).touch()"), str(tmp_path / "no")]
    build = runner.Part("build", [python("print('make: ***'); exit(2)"), mark], 300, vital=True)
    code, outcomes = run(runner, tmp_path / "out", [build], [runner.Part("tests", [mark], 300)])
    assert code == 1
    assert outcomes["build"].verdict == "failed"
    assert outcomes["tests"].verdict == "not run"
    assert outcomes["tests"].line == "cannot run: build did not succeed"
    assert not (tmp_path / "no").exists()
    # Other parts need its first command only.
    build = runner.Part("build", [python("pass"), python("exit(1)")], 300, vital=True)
    code, outcomes = run(runner, tmp_path / "out", [build], [runner.Part("tests", [mark], 300)])
    assert code == 1
    assert [o.verdict for o in outcomes.values()] == ["failed", "ok"]


def test_time_is_kept_for_the_last_parts(runner: ModuleType, tmp_path: Path) -> None:
    hangs = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(600)"
    sign = late_from(runner, tmp_path / "sign", 650)
    last = runner.Part("last", [[*python("import sys; print(sys.argv[1])"), runner.LEFT]], 900)
    for least, verdicts in ((400, ["cut off", "ok"]), (0, ["cut off", "ok"])):
        sign.unlink(missing_ok=True)
        stages = [
            [runner.Part("first", [[*python(hangs), str(sign)]], 900 if least else 600)],
            [replace(last, least=least)],
        ]
        code, outcomes = run(runner, tmp_path / str(least), *stages, seconds=1000)
        assert code == 1
        assert [o.verdict for o in outcomes.values()] == verdicts
        # The limit given to the command leaves it time to end.
        assert 200 < int(outcomes["last"].line) <= 350 - runner.MARGIN_SECONDS
    # A short run keeps at most half of its time.
    stages = [[last], [replace(last, least=400)]]
    limits = runner.Run(stages, tmp_path, ROOT, 100, tmp_path / "logs", {})._ends
    assert limits[1] - limits[0] == pytest.approx(50)


def test_an_unavailable_part_is_no_failure(runner: ModuleType, tmp_path: Path) -> None:
    def part(name: str, *commands: list[str]) -> Any:
        return runner.Part(name, commands, 300, unavailable="not supported|is not installed")

    refuses = python("print('x'); print('Error: Device not supported here'); exit(1)")
    code, outcomes = run(runner, tmp_path / "a", [part("no", refuses), part("none", ["no-tool"])])
    assert code == 0
    assert [o.verdict for o in outcomes.values()] == ["unavailable", "unavailable"]
    assert outcomes["no"].line == "Error: Device not supported here"
    # Only for that reason alone.
    code, outcomes = run(runner, tmp_path / "b", [part("other", python("exit(1)"), refuses)])
    assert code == 1 and outcomes["other"].verdict == "failed"
    code, outcomes = run(runner, tmp_path / "c", [part("fine", python("print('not supported')"))])
    assert code == 0 and outcomes["fine"].verdict == "ok"


def test_counts_are_added_up(runner: ModuleType) -> None:
    first = "3 passed, 1 skipped in 2.00s"
    assert runner.combined([]) == ""
    assert runner.combined([first]) == first
    assert runner.combined([first, "1 failed, 4 passed in 1.00s (0:01:00)"]) == (
        "7 passed, 1 skipped, 1 failed"
    )
    assert runner.combined(["2 wrong", "ERROR SUMMARY: 0 errors"]) == (
        "2 wrong; ERROR SUMMARY: 0 errors"
    )


def test_being_cut_off_leaves_a_verdict(tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(f"""
import sys
sys.path.insert(0, {str(FOLDER)!r})
from pathlib import Path
from runner import Part, Run, stopped_by_signals
quick = [sys.executable, "-c", "print('quick')"]
slow = [sys.executable, "-c", "import time; print('begun'); time.sleep(600)"]
parts = [[Part("quick", [quick], 300)], [Part("slow", [slow], 300)], [Part("never", [quick], 300)]]
out = Path({str(tmp_path / "out")!r})
run = Run(parts, out, Path("."), 3600, Path({str(tmp_path / "logs")!r}), {{}})
with stopped_by_signals(run):
    code = run.run()
print(run.verdict())
sys.exit(code)
""")
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    log = tmp_path / "logs" / "slow.log"
    begin = time.monotonic()
    while not (log.exists() and "begun" in log.read_text()):
        assert time.monotonic() - begin < 300 and process.poll() is None
        time.sleep(0.05)
    killed = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert b"quick  ok" in killed["verdict.txt"]
    assert json.loads(killed["run.json"])["parts"][0]["verdict"] == "ok"
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 1
    table = (tmp_path / "out" / "verdict.txt").read_text()
    assert said.endswith(table)
    verdicts = [" ".join(line.split()[:3]) for line in table.splitlines()]
    assert verdicts[1].startswith("quick ok")
    assert verdicts[2] == "slow cut off"
    assert verdicts[3] == "never not run"


def test_results_are_named_after_card_torch_and_day(driver: ModuleType) -> None:
    day = datetime.date(2026, 1, 31)
    name = driver.results_name("NVIDIA H100 80GB HBM3", "2.11.0+cu130", day)
    assert name == "h100-80gb-hbm3-torch2.11.0-2026-01-31.json"
    assert driver.results_name("NVIDIA H200", "2.11.0", day) == "h200-torch2.11.0-2026-01-31.json"


def test_parts_of_the_real_run(driver: ModuleType, tmp_path: Path) -> None:
    results, out = tmp_path / "results" / "a.json", tmp_path / "out"
    parts = [part for stage in driver.stages(results, out) for part in stage]
    names = [part.name for part in parts]
    # Numbers first.
    assert names[:5] == ["build", "compile", "smoke", "decisive", "gpu"]
    assert len(set(names)) == len(names)
    for part in parts:
        for command in part.commands:
            for word in command[1:]:
                assert not word.endswith(".py") or (ROOT / word).is_file(), word
    assert parts[0].vital
    files = [command[-1] for command in parts[4].commands]
    assert files[:3] == [f"tests/gpu/test_gpu_{name}.py" for name in ("streams", "graphs", "costs")]
    assert files[-1] == "tests/gpu/test_gpu_distributed.py"
    assert sorted(files) == sorted(f"tests/gpu/{file.name}" for file in FOLDER.glob("test_*.py"))
    # Verdict, run and logs are written by the runner, all else to files that are named here.
    written = [c[c.index("--json") + 1] for p in parts for c in p.commands if "--json" in c]
    assert written == [str(out / f"{name}.json") for name in ("decisive", "bench")]
    assert len(written) + 3 <= 8
    [bench] = [part for part in parts if part.name == "bench"]
    bench.after([0])
    assert not results.parent.exists()
    out.mkdir()
    (out / "bench.json").write_text("{}")
    bench.after([0])
    assert (results.parent / "a-bench.json").read_text() == "{}"


def test_a_backend_with_wrong_results_is_not_measured(driver: ModuleType, tmp_path: Path) -> None:
    parts = [part for stage in driver.stages(tmp_path / "a.json", tmp_path) for part in stage]
    smoke, decisive = parts[2:4]
    # One that was cut off may only be slow.
    for codes, left_out in (([0, 0], ""), ([0, 1], "cuda"), ([None, -11], "cuda"), ([0], "")):
        smoke.after(codes)
        assert decisive.environment[driver.WITHOUT] == left_out
    assert driver.WITHOUT == providers.WITHOUT


def test_a_build_without_cuda_kernels_is_told_and_goes_on(
    runner: ModuleType, driver: ModuleType, tmp_path: Path
) -> None:
    [[build], *_] = driver.stages(tmp_path / "a.json", tmp_path)
    says = "print('ampfast is built without CUDA kernels, as nvcc was not found. Nothing is lost')"
    build = replace(build, commands=[python(says)])
    tests = runner.Part("tests", [python("pass")], 300)
    _, outcomes = run(runner, tmp_path / "out", [build], [tests])
    assert any("nvcc was not found" in line for line in outcomes["build"].details)
    assert [outcomes[name].verdict for name in ("build", "tests")] == ["ok", "ok"]


def test_make_may_be_missing(
    driver: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    [[build], *_] = driver.stages(tmp_path / "a.json", tmp_path)
    assert build.commands[0][-4:] == [sys.executable, "setup.py", "build_ext", "--inplace"]


def test_output_is_shown_as_it_comes(
    runner: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = tmp_path / "seen"
    code = f"""
import pathlib, time
print("first", flush=True)
while not pathlib.Path({str(seen)!r}).exists():
    time.sleep(0.01)
print("second")
"""

    class Terminal(io.StringIO):
        def write(self, text: str) -> int:
            if "first" in text:
                seen.touch()
            return super().write(text)

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    shown = runner.Part("shown", [python(code)], 300, shown=True)
    hidden = runner.Part("hidden", [python("print('unseen')")], 300)
    assert run(runner, tmp_path / "out", [shown], [hidden])[0] == 0
    said = terminal.getvalue()
    assert said.count("first\nsecond\n") == 1 and "unseen" not in said


def test_logs_are_one_small_file(
    runner: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "LOG_BYTES", 3)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "long.log").write_text("12345")
    with tarfile.open(fileobj=io.BytesIO(runner.archive(tmp_path))) as packed:
        log = packed.extractfile("a/long.log")
        assert log is not None and log.read() == b"345"


def test_clocks_are_kept_or_the_reason_why_not(
    runner: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    values = ["1980 MHz", "3201 MHz", "0x0000000000000001", "34", "120.10 W", "P0"]
    for said, code, clocks in (
        (", ".join(values), 0, dict(zip(runner.CLOCKS, values, strict=True))),
        ("no such field", 2, {"error": "no such field"}),
    ):
        fake.write_text(f"#!/bin/sh\necho '{said}'\nexit {code}\n")
        fake.chmod(0o755)
        _, outcomes = run(runner, tmp_path / "out", [runner.Part("a", [python("pass")], 300)])
        assert outcomes["a"].clocks == [clocks, clocks]
    fake.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "nvidia-smi" in runner.clocks()["error"]


def test_the_commit_reaches_every_part(
    driver: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(driver.COMMIT, "")  # restored afterwards
    monkeypatch.setattr(driver, "facts", lambda: ("a card", "2.11.0"))
    monkeypatch.setattr(driver, "LOGS", tmp_path / "logs")
    says = python("import os; print('commit', os.environ['AMPFAST_COMMIT'])")
    part = driver.Part("says", [says], 300)
    monkeypatch.setattr(driver, "stages", lambda *arguments: [[part]])
    assert driver.main(["--out", str(tmp_path / "out"), "--commit", "abc"]) == 0
    assert (
        "commit abc, GPU a card, torch 2.11.0\nsays  ok"
        in (tmp_path / "out" / "verdict.txt").read_text()
    )
    assert (tmp_path / "logs" / "says.log").read_text() == "commit abc\n"


def test_it_builds_with_its_interpreter(
    driver: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("make") is None:
        pytest.skip("needs make")
    # As from `make -k gpu VENV=.venv`, whose settings must not be inherited.
    monkeypatch.setenv("MAKEFLAGS", "k -- VENV=.venv PYTHON=no-such-python")
    [build] = driver.stages(tmp_path / "a.json", tmp_path / "b.json")[0]
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
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=hidden,
    )
    assert done.returncode == (2 if by_make else 1)  # make's own exit code for any failure
    assert "needs a GPU" in done.stderr
    assert "building" not in done.stdout
    assert not (tmp_path / "out").exists()


def test_an_interpreter_without_torch_is_reported(
    driver: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "FACTS", "import no_such_torch")
    with pytest.raises(
        SystemExit, match="GPU: ModuleNotFoundError: No module named 'no_such"
    ) as why:
        driver.facts()
    assert str(why.value).startswith(sys.executable)
    monkeypatch.setattr(driver, "FACTS", "import os; os._exit(3)")
    with pytest.raises(SystemExit, match="exit code 3; say PYTHON="):
        driver.facts()
