"""Launches of compiled kernels by Triton, the first and later ones, over a driver that records."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.frames import frames_of
from support.kernel_calls import run_check, run_unscale
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from variants import TARGETS, kernels, launch, table_of

from ampfast import _C
from ampfast.backends import core
from ampfast.backends.core import Clip, Factor, Pass, Update
from ampfast.backends.gpu import DeviceKernels

CPU = torch.device("cpu")
KERNELS = DeviceKernels(launch)


class Recording:
    """Driver of a GPU that runs nothing."""

    def __init__(self) -> None:
        self.utils = self
        self.launches: list[tuple[Any, ...]] = []
        self.stream = 7

    def get_current_target(self) -> Any:
        return TARGETS["sm_90"]

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return self.stream

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 49_152}

    def load_binary(self, *_: Any) -> tuple[Any, ...]:
        return "module", "function", 0, 0, 1024

    def unload_module(self, module: Any) -> None:
        pass

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        def run(*given: Any) -> None:
            *_, enter, leave = given[:9]
            for hook in (enter, leave):
                if hook is not None:
                    hook(given[6])
            if given[0] > 0:  # as Triton's own
                self.launches.append(given)

        return run


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recording]:
    """A driver that has loaded no kernel, and kernels that were never launched."""
    recording = Recording()
    monkeypatch.setattr(driver, "_active", recording)
    monkeypatch.setattr(launch, "_launched", {})
    monkeypatch.setattr(launch, "_threads", lambda device: 128)
    monkeypatch.setattr(launch, "_most_programs", 4)
    monkeypatch.setattr(launch, "is_capturing", lambda: False)
    for name in ("multi_tensor", "narrow", "update_scale", "clip_coefficient"):
        getattr(kernels, name).device_caches.clear()
    yield recording
    for name in ("multi_tensor", "narrow", "update_scale", "clip_coefficient"):
        getattr(kernels, name).device_caches.clear()


@pytest.fixture
def ordinary(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Kernels launched by `JITFunction.run`, in order."""
    launched: list[Any] = []
    run = JITFunction.run

    def recorded(function: Any, *args: Any, **options: Any) -> Any:
        if not options["warmup"]:
            launched.append(function)
        return run(function, *args, **options)

    monkeypatch.setattr(JITFunction, "run", recorded)
    return launched


def multi_tensor() -> Callable[[], object]:
    grads = core.list_of([torch.ones(3)], CPU)
    found_inf, scale = torch.zeros(()), torch.tensor(4.0)
    return lambda: run_unscale(KERNELS, grads, scale, is_scale=True, found_inf=found_inf)


def narrow() -> Callable[[], object]:
    table, flag = table_of(torch.float16, True), torch.zeros(())
    return lambda: launch.narrow(table, table.segments[0], flag)


def update_scale() -> Callable[[], object]:
    one, tracker = torch.ones(()), torch.zeros((), dtype=torch.int32)
    update = Update(one, tracker, [one], 2.0, 0.5, 2000, None, one)
    return lambda: launch.update_scale(update)


def clip_coefficient() -> Callable[[], object]:
    one, sums = torch.ones(()), torch.ones(3, 2, dtype=torch.float64)
    clip = Clip(sums, 1.0, True, one, one.double(), one, one)
    return lambda: launch.clip_coefficient(clip)


CALLS = {each.__name__: each for each in (multi_tensor, narrow, update_scale, clip_coefficient)}


def alike(given: tuple[Any, ...]) -> list[Any]:
    """Arguments of a launch with addresses for tensors, without what hooks get."""
    code = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in given]
    return code[:6] + code[9:]


@pytest.mark.parametrize("make", CALLS.values(), ids=CALLS)
def test_later_launches_are_direct_and_alike(
    make: Callable[[], Callable[[], object]], recording: Recording, ordinary: list[Any]
) -> None:
    call = make()
    call()
    assert ordinary == [getattr(kernels, make.__name__)]
    for recording.stream in (7, 8):
        call()
    assert len(ordinary) == 1
    first, second, third = recording.launches
    assert alike(first) == alike(second)
    assert (first[3], second[3], third[3]) == (7, 7, 8)
    assert second[6:9] == (None, None, None), "hooks without a call"
    # Nothing that the driver would be asked about.
    assert not any(isinstance(argument, torch.Tensor) for argument in second)


def with_one_more(patch: pytest.MonkeyPatch) -> None:
    make = Recording.launcher_cls

    def launcher_cls(self: Recording, *given: Any) -> Callable[..., None]:
        run = make(self, *given)
        return lambda *all_of_them, **others: run(*all_of_them) if others else fail()

    def fail() -> None:
        raise TypeError("a launch takes more in this version")

    def launched(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *given, stream: kernel.run(
            *grid, stream, kernel.function, kernel.packed_metadata, *[None] * 3, *given, more=1
        )

    patch.setattr(Recording, "launcher_cls", launcher_cls)
    run = JITFunction.run

    def usual(function: Any, *given: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(function, *given, grid=grid, warmup=True, **options)
        if not warmup:
            launched(kernel._init_handles() or kernel, (*grid, 1, 1)[:3])(*given, stream=7)
        return kernel

    patch.setattr(JITFunction, "run", usual)


def without_hooks(patch: pytest.MonkeyPatch) -> None:
    patch.delattr(type(knobs.runtime), "launch_enter_hook")


@pytest.mark.parametrize("make", CALLS.values(), ids=CALLS)
def test_with_another_launch_all_are_usual(
    make: Callable[[], Callable[[], object]], recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_one_more(monkeypatch)
    call = make()
    for _ in range(3):
        call()
    assert len(recording.launches) == 3
    assert [takes_addresses for *_, takes_addresses in launch._launched.values()] == [False]


@pytest.mark.parametrize("make", CALLS.values(), ids=CALLS)
def test_hooks_set_later_see_each_launch(
    make: Callable[[], Callable[[], object]], recording: Recording
) -> None:
    seen: list[tuple[str, Any]] = []
    call = make()
    for _ in range(2):
        call()
    chains = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    hooks = [lambda told, at=at: seen.append((at, told.get())) for at in ("enter", "exit")]
    for chain, hook in zip(chains, hooks, strict=True):
        chain.add(hook)
    try:
        call()
    finally:
        for chain, hook in zip(chains, hooks, strict=True):
            chain.remove(hook)
    call()
    assert [at for at, _ in seen] == ["enter", "exit"]
    assert all(told["name"] == make.__name__ and told["stream"] == 7 for _, told in seen)


def test_a_plain_function_as_hook(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    call = multi_tensor()
    call()
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", seen.append)
    call()
    assert len(seen) == 1


def test_a_dtype_that_appears_later_fails_before_the_first_write(
    recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale = torch.tensor(4.0)
    plain, wide = torch.ones(3), torch.ones(3, dtype=torch.float64)

    def unscale(*grads: torch.Tensor) -> None:
        run_unscale(KERNELS, core.list_of(list(grads), CPU), scale, is_scale=True)

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no compiler")

    unscale(plain)
    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "_do_compile", broken)
        unscale(plain)
        for grads in ((wide,), (plain, wide)):
            before = len(recording.launches)
            with pytest.raises(RuntimeError, match="no compiler"):
                unscale(*grads)
            assert len(recording.launches) == before
    unscale(plain, wide)
    assert len(recording.launches) == 4


def test_few_frames(recording: Recording) -> None:
    """Python's own between a pass, an update and the driver, with Triton's launcher."""
    grads = core.list_of([torch.ones(3)], CPU)
    scale, tracker = torch.tensor(4.0), torch.zeros((), dtype=torch.int32)
    update = Update(scale, tracker, [torch.zeros(())], 2.0, 0.5, 2000)
    work = Pass(True, Factor.TIMES_RECIPROCAL, scale)
    # A table of an earlier list at these addresses would do.
    _C.clear_tables()
    uploads = _C.tables_made()

    def call() -> None:
        KERNELS.run(grads, work)
        KERNELS.update(update)

    call()
    recording.launches.clear()
    frames = frames_of(call, but=Recording.launcher_cls)
    assert len(recording.launches) == 2
    assert _C.tables_made() - uploads == 1
    assert len(frames) <= 25, frames


def test_several_threads_launch_a_variant_first(recording: Recording) -> None:
    """Whoever comes second may compile once more, and launches the same."""
    calls = [multi_tensor() for _ in range(4)]
    errors: list[BaseException] = []

    def often(call: Callable[[], object]) -> None:
        try:
            for _ in range(50):
                call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=often, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    tables = [given[15] for given in recording.launches]  # their sums of chunks
    addresses = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in tables]
    assert len(addresses) == 200
    assert sorted(map(addresses.count, set(addresses))) == [50] * 4


@pytest.mark.parametrize(
    ("registers", "most_threads", "programs"),
    [
        *((32, 2048, 16), (33, 2048, 12), (48, 2048, 10), (64, 2048, 8), (65, 2048, 7)),
        *((40, 1024, 8), (72, 1536, 7), (40, 1536, 12)),
    ],
)
def test_the_grid_is_what_a_device_holds(
    registers: int, most_threads: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(
        max_threads_per_multi_processor=most_threads, multi_processor_count=132, warp_size=32
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    kernel = SimpleNamespace(n_regs=registers, _init_handles=lambda: None)
    assert launch._resident_programs(kernel, torch.device("cuda", 7)) == 132 * programs


def test_the_grid_without_the_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(
        max_threads_per_multi_processor=2048, multi_processor_count=10, warp_size=32
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for kernel in (object(), SimpleNamespace(_init_handles=lambda: None)):
        assert launch._resident_programs(kernel, torch.device("cuda", 8)) == 160
    # AMD's registers are counted otherwise.
    monkeypatch.setattr(torch.version, "hip", "7.0")
    properties.warp_size = 64
    kernel = SimpleNamespace(n_regs=128, _init_handles=lambda: None)
    assert launch._resident_programs(kernel, torch.device("cuda", 9)) == 80


def test_no_more_programs_than_chunks(
    recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_most_programs", 6)
    for numel, programs in ((3, 1), (5 * 2048, 5), (9 * 2048, 6)):
        grads = core.list_of([torch.ones(numel)], CPU)
        for _ in range(2):  # the first launch and a later one
            run_check(KERNELS, grads, torch.tensor(4.0))
            assert recording.launches[-1][0] == programs
