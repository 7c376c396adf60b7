"""Puts ampfast behind the names that torch has for its gradient scaler, and takes it away again."""

from ampfast.patching.names import Patch, patch, unpatch

__all__ = ["Patch", "patch", "unpatch"]
