"""A scaler that scales nothing, and skips steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ampfast.grad_scaler import GradScaler

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from ampfast.spikes import Sigmas


class StepGuard(GradScaler):
    """Skips steps whose gradients have inf or NaN, and scales nothing; for bfloat16 and float32.

    `GradScaler(device, init_scale=1.0, dynamic=False)`: `scale` returns its argument, and gradients
    are only read, once. Clipping, counts, tracking and the agreement of ranks are `GradScaler`'s.

    Args:
        device: As for `GradScaler`.
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
        device: str = "cuda",
        *,
        enabled: bool = True,
        backend: str | None = None,
        allow_fp16: bool = False,
        process_group: ProcessGroup | DeviceMesh | None = None,
        track: str | None = None,
        skip_above: float | Sigmas | None = None,
        max_skips: int | None = None,
    ) -> None:
        super().__init__(
            *(device, 1.0),
            enabled=enabled,
            backend=backend,
            allow_fp16=allow_fp16,
            dynamic=False,
            process_group=process_group,
            track=track,
            skip_above=skip_above,
            max_skips=max_skips,
        )
