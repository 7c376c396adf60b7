"""Trains a small transformer in bfloat16 with bad batches, which are clipped only or skipped.

In a bad batch the next characters are those of other texts, as if a loader had paired the wrong
files. It prints the loss on files that it has not seen and the number of skipped steps:

    python examples/spikes.py --picture spikes.svg  # a picture needs matplotlib
    python examples/spikes.py --in-a-row 1

On a CPU it runs on one thread: with others sums are rounded differently, and small steps do not
get faster.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from finetune_16bit import Batch, drawn, loss_of, mean_loss
from language import Writer, library
from torch import Tensor

import ampfast
from ampfast.report import History

# Whether there are bad batches, and the limit of the norm.
WAYS = {
    "clean": (False, None),
    "clipped": (True, None),
    "clipped, skipped": (True, ampfast.Sigmas(6, window=64)),
}
# Bad batches begin when the large norms of the first steps have left the window.
FIRST, EVERY = 120, 60

Curve = list[tuple[int, float]]


def paired_wrongly(batches: list[Batch], others: list[Batch], bad: Tensor) -> list[Batch]:
    """Returns the batches, the bad ones with the following characters of others."""
    return [
        (characters, wrong if is_bad else right)
        for (characters, right), (_, wrong), is_bad in zip(
            batches, others, bad.tolist(), strict=True
        )
    ]


def trained(
    device: str, batches: list[Batch], unseen: list[Batch], skip_above: ampfast.Sigmas | None
) -> tuple[Curve, History]:
    """Returns steps and the loss on unseen batches after them, and the scaler's history."""
    torch.manual_seed(0)
    model = Writer(width=32).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    guard = ampfast.StepGuard()
    curve = []
    for step, batch in enumerate(batches, 1):
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = loss_of(model, batch)
        guard.scale(loss).backward()
        guard.clip_grad_norm_(optimizer, 1.0, skip_above=skip_above)
        guard.step_and_update(optimizer)
        if step % 10 == 0 or step == len(batches):
            curve.append((step, mean_loss(model, unseen)))
    return curve, guard.history()


def draw(curves: dict[str, Curve], history: History, path: Path) -> None:
    """Draws the losses above the norms with their spikes; equal arguments give equal files."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise SystemExit("--picture needs matplotlib: pip install matplotlib") from error
    looks = {
        "clean": {"color": "#c8ccd1", "lw": 5},
        "clipped": {"color": "#b45309", "lw": 1.5},
        "clipped, skipped": {"color": "#1f5fae", "lw": 1.5},
    }
    style = {"svg.fonttype": "none", "svg.hashsalt": "ampfast", "font.family": "sans-serif"}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(8, 5), layout="constrained")
        losses, norms = figure.subplots(2, sharex=True)
        for way, look in looks.items():
            losses.plot(*zip(*curves[way], strict=True), label=way, **look)
        losses.set(ylabel="loss on unseen files")
        # Of the last way, which skips; numbered from 1, as the losses after them.
        steps, values, spiked = history.step + 1, history.grad_norm, history.spiked
        norms.plot(steps.tolist(), values.tolist(), color="#1f5fae", lw=1)
        label = f"skipped: {int(spiked.sum())} of {len(history)}"
        marker = {"marker": "^", "linestyle": "none", "color": "tab:orange"}
        norms.plot(steps[spiked].tolist(), values[spiked].tolist(), label=label, **marker)
        norms.set(xlabel="steps", ylabel="gradient norm", yscale="log")
        for axes in (losses, norms):
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(frameon=False)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600, help="the last 1,024 are counted")
    parser.add_argument("--in-a-row", type=int, default=8, help=f"bad ones, every {EVERY} steps")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--picture", type=Path, help="file to draw losses and norms to")
    options = parser.parse_args(arguments)

    text = library()
    seen, unseen = text[: len(text) * 9 // 10], drawn(text[len(text) * 9 // 10 :], 8, seed=1)
    clean, others = (drawn(seen, options.steps, seed) for seed in (0, 2))
    steps = torch.arange(options.steps)
    bad = (steps >= FIRST) & ((steps - FIRST) % EVERY < options.in_a_row)

    print(f"bad batches: {int(bad.sum())} of {options.steps}, {options.in_a_row} in a row")
    print(f"{f'after {options.steps} steps':<18}    loss  bad skipped  others skipped")
    curves = {}
    for way, (with_bad, skip_above) in WAYS.items():
        batches = paired_wrongly(clean, others, bad) if with_bad else clean
        curves[way], history = trained(options.device, batches, unseen, skip_above)
        is_bad = bad[history.step] & with_bad
        counts = [int((history.spiked & kind).sum()) for kind in (is_bad, ~is_bad)]
        print(f"{way:<18}{curves[way][-1][1]:8.4f}{counts[0]:13}{counts[1]:16}", flush=True)
    if options.picture:
        draw(curves, history, options.picture)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
