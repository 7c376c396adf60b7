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
from exact_training import OPTIMIZERS, SCALERS, Heads, batches_of, plant
from support.comparison import assert_same
from support.steps import Training as One
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict as sharding
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ampfast import GradScaler

# Total number of batches, split over the ranks.
PARTS = 4
STEPS = 16
# Steps at which training is saved and resumed: after a tolerated overflow, and with a growth
# tracker other than 0.
CUTS = (6, 11)
OVERFLOWS = (0, 5, 6, 9, 13)
INF = float("inf")
SETTINGS: dict[str, Any] = {"device": "cpu", "init_scale": 2.0**6, "growth_interval": 3}
POLICY: dict[str, Any] = {"min_scale": 2.0**4, "max_scale": 2.0**8, "hysteresis": 2}


@dataclass(frozen=True)
class Form:
    """Format of a checkpoint, and its scaler.

    Attributes:
        store: "stateful" gives the scaler to torch.distributed.checkpoint, "values" its state dict,
            "file" is one file of torch.save with whole tensors.
        policy: More arguments of our scaler.
    """

    kind: str = "fused_adamw"
    store: str = "stateful"
    policy: dict[str, Any] = field(default_factory=dict)


class Training:
    """Model, optimizer and scaler of one rank."""

    def __init__(self, form: Form, scaler: str, sharded: bool) -> None:
        self.form = form
        self.model: Any = Heads()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in (*self.model.heads, self.model) if sharded else ():
            fully_shard(module, mesh=mesh)
        self.optimizer = OPTIMIZERS[form.kind](self.model.parameters())
        self.scaler = SCALERS[scaler](**SETTINGS, **form.policy)

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
                plant(self.model.parameters())
            self.scaler.step(self.optimizer)
            self.scaler.update()
            params = sharding.get_model_state_dict(
                self.model, options=sharding.StateDictOptions(full_state_dict=True)
            )
            sums = [zlib.crc32(p.detach().numpy().tobytes()) for p in params.values()]
            trace.append([step, self.scaler.state_dict(), sums])
        return trace

    def state(self, **options: bool) -> dict[str, Any]:
        model, optimizer = sharding.get_state_dict(
            self.model, self.optimizer, options=sharding.StateDictOptions(**options)
        )
        scaler = self.scaler if self.form.store == "stateful" else self.scaler.state_dict()
        return {"model": model, "optimizer": optimizer, "scaler": scaler}

    def save(self, place: str) -> None:
        if self.form.store == "file":
            state = self.state(full_state_dict=True)
            if dist.get_rank() == 0:
                torch.save(state, place)
            dist.barrier()
            return
        checkpoint.save(self.state(), checkpoint_id=place)

    def load(self, place: str) -> None:
        if self.form.store == "file":
            state = torch.load(place, weights_only=True)
            options = sharding.StateDictOptions(full_state_dict=True)
        else:
            state, options = self.state(), sharding.StateDictOptions()
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
    form: Form, scaler: str, steps: Sequence[int], loaded: str, saved: str, sharded: bool = True
) -> list[Any]:
    """Trains from one checkpoint to the next; an empty path is none."""
    warnings.simplefilter("error", FutureWarning)
    training = Training(form, scaler, sharded)
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
    [trace] = ranks.run(leg, form, scaler, range(STEPS), "", "", False, ranks=1)
    scales = [state["scale"] for _, state, _ in trace]
    changes = [after - before for before, after in itertools.pairwise(scales)]
    assert min(changes) < 0 < max(changes)
    return trace


def go_on(
    form: Form, folder: Path, legs: Sequence[tuple[int, str]], cuts: Sequence[int] = CUTS
) -> None:
    """Resumes on each number of ranks with its scaler, one after another."""
    reference = expected(form.kind, "ours" if form.policy else "torch", (*form.policy.items(),))
    ends = [0, *cuts, STEPS]
    places = ["", *(str(folder / f"after{cut}") for cut in cuts), ""]
    for i, (count, scaler) in enumerate(legs):
        steps = range(ends[i], ends[i + 1])
        job = (leg, form, scaler, steps, places[i], places[i + 1])
        for trace in ranks.run(*job, ranks=count):
            assert_same(trace, reference[steps.start : steps.stop], f"leg {i}")


def ours(*counts: int) -> list[tuple[int, str]]:
    return [(count, "ours") for count in counts]


MOMENTUM, FUSED = Form("momentum"), Form()
POLICIES = [Form(store=store, policy=POLICY) for store in ("stateful", "values", "file")]
# Arguments of `go_on`.
RUNS: list[tuple[Any, ...]] = [
    *((form, ours(4, 2, 1)) for form in (MOMENTUM, Form("adamw", "values"), *POLICIES)),
    (Form("fused_adam", "file"), ours(4, 2, 1)),
    # To more ranks; with Adam, torch takes a step without gradients to save a state, and counts it.
    *((form, ours(2, 4), (0,)) for form in (MOMENTUM, Form("momentum", "file", policy=POLICY))),
    (FUSED, ours(2, 4), CUTS[:1]),
    (MOMENTUM, [(2, "torch"), (4, "ours"), (1, "torch")]),
    (Form("momentum", "values"), [(2, "ours"), (4, "torch"), (1, "ours")]),
    (Form("momentum", "file"), [(2, "torch"), (4, "ours"), (1, "torch")]),
]


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_resumed_on_other_ranks(run: tuple[Any, ...], tmp_path: Path) -> None:
    form, legs, *more = run
    go_on(form, tmp_path, legs, *more)
    if form.policy:  # The state dict's entry "ampfast" carries the tolerated overflow.
        reference = expected(form.kind, "ours", tuple(POLICY.items()))
        assert reference[CUTS[0] - 1][1]["ampfast"]["hysteresis_tracker"] == 1


# The scaler alone


def test_other_limits(world: Any, tmp_path: Path) -> None:
    """torch demands every entry of the loading side, and no other, unless told otherwise."""

    def reloaded(of_saved: Any, of_loaded: Any, partial: bool = False) -> dict[str, Any]:
        saved = One(GradScaler(**SETTINGS, **of_saved)).step(INF, 1.0).scaler
        loaded = One(GradScaler(**SETTINGS, **of_loaded)).step(INF).scaler
        place = tmp_path / f"{of_saved} {of_loaded} {partial}"
        checkpoint.save({"scaler": saved}, checkpoint_id=place)
        planner = checkpoint.DefaultLoadPlanner(allow_partial_load=partial)
        checkpoint.load({"scaler": loaded}, checkpoint_id=place, planner=planner)
        return loaded.state_dict()

    missing = r"Missing key in checkpoint state_dict: scaler\.ampfast\."
    with pytest.raises(checkpoint.CheckpointException, match=missing):
        reloaded({}, POLICY)
    kept = GradScaler(**SETTINGS, **POLICY).state_dict()
    kept["ampfast"]["hysteresis_tracker"] = 1
    kept |= {"scale": 2.0**5, "_growth_tracker": 1}
    assert_same(reloaded({}, POLICY, partial=True), kept)
    with pytest.raises(
        ValueError, match=r"other settings.*'hysteresis': 2. there.*'hysteresis': 3. here"
    ):
        reloaded(POLICY, {**POLICY, "hysteresis": 3})
    kept = {**GradScaler(**SETTINGS).state_dict(), "_growth_tracker": 1}
    assert_same(reloaded(POLICY, {}), kept)
