"""The shapes of well-known models, as their publishers' config.json say them: enough to plan without a download."""

from __future__ import annotations

from typing import Any, NamedTuple


class Shape(NamedTuple):
    """The numbers of a decoder that memory and arithmetic depend on; `experts`: their number, those that a token
    takes, and the width of one."""

    kind: str  # transformers' model_type
    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    tied: bool = False
    head_size: int | None = None
    experts: tuple[int, int, int] | None = None

    def options(self) -> dict[str, Any]:
        """The arguments of transformers' config class."""
        found: dict[str, Any] = {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": 131072,
        }
        if self.head_size is not None:
            found["head_dim"] = self.head_size
        if self.experts is not None:
            names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
            found |= dict(zip(names, self.experts, strict=True))
        return found


_QWEN2_5 = {
    "0.5B": Shape("qwen2", 151936, 896, 4864, 24, 14, 2, tied=True),
    "1.5B": Shape("qwen2", 151936, 1536, 8960, 28, 12, 2, tied=True),
    "3B": Shape("qwen2", 151936, 2048, 11008, 36, 16, 2, tied=True),
    "7B": Shape("qwen2", 152064, 3584, 18944, 28, 28, 4),
    "14B": Shape("qwen2", 152064, 5120, 13824, 48, 40, 8),
    "32B": Shape("qwen2", 152064, 5120, 27648, 64, 40, 8),
    "72B": Shape("qwen2", 152064, 8192, 29568, 80, 64, 8),
}
_QWEN3 = {
    "0.6B": Shape("qwen3", 151936, 1024, 3072, 28, 16, 8, tied=True, head_size=128),
    "1.7B": Shape("qwen3", 151936, 2048, 6144, 28, 16, 8, tied=True, head_size=128),
    "4B": Shape("qwen3", 151936, 2560, 9728, 36, 32, 8, tied=True, head_size=128),
    "8B": Shape("qwen3", 151936, 4096, 12288, 36, 32, 8, head_size=128),
    "14B": Shape("qwen3", 151936, 5120, 17408, 40, 40, 8, head_size=128),
    "32B": Shape("qwen3", 151936, 5120, 25600, 64, 64, 8, head_size=128),
    "30B-A3B": Shape("qwen3_moe", 151936, 2048, 6144, 48, 32, 4, head_size=128, experts=(128, 8, 768)),
}
_LLAMA = {
    "Llama-3.1-8B": Shape("llama", 128256, 4096, 14336, 32, 32, 8),
    "Llama-3.1-70B": Shape("llama", 128256, 8192, 28672, 80, 64, 8),
    "Llama-3.2-1B": Shape("llama", 128256, 2048, 8192, 16, 32, 8, tied=True, head_size=64),
    "Llama-3.2-3B": Shape("llama", 128256, 3072, 8192, 28, 24, 8, tied=True, head_size=128),
}
PUBLISHED: dict[str, Shape] = {
    **{f"Qwen/Qwen2.5-{size}{kind}": shape for size, shape in _QWEN2_5.items() for kind in ("", "-Instruct")},
    **{f"Qwen/Qwen3-{size}{kind}": shape for size, shape in _QWEN3.items() for kind in ("", "-Base")},
    **{f"meta-llama/{name}{kind}": shape for name, shape in _LLAMA.items() for kind in ("", "-Instruct")},
}
