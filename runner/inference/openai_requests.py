"""Request bodies of OpenAI's protocol with vLLM's additions; unknown fields are refused.

An ignored field would change an answer silently.

Sources: the API reference of OpenAI for completions and chat completions; vLLM's CompletionRequest for the additions.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from runner.core.bounded_text import parse_json
from runner.inference.engine import SamplingParams

MAX_CHOICES = 128  # of one prompt
MAX_LOGPROBS = 20
MAX_PROMPTS = 2048  # of one request
SEED_BITS = 64


class BadRequest(Exception):
    """A request that is answered with an error of OpenAI's shape; param: the field."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


class StreamOptions(BaseModel):
    """include_usage: a last chunk with the token counts."""

    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False


class GenerationBody(BaseModel):
    """What completions and chat completions have in common."""

    model_config = ConfigDict(extra="forbid")

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

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nulls(cls, values: Any) -> Any:
        return (
            {key: value for key, value in values.items() if value is not None} if isinstance(values, dict) else values
        )

    @field_validator("stop", mode="before")
    @classmethod
    def _stops_as_list(cls, value: Any) -> Any:
        value = [value] if isinstance(value, str) else value
        if isinstance(value, list) and "" in value:
            raise ValueError("an empty stop string would end every answer")
        return value

    def sampling_params(self, max_new_tokens: int, logprobs: int, adapter: str | None) -> list[SamplingParams]:
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
            raise ValueError("max_tokens=0 asks for nothing; with echo=true it scores the prompt")
        if self.stream and (self.echo or self.prompt_logprobs is not None):
            raise ValueError("echo and prompt_logprobs are not streamed; leave out stream")
        if not 1 <= len(self.prompts()) <= MAX_PROMPTS:
            raise ValueError(f"1 to {MAX_PROMPTS} prompts are taken at once")
        return self

    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts, also where there is one."""
        prompt: Any = self.prompt
        is_one = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))
        return [prompt] if is_one else prompt


class ResponseFormat(BaseModel):
    """Plain text only; answers are not constrained."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["text"] = "text"


class ChatBody(GenerationBody):
    """The body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)
    tools: list[dict[str, Any]] = []
    tool_choice: Literal["auto", "none"] = "auto"
    parallel_tool_calls: Literal[True] = True
    response_format: ResponseFormat = ResponseFormat()
    chat_template_kwargs: dict[str, Any] = {}

    @model_validator(mode="after")
    def _check_together(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise ValueError("max_tokens and max_completion_tokens mean the same; give one of them")
        if reserved := sorted({"tokenize", "add_generation_prompt", "tools"} & set(self.chat_template_kwargs)):
            raise ValueError(f"chat_template_kwargs.{reserved[0]} is set by the server; leave it out")
        return self

    @property
    def new_tokens(self) -> int | None:
        """Most tokens of an answer; None = as many as fit."""
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens


class TokenizeBody(BaseModel):
    """The body of /tokenize: a prompt, or messages."""

    model_config = ConfigDict(extra="forbid")
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] = []
    chat_template_kwargs: dict[str, Any] = {}
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


B = TypeVar("B", bound=BaseModel)


def parse_body(kind: type[B], content: bytes) -> B:
    """The body of a request. Raises BadRequest."""
    try:
        value = parse_json(content)
    except ValueError as error:
        raise BadRequest(f"the body is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadRequest("the body is no JSON object")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _bad_field(error, kind) from None


def _bad_field(error: ValidationError, kind: type[BaseModel]) -> BadRequest:
    first = error.errors(include_url=False)[0]
    param = ".".join(map(str, first["loc"][:1])) or None
    if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
        from runner.spec.suggest import nearest_word

        near = nearest_word(str(param), list(kind.model_fields))
        text = f"{param} is not supported" + (f"; did you mean {near}?" if near else "; leave it out")
        return BadRequest(text, param=param)
    text = str(first["msg"]).removeprefix("Value error, ")
    given = f", not {json.dumps(first['input'], default=str)[:60]}" if first["type"] != "value_error" and param else ""
    if first["type"] == "missing":
        given = ""
    return BadRequest(f"{param}: {text}{given}" if param else text, param=param)
