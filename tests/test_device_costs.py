"""Cost of a step on a device: launches, bytes, tables, uploads and flags, counted on the host."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from support.clipping_reference import coefficient_of, grads_of
from support.comparison import FLOATS, assert_same
from support.gradients import sgd_with
from support.optimizers import OPTIMIZERS
from support.reference_launcher import ReferenceLauncher
from support.scalers import started
from support.twins import assert_sides_same, side

from ampfast import _C, GradScaler, LogMax, Sigmas, functional

CPU = torch.device("cpu")
PLAIN = ("sgd", "adam")
FUSED = ("fused_sgd", "fused_adam")
INF = math.inf


# Every test has CPU tensors on a device whose launches are counted.
pytestmark = pytest.mark.usefixtures("launcher")


def warmed(kind: str, **arguments: Any) -> Any:
    run = side(GradScaler, kind, **arguments)
    run.train(0)
    run.train(1)
    run.scaler.scale(run.loss(2)).backward()
    return run


@pytest.mark.parametrize("track", [None, "overflow"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_is_torchs_bit_for_bit(
    launcher: ReferenceLauncher, kind: str, track: str | None
) -> None:
    settings: dict[str, Any] = {"init_scale": 2.0**12, "growth_interval": 2}
    ours = side(GradScaler, kind, track=track, **settings)
    theirs = side(torch.amp.GradScaler, kind, **settings)
    for seed in range(12):
        bad = {4: INF, 9: math.nan}.get(seed)
        for run in (ours, theirs):
            run.train(seed, bad)
        assert_sides_same(ours, theirs)
    assert {"update"} < set(launcher.launches)


# Steps, their launches, and how often they read and write all gradients


def step(run: Any) -> None:
    run.scaler.step(run.optimizer)
    run.scaler.update()


def together(run: Any) -> None:
    run.scaler.step_and_update(run.optimizer)


def unscale(run: Any) -> None:
    run.scaler.unscale_(run.optimizer)
    step(run)


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
    "norm": Cost(norm, "check clip", 1, 0),
    "clip": Cost(clip(), "check unscale update", 2, 1),
    "clip by the largest": Cost(clip(INF), "check unscale update", 2, 1),
    "clip, then together": Cost(clip(then=together), "check unscale update", 2, 1),
    "defer": Cost(defer(), "check clip update", 1, 0, FUSED),
    "defer, then together": Cost(defer(then=together), "check clip update", 1, 0, FUSED),
}
for limit in LIMITS:
    COSTS |= {
        f"clip, {limit}": Cost(clip(skip_above=limit), "check clip unscale update", 2, 1),
        f"defer, {limit}": Cost(defer(skip_above=limit), "check clip update", 1, 0, FUSED),
        f"step, {limit}": Cost(step, "unscale clip update", 1, 1, PLAIN, {"skip_above": limit}),
        f"fused step, {limit}": Cost(step, "check clip update", 1, 0, FUSED, {"skip_above": limit}),
    }


# Settings, and what launches they turn into which others: a policy's update is a launch of its own.
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "usual": ({}, {}),
    "tracked": ({"track": "overflow"}, {}),
    "policy": ({"policy": LogMax()}, {"unscale": "unscale update", "check": "check update"}),
}


@pytest.mark.parametrize("added", SETTINGS)
@pytest.mark.parametrize("name", COSTS)
def test_launches_bytes_and_tables(launcher: ReferenceLauncher, name: str, added: str) -> None:
    cost, (settings, others) = COSTS[name], SETTINGS[added]
    for kind in cost.kinds:
        run = side(GradScaler, kind, **cost.settings, **settings)
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
            if turn or added != "tracked":  # which walks once to know the parameters
                assert launcher.launches == others.get(cost.launches, cost.launches).split(), kind
        assert _C.tables_made() == tables + 1


@pytest.mark.parametrize("call", [step, together])
@pytest.mark.parametrize("kind", FUSED)
def test_the_check_writes_the_grad_scale(
    launcher: ReferenceLauncher, kind: str, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No launch of its own: with the next scale written first, it would be too late."""
    run = warmed(kind, growth_interval=1)
    given, written = [], []
    step, plain = run.optimizer.step, launcher.multi_tensor

    def spied_step() -> None:
        given.append((run.optimizer.grad_scale, run.optimizer.grad_scale.item()))
        step()

    def spied_launch(work: Any, *more: Any) -> None:
        written.append(work.factor_copy)
        plain(work, *more)

    monkeypatch.setattr(run.optimizer, "step", spied_step)
    monkeypatch.setattr(launcher, "multi_tensor", spied_launch)
    before = run.scaler.get_scale()
    call(run)
    assert run.scaler.get_scale() == 2 * before
    [(grad_scale, value)] = given
    assert value == grad_scale.item() == before
    assert written == [grad_scale] and written[0] is grad_scale
    assert grad_scale is not run.scaler._scale


@pytest.mark.parametrize("bad", ["none", "first", "last"])
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 9])
def test_one_update_for_any_number_of_optimizers(
    launcher: ReferenceLauncher, count: int, at_once: bool, bad: str
) -> None:
    """It rides in the last of two checks, and is a launch of its own behind more."""
    scaler = started(GradScaler, 4.0, growth_interval=1)
    values = [1.0] * count
    if bad != "none":
        values[0 if bad == "first" else -1] = INF
    optimizers = [sgd_with(torch.full((3,), value)) for value in values]
    if at_once:
        scaler.step_and_update(*optimizers)
    else:
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    rides = at_once and count <= 2
    assert launcher.launches == ["unscale"] * count + ["update"] * (not rides)
    assert scaler.get_scale() == (8.0 if bad == "none" else 2.0)


def test_one_coefficient_for_all_lists(launcher: ReferenceLauncher) -> None:
    optimizers = [sgd_with(torch.full((n,), 8.0, dtype=FLOATS[n % 2])) for n in range(1, 6)]
    optimizers.append(sgd_with(*(torch.full((n,), 8.0) for n in (5, 5000, 1))))
    norm = started(GradScaler, 4.0).clip_grad_norm_(optimizers, 1.0)
    assert norm.item() == pytest.approx(math.sqrt((15 + 5006) * 4))
    assert launcher.launches == ["check"] * 6 + ["clip"] + ["unscale"] * 6
    coefficient = coefficient_of(norm, 1.0)
    for grad in itertools.chain.from_iterable(map(grads_of, optimizers)):
        assert_same(grad, torch.full_like(grad, 2.0) * coefficient.to(grad.dtype))


def test_a_launch_that_fails_leaves_no_flag_behind(
    launcher: ReferenceLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    grads = [torch.full((3,), math.inf), torch.ones(3, dtype=torch.float16)]
    plain = launcher.multi_tensor

    def fails(work: Any, table: Any, segment: Any, is_last: bool) -> None:
        if segment.dtype is torch.float16:
            raise RuntimeError("no compiler")
        plain(work, table, segment, is_last)

    with monkeypatch.context() as broken:
        broken.setattr(launcher, "multi_tensor", fails)
        with pytest.raises(RuntimeError, match="no compiler"):
            functional.check_(grads, torch.zeros(()))
    grads[0].fill_(1.0)
    functional.check_(grads, found := torch.zeros(()))
    assert found.item() == 0.0


def test_empty_gradients_get_a_float32_flag() -> None:
    optimizer = sgd_with(torch.zeros(0))
    scaler = started(GradScaler, 4.0, growth_interval=1)
    torch.set_default_dtype(torch.float64)
    try:
        scaler.step_and_update(optimizer)
    finally:
        torch.set_default_dtype(torch.float32)
    assert scaler.found_inf(optimizer).dtype == torch.float32
    assert scaler.get_scale() == 8.0


def test_a_raising_step_takes_the_update_back() -> None:
    run = warmed("sgd", init_scale=3.0, growth_interval=100)
    state = run.scaler.state_dict()
    run.optimizer.step = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        together(run)
    assert_same(run.scaler.state_dict(), state)


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
    for gradient in grads_of(optimizer):
        assert_same(gradient, torch.full_like(gradient, 4.0))


def test_nothing_is_launched_for_nothing(launcher: ReferenceLauncher) -> None:
    functional.unscale_([], torch.zeros(()), torch.tensor(0.5))
    functional.check_([torch.zeros(0, 3)], torch.zeros(()))
    assert launcher.launches == []
    assert started(GradScaler).clip_grad_norm_(sgd_with(torch.zeros(0)), 1.0).item() == 0.0
    assert launcher.launches == ["clip"]


# Tracking


@pytest.mark.parametrize("kind", ["sgd", "fused_adam"])
def test_steps_are_marked_where_the_update_rides(kind: str) -> None:
    run = side(GradScaler, kind, track="overflow")
    expected = []
    for seed in range(6):
        run.optimizer.zero_grad()
        run.scaler.scale(run.loss(seed)).backward()
        if seed in (2, 4):
            next(run.model.parameters()).grad.view(-1)[0] = INF
            expected.append(seed)
        together(run)
        report = run.scaler.overflow_report()
        assert report.step == (expected[-1] if expected else None)
        assert [p.infinities for p in report.totals] == ([len(expected)] if expected else [])


def test_lists_that_change_keep_their_rows() -> None:
    """An unused parameter shifts later ones in the list, not in the rows."""
    scaler = started(GradScaler, 4.0, track="overflow")
    params = [torch.nn.Parameter(torch.zeros(n)) for n in (3, 4, 5, 3)]
    optimizer = torch.optim.SGD(params, lr=0.0)
    memory, places = torch.ones(64), (0, 16, 32, 0)  # the last is in the memory of the first
    lists = [((0, 1, 2), 1), ((0, 2), 2), ((2,), 2), ((1, 2), 1)]
    for used, bad in lists + [((i,), i) for i in (0, 3, 0, 3)]:
        for i, param in enumerate(params):
            param.grad = memory[places[i] :][: param.numel()] if i in used else None
        memory.fill_(1.0)
        memory[places[bad]] = INF
        scaler.step(optimizer)
        scaler.update()
        assert [p.index for p in scaler.overflow_report().parameters] == [bad]
    totals = [(p.index, p.infinities) for p in scaler.overflow_report().totals]
    assert totals == [(index, 2) for index in range(4)]


# Tables


def unscale(grads: list[torch.Tensor]) -> int:
    """Unscales by 1/2; returns the number of new tables."""
    before = _C.tables_made()
    functional.unscale_(grads, torch.zeros(()), torch.tensor(0.5))
    return _C.tables_made() - before


def test_a_table_is_made_once(launcher: ReferenceLauncher) -> None:
    grads = [torch.ones(n) for n in (3, 5000, 1)]
    assert [unscale(grads) for _ in range(4)] == [1, 0, 0, 0]
    assert_same(grads[1], torch.full((5000,), 0.5**4))
    # Also by optimizers that step in turn.
    lists = [[torch.ones(4)] for _ in range(500)]
    assert [unscale(grads) for grads in lists] == [1] * 500
    assert [unscale(grads) for grads in lists] == [0] * 500
    # A captured one is never one that eager steps use.
    launcher.capturing = True
    assert [unscale(lists[0]), unscale(lists[0])] == [1, 1]
    launcher.capturing = False
    assert unscale(lists[0]) == 0


def test_any_change_makes_another() -> None:
    memory = torch.ones(64)
    grads = [memory[:8], memory[16:24]]
    assert unscale(grads) == 1
    for changed in (
        [memory[:8], memory[17:25]],  # another address
        [memory[:8], memory[16:25]],  # another length
        [memory[:8].view(torch.float16), memory[16:24]],  # another dtype, at the same address
        [memory[:8]],
        [memory[16:24], memory[:8]],  # another order
        [memory[:8], memory[16:24], memory[32:40]],
    ):
        assert unscale(changed) == 1
        assert unscale(changed) == 0
    assert unscale(grads) == 0, "the first is still known"


def test_tables_do_not_pile_up() -> None:
    """A few large tables are kept of any size, more only up to a total size."""
    tensors = [torch.ones(1) for _ in range(20_000)]

    def looked_up(first: int) -> tuple[int, int]:
        """Tables made, and bytes of that of the tensors in that order."""
        before = _C.tables_made()
        grads = _C.GradList.of(tensors[first:] + tensors[:first], torch.device("cpu"))
        assert grads is not None
        table = _C.DeviceTable.of(grads, False)
        return _C.tables_made() - before, table.words.nbytes + table.partials.nbytes

    assert unscale(tensors[:1]) == 1
    new = [looked_up(first) for first in range(32)]
    assert sum(table_bytes for _, table_bytes in new) > 2**23
    assert [tables for tables, _ in new] == [1] * 32
    assert [looked_up(first)[0] for first in range(32)] == [0] * 32
    assert unscale(tensors[:1]) == 1, "long unused tables are forgotten"
    assert looked_up(1)[0] == 0
    assert looked_up(0)[0] == 1


def uploads(grads: list[torch.Tensor], calls: int) -> list[int]:
    """Unscales by 1/2 so often; returns the number of tables that each call uploaded."""
    counts = [_C.uploads()]
    for _ in range(calls):
        unscale(grads)
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
        unscale(grads)
    before = _C.uploads()
    launcher.capturing = True
    assert [unscale(grads) for grads in lists * 3] == [1] * 6
    tables = [_C.DeviceTable.of(_C.GradList.of(grads, CPU), True) for grads in lists * 3]
    launcher.capturing = False
    assert _C.uploads() == before
    assert not any(table.header.any() for table in tables)
    eager = [_C.DeviceTable.of(_C.GradList.of(grads, CPU), False) for grads in lists]
    assert len({table.header.data_ptr() for table in tables}) == 6
    [of_stream] = {table.header.data_ptr() for table in eager}
    assert of_stream not in {table.header.data_ptr() for table in tables}
    assert {*eager[0].header.tolist()} == {0}


def test_captures_take_headers_that_eager_passes_made() -> None:
    grads = _C.GradList.of([torch.ones(4)], CPU)
    _C.DeviceTable.of(grads, False)
    headers = {_C.DeviceTable.of(grads, True).header.data_ptr() for _ in range(500)}
    with pytest.raises(RuntimeError, match=r"cannot capture .*: run one iteration without"):
        for _ in range(1100):
            headers.add(_C.DeviceTable.of(grads, True).header.data_ptr())
    assert len(headers) >= 500
    last = len(headers)
    _C.DeviceTable.of(grads, False)  # of a known list, too
    headers.add(_C.DeviceTable.of(grads, True).header.data_ptr())
    assert len(headers) == last + 1


# Updates that ride in a check


def test_an_error_before_the_check_leaves_no_update() -> None:
    run = warmed("sgd")
    run.optimizer.param_groups.append({"params": [None]})
    with pytest.raises(AssertionError) as caught:
        run.scaler.step_and_update(run.optimizer)
    assert caught.value.__notes__ == ["It is parameter 0 of group 1."]
    assert run.scaler._turn(run.optimizer).ending is None


def test_an_update_that_rides_is_as_one_apart() -> None:
    run = warmed("sgd", init_scale=4.0, min_scale=4.0, on_min_scale="raise")
    before = run.scaler._scale._version
    together(run)
    assert run.scaler._scale._version == before + 1
    next(run.model.parameters()).grad.view(-1)[0] = INF
    with pytest.raises(FloatingPointError):
        together(run)


@pytest.mark.parametrize("kind", ["sgd", "fused_sgd"])
class Counting(GradScaler):
    updates = 0

    def update(self, new_scale: Any = None) -> None:
        self.updates += 1
        super().update(new_scale)


@pytest.mark.parametrize("kind", ["sgd", "fused_sgd"])
def test_no_update_rides_past_an_override(kind: str) -> None:
    run = side(Counting, kind)
    for seed in range(3):
        run.scaler.scale(run.loss(seed)).backward()
        together(run)
    assert run.scaler.updates == 3


def test_an_update_does_not_ride_in_a_second_check(launcher: ReferenceLauncher) -> None:
    """The flag of `unscale_` counts, which a check of an own `grad_scale` does not know."""
    run = warmed("fused_sgd", init_scale=4.0)
    launcher.launches.clear()
    run.scaler.unscale_(run.optimizer)
    for flag in run.scaler._found_inf_per_device(run.optimizer).values():
        flag.fill_(1.0)
    run.optimizer.grad_scale = torch.ones(())
    run.scaler.step_and_update(run.optimizer)
    assert launcher.launches == ["unscale", "check", "update"]
    assert run.scaler.get_scale() == 2.0


def test_a_factor_that_is_no_number_is_refused_as_apart(launcher: ReferenceLauncher) -> None:
    run = warmed("sgd")
    launcher.launches.clear()
    run.scaler._growth_factor = "2"
    with pytest.raises((TypeError, RuntimeError), match=r"growth_factor|scale_growth_factor"):
        run.scaler.step_and_update(run.optimizer)
    assert launcher.launches == ["unscale"]
