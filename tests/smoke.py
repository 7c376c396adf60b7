"""Smoke test of an installed wheel with torch alone: `python -I tests/smoke.py libcuda.so.1`.

The argument is a stand-in for CUDA's driver, tools/ptx_emulator.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch

import ampfast
from ampfast.backends import cuda


def demand(what: str, is_so: bool) -> None:
    """Prints a line, and exits unless the condition holds."""
    print(f"{'ok  ' if is_so else 'NOT '} {what}")
    if not is_so:
        raise SystemExit(1)


def trained(scaler: torch.amp.GradScaler, fused: bool) -> tuple[list[torch.Tensor], list[float]]:
    """Parameters and scales after a few steps, one of which overflows."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    scales = []
    for step in range(6):
        data = torch.randn(8, 16) * (torch.inf if step == 2 else 1.0)
        optimizer.zero_grad()
        scaler.scale(model(data).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return [param.detach() for param in model.parameters()], scales


def said(*arguments: str) -> str:
    """Output of `python -m ampfast`."""
    command = [sys.executable, "-I", "-m", "ampfast", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> None:
    """Checks metadata, kernels, training and commands."""
    checkout = Path(__file__).resolve().parents[1]
    demand(
        f"it is the installed package: {ampfast.__file__}",
        Path(ampfast.__file__).resolve().parent != checkout / "ampfast",
    )
    version = metadata.version("ampfast")
    demand(f"version {version} is the package's own", version == ampfast.__version__)
    core = Path(ampfast._C.__file__).parent.name
    minor = ".".join(torch.__version__.split(".")[:2])
    demand(f"the core in {core} is for torch {torch.__version__}", core == f"torch{minor}")
    on_cpu = ampfast.backends.default_for(torch.device("cpu"))
    demand(f"gradients on the CPU get the backend {on_cpu!r}", on_cpu == "cpu")

    demand(f"its CUDA kernels are there: {cuda.KERNELS}", not cuda.missing())
    driver = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
    cuda.load(torch.device("cpu"))
    found = driver.ptx_emulator_calls(b"cuModuleGetFunction")
    demand(f"a driver is asked for {found} kernels of that image", found > 0)

    for fused in (False, True):
        ours = trained(ampfast.GradScaler("cpu", growth_interval=2), fused)
        theirs = trained(torch.amp.GradScaler("cpu", growth_interval=2), fused)
        are_equal = ours[1] == theirs[1] and all(map(torch.equal, ours[0], theirs[0]))
        demand(f"training is equal to that with torch's scaler, scales {ours[1]}", are_equal)
        demand("a step was skipped", any(b < a for a, b in zip(ours[1], ours[1][1:], strict=False)))

    original = torch.amp.GradScaler
    with ampfast.patch():
        demand(
            "patch() takes the place of torch's",
            isinstance(torch.amp.GradScaler("cpu"), ampfast.GradScaler),
        )
    demand("unpatch() gives it back", torch.amp.GradScaler is original)

    demand("`--version` runs", ampfast.__version__ in said("--version"))
    facts = json.loads(said("info"))
    demand("`info` runs", facts["devices"][0]["backend"] == "cpu")
    demand("`check` finds no difference", "Nothing differs." in said("check"))


if __name__ == "__main__":
    main()
