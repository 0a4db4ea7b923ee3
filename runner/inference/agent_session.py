"""The calls of one program: messages become ids that continue those of recorded turns.

messages ──begin with a recorded turn──▶ its ids + what follows it     what the policy wrote is not tokenized again
         └─ anything else ─────────────▶ rendered, a row of its own    counted where turns of an assistant are in it
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from threading import Condition, Lock
from typing import Any

from prometheus_client import Counter as MetricCounter

from runner.core.chat_answer import THINK
from runner.core.untrusted_text import parse_json
from runner.data.chat import Renderer
from runner.data.examples import image_parts, join_text_parts
from runner.environment.config import AgentEnvironmentConfig
from runner.environment.processes import EpisodeFailure
from runner.inference.chat_prompt import ChatPrompt
from runner.inference.engine import TokenEvent
from runner.inference.openai_answers import ChatCompletions, Choice
from runner.inference.openai_requests import BadRequest, ChatBody, Json
from runner.inference.served_model import ServedModel
from runner.interfaces import Rollout
from runner.interfaces.environments import Message, PolicyCall

UNSUPPORTED = ("stop", "stop_token_ids", "ignore_eos", "top_logprobs")  # of a request: the sampler of the job sets them


class NoEngine:
    """Stands for the engine of a `ServedModel`: the sampler of the job writes the answers."""

    failure = None
    num_requests = weight_version = 0
    tokens_generated = MetricCounter("run_policy_tokens", "New tokens", registry=None)


@dataclass
class ServedPolicy(ServedModel):
    """The policy under any name, rendered as in the job."""

    renderer: Renderer = field(kw_only=True)

    def adapter(self, model: str) -> str | None:
        """None: a program may name any model."""
        return None

    @cached_property
    def _renderer(self) -> Renderer:
        return self.renderer


class SampledChat(ChatCompletions):
    """A chat completion that is already sampled. rollouts: of its choices."""

    def __init__(self, served: ServedModel, body: ChatBody, prompt: ChatPrompt, rollouts: Sequence[Rollout]) -> None:
        super().__init__(served, body, prompt.ids, prompt.is_thinking, None)
        self._rollouts = rollouts

    async def generate(self) -> AsyncGenerator[tuple[Choice, str, TokenEvent], None]:
        """See `_Answer`."""
        for choice, rollout in zip(self.choices, self._rollouts, strict=True):
            last = len(rollout.ids) - 1
            raw = rollout.raw_logprobs or rollout.logprobs
            for at, (token, logprob, raw_logprob) in enumerate(zip(rollout.ids, rollout.logprobs, raw, strict=True)):
                finish: Any = rollout.finish if at == last else None
                event = TokenEvent("", token, logprob, raw_logprob, (), rollout.version, finish)
                yield choice, choice.take(event), event


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """A turn of the policy. conversation: comparable messages up to and with it; ids: the same.

    settings: tools and variables of the template; names: of the tools that it calls, by the ids of the calls
    """

    conversation: tuple[Any, ...]
    settings: Any
    ids: tuple[int, ...]
    names: Mapping[str, str]


def comparable(message: Message) -> Any:
    """A message in a form in which those that say the same are equal, whatever a client made of it."""
    calls = []
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        with suppress(ValueError):  # a client may have changed it
            arguments = parse_json(arguments) if isinstance(arguments, str) else arguments
        calls.append((call["function"]["name"], arguments))
    content = message.get("content") or ""
    text = content if image_parts(message) else join_text_parts(content)
    rest = {name: value for name, value in message.items() if name not in ("content", "tool_calls") and value}
    return rest, text, calls


@dataclass(eq=False, slots=True)
class WaitingCall:
    """A call that waits for its turn; is_taken: it is being sampled."""

    call: PolicyCall
    future: Future[Rollout | None]
    is_taken: bool = False


@dataclass(slots=True)
class Waiting:
    """What the programs of a batch wait for.

    calls: of the policy; unfinished, running: numbers of episodes; changed: of any of these
    """

    unfinished: set[int]
    running: set[int] = field(default_factory=set)
    calls: list[WaitingCall] = field(default_factory=list)
    changed: Condition = field(default_factory=Condition)

    def is_complete(self) -> bool:
        """Whether there are new calls, and each program that runs waits for the policy, or all have ended."""
        is_new = any(not one.is_taken for one in self.calls)
        return self.running <= {one.call.episode for one in self.calls} and (is_new or not self.unfinished)


class AgentSession:
    """The calls of one program. number: of its episode."""

    def __init__(self, number: int, served: ServedPolicy, config: AgentEnvironmentConfig, waiting: Waiting) -> None:
        self.number, self.key, self.waiting = number, secrets.token_hex(16), waiting
        self._served, self._config = served, config
        self.turns: list[RecordedTurn] = []
        self.unread_calls = set[str]()  # keys of those without a reply yet
        self._requests: Counter[str] = Counter()  # of the same prompt
        self.is_closed = False
        self._num_waiting, self._own_s, self._since = 0, 0.0, time.monotonic()
        self._clock = Lock()  # of these three, which two threads use

    def start_clock(self) -> None:
        """The program starts; until now its episode waited for a free worker."""
        with self._clock:
            self._since = time.monotonic()

    def check(self) -> None:
        """Raise EpisodeFailure where the program has had its time, or nobody needs it any more."""
        with self._clock:
            own = self._own_s + (0.0 if self._num_waiting else time.monotonic() - self._since)
        if self.is_closed:
            raise EpisodeFailure("closed", "the run ends")
        if own > self._config.timeout_s:
            text = f"no result within environment.timeout_s={self._config.timeout_s:g}"
            raise EpisodeFailure("timeout", f"{text}; what it has started was killed")

    def count_waiting(self, change: int) -> None:
        """A call begins or ends to wait for the policy; meanwhile the program's time stands still."""
        with self._clock:
            now = time.monotonic()
            self._own_s += 0.0 if self._num_waiting else now - self._since
            self._num_waiting, self._since = self._num_waiting + change, now

    def prepare_calls(self, body: ChatBody) -> tuple[ChatPrompt, list[PolicyCall]]:
        """The prompt of a request, and a call for each of its choices. Raises BadRequest, DataError."""
        if wrong := next((name for name in UNSUPPORTED if getattr(body, name)), None):
            raise BadRequest(f"{wrong} is set by the training job (sampler.*); leave it out", param=wrong)
        messages, tools, variables = body.conversation()
        prompt = self._continue_turn(messages, (tools, variables))
        is_unmatched = prompt is None and bool(self.turns) and any(m["role"] == "assistant" for m in messages)
        prompt = prompt or self._served.render(messages, tools, variables)
        digest = hashlib.blake2b(json.dumps(prompt.ids).encode(), digest_size=16).hexdigest()
        calls = []
        for _ in range(body.n):
            if self._requests.total() >= self._config.max_turns:
                text = f"the episode has had its {self._config.max_turns} turns (environment.max_turns)"
                raise BadRequest(text, code="max_turns")
            key = f"{digest}:{self._requests[digest]}"
            self._requests[digest] += 1
            given = (self.number, prompt.ids, tuple(messages), body.new_tokens, key, is_unmatched)
            calls.append(PolicyCall(*given))
            self.unread_calls.add(key)
        return prompt, calls

    def _continue_turn(self, messages: Sequence[Message], settings: Any) -> ChatPrompt | None:
        """The prompt that continues the longest recorded turn which the messages begin with, if there is one."""
        conversation = tuple(map(comparable, messages))
        for turn in sorted(self.turns, key=lambda turn: -len(turn.conversation)):
            size = len(turn.conversation)
            new = messages[size:]
            if conversation[:size] != turn.conversation or turn.settings != settings or not new:
                continue
            if any(message["role"] == "assistant" or image_parts(message) for message in new):
                return None
            new = [{**m, "name": turn.names.get(m["tool_call_id"], "")} if m.get("tool_call_id") else m for m in new]
            added = self._served.renderer.extend(turn.ids, new, **turn.settings[1])
            return ChatPrompt((*turn.ids, *added), self._served.decode(added).rstrip().endswith(THINK))
        return None

    def record(self, body: ChatBody, prompt: ChatPrompt, rollouts: Sequence[Rollout], content: Json) -> None:
        """Keep the turns of an answer. content: the answer as clients get it."""
        messages, *settings = body.conversation()
        conversation = tuple(map(comparable, messages))
        for choice, rollout in zip(content["choices"], rollouts, strict=True):
            message = choice["message"]
            names = {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
            whole = (*conversation, comparable(message))
            self.turns.append(RecordedTurn(whole, tuple(settings), (*prompt.ids, *rollout.ids), names))
