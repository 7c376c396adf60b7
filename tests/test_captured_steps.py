"""Steps of plain optimizers under a CUDA graph, with a stand-in for the graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.captures import SKIPPABLE, Capturing, OnGpu, Training, assert_replays_are_eager
from support.reference_launcher import ReferenceLauncher
from support.scalers import TorchScaler

from ampfast import GradScaler, Sigmas, capture

OptState = torch.amp.grad_scaler.OptState


@pytest.fixture
def capturing(launcher: ReferenceLauncher, monkeypatch: pytest.MonkeyPatch) -> Capturing:
    return Capturing(launcher, monkeypatch)


def step(training: Training) -> None:
    training.step()


def step_together(training: Training) -> None:
    training.step(together=True)


def unscale_then_step(training: Training) -> None:
    training.scaler.unscale_(training.optimizer)
    training.step()


def clip_then_step(training: Training) -> None:
    training.scaler.clip_grad_norm_(training.optimizer, 0.5)
    training.step()


@pytest.mark.parametrize("calls", [step, step_together, unscale_then_step])
@pytest.mark.parametrize("kind", SKIPPABLE)
def test_replays_are_torchs_eager_steps(capturing: Capturing, kind: str, calls: Any) -> None:
    assert_replays_are_eager(capturing, kind, calls, TorchScaler)
    assert capturing.graph.calls.count("begin") == capturing.graph.calls.count("end") == 1


@pytest.mark.parametrize("kind", SKIPPABLE)
def test_replays_clip_as_eager_steps(capturing: Capturing, kind: str) -> None:
    assert_replays_are_eager(capturing, kind, clip_then_step, GradScaler)


def test_replays_follow_norms_that_were_loaded(capturing: Capturing) -> None:
    training = trained()
    scaler, optimizer = training.scaler, training.optimizer

    def clip_and_step() -> None:
        scaler.clip_grad_norm_(optimizer, 0.5, skip_above=Sigmas(2.0, 4))
        training.step()

    clip_and_step()
    with capturing.of(scaler) as graph:
        clip_and_step()
    for last, reason in ((1.0, "spike"), (1e6, None)):
        saved, norms = scaler.state_dict(), [1e-3, last, 1e-3, last]
        saved["ampfast"]["norms"] = [norms]
        scaler.load_state_dict(saved)
        training.feed(1)
        optimizer.zero_grad(set_to_none=False)
        training.backward()
        graph.replay()
        assert scaler.skip_reason(optimizer) == reason
        (kept,) = scaler.state_dict()["ampfast"]["norms"]
        if reason:
            assert kept == {"norms": norms, "spikes": 1}
        else:
            assert kept[:3] == norms[1:] and kept[-1] not in (1e-3, last)


def test_replays_take_a_lasting_change_as_usual(capturing: Capturing) -> None:
    training = trained()
    scaler, optimizer = training.scaler, training.optimizer

    def clip_and_step() -> None:
        scaler.clip_grad_norm_(optimizer, 0.5, skip_above=Sigmas(2.0, 4, patience=3))
        training.step()

    clip_and_step()
    with capturing.of(scaler) as graph:
        clip_and_step()
    saved, reasons = scaler.state_dict(), []
    saved["ampfast"]["norms"] = [{"norms": [1e-3] * 4, "spikes": 1}]
    scaler.load_state_dict(saved)
    for _ in range(4):
        training.feed(1)
        optimizer.zero_grad(set_to_none=False)
        training.backward()
        graph.replay()
        reasons.append(scaler.skip_reason(optimizer))
    assert reasons == ["spike", "spike", None, None]
    with pytest.warns(UserWarning, match="Sigmas: 3 steps in a row"):
        assert len(scaler.state_dict()["ampfast"]["norms"][0]) == 2


# Calls that capture a step, each of which fails in turn


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
    state: dict[str, Any] = training.scaler._per_optimizer_states[id(training.optimizer)]
    return state


def is_untouched(training: Training) -> bool:
    state = state_of(training)
    return state["stage"] is OptState.READY and not state["found_inf_per_device"]


CALLS = ["get", "get", "begin", "step", "end"]


@pytest.mark.parametrize("fails", ["", "get", "begin", "step", "end"])
def test_the_body_is_the_step_alone_and_ends_when_it_raises(
    capturing: Capturing, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    training, after = trained(), torch.zeros(())
    with capturing.of(training.scaler) as graph:
        plain_step = training.optimizer.step

        def stepped() -> str:
            graph.note("step")
            plain_step()
            return "result"

        monkeypatch.setattr(training.optimizer, "step", stepped)
        graph.fails = fails
        if fails:
            with pytest.raises(RuntimeError, match=f"^{fails} fails$"):
                training.scaler.step(training.optimizer)
        else:
            assert training.scaler.step(training.optimizer) == "result"
        after.add_(1)
    if fails == "get":
        assert graph.calls == ["get"]
        assert is_untouched(training)
    else:
        done = CALLS.index(fails) + 1 if fails else len(CALLS)
        assert graph.calls == CALLS[:done] + ["end"] * (fails == "step")
        # As after an eager step that raises.
        state = state_of(training)
        assert state["stage"] is (OptState.UNSCALED if fails else OptState.STEPPED)
        assert len(state["found_inf_per_device"]) == 1
    training.params[0].grad.fill_(torch.inf)
    graph.replay()
    assert after.item() == 1.0, "outside of the body"


def test_an_update_that_rides_is_undone_when_the_step_raises(
    capturing: Capturing, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = trained()
    before = [training.scaler._scale.clone(), training.scaler._growth_tracker.clone()]
    with capturing.of(training.scaler) as graph:
        monkeypatch.setattr(training.optimizer, "step", lambda: graph.note("step"))
        graph.fails = "step"
        with pytest.raises(RuntimeError, match=r"^step fails$"):
            training.step(together=True)
    training.params[0].grad.fill_(torch.inf)
    graph.replay()
    assert [training.scaler._scale, training.scaler._growth_tracker] == before


# Refused before anything else


def refused(training: Training, capturing: Capturing, text: str) -> None:
    named = pytest.raises(RuntimeError, match=f"^a CUDA graph .*cannot capture .*{text}")
    with capturing.of(training.scaler) as graph, named:
        training.scaler.step(training.optimizer)
    assert is_untouched(training)
    assert "begin" not in graph.calls


def test_refused_with_a_torch_without_conditional_nodes(
    capturing: Capturing, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = r"that the host may skip: take torch 2\.12 or newer .*CUDA 12\.4 .*fused=True"
    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "hip", "7.2")
        refused(trained(), capturing, text)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    refused(trained(), capturing, text)


def test_refused_on_another_device(capturing: Capturing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "_current_device", lambda: torch.device("cuda", 1))
    refused(trained(), capturing, "on cpu, too")


@pytest.mark.parametrize("other", [torch.zeros((), device="meta"), 0.0])
def test_refused_with_a_flag_elsewhere(capturing: Capturing, other: Any) -> None:
    training, flag = trained(), torch.zeros(()).as_subclass(OnGpu)
    state = {"found_inf_per_device": {flag.device: flag, "elsewhere": other}}
    named = pytest.raises(RuntimeError, match=r"to skip on (meta|None), too")
    with capturing.of(training.scaler) as graph, named:
        training.scaler._maybe_opt_step(training.optimizer, state)
    assert not graph.calls


@pytest.mark.parametrize("kind", ["momentum", "adam"])
def test_refused_the_step_that_makes_the_state(capturing: Capturing, kind: str) -> None:
    refused(trained(kind, 0), capturing, "the first step of (SGD|Adam), .*: run one iteration")


def test_refused_a_step_that_counts_on_the_host(capturing: Capturing) -> None:
    training = trained()
    training.optimizer = torch.optim.Adam(training.params, capturable=False)
    training.optimizer.step()
    training.optimizer.state[training.weight]["step"] = torch.ones((), device="meta")
    refused(training, capturing, "counts steps on the host, .*: make it with capturable=True")


def test_refused_the_first_step_of_one_without_capturable(capturing: Capturing) -> None:
    training = trained()
    training.optimizer = torch.optim.Muon(training.params)
    refused(training, capturing, "the first step of Muon, .*: run one iteration")


@pytest.mark.parametrize("count", [1, torch.ones((), device="meta")], ids=["int", "elsewhere"])
def test_refused_a_count_of_steps_on_the_host(capturing: Capturing, count: Any) -> None:
    training = trained()
    training.optimizer = torch.optim.Adagrad(training.params)
    training.optimizer.state[training.weight]["step"] = count
    refused(training, capturing, "a step of Adagrad, which counts steps on the host")


def test_refused_one_count_of_steps_on_the_host_among_others(capturing: Capturing) -> None:
    training = trained()
    training.optimizer = torch.optim.Adagrad(training.params)
    counts = [torch.ones(()) for _ in training.params]
    counts[-1] = torch.ones((), device="meta")
    for param, count in zip(training.params, counts, strict=True):
        training.optimizer.state[param]["step"] = count
    refused(training, capturing, "a step of Adagrad, which counts steps on the host")


def test_refused_one_parameter_without_state_among_others(capturing: Capturing) -> None:
    training = trained("adam")
    training.optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})
    training.optimizer.param_groups[-1]["params"][0].grad = torch.ones(1)
    refused(training, capturing, "the first step of Adam, .*: run one iteration")


@pytest.mark.parametrize("is_capturable", [False, True])
def test_another_projects_optimizer_is_known_by_capturable(is_capturable: bool) -> None:
    param = torch.nn.Parameter(torch.ones(1))
    group = {"params": [param], **({"capturable": True} if is_capturable else {})}
    assert capture._lacks_state(object(), group, {}) is is_capturable
    assert not capture._lacks_state(object(), group, {"exp_avg": param})


def test_compiled_code_refuses_when_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "is_capturing", lambda: True)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    capture.refuse_capture("what is traced")


def test_an_eager_step_is_not_asked(capturing: Capturing) -> None:
    training = trained("adam", 0)
    training.scaler.unscale_(training.optimizer)
    training.scaler._scale = training.scaler._scale.as_subclass(OnGpu)
    training.scaler.step(training.optimizer)
    assert not capturing.graph.calls


def test_an_override_of_the_hook_decides(
    capturing: Capturing, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = trained()
    monkeypatch.setattr(training.scaler, "_maybe_opt_step", lambda *args: "its own")
    with capturing.of(training.scaler) as graph:
        assert training.scaler.step(training.optimizer) == "its own"
    assert not graph.calls
