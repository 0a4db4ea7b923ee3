"""Options that all samplers share, and those of samplers with sampling parameters."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from runner.spec.base import ComponentConfig, Dtype

Stop = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0)]
WeightParts = Literal["changed", "fixed", "adapter", "base"]  # as `TrainableModel.hf_tensors` calls them
PATIENCE_S = 1500.0


class SamplerConfig(ComponentConfig):
    """Where rollouts come from."""

    group: ClassVar[str] = "sampler"
    engine: ClassVar[bool] = False  # it has weights of its own, under the names that a model on the hub has them by
    served: ClassVar[bool] = False  # it runs already, outside of the job
    shares_model: ClassVar[bool] = False  # it samples from the model itself: the trainer's, or a copy of it
    lacks_experts: ClassVar[str] = "it samples nothing"  # why it does not return the experts of its tokens

    @property
    def starts_engine(self) -> bool:
        """Whether the job starts an engine that has weights and a cache of its own."""
        return self.engine and not self.served

    @property
    def is_interruptible(self) -> bool:
        """Whether it loads newer weights between two tokens, so that its rollouts do not repeat."""
        return False

    @property
    def memory_share(self) -> float | None:
        """The share of a card that its engine takes; None = the usual one."""
        return None

    @property
    def kv_cache_bytes(self) -> int | None:
        """GiB for keys and values; None = what the share leaves."""
        return None

    @property
    def sleep_level(self) -> int | None:
        """vLLM's sleep level beside a trainer (0, 1, 2); None = the usual one for the device."""
        return None

    @property
    def max_concurrent(self) -> int | None:
        """Most answers in work at once."""
        return None

    @property
    def length_limit(self) -> int | None:
        """Most tokens of prompt and answer, or of an episode; None = as the model allows."""
        return None

    def answer_tokens(self) -> int:
        """Most tokens of one answer."""
        return 0

    @property
    def patience_s(self) -> float:
        """Seconds that a sampler outside of the trainer is waited for: fewer than ranks wait for one another."""
        return PATIENCE_S

    def weights_to_send(self) -> tuple[WeightParts, ...]:
        """What an engine is sent of the policy: at every version, and, before the first one, for all of them."""
        return ()

    def weights_dtype(self, products: Dtype) -> Dtype | None:
        """The data type of an engine's weights, where the policy computes in `products`.

        None = the engine does not belong to the job.
        """
        return None

    def logprob_tolerance(self) -> float | None:
        """Most that log-probabilities may differ from the trainer's after a sync, where it was set
        (`sync_logprob_tolerance`)."""
        return None

    def extra_weight_copies(self) -> int:
        """Versions of the weights that lie in this machine's memory beside those that the lag needs."""
        return 0

    def cards(self) -> int:
        """Devices that one process which only samples takes."""
        return 1

    def stop_criteria(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """The strings and the token ids that end an answer, beside the model's own end of sequence."""
        return (), ()

    def preflight(self) -> None:
        """Raise EnvironmentProblem for what is missing on this machine."""

    def preflight_here(self) -> None:
        """Raise EnvironmentProblem for what is missing on a machine that runs the job's processes."""


class SamplingConfig(SamplerConfig):
    """The sampled distribution, and how an answer ends."""

    temperature: float = Field(default=1.0, gt=0, description="Divides the logits; values below 1 favor likely tokens.")
    top_k: int | None = Field(default=None, ge=1, description="Sample from the k most likely tokens; null = from all.")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="Sample from the most likely tokens that reach this total probability."
    )
    min_p: float = Field(
        default=0.0, ge=0, lt=1, description="Sample from tokens with at least this fraction of the top probability."
    )
    max_new_tokens: int = Field(default=256, ge=1, description="Maximum tokens of a completion, with its end token.")
    stop: Annotated[tuple[Stop, ...], Field(strict=False)] = Field(
        default=(), description="Strings that end a completion when they appear; they stay in it."
    )
    stop_token_ids: Annotated[tuple[TokenId, ...], Field(strict=False)] = Field(
        default=(), description="Token ids that end a completion, in addition to the model's end of sequence."
    )
    max_num_seqs: int = Field(default=256, ge=1, description="Maximum number of concurrent sequences.")
    timeout_s: float | None = Field(
        default=None,
        gt=0,
        description="Timeout in seconds of a sampler outside the trainer for its part of a step; null = 1500.",
    )
    sync_logprob_tolerance: float | None = Field(
        default=None,
        gt=0,
        description="Largest difference of sampler and trainer after a weight sync (mean |log-prob.| of fixed "
        "tokens); null = 1e-3 for float32 products, 0.03 with TF32, 0.3 for others.",
    )

    @property
    def patience_s(self) -> float:
        return PATIENCE_S if self.timeout_s is None else self.timeout_s

    @property
    def max_concurrent(self) -> int | None:
        return self.max_num_seqs

    @property
    def truncates(self) -> bool:
        """Whether the sampled distribution is truncated."""
        return self.top_k is not None or self.top_p < 1 or self.min_p > 0

    def logprob_tolerance(self) -> float | None:
        return self.sync_logprob_tolerance

    def answer_tokens(self) -> int:
        return self.max_new_tokens

    def stop_criteria(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        return self.stop, self.stop_token_ids
