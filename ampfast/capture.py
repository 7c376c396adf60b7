"""What cannot be part of a CUDA graph, said before the capture is broken."""

import torch

__all__ = ["refuse_capture"]


def refuse_capture(what: str, remedy: str) -> None:
    """Raises RuntimeError, naming `what` and its `remedy`, if the current stream is captured."""
    if torch.compiler.is_compiling():
        return  # what is compiled runs later
    # A build of torch without CUDA has no answer to the second.
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"a CUDA graph cannot capture {what}: {remedy}")
