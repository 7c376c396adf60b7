"""Programs of the documentation and the FSDP2 example, on their ranks."""

from __future__ import annotations

import argparse
import runpy
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from support.processes import ROOT, python

EXAMPLE = ROOT / "examples" / "fsdp2.py"
STEPS = 20
WORLD = 4


def trained(scaler: str) -> str:
    train = runpy.run_path(str(EXAMPLE))["train"]
    return train(argparse.Namespace(scaler=scaler, steps=STEPS, device="cpu"))


@pytest.mark.sweep
def test_the_fsdp2_example_gives_the_same_with_both_scalers() -> None:
    done = python(EXAMPLE, "--steps", STEPS, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    assert ranks.run(trained, "torch") == [last, last]
    # Only one rank held the infinity.
    [planted] = [line for line in lines if line.startswith(f"step {STEPS // 2}:")]
    assert planted.endswith("skipped: [True, True]")


def recipe(title: str) -> list[float]:
    """Norms of a program on the page, on one of its ranks."""
    page = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
    section = page.split(f"## {title}")[1].split("```python")[1].split("```")[0]
    begin, end = dist.init_process_group, dist.destroy_process_group
    dist.init_process_group = dist.destroy_process_group = lambda *args, **kwargs: None
    try:
        names: dict[str, Any] = {}
        exec(section, names)
    finally:
        dist.init_process_group, dist.destroy_process_group = begin, end
    return [norm.item() for norm in names["norms"]]


def in_one_process() -> list[float]:
    """Norms of the same training without ranks, in float32."""
    experts = []
    for number in range(2):
        torch.manual_seed(1 + number)
        experts.append(torch.nn.Linear(64, 64))
    torch.manual_seed(0)
    dense = torch.nn.Linear(64, 64)
    params = [p for module in (dense, *experts) for p in module.parameters()]
    optimizer = torch.optim.AdamW(params, lr=1e-3)
    generators = [torch.Generator().manual_seed(rank) for rank in range(WORLD)]
    norms = []
    for _ in range(3):
        optimizer.zero_grad()
        for generator in generators:
            hidden = dense(torch.randn(32, 64, generator=generator))
            parts = zip(experts, hidden.chunk(2), strict=True)
            loss = torch.cat([expert(part) for expert, part in parts]).square().mean()
            (loss / WORLD).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(params, 1.0).item())
        optimizer.step()
    return norms


def test_the_recipe_for_mixtures_of_experts() -> None:
    expected = in_one_process()
    for seen in ranks.run(recipe, "Mixtures of experts", ranks=WORLD):
        assert seen == pytest.approx(expected, rel=1e-5)


def test_the_recipe_for_pipelines() -> None:
    torch.manual_seed(0)
    stages = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(2)]
    model, expected = torch.nn.Sequential(*stages), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        data, target = torch.randn(32, 64), torch.randn(32, 64)
        (model(data) - target).square().mean().backward()
        expected.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
    for seen in ranks.run(recipe, "Pipelines", ranks=2):
        assert seen == pytest.approx(expected, rel=1e-5)
