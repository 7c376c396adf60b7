"""What cannot be part of a CUDA graph, said before the capture is broken."""

import torch

__all__ = ["WARM_UP", "is_capturing", "refuse_capture"]

WARM_UP = "run one iteration without capturing first"


def is_capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    # A build of torch without CUDA has no answer to the second.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def refuse_capture(what: str, remedy: str = WARM_UP) -> None:
    """Raises RuntimeError, naming `what` and its `remedy`, if the current stream is captured."""
    # What is compiled runs later.
    if not torch.compiler.is_compiling() and is_capturing():
        raise RuntimeError(f"a CUDA graph cannot capture {what}: {remedy}")
