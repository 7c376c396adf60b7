"""TRL: its trainers are Transformers', whose Accelerator has the scaler.

It uses none on the CPU; these tests set its `native_amp` to take the path of a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import trajectories
from support.scalers import TorchScaler
from trajectories import STEPS, Late, Run, assert_same_run

import ampfast

transformers = pytest.importorskip("transformers", reason="needs transformers")
trl = pytest.importorskip("trl", reason="needs trl")
datasets = pytest.importorskip("datasets", reason="needs trl")
tokenizers = pytest.importorskip("tokenizers", reason="needs transformers")

# They overflow more often than the tests' other nets.
SETTINGS = {**trajectories.SETTINGS, "growth_interval": 2}
WORDS = {"<end>": 0, **{f"w{index}": index for index in range(1, 32)}}


def tokenizer() -> Any:
    splits = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="<end>"))
    splits.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=splits, eos_token="<end>", pad_token="<end>"
    )


def language_model(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": len(WORDS)}
    config = transformers.LlamaConfig(num_hidden_layers=1, num_attention_heads=2, **sizes)
    return transformers.LlamaForCausalLM(config).to(dtype)


class LateTrainer(Late, trl.SFTTrainer):
    """Makes a `LateScheduler`."""


def sft(
    folder: Path,
    model: Any,
    arguments: dict[str, Any],
    kind: type[Any] = trl.SFTTrainer,
    **more: Any,
) -> Any:
    settings = trl.SFTConfig(str(folder), per_device_train_batch_size=1, **arguments)
    rows = torch.randint(1, 32, (STEPS, 8), generator=torch.Generator().manual_seed(5))
    dataset = datasets.Dataset.from_dict({"input_ids": rows.tolist()})
    return kind(model, settings, train_dataset=dataset, processing_class=tokenizer(), **more)


def grpo(folder: Path, model: Any, arguments: dict[str, Any]) -> Any:
    arguments |= {"num_generations": 2, "max_completion_length": 4}
    settings = trl.GRPOConfig(str(folder), per_device_train_batch_size=2, **arguments)
    prompts = {"prompt": [f"w{index} w{index + 1}" for index in range(1, STEPS + 1)]}
    return trl.GRPOTrainer(
        model,
        reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
        args=settings,
        train_dataset=datasets.Dataset.from_dict(prompts),
        processing_class=tokenizer(),
    )


class Scales(transformers.TrainerCallback):
    """Records the scale before each step."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.run.scales.append(self.run.scaler.get_scale())


def train(
    make: Callable[..., Any], scaler: TorchScaler, folder: Path, optim: str, **more: Any
) -> Run:
    run, model = Run(scaler), more.pop("model", None) or language_model()
    arguments = {
        "use_cpu": True,
        "fp16": True,
        "optim": optim,
        "learning_rate": 0.02,
        "num_train_epochs": 1,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    trainer = make(folder, model, arguments, **more)
    trainer.accelerator.native_amp = True
    trainer.accelerator.scaler = scaler
    trainer.add_callback(Scales(run))
    trainer.train()
    logs = trainer.state.log_history[:STEPS]
    run.losses = [torch.tensor(log["loss"]) for log in logs]
    names = ("grad_norm", "learning_rate", "num_tokens")
    return run.finish(
        trainer.model,
        logs=[[log[name] for name in names] for log in logs],
        optimizer=trainer.optimizer.state_dict(),
    )


def assert_norms_tell_of_overflows(run: Run) -> None:
    scales = [*run.scales, run.state["scaler"]["scale"]]
    for step, (norm, *_) in enumerate(run.state["logs"]):
        assert math.isfinite(norm) == (scales[step + 1] >= scales[step])


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
@pytest.mark.parametrize("make", [sft, grpo])
def test_trainers(
    make: Callable[..., Any], optim: str, tmp_path: Path, step_reads: list[int]
) -> None:
    ours = train(make, ampfast.GradScaler("cpu", **SETTINGS), tmp_path, optim)
    reads = step_reads.copy()
    assert_same_run(ours, train(make, TorchScaler("cpu", **SETTINGS), tmp_path, optim))
    assert_norms_tell_of_overflows(ours)
    rates = {rate for _, rate, _ in ours.state["logs"]}
    if optim == "adamw_torch_fused":
        assert reads == step_reads[STEPS:] == [0] * STEPS
        assert len(rates) == STEPS
    else:
        assert len(rates) < STEPS


def test_a_late_schedule(tmp_path: Path, step_reads: list[int]) -> None:
    scaler = ampfast.GradScaler("cpu", **SETTINGS)
    run = train(sft, scaler, tmp_path, "adamw_torch_fused", kind=LateTrainer)
    skipped = [not math.isfinite(norm) for norm, *_ in run.state["logs"]]
    rates = [rate for _, rate, _ in run.state["logs"]]
    # The step after a skipped one has the same rate, one step later.
    assert [a == b for a, b in pairwise(rates)] == [True, *skipped[:-2]]
    assert 2 <= sum(skipped) < STEPS - 2
    assert step_reads == [0] * STEPS


def test_a_float16_model(tmp_path: Path) -> None:
    model = language_model(torch.float16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, fused=True)
    ampfast.master_weights_(optimizer)
    scaler = ampfast.GradScaler("cpu", **SETTINGS)
    more = {"model": model, "optimizers": (optimizer, None)}
    run = train(sft, scaler, tmp_path, "adamw_torch_fused", **more)
    assert run.skipped >= 2
    assert_norms_tell_of_overflows(run)
    before = language_model(torch.float16).parameters()
    for param, old in zip(model.parameters(), before, strict=True):
        assert param.dtype is torch.float16
        master = optimizer.master_weights[param]
        assert torch.equal(param, master.half())
        assert not torch.equal(param.float(), master)
        assert not torch.equal(param, old)


@pytest.mark.usefixtures("float16_on_cpu")
def test_example(run_example: Callable[[str], str]) -> None:
    assert "steps=4" in run_example("with_trl.py")


def test_example_refuses_a_cpu(run_example: Callable[[str], str]) -> None:
    with pytest.raises(SystemExit, match="neither casts to float16 nor unscales"):
        run_example("with_trl.py")
