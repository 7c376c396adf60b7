"""Python functions that a call enters, and a loop to call a scaler in."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

RANKS = str(Path(dist.__file__).parent)


class Loop:
    """Scaler and optimizer with new gradients for every iteration."""

    def __init__(
        self, scaler: Any, kind: str = "plain", *, parameters: int = 10, schedule: bool = False
    ) -> None:
        self.params = [torch.nn.Parameter(torch.randn(4)) for _ in range(parameters)]
        options: dict[str, Any] = {"fused": True} if kind == "fused" else {"foreach": False}
        self.optimizer = torch.optim.AdamW(self.params, **options)
        if schedule:
            self.schedule = torch.optim.lr_scheduler.ConstantLR(self.optimizer)
        self.scaler = scaler
        for _ in range(2):
            self.backward()
            scaler.step(self.optimizer)
            scaler.update()

    def backward(self) -> None:
        self.scaler.scale(torch.ones(()))
        for param in self.params:
            param.grad = torch.randn(4)


def frames_of(
    call: Callable[[], object], *, but: Callable[..., Any], of_triton: str | None = None
) -> list[str]:
    """Python functions entered by a call, without one of them, torch.distributed's, and callees.

    `of_triton` takes the place of the names of Triton's.
    """
    names: list[str] = []
    left_out: list[Any] = []
    code = getattr(but, "__func__", but).__code__

    def profile(frame: Any, event: str, _: object) -> None:
        if event == "call":
            if left_out or frame.f_code is code or frame.f_code.co_filename.startswith(RANKS):
                left_out.append(frame)
            else:
                is_tritons = of_triton and "/triton/" in frame.f_code.co_filename
                is_tritons = is_tritons and "/ampfast/" not in frame.f_code.co_filename
                names.append(of_triton or "" if is_tritons else frame.f_code.co_qualname)
        elif event == "return" and left_out:
            left_out.pop()

    gc.disable()  # what it ends may run Python
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return names[1:]  # `call` itself
