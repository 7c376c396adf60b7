"""GPU test tools that need no GPU: counts from a trace, and the fuzz."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "gpu"


def test_a_trace_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    import tracing

    def event(kind: str, name: str, begin: float, **more: Any) -> dict[str, Any]:
        return {"ph": "X", "cat": kind, "name": name, "ts": begin, "dur": 1.0, **more}

    counts = tracing.counts_in(
        [
            {"ph": "M", "name": "process_name"},
            event("cuda_runtime", "cudaDeviceSynchronize", 1.0),
            event("user_annotation", tracing.MARK, 10.0, dur=20.0),
            event("gpu_user_annotation", tracing.MARK, 12.0),
            event("cuda_runtime", "cudaLaunchKernel", 11.0),
            event("cuda_driver", "cuLaunchKernelEx", 13.0),
            event("kernel", "second", 40.0),
            event("kernel", "first", 14.0),
            event("cuda_runtime", "cudaStreamIsCapturing", 15.0),
            event("cuda_runtime", "cudaStreamSynchronize", 16.0),
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 17.0),
            event("gpu_memset", "Memset (Device)", 18.0),
            event("cuda_runtime", "cudaDeviceSynchronize", 50.0),
        ]
    )
    assert counts.kernels == ["first", "second"]
    assert counts.copies == ["Memcpy DtoH (Device -> Pinned)", "Memset (Device)"]
    assert counts.syncs == ["cudaStreamSynchronize"]


@pytest.mark.parametrize("kind", ["normal", "wide", "bits"])
def test_batches_find_wrong_kernels(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The GPU tests' fuzz passes with the CPU's kernels and fails with wrong ones."""
    import torch

    from ampfast.backends import cpu

    monkeypatch.syspath_prepend(str(FOLDER))
    import batches

    device = torch.device("cpu")
    arguments: dict[str, Any] = {"kind": kind, "is_scale": False, "seed": 3, "factor": 1 / 3}
    for seed in range(10):
        arguments["seed"] = seed
        batches.run_batch(cpu, batches.random_batch(seed, 20), device, **arguments)

    class Wrong:
        def __init__(self, name: str) -> None:
            self.name = name

        def run(self, grads: Any, work: Any) -> torch.Tensor:
            if self.name == "value" and work.write:
                work = work._replace(factor=work.factor * (1 + 1e-6))
            found = cpu.run(grads, work)
            if self.name == "flag" and not work.write:
                return 1 - found
            return torch.zeros(()) if self.name == "found_inf" and work.write else found

    for name in ("flag", "value", "found_inf"):
        with pytest.raises(AssertionError):
            batches.run_batch(Wrong(name), batches.random_batch(5, 40), device, **arguments)


@pytest.mark.parametrize("state", ["right", "wrong", "missing", "broken"])
def test_the_smoke_test_tells_a_wrong_backend(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], state: str
) -> None:
    import torch

    from ampfast.backends import cpu

    monkeypatch.syspath_prepend(str(FOLDER))
    import smoke

    class Kernels:
        def __getattr__(self, name: str) -> Any:
            return getattr(cpu, name)

        def run(self, grads: Any, work: Any) -> torch.Tensor:
            if state == "broken":
                raise RuntimeError("an illegal access")
            if state == "wrong" and work.write:
                work = work._replace(factor=work.factor * 2)
            return cpu.run(grads, work)

    monkeypatch.setattr(smoke, "SECONDS", 0.0)
    monkeypatch.setattr(smoke, "gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(smoke, "kernels_of", lambda *arguments: Kernels())
    reason = "it is missing" if state == "missing" else ""
    monkeypatch.setattr(smoke, "unavailable_reason", lambda name: reason)
    assert smoke.main("cuda") == (state != "right")
    said = capsys.readouterr().out
    assert said.startswith({"right": "cuda: 120 lists", "missing": "WRONG it"}.get(state, "WRONG"))
