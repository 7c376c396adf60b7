"""Master weights, `sync_free_` and `LateScheduler` on a GPU."""

from __future__ import annotations

import contextlib
import math
from functools import partial
from typing import Any

import pytest
import torch
from gpu_support import A_WHILE, MAKERS, no_syncs, skip_without
from support.comparison import TorchScaler, assert_same
from support.sync_free_loops import BAD, KINDS, Loop, fused_twin, in_groups, parameters

import ampfast
from ampfast import GradScaler, LateScheduler

HALVES = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("kind", ["adam", "fused_adamw", "capturable_adam", "capturable_sgd"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_master_weights_are_those_by_hand(
    backend: str, device: torch.device, dtype: torch.dtype, kind: str
) -> None:
    generator = torch.Generator(device).manual_seed(1)

    def drawn() -> list[torch.Tensor]:
        sizes = ((64, 33), (129,), (1,), (257, 512))
        return [torch.randn(size, generator=generator, device=device).to(dtype) for size in sizes]

    ours = [torch.nn.Parameter(value) for value in drawn()]
    masters = [torch.nn.Parameter(param.detach().float()) for param in ours]
    optimizer: Any = ampfast.master_weights_(MAKERS[kind](ours))
    by_hand = MAKERS[kind](masters)
    scaler = GradScaler(init_scale=16.0, backend=backend)
    for step in range(8):
        scale, grads = scaler.scale(torch.ones((), device=device)), [16 * grad for grad in drawn()]
        if step == 3:
            grads[1][5] = torch.inf
        for param, master, grad in zip(ours, masters, grads, strict=True):
            param.grad, master.grad = grad, grad.float() / scale
        scaler.step(optimizer)
        scaler.update()
        if step != 3:
            by_hand.step()
        rounded = [master.detach().to(dtype) for master in masters]
        assert_same([p.detach() for p in ours], rounded, f"step {step}")
    found = [optimizer.master_weights[param] for param in ours]
    assert_same(found, [master.detach() for master in masters], "master weights")


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_sync_free_continues_as_torch_fused(
    device: torch.device, kind: str, ours: bool, backend: str
) -> None:
    """And nothing waits behind the first step."""
    make, defaults = KINDS[kind]

    def scaler() -> Any:
        arguments: Any = {"init_scale": 1000.0, "growth_interval": 2}
        return GradScaler(backend=backend, **arguments) if ours else TorchScaler(**arguments)

    loop = Loop(make(in_groups(parameters(device)), **defaults))
    loop.run([None] * 3)
    skip_without(kind, partial(make, **{**defaults, "foreach": False, "fused": True}), device)
    twin = Loop(fused_twin(loop.optimizer, defaults), scaler())
    free = Loop(ampfast.sync_free_(loop.optimizer), scaler())
    for seed, bad in enumerate(BAD, 3):
        twin.step(seed, bad)
        free.draw(seed, bad)
        with no_syncs() if ours and seed > 3 else contextlib.nullcontext():
            free.finish()
        assert_same(free.observe(), twin.observe(), f"step {seed}")


def test_the_schedule_advances_while_the_device_is_busy(device: torch.device, backend: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(1000, device=device))
    parameter.grad = torch.ones(1000, device=device)
    optimizer, scaler = MAKERS["capturable_adam"]([parameter]), GradScaler(backend=backend)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    scheduler, loss = LateScheduler(schedule, scaler, optimizer), torch.ones((), device=device)
    scaler.scale(loss)
    skipped, not_waited_for = (0, 3, 4, 7), set()
    for number in range(10):
        parameter.grad.fill_(math.inf if number in skipped else 1.0)
        # The first two allocate and compile.
        is_warm = number > 1
        if is_warm:
            torch.cuda.synchronize()
            torch.cuda._sleep(A_WHILE)
        with no_syncs() if is_warm else contextlib.nullcontext():
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
        if is_warm and not torch.cuda.current_stream().query():
            not_waited_for.add(number in skipped)
    # A busy host may be late itself, but not each time.
    assert not_waited_for == {False, True}, "the host waits for steps"
    scheduler.flush()
    assert scheduler.last_epoch == 10 - len(skipped)
