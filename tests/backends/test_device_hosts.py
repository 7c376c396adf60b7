"""Host side of device kernels: locks, alignment, chunks, and what an interrupt leaves behind."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from support.comparison import assert_same
from support.kernels import grads_of, run_check, run_unscale
from support.launchers import ReferenceLauncher, spans_of
from support.steps import side

from ampfast import _C, GradScaler
from ampfast.backends import core
from ampfast.backends.gpu import DeviceKernels

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_tables() -> None:
    _C.clear_tables()


def test_another_thread_does_not_come_between_two_launches() -> None:
    """Both passes are over one table, whose scratch the first launch has written."""
    grads = [torch.tensor([torch.inf]), torch.ones(2, dtype=torch.float64)]
    between, found = threading.Event(), {}

    class Interrupted(ReferenceLauncher):
        def multi_tensor(self, work: Any, table: Any, segment: Any, is_last: bool) -> None:
            super().multi_tensor(work, table, segment, is_last)
            if not is_last and threading.current_thread().name == "first":
                between.set()
                second.join(0.2)

    kernels = DeviceKernels(Interrupted())

    def check() -> None:
        found[threading.current_thread().name] = run_check(kernels, grads_of(grads)).item()

    def check_later() -> None:
        assert between.wait(600)
        check()

    first = threading.Thread(target=check, name="first")
    second = threading.Thread(target=check_later, name="second")
    for thread in (second, first):
        thread.start()
    for thread in (first, second):
        thread.join()
    assert found == {"first": 1.0, "second": 1.0}


class NoBfloat16(ReferenceLauncher):
    """Cannot launch one of two dtypes, which a launcher with `prepare` finds out before."""

    broken = "multi_tensor"

    def multi_tensor(self, work: Any, table: Any, segment: Any, is_last: bool) -> None:
        self.refuse("multi_tensor", segment)
        super().multi_tensor(work, table, segment, is_last)

    def refuse(self, name: str, segment: Any) -> None:
        if segment.dtype is torch.bfloat16 and self.broken == name:
            raise RuntimeError("no compiler")


class Prepared(NoBfloat16):
    broken = "prepare"

    def prepare(self, work: Any, table: Any, segment: Any, is_last: bool) -> None:
        self.refuse("prepare", segment)


@pytest.mark.parametrize("made", [NoBfloat16, Prepared])
def test_a_launch_that_fails_leaves_nothing_behind(made: type[NoBfloat16]) -> None:
    launcher, scale, found = made(), torch.tensor(4.0), torch.zeros(())
    kernels = DeviceKernels(launcher)
    grads = [torch.full((3,), torch.inf), torch.ones(3, dtype=torch.bfloat16)]
    with pytest.raises(RuntimeError, match="no compiler"):
        run_check(kernels, grads_of(grads))
    grads[0].fill_(8.0)
    if made is Prepared:
        assert launcher.launches == []
        with pytest.raises(RuntimeError, match="no compiler"):
            run_unscale(kernels, grads_of(grads), scale, is_scale=True, found_inf=found)
        assert grads[0].tolist() == [8.0] * 3
        assert run_check(kernels, grads_of(grads[1:])).item() == 0.0, "one alone is not prepared"
    launcher.broken = ""
    assert run_check(kernels, grads_of(grads)).item() == 0.0


def test_elements_off_their_own_alignment_are_irregular() -> None:
    memory = bytearray(64)
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        for offset in range(1, dtype.itemsize):
            odd = torch.frombuffer(memory, dtype=dtype, count=3, offset=offset)
            assert core.list_of([odd], CPU) is None
        even = torch.frombuffer(memory, dtype=dtype, count=3, offset=dtype.itemsize)
        assert core.list_of([even], CPU) is not None


def chunks_of(tensors: list[torch.Tensor]) -> list[tuple[int, int, int]]:
    table = core.DeviceTable.of(grads_of(tensors), False)
    [segment] = table.segments
    chunks = spans_of(table.words.tolist(), segment)
    return [(chunk.address, chunk.size, chunk.parameter) for chunk in chunks]


@pytest.mark.usefixtures("few_chunks")
@pytest.mark.parametrize("windows", [1, 3, 4, 11, 500])
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_chunks_cover_every_tensor_once(windows: int, offset: int) -> None:
    memory = torch.ones(windows * _C.WINDOW_BYTES // 4 + 8)
    tensors = [memory[offset : memory.numel() - 5], torch.ones(0), torch.ones(3)]
    chunks = chunks_of(tensors)
    address = tensors[0].data_ptr()
    for begin, size, parameter in chunks[:-1]:
        assert (begin, parameter) == (address, 0)
        assert 0 < size <= _C.MOST_CHUNK_BYTES
        # An equal number of windows each, counted from an aligned address.
        assert begin == tensors[0].data_ptr() or begin % 16 == 0
        address += size
    assert address == tensors[0].data_ptr() + tensors[0].nbytes
    assert chunks[-1] == (tensors[2].data_ptr(), 12, 2)
    assert len(chunks) <= max(6, tensors[0].nbytes // _C.MOST_CHUNK_BYTES + 3)


def test_chunks_of_long_lists() -> None:
    # Never touched, so they take no memory.
    sizes = {2**22: 2**13, 2**23: 2**14, 2**27: 2**16, 2**28: 9 * 2**13, 2**31 + 5: 2**18}
    for numel, size in sizes.items():
        tensor = torch.empty(numel)
        found = chunks_of([tensor])
        assert found[1][1] == size
        assert found[-1][0] + found[-1][1] == tensor.data_ptr() + 4 * numel
        most = (4 if numel > 2**24 else 1) * _C.ENOUGH_CHUNKS
        assert len(found) <= max(most + 1, 4 * numel // _C.MOST_CHUNK_BYTES + 2)


@pytest.mark.parametrize(("name", "more"), [("unscale_", ()), ("clip_grad_norm_", (0.5,))])
def test_an_interrupted_launch_leaves_a_step_that_is_skipped(
    name: str, more: tuple[float, ...], launcher: ReferenceLauncher
) -> None:
    run = side(GradScaler)
    run.scaler.scale(run.loss(3)).backward()
    held = run.scaler._per_optimizer_states[id(run.optimizer)]
    plain = launcher.multi_tensor

    def interrupted(work: Any, *more: Any) -> None:
        if not work.write:
            plain(work, *more)
            return
        assert held["stage"].name == "UNSCALED", "not marked before the first write"
        assert [flag.item() for flag in held["found_inf_per_device"].values()] == [1.0]
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "multi_tensor", interrupted)
        with pytest.raises(KeyboardInterrupt):
            getattr(run.scaler, name)(run.optimizer, *more)
    before = [param.detach().clone() for param in run.model.parameters()]
    assert run.scaler.step(run.optimizer) is None
    assert_same(before, [param.detach() for param in run.model.parameters()])
    assert run.scaler.step_skipped(run.optimizer)


def test_gradients_live_until_the_launch(launcher: ReferenceLauncher) -> None:
    """What runs before a launch may drop them: nobody else gets their memory."""
    param = torch.nn.Parameter(torch.zeros(4096))
    optimizer = torch.optim.SGD([param], lr=0.1)
    param.grad = torch.full((4096,), 8.0)
    address = param.grad.data_ptr()
    plain, held = launcher.multi_tensor, []

    def dropping(*work: Any) -> None:
        param.grad = None
        held.extend(torch.full((4096,), 8.0) for _ in range(8))
        plain(*work)

    launcher.multi_tensor = dropping  # type: ignore[method-assign]
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    assert held
    assert all(other.data_ptr() != address and other.eq(8.0).all() for other in held)
