"""Steps under a CUDA graph, with a stand-in for it, and what is refused there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.captures import (
    SETTINGS,
    SKIPPABLE,
    Capturing,
    OnGpu,
    Training,
    assert_replays_are_eager,
    pretend_capture,
)
from support.comparison import TorchScaler, started
from support.gradients import parameter_with, sgd_with
from support.launchers import ReferenceLauncher
from torch._dynamo.utils import counters

import ampfast
from ampfast import GradScaler

OptState = torch.amp.grad_scaler.OptState


@pytest.fixture
def capturing(launcher: ReferenceLauncher, monkeypatch: pytest.MonkeyPatch) -> Capturing:
    return Capturing(launcher, monkeypatch)


CALLS = [
    *((Training.step, TorchScaler), (partial(Training.step, together=True), TorchScaler)),
    (partial(Training.step, way="unscale"), TorchScaler),
    (partial(Training.step, way="clip"), GradScaler),
]


@pytest.mark.parametrize(("calls", "rival"), CALLS)
@pytest.mark.parametrize("kind", SKIPPABLE)
def test_replays_are_eager_steps(capturing: Capturing, kind: str, calls: Any, rival: Any) -> None:
    assert_replays_are_eager(capturing, kind, calls, rival)
    assert capturing.graph.calls.count("begin") == capturing.graph.calls.count("end") == 1


def trained(kind: str = "sgd", iterations: int = 1) -> Training:
    """A training with gradients, after some iterations."""
    training = Training(GradScaler("cpu"), kind, torch.device("cpu"))
    for iteration in range(iterations):
        training.iterate(iteration)
    training.feed(iterations)
    training.optimizer.zero_grad()
    training.backward()
    return training


def state_of(training: Training) -> dict[str, Any]:
    return training.scaler._per_optimizer_states[id(training.optimizer)]


@pytest.mark.parametrize("fails", [False, True])
def test_the_body_is_the_step_alone_and_ends_when_it_raises(
    capturing: Capturing, fails: bool
) -> None:
    training, after = trained(), torch.zeros(())

    def step() -> str:
        capturing.graph.note("step")
        return "result"

    training.optimizer.step = step
    with capturing.of(training.scaler) as graph:
        graph.fails = "step" * fails
        if fails:
            with pytest.raises(RuntimeError, match=r"^step fails$"):
                training.scaler.step(training.optimizer)
        else:
            assert training.scaler.step(training.optimizer) == "result"
        after.add_(1)
    assert graph.calls == ["get", "get", "begin", "step", "end"]
    # As after an eager step that raises.
    stage = OptState.UNSCALED if fails else OptState.STEPPED
    assert state_of(training)["stage"] is stage
    training.params[0].grad.fill_(torch.inf)
    graph.replay()
    assert after.item() == 1.0, "outside of the body"


@pytest.mark.parametrize("bad", [None, 0, 1, 2])
def test_the_host_waits_once_for_all_gpus(bad: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Any] = []
    monkeypatch.setattr(OnGpu, "item", lambda flag: reads.append(flag) or flag.tolist())
    scaler, optimizer = started(GradScaler), sgd_with(torch.ones(1))
    optimizer.step = lambda: "stepped"
    flags = enumerate(torch.tensor([float(number == bad) for number in range(3)]).unbind())
    found = {number: flag.as_subclass(OnGpu) if number else flag for number, flag in flags}
    result = scaler._maybe_opt_step(optimizer, {"found_inf_per_device": found})
    assert (result, len(reads)) == ("stepped" if bad is None else None, 1)


# Refused before anything else


FIRST = "the first step of {}, .*: run one iteration"
OLD = r"that the host may skip: take torch 2\.12 or newer .*CUDA 12\.4 .*fused=True"
Change = Callable[[Training, pytest.MonkeyPatch], object]


def with_(owner: Any, name: str, value: Any) -> Change:
    return lambda training, patch: patch.setattr(owner, name, value)


def one_more(device: str) -> Change:
    param = parameter_with(torch.ones(1, device=device))
    return lambda training, _: training.optimizer.add_param_group({"params": [param]})


class Own(torch.optim.Adam):
    """Of another project."""


def anothers(training: Training, _: object) -> None:
    training.optimizer = Own(training.params, capturable=True)


def counting_on_the_host(training: Training, _: object) -> None:
    training.optimizer = torch.optim.Adagrad(training.params)
    for param in training.params:
        training.optimizer.state[param]["step"] = torch.ones((), device="meta")


@pytest.mark.parametrize(
    ("kind", "iterations", "change", "text"),
    [
        ("sgd", 1, with_(torch.version, "hip", "7.2"), OLD),
        ("sgd", 1, with_(torch.cuda, "CUDAGraph", object), OLD),
        ("sgd", 1, one_more("meta"), "on meta, too"),
        ("momentum", 0, None, FIRST.format("SGD")),
        ("adam", 0, None, FIRST.format("Adam")),
        ("fused_sgd", 0, None, "the first step of a fused SGD with momentum"),
        ("adam", 1, one_more("cpu"), FIRST.format("Adam")),
        ("sgd", 1, anothers, FIRST.format("Own")),
        ("sgd", 1, counting_on_the_host, "a step of Adagrad, which counts steps on the host"),
    ],
)
def test_refused_before_anything_else(
    capturing: Any, monkeypatch: Any, kind: str, iterations: int, change: Change | None, text: str
) -> None:
    training = trained(kind, iterations)
    if change is not None:
        change(training, monkeypatch)
    named = pytest.raises(RuntimeError, match=f"^a CUDA graph .*cannot capture .*{text}")
    with capturing.of(training.scaler) as graph, named:
        training.scaler.step(training.optimizer)
    state = state_of(training)
    assert state["stage"] is OptState.READY
    assert kind == "fused_sgd" or not state["found_inf_per_device"]
    assert "begin" not in graph.calls


READS = {
    **dict.fromkeys(("get_scale", "state_dict"), "a scale that the host reads"),
    "overflow_report": "a report that the host reads",
    "stats": "counts that the host reads",
    "history": "a history that the host reads",
    "step_skipped": "a question that the host asks",
}


@pytest.mark.parametrize(("name", "what"), READS.items(), ids=READS)
def test_refuses_reads_by_the_host(name: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scaler, optimizer = started(GradScaler, track="overflow"), sgd_with(torch.ones(1))
    scaler.step(optimizer)
    scaler.update()
    arguments = (optimizer,) if name == "step_skipped" else ()
    getattr(scaler, name)(*arguments)
    pretend_capture(monkeypatch)
    with pytest.raises(RuntimeError, match=f"a CUDA graph cannot capture {what}"):
        getattr(scaler, name)(*arguments)
    with pytest.raises(RuntimeError, match="cannot capture the creation of the scale,"):
        GradScaler("cpu", backend="aten").scale(torch.ones((), device="meta"))
    with pytest.raises(RuntimeError, match=r"cannot capture sync_free_, .* call it before"):
        ampfast.sync_free_(optimizer)
    assert GradScaler("cpu", enabled=False).get_scale() == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sgd", "fused_adam"])
def test_compiled_steps_break_no_more_often(kind: str) -> None:
    """Fewer breaks may leave more graphs."""
    breaks = []
    for scaler_type in (GradScaler, TorchScaler):
        torch._dynamo.reset()
        counters.clear()
        training = Training(scaler_type("cpu", **SETTINGS), kind, torch.device("cpu"))
        compiled = torch.compile(training.repeat, backend="eager")
        for iteration in range(3):
            training.feed(iteration)
            compiled()
        assert training.params[0].isfinite().all()
        breaks.append(sum(counters["graph_break"].values()))
    torch._dynamo.reset()
    assert 0 < breaks[0] <= breaks[1]
