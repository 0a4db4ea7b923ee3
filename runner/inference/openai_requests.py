"""Request bodies of OpenAI's protocol with vLLM's additions; unknown fields are refused.

An ignored field would change an answer silently.

Sources: the API reference of OpenAI for completions and chat completions; vLLM's CompletionRequest for the additions.
"""

from __future__ import annotations

import base64
import json
import re
import secrets
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from runner.core.untrusted_text import parse_json, shorten, without_nulls
from runner.inference.engine import LogprobsMode, SamplingParams

MAX_CHOICES = 128  # of one prompt
MAX_LOGPROBS = 20
MAX_PROMPTS = 2048  # of one request
SEED_BITS = 64
TYPE_NAMES = ("str", "int", "float", "bool")  # what pydantic calls the forms of a union
Json = dict[str, Any]


class BadRequest(Exception):
    """A request that is answered with an error of OpenAI's shape; param: the field."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


class StrictBody(BaseModel):
    """A body, or a part of one, that refuses unknown fields; null means left out."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nulls(cls, values: Any) -> Any:
        return {k: v for k, v in values.items() if v is not None} if isinstance(values, dict) else values


class StreamOptions(StrictBody):
    """include_usage: a last chunk with the token counts."""

    include_usage: bool = False


class GenerationBody(StrictBody):
    """What completions and chat completions have in common."""

    model: str
    temperature: float = Field(1.0, ge=0, le=1000, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1)  # -1 and 0: all, as in vLLM
    min_p: float = Field(0.0, ge=0, le=1)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    # What does not change an answer, or only with the value that changes nothing
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: Literal[False] | None = None
    presence_penalty: float = Field(0.0, ge=0, le=0)
    frequency_penalty: float = Field(0.0, ge=0, le=0)
    repetition_penalty: float = Field(1.0, ge=1, le=1)
    logit_bias: dict[str, float] = Field({}, max_length=0)

    @field_validator("stop", mode="before")
    @classmethod
    def _stops_as_list(cls, value: Any) -> Any:
        value = [value] if isinstance(value, str) else value
        if isinstance(value, list) and "" in value:
            raise ValueError("an empty stop string would end every completion")
        return value

    def sampling_params(
        self, max_new_tokens: int, logprobs: int, logprobs_mode: LogprobsMode, adapter: str | None
    ) -> list[SamplingParams]:
        """The parameters of each of the n answers. Without a seed they are drawn again by every request."""
        seed = (secrets.randbits(SEED_BITS) if self.seed is None else self.seed) % 2**SEED_BITS
        return [
            SamplingParams(
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k if self.top_k > 0 else None,
                min_p=self.min_p,
                max_new_tokens=max_new_tokens,
                stop=tuple(self.stop),
                stop_token_ids=tuple(self.stop_token_ids),
                ignore_eos=self.ignore_eos,
                seed=seed + (at << SEED_BITS),
                logprobs=logprobs,
                logprobs_mode=logprobs_mode,
                adapter=adapter,
            )
            for at in range(self.n)
        ]


class CompletionBody(GenerationBody):
    """The body of /v1/completions. prompt: text, token ids, or a list of either."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int = Field(16, ge=0)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = None
    suffix: Literal[""] | None = None

    @model_validator(mode="after")
    def _check_together(self) -> CompletionBody:
        if self.best_of not in (None, self.n):
            raise ValueError("best_of other than n is not supported; leave it out")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens=0 generates nothing; set echo=true too, which scores the prompt")
        if self.stream and (self.echo or self.prompt_logprobs is not None):
            raise ValueError("echo and prompt_logprobs are not streamed; leave out stream")
        if not 1 <= len(self.prompts()) <= MAX_PROMPTS:
            raise ValueError(f"a request takes 1 to {MAX_PROMPTS} prompts")
        return self

    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts, also where there is one."""
        prompt: Any = self.prompt
        is_one = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))
        return [prompt] if is_one else prompt


class ResponseFormat(StrictBody):
    """Plain text only; answers are not constrained."""

    type: Literal["text"] = "text"


class ImageUrl(StrictBody):
    """An image inside the request; the server fetches nothing."""

    url: str
    detail: Literal["auto"] = "auto"

    @field_validator("url")
    @classmethod
    def _check_inline(cls, url: str) -> str:
        if not re.match("data:image/[^,]*;base64,", url):
            text = "expected a data URL; images are not fetched, so send the file itself"
            raise ValueError(f'{text}: "data:image/png;base64,$(base64 -w0 FILE)"')
        return url

    def decode(self) -> bytes:
        """The encoded file. Raises BadRequest."""
        try:
            return base64.b64decode(self.url.partition(",")[2], validate=True)
        except ValueError as error:
            raise BadRequest(f"image_url.url: not base64 ({error})", param="messages") from None


class ContentPart(StrictBody):
    """A part of a message's content: the field that its type names."""

    type: Literal["text", "image_url"]
    text: str | None = None
    image_url: ImageUrl | None = None

    @model_validator(mode="after")
    def _has_its_field(self) -> ContentPart:
        if self.model_fields_set != {"type", self.type}:
            raise ValueError(f"a part of type {self.type} has the fields type and {self.type}")
        return self

    def plain(self) -> Json:
        """As chat templates take it."""
        if self.image_url is None:
            return {"type": "text", "text": self.text}
        return {"type": "image", "image": self.image_url.decode()}


class FunctionCall(StrictBody):
    """What an assistant has called. arguments: JSON, as text or as an object."""

    name: str
    arguments: str | dict[str, Any]


class ToolCallBody(StrictBody):
    """A tool call of an assistant's message."""

    id: str | None = None
    index: int | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class MessageBody(StrictBody):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] = ""
    name: str | None = None
    tool_calls: list[ToolCallBody] = []
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ToolFunction(BaseModel):
    """A function that the model may call; what describes it is the template's to read."""

    model_config = ConfigDict(extra="allow")
    name: str = Field(min_length=1)


class ToolBody(StrictBody):
    """A tool of a request."""

    type: Literal["function"]
    function: ToolFunction


class ConversationBody(StrictBody):
    """What /v1/chat/completions and /tokenize have in common."""

    messages: list[MessageBody] | None = None
    tools: list[ToolBody] = []
    chat_template_kwargs: dict[str, bool | int | float | str] = {}

    def conversation(self) -> tuple[list[Json], list[Json], Json]:
        """Messages, tools and template variables as plain values. Raises BadRequest for images that are none."""
        messages = [{"content": "", **_fields_without_nulls(one)} for one in self.messages or ()]
        for message, body in zip(messages, self.messages or (), strict=True):
            if isinstance(body.content, list):
                message["content"] = [part.plain() for part in body.content]
        return messages, list(map(_fields_without_nulls, self.tools)), self.chat_template_kwargs


class ChatBody(GenerationBody, ConversationBody):
    """The body of /v1/chat/completions."""

    messages: list[MessageBody]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)
    tool_choice: Literal["auto", "none"] = "auto"
    parallel_tool_calls: Literal[True] = True
    response_format: ResponseFormat = ResponseFormat()

    @model_validator(mode="after")
    def _check_together(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise ValueError("max_tokens and max_completion_tokens mean the same; set one of them")
        if reserved := sorted({"tokenize", "add_generation_prompt", "tools"} & set(self.chat_template_kwargs)):
            raise ValueError(f"chat_template_kwargs.{reserved[0]} is set by the server; leave it out")
        return self

    @property
    def new_tokens(self) -> int | None:
        """Most tokens of an answer; None = as many as fit."""
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens


class TokenizeBody(ConversationBody):
    """The body of /tokenize: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("set either prompt or messages")
        return self


B = TypeVar("B", bound=BaseModel)


def _fields_without_nulls(body: BaseModel) -> Json:
    """What a client has set, without nulls: to a chat template, null is not a missing key."""
    found: Json = without_nulls(body.model_dump(exclude_unset=True))
    return found


def parse_body(kind: type[B], content: bytes) -> B:
    """The body of a request. Raises BadRequest."""
    try:
        value = parse_json(content)
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadRequest("the body is not a JSON object")
    if re.search(rb"\\u[dD][89a-fA-F]", content):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise BadRequest(
                f"the body has one half of a surrogate pair, {error.object[error.start]!a}, alone"
            ) from None
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _bad_field(error, kind) from None


def _bad_field(error: ValidationError, kind: type[BaseModel]) -> BadRequest:
    first = max(error.errors(include_url=False), key=lambda one: len(one["loc"]))  # of a union, the form that was meant
    place = [part for part in first["loc"] if str(part).replace("_", "").isalnum() and part not in TYPE_NAMES]
    field = ".".join(map(str, place)) or None
    param = str(place[0]) if place else None
    if first["type"] == "extra_forbidden":
        from runner.spec.suggest import nearest_word

        near = nearest_word(field, list(kind.model_fields)) if field == param and field else None
        text = f"{field} is not supported" + (f"; did you mean {near}?" if near else "; leave it out")
        return BadRequest(text, param=param)
    text = str(first["msg"]).removeprefix("Value error, ")
    shows_value = field and first["type"] not in ("value_error", "missing")
    given = f", not {shorten(json.dumps(first['input'], default=str), 60)}" if shows_value else ""
    return BadRequest(f"{field}: {text}{given}" if field else text, param=param)
