"""A scaler that scales nothing, and skips steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch.cuda.amp.common import amp_definitely_not_available

from ampfast.scaler.grad_scaler import GradScaler

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from ampfast.clip.norm_history import Sigmas


class StepGuard(GradScaler):
    """Skips steps whose gradients have inf or NaN, and scales nothing; for bfloat16 and float32.

    `GradScaler(init_scale=1.0, dynamic=False)` that needs no device: its state is made where the
    first gradients are (or the first parameters, or the ranks of a group, if there are none). It is
    never disabled for want of CUDA. `scale` returns its argument and need not be called. Gradients
    are only read, once; an optimizer without gradients steps, as without a guard. Clipping, counts,
    tracking and the agreement of ranks are `GradScaler`'s.

    Args:
        device: Device type, which a mesh of `process_group` must have then; None for any.
        enabled: As for `GradScaler`.
        backend: As for `GradScaler`.
        allow_fp16: As for `GradScaler`.
        process_group: As for `GradScaler`.
        track: As for `GradScaler`.
        skip_above: As for `GradScaler`.
        max_skips: As for `GradScaler`.

    Raises:
        TypeError: As `GradScaler`.
        ValueError: As `GradScaler`.
        RuntimeError: As `GradScaler`.
    """

    def __init__(
        self,
        device: str | None = None,
        *,
        enabled: bool = True,
        backend: str | None = None,
        allow_fp16: bool = False,
        process_group: ProcessGroup | DeviceMesh | None = None,
        track: str | None = None,
        skip_above: float | Sigmas | None = None,
        max_skips: int | None = None,
    ) -> None:
        if device == "cuda" and amp_definitely_not_available():
            device = None  # for which torch's constructor would disable it
        super().__init__(
            *(cast(str, device), 1.0),
            enabled=enabled,
            backend=backend,
            allow_fp16=allow_fp16,
            dynamic=False,
            process_group=process_group,
            track=track,
            skip_above=skip_above,
            max_skips=max_skips,
        )
