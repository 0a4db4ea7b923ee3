"""The served model as the routes know it: its names, tokenizer, limits and metrics."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Literal, TypeVar

import psutil
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from runner.core.media import without_media
from runner.core.tool_formats import FORMATS, ToolFormat
from runner.data.chat import Renderer
from runner.data.chat_template import unread_fault
from runner.data.config import ChatConfig
from runner.data.tokenization import bos_and_eos
from runner.inference.answer_text import TextStream, hidden_token_ids, token_bytes, token_text
from runner.inference.chat_prompt import ChatPrompt, render_chat
from runner.inference.engine import TokenEvent
from runner.inference.engine_client import EngineClient
from runner.inference.engine_process import EngineInfo
from runner.inference.openai_requests import BadRequest, GenerationBody
from runner.interfaces.media import ImageEntry, ProcessedImage, images_of, vocabulary_ids

LONGEST_ANSWER = 4096  # of a chat that names no max_tokens, by a model without a longest row
SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # upper ends of the histograms' buckets

T = TypeVar("T")
G = TypeVar("G", bound=GenerationBody)


def unix_seconds() -> int:
    """Now, as OpenAI's `created` says it."""
    return int(datetime.now(UTC).timestamp())


class EngineImages:
    """The images of requests, which the engine's process keeps and processes; see `ImageTokenizer`.

    For threads other than that of the event loop, in which it is made.
    """

    def __init__(self, client: EngineClient, placeholder: str, token_id: int) -> None:
        self.placeholder, self.token_id = placeholder, token_id
        self._client, self._loop = client, asyncio.get_running_loop()

    def __deepcopy__(self, memo: object) -> EngineImages:
        """Itself: copies of a tokenizer have the same images."""
        return self

    def add(self, source: str | bytes, *, several: bool) -> tuple[ImageEntry, ProcessedImage]:
        """See `ImageTokenizer`; of contents alone, and without pixels. Raises DataError."""
        assert isinstance(source, bytes)
        call = self._client.call("add_image", base64.b64encode(source).decode(), several)
        id, text, count = asyncio.run_coroutine_threadsafe(call, self._loop).result()
        return ImageEntry(id, "", len(source), 0, several, count), ProcessedImage(text, count, {})


@dataclass
class ServedModel:
    """A model behind an engine, with its tokenizer.

    logprobs_mode: which log-probabilities clients get: of the model at temperature 1 ("raw"), or of the distribution
    sampled from ("processed")
    """

    info: EngineInfo
    tokenizer: Any
    client: EngineClient
    logprobs_mode: Literal["raw", "processed"] = "raw"
    created: int = field(default_factory=unix_seconds)

    def __post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "tokenize")  # one: a tokenizer must not be used by two at once
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("run_requests", "Responses", ["path", "status"], registry=registry)
        self.cancelled = Counter("run_requests_cancelled", "Requests whose client has gone", registry=registry)
        self.prompt_tokens = Counter("run_prompt_tokens", "Tokens of prompts", registry=registry)
        more: dict[str, Any] = {"registry": registry, "buckets": SECONDS}
        self.first_token_s = Histogram("run_time_to_first_token_seconds", "Until the first token", **more)
        self.duration_s = Histogram("run_request_duration_seconds", "Until the last token", **more)
        registry.register(self.client.tokens_generated)
        if self.info.image_token is not None:
            self.tokenizer.image_reader = EngineImages(self.client, *self.info.image_token)
        now = {
            "run_requests_in_flight": lambda: self.client.num_requests,
            "run_weight_version": lambda: self.client.weight_version,
            "process_start_time_seconds": psutil.Process().create_time,  # a client notices a restart
        }
        for name, value in now.items():
            Gauge(name, name, registry=registry).set_function(value)

    @property
    def names(self) -> list[str]:
        """What a request's `model` may be: the model and its adapters."""
        return list(dict.fromkeys([self.info.name, *self.info.adapters]))

    def adapter(self, model: str) -> str | None:
        """The adapter that a request's `model` means. Raises BadRequest for a model that is not here."""
        if model not in self.names:
            text = f"the model '{model}' does not exist; models: {', '.join(self.names)}"
            raise BadRequest(text, param="model", status=404, code="model_not_found")
        return model if model in self.info.adapters else None

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run what may take long, such as tokenizing a long text, beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    # --- prompts ---

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """The ids of a plain prompt, behind what the tokenizer begins every text with, once."""
        ids = tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        begin = self._begin if add_special_tokens else ()
        return ids if ids[: len(begin)] == begin else (*begin, *ids)

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]
    ) -> ChatPrompt:
        """The prompt of a conversation; see `render_chat`. kwargs: variables that the template reads."""
        if not self.tokenizer.chat_template:
            raise BadRequest("this model's tokenizer has no chat template; use /v1/completions with a plain prompt")
        if fault := unread_fault(self.tokenizer, kwargs):
            raise BadRequest(f"chat_template_kwargs: {fault}", param="chat_template_kwargs")
        return render_chat(self._renderer, messages, tools, kwargs)

    @cached_property
    def _renderer(self) -> Renderer:
        return Renderer(self.tokenizer, ChatConfig(date=self.info.chat_date))

    def new_tokens(self, prompt: Sequence[int], wanted: int | None) -> int:
        """Most tokens of an answer; wanted None = as many as fit.

        Raises BadRequest where they do not fit, and for ids that the model does not have.
        """
        if not prompt:
            raise BadRequest("the prompt is empty; expected at least one token", param="prompt")
        wrong = next((i for i in prompt if not 0 <= i < self.info.vocab_size), None)
        if wrong is not None:
            text = f"the prompt has the token id {wrong}; the model has the ids 0 to {self.info.vocab_size - 1}"
            raise BadRequest(text, param="prompt")
        limit = self.info.length_limit
        if limit is None:
            return LONGEST_ANSWER if wanted is None else wanted
        needed = len(prompt) + (1 if wanted is None else wanted)
        if needed > limit:
            text = f"the model takes {limit} tokens for prompt and completion, but these are {needed}"
            raise BadRequest(
                f"{text}: {len(prompt)} of the prompt, {needed - len(prompt)} of the completion; shorten one of them",
                code="context_length_exceeded",
            )
        return limit - len(prompt) if wanted is None else wanted

    @cached_property
    def _begin(self) -> tuple[int, ...]:
        return tuple(bos_and_eos(self.tokenizer)[0])

    def vocabulary_ids(self, ids: Sequence[int]) -> list[int]:
        """A prompt's ids as clients get them: an image's token in the places of an image."""
        return vocabulary_ids(ids, images_of(self.tokenizer))

    # --- answers ---

    @cached_property
    def tool_format(self) -> ToolFormat:
        """The format of tool calls: of the chat template, or else that of most models."""
        own = self._renderer.template.tool_format if self.tokenizer.chat_template else None
        return own or FORMATS["hermes"]

    def with_run_stops(self, body: G) -> G:
        """The body, with the served run's stops where it names none; `[]` and `ignore_eos` mean none."""
        if body.ignore_eos or body.model != self.info.name:
            return body
        own = {"stop": self.info.run_stop, "stop_token_ids": self.info.run_stop_token_ids}
        return body.model_copy(update={k: list(v) for k, v in own.items() if k not in body.model_fields_set})

    def text_stream(
        self, body: GenerationBody, tool_format: ToolFormat | None = None, context: Sequence[int] = ()
    ) -> TextStream:
        """What makes an answer's text of its ids; it shows the marks of `tool_format`.

        context: ids that the text continues
        """
        hidden = frozenset[int]() if body.include_stop_str_in_output else frozenset(body.stop_token_ids)
        special = hidden_token_ids(self.tokenizer, self.info.stop_token_ids, tool_format)
        context = [one for one in context if one not in special]
        if body.skip_special_tokens:
            hidden |= special
        return TextStream(self.decode, hidden, body.stop, body.include_stop_str_in_output, context)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        return str(self.tokenizer.decode(without_media(ids), skip_special_tokens=False))

    def token_text(self, id: int, body: GenerationBody) -> str:
        """A token by itself, as lists of log-probabilities name it."""
        return f"token_id:{id}" if body.return_tokens_as_token_ids else token_text(self.decode, id)

    def token_bytes(self, id: int) -> bytes:
        """The bytes of a token, which may be a part of a character."""
        return token_bytes(self.tokenizer, id, token_text(self.decode, id))

    def logprob(self, event: TokenEvent) -> float:
        """The log-probability of a new token that clients get."""
        return event.raw_logprob if self.logprobs_mode == "raw" else event.logprob
