"""The model of docs/kernels.md: counted with the code, beside what was measured."""

from __future__ import annotations

import pytest
import torch
from simulated import CPU
from support.reference_launcher import ReferenceLauncher

from ampfast.backends import core
from ampfast.backends.gpu import DeviceKernels
from benchmarks import machine, model, pages
from benchmarks.cases import GradCase, make_gradients


def test_the_page_has_the_table_of_the_code_and_of_the_committed_results():
    _, block, _ = pages.split(machine.REPOSITORY / model.PAGE)
    expected = model.block(pages.committed(machine.REPOSITORY))
    assert block.strip() == expected, "renew it: python -m benchmarks model --write ."


@pytest.mark.parametrize("call", ["check", "unscale"])
def test_the_model_counts_what_a_launcher_reads_and_writes(call):
    case = GradCase("mixed", (*(20 * [(257,)]), (3, 100_000), (), (7,)))
    counted, launcher = model.cost(case, torch.bfloat16, call), ReferenceLauncher()
    grads = core.list_of(make_gradients(case, torch.bfloat16, CPU), CPU)
    DeviceKernels(launcher).run(grads, model.PASSES[call])
    assert counted.launches == len(launcher.launches) == 1
    assert counted.bytes == launcher.read + launcher.written
    # Of every tensor at least an address and an extent.
    assert counted.table_bytes >= 16 * len(case.shapes)
    moved = (counted.bytes + counted.table_bytes) / model.BYTES_PER_SECOND
    assert counted.seconds == pytest.approx(model.FIXED_SECONDS + moved)


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
