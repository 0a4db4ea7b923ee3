"""Small models from random weights, for demos and tests: no download, no account."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2 import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification
from transformers.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM, Qwen3MoeForSequenceClassification

from runner.model.build import DTYPES, Admit, Fit, drawn, load_folder, placed
from runner.model.causal import CausalLM
from runner.model.config import ModelConfig, SmallConfig, TinyMoeConfig
from runner.model.positions import check_rows, longest_row
from runner.model.ragged import RaggedModel
from runner.model.scalar import ScalarModel
from runner.model.source import Source
from runner.model.tokenizer import byte_tokenizer
from runner.model.valued import ValuedLM
from runner.protocols import Decide
from runner.spec.base import Dtype, Head


def tokenizer(config: SmallConfig) -> PreTrainedTokenizerFast:
    """One id per byte and three special tokens, whatever the size of the model."""
    return byte_tokenizer(config.max_positions)


def architecture(config: SmallConfig, tokenizer: Any) -> Any:
    """The shape of the model, as transformers has it."""
    common = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if not isinstance(config, TinyMoeConfig):
        return Qwen2Config(**common)
    return Qwen3MoeConfig(
        **common,
        moe_intermediate_size=config.intermediate_size,
        num_experts=config.experts,
        num_experts_per_tok=config.experts_per_token,
        norm_topk_prob=True,
    )


def build(
    config: SmallConfig,
    *,
    tokenizer: Any,
    device: torch.device,
    seed: int,
    decide: Decide,
    head: Head = "lm",
    init_from: str | None = None,
    longest: int = 0,
    fit: Fit | None = None,
    admit: Admit | None = None,
    stored: Dtype | None = None,
) -> RaggedModel:
    """The model with weights drawn from `seed`, or those of the folder `init_from`; head="scalar" scores rows,
    head="lm+value" is a language model with a value head beside it. `fit` sees the module first (see `placed`),
    `admit` its config before that; `stored` is the data type of its weights, None = that it computes in.

    Raises SpecError if rows of `longest` tokens are too long for it.
    """
    shape = architecture(config, tokenizer)
    if head == "scalar":
        shape.num_labels = 1
    check_rows(longest, longest_row(shape))
    if admit is not None:
        admit(shape)
    kind, made = _KINDS[type(shape)][head]
    module: Any = drawn(lambda: kind(shape), seed)
    source = Source(drawn=f"from seed {seed} for {_shape(config)}")
    if init_from is not None:
        load_folder(module, init_from)
        source = Source(folder=Path(init_from))
    compute = DTYPES[config.compute_dtype]
    module = placed(module, DTYPES[stored] if stored else compute, device, fit, compute)
    return made(module, tokenizer, config, seed=seed, decide=decide, source=source)


def _shape(config: SmallConfig) -> str:
    """What random weights depend on beside their seed."""
    own = config.model_dump(exclude=set(ModelConfig.model_fields))
    return " ".join(f"{name}={value}" for name, value in own.items())


_KINDS: dict[type, dict[Head, tuple[Any, type[RaggedModel]]]] = {
    Qwen2Config: {
        "lm": (Qwen2ForCausalLM, CausalLM),
        "scalar": (Qwen2ForSequenceClassification, ScalarModel),
        "lm+value": (Qwen2ForCausalLM, ValuedLM),
    },
    Qwen3MoeConfig: {
        "lm": (Qwen3MoeForCausalLM, CausalLM),
        "scalar": (Qwen3MoeForSequenceClassification, ScalarModel),
        "lm+value": (Qwen3MoeForCausalLM, ValuedLM),
    },
}
