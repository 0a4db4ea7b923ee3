"""Conversations to text that is trained on or not, by construction: no string is searched for.

    prefix = template(messages before the turn, add_generation_prompt=True)     what generation sees: context
    upto   = template(messages up to and with the turn)                         must begin with `prefix`
    turn   = upto[len(prefix):]                                                 what generation must produce: trained on

    the next turn's prefix begins with `upto`   the same row continues: one row, several trained turns
    it does not (the template rewrites history) a row of its own: the next turn under the context generation sees

Texts are tokenized one by one, so that no token spans a border and the context's ids are exactly those that generation
gets. A template's control tokens inside a message are text: they are encoded without their special meaning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from runner.core.errors import DataError, EnvironmentProblem
from runner.data.config import TRAINING_TEMPLATES, ChatConfig
from runner.data.control_tokens import ControlTokens, Placeholders, Segment, common_length
from runner.data.conversation import (
    CALL_FORMS,
    CallForm,
    Statement,
    content_parts,
    find_missing,
    plain_messages,
    statements,
)
from runner.data.examples import Message, Tools, image_parts, is_trained
from runner.data.images import insert_images
from runner.data.jinja_sandbox import DEADLINE_S, TemplateTimeout, render
from runner.interfaces.media import images_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# completion: all that follows the prompt, as one answer
TrainOn = Literal["assistant", "answers", "last", "all", "completion"]
PROBE = chr(0xFFFFD)  # stands for an assistant's words
OPENING: tuple[Message, ...] = ({"role": "user", "content": "a"}, {"role": "assistant", "content": PROBE})
UNOPENED = (
    "the chat template's generation prompt differs from the start of the assistant turns that it renders, so prompt "
    "and completion cannot be separated"
)
OTHER_TEMPLATE = "chat.template=FILE sets a template that renders such a conversation"
TEXT_ONLY_HINT = (
    "choose an image-text model (model.path=…), or train on the text alone: data.rename_columns={images: unused_images}"
)
PART_HINTS = {
    "reasoning": "chat.drop=[reasoning] trains without it; chat.template=FILE sets a template that renders it",
    "tool": "chat.drop=[tools] trains without the column tools; chat.template=FILE sets a template that renders it",
    "tool call": "chat.template=FILE sets a template that renders tool calls",
    "content": "chat.template=FILE sets a template that renders messages of this role",
}


class RenderError(Exception):
    """The template cannot write a conversation; `hint` says what to type."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class RenderTimeout(RenderError):
    """The template did not end in time, which it would not for other conversations either."""


@dataclass(frozen=True, slots=True)
class _Chat:
    """A conversation as templates take it.

    trained: the indices of the turns that are trained on; images: of each message, its images (path or content)
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    context: int
    trained: list[int]
    placeholders: Placeholders
    images: list[list[str | bytes]] = field(default_factory=list)


class Renderer:
    """A tokenizer's chat template with the options of `chat`. Raises DataError if there is no template.

    notes: what was noticed in the conversations so far
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: ChatConfig | None = None) -> None:
        if not tokenizer.chat_template:
            raise DataError(
                "the data are conversations, but the tokenizer has no chat template to render them\n"
                "  use a model that has one (an instruct or chat model: model.path=..., or model.tokenizer=...),\n"
                "  or set chat.template=FILE, or use plain text in `prompt` and `completion` (or `text`)"
            )
        self.tokenizer, self.chat, self.reader = tokenizer, options or ChatConfig(), images_of(tokenizer)
        self.notes: set[str] = set()
        self.source = str(tokenizer.get_chat_template())
        self.control = ControlTokens(tokenizer, self.source)

    def render(
        self, messages: Sequence[Message], tools: Tools = (), context: int = 0, train_on: TrainOn | None = None
    ) -> list[list[Segment]]:
        """The rows that train on the assistant turns after the first `context` messages. Raises RenderError.

        One row, or several where the template rewrites history. With last the conversation ends with that turn;
        messages after it would teach nothing.
        """
        train_on = train_on or self.chat.train_on
        chat = self._prepare(messages, tools, context, train_on)
        if train_on == "completion":
            rows = [self._completion(chat)]
        elif train_on == "all":
            rows = [self._everything(chat)]
        else:
            rows = self._rows(chat, train_on)
        return [self._finish(chat, row) for row in rows]

    def _finish(self, chat: _Chat, row: Sequence[Segment]) -> list[Segment]:
        """The segments of a row with literal control tokens apart, and with what stands for its images."""
        segments = _merge_neighbors([piece for segment in row for piece in chat.placeholders.split(segment)])
        try:
            return insert_images(segments, self.reader, [one for some in chat.images for one in some])
        except DataError as error:
            raise RenderError(str(error)) from error

    def render_prompt(self, messages: Sequence[Message], tools: Tools = ()) -> list[Segment]:
        """What generation sees of a conversation that the assistant is to answer. Raises RenderError."""
        chat = self._prepare(messages, tools, len(messages), "last")
        text = self._text(chat, len(chat.messages), prompt=True)
        self._check_context(chat, len(chat.messages), text)
        return self._finish(chat, [Segment(text, is_trained=False)])

    def conversation_ids(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """The ids of a whole conversation that a model only reads, such as a reward model. Raises RenderError."""
        chat = self._prepare(messages, tools, 0, "all")
        text = self._text(chat, len(chat.messages))
        self._check_context(chat, len(chat.messages), text)
        return self.control.ids_of(self._finish(chat, [Segment(text, is_trained=False)]))

    def extend(self, ids: Sequence[int], message: Message) -> list[int]:
        """The ids that continue `ids` by a message and the opening of the next turn.

        `ids` end with a turn of the assistant. What the policy wrote stays as it is; a turn without an end token
        is closed. Raises EnvironmentProblem if the template does not write the message.
        """
        hint = f"{PART_HINTS['content']}; or set another role for the environment (environment.role=user)"
        try:
            chat = self._prepare([*OPENING, message], (), 0, "last")
            after = self._text(chat, 3, prompt=True).rpartition(PROBE)[2]
        except RenderError as error:
            text = f"the chat template cannot continue an episode with a message of role {message['role']}: {error}"
            raise EnvironmentProblem(f"{text}\n  {hint}") from error
        if missing := find_missing(statements(chat.messages[2:]), after):
            text = f"the chat template does not render the environment's messages of role {message['role']}"
            raise EnvironmentProblem(f"{text}: {missing[0].text!r}\n  {hint}")
        last = self._text(chat, 2).rpartition(PROBE)[2]
        closing = self.control.leading(after[: common_length(after, last)]) or self.control.leading(after, 1)
        end, rest = self.control.ids_of([Segment(closing, is_trained=False)]), after[len(closing) :]
        final = self.control.ids_of([Segment(last.rstrip(), is_trained=False)])[-1:]
        if final and list(ids[-1:]) == final:  # a template may end a last turn by another token than an earlier one
            end = []
        written = next(n for n in range(len(end), -1, -1) if list(ids[len(ids) - n :]) == end[:n])
        return end[written:] + self.control.ids_of(chat.placeholders.split(Segment(rest, is_trained=False)))

    def rewrites_history(self) -> bool:
        """Whether the template writes an earlier assistant turn in another way than the last one."""
        chat = self._prepare([*OPENING, {"role": "user", "content": "b"}], (), 0, "last")
        earlier, last = (self._text(chat, stop).partition(PROBE)[0] for stop in (3, 2))
        return earlier != last or not earlier.startswith(self._text(chat, 1, prompt=True))

    @cached_property
    def _is_open_ended(self) -> bool:
        """Whether the template writes nothing after an assistant's words: the next role's token ends the turn."""
        try:
            return self._text(self._prepare(OPENING, (), 0, "last"), 2).endswith(PROBE)
        except RenderError:  # the template needs another start of a conversation
            return False

    def _prepare(self, messages: Sequence[Message], tools: Tools, context: int, train_on: TrainOn) -> _Chat:
        """The conversation without what is dropped, its control tokens as private characters."""
        drop = self.chat.drop
        kept = [i for i, m in enumerate(messages) if not ("system" in drop and m["role"] in ("system", "developer"))]
        trained = [i for i, at in enumerate(kept) if messages[at]["role"] == "assistant" and at >= context]
        if train_on in ("assistant", "answers"):
            trained = [i for i in trained if is_trained(messages[kept[i]])]
        elif train_on != "completion":
            trained = trained[-1:]
        form = self._call_form if any(m.get("tool_calls") for m in messages) else CALL_FORMS[0]
        plain: Any = plain_messages([messages[at] for at in kept], drop, form)
        used: Any = [dict(tool) for tool in tools] if tools and "tools" not in drop else None
        plain, used, placeholders = self.control.insert_placeholders(plain, used)
        if placeholders.chars:
            self.notes.add("messages contain control tokens of the chat template; they are encoded as text")
        images = [[part["image"] for part in image_parts(messages[at])] for at in kept]
        if any(images) and self.reader is None:
            raise RenderError("an image, but the model reads text alone", TEXT_ONLY_HINT)
        return _Chat(plain, used, sum(at < context for at in kept), trained, placeholders, images)

    def _text(self, chat: _Chat, stop: int, prompt: bool = False, extra: Mapping[str, Any] | None = None) -> str:
        """The first `stop` messages as text; `prompt` adds what opens the assistant's turn."""
        messages = chat.messages[:stop]
        if self.reader is not None and self._needs_parts:
            messages = [{**message, "content": content_parts(message["content"])} for message in messages]
        variables: dict[str, Any] = {"tools": chat.tools, "documents": None, "add_generation_prompt": prompt}
        variables |= {**self.tokenizer.special_tokens_map, **(self.chat.kwargs or {}), **(extra or {})}
        source = str(self.tokenizer.get_chat_template(tools=chat.tools))
        try:
            text = render(source, {"messages": messages, **variables})
        except TemplateTimeout as error:
            raise RenderTimeout(f"the chat template ran for more than {DEADLINE_S:g} s", OTHER_TEMPLATE) from error
        except Exception as error:  # a template is a foreign program and may fail in any way; the row is named instead
            roles = ", ".join(m["role"] for m in messages) or "none, as an assistant turn comes first"
            reason = f"{type(error).__name__}: {error}; roles: {roles}"
            raise RenderError(f"the chat template fails on the conversation: {reason}", OTHER_TEMPLATE) from error
        count = sum(map(len, chat.images[:stop]))
        if self.reader and any(chat.images) and (written := text.count(self.reader.placeholder)) != count:
            raise RenderError(f"the chat template renders {written} of {count} images", OTHER_TEMPLATE)
        return text

    @cached_property
    def _needs_parts(self) -> bool:
        try:
            return PROBE not in render(self.source, {"messages": OPENING, **self.tokenizer.special_tokens_map})
        except Exception:  # of whatever kind the template raises
            return True

    @cached_property
    def _call_form(self) -> CallForm:
        """The form of tool calls that the template writes; the first one if it writes none."""
        function = {"name": "probed", "arguments": {"key": "value"}}
        call: Message = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "function": function}],
        }
        for form in CALL_FORMS:
            messages = plain_messages([OPENING[0], call], (), form)
            with suppress(RenderError):
                if not find_missing(
                    statements(messages), self._text(_Chat(messages, None, 0, [], Placeholders("")), 2)
                ):
                    return form
        return CALL_FORMS[0]

    def _turn(self, chat: _Chat, turn: int) -> tuple[str, str]:
        """(what generation sees before a turn, the same with the turn); the turn holds all that it says."""
        prefix, upto = self._text(chat, turn, prompt=True), self._text(chat, turn + 1)
        if not upto.startswith(prefix):
            raise RenderError(UNOPENED, self._unopened_hint(chat, turn, turn + 1))
        self._refuse(find_missing(_statements_between(chat, turn, turn + 1), upto[len(prefix) :]))
        return prefix, upto

    def _rows(self, chat: _Chat, train_on: TrainOn) -> list[list[Segment]]:
        rows: list[_Row] = []
        for turn in chat.trained:
            prefix, upto = self._turn(chat, turn)
            if rows and not prefix.startswith(rows[-1].text):
                self._share_end(rows[-1], prefix)
            if not rows or not prefix.startswith(rows[-1].text):
                rows.append(_Row())
            row = rows[-1]
            row.segments += self._between(prefix[len(row.text) :], follows_turn=bool(row.text))
            thoughts = _statements_between(chat, turn, turn + 1) if train_on == "answers" else []
            row.segments += _exclude_reasoning(self._body(upto[len(prefix) :]), thoughts)
            row.text, row.start, row.turn = upto, len(prefix), turn
        for row in rows:
            self._check_context(chat, row.turn, row.text[: row.start])
            rest = ""
            if row is rows[-1] and train_on != "last":
                whole = self._text(chat, len(chat.messages))
                rest = whole[len(row.text) :] if whole.startswith(row.text) else ""
            row.segments += self._between(rest or self._closing(chat, row.turn), follows_turn=True, answer=True)
            at = max(i for i, segment in enumerate(row.segments) if segment.is_trained and not segment.answer)
            row.segments[at] = replace(row.segments[at], answer=True)
        return [row.segments for row in rows]

    def _share_end(self, row: _Row, prefix: str) -> None:
        """Cut what a template writes only after the end token of a last turn, if nothing else stops the row."""
        shared = common_length(row.text, prefix)
        ends = [m.end() for m in self.control.special.finditer(row.text) if row.start < m.end() <= shared]
        if ends and not self.control.special.sub("", row.text[ends[-1] :]).strip():
            last = max(i for i, segment in enumerate(row.segments) if segment.is_trained)
            start = sum(len(segment.text) for segment in row.segments[:last])
            row.segments[last:] = [Segment(row.text[start : ends[-1]], is_trained=True)]
            row.text = row.text[: ends[-1]]

    def _everything(self, chat: _Chat) -> list[Segment]:
        """All of the conversation; its last assistant turn apart where generation would open it so."""
        whole, turn = self._text(chat, len(chat.messages)), chat.trained[-1]
        self._refuse(find_missing(_statements_between(chat, 0, len(chat.messages)), whole))
        prefix, upto = self._text(chat, turn, prompt=True), self._text(chat, turn + 1)
        if not (upto.startswith(prefix) and whole.startswith(upto)):
            return [Segment(whole, is_trained=True)]
        body = [replace(s, is_trained=True, answer=s.is_trained) for s in self._body(upto[len(prefix) :])]
        return [Segment(prefix, is_trained=True), *body, Segment(whole[len(upto) :], is_trained=True)]

    def _completion(self, chat: _Chat) -> list[Segment]:
        """All messages after the prompt as one answer."""
        prefix, whole = self._text(chat, chat.context, prompt=True), self._text(chat, len(chat.messages))
        if not whole.startswith(prefix):
            raise RenderError(UNOPENED, self._unopened_hint(chat, chat.context, len(chat.messages)))
        self._refuse(find_missing(_statements_between(chat, chat.context, len(chat.messages)), whole[len(prefix) :]))
        self._check_context(chat, chat.context, prefix)
        body = [replace(segment, answer=segment.is_trained) for segment in self._body(whole[len(prefix) :])]
        closing = self._between(self._closing(chat, len(chat.messages) - 1), follows_turn=True, answer=True)
        return [Segment(prefix, is_trained=False), *body, *closing]

    def _body(self, text: str) -> list[Segment]:
        """The turn, and apart from it the blanks after its end token: generation has stopped there."""
        body = text.rstrip()
        ends = [match.end() for match in self.control.special.finditer(body)]
        if not ends or ends[-1] != len(body):
            body = text
        return [Segment(body, is_trained=True), Segment(text[len(body) :], is_trained=False)]

    def _between(self, text: str, follows_turn: bool, answer: bool = False) -> list[Segment]:
        """Context; the token of the next role is trained on where it is what ends the turn before it."""
        end = self.control.leading(text, 1) if follows_turn and self._is_open_ended else ""
        return [Segment(end, is_trained=True, answer=answer), Segment(text[len(end) :], is_trained=False)]

    def _closing(self, chat: _Chat, turn: int) -> str:
        """The token that ends a last turn which the template leaves open: that of the role that follows."""
        if not self._is_open_ended:
            return ""
        role = "tool" if chat.messages[turn].get("tool_calls") else "user"
        follows = self._prepare([*OPENING, {"role": role, "content": "a"}], (), 0, "last")
        return self.control.leading(self._text(follows, 3).rpartition(PROBE)[2], 1)

    def _check_context(self, chat: _Chat, turn: int, prefix: str) -> None:
        """Refuse a context that lacks what was said before the turn.

        Earlier reasoning may be left out: generation does not see it either.
        """
        before = _statements_between(chat, 0, turn)
        self._refuse(find_missing([s for s in before if not (s.role == "assistant" and s.part == "reasoning")], prefix))
        thoughts = [s for s in before if s.part == "reasoning" and s.index not in chat.trained]
        if find_missing(thoughts, prefix):
            self.notes.add("the chat template leaves out the reasoning of earlier turns, which are context only")

    def _refuse(self, missing: Sequence[Statement]) -> None:
        if missing:
            first = missing[0]
            hint = PART_HINTS[first.part]
            if first.role in ("system", "developer"):
                hint = "chat.drop=[system] trains without system prompts; chat.template=FILE sets another template"
            raise RenderError(f"the chat template does not render {first}", hint)

    def _unopened_hint(self, chat: _Chat, turn: int, stop: int) -> str:
        """What makes the template open an answer as it writes it."""
        for name in ("enable_thinking", "thinking"):
            extra = {name: False}
            if self._text(chat, stop, extra=extra).startswith(self._text(chat, turn, prompt=True, extra=extra)):
                return f"type chat.kwargs={{{name}: false}}; completions then start without reasoning"
        named = next((name for name, mark in TRAINING_TEMPLATES.items() if mark in self.source), "FILE")
        return f"type chat.template={named}, or use a plain text prompt and completion"


@dataclass(slots=True)
class _Row:
    """A row under construction. text: of all segments; start: where its last turn, number `turn`, begins."""

    segments: list[Segment] = field(default_factory=list)
    text: str = ""
    start: int = 0
    turn: int = 0


def _statements_between(chat: _Chat, start: int, stop: int) -> list[Statement]:
    """What the messages start … stop say; from the first one on, the names of the tools too."""
    tools = tuple(chat.tools or ()) if start == 0 else ()
    return [s for s in statements(chat.messages[:stop], tools) if s.index is None or s.index >= start]


def _exclude_reasoning(turn: Sequence[Segment], parts: Sequence[Statement]) -> list[Segment]:
    """A turn of which the reasoning, and what opens it, is context."""
    body, *rest = turn
    ends = [
        body.text.find(one.text) + len(one.text) for one in parts if one.part == "reasoning" and one.text in body.text
    ]
    cut = max(ends, default=0)
    return [Segment(body.text[:cut], is_trained=False), Segment(body.text[cut:], is_trained=True), *rest]


def _merge_neighbors(segments: Sequence[Segment]) -> list[Segment]:
    """Merge neighbors of the same kind and leave out empty ones: the fewest borders."""
    found: list[Segment] = []
    for segment in segments:
        if not segment.text:
            continue
        if found and not segment.literal and replace(found[-1], text="") == replace(segment, text=""):
            segment = replace(segment, text=found.pop().text + segment.text)
        found.append(segment)
    return found
