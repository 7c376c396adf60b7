"""Simulated device: a queue on the host, launches by torch's ops, and small lists to time."""

from __future__ import annotations

import torch
from support.reference_launcher import chunks_of

from ampfast.backends import cpu
from ampfast.backends.core import Factor
from ampfast.backends.gpu import DeviceKernels
from benchmarks import device_time
from benchmarks.cases import GradCase
from benchmarks.harness import Effort, Setting

CPU = torch.device("cpu")
BRIEF = Effort(quick=True, comparison_s=0.01, sample_s=0.0001)
SMALL = GradCase("small", ((3, 5), (7,), (), (0,), (1025,)))


def on(queue=None):
    return Setting(CPU, BRIEF, queue)


class HostQueue(device_time.HostQueue):
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


class TableLauncher:
    """Launcher that reads tables and calls torch's ops."""

    def is_capturing(self) -> bool:
        return False

    def multi_tensor(self, work, table, segment, is_last) -> None:
        tensors = [chunk for _, chunk in chunks_of(table.words, segment)]
        if work.how is Factor.NONE:
            inverse = torch.ones(())
        elif work.how is Factor.TIMES_RECIPROCAL:
            inverse = work.factor.double().reciprocal().float()
        else:
            inverse = work.factor
        targets = tensors if work.write else [tensor.clone() for tensor in tensors]
        if work.sums is not None:
            wide = [tensor.double() * inverse for tensor in tensors]
            work.sums[0] = sum(tensor.square().sum() for tensor in wide)
        torch._amp_foreach_non_finite_check_and_unscale_(targets, work.found_inf, inverse)
        if work.coefficient is not None:
            torch._foreach_mul_(targets, work.coefficient.to(targets[0].dtype))
        if work.ending is not None:
            scale, growth_tracker, _, *factors = work.ending.update[:6]
            torch._amp_update_scale_(scale, growth_tracker, work.found_inf, *factors)

    def clip_coefficient(self, clip) -> None:
        cpu.clip(clip)

    def update_scale(self, update) -> None:
        raise NotImplementedError("no path that is measured launches this alone")


def kernels_over_tables(name: str, device: torch.device) -> DeviceKernels:
    """Stand-in for `providers.device_kernels`."""
    return DeviceKernels(TableLauncher())
