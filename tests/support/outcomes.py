"""Outcomes of calls: value, exception and warnings."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ampfast import GradScaler
from ampfast.late_backward import WARNING
from support.comparison import assert_same
from support.scalers import TorchScaler

# The warning of a backward after unscale_, a deliberate difference.
_LATE = WARNING.split("{")[0]


@dataclass
class Outcome:
    """Value or exception of a call, and its warnings with the lines they point at."""

    value: Any = None
    error: BaseException | None = None
    warned: list[tuple[type[Warning], str, str, int]] = field(default_factory=list)

    def comparable(self) -> tuple[Any, ...]:
        """Type and text of the error, value and warnings; without what only ours say."""
        return (
            None if self.error is None else (type(self.error).__name__, str(self.error)),
            self.value,
            [each for each in self.warned if not each[1].startswith(_LATE)],
        )


def outcome(call: Callable[[], Any]) -> Outcome:
    """Runs `call` and records its value, exception and warnings."""
    result = Outcome()
    always = torch.is_warn_always_enabled()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # Else only one side would get torch's once-per-process warnings.
        torch.set_warn_always(True)
        try:
            result.value = call()
        except Exception as error:
            result.error = error
        finally:
            torch.set_warn_always(always)
    result.warned = [(w.category, str(w.message), w.filename, w.lineno) for w in caught]
    return result


def agree(scenario: Callable[[type[TorchScaler]], Any]) -> Outcome:
    """Runs a scenario with each class, asserts equal values, errors and warnings; returns ours."""
    ours, theirs = outcome(lambda: scenario(GradScaler)), outcome(lambda: scenario(TorchScaler))
    assert_same(ours.comparable(), theirs.comparable(), "outcome")
    return ours
