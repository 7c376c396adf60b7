"""Norms that unscaling measures for a clipping by torch's name, and the default limit."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import random
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from support.clipping_reference import clip_by_hand, clips_by_name, exact_norm, grads_of
from support.comparison import FLOATS, assert_same
from support.gradients import filled, parameter_with, sgd_with
from support.one_step import host_reads
from support.reference_launcher import ReferenceLauncher
from support.scalers import started
from torch import Tensor

from ampfast import _C, GradScaler, LogMax, Sigmas, StepGuard, clip_grad, functional
from ampfast.backends import core

INF = math.inf


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Whether each clip took a kept norm."""
    return clips_by_name(monkeypatch)


def kept_norms() -> int:
    return sum(clip_grad.KEPT in entry for entry in clip_grad._entries(clip_grad._living()))


def keeping(scale: float = 8.0, **arguments: Any) -> Any:
    return started(GradScaler, scale, keep_norm=True, **arguments)


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def three() -> list[Tensor]:
    return [filled((n,), torch.float32, n) for n in (5, 40_000, 1)]


@pytest.mark.parametrize("order", [2.0, INF])
@pytest.mark.parametrize("limit", [0.5, 1e6, INF])
def test_the_norm_is_that_of_our_own_clipping(order: float, limit: float) -> None:
    ours, own = sgd_with(*three()), sgd_with(*three())
    scaler, other = keeping(), started(GradScaler)
    scaler.unscale_(ours)
    norm = functional.clip_grad_norm_(iter(reversed(params_of(ours))), limit, order)
    assert_same(norm, other.clip_grad_norm_(own, limit, order))
    assert_same(grads_of(ours), grads_of(own))
    for each, optimizer in ((scaler, ours), (other, own)):
        each.step(optimizer)
        each.update()
    assert_same(params_of(ours), params_of(own))


@pytest.mark.parametrize("clips", [True, False])
def test_launches_and_bytes(launcher: ReferenceLauncher, clips: bool) -> None:
    optimizer, scaler = sgd_with(*three()), keeping()
    size, limit = sum(grad.nbytes for grad in grads_of(optimizer)), 0.5 if clips else 1e6
    scaler.unscale_(optimizer)
    functional.clip_grad_norm_(params_of(optimizer), limit)
    assert launcher.launches == ["unscale", "unscale"]
    assert launcher.read + launcher.written == (4 if clips else 2) * size
    own = sgd_with(*three())
    own_scaler = started(GradScaler)
    own_scaler.clip_grad_norm_(own, limit)
    assert_same(grads_of(optimizer), grads_of(own))


def test_the_host_reads_nothing() -> None:
    optimizer, scaler = sgd_with(*three()), keeping()

    def step() -> None:
        scaler.unscale_(optimizer)
        functional.clip_grad_norm_(params_of(optimizer), 1.0)

    assert host_reads(step) == 0


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.usefixtures("small_grain")
def test_unscaling_with_sums_is_unscaling(dtype: torch.dtype) -> None:
    for scale in (8.0, 1.0, 3.0, 2.0**-30):
        grads = [filled((n,), dtype, n) for n in (7, 50_000, 1)]
        ours, own = sgd_with(*grads), sgd_with(*(grad.clone() for grad in grads))
        exact = exact_norm(grads, scale)
        scaler, other = (
            started(GradScaler, scale, allow_fp16=True, keep_norm=k) for k in (True, False)
        )
        scaler.unscale_(ours)
        other.unscale_(own)
        assert_same(grads_of(ours), grads_of(own))
        assert_same(scaler.found_inf(ours), other.found_inf(own))
        norm = functional.clip_grad_norm_(params_of(ours), INF)
        wide = torch.tensor(exact, dtype=torch.float64).to(norm.dtype)
        torch.testing.assert_close(norm, wide, rtol=max(torch.finfo(dtype).eps, 1e-13), atol=0)


CHANGES: dict[str, Callable[[list[Any]], Any]] = {
    "in place": lambda params: params[1].grad.mul_(2),
    "a view": lambda params: params[1].grad[:3].zero_(),
    "another tensor": lambda params: setattr(params[0], "grad", params[0].grad * 3),
    "dropped": lambda params: setattr(params[0], "grad", None),
    "added": lambda params: params.append(parameter_with(torch.ones(3))),
    "a part": lambda params: params.pop(),
    "other data": lambda params: setattr(params[2].grad, "data", torch.full((1,), 9.0)),
    "fewer values": lambda params: setattr(params[1].grad, "data", params[1].grad.data[:9]),
    "set to none and made again": lambda params: anew(params),
    "unscaled again": lambda params: keeping().unscale_(torch.optim.SGD(params[1:], lr=1.0)),
    "a clip before": lambda params: functional.clip_grad_norm_(params, 0.1),
    "accumulated": lambda params: (params[0].sum() * 2).backward(),
}


def anew(params: list[Any]) -> None:
    shapes = [param.grad.shape for param in params]
    for param in params:
        param.grad = None
    for param, shape in zip(params, shapes, strict=True):
        param.grad = torch.full(shape, 0.5)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("order", [2.0, INF])
def test_changes_are_noticed(change: str, order: float, measured: list[str]) -> None:
    optimizer, scaler = sgd_with(*three()), keeping()
    scaler.unscale_(optimizer)
    params = params_of(optimizer)
    CHANGES[change](params)
    measured.clear()
    before = [parameter_with(p.grad.clone()) for p in params if p.grad is not None]
    norm = functional.clip_grad_norm_(params, 0.25, order)
    assert "kept" not in measured
    by_hand = functional.get_total_norm([p.grad for p in before], order)
    torch.testing.assert_close(norm, by_hand, rtol=1e-6, atol=0)
    clip_by_hand(before, norm, 0.25)
    assert_same([p.grad for p in params if p.grad is not None], [p.grad for p in before])


def test_a_norm_is_kept_until_the_update_at_most(measured: list[str]) -> None:
    optimizer, scaler = sgd_with(*three()), keeping()
    for steps in (False, True):
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)
        assert kept_norms() == 1
        if steps:
            scaler.step(optimizer)
        scaler.update()
        assert kept_norms() == 0
        functional.clip_grad_norm_(params_of(optimizer), 1.0)
    assert "kept" not in measured
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    del scaler
    gc.collect()
    assert kept_norms() == 0


def test_optimizers_are_told_apart(measured: list[str]) -> None:
    first, second, scaler = sgd_with(*three()), sgd_with(torch.ones(4)), keeping()
    scaler.unscale_(first)
    scaler.unscale_(second)
    assert functional.clip_grad_norm_(params_of(second), 1.0).item() == 0.25
    functional.clip_grad_norm_(params_of(first), 1.0)
    assert measured == ["kept", "kept"]
    scaler.update()
    scaler.unscale_(first)
    scaler.unscale_(second)
    functional.clip_grad_norm_(params_of(first) + params_of(second), 1.0)
    assert measured == ["kept", "kept", "read"]


@pytest.mark.parametrize("bad", [INF, math.nan])
def test_the_norm_of_a_skipped_step(bad: float, measured: list[str]) -> None:
    optimizer, scaler = sgd_with(*three()), keeping()
    grads_of(optimizer)[1][77] = bad
    before = [param.detach().clone() for param in params_of(optimizer)]
    scaler.unscale_(optimizer)
    norm = functional.clip_grad_norm_(params_of(optimizer), 1.0)
    assert_same(norm, torch.tensor(bad))
    assert measured == ["kept"]
    scaler.step(optimizer)
    scaler.update()
    assert_same([param.detach() for param in params_of(optimizer)], before)
    assert scaler.skip_reason(optimizer) == "overflow" and scaler.get_scale() == 4.0


@pytest.mark.parametrize("bad", [INF, math.nan])
def test_an_error_leaves_the_gradients(bad: float) -> None:
    optimizer, scaler = sgd_with(*three()), keeping()
    grads_of(optimizer)[0][0] = bad
    scaler.unscale_(optimizer)
    before = [grad.clone() for grad in grads_of(optimizer)]
    with pytest.raises(RuntimeError, match="non-finite"):
        functional.clip_grad_norm_(params_of(optimizer), 1.0, error_if_nonfinite=True)
    assert_same(grads_of(optimizer), before)


@pytest.mark.parametrize("kind", ["policy", "track", "guard", "masters", "aten"])
def test_beside_other_features(kind: str, measured: list[str]) -> None:
    from ampfast import master_weights_

    grads = [grad / 4 for grad in three()]
    arguments: dict[str, Any] = {
        "policy": {"policy": LogMax()},
        "track": {"track": "health"},
        "aten": {"backend": "aten"},
    }.get(kind, {})
    scaler = keeping(**arguments) if kind != "guard" else StepGuard("cpu")
    if kind == "guard":
        scaler.skip_above = 1e9
        scaler.scale(torch.ones(()))
    optimizer = sgd_with(*(grad.bfloat16() if kind == "masters" else grad for grad in grads))
    if kind == "masters":
        optimizer = master_weights_(optimizer)
    scaler.unscale_(optimizer)
    params = params_of(optimizer)
    exact = exact_norm([param.grad for param in params], 1.0)
    norm = functional.clip_grad_norm_(params, 0.5)
    torch.testing.assert_close(norm, torch.tensor(exact, dtype=torch.float32), rtol=3e-7, atol=0)
    assert measured == ["kept"]
    scaler.step(optimizer)
    scaler.update()


def test_irregular_gradients_are_not_kept() -> None:
    optimizer, scaler = sgd_with(torch.ones(3), torch.ones(8)[::2]), keeping()
    scaler.unscale_(optimizer)
    assert kept_norms() == 0
    assert functional.clip_grad_norm_(params_of(optimizer), 1.0).item() == pytest.approx(7**0.5 / 8)


def test_stamps() -> None:
    params = [parameter_with(torch.ones(n)) for n in (3, 4)]
    groups, reverse = [{"params": params}], [{"params": params[1:]}, {"params": params[:1]}]
    other, part = _C.stamped(groups), _C.stamped([{"params": params[:1]}])
    stamp = _C.stamped([{"params": iter(params[::-1])}])
    assert not stamp.overlaps()
    for given in ([], groups[:0], [{"params": params[:1]}], [{"params": tuple(params)}]):
        assert not _C.take(stamp, given)
    assert [param.grad._version for param in params] == [3, 2]
    assert [_C.take(each, groups) for each in (other, part, stamp, stamp)] == [0, 0, 1, 0]
    assert _C.take(_C.stamped(groups), reverse)
    assert [param.grad._version for param in params] == [6, 5]
    for irregular in ([], [torch.ones(3)], [3], [parameter_with(torch.ones(8)[::2]), *params]):
        assert _C.stamped([{"params": irregular}]) is None
    assert [param.grad._version for param in params] == [6, 5]


# The default limit.


def spiky(seed: int) -> Iterator[float]:
    """Norms of which a few are large, one is infinite."""
    chance = random.Random(seed)
    for step in range(40):
        yield INF if step == 17 else 50.0 if step in (12, 25, 26) else chance.uniform(0.9, 1.1)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("limit", [10.0, Sigmas(6, window=8)], ids=str)
def test_spikes_are_skipped_as_by_our_own_clipping(limit: Any, fused: bool) -> None:
    def trained(own: bool) -> list[Any]:
        param = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.AdamW([param], lr=0.1, fused=fused)
        scaler, seen = GradScaler("cpu", init_scale=8.0), []
        if not own:
            scaler.skip_above = limit
        for norm in spiky(1):
            scaler.scale(torch.ones(()))
            param.grad = torch.tensor([norm * scaler.get_scale(), 0.0])
            if own:
                told = scaler.clip_grad_norm_(optimizer, 1.0, skip_above=limit)
            else:
                scaler.unscale_(optimizer)
                told = functional.clip_grad_norm_([param], 1.0)
            scaler.step(optimizer)
            seen += [told, param.detach().clone(), scaler.skip_reason(optimizer)]
            scaler.update()
            seen.append(scaler.get_scale())
        stats = scaler.stats()
        return [seen, stats.spikes, stats.skipped, scaler.state_dict()["_growth_tracker"]]

    ours, own = trained(False), trained(True)
    assert_same(ours, own)
    assert ours[1] == 3 and ours[2] == 4


def test_a_changed_gradient_obeys_the_limit() -> None:
    optimizer, scaler = sgd_with(torch.full((4,), 8.0)), started(GradScaler)
    scaler.skip_above = 3.0
    scaler.unscale_(optimizer)
    grads_of(optimizer)[0].mul_(2)
    assert functional.clip_grad_norm_(params_of(optimizer), 1.0).item() == 4.0
    scaler.step(optimizer)
    assert scaler.skip_reason(optimizer) == "spike"
    scaler.update()
    assert scaler.get_scale() == 8.0


@pytest.mark.parametrize("order", [1.0, 2.0])
def test_a_norm_that_raises_is_compared_first(order: float) -> None:
    """Finite gradients of an infinite norm, which torch's function measures or the kernels."""
    optimizer, scaler = sgd_with(torch.full((4,), 3e38)), started(GradScaler, 1.0)
    scaler.skip_above = 1e6
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="non-finite"):
        functional.clip_grad_norm_(params_of(optimizer), 1.0, order, error_if_nonfinite=True)
    assert_same(grads_of(optimizer), [torch.full((4,), 3e38)])
    scaler.step(optimizer)
    assert scaler.skip_reason(optimizer) == "spike"


def test_the_limit_is_also_that_of_our_own_clipping() -> None:
    optimizer, scaler = sgd_with(torch.full((4,), 8.0)), started(GradScaler)
    assert scaler.skip_above is None
    scaler.skip_above = 1.0
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    assert scaler.skip_reason(optimizer) == "spike"
    scaler.update()
    for grad in grads_of(optimizer):
        grad.fill_(8.0)
    scaler.clip_grad_norm_(optimizer, 1.0, skip_above=3.0)
    scaler.step(optimizer)
    assert scaler.skip_reason(optimizer) is None


@pytest.mark.parametrize(
    ("limit", "error"), [("6", TypeError), (-1.0, ValueError), (math.nan, ValueError)]
)
def test_limits_are_checked(limit: Any, error: type[Exception]) -> None:
    scaler = started(GradScaler)
    with pytest.raises(error):
        scaler.skip_above = limit
    assert scaler.skip_above is None
    with pytest.raises(TypeError, match="keep_norm must be a bool"):
        GradScaler("cpu", keep_norm=1)


def test_copies_keep_the_limit() -> None:
    scaler = GradScaler("cpu")
    scaler.skip_above = Sigmas(4)
    for again in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert again.skip_above == Sigmas(4)
        assert again._has_observers


# What a limit is compared with.

LIMITS = pytest.mark.parametrize("limit", [3.5, Sigmas(6, window=2)], ids=str)


def limited(limit: Any) -> Any:
    scaler = started(GradScaler)
    scaler.skip_above = limit
    return scaler


def spikes_of(
    scaler: Any,
    clip: Callable[[], Any],
    *optimizers: torch.optim.Optimizer,
    unscales: bool = True,
) -> list[list[str | None]]:
    """Why steps were skipped of norms 3, 3, 3 and 6 times as large."""
    reasons = []
    for factor in (1.0, 1.1, 1.05, 6.0):
        scaler.scale(torch.ones(()))
        for optimizer in optimizers:
            for grad in grads_of(optimizer):
                grad.fill_(8.0 * factor)
            if unscales:
                scaler.unscale_(optimizer)
        clip()
        for optimizer in optimizers:
            scaler.step(optimizer)
        reasons.append([scaler.skip_reason(optimizer) for optimizer in optimizers])
        scaler.update()
    return reasons


@LIMITS
def test_a_joint_clip_is_that_of_our_own(limit: Any) -> None:
    results = []
    for by_name in (True, False):
        scaler = limited(limit)
        first, second = sgd_with(torch.ones(4)), sgd_with(torch.ones(3), torch.ones(2))
        params = params_of(second) + params_of(first)
        if by_name:
            clip = partial(functional.clip_grad_norm_, params, 1.0)
            reasons = spikes_of(scaler, clip, second, first)
        else:
            both = [first, second]
            clip = partial(scaler.clip_grad_norm_, both[::-1], 1.0)
            reasons = spikes_of(scaler, clip, *both, unscales=False)
        results.append([reasons, params, grads_of(first, second), scaler.stats().spikes])
        if isinstance(limit, Sigmas):
            results[-1].append(scaler.state_dict()["ampfast"]["norms"])
    assert_same(results[0], results[1])
    assert results[0][0] == [[None, None]] * 3 + [["spike", "spike"]]


def test_one_that_overflows_is_no_reason_for_others() -> None:
    """A finite norm says nothing of an infinity among gradients that it leaves out."""
    scaler = limited(1e9)
    first, second = sgd_with(torch.ones(4), torch.full((2,), INF)), sgd_with(torch.ones(3))
    scaler.scale(torch.ones(()))
    for optimizer in (first, second):
        scaler.unscale_(optimizer)
    functional.clip_grad_norm_([params_of(first)[0], *params_of(second)], 1.0)
    for optimizer in (first, second):
        scaler.step(optimizer)
    assert [scaler.skip_reason(each) for each in (first, second)] == ["overflow", None]
    scaler.update()
    for optimizer in (first, second):
        scaler.unscale_(optimizer)
    functional.clip_grad_norm_(params_of(first) + params_of(second), 1.0)
    assert [scaler.skip_reason(each) for each in (first, second)] == ["overflow"] * 2


@LIMITS
@pytest.mark.parametrize("order", [1.0, 2.0, INF])
def test_a_part_of_the_gradients_skips_their_optimizer(limit: Any, order: float) -> None:
    scaler, part = limited(limit), torch.ones(9)
    optimizer, other = sgd_with(part, torch.ones(3)), sgd_with(torch.ones(100))
    if order != 2.0 and not isinstance(limit, Sigmas):
        scaler.skip_above = 10.0 if order == 1.0 else 1.5

    def clip() -> None:
        functional.clip_grad_norm_(params_of(optimizer)[:1], 1.0, order)

    reasons = spikes_of(scaler, clip, optimizer, other)
    assert reasons == [[None, None]] * 3 + [["spike", None]]


def test_a_number_limits_each_part_and_sigmas_the_first() -> None:
    for limit, expected in ((3.5, "spike"), (Sigmas(6, window=2), None)):
        scaler, optimizer = limited(limit), sgd_with(torch.ones(1), torch.ones(9))
        first, second = params_of(optimizer)
        for factor in (1.0, 1.0, 1.0, 6.0):
            scaler.scale(torch.ones(()))
            first.grad.fill_(8.0)
            second.grad.fill_(8.0 * factor)
            scaler.unscale_(optimizer)
            functional.clip_grad_norm_(first, 1e3)
            functional.clip_grad_norm_(second, 1e3)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.skip_reason(optimizer) == expected


@pytest.mark.parametrize("change", ["replaced", "strided", "dropped"])
def test_a_limit_holds_for_gradients_that_are_not_known(change: str) -> None:
    scaler, optimizer = limited(2.0), sgd_with(torch.full((2, 2), 8.0), torch.full((4,), 8.0))
    first, second = params_of(optimizer)
    if change == "strided":
        first.grad = torch.full((4, 4), 8.0)[::2, ::2]
    scaler.unscale_(optimizer)
    if change == "replaced":
        second.grad = second.grad * 1
    if change == "dropped":
        first.grad = None
        second.grad.mul_(2)
    functional.clip_grad_norm_(params_of(optimizer), 100.0)
    assert scaler.skip_reason(optimizer) == "spike"


def test_each_scaler_has_its_own_limit() -> None:
    loose, tight = limited(50.0), limited(1.0)
    first, second = sgd_with(torch.full((4,), 8.0)), sgd_with(torch.full((4,), 8.0))
    loose.unscale_(first)
    tight.unscale_(second)
    functional.clip_grad_norm_(params_of(first) + params_of(second), 1.0)
    assert (loose.skip_reason(first), tight.skip_reason(second)) == (None, "spike")


def test_a_limit_takes_one_launch_more(launcher: ReferenceLauncher) -> None:
    optimizer, scaler = sgd_with(*three()), limited(1e6)
    scaler.unscale_(optimizer)
    functional.clip_grad_norm_(params_of(optimizer), 0.5)
    assert launcher.launches == ["unscale", "clip", "unscale"]


@pytest.mark.parametrize("together", [False, True])
def test_a_limit_that_is_not_compared_warns_once(together: bool, recwarn: Any) -> None:
    warnings.simplefilter("always")
    optimizer, scaler = sgd_with(torch.ones(4)), started(GradScaler)

    def step(clips: bool) -> int:
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)
        if clips:
            functional.clip_grad_norm_(params_of(optimizer), 1.0)
        if together:
            scaler.step_and_update(optimizer)
        else:
            scaler.step(optimizer)
            scaler.update()
        told = [str(each.message) for each in recwarn if each.filename == __file__]
        return sum("skip_above had no effect" in text for text in told)

    assert step(False) == 0
    scaler.skip_above = 100.0
    assert step(True) == 0
    scaler.update(4.0)
    assert [step(False), step(False), step(True)] == [1, 1, 1]
    assert [pickle.loads(pickle.dumps(scaler))._spike_rules._warns, scaler._spike_rules._warns] == [
        True,
        False,
    ]


@pytest.mark.filterwarnings("error")
def test_a_scale_that_is_set_ends_no_step_to_compare() -> None:
    scaler = started(GradScaler)
    scaler.skip_above = 100.0
    scaler.unscale_(sgd_with(torch.ones(4)))
    scaler.update(4.0)


def test_a_flag_that_is_set_stays_that_of_an_overflow() -> None:
    optimizer, scaler = sgd_with(torch.tensor([INF, 1.0])), started(GradScaler)
    scaler.skip_above = 0.5
    scaler.unscale_(optimizer)
    functional.clip_grad_norm_(params_of(optimizer), 1.0)
    flags = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
    assert [flag.item() for flag in flags] == [1.0] != [core.SPIKE]


def test_a_clip_after_the_step_decides_nothing() -> None:
    """As fastai's, whose scaler steps a stand-in."""
    optimizer, scaler = sgd_with(torch.full((4,), 8.0)), started(GradScaler)
    scaler.skip_above = 1.0
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert functional.clip_grad_norm_(params_of(optimizer), 1.0).item() == 2.0
    assert scaler.skip_reason(optimizer) is None
    with pytest.warns(UserWarning, match="skip_above had no effect"):
        scaler.update()
    assert scaler.stats().skipped == 0


def test_a_second_clip_is_no_second_step() -> None:
    optimizer, scaler = sgd_with(torch.full((4,), 8.0)), started(GradScaler)
    scaler.skip_above = Sigmas(6, window=4)
    scaler.unscale_(optimizer)
    assert functional.clip_grad_norm_(params_of(optimizer), 1.0).item() == 2.0
    assert functional.clip_grad_norm_(params_of(optimizer), 1.0).item() < 1.01
    assert scaler.state_dict()["ampfast"]["norms"] == [[2.0]]


def test_a_limit_may_come_late() -> None:
    optimizer, scaler = sgd_with(torch.full((4,), 8.0)), started(GradScaler)
    scaler.unscale_(optimizer)
    scaler.update()
    scaler.skip_above = 0.1
    scaler.unscale_(optimizer)
    functional.clip_grad_norm_(params_of(optimizer), 1.0)
    assert scaler.skip_reason(optimizer) == "spike"


@pytest.mark.parametrize("shared", ["whole", "overlapping", "numpy"])
def test_gradients_that_share_memory_are_measured_anew(shared: str, measured: list[str]) -> None:
    """Unscaling writes the shared values twice, so what it sums is not what it leaves."""
    memory = filled((5,), torch.float32, 5)
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    params[0].grad = memory[:3]
    params[1].grad = memory[:3] if shared == "whole" else memory[2:]
    if shared == "numpy":  # each with a storage of its own
        params[1].grad = torch.from_numpy(memory.numpy()[1:4])
    optimizer, scaler = torch.optim.SGD(params, lr=1.0), keeping()
    scaler.unscale_(optimizer)
    expected = exact_norm(grads_of(optimizer), 1.0)
    norm = functional.clip_grad_norm_(params, 1e6)
    assert norm.item() == pytest.approx(expected, rel=1e-6)
    assert "kept" not in measured


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_measure_anew(
    ranks: int, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collective between unscaling and clipping raises no version."""
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: ranks)
    optimizer, scaler = sgd_with(*three()), keeping()
    scaler.skip_above = 1e-6
    scaler.unscale_(optimizer)
    functional.clip_grad_norm_(params_of(optimizer), 1.0)
    assert measured == ["kept" if ranks == 1 else "read"]
    assert scaler.skip_reason(optimizer) == "spike"


def test_unscaling_by_hand_is_noticed(measured: list[str]) -> None:
    for unscale_ in (functional.unscale_, torch.ops.ampfast.unscale_):
        optimizer, scaler = sgd_with(*three()), keeping()
        scaler.unscale_(optimizer)
        unscale_(grads_of(optimizer), torch.tensor(0.0), torch.tensor(0.25))
        norm = functional.clip_grad_norm_(params_of(optimizer), 1e6)
        assert norm.item() == pytest.approx(exact_norm(grads_of(optimizer), 1.0), rel=1e-6)
    assert "kept" not in measured


def test_a_call_of_the_private_method_is_noticed(measured: list[str]) -> None:
    optimizer, scaler, other = sgd_with(*three()), keeping(), started(GradScaler)
    scaler.unscale_(optimizer)
    other._unscale_grads_(optimizer, torch.tensor(0.25), torch.tensor(0.0), False)
    norm = functional.clip_grad_norm_(params_of(optimizer), 1e6)
    assert norm.item() == pytest.approx(exact_norm(grads_of(optimizer), 1.0), rel=1e-6)
    assert "kept" not in measured


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("keeps", [False, True])
def test_a_check_of_scaled_gradients_is_not_observed(keeps: bool, is_sparse: bool) -> None:
    scaler: Any = started(GradScaler, keep_norm=keeps, policy=LogMax())
    param = parameter_with(torch.ones(3))
    if is_sparse:
        param.grad = torch.ones(3).to_sparse()
    scaler._check_inf_per_device(torch.optim.SGD([param], lr=0.1))
    assert scaler._loss_scale.follower.observed == []


class Hooked(GradScaler):
    """Unscales by a hook, which makes the list of gradients by itself."""

    def _unscale_grads_(self, *given: Any) -> Any:
        return super()._unscale_grads_(*given)


class HookedByTorch(GradScaler):
    """Unscales by a hook, with torch's op."""

    def _unscale_grads_(self, optimizer: Any, inv_scale: Tensor, found: Tensor, _: Any) -> Any:
        torch._amp_foreach_non_finite_check_and_unscale_(grads_of(optimizer), found, inv_scale)
        return {found.device: found}


OTHERS: dict[str, Callable[[], Any]] = {
    "plain": partial(started, GradScaler),
    "policy": partial(started, GradScaler, policy=LogMax()),
    "aten": partial(started, GradScaler, backend="aten"),
    "hook": partial(started, Hooked),
    "hook that keeps": partial(started, Hooked, keep_norm=True),
    "hook of torch's op": partial(started, HookedByTorch, keep_norm=True),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("act", ["unscale_", "step"])
def test_another_scaler_that_unscales_is_noticed(other: str, act: str, measured: list[str]) -> None:
    optimizer, scaler = sgd_with(*three()), keeping()
    scaler.unscale_(optimizer)
    getattr(OTHERS[other](), act)(optimizer)
    norm = functional.clip_grad_norm_(params_of(optimizer), 1e6)
    assert norm.item() == pytest.approx(exact_norm(grads_of(optimizer), 1.0), rel=1e-6)
    assert "kept" not in measured


def test_unscaling_beside_an_irregular_gradient_is_noticed(measured: list[str]) -> None:
    shared, strided = parameter_with(torch.ones(4)), parameter_with(torch.ones(8)[::2])
    first, second = (torch.optim.SGD(given, lr=1.0) for given in ([shared], [shared, strided]))
    scaler = keeping()
    scaler.unscale_(first)
    scaler.unscale_(second)
    assert functional.clip_grad_norm_(shared, 1e6).item() == 2 / 64
    assert "kept" not in measured


def test_gradients_are_let_go_by_the_clip() -> None:
    optimizer, scaler = sgd_with(*three()), keeping()
    scaler.unscale_(optimizer)
    entry = scaler._per_optimizer_states[id(optimizer)]
    assert clip_grad.KEPT in entry
    functional.clip_grad_norm_(params_of(optimizer), 1.0)
    assert clip_grad.KEPT not in entry
