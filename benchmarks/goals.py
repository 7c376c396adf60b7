"""Goals: largest time of a row, as a fraction of another row's."""

from __future__ import annotations

from .providers import CHECK, COPY, HALF_COPY, NORM, UNSCALE, UPDATE
from .results import Goal
from .timing import WITHOUT, Timed, dtype_name

WHAT = (
    "Limits that this project has set itself, most of them beyond “not slower than torch”. A goal "
    "that was not met is not a loss against torch."
)
# By subject, what its goals are and why their limits are those.
KINDS = {
    "loops": "The scaler's own time in a training loop, over torch's. torch's time grows with each "
    "parameter, ours hardly: hence 0.35 to 0.5 for 10 parameters, 0.4 for 62 and 0.36 for 148, but "
    "0.6 for 6 large ones, where the memory limits both. A loop with a feature that torch's scaler "
    "lacks may take up to 1.3 times torch's plain loop.",
    "host": "Warm calls over tiny gradients, over torch's. torch takes most of a microsecond of "
    "Python for each parameter, a walk in C++ a twentieth of that: hence 0.04 for 1,000. Fixed "
    "costs weigh more in a short list: hence 0.06 for 160 and 0.15 for 10.",
    "clip": "Clipping over torch's two calls, which move the gradients five times. Ours move them "
    "three times, or once with in_place=False, hence at most 1/1.5 and 1/3.5 for long lists. In "
    "short lists calls cost more than bytes, hence 1/5.",
    "training": "A whole step over the same step without a scaler. A user should not feel a "
    "scaler, hence 1.05 on a CPU and 1.02 on a GPU, little more than the noise of a run.",
    "kernels": "One pass over a list. No pass may be slower than torch's op, nor a check than "
    "unscaling, hence 1; many short tensors, where torch pays for each, are to take 1/2.5 "
    "of its time, and a check 1/4. For lists beyond every cache the yardstick is a check, "
    "which only reads: a norm reads as much, at 85% of its bandwidth or 75% in 16 bits; "
    "unscaling moves twice as much, at 1.4 or 1.3 times its bandwidth. On a GPU the "
    "yardstick is a copy, at 85% to 95% of its bandwidth.",
    "steps": "Whole steps on a GPU, over torch's. For a fused optimizer ours reads the gradients "
    "where torch's reads and writes them, hence half of the time; with 1,000 parameters or more "
    "the host's part is to be a fifth.",
    "tracking": "A pass that marks overflows, over the same without, on a GPU. Marks add no byte, "
    "hence 1.1; in 16 bits, where a byte takes more arithmetic, 1.5.",
    "masters": "A step with master weights over the same by torch's foreach calls. Ours casts "
    "and unscales in one pass, torch in two, hence 1/1.3 for large lists and less with a clip; in "
    "short lists calls cost more than bytes, hence 1/2 and 1/3.",
    "decisive": "Some of the goals of kernels, clip, host and training, over few lists.",
}
# Over torch's op on a CPU, of a list alone; every other list must not be slower.
CPU_KERNELS = {(UNSCALE, "1000x1k"): 1 / 2.5, (CHECK, "1000x1k"): 1 / 4}
# Over a check, of lists that no cache holds: a pass at the speed of memory takes as long as its
# bytes do. By bytes of an element.
CPU_LARGE = ("bert_base", "bert_large", "one_64m")
CPU_OVER_CHECK = {
    NORM: {4: 1 / 0.85, 2: 1 / 0.75},
    UNSCALE: {4: 2 / 1.4, 2: 2 / 1.3},
}
# Check and unscaling over a copy on a GPU, from so many bytes on.
GPU_OVER_COPY = ((1_000_000_000, (1 / 0.95, 1 / 0.92)), (256_000_000, (1 / 0.85, 1 / 0.85)))
# Over torch's op on a GPU.
GPU_MODELS = {"bert_large": 1 / 1.15}
# Over a torch with at most this many tensors per launch: device time, the same with the scale
# update in the launch, and host time of a whole step.
FEW_TENSORS = 110
GPU_KERNELS = {"1000x1k": 1 / 2, "10000x256": 1 / 8}
GPU_WITH_UPDATE = {"1000x1k": 1 / 2}
GPU_HOST = 1 / 5
# Device time of a step whose optimizer unscales, over torch's.
FUSED_SHARE = 0.5
# Least bytes of the lists that a GPU has goals for in tracking and clipping.
LARGE = 256_000_000
# A pass with tracking over the same without.
TRACKING = {"float32": 1.10, "float16": 1.5, "bfloat16": 1.5}
TRACKED_CHECKS = (CHECK, "check, overflow")
TRACKED_UNSCALES = (UNSCALE, "unscale, overflow")
# Over torch's two calls, in float32 on a CPU: one call, in place and deferred.
CPU_CLIP = {
    "1000x1k": (1 / 5, 1 / 5),
    "bert_base": (1 / 1.5, 1 / 3.5),
    "bert_large": (1 / 1.5, 1 / 3.5),
}
GPU_CLIP = (1 / 1.6, 1 / 4)
# A step with master weights, without the optimizer's own, over torch's foreach copies and scaler;
# plain and clipped.
MASTER_WEIGHTS = {
    "1000x4": (1 / 3, None),
    "1000x1k": (1 / 2, 1 / 3),
    "resnet50": (1 / 1.3, None),
    "bert_base": (1 / 1.3, 1 / 1.8),
}
# A training step over the same without a scaler.
TRAINING = {"cpu": 1.05, "cuda": 1.02}

CLIP = "clip"
DEFERRED_CLIP = "clip, in_place=False"
CLIPS = (CLIP, DEFERRED_CLIP)
MASTERS = "master weights"
CLIPPED_MASTERS = "master weights, clip"
STEP = "full step"
FUSED_STEP = "full step, fused"


def of_kernels(timed: Timed, provider: str) -> list[Goal]:
    """Goals for the calls over one list."""
    check, unscale = (CHECK, provider), (UNSCALE, provider)
    if timed.tensors_per_launch is None:
        goals = []
        for ours in (check, unscale):
            # A list outside of the cache is bound by memory, with torch, too, whose float32 op is
            # as fast as a copy: "faster" is a goal for a list alone.
            limit = CPU_KERNELS.get((ours[0], timed.case.name)) if timed.lists == 1 else None
            goals += timed.goal(ours, (ours[0], "torch"), limit or 1.0, lenient=limit is None)
        if timed.case.name in CPU_LARGE:
            for call, limits in CPU_OVER_CHECK.items():
                limit = limits.get(timed.dtype.itemsize)
                if limit is not None:
                    goals += timed.goal((call, provider), check, limit, lenient=True)
        return goals + timed.goal(check, unscale, 1.0, lenient=True)
    goals = []
    over_copy = next((limits for least, limits in GPU_OVER_COPY if timed.list_bytes >= least), ())
    many = _many_launches(GPU_KERNELS, timed)
    known = GPU_MODELS.get(timed.case.name) if many is None else many
    copies = zip((HALF_COPY, COPY), over_copy, strict=False)
    for ours, (copy, limit) in zip((check, unscale), copies, strict=False):
        goals += timed.goal(ours, (copy, "torch"), limit)
    for ours in (check, unscale):
        limit = 1.0 if known is None else known
        goals += timed.goal(ours, (ours[0], "torch"), limit, lenient=known is None)
    if (limit := _many_launches(GPU_WITH_UPDATE, timed)) is not None:
        goals += timed.goal((UPDATE, provider), (UNSCALE, "torch"), limit)
    return goals


def of_steps(timed: Timed, provider: str) -> list[Goal]:
    """Goals for whole steps; none on a CPU, where the subject "host" has them."""
    if timed.tensors_per_launch is None:
        return []
    goals = timed.goal((FUSED_STEP, provider), (FUSED_STEP, "torch"), FUSED_SHARE)
    if _many_launches(GPU_KERNELS, timed) is not None:
        for call in (STEP, FUSED_STEP):
            goals += timed.goal((call, provider), (call, "torch"), GPU_HOST, host=True)
    return goals


def of_tracking(timed: Timed, provider: str) -> list[Goal]:
    """Goals for passes that mark overflows; none on a CPU."""
    limit = TRACKING.get(dtype_name(timed.dtype))
    on_cpu = timed.tensors_per_launch is None
    if on_cpu or limit is None or timed.list_bytes < LARGE:
        return []
    pairs = ((TRACKED_CHECKS[1], CHECK), (TRACKED_UNSCALES[1], UNSCALE))
    return [g for a, b in pairs for g in timed.goal((a, provider), (b, provider), limit)]


def of_clipping(timed: Timed, provider: str) -> list[Goal]:
    """Goals for clipping; those on a CPU are for float32."""
    limits: tuple[float, ...]
    if timed.tensors_per_launch is None:
        limits = CPU_CLIP.get(timed.case.name, ()) if timed.dtype.itemsize == 4 else ()
    else:
        limits = GPU_CLIP if timed.list_bytes >= LARGE else ()
    calls = zip(CLIPS, limits, strict=False)
    return [g for c, limit in calls for g in timed.goal((c, provider), (CLIP, "torch"), limit)]


def of_masters(timed: Timed, provider: str) -> list[Goal]:
    """Goals for steps with master weights, over the foreach way."""
    limits = zip((MASTERS, CLIPPED_MASTERS), MASTER_WEIGHTS.get(timed.case.name, ()), strict=False)
    return [
        goal
        for call, limit in limits
        if limit is not None
        for goal in timed.goal((call, provider), (call, "torch"), limit)
    ]


def of_training(timed: Timed, ours: tuple[str, str], call: str) -> list[Goal]:
    """Goals for whole training steps, over the same call without a scaler."""
    limit = TRAINING["cpu" if timed.tensors_per_launch is None else "cuda"]
    return timed.goal(ours, (call, WITHOUT), limit)


def _many_launches(limits: dict[str, float], timed: Timed) -> float | None:
    return limits.get(timed.case.name) if timed.tensors_per_launch == FEW_TENSORS else None
