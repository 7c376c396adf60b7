"""Trains a network sharded over two ranks by FSDP2, in float16 mixed precision.

Run plainly, it starts both ranks itself. An infinity that only one of them holds makes both skip.
The last line is the same for both scalers:

    python examples/fsdp2.py --scaler torch
    python examples/fsdp2.py --scaler ampfast
    torchrun --nproc-per-node=2 examples/fsdp2.py --scaler ampfast
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import ampfast

BATCH = 64


def network() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(16, 64), nn.ReLU()),
        *(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)),
    )


def train(options: argparse.Namespace) -> str:
    """Trains on all ranks of the default group; returns the last line of output, equal on all."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device(options.device)
    if device.type == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    # All ranks create the same networks; each keeps its shards of one of them.
    torch.manual_seed(0)
    teacher, model = network().to(device), network().to(device)
    unseen = torch.randn(1000, 16).to(device)
    mesh = init_device_mesh(device.type, (ranks,))
    half = MixedPrecisionPolicy(param_dtype=torch.float16)
    for part in (model[0], model[2], model[4], model):
        fully_shard(part, mesh=mesh, mp_policy=half)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    classes = {"torch": torch.amp.GradScaler, "ampfast": ampfast.GradScaler}
    # Overflows in the first steps, which are skipped.
    scaler = classes[options.scaler](device.type, init_scale=2.0**24, growth_interval=50)

    def loss_of(inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            targets = teacher(inputs)
        return nn.functional.mse_loss(model(inputs).float(), targets)

    # From here on each rank draws its own data.
    torch.manual_seed(1 + rank)
    for step in range(options.steps):
        optimizer.zero_grad()
        loss = loss_of(torch.randn(BATCH, 16).to(device))
        scaler.scale(loss).backward()
        infinite = step == options.steps // 2
        if infinite and rank == ranks - 1:
            # Only in the shard of this rank.
            model[0].weight.grad.to_local()[0, 0] = math.inf
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if infinite or step % 25 == 0:
            skipped = [False] * ranks
            dist.all_gather_object(skipped, scaler.get_scale() < before)
            if rank == 0:
                print(f"step {step}: scale {scaler.get_scale():g}, skipped: {skipped}", flush=True)

    if rank == 0 and isinstance(scaler, ampfast.GradScaler):
        print(scaler.stats())
    with torch.no_grad():
        loss = loss_of(unseen)
    checksum = sum(part.full_tensor().double().sum().item() for part in model.parameters())
    return f"loss {loss.item():.5f}, sum of all parameters {checksum!r}"


def run(rank: int, options: argparse.Namespace, ranks: int, store: str | None) -> None:
    """Runs one rank of a group that meets at `store` or was started by torchrun."""
    torch.set_num_threads(1)
    backend = "nccl" if options.device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=ranks)
    last = train(options)
    if dist.get_rank() == 0:
        print(last)
    dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scaler", choices=("torch", "ampfast"), default="ampfast")
    parser.add_argument("--steps", type=int, default=300)
    default = "cuda" if torch.cuda.device_count() > 1 else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    options = parser.parse_args(arguments)
    if "RANK" in os.environ:
        run(-1, options, -1, None)
    else:
        with tempfile.TemporaryDirectory() as folder:
            store = Path(folder, "store").as_uri()
            # Without Python's finalization, in which gloo's threads, which outlive a mesh, may
            # still free tensors and abort (pytorch/pytorch#179291).
            start = torch.multiprocessing.start_processes
            start(run, (options, 2, store), nprocs=2, start_method="forkserver")


if __name__ == "__main__":
    main()
