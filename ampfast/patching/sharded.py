"""What FSDP's `ShardedGradScaler` is while patched."""

from typing import ClassVar

from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchShardedGradScaler

from ampfast import fsdp
from ampfast.patching.stand_in import StandIn


class ShardedGradScaler(fsdp.ShardedGradScaler, metaclass=StandIn):
    """`ampfast.ShardedGradScaler` under torch's name, equal to torch's class for isinstance."""

    _stands_for: ClassVar[type] = TorchShardedGradScaler
