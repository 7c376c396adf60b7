"""Lightning's FSDP precision plugin, around FSDP on the CPU, which Fabric itself refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from support.scalers import Scaler
from torch import distributed
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from trajectories import SETTINGS, HalfNet, Run, assert_same_run, batches, optimizer_for

import ampfast

fabric = pytest.importorskip("lightning.fabric.plugins", reason="needs lightning")
pytorch = pytest.importorskip("lightning.pytorch.plugins", reason="needs lightning")


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def train(scaler_type: Scaler, clip: bool) -> Run:
    precision, run = fabric.FSDPPrecision("16-mixed"), Run()
    precision.scaler = scaler_type("cpu", **SETTINGS)
    model = FullyShardedDataParallel(
        HalfNet(),
        device_id=torch.device("cpu"),
        mixed_precision=precision.mixed_precision_config,
        use_orig_params=True,
    )
    optimizer = optimizer_for(model)
    for data, target in batches():
        optimizer.zero_grad()
        precision.backward(run.loss(model(data), target, precision.scaler), model)
        if clip:
            precision.unscale_gradients(optimizer)
            model.clip_grad_norm_(0.05)
        precision.optimizer_step(optimizer)
    return run.finish(model, saved=precision.state_dict())


@pytest.mark.parametrize("clip", [False, True], ids=["", "clip"])
def test_attribute(clip: bool) -> None:
    assert_same_run(train(ampfast.ShardedGradScaler, clip), train(ShardedGradScaler, clip))


@pytest.mark.parametrize("plugins", [fabric, pytorch], ids=["fabric", "trainer"])
@pytest.mark.usefixtures("cuda_on_cpu", "patched")
def test_the_scaler_that_it_makes_is_patched(plugins: object) -> None:
    assert isinstance(plugins.FSDPPrecision("16-mixed").scaler, ampfast.ShardedGradScaler)


@pytest.mark.parametrize("plugins", [fabric, pytorch], ids=["fabric", "trainer"])
def test_its_argument_takes_no_scaler_yet(plugins: object) -> None:
    """If this fails, the argument works, and example and documentation can say so."""
    with pytest.raises(ValueError, match="does not use a scaler"):
        plugins.FSDPPrecision("16-mixed", scaler=ShardedGradScaler("cpu"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="Fabric has FSDP for GPUs only")
def test_example(run_example: Callable[[str], str]) -> None:
    distributed.destroy_process_group()
    assert "steps=4" in run_example("with_fabric_fsdp.py")
