"""A small Qwen2-type model from random weights, for demos and tests: no download, no account."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2 import Qwen2Config, Qwen2ForCausalLM

from runner.model.build import DTYPES, drawn, placed
from runner.model.causal import CausalLM
from runner.model.config import TinyConfig
from runner.model.tokenizer import byte_tokenizer
from runner.protocols import Decide


def tokenizer(config: TinyConfig) -> PreTrainedTokenizerFast:
    """One id per byte and three special tokens, whatever the size of the model."""
    return byte_tokenizer(config.max_positions)


def build(config: TinyConfig, *, tokenizer: Any, device: torch.device, seed: int, decide: Decide) -> CausalLM:
    """The model with weights drawn from `seed`."""
    architecture = Qwen2Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        max_position_embeddings=config.max_positions,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    module = placed(drawn(lambda: Qwen2ForCausalLM(architecture), seed), DTYPES[config.dtype], device)
    return CausalLM(module, tokenizer, config, seed=seed, decide=decide)
