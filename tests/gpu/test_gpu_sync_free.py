"""`sync_free_` on a GPU: no host sync, and torch's own fused results."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from gpu_support import no_syncs
from support.comparison import assert_same
from support.scalers import TorchScaler
from support.sync_free_loops import BAD, KINDS, Loop, fused_twin, in_groups, parameters

import ampfast
from ampfast import GradScaler
from ampfast.fused_trial import fault_of

pytestmark = pytest.mark.gpu

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    **KINDS,
    "capturable": (torch.optim.Adam, {"lr": 0.1, "capturable": True}),
}


def plain(kind: str, device: torch.device, steps: int, **options: Any) -> Loop:
    make, defaults = CASES[kind]
    loop = Loop(make(in_groups(parameters(device)), **{**defaults, **options}))
    loop.run([None] * steps)
    return loop


def unavailable_reason(kind: str, device: torch.device) -> str:
    """Reason why this torch has no fused implementation for this device."""
    p = torch.nn.Parameter(torch.ones(3, device=device))
    p.grad = torch.ones(3, device=device)
    try:
        CASES[kind][0]([p], fused=True).step()
    except RuntimeError as error:
        return f"{kind}: torch says: {error}".splitlines()[0]
    return ""


@pytest.fixture(params=CASES)
def kind(request: pytest.FixtureRequest, device: torch.device) -> str:
    if reason := unavailable_reason(request.param, device):
        pytest.skip(reason)
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_torchs_kernels_pass_their_trial(
    kind: str, dtype: torch.dtype, device: torch.device
) -> None:
    assert fault_of(CASES[kind][0], dtype, device) is None


@pytest.mark.parametrize("kind", CASES)
def test_is_refused_where_torch_has_no_kernel(kind: str, device: torch.device) -> None:
    if not unavailable_reason(kind, device):
        pytest.skip("this torch has one")
    loop = plain(kind, device, 1)
    with pytest.raises(ValueError, match="cannot step parameter 0 of group 0"):
        ampfast.sync_free_(loop.optimizer)
    loop.run([None], 1)


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("ours", [False, True])
def test_continues_as_torch_fused(
    device: torch.device, kind: str, steps: int, ours: bool, backend: str
) -> None:
    def scaler() -> Any:
        arguments = {"init_scale": 1000.0, "growth_interval": 2}
        return GradScaler(backend=backend, **arguments) if ours else TorchScaler(**arguments)

    loop = plain(kind, device, steps)
    twin = Loop(fused_twin(loop.optimizer, CASES[kind][1]), scaler())
    free = Loop(ampfast.sync_free_(loop.optimizer), scaler())
    for state in loop.optimizer.state.values():
        if "step" in state:
            assert state["step"].device == device and state["step"].dtype is torch.float32
            assert state["step"].item() == steps
    for seed, bad in enumerate(BAD, steps):
        free.step(seed, bad)
        twin.step(seed, bad)
        assert_same(free.observe(), twin.observe(), f"step {seed}")


def test_nothing_waits_after_one_step(device: torch.device, kind: str, backend: str) -> None:
    loop = plain(kind, device, 2)
    scaler = GradScaler(backend=backend)
    free = Loop(ampfast.sync_free_(loop.optimizer), scaler)
    free.step(2)
    loss, grads = torch.ones((), device=device), [p.grad for p in free.params]
    for bad in (None, math.inf, None):
        if bad is not None:
            grads[0].fill_(bad)
        with no_syncs():
            scaler.scale(loss)
            scaler.step(free.optimizer)
            scaler.update()
        assert scaler.step_skipped(free.optimizer) is (bad is not None)
        for grad in grads:
            grad.zero_()


def test_a_state_dict_of_a_plain_one_keeps_it_so(device: torch.device, kind: str) -> None:
    saved = plain(kind, device, 3).optimizer.state_dict()
    free = Loop(ampfast.sync_free_(plain(kind, device, 1).optimizer), GradScaler())
    free.optimizer.load_state_dict(saved)
    for state in free.optimizer.state.values():
        if "step" in state:
            assert state["step"].device == device and state["step"].item() == 3
    free.step(3)
    grads = [p.grad for p in free.params]
    with no_syncs():
        free.scaler.scale(torch.ones((), device=device))
        free.scaler.step(free.optimizer)
        free.scaler.update()
    assert all(bool(grad.isfinite().all()) for grad in grads)


@pytest.mark.parametrize("place", ["cpu", "gpu"])
def test_a_tensor_learning_rate(device: torch.device, kind: str, place: str) -> None:
    lr = torch.tensor(0.25, device=device if place == "gpu" else "cpu")
    options = {**CASES[kind][1], "lr": lr, "foreach": None}
    loop = plain(kind, device, 2, lr=lr, foreach=None)
    loop.optimizer.param_groups[1]["lr"] = lr
    twin = Loop(fused_twin(loop.optimizer, options), GradScaler(init_scale=1000.0))
    free = Loop(ampfast.sync_free_(loop.optimizer), GradScaler(init_scale=1000.0))
    for each in (free, twin):
        each.run(BAD, 2)
    assert_same(free.observe(), twin.observe())


def test_tensors_that_only_the_host_can_read(device: torch.device) -> None:
    loop = plain("adam", device, 1)
    loop.optimizer.param_groups[1]["weight_decay"] = torch.tensor(0.1, device=device)
    with pytest.raises(ValueError, match="'weight_decay' of group 1 is a tensor on cuda"):
        ampfast.sync_free_(loop.optimizer)


def test_state_left_on_the_cpu(device: torch.device) -> None:
    loop = plain("adam", device, 1)
    state = loop.optimizer.state[loop.params[0]]
    state["exp_avg"] = state["exp_avg"].cpu()
    with pytest.raises(ValueError, match=r"'exp_avg' of parameter 0 of group 0 .* device: cpu"):
        ampfast.sync_free_(loop.optimizer)


def test_a_captured_step(device: torch.device, backend: str) -> None:
    scaler = GradScaler(backend=backend, init_scale=1000.0)
    loop = plain("capturable", device, 2)
    twin = Loop(fused_twin(loop.optimizer, CASES["capturable"][1]))
    twin.scaler = GradScaler(backend=backend, init_scale=1000.0)
    free = Loop(ampfast.sync_free_(loop.optimizer), scaler)
    for each in (free, twin):
        each.step(2)
    loss, grads = torch.ones((), device=device), [p.grad for p in free.params]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match="call it before"):
            ampfast.sync_free_(free.optimizer)
        scaler.scale(loss)
        scaler.step(free.optimizer)
        scaler.update()
    for seed, bad in enumerate(BAD, 3):
        twin.draw(seed, bad)
        for grad, q in zip(grads, twin.params, strict=True):
            grad.copy_(q.grad)
        twin.finish()  # which divides them
        graph.replay()
        assert_same(free.observe(), twin.observe(), f"step {seed}")
