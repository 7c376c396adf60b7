"""Tables of gradients while addresses, streams and devices change and steps are in flight."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from gpu_support import assert_twins_same, flag, kernels_of, no_syncs, twins
from support.comparison import BITS, FLOATS
from support.gradients import make_gradient
from support.kernel_calls import grads_of, run_check, run_unscale

from ampfast import _C, GradScaler

pytestmark = pytest.mark.gpu

# Long enough for the host to queue the rest.
A_WHILE = 400_000_000


def torch_unscaled(grad: torch.Tensor, inverse: float) -> torch.Tensor:
    """Gradient unscaled by torch's op; on the CPU, which has all dtypes."""
    result = grad.clone().cpu()
    torch._amp_foreach_non_finite_check_and_unscale_(
        [result], torch.zeros(()), torch.tensor(inverse)
    )
    return result


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    bits = BITS[theirs.dtype]
    return torch.equal(ours.cpu().view(bits), theirs.view(bits))


def test_one_address_with_other_sizes_and_dtypes(backend: str, device: torch.device) -> None:
    kernels = kernels_of(backend, device)
    memory = torch.empty(2**20, dtype=torch.uint8, device=device)
    chance = random.Random(7)
    inverse = flag(1 / 3, device)
    for step in range(200):
        dtype = chance.choice(FLOATS)
        count = chance.choice((1, 3, 2048, 4096, 5000, 60_000))
        grad = memory[: count * dtype.itemsize].view(dtype)
        grad.copy_(torch.randn(count, device=device))
        bad = step % 3 == 0
        if bad:
            grad[-1] = torch.inf
        expected = torch_unscaled(grad, 1 / 3)
        memory[count * dtype.itemsize :] = 0xFF  # NaN in any dtype, which must not count
        assert run_check(kernels, grads_of([grad])).item() == float(bad), step
        assert run_unscale(kernels, grads_of([grad]), inverse, is_scale=False).item() == float(bad)
        assert same_bits(grad, expected), (step, dtype, count)


def test_gradients_are_freed_and_reallocated(backend: str, device: torch.device) -> None:
    chance = random.Random(8)
    scaler = GradScaler(backend=backend, init_scale=8.0, growth_interval=10_000)
    scaler.scale(torch.ones((), device=device))
    reused, seen = 0, set()
    for step in range(100):
        dtype = chance.choice((torch.float32, torch.float64, torch.bfloat16))
        count = chance.choice((300, 5_000, 70_000))
        p = torch.nn.Parameter(torch.zeros(count, dtype=dtype, device=device))
        p.grad = torch.full((count,), 24.0, dtype=dtype, device=device)
        reused += p.grad.data_ptr() in seen
        seen.add(p.grad.data_ptr())
        optimizer = torch.optim.SGD([p], lr=1.0)
        scaler.step(optimizer)
        scaler.update()
        assert bool((p == -3.0).all()), (step, dtype, count)
        del p, optimizer
    assert reused > 10, "the allocator gave other addresses each time"


def test_many_steps_in_flight(backend: str, device: torch.device) -> None:
    """More lists than kept tables, so that buffers come and go while the device works."""
    kernels = kernels_of(backend, device)
    lists = [
        [make_gradient("long", dtype, seed)[: 900 * seed + 5].to(device) for dtype in FLOATS]
        for seed in range(45)
    ]
    expected = [[torch_unscaled(torch_unscaled(g, 0.5), 0.5) for g in grads] for grads in lists]
    inverse = flag(0.5, device)
    run_unscale(kernels, grads_of([g.clone() for g in lists[0]]), inverse, is_scale=False)
    torch.cuda.synchronize()
    found = []
    before = _C.tables_made()
    with no_syncs():
        torch.cuda._sleep(A_WHILE)
        for _ in range(2):
            for grads in lists:
                found.append(run_unscale(kernels, grads_of(grads), inverse, is_scale=False))
    assert _C.tables_made() - before >= len(lists), "there were no new tables"
    for grads, reference in zip(lists, expected, strict=True):
        assert all(map(same_bits, grads, reference))
    assert not torch.stack(found).any()


def test_flags_in_flight_keep_their_values(backend: str, device: torch.device) -> None:
    kernels = kernels_of(backend, device)
    grads = [torch.ones(5_000, device=device) for _ in range(40)]
    for bad in range(0, 40, 3):
        grads[bad][bad * 100] = torch.nan
    expected = torch.tensor([float(i % 3 == 0) for i in range(40)] * 5)
    torch.cuda.synchronize()
    torch.cuda._sleep(A_WHILE)
    found = [run_check(kernels, grads_of([grad])) for _ in range(5) for grad in grads]
    assert torch.equal(torch.stack(found).cpu(), expected)


@pytest.mark.parametrize("kind", ["sgd", "fused_adam"])
def test_streams_that_change(backend: str, device: torch.device, kind: str) -> None:
    ours, theirs = twins(backend, kind, device, growth_interval=2)
    streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    chance = random.Random(9)
    last = streams[0]
    for iteration in range(12):
        stream = chance.choice(streams)
        stream.wait_stream(last)
        last = stream
        with torch.cuda.stream(stream):
            bad = torch.inf if iteration % 4 == 3 else None
            for twin in (ours, theirs):
                twin.backward(iteration, bad=bad)
                twin.step()
                twin.finish()
    torch.cuda.synchronize()
    assert_twins_same(ours, theirs)


def test_a_table_belongs_to_a_stream(backend: str, device: torch.device) -> None:
    kernels = kernels_of(backend, device)
    grads = [torch.full((70_003,), 24.0, device=device)]
    inverse = flag(0.5, device)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    made, uploads = [], []
    for _ in range(4):
        for stream in streams:
            with torch.cuda.stream(stream):
                before = _C.tables_made(), _C.uploads()
                run_unscale(kernels, grads_of(grads), inverse, is_scale=False)
                made.append(_C.tables_made() - before[0])
                uploads.append(_C.uploads() - before[1])
            torch.cuda.synchronize()
    assert made == [1] * 3 + [0] * 9
    assert uploads == [0] * 9 + [1] * 3
    assert bool((grads[0] == 24.0 / 2**12).all())


def test_two_streams_at_once(backend: str, device: torch.device) -> None:
    """Each stream's table has its own scratch, so launches may overlap."""
    kernels = kernels_of(backend, device)
    sides: list[Any] = []
    for side in range(2):
        grad = torch.full((2_000_003,), 1.0, device=device)
        if side:
            grad[-1] = torch.inf
        sides.append((torch.cuda.Stream(), grads_of([grad]), grad, []))
    torch.cuda.synchronize()
    for _ in range(200):
        for stream, grads, _, found in sides:
            with torch.cuda.stream(stream):
                found.append(run_check(kernels, grads))
    torch.cuda.synchronize()
    assert not torch.stack(sides[0][3]).any()
    assert torch.stack(sides[1][3]).all()


def test_device_contexts(backend: str, device: torch.device) -> None:
    ours, theirs = twins(backend, "sgd", device, growth_interval=2)
    for iteration in range(4):
        with torch.cuda.device(device), torch.cuda.device(device.index):
            for twin in (ours, theirs):
                twin.backward(iteration)
                twin.step()
                twin.finish()
        assert torch.cuda.current_device() == device.index
    assert_twins_same(ours, theirs)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_another_device_is_current(backend: str, device: torch.device, kind: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    other = torch.device("cuda", (device.index + 1) % torch.cuda.device_count())
    ours, theirs = twins(backend, kind, other, places=(other, device), growth_interval=2)
    for iteration in range(6):
        for twin in (ours, theirs):
            twin.backward(iteration, bad=torch.inf if iteration == 2 else None)
            twin.step()
            twin.finish()
        assert torch.cuda.current_device() == device.index
    assert_twins_same(ours, theirs)


@pytest.mark.parametrize("how", ["freed", "shrunk"])
def test_freed_storage_is_refused(backend: str, device: torch.device, how: str) -> None:
    grad = torch.ones(5_000, device=device)
    grad.untyped_storage().resize_(0 if how == "freed" else 100)
    with pytest.raises(RuntimeError, match="storage of a gradient was freed or resized"):
        run_check(kernels_of(backend, device), grads_of([grad]))
