"""Trains a small transformer to write Python, character by character, in float16 mixed precision.

It reads the source of Python's own library, which lies beside every interpreter. The last line is
the same for both scalers:

    python examples/language.py --scaler torch
    python examples/language.py --scaler ampfast
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from torch import nn

import ampfast

CHARACTERS = 128
CONTEXT = 64
BATCH = 16


def library() -> torch.Tensor:
    """Returns the source of Python's library, one int64 in [0, 128) for each character."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = bytearray().join(file.read_bytes() for file in files)
    return torch.frombuffer(text, dtype=torch.uint8).clamp(max=CHARACTERS - 1).long()


class Writer(nn.Module):
    """Predicts the next character at every position of a text of at most 64 characters."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, width)
        self.places = nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(
            layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.head = nn.Linear(width, CHARACTERS)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Maps int64 of shape (texts, length) to logits of shape (texts, length, 128)."""
        length = text.shape[1]
        past = nn.Transformer.generate_square_subsequent_mask(length, device=text.device)
        places = torch.arange(length, device=text.device)
        states = self.characters(text) + self.places(places)
        return self.head(self.layers(states, mask=past, is_causal=True))


def windows(text: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws texts, int64 of shape (16, 64), and the next characters."""
    starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=generator)
    drawn = text[starts + torch.arange(CONTEXT + 1)]
    return drawn[:, :-1], drawn[:, 1:]


def written(model: nn.Module, prompt: str, length: int, device: torch.device) -> str:
    """Returns the prompt and a sampled continuation."""
    generator = torch.Generator().manual_seed(0)
    text = torch.tensor([[ord(character) for character in prompt]])
    for _ in range(length):
        logits = model(text[:, -CONTEXT:].to(device))[0, -1].float().cpu()
        drawn = torch.multinomial(logits.softmax(0), 1, generator=generator)
        text = torch.cat([text, drawn[None]], dim=1)
    return "".join(map(chr, text[0].tolist()))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scaler", choices=("torch", "ampfast"), default="ampfast")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)

    device = torch.device(options.device)
    torch.manual_seed(0)
    text = library()
    seen, unseen = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    model = Writer().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    classes = {"torch": torch.amp.GradScaler, "ampfast": ampfast.GradScaler}
    # Overflows in the first steps, which are skipped.
    scaler = classes[options.scaler](device.type, init_scale=2.0**20, growth_interval=50)

    def loss_of(text: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        characters, following = windows(text, generator)
        with torch.autocast(device.type, dtype=torch.float16):
            logits = model(characters.to(device)).float().flatten(0, 1)
        return nn.functional.cross_entropy(logits, following.to(device).flatten())

    generator = torch.Generator().manual_seed(0)
    for step in range(options.steps):
        optimizer.zero_grad()
        loss = loss_of(seen, generator)
        scaler.scale(loss).backward()
        # ampfast's scaler.clip_grad_norm_(optimizer, 1.0) does both at once.
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if step % 25 == 0:
            print(f"step {step}: loss {loss.item():.4f}, scale {scaler.get_scale():g}", flush=True)

    if isinstance(scaler, ampfast.GradScaler):
        print(scaler.stats())
    with torch.no_grad():
        print(written(model, "def ", 100, device))
        losses = [loss_of(unseen, generator).item() for _ in range(10)]
    checksum = sum(parameter.double().sum().item() for parameter in model.parameters())
    print(f"loss on unseen files {sum(losses) / 10:.4f}, sum of all parameters {checksum!r}")


if __name__ == "__main__":
    main()
