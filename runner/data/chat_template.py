"""A tokenizer's chat template: which one a job uses, the text that it writes, its end tokens.

    chat.template │ the tokenizer's own │ a training template ──defaults of chat.kwargs──▶ tokenizer.chat_template
    messages ──ChatTemplate.text──▶ text

The defaults are part of the template's text, so an export and whoever serves it have them too.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateSyntaxError

from runner.core.chat_answer import ChatAnswer
from runner.core.errors import DataError, Problem, SpecError
from runner.core.tool_formats import FORMATS, ToolCall, ToolFormat
from runner.data.config import TRAINING_TEMPLATES, ChatConfig
from runner.data.control_tokens import ASSISTANT_TOKENS, ControlTokens, common_length
from runner.data.conversation import CALL_FORMS, CallForm, content_parts, find_missing, plain_messages, statements
from runner.data.jinja_sandbox import DEADLINE_S, TemplateTimeout, literal_text, read_variables, render
from runner.data.message_keys import Message
from runner.data.readers import read_whole_text
from runner.interfaces.media import images_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from runner.interfaces import Decide

PROBE = chr(0xFFFFD)  # stands for an assistant's words
USER: Message = {"role": "user", "content": "a"}
OPENING: tuple[Message, ...] = (USER, {"role": "assistant", "content": PROBE})
TEMPLATES = Path(__file__).parent / "templates"
OTHER_TEMPLATE = "chat.template=FILE sets a template that renders such a conversation"
SET_BY_RENDERER = ("messages", "tools", "documents", "add_generation_prompt", "strftime_now")


class RenderError(Exception):
    """The template cannot write a conversation; `hint` says what to type."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class RenderTimeout(RenderError):
    """The template did not end in time, which it would not for other conversations either."""


class ChatTemplate:
    """The chat template of a tokenizer that has one.

    source: its text; reads_date: whether what it writes depends on the day, which chat.date sets
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: ChatConfig) -> None:
        self.source = str(tokenizer.get_chat_template())
        self.control = ControlTokens(tokenizer, self.source)
        self.reads_date = reads_date(tokenizer)
        self._tokenizer = tokenizer
        self._variables: dict[str, Any] = {**tokenizer.special_tokens_map, **(options.kwargs or {})}
        if options.date is not None:
            self._variables["strftime_now"] = datetime.fromisoformat(options.date).strftime

    def text(self, messages: Sequence[Mapping[str, Any]], tools: Any = None, prompt: bool = False, **more: Any) -> str:
        """Plain messages as text; `prompt` adds what opens the assistant's turn. Raises RenderError.

        more: variables of the template
        """
        if self._needs_parts:
            messages = [{**message, "content": content_parts(message["content"])} for message in messages]
        variables = {"messages": list(messages), "tools": tools, "documents": None, "add_generation_prompt": prompt}
        source = str(self._tokenizer.get_chat_template(tools=tools))
        try:
            return render(source, {**variables, **self._variables, **more})
        except TemplateTimeout as error:
            raise RenderTimeout(f"the chat template ran for more than {DEADLINE_S:g} s", OTHER_TEMPLATE) from error
        except Exception as error:  # a template is a foreign program and may fail in any way; the row is named instead
            roles = ", ".join(m["role"] for m in messages) or "none, as an assistant turn comes first"
            reason = f"{type(error).__name__}: {error}; roles: {roles}"
            raise RenderError(f"the chat template fails on the conversation: {reason}", OTHER_TEMPLATE) from error

    @cached_property
    def _needs_parts(self) -> bool:
        """Whether the template of an image-text model reads contents as lists of parts alone."""
        if images_of(self._tokenizer) is None:
            return False
        try:
            return PROBE not in render(self.source, {"messages": OPENING, **self._variables})
        except Exception:  # of whatever kind the template raises
            return True

    @cached_property
    def call_form(self) -> CallForm:
        """The form of tool calls that the template writes; the first one if it writes none."""
        return next((form for form in CALL_FORMS if self._writes_call(form)), CALL_FORMS[0])

    def _writes_call(self, form: CallForm) -> bool:
        messages = plain_messages([USER, _call("value")], (), form)
        with suppress(RenderError):
            return not find_missing(statements(messages), self.text(messages))
        return False

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """The format in which the template writes tool calls; None if it writes none, or in no known format."""
        messages = plain_messages([USER, _call("value")], (), self.call_form)
        try:
            before, whole = self.text(messages[:1], prompt=True), self.text(messages)
        except RenderError:
            return None
        shared = common_length(before, whole)
        if shared < len(before):  # a prompt that opens reasoning: the turn begins after a token that both have
            shared = max((m.end() for m in self.control.special.finditer(before) if m.end() <= shared), default=shared)
        turn = whole[shared:].rstrip()
        ends = [match for match in self.control.special.finditer(turn) if match.end() == len(turn)]
        turn = turn[: ends[0].start()] if ends else turn
        for one in FORMATS.values():
            answer = ChatAnswer(one)
            answer.push(turn)
            answer.close()
            if answer.calls == [ToolCall("probed", {"key": "value"})]:
                return one
        return None

    def opens_as_it_writes(self) -> bool:
        """Whether a plain answer begins with the generation prompt."""
        try:
            return self.text(OPENING).startswith(self.text(OPENING[:1], prompt=True))
        except RenderError:  # the template needs another start of a conversation
            return True

    def rewrites_history(self) -> bool:
        """Whether the template writes an earlier assistant turn in another way than the last one."""
        earlier, last = (self.text(messages).partition(PROBE)[0] for messages in ([*OPENING, USER], OPENING))
        return earlier != last or not earlier.startswith(self.text(OPENING[:1], prompt=True))

    @cached_property
    def is_open_ended(self) -> bool:
        """Whether the template writes nothing after an assistant's words: the next role's token ends the turn."""
        try:
            return self.text(OPENING).endswith(PROBE)
        except RenderError:
            return False

    def closing(self, role: str) -> str:
        """The token of `role`, by which its message ends the turn before it where the template does not."""
        return self.control.leading(self.text([*OPENING, {"role": role, "content": "a"}]).rpartition(PROBE)[2], 1)

    @cached_property
    def end_tokens(self) -> frozenset[str]:
        """The special tokens that end an assistant's turn of words or of tool calls."""
        turns = [(OPENING[1], USER)]
        if self._writes_call(self.call_form):
            turns.append((_call(PROBE), {"role": "tool", "name": "probed", "content": "a"}))
        return frozenset(token for turn, reply in turns if (token := self._end_of(turn, reply)))

    def end_token_ids(self) -> frozenset[int]:
        """Their ids."""
        vocabulary = self._tokenizer.get_vocab()
        return frozenset(vocabulary[token] for token in self.end_tokens if token in vocabulary)

    def _end_of(self, turn: Message, reply: Message) -> str:
        """The last special token after a turn, whatever follows it; else the token of the role that follows."""
        messages = plain_messages([USER, turn, reply], (), self.call_form)
        try:
            last, followed = (self.text(messages[:stop]).partition(PROBE)[2] for stop in (2, 3))
        except RenderError:
            return ""
        shared = last[: common_length(last, followed)]
        for text in (shared, last):
            if found := self.control.special.findall(text):
                return str(found[-1])
        return self.control.leading(followed[len(shared) :], 1)


def calls_turn(results: Sequence[Message]) -> Message:
    """A turn of the assistant with the calls of these results, each with the probe as an argument."""
    calls = [
        {"type": "function", "id": one["tool_call_id"], "function": {"name": one["name"], "arguments": {"key": PROBE}}}
        for one in results
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def _call(value: str) -> Message:
    function = {"name": "probed", "arguments": {"key": value}}
    return {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}


def _sources(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """The tokenizer's templates by name: it may have one of its own for tools."""
    found = tokenizer.chat_template
    return dict(found) if isinstance(found, dict) else {"default": found} if found else {}


def reads_date(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a template of the tokenizer reads the date."""
    return any("strftime_now" in read_variables(source) for source in _sources(tokenizer).values())


def install_template(tokenizer: PreTrainedTokenizerBase, chat: ChatConfig, decide: Decide) -> None:
    """Give a tokenizer the template of a job: chat.template, or the training template of its own one.

    The variables of chat.kwargs become defaults of the template, and chat.special_tokens a setting of the tokenizer.
    Raises DataError for a file that is no template, SpecError for variables that the template does not read.
    """
    if chat.special_tokens:
        tokenizer.init_kwargs[ASSISTANT_TOKENS] = list(chat.special_tokens)
    if chat.template is not None:
        tokenizer.chat_template = load_template(chat.template)
    elif (name := _training_template(tokenizer, chat)) is not None:
        reason = "the model's own template opens a completion with reasoning, and renders completions without it"
        decide("chat.template", "the model's own", name, reason)
        tokenizer.chat_template = load_template(name)
    if not chat.kwargs:
        return
    sources = _sources(tokenizer)
    if fault := unread_fault(tokenizer, chat.kwargs):
        raise SpecError([Problem("chat.kwargs", fault if sources else "there is no chat template; leave it out")])
    made = {name: _with_defaults(source, chat.kwargs) for name, source in sources.items()}
    tokenizer.chat_template = made if isinstance(tokenizer.chat_template, dict) else made["default"]


def free_variables(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """The variables of the tokenizer's templates that a caller may set."""
    read = frozenset[str]().union(*(read_variables(source) for source in _sources(tokenizer).values()))
    return read - {*SET_BY_RENDERER, *tokenizer.special_tokens_map}


def unread_fault(tokenizer: PreTrainedTokenizerBase, variables: Collection[str]) -> str | None:
    """Which variables no template of the tokenizer reads, and which it does; None if it reads all."""
    free = free_variables(tokenizer)
    if unread := sorted({*variables} - free):
        return f"the chat template does not read {', '.join(unread)}; it reads: {', '.join(sorted(free)) or 'none'}"
    return None


def _with_defaults(source: str, variables: Mapping[str, Any]) -> str:
    """A template in which variables have a value where a caller gives none."""
    lines = (
        f"{{%- if {name} is not defined -%}}{{%- set {name} = {json.dumps(value)} -%}}{{%- endif -%}}"
        for name, value in variables.items()
    )
    return "".join(lines) + source


def _training_template(tokenizer: PreTrainedTokenizerBase, chat: ChatConfig) -> str | None:
    """The training template for a tokenizer whose own template cannot write what it opens."""
    if not tokenizer.chat_template or (own := ChatTemplate(tokenizer, chat)).opens_as_it_writes():
        return None
    return next((name for name, mark in TRAINING_TEMPLATES.items() if mark in own.source), None)


def load_template(name: str) -> str:
    """A chat template: a file of the user's, or one of this project's training templates.

    Raises DataError if there is no such template, or if it is none.
    """
    file = TEMPLATES / f"{name}.jinja" if name in TRAINING_TEMPLATES else Path(name)
    try:
        source = read_whole_text(file, "chat.template")
        literal_text(source)
    except OSError as error:
        raise DataError(f"chat.template={name}: {error.strerror or error}") from error
    except TemplateSyntaxError as error:
        raise DataError(f"chat.template={name}: not a jinja template: {error}") from error
    return source
