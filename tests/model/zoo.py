"""Small models of several architectures, and the plain computation that every other one is held against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.bloom import BloomConfig, BloomForCausalLM
from transformers.models.gemma2 import Gemma2Config, Gemma2ForCausalLM
from transformers.models.gpt2 import GPT2Config, GPT2LMHeadModel
from transformers.models.gpt_oss import GptOssConfig, GptOssForCausalLM
from transformers.models.granite import GraniteConfig, GraniteForCausalLM
from transformers.models.llama import LlamaConfig, LlamaForCausalLM
from transformers.models.llama4 import Llama4ForCausalLM, Llama4TextConfig
from transformers.models.mistral import MistralConfig, MistralForCausalLM
from transformers.models.qwen2 import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen3 import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM

from runner.core.auto_choices import Decisions
from runner.core.batch import Batch, pack
from runner.interfaces import Request
from runner.model.causal_lm import CausalLM
from runner.model.config import TinyConfig
from runner.model.tiny import byte_tokenizer
from runner.sampler.config import TorchSamplerConfig
from runner.sampler.torch import TorchSampler
from runner.trainer.answer_evaluator import ShorteningSampler

VOCAB = 300
CPU = torch.device("cpu")
LOGPROBS = frozenset({"logprobs"})
LENGTHS = (7, 1, 19, 2, 12, 30)

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,  # large enough that a wrong mask or position shows
    "bos_token_id": None,
    "eos_token_id": 258,
    "pad_token_id": 256,
}
ZOO: dict[str, Any] = {
    "llama": lambda **o: LlamaForCausalLM(LlamaConfig(**SHAPE | o)),
    "qwen2": lambda **o: Qwen2ForCausalLM(Qwen2Config(**SHAPE | o)),
    "qwen3": lambda **o: Qwen3ForCausalLM(Qwen3Config(**SHAPE | o)),
    "qwen3_moe": lambda **o: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **SHAPE
            | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [1]}
            | o
        )
    ),
    "mistral": lambda **o: MistralForCausalLM(MistralConfig(**SHAPE | {"sliding_window": 8} | o)),
    "gemma2": lambda **o: Gemma2ForCausalLM(
        Gemma2Config(**SHAPE | {"sliding_window": 8, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 3.0} | o)
    ),
    "granite": lambda **o: GraniteForCausalLM(GraniteConfig(**SHAPE | {"logits_scaling": 4.0} | o)),
    "gpt_oss": lambda **o: GptOssForCausalLM(
        GptOssConfig(**SHAPE | {"sliding_window": 8, "num_local_experts": 2, "num_experts_per_tok": 1} | o)
    ),
    "llama4": lambda **o: Llama4ForCausalLM(
        Llama4TextConfig(**SHAPE | {"attention_chunk_size": 8, "num_local_experts": 2, "intermediate_size_mlp": 48} | o)
    ),
    "bloom": lambda **o: BloomForCausalLM(
        BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3, eos_token_id=258, **o)
    ),
    "gpt2": lambda **o: GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3, eos_token_id=258, **o)
    ),
}


def module(kind: str, seed: int = 0, **options: Any) -> Any:
    """A model of the zoo, drawn from `seed`, without dropout unless asked for."""
    torch.manual_seed(seed)
    made = ZOO[kind](**options)
    for part in made.modules():
        if isinstance(part, nn.Dropout) and "attn_pdrop" not in options:
            part.p = 0.0
    return made.eval()


def causal(
    kind: str, decisions: Decisions | None = None, double: bool = False, seed: int = 0, **options: Any
) -> CausalLM:
    """The same behind CausalLM. Options that TinyConfig knows go to it, the others to the architecture."""
    ours = {key: options.pop(key) for key in list(options) if key in TinyConfig.model_fields}
    made = module(kind, seed, **options)
    if double:
        made.double()
    made.requires_grad_(True)
    return CausalLM(made, byte_tokenizer(512), TinyConfig(**ours), seed=seed, decide=decisions or Decisions())


def rows(lengths: tuple[int, ...] = LENGTHS, seed: int = 1) -> list[list[int]]:
    """Random ids of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in lengths]


def greedy(
    model: CausalLM, prompts: Sequence[Sequence[int]], most: int, max_num_seqs: int = 32, **stops: Any
) -> list[list[int]]:
    """The ids of the greedy answers, end tokens left out."""
    config = TorchSamplerConfig(top_k=1, max_new_tokens=most, max_num_seqs=max_num_seqs, **stops)
    sampler = ShorteningSampler(TorchSampler(config, model, decide=Decisions()))
    found = sampler.sample([Request(tuple(prompt), 0, most, at) for at, prompt in enumerate(prompts)])
    ends = model.limits().stop_token_ids
    return [[token for token in one.ids if token not in ends] for one in found]


def batch(lengths: tuple[int, ...] = LENGTHS, seed: int = 1) -> Batch:
    """A packed batch of random rows, the first third of each without weight."""
    ids = rows(lengths, seed)
    return pack(ids, [[float(i >= len(row) // 3) for i in range(len(row))] for row in ids])


def reference(causal: Any, ids: list[list[int]]) -> Tensor:
    """Row by row through the plain model: log-softmax at the next token, 0 at roots."""
    out = []
    for row in ids:
        logits = causal(input_ids=torch.tensor([row]), use_cache=False).logits[0].to(torch.float64)
        picked = torch.log_softmax(logits, -1)[:-1].gather(1, torch.tensor(row[1:], dtype=torch.int64)[:, None])[:, 0]
        out.append(torch.cat([picked.new_zeros(1), picked]))
    return torch.cat(out)


def gradients(model: CausalLM, linear: bool, data: Batch) -> dict[str, Tensor]:
    """Of Σ c·logprobs with fixed random c where there is weight, by name."""
    c = torch.randn(data.num_tokens, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    c = c * data.tokens["weight"]
    model.module.zero_grad()
    total = model.linear_loss(data, c)[0] if linear else (model.outputs(data, LOGPROBS)["logprobs"] * c).sum()
    total.backward()
    return {name: p.grad.clone() for name, p in model.trainable().items() if p.grad is not None}


def relative(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Largest difference over the largest gradient, over all parameters."""
    assert got.keys() == wanted.keys()
    scale = max(float(w.abs().max()) for w in wanted.values())
    return max(float((got[k] - wanted[k]).abs().max()) for k in wanted) / scale
