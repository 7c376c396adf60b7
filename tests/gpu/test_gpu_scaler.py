"""Training loops on a GPU: ours and torch's scaler stay equal bit for bit."""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_support import (
    BACKENDS,
    Quiet,
    QuietFused,
    Twin,
    assert_trains_as_without_scaler,
    assert_twins_same,
    flag,
    no_syncs,
    twins,
)
from gpu_support import unavailable_reason as unavailable_backend
from support.comparison import assert_same, difference
from support.gradients import make_gradient
from support.optimizers import FUSED, OPTIMIZERS
from support.outcomes import agree
from support.scalers import TorchScaler

from ampfast import GradScaler, Percentile, ZScore

pytestmark = pytest.mark.gpu

CPU = torch.device("cpu")
BAD = (math.inf, -math.inf, math.nan)
# Gradients that torch's fused kernels take in one optimizer on a GPU.
DTYPES = (torch.float32, torch.float64)


def unavailable_reason(kind: str, device: torch.device) -> str:
    """Reason why an optimizer cannot run on this device in this torch."""
    p = torch.nn.Parameter(torch.ones(3, device=device))
    p.grad = torch.ones(3, device=device)
    try:
        OPTIMIZERS[kind]([p]).step()
    except RuntimeError as error:
        return f"{kind}: torch says: {error}".splitlines()[0]
    return ""


@pytest.fixture(params=(*BACKENDS, "aten"))
def backend(request: pytest.FixtureRequest) -> str:
    """Name of a backend: one with kernels, or that of GPUs without kernels."""
    if request.param in BACKENDS and (reason := unavailable_backend(request.param)):
        pytest.skip(reason)
    return request.param


@pytest.fixture(params=OPTIMIZERS)
def kind(request: pytest.FixtureRequest, device: torch.device) -> str:
    if reason := unavailable_reason(request.param, device):
        pytest.skip(reason)
    return request.param


@pytest.mark.parametrize("seed", range(4))
def test_random_programs(backend: str, device: torch.device, kind: str, seed: int) -> None:
    """Clipping, accumulation, overflows, states saved and loaded, separate and fused updates."""
    chance = random.Random(f"{kind} {seed}")
    count = chance.choice((1, 1, 2, 6))
    arguments = {
        "init_scale": chance.choice((2.0**10, 3.0)),
        "growth_factor": chance.choice((2.0, 1.1)),
        "growth_interval": chance.choice((1, 3)),
    }
    ours, theirs = twins(backend, kind, device, dtypes=DTYPES, optimizers=count, **arguments)
    for iteration in range(12):
        bad = chance.choice(BAD) if chance.random() < 0.3 else None
        bad_at = chance.randrange(count)
        clip, add, together = (chance.random() < 0.3 for _ in range(3))
        reload = chance.random() < 0.15
        for twin in (ours, theirs):
            for o in range(count):
                twin.backward(iteration, o, bad if o == bad_at else None)
                if add:
                    twin.backward(100 + iteration, o, add=True)
            for o in range(count - together):
                twin.step(o, clip=clip)
            twin.finish(together=together)
            if reload:
                twin.scaler.load_state_dict(copy.deepcopy(twin.scaler.state_dict()))
        # Read together, since torch waits for the device at other places.
        assert_twins_same(ours, theirs, f"iteration {iteration}")


def test_found_inf_can_be_asked(backend: str, device: torch.device, kind: str) -> None:
    ours, _ = twins(backend, kind, device)
    for iteration, bad in enumerate((None, math.inf, None, math.nan)):
        ours.backward(iteration, bad=bad)
        ours.step()
        assert ours.scaler.step_skipped(ours.optimizers[0]) is (bad is not None)
        handed_out = ours.scaler.found_inf(ours.optimizers[0])
        ours.finish()
        ours.backward(iteration)
        ours.step()
        ours.finish()
        assert handed_out.item() == float(bad is not None), "written by a later step"


@pytest.mark.parametrize("kind", ["fused_sgd", "fused_adam"])
@pytest.mark.parametrize("user_scale", [2.0, 0.25])
def test_grad_scale_of_the_user(
    backend: str, device: torch.device, kind: str, user_scale: float
) -> None:
    ours, theirs = twins(backend, kind, device, init_scale=64.0, growth_interval=2)
    for iteration in range(4):
        for explicit in (False, True):
            for twin in (ours, theirs):
                twin.backward(iteration)
                if explicit:
                    twin.scaler.unscale_(twin.optimizers[0])
                twin.optimizers[0].grad_scale = flag(user_scale, device)
                twin.step()
                twin.finish()
            assert_twins_same(ours, theirs)


MIXED = (None, None, math.inf, None, math.nan, None, -math.inf, None, None)


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("first", ["gpu", "cpu"])
def test_gradients_in_mixed_places(
    backend: str, device: torch.device, kind: str, together: bool, first: str
) -> None:
    places = (device, CPU) if first == "gpu" else (CPU, device)
    arguments: Any = {"places": places, "dtypes": (torch.float32,), "growth_interval": 2}
    ours = Twin(GradScaler, kind, device, backend=backend, **arguments)
    assert_trains_as_without_scaler(ours, kind, MIXED, together=together)


@pytest.mark.parametrize("together", [False, True])
def test_fused_optimizer_in_mixed_places(
    backend: str, device: torch.device, together: bool
) -> None:
    """Optimizer without work of its own: torch's read their flag on the CPU before it arrives."""
    arguments: Any = {"places": (device, CPU), "growth_interval": 100, "init_scale": 2.0**12}
    ours = Twin(GradScaler, QuietFused, device, backend=backend, **arguments)
    scale = 2.0**12
    for iteration, bad in enumerate(MIXED):
        ours.backward(iteration, bad=bad)
        before = [p.grad.clone() for p in ours.params[0]]
        if not together:
            ours.step()
        ours.finish(together=together)
        assert_same([p.grad for p in ours.params[0]], before, "gradients")
        assert ours.scaler.step_skipped(ours.optimizers[0]) is (bad is not None), iteration
        scale = scale if bad is None else scale / 2
        assert ours.scaler.get_scale() == scale


@pytest.mark.parametrize("kind", ["sgd", "momentum", "fused_adam"])
@pytest.mark.parametrize("together", [False, True])
def test_loss_on_the_cpu(backend: str, device: torch.device, kind: str, together: bool) -> None:
    arguments: Any = {"loss_on": CPU, "dtypes": (torch.float32,), "growth_interval": 2}
    ours = Twin(GradScaler, kind, device, backend=backend, **arguments)
    assert ours.scaler._scale.device == CPU
    assert_trains_as_without_scaler(ours, kind, MIXED, together=together)


def parameters_of(backend: str | None, grads: Callable[[int], list[torch.Tensor]]) -> Any:
    """Started scaler and SGD; `grads` are set in each iteration."""
    if backend is None:
        scaler = TorchScaler(init_scale=8.0, growth_interval=2)
    else:
        scaler = GradScaler(init_scale=8.0, growth_interval=2, backend=backend)
    first = grads(0)
    params = [torch.nn.Parameter(torch.ones_like(g.to_dense())) for g in first]
    scaler.scale(torch.ones((), device=first[0].device))
    return scaler, params, torch.optim.SGD(params, lr=0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("coalesced", [False, True])
def test_sparse_gradients(
    backend: str, device: torch.device, dtype: torch.dtype, coalesced: bool
) -> None:
    def grads(seed: int) -> list[torch.Tensor]:
        values = make_gradient("contiguous", dtype, seed)[:3].to(device)
        if seed == 2:
            values[1, 2] = math.inf
        sparse = torch.sparse_coo_tensor(
            torch.tensor([[0, 4, 2]], device=device), values, (6, values.shape[1])
        )
        dense = make_gradient("long", dtype, seed).to(device)
        return [sparse.coalesce() if coalesced else sparse, dense]

    results = []
    for which in (backend, None):
        scaler, params, optimizer = parameters_of(which, grads)
        seen = []
        for seed in range(5):
            for p, g in zip(params, grads(seed), strict=True):
                p.grad = g
            scaler.step(optimizer)
            scaler.update()
            seen.append([[p.detach().clone() for p in params], scaler.get_scale()])
            seen.append([p.grad.to_dense() for p in params])
        results.append(seen)
    assert_same(*results)


def test_overlapping_gradients(backend: str, device: torch.device) -> None:
    def expanded(scaler_type: Any) -> Any:
        arguments = {} if scaler_type is TorchScaler else {"backend": backend}
        scaler = scaler_type(**arguments)
        p = torch.nn.Parameter(torch.ones(6, 11, device=device))
        p.grad = torch.ones(6, 1, device=device).expand(6, 11)
        scaler.scale(torch.ones((), device=device))
        scaler.step(torch.optim.SGD([p], lr=0.5))

    # Refused with torch's error.
    assert agree(expanded).error is not None

    # torch multiplies shared elements a nondeterministic number of times; its flag is exact.
    for bad in (0.0, math.inf, math.nan):
        memory = torch.zeros(8, device=device)
        memory[5] = bad
        p = torch.nn.Parameter(torch.ones(4, 3, device=device))
        p.grad = memory.as_strided((4, 3), (1, 2))
        dense = torch.nn.Parameter(torch.ones(5, device=device))
        dense.grad = torch.full((5,), 8.0, device=device)
        scaler = GradScaler(init_scale=8.0, backend=backend)
        scaler.scale(torch.ones((), device=device))
        optimizer = Quiet([p, dense])
        scaler.step(optimizer)
        assert optimizer.steps == (bad == 0.0)
        scaler.update()
        assert scaler.get_scale() == (8.0 if bad == 0.0 else 4.0)
        assert torch.equal(dense.grad, torch.ones(5, device=device))


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adam", "fused_sgd", "fused_adam"])
def test_bfloat16_gradients(backend: str, device: torch.device, kind: str) -> None:
    """torch has no kernel for them on a GPU, so the twin unscales in float32, which is exact."""
    dtype = torch.bfloat16
    scaler = GradScaler(init_scale=8.0, backend=backend)
    loss = torch.ones((), device=device)
    scaler.scale(loss)
    sides = [
        [torch.nn.Parameter(make_gradient("long", dtype, i).to(device)) for i in range(3)]
        for _ in range(2)
    ]
    ours, theirs = (OPTIMIZERS[kind](params) for params in sides)
    for iteration, bad in enumerate((None, math.inf, None)):
        for side, params in enumerate(sides):
            for i, p in enumerate(params):
                grad = make_gradient("long", dtype, 10 * iteration + i).to(device)
                # The scale is a power of two, so products are exact.
                p.grad = grad * scaler._scale.to(dtype) if side == 0 else grad
        if bad:
            sides[0][1].grad[70_000] = bad
        if backend == "aten":
            with pytest.raises(RuntimeError, match="not implemented for 'BFloat16'"):
                scaler.unscale_(ours)
            return
        scaler.unscale_(ours)
        scaler.step(ours)
        scaler.update()
        if bad is None:
            theirs.step()
        mine, torchs = ([p.detach() for p in params] for params in sides)
        assert_same(mine, torchs, f"at {iteration}")
    assert scaler.get_scale() == 4.0


def test_all_dtypes_in_one_optimizer(backend: str, device: torch.device) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
    if backend == "aten":
        pytest.skip("torch's op takes no bfloat16 gradients on a GPU")
    ours = Twin(
        GradScaler,
        Quiet,
        device,
        dtypes=dtypes,
        backend=backend,
        allow_fp16=True,
        init_scale=8.0,
        growth_interval=1,
    )
    for iteration in range(4):
        ours.backward(iteration)
        if iteration == 2:
            ours.params[0][3].grad[0, 0, 0, 0] = math.inf
        ours.step()
        ours.finish()
        if iteration != 2:
            for i, p in enumerate(ours.params[0]):
                layout = ("long", "contiguous", "transposed", "channels_last", "scalar", "short")
                if i < len(layout):
                    grad = make_gradient(layout[i], p.dtype, 7919 * iteration + i)
                    assert_same(p.grad, grad.to(device), f"gradient {i}")
    assert ours.scaler.get_scale() == 8.0 * 2 * 2 / 2 * 2
    assert ours.optimizers[0].steps == 3


class Net(torch.nn.Module):
    """Convolutional net with a deterministic backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(3, 16, 3, stride=2, padding=1),
            torch.nn.BatchNorm2d(16),
            torch.nn.ReLU(),
            torch.nn.Conv2d(16, 32, 3, stride=2, padding=1),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Linear(32 * 8 * 8, 10),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("kind", ["momentum", "adam", "fused_adam"])
@pytest.mark.parametrize("together", [False, True])
def test_autocast_training_of_a_convnet(
    backend: str, device: torch.device, kind: str, together: bool
) -> None:
    makers = {
        "momentum": lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9),
        "adam": lambda params: torch.optim.Adam(params, lr=1e-3),
        "fused_adam": lambda params: torch.optim.Adam(params, lr=1e-3, fused=True),
    }

    def trained(scaler: Any) -> list[Any]:
        torch.manual_seed(3)
        net = Net().to(device)
        optimizer = makers[kind](net.parameters())
        images = torch.randn(8, 16, 3, 32, 32, device=device)
        labels = torch.randint(0, 10, (8, 16), device=device)
        seen = []
        for step in range(40):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                logits = net(images[step % 8])
                loss = torch.nn.functional.cross_entropy(logits, labels[step % 8])
            scaler.scale(loss).backward()
            if together and hasattr(scaler, "step_and_update"):
                scaler.step_and_update(optimizer)
            else:
                scaler.step(optimizer)
                scaler.update()
            seen.append([loss.detach(), scaler.get_scale()])
        return [seen, [p.detach() for p in net.parameters()], optimizer.state_dict()]

    # Overflows in the first steps.
    arguments = {"init_scale": 2.0**24, "growth_interval": 5}
    ours = trained(GradScaler(backend=backend, **arguments))
    theirs, again = (trained(TorchScaler(**arguments)) for _ in range(2))
    if difference(theirs, again) is not None:
        pytest.skip("torch gives other bits each time here")
    assert_same(ours, theirs)
    scales = [scale for _, scale in ours[0]]
    assert any(b < a for a, b in itertools.pairwise(scales)), "no step was skipped"
    assert ours[0][-1][0].isfinite()


def test_states_move_between_scalers(backend: str, device: torch.device) -> None:
    ours, theirs = twins(backend, "sgd", device, growth_interval=3)
    for twin in (ours, theirs):
        twin.backward(0)
        twin.step()
        twin.finish()
    assert_same(ours.scaler.state_dict(), theirs.scaler.state_dict())
    loaded = [TorchScaler(), GradScaler(backend=backend)]
    for scaler, twin in zip(loaded, (ours, theirs), strict=True):
        scaler.load_state_dict(twin.scaler.state_dict())
        twin.scaler = scaler
        scaler.scale(twin.loss)
        for iteration in range(4):
            twin.backward(iteration)
            twin.step()
            twin.finish()
    assert_twins_same(theirs, ours)


@pytest.mark.parametrize("kind", FUSED)
def test_first_step_of_fused_optimizers_may_overflow(
    backend: str, device: torch.device, kind: str
) -> None:
    if reason := unavailable_reason(kind, device):
        pytest.skip(reason)
    make: Any = OPTIMIZERS[kind]
    if kind == "fused_sgd":
        make = lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9, fused=True)  # noqa: E731
    skipped = Twin(GradScaler, make, device, backend=backend)
    start = [p.detach().clone() for p in skipped.params[0]]
    skipped.backward(0, bad=math.inf)
    skipped.step()
    skipped.finish()
    assert_same([p.detach() for p in skipped.params[0]], start)
    skipped.backward(1)
    skipped.step()
    skipped.finish()
    assert all(p.isfinite().all() for p in skipped.params[0])


@pytest.mark.parametrize("limit", [1.0, Percentile(50, 4), ZScore(2.0, warmup=2)], ids=str)
def test_norms_by_parameter_and_limits_that_follow(
    backend: str, device: torch.device, limit: Any
) -> None:
    """Measured and decided on the device, without a wait."""
    params = [torch.nn.Parameter(torch.ones(size, device=device)) for size in (5, 70_000, 1)]
    optimizer = torch.optim.AdamW(params, lr=0.1, fused=True)
    scaler = GradScaler(init_scale=8.0, growth_interval=100, backend=backend, track="norms")
    scaler.scale(torch.ones((), device=device))

    def step() -> None:
        scaler.clip_grad_norm_(optimizer, limit)
        scaler.step(optimizer)
        scaler.update()

    for number in range(6):
        for param in params:
            param.grad = torch.randn_like(param) * (number + 1)
        expected = [float(param.grad.double().norm()) / 8 for param in params]
        if number == 0:
            step()  # makes tables and tries the fused kernels
        else:
            with no_syncs():
                step()
        found = [each.last for each in scaler.grad_norms().parameters]
        assert found == pytest.approx(expected, rel=1e-5)
