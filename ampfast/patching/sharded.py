"""What FSDP's `ShardedGradScaler` is while patched."""

from typing import ClassVar

from ampfast import sharded
from ampfast.patching.stand_in import StandIn


class ShardedGradScaler(sharded.ShardedGradScaler, metaclass=StandIn):
    """`ampfast.ShardedGradScaler` under torch's name, equal to torch's class for isinstance."""

    _stands_for: ClassVar[type] = sharded.TorchShardedGradScaler
