"""The process that runs a user's environment, with a process for each episode.

It is started and guarded as `runner.user_code.worker` says.

    runner ══ socket ══▶ worker: has imported the file ── fork ──▶ guard ── fork ──▶ episode: one object of the class
           ══ a socket for each episode, passed to the worker ═══════════════════▶   one line of JSON per request

An episode that hangs, dies or leaves processes behind is ended alone: when its socket closes, its guard kills all
below it. Methods that are async run in one event loop; those of one turn are awaited together.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from runner.user_code.worker import (
    Serve,
    answer,
    describe_error,
    error_location,
    first_cause,
    keep_from_children,
    main,
    run_guarded,
    seed_generators,
    select_arguments,
)

NO_TOOLS = ("reset", "score", "get_reward", "is_done")  # methods that have a meaning of their own; get_reward: TRL's
STATE_BYTES = 1 << 20


def prepare(target: Callable[..., Any], path: str) -> tuple[dict[str, Any], Serve]:
    """The tools of a class, and what plays its episodes.

    Raises TypeError for a class that is no environment, ValueError for type hints without a schema.
    """
    tools: list[Any] = []
    if inspect.isclass(target):
        if not callable(getattr(target, "reset", None)):
            raise TypeError(f"{target.__name__} has no method reset(prompt, **columns)")
        tools = _in_child(partial(_schemas, target))
    names = [tool["function"]["name"] for tool in tools]
    return {"tools": tools, "is_class": inspect.isclass(target)}, partial(_serve, target, names, path)


def tool_names(target: type) -> list[str]:
    """The public methods that the policy may call."""
    methods = inspect.getmembers(target, inspect.isfunction)
    return [name for name, _ in methods if not name.startswith("_") and name not in NO_TOOLS]


def _schemas(target: type) -> list[Any]:
    if own := getattr(target, "_tool_schemas", None):  # of an MCP server
        return list(own())
    from transformers.utils import chat_template_utils  # in a child, so that the episodes' processes stay small

    # It imports torch to know the type of a tensor, which takes seconds; whoever names that type has imported it.
    chat_template_utils.is_torch_available = lambda: "torch" in sys.modules  # type: ignore[attr-defined]
    return [chat_template_utils.get_json_schema(getattr(target, name)) for name in tool_names(target)]


def _in_child(work: Callable[[], list[Any]]) -> list[Any]:
    """What `work` returns in a forked process. Raises ValueError with the text of its error."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            reply: dict[str, Any] = {"found": work()}
        except Exception as error:  # of the user's hints and docstrings, or of the connection to an MCP server
            cause = first_cause(error)
            reply = {"error": str(cause) or type(cause).__name__}
        with os.fdopen(writing, "w") as file:
            json.dump(reply, file)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    os.waitpid(child, 0)
    reply = json.loads(text or '{"error": "the process that reads the type hints exited"}')
    if "error" in reply:
        raise ValueError(reply["error"])
    return list(reply["found"])


def _serve(target: Callable[..., Any], tools: Sequence[str], path: str, channel: socket.socket, stack: int) -> None:
    """Fork an episode for each socket that arrives."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # guards end by themselves
    gc.freeze()  # what was imported stays shared with the episodes
    while True:
        _, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
        if not descriptors:
            return
        own = socket.socket(fileno=descriptors[0])
        if os.fork() == 0:
            os._exit(run_guarded(partial(_play, UserEpisode(target, tools), path, own), own.fileno(), ()))
        own.close()


def _play(episode: UserEpisode, path: str, channel: socket.socket) -> int:
    """Answer the requests of one episode until its socket ends."""
    keep_from_children(channel.fileno())
    me = os.getpid()
    with asyncio.Runner() as loop:
        for line in channel.makefile("rb"):
            try:
                reply = loop.run(episode.reply(json.loads(line)))
            except Exception as error:  # user code may raise anything; the episode is left out
                kind = f"{type(first_cause(error)).__name__} at {error_location(first_cause(error), path)}"
                reply = {"failed": kind, "message": describe_error(error, path), "trace": traceback.format_exc()}
            if os.getpid() != me:
                os._exit(0)  # the environment forked and its child came back: only one of the two may answer
            answer(channel, reply)
    os._exit(0)  # whatever threads the environment has left


class UserEpisode:
    """One episode: an object of the user's class, or the user's function."""

    def __init__(self, target: Callable[..., Any], tools: Sequence[str]) -> None:
        self._target, self._tools = target, tools
        self._object: Any = None

    async def reply(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a request, as JSON values."""
        seed_generators(request["seed"])
        limit = request["max_tool_output"]
        if "reset" in request:
            self._object = self._target()
            said = await _value(self._object.reset(**select_arguments(self._object.reset, request["reset"])))
            return {"said": None if said is None else _text(said)}
        if "messages" in request:
            return {"message": _as_message(await _value(self._target(request["messages"])), limit)}
        if "calls" in request:
            results = await self._call_all(request["calls"])
            done = getattr(self._object, "is_done", None)
            results = [(cut_middle(text, limit), failed) for text, failed in results]
            return {"results": results, "done": bool(await _value(done())) if done else False}
        return {"score": await self._score(), "state": _state(self._object)}

    async def _call_all(self, calls: Sequence[Mapping[str, Any]]) -> list[tuple[str, bool]]:
        """The result of each call as text, and whether the tool raised; async tools run side by side."""
        begun = [self._begin_call(call["name"], call["arguments"]) for call in calls]
        pending = [value for value in begun if inspect.isawaitable(value)]
        ended = iter(await asyncio.gather(*pending, return_exceptions=True))
        values = [next(ended) if inspect.isawaitable(value) else value for value in begun]
        for value in values:
            if getattr(value, "ends_episode", False):  # an EpisodeError: the user's file has its own copy of the class
                raise value
        return [
            (f"error: {first_cause(v)}", True) if isinstance(v, BaseException) else (_text(v), False) for v in values
        ]

    def _begin_call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """What the tool returns, which may be awaitable, or the exception that it raises."""
        if name not in self._tools:
            return LookupError(f"no tool {name}; tools: {', '.join(self._tools)}")
        try:
            if call_tool := getattr(self._object, "_call_tool", None):  # of an MCP server, whose tools are no methods
                return call_tool(name, arguments)
            return getattr(self._object, name)(**arguments)
        except Exception as error:  # as in TRL, a tool says by an exception what is wrong with a call
            return error

    async def _score(self) -> float | None:
        method = getattr(self._object, "score", None) or getattr(self._object, "get_reward", None)
        score = await _value(method()) if callable(method) else None
        return None if score is None else float(score)


async def _value(returned: Any) -> Any:
    return await returned if inspect.isawaitable(returned) else returned


def _text(value: Any) -> str:
    """Text that a tokenizer takes: no half of a surrogate pair."""
    return str(value).encode("utf-8", errors="replace").decode()


def _as_message(value: Any, limit: int) -> dict[str, str] | None:
    """What a function returned: a message, or the text of a user's message."""
    if value is None:
        return None
    message = value if isinstance(value, Mapping) else {"content": value}
    return {"role": str(message.get("role", "user")), "content": cut_middle(_text(message["content"]), limit)}


def cut_middle(text: str, limit: int) -> str:
    """The text, of which the middle is left out and marked where it has more than `limit` characters."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters left out …]\n{text[len(text) - half :]}"


def _state(instance: Any) -> dict[str, Any]:
    """The public attributes that are JSON values, for rewards."""
    found: dict[str, Any] = {}
    for name, value in getattr(instance, "__dict__", {}).items():
        try:
            if not name.startswith("_") and len(json.dumps(value, allow_nan=False)) <= STATE_BYTES:
                found[name] = value
        except (TypeError, ValueError, RecursionError):  # no JSON value, which rewards do not see
            continue
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], prepare))
