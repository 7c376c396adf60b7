"""Launches of compiled kernels by Triton, the first and later ones, over a driver that records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.kernels import run_check, run_unscale
from support.steps import frames_of
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from variants import TARGETS, clip_of, kernels, launch

from ampfast import _C
from ampfast.backends import core, cuda_graphs
from ampfast.backends.core import Factor, Pass, Update
from ampfast.backends.gpu import DeviceKernels

CPU = torch.device("cpu")
KERNELS = DeviceKernels(launch)
NAMES = ("multi_tensor", "update_scale", "clip_coefficient")


class Recording:
    """Driver of a GPU that runs nothing."""

    def __init__(self) -> None:
        self.utils = self
        self.launches: list[tuple[Any, ...]] = []
        self.stream = 7
        self.takes_direct_launches = True

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
            elif not self.takes_direct_launches:
                raise TypeError("a launch takes more in this version")

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
    for name in NAMES:
        getattr(kernels, name).device_caches.clear()
    yield recording
    for name in NAMES:
        getattr(kernels, name).device_caches.clear()


@pytest.fixture(params=NAMES)
def call(request: pytest.FixtureRequest) -> Callable[[], object]:
    """Launches one of the kernels."""
    one, grads = torch.ones(()), core.list_of([torch.ones(3)], CPU)
    tracker = torch.zeros((), dtype=torch.int32)
    update = Update(one, tracker, [one], 2.0, 0.5, 2000, None, one)
    clip, found = clip_of(torch.float32, True, True, False), {"found_inf": torch.zeros(())}
    call = {
        "multi_tensor": lambda: run_unscale(KERNELS, grads, one, is_scale=True, **found),
        "update_scale": lambda: launch.update_scale(update),
        "clip_coefficient": lambda: launch.clip_coefficient(clip),
    }[request.param]
    call.__name__ = request.param
    return call


def alike(given: tuple[Any, ...]) -> list[Any]:
    """Arguments of a launch with addresses for tensors, without what hooks get."""
    code = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in given]
    return code[:6] + code[9:]


@pytest.mark.parametrize("direct", [True, False])
def test_later_launches_are_direct_and_alike(
    call: Any, direct: bool, recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without Triton's `run`, where this version takes that; else all are usual."""
    usual: list[Any] = []
    run = JITFunction.run

    def recorded(function: Any, *args: Any, **options: Any) -> Any:
        if not options["warmup"]:
            usual.append(function)
        return run(function, *args, **options)

    monkeypatch.setattr(JITFunction, "run", recorded)
    recording.takes_direct_launches = direct
    call()
    assert usual == [getattr(kernels, call.__name__)]
    for recording.stream in (7, 8):
        call()
    assert len(usual) == (1 if direct else 3)
    first, second, third = recording.launches
    assert alike(first) == alike(second)
    assert (first[3], second[3], third[3]) == (7, 7, 8)
    # Then there is nothing that the driver would be asked about.
    assert direct == (not any(isinstance(argument, torch.Tensor) for argument in second))
    assert not direct or second[6:9] == (None, None, None), "hooks without a call"


def test_hooks_set_later_see_each_launch(
    call: Any, recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, Any]] = []
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
    assert all(told["name"] == call.__name__ and told["stream"] == 7 for _, told in seen)
    plain: list[Any] = []
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", plain.append)
    call()
    assert len(plain) == 1


@pytest.mark.parametrize("why", ["no compiler", "its kernel is not compiled yet"])
def test_a_dtype_that_appears_later_fails_before_the_first_write(
    why: str, recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot be compiled, or not while a CUDA graph is captured."""
    scale = torch.tensor(4.0)
    plain, wide = torch.ones(3), torch.ones(3, dtype=torch.float64)

    def unscale(*grads: torch.Tensor) -> None:
        run_unscale(KERNELS, core.list_of(list(grads), CPU), scale, is_scale=True)

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError(why)

    unscale(plain)
    with monkeypatch.context() as patch:
        if why == "no compiler":
            patch.setattr(JITFunction, "_do_compile", broken)
        else:
            patch.setattr(cuda_graphs, "is_capturing", lambda: True)
        unscale(plain)
        for grads in ((wide,), (plain, wide)):
            before = len(recording.launches)
            with pytest.raises(RuntimeError, match=why):
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


@pytest.mark.parametrize(
    ("hip", "registers", "most_threads", "programs"),
    [
        *((None, 32, 2048, 16), (None, 33, 2048, 12), (None, 64, 2048, 8), (None, 65, 2048, 7)),
        *((None, 40, 1024, 8), (None, 72, 1536, 7), (None, 40, 1536, 12)),
        (None, None, 2048, 16),  # of a Triton that does not tell
        ("7.0", 128, 2048, 8),  # AMD's registers are counted otherwise
    ],
)
def test_the_grid_is_what_a_device_holds(
    hip: str | None, registers: int | None, most_threads: int, programs: int, monkeypatch: Any
) -> None:
    properties = SimpleNamespace(
        max_threads_per_multi_processor=most_threads,
        multi_processor_count=132,
        warp_size=64 if hip else 32,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "hip", hip)
    kernel = SimpleNamespace(_init_handles=lambda: None)
    if registers is not None:
        kernel.n_regs = registers
    device = torch.device("cuda", 8 if hip else 7)
    assert launch._resident_programs(kernel, device) == 132 * programs


def test_no_more_programs_than_chunks(
    recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_most_programs", 6)
    for numel, programs in ((3, 1), (5 * 2048, 5), (9 * 2048, 6)):
        grads = core.list_of([torch.ones(numel)], CPU)
        for _ in range(2):  # the first launch and a later one
            run_check(KERNELS, grads, torch.tensor(4.0))
            assert recording.launches[-1][0] == programs
