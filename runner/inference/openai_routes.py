"""The routes of OpenAI's protocol: models, completions, chat completions; and /tokenize, /health, /metrics.

    body ─parse─▶ prompts ─▶ requests ─engine─▶ events ─Choice─▶ pieces ─▶ one JSON answer, or server-sent events

Shapes: https://platform.openai.com/docs/api-reference, and vLLM's OpenAI-compatible server for what is its own
(return_token_ids, stop_reason, prompt_logprobs, /tokenize).
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from runner.core.errors import RunnerError
from runner.inference.answer_text import ChatAnswer, TextStream, ToolCall
from runner.inference.engine import GenerationRequest, TokenEvent, TokenScore
from runner.inference.openai_requests import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    TokenizeBody,
    parse_body,
)
from runner.inference.served_model import ServedModel

Json = dict[str, Any]
T = TypeVar("T")
ReadBody = Callable[[Request], Awaitable[bytes]]
LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON does not have, as in vLLM


def error_response(message: str, status: int, *, param: str | None = None, code: str | None = None) -> JSONResponse:
    """An error in OpenAI's shape."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": param, "code": code}}, status)


@dataclass
class Choice:
    """One answer in the making."""

    index: int
    prompt: tuple[int, ...]
    text: TextStream
    events: list[TokenEvent] = field(default_factory=list)
    finish: str | None = None

    def take(self, event: TokenEvent) -> str:
        """The text that a new token adds."""
        self.events.append(event)
        piece = self.text.push(event.token_id)
        if event.finish_reason is not None:
            self.finish = event.finish_reason
            piece += self.text.close()
        return piece

    @property
    def ids(self) -> list[int]:
        """Of the answer, the end token included."""
        return [event.token_id for event in self.events]

    def stop_reason(self, body: GenerationBody) -> str | int | None:
        """What ended the answer: a stop string or one of the request's ids; None = the model's own end, or its
        length."""
        if self.text.stop_reason is not None:
            return self.text.stop_reason
        last = self.events[-1].token_id if self.events else None
        return last if self.finish == "stop" and last in body.stop_token_ids else None


def token_usage(choices: Sequence[Choice], prompts: Sequence[Sequence[int]]) -> Json:
    """The token counts of an answer."""
    prompt, completion = sum(map(len, prompts)), sum(len(choice.events) for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


async def generate(
    served: ServedModel, requests: Sequence[GenerationRequest], choices: Sequence[Choice]
) -> AsyncGenerator[tuple[Choice, str, TokenEvent], None]:
    """Every new token of several requests, with the text that it adds to its choice."""
    served.count_prompts(requests)
    start, is_first = time.monotonic(), True
    if not requests:
        return
    async with served.client.open(requests) as events:
        async for event in events:
            if is_first:
                served.first_token_s.observe(time.monotonic() - start)
                is_first = False
            choice = choices[int(event.request_id)]
            yield choice, choice.take(event), event
    served.duration_s.observe(time.monotonic() - start)


async def while_connected(served: ServedModel, request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which ends where the client goes. Raises ClientDisconnect then."""

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.create_task(work), asyncio.create_task(wait_for_disconnect())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            return tasks[0].result()
        served.cancelled += 1
        raise ClientDisconnect
    finally:
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)


def event_stream(served: ServedModel, chunks: AsyncGenerator[Json, None]) -> StreamingResponse:
    """Server-sent events: each chunk, then [DONE]. An error after the first byte is an event, too."""

    async def lines() -> AsyncIterator[str]:
        try:
            async for chunk in chunks:
                yield f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"
        except RunnerError as error:
            content = bytes(error_response(str(error), 500).body).decode()
            yield f"data: {content}\n\n"
        except asyncio.CancelledError:
            served.cancelled += 1
            raise
        finally:
            await chunks.aclose()
        yield "data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


# --- completions ---


@dataclass
class Completions:
    """A request to /v1/completions: its prompts, and n choices for each."""

    served: ServedModel
    body: CompletionBody
    prompts: list[tuple[int, ...]]
    adapter: str | None

    def __post_init__(self) -> None:
        body, served = self.body, self.served
        self.requests: list[GenerationRequest] = []
        self.choices: list[Choice] = []
        self.head: Json = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model,
        }
        for prompt in self.prompts:
            served.new_tokens(prompt, body.max_tokens)
            for params in body.sampling_params(max(body.max_tokens, 1), body.logprobs or 0, self.adapter):
                self.requests.append(GenerationRequest("", prompt, params))
                self.choices.append(Choice(len(self.choices), prompt, served.text_stream(body)))
                if body.max_tokens == 0:
                    self.choices[-1].finish = "length"
        if body.max_tokens == 0:
            self.requests = []

    async def whole(self) -> Json:
        """The answer as one object."""
        texts = [""] * len(self.choices)
        async for choice, piece, _ in generate(self.served, self.requests, self.choices):
            texts[choice.index] += piece
        scores: dict[tuple[int, ...], list[TokenScore]] = {}
        body = self.body
        if body.prompt_logprobs is not None or (body.echo and body.logprobs is not None):
            most = max(body.prompt_logprobs or 0, body.logprobs or 0)
            for prompt in self.prompts:
                scores[prompt] = await self.served.client.score(prompt, most, self.adapter)
        choices = [
            self._choice_json(choice, text, scores.get(choice.prompt, []))
            for choice, text in zip(self.choices, texts, strict=True)
        ]
        return {**self.head, "choices": choices, "usage": token_usage(self.choices, self.prompts)}

    async def chunks(self) -> AsyncGenerator[Json, None]:
        """The answer piece by piece."""
        body = self.body
        async for choice, piece, event in generate(self.served, self.requests, self.choices):
            one: Json = {"index": choice.index, "text": piece, "finish_reason": choice.finish, "logprobs": None}
            if body.logprobs is not None:
                one["logprobs"] = self._logprobs([event], [], 0)
            if body.return_token_ids:
                one["token_ids"] = [event.token_id]
                if len(choice.events) == 1:
                    one["prompt_token_ids"] = list(choice.prompt)
            if choice.finish is not None:
                one["stop_reason"] = choice.stop_reason(body)
            if piece or choice.finish is not None or body.return_token_ids or body.logprobs is not None:
                yield {**self.head, "choices": [one]}
        if body.stream_options.include_usage:
            yield {**self.head, "choices": [], "usage": token_usage(self.choices, self.prompts)}

    def _choice_json(self, choice: Choice, text: str, scores: list[TokenScore]) -> Json:
        body, served = self.body, self.served
        shown = list(choice.prompt) if body.echo else []
        prefix = served.decode(choice.prompt) if body.echo else ""
        if body.echo and isinstance(body.prompts()[choice.index // body.n], str):
            prefix = str(body.prompts()[choice.index // body.n])
        one: Json = {"index": choice.index, "text": prefix + text, "finish_reason": choice.finish, "logprobs": None}
        one["stop_reason"] = choice.stop_reason(body)
        if body.logprobs is not None:
            one["logprobs"] = self._logprobs(choice.events, shown, body.logprobs, scores)
        if body.return_token_ids:
            one |= {"token_ids": choice.ids, "prompt_token_ids": list(choice.prompt)}
        if body.prompt_logprobs is not None:
            one["prompt_logprobs"] = [
                None,
                *(self._prompt_logprob(choice.prompt, at, scores) for at in range(len(scores))),
            ]
        return one

    def _prompt_logprob(self, prompt: tuple[int, ...], at: int, scores: list[TokenScore]) -> Json:
        """vLLM's form: token id → its log-probability."""
        top = scores[at].top_logprobs[: self.body.prompt_logprobs]
        found = {**dict(top), prompt[at + 1]: scores[at].logprob}
        return {str(i): {"logprob": finite(v), "decoded_token": self.served.decode([i])} for i, v in found.items()}

    def _logprobs(
        self, events: Sequence[TokenEvent], prompt: list[int], top: int, scores: Sequence[TokenScore] = ()
    ) -> Json:
        """The lists of tokens and log-probabilities; the first token of an echoed prompt has none."""
        served, body = self.served, self.body
        ids = [*prompt, *(event.token_id for event in events)]
        values = (
            [*(score.logprob for score in scores), *(served.logprob(event) for event in events)]
            if prompt
            else [served.logprob(event) for event in events]
        )
        tops = [*(score.top_logprobs for score in scores if prompt), *(event.top_logprobs for event in events)]
        tokens = [served.token_text(i, body) for i in ids]
        offsets, offset = [], 0
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        first = [None] if prompt else []
        named = [
            {served.token_text(i, body): finite(v) for i, v in (*one[: body.logprobs], (id, value))}
            for one, id, value in zip(tops, ids[len(first) :], values, strict=True)
        ]
        return {
            "tokens": tokens,
            "token_logprobs": [*first, *map(finite, values)],
            "top_logprobs": [*first, *named] if body.logprobs else None,
            "text_offset": offsets,
        }


def finite(value: float) -> float:
    """A log-probability that JSON can say."""
    return value if math.isfinite(value) else LEAST_LOGPROB


# --- chat ---


@dataclass
class ChatCompletions:
    """A request to /v1/chat/completions with n choices."""

    served: ServedModel
    body: ChatBody
    prompt: tuple[int, ...]
    is_thinking: bool
    adapter: str | None

    def __post_init__(self) -> None:
        body, served = self.body, self.served
        most = served.new_tokens(self.prompt, body.new_tokens)
        params = body.sampling_params(most, body.top_logprobs, self.adapter)
        self.requests = [GenerationRequest("", self.prompt, one) for one in params]
        self.choices = [Choice(at, self.prompt, served.text_stream(body)) for at in range(body.n)]
        tools = bool(body.tools) and body.tool_choice == "auto"
        self.answers = [ChatAnswer(tools, self.is_thinking) for _ in params]
        self.id, self.created = f"chatcmpl-{secrets.token_hex(12)}", int(time.time())

    def _head(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.body.model}

    async def whole(self) -> Json:
        """The answer as one object."""
        parts: list[dict[str, str]] = [{"content": "", "reasoning": ""} for _ in self.choices]
        async for choice, piece, _ in generate(self.served, self.requests, self.choices):
            for part, text in self._split(choice, piece):
                parts[choice.index][part] += text
        choices = []
        for choice, answer, texts in zip(self.choices, self.answers, parts, strict=True):
            message: Json = {"role": "assistant", "content": texts["content"] or (None if answer.calls else "")}
            if texts["reasoning"]:
                message["reasoning_content"] = texts["reasoning"]
            if answer.calls:
                message["tool_calls"] = [_call_json(call) for call in answer.calls]
            one: Json = {
                "index": choice.index,
                "message": message,
                "finish_reason": self._finish(choice),
                "logprobs": None,
            }
            one["stop_reason"] = choice.stop_reason(self.body)
            if self.body.logprobs:
                one["logprobs"] = {"content": [self._logprob(event) for event in choice.events]}
            if self.body.return_token_ids:
                one["token_ids"] = choice.ids
            choices.append(one)
        extra = {"prompt_token_ids": list(self.prompt)} if self.body.return_token_ids else {}
        usage = token_usage(self.choices, [self.prompt])
        return {**self._head("chat.completion"), "choices": choices, "usage": usage, **extra}

    async def chunks(self) -> AsyncGenerator[Json, None]:
        """The answer piece by piece; a tool call comes as a whole."""
        for choice in self.choices:
            yield self._chunk(choice, {"role": "assistant", "content": ""})
        waiting: dict[int, list[Json]] = {choice.index: [] for choice in self.choices}  # log-probabilities to be sent
        ids: dict[int, list[int]] = {choice.index: [] for choice in self.choices}
        async for choice, piece, event in generate(self.served, self.requests, self.choices):
            if self.body.logprobs:
                waiting[choice.index].append(self._logprob(event))
            ids[choice.index].append(event.token_id)
            found = self._split(choice, piece)
            deltas: list[Json] = [{"reasoning_content" if part == "reasoning" else part: text} for part, text in found]
            if choice.finish is not None:
                calls = self.answers[choice.index].calls
                deltas += [{"tool_calls": [{"index": at, **_call_json(call)}]} for at, call in enumerate(calls)]
                deltas.append({})
            for at, delta in enumerate(deltas):
                chunk = self._chunk(choice, delta, is_last=choice.finish is not None and at == len(deltas) - 1)
                if waiting[choice.index]:
                    chunk["choices"][0]["logprobs"] = {"content": waiting[choice.index]}
                    waiting[choice.index] = []
                if self.body.return_token_ids and ids[choice.index]:
                    chunk["choices"][0]["token_ids"], ids[choice.index] = ids[choice.index], []
                yield chunk
        if self.body.stream_options.include_usage:
            usage = token_usage(self.choices, [self.prompt])
            yield {**self._head("chat.completion.chunk"), "choices": [], "usage": usage}

    def _split(self, choice: Choice, piece: str) -> list[tuple[str, str]]:
        """New text as reasoning and content."""
        answer = self.answers[choice.index]
        found: list[tuple[str, str]] = [*answer.push(piece)] if piece else []
        return [*found, *answer.close()] if choice.finish is not None else found

    def _finish(self, choice: Choice) -> str | None:
        return "tool_calls" if self.answers[choice.index].calls and choice.finish == "stop" else choice.finish

    def _chunk(self, choice: Choice, delta: Json, is_last: bool = False) -> Json:
        one: Json = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
        if is_last:
            one |= {"finish_reason": self._finish(choice), "stop_reason": choice.stop_reason(self.body)}
        return {**self._head("chat.completion.chunk"), "choices": [one]}

    def _logprob(self, event: TokenEvent) -> Json:
        tops = [self._token_json(i, v) for i, v in event.top_logprobs]
        return {**self._token_json(event.token_id, self.served.logprob(event)), "top_logprobs": tops}

    def _token_json(self, id: int, value: float) -> Json:
        text = self.served.token_text(id, self.body)
        return {"token": text, "logprob": finite(value), "bytes": list(text.encode())}


def _call_json(call: ToolCall) -> Json:
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


# --- routes ---


def openai_routes(served: ServedModel, read_body: ReadBody) -> list[Route]:
    """The routes over one model. read_body: the body of a request, within the server's bounds."""

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model_json(served, name) for name in served.names]})

    async def model(request: Request) -> Response:
        served.adapter(name := request.path_params["name"])
        return JSONResponse(_model_json(served, name))

    async def completions(request: Request) -> Response:
        body = parse_body(CompletionBody, await read_body(request))
        adapter = served.adapter(body.model)
        prompts = await served.in_thread(
            lambda: [served.encode(p) if isinstance(p, str) else tuple(p) for p in body.prompts()]
        )
        return await _answer(request, Completions(served, body, prompts, adapter))

    async def chat(request: Request) -> Response:
        body = parse_body(ChatBody, await read_body(request))
        adapter = served.adapter(body.model)
        prompt = await served.in_thread(lambda: served.render(body.messages, body.tools, body.chat_template_kwargs))
        return await _answer(request, ChatCompletions(served, body, prompt.ids, prompt.is_thinking, adapter))

    async def _answer(request: Request, work: Completions | ChatCompletions) -> Response:
        if work.body.stream:
            if served.client.failure is not None:
                raise served.client.failure
            return event_stream(served, work.chunks())
        return JSONResponse(await while_connected(served, request, work.whole()))

    async def tokenize(request: Request) -> Response:
        body = parse_body(TokenizeBody, await read_body(request))
        if body.model is not None:
            served.adapter(body.model)
        if body.messages is not None:
            messages = body.messages
            ids = (await served.in_thread(lambda: served.render(messages, body.tools, body.chat_template_kwargs))).ids
        else:
            ids = await served.in_thread(lambda: served.encode(body.prompt or "", body.add_special_tokens))
        return JSONResponse({"tokens": list(ids), "count": len(ids), "max_model_len": served.info.length_limit})

    async def health(request: Request) -> Response:
        if (failure := served.client.failure) is not None:
            return error_response(str(failure), 503)
        return JSONResponse({"status": "ok"})

    async def metrics(request: Request) -> Response:
        return PlainTextResponse(served.metrics_text(), media_type="text/plain; version=0.0.4")

    return [
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/health", health),
        Route("/metrics", metrics),
    ]


def _model_json(served: ServedModel, name: str) -> Json:
    parent = served.info.name if name in served.info.adapters else None
    about = {"id": name, "object": "model", "created": served.created, "owned_by": "run", "parent": parent}
    return {**about, "max_model_len": served.info.length_limit}
