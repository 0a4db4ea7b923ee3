"""What answers the policy between its turns: environments and their episodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from runner.core.tool_formats import ToolFormat, Tools
from runner.interfaces.sampling import EpisodeResult, Prompt, Rollout

Message = Mapping[str, Any]  # as chat templates take it: role, content, perhaps tool_calls

# The ids of a conversation that ends with the policy's turn, and messages → the ids that follow, up to the next turn.
# Raises EnvironmentProblem if the chat template cannot write the messages.
ExtendConversation = Callable[[Sequence[int], Sequence[Message]], list[int]]


@dataclass(frozen=True, slots=True)
class EpisodeChat:
    """How prompts with tools become ids, and calls are written.

    render: messages and JSON schemas → ids, their text, whether they open a block of reasoning; raises DataError for
    what the chat template refuses; tool_format: None = the template writes no calls
    """

    render: Callable[[Sequence[Message], Tools], tuple[tuple[int, ...], str, bool]]
    tool_format: ToolFormat | None


@dataclass(frozen=True, slots=True)
class Observation:
    """What an environment says to a turn of the policy; context for the next turn, and never trained on."""

    role: str
    text: str


class Environment(Protocol):
    """Environment of one episode, used once: returns a reply to a turn, or None to end the episode."""

    def reset(self, prompt: Prompt) -> None: ...

    def step(self, answer: str) -> Observation | None: ...


@dataclass(frozen=True, slots=True)
class EnvironmentReply:
    """What comes of a turn of the policy.

    messages: context for the next turn; none = the episode is over; turn: the policy's own as a message, where its
    calls were parsed; failure: why the episode is left out; counts: for metrics environment/NAME; turns are
    counted beside them
    """

    messages: tuple[Message, ...] = ()
    turn: Message | None = None
    failure: str = ""
    counts: Mapping[str, int] = field(default_factory=dict)


class EpisodeBatch(Protocol):
    """The environments of several episodes, by the numbers of these."""

    @property
    def starts(self) -> Sequence[tuple[Prompt, str]]: ...  # what each begins with, and why it is left out, or ""

    # a turn of the policy; is_last: nothing that is said to it is read any more
    def submit(self, number: int, text: str, is_last: bool) -> None: ...

    # what has been said to turns since the last call; waits up to so many seconds for the first reply
    def replies(self, wait_s: float) -> list[tuple[int, EnvironmentReply]]: ...

    def end_episode(self, number: int) -> None: ...  # it has no further turn, and its score can be computed

    def results(self) -> list[EpisodeResult]: ...  # of every episode, once, after the end of all

    def close(self) -> None: ...  # also of episodes that have not ended


class Environments(Protocol):
    """Environments for episodes of at most `max_turns` turns of the policy.

    roles: those of its messages, as far as they are known before the first one; max_episode_tokens: of turns and
    messages, None = no limit; max_episodes: that are played at the same time; lockstep: whether all episodes have their
    replies before any continues; runs_programs: these are `ProgramEnvironments`
    """

    @property
    def runs_programs(self) -> bool: ...

    @property
    def max_turns(self) -> int: ...

    @property
    def lockstep(self) -> bool: ...

    @property
    def roles(self) -> tuple[str, ...]: ...

    @property
    def max_episode_tokens(self) -> int | None: ...

    @property
    def max_episodes(self) -> int | None: ...

    # seeds: of each episode's random numbers, the same for episodes that are to begin alike
    def start_episodes(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> EpisodeBatch: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class PolicyCall:
    """A turn that a program requests of the policy.

    episode: its number; ids, messages: of the whole prompt; max_new_tokens: None = as many as the sampler allows; key:
    of its random stream, one of its own in the episode; is_unmatched: the history has turns of an assistant that are
    not those that were recorded, so that the call starts a new row
    """

    episode: int
    ids: tuple[int, ...]
    messages: tuple[Message, ...]
    max_new_tokens: int | None
    key: str
    is_unmatched: bool = False


class ProgramEpisodes(Protocol):
    """Episodes of programs that call the policy, by their numbers."""

    # New calls, perhaps none; waits up to so many seconds until each program that runs waits for the policy. None = all
    # programs have ended
    def next_calls(self, wait_s: float) -> list[PolicyCall] | None: ...

    # rollout: None = the prompt leaves no room for a token
    def answer(self, call: PolicyCall, rollout: Rollout | None) -> None: ...

    def results(self) -> list[EpisodeResult]: ...  # of every episode, once, after the end of all

    def close(self) -> None: ...  # also of episodes that have not ended


class ProgramEnvironments(Protocol):
    """Environments whose programs call the policy, up to `max_turns` times; otherwise as `Environments`."""

    def start_programs(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> ProgramEpisodes: ...


@dataclass(frozen=True, slots=True)
class EnvironmentFactory:
    """Makes an environment for each episode, in this process; see `Environments`."""

    runs_programs: ClassVar[bool] = False
    make: Callable[[], Environment]
    max_turns: int
    roles: tuple[str, ...] = field(default=(), kw_only=True)
    max_episode_tokens: int | None = field(default=None, kw_only=True)
    max_episodes: ClassVar[None] = None
    lockstep: ClassVar[bool] = True  # in one process, nothing would be won otherwise

    def start_episodes(self, prompts: Sequence[Prompt], seeds: Sequence[int] = ()) -> LocalEpisodes:
        """An environment for an episode of each prompt."""
        return LocalEpisodes([(prompt, "") for prompt in prompts], [self.start_episode(prompt) for prompt in prompts])

    def start_episode(self, prompt: Prompt) -> Environment:
        """An environment for one episode."""
        environment = self.make()
        environment.reset(prompt)
        return environment

    def close(self) -> None:
        """Nothing was started."""


@dataclass(frozen=True, slots=True)
class LocalEpisodes:
    """Episodes in this process; see `EpisodeBatch`."""

    starts: Sequence[tuple[Prompt, str]]
    environments: Sequence[Environment]
    said: list[tuple[int, EnvironmentReply]] = field(default_factory=list)

    def submit(self, number: int, text: str, is_last: bool) -> None:
        """See `EpisodeBatch`."""
        said = None if is_last else self.environments[number].step(text)
        messages = () if said is None else ({"role": said.role, "content": said.text},)
        self.said.append((number, EnvironmentReply(messages)))

    def replies(self, wait_s: float) -> list[tuple[int, EnvironmentReply]]:
        """See `EpisodeBatch`; nothing is waited for."""
        said = [*self.said]
        self.said.clear()
        return said

    def end_episode(self, number: int) -> None:
        """Nothing is to be done."""

    def results(self) -> list[EpisodeResult]:
        """See `EpisodeBatch`; these environments have no score."""
        return [EpisodeResult() for _ in self.environments]

    def close(self) -> None:
        """Nothing was started."""
