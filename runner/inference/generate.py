"""Answers of an engine in this process: one prompt's text as it comes, and conversations.

prompt ids ─Engine─▶ tokens ─TextStream─▶ pieces of text ─ChatAnswer─▶ reasoning, content
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.core.chat_answer import ChatAnswer
from runner.core.errors import DataError
from runner.core.tool_formats import Part, ToolFormat
from runner.data.chat import Renderer
from runner.data.examples import user_message
from runner.inference.answer_text import TextStream, hidden_token_ids
from runner.inference.chat_prompt import render_chat
from runner.inference.engine import GenerationRequest, SamplingParams

if TYPE_CHECKING:
    from runner.inference.torch_engine import TorchEngine

_ids = count()


def stream_answer(
    engine: TorchEngine,
    tokenizer: Any,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    is_stopped: Callable[[], bool] = lambda: False,
    tool_format: ToolFormat | None = None,
) -> Iterator[str]:
    """Yield the text of one answer in parts, never half a character, with the marks of `tool_format`.

    A caller that stops listening cancels the request, and so does `is_stopped`, which is called before each token.
    The answer has fewer tokens than `params` says where the model has no room. Raises DataError for a prompt that
    cannot be answered.
    """
    if (limit := engine.limits.length_limit) is not None:
        if limit[0] <= len(prompt_ids):
            raise DataError(f"the prompt has {len(prompt_ids)} tokens, and {limit[1]}")
        params = replace(params, max_new_tokens=min(params.max_new_tokens, limit[0] - len(prompt_ids)))
    request = GenerationRequest(f"answer-{next(_ids)}", tuple(prompt_ids), params)
    hidden = hidden_token_ids(tokenizer, engine.limits.stop_token_ids, tool_format)
    text = TextStream(lambda ids: str(tokenizer.decode(ids)), hidden, params.stop)
    engine.submit(request)
    try:
        finished = False
        while not finished and not is_stopped():
            for event in engine.step():
                finished = event.finish_reason is not None
                if piece := text.push(event.token_id):
                    yield piece
        if rest := text.close():
            yield rest
    finally:
        engine.cancel(request.id)


@dataclass(slots=True)
class Conversation:
    """A chat with a model: what was said, and what is said next.

    messages: system prompt first, if there is one; images: of the next message
    """

    engine: TorchEngine
    renderer: Renderer
    params: SamplingParams
    system: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    images: list[Path] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self, system: str | None = None) -> None:
        """Forget all that was said; `system` is the system prompt from now on, None = as before."""
        self.system = self.system if system is None else system
        self.messages, self.images = [{"role": "system", "content": self.system}] if self.system else [], []

    def answer(self, text: str, is_stopped: Callable[[], bool] = lambda: False) -> Iterator[tuple[Part, str]]:
        """The pieces of the answer to a user's message. One that is stopped stays as far as it went.

        Raises DataError, with the conversation as it was, for one that the template or the model's length refuses.
        """
        asked = [*self.messages, user_message(text, self.images)]
        prompt = render_chat(self.renderer, asked)
        turn = sum(message["role"] == "assistant" for message in asked)
        params = replace(self.params, seed=self.params.seed + turn)
        marks = self.renderer.template.tool_format
        parts, said = ChatAnswer(marks if marks and marks.has_channels else None, prompt.is_thinking), list[str]()
        try:
            for piece in stream_answer(self.engine, self.renderer.tokenizer, prompt.ids, params, is_stopped, marks):
                yield from self._collect(parts.push(piece), said)
        except DataError as error:
            raise DataError(f"{error}; /reset starts a new one") from error
        yield from self._collect(parts.close(), said)
        self.images = []
        self.messages = [*asked, {"role": "assistant", "content": "".join(said).strip()}]

    def _collect(self, parts: Sequence[tuple[Part, str]], said: list[str]) -> Sequence[tuple[Part, str]]:
        said += [piece for part, piece in parts if part == "content"]
        return parts
