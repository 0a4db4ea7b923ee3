"""Records of the data, and of rollouts: requests, completions, rewards, samplers."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from runner.run_dir.manifest import PromptStyle

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    Experts = np.ndarray[tuple[int, ...], np.dtype[np.int16]]


@dataclass(frozen=True, slots=True)
class TokenizedExample:
    """A tokenized row of data: ids and weights of equal length (weight 1 = trained on, 0 = context).

    branches: where each of several continuations of the same beginning starts, in order; empty for one row
    """

    ids: tuple[int, ...]
    weights: tuple[float, ...]
    branches: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """Two completions of one prompt, the first preferred. `margin`: by how much, where the data says so.

    A completion holds everything after the prompt, its end included; all of its tokens count.
    """

    prompt: tuple[int, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]
    margin: float | None = None


@dataclass(frozen=True, slots=True)
class LabeledCompletion:
    """One answer to a prompt, and whether it is a good one."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    good: bool


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of a rollout. `columns`: the row's other columns (JSON-able), which the reward receives.

    messages: the conversation so far, if the row has one; text: what `ids` say, of plain text without BOS.
    """

    ids: tuple[int, ...]
    text: str
    messages: tuple[Mapping[str, Any], ...] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)

    def as_argument(self) -> str | list[dict[str, Any]]:
        """What a user's function gets: the messages, or the text without them."""
        return self.text if self.messages is None else [dict(m) for m in self.messages]


@dataclass(frozen=True, slots=True)
class EvalQuestion:
    """A held-out item: its tokens, and, where it has an answer, the prompt and the expected answer.

    `prompt_ids` is empty for plain text, of which only the loss can be measured. messages, columns: as of a `Prompt`,
    where the row has them; for an environment. answer_ids: empty where the answer follows the prompt in the item. key:
    digest of a prompt's row, the same under every tokenizer and chat template; empty for other kinds of rows.
    follows_reasoning: whether the completion has any reasoning before the answer, which begins with the end of it.
    """

    item: TokenizedExample
    prompt_ids: tuple[int, ...] = ()
    prompt: str = ""
    answer: str = ""
    messages: tuple[Mapping[str, Any], ...] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    answer_ids: tuple[int, ...] = ()
    key: str = ""
    follows_reasoning: bool = False


class Data(Protocol):
    """Items of one kind (see `ItemKind`) as a pure function of the step."""

    @property
    def fingerprint(self) -> str: ...  # sha256 of everything that the items depend on

    @property
    def prompt_style(self) -> PromptStyle: ...  # whether prompts go through the chat template

    @property
    def columns(self) -> Collection[str]: ...  # those that rewards see in any row

    @property
    def longest(self) -> int: ...  # tokens of the longest item, in rollouts of the longest prompt; held-out ones too

    def __len__(self) -> int: ...

    # items step·count … of the endless seeded order; a round above 0 refills a step from an order of its own
    def take(self, step: int, count: int, round: int = 0) -> Sequence[Any]: ...

    def held_out_questions(self) -> Sequence[EvalQuestion]: ...  # held-out prompts; empty if there are none

    def held_out_items(self) -> Sequence[Any]: ...  # pairs or judged answers held out; empty for other kinds


@dataclass(frozen=True, slots=True)
class Request:
    """One answer to be sampled. Equal `group`s have the very same prompt, which is computed once.

    seed: of this request's own random stream, derived by the caller from (seed, step, prompt, sample, turn); raw: asks
    for raw_logprobs, which under truncation cost a pass over the vocabulary for each token
    """

    prompt: tuple[int, ...]
    seed: int
    max_new_tokens: int
    group: int
    raw: bool = False


@dataclass(frozen=True, slots=True)
class Rollout:
    """A sampled answer. Its numbers become arrays, int64 and float64, which ranks send and join as bytes.

    ids: the new tokens, the end token included if it was drawn
    logprobs: of the distribution really sampled from (tempered, truncated); raw_logprobs again, where an engine reports
    only those
    raw_logprobs: at the sampling temperature, before truncation (top_k, top_p, min_p): what a ratio is taken to; None
    unless the request asked for them, and where an engine cannot report them
    version: of the weights that drew it, of its first token where they changed; finish: "stop" or "length"
    versions: of the weights that drew each token, by a sampler that loads newer ones meanwhile; else empty
    experts: int16 [L, M, k], the k experts of the M layers that have some, for each of the L tokens that were computed:
    the prompt and all new ones but the last; None where the sampler does not return them
    text: of the ids (see `completion_text`), decoded by the rank that sampled it; None = not decoded, as after a change
    of ids
    """

    ids: Sequence[int]
    logprobs: Sequence[float]
    raw_logprobs: Sequence[float] | None
    version: int
    finish: str
    versions: Sequence[int] = ()
    experts: Experts | None = field(default=None, compare=False)
    text: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        """Raises TypeError for what is not a number."""
        is_same = self.raw_logprobs is self.logprobs
        for name, kind in (("ids", "q"), ("versions", "q"), ("logprobs", "d"), ("raw_logprobs", "d")):
            values = getattr(self, name)
            if values is not None and not (isinstance(values, array) and values.typecode == kind):
                object.__setattr__(self, name, array(kind, iter(values)))
        if is_same:
            object.__setattr__(self, "raw_logprobs", self.logprobs)  # one array, which is sent once


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a model's answers are bounded by.

    stop_token_ids: every id that ends one; vocab_size: ids are below it; length_limit: most tokens of prompt and answer
    together, and why; None = no limit
    """

    stop_token_ids: frozenset[int]
    vocab_size: int
    length_limit: tuple[int, str] | None


class Sampler(Protocol):
    """Draws rollouts from a policy whose weights come from the trainer."""

    @property
    def temperature(self) -> float: ...

    @property
    def max_new_tokens(self) -> int: ...  # of one answer

    @property
    def max_model_len(self) -> int | None: ...  # tokens of prompt and answer together; None = no limit

    # None: shares the trainer's own
    def load_weights(self, tensors: Mapping[str, Tensor] | None, version: int) -> None: ...

    def sample(self, requests: Sequence[Request]) -> list[Rollout]: ...  # in the order of the requests

    # By each engine that it has, of each row, the log-probability at temperature 1 of all ids but the first
    def score(self, rows: Sequence[Sequence[int]]) -> list[list[list[float]]]: ...

    def pop_metrics(self) -> dict[str, float]: ...  # since the last call, for the step's metrics

    def release_memory(self) -> None: ...  # memory that it does not need until the next request

    def close(self) -> None: ...  # what it has started ends


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer as a reward sees it.

    ids: of all of the policy's turns; text: of the last one, with its special tokens but the one that ends it;
    messages: the whole conversation, where there is one; step: optimizer steps before the one that it is sampled for,
    or before the evaluation; environment: what the environment knows of the episode, where it says it
    """

    prompt: Prompt
    ids: tuple[int, ...]
    text: str
    finish: str
    messages: tuple[Mapping[str, Any], ...] | None = None
    step: int = 0
    environment: EpisodeResult | None = None


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """What an environment knows of an episode that is over.

    score: its own, None = it has none; state: attributes of the user's object, as JSON values; failure: why the
    episode is left out, empty if it is not; unread_calls: keys of a program's calls (see `PolicyCall`) whose client had
    gone before the reply
    """

    score: float | None = None
    state: Mapping[str, Any] = field(default_factory=dict)
    failure: str = ""
    unread_calls: frozenset[str] = frozenset()


class Reward(Protocol):
    """Scores all samples of a prompt at once; None = could not be scored, which is not 0."""

    def score(self, groups: Sequence[Sequence[Completion]]) -> list[list[float | None]]: ...

    def close(self) -> None: ...


# The newest version of the weights that was published, and its tensors; may be called from any thread
NewestWeights = Callable[[], tuple[int, Mapping[str, "Tensor"]]]


class RequestSource(Protocol):
    """Requests that arrive while others are answered, each with a number."""

    # those that have arrived; wait: as nothing is being sampled, return at least one; none = no more will arrive
    def take(self, wait: bool) -> Sequence[tuple[int, Request]]: ...

    def answer(self, number: int, rollout: Rollout) -> None: ...


def sample_in_waves(sample: Callable[[Sequence[Request]], list[Rollout]], source: RequestSource) -> None:
    """Answer a source's requests: all that have arrived, then those that have meanwhile, …"""
    while arrived := source.take(wait=True):
        for (number, _), rollout in zip(arrived, sample([request for _, request in arrived]), strict=True):
            source.answer(number, rollout)


def sample_from(sampler: Any, source: RequestSource) -> None:
    """Answer a source's requests: in the running batch of a `ContinuousSampler`, else in waves."""
    if isinstance(sampler, ContinuousSampler):
        sampler.sample_continuously(source)
    else:
        sample_in_waves(sampler.sample, source)


@runtime_checkable
class ContinuousSampler(Protocol):
    """A sampler whose running batch later requests can join."""

    def sample_continuously(self, source: RequestSource) -> None: ...


class InterruptibleSampler(Protocol):
    """A sampler that can load newer weights between two tokens."""

    def set_weight_source(self, newest: NewestWeights) -> None: ...


class SamplerWrapper:
    """Forwards every call to another sampler; a subclass overrides what changes."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    @property
    def temperature(self) -> float:
        """That of the distribution sampled from."""
        return self._sampler.temperature

    @property
    def max_new_tokens(self) -> int:
        """Of one answer."""
        return self._sampler.max_new_tokens

    @property
    def max_model_len(self) -> int | None:
        """Tokens of prompt and answer together; None = no limit."""
        return self._sampler.max_model_len

    def load_weights(self, tensors: Mapping[str, Tensor] | None, version: int) -> None:
        """Pass a version of the weights to the inner sampler."""
        self._sampler.load_weights(tensors, version)

    def set_weight_source(self, newest: NewestWeights) -> None:
        """Let the inner sampler, which is interruptible, load newer weights between two tokens."""
        cast(InterruptibleSampler, self._sampler).set_weight_source(newest)

    def sample(self, requests: Sequence[Request]) -> list[Rollout]:
        """One rollout per request, in their order."""
        return self._sampler.sample(requests)

    def score(self, rows: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        """Log-probabilities of given rows, by each engine."""
        return self._sampler.score(rows)

    def pop_metrics(self) -> dict[str, float]:
        """Metrics since the last call."""
        return self._sampler.pop_metrics()

    def release_memory(self) -> None:
        """Release the memory that is not needed until the next request."""
        self._sampler.release_memory()

    def close(self) -> None:
        """End what was started."""
        self._sampler.close()
