"""Small lists to time, and a GPU's path by torch's ops, which may be wrong in one way."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from support.comparison import replaced
from support.launchers import ReferenceLauncher

from ampfast import backends
from ampfast.backends.gpu import DeviceKernels
from benchmarks.cases import GradCase
from benchmarks.timing import Effort, HostQueue, Setting

CPU = torch.device("cpu")
BRIEF = Effort(quick=True, comparison_s=0.01, sample_s=0.0001)
SMALL = GradCase("small", ((3, 5), (7,), (), (0,), (1025,)))
ON_CPU, AS_ON_GPU = Setting(CPU, BRIEF), Setting(CPU, BRIEF, HostQueue())


@dataclass
class Launcher(ReferenceLauncher):
    wrong: str = ""

    def multi_tensor(self, work, table, segment, is_last) -> None:
        if self.wrong == "value" and work.write:
            work = replaced(work, factor=torch.nextafter(work.factor, 2 * work.factor))
        super().multi_tensor(work, table, segment, is_last)
        if self.wrong in ("finds", "finds nothing"):
            work.found_inf.fill_(self.wrong == "finds")
        if self.wrong == "norm" and work.sums is not None:
            work.sums[0] *= 1 + 1e-5
        if self.wrong == "no update" and work.ending is not None:
            work.ending.growth_tracker.zero_()


def launch_by(monkeypatch, wrong=""):
    """Gives each backend kernels over tables."""
    kernels = DeviceKernels(Launcher(wrong=wrong))
    chosen = SimpleNamespace(kernels_for=lambda device: kernels, name_for=lambda device: "cpu")
    monkeypatch.setattr(backends, "choose", lambda name=None: chosen)
