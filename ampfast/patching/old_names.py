"""The stand-ins of torch's deprecated classes, which take `init_scale` first."""

from typing import Any

from typing_extensions import deprecated

from ampfast.patching import amp

__all__ = ["stand_in"]


def stand_in(torch_class: Any, device: str, module: str) -> type[amp.GradScaler]:
    """Returns the class that `module` offers as `GradScaler`, in the place of `torch_class`."""

    class TorchBase(torch_class):  # type: ignore[misc]
        """Torch's class as a base whose `__init__` takes the arguments of torch.amp's."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super(torch_class, self).__init__(*args, **kwargs)

    class GradScaler(amp.GradScaler, TorchBase):
        """`ampfast.GradScaler` for one device type, with the signature that has no device.

        Args:
            init_scale: as of torch's class, like the four that follow.
            ours: keyword arguments of `ampfast.GradScaler` that torch's class does not have.
        """

        _stands_for = torch_class

        @deprecated(torch_class.__init__.__deprecated__, category=FutureWarning)
        def __init__(
            self,
            init_scale: float = 2.0**16,
            growth_factor: float = 2.0,
            backoff_factor: float = 0.5,
            growth_interval: int = 2000,
            enabled: bool = True,
            **ours: Any,
        ) -> None:
            if "device" in ours:
                raise TypeError("GradScaler.__init__() got an unexpected keyword argument 'device'")
            super().__init__(
                device,
                init_scale=init_scale,
                growth_factor=growth_factor,
                backoff_factor=backoff_factor,
                growth_interval=growth_interval,
                enabled=enabled,
                **ours,
            )

    # By which pickle finds it, and checkpoints are looked up.
    GradScaler.__module__, GradScaler.__qualname__ = module, "GradScaler"
    # By which Python calls it in an error.
    signature = GradScaler.__init__.__wrapped__  # type: ignore[attr-defined]
    signature.__qualname__ = "GradScaler.__init__"
    return GradScaler
