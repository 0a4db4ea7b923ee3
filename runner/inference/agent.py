"""Episodes of programs that call the policy: the recording endpoint in front of the trainer's sampler.

    program ──/SESSION/v1/chat/completions──▶ AgentSession: messages ──ids──▶ pending ──next_calls──▶ trainer: sampler
       ▲                                        ▲  └── recorded turns ◀── rollouts ◀──answer───────────┘
       └───────────── answer, stream ───────────┘

A request whose messages begin with those of a recorded turn, its answer included, continues the ids of that turn: what
the policy wrote is not tokenized again. Any other request is rendered from its messages, and starts a new row.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from runner.data.chat import Renderer
from runner.environment.config import AgentEnvironmentConfig
from runner.environment.processes import EpisodeFailure, EpisodeFailures, failure_kind
from runner.environment.program import run_program
from runner.inference.agent_session import AgentSession, NoEngine, SampledChat, ServedPolicy, Waiting, WaitingCall
from runner.inference.engine_client import EngineClient
from runner.inference.engine_process import EngineInfo
from runner.inference.http import HttpLimits, listen, serve_in_thread
from runner.inference.openai_requests import BadRequest, ChatBody
from runner.inference.openai_routes import event_stream, openai_routes, read_body, while_connected
from runner.inference.server import create_app
from runner.interfaces import EpisodeResult, Prompt, Rollout
from runner.interfaces.environments import PolicyCall
from runner.user_code.process import CapturedOutput

log = logging.getLogger("runner")
LIMITS = HttpLimits(max_body_bytes=256 << 20)
SET_BY_SAMPLER = ("temperature", "top_p", "top_k", "min_p", "seed")  # fields of a request that are not used


class AgentEnvironments:
    """Runs programs whose calls are answered by the trainer's sampler; see `ProgramEnvironments`."""

    runs_programs, lockstep = True, False
    roles: tuple[str, ...] = ()
    max_episode_tokens = max_episodes = None

    def __init__(
        self, config: AgentEnvironmentConfig, served: ServedPolicy, failures: EpisodeFailures, output: CapturedOutput
    ) -> None:
        self.config, self.served, self.failures, self.output = config, served, failures, output
        self.max_turns = config.max_turns
        self.sessions: dict[str, AgentSession] = {}
        self._warned = False
        self.threads = ThreadPoolExecutor(config.workers, thread_name_prefix="agent")
        self._ends = ExitStack()
        listener = self._ends.enter_context(listen("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        models = next(route for route in openai_routes(served) if route.path == "/v1/models")
        routes = [
            Route("/{session}/v1/chat/completions", self._answer_chat, methods=["POST"]),
            Route("/{session}/v1/models", models.endpoint),
        ]
        self._ends.enter_context(serve_in_thread(create_app(served, routes=routes), listener, LIMITS))

    def start_programs(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> AgentEpisodes:
        """See `ProgramEnvironments`."""
        return AgentEpisodes(self, prompts, seeds)

    def close(self) -> None:
        """See `Environments`."""
        for session in self.sessions.values():
            session.is_closed = True
        self.threads.shutdown(cancel_futures=True)
        self._ends.close()
        self.output.close()
        self.failures.close()

    async def _answer_chat(self, request: Request) -> Response:
        """A chat completion of the policy."""
        session, served = self.sessions.get(request.path_params["session"]), self.served
        if session is None:
            raise BadRequest("no episode has this URL; the episode may be over", status=404)
        body = await read_body(served, request, ChatBody)
        self._warn_of_ignored(body)
        prompt, calls = await served.in_thread(lambda: session.prepare_calls(body))
        rollouts = await while_connected(served, request, self._sample(session, calls))
        content = await SampledChat(served, body, prompt, rollouts).whole()
        session.record(body, prompt, rollouts, content)
        session.unread_calls.difference_update(call.key for call in calls)
        if body.stream:
            return event_stream(served, SampledChat(served, body, prompt, rollouts).chunks())
        return JSONResponse(content)

    async def _sample(self, session: AgentSession, calls: Sequence[PolicyCall]) -> list[Rollout]:
        """What the trainer's sampler writes. Raises BadRequest where there is no room for it."""
        mine = [WaitingCall(call, Future()) for call in calls]
        waiting = session.waiting
        with waiting.changed:
            waiting.calls += mine
            waiting.changed.notify_all()
        session.count_waiting(1)
        try:
            found = [await asyncio.wrap_future(one.future) for one in mine]
        finally:
            session.count_waiting(-1)
            with waiting.changed:
                waiting.calls[:] = [one for one in waiting.calls if one not in mine]
        if rollouts := [rollout for rollout in found if rollout is not None]:
            return rollouts
        text = f"the prompt of {len(calls[0].ids)} tokens leaves no room for an answer; shorten it"
        raise BadRequest(text, param="messages", code="context_length_exceeded")

    def _warn_of_ignored(self, body: ChatBody) -> None:
        ignored = [name for name in SET_BY_SAMPLER if name in body.model_fields_set]
        if ignored and not self._warned:
            self._warned = True
            log.warning("a program sets %s; the policy is sampled as sampler.* says", ", ".join(ignored))


@dataclass
class AgentEpisodes:
    """Programs side by side; see `ProgramEpisodes`."""

    owner: AgentEnvironments
    prompts: Sequence[Prompt]
    seeds: Sequence[int]
    futures: list[Future[EpisodeResult]] = field(init=False)

    def __post_init__(self) -> None:
        owner, numbers = self.owner, range(len(self.prompts))
        self.waiting = Waiting(set(numbers))
        self.sessions = [AgentSession(at, owner.served, owner.config, self.waiting) for at in numbers]
        owner.sessions |= {session.key: session for session in self.sessions}
        self.futures = [owner.threads.submit(self._run, session) for session in self.sessions]

    def next_calls(self, wait_s: float) -> list[PolicyCall] | None:
        """See `ProgramEpisodes`; in the order of the episodes."""
        waiting = self.waiting
        with waiting.changed:
            waiting.changed.wait_for(waiting.is_complete, wait_s)
            if not waiting.calls and not waiting.unfinished:
                return None
            new = [one for one in waiting.calls if not one.is_taken]
            for one in new:
                one.is_taken = True
        return sorted((one.call for one in new), key=lambda call: (call.episode, call.key))

    def answer(self, call: PolicyCall, rollout: Rollout | None) -> None:
        """See `ProgramEpisodes`."""
        with self.waiting.changed:
            found = [one for one in self.waiting.calls if one.call is call]
            for one in found:  # or its client has gone
                self.waiting.calls.remove(one)
                if one.future.set_running_or_notify_cancel():
                    one.future.set_result(rollout)

    def results(self) -> list[EpisodeResult]:
        """See `ProgramEpisodes`. Raises EnvironmentProblem where too many episodes fail."""
        found = []
        for session, future in zip(self.sessions, self.futures, strict=True):
            error = future.exception()
            if error is not None and not isinstance(error, EpisodeFailure):
                raise error
            if error is None and not session.turns:
                error = EpisodeFailure("no call", "the program ended without a call of the policy")
            self.owner.failures.record(error)
            result = future.result() if error is None else EpisodeResult(failure=failure_kind(error))
            found.append(replace(result, unread_calls=frozenset(session.unread_calls)))
        return found

    def close(self) -> None:
        """See `ProgramEpisodes`; programs that still run are killed."""
        for session, future in zip(self.sessions, self.futures, strict=True):
            session.is_closed = True
            future.cancel()
            del self.owner.sessions[session.key]
        with self.waiting.changed:
            for call in self.waiting.calls:
                call.future.cancel()

    def _run(self, session: AgentSession) -> EpisodeResult:
        """Run the program of an episode. Raises EpisodeFailure."""
        owner, prompt = self.owner, self.prompts[session.number]
        task = {
            "prompt": prompt.as_argument(),
            "columns": dict(prompt.columns),
            "seed": self.seeds[session.number],
        }
        with self.waiting.changed:
            self.waiting.running.add(session.number)
        session.start_clock()
        try:
            url = f"{owner.url}/{session.key}/v1"
            return run_program(owner.config, task, url, session.key, session.check, owner.output)
        finally:
            with self.waiting.changed:
                self.waiting.running.discard(session.number)
                self.waiting.unfinished.discard(session.number)
                self.waiting.changed.notify_all()


def build(
    config: AgentEnvironmentConfig, *, renderer: Callable[[], Renderer], folder: Path | None = None, **_: Any
) -> AgentEnvironments:
    """Start the endpoint that programs call.

    renderer: of the policy's chats; folder: where environment.log is kept, with what programs print
    """
    config.preflight()
    chat = renderer()
    output = CapturedOutput(config.command, None if folder is None else folder / "environment.log")
    info = EngineInfo(
        name="policy",
        adapters=(),
        stop_token_ids=(chat.tokenizer.eos_token_id,),
        vocab_size=2**31,
        length_limit=None,
        step=None,
        chat_date=chat.chat.date,
    )
    served = ServedPolicy(info, chat.tokenizer, cast(EngineClient, NoEngine()), renderer=chat)
    return AgentEnvironments(config, served, EpisodeFailures(config.command, config.max_failures, output), output)
