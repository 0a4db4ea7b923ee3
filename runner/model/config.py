"""What a user can set of a model."""

from typing import Any, ClassVar, Literal, Self

from pydantic import Field

from runner.spec.base import ComponentConfig, absolute_if_local


class ModelConfig(ComponentConfig):
    """A causal language model and how it runs ragged batches."""

    group: ClassVar[str] = "model"
    tokenizer_factory: ClassVar[str]  # "module:attribute" of config -> tokenizer, needed before the weights are
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="Data type of the stored weights; bfloat16 only beside an adapter, which learns in float32.",
    )
    autocast: Literal["none", "bfloat16"] = Field(
        default="none", description="Data type that matrix products are computed in; none = that of the weights."
    )
    layout: Literal["packed", "padded"] = Field(
        default="packed",
        description="How a ragged batch runs: packed = end to end without padding; padded = the model's own attention.",
    )
    gradient_checkpointing: bool = Field(
        default=False, description="Recompute activations in the backward pass: less memory, about a third more time."
    )
    head_chunk_tokens: int = Field(
        default=2048, ge=1, description="Tokens whose logits exist at once in the chunked LM head."
    )

    def absolute(self) -> Self:
        """The same config with the paths of local folders made absolute."""
        return self

    def sizes(self) -> dict[str, tuple[str, int]]:
        """What parallelism divides (heads, kv_heads, features, layers, experts): the option that says it, and how many.
        Empty where only the model's own folder says it."""
        return {}


class TinyConfig(ModelConfig):
    """A small Qwen2-type model from random weights, with its own byte-level tokenizer and chat template."""

    factory: ClassVar[str] = "runner.model.tiny:build"
    tokenizer_factory: ClassVar[str] = "runner.model.tiny:tokenizer"
    name: Literal["tiny"] = "tiny"
    hidden_size: int = Field(default=128, ge=8, multiple_of=8, description="Width of the residual stream.")
    intermediate_size: int = Field(default=384, ge=8, description="Width of the feed-forward layers.")
    layers: int = Field(default=4, ge=1, description="Decoder layers.")
    heads: int = Field(default=4, ge=1, description="Attention heads.")
    kv_heads: int = Field(
        default=4, ge=1, description="Key-value heads; fewer than heads means grouped-query attention."
    )
    vocab_size: int = Field(default=512, ge=259, description="Rows of the embedding; at least the tokenizer's 259.")
    max_positions: int = Field(default=2048, ge=16, description="Longest sequence in tokens.")

    def sizes(self) -> dict[str, tuple[str, int]]:
        names = {"heads": "heads", "kv_heads": "kv_heads", "features": "intermediate_size", "layers": "layers"}
        return {kind: (f"model.{name}", getattr(self, name)) for kind, name in names.items()}

    def problems(self, job: Any) -> list[tuple[str, str]]:
        found = []
        if job.data.max_length > self.max_positions:
            text = f"{job.data.max_length} is above model.max_positions={self.max_positions}"
            found.append(("data.max_length", f"{text}; lower the one or raise the other"))
        if self.hidden_size % self.heads:
            found.append(("model.heads", f"{self.heads} heads do not divide model.hidden_size={self.hidden_size}"))
        elif (self.hidden_size // self.heads) % 2:
            found.append(
                ("model.heads", "rotary positions need an even head size; change model.heads or model.hidden_size")
            )
        if self.heads % self.kv_heads:
            found.append(("model.kv_heads", f"{self.kv_heads} does not divide model.heads={self.heads}"))
        return found


class HfConfig(ModelConfig):
    """Any Hugging Face causal LM, by folder or hub id."""

    factory: ClassVar[str] = "runner.model.hf:build"
    tokenizer_factory: ClassVar[str] = "runner.model.hf:tokenizer"
    name: Literal["hf"] = "hf"
    path: str = Field(
        min_length=1, description="Folder or hub id of the model, e.g. /models/Qwen3-0.6B or Qwen/Qwen3-0.6B."
    )
    revision: str | None = Field(
        default=None, description="Branch, tag or commit on the hub; null = its default branch."
    )
    tokenizer: str | None = Field(default=None, description="Folder or hub id of the tokenizer; null = model.path.")
    trust_remote_code: bool = Field(
        default=False,
        description="Run Python code that comes with the model. Only for models whose code you have read.",
    )
    from_scratch: bool = Field(default=False, description="Keep the architecture, draw the weights at random.")

    def absolute(self) -> Self:
        tokenizer = self.tokenizer and absolute_if_local(self.tokenizer)
        return self.model_copy(update={"path": absolute_if_local(self.path), "tokenizer": tokenizer})


COMPONENTS = (TinyConfig, HfConfig)
