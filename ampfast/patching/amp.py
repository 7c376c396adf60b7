"""What `torch.amp.GradScaler` is while patched."""

from typing import ClassVar

from torch.amp.grad_scaler import GradScaler as TorchGradScaler

from ampfast import grad_scaler
from ampfast.patching.stand_in import StandIn


# A class of its own rather than ampfast.GradScaler itself: so unpatch() can tell a name taken from
# torch from one taken from ampfast, and isinstance(x, ampfast.GradScaler) means what it says.
class GradScaler(grad_scaler.GradScaler, metaclass=StandIn):
    """`ampfast.GradScaler` under torch's name, equal to `torch.amp.GradScaler` for isinstance."""

    _stands_for: ClassVar[type] = TorchGradScaler
