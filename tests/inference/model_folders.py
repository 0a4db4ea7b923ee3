"""Small model folders and adapters, written as other programs write them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import peft
import torch

from tests.model.zoo import causal, module


def write_base(folder: Path, kind: str = "qwen3", seed: int = 4) -> Path:
    """A Hugging Face folder with the byte tokenizer."""
    causal(kind, seed=seed).save(folder)
    return folder


def write_adapter(folder: Path, base: Path | str, *, kind: str = "qwen3", seed: int = 1, **options: Any) -> Path:
    """An adapter as TRL's trainers leave it: peft's own `save_pretrained`, all of its numbers drawn from `seed`."""
    settings = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"} | options
    inner = module(kind, seed=4)
    inner.config._name_or_path = inner.name_or_path = str(base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = peft.get_peft_model(inner, peft.LoraConfig(**settings))
        torch.manual_seed(seed)
        for name, parameter in made.named_parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.3) if "lora_" in name else None
        made.save_pretrained(folder)
    return folder
