"""Simulated device: a queue on the host, launches by torch's ops, and small lists to time."""

from __future__ import annotations

import torch
from support.reference_launcher import ReferenceLauncher

from ampfast.backends.gpu import DeviceKernels
from benchmarks import timing
from benchmarks.cases import GradCase
from benchmarks.timing import Effort, Setting

CPU = torch.device("cpu")
BRIEF = Effort(quick=True, comparison_s=0.01, sample_s=0.0001)
SMALL = GradCase("small", ((3, 5), (7,), (), (0,), (1025,)))


def on(queue=None):
    return Setting(CPU, BRIEF, queue)


class HostQueue(timing.HostQueue):
    """The same, which records its calls."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def synchronize(self) -> None:
        self.asked.append("synchronize")

    def stamp(self) -> float:
        self.asked.append("stamp")
        return super().stamp()

    def hold(self, seconds: float) -> None:
        self.asked.append(f"hold {seconds * 1e6:.0f} us")

    def capture(self, body):
        self.asked.append("capture")
        return super().capture(body)


class NoGraphs(HostQueue):
    def capture(self, body):
        raise RuntimeError("operation not permitted")


class Launcher(ReferenceLauncher):
    """Launches by torch's ops, and wrong in one way."""

    def __init__(self, wrong: str = "") -> None:
        super().__init__()
        self.wrong = wrong

    def multi_tensor(self, work, table, segment, is_last) -> None:
        if self.wrong == "writes nothing" and work.write:
            return
        if self.wrong == "value" and work.write:
            work = work._replace(factor=torch.nextafter(work.factor, 2 * work.factor))
        super().multi_tensor(work, table, segment, is_last)
        if self.wrong == "finds":
            work.found_inf.fill_(1)
        if self.wrong == "finds nothing":
            work.found_inf.fill_(0)
        if self.wrong == "norm" and work.sums is not None:
            work.sums[0] *= 1 + 1e-5
        if self.wrong == "no update" and work.ending is not None:
            work.ending.update.growth_tracker.zero_()

    def clip_coefficient(self, clip) -> None:
        super().clip_coefficient(clip)
        if self.wrong == "coefficient":
            clip.coefficient.mul_(0.5)


def kernels_over_tables(wrong: str = ""):
    """Stand-in for `providers.device_kernels`."""
    return lambda name, device: DeviceKernels(Launcher(wrong))
