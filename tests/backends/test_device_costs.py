"""Cost of a step on a device: launches, bytes, tables, uploads and ops, counted on the host."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from support.comparison import FLOATS, assert_same, started
from support.gradients import sgd_with
from support.launchers import ReferenceLauncher
from support.models import grads_in
from support.steps import side, take_step

from ampfast import _C, GradScaler, Sigmas, backends, functional
from ampfast.backends.gpu import DeviceKernels

CPU = torch.device("cpu")
PLAIN = ("sgd", "adam")
FUSED = ("fused_sgd", "fused_adam")
INF = math.inf


# Every test has CPU tensors on a device whose launches are counted.
pytestmark = pytest.mark.usefixtures("launcher")


# Steps, their launches, and how often they read and write all gradients


def ending(way: str) -> Callable[[Any], None]:
    return lambda run: take_step(run.scaler, run.optimizer, way=way)


step, together, unscale = map(ending, ("step", "together", "unscale"))


def norm(run: Any) -> None:
    run.scaler.grad_norm(run.optimizer)


def clip(*order: float, then: Callable[[Any], None] = step, **options: Any) -> Any:
    def call(run: Any) -> None:
        run.scaler.clip_grad_norm_(run.optimizer, 0.5, *order, **options)
        then(run)

    return call


defer = functools.partial(clip, in_place=False)


class Cost(NamedTuple):
    call: Callable[[Any], None]
    launches: str
    reads: int
    writes: int
    kinds: tuple[str, ...] = (*PLAIN, *FUSED)
    settings: Mapping[str, Any] = MappingProxyType({})


# None of these limits; each step is a spike; not as long as a window has too few norms.
LIMITS = (1e9, 0.0, Sigmas(6.0, 2))
COSTS = {
    "step": Cost(step, "unscale update", 1, 1, PLAIN),
    "fused step": Cost(step, "check update", 1, 0, FUSED),
    "together": Cost(together, "unscale", 1, 1, PLAIN),
    "fused together": Cost(together, "check", 1, 0, FUSED),
    "unscale_": Cost(unscale, "unscale update", 1, 1),
    "norm": Cost(norm, "check", 1, 0),
    "clip": Cost(clip(), "check unscale update", 2, 1),
    "clip by the largest": Cost(clip(INF), "check unscale update", 2, 1),
    "clip, then together": Cost(clip(then=together), "check unscale update", 2, 1),
    "defer": Cost(defer(), "check update", 1, 0, FUSED),
    "defer, then together": Cost(defer(then=together), "check update", 1, 0, FUSED),
}
for limit in LIMITS:
    COSTS |= {
        f"clip, {limit}": Cost(clip(skip_above=limit), "check unscale update", 2, 1),
        f"defer, {limit}": Cost(defer(skip_above=limit), "check update", 1, 0, FUSED),
        f"step, {limit}": Cost(step, "unscale update", 1, 1, PLAIN, {"skip_above": limit}),
        f"fused step, {limit}": Cost(step, "check update", 1, 0, FUSED, {"skip_above": limit}),
    }


@pytest.mark.parametrize("track", [None, "overflow"])
@pytest.mark.parametrize("name", COSTS)
def test_launches_bytes_and_tables(
    launcher: ReferenceLauncher, name: str, track: str | None
) -> None:
    cost = COSTS[name]
    for kind in cost.kinds:
        run = side(GradScaler, kind, track=track, **cost.settings)
        run.scaler.scale(run.loss(3)).backward()
        grads = [param.grad for param in run.model.parameters()]
        size, tables = sum(grad.nbytes for grad in grads), _C.tables_made()
        for turn in range(4):
            for grad in grads:
                grad.fill_(2.0)
            launcher.launches.clear()
            launcher.read = launcher.written = 0
            cost.call(run)
            assert (launcher.read, launcher.written) == (cost.reads * size, cost.writes * size)
            if turn or track is None:  # tracking walks once to know the parameters
                assert launcher.launches == cost.launches.split(), kind
        assert _C.tables_made() == tables + 1


@pytest.mark.parametrize("bad", [None, 0, -1])
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 9])
def test_one_update_for_any_number_of_optimizers(
    launcher: ReferenceLauncher, count: int, at_once: bool, bad: int | None
) -> None:
    """It rides in the last of two checks, and is a launch of its own behind more."""
    scaler, values = started(GradScaler, 4.0, growth_interval=1), [1.0] * count
    if bad is not None:
        values[bad] = INF
    optimizers = [sgd_with(torch.full((3,), value)) for value in values]
    if at_once:
        scaler.step_and_update(*optimizers)
    else:
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    rides = at_once and count <= 2
    assert launcher.launches == ["unscale"] * count + ["update"] * (not rides)
    assert scaler.get_scale() == (8.0 if bad is None else 2.0)


class Counting(GradScaler):
    updates = 0

    def update(self, new_scale: Any = None) -> None:
        self.updates += 1
        super().update(new_scale)


def test_an_update_that_cannot_ride_is_apart(launcher: ReferenceLauncher) -> None:
    run = side(Counting)
    run.scaler.scale(run.loss(0)).backward()
    together(run)
    assert run.scaler.updates == 1
    # The flag of `unscale_` counts, which a check of an own `grad_scale` does not know.
    run = side(GradScaler, "fused_sgd", init_scale=4.0)
    run.scaler.scale(run.loss(0)).backward()
    launcher.launches.clear()
    run.scaler.unscale_(run.optimizer)
    for flag in run.scaler._found_inf_per_device(run.optimizer).values():
        flag.fill_(1.0)
    run.optimizer.grad_scale = torch.ones(())
    together(run)
    assert launcher.launches == ["unscale", "check", "update"]
    assert run.scaler.get_scale() == 2.0


@pytest.mark.parametrize("clips", [False, True])
def test_every_dtype_is_a_launch_and_all_share_a_table(launcher: Any, clips: bool) -> None:
    sizes = [(n, dtype) for n in (1, 5000) for dtype in FLOATS]
    optimizer = sgd_with(*(torch.full((n,), 8.0, dtype=dtype) for n, dtype in sizes))
    scaler, before = started(GradScaler, 2.0, allow_fp16=True), _C.tables_made()
    if clips:
        norm = scaler.clip_grad_norm_(optimizer, 1e9)
        assert norm.item() == pytest.approx(math.sqrt(4 * 5001 * 4.0**2))
    else:
        scaler.unscale_(optimizer)
    assert launcher.launches == ["check"] * 4 * clips + ["unscale"] * 4
    assert _C.tables_made() == before + 1
    assert scaler.found_inf(optimizer).item() == 0.0
    for gradient in grads_in(optimizer):
        assert_same(gradient, torch.full_like(gradient, 4.0))


def test_nothing_is_launched_for_nothing(launcher: ReferenceLauncher) -> None:
    functional.unscale_([], torch.zeros(()), torch.tensor(0.5))
    functional.check_([torch.zeros(0, 3)], torch.zeros(()))
    assert launcher.launches == []
    assert started(GradScaler).clip_grad_norm_(sgd_with(torch.zeros(0)), 1.0).item() == 0.0
    assert launcher.launches == ["clip"]


class Silent(ReferenceLauncher):
    """Runs nothing: what is counted are torch's ops around the launches."""

    def multi_tensor(self, *_: Any) -> None:
        pass

    update_scale = clip_coefficient = multi_tensor


# Memory and views, values that the host reads, and the flag on the host that marks a pass.
FREE = "empty empty_like empty_strided unsqueeze unbind select as_strided detach"
OF_HOST = "item _local_scalar_dense ones fill_"


@pytest.mark.parametrize("track", [None, "overflow"])
@pytest.mark.parametrize("kind", ["sgd", "fused_sgd"])
@pytest.mark.parametrize("name", ["step", "unscale_", "clip_grad_norm_"])
def test_torchs_ops_launch_nothing_besides(
    name: str, kind: str, track: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fill of memory is a launch, too, for a kernel to overwrite it."""
    kernels = DeviceKernels(Silent())
    monkeypatch.setattr(backends.Choice, "kernels_for", lambda choice, device: kernels)
    run = side(GradScaler, kind, track=track)
    monkeypatch.setattr(run.optimizer, "step", lambda: None)
    run.scaler.scale(run.loss(3)).backward()
    for _ in range(5):  # by then the table is uploaded
        with torch.autograd.profiler.profile() as seen:
            getattr(run.scaler, name)(run.optimizer, *((0.5,) if name == "clip_grad_norm_" else ()))
        run.scaler.update()
    names = {event.name.removeprefix("aten::") for event in seen.function_events}
    assert names <= {*FREE.split(), *OF_HOST.split()}


# Tables


def made(grads: list[torch.Tensor]) -> int:
    """Unscales by 1/2; returns the number of new tables."""
    before = _C.tables_made()
    functional.unscale_(grads, torch.zeros(()), torch.tensor(0.5))
    return _C.tables_made() - before


def test_a_table_is_made_once(launcher: ReferenceLauncher) -> None:
    grads = [torch.ones(n) for n in (3, 5000, 1)]
    assert [made(grads) for _ in range(4)] == [1, 0, 0, 0]
    assert_same(grads[1], torch.full((5000,), 0.5**4))
    # Also by optimizers that step in turn.
    lists = [[torch.ones(4)] for _ in range(500)]
    assert [made(grads) for grads in lists] == [1] * 500
    assert [made(grads) for grads in lists] == [0] * 500
    memory = torch.ones(64)
    for changed in (
        [memory[:8], memory[16:24]],
        [memory[:8], memory[17:25]],  # another address
        [memory[:8], memory[16:25]],  # another length
        [memory[:8].view(torch.float16), memory[16:24]],  # another dtype, at the same address
        [memory[:8]],
        [memory[16:24], memory[:8]],  # another order
        [memory[:8], memory[16:24], memory[32:40]],
    ):
        assert [made(changed), made(changed)] == [1, 0]
    # A captured one is never one that eager steps use.
    launcher.capturing = True
    assert [made(lists[0]), made(lists[0])] == [1, 1]
    launcher.capturing = False
    assert made(lists[0]) == 0


def test_tables_do_not_pile_up() -> None:
    """They are kept up to a total size."""
    tensors = [torch.ones(1) for _ in range(20_000)]

    def looked_up(first: int) -> int:
        """Tables made for the tensors in that order."""
        before = _C.tables_made()
        _C.DeviceTable.of(_C.GradList.of(tensors[first:] + tensors[:first], CPU), False)
        return _C.tables_made() - before

    assert made(tensors[:1]) == 1
    assert [looked_up(first) for first in range(40)] == [1] * 40
    assert [looked_up(first) for first in range(10, 40)] == [0] * 30
    assert made(tensors[:1]) == 1, "long unused tables are forgotten"
    assert [looked_up(39), looked_up(0)] == [0, 1]


def uploads(grads: list[torch.Tensor], calls: int) -> list[int]:
    """Unscales by 1/2 so often; returns the number of tables that each call uploaded."""
    counts = [_C.uploads()]
    for _ in range(calls):
        made(grads)
        counts.append(_C.uploads())
    return [after - before for before, after in itertools.pairwise(counts)]


def test_a_small_table_is_uploaded_where_it_stays() -> None:
    """By the fourth pass: one step makes up to three."""
    grads = [torch.full((n,), 8.0, dtype=d) for n in (1, 5000) for d in FLOATS]
    assert uploads(grads, 6) == [0, 0, 0, 1, 0, 0]
    for gradient in grads:
        assert_same(gradient, torch.full_like(gradient, 0.125))
    moving = [torch.ones(n) for n in range(1, 9)]
    assert [uploads([moved], 3) for moved in moving] == [[0] * 3] * 8
    most = 2048  # chunks
    many = list(torch.ones(most + 1).split(1))
    assert uploads(many[:most], 5) == [0, 0, 0, 1, 0]
    assert uploads(many, 2) == [1, 0], "a long one at once"


def test_no_captured_table_is_uploaded(launcher: ReferenceLauncher) -> None:
    """Replays read it where the host wrote it, each with a header of its own."""
    lists = [[torch.ones(4)], list(torch.ones(5000).split(1))]
    for grads in lists:
        made(grads)
    before = _C.uploads()
    launcher.capturing = True
    assert [made(grads) for grads in lists * 3] == [1] * 6
    tables = [_C.DeviceTable.of(_C.GradList.of(grads, CPU), True) for grads in lists * 3]
    launcher.capturing = False
    assert _C.uploads() == before
    assert not any(table.header.any() for table in tables)
    eager = [_C.DeviceTable.of(_C.GradList.of(grads, CPU), False) for grads in lists]
    assert len({table.header.data_ptr() for table in tables}) == 6
    [of_stream] = {table.header.data_ptr() for table in eager}
    assert of_stream not in {table.header.data_ptr() for table in tables}
    assert {*eager[0].header.tolist()} == {0}
