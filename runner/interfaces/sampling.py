"""What is asked of a policy, what it answers, and who judges and answers that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from runner.interfaces.data import Prompt

if TYPE_CHECKING:
    from torch import Tensor


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
    """A sampled answer.

    ids: the new tokens, the end token included if it was drawn
    logprobs: of the distribution really sampled from (tempered, truncated); raw_logprobs again, where an engine reports
    only those
    raw_logprobs: at the sampling temperature, before truncation (top_k, top_p, min_p): what a ratio is taken to; None
    unless the request asked for them, and where an engine cannot report them
    version: of the weights that drew it; finish: "stop" or "length"
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    raw_logprobs: tuple[float, ...] | None
    version: int
    finish: str


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a model's answers are bounded by.

    stop_token_ids: every id that ends one; vocab_size: ids are below it; length_limit: most tokens of prompt and answer
    together, and why; None = no limit
    """

    stop_token_ids: frozenset[int]
    vocab_size: int
    length_limit: tuple[int, str] | None


@dataclass(frozen=True, slots=True)
class GreedyOutput:
    """A greedy answer: new tokens without the end token, and the finish reason: "stop" or "length"."""

    ids: tuple[int, ...]
    finish: str


# Tokens of an answer so far, maximum number of tokens → why it ends with the last one, None if it continues
StopCriterion = Callable[[Sequence[int], int], str | None]


class Sampler(Protocol):
    """Draws rollouts from a policy whose weights come from the trainer."""

    @property
    def temperature(self) -> float: ...

    @property
    def max_new_tokens(self) -> int: ...  # of one answer

    @property
    def max_model_len(self) -> int | None: ...  # tokens of prompt and answer together; None = no limit

    def load_weights(
        self, tensors: Mapping[str, Tensor] | None, version: int
    ) -> None: ...  # None: shares the trainer's own

    def sample(self, requests: Sequence[Request]) -> list[Rollout]: ...  # in the order of the requests

    # By each engine that it has, of each row, the log-probability at temperature 1 of all ids but the first
    def score(self, rows: Sequence[Sequence[int]]) -> list[list[list[float]]]: ...

    def pop_metrics(self) -> dict[str, float]: ...  # since it was last asked, for the step's numbers

    def release_memory(self) -> None: ...  # what it can do without until it is next asked for something

    def close(self) -> None: ...  # what it has started ends


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer as a reward sees it.

    ids: of all of the policy's turns; text: of the last one; messages: the whole conversation, where there is one
    """

    prompt: Prompt
    ids: tuple[int, ...]
    text: str
    finish: str
    messages: tuple[Mapping[str, Any], ...] | None = None


@dataclass(frozen=True, slots=True)
class Observation:
    """What an environment says to a turn of the policy; context for the next turn, and never trained on."""

    role: str
    text: str


class Environment(Protocol):
    """One episode's counterpart, used once: hears a turn, answers it, or ends the episode with None."""

    def reset(self, prompt: Prompt) -> None: ...

    def step(self, answer: str) -> Observation | None: ...


# The ids of a conversation that ends with the policy's turn, and a message → the ids that follow, up to the next turn.
# Raises EnvironmentProblem if the chat template cannot write the message.
ExtendConversation = Callable[[Sequence[int], Mapping[str, Any]], list[int]]


@dataclass(frozen=True, slots=True)
class EnvironmentFactory:
    """Makes an environment for each episode, of at most `max_turns` turns of the policy.

    roles: those of its observations, as far as they are known before the first one
    """

    make: Callable[[], Environment]
    max_turns: int
    roles: tuple[str, ...] = field(default=(), kw_only=True)

    def start_episodes(self, prompts: Sequence[Prompt]) -> EnvironmentBatch:
        """An environment for an episode of each prompt."""
        return EnvironmentBatch({at: self.start_episode(prompt) for at, prompt in enumerate(prompts)})

    def start_episode(self, prompt: Prompt) -> Environment:
        """An environment for one episode."""
        environment = self.make()
        environment.reset(prompt)
        return environment


@dataclass(frozen=True, slots=True)
class EnvironmentBatch:
    """The environments of several episodes, by the numbers of these."""

    environments: Mapping[int, Environment]

    def step(self, turns: Sequence[tuple[int, str]]) -> list[Observation | None]:
        """What each says to its episode's turn, given as (number, text)."""
        return [self.environments[at].step(text) for at, text in turns]


class Reward(Protocol):
    """Scores all samples of a prompt at once; None = could not be scored, which is not 0."""

    def score(self, groups: Sequence[Sequence[Completion]]) -> list[list[float | None]]: ...

    def close(self) -> None: ...


class SamplerWrapper:
    """To be narrowed; see `Sampler`."""

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
        """Hand on a version of the weights."""
        self._sampler.load_weights(tensors, version)

    def sample(self, requests: Sequence[Request]) -> list[Rollout]:
        """One rollout per request, in their order."""
        return self._sampler.sample(requests)

    def score(self, rows: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        """Log-probabilities of given rows, by each engine."""
        return self._sampler.score(rows)

    def pop_metrics(self) -> dict[str, float]:
        """Numbers since this was last asked for."""
        return self._sampler.pop_metrics()

    def release_memory(self) -> None:
        """Do without what can be done without."""
        self._sampler.release_memory()

    def close(self) -> None:
        """End what was started."""
        self._sampler.close()
