"""TRL: the scaler is an attribute of the trainer's Accelerator, set before `train`.

pip install trl
"""

from __future__ import annotations

import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import ampfast


def main() -> None:
    # A tiny model; usually `from_pretrained(..., dtype=torch.float32)`.
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"<end>": 0})), eos_token="<end>", pad_token="<end>"
    )
    rows = Dataset.from_dict({"input_ids": torch.randint(1, 32, (128, 8)).tolist()})
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            folder,
            fp16=True,
            max_steps=4,
            per_device_train_batch_size=32,
            save_strategy="no",
            report_to="none",
        )
        trainer = SFTTrainer(model, arguments, train_dataset=rows, processing_class=tokenizer)
        accelerator = trainer.accelerator
        if not accelerator.native_amp:
            raise SystemExit(
                "on a CPU Accelerate neither casts to float16 nor unscales: this needs a GPU"
            )
        accelerator.scaler = ampfast.GradScaler(accelerator.device.type)
        trainer.train()
    print(accelerator.scaler.stats())


if __name__ == "__main__":
    main()
