"""Drop-in replacement for FSDP1's gradient scaler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from torch.distributed.fsdp import sharded_grad_scaler

from ampfast.scaler.grad_scaler import GradScaler

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

# torch's own class, before patch() gives its name to another.
TorchShardedGradScaler: Any = sharded_grad_scaler.ShardedGradScaler


# Only `scale` is torch's, whose class comes last in the method resolution order.
class ShardedGradScaler(GradScaler, TorchShardedGradScaler):  # type: ignore[misc]
    """`GradScaler` for FSDP1: agreement over all ranks, or the ranks of a process group.

    `scale` keeps the dtype of a loss, and float16 gradients, which FSDP's mixed precision makes,
    are unscaled. Unlike in torch's class, ranks agree with fused optimizers, too, flags are 0-dim,
    and `update` is that of `GradScaler`.

    Args:
        device: As for `GradScaler`, like the other arguments of torch's class.
        init_scale: Initial scale.
        backoff_factor: Factor after an overflow; before `growth_factor`, as in torch.
        growth_factor: Factor of growth.
        growth_interval: Iterations without overflow before the scale grows.
        enabled: If False, every method is a no-op.
        process_group: As for `GradScaler`, but None is the default group; the sharding group with
            HYBRID_SHARD.
        ours: Other keyword arguments of `GradScaler`.

    Source: torch/distributed/fsdp/sharded_grad_scaler.py.
    """

    _is_for_all = True
    # torch's default is the group at the import of its module.
    _base_arguments: ClassVar[dict[str, Any]] = {"process_group": None}

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: ProcessGroup | DeviceMesh | None = None,
        **ours: Any,
    ) -> None:
        torchs = (device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        super().__init__(*torchs, process_group=process_group, **{"allow_fp16": True, **ours})
