"""Accelerate: the scaler is an attribute of the Accelerator, read by `prepare`.

It uses none on the CPU; these tests set its `native_amp` to take the path of a GPU.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sixteen_bit import CASES, Case, Part, assert_as_by_hand
from support.comparison import assert_same
from support.scalers import Scaler, TorchScaler
from torch import nn
from trajectories import (
    SETTINGS,
    STEPS,
    HalfNet,
    Run,
    assert_same_run,
    batches,
    late_by_hand,
    optimizer_for,
    planted,
)

import ampfast

accelerate = pytest.importorskip("accelerate", reason="needs accelerate")
fsdp_utils = pytest.importorskip("accelerate.utils.fsdp_utils", reason="needs accelerate")
modeling = pytest.importorskip("accelerate.utils.modeling", reason="needs accelerate")


@pytest.fixture(autouse=True)
def _its_state_is_forgotten() -> Iterator[None]:
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def accelerator_with(scaler: TorchScaler, **settings: Any) -> Any:
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="fp16", **settings)
    accelerator.native_amp = True
    accelerator.scaler = scaler
    return accelerator


def train(scaler_type: Scaler, name: str, clip: float | None, checkpoint: Path) -> Run:
    accelerator = accelerator_with(scaler_type("cpu", **SETTINGS))
    run, model = Run(), HalfNet()
    optimizer = optimizer_for(model, name)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    skipped, rates = [], []
    for step, (data, target) in enumerate(batches()):
        if step == STEPS // 2:
            accelerator.save_state(str(checkpoint))
            accelerator.load_state(str(checkpoint))
        optimizer.zero_grad()
        accelerator.backward(run.loss(model(data), target, accelerator.scaler))
        if clip is not None:
            accelerator.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        scheduler.step()
        skipped.append(accelerator.optimizer_step_was_skipped)
        rates += scheduler.get_last_lr()
    return run.finish(model, skipped=skipped, rates=rates, optimizer=optimizer.state_dict())


@pytest.mark.parametrize("clip", [None, 0.05], ids=["", "clip"])
@pytest.mark.parametrize("name", ["adam", "fused_adamw"])
def test_attribute(name: str, clip: float | None, tmp_path: Path, step_reads: list[int]) -> None:
    train(ampfast.GradScaler, name, clip, tmp_path / "first")  # the trial of fused kernels reads
    step_reads.clear()
    ours = train(ampfast.GradScaler, name, clip, tmp_path / "ours")
    reads = step_reads.copy()
    assert_same_run(ours, train(TorchScaler, name, clip, tmp_path / "torch"))
    if name == "adam":
        assert sum(ours.state["skipped"]) == ours.skipped
    else:  # Accelerate sees every step of a fused optimizer, skipped or not.
        assert not any(ours.state["skipped"])
        assert len(set(ours.state["rates"])) == STEPS
        assert reads == step_reads[STEPS:] == [0] * STEPS


def schedules(accelerator: Any, name: str) -> list[list[tuple[float, bool]]]:
    """Learning rate after each step, and whether it was skipped, of two models in turn.

    Gradients of the first one overflow in the steps of `PLANTED`.
    """
    models = [HalfNet(), HalfNet()]
    optimizers = [optimizer_for(model, name) for model in models]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.99) for each in optimizers]
    prepared = accelerator.prepare(*models, *optimizers, *schedulers)
    records: list[list[tuple[float, bool]]] = [[], []]
    for step, (data, target) in enumerate(batches()):
        with accelerator.accumulate(*models):
            for index in range(2):
                model, optimizer, scheduler = prepared[index::2]
                loss = nn.functional.cross_entropy(model(data), target)
                accelerator.backward(loss if index else planted(loss, model, step))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                records[index].append((scheduler.get_last_lr()[0], optimizer.step_was_skipped))
    return records


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("given", [True, False], ids=["given", "patched"])
@pytest.mark.usefixtures("cuda_on_cpu")
def test_schedules_with_overflows(given: bool, accumulation: int) -> None:
    def run(name: str, make: Callable[..., TorchScaler]) -> Any:
        accelerator = accelerator_with(
            make(init_scale=64.0), gradient_accumulation_steps=accumulation
        )
        return schedules(accelerator, name)

    plain, fused = (run(name, TorchScaler) for name in ("adam", "fused_adamw"))
    assert [any(skipped for _, skipped in record) for record in plain] == [True, False]
    overflowing, finite = fused
    assert overflowing == finite
    with contextlib.nullcontext() if given else ampfast.patch():
        make = ampfast.GradScaler if given else modeling.get_grad_scaler
        assert run("adam", make) == plain
        assert run("fused_adamw", make) == fused


def train_late(name: str, clip: float | None, checkpoint: Path) -> Run:
    """A run whose second half new objects resume, with `LateScheduler`."""
    run, rates = Run(), []
    for half in range(2):
        accelerator = accelerator_with(ampfast.GradScaler("cpu", **SETTINGS))
        model = HalfNet()
        optimizer = optimizer_for(model, name)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)
        scheduler = ampfast.LateScheduler(scheduler, accelerator.scaler, optimizer)
        accelerator.register_for_checkpointing(scheduler)
        model, optimizer = accelerator.prepare(model, optimizer)
        if half:
            accelerator.load_state(str(checkpoint))
        for data, target in list(batches())[half * STEPS // 2 :][: STEPS // 2]:
            optimizer.zero_grad()
            accelerator.backward(run.loss(model(data), target, accelerator.scaler))
            if clip is not None:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            rates += scheduler.get_last_lr()
            optimizer.step()
            scheduler.step()
        accelerator.save_state(str(checkpoint))
    return run.finish(model, rates=rates, optimizer=optimizer.state_dict())


@pytest.mark.parametrize("clip", [None, 0.05], ids=["", "clip"])
@pytest.mark.parametrize("name", ["adam", "fused_adamw"])
def test_a_late_schedule(
    name: str, clip: float | None, tmp_path: Path, step_reads: list[int]
) -> None:
    ours, model = train_late(name, clip, tmp_path), HalfNet()
    optimizer = optimizer_for(model, name)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)
    theirs = late_by_hand(model, optimizer, scheduler, clip)
    assert_same((ours.losses, ours.scales), (theirs.losses, theirs.scales))
    assert_same(ours.state, theirs.state)
    assert 2 <= ours.skipped < STEPS
    if name == "fused_adamw":
        assert step_reads == [0] * STEPS


@pytest.mark.parametrize("name", ["adam", "fused_adamw"])
def test_a_guard_in_bfloat16(name: str) -> None:
    accelerator, model = accelerate.Accelerator(cpu=True, mixed_precision="bf16"), HalfNet().layers
    accelerator.scaler = guard = ampfast.StepGuard("cpu")
    optimizer = optimizer_for(model, name)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    reasons = []
    for step, (data, target) in enumerate(batches()):
        optimizer.zero_grad()
        factor = {3: math.nan, 5: 1e6}.get(step, 1.0)
        accelerator.backward(factor * nn.functional.cross_entropy(model(data), target))
        before = [param.detach().clone() for param in model.parameters()]
        guard.clip_grad_norm_(optimizer.optimizer, 1.0, skip_above=100.0)
        optimizer.step()
        scheduler.step()
        reasons.append(guard.skip_reason(optimizer.optimizer))
        kept = all(map(torch.equal, before, model.parameters()))
        assert kept == (reasons[-1] is not None)
        assert optimizer.step_was_skipped == (kept and name == "adam")
    assert {step: why for step, why in enumerate(reasons) if why} == {3: "overflow", 5: "spike"}
    # Accelerate calls every step of a fused optimizer a step, as with torch's scaler.
    assert scheduler.scheduler.last_epoch == (STEPS - 2 if name == "adam" else STEPS)


@pytest.mark.usefixtures("cuda_on_cpu", "patched")
def test_the_scalers_that_it_makes_are_patched() -> None:
    for made in (modeling.get_grad_scaler(), fsdp_utils.get_fsdp2_grad_scaler(device="cuda")):
        assert isinstance(made, ampfast.GradScaler)
    sharded = modeling.get_grad_scaler(accelerate.DistributedType.FSDP)
    assert isinstance(sharded, ampfast.ShardedGradScaler)


def train_16_bit(part: Part) -> None:
    precision = "fp16" if part.case.scaled else "bf16"
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
    if part.case.scaled:
        accelerator.native_amp = True
        accelerator.scaler = part.make_scaler()
    model, optimizer = accelerator.prepare(part.model, part.make_optimizer())
    if part.resumes:
        accelerator.load_state(str(part.folder))
    for data, target in part.batches:
        optimizer.zero_grad()
        accelerator.backward(part.loss(model(data), target))
        if part.case.clip is not None:
            accelerator.clip_grad_norm_(model.parameters(), part.case.clip)
        optimizer.step()
    accelerator.save_state(str(part.folder))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_16_bit_models(case: Case, tmp_path: Path) -> None:
    assert_as_by_hand(train_16_bit, case, tmp_path)


@pytest.mark.usefixtures("float16_on_cpu")
def test_example(run_example: Callable[[str], str]) -> None:
    assert "steps=4" in run_example("with_accelerate.py")


def test_example_refuses_a_cpu(run_example: Callable[[str], str]) -> None:
    with pytest.raises(SystemExit, match="neither casts to float16 nor unscales"):
        run_example("with_accelerate.py")


@pytest.mark.parametrize("clip", [None, 0.05], ids=["", "clip"])
@pytest.mark.parametrize("name", ["adam", "fused_adamw"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_spikes(precision: str, name: str, clip: float | None) -> None:
    """The recipe of docs/trainers.md: a clip of Accelerate's comes before the step in bf16."""
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
    if precision == "fp16":
        accelerator.native_amp = True
        scaler = ampfast.GradScaler("cpu", init_scale=4.0, skip_above=ampfast.Sigmas(6, window=8))
        accelerator.scaler = scaler
    else:
        scaler = ampfast.StepGuard("cpu", skip_above=ampfast.Sigmas(6, window=8))
        accelerator.scaler = scaler
        accelerator.clip_grad_norm_ = lambda params, limit, order=2.0: scaler.clip_grad_norm_(
            optimizer.optimizer, limit, order
        )
    plain = nn.Linear(8, 3)
    model, optimizer = accelerator.prepare(plain, optimizer_for(plain, name))
    reasons = []
    for step, (data, target) in enumerate(batches()):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data), target)
        accelerator.backward(loss * (500 if step == 12 else 1))
        before = plain.weight.detach().clone()
        if clip is not None:
            accelerator.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        reasons.append(scaler.skip_reason(optimizer.optimizer))
        assert torch.equal(before, plain.weight) is (reasons[-1] is not None)
    assert reasons == [None] * 12 + ["spike"] + [None] * (STEPS - 13)
