"""What data are made of, and what hands them out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from runner.run_dir.resume_compatibility import PromptStyle


@dataclass(frozen=True, slots=True)
class TokenizedExample:
    """A tokenised row of data: ids and weights of equal length (weight 1 = trained on, 0 = context).

    branches: where each of several continuations of the same beginning starts, in order; empty for one row
    """

    ids: tuple[int, ...]
    weights: tuple[float, ...]
    branches: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """Two completions of one prompt, the first preferred. `margin`: by how much, where the data says so.

    A completion holds everything after the prompt, its end included; all of its tokens count.
    """

    prompt: tuple[int, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]
    margin: float | None = None


@dataclass(frozen=True, slots=True)
class LabeledCompletion:
    """One answer to a prompt, and whether it is a good one."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    good: bool


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of a rollout. `columns`: the row's other columns (JSON-able), which the reward receives.

    messages: the conversation so far, if the row has one; text: what `ids` say.
    """

    ids: tuple[int, ...]
    text: str
    messages: tuple[Mapping[str, Any], ...] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EvalQuestion:
    """A held-out item: its tokens, and, where it has an answer, what to ask and what to expect.

    `prompt_ids` is empty for plain text, of which only the loss can be measured. messages, columns: as of a `Prompt`,
    where the row has them; for an environment. answer_ids: empty where the answer follows the prompt in the item.
    """

    item: TokenizedExample
    prompt_ids: tuple[int, ...] = ()
    prompt: str = ""
    answer: str = ""
    messages: tuple[Mapping[str, Any], ...] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    answer_ids: tuple[int, ...] = ()


class Data(Protocol):
    """Items of one kind (see `ItemKind`) as a pure function of the step."""

    @property
    def fingerprint(self) -> str: ...  # sha256 of everything that the items depend on

    @property
    def prompt_style(self) -> PromptStyle: ...  # whether what is asked goes through the chat template

    @property
    def columns(self) -> Collection[str]: ...  # those that rewards see in any row

    def __len__(self) -> int: ...

    # items step·count … of the endless seeded order; a round above 0 refills a step from an order of its own
    def take(self, step: int, count: int, round: int = 0) -> Sequence[Any]: ...

    def held_out_questions(self) -> Sequence[EvalQuestion]: ...  # what can be asked; empty if there is nothing

    def held_out_items(self) -> Sequence[Any]: ...  # pairs or judged answers held out; empty for other kinds
