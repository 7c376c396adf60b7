"""One step on several ranks: decision, norms and gradients, against all elements in one place."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from exact_training import local, whole
from support.gradients import parameter_like
from support.groups import Derived, Foreign, line, pair, square
from support.models import coefficient_of
from support.optimizers import Reader
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import ampfast
from ampfast import functional

SCALE = 4.0
MAX_NORM = 2.0
WORLD = 4
ORDERS = (1.0, 2.0, 3.0, math.inf)
ALL = range(WORLD)


@dataclass
class Step:
    """Parameters of one rank and what its decision and norms must follow.

    Attributes:
        params: They have the unscaled gradients.
        elements: All elements that count in this rank's norms.
        group: The scaler's process group.
        members: Ranks whose overflow makes this one skip.
        replicas: Ranks that hold the same gradients, so that all of them overflow.
        is_list: Whether the gradients need no scaler to be known as what they are.
        is_whole: Whether every rank has a gradient of every parameter.
    """

    params: list[torch.nn.Parameter]
    elements: Sequence[torch.Tensor]
    group: Any = None
    members: Sequence[int] = ALL
    replicas: Sequence[int] = ()
    is_list: bool = False
    is_whole: bool = True

    def plant(self, bad: int | None, value: float) -> Step:
        rank = dist.get_rank()
        grad = self.params[0].grad
        if grad is not None and (rank == bad or (rank in self.replicas and bad in self.replicas)):
            local(grad).view(-1)[-1] = value
        return self


# Builders of steps, each given the rank that overflows and the value


# Of the scaler's group, by what it is: ranks that agree.
ROWS, COLUMNS = ((0, 1), (2, 3)), ((0, 2), (1, 3))


def placed(value: torch.Tensor, how: str) -> torch.Tensor:
    """Distributes a tensor that every rank has."""
    if how == "plain":
        return value.clone()
    name, _, spec = how.rpartition(":")
    kinds = {"R": Replicate(), "S0": Shard(0), "S1": Shard(1), "P": Partial()}
    placements = [kinds[each] for each in spec.split(",")]
    mesh = square()[name] if name else line() if len(placements) == 1 else square()
    shards = [Replicate() if p.is_partial() else p for p in placements]
    tensor = DTensor.from_local(value.clone(), mesh, [Replicate()] * mesh.ndim)
    local = tensor.redistribute(placements=shards).to_local().clone()
    for dim, placement in enumerate(placements):
        if placement.is_partial():
            # Summands are integers, some of them negative; one infinite summand is enough.
            size, mine = mesh.size(dim), mesh.get_local_rank(dim)
            part = local * (size + 2 if mine == 0 else -1 - 2 / (size - 1))
            bad = local if mine == 0 else torch.zeros_like(local)
            local = torch.where(local.isfinite(), part, bad)
    return DTensor.from_local(
        local, mesh, placements, shape=value.shape, stride=value.stride(), run_check=False
    )


def parts(kind: str, bad: int | None, value: float) -> Step:
    """Ranks own different gradients and share a marked one."""
    rank = dist.get_rank()
    made, halves = {
        "world": (lambda: dist.group.WORLD, None),
        "mesh": (square, None),
        "a": (lambda: square()["a"], COLUMNS),
        "b": (lambda: square()["b"], ROWS),
        "pairs": (lambda: pair(*COLUMNS), COLUMNS),
        "foreign": (lambda: Foreign(dist.group.WORLD), None),
        "derived": (lambda: Derived(dist.group.WORLD), None),
        "foreign pairs": (lambda: Foreign(pair(*ROWS)), ROWS),
    }[kind]
    members = ALL if halves is None else next(half for half in halves if rank in half)
    own = [(-1.0) ** r * torch.arange(1.0, 3.0 + r) for r in ALL]
    params = [parameter_like(own[rank].clone()), parameter_like(torch.full((5,), 3.0))]
    ampfast.mark_replicated(params[1:])
    elements = [*(own[r] for r in members), torch.full((5,), 3.0)]
    return Step(params, elements, made(), members).plant(bad, value)


def foreign_beside_mesh(how: str, bad: int | None, value: float) -> Step:
    """On a mesh whose rows are the foreign group."""
    row, values = ROWS[dist.get_rank() // 2], torch.arange(1.0, 5.0)
    members = row if how == "R,S0" else ALL
    step = Step([parameter_like(placed(values, how))], [values], Foreign(pair(*ROWS)), members)
    step.replicas = row if how == "S0,R" else ()
    return step.plant(bad, value)


def stages(bad: int | None, value: float) -> Step:
    """Pipeline of two stages on two ranks each: the first sharded, the second replicated."""
    values, same = torch.tensor([1.0, 2.0, 2.0, 4.0]), torch.full((4,), 3.0)
    grad = placed(values, "b:S0" if dist.get_rank() < 2 else "plain")
    params = [parameter_like(grad), parameter_like(same.clone())]
    ampfast.mark_replicated(params[1:])
    return Step(params, [values, values, same], square()["a"], replicas=(2, 3)).plant(bad, value)


def on_some_ranks(sharded: bool, bad: int | None, value: float) -> Step:
    """A gradient on all ranks together with one on a mesh of the last two."""
    params = [parameter_like(placed(torch.ones(4), "S0"))]
    last = DeviceMesh("cpu", [2, 3])
    if dist.get_rank() >= 2:
        threes = torch.full((2,), 3.0)
        grad = distribute_tensor(threes, last, [Shard(0) if sharded else Replicate()])
        params.append(parameter_like(grad))
    return Step(params, [torch.ones(4), torch.full((2,), 3.0)]).plant(bad, value)


def other_order(bad: int | None, value: float) -> Step:
    """Replicas on a mesh that orders ranks otherwise than the scaler's."""
    mesh = DeviceMesh("cpu", [0, 3, 2, 1])
    grad = DTensor.from_local(torch.full((4,), 2.0), mesh, [Replicate()])
    step = Step([parameter_like(grad)], [torch.full((4,), 2.0)], square(), replicas=ALL)
    return step.plant(bad, value)


def own_beside_shards(bad: int | None, value: float) -> Step:
    """Plain gradients are parts over a group."""
    twos, own = torch.full((4,), 2.0), torch.full((1,), 3.0 + dist.get_rank())
    params = [parameter_like(own), parameter_like(placed(twos, "S0"))]
    return Step(params, [twos, 3.0 + torch.arange(4.0)], dist.group.WORLD).plant(bad, value)


def lacking(bad: int | None, value: float) -> Step:
    """Rank 0 has no gradient."""
    param = parameter_like(placed(torch.ones(8), "S0"))
    if dist.get_rank() == 0:
        param.grad = None
    step = Step([param], [torch.ones(6)], members=(1, 2, 3), is_whole=False)
    return step.plant(bad, value)


def slice_beside_square(marked: bool, bad: int | None, value: float) -> Step:
    """A mark without a group says nothing of DTensors."""
    values = [DENSE, EXPERTS[0]]
    params = [parameter_like(placed(*each)) for each in zip(values, ("S0,S0", "a:S0"), strict=True)]
    if marked:
        ampfast.mark_replicated(params)
    return Step(params, values).plant(bad, value)


# Mixtures of experts: some parameters are held by a group of ranks, others by all

DENSE = torch.arange(1.0, 9.0)
# Of the first expert and of the second.
EXPERTS = [torch.tensor([3.0, -1.0]), torch.tensor([-20.0, 2.5])]
# The ranks that hold the same expert.
HOLDERS = {"columns": COLUMNS, "rows": ROWS, "diagonals": ((0, 3), (1, 2))}


def expert(kind: str, holders: str) -> torch.nn.Parameter:
    """Parameter of this rank's expert, marked."""
    both = HOLDERS[holders]
    number = int(dist.get_rank() in both[1])
    grad: torch.Tensor = EXPERTS[number].clone()
    if kind == "plain":
        mark: Any = pair(*both)
    elif kind in ("slice", "partial"):
        mark = square()["a" if both == COLUMNS else "b"]
        if kind == "slice":
            grad = distribute_tensor(grad, mark, [Shard(0)])
        else:
            grad = DTensor.from_local(grad / 2, mark, [Partial()])
    else:
        mark = [DeviceMesh("cpu", each) for each in both][number]
        grad = distribute_tensor(grad, mark, [Replicate() if kind == "replicated" else Shard(0)])
    param = parameter_like(grad)
    ampfast.mark_replicated([param], group=mark)
    return param


def experts(how: str, kind: str, holders: str, group: str, bad: int | None, value: float) -> Step:
    """A gradient that all ranks hold in some way, and that of an expert."""
    params = [parameter_like(placed(DENSE, how)), expert(kind, holders)]
    made: Any = {"world": dist.group.WORLD, "mesh": square()}.get(group)
    members: Sequence[int] = ALL
    if group == "half":  # of the ranks, with both experts
        made, members = pair(*ROWS), ROWS[dist.get_rank() // 2]
    step = Step(params, [DENSE, *EXPERTS], made, members)
    if how == "plain":
        ampfast.mark_replicated(params[:1])
        step.replicas = members
    elif how == "S0,R":  # along the rows
        step.replicas = ROWS[dist.get_rank() // 2]
    return step.plant(bad, value)


# Dense gradient as for `placed`; kind of the expert, its holders, the scaler's group.
EXPERT_CASES = """
S0    plain columns none
S0    plain columns world
S0    plain rows mesh
S0    plain diagonals none
S0,S0 plain diagonals none
S0,R  plain rows world
plain plain diagonals mesh
plain plain columns half
S0    slice columns none
S0,S0 slice columns world
S0    sharded diagonals none
plain sharded rows world
S0    replicated columns none
plain replicated columns world
S0    partial rows none
"""

# Lists of DTensors. R: replicated, S0: sharded along rows, P: partial, on the line or the square or
# one of its lines `a` and `b`; "plain" is a tensor that every rank has.
LISTS = {
    "sharded": "S0 S1 S0",
    "replicated": "R R",
    "replicated first": "R S0 R",
    "summands": "P R",
    "summands and shards": "S0 P S1",
    "with plain": "S0 plain S1",
    "plain first": "plain S0 plain",
    "replicas of shards": "R,S0 R,S1",
    "shards of replicas": "S0,R S1,R",
    "shards both ways": "S0,S1 S1,S0",
    "shards of shards": "S0,S0 S1,S1",
    "mixed": "R,S0 S0,R R,R",
    "mixed with plain": "R,R R,S0 plain S0,R",
    "mixed with summands": "P,S0 R,S1 P,P",
    "line and square": "S0 R,S0",
    "two lines": "a:S0 b:S0",
    "two lines and plain": "plain b:R a:S1",
    "one line of two": "b:S0 b:R plain",
}
SHAPES = [(5, 7), (1, 3), (9, 2), (4, 4)]


def listed(names: list[str], bad: int | None, value: float) -> Step:
    """Multiples of 12, which divide exactly into summands; the first or last element is bad."""
    generator = torch.Generator().manual_seed(9)
    shapes = SHAPES[: len(names)]
    full = [12.0 * torch.randint(-5, 6, shape, generator=generator).float() for shape in shapes]
    elements = [each.reshape(-1).clone() for each in full]
    if bad is not None:
        full[-1 if bad else 0].view(-1)[-1 if bad else 0] = value
    params = [parameter_like(placed(*each)) for each in zip(full, names, strict=True)]
    return Step(params, elements, is_list=True)


GROUPS = ("world", "mesh", "a", "b", "pairs", "foreign", "derived", "foreign pairs")
BUILDERS: dict[str, Callable[[int | None, float], Step]] = {
    **{f"parts, {kind}": functools.partial(parts, kind) for kind in GROUPS},
    **{
        f"foreign group, {how}": functools.partial(foreign_beside_mesh, how)
        for how in ("R,S0", "S0,R", "S0,S0")
    },
    "stages": stages,
    "on some ranks, sharded": functools.partial(on_some_ranks, True),
    "on some ranks, replicated": functools.partial(on_some_ranks, False),
    "other order": other_order,
    "own beside shards": own_beside_shards,
    "lacking": lacking,
    "slice": functools.partial(slice_beside_square, False),
    "marked slice": functools.partial(slice_beside_square, True),
    **{
        f"experts, {case}": functools.partial(experts, *case.split())
        for case in EXPERT_CASES.strip().splitlines()
    },
    **{f"list, {name}": functools.partial(listed, kinds.split()) for name, kinds in LISTS.items()},
}

PATHS: dict[str, Callable[[Any, Any], Any]] = {
    "step": lambda scaler, optimizer: None,
    "norms": lambda scaler, optimizer: [scaler.grad_norm(optimizer, order) for order in ORDERS],
    "unscale": lambda scaler, optimizer: scaler.unscale_(optimizer),
    **{
        f"clip {order}": functools.partial(
            lambda scaler, optimizer, order: scaler.clip_grad_norm_(optimizer, MAX_NORM, order),
            order=order,
        )
        for order in ORDERS[1:]
    },
    "defer": lambda scaler, optimizer: scaler.clip_grad_norm_(optimizer, MAX_NORM, in_place=False),
    "check": lambda scaler, optimizer: scaler._check_inf_per_device(optimizer),
}
BADS = ((None, 0.0), (0, math.inf), (WORLD - 1, math.nan))


def stepped(name: str) -> None:
    """Checks every path on this rank."""
    paths = [(torch.optim.SGD, path) for path in PATHS if path != "defer"]
    paths += [(Reader, "step"), (Reader, "unscale"), (Reader, "defer")]
    for (bad, value), (kind, path) in itertools.product(BADS, paths):
        step = BUILDERS[name](bad, value)
        what = f"{name}, {kind.__name__}, {path}, {bad} bad"
        skips = bad in step.members
        elements = torch.cat([each.double() for each in step.elements])
        norms = [value if skips else torch.linalg.vector_norm(elements, p).item() for p in ORDERS]
        for param in step.params:
            if param.grad is not None:
                local(param.grad).mul_(SCALE)
        # All ranks ask in the same order.
        grads = [whole(param.grad) / SCALE for param in step.params if step.is_whole]
        group = {"process_group": step.group} if step.group is not None else {}
        scaler = ampfast.GradScaler("cpu", init_scale=SCALE, **group)
        scaler.scale(torch.ones(()))
        optimizer = kind(step.params, lr=1.0)
        result, factor = PATHS[path](scaler, optimizer), 1.0
        if path == "norms":
            found = [norm.item() for norm in result]
            assert found == pytest.approx(norms, rel=1e-6, nan_ok=True), what
        if path.startswith(("clip", "defer")):
            norm = norms[ORDERS.index(float(path.partition(" ")[2] or 2))]
            assert result.item() == pytest.approx(norm, rel=1e-6, nan_ok=True), what
            factor = coefficient_of(torch.tensor(norm), MAX_NORM).item()
        if path == "check":
            [flag] = result.values()
            assert flag.item() == float(skips), what
            continue
        scaler.step(optimizer)
        flags = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
        assert [flag.item() for flag in flags] == [float(skips)], what
        scaler.update()
        assert scaler.get_scale() == (SCALE / 2 if skips else SCALE), what
        for param, grad in zip(step.params, grads, strict=step.is_whole):
            now = whole(param)
            wanted = torch.zeros_like(now) if skips else -grad * factor
            torch.testing.assert_close(now, wanted, rtol=1e-6, atol=1e-6, msg=what)
        if step.is_list and path == "step":
            # The same list from a caller, without a scaler.
            flag, half = torch.zeros(()), torch.tensor(1 / SCALE)
            given = [param.grad for param in BUILDERS[name](bad, value).params]
            functional.check_(given, flag)
            assert flag.item() == float(skips), what
            found = [functional.grad_norm(given, order, torch.ones(())).item() for order in ORDERS]
            assert found == pytest.approx(norms, rel=1e-6, nan_ok=True), what
            functional.unscale_(given, flag, half)
            for ours, grad in zip(given, grads, strict=True):
                torch.testing.assert_close(whole(ours), grad / SCALE, equal_nan=True)


# A few at a time, so that groups of ranks do not pile up.
NAMES = [(name,) for name in sorted(BUILDERS)]


@pytest.mark.parametrize("first", range(4))
def test_as_with_all_elements_in_one_place(first: int) -> None:
    ranks.run_each(stepped, NAMES[first::4], ranks=WORLD)
