"""`python -m ampfast compare` of programs with a trainer of another project."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SETUP = """
import torch
from torch import nn
for name in ("nms", "qnms"):  # of a torchvision for another build of torch
    torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores) -> Tensor")
torch.manual_seed(0)
torch.set_num_threads(1)
rows = [{"data": torch.randn(4), "labels": torch.randn(2)} for _ in range(24)]
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)
    def forward(self, data, labels):
        with torch.autocast("cpu", torch.float16):
            return {"loss": (self.net(data).float() - labels).square().mean()}
"""
# On a CPU Accelerate uses no scaler, so that programs take the way of a GPU.
PROGRAMS = {
    "lightning": """
import lightning as L
from lightning.pytorch.plugins import MixedPrecision
class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()
    def training_step(self, batch):
        return self.net(**batch)["loss"]
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18)
L.Trainer(
    max_epochs=1, accelerator="cpu", plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)],
    logger=False, enable_checkpointing=False, enable_progress_bar=False,
).fit(Module(), torch.utils.data.DataLoader(rows, batch_size=2))
""",
    "accelerate": """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True, mixed_precision="fp16")
accelerator.native_amp = True
accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(rows, batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    optimizer.zero_grad()
    accelerator.backward(model(**batch)["loss"])
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
""",
    "transformers": """
from transformers import Trainer, TrainingArguments
trainer = Trainer(Net(), TrainingArguments(
    output_dir="output", use_cpu=True, fp16=True, per_device_train_batch_size=2,
    num_train_epochs=1, report_to="none", save_strategy="no", disable_tqdm=True,
), train_dataset=rows)
trainer.accelerator.native_amp = True
trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18)
trainer.train()
""",
}


@pytest.mark.parametrize("trainer", PROGRAMS)
def test_the_training_is_equal(trainer: str, tmp_path: Path) -> None:
    if not find_spec(trainer):
        pytest.skip(f"needs {trainer}")
    (tmp_path / "train.py").write_text(SETUP + PROGRAMS[trainer])
    done = subprocess.run(
        [sys.executable, "-m", "ampfast", "compare", "train.py", "--json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["verdict"] == "equal"
    [scaler] = facts["scalers"]
    for side in (scaler["torch"], scaler["ampfast"]):
        assert side["steps"] == 12
        assert 0 < side["skipped"] < 12
        assert 0 < side["medians"]["share"] < 1
