"""What draws rollouts from the policy."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from runner.spec.base import ComponentConfig

Stop = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0)]


class SamplerConfig(ComponentConfig):
    """Where rollouts come from."""

    group: ClassVar[str] = "sampler"

    def answer_tokens(self) -> int:
        """Most tokens of one answer."""
        return 0

    def stopping(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """The strings and the token ids that end an answer, beside the model's own end of sequence."""
        return (), ()


class NoSamplerConfig(SamplerConfig):
    """No rollouts: for algorithms that learn from given data."""

    factory: ClassVar[str] = "runner.sampler.none:build"
    name: Literal["none"] = "none"


class TorchSamplerConfig(SamplerConfig):
    """The model itself draws, in this process: rollouts are equal bit for bit in every run on the same machine."""

    factory: ClassVar[str] = "runner.sampler.torch:build"
    name: Literal["torch"] = "torch"
    temperature: float = Field(default=1.0, gt=0, description="Divides the logits; below 1 the likely grows likelier.")
    top_k: int | None = Field(default=None, ge=1, description="Draw from this many likeliest tokens; null = from all.")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="Draw from the fewest likeliest tokens whose probability reaches this."
    )
    min_p: float = Field(
        default=0.0, ge=0, lt=1, description="Draw from tokens at least this many times as likely as the likeliest."
    )
    max_new_tokens: int = Field(default=256, ge=1, description="Most tokens of an answer, the end token included.")
    stop: Annotated[tuple[Stop, ...], Field(strict=False)] = Field(
        default=(), description="Strings that end an answer when they appear in it; they stay part of it."
    )
    stop_tokens: Annotated[tuple[TokenId, ...], Field(strict=False)] = Field(
        default=(), description="Token ids that end an answer, beside the model's own end of sequence."
    )
    batch_size: int = Field(
        default=256, ge=1, description="Most answers in work at once; one that ends makes room for the next."
    )

    def answer_tokens(self) -> int:
        return self.max_new_tokens

    def stopping(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        return self.stop, self.stop_tokens


COMPONENTS = (NoSamplerConfig, TorchSamplerConfig)
