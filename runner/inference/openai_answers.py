"""OpenAI-protocol answers: requests and engine events to one JSON object, or to chunks.

    prompts × n ─▶ requests ─engine─▶ events ─Choice─▶ pieces ─▶ whole() or chunks()

Shapes: https://platform.openai.com/docs/api-reference, and vLLM's OpenAI-compatible server for what is its own
(return_token_ids, stop_reason, prompt_logprobs).
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from runner.core.chat_answer import ChatAnswer
from runner.core.tool_formats import Part, ToolCall, ToolFormat
from runner.inference.answer_text import TextStream
from runner.inference.engine import GenerationRequest, SamplingParams, TokenEvent, TokenScore
from runner.inference.openai_requests import ChatBody, CompletionBody, GenerationBody, Json
from runner.inference.served_model import ServedModel, unix_seconds

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
            piece += self.text.close()
            self.finish = event.finish_reason if self.text.stop_reason is None else "stop"
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


class _Answer:
    """What both kinds of answers have in common: their choices, and the events that fill these."""

    def __init__(self, served: ServedModel, body: GenerationBody, prompts: Sequence[tuple[int, ...]], id: str) -> None:
        self.served, self.prompts = served, prompts
        self.requests: list[GenerationRequest] = []
        self.choices: list[Choice] = []
        self.head: Json = {"id": f"{id}-{secrets.token_hex(12)}", "created": unix_seconds(), "model": body.model}

    def add_choices(
        self,
        body: GenerationBody,
        prompt: tuple[int, ...],
        params: Sequence[SamplingParams],
        tool_format: ToolFormat | None = None,
    ) -> None:
        """Add n choices. tool_format: whose marks a turn shows; None = the text continues the prompt."""
        context = prompt if tool_format is None else ()
        for one in params:
            self.requests.append(GenerationRequest("", prompt, one))
            self.choices.append(Choice(len(self.choices), prompt, self.served.text_stream(body, tool_format, context)))

    async def generate(self) -> AsyncGenerator[tuple[Choice, str, TokenEvent], None]:
        """Every new token, with the text that it adds to its choice."""
        served, start, is_first = self.served, time.monotonic(), True
        served.prompt_tokens.inc(sum(len(request.prompt_ids) for request in self.requests))
        if not self.requests:
            return
        async with served.client.open(self.requests) as events:
            async for event in events:
                if is_first:
                    served.first_token_s.observe(time.monotonic() - start)
                    is_first = False
                choice = self.choices[int(event.request_id)]
                yield choice, choice.take(event), event
        served.duration_s.observe(time.monotonic() - start)

    def usage(self) -> Json:
        """The token counts."""
        prompt, completion = sum(map(len, self.prompts)), sum(len(choice.events) for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


# --- completions ---


class Completions(_Answer):
    """A request to /v1/completions: its prompts, and n choices for each."""

    def __init__(
        self, served: ServedModel, body: CompletionBody, prompts: Sequence[tuple[int, ...]], adapter: str | None
    ) -> None:
        """Raises BadRequest for what does not fit."""
        super().__init__(served, body, prompts, "cmpl")
        self.body, self.adapter = body, adapter
        self.head["object"] = "text_completion"
        for prompt in prompts:
            served.new_tokens(prompt, body.max_tokens)
            params = body.sampling_params(max(body.max_tokens, 1), body.logprobs or 0, served.logprobs_mode, adapter)
            self.add_choices(body, prompt, params)
        if body.max_tokens == 0:
            self.requests = []
            for choice in self.choices:
                choice.finish = "length"

    async def whole(self) -> Json:
        """The answer as one object."""
        texts = [""] * len(self.choices)
        async for choice, piece, _ in self.generate():
            texts[choice.index] += piece
        scores: dict[tuple[int, ...], list[TokenScore]] = {}
        body = self.body
        if body.prompt_logprobs is not None or (body.echo and body.logprobs is not None):
            most = max(body.prompt_logprobs or 0, body.logprobs or 0)
            for prompt in self.prompts:
                scores[prompt] = await self.served.client.score(prompt, most, self.adapter)
        choices = await self.served.in_thread(
            lambda: [
                self._choice_json(choice, text, scores.get(choice.prompt, []))
                for choice, text in zip(self.choices, texts, strict=True)
            ]
        )
        return {**self.head, "choices": choices, "usage": self.usage()}

    async def chunks(self) -> AsyncGenerator[Json, None]:
        """The answer piece by piece."""
        body, offsets = self.body, [0] * len(self.choices)  # text_offset of each choice's next token
        async for choice, piece, event in self.generate():
            one: Json = {"index": choice.index, "text": piece, "finish_reason": choice.finish, "logprobs": None}
            if body.logprobs is not None:
                one["logprobs"] = self._logprobs([event], [], [], offsets[choice.index])
                offsets[choice.index] += len(one["logprobs"]["tokens"][0])
            if body.return_token_ids:
                one["token_ids"] = [event.token_id]
                if len(choice.events) == 1:
                    one["prompt_token_ids"] = list(choice.prompt)
            if choice.finish is not None:
                one["stop_reason"] = choice.stop_reason(body)
            if piece or choice.finish is not None or body.return_token_ids or body.logprobs is not None:
                yield {**self.head, "choices": [one]}
        if body.stream_options.include_usage:
            yield {**self.head, "choices": [], "usage": self.usage()}

    def _choice_json(self, choice: Choice, text: str, scores: list[TokenScore]) -> Json:
        body, served = self.body, self.served
        shown = list(choice.prompt) if body.echo else []
        prefix = served.decode(choice.prompt) if body.echo else ""
        if body.echo and isinstance(body.prompts()[choice.index // body.n], str):
            prefix = str(body.prompts()[choice.index // body.n])
        one: Json = {"index": choice.index, "text": prefix + text, "finish_reason": choice.finish, "logprobs": None}
        one["stop_reason"] = choice.stop_reason(body)
        if body.logprobs is not None:
            one["logprobs"] = self._logprobs(choice.events, shown, scores)
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
        self, events: Sequence[TokenEvent], prompt: list[int], scores: Sequence[TokenScore], offset: int = 0
    ) -> Json:
        """The lists of tokens and log-probabilities; the first token of an echoed prompt has none."""
        served, body = self.served, self.body
        scores = scores if prompt else []
        ids = [*prompt, *(event.token_id for event in events)]
        values = [*(score.logprob for score in scores), *(served.logprob(event) for event in events)]
        tops = [*(score.top_logprobs for score in scores), *(event.top_logprobs for event in events)]
        tokens = [served.token_text(i, body) for i in ids]
        offsets = []
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


class ChatCompletions(_Answer):
    """A request to /v1/chat/completions with n choices.

    is_thinking: the prompt has opened a block of reasoning.
    """

    def __init__(
        self, served: ServedModel, body: ChatBody, prompt: tuple[int, ...], is_thinking: bool, adapter: str | None
    ) -> None:
        """Raises BadRequest for what does not fit."""
        super().__init__(served, body, [prompt], "chatcmpl")
        self.body = body
        params = body.sampling_params(
            served.new_tokens(served.vocabulary_ids(prompt), body.new_tokens),
            body.top_logprobs,
            served.logprobs_mode,
            adapter,
        )
        self.add_choices(body, prompt, params, served.tool_format)
        tools = body.conversation()[1] if body.tool_choice == "auto" else []
        own = served.tool_format if tools or served.tool_format.has_channels else None
        self.answers = [ChatAnswer(own, is_thinking, tools) for _ in params]

    async def whole(self) -> Json:
        """The answer as one object."""
        parts: list[dict[str, str]] = [{"content": "", "reasoning": ""} for _ in self.choices]
        async for choice, piece, _ in self.generate():
            for part, text in self._split(choice, piece):
                parts[choice.index][part] += text
        choices = await self.served.in_thread(
            lambda: [self._choice_json(*one) for one in zip(self.choices, parts, strict=True)]
        )
        one: Json = {"object": "chat.completion", "choices": choices, "usage": self.usage()}
        return {**self.head, **one, **self._prompt_ids()}

    def _prompt_ids(self) -> Json:
        asks = self.body.return_token_ids
        return {"prompt_token_ids": self.served.vocabulary_ids(self.prompts[0])} if asks else {}

    async def chunks(self) -> AsyncGenerator[Json, None]:
        """The answer piece by piece; a tool call comes as a whole."""
        for choice in self.choices:
            yield {**self._chunk(choice, {"role": "assistant", "content": ""}), **self._prompt_ids()}
        waiting: list[list[TokenEvent]] = [[] for _ in self.choices]  # whose log-probabilities and ids are to be sent
        async for choice, piece, event in self.generate():
            events = waiting[choice.index]
            events.append(event)
            deltas: list[Json] = [
                {"reasoning_content" if part == "reasoning" else part: text}
                for part, text in self._split(choice, piece)
            ]
            if choice.finish is not None:
                calls = self.answers[choice.index].calls
                deltas += [
                    {"tool_calls": [{"index": at, **_call_json(choice, at, call)}]} for at, call in enumerate(calls)
                ]
                deltas.append({})
            for at, delta in enumerate(deltas):
                chunk = self._chunk(choice, delta, is_last=choice.finish is not None and at == len(deltas) - 1)
                if events and self.body.logprobs:
                    chunk["choices"][0]["logprobs"] = {"content": list(map(self._logprob, events))}
                if events and self.body.return_token_ids:
                    chunk["choices"][0]["token_ids"] = [one.token_id for one in events]
                events.clear()
                yield chunk
        if self.body.stream_options.include_usage:
            yield {**self.head, "object": "chat.completion.chunk", "choices": [], "usage": self.usage()}

    def _split(self, choice: Choice, piece: str) -> list[tuple[Part, str]]:
        """New text as reasoning and content."""
        answer = self.answers[choice.index]
        found = answer.push(piece) if piece else []
        return [*found, *answer.close()] if choice.finish is not None else found

    def _choice_json(self, choice: Choice, texts: dict[str, str]) -> Json:
        calls = self.answers[choice.index].calls
        message: Json = {"role": "assistant", "content": texts["content"] or (None if calls else "")}
        if texts["reasoning"]:
            message["reasoning_content"] = texts["reasoning"]
        if calls:
            message["tool_calls"] = [_call_json(choice, at, call) for at, call in enumerate(calls)]
        one: Json = {"index": choice.index, "message": message, "logprobs": None, **self._end_json(choice)}
        if self.body.logprobs:
            one["logprobs"] = {"content": [self._logprob(event) for event in choice.events]}
        if self.body.return_token_ids:
            one["token_ids"] = choice.ids
        return one

    def _end_json(self, choice: Choice) -> Json:
        finish = "tool_calls" if self.answers[choice.index].calls and choice.finish == "stop" else choice.finish
        return {"finish_reason": finish, "stop_reason": choice.stop_reason(self.body)}

    def _chunk(self, choice: Choice, delta: Json, is_last: bool = False) -> Json:
        one: Json = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
        choices = [one | self._end_json(choice)] if is_last else [one]
        return {**self.head, "object": "chat.completion.chunk", "choices": choices}

    def _logprob(self, event: TokenEvent) -> Json:
        tops = [self._token_json(i, v) for i, v in event.top_logprobs]
        return {**self._token_json(event.token_id, self.served.logprob(event)), "top_logprobs": tops}

    def _token_json(self, id: int, value: float) -> Json:
        text = self.served.token_text(id, self.body)
        return {"token": text, "logprob": finite(value), "bytes": list(self.served.token_bytes(id))}


def _call_json(choice: Choice, at: int, call: ToolCall) -> Json:
    """A call; the same answer to the same prompt has the same ids.

    Mistral's templates want nine letters and digits.
    """
    content = json.dumps([choice.prompt, choice.ids, at]).encode()
    return {
        "id": hashlib.blake2b(content).hexdigest()[:9],
        "type": "function",
        "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
    }
