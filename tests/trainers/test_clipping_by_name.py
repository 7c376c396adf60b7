"""Trainers that clip by torch's name, as they are, under `patch(clip_grad_norm=True)`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.comparison import assert_same
from support.one_step import host_reads
from torch import Tensor, nn
from trajectories import SETTINGS, STEPS, HalfNet, Run, batches, loader, optimizer_for

import ampfast
from ampfast import clip_grad

CLIP = 0.05
GAMMA = 0.99  # of Accelerate's test


@pytest.fixture
def clips(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """Runs the test under the patch; norms, by our kernels, without a host read."""
    norms: list[Tensor] = []
    plain = clip_grad._clipped

    def spied(params: list[Tensor], *rest: Any) -> Tensor:
        theirs = torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
        found = []
        assert host_reads(lambda: found.append(plain(params, *rest))) == 0
        [norm] = found
        assert isinstance(norm, Tensor)
        torch.testing.assert_close(norm, theirs, rtol=1e-6, atol=0, equal_nan=True)
        norms.append(norm)
        return norm

    monkeypatch.setattr(clip_grad, "_clipped", spied)
    with ampfast.patch(clip_grad_norm=True):
        yield norms


def by_hand(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: Callable[[bool], object] = lambda skipped: None,
    clip: float = CLIP,
    skip_above: Any = None,
) -> tuple[Run, list[Tensor]]:
    """A run with our own clipping, and its norms."""
    run, scaler, norms = Run(), ampfast.GradScaler("cpu", **SETTINGS), []
    for data, target in batches():
        optimizer.zero_grad()
        scaler.scale(run.loss(model(data), target, scaler)).backward()
        norms.append(scaler.clip_grad_norm_(optimizer, clip, skip_above=skip_above))
        scaler.step(optimizer)
        schedule(scaler.step_skipped(optimizer))
        scaler.update()
    return run.finish(model), norms


def assert_as_by_hand(ours: Run, norms: list[Tensor], theirs: Run, own_norms: list[Tensor]) -> None:
    assert_same(norms, own_norms, "norms")
    assert_same((ours.losses, ours.scales), (theirs.losses, theirs.scales))
    for name, value in theirs.state.items():
        assert_same(ours.state[name], value, name)
    assert ours.skipped >= 2


def by_fastai() -> Run:
    basics = importlib.import_module("fastai.basics")
    fp16 = importlib.import_module("fastai.callback.fp16")
    training = importlib.import_module("fastai.callback.training")
    model, run, learner = HalfNet(), Run(), None

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return run.loss(output, target, learner.scaler)

    learner = basics.Learner(
        basics.DataLoaders(loader(batches()), []),
        model,
        loss_func=loss,
        opt_func=lambda params, lr: basics.OptimWrapper(opt=optimizer_for(model)),
        cbs=[fp16.MixedPrecision(**SETTINGS), training.GradientClip(CLIP)],
    )
    with learner.no_bar(), learner.no_logging():
        learner.fit(1, lr=0.02)
    return run.finish(model)


def by_ignite() -> Run:
    """It does not clip by itself: the function of a user's engine."""
    engine = importlib.import_module("ignite.engine")
    model, run, scaler = HalfNet(), Run(), torch.amp.GradScaler("cpu", **SETTINGS)
    optimizer = optimizer_for(model)

    def update(_: Any, batch: tuple[Tensor, Tensor]) -> None:
        data, target = batch
        optimizer.zero_grad()
        scaler.scale(run.loss(model(data), target, scaler)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()

    engine.Engine(update).run(batches())
    return run.finish(model)


def of_its_tests(name: str) -> Callable[[], Run]:
    """The training of another file of tests."""
    return lambda: importlib.import_module(name).train(ampfast.GradScaler, "adam", CLIP)


TRAINERS: dict[str, tuple[str, Callable[[], Run]]] = {
    "timm": ("timm.utils", of_its_tests("test_timm")),
    "fabric": ("lightning", of_its_tests("test_fabric")),
    "lightning": ("lightning", of_its_tests("test_lightning")),
    "fastai": ("fastai.basics", by_fastai),
    "ignite": ("ignite.engine", by_ignite),
}


@pytest.mark.usefixtures("cuda_on_cpu")
@pytest.mark.parametrize("trainer", TRAINERS)
def test_trainers(trainer: str, clips: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    needs, train = TRAINERS[trainer]
    pytest.importorskip(needs, reason=f"needs {trainer}")
    if trainer == "fastai":
        monkeypatch.setattr(importlib.import_module("fastai.basics").defaults, "use_cuda", False)
    ours = train()
    model = HalfNet()
    theirs, norms = by_hand(model, optimizer_for(model))
    if trainer == "fastai":
        # It clips after the scaler's step, which only asks whether to skip.
        norms = [norm for norm in norms if norm.isfinite()]
    assert_as_by_hand(ours, clips, theirs, norms)
    assert len(clips) == STEPS - (trainer == "fastai") * ours.skipped


@pytest.mark.parametrize("name", ["adam", "fused_adamw"])
def test_accelerate(name: str, clips: list[Tensor], tmp_path: Path) -> None:
    tests = pytest.importorskip("test_accelerate", reason="needs accelerate")
    try:
        ours = tests.train(ampfast.GradScaler, name, CLIP, tmp_path / "half")
    finally:
        tests.accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        tests.accelerate.state.GradientState._reset_state()
    model = HalfNet()
    optimizer = optimizer_for(model, name)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=GAMMA)

    def schedule(skipped: bool) -> None:
        if not skipped or name == "fused_adamw":
            scheduler.step()

    theirs, norms = by_hand(model, optimizer, schedule)
    assert_as_by_hand(ours, clips, theirs, norms)
    assert len(clips) == STEPS


@pytest.mark.parametrize("skip_above", [None, 0.9, ampfast.Sigmas(0.0, window=2)], ids=str)
def test_transformers(
    skip_above: Any, clips: list[Tensor], tmp_path: Path, step_reads: list[int]
) -> None:
    """With the scaler's limit spikes are skipped, too, without a callback."""
    tests = pytest.importorskip("test_transformers", reason="needs transformers")
    arguments = {"max_grad_norm": CLIP, "train_sampling_strategy": "sequential"}
    scaler = ampfast.GradScaler("cpu", **SETTINGS)
    scaler.skip_above = skip_above
    trainer = tests.trainer_with(scaler, tmp_path, **arguments)
    trainer.train()
    ours = tests.finished(trainer)
    assert step_reads == [0] * STEPS
    logged = [log["grad_norm"] for log in trainer.state.log_history[:STEPS]]
    assert_same(logged, [norm.item() for norm in clips])

    model = tests.Classifier()
    settings = tests.trainer_with(torch.amp.GradScaler("cpu"), tmp_path, **arguments).args
    made = tests.made_by_trainer(model, settings)
    theirs, norms = by_hand(
        model.net,
        made.optimizer,
        lambda skipped: made.lr_scheduler.step(),
        skip_above=skip_above,
    )
    theirs.state.pop("scaler" if skip_above is None else "unused", None)
    if isinstance(skip_above, ampfast.Sigmas):
        assert scaler.state_dict()["ampfast"] == theirs.scaler.state_dict()["ampfast"]
    assert_as_by_hand(ours, clips, theirs, norms)
    spikes = scaler.stats().spikes
    assert spikes == theirs.scaler.stats().spikes
    assert (spikes > 0) is (skip_above is not None)


def test_trl(clips: list[Tensor], tmp_path: Path, step_reads: list[int]) -> None:
    tests = pytest.importorskip("test_trl", reason="needs trl")
    scaler = ampfast.GradScaler("cpu", **tests.SETTINGS)
    run = tests.train(tests.sft, scaler, tmp_path, "adamw_torch_fused")
    tests.assert_norms_tell_of_overflows(run)
    assert len(clips) == STEPS == len(step_reads) and not any(step_reads)
    assert_same([norm for norm, *_ in run.state["logs"]], [norm.item() for norm in clips])

    own = ampfast.GradScaler("cpu", **tests.SETTINGS)

    def clipping_by_ours(*given: Any) -> Any:
        trainer = tests.sft(*given)
        trainer.accelerator.clip_grad_norm_ = lambda params, limit: own.clip_grad_norm_(
            trainer.optimizer.optimizer, limit
        )
        return trainer

    by_ours = tests.train(clipping_by_ours, own, tmp_path, "adamw_torch_fused")
    for part in ("losses", "scales", "state"):
        assert_same(getattr(run, part), getattr(by_ours, part), part)
    assert len(clips) == STEPS
