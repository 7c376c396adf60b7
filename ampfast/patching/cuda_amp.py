"""What `torch.cuda.amp.GradScaler` is while patched."""

from typing import Any

from torch.cuda.amp.grad_scaler import GradScaler as TorchGradScaler
from typing_extensions import deprecated

from ampfast.patching import amp


class _TorchBase(TorchGradScaler):
    """Torch's class as a base whose `__init__` takes the arguments of `torch.amp.GradScaler`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super(TorchGradScaler, self).__init__(*args, **kwargs)


class GradScaler(amp.GradScaler, _TorchBase):
    """`ampfast.GradScaler("cuda")` with the deprecated signature that has `init_scale` first.

    Args:
        init_scale: as of `torch.cuda.amp.GradScaler`, like the four that follow.
        ours: keyword arguments of `ampfast.GradScaler` that torch's class does not have.
    """

    _stands_for = TorchGradScaler

    @deprecated(TorchGradScaler.__init__.__deprecated__, category=FutureWarning)  # type: ignore[attr-defined]
    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        **ours: Any,
    ) -> None:
        super().__init__(
            "cuda",
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
            **ours,
        )
