"""OpenAI-protocol answers: requests and engine events to one JSON object, or to chunks.

    prompts × n ─▶ requests ─engine─▶ events ─Choice─▶ pieces ─▶ whole() or chunks()

Shapes: https://platform.openai.com/docs/api-reference, and vLLM's OpenAI-compatible server for what is its own
(return_token_ids, stop_reason, prompt_logprobs).
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from runner.inference.answer_text import ChatAnswer, TextStream, ToolCall
from runner.inference.engine import GenerationRequest, TokenEvent, TokenScore
from runner.inference.openai_requests import ChatBody, CompletionBody, GenerationBody
from runner.inference.served_model import ServedModel, unix_seconds

Json = dict[str, Any]
LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON does not have, as in vLLM


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
            "created": unix_seconds(),
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
        self.id, self.created = f"chatcmpl-{secrets.token_hex(12)}", unix_seconds()

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
