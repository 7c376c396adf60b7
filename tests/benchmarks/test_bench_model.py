"""The model of docs/kernels.md: counted with the code, beside what was measured."""

from __future__ import annotations

import shutil

import pytest
import torch
from simulated import CPU
from support.reference_launcher import ReferenceLauncher

from ampfast.backends import core
from ampfast.backends.gpu import DeviceKernels
from benchmarks import __main__ as command
from benchmarks import machine, model, pages
from benchmarks.cases import CASES, GradCase, make_gradients
from benchmarks.results import Results, Row, Spread

SIDES = {"torch": "torch", "cuda": "ampfast, cuda", "triton": "ampfast, triton"}


def test_the_page_has_the_table_of_the_code_and_of_the_committed_results():
    _, block, _ = pages.split(machine.REPOSITORY / model.PAGE)
    expected = model.block(pages.committed(machine.REPOSITORY))
    assert block.strip() == expected, "renew it: python -m benchmarks model --write ."


@pytest.mark.parametrize("call", ["check", "unscale"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_model_counts_what_a_launcher_reads_and_writes(call, dtype):
    case = GradCase("mixed", (*(20 * [(257,)]), (3, 100_000), (), (7,)))
    counted, launcher = model.cost(case, dtype, call), ReferenceLauncher()
    grads = core.list_of(make_gradients(case, dtype, CPU), CPU)
    DeviceKernels(launcher).run(grads, model.PASSES[call])
    assert counted.launches == len(launcher.launches) == 1
    assert counted.bytes == launcher.read + launcher.written
    # Of every tensor at least an address and an extent.
    assert counted.table_bytes >= 16 * len(case.shapes)
    moved = counted.bytes + counted.table_bytes
    fixed = model.FIXED_SECONDS
    assert counted.seconds == pytest.approx(fixed + moved / model.BYTES_PER_SECOND)


@pytest.mark.parametrize(
    ("shapes", "launches"),
    [
        *[([(3,)], (1, 1)), (110 * [(3,)], (1, 1)), (111 * [(3,)], (2, 1))],
        *[(1000 * [(1024,)], (10, 2)), ([(320 << 16,)], (1, 1)), ([(320 << 16, 2)], (2, 1))],
        *[([((320 << 16) + 1,)], (2, 1)), ([((319 << 16) + 1,), (1,)], (2, 1))],
        ([(1 << 30,)], (52, 8)),
    ],
)
def test_launches_of_torchs_op(shapes, launches):
    case = GradCase("some", tuple(shapes))
    found = tuple(model.torch_launches(case, *most) for most in model.TORCH_LAUNCHES.values())
    assert found == launches


def test_measurements_are_of_the_newest_run_on_a_gpu_and_the_faster_backend(monkeypatch):
    monkeypatch.setattr(model, "LISTS", [("1000x1k", torch.float32)])

    def results(gpu, date, **ms):
        name = ("decisive", "1000x1k, cold", "float32", "check")
        rows = [Row(*name, SIDES[side], ms=Spread(x, x, x)) for side, x in ms.items()]
        machine = {"gpu": gpu} if gpu else {"cpu": "a"}
        return Results(machine, "2.11.0", "3.6.0", "0.1", "abc", date, rows=rows)

    old = results("H1", "2026-01-01", cuda=0.001)
    new = results("H2", "2026-02-01", cuda=0.004, triton=0.003, torch=0.001)
    on_cpu = results(None, "2026-03-01", cuda=0.001)
    block = model.block([new, on_cpu, old])
    assert block.count(" 3 us, triton |") == 1 and block.count("| not measured |") == 1
    assert "Measured on H2 " in block and block.endswith("commit abc, 2026-02-01.")
    without = model.block([on_cpu])
    assert without.count("| not measured |") == 2 and "Measured" not in without


def test_the_command_prints_or_writes_the_table(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(model, "LISTS", [("1000x1k", torch.float32)])
    assert command.main(["model"]) == 0
    printed = capsys.readouterr().out
    assert f"| {CASES['1000x1k'].list_bytes(torch.float32) / 1e6:.1f} MB |" in printed
    (tmp_path / "docs").mkdir()
    shutil.copytree(machine.REPOSITORY / "benchmarks/results", tmp_path / "benchmarks/results")
    page = tmp_path / model.PAGE
    page.write_text(f"a\n{pages.START}\nold\n{pages.END}\nb\n")
    assert command.main(["model", "--write", str(tmp_path)]) == 0
    assert page.read_text() == f"a\n{pages.START}\n{printed}{pages.END}\nb\n"
