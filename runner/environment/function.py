"""A user's class or function as the environment, in the convention of TRL's `environment_factory`.

    prompt ──reset──▶ first words │ turn ──parsed──▶ calls ──▶ results … a turn without a call ──▶ score, state
           └──── all of it in a process of its own for each episode (`worker.py`), with a deadline for each request

An episode whose process raises, hangs, dies or says what cannot be read is left out, and counted by kind.
"""

from __future__ import annotations

import hashlib
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from runner.core.chat_answer import ChatAnswer
from runner.core.errors import EnvironmentProblem, Problem, SpecError
from runner.core.subprocess import JsonLines
from runner.core.tool_formats import ToolCall, ToolFormat, Tools
from runner.environment import worker
from runner.environment.config import FunctionEnvironmentConfig
from runner.interfaces import EnvironmentReply, EpisodeResult, Prompt
from runner.interfaces.environments import EpisodeChat, Message
from runner.interfaces.rewards import encode_json
from runner.run_dir.user_files import original_path
from runner.user_code.process import START_S, CapturedOutput, FunctionTarget, UserProcess, WorkerStartError

if TYPE_CHECKING:
    from runner.interfaces import Decide

log = logging.getLogger("runner")
PROGRAM = Path(worker.__file__)
REPLY_BYTES = 1 << 28
MOST_KINDS = 20


class EpisodeFailure(Exception):
    """Why an episode is left out; the first argument is its kind."""


class EpisodeProcess:
    """The process of one episode, which ends with its socket."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._lines = JsonLines(channel.fileno(), channel.fileno(), REPLY_BYTES)

    def request(self, content: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """The reply. Raises EpisodeFailure."""
        end, replies = time.monotonic() + timeout_s, list[Any]()
        try:
            self._lines.write(encode_json(content) + b"\n", timeout_s)
            while not replies:
                if (wait_s := end - time.monotonic()) <= 0:
                    raise TimeoutError
                if (arrived := self._lines.receive(wait_s)) is None:
                    raise EpisodeFailure("died", "its process exited")
                replies = arrived
        except TimeoutError as error:
            text = f"no reply within environment.timeout_s={timeout_s:g}; its process was killed"
            raise EpisodeFailure("timeout", text) from error
        except ValueError as error:
            raise EpisodeFailure("wrong reply", f"what arrived is no reply: {error}") from error
        reply: dict[str, Any] = replies[0]
        if "failed" in reply:
            raise EpisodeFailure(reply["failed"], reply["message"], reply["trace"])
        return reply

    def close(self) -> None:
        """End the process and all that it started."""
        self._channel.close()


class EpisodeProcesses:
    """Starts processes of episodes: forks of one that has imported the user's file.

    Raises WorkerStartError where that does not start.
    """

    def __init__(self, target: FunctionTarget, output: CapturedOutput) -> None:
        self._target, self.output, self._lock = target, output, Lock()
        self._worker = UserProcess(PROGRAM, target, output)
        self.tools: Tools = self._worker.ready["tools"]
        self.is_class: bool = self._worker.ready["is_class"]

    def start(self) -> EpisodeProcess:
        """A new episode; where the process that forks it has died, another one is started."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            try:
                self._worker.send_descriptor(theirs.fileno(), START_S)
            except OSError:
                log.warning("the process that starts episodes exited: %s; a new one starts", self._worker.end())
                self._worker = UserProcess(PROGRAM, self._target, self.output)
                self._worker.send_descriptor(theirs.fileno(), START_S)
        return EpisodeProcess(ours)

    def close(self) -> None:
        """End all of them."""
        self._worker.end()
        self.output.close()


class EpisodeFailures:
    """Counts episodes that are left out, logs each kind once, and raises when one after another fails."""

    def __init__(self, label: str, max_failures: int, output: CapturedOutput) -> None:
        self._label, self._max_failures, self._output = label, max_failures, output
        self._counts: Counter[str] = Counter()
        self._in_a_row = self._episodes = 0

    def record(self, failure: EpisodeFailure | None) -> None:
        """Count an episode. Raises EnvironmentProblem after `max_failures` failures in a row."""
        self._episodes += 1
        if failure is None:
            self._in_a_row = 0
            return
        kind, message, *trace = map(str, failure.args)
        kind = kind if kind in self._counts or len(self._counts) < MOST_KINDS else "other reasons"
        if kind not in self._counts:
            log.warning("%s: an episode is left out: %s", self._label, message)
        for text in trace:
            self._output.append_to_file(text)
        self._counts[kind] += 1
        self._in_a_row += 1
        if self._in_a_row >= self._max_failures:
            text = f"{self._label}: {self._in_a_row} episodes in a row failed (environment.max_failures); the last one:"
            raise EnvironmentProblem(f"{text}\n  {message}\n  fix the environment")

    def close(self) -> None:
        """Warn how many episodes were left out, by kind."""
        if self._counts:
            kinds = "; ".join(f"{count} × {kind}" for kind, count in self._counts.most_common())
            total = self._counts.total()
            log.warning("%s: %d of %d episodes were left out: %s", self._label, total, self._episodes, kinds)
        self._counts.clear()


@dataclass(slots=True)
class PlayedEpisode:
    """An episode that is played, or has ended. messages: all so far; process: None once it has failed."""

    prompt: Prompt
    seed: int
    process: EpisodeProcess | None = None
    messages: list[Message] = field(default_factory=list)
    turns: int = 0
    failure: EpisodeFailure | None = None


class FunctionEnvironments:
    """Plays episodes of a user's class or function; see `Environments`."""

    runs_programs = False
    roles: tuple[str, ...] = ()

    def __init__(
        self,
        config: FunctionEnvironmentConfig,
        processes: EpisodeProcesses,
        chat: EpisodeChat,
        failures: EpisodeFailures,
    ) -> None:
        self.config, self.processes, self.chat, self.failures = config, processes, chat, failures
        self.max_turns, self.max_episode_tokens = config.max_turns, config.max_episode_tokens
        self._threads = ThreadPoolExecutor(config.workers, thread_name_prefix="environment")

    def start_episodes(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> FunctionEpisodes:
        """See `Environments`."""
        episodes = [PlayedEpisode(prompt, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
        said = self.in_threads(self._start, episodes)
        known: dict[str, Prompt] = {}  # episodes of one prompt mostly begin alike
        for episode, words in zip(episodes, said, strict=True):
            if episode.failure is None and (words is not None or self.processes.tools):
                key = f"{id(episode.prompt)} {words}"
                known[key] = known.get(key) or self._with_tools(episode.prompt, words)
                episode.prompt = known[key]
            episode.messages = [*(episode.prompt.messages or ())]
        return FunctionEpisodes(self, episodes)

    def in_threads(self, work: Callable[[PlayedEpisode], Any], episodes: Sequence[PlayedEpisode]) -> list[Any]:
        """What `work` returns for each episode; None for one that fails, whose process is ended."""

        def run(episode: PlayedEpisode) -> Any:
            try:
                return work(episode)
            except EpisodeFailure as failure:
                episode.failure = failure
                if episode.process is not None:
                    episode.process.close()
                return None

        return list(self._threads.map(run, episodes))

    def request(self, episode: PlayedEpisode, **content: Any) -> dict[str, Any]:
        """What the episode's process replies. Raises EpisodeFailure."""
        assert episode.process is not None
        options = {"seed": episode.seed + episode.turns, "max_tool_output": self.config.max_tool_output}
        return episode.process.request(content | options, self.config.timeout_s)

    def close(self) -> None:
        """See `Environments`."""
        self._threads.shutdown(cancel_futures=True)
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
        prompt = episode.prompt
        asked = prompt.text if prompt.messages is None else [dict(m) for m in prompt.messages]
        said: str | None = self.request(episode, reset={**prompt.columns, "prompt": asked})["said"]
        return said

    def _with_tools(self, prompt: Prompt, words: str | None) -> Prompt:
        """The prompt with the tools, and what `reset` said at the end of its last message, as in TRL."""
        if prompt.messages is None:
            raise EnvironmentProblem("environment=function needs prompts that are messages, and these are plain text")
        *before, last = map(dict, prompt.messages)
        if words is not None:
            text = {"type": "text", "text": words}
            last["content"] = [*last["content"], text] if isinstance(last["content"], list) else last["content"] + words
        ids, text_of_ids, _ = self.chat.render([*before, last], self.processes.tools)
        return replace(prompt, ids=ids, text=text_of_ids, messages=(*before, last))


@dataclass(slots=True)
class FunctionEpisodes:
    """Episodes that are played side by side; see `EpisodeBatch`."""

    owner: FunctionEnvironments
    episodes: list[PlayedEpisode]

    @property
    def starts(self) -> Sequence[tuple[Prompt, str]]:
        """See `EpisodeBatch`."""
        return [(episode.prompt, failure_kind(episode.failure)) for episode in self.episodes]

    def step(self, turns: Sequence[tuple[int, str]], is_last: bool = False) -> list[EnvironmentReply]:
        """See `EpisodeBatch`; calls of a last turn are executed, too."""
        texts = {id(self.episodes[at]): text for at, text in turns}
        chosen = [self.episodes[at] for at, _ in turns]
        found = self.owner.in_threads(lambda episode: self._step(episode, texts[id(episode)]), chosen)
        return [
            EnvironmentReply(failure=failure_kind(episode.failure)) if reply is None else reply
            for episode, reply in zip(chosen, found, strict=True)
        ]

    def finish(self) -> list[EpisodeResult]:
        """See `EpisodeBatch`. Raises EnvironmentProblem where too many episodes fail."""
        whole = [episode for episode in self.episodes if episode.failure is None]
        results = dict(zip(map(id, whole), self.owner.in_threads(self._result, whole), strict=True))
        for episode in self.episodes:
            self.owner.failures.record(episode.failure)
        return [results.get(id(e)) or EpisodeResult(failure=failure_kind(e.failure)) for e in self.episodes]

    def close(self) -> None:
        """See `EpisodeBatch`."""
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
            return EnvironmentReply(said, turn, counts={"turns": 1})
        chat = self.owner.chat
        answer = ChatAnswer(chat.tool_format, self._is_thinking(episode), self.owner.processes.tools)
        parts = [*answer.push(text), *answer.close()]
        turn = _message(parts, answer.calls, episode.turns)
        counts = {"turns": 1, "calls": len(answer.calls), "malformed_calls": len(answer.errors), "tool_errors": 0}
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

    def _is_thinking(self, episode: PlayedEpisode) -> bool:
        return episode.prompt.text.rstrip().endswith("<think>")

    def _result(self, episode: PlayedEpisode) -> EpisodeResult:
        """Score and attributes at the end. Raises EpisodeFailure."""
        if not self.owner.processes.is_class:
            return EpisodeResult()
        reply = self.owner.request(episode, finish=True)
        return EpisodeResult(reply["score"], reply["state"])


def failure_kind(failure: EpisodeFailure | None) -> str:
    """Why an episode is left out; empty if it is not."""
    return "" if failure is None else str(failure.args[0])


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


def build(
    config: FunctionEnvironmentConfig,
    *,
    decide: Decide,
    chat: Callable[[], EpisodeChat],
    folder: Path | None = None,
    **_: Any,
) -> FunctionEnvironments:
    """Start the process that has the user's file. Raises SpecError if it cannot be used.

    chat: of the policy; folder: where environment.log is kept, with what the code prints, and full tracebacks
    """
    config.preflight()
    source = config.file.resolve()
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    file = original_path(source)
    label = f"{file.name}:{config.function}"
    decide("environment.path", f"{file}:{config.function}", f"{file}:{config.function}", f"sha256 {digest}")
    output = CapturedOutput(label, None if folder is None else folder / "environment.log")
    try:
        processes = EpisodeProcesses(FunctionTarget(file, config.function, env=config.env, copy=source), output)
    except WorkerStartError as error:
        raise SpecError([Problem("environment.path", f"{file} cannot be used: {error}; fix the file")]) from error
    found = chat()
    if processes.tools:
        if found.tool_format is None:
            processes.close()
            text = "the chat template writes no tool calls in a known format, so the tools cannot be called"
            raise EnvironmentProblem(f"{text}\n  use a model whose template does, or type chat.template=FILE")
        names = ", ".join(tool["function"]["name"] for tool in processes.tools)
        decide.record_fact("tool calls", found.tool_format.name, f"as the chat template writes them; tools: {names}")
    return FunctionEnvironments(config, processes, found, EpisodeFailures(label, config.max_failures, output))
