"""A conversation to segments of text that are learnt or not, by construction: no string is searched for.

    prefix = template(messages before the turn, add_generation_prompt=True)     what generation will see: context
    upto   = template(messages up to and with the turn)                         must begin with `prefix`
    turn   = upto[len(prefix):]                                                 what generation must produce: learnt

The segments are tokenised one by one, so that no token spans the border and the context's ids are exactly
those that generation gets.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from runner.core.errors import DataError
from runner.data.examples import ChatExample, Message, is_learnt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LossOn = Literal["assistant", "last_assistant", "all"]
Learnt = LossOn | Literal["completion"]  # completion: all that follows the prompt, as one answer
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of text; `answer` marks the last assistant turn without the blanks that the template puts after it."""

    text: str
    learnt: bool
    answer: bool = False


class NotPrefixStable(Exception):
    """The template renders the beginning of this conversation in another way once it goes on."""


class ChatTemplate:
    """The tokenizer's chat template. Raises DataError if there is none."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.chat_template:
            raise DataError(
                "the data are conversations and the tokenizer has no chat template, so they cannot be written as text\n"
                "  use a model that has one (an instruct or chat model: model.path=..., or model.tokenizer=...),\n"
                "  or give `prompt` and `completion` (or `text`) as plain text"
            )
        self.tokenizer = tokenizer
        added = [str(t) for t in tokenizer.added_tokens_decoder.values() if t.special]
        self._ends = tuple({*map(str, tokenizer.all_special_tokens), *added})

    def render(self, chat: ChatExample, messages: Sequence[Message], prompt: bool = False) -> str:
        """`messages` of the conversation as text; `prompt` adds what opens the assistant's turn."""
        return str(self._apply(chat, messages, tokenize=False, add_generation_prompt=prompt))

    def ids_and_mask(self, chat: ChatExample) -> tuple[list[int], list[int]] | None:
        """(ids, 1 where the assistant speaks) by the template's own generation marks, or None if it has none."""
        tools: Any = list(chat.tools) or None
        if not MARKS.search(self.tokenizer.get_chat_template(tools=tools)):
            return None
        out = self._apply(chat, chat.messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        mask = out["assistant_masks"]
        return (list(out["input_ids"]), list(mask)) if any(mask) else None

    def segments(self, chat: ChatExample, loss_on: Learnt) -> list[Segment]:
        """The conversation cut at each assistant turn that is learnt. Raises NotPrefixStable, DataError.

        With last_assistant the conversation ends with that turn; messages after it would teach nothing.
        """
        if loss_on == "completion":
            return self._completion(chat)
        turns = [i for i, m in enumerate(chat.messages) if m["role"] == "assistant" and i >= chat.context]
        turns = [i for i in turns if is_learnt(chat.messages[i])] if loss_on == "assistant" else turns[-1:]
        messages = chat.messages[: turns[-1] + 1] if loss_on == "last_assistant" else chat.messages
        full, done, found = self.render(chat, messages), 0, list[Segment]()
        for turn in turns:
            prefix = self.render(chat, messages[:turn], prompt=True)
            upto = full if turn + 1 == len(messages) else self.render(chat, messages[: turn + 1])
            if not (upto.startswith(prefix) and full.startswith(upto) and done <= len(prefix)):
                raise NotPrefixStable
            found.append(Segment(full[done : len(prefix)], learnt=False))
            found += self._turn(upto[len(prefix) :], last=turn == turns[-1])
            done = len(upto)
        found.append(Segment(full[done:], learnt=False))
        return _joined([Segment(s.text, True, s.answer) for s in found] if loss_on == "all" else found)

    def _completion(self, chat: ChatExample) -> list[Segment]:
        prefix = self.render(chat, chat.messages[: chat.context], prompt=True)
        full = self.render(chat, chat.messages)
        if not full.startswith(prefix):
            raise NotPrefixStable
        return _joined([Segment(prefix, learnt=False), *self._turn(full[len(prefix) :], last=True)])

    def _turn(self, text: str, last: bool) -> list[Segment]:
        """The turn, and apart from it the blanks after its end token: generation has stopped there."""
        body = text.rstrip()
        if not body.endswith(self._ends):
            body = text
        return [Segment(body, learnt=True, answer=last), Segment(text[len(body) :], learnt=False)]

    def _apply(self, chat: ChatExample, messages: Sequence[Message], **options: Any) -> Any:
        tools: Any = list(chat.tools) or None
        try:
            return self.tokenizer.apply_chat_template([dict(m) for m in messages], tools=tools, **options)
        except Exception as error:  # a template is a foreign program and may fail in any way; the row is named instead
            raise DataError(
                f"{chat.place}: the chat template refuses the conversation: {type(error).__name__}: {error}\n"
                f"  roles: {', '.join(m['role'] for m in messages)}"
            ) from error


def _joined(segments: Sequence[Segment]) -> list[Segment]:
    """Neighbours of the same kind made one, empty ones left out: the fewest borders."""
    found: list[Segment] = []
    for segment in segments:
        if found and (found[-1].learnt, found[-1].answer) == (segment.learnt, segment.answer):
            segment = Segment(found.pop().text + segment.text, segment.learnt, segment.answer)
        if segment.text:
            found.append(segment)
    return found
