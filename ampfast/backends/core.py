"""The compiled core, whose names are listed in _C.pyi, and what its kernels are given."""

from __future__ import annotations

from enum import IntEnum
from types import SimpleNamespace

import torch

_REMEDY = (
    "build it against the torch that is installed: `make build` in a checkout, or `pip install "
    "--no-build-isolation .` and start Python outside of the checkout, whose own folder hides what "
    "was installed"
)


def _require_torch(built_for: str, here: str) -> None:
    """Raises ImportError unless torch's version equals the build's, except for the patch number.

    C++ classes may differ between minor versions, and some mismatched builds still load.
    """
    if built_for.split(".")[:2] != here.split(".")[:2]:
        raise ImportError(
            f"ampfast's compiled core is for torch {built_for}, and this is torch {here}; {_REMEDY}"
        )


try:
    # `from ampfast import _C` would report a circular import if there is no core.
    import ampfast._C as _C
    from ampfast._C import *  # noqa: F403
except ImportError as error:
    raise ImportError(f"ampfast's compiled core cannot be loaded ({error}); {_REMEDY}") from error
_require_torch(_C.TORCH, torch.__version__)

compiled = _C

# The list of tensors on a device; None if one of them is irregular or of another type.
list_of = _C.GradList.of

# Words of a scaler's state, and of the norms of the steps taken, by name, as in csrc/scale.h.
state_layout = SimpleNamespace(**_C.state_layout)
norm_layout = SimpleNamespace(**_C.norm_layout)


class Factor(IntEnum):
    """How an optimizer applies the factor of a pass, which decides whether a value is finite."""

    NONE = 0
    TIMES = 1
    TIMES_RECIPROCAL = 2  # a float64 one, rounded to float32
    DIVIDE = 3


class Use(IntEnum):
    """How an optimizer's gradients are used in a norm."""

    AS_THEY_ARE = 0
    SCALED = 1
    DEFERRED = 2  # its step divides by the scale and the clip coefficient


class Aim(IntEnum):
    """What a norm is taken for."""

    MEASURE = 0  # gradients are only read
    STEP = 1  # they are unscaled, or checked
    CLIP = 2
    CLIP_DECIDED = 3  # a hook has decided whether they are finite
