"""The passes of a scaler: every touch of gradients is one of these calls into the core."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ampfast.backends.core import Aim, Clip, Factor, Finder, Pass, Use
from ampfast.backends.scalars import inverse, joint_flag
from ampfast.clip.norm_history import ClipLimit, NormHistories, Sigmas
from ampfast.gradients import Flags, Turn

if TYPE_CHECKING:
    from ampfast.distributed import Ranks
    from ampfast.scaler.loss_scale import LossScale

# Members of enums, which are slow to read from a class.
AS_THEY_ARE, SCALED, DEFERRED = Use
MEASURE, STEP, CLIP, CLIP_DECIDED = Aim


class Passes:
    """What a scaler does with the gradients of optimizers: find, run, agree, decide.

    Args:
        scaler: The scaler, of which it takes the kernels, the ranks, the tables of tracking, the
            state of the scale, the histories of norms and the settings as they are now.

    Attributes:
        agree: Gives a turn, which has an agreement until then, the flags of all ranks.
        is_guard: Whether the scale is 1 forever, so that nothing is multiplied or divided by it.
        measures: Whether a step takes the norm, which is kept or compared with `skip_above`.
    """

    def __init__(self, scaler: Any) -> None:
        keeps_norms, self._skip_above = scaler._track == "norms", scaler._skip_above
        self.measures = keeps_norms or self._skip_above is not None
        self._ranks: Ranks = scaler._ranks
        self._loss_scale: LossScale = scaler._loss_scale
        self._histories: NormHistories = scaler._norm_histories
        self.is_guard, self._is_alone = scaler._is_guard, scaler._ranks.is_alone
        self._scale: Tensor | None = None
        self._unscaling = self._dividing = Pass(False, Factor.NONE)
        self._finder = finder = Finder(scaler._choice)
        self.agree = finder.agree
        finder.ranks = scaler._ranks
        finder.tracking = None if scaler._track is None else scaler._reports
        finder.has_group, finder.keeps_norms = not self._is_alone, keeps_norms
        finder.allow_fp16 = scaler._allow_fp16

    def _know(self, scale: Tensor | None) -> None:
        """Makes the passes of a scale, unless they are known; None if the scaler is disabled."""
        if scale is None:
            # A disabled scaler needs no process group.
            self._finder.has_group = not self._is_alone and dist.is_initialized()
        if scale is None or self._scale is scale:
            return
        divisor = scale.detach().float()
        how, factor = Factor.TIMES_RECIPROCAL, scale
        if scale.dtype is not torch.float32:
            how, factor = Factor.TIMES, inverse(scale)
        self._unscaling = Pass(True, how, factor)
        if self.is_guard:
            self._unscaling = Pass(False, Factor.NONE)
        self._dividing = Pass(False, Factor.DIVIDE, divisor)
        words = self._loss_scale.words_on(scale.device)
        self._finder.set_scale(scale, words, self._unscaling, self._dividing)
        # The factors of another scale are copies.
        self._scale = scale if scale.dtype is torch.float32 else None

    def unscale(self, optimizer: Any, turn: Turn, scale: Tensor) -> None:
        """Unscales an optimizer's gradients, whose turn gets flags on which all ranks agree."""
        if self._scale is not scale:
            self._know(scale)
        if self.measures:
            self.norm([optimizer], [turn], [SCALED], self._skip_above, scale)
            return
        self._finder.take(optimizer, turn, self._unscaling)

    def check(self, optimizer: Any, turn: Turn, work: Pass, scale: Tensor) -> Flags:
        """Runs a pass that divides, also float16 gradients; the stage of the turn stays."""
        self._know(scale)
        flags: Flags = self._finder.take(optimizer, turn, work)
        return flags

    def check_by_scale(self, optimizer: Any, turn: Turn, scale: Tensor) -> Any:
        """Checks still scaled gradients; returns the scale by which the optimizer divides them.

        Args:
            optimizer: The optimizer.
            turn: Its turn.
            scale: The scale, times that of the optimizer if it has one.
        """
        if self._scale is not scale:
            self._know(scale)
        if self.measures and not turn.is_measured:
            self.norm([optimizer], [turn], [DEFERRED], self._skip_above, scale)
            # As nothing was written, a step that raises may be repeated, and checks again.
            divisor, turn.divisor, turn.is_measured = turn.divisor, None, True
            return divisor
        before = turn["found_inf_per_device"] if turn.may_spike else None
        flags: Flags = self._finder.take(optimizer, turn, self._dividing)
        if before:
            turn["found_inf_per_device"] = joint_flags(before, flags)
        return scale.clone() if turn.grad_scale is None else turn.grad_scale

    def agree_beside_hooks(self, optimizer: Any, turn: Turn, scale: Tensor | None) -> Flags:
        """Returns the flags of all ranks, after a hook has decided on this one's."""
        turn.agreement = self._ranks.agreement_on(optimizer)
        if turn.agreement is not None and scale is not None:
            self._know(scale)
            self.agree(turn)
        flags: Flags = turn["found_inf_per_device"]
        return flags

    def run_hook(
        self, optimizer: Any, turn: Turn, work: Pass, allow_fp16: bool, scale: Tensor | None
    ) -> Flags:
        """Unscales as torch's method that subclasses override."""
        if scale is not None:
            self._know(scale)
        flags: Flags = self._finder.run(optimizer, turn, work, allow_fp16)
        return flags

    def norm(
        self,
        optimizers: list[Any],
        turns: list[Turn],
        uses: list[Use],
        highest: float | Sigmas | None,
        scale: Any,
        aim: Aim = STEP,
        limit: float | ClipLimit = math.inf,
        order: float = 2.0,
    ) -> Tensor:
        """Takes the norm of gradients, and unscales or clips them or lets the steps clip.

        Args:
            optimizers: The optimizers.
            turns: Their turns.
            uses: How each uses its gradients.
            highest: The largest norm of a step that is taken, or None.
            scale: The scale, or None if they are not scaled.
            aim: What the norm is taken for.
            limit: The limit of the norm.
            order: The order of the norm.
        """
        if scale is None or self._scale is not scale:
            self._know(scale)
        follows = limit if isinstance(limit, float) else self._follower(turns[0], limit)
        history: Any = None
        rule: Any = None
        if isinstance(highest, Sigmas):
            history = self._histories.of(turns[0].record, highest, scale.device)
            rule = highest.sigmas, history.words
        elif highest is not None and highest < math.inf:
            rule = highest, None
        norm: Tensor = self._finder.norm(optimizers, turns, uses, aim, follows, order, rule)
        if scale is not None:
            self._loss_scale.norms.append((tuple(map(id, optimizers)), norm, order))
        if highest is not None:
            self._histories.is_compared = True
        if rule is not None:
            for turn in turns:
                turn.may_spike = True
            if history is not None:
                history.check()
        return norm

    def _follower(self, turn: Turn, rule: ClipLimit) -> Any:
        """Decides a clip by a limit that follows the norms of an optimizer's steps."""

        def follow(clip: Clip, found_inf: Tensor | None) -> None:
            self._histories.of(turn.record, rule, clip.norm.device).follow(clip, found_inf)

        return follow


def joint_flags(before: Flags, flags: Flags) -> Flags:
    """Flags that are set where one of two checks has set them, in new tensors."""
    joint = dict(flags)
    for device, flag in before.items():
        joint[device] = joint_flag([flag, flags.get(device, flag)], flag.device)
    return joint
