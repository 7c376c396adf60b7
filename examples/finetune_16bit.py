"""Fine-tunes a small transformer in float32 and in 16 bit, with float32 master weights and without.

The transformer of language.py is trained in float32 first, and then on at small learning rates. It
prints the loss on files that it has not seen, one row for each way:

    python examples/finetune_16bit.py --picture finetune_16bit.svg  # a picture needs matplotlib
"""

from __future__ import annotations

import argparse
import copy
import math
from pathlib import Path

import torch
from language import Writer, library, windows
from torch import Tensor, nn

import ampfast

# Dtype of the parameters, and whether they have master weights.
WAYS = {
    "fp32": (torch.float32, False),
    "bf16": (torch.bfloat16, False),
    "bf16 + masters": (torch.bfloat16, True),
    "fp16": (torch.float16, False),
    "fp16 + masters": (torch.float16, True),
}
RATES = (1e-5, 1e-4)

Batch = tuple[Tensor, Tensor]


def drawn(text: Tensor, batches: int, seed: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [windows(text, generator) for _ in range(batches)]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    characters, following = (part.to(next(model.parameters()).device) for part in batch)
    return nn.functional.cross_entropy(model(characters).float().flatten(0, 1), following.flatten())


@torch.no_grad()
def mean_loss(model: nn.Module, batches: list[Batch]) -> float:
    return sum(loss_of(model, batch).item() for batch in batches) / len(batches)


def fine_tuned(
    trained: nn.Module, way: str, rate: float, batches: list[Batch], unseen: list[Batch]
) -> list[tuple[int, float]]:
    """Returns steps and the loss on unseen batches after them, ten times, or until it is NaN."""
    dtype, masters = WAYS[way]
    model = copy.deepcopy(trained).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    if masters:
        optimizer = ampfast.master_weights_(optimizer)
    scaler = ampfast.GradScaler(
        next(model.parameters()).device.type,
        enabled=dtype is torch.float16,
        # Without master weights float16 gradients are refused otherwise.
        allow_fp16=not masters,
    )
    curve = [(0, mean_loss(model, unseen))]
    for step, batch in enumerate(batches, 1):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, batch)).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step_and_update(optimizer)
        if step * 10 // len(batches) > (step - 1) * 10 // len(batches):
            curve.append((step, mean_loss(model, unseen)))
            if math.isnan(curve[-1][1]):
                break
    return curve


def draw(curves: dict[tuple[str, float], list[tuple[int, float]]], path: Path) -> None:
    """Draws the curves of each learning rate side by side; equal curves give equal files."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise SystemExit("--picture needs matplotlib: pip install matplotlib") from error
    # A thin line with masters lies on top of a thick one without.
    looks = {
        "fp32": {"color": "#c8ccd1", "lw": 7},
        "bf16": {"color": "#b45309", "lw": 2},
        "bf16 + masters": {"color": "#b45309", "lw": 1.2, "ls": "--"},
        "fp16": {"color": "#1f5fae", "lw": 2, "marker": "x", "ms": 9},
        "fp16 + masters": {"color": "#1f5fae", "lw": 1.2, "ls": "--"},
    }
    style = {"svg.fonttype": "none", "svg.hashsalt": "ampfast", "font.family": "sans-serif"}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(8, 3.6), layout="constrained")
        for axes, rate in zip(figure.subplots(1, len(RATES)), RATES, strict=True):
            for way, look in looks.items():
                steps, losses = zip(*curves[way, rate], strict=True)
                broken = any(map(math.isnan, losses))
                label = f"{way}, then NaN" if broken else way
                axes.plot(steps, losses, label=label, **look)
            axes.set_title(f"learning rate {rate:g}", loc="left")
            axes.set(xlabel="steps", ylabel="loss on unseen files")
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(frameon=False)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--picture", type=Path, help="file to draw the curves to")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    text = library()
    seen, unseen = text[: len(text) * 9 // 10], drawn(text[len(text) * 9 // 10 :], 8, seed=1)
    trained = Writer(width=32).to(options.device)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=3e-3)
    for batch in drawn(seen, 2 * options.steps, seed=0):
        optimizer.zero_grad()
        loss_of(trained, batch).backward()
        nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()

    batches, curves = drawn(seen, options.steps, seed=2), {}
    print(f"loss on unseen files: {mean_loss(trained, unseen):.4f}")
    print(f"{f'after {options.steps} steps':<14}" + "".join(f"{rate:>9g}" for rate in RATES))
    for way in WAYS:
        for rate in RATES:
            curves[way, rate] = fine_tuned(trained, way, rate, batches, unseen)
        losses = [curves[way, rate][-1][1] for rate in RATES]
        print(f"{way:<14}" + "".join(f"{loss:9.4f}" for loss in losses), flush=True)
    if options.picture:
        draw(curves, options.picture)


if __name__ == "__main__":
    main()
