"""TRL: its trainers are Transformers', whose Accelerator has the scaler.

It uses none on the CPU; these tests set its `native_amp` to take the path of a GPU.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import SETTINGS, STEPS
from support.comparison import TorchScaler, assert_same

import ampfast

transformers = pytest.importorskip("transformers", reason="needs transformers")
trl = pytest.importorskip("trl", reason="needs trl")
datasets = pytest.importorskip("datasets", reason="needs trl")
tokenizers = pytest.importorskip("tokenizers", reason="needs transformers")

WORDS = {"<end>": 0, **{f"w{index}": index for index in range(1, 32)}}


def tokenizer() -> Any:
    splits = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="<end>"))
    splits.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=splits, eos_token="<end>", pad_token="<end>"
    )


def train(scaler: TorchScaler, folder: Path, optim: str) -> list[Any]:
    """Logs and final states of a small language model."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": len(WORDS)}
    config = transformers.LlamaConfig(num_hidden_layers=1, num_attention_heads=2, **sizes)
    settings = trl.SFTConfig(
        str(folder),
        per_device_train_batch_size=1,
        use_cpu=True,
        fp16=True,
        optim=optim,
        learning_rate=0.02,
        num_train_epochs=1,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    rows = torch.randint(1, 32, (STEPS, 8), generator=torch.Generator().manual_seed(5))
    trainer = trl.SFTTrainer(
        transformers.LlamaForCausalLM(config),
        settings,
        train_dataset=datasets.Dataset.from_dict({"input_ids": rows.tolist()}),
        processing_class=tokenizer(),
    )
    trainer.accelerator.native_amp = True
    trainer.accelerator.scaler = scaler
    trainer.train()
    names = ("loss", "grad_norm", "learning_rate", "num_tokens")
    logs = [[log[name] for name in names] for log in trainer.state.log_history[:STEPS]]
    params = [param.detach() for param in trainer.model.parameters()]
    return [logs, params, trainer.optimizer.state_dict(), scaler.state_dict()]


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_runs(optim: str, tmp_path: Path, step_reads: list[int]) -> None:
    settings = {**SETTINGS, "growth_interval": 2}  # overflows more often than other nets
    scaler = ampfast.GradScaler("cpu", **settings)
    ours = train(scaler, tmp_path, optim)
    reads = step_reads.copy()
    assert_same(ours, train(TorchScaler("cpu", **settings), tmp_path, optim))
    assert 2 <= scaler.stats().skipped == sum(not math.isfinite(norm) for _, norm, *_ in ours[0])
    if optim == "adamw_torch_fused":  # the first one may try the fused kernel
        assert reads[1:] == step_reads[STEPS + 1 :] == [0] * (STEPS - 1)
