"""Steps skipped for the norm of their gradients, against the rule in plain Python."""

from __future__ import annotations

import copy
import math
import pickle
import random
import warnings
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from support.captures import OnGpu
from support.comparison import assert_same
from support.scale_model import Rule, random_norms
from torch import Tensor, nn
from torch.distributed import checkpoint

import ampfast
from ampfast import Sigmas, capture, clipping, spikes
from ampfast.backends import core, cpu, scalars, torch_ops

WINDOW = 4


def clipped_by(clip: Callable[..., None], norm: float, flag: Tensor, *rule: Any) -> None:
    one = torch.zeros((), dtype=torch.float64)
    rows = torch.tensor([[norm * norm, norm]], dtype=torch.float64)
    clip(core.Clip(rows, 1.0, True, torch.zeros(()), one, None, None, flag, *rule))


LIMITS = [1.2, 0.0, Sigmas(2.0, 4), Sigmas(0.0, 2), Sigmas(6.0, 128), Sigmas(3.0, 5, patience=1)]
LIMITS += [Sigmas(1.0, 7, patience=9)]


def number_of(limit: float | Sigmas) -> float:
    return limit.sigmas if isinstance(limit, Sigmas) else limit


def clip_on_cpu(norm: float, flag: Tensor, *rule: Any) -> None:
    clipped_by(cpu.clip, norm, flag, *rule)


def clip_by_torch(norm: float, flag: Tensor, *rule: Any) -> None:
    torch_ops.spike_(flag, torch.tensor(norm), *rule)


@pytest.mark.parametrize("clip", [clip_on_cpu, clip_by_torch])
@pytest.mark.parametrize("limit", LIMITS, ids=str)
def test_kernels_follow_the_rule(limit: float | Sigmas, clip: Callable[..., None]) -> None:
    rule = Rule(limit)
    words = rule.words() if isinstance(limit, Sigmas) else None
    found = []
    for norm in random_norms(1500, seed=3):
        flag = torch.zeros(())
        clip(norm, flag, number_of(limit), words)
        assert flag.item() == rule.flag(norm)
        found.append(flag.item())
    assert {0.0, core.SPIKE} == set(found)
    if words is not None:
        rule.assert_are(words)
        assert rule.restarts or rule.patience > 9


# Scaler


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.1)


def fused_adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.1, fused=True)


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True)


class Loop:
    """A parameter of two elements whose gradient has the norm that is asked for."""

    def __init__(
        self, make: Any = adam, dtype: torch.dtype = torch.float32, **options: Any
    ) -> None:
        self.param = nn.Parameter(torch.zeros(2, dtype=dtype))
        self.optimizer = make([self.param])
        self.scaler = ampfast.GradScaler(
            "cpu", **{"init_scale": 8.0, "growth_interval": 3, **options}
        )

    def clip(self, norm: float, above: Any, *more: Any, **options: Any) -> Tensor:
        self.optimizer.zero_grad()
        direction = torch.tensor([0.6, 0.8], dtype=self.param.dtype)
        self.scaler.scale((self.param * direction * norm).sum()).backward()
        return self.scaler.clip_grad_norm_(self.optimizer, 1.0, *more, skip_above=above, **options)

    def step(
        self, norm: float, above: Any, *more: Any, together: bool = False, **options: Any
    ) -> Any:
        """Returns the reason of the skip; checks that the step is as it says."""
        self.clip(norm, above, *more, **options)
        before = self.param.detach().clone()
        state = copy.deepcopy(self.optimizer.state_dict()["state"])
        if together:
            self.scaler.step_and_update(self.optimizer)
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        reason = self.scaler.skip_reason(self.optimizer)
        skipped = reason is not None
        assert self.scaler.step_skipped(self.optimizer) == skipped
        assert self.scaler.found_inf(self.optimizer).item() == float(skipped)
        if norm != 0 or skipped:
            assert torch.equal(before, self.param) == skipped
        if skipped and state:
            assert_same(self.optimizer.state_dict()["state"], state)
        return reason

    def now(self) -> tuple[float, int]:
        return self.scaler.get_scale(), self.scaler.stats().growth_tracker


PROGRAM = [
    *((1.0, None, 8.0, 1), (1.5, None, 8.0, 2), (50.0, "spike", 8.0, 2), (20.0, None, 16.0, 0)),
    *((math.inf, "overflow", 8.0, 0), (2.0, None, 8.0, 1), (21.0, "spike", 8.0, 1)),
    *((math.nan, "overflow", 4.0, 0), (30.0, "spike", 4.0, 0), (1.0, None, 4.0, 1)),
]


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("order", [2.0, math.inf, 3.0])
@pytest.mark.parametrize(
    ("make", "in_place"),
    [(adam, True), *((make, where) for make in (fused_adam, momentum) for where in (True, False))],
)
@pytest.mark.parametrize("backend", ["cpu", "aten"])
def test_a_spike_is_skipped_and_leaves_the_scale(
    backend: str, make: Any, order: float, in_place: bool, together: bool
) -> None:
    loop = Loop(make, backend=backend)
    # Norms of the other orders are smaller.
    shrink = {2.0: 1.0, math.inf: 0.8, 3.0: (0.6**3 + 0.8**3) ** (1 / 3)}[order]
    above = 20.5 * shrink
    for norm, reason, *state in PROGRAM:
        found = loop.step(norm, above, order, in_place=in_place, together=together)
        assert (found, *loop.now()) == (reason, *state)
    stats, history = loop.scaler.stats(), loop.scaler.history()
    assert (stats.steps, stats.skipped, stats.spikes) == (10, 5, 3)
    assert (stats.growths, stats.backoffs, stats.consecutive_skips) == (1, 2, 0)
    reasons = [reason for _, reason, *_ in PROGRAM]
    assert history.spiked.tolist() == [reason == "spike" for reason in reasons]
    assert history.skipped.tolist() == [reason is not None for reason in reasons]


@pytest.mark.parametrize("make", [adam, fused_adam])
def test_sigmas(make: Any) -> None:
    loop, rule = Loop(make), Rule(Sigmas(3.0, WINDOW))
    reasons = []
    for norm in random_norms(60, seed=5):
        # A new one in each step, as loops are written.
        total = loop.clip(norm, Sigmas(3.0, WINDOW)).item()
        loop.scaler.step(loop.optimizer)
        loop.scaler.update()
        overflows = not math.isfinite(loop.param.grad.sum())
        expected = 1.0 if overflows else rule.flag(total)
        reason = loop.scaler.skip_reason(loop.optimizer)
        assert reason == {0.0: None, 1.0: "overflow", core.SPIKE: "spike"}[expected]
        reasons.append(reason)
    assert set(reasons) == {None, "overflow", "spike"}


@pytest.mark.parametrize("order", [2.0, 3.0])
@pytest.mark.parametrize("in_place", [True, False])
def test_optimizers_clipped_together_are_skipped_together(in_place: bool, order: float) -> None:
    params = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizers = [fused_adam([param]) for param in params]
    scaler = ampfast.GradScaler("cpu", init_scale=8.0, growth_interval=10)
    program = [((1.0, 1.0), None), ((40.0, 1.0), "spike"), ((math.inf, 1.0), "overflow")]
    program += [((1.0, math.nan), "overflow"), ((1.0, 40.0), "spike"), ((1.0, 1.0), None)]
    for sizes, reason in program:
        for param, size in zip(params, sizes, strict=True):
            param.grad = torch.full((2,), scaler.get_scale() * size)
        scaler.scale(torch.zeros(()))
        scaler.clip_grad_norm_(optimizers, 1.0, order, skip_above=20.0, in_place=in_place)
        entries = [scaler._per_optimizer_states[id(each)] for each in optimizers]
        flags = [flag for entry in entries for flag in entry["found_inf_per_device"].values()]
        assert flags[0].data_ptr() != flags[1].data_ptr()
        before = [param.detach().clone() for param in params]
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for optimizer, param, old in zip(optimizers, params, before, strict=True):
            assert scaler.skip_reason(optimizer) == reason
            assert torch.equal(param, old) == (reason is not None)
    assert (scaler.stats().spikes, scaler.get_scale()) == (2, 2.0)


def test_a_spike_beside_a_step_and_beside_an_overflow() -> None:
    loops = [Loop(), Loop()]
    loops[1].scaler = scaler = loops[0].scaler
    for norms, after in (
        ((1.0, 50.0), (8.0, 0)),
        ((math.inf, 50.0), (4.0, 0)),
        ((1.0, 1.0), (4.0, 1)),
    ):
        for loop, norm in zip(loops, norms, strict=True):
            loop.clip(norm, 20.0)
        for loop in loops:
            scaler.step(loop.optimizer)
        reasons = [scaler.skip_reason(loop.optimizer) for loop in loops]
        assert reasons[0] == (None if norms[0] == 1 else "overflow")
        assert reasons[1] == (None if norms[1] == 1 else "spike")
        scaler.update()
        assert loops[0].now() == after
    assert scaler.history().spiked.tolist() == [True, False, False]


@pytest.mark.parametrize("reduced", ["SUM", "MAX", "AVG"])
def test_flags_that_ranks_reduce_keep_their_meaning(reduced: str) -> None:
    loop = Loop()
    for others, backs_off in (([0.0], False), ([core.SPIKE], False), ([1.0], True)):
        loop.clip(50.0, 20.0)
        (flag,) = loop.scaler._per_optimizer_states[id(loop.optimizer)][
            "found_inf_per_device"
        ].values()
        flags = torch.stack([flag, *map(torch.tensor, others)])
        flag.copy_({"SUM": flags.sum(), "MAX": flags.max(), "AVG": flags.mean()}[reduced])
        before = loop.now()[0]
        loop.scaler.step(loop.optimizer)
        assert loop.scaler.step_skipped(loop.optimizer)
        loop.scaler.update()
        assert loop.now()[0] == (before / 2 if backs_off else before)


def test_a_fused_optimizer_with_its_own_grad_scale() -> None:
    loop, handed = Loop(fused_adam), []
    loop.optimizer.register_step_pre_hook(lambda o, *_: handed.append(o.found_inf.item()))
    for norm, reason in ((1.0, None), (50.0, "spike"), (math.inf, "overflow")):
        loop.clip(norm, 20.0)
        loop.optimizer.grad_scale = torch.tensor(2.0)
        before = loop.param.detach().clone()
        loop.scaler.step(loop.optimizer)
        loop.scaler.update()
        assert loop.scaler.skip_reason(loop.optimizer) == reason
        assert handed[-1] == float(reason is not None)
        assert torch.equal(before, loop.param) == (reason is not None)


def test_the_hysteresis_and_the_minimum_do_not_count_spikes() -> None:
    loop = Loop(hysteresis=2, hysteresis_refill="finite_step", min_scale=4.0, on_min_scale="raise")
    for norm in (math.inf, 50.0, 50.0, math.inf):
        loop.step(norm, 20.0)
    assert loop.now() == (4.0, 0)
    for _ in range(3):
        assert loop.step(50.0, 20.0) == "spike"


@pytest.mark.parametrize("options", [{}, {"min_scale": 1.0}, {"policy": ampfast.LogMax()}], ids=str)
def test_norms_bind_no_checkpoint_to_a_policy(options: dict[str, Any]) -> None:
    loop, other = Loop(), Loop(**options)
    for norm in (1.0, 2.0):
        loop.step(norm, Sigmas(6.0, 4))
    other.scaler.load_state_dict(loop.scaler.state_dict())
    assert other.scaler.state_dict()["ampfast"]["norms"] == [[1.0, 2.0]]


@pytest.mark.parametrize("then", ["warn", "raise"])
def test_a_spike_after_an_overflow_at_the_minimum_tells_nothing_again(then: str) -> None:
    loop = Loop(min_scale=8.0, on_min_scale=then)
    error = UserWarning if then == "warn" else FloatingPointError
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(error, match="1 step was skipped"):
                loop.step(math.inf, 20.0)
            assert loop.step(50.0, 20.0) == "spike"
            assert loop.scaler.stats().consecutive_skips == 2
            loop.step(1.0, 20.0)


def test_sparse_gradients_and_several_dtypes() -> None:
    table = nn.Embedding(4, 3, sparse=True)
    wide = nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer = torch.optim.SGD([*table.parameters(), wide], lr=0.1)
    scaler = ampfast.GradScaler("cpu", init_scale=8.0)
    for factor, reason in ((1.0, None), (100.0, "spike")):
        optimizer.zero_grad()
        scaler.scale(factor * (table(torch.tensor([1, 1, 2])).sum() + wide.sum())).backward()
        scaler.clip_grad_norm_(optimizer, 1.0, skip_above=20)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.skip_reason(optimizer) == reason


class Overriding(ampfast.GradScaler):
    def _unscale_grads_(self, *args: Any) -> dict[torch.device, Tensor]:
        return super()._unscale_grads_(*args)


def test_a_subclass_that_unscales() -> None:
    loop = Loop()
    loop.scaler = Overriding("cpu", init_scale=8.0, growth_interval=3)
    for norm, reason, *state in PROGRAM:
        assert (loop.step(norm, 20.5), *loop.now()) == (reason, *state)


def test_a_disabled_scaler_clips_only() -> None:
    loop = Loop(enabled=False)
    assert loop.step(50.0, 20.0) is None
    assert loop.scaler.stats().spikes == 0


def test_the_schedule_waits() -> None:
    loop = Loop()
    schedule = torch.optim.lr_scheduler.StepLR(loop.optimizer, 1)
    late = ampfast.LateScheduler(schedule, loop.scaler, loop.optimizer)
    for norm in (1.0, 50.0, 1.0):
        loop.clip(norm, 20.0)
        loop.scaler.step(loop.optimizer)
        loop.scaler.update()
        late.step()
    late.flush()
    assert schedule.last_epoch == 2


# A training goes on


def reasons_of(loop: Loop, norms: list[float], limit: Sigmas) -> list[str | None]:
    return [loop.step(norm, limit) for norm in norms]


@pytest.mark.parametrize("backend", ["cpu", "aten"])
def test_steps_without_gradient_do_not_fill_the_window(backend: str) -> None:
    loop, limit = Loop(backend=backend, growth_interval=10**6), Sigmas(6.0, 8)
    chance = random.Random(1)
    norms = [chance.uniform(1, 3) if i > 20 and i % 4 == 0 else 0.0 for i in range(200)]
    assert set(reasons_of(loop, norms, limit)) == {None}
    assert loop.step(100.0, limit) == "spike"


@pytest.mark.parametrize("backend", ["cpu", "aten"])
@pytest.mark.parametrize("window", [2, 3, 8, 128])
def test_nearly_equal_norms_are_no_spikes(window: int, backend: str) -> None:
    loop, limit = Loop(backend=backend, growth_interval=10**6), Sigmas(6.0, window)
    norms = [1.0, 1 + 1.2e-7] * window + [1.000001, 1.0, 1.05, 0.95, 1.02]
    assert set(reasons_of(loop, norms, limit)) == {None}
    assert loop.step(2.0, limit) == "spike"


DOUBLING = [(2, None, 1), (3, None, 1), (8, None, 4), (128, None, 32), (1024, None, 32)]


@pytest.mark.parametrize("backend", ["cpu", "aten"])
@pytest.mark.parametrize(("window", "given", "patience"), [*DOUBLING, (4, 3, 3), (4, 9, 9)])
def test_a_norm_that_doubles_for_good_is_the_new_usual(
    window: int, given: int | None, patience: int, backend: str
) -> None:
    loop, limit = Loop(backend=backend, growth_interval=10**6), Sigmas(6.0, window, patience=given)
    assert set(reasons_of(loop, [1.0, 1.01] * window, limit)) == {None}
    assert reasons_of(loop, [2.0] * patience, limit) == ["spike"] * patience
    assert loop.scaler.stats().consecutive_skips == patience
    with pytest.warns(UserWarning, match=f"Sigmas: {patience} step.* skipped") as told:
        assert set(reasons_of(loop, [2.0, *[2.02, 1.98] * window], limit)) == {None}
    assert [record.filename for record in told] == [__file__]
    assert loop.step(20.0, limit) == "spike"


def test_the_window_starts_anew() -> None:
    loop, limit = Loop(), Sigmas(6.0, 4, patience=1)
    reasons_of(loop, [1.0, 1.1, 1.0, 1.1, 4.0], limit)
    with pytest.warns(UserWarning, match="new usual"):
        assert loop.step(4.0, limit) is None
    assert loop.scaler._spike_rules.accepted_norms() == [[4.0]]
    # As at the beginning, none of its first steps is skipped.
    assert reasons_of(loop, [40.0, 4.0, 4.0], limit) == [None] * 3


@pytest.mark.parametrize("backend", ["cpu", "aten"])
def test_steps_without_gradient_neither_end_nor_lengthen_a_run(backend: str) -> None:
    loop, limit = Loop(backend=backend, growth_interval=10**6), Sigmas(6.0, 4, patience=2)
    reasons_of(loop, [1.0, 1.1, 1.0, 1.1], limit)
    lonely = [0.0, 0.0, 50.0, 0.0, 0.0, 0.0]
    for _ in range(3):
        assert [*reasons_of(loop, lonely, limit), loop.step(1.05, limit)].count("spike") == 1
    run = [50.0, 0.0, 50.0, 0.0, math.inf, 0.0]
    assert reasons_of(loop, run, limit) == ["spike", None, "spike", None, "overflow", None]
    with pytest.warns(UserWarning, match="new usual"):
        assert loop.step(50.0, limit) is None


@pytest.mark.parametrize("backend", ["cpu", "aten"])
def test_a_norm_beyond_float32_is_never_usual(backend: str) -> None:
    guard = ampfast.StepGuard("cpu", backend=backend)
    param = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([param], lr=0.1)
    reasons = []
    for value in [1.0, 1.0, *[3e38] * 9, 1.0]:
        guard.scale(torch.zeros(()))
        param.grad = torch.full((2,), value)
        guard.clip_grad_norm_(optimizer, 1.0, skip_above=Sigmas(6.0, 2))
        guard.step(optimizer)
        guard.update()
        reasons.append(guard.skip_reason(optimizer))
    assert reasons == [None, None, *["spike"] * 9, None]


def test_a_change_of_patience_counts_at_once() -> None:
    loop = Loop()
    reasons_of(loop, [1.0, 1.1, 1.0, 1.1], Sigmas(6.0, 4))
    assert set(reasons_of(loop, [5.0] * 5, Sigmas(6.0, 4, patience=50))) == {"spike"}
    with pytest.warns(UserWarning, match="Sigmas: 3 steps in a row"):
        assert loop.step(5.0, Sigmas(6.0, 4, patience=3)) is None


def test_optimizers_with_a_joint_norm_go_on_together() -> None:
    params = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizers = [adam([param]) for param in params]
    scaler, reasons = ampfast.GradScaler("cpu", init_scale=8.0), []
    with pytest.warns(UserWarning, match="new usual") as told:
        for size in (1.0, 1.1, 1.0, 1.1, 9.0, 9.0, 9.0, 9.1, 9.0):
            scaler.scale(torch.zeros(()))
            for param, share in zip(params, (size, 0.0), strict=True):
                param.grad = torch.full((2,), scaler.get_scale() * share)
            scaler.clip_grad_norm_(optimizers, 1.0, skip_above=Sigmas(6.0, 4))
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            reasons.append([scaler.skip_reason(optimizer) for optimizer in optimizers])
    assert reasons == [[None] * 2] * 4 + [["spike"] * 2] * 2 + [[None] * 2] * 3
    assert len(told) == 1


class Arrival:
    has_come = False

    def query(self) -> bool:
        return self.has_come


def test_a_gpu_warns_from_a_copy_that_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """No clip reads a tensor of a GPU, and few copy one."""
    sent = []

    def copy(tensor: Tensor) -> tuple[Tensor, Arrival]:
        assert tensor.is_cuda
        sent.append((tensor.as_subclass(Tensor).clone(), Arrival()))
        return sent[-1]

    monkeypatch.setattr(scalars, "copy_to_host_async", copy)
    rules, device, optimizer = spikes.SpikeRules(), torch.device("cpu"), adam([nn.Parameter()])
    rule = rules.rule([optimizer], Sigmas(6.0, 4), device)
    rules.record([optimizer], rule)
    (window,) = [each for _, each in rules._windows]
    window.header = window.header.as_subclass(OnGpu)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for turn in range(2, 256):
            rules.record([optimizer], rule)
            assert len(sent) == min(turn // 64, 1) + (turn >= 192)
            # Behind the first copy, which arrives after the second clip that would read it.
            rule.accepted_norms[core.norm_layout.RESTARTS] = turn >= 64
            if turn in (130, 200):
                sent[-1][1].has_come = True
    with pytest.warns(UserWarning, match="Sigmas: 2 steps in a row"):
        rules.record([optimizer], rule)


# Costs


def test_one_flag_is_written_in_place_after_a_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("an operator for the flag of a single list")

    loop = Loop()
    monkeypatch.setattr(loop.scaler, "_clip_over", lambda *args: None)
    monkeypatch.setattr(clipping, "joint_flag", refused)
    monkeypatch.setattr(clipping, "moved", refused)
    loop.clip(50.0, 20.0)
    (flag,) = loop.scaler._last_flags(loop.optimizer).values()
    assert flag.item() == core.SPIKE


# What is kept


def run(loop: Loop, norms: list[float]) -> list[str | None]:
    return [loop.step(norm, Sigmas(2.0, WINDOW)) for norm in norms]


def by_checkpoint(loop: Loop) -> Loop:
    saved = Loop()
    saved.scaler.load_state_dict(pickle.loads(pickle.dumps(loop.scaler.state_dict())))
    return saved


def by_checkpoint_later(loop: Loop) -> Loop:
    saved = Loop()
    run(saved, [3.0, 2.0])
    saved.scaler.load_state_dict(loop.scaler.state_dict())
    return saved


def by_pickle(loop: Loop) -> Loop:
    saved = Loop()
    saved.scaler = pickle.loads(pickle.dumps(loop.scaler))
    return saved


def by_copy(loop: Loop) -> Loop:
    saved = Loop()
    saved.scaler = copy.copy(loop.scaler)
    return saved


@pytest.mark.filterwarnings("ignore:The gradient norm stayed above")
@pytest.mark.parametrize("keep", [by_checkpoint, by_checkpoint_later, by_pickle, by_copy])
@pytest.mark.parametrize("before", [2, 9])
def test_the_norms_are_kept(keep: Callable[[Loop], Loop], before: int) -> None:
    norms = [norm for norm in random_norms(40, seed=6) if math.isfinite(norm)]
    loop = Loop()
    run(loop, norms[:before])
    other = keep(loop)
    expected = run(loop, norms[before:])
    assert run(other, norms[before:]) == expected
    assert other.scaler._spike_rules.accepted_norms() == loop.scaler._spike_rules.accepted_norms()
    assert "spike" in expected


@pytest.mark.parametrize("keep", [by_checkpoint, by_checkpoint_later, by_pickle, by_copy])
def test_a_run_of_spikes_goes_on(keep: Callable[[Loop], Loop]) -> None:
    loop, limit = Loop(), Sigmas(6.0, WINDOW, patience=3)
    assert reasons_of(loop, [1.0, 1.1, 1.0, 1.1, 9.0, 9.0], limit)[-2:] == ["spike"] * 2
    taken = [torch.tensor(norm).item() for norm in (1.0, 1.1, 1.0, 1.1)]
    assert loop.scaler._spike_rules.accepted_norms() == [{"norms": taken, "spikes": 2}]
    for each in (keep(loop), loop):
        assert each.step(9.0, limit) == "spike"
        with pytest.warns(UserWarning, match="new usual"):
            assert each.step(9.0, limit) is None


def test_another_window_takes_the_last_norms() -> None:
    loop = Loop()
    run(loop, [1.0, 2.0, 3.0, 2.5, 2.6])
    loop.clip(2.0, Sigmas(2.0, 3))
    assert [round(norm, 5) for norm in loop.scaler._spike_rules.accepted_norms()[0]] == [
        2.5,
        2.6,
        2.0,
    ]
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()
    assert loop.step(50.0, Sigmas(2.0, 3)) == "spike"


def test_the_ring_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, rings = Loop(), []
    for norm in (1.0, 2.0, 3.0):
        run(loop, [norm])
        rings += [ring.words for _, ring in loop.scaler._spike_rules._windows]
    with monkeypatch.context() as patch:
        patch.setattr(spikes, "is_capturing", lambda: True)
        run(loop, [4.0])
    run(loop, [5.0])
    saved = loop.scaler.state_dict()
    for norms in (saved["ampfast"]["norms"], [[7.0]], []):
        saved["ampfast"]["norms"] = norms
        loop.scaler.load_state_dict(saved)
        rings += [ring.words for _, ring in loop.scaler._spike_rules._windows]
        assert loop.scaler._spike_rules.accepted_norms() == (norms or [[]])
    assert len(rings) == 6
    assert len({ring.data_ptr() for ring in rings}) == 1


class Several:
    """Optimizers of one scaler, each with a parameter of one element."""

    def __init__(self, count: int, **options: Any) -> None:
        self.scaler = ampfast.GradScaler("cpu", init_scale=8.0, **options)
        self.params = [nn.Parameter(torch.zeros(1)) for _ in range(count)]
        self.optimizers = [torch.optim.SGD([param], lr=0.1) for param in self.params]

    def step(self, which: int, norm: float) -> str | None:
        optimizer, param = self.optimizers[which], self.params[which]
        self.scaler.scale(torch.zeros(()))
        param.grad = torch.full((1,), norm * 8.0)
        self.scaler.clip_grad_norm_(optimizer, 1.0, skip_above=Sigmas(2.0, WINDOW))
        self.scaler.step(optimizer)
        self.scaler.update()
        return self.scaler.skip_reason(optimizer)

    def norms(self) -> list[list[float]]:
        return self.scaler.state_dict()["ampfast"]["norms"]


STAGE = [1.0, 1.1, 1.0, 1.1, 1.0]


def test_loaded_norms_are_for_the_next_clip() -> None:
    """Not for an optimizer that is alive, but no longer used."""
    several = Several(2)
    for norm in STAGE:
        several.step(0, 1000 * norm)
    saved = several.scaler.state_dict()
    saved["ampfast"]["norms"] = [STAGE]
    several.scaler.load_state_dict(saved)
    assert several.norms() == [STAGE]
    assert several.step(1, 1000.0) == "spike"
    assert several.step(1, 1.05) is None
    assert several.step(0, 1000.0) is None
    assert [norms[-1] for norms in several.norms()] == [torch.tensor(1.05).item(), 1000.0]


@pytest.mark.parametrize("how", ["state_dict", "same process", "pickle", "distributed"])
def test_norms_are_saved_in_the_order_of_the_first_clips(how: str, tmp_path: Path) -> None:
    several = Several(3, max_scale=8.0)
    for which, factor in ((1, 1000.0), (0, 1.0), (1, 1000.0)):
        for norm in STAGE:
            several.step(which, factor * norm)
    other = several if how == "same process" else Several(3, max_scale=8.0)
    if how == "pickle":
        other.scaler = pickle.loads(pickle.dumps(several.scaler))
    elif how == "distributed":
        checkpoint.save({"scaler": several.scaler}, checkpoint_id=tmp_path)
        checkpoint.load({"scaler": other.scaler}, checkpoint_id=tmp_path)
    else:
        other.scaler.load_state_dict(several.scaler.state_dict())
    assert other.step(1, 1e6) == "spike"
    assert other.step(2, 1000.0) == "spike"
    other.scaler.load_state_dict(other.scaler.state_dict())
    assert other.step(1, 1050.0) is None
    assert other.step(0, 1000.0) == "spike"
    assert other.step(2, 1000.0) is None  # the checkpoint had no third ones


def test_a_captured_clip_takes_the_norms_of_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    several = Several(4)
    for which in (0, 1, 2):
        several.step(which, 1.0 + which)
    with monkeypatch.context() as patch:
        patch.setattr(spikes, "is_capturing", lambda: True)
        several.step(1, 2.0)
    saved = several.scaler.state_dict()
    assert saved["ampfast"]["norms"] == [[1.0], [2.0, 2.0], [3.0]]
    for norms in ([[7.0], [8.0], [9.0]], [[4.0], [5.0], [6.0]]):
        saved["ampfast"]["norms"] = norms
        several.scaler.load_state_dict(saved)
        assert several.norms() == norms
    several.step(0, 10.0)
    several.step(1, 11.0)
    assert several.norms() == [[4.0, 10.0], [5.0, 11.0], [6.0]]
    several.step(3, 12.0)
    several.step(2, 13.0)
    assert several.norms() == [[4.0, 10.0], [5.0, 11.0], [6.0, 12.0], [13.0]]


def test_the_longest_checkpoint_and_an_older_one_with_norms_of_zero() -> None:
    loop = Loop()
    run(loop, [1.0])
    saved = loop.scaler.state_dict()
    for norms in ([2.0] * 1024, [0.0] * 1000 + [2.0] * 20 + [0.0] * 4):
        saved["ampfast"]["norms"] = [norms]
        loop.scaler.load_state_dict(saved)
        assert run(loop, [0.0, 9.0, 2.0]) == [None, "spike", None]
        assert loop.scaler._spike_rules.accepted_norms() == [[2.0] * WINDOW]
    saved["ampfast"]["norms"] = [[0.0] * 1024]
    loop.scaler.load_state_dict(saved)
    run(loop, [3.0])
    assert loop.scaler._spike_rules.accepted_norms() == [[3.0]]


def test_a_checkpoint_without_norms_begins_anew() -> None:
    loop = Loop()
    run(loop, [1.0, 1.1, 1.0, 1.1, 1.0])
    loop.scaler.load_state_dict(torch.amp.GradScaler("cpu").state_dict() | {"scale": 8.0})
    assert loop.scaler._spike_rules.accepted_norms() == []
    assert run(loop, [50.0]) == [None]


def test_a_capture_refuses_new_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop()
    monkeypatch.setattr(capture, "is_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="the norms of Sigmas, which every replay"):
        loop.clip(1.0, Sigmas())


def test_a_capture_refuses_to_tell_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop()
    loop.step(1.0, 20.0)
    monkeypatch.setattr(capture, "is_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="a question that the host asks"):
        loop.scaler.skip_reason(loop.optimizer)


def test_only_sigmas_add_to_a_checkpoint() -> None:
    loop = Loop()
    loop.step(1.0, 20.0)
    theirs = torch.amp.GradScaler("cpu")
    assert set(loop.scaler.state_dict()) == set(theirs.state_dict())
    loop.step(1.0, Sigmas())
    state = loop.scaler.state_dict()
    assert set(state) == {*theirs.state_dict(), "ampfast"}
    theirs.load_state_dict(state)
    assert theirs.get_scale() == 8.0


@pytest.mark.parametrize(
    "norms",
    [
        *(1.0, [1.0], [[1]], [[math.inf]], [[-1.0]], [[1.0] * 1025], [(1.0,)]),
        *([[1.0], [math.nan]], [[1.0, math.nan]], [{"norms": [1.0]}], [{"spikes": 1}]),
        *([{"norms": [1.0], "spikes": spikes}] for spikes in (-1, 1.0, True, 2**31)),
        *([{"norms": norms, "spikes": 1}] for norms in (1.0, [-1.0], {"norms": [], "spikes": 1})),
    ],
    ids=lambda norms: str(norms)[:40],
)
def test_damaged_norms_are_refused(norms: Any) -> None:
    loop = Loop()
    run(loop, [1.0, 2.0])
    state = loop.scaler.state_dict()
    state["ampfast"]["norms"] = norms
    state["scale"] = 2.0
    with pytest.raises(ValueError, match="norms of steps taken must be lists"):
        loop.scaler.load_state_dict(state)
    assert loop.scaler.get_scale() == 8.0
    assert len(loop.scaler._spike_rules.accepted_norms()[0]) == 2


# Bad input


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Sigmas(-1.0), ValueError, "sigmas must be at least 0 and finite, got -1.0"),
        (lambda: Sigmas(math.nan), ValueError, "sigmas must be at least 0 and finite, got nan"),
        (lambda: Sigmas(math.inf), ValueError, "sigmas must be at least 0 and finite, got inf"),
        (lambda: Sigmas(10**400), ValueError, "sigmas must be at least 0 and finite"),
        (lambda: Sigmas("6"), TypeError, "sigmas must be a Python number, got str"),
        (lambda: Sigmas(6, 1), ValueError, "window must be from 2 to 1024, got 1"),
        (lambda: Sigmas(6, 1025), ValueError, "window must be from 2 to 1024, got 1025"),
        (lambda: Sigmas(6, 2.0), TypeError, "window must be an int, got float"),
        (lambda: Sigmas(6, True), TypeError, "window must be an int, got bool"),
        (lambda: Sigmas(6, patience=0), ValueError, "patience must be from 1 to 2147483647, got 0"),
        (lambda: Sigmas(6, patience=2**31), ValueError, "patience must be from 1 to 2147483647"),
        (lambda: Sigmas(6, patience=2.0), TypeError, "patience must be an int, got float"),
        (lambda: Sigmas(6, patience=True), TypeError, "patience must be an int, got bool"),
    ],
)
def test_bad_sigmas(make: Callable[[], Sigmas], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()


def test_a_clip_that_is_refused_keeps_the_norms() -> None:
    loop = Loop()
    run(loop, [1.0, 1.1, 1.0, 1.1])
    before = loop.scaler._spike_rules.accepted_norms()
    with pytest.raises(ValueError, match="in_place=False needs an optimizer"):
        loop.clip(1.0, Sigmas(2.0, 2), in_place=False)
    assert loop.scaler._spike_rules.accepted_norms() == before
    other = by_checkpoint(loop)
    half = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    half.grad = torch.ones_like(half)
    refused = adam([half])
    other.scaler.scale(torch.zeros(()))
    with pytest.raises(ValueError, match="FP16"):
        other.scaler.clip_grad_norm_(refused, 1.0, skip_above=Sigmas(2.0, WINDOW))
    other.scaler._per_optimizer_states.pop(id(refused))
    assert other.step(50.0, Sigmas(2.0, WINDOW)) == "spike"


def test_limits_at_their_bounds() -> None:
    loop = Loop()
    assert loop.step(1.0, Fraction(1, 2)) == "spike"
    assert loop.step(1.0, 10**400) is None
    assert Loop().step(1.0, Sigmas(Fraction(13, 2)), 3.0) is None
    assert loop.step(1.0, 0) == loop.step(0.7, 0.6) == "spike"
    assert loop.step(1.0, Sigmas(0.0, 1024)) is None
    assert repr(Sigmas(Fraction(1, 2))) == "Sigmas(sigmas=0.5, window=128, patience=None)"


@pytest.mark.parametrize(
    ("above", "error", "text"),
    [
        (math.nan, ValueError, "skip_above must be at least 0, got nan"),
        (-1, ValueError, "skip_above must be at least 0, got -1"),
        ("20", TypeError, "skip_above must be a Python number or ampfast.Sigmas, got str"),
        (True, TypeError, "skip_above must be a Python number or ampfast.Sigmas, got bool"),
        (torch.tensor(2.0), TypeError, "or ampfast.Sigmas, got Tensor"),
    ],
)
def test_a_bad_limit_changes_nothing(above: Any, error: type[Exception], text: str) -> None:
    loop = Loop()
    with pytest.raises(error, match=text):
        loop.clip(1.0, above)
    assert loop.param.grad.norm().item() == pytest.approx(8.0)
    assert loop.step(1.0, 20.0) is None
