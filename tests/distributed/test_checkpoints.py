"""Checkpoints of sharded models, resumed on more or fewer ranks."""

from __future__ import annotations

import functools
import itertools
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from exact_training import OPTIMIZERS, SCALERS, Heads, batches_of
from support.comparison import assert_same
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict as sharding
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

from ampfast import GradScaler, LateScheduler, ShardedGradScaler

# Total number of batches, split over the ranks.
PARTS = 4
STEPS = 16
# Steps at which training is saved and resumed: after a tolerated overflow, and with a growth
# tracker other than 0.
CUTS = (6, 11)
OVERFLOWS = (0, 5, 6, 9, 13)
INF = float("inf")
SETTINGS: dict[str, Any] = {"device": "cpu", "init_scale": 2.0**6, "growth_interval": 3}
MAKES = {**SCALERS, "sharded": ShardedGradScaler}
POLICY: dict[str, Any] = {"min_scale": 2.0**4, "max_scale": 2.0**8, "hysteresis": 2}


@dataclass(frozen=True)
class Form:
    """Format of a checkpoint, and its scaler.

    Attributes:
        store: "stateful" gives the scaler to torch.distributed.checkpoint, "values" its state dict,
            "file" is one file of torch.save with whole tensors.
        started: Whether the scaler has scaled something when it is loaded.
        policy: More arguments of our scaler.
    """

    kind: str = "fused_adamw"
    store: str = "stateful"
    started: bool = False
    policy: dict[str, Any] = field(default_factory=dict)


class Training:
    """Model, optimizer, scaler and schedule of one rank."""

    def __init__(self, form: Form, scaler: str, shards: str) -> None:
        self.form = form
        self.model: Any = Heads()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        if shards == "fsdp2":
            for head in self.model.heads:
                fully_shard(head, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        elif shards == "fsdp1":
            self.model = FullyShardedDataParallel(
                self.model,
                device_mesh=mesh,
                device_id=torch.device("cpu"),
                use_orig_params=True,
            )
        self.optimizer = OPTIMIZERS[form.kind](self.model.parameters())
        self.scaler = MAKES[scaler](**SETTINGS, **form.policy)

    def run(self, steps: Sequence[int]) -> list[Any]:
        """Trains; returns scaler and parameters after each step."""
        mine = PARTS // dist.get_world_size()
        first = mine * dist.get_rank()
        batches = batches_of(range(first, first + mine), {})
        trace = []
        for step in steps:
            self.optimizer.zero_grad()
            self.scaler.scale(batches(step, 0).loss(self.model) / mine).backward()
            if step in OVERFLOWS and dist.get_rank() == dist.get_world_size() - 1:
                self.plant()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            params = sharding.get_model_state_dict(
                self.model, options=sharding.StateDictOptions(full_state_dict=True)
            )
            sums = [zlib.crc32(p.detach().numpy().tobytes()) for p in params.values()]
            trace.append([step, self.scaler.state_dict(), sums])
        return trace

    @torch.no_grad()
    def plant(self) -> None:
        """Makes one element of this rank's gradients infinite."""
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        mine = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
        next(g for g in mine if g.numel()).view(-1)[0] = INF

    def state(self, **options: bool) -> dict[str, Any]:
        model, optimizer = sharding.get_state_dict(
            self.model, self.optimizer, options=sharding.StateDictOptions(**options)
        )
        return {"model": model, "optimizer": optimizer}

    def save(self, place: str) -> None:
        if self.form.store == "file":
            state = {**self.state(full_state_dict=True), "scaler": self.scaler.state_dict()}
            if dist.get_rank() == 0:
                torch.save(state, place)
            dist.barrier()
            return
        as_value = self.form.store == "values"
        scaler = self.scaler.state_dict() if as_value else self.scaler
        checkpoint.save({**self.state(), "scaler": scaler}, checkpoint_id=place)

    def load(self, place: str) -> None:
        if self.form.started:
            self.scaler.scale(torch.ones(()))
        if self.form.store == "file":
            state = torch.load(place, weights_only=True)
            options = sharding.StateDictOptions(full_state_dict=True)
        else:
            as_value = self.form.store == "values"
            scaler = self.scaler.state_dict() if as_value else self.scaler
            state, options = {**self.state(), "scaler": scaler}, sharding.StateDictOptions()
            checkpoint.load(state, checkpoint_id=place)
        sharding.set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=options,
        )
        if self.form.store != "stateful":
            self.scaler.load_state_dict(state["scaler"])


def leg(
    form: Form, scaler: str, shards: str, steps: Sequence[int], loaded: str, saved: str
) -> list[Any]:
    """Trains from one checkpoint to the next; an empty path is none."""
    warnings.simplefilter("error", FutureWarning)
    training = Training(form, scaler, shards)
    if loaded:
        training.load(loaded)
    trace = training.run(steps)
    if saved:
        training.save(saved)
    return trace


@functools.cache
def expected(kind: str, scaler: str, policy: tuple[tuple[str, Any], ...]) -> list[Any]:
    """Uninterrupted training in one process without shards."""
    form = Form(kind, policy=dict(policy))
    [trace] = ranks.run(leg, form, scaler, "none", range(STEPS), "", "", ranks=1)
    scales = [state["scale"] for _, state, _ in trace]
    changes = [after - before for before, after in itertools.pairwise(scales)]
    assert min(changes) < 0 < max(changes)
    return trace


def go_on(
    form: Form,
    folder: Path,
    legs: Sequence[tuple[int, str]],
    cuts: Sequence[int] = CUTS,
    shards: Sequence[str] = ("fsdp2",) * 3,
) -> None:
    """Resumes on each number of ranks with its scaler and sharding, one after another."""
    reference = expected(form.kind, "ours" if form.policy else "torch", (*form.policy.items(),))
    ends = [0, *cuts, STEPS]
    places = ["", *(str(folder / f"after{cut}") for cut in cuts), ""]
    for i, (count, scaler) in enumerate(legs):
        steps = range(ends[i], ends[i + 1])
        job = (leg, form, scaler, shards[i], steps, places[i], places[i + 1])
        for trace in ranks.run(*job, ranks=count):
            assert_same(trace, reference[steps.start : steps.stop], f"leg {i}")


def ours(*counts: int) -> list[tuple[int, str]]:
    return [(count, "ours") for count in counts]


@pytest.mark.parametrize(
    ("kind", "store"), [("momentum", "stateful"), ("adamw", "values"), ("fused_adam", "file")]
)
def test_on_fewer_ranks(kind: str, store: str, tmp_path: Path) -> None:
    go_on(Form(kind, store), tmp_path, ours(4, 2, 1))


@pytest.mark.sweep
@pytest.mark.parametrize(("kind", "store"), [("fused_adamw", "stateful"), ("momentum", "file")])
def test_on_more_ranks(kind: str, store: str, tmp_path: Path) -> None:
    go_on(Form(kind, store), tmp_path, ours(2, 4), CUTS[:1])


@pytest.mark.parametrize("store", ["stateful", "values", "file"])
def test_limits_and_hysteresis(store: str, tmp_path: Path) -> None:
    """The state dict's entry "ampfast" carries the policy and the tolerated overflow."""
    reference = expected("fused_adamw", "ours", tuple(POLICY.items()))
    assert reference[CUTS[0] - 1][1]["ampfast"]["hysteresis_tracker"] == 1
    go_on(Form(store=store, policy=POLICY), tmp_path, ours(4, 2, 1))


@pytest.mark.parametrize("store", ["stateful", "file"])
def test_into_a_scaler_that_has_started(store: str, tmp_path: Path) -> None:
    form = Form("momentum", store, started=True, policy=POLICY)
    go_on(form, tmp_path, ours(2, 1), CUTS[:1])


def test_without_shards_in_the_end(tmp_path: Path) -> None:
    go_on(Form(), tmp_path, [(4, "ours"), (1, "ours")], CUTS[:1], ["fsdp2", "none"])


def test_with_fsdp1_in_between(tmp_path: Path) -> None:
    """FSDP1's scaler, "sharded", agrees with all ranks."""
    legs = [(2, "ours"), (4, "sharded"), (2, "sharded")]
    go_on(Form("momentum"), tmp_path, legs, CUTS, ["fsdp2", "fsdp1", "fsdp1"])


@pytest.mark.parametrize(
    ("store", "scalers"),
    [
        ("stateful", ("torch", "ours", "torch")),
        ("values", ("ours", "torch", "ours")),
        ("file", ("torch", "ours", "torch")),
    ],
)
def test_torchs_checkpoints_into_ours_and_back(
    store: str, scalers: tuple[str, ...], tmp_path: Path
) -> None:
    go_on(Form("momentum", store), tmp_path, list(zip((2, 4, 1), scalers, strict=True)))


@pytest.mark.sweep
@pytest.mark.parametrize("store", ["stateful", "file"])
def test_saved_before_the_start(store: str, tmp_path: Path) -> None:
    # Not with Adam: to save its state, torch takes a step without gradients and counts it.
    go_on(Form("momentum", store, policy=POLICY), tmp_path, ours(2, 4), (0,))


# The scaler alone


def stepped(scaler: Any, gradients: Sequence[float]) -> Any:
    for gradient in gradients:
        parameter = torch.ones(1, requires_grad=True)
        scaler.scale(parameter * gradient).sum().backward()
        scaler.step(torch.optim.SGD([parameter], lr=0.1))
        scaler.update()
    return scaler


def reloaded(place: str, saved: Any, loaded: Any, partial: bool = False) -> dict[str, Any] | str:
    """State of one scaler after loading another's checkpoint, or the error."""
    checkpoint.save({"scaler": saved}, checkpoint_id=place)
    planner = checkpoint.DefaultLoadPlanner(allow_partial_load=partial)
    try:
        checkpoint.load({"scaler": loaded}, checkpoint_id=place, planner=planner)
    except (ValueError, checkpoint.CheckpointException) as error:
        return f"{type(error).__name__}: {error}"
    return loaded.state_dict()


def without_limits(place: str, partial: bool) -> Any:
    saved = stepped(GradScaler(**SETTINGS), [INF, 1.0])
    loaded = stepped(GradScaler(**SETTINGS, **POLICY), [INF])
    return reloaded(place, saved, loaded, partial)


def test_a_checkpoint_without_limits_is_loaded_in_part(tmp_path: Path) -> None:
    """torch demands every entry of the loading side unless told otherwise."""
    for message in ranks.run(without_limits, str(tmp_path / "strict"), False):
        assert "Missing key in checkpoint state_dict: scaler.ampfast." in message
    kept = GradScaler(**SETTINGS, **POLICY).state_dict()
    kept["ampfast"]["hysteresis_tracker"] = 1
    for state in ranks.run(without_limits, str(tmp_path / "partial"), True):
        assert_same(state, {**kept, "scale": 2.0**5, "_growth_tracker": 1})


def with_limits(place: str, of_loaded: dict[str, Any]) -> Any:
    saved = stepped(GradScaler(**SETTINGS, **POLICY), [INF, 1.0])
    return reloaded(place, saved, GradScaler(**SETTINGS, **of_loaded))


def test_a_checkpoint_with_other_limits_is_refused_everywhere(tmp_path: Path) -> None:
    for message in ranks.run(with_limits, str(tmp_path), {**POLICY, "hysteresis": 3}):
        assert message.startswith("ValueError: the checkpoint is of a scaler with another policy")
        assert "hysteresis 2 there, 3 here" in message


def test_limits_are_not_looked_for_without_them(tmp_path: Path) -> None:
    """torch reads the entries of the loading side only."""
    expected = {**GradScaler(**SETTINGS).state_dict(), "_growth_tracker": 1}
    for state in ranks.run(with_limits, str(tmp_path), {}):
        assert_same(state, expected)


def disabled(place: str, scaler: str) -> Any:
    makes = SCALERS[scaler]
    off, on = makes(**SETTINGS, enabled=False), makes(**SETTINGS)
    return [
        reloaded(f"{place}/on", on, off),
        reloaded(f"{place}/off", off, makes(**SETTINGS, enabled=False)),
        reloaded(f"{place}/neither", off, on),
    ]


def test_disabled_scalers(tmp_path: Path) -> None:
    by_ours = ranks.run(disabled, str(tmp_path / "ours"), "ours")
    by_torch = ranks.run(disabled, str(tmp_path / "torch"), "torch")
    assert [seen[:2] for seen in by_ours] == [seen[:2] for seen in by_torch] == [[{}, {}]] * 2
    for seen in by_ours + by_torch:
        assert "Missing key in checkpoint state_dict: scaler." in seen[2]


def schedule_of(place: str) -> list[Any]:
    """A pending decision of the schedule is resumed once."""
    found = []
    for bad in (False, True):
        parameter = torch.ones(1, requires_grad=True)
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        scaler = GradScaler(**SETTINGS)
        schedules: list[Any] = [
            LateScheduler(
                torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0),
                scaler,
                optimizer,
            )
            for _ in range(2)
        ]
        for gradient, loss in ((1.0, 1.0), (INF if bad else 1.0, 2.0)):
            scaler.scale(parameter * gradient).sum().backward()
            scaler.step(optimizer)
            scaler.update()
            schedules[0].step(loss)
        where = f"{place}/{bad}"
        checkpoint.save({"schedule": schedules[0]}, checkpoint_id=where)
        checkpoint.load({"schedule": schedules[1]}, checkpoint_id=where)
        assert isinstance(schedules[1], Stateful)
        before = schedules[1].last_epoch
        schedules[1].flush()
        found.append([before, schedules[1].last_epoch, optimizer.param_groups[0]["lr"]])
    return found


def test_a_late_schedule(tmp_path: Path) -> None:
    assert ranks.run(schedule_of, str(tmp_path)) == [[[1, 2, 0.5], [1, 1, 1.0]]] * 2


def test_in_one_process_without_a_group(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")
        state = reloaded(
            str(tmp_path),
            stepped(GradScaler(**SETTINGS, **POLICY), [INF, 1.0]),
            stepped(GradScaler(**SETTINGS, **POLICY), [1.0, 1.0]),
        )
    assert isinstance(state, dict)
    assert (state["_growth_tracker"], state["ampfast"]["hysteresis_tracker"]) == (1, 1)


class Stepping(torch.optim.Optimizer):
    """Calls the scaler in its step, as Accelerate's wrapper does."""

    def __init__(self, inner: torch.optim.Optimizer, scaler: GradScaler) -> None:
        self.inner, self.scaler = inner, scaler

    param_groups = property(lambda self: self.inner.param_groups)
    state = property(lambda self: self.inner.state)

    def step(self, closure: None = None) -> None:
        self.scaler.step(self.inner)
        self.scaler.update()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()


@pytest.mark.parametrize("scaler_type", [torch.amp.GradScaler, GradScaler], ids=["torch", "ours"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_reading_the_state_of_a_wrapper_steps_the_scaler(fused: bool, scaler_type: Any) -> None:
    """As docs/troubleshooting.md says; a scaler that is loaded afterwards is as it was saved."""
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    scaler = scaler_type("cpu", init_scale=1024.0, growth_interval=2)
    saved = {**scaler.state_dict(), "_growth_tracker": 1}
    scaler.load_state_dict(saved)
    wrapper = Stepping(optimizer, scaler)
    with pytest.raises(AssertionError, match="Attempted step but _scale is None"):
        sharding.get_optimizer_state_dict(model, wrapper)
    optimizer.zero_grad()
    scaler.scale(torch.zeros(()))
    before = [param.detach().clone() for param in model.parameters()]
    sharding.get_optimizer_state_dict(model, wrapper)
    assert (scaler.get_scale(), scaler.state_dict()["_growth_tracker"]) == (2048.0, 0)
    assert_same(before, [param.detach() for param in model.parameters()])
    scaler.load_state_dict(saved)
    assert scaler.state_dict() == saved
    optimizer.state.clear()
    sharding.get_optimizer_state_dict(model, optimizer)
    assert scaler.state_dict() == saved
