"""Conversations to text that is trained on or not, by construction: no string is searched for.

    prefix = template(messages before the turn, add_generation_prompt=True)     what generation sees: context
    upto   = template(messages up to and with the turn)                         must begin with `prefix`
    turn   = upto[len(prefix):]                                                 what generation must produce: trained on

    the next turn's prefix begins with `upto`   the same row continues: one row, several trained turns
    it does not (the template rewrites history) a row of its own: the next turn under the context generation sees

Texts are tokenized one by one, so that no token spans a border; `tokenization` compares a context's ids with those that
generation gets. A template's control tokens inside a message are text: they are encoded without their special meaning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from runner.core.errors import DataError, EnvironmentProblem
from runner.data.chat_template import OPENING, OTHER_TEMPLATE, PROBE, ChatTemplate, RenderError, calls_turn
from runner.data.config import ChatConfig
from runner.data.control_tokens import Placeholders, Segment, common_length, merge_neighbors
from runner.data.conversation import CALL_FORMS, Statement, find_missing, plain_messages, statements
from runner.data.examples import Tools, image_parts
from runner.data.images import insert_images
from runner.data.message_keys import Message, is_trained
from runner.interfaces.media import images_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# completion: all that follows the prompt, as one answer
TrainOn = Literal["assistant", "answers", "last", "all", "completion"]
TEXT_ONLY_HINT = (
    "choose an image-text model (model.path=…), or train on the text alone: data.rename_columns={images: unused_images}"
)
NO_VARIABLES: Mapping[str, Any] = {}
PART_HINTS = {
    "reasoning": "chat.drop=[reasoning] trains without it; chat.template=FILE sets a template that renders it",
    "tool": "chat.drop=[tools] trains without the column tools; chat.template=FILE sets a template that renders it",
    "tool call": "chat.template=FILE sets a template that renders tool calls",
    "content": "chat.template=FILE sets a template that renders messages of this role",
}


class UnopenedError(RenderError):
    """The generation prompt is not how the template begins the turn that follows."""

    def __init__(self, hint: str) -> None:
        super().__init__(
            "the chat template's generation prompt differs from the start of the assistant turns that it renders, so "
            "prompt and completion cannot be separated",
            hint,
        )


@dataclass(frozen=True, slots=True)
class _Chat:
    """A conversation as templates take it.

    trained: the indices of the turns that are trained on; images: of each message, its images (path or content);
    variables: of the template, this conversation's own
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    context: int
    trained: list[int]
    placeholders: Placeholders
    images: list[list[str | bytes]] = field(default_factory=list)
    variables: Mapping[str, Any] = field(default_factory=dict)


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
        self.template = ChatTemplate(tokenizer, self.chat)
        self.control = self.template.control
        if self.template.reads_date and self.chat.date is not None:
            self.notes.add(f"the chat template reads the date, which is {self.chat.date} for this run (chat.date)")

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools = (),
        context: int = 0,
        train_on: TrainOn | None = None,
        variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> list[list[Segment]]:
        """The rows that train on the assistant turns after the first `context` messages. Raises RenderError.

        One row, or several where the template rewrites history. With last the conversation ends with that turn;
        messages after it would teach nothing. variables: of the template, for this conversation.
        """
        train_on = train_on or self.chat.train_on
        self._refuse_special_tokens(messages)
        chat = replace(self._prepare(messages, tools, context, train_on), variables=variables)
        if train_on == "completion":
            rows = [self._completion(chat)]
        elif train_on == "all":
            rows = [self._everything(chat)]
        else:
            rows = self._rows(chat, train_on)
        return [self._finish(chat, row) for row in rows]

    def _refuse_special_tokens(self, messages: Sequence[Message]) -> None:
        """Raise RenderError for a token of chat.special_tokens that is not the assistant's."""
        for at, message in enumerate(messages if self.control.of_assistant else ()):
            text = json.dumps(message, ensure_ascii=False, default=str)
            found = next((token for token in self.control.of_assistant if token in text), None)
            if found and message["role"] != "assistant":
                why = "chat.special_tokens allows it in assistant turns only"
                raise RenderError(f"messages[{at}] (role {message['role']}) has the special token {found!r}; {why}")

    def _finish(self, chat: _Chat, row: Sequence[Segment]) -> list[Segment]:
        """The segments of a row with literal control tokens apart, and with what stands for its images."""
        segments = merge_neighbors([piece for segment in row for piece in chat.placeholders.split(segment)])
        try:
            return insert_images(segments, self.reader, [one for some in chat.images for one in some])
        except DataError as error:
            raise RenderError(str(error)) from error

    def render_prompt(
        self, messages: Sequence[Message], tools: Tools = (), variables: Mapping[str, Any] = NO_VARIABLES
    ) -> list[Segment]:
        """What generation sees of a conversation that the assistant is to answer. Raises RenderError.

        variables: see `render`
        """
        self._refuse_special_tokens(messages)
        chat = replace(self._prepare(messages, tools, len(messages), "last"), variables=variables)
        text = self._text(chat, len(chat.messages), prompt=True)
        self._check_context(chat, len(chat.messages), text)
        return self._finish(chat, [Segment(text, is_trained=False)])

    def conversation_ids(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """The ids of a whole conversation that a model only reads, such as a reward model. Raises RenderError."""
        chat = self._prepare(messages, tools, 0, "all")
        text = self._text(chat, len(chat.messages))
        self._check_context(chat, len(chat.messages), text)
        segments = self._finish(chat, [Segment(text, is_trained=False)])
        return self.control.ids_of(segments, begins_row=True)

    def extend(self, ids: Sequence[int], messages: Sequence[Message], /, **variables: Any) -> list[int]:
        """The ids that continue `ids` by messages and the opening of the next turn.

        `ids` end with a turn of the assistant. What the policy wrote stays as it is; a turn without an end token
        is closed. Results of calls, which have a `tool_call_id`, follow a turn of calls. Raises EnvironmentProblem if
        the template does not write a message. variables: see `render`.
        """
        role = messages[0]["role"]
        hint = f"{PART_HINTS['content']}; or set another role for the environment (environment.role=user)"
        opening = list(OPENING)
        if all(message.get("tool_call_id") for message in messages) and self.template.tool_format is not None:
            opening[1] = calls_turn(messages)
        try:
            try:
                chat, after = self._continue(opening, messages, **variables)
            except RenderError:  # a template may take one call in a turn alone
                chat, after = self._continue(OPENING, messages, **variables)
        except RenderError as error:
            text = f"the chat template cannot continue an episode with a message of role {role}: {error}"
            raise EnvironmentProblem(f"{text}\n  {hint}") from error
        if missing := find_missing(statements(chat.messages[2:]), after):
            text = f"the chat template does not render the environment's messages of role {role}"
            raise EnvironmentProblem(f"{text}: {missing[0].text!r}\n  {hint}")
        last = self._text(chat, 2).rpartition(PROBE)[2]
        shared = after[: common_length(after, last)]
        if chat.messages[1].get("tool_calls"):  # the rest of the call is the policy's own
            ends = [match.start() for match in self.control.special.finditer(shared)] or [len(shared)]
            after, last, shared = after[ends[-1] :], last[ends[-1] :], shared[ends[-1] :]
        closing = self.control.leading(shared) or self.control.leading(after, 1)
        end, rest = self.control.ids_of([Segment(closing, is_trained=False)]), after[len(closing) :]
        final = self.control.ids_of([Segment(last.rstrip(), is_trained=False)])[-1:]
        if final and list(ids[-1:]) == final:  # a template may end a last turn by another token than an earlier one
            end = []
        written = next(n for n in range(len(end), -1, -1) if list(ids[len(ids) - n :]) == end[:n])
        return end[written:] + self.control.ids_of(chat.placeholders.split(Segment(rest, is_trained=False)))

    def _continue(self, opening: Sequence[Message], said: Sequence[Message], /, **variables: Any) -> tuple[_Chat, str]:
        """A conversation that continues so, and what it says after the assistant's turn. Raises RenderError."""
        chat = replace(self._prepare([*opening, *said], (), 0, "last"), variables=variables)
        return chat, self._text(chat, len(chat.messages), prompt=True).rpartition(PROBE)[2]

    def _prepare(self, messages: Sequence[Message], tools: Tools, context: int, train_on: TrainOn) -> _Chat:
        """The conversation without what is dropped, its control tokens as private characters."""
        drop = self.chat.drop
        kept = [i for i, m in enumerate(messages) if not ("system" in drop and m["role"] in ("system", "developer"))]
        trained = [i for i, at in enumerate(kept) if messages[at]["role"] == "assistant" and at >= context]
        if train_on in ("assistant", "answers"):
            trained = [i for i in trained if is_trained(messages[kept[i]])]
        elif train_on != "completion":
            trained = trained[-1:]
        form = self.template.call_form if any(m.get("tool_calls") for m in messages) else CALL_FORMS[0]
        plain: Any = plain_messages([messages[at] for at in kept], drop, form)
        used: Any = [dict(tool) for tool in tools] if tools and "tools" not in drop else None
        plain, used, placeholders = self.control.insert_placeholders(plain, used)
        if placeholders.chars:
            self.notes.add("messages contain control tokens of the chat template; they are encoded as text")
        images = [[part["image"] for part in image_parts(messages[at])] for at in kept]
        if any(images) and self.reader is None:
            raise RenderError("an image, but the model reads text alone", TEXT_ONLY_HINT)
        return _Chat(plain, used, sum(at < context for at in kept), trained, placeholders, images)

    def _text(self, chat: _Chat, stop: int, prompt: bool = False, **more: Any) -> str:
        """The first `stop` messages as text; `prompt` adds what opens the assistant's turn."""
        text = self.template.text(chat.messages[:stop], chat.tools, prompt, **{**chat.variables, **more})
        count = sum(map(len, chat.images[:stop]))
        if self.reader and any(chat.images) and (written := text.count(self.reader.placeholder)) != count:
            raise RenderError(f"the chat template renders {written} of {count} images", OTHER_TEMPLATE)
        return text

    def _turn(self, chat: _Chat, turn: int) -> tuple[str, str]:
        """(what generation sees before a turn, the same with the turn); the turn holds all that it says."""
        prefix, upto = self._open_turn(chat, turn, turn + 1)
        self._refuse(find_missing(_statements_between(chat, turn, turn + 1), upto[len(prefix) :]))
        return prefix, upto

    def _open_turn(self, chat: _Chat, turn: int, stop: int) -> tuple[str, str]:
        """(what generation sees before a turn, the first `stop` messages, which begin with it).

        A template that opens every completion with reasoning may render a turn without any in another way. Such a
        turn is rendered with reasoning, which is taken out again, so that it begins with an empty one.
        """
        prefix, whole = self._text(chat, turn, prompt=True), self._text(chat, stop)
        if whole.startswith(prefix):
            return prefix, whole
        message = chat.messages[turn]
        if not any(s.part == "reasoning" for s in _statements_between(chat, turn, turn + 1)):
            messages = list(chat.messages)
            messages[turn] = message | {"reasoning_content": PROBE, "thinking": PROBE}
            opened = self._text(replace(chat, messages=messages), stop)
            if opened.startswith(prefix) and opened.count(PROBE) == 1:
                self.notes.add("the chat template opens completions with reasoning; one without any has an empty one")
                return prefix, opened.replace(PROBE, "")
        raise self._unopened_error(chat, turn, stop)

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
            start = at - row.segments[at - 1].is_reasoning
            row.segments[start : at + 1] = [replace(s, answer=True) for s in row.segments[start : at + 1]]
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
        prefix, whole = self._open_turn(chat, chat.context, len(chat.messages))
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
        end = self.control.leading(text, 1) if follows_turn and self.template.is_open_ended else ""
        if end not in self.template.end_tokens:  # of another turn of the assistant, at which generation does not stop
            end = ""
        return [Segment(end, is_trained=True, answer=answer), Segment(text[len(end) :], is_trained=False)]

    def _closing(self, chat: _Chat, turn: int) -> str:
        """The token that ends a last turn which the template leaves open: that of the role that follows."""
        if not self.template.is_open_ended:
            return ""
        return self.template.closing("tool" if chat.messages[turn].get("tool_calls") else "user")

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

    def _unopened_error(self, chat: _Chat, turn: int, stop: int) -> RenderError:
        """Why the template does not open an answer as it writes it, and what to do."""
        if turn and chat.messages[turn - 1]["role"] == chat.messages[turn]["role"]:
            text = f"two assistant messages in a row, messages[{turn - 1}] and messages[{turn}]"
            text = f"{text}; the chat template writes them as one turn, or changes the first"
            return RenderError(text, "join the two messages, or put another one between them")
        return UnopenedError(self._unopened_hint(chat, turn, stop))

    def _unopened_hint(self, chat: _Chat, turn: int, stop: int) -> str:
        """What makes the template open an answer as it writes it."""
        for name in ("enable_thinking", "thinking"):
            off = {name: False}
            if self._text(chat, stop, **off).startswith(self._text(chat, turn, prompt=True, **off)):
                return f"type chat.kwargs={{{name}: false}}; completions then start without reasoning"
        return "type chat.template=FILE, or use a plain text prompt and completion"


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
    """A turn of which the reasoning, and what opens it, is not trained on."""
    body, *rest = turn
    ends = [
        body.text.find(one.text) + len(one.text) for one in parts if one.part == "reasoning" and one.text in body.text
    ]
    rest_text = body.text[max(ends, default=0) :]
    if ends:
        rest_text = rest_text.lstrip()  # a line break may be one token with what it follows
    cut = len(body.text) - len(rest_text)
    reasoning = Segment(body.text[:cut], is_trained=False, is_reasoning=True)
    return [reasoning, Segment(body.text[cut:], is_trained=True), *rest]
