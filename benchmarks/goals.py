"""Goals of kernels and whole steps, and their verdicts."""

from __future__ import annotations

from dataclasses import dataclass

from .harness import Samples
from .providers import CHECK, COPY, HALF_COPY, UNSCALE, UPDATE
from .results import Goal

# CPU: torch's time over ours for `unscale_`; a huge tensor and a real model must not get slower.
CPU_SPEEDUPS = {"1000x1k": 2.5, "bert_base": 1.0, "bert_large": 1.0, "one_64m": 1.0}

# GPU, from so many bytes on: fraction of a copy's bandwidth.
PARTS_OF_COPY = ((1_000_000_000, 0.90), (256_000_000, 0.85))
# Against a torch with at most this many tensors per launch: its device time over ours, and over
# ours with the scale update in the same launch.
FEW_TENSORS = 110
GPU_SPEEDUPS = {"1000x1k": 5.0, "10000x256": 8.0}
GPU_SPEEDUPS_WITH_UPDATE = {"1000x1k": 4.0}
# Host time of a whole step, likewise.
GPU_HOST_SPEEDUP = 5.0
# Fraction of torch's device time for a step whose optimizer unscales.
FUSED_SHARE = 0.5

# Time of a pass with tracking over that of the same pass without, on a GPU from so many bytes on.
LEAST_TRACKED_BYTES = 256_000_000
TRACKING_LIMITS = {"float32": 1.10, "float16": 1.5, "bfloat16": 1.5}
TRACKED_CHECKS = (CHECK, "check, overflow", "check, health")
TRACKED_UNSCALES = (UNSCALE, "unscale, overflow", "unscale, health")

# torch's time for unscale_ and clip_grad_norm_ over that of one call, in place and deferred: on a
# CPU, and on a GPU from so many bytes on.
CPU_CLIP_SPEEDUPS = {"1000x1k": (5.0, 5.0), "bert_base": (1.3, 2.0), "bert_large": (1.3, 2.0)}
GPU_CLIP_SPEEDUPS = (1.6, 4.0)
GPU_CLIP_BYTES = 256_000_000

# Time of a training step over that of the same step without a scaler.
TRAINING_LIMITS = {"cpu": 1.05, "cuda": 1.02}

CLIP = "clip"
DEFERRED_CLIP = "clip, in_place=False"
STEP = "full step"
FUSED_STEP = "full step, fused"
# Provider of rows without a scaler.
WITHOUT = "none"


@dataclass(frozen=True)
class Place:
    """Place of a measurement.

    `tensors_per_launch` is torch's on a GPU; None on a CPU, which has other goals.
    """

    case: str
    list_name: str
    dtype: str
    list_bytes: int
    tensors_per_launch: int | None

    def goal(
        self,
        name: str,
        sense: str,
        limit: float,
        samples: Samples,
        over: tuple[tuple[str, str], tuple[str, str]],
        spread_counts: bool = False,
    ) -> list[Goal]:
        """Goal for a ratio of two contenders' times; none where one of them was not timed."""
        if not all(key in samples for key in over):
            return []
        ratio = samples.ratio(*over)
        return [
            Goal.of_spread(
                name, self.list_name, self.dtype, sense, limit, ratio, spread_counts=spread_counts
            )
        ]


def of_kernels(place: Place, provider: str, samples: Samples) -> list[Goal]:
    """Goals for the paths over one list."""
    if place.tensors_per_launch is None:
        return _on_cpu(place, provider, samples)
    goals = []
    part = part_of_copy(place.list_bytes)
    for path, copy in ((CHECK, HALF_COPY), (UNSCALE, COPY)):
        ours, theirs = (path, provider), (path, "torch")
        if part is not None:
            name = f"{provider}: {path}, part of a copy's bandwidth"
            goals += place.goal(name, ">=", part, samples, ((copy, "torch"), ours))
        name = f"{provider}: {path}, times as fast as torch"
        goals += place.goal(name, ">=", 1.0, samples, (theirs, ours), spread_counts=True)
        speedup = _speedup(GPU_SPEEDUPS, place)
        if speedup is not None:
            goals += place.goal(f"{name}'s many launches", ">=", speedup, samples, (theirs, ours))
    speedup = _speedup(GPU_SPEEDUPS_WITH_UPDATE, place)
    if speedup is not None:
        name = f"{provider}: {UPDATE}, times as fast as torch's {UNSCALE} alone"
        over = ((UNSCALE, "torch"), (UPDATE, provider))
        goals += place.goal(name, ">=", speedup, samples, over)
    return goals


def of_steps(place: Place, provider: str, samples: Samples, host: Samples | None) -> list[Goal]:
    """Goals for whole steps; none on a CPU, where the subject "host" has them."""
    if place.tensors_per_launch is None:
        return []
    name = f"{provider}: {FUSED_STEP}, device time over torch's"
    over = ((FUSED_STEP, provider), (FUSED_STEP, "torch"))
    goals = place.goal(name, "<=", FUSED_SHARE, samples, over)
    if host is not None and _speedup(GPU_SPEEDUPS, place) is not None:
        for path in (STEP, FUSED_STEP):
            name = f"{provider}: {path}, torch's host time over ours"
            over = ((path, "torch"), (path, provider))
            goals += place.goal(name, ">=", GPU_HOST_SPEEDUP, host, over)
    return goals


def of_tracking(place: Place, provider: str, samples: Samples) -> list[Goal]:
    """Goals for passes that mark overflows; none on a CPU. Health is a pass of its own."""
    limit = TRACKING_LIMITS.get(place.dtype)
    if place.tensors_per_launch is None or limit is None or place.list_bytes < LEAST_TRACKED_BYTES:
        return []
    goals = []
    for plain, marked, _ in (TRACKED_CHECKS, TRACKED_UNSCALES):
        name = f"{provider}: {marked}, time over that without"
        goals += place.goal(name, "<=", limit, samples, ((marked, provider), (plain, provider)))
    return goals


def of_clipping(place: Place, provider: str, samples: Samples) -> list[Goal]:
    """Goals for clipping; those on a CPU are for float32."""
    if place.tensors_per_launch is None:
        limits = CPU_CLIP_SPEEDUPS.get(place.case) if place.dtype == "float32" else None
    else:
        limits = GPU_CLIP_SPEEDUPS if place.list_bytes >= GPU_CLIP_BYTES else None
    goals = []
    for path, limit in zip((CLIP, DEFERRED_CLIP), limits or (), strict=False):
        name = f"{provider}: {path}, times as fast as torch's unscale_ and clip_grad_norm_"
        goals += place.goal(name, ">=", limit, samples, ((CLIP, "torch"), (path, provider)))
    return goals


def of_training(
    place: Place, ours: tuple[str, str], without: tuple[str, str], samples: Samples
) -> list[Goal]:
    """Goal for whole training steps, by path and provider of both sides."""
    limit = TRAINING_LIMITS["cpu" if place.tensors_per_launch is None else "cuda"]
    name = f"{ours[1]}: {ours[0]}, time over that without a scaler"
    return place.goal(name, "<=", limit, samples, (ours, without))


def part_of_copy(list_bytes: int) -> float | None:
    """Required fraction of the copy bandwidth for a list of this size, if any."""
    return next((part for least, part in PARTS_OF_COPY if list_bytes >= least), None)


def _speedup(speedups: dict[str, float], place: Place) -> float | None:
    return speedups.get(place.case) if place.tensors_per_launch == FEW_TENSORS else None


def _on_cpu(place: Place, provider: str, samples: Samples) -> list[Goal]:
    goals = []
    # A list outside of the cache is bound by memory, with torch, too, whose float32 op is as fast
    # as a copy: "faster" is a goal for a list alone.
    limit = CPU_SPEEDUPS.get(place.case)
    if limit is not None and (limit == 1.0 or place.list_name == place.case):
        over = ((UNSCALE, "torch"), (UNSCALE, provider))
        name = "unscale_, times as fast as torch"
        goals += place.goal(name, ">=", limit, samples, over, spread_counts=limit == 1.0)
    over = ((CHECK, provider), (UNSCALE, provider))
    name = "check_, time over that of unscale_"
    return goals + place.goal(name, "<=", 1.0, samples, over, spread_counts=True)
