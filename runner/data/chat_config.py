"""What a user can set of conversations: the chat template and the loss mask."""

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field

from runner.core.errors import DataError
from runner.spec.base import Config, absolute_if_local

TRAINING_TEMPLATES = {"deepseek_r1": "<｜Assistant｜><think>"}  # name of a file in templates/ → mark of its family
DropPart = Literal["reasoning", "system", "tools"]  # of a conversation: thoughts, system prompts, schemas of tools


def today() -> str:
    """The day of this machine's clock, as chat.date has it."""
    return datetime.now().date().isoformat()


class ChatConfig(Config):
    """How conversations become tokens in training, rollouts, environments, evaluation and `run infer`."""

    template: str | None = Field(
        default=None,
        min_length=1,
        description="A jinja file, or the name of a training template of this project; null = the tokenizer's own.",
    )
    kwargs: dict[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], bool | int | float | str] | None = Field(
        default=None, description="Variables for the template, e.g. {enable_thinking: false}; null = none."
    )
    date: str | None = Field(
        default=None,
        pattern=r"^\d{4}-\d\d-\d\d$",
        description="The date that templates read, e.g. 2026-01-31; null = the day on which the run begins.",
    )
    special_tokens: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        default=(),
        description="Special tokens of the tokenizer that assistant turns may write, e.g. [<call>]; elsewhere in a "
        "conversation they are an error. [] = those of the run that wrote the tokenizer. Others are encoded as text.",
    )
    train_on: Literal["assistant", "answers", "last", "all"] = Field(
        default="assistant",
        description="Loss mask of sft and distill: all assistant turns, those without reasoning (answers), the last "
        "one, or all tokens.",
    )
    drop: Annotated[tuple[DropPart, ...], Field(strict=False)] = Field(
        default=(), description="Parts of conversations to drop because the template cannot render them."
    )

    def with_absolute_paths(self) -> Self:
        """The same config with the path of a template file made absolute."""
        file = self.template_file()
        return self.model_copy(update={"template": absolute_if_local(str(file))}) if file else self

    def with_user_files(self, change: Callable[[Path], Path]) -> Self:
        """The same config with the path of the user's own template changed."""
        file = self.template_file()
        return self.model_copy(update={"template": str(change(file))}) if file else self

    def template_file(self) -> Path | None:
        """The user's own template; None for the tokenizer's and for a training template of this project."""
        return None if self.template is None or self.template in TRAINING_TEMPLATES else Path(self.template)

    def preflight(self) -> None:
        """Raise DataError for a template that is not there; imports no tokenizer."""
        file = self.template_file()
        if file and not file.is_file():
            named = ", ".join(TRAINING_TEMPLATES)
            raise DataError(f"chat.template={file}: no such file; expected a jinja file, or one of: {named}")

    def problems(self, job: Any) -> list[tuple[str, str]]:
        if self.train_on == "assistant" or job.algorithm.item_kind == "sft":
            return []
        why = f"algorithm={job.algorithm.name} sets its own loss mask; leave it out"
        return [("chat.train_on", f"is used only by sft and distill; {why}")]
