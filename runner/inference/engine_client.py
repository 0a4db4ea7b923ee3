"""Asyncio client of an engine in another process (`runner.inference.engine_process`).

open(requests) ─▶ Generation: async for event in …; leaving it early cancels what is unfinished
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from itertools import count
from typing import Any

from prometheus_client import Counter

from runner.core.errors import DataError, DeadlineExceeded, RunnerError
from runner.core.subprocess import READ_BYTES, JsonLines
from runner.inference.engine import GenerationRequest, TokenEvent, TokenScore
from runner.inference.engine_process import EngineInfo, decode_event

HANG_TIMEOUT_S = 600.0  # an engine with requests that sends nothing for so long is taken to hang
WATCH_INTERVAL_S = 1.0


class EngineLost(RunnerError):
    """The engine has ended, or hangs; the process ends with its exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class EngineClient:
    """Several requests at once to one engine, over two pipes; to be used in one event loop."""

    def __init__(self, reading: int, writing: int, *, hang_timeout_s: float = HANG_TIMEOUT_S) -> None:
        self._reading, self._writing, self._hang_timeout_s = reading, writing, hang_timeout_s
        self._lines = JsonLines()
        self._queues: dict[str, asyncio.Queue[TokenEvent | RunnerError]] = {}
        self._calls: dict[str, asyncio.Future[Any]] = {}
        self._ready: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._numbers = count()
        self._newest = time.monotonic()  # when the engine last sent something, or had nothing to do
        self.failure: RunnerError | None = None  # why no request can be answered any more
        self.failed = asyncio.Event()
        self.tokens_generated, self.weight_version = Counter("run_generation_tokens", "New tokens", registry=None), 0

    @classmethod
    async def connect(cls, reading: int, writing: int, **options: Any) -> EngineClient:
        """A client of the engine at these descriptors. `wait_ready` says when it has loaded."""
        client = cls(reading, writing, **options)
        os.set_blocking(reading, False)
        loop = asyncio.get_running_loop()
        loop.add_reader(reading, client._receive)
        pipe = os.fdopen(writing, "wb", buffering=0)
        transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, pipe)
        client._writer = asyncio.StreamWriter(transport, protocol, None, loop)
        client._watching = asyncio.create_task(client._watch())
        return client

    _writer: asyncio.StreamWriter
    _watching: asyncio.Task[None]

    async def wait_ready(self) -> EngineInfo:
        """What the engine has loaded. Raises RunnerError where it could not."""
        return await self._ready

    @property
    def num_requests(self) -> int:
        """Answers that are not finished."""
        return len(self._queues)

    @asynccontextmanager
    async def open(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[AsyncIterator[TokenEvent]]:
        """The events of some requests, as they come, until all are finished.

        What is not finished at the end of the block is cancelled. Their ids are given again, in their order: "0",
        "1", … Raises DataError for a request that cannot be answered, EngineLost where the engine has ended.
        """
        self._raise_failure()
        queue = asyncio.Queue[TokenEvent | RunnerError]()
        own = {f"{next(self._numbers)}": str(at) for at in range(len(requests))}
        self._queues |= dict.fromkeys(own, queue)
        try:
            sent = [
                {"id": id, "prompt_ids": request.prompt_ids, "params": asdict(request.params)}
                for id, request in zip(own, requests, strict=True)
            ]
            await self._send({"submit": sent})
            yield self._events(queue, own)
        finally:
            left = [id for id in own if self._queues.pop(id, None) is not None]
            if left and self.failure is None:
                self._write({"cancel": left})

    async def _events(
        self, queue: asyncio.Queue[TokenEvent | RunnerError], own: dict[str, str]
    ) -> AsyncIterator[TokenEvent]:
        left = len(own)
        while left:
            event = await queue.get()
            if isinstance(event, RunnerError):
                raise event
            left -= event.finish_reason is not None
            yield replace(event, request_id=own[event.request_id])

    async def score(self, ids: Sequence[int], logprobs: int, adapter: str | None) -> list[TokenScore]:
        """Log-probabilities of all tokens but the first; see `TorchEngine`."""
        found = await self.call("score", list(ids), logprobs, adapter)
        return [TokenScore(logprob, tuple((i, v) for i, v in top)) for logprob, top in found]

    async def call(self, verb: str, *arguments: Any) -> Any:
        """What a verb of `EngineHost` returns. Raises DataError where the engine refuses it."""
        self._raise_failure()
        id = f"{next(self._numbers)}"
        self._calls[id] = asyncio.get_running_loop().create_future()
        try:
            await self._send({"call": {"id": id, "verb": verb, "arguments": arguments}})
            return await self._calls[id]
        finally:
            self._calls.pop(id, None)

    async def close(self) -> None:
        """Close the connection, which ends the engine."""
        self._watching.cancel()
        asyncio.get_running_loop().remove_reader(self._reading)
        self._writer.close()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _write(self, message: dict[str, Any]) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")

    async def _send(self, message: dict[str, Any]) -> None:
        self._write(message)
        await self._writer.drain()

    def _receive(self) -> None:
        """Read what the engine has sent, and hand each event to its request."""
        try:
            content = os.read(self._reading, READ_BYTES)
        except BlockingIOError:
            return
        if not content:
            self._fail(EngineLost("the engine exited without an error message", 1))
            asyncio.get_running_loop().remove_reader(self._reading)
            return
        self._newest = time.monotonic()
        for message in self._lines.parse(content):
            self._dispatch(message)

    def _dispatch(self, message: dict[str, Any]) -> None:
        for one in message.get("events", ()):
            event = decode_event(one)
            self.tokens_generated.inc()
            self.weight_version = event.weight_version
            if (queue := self._queues.get(event.request_id)) is not None:  # or it was cancelled meanwhile
                queue.put_nowait(event)
                if event.finish_reason is not None:
                    del self._queues[event.request_id]
        if (id := message.get("failed")) is not None:
            refusal = DataError(message["message"])
            if (queue := self._queues.pop(id, None)) is not None:
                queue.put_nowait(refusal)
            if (future := self._calls.get(id)) is not None:
                future.set_exception(refusal)
        if (future := self._calls.get(message.get("returned", ""))) is not None:
            future.set_result(message["value"])
        if (ready := message.get("ready")) is not None:
            self._ready.set_result(EngineInfo.model_validate(ready, strict=False))
        if (error := message.get("error")) is not None:
            self._fail(EngineLost(error, message["exit_code"]))

    def _fail(self, error: RunnerError) -> None:
        """Answer all requests with an error, and every later one."""
        if self.failure is not None:
            return
        self.failure = error
        for queue in {id(queue): queue for queue in self._queues.values()}.values():
            queue.put_nowait(error)
        self._queues.clear()
        for future in self._calls.values():
            future.set_exception(error)
        if not self._ready.done():
            self._ready.set_exception(error)
        self.failed.set()

    async def _watch(self) -> None:
        """Notice an engine that hangs."""
        while self.failure is None:
            await asyncio.sleep(WATCH_INTERVAL_S)
            if not self._queues and not self._calls:
                self._newest = time.monotonic()
            elif time.monotonic() - self._newest > self._hang_timeout_s:
                text = f"the engine sent no message for {self._hang_timeout_s:g} s while {self.num_requests} run"
                self._fail(EngineLost(text, DeadlineExceeded.exit_code))
