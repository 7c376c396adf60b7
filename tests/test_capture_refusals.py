"""Refusals under capture and decisions on a GPU, with simulated GPU tensors."""

from __future__ import annotations

import contextlib
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.gradients import parameter_with

from ampfast import GradScaler, capture, grad_scaler
from ampfast.backends import scalars
from ampfast.loss_scale import Limits, LossScale

REFUSED = pytest.raises(RuntimeError, match="a CUDA graph cannot capture")


class OnGpu(torch.Tensor):
    """CPU tensor that claims to be on a GPU, and counts reads by the host."""

    waits: list[float]
    is_cuda = property(lambda self: True)

    def item(self) -> float:
        value = super().item()
        OnGpu.waits.append(value)
        return value


class Number:
    """Flag that is not a tensor."""

    is_cuda = False

    def __init__(self, value: float) -> None:
        self.value = value

    def item(self) -> float:
        return self.value


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Simulates a capture that never ends."""
    monkeypatch.setattr(OnGpu, "waits", [], raising=False)

    def begin() -> None:
        for module in (capture, grad_scaler):
            monkeypatch.setattr(module, "is_capturing", lambda: True)

    return begin


def started(**arguments: Any) -> GradScaler:
    scaler = GradScaler("cpu", init_scale=8.0, **arguments)
    scaler.scale(torch.ones(()))
    return scaler


def sgd(*grads: float, **arguments: Any) -> torch.optim.Optimizer:
    params = [parameter_with(torch.tensor([grad])) for grad in grads]
    return torch.optim.SGD(params, lr=0.1, **arguments)


READS = {
    "get_scale": "a scale that the host reads",
    "state_dict": "a scale that the host reads",
    "stats": "counts that the host reads",
    "history": "a history that the host reads",
    "step_skipped": "a question that the host asks",
    "overflow_report": "a report that the host reads",
    "health": "a report that the host reads",
    "check_ranks": "a comparison that the host makes",
}


@pytest.mark.parametrize(("name", "what"), READS.items(), ids=READS)
def test_refuses_reads_by_the_host(name: str, what: str, pretend: Callable[[], None]) -> None:
    scaler, optimizer = started(track="overflow"), sgd(1.0)
    scaler.step(optimizer)
    scaler.update()
    arguments = (optimizer,) if name in ("step_skipped", "health") else ()
    getattr(scaler, name)(*arguments)
    pretend()
    with pytest.raises(RuntimeError, match=f"a CUDA graph cannot capture {what}"):
        getattr(scaler, name)(*arguments)


def test_a_disabled_scaler_reads_nothing(pretend: Callable[[], None]) -> None:
    pretend()
    assert GradScaler("cpu", enabled=False).get_scale() == 1.0


def test_refuses_to_create_state_off_the_cpu(pretend: Callable[[], None]) -> None:
    meta, cpu = torch.device("meta"), torch.device("cpu")
    pretend()
    for begins in (
        GradScaler("cpu", backend="aten")._lazy_init_scale_growth_tracker,
        LossScale(Limits()).words_on,
    ):
        with REFUSED:
            begins(meta)
        begins(cpu)
    moved = LossScale(Limits())
    assert moved.words_on(cpu) is moved.words_on(cpu)
    with REFUSED:
        moved.words_on(meta)


def test_kept_state_moves_with_the_scale() -> None:
    state = LossScale(Limits())
    state.words_on(torch.device("cpu"))
    state._new_words = lambda: pytest.fail("made anew")
    assert state.words_on(torch.device("meta")).device.type == "meta"


def test_refuses_the_first_fused_step_with_momentum(pretend: Callable[[], None]) -> None:
    scaler, optimizer = started(), sgd(1.0, fused=True, momentum=0.9)
    pretend()
    with REFUSED:
        scaler.step(optimizer)


@pytest.mark.parametrize("overridden", [False, True])
def test_refuses_a_plain_step_before_it_unscales(
    overridden: bool, pretend: Callable[[], None]
) -> None:
    scaler, optimizer = started(), sgd(1.0)
    scaler._scale = scaler._scale.as_subclass(OnGpu)
    if overridden:  # an override may decide on the device
        scaler._maybe_opt_step = lambda *args, **kwargs: None
    pretend()
    with contextlib.nullcontext() if overridden else REFUSED:
        scaler.step(optimizer)
    stage = scaler._per_optimizer_states[id(optimizer)]["stage"].name
    assert stage == ("STEPPED" if overridden else "READY")


def test_a_plain_step_on_the_cpu_is_not_part_of_a_capture(pretend: Callable[[], None]) -> None:
    scaler, optimizer = started(), sgd(1.0)
    pretend()
    scaler.step(optimizer)
    assert scaler.found_inf(optimizer).tolist() == 0.0


@pytest.mark.parametrize("bad", [None, 0, 1, 2])
@pytest.mark.parametrize("on_gpus", [0, 1, 2])
def test_the_host_waits_once_for_all_gpus(
    on_gpus: int, bad: int | None, pretend: Callable[[], None]
) -> None:
    scaler, optimizer = started(), sgd(1.0)
    flags = [torch.tensor(float(index == bad)) for index in range(on_gpus + 1)]
    found: dict[Any, Any] = {"elsewhere": flags[0]}
    for index, flag in enumerate(flags[1:]):
        found[f"gpu {index}"] = flag.as_subclass(OnGpu)
    found["number"] = number = Number(float(bad == on_gpus + 1))
    steps: list[None] = []
    optimizer.step = lambda: steps.append(None)
    state = {"found_inf_per_device": found}
    scaler._maybe_opt_step(optimizer, state)
    assert len(OnGpu.waits) == min(on_gpus, 1)
    is_bad = any(flag.tolist() for flag in flags) or number.value != 0.0
    assert steps == ([] if is_bad else [None])
    assert state["found_inf_per_device"] is found
    pretend()
    with REFUSED if on_gpus else contextlib.nullcontext():
        scaler._maybe_opt_step(optimizer, state)


def test_stays_enabled_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (grad_scaler, torch.cuda.amp.common):
        monkeypatch.setattr(module, "amp_definitely_not_available", lambda: False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert GradScaler("cuda").is_enabled()


def test_found_inf_is_on_the_device_of_the_scale() -> None:
    scaler, optimizer = started(), sgd(1.0)
    scaler.step(optimizer)
    scaler._scale = scaler._scale.to("meta")
    assert scaler.found_inf(optimizer).device.type == "meta"


def test_numbers_are_read_when_a_copy_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    class Arrival:
        has_come = False

        def query(self) -> bool:
            return self.has_come

        def synchronize(self) -> None:
            self.has_come = True

    ways: list[Any] = []

    def copy(counters: torch.Tensor) -> tuple[torch.Tensor, Arrival | None]:
        ways.append((counters.clone(), None if len(ways) == 2 else Arrival()))
        return ways[-1]

    monkeypatch.setattr(scalars, "copy_to_host_async", copy)
    copies = scalars.HostCopies()

    def arrived(value: int) -> list[int] | None:
        return copies.latest(torch.tensor([value]).as_subclass(OnGpu))

    assert arrived(1) is None and len(ways) == 1
    assert arrived(2) is None and len(ways) == 1
    ways[0][1].has_come = True
    assert arrived(3) == [1] and len(ways) == 2
    assert arrived(4) is None and len(ways) == 2
    ways[1][1].has_come = True
    assert arrived(5) == [3] and len(ways) == 3
    assert arrived(6) == [5] and len(ways) == 4
    assert copies.latest(torch.tensor([7]).as_subclass(OnGpu), waits=True) == [6]
    assert pickle.loads(pickle.dumps(copies))._pending is None
    assert scalars.HostCopies().latest(torch.tensor([7])) == [7]
