"""What stands between two turns of the policy: the words of an environment, as the chat template writes them.

    … answer<|im_end|> │ \n<|im_start|>tool\n84<|im_end|>\n<|im_start|>assistant\n │ next answer …
                       └────────────────── ids of an observation ─────────────────┘

The policy's own tokens are never written as text and tokenised again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runner.errors import EnvironmentProblem

OPENING = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})


class Turns:
    """The observations of one tokenizer's chat template."""

    def __init__(self, tokenizer: Any) -> None:
        """Raises EnvironmentProblem if the template cannot be continued turn by turn."""
        self._tokenizer = tokenizer
        self._base = self._render(OPENING)
        body = self._base.rstrip()
        self._end = next((t for t in map(str, tokenizer.all_special_tokens) if body.endswith(t)), "")
        self._blank = self._base[len(body) :]
        self._end_ids = self._ids(self._end) if self._end else []

    def observation(self, role: str, text: str, answer: Sequence[int]) -> list[int]:
        """Ids from the end of `answer` to the opening of the next turn; closes a turn that has no end token."""
        whole = self._render((*OPENING, {"role": role, "content": text}), add_generation_prompt=True)
        if not whole.startswith(self._base):
            raise EnvironmentProblem(
                "the chat template writes earlier turns differently once the conversation goes on, so an episode of "
                "several turns cannot be continued token by token; use a model with another template (model.tokenizer)"
            )
        closed = list(answer[len(answer) - len(self._end_ids) :]) == self._end_ids
        return self._ids(("" if closed else self._end) + self._blank + whole[len(self._base) :])

    def _render(self, messages: Sequence[dict[str, str]], **options: Any) -> str:
        if not self._tokenizer.chat_template:
            raise EnvironmentProblem(
                "an environment needs a chat template, and the tokenizer has none; use an instruct or chat model"
            )
        text: str = self._tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
        return text

    def _ids(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return found
