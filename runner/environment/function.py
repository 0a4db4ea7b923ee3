"""A user's class or function as the environment, in the convention of TRL's `environment_factory`.

    prompt ──reset──▶ first words │ turn ──parsed──▶ calls ──▶ results … a turn without a call ──▶ score, state
           └──── all of it in a process of its own for each episode (`worker.py`), with a deadline for each request

An episode whose process raises, hangs, dies or says what cannot be read is left out, and counted by kind.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from runner.core.chat_answer import ChatAnswer
from runner.core.errors import EnvironmentProblem, Problem, SpecError
from runner.core.tool_formats import ToolCall, ToolFormat
from runner.environment.config import FunctionEnvironmentConfig, ToolEnvironmentConfig
from runner.environment.processes import (
    EpisodeFailure,
    EpisodeFailures,
    EpisodeProcess,
    EpisodeProcesses,
    failure_kind,
)
from runner.interfaces import EnvironmentReply, EpisodeResult, Prompt
from runner.interfaces.environments import EpisodeChat, Message
from runner.user_code.process import CapturedOutput, FunctionTarget, WorkerStartError

if TYPE_CHECKING:
    from runner.interfaces import Decide

T = TypeVar("T")
TOGETHER_S = 0.01  # between two replies that are returned together


@dataclass(slots=True)
class PlayedEpisode:
    """An episode that is played, or has ended. messages: all so far; process: None once it has failed."""

    prompt: Prompt
    seed: int
    process: EpisodeProcess | None = None
    messages: list[Message] = field(default_factory=list)
    turns: int = 0
    failure: EpisodeFailure | None = None

    def fail(self, failure: EpisodeFailure) -> None:
        """Leave the episode out, for the first reason there is, and end its process."""
        self.failure = self.failure or failure
        if self.process is not None:
            self.process.kill()


class FunctionEnvironments:
    """Plays episodes of a user's class or function; see `Environments`."""

    runs_programs = False
    roles: tuple[str, ...] = ()

    def __init__(
        self, config: ToolEnvironmentConfig, processes: EpisodeProcesses, chat: EpisodeChat, failures: EpisodeFailures
    ) -> None:
        self.config, self.processes, self.chat, self.failures = config, processes, chat, failures
        self.max_turns, self.max_episode_tokens = config.max_turns, config.max_episode_tokens
        self.lockstep, self.max_episodes = config.lockstep, 4 * config.workers
        self.threads = ThreadPoolExecutor(config.workers, thread_name_prefix="environment")

    def start_episodes(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> FunctionEpisodes:
        """See `Environments`."""
        episodes = [PlayedEpisode(prompt, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
        said = self.threads.map(partial(self.try_with, self._start), episodes)
        known: dict[str, Prompt] = {}  # episodes of one prompt mostly begin alike
        for episode, words in zip(episodes, said, strict=True):
            if episode.failure is None and (words is not None or self.processes.tools):
                key = f"{id(episode.prompt)} {words}"
                known[key] = known.get(key) or self._with_tools(episode.prompt, words)
                episode.prompt = known[key]
            episode.messages = [*(episode.prompt.messages or ())]
        return FunctionEpisodes(self, episodes)

    def try_with(self, work: Callable[[PlayedEpisode], T], episode: PlayedEpisode) -> T | None:
        """What `work` returns; None where the episode fails, whose process is ended."""
        try:
            return work(episode)
        except EpisodeFailure as failure:
            episode.fail(failure)
            return None

    def request(self, episode: PlayedEpisode, **content: Any) -> dict[str, Any]:
        """What the episode's process replies. Raises EpisodeFailure."""
        assert episode.process is not None
        options = {"seed": episode.seed + episode.turns, "max_tool_output": self.config.max_tool_output}
        return episode.process.request(content | options, self.config.timeout_s)

    def close(self) -> None:
        """See `Environments`."""
        self.threads.shutdown(cancel_futures=True)
        self.processes.close()
        self.failures.close()

    def _start(self, episode: PlayedEpisode) -> str | None:
        """Start its process; what `reset` says."""
        try:
            episode.process = self.processes.start()
        except (WorkerStartError, OSError) as error:
            raise EpisodeFailure("no process", f"no process can start: {error}") from error
        if not self.processes.is_class:
            return None
        reset = {**episode.prompt.columns, "prompt": episode.prompt.as_argument()}
        return self.request(episode, reset=reset)["said"]

    def _with_tools(self, prompt: Prompt, words: str | None) -> Prompt:
        """The prompt with the tools, and what `reset` said at the end of its last message, as in TRL."""
        if prompt.messages is None:
            raise EnvironmentProblem(
                f"environment={self.config.name} needs chat prompts (messages); the data has plain text"
            )
        *before, last = map(dict, prompt.messages)
        if words is not None:
            text = {"type": "text", "text": words}
            last["content"] = [*last["content"], text] if isinstance(last["content"], list) else last["content"] + words
        ids, text_of_ids, _ = self.chat.render([*before, last], self.processes.tools)
        return replace(prompt, ids=ids, text=text_of_ids, messages=(*before, last))


class FunctionEpisodes:
    """Episodes that are played side by side; see `EpisodeBatch`."""

    def __init__(self, owner: FunctionEnvironments, episodes: Sequence[PlayedEpisode]) -> None:
        self.owner, self.episodes = owner, episodes
        self._in_step, self._ending = dict[int, Future[EnvironmentReply | None]](), dict[int, Future[Any]]()
        self._done = SimpleQueue[int]()  # the numbers of episodes with a reply
        self._given_up: list[Future[EnvironmentReply | None]] = []
        self._waits_since: float | None = None

    @property
    def starts(self) -> Sequence[tuple[Prompt, str]]:
        """See `EpisodeBatch`."""
        return [(episode.prompt, failure_kind(episode.failure)) for episode in self.episodes]

    def submit(self, number: int, text: str, is_last: bool) -> None:
        """See `EpisodeBatch`; calls of a last turn are executed, too."""
        work = partial(self.owner.try_with, lambda episode: self._step(episode, text))
        future = self.owner.threads.submit(work, self.episodes[number])
        self._in_step[number] = future
        future.add_done_callback(lambda _: self._done.put(number))

    def replies(self, wait_s: float) -> list[tuple[int, EnvironmentReply]]:
        """See `EpisodeBatch`; replies of about the same time are returned together."""
        found, now = dict[int, EnvironmentReply](), time.monotonic()
        end = now + min(wait_s, self.owner.config.max_wait_s or wait_s)
        while self._in_step:
            try:
                number = self._done.get(timeout=max(end - time.monotonic(), 0.0))
            except Empty:
                break
            if (future := self._in_step.pop(number, None)) is not None:
                found[number] = future.result() or EnvironmentReply(failure=failure_kind(self.episodes[number].failure))
                end = min(end, time.monotonic() + TOGETHER_S)
        is_waiting = wait_s and self._in_step and not found
        self._waits_since = (self._waits_since or now) if is_waiting else None
        return [*found.items(), *self._too_slow()]

    def _too_slow(self) -> list[tuple[int, EnvironmentReply]]:
        """The episodes that the others have waited for too long, as failed; they are given up."""
        limit_s = self.owner.config.max_wait_s
        if limit_s is None or self._waits_since is None or time.monotonic() - self._waits_since < limit_s:
            return []
        late = [*self._in_step]
        self._given_up += self._in_step.values()
        self._in_step.clear()
        text = f"no reply within environment.max_wait_s={limit_s:g} after all others; its process was killed"
        for number in late:
            self.episodes[number].fail(EpisodeFailure("too slow", text))
        return [(number, EnvironmentReply(failure="too slow")) for number in late]

    def end_episode(self, number: int) -> None:
        """See `EpisodeBatch`."""
        episode = self.episodes[number]
        if episode.failure is None:
            self._ending[number] = self.owner.threads.submit(self.owner.try_with, self._result, episode)

    def results(self) -> list[EpisodeResult]:
        """See `EpisodeBatch`. Raises EnvironmentProblem where too many episodes fail."""
        late = wait(self._ending.values(), self.owner.config.max_wait_s).not_done
        for number, future in self._ending.items():
            if future in late:
                self.episodes[number].fail(EpisodeFailure("too slow", "no score within environment.max_wait_s"))
        found = {at: future.result() for at, future in self._ending.items()}
        for episode in self.episodes:
            self.owner.failures.record(episode.failure)
        return [found.get(at) or EpisodeResult(failure=failure_kind(e.failure)) for at, e in enumerate(self.episodes)]

    def close(self) -> None:
        """See `EpisodeBatch`."""
        pending = [*self._in_step.values(), *self._given_up, *self._ending.values()]
        for future in pending:
            future.cancel()
        for episode in self.episodes:
            if episode.process is not None:
                episode.process.kill()
        wait(pending)  # whose processes are dead
        for episode in self.episodes:
            if episode.process is not None:
                episode.process.close()

    def _step(self, episode: PlayedEpisode, text: str) -> EnvironmentReply:
        """What comes of a turn. Raises EpisodeFailure."""
        episode.turns += 1
        if not self.owner.processes.is_class:
            turn: Message = {"role": "assistant", "content": text}
            episode.messages.append(turn)
            message = self.owner.request(episode, messages=[dict(m) for m in episode.messages])["message"]
            said = () if message is None else (message,)
            episode.messages += said
            return EnvironmentReply(said, turn)
        chat, is_thinking = self.owner.chat, episode.prompt.text.rstrip().endswith("<think>")
        answer = ChatAnswer(chat.tool_format, is_thinking, self.owner.processes.tools)
        parts = [*answer.push(text), *answer.close()]
        turn = _message(parts, answer.calls, episode.turns)
        counts = {"calls": len(answer.calls), "malformed_calls": len(answer.errors), "tool_errors": 0}
        messages = [
            _parse_error_result(error, chat.tool_format, f"bad{episode.turns:03}{at:03}")
            for at, error in enumerate(answer.errors)
        ]
        if answer.calls:
            calls = [{"name": call.name, "arguments": call.arguments} for call in answer.calls]
            reply = self.owner.request(episode, calls=calls)
            counts["tool_errors"] = sum(failed for _, failed in reply["results"])
            results = zip(turn["tool_calls"], reply["results"], strict=True)
            messages = [_result(call["function"]["name"], call["id"], said) for call, (said, _) in results] + messages
            if reply["done"]:
                messages = []
        episode.messages += [turn, *messages]
        return EnvironmentReply(tuple(messages), turn, counts=counts)

    def _result(self, episode: PlayedEpisode) -> EpisodeResult:
        """Score and attributes at the end. Raises EpisodeFailure."""
        if not self.owner.processes.is_class:
            return EpisodeResult()
        reply = self.owner.request(episode, finish=True)
        return EpisodeResult(reply["score"], reply["state"])


def _message(parts: Sequence[tuple[str, str]], calls: Sequence[ToolCall], turn: int) -> dict[str, Any]:
    """A turn of the policy as a message, with its reasoning and calls apart."""
    texts = {part: "".join(text for kind, text in parts if kind == part) for part in ("content", "reasoning")}
    made = [
        {
            "type": "function",
            "id": f"c{turn:04}{at:04}",  # nine letters and digits, as Mistral's templates want it
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for at, call in enumerate(calls)
    ]
    message = {"role": "assistant", "content": texts["content"]}
    reasoning = {"reasoning_content": texts["reasoning"]} if texts["reasoning"] else {}
    return message | reasoning | ({"tool_calls": made} if made else {})


def _result(name: str, call: str, text: str) -> Message:
    return {"role": "tool", "name": name, "tool_call_id": call, "content": text}


def _parse_error_result(error: str, tool_format: ToolFormat | None, call: str) -> Message:
    """What the policy is told of a call that cannot be read."""
    assert tool_format is not None
    return _result("unknown", call, f"error: the call cannot be read as {tool_format.name}: {error}")


def build(config: FunctionEnvironmentConfig, *, decide: Decide, **context: Any) -> FunctionEnvironments:
    """Start the process that has the user's file. Raises SpecError if it cannot be used.

    context: see `play_target`
    """
    target = FunctionTarget.from_config(config, decide)
    return play_target(config, target, target.label, "environment.path", decide=decide, **context)


def play_target(
    config: ToolEnvironmentConfig,
    target: FunctionTarget,
    label: str,
    key: str,
    *,
    decide: Decide,
    chat: Callable[[], EpisodeChat],
    folder: Path | None = None,
    **_: Any,
) -> FunctionEnvironments:
    """Start the process that plays episodes of a target. Raises SpecError for the option `key`.

    label: of what is logged; chat: of the policy; folder: where environment.log is kept, with what the code prints,
    and full tracebacks
    """
    output = CapturedOutput(label, None if folder is None else folder / "environment.log")
    try:
        processes = EpisodeProcesses(target, output)
    except WorkerStartError as error:
        raise SpecError([Problem(key, f"{label} cannot be used: {error}; see environment.log")]) from error
    found = chat()
    if processes.tools:
        if found.tool_format is None:
            processes.close()
            text = "the chat template writes no tool calls in a known format, so the tools cannot be called"
            raise EnvironmentProblem(f"{text}\n  use a model whose template does, or type chat.template=FILE")
        names = ", ".join(tool["function"]["name"] for tool in processes.tools)
        decide.record_fact("tool calls", found.tool_format.name, f"as the chat template writes them; tools: {names}")
    return FunctionEnvironments(config, processes, found, EpisodeFailures(label, config.max_failures, output))
